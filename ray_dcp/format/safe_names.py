"""The names that a `.metadata` may refer to, and the plain values that stand for them.

Nothing here is imported or called: allowing a name only means that the data around it is read.
"""

from __future__ import annotations

from typing import Any

from ray_dcp.format.dtypes import ITEMSIZE
from ray_dcp.format.safe_pickle import Builder, Global, damaged

__all__ = ["allowed_global"]

_MAX_PATH_PARTS = 1024
_MAX_PATH_CHARS = 1 << 16


def allowed_global(name: str) -> Global | None:
    """Returns what a dotted name stands for, None when no `.metadata` needs it.

    Args:
        name: Module and qualified name.

    Example:
        >>> allowed_global("torch.bfloat16").name
        'torch.bfloat16'
        >>> allowed_global("os.system") is None
        True
    """
    if name in _BUILDERS:
        return Global(name, _BUILDERS[name])
    return Global(name, None) if name in _OPAQUE else None


def _one(args: tuple[Any, ...]) -> Any:
    if len(args) != 1:
        raise damaged("one argument", str(len(args)))
    return args[0]


def _size(args: tuple[Any, ...]) -> Any:
    value = _one(args) if args else ()
    if not isinstance(value, (list, tuple)):
        raise damaged("a size", "something else")
    return value


def _path(args: tuple[Any, ...]) -> str:
    if len(args) > _MAX_PATH_PARTS or not all(isinstance(part, str) for part in args):
        raise damaged("a path of texts", "something else")
    if sum(map(len, args)) > _MAX_PATH_CHARS:
        raise damaged(f"a path of at most {_MAX_PATH_CHARS} characters", "a longer one")
    head = args[0] if args and args[0].endswith(("/", "\\")) else ""
    return head + "/".join(args[1:] if head else args)


def _empty_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    if len(args) > 1 or (args and not (args[0] is None or isinstance(args[0], Global))):
        raise damaged("an empty dict", "something else")
    return {}


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_BUILDERS: dict[str, Builder] = {
    "collections.OrderedDict": _empty_dict,
    "collections.defaultdict": _empty_dict,
    "torch.Size": _size,
    "torch.serialization._get_layout": _one,
    # What sets and lists are called with in protocol 2: what they hold stands for them.
    "__builtin__.frozenset": _one,
    "__builtin__.set": _one,
    "builtins.frozenset": _one,
    "builtins.set": _one,
    # Why two modules: Python 3.13 pickles paths by the second name.
    **{f"pathlib.{name}": _path for name in _PATHS},
    **{f"pathlib._local.{name}": _path for name in _PATHS},
}

_DCP = "torch.distributed.checkpoint"
_DTYPES = {
    *ITEMSIZE,
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
}
_OPAQUE = frozenset(
    [
        *(f"torch.{dtype}" for dtype in _DTYPES),
        *(
            f"{_DCP}.metadata.{name}"
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
        *(
            # What planners that cache their plans leave in planner_data or in extra attributes.
            f"{_DCP}.planner.{name}"
            for name in (
                "BytesIOWriteData", "LoadItemType", "LoadPlan", "ReadItem", "SavePlan",
                "TensorWriteData", "WriteItem", "WriteItemType",
            )
        ),
        f"{_DCP}.filesystem._StorageInfo",
        f"{_DCP}.filesystem._StoragePrefix",
        "builtins.dict",
        "builtins.int",
        "builtins.list",
        "builtins.str",
        "builtins.tuple",
        "collections.ChainMap",
        "torch.device",
    ]
)  # fmt: skip
