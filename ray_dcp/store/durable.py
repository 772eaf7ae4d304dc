"""Steps that make files durable on a POSIX filesystem: directories, temp files, publishing.

All functions raise plain `OSError`; `local` and `local_writer` give them their meaning.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from contextlib import suppress

from ray_dcp.store.paths import TEMP_PREFIX

__all__ = [
    "create_temp",
    "creates_once",
    "first_existing_parent",
    "make_directories",
    "publish",
    "sync_directory",
    "write_all",
]

_MODE = 0o666
_NAME_MAX = 255
# What filesystems without hard links answer to link().
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
)
# What kernels and filesystems without `RENAME_NOREPLACE` answer to it; EPERM is that of sandboxes.
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_MOST_TRIES = 100
"""How often a directory is made again that a collector removes while it is empty."""


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        # Why: some network and FUSE filesystems have no fsync for directories.
        if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def first_existing_parent(path: str) -> str:
    """Returns the nearest parent of a path (or itself) that exists."""
    while path != os.path.dirname(path) and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def make_directories(path: str, *, sync: bool) -> None:
    """Creates a directory and its missing parents, and makes each new name durable."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        if not os.path.isdir(directory):
            # Why two errors: a name that is gone again was removed by a collector meanwhile.
            number = errno.ENOTDIR if os.path.lexists(directory) else errno.ENOENT
            raise OSError(number, os.strerror(number), directory)
        if sync:
            sync_directory(os.path.dirname(directory))


def create_temp(path: str, flags: int = 0, *, sync: bool) -> tuple[int, str]:
    """Creates an unpublished file beside the file that it is to become.

    Args:
        path: The file that it is to become; missing directories are made.
        flags: More flags for `os.open`.
        sync: Make new directories durable.

    Returns:
        A descriptor opened for writing, and the path of the temporary file.
    """
    directory, name = os.path.split(path)
    prefix = f"{TEMP_PREFIX}{secrets.token_hex(6)}-"
    temp = os.path.join(directory, prefix + name[: _NAME_MAX - len(prefix)])
    flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(_MOST_TRIES):
        try:
            return os.open(temp, flags, _MODE), temp
        except FileNotFoundError:
            # A collector may remove the directory again while it is empty: hence the loop.
            with suppress(FileNotFoundError):
                make_directories(directory, sync=sync)
        except OSError:
            # Why: some filesystems refuse O_DIRECT only after they have made the file.
            with suppress(OSError):
                os.unlink(temp)
            raise
    return os.open(temp, flags, _MODE), temp


def write_all(fd: int, data: memoryview) -> None:
    """Writes all bytes at the descriptor's position."""
    while len(data):
        data = data[os.write(fd, data) :]


def publish(temp: str, path: str, *, create: bool, sync: bool) -> None:
    """Gives a finished temporary file its name, atomically, and removes the temporary name.

    Args:
        temp: Path of the temporary file, whose content is durable already.
        path: The name to give, in the same directory.
        create: Only if the name is free; exactly one of several callers wins where the filesystem
            has hard links or `RENAME_NOREPLACE`, else this looks first.
        sync: Make the name durable.

    Raises:
        FileExistsError: `create`, and the name is taken.
        OSError: Anything else.
    """
    try:
        if create:
            _link(temp, path)
        else:
            os.rename(temp, path)
    except FileExistsError:
        # Why: who is told that a name is taken relies on it, and the one who gave it may have
        # died before it was durable.
        if sync:
            sync_directory(os.path.dirname(path))
        raise
    if sync:
        sync_directory(os.path.dirname(path))


def _link(temp: str, path: str) -> None:
    try:
        os.link(temp, path)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        _rename_to_free(temp, path)
        return
    # Suppressed: the file has its name, and what is left is no more than a second one.
    with suppress(OSError):
        os.unlink(temp)


def _rename_to_free(temp: str, path: str) -> None:
    """Renames where there are no hard links, if the new name is free."""
    try:
        _rename_noreplace(temp, path)
    except OSError as exc:
        if exc.errno not in _NO_FLAGS:
            raise
        # Careful: of two callers that look at once both win; see `creates_once`.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.rename(temp, path)


def creates_once(first: str, second: str, name: str) -> bool:
    """Returns whether the filesystem itself refuses to give a second file a name that is taken.

    Args:
        first: A file.
        second: Another one in the same directory.
        name: A free name there, which the first one gets.

    Raises:
        OSError: It could not be tried.
    """
    for give in (os.link, _rename_noreplace):
        try:
            # Why it has to succeed first: the kernel refuses a taken name before it asks the
            # filesystem whether it can do this at all.
            give(first, name)
        except OSError as exc:
            if exc.errno not in _NO_LINKS | _NO_FLAGS:
                raise
            continue
        try:
            give(second, name)
        except FileExistsError:
            return True
        return False
    return False


def _rename_noreplace(temp: str, path: str) -> None:
    """Linux's `renameat2` with `RENAME_NOREPLACE`: vfat, exfat, cifs and ntfs3 have it.

    Source: renameat2(2); not in Python's `os`.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    old, new = os.fsencode(temp), os.fsencode(path)
    if call(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
