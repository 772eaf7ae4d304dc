"""`open_storage` returns the storage of a path, URL, `Location` or filesystem."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray_dcp.commit_protocol.messages import Target
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
from ray_dcp.store.object_clients import PROVIDERS
from ray_dcp.store.storage import Storage


def as_target(place: AnyPlace) -> Target:
    """Returns the `Target` of a storage location.

    Args:
        place: A path, a URL, a `Location`, a `Target`, a path object with its own filesystem
            (universal_pathlib), a `Checkpoint` of Ray Train, or a filesystem, which stands for its
            root.

    Raises:
        InvalidRequestError: `place` is none of these.

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
    """Returns the storage of one checkpoint directory.

    The storage is not accessed: a location that does not exist or is not writable raises only at
    the first read or write.

    Args:
        target: A path; `file://` and an absolute path (used as it is, without %-decoding, as
            fsspec does); `memory://` and a name; `s3://`, `gs://` or `az://` with bucket and
            prefix; any other URL that fsspec serves; a filesystem of fsspec, pyarrow.fs or
            obstore; or a `Location` or `Target` with one of these.

    Raises:
        InvalidRequestError: The protocol is not served (the message names the package to install),
            the location is empty, or an option is unknown.

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
        from ray_dcp.store.filesystems import FsspecStorage, filesystem_of

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
    """Returns the target of a subdirectory, with the same options or filesystem.

    Args:
        target: As for `open_storage`.
        name: Name of the subdirectory; may contain `/`.
    """
    place = absolute_target(target)
    return replace(place, url=url_below(place.url, name))


def absolute_target(target: AnyPlace) -> Target:
    """Returns a target with the absolute path or URL of a location.

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
    # Why not the URL of the storage: it lacks host, account and chained protocols.
    is_whole = scheme in ("", "memory") or (scheme in PROVIDERS and "@" not in rest)
    return replace(place, url=url if is_whole or place.filesystem is not None else place.url)


def place_by_fsspec(url: str) -> Target:
    """Returns the target of a URL, with the filesystem that fsspec creates for it.

    Raises:
        InvalidRequestError: fsspec can't create one.
    """
    from ray_dcp.store.filesystems import filesystem_of

    filesystem, path = filesystem_of(url, {})
    return _with_filesystem(path, filesystem)


def _with_filesystem(url: str, filesystem: Any) -> Target:
    """Returns the target of a path or URL in a given filesystem; an empty one is its root."""
    storage = _in_filesystem(url, filesystem)
    if isinstance(storage, LocalStorage):
        return Target(storage.url)
    # Why not always the given filesystem: the storage unwraps subtree filesystems.
    return Target(storage.url, filesystem=getattr(storage, "filesystem", filesystem))


def _in_filesystem(url: str, filesystem: Any) -> Storage:
    # Why imported here: each storage imports the library of its filesystems.
    if kind_of_filesystem(filesystem) == "obstore":
        from ray_dcp.store.object_storage import ObjectStorage

        return ObjectStorage.within(filesystem, url)
    from ray_dcp.store.filesystems import FsspecStorage

    return FsspecStorage.within(filesystem, url)


def target_of(path: AnyPlace, storage_options: Mapping[str, object] | None) -> Target:
    """Returns the absolute location of a path.

    Args:
        path: Path, URL or target.
        storage_options: More options for the storage.

    Raises:
        InvalidRequestError: It is not a path or a URL that a storage serves.
    """
    options = storage_options or {}
    place = as_target(path)
    place = replace(place, storage_options={**place.storage_options, **options})
    return replace(place, url=open_storage(place).url)  # raises for what is no path
