"""What the memory of a node has free, before bytes are staged in it.

*Why*: nobody refuses memory that is not there. A page of a tmpfs, which Ray's object store is, is
taken when it is first written to; where others have filled the tmpfs, the process that writes gets
SIGBUS, and beyond the limit of a control group, or of the machine, some process gets SIGKILL.

`ObjectStoreFile` is the file in which the object store of this node keeps its bytes. `room` lends
what one object needs of it: it looks right before the object is written, keeps as much again for
others, and lets no two processes of ray_dcp write at a time where room is scarce. *Left open*:
another program that takes all of that reserve within the milliseconds of one copy.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_dcp.core import bounds

AMPLE = 64
"""Where so many objects of a length fit, processes put theirs without waiting for each other: more
than the ranks of a node put at a time."""

_LOOK_S = 0.01
_USUAL = "/dev/shm"  # noqa: S108 - it is looked at, nothing is made there


class NoRoomError(Exception):
    """The memory of this node has no room for staged bytes; the message says which, and how much.

    Internal: whoever catches it stages elsewhere, or fails the save by name.
    """


class ObjectStoreFile:
    """The file in which a node's object store keeps its bytes.

    Args:
        path: Path of the store's file in the descriptor table of the process that has it open, as
            the file has no name; or the directory that contains it. If None, neither is known, and
            only the node's memory is looked at.
        directory: Directory of the file, for messages.

    Examples:
        >>> with ObjectStoreFile(None).room(1):
        ...     pass
    """

    def __init__(self, path: str | None, directory: str = "") -> None:
        self._path = path
        self.directory = directory or path or "its directory"

    @classmethod
    def of_store(cls, socket_path: str) -> ObjectStoreFile:
        """Returns the file of the object store that listens at a socket of this machine.

        Args:
            socket_path: `ObjectStoreSocketName` of the node.
        """
        # Suppressed: another user's, or another machine's.
        with suppress(OSError, ValueError):
            daemon = Path(f"/proc/{_pid_behind(socket_path)}")
            found = _open_files(daemon, "plasma")
            if found:
                path, name = found[-1]
                return cls(path, str(Path(name).parent))
            flag = b"--plasma_directory="
            words = (daemon / "cmdline").read_bytes().split(b"\0")
            given = [word[len(flag) :].decode() for word in words if word.startswith(flag)]
            if given and os.path.isdir(given[0]):
                return cls(given[0])
        return cls(_USUAL if os.path.isdir(_USUAL) else None)

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Reserves room for an object that is written within the context.

        Args:
            num_bytes: Length of the object, in bytes.

        Raises:
            NoRoomError: There is none, or another process holds the turn for longer than `TURN_S`.
        """
        with self._opened() as file:
            self._check_address_space(file, num_bytes)
            free_bytes, needed_bytes = self._look(file, num_bytes)
            if file is None or free_bytes >= AMPLE * num_bytes:
                self._check(free_bytes, needed_bytes, num_bytes)
                yield
                return
            self._take_turn(file)  # closing the file ends it, and so does a death
            self._check(*self._look(file, num_bytes), num_bytes)
            yield

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        try:
            # Why anew each time: a lock belongs to what was opened, and so to one thread.
            file = None if self._path is None else os.open(self._path, os.O_RDONLY)
        except OSError:
            file = None  # the daemon has ended: putting says so
        try:
            yield file
        finally:
            if file is not None:
                os.close(file)

    def _look(self, file: int | None, num_bytes: int) -> tuple[int, int]:
        """Returns how many bytes are free, and how many an object may take of these.

        *Invariant*: what the store has touched it keeps, and uses again. So an object takes no more
        than what the store has never touched; nothing, once that is all of it.
        """
        free_bytes = free_memory_bytes()
        if file is None:
            return free_bytes, num_bytes
        disk, status = os.fstatvfs(file), os.fstat(file)
        free_bytes = min(free_bytes, disk.f_bavail * disk.f_frsize)
        is_directory = os.path.isdir(f"/proc/self/fd/{file}")
        untouched_bytes = max(status.st_size - status.st_blocks * 512, 0)
        return free_bytes, 2 * num_bytes if is_directory else min(2 * num_bytes, untouched_bytes)

    def _check(self, free_bytes: int, needed_bytes: int, num_bytes: int) -> None:
        if free_bytes < needed_bytes:
            raise NoRoomError(
                f"{self.directory}, where Ray's object store is, or the memory of the machine or "
                f"of its control group has {free_bytes} bytes free, and an object of {num_bytes} "
                f"bytes needs {needed_bytes} with its reserve"
            )

    def _check_address_space(self, file: int | None, num_bytes: int) -> None:
        """Raises `NoRoomError` if the limit of addresses does not admit the store's file.

        *Why*: Ray maps it whole with the first object, and ends the process if it can't.
        """
        left_bytes = free_address_bytes()
        if left_bytes is None:
            return
        is_mapped = "/plasma" in Path("/proc/self/maps").read_text()
        needed_bytes = num_bytes + (0 if is_mapped or file is None else os.fstat(file).st_size)
        if left_bytes < needed_bytes:
            raise NoRoomError(
                f"RLIMIT_AS (ulimit -v) leaves this process {left_bytes} bytes of addresses, and "
                f"Ray's object store needs {needed_bytes}"
            )

    def _take_turn(self, file: int) -> None:
        end_s = time.monotonic() + bounds.TURN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise NoRoomError(
                        f"another process has put an object into Ray's object store in "
                        f"{self.directory} for {bounds.TURN_S:g} s, and room there is scarce"
                    ) from None
            except OSError:
                return  # this filesystem has no locks
            threading.Event().wait(_LOOK_S)


def _pid_behind(socket_path: str) -> int:
    """Returns the process that listens at a Unix socket, as this process numbers it."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(1.0)
        end.connect(socket_path)
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", credentials)
    if pid <= 0:
        raise ValueError(f"the process behind {socket_path} is of another namespace")
    return int(pid)


def _open_files(process: Path, prefix: str) -> list[tuple[str, str]]:
    """Returns the files that a process has open under names with a prefix, the largest last.

    Returns:
        Of each, its path in the table of the process, and the path that it was opened by.
    """
    found = []
    # Suppressed: the table is another user's; a file was closed meanwhile.
    with suppress(OSError):
        for one in (process / "fd").iterdir():
            with suppress(OSError):
                name = os.readlink(one)
                if Path(name).name.startswith(prefix):
                    found.append((os.stat(one).st_size, str(one), name))
    return [(path, name) for _, path, name in sorted(found)]


def free_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    groups: Path = Path("/proc/self/cgroup"),
    mounted: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Returns how much memory can be taken before the kernel ends a process, in bytes.

    The least of what the machine has, with its swap, and what each control group of this process
    has below its limit. What can't be read does not limit.

    Args:
        meminfo: Path of the machine's memory table.
        groups: Path of the table of this process's control groups.
        mounted: Directory where control groups are mounted.
    """
    free = [1 << 62]
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in meminfo.read_text().splitlines())
        found = {words[0]: int(words[1]) << 10 for words in lines}
        free.append(found["MemAvailable:"] + found.get("SwapFree:", 0))
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                free += _left_in_groups(mounted, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                free += _left_in_groups(mounted / "memory", path, *names)
    return max(min(free), 0)


def _left_in_groups(mounted: Path, path: str, limit: str, usage: str, prefix: str) -> list[int]:
    """Returns what a control group, and each that it is in, has left."""
    own = mounted / path.lstrip("/")
    if not own.is_dir():
        own = mounted  # in a container the group's path is that of the machine
    left = []
    while own == mounted or mounted in own.parents:
        # Suppressed: no limit ("max"), or the root, which has no files.
        with suppress(OSError, ValueError, KeyError):
            limit_bytes = int((own / limit).read_text())
            lines = (line.split() for line in (own / "memory.stat").read_text().splitlines())
            stat = {name: int(value) for name, value in lines}
            # Why: files that nobody used lately go first when memory is short.
            used_bytes = int((own / usage).read_text()) - stat[f"{prefix}inactive_file"]
            left.append(limit_bytes - used_bytes)
        own = own.parent
    return left


def free_address_bytes() -> int | None:
    """Returns how many more bytes this process may map; None if there is no limit."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(limit_bytes - pages * resource.getpagesize(), 0)
