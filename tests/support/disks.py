"""Small disks that really fill up: a tmpfs where one may be mounted, a counted quota elsewhere.

The quota is one of the process, and of every process that is told of it; it counts the bytes that
are written below its directory, and those of files that are removed, and gives ENOSPC, as a
filesystem does.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

PAGE = 4096
WRITING = ("write", "pwrite", "writev", "pwritev")


class Tmpfs:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def leave(self, num_bytes: int, everywhere: Callable[..., Any]) -> None:
        """Fills the disk but for so many bytes, rounded up to pages."""
        self.make_room(everywhere)
        status = os.statvfs(self.path)
        free_pages = status.f_bavail * status.f_frsize // PAGE
        self._ballast.write_bytes(bytes((free_pages - -(-num_bytes // PAGE)) * PAGE))

    def make_room(self, everywhere: Callable[..., Any]) -> None:
        """Frees all but what was saved."""
        self._ballast.unlink(missing_ok=True)


class Quota:
    """A directory of which the processes that are told count the bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def leave(self, num_bytes: int, everywhere: Callable[..., Any]) -> None:
        """Lets every process write only so many more bytes."""
        self.make_room(everywhere)
        everywhere(count_bytes, num_bytes)

    def make_room(self, everywhere: Callable[..., Any]) -> None:
        """Lets every process write what it likes."""
        everywhere(count_no_bytes)


Disk = Tmpfs | Quota


@contextmanager
def small_disk(path: Path, *, num_bytes: int = 8 << 20, may_mount: bool = True) -> Iterator[Disk]:
    """Lends a small disk at a new directory."""
    path.mkdir()
    mount = shutil.which("mount")
    mounted = (
        may_mount
        and mount is not None
        and subprocess.run(
            [mount, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
    try:
        yield Tmpfs(path) if mounted else Quota(path)
    finally:
        count_no_bytes()
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


_PATCHES: list[Any] = []


def count_bytes(left: int) -> None:
    """Gives ENOSPC in this process once so many bytes were written by functions of `os`."""

    def counted(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def write(fd: int, data: Any, *where: Any) -> int:
            nonlocal left
            parts = data if name.endswith("v") else [data]
            wanted = sum(memoryview(part).nbytes for part in parts)
            if wanted > left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left -= wanted
            count: int = real(fd, data, *where)
            return count

        return write

    unlink = os.unlink

    def freeing(path: Any, **how: Any) -> None:
        nonlocal left
        status = os.stat(path, follow_symlinks=False, **how)
        unlink(path, **how)
        left += status.st_size if status.st_nlink == 1 else 0

    for name, function in ({name: counted(name) for name in WRITING} | {"unlink": freeing}).items():
        patch = mock.patch.object(os, name, function)
        patch.start()
        _PATCHES.append(patch)


def count_no_bytes() -> None:
    """Ends `count_bytes`."""
    while _PATCHES:
        _PATCHES.pop().stop()


def here(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in this process only."""
    return function(*args)
