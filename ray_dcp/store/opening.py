"""`open_storage`: from a path, URL or `Target` to the storage that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ray_dcp.errors import InvalidRequestError
from ray_dcp.protocol.messages import Target
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import Storage

__all__ = ["open_storage"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_storage(target: str | os.PathLike[str] | Target) -> Storage:
    """Returns the storage bound to one checkpoint directory.

    Nothing is touched: whether the place exists or can be written shows on the first read or
    write.

    Args:
        target: A path, `file://` and an absolute path (taken as it is, without %-decoding, as
            fsspec takes it), `memory://` and a name, or a `Target` with one of these.

    Raises:
        InvalidRequestError: The protocol is not served, the place is empty, or there are storage
            options for a storage that has none.

    Example:
        >>> open_storage("/checkpoints/step-10").url
        '/checkpoints/step-10'
        >>> open_storage("memory://run/step-10").url
        'memory://run/step-10'
    """
    place, options = _place(target)
    match = _SCHEME.match(place)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", place)
    if options:
        raise InvalidRequestError(
            f"{scheme} storage takes no storage_options, but got {', '.join(sorted(options))}; "
            f"leave them out",
            key=place,
        )
    if scheme in ("file", "local"):
        if match and not rest.startswith("/"):
            raise InvalidRequestError(
                f"{scheme}:// must be followed by an absolute path, but {place!r} is not; "
                f"write file:///path or the plain path",
                key=place,
            )
        return LocalStorage(rest)
    if scheme == "memory":
        return MemoryStorage(rest)
    raise InvalidRequestError(
        f"expected a path, file:// or memory://, but found {scheme}:// in {place!r}; mount that "
        f"storage as a directory, or pass a storage_writer or storage_reader for it, such as "
        f"FsspecWriter({place!r})",
        key=place,
    )


def _place(target: str | os.PathLike[str] | Target) -> tuple[str, Mapping[str, object]]:
    if isinstance(target, Target):
        return _text(target.url), target.storage_options
    return _text(target), {}


def _text(place: object) -> str:
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"expected a path or URL as a string or PathLike, but got {type(place).__name__}"
        )
    if not text or "\0" in text:
        raise InvalidRequestError(f"expected a path or URL, but found {text!r}", key=repr(text))
    return text
