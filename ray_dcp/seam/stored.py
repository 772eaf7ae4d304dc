"""What a checkpoint holds, name by name, for those who make a state dict of it without targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ray_dcp.errors import InvalidRequestError
from ray_dcp.options import KeyMap
from ray_dcp.plan.values import ChunkTable, Kind, Path
from ray_dcp.seam.flatten import set_by_path
from ray_dcp.seam.key_maps import renamer
from ray_dcp.seam.tensors import dtype_of

__all__ = [
    "Stored",
    "chosen",
    "get_by_path",
    "matches",
    "nested",
    "stored_in_metadata",
    "stored_in_table",
]


@dataclass(frozen=True)
class Stored:
    """One tensor or object of a checkpoint, and what is to become of it."""

    name: str
    """In the checkpoint."""
    path: Path
    """Where it sits in the new state dict."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """Of the new tensor; None for objects."""

    @property
    def fqn(self) -> str:
        """Its dotted name in the new state dict."""
        return ".".join(map(str, self.path))


def stored_in_table(table: ChunkTable) -> list[Stored]:
    """Returns what a chunk table tells.

    Args:
        table: Of a committed checkpoint, ours or stock DCP's.
    """
    found = []
    for number, (name, path) in enumerate(zip(table.names, table.paths, strict=True)):
        shape = tuple(table.shape[number, : table.ndim[number]].tolist())
        if table.kind[number] == Kind.OBJECT:
            found.append(Stored(name, path or (name,)))
        else:
            dtype = dtype_of(table.dtypes[table.dtype[number]], fqn=name)
            found.append(Stored(name, path or (name,), shape, dtype))
    return found


def stored_in_metadata(metadata: Metadata) -> list[Stored]:
    """Returns what the metadata of a third party's reader tells.

    Args:
        metadata: As `StorageReader.read_metadata` gives it.
    """
    paths: Mapping[str, Any] = metadata.planner_data or {}
    found = []
    for name, entry in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name) or (name,))
        if isinstance(entry, TensorStorageMetadata):
            found.append(Stored(name, path, tuple(entry.size), entry.properties.dtype))
        else:
            found.append(Stored(name, path))
    return found


def chosen(
    stored: Sequence[Stored],
    include: Sequence[str] = (),
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
) -> list[Stored]:
    """Returns a part of a checkpoint, under other names and of another dtype.

    Args:
        stored: All of it.
        include: Shell patterns of names; everything if none is given.
        key_map: See `LoadOptions.key_map`. What gets another name sits at its dots.
        dtype: Of floating tensors; their own if None.

    Raises:
        InvalidRequestError: Nothing is left, or two get one name.
    """
    rename = renamer(key_map) if key_map is not None else None
    kept: dict[str, Stored] = {}
    for each in stored:
        if not matches(each.name, include):
            continue
        new = each
        if rename is not None:
            name = rename(each.name)
            if name is None:
                continue
            new = each if name == each.name else replace(each, path=tuple(name.split(".")))
        if dtype is not None and new.dtype is not None and new.dtype.is_floating_point:
            new = replace(new, dtype=dtype)
        if new.fqn in kept:
            raise InvalidRequestError(
                f"{kept[new.fqn].name!r} and {each.name!r} would both be {new.fqn!r}; give each a "
                f"name of its own",
                key=each.name,
            )
        kept[new.fqn] = new
    if stored and not kept:
        raise InvalidRequestError(
            f"nothing of the checkpoint is left: expected some of {len(stored)} names such as "
            f"{stored[0].name!r} to match {list(include)}",
            key="include",
        )
    return list(kept.values())


def matches(name: str, include: Sequence[str]) -> bool:
    """Whether a name is asked for.

    Example:
        >>> matches("model.w", ["model.*"]), matches("step", ["model.*"]), matches("step", [])
        (True, False, True)
    """
    return not include or any(fnmatchcase(name, pattern) for pattern in include)


def nested(values: Mapping[Path, Any]) -> dict[Any, Any]:
    """Returns the state dict with values at their paths.

    Raises:
        DamagedCheckpointError: Two paths contradict each other, or ask for an impossible list.
    """
    root: dict[Any, Any] = {}
    for path, value in values.items():
        set_by_path(root, path, value)
    return root


def get_by_path(root: Any, path: Path) -> Any:
    """Returns what `nested` put at a path."""
    for part in path:
        root = root[getattr(part, "key", part)]
    return root
