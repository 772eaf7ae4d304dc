"""`Location`: a URL with credentials or a filesystem, accepted wherever a `checkpoint_id` is.

The module also recognises values that name a storage location, and splits URLs. The module
`opening` maps them to storages.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError

# "::" chains protocols in fsspec, such as "simplecache::s3://".
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z0-9+.-]+)*)://(.*)", re.DOTALL)
_MANGLED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|memory):/[^/]")
_NO_URL = re.compile(
    r"(file|local|s3|s3a|gs|gcs|az|azure|abfs|abfss|memory|https?|hdfs|ftp|sftp):(?!//)"
)
_SECRETS = re.compile(r"[^/@?]*:[^/@?]*@|.*[?&][^=&]*=", re.DOTALL)
"""Matches what follows `scheme://` in a URL that contains credentials or options."""


@dataclass(frozen=True)
class Location:
    """Location of a checkpoint, with credentials or a filesystem. Accepted as `checkpoint_id`.

    Neither options nor filesystem are shown by `repr`, logged, or written into a checkpoint. They
    are sent to the coordinator and to the node agents, and so must be picklable.

    Args:
        url: Path or URL; with `filesystem`, the path in it.
        storage_options: Options of the storage, such as `{"endpoint": ..., "access_key_id": ...}`;
            for protocols that fsspec serves, the arguments of its filesystem.
        filesystem: A filesystem of fsspec or pyarrow.fs, or a store of obstore, used as it is.

    Raises:
        InvalidRequestError: `url` is not a path or URL, `url` contains credentials, `filesystem`
            is of another kind, or both `storage_options` and `filesystem` are given.

    Examples:
        >>> run = Location("s3://bucket/run", {"secret_access_key": "hush"})
        >>> run / "step-10"
        Location(url='s3://bucket/run/step-10')
    """

    url: str
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    filesystem: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_path = self.filesystem is not None
        object.__setattr__(self, "url", checked_url(self.url, in_filesystem=is_path))
        if not isinstance(self.storage_options, Mapping):
            raise InvalidRequestError(
                f"storage_options must be a mapping, but is a "
                f"{type(self.storage_options).__name__}",
                key="storage_options",
            )
        if self.filesystem is None:
            return
        if kind_of_filesystem(self.filesystem) is None:
            raise InvalidRequestError(
                f"filesystem must be one of fsspec or pyarrow.fs, or a store of obstore, but is a "
                f"{type(self.filesystem).__name__}",
                key="filesystem",
            )
        if self.storage_options:
            raise InvalidRequestError(
                "a ready filesystem takes no storage_options: give them when making it",
                key="storage_options",
            )

    def __truediv__(self, name: str) -> Location:
        """Returns a location below this one, such as a step of a run."""
        return replace(self, url=url_below(self.url, name))


Filesystem = Any
"""A filesystem of fsspec or pyarrow.fs, or a store of obstore."""
AnyPlace = str | os.PathLike[str] | Location | Target | Filesystem
"""Any value that names the location of a checkpoint."""


def is_place(value: Any) -> bool:
    """Returns whether a value names a storage location, judged by its type alone."""
    if isinstance(value, (str, Location, Target)) or brings_filesystem(value):
        return True
    if isinstance(value, os.PathLike):
        return isinstance(os.fspath(value), str)
    return (
        kind_of_filesystem(value) is not None
        or kind_of_filesystem(getattr(value, "fs", None)) == "fsspec"
    )


def brings_filesystem(value: Any) -> bool:
    """Returns whether a value has a filesystem, as the `Checkpoint` of a Ray Train `Result` has.

    *Careful*: a `Checkpoint` is an `os.PathLike`, but its `__fspath__` raises.
    """
    return kind_of_filesystem(getattr(value, "filesystem", None)) is not None


def kind_of_filesystem(value: Any) -> str | None:
    """Returns `"fsspec"`, `"arrow"` or `"obstore"` for a filesystem of that library, else None.

    No library is imported: if `value` is one of its objects, it has been imported already.
    """
    for kind, module, name in (
        ("fsspec", "fsspec.spec", "AbstractFileSystem"),
        ("arrow", "pyarrow.fs", "FileSystem"),
    ):
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and isinstance(value, found):
            return kind
    is_store = type(value).__module__.partition(".")[0] == "obstore"
    return "obstore" if is_store and type(value).__name__.endswith("Store") else None


def url_below(url: str, name: str) -> str:
    """Returns the URL or path of `name` below `url`.

    Examples:
        >>> url_below("memory://", "run"), url_below("s3://bucket/run/", "step-1")
        ('memory://run', 's3://bucket/run/step-1')
    """
    return f"{url}{name}" if url.endswith("://") else f"{url.rstrip('/')}/{name}"


def split_url(url: str) -> tuple[str, str]:
    """Returns the scheme in lower case (empty for a plain path) and the rest of a URL.

    Examples:
        >>> split_url("S3://bucket/run"), split_url("/run")
        (('s3', 'bucket/run'), ('', '/run'))
    """
    match = _SCHEME.match(url)
    return (match[1].lower(), match[2]) if match else ("", url)


def checked_url(place: object, *, in_filesystem: bool = False) -> str:
    """Returns the text of a path or URL after checking it.

    Args:
        place: Path or URL as the user gave it.
        in_filesystem: The path is for a given filesystem, which may have names that look like
            misspelt URLs.

    Raises:
        InvalidRequestError: `place` is not a path or URL, or contains credentials.
    """
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"expected a path or URL as a string or PathLike, a Location, or a filesystem of "
            f"fsspec, pyarrow.fs or obstore, but got {type(place).__name__}"
        )
    if not text or "\0" in text:
        raise InvalidRequestError(f"expected a path or URL, but found {text!r}", key=repr(text))
    if isinstance(place, os.PathLike) and _MANGLED.match(text):
        raise InvalidRequestError(
            f"expected a path, but found {text!r}: pathlib makes one slash of the two in a URL; "
            f"pass URLs as strings",
            key="checkpoint_id",
        )
    if text.startswith("~") or (_NO_URL.match(text) and not in_filesystem):
        way_out = "os.path.expanduser(path)" if text[0] == "~" else "file:///path or the plain path"
        if not text.startswith(("~", "file:", "local:")):
            way_out = f"{text.partition(':')[0]}://…"
        raise InvalidRequestError(
            f"expected a path or URL, but {text!r} would make a folder {text.split('/')[0]!r} in "
            f"the current directory; give {way_out}, or {'./' + text!r} if you mean that folder",
            key="checkpoint_id",
        )
    scheme, rest = split_url(text)
    # Why split: each URL of a chain may have credentials ("zip://a::s3://key:secret@bucket").
    if scheme not in ("", "file", "local") and any(map(_SECRETS.match, rest.split("://"))):
        # Why the URL is not shown: messages are logged, and this one would contain a secret.
        raise InvalidRequestError(
            f"this {scheme}:// URL carries credentials or options (…:…@ or ?…=…), and URLs are "
            f"written into checkpoints and logs; pass ray_dcp.Location(url, storage_options) "
            f"instead",
            key="checkpoint_id",
        )
    return text
