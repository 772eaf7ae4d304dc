"""What kind of filesystem a directory is on, as the kernel's table of mounts tells."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["is_network_disk", "mount_kind"]

_MOUNTS = "/proc/self/mountinfo"

_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
    }
)  # fmt: skip


def mount_kind(device: int) -> str | None:
    """Returns the kind of filesystem that a device number belongs to, or None if it is unknown.

    Args:
        device: `os.stat(path).st_dev`.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            if left.split()[2] == wanted:
                return right.split()[0]
    return None


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
        kind = mount_kind(os.stat(directory).st_dev) or ""
    except OSError:
        return False
    return kind in _NETWORK or kind.split(".")[0] == "fuse"
