"""`open_storage`: from whatever names a place to its `Target` and the storage that serves it.

`watched` reports how much of what is saved is there already, for those who wait while others write
it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import (
    AnyPlace,
    Location,
    brings_filesystem,
    checked_url,
    kind_of_filesystem,
    split_url,
    url_below,
)
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.object_stores import PROVIDERS
from ray_dcp.store.storage import Storage


def as_target(place: AnyPlace) -> Target:
    """Returns where a place is.

    Args:
        place: A path, a URL, a `Location`, a `Target`, a path object that brings its filesystem
            (universal_pathlib), a `Checkpoint` of Ray Train, or a ready filesystem whose root is
            meant.

    Raises:
        InvalidRequestError: It is none of these.

    Examples:
        >>> as_target("memory://run").url
        'memory://run'
    """
    if isinstance(place, Target):
        checked_url(place.url, in_filesystem=place.filesystem is not None)
        return place
    if isinstance(place, Location):
        if place.filesystem is None:
            return Target(place.url, place.storage_options)
        return _with_filesystem(place.url, place.filesystem)
    if brings_filesystem(place):
        found: Any = place
        return _with_filesystem(str(found.path), found.filesystem)
    brought = getattr(place, "fs", None)
    if not isinstance(place, str) and kind_of_filesystem(brought) == "fsspec":
        return _with_filesystem(str(getattr(place, "path", "")), brought)
    if not isinstance(place, (str, os.PathLike)) and kind_of_filesystem(place) is not None:
        return _with_filesystem("", place)
    return Target(checked_url(place))


def open_storage(target: AnyPlace) -> Storage:
    """Returns the storage bound to one checkpoint directory.

    Nothing is touched: whether the place exists or can be written shows on the first read or
    write.

    Args:
        target: A path; `file://` and an absolute path (taken as it is, without %-decoding, as
            fsspec takes it); `memory://` and a name; `s3://`, `gs://` or `az://` with bucket and
            prefix; any other URL that fsspec serves; a ready filesystem of fsspec, pyarrow.fs or
            obstore; or a `Location` or `Target` with one of these.

    Raises:
        InvalidRequestError: The protocol is not served (the message names what to install), the
            place is empty, or an option is not understood.

    Examples:
        >>> open_storage("/checkpoints/step-10").url
        '/checkpoints/step-10'
        >>> open_storage("memory://run/step-10").url
        'memory://run/step-10'
    """
    place = as_target(target)
    if place.filesystem is not None:
        return _in_filesystem(place.url, place.filesystem)
    scheme, rest = split_url(place.url)
    options = dict(place.storage_options)
    if scheme in PROVIDERS:
        from ray_dcp.store.object_storage import ObjectStorage

        return ObjectStorage.at(scheme, rest.rstrip("/"), options)
    if scheme not in ("", "file", "local", "memory"):
        from ray_dcp.store.fsspec_storage import FsspecStorage, filesystem_of

        return FsspecStorage.within(*filesystem_of(place.url, options))
    if options:
        raise InvalidRequestError(
            f"{scheme or 'file'} storage takes no storage_options, but got "
            f"{', '.join(sorted(options))}; leave them out",
            key=place.url,
        )
    if scheme == "memory":
        return MemoryStorage(rest)
    if scheme and not rest.startswith("/"):
        raise InvalidRequestError(
            f"{scheme}:// must be followed by an absolute path, but {place.url!r} is not; "
            f"write file:///path or the plain path",
            key=place.url,
        )
    return LocalStorage(rest)


def place_below(target: AnyPlace, name: str) -> Target:
    """Returns the target of a directory in another one, reached in the same way.

    Args:
        target: As for `open_storage`.
        name: Of the directory; several with `/` between them are fine.
    """
    place = absolute_target(target)
    return replace(place, url=url_below(place.url, name))


def absolute_target(target: AnyPlace) -> Target:
    """Returns a target with the whole path or URL of a place.

    Args:
        target: As for `open_storage`.

    Raises:
        InvalidRequestError: As `open_storage`.
    """
    place = as_target(target)
    url = open_storage(place).url
    scheme, rest = split_url(place.url)
    if scheme in ("file", "local"):
        return replace(place, url=f"file://{rest}")
    # Why not that of the storage: it has neither host nor account, nor what is chained.
    is_whole = scheme in ("", "memory") or (scheme in PROVIDERS and "@" not in rest)
    return replace(place, url=url if is_whole or place.filesystem is not None else place.url)


def place_by_fsspec(url: str) -> Target:
    """Returns the target of a URL with the filesystem that fsspec makes for it.

    Raises:
        InvalidRequestError: fsspec makes none.
    """
    from ray_dcp.store.fsspec_storage import filesystem_of

    filesystem, path = filesystem_of(url, {})
    return _with_filesystem(path, filesystem)


def _with_filesystem(url: str, filesystem: Any) -> Target:
    """Returns the target for a path or URL in a ready filesystem; its root when empty."""
    storage = _in_filesystem(url, filesystem)
    if isinstance(storage, LocalStorage):
        return Target(storage.url)
    # Why not always the given one: what was wrapped around another is left out.
    return Target(storage.url, filesystem=getattr(storage, "filesystem", filesystem))


def _in_filesystem(url: str, filesystem: Any) -> Storage:
    # Why inside: adapters import the libraries whose filesystems they take.
    kind = kind_of_filesystem(filesystem)
    if kind == "obstore":
        from ray_dcp.store.object_storage import ObjectStorage

        return ObjectStorage.within(filesystem, url)
    if kind == "arrow":
        from ray_dcp.store.arrow_storage import ArrowStorage

        return ArrowStorage.within(filesystem, url)
    from ray_dcp.store.fsspec_storage import FsspecStorage

    return FsspecStorage.within(filesystem, url)


LOOKS_S = 0.25

Told = Callable[[int, int], None]
"""What is told bytes done and in all, now and then."""


@contextmanager
def watched(target: AnyPlace, told: Told | None, done: int, total: int) -> Iterator[None]:
    """Tells now and then how much of what is saved is there, which a save itself does not.

    Args:
        target: Where it is saved; what is no directory of this machine is not looked at.
        told: Called with bytes done and in all, from another thread.
        done: Bytes that were done before.
        total: What is told in the end.
    """
    if told is None:
        yield
        return
    storage, over = open_storage(target), threading.Event()
    folder = Path(storage.url) if isinstance(storage, LocalStorage) else None

    def look() -> None:
        while folder is not None and not over.wait(LOOKS_S):
            with suppress(OSError):
                found = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                told(min(done + found, total), total)

    looking = start_thread(look, "ray_dcp looks at a target")
    try:
        yield
        told(total, total)
    finally:
        over.set()
        looking.join()
