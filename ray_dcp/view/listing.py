"""Lists the checkpoints below a directory: which are there, and what state they are in.

Looks at names, lengths and small records only; whether the bytes are right is for `verify`. What a
state is called is decided in `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_dcp.collector import collector_paused
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import (
    MAX_RECORD_BYTES,
    Manifest,
    decode_record,
    record_key,
    slot_of,
)
from ray_dcp.format.run_files import (
    CATALOGUE,
    MAX_NOTE_BYTES,
    SHARED_FOLDER,
    noted_step,
    tag_of,
)
from ray_dcp.format.step_info import (
    CatalogueRow,
    StepInfo,
    decode_catalogue,
    decode_info,
    info_key,
    info_slot,
)
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.slots import Slots, read_slots
from ray_dcp.transfer.threads import run_tasks
from ray_dcp.view.file_names import METADATA, rank_of_file
from ray_dcp.view.runs import PART_NAME, step_of
from ray_dcp.view.states import FOREIGN, State, StateFound, state_of

__all__ = ["ListedCheckpoint", "State", "list_checkpoints"]

_REMOTE_THREADS = 16
"""Folders of an object store that are looked into at a time: each takes a round trip or two."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """One directory that holds a checkpoint, or what a save left of one."""

    name: str
    """Path below the root that was listed; `.` for the root itself."""
    step: int | None
    """Number at the end of the name; None if there is none."""
    state: State
    """`committed`; `in flight`: files of a save that may still be committed, or that crashed;
    `aborted`: a save failed and nothing else is there; `damaged`: committed, but files are missing,
    have another length or can't be read; `stock`: not written by ray_dcp; `deleted`:
    `ray_dcp.delete` took it away."""
    num_bytes: int
    """Bytes of all files in the directory, also of those that no commit refers to."""
    num_ranks: int | None
    """Ranks that saved it, if that can be told."""
    created_s: float | None
    """Seconds since 1970 by the coordinator's clock; None if that was not recorded."""
    detail: str = ""
    """What is damaged or missing."""
    in_flight: tuple[str, ...] = ()
    """Attempts that left files here and of which no record says what became of them; beside a
    checkpoint that is committed, they are saves over it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As told to a `CheckpointManager`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's, as told to a `CheckpointManager`."""
    tags: tuple[str, ...] = ()
    """Sorted."""
    note: str = ""
    items: Mapping[str, str] = field(default_factory=dict)
    """Folder of each named item of the step, below its own; empty for a step of one state."""
    manifest: Manifest | None = field(default=None, repr=False)
    """The commit; None where none of ray_dcp stands."""

    @property
    def is_readable(self) -> bool:
        """A checkpoint stands here that can be loaded, as far as names and lengths tell."""
        return self.state in ("committed", *FOREIGN)


@dataclass(frozen=True)
class _Shared:
    """What lies beside the steps of a run."""

    tags: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)
    rows: Mapping[str, CatalogueRow] = field(default_factory=dict)


def list_checkpoints(
    root: AnyPlace, *, told: Callable[[int, int], None] | None = None
) -> tuple[ListedCheckpoint, ...]:
    """Returns every checkpoint at or below a directory, by step and then by name.

    Args:
        root: Path, URL, `Location` or filesystem.
        told: Called now and then with the number of folders looked into, and of all; from any
            thread.

    Returns:
        Empty when there is none, or no such directory.

    Raises:
        StorageError: The storage refused to list.

    Complexity:
        One listing, and one or two small reads for each checkpoint; on object stores 16 at a time.
    """
    storage = open_storage(root)
    with collector_paused():
        directories: dict[str, dict[str, int]] = {}
        for entry in storage.list():
            directory, _, name = entry.key.rpartition("/")
            directories.setdefault(directory, {})[name] = entry.num_bytes
        shared = _read_shared(storage, directories)
        _fold_attempts(directories)
        todo = [item for item in directories.items() if _is_checkpoint(item[1])]
        found: list[ListedCheckpoint] = []

        def look(item: tuple[str, dict[str, int]]) -> None:
            found.append(_look(storage, root, *item, shared))
            if told is not None:
                told(len(found), len(todo))

        if isinstance(storage, LocalStorage):
            for item in todo:
                look(item)
        else:
            run_tasks(todo, look, min(_REMOTE_THREADS, len(todo)))
        found.sort(key=lambda item: (item.step is None, item.step or 0, item.name))
    return tuple(found)


def _read_shared(storage: Storage, directories: dict[str, dict[str, int]]) -> _Shared:
    """Takes the folder `.manager` out of the listing, and reads what it tells of steps."""
    tags: dict[int, list[str]] = {}
    notes: dict[int, str] = {}
    rows: dict[str, CatalogueRow] = {}
    inside = [name for name in directories if f"{name}/".startswith(f"{SHARED_FOLDER}/")]
    for folder in inside:
        below = folder.removeprefix(SHARED_FOLDER).lstrip("/")
        for name in directories.pop(folder):
            key = f"{below}/{name}" if below else name
            tagged, noted = tag_of(key), noted_step(key)
            if tagged is not None:
                tags.setdefault(tagged[0], []).append(tagged[1])
            elif noted is not None:
                data = _read(storage, f"{SHARED_FOLDER}/{key}", MAX_NOTE_BYTES)
                notes[noted] = data.decode("utf-8", "replace")
            elif key == CATALOGUE:
                rows = _catalogue(_read(storage, f"{SHARED_FOLDER}/{key}", MAX_RECORD_BYTES))
    return _Shared({step: tuple(sorted(some)) for step, some in tags.items()}, notes, rows)


def _read(storage: Storage, key: str, most_bytes: int) -> bytes:
    """Returns a small file; empty when it is gone since it was listed."""
    try:
        return storage.read(key, 0, most_bytes)
    except KeyMissingError:
        return b""


def _catalogue(data: bytes) -> dict[str, CatalogueRow]:
    try:
        return {row.name: row for row in decode_catalogue(data)}
    except DamagedCheckpointError:
        return {}  # it only saves reading


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
        key == METADATA or slot_of(key) or key.endswith((".distcp", ".safetensors"))
        for key in files
    )


def _look(
    storage: Storage,
    root: AnyPlace,
    directory: str,
    files: Mapping[str, int],
    shared: _Shared,
) -> ListedCheckpoint:
    name = directory or storage.url.rstrip("/").rpartition("/")[2]
    slot, found = _found(storage, root, directory, files)
    manifest = found.manifest
    info = None if manifest is None else _info(storage, directory, files, slot, manifest, shared)
    step = step_of(name)
    # Why: what is nested deeper, or the root itself, is no step of this run.
    own = step is not None and bool(directory) and "/" not in directory
    listed = ListedCheckpoint(
        name=directory or ".",
        step=step,
        state=found.state,
        num_bytes=sum(files.values()),
        num_ranks=manifest.world_size if manifest else _num_ranks(files),
        created_s=manifest.created_s if manifest else None,
        detail=found.detail,
        in_flight=found.in_flight,
        tags=shared.tags.get(step or 0, ()) if own else (),
        note=shared.notes.get(step or 0, "") if own else "",
        manifest=manifest,
    )
    if info is None:
        return listed
    return replace(listed, metrics=info.metrics, metadata=info.metadata, items=info.items)


def _num_ranks(files: Iterable[str]) -> int | None:
    ranks = {rank for key in files if (rank := rank_of_file(key)) is not None}
    return len(ranks) or None


def _found(
    storage: Storage, root: AnyPlace, directory: str, files: Mapping[str, int]
) -> tuple[int, StateFound]:
    """Returns the slot of what stands, and what there is to say about the folder."""
    last = max((slot for key in files if (slot := slot_of(key))), default=0)
    if not last:
        return 0, state_of(files, Slots())
    standing = _highest(storage, directory, last)
    if standing is not None:
        return last, state_of(files, standing=standing)
    below = open_storage(place_below(root, directory)) if directory else storage
    try:
        slots = read_slots(below)
    except StorageError:
        raise
    except CheckpointError as error:
        return 0, StateFound("damaged", error.message)
    return (slots.decides.slot if slots.decides else 0), state_of(files, slots)


def _highest(storage: Storage, directory: str, last: int) -> Manifest | None:
    """Returns the manifest in the highest slot; None when that does not decide by itself.

    Why: it nearly always does, and one read is a tenth of looking at all slots.
    """
    key = record_key(last)
    try:
        data = storage.read(f"{directory}/{key}" if directory else key, 0, MAX_RECORD_BYTES + 1)
        record = decode_record(data, key=key)
    except StorageError as error:
        if isinstance(error, KeyMissingError):
            return None
        raise
    except CheckpointError:
        return None
    return record if isinstance(record, Manifest) and record.previous_slot == last - 1 else None


def _info(
    storage: Storage,
    directory: str,
    files: Mapping[str, int],
    slot: int,
    manifest: Manifest,
    shared: _Shared,
) -> StepInfo | None:
    """Returns what a manager noted about a step; None when nothing can be read."""
    row = shared.rows.get(directory)
    if row is not None and (row.slot, row.attempt) == (slot, manifest.attempt):
        return row.info
    below = [number for key in files if (number := info_slot(key)) is not None and number < slot]
    if not below:
        return None
    key = info_key(max(below))
    try:
        data = _read(storage, f"{directory}/{key}" if directory else key, MAX_RECORD_BYTES)
        return decode_info(data, key=key)
    except DamagedCheckpointError:
        return None  # the checkpoint is whole without it
