"""Lists the checkpoints below a directory: which are there, and what state they are in.

Looks at names, lengths and manifests only; whether the bytes are right is for `verify`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ray_dcp.errors import CheckpointError, StorageError
from ray_dcp.format.manifest import DeleteRecord, Manifest, slot_of
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.slots import read_slots
from ray_dcp.view.checkpoint_view import rank_of_file
from ray_dcp.view.runs import PART_NAME, step_of

__all__ = ["ListedCheckpoint", "State", "list_checkpoints"]

State = Literal["committed", "uncommitted", "damaged", "stock", "deleted"]

_OUR_FILE = re.compile(rf"__\d+_\d+\..+\.distcp|[^/]+/{PART_NAME.pattern}")
_STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")
_METADATA = ".metadata"


@dataclass(frozen=True)
class ListedCheckpoint:
    """One directory that holds a checkpoint, or what a save left of one."""

    name: str
    """Path below the root that was listed; `.` for the root itself."""
    step: int | None
    """Number at the end of the name; None if there is none."""
    state: State
    """`committed`; `uncommitted`: files of a save without a commit; `damaged`: committed, but
    files are missing, have another length or can't be read; `stock`: not written by ray_dcp;
    `deleted`: `ray_dcp.delete` took it away."""
    num_bytes: int
    """Bytes of all files in the directory, also of those that no commit refers to."""
    num_ranks: int | None
    """Ranks that saved it, if that can be told."""
    created_s: float | None
    """Seconds since 1970 by the coordinator's clock; None if that was not recorded."""
    detail: str = ""
    """What is damaged or missing."""


def list_checkpoints(root: AnyPlace) -> tuple[ListedCheckpoint, ...]:
    """Returns every checkpoint at or below a directory, by step and then by name.

    Args:
        root: Path, URL, `Location` or filesystem.

    Returns:
        Empty when there is none, or no such directory.

    Raises:
        StorageError: The storage refused to list.

    Complexity:
        One listing, and one manifest read for each checkpoint.
    """
    storage = open_storage(root)
    directories: dict[str, dict[str, int]] = {}
    for entry in storage.list():
        directory, _, name = entry.key.rpartition("/")
        directories.setdefault(directory, {})[name] = entry.num_bytes
    _fold_attempts(directories)
    found = [
        _look(storage, root, directory, files)
        for directory, files in directories.items()
        if _is_checkpoint(files)
    ]
    found.sort(key=lambda item: (item.step is None, item.step or 0, item.name))
    return tuple(found)


def _fold_attempts(directories: dict[str, dict[str, int]]) -> None:
    """Counts the sub-folders of safetensors attempts as part of their checkpoint."""
    for directory, names in list(directories.items()):
        if directory and any(PART_NAME.match(name) for name in names):
            parent, _, attempt = directory.rpartition("/")
            files = directories.pop(directory)
            directories.setdefault(parent, {}).update(
                {f"{attempt}/{name}": num_bytes for name, num_bytes in files.items()}
            )


def _is_checkpoint(files: Mapping[str, int]) -> bool:
    return any(
        key == _METADATA or slot_of(key) or key.endswith((".distcp", ".safetensors"))
        for key in files
    )


def _look(
    storage: Storage,
    root: AnyPlace,
    directory: str,
    files: Mapping[str, int],
) -> ListedCheckpoint:
    name = directory or storage.url.rstrip("/").rpartition("/")[2]
    state, detail, manifest = _state(_below(root, storage, directory), files)
    ranks = {rank for key in files if (rank := rank_of_file(key)) is not None}
    return ListedCheckpoint(
        name=directory or ".",
        step=step_of(name),
        state=state,
        num_bytes=sum(files.values()),
        num_ranks=manifest.world_size if manifest else len(ranks) or None,
        created_s=manifest.created_s if manifest else None,
        detail=detail,
    )


def _below(root: AnyPlace, storage: Storage, directory: str) -> Storage:
    return open_storage(place_below(root, directory)) if directory else storage


def _state(storage: Storage, files: Mapping[str, int]) -> tuple[State, str, Manifest | None]:
    """Returns the state, what is wrong, and the manifest if one is committed."""
    try:
        decides = read_slots(storage).decides if any(slot_of(key) for key in files) else None
    except StorageError:
        raise
    except CheckpointError as error:
        return "damaged", error.message, None
    if decides is None:
        return (*_state_without_commit(files), None)
    manifest = decides.record
    if isinstance(manifest, DeleteRecord):
        return (*_state_after_delete(files), None)
    wrong = [
        f"{entry.key} is missing" if entry.key not in files
        else f"{entry.key} has {files[entry.key]} bytes instead of {entry.num_bytes}"
        for entry in (*manifest.files, *manifest.tables)
        if files.get(entry.key) != entry.num_bytes
    ]  # fmt: skip
    return ("damaged" if wrong else "committed"), "; ".join(wrong), manifest


def _state_after_delete(files: Mapping[str, int]) -> tuple[State, str]:
    found = _state_without_commit(files)
    if found[0] == "stock":
        return found  # saved since
    left = any(_OUR_FILE.fullmatch(key) for key in files)
    return "deleted", "files are left: ray_dcp.collect removes them" if left else ""


def _state_without_commit(files: Mapping[str, int]) -> tuple[State, str]:
    # Why by name: `.metadata` of a large checkpoint takes seconds to read.
    ours = any(_OUR_FILE.fullmatch(key) for key in files)
    theirs = any(_STOCK_FILE.fullmatch(key) for key in files)
    if _METADATA in files and (theirs or not ours):
        return "stock", ""
    if ours or theirs:
        return "uncommitted", "it has no manifest" if ours else "it has no .metadata"
    if any(key.endswith(".safetensors") for key in files):
        return "stock", "plain safetensors files"
    return "uncommitted", "it has records of saves, but none of a commit that stands"
