"""What kind of filesystem a directory is on, as the kernel's table of mounts tells."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["is_network_disk", "may_create_twice", "mount_kind"]

_MOUNTS = "/proc/self/mountinfo"

_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
    }
)  # fmt: skip

# Why these: fuseblk is a local disk; sshfs calls link(2) on its server; the metadata servers of the
# others make a name in one transaction.
_EXCLUSIVE_FUSE = frozenset(
    {"fuseblk", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs", "fuse.mfs", "fuse.sshfs"}
)


def mount_kind(directory: str) -> str | None:
    """Returns the type of the filesystem that a directory is on, or None if it is unknown.

    Args:
        directory: Absolute path of one that exists.

    Raises:
        OSError: It can't be looked at.
    """
    device = os.stat(directory).st_dev
    wanted, real = f"{os.major(device)}:{os.minor(device)}", f"{os.path.realpath(directory)}/"
    found, length = None, 0
    with suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            fields = left.split()
            if fields[2] == wanted:
                return right.split()[0]
            # Why by path as well: btrfs gives files another device number than its mount.
            point = fields[4].replace("\\040", " ").rstrip("/") + "/"
            if real.startswith(point) and len(point) >= length:
                found, length = right.split()[0], len(point)
    return found


def may_create_twice(kind: str | None) -> bool:
    """Returns whether two machines may both be told that they created one name.

    A FUSE filesystem may look whether a name is free and then write, hard links included, and no
    try from one process shows it. Measured with two mounts of SeaweedFS 4.48: of 40 names that both
    linked at once, both were told of success for 21. So only those are believed of which it is
    known that one server or one local disk decides.

    Args:
        kind: As `mount_kind` returns it; an unknown one may be anything.

    Example:
        >>> [may_create_twice(kind) for kind in ("ext4", "nfs4", "fuse.sshfs", "fuse.seaweedfs")]
        [False, False, False, True]
    """
    return kind is None or (kind.startswith("fuse") and kind not in _EXCLUSIVE_FUSE)


def is_network_disk(directory: str) -> bool:
    """Returns whether a directory's bytes come over the network, as far as that is known.

    FUSE counts: what is mounted so and holds checkpoints is nearly always far away.

    Args:
        directory: Absolute path.

    Example:
        >>> is_network_disk("/proc")
        False
    """
    try:
        kind = mount_kind(directory) or ""
    except OSError:
        return False
    return kind in _NETWORK or kind.split(".")[0] == "fuse"
