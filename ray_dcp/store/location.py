"""`Location`: a URL with what is needed to get there, wherever a `checkpoint_id` is taken.

Also tells which values name a place, and takes URLs apart. What they mean is decided in `opening`.
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
"""What follows `scheme://` in a URL that carries credentials or options."""


@dataclass(frozen=True)
class Location:
    """Where a checkpoint lies, with credentials or a ready filesystem. Taken as `checkpoint_id`.

    Neither options nor filesystem are shown by `repr`, logged, or written into a checkpoint. They
    travel to the other ranks' coordinator and to stagers, and so must be picklable.

    Args:
        url: Path or URL; with a filesystem, the path in it.
        storage_options: Options of the storage, such as `{"endpoint": ..., "access_key_id": ...}`;
            for protocols that fsspec serves, the arguments of its filesystem.
        filesystem: A filesystem of fsspec or pyarrow.fs, or a store of obstore, to be used
            instead of making one.

    Raises:
        InvalidRequestError: The URL is none, carries credentials itself, the filesystem is none
            of these, or both options and filesystem are given.

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
        """Returns the location below this one, such as a step of a run."""
        return replace(self, url=url_below(self.url, name))


Filesystem = Any
"""A filesystem of fsspec or pyarrow.fs, or a store of obstore."""
AnyPlace = str | os.PathLike[str] | Location | Target | Filesystem
"""Whatever names where a checkpoint lies."""


def is_place(value: Any) -> bool:
    """Tells whether a value names a place, as far as its type goes."""
    if isinstance(value, (str, Location, Target)) or brings_filesystem(value):
        return True
    if isinstance(value, os.PathLike):
        return isinstance(os.fspath(value), str)
    return (
        kind_of_filesystem(value) is not None
        or kind_of_filesystem(getattr(value, "fs", None)) == "fsspec"
    )


def brings_filesystem(value: Any) -> bool:
    """Tells a `Checkpoint` of Ray Train, as its `Result` gives it.

    *Careful*: it counts as a path, and raises when it is asked for one.
    """
    return kind_of_filesystem(getattr(value, "filesystem", None)) is not None


def kind_of_filesystem(value: Any) -> str | None:
    """Returns `"fsspec"`, `"arrow"` or `"obstore"` for a filesystem of theirs, else None.

    None of them is imported: who holds an object of a class has imported it.
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
    """Returns the URL or path of something below another.

    Examples:
        >>> url_below("memory://", "run"), url_below("s3://bucket/run/", "step-1")
        ('memory://run', 's3://bucket/run/step-1')
    """
    return f"{url}{name}" if url.endswith("://") else f"{url.rstrip('/')}/{name}"


def split_url(url: str) -> tuple[str, str]:
    """Returns the scheme in small letters, empty for a plain path, and the rest.

    Examples:
        >>> split_url("S3://bucket/run"), split_url("/run")
        (('s3', 'bucket/run'), ('', '/run'))
    """
    match = _SCHEME.match(url)
    return (match[1].lower(), match[2]) if match else ("", url)


def checked_url(place: object, *, in_filesystem: bool = False) -> str:
    """Returns the text of a path or URL.

    Args:
        place: As the user gave it.
        in_filesystem: It is for a ready filesystem, whose names are its own business.

    Raises:
        InvalidRequestError: It is none, or carries credentials.
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
    # Why split: in a chained URL each place may carry its own ("zip://a::s3://key:secret@bucket").
    if scheme not in ("", "file", "local") and any(map(_SECRETS.match, rest.split("://"))):
        # Why not shown: what is refused here would otherwise be written into the checkpoint.
        raise InvalidRequestError(
            f"this {scheme}:// URL carries credentials or options (…:…@ or ?…=…), and URLs are "
            f"written into checkpoints and logs; pass ray_dcp.Location(url, storage_options) "
            f"instead",
            key="checkpoint_id",
        )
    return text
