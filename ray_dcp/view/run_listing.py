"""Lists runs and checkpoints: which are there, and what state they are in.

`list_checkpoints` looks at names, lengths and small records only; `verify` checks the bytes.
`folder_state` is pure: from the names of a folder's files, ours and stock DCP's, and its records,
to its state.

`list_run` lists the step folders of a run by their names alone, newest first. It does not look
which of them hold a checkpoint: the load that tries one finds out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from ray_dcp.commit_protocol.garbage import attempts_of
from ray_dcp.core.processes import collector_paused
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import (
    MAX_RECORD_BYTES,
    DeleteRecord,
    Manifest,
    slot_of,
)
from ray_dcp.format.names import CATALOGUE, MAX_NOTE_BYTES, SHARED_FOLDER, noted_step, tags_in
from ray_dcp.format.step_info import (
    CatalogueRow,
    decode_catalogue,
    info_slot,
)
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.io.records import Slots, highest_record, info_below, read_slots
from ray_dcp.io.threads import run_tasks
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import Told, open_storage, place_below
from ray_dcp.store.storage import (
    NETWORK_DISK,
    Entry,
    Storage,
    read_if_there,
    read_traits_of,
)

T = TypeVar("T")

_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})", re.DOTALL)
PART_NAME = re.compile(r"rank-\d+-part-\d+\.safetensors")
"""Name of a part file of a safetensors save, in the sub-folder of its attempt."""
_MOST_SHOWN = 8


@dataclass(frozen=True)
class ListedStep:
    """A folder of a run that holds a checkpoint, or what a save left of one."""

    name: str
    """Of the folder, which lies directly in the run."""
    step: int
    """Number at the end of the name."""


@dataclass(frozen=True)
class ListedRun:
    """What lies in a directory of checkpoints."""

    url: str
    """Absolute path or URL."""
    steps: tuple[ListedStep, ...]
    """Newest first; of equal steps, the name that sorts last comes first."""
    others: tuple[str, ...] = ()
    """What else lies directly in it; folders end in `/`."""
    is_checkpoint: bool = False
    """It is itself a checkpoint, or what a save left of one."""

    def checkpoint_id(self, name: str) -> str:
        """Returns the path or URL of a folder of the run."""
        return f"{self.url.rstrip('/')}/{name}"

    def in_words(self) -> str:
        """Returns what is there, for messages."""
        names = [f"{folder.name}/" for folder in self.steps] + list(self.others)
        if not names:
            return "nothing"
        more = f", … ({len(names)} in all)" if len(names) > _MOST_SHOWN else ""
        return ", ".join(names[:_MOST_SHOWN]) + more


def step_of(name: str) -> int | None:
    """Returns the number at the end of a folder's name, None if there is none.

    Args:
        name: Without slashes at its end.

    Examples:
        >>> step_of("step-000120"), step_of("epoch=3-step=70"), step_of("final")
        (120, 70, None)
    """
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def list_run(run: AnyPlace) -> ListedRun:
    """Returns the step folders of a run.

    A step folder lies directly in the run, its name ends in a number, and directly in it are
    files of a checkpoint. What a folder nests deeper is its own business.

    Args:
        run: Path or URL.

    Returns:
        Without steps when there are none, or no such directory.

    Raises:
        InvalidRequestError: `run` is no path and no URL that can be listed.
        StorageError: The storage refused to list.

    Complexity:
        One listing of all files at and below the run; nothing is read.
    """
    storage = open_storage(run)
    folders = folders_in(storage)
    files = folders.pop("", [])
    steps, others = [], []
    for name, keys in folders.items():
        step = step_of(name)
        if step is not None and _is_checkpoint(keys):
            steps.append(ListedStep(name, step))
        else:
            others.append(f"{name}/")
    steps.sort(key=lambda folder: (folder.step, folder.name), reverse=True)
    return ListedRun(
        storage.url, tuple(steps), (*sorted(others), *sorted(files)), _is_checkpoint(files)
    )


def folders_in(storage: Storage) -> dict[str, list[str]]:
    """Returns the keys of the files of each folder, below that; of those in no folder under "".

    Raises:
        StorageError: It can't be listed.
    """
    folders: dict[str, list[str]] = {}
    for entry in storage.list():
        name, slash, rest = entry.key.partition("/")
        folders.setdefault(name if slash else "", []).append(rest if slash else name)
    return folders


def _is_checkpoint(keys: Iterable[str]) -> bool:
    """Tells by the names of files whether a checkpoint is there, or what a save left of one."""
    return any(
        key == ".metadata"
        or slot_of(key) is not None
        or ("/" not in key and key.endswith((".distcp", ".safetensors")))
        or (key.count("/") == 1 and PART_NAME.fullmatch(key.rpartition("/")[2]) is not None)
        for key in keys
    )


METADATA = ".metadata"
OUR_FILE = re.compile(rf"__\d+_\d+\..+\.distcp|[^/]+/{PART_NAME.pattern}")
"""Data files that ray_dcp writes."""
STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")
"""Data files that stock DCP writes."""

_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.(?:.+\.)?distcp|.*/rank-(\d+)-part-\d+\.safetensors")


def rank_of_file(key: str) -> int | None:
    """Returns the rank in the name of a data file, ours or stock DCP's.

    Args:
        key: Key of the file.

    Examples:
        >>> rank_of_file("__12_0.distcp"), rank_of_file("model.safetensors")
        (12, None)
    """
    match = _RANK.fullmatch(key)
    return int(match[1] or match[2]) if match else None


State = Literal[
    "committed", "in flight", "aborted", "damaged", "stock", "safetensors", "deleted", "unreadable"
]

FOREIGN: tuple[State, ...] = ("stock", "safetensors")
"""Checkpoints of other programs: read like ours, and never deleted."""


@dataclass(frozen=True)
class StateFound:
    """State of a folder; see `ListedCheckpoint`."""

    state: State
    detail: str = ""
    manifest: Manifest | None = None
    in_flight: tuple[str, ...] = ()


def folder_state(files: Mapping[str, int], slots: Slots) -> StateFound:
    """Returns the state of a folder.

    Args:
        files: Lengths of what lies in it, by key.
        slots: Its records, as far as they decide.
    """
    decides = None if slots.decides is None else slots.decides.record
    known = {record.attempt for record in slots.records.values()}
    known |= {vote.attempt for vote in decides.decided} if decides is not None else set()
    pending = tuple(sorted(attempts_of(files) - known))
    if isinstance(decides, Manifest):
        return _committed(files, decides, pending)
    if isinstance(decides, DeleteRecord):
        return _deleted(files, pending)
    return _nothing(files, pending, aborted=bool(slots.used))


def wrong_lengths(storage: Storage, checkpoint: Checkpoint) -> list[str]:
    """Returns which files of an opened checkpoint are missing or too short; nothing is read.

    Args:
        storage: Where it lies.
        checkpoint: As opened.

    Raises:
        StorageError: It can't be listed.
    """
    files = {entry.key: entry.num_bytes for entry in storage.list()}
    if checkpoint.manifest is not None:
        return _wrong(files, checkpoint.manifest)
    table = checkpoint.table
    ends = np.zeros(len(table.files), np.int64)
    np.maximum.at(ends, table.file, table.item_offset + table.item_bytes)
    return [
        f"{key} is missing"
        if key not in files
        else f"{key} has {files[key]} bytes, and needs {end}"
        for key, end in zip(table.files, ends.tolist(), strict=True)
        if files.get(key, -1) < end
    ]


def _wrong(files: Mapping[str, int], standing: Manifest) -> list[str]:
    return [
        f"{entry.key} is missing"
        if entry.key not in files
        else f"{entry.key} has {files[entry.key]} bytes instead of {entry.num_bytes}"
        for entry in (*standing.files, standing.table)
        if files.get(entry.key) != entry.num_bytes
    ]


def _committed(
    files: Mapping[str, int], standing: Manifest, pending: tuple[str, ...]
) -> StateFound:
    wrong = _wrong(files, standing)
    return StateFound(
        "damaged" if wrong else "committed", "; ".join(wrong), standing, in_flight=pending
    )


def _deleted(files: Mapping[str, int], pending: tuple[str, ...]) -> StateFound:
    found = _nothing(files, pending, aborted=True)
    if found.state in FOREIGN:
        return found  # saved since
    if pending:
        return StateFound("in flight", "it was deleted, and is being saved again", None, pending)
    left = any(OUR_FILE.fullmatch(key) for key in files)
    return StateFound("deleted", "files are left: ray_dcp.collect removes them" if left else "")


def _nothing(files: Mapping[str, int], pending: tuple[str, ...], *, aborted: bool) -> StateFound:
    # Why by name: `.metadata` of a large checkpoint takes seconds to read.
    ours = any(OUR_FILE.fullmatch(key) for key in files)
    theirs = any(STOCK_FILE.fullmatch(key) for key in files)
    if METADATA in files and (theirs or not ours):
        return StateFound("stock", "", in_flight=pending)
    if pending or theirs or (ours and not aborted):
        missing = "no .metadata" if theirs and not ours else "no manifest"
        return StateFound("in flight", f"it has {missing}", None, pending)
    if any(key.endswith(".safetensors") for key in files) and not ours:
        return StateFound("safetensors")
    return StateFound("aborted", "it has records of saves, but none of a commit")


_MOST_LOOKS = 20
"""How often a folder is looked at again; each time a save or a delete came in between."""
_MOST_THREADS = 32
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
    `ray_dcp.delete` took it away; `unreadable`: the storage refused."""
    num_bytes: int
    """Bytes of all files in the directory, also of those that no commit refers to."""
    num_ranks: int | None
    """Ranks that saved it; None if that is not known."""
    created_s: float | None
    """Seconds since 1970 by the coordinator's clock; None if that was not recorded."""
    detail: str = ""
    """What is damaged or missing."""
    in_flight: tuple[str, ...] = ()
    """Attempts that left files here and that no record decides about; beside a
    checkpoint that is committed, they are saves over it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As given to a `CheckpointManager`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's, as given to a `CheckpointManager`."""
    tags: tuple[str, ...] = ()
    """Sorted."""
    note: str = ""
    items: Mapping[str, str] = field(default_factory=dict)
    """Folder of each named item of the step, below its own; empty for a step of one state."""
    manifest: Manifest | None = field(default=None, repr=False)
    """The manifest that is current; None where ray_dcp has committed none."""

    @property
    def is_readable(self) -> bool:
        """Whether a committed checkpoint can be loaded, by the names and lengths of its files."""
        return self.state in ("committed", *FOREIGN)


@dataclass(frozen=True)
class _Shared:
    """What lies beside the steps of a run."""

    tags: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)
    rows: Mapping[str, CatalogueRow] = field(default_factory=dict)
    """Of the catalogue file, by folder: it only saves reading."""


def list_checkpoints(root: AnyPlace, *, told: Told | None = None) -> tuple[ListedCheckpoint, ...]:
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
        One listing, and one or two small reads for each checkpoint; on object stores 32 at a time.
    """
    storage = open_storage(root)
    with collector_paused():
        directories: dict[str, dict[str, int]] = {}
        entries, refused = readable_entries(storage)
        found = [_unreadable(name, why) for name, why in refused.items()]
        for entry in entries:
            directory, _, name = entry.key.rpartition("/")
            directories.setdefault(directory, {})[name] = entry.num_bytes
        shared = _read_shared(storage, directories)
        _fold_attempts(directories)
        todo = [item for item in directories.items() if _is_checkpoint(item[1])]
        checkpoints = {directory for directory, _ in todo if directory}

        def look(item: tuple[str, dict[str, int]]) -> None:
            # Why: a folder inside a checkpoint is an item, whatever number its name ends with.
            is_item = any(above in checkpoints for above in folders_above(item[0]))
            try:
                found.append(_look(storage, root, *item, shared, is_item=is_item))
            except StorageError as error:
                found.append(_unreadable(item[0], error.message, sum(item[1].values())))
            if told is not None:
                told(len(found), len(todo))

        look_into(storage, todo, look)
        found.sort(key=lambda item: (item.step is None, item.step or 0, item.name))
    return tuple(found)


def look_into(storage: Storage, todo: Sequence[T], look: Callable[[T], None]) -> None:
    """Calls `look` for each of some folders, on storages that are waited for 32 at a time.

    Args:
        storage: In which they lie.
        todo: The folders.
        look: Reads what is in one.
    """
    # Why only there: a file is read in less time than a thread takes over.
    is_remote = read_traits_of(storage).request_s >= NETWORK_DISK.request_s
    run_tasks(todo, look, min(_MOST_THREADS, len(todo)) if is_remote else 1)


def readable_entries(storage: Storage) -> tuple[list[Entry], dict[str, str]]:
    """Returns what lies in a storage, and which folders of this machine can't be listed, and why.

    Raises:
        StorageError: Nothing can be listed.
    """
    try:
        return storage.list(), {}
    except StorageError as error:
        entries: list[Entry] = []
        refused: dict[str, str] = {}
        is_local = isinstance(storage, LocalStorage) and os.path.isdir(storage.url)
        for name in sorted(os.listdir(storage.url) if is_local else []):
            try:
                found = storage.list(name)
                entries += [e for e in found if e.key == name or e.key.startswith(f"{name}/")]
            except StorageError as why:
                refused[name] = why.message
        if not entries:
            raise error
        return entries, refused


def _unreadable(directory: str, why: str, num_bytes: int = 0) -> ListedCheckpoint:
    step = step_of(directory)
    return ListedCheckpoint(directory or ".", step, "unreadable", num_bytes, None, None, why)


def _read_shared(storage: Storage, directories: dict[str, dict[str, int]]) -> _Shared:
    """Takes the folder `.manager` out of the listing, and reads what it has about steps."""
    keys: list[str] = []
    notes: dict[int, str] = {}
    rows: dict[str, CatalogueRow] = {}
    inside = [name for name in directories if f"{name}/".startswith(f"{SHARED_FOLDER}/")]
    for folder in inside:
        below = folder.removeprefix(SHARED_FOLDER).lstrip("/")
        for name in directories.pop(folder):
            key = f"{below}/{name}" if below else name
            keys.append(key)
            noted = noted_step(key)
            if noted is not None:
                data = read_if_there(storage, f"{SHARED_FOLDER}/{key}", MAX_NOTE_BYTES) or b""
                notes[noted] = data.decode("utf-8", "replace")
            elif key == CATALOGUE:
                data = read_if_there(storage, f"{SHARED_FOLDER}/{key}", MAX_RECORD_BYTES) or b""
                with suppress(DamagedCheckpointError):
                    rows = {row.name: row for row in decode_catalogue(data)}
    tags = {step: tuple(sorted(some)) for step, some in tags_in(keys).items()}
    return _Shared(tags, notes, rows)


def _fold_attempts(directories: dict[str, dict[str, int]]) -> None:
    """Counts the sub-folders of safetensors attempts as part of their checkpoint."""
    for directory, names in list(directories.items()):
        if directory and any(PART_NAME.match(name) for name in names):
            parent, _, attempt = directory.rpartition("/")
            files = directories.pop(directory)
            directories.setdefault(parent, {}).update(
                {f"{attempt}/{name}": num_bytes for name, num_bytes in files.items()}
            )


def folders_above(path: str) -> Iterator[str]:
    """Yields the directories that a path lies in, the deepest first, without the root."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _look(
    storage: Storage,
    root: AnyPlace,
    directory: str,
    files: Mapping[str, int],
    shared: _Shared,
    *,
    is_item: bool,
) -> ListedCheckpoint:
    name = directory or storage.url.rstrip("/").rpartition("/")[2]
    slot, found, files = _found(storage, root, directory, files)
    manifest, detail = found.manifest, found.detail
    info, row = None, shared.rows.get(directory)
    if manifest is not None and row is not None and row.attempt == manifest.attempt:
        info = row.info
    elif manifest is not None:
        try:
            info = info_below(storage, directory, map(info_slot, files), slot)
        except DamagedCheckpointError as error:
            told = f"its metrics and items are not known: {error.message}"
            detail = f"{detail}; {told}" if detail else told
    step = None if is_item else step_of(name)
    # Why: what is nested deeper, or the root itself, is no step of this run.
    own = step is not None and bool(directory) and "/" not in directory
    listed = ListedCheckpoint(
        name=directory or ".",
        step=step,
        state=found.state,
        num_bytes=sum(files.values()),
        num_ranks=manifest.world_size if manifest else num_ranks(files),
        created_s=manifest.created_s if manifest else None,
        detail=detail,
        in_flight=found.in_flight,
        tags=shared.tags.get(step or 0, ()) if own else (),
        note=shared.notes.get(step or 0, "") if own else "",
        manifest=manifest,
    )
    if info is None:
        return listed
    return replace(listed, metrics=info.metrics, metadata=info.metadata, items=info.items)


def num_ranks(files: Iterable[str]) -> int | None:
    """Returns how many ranks wrote some data files, by their names; None if these have no rank."""
    ranks = {rank for key in files if (rank := rank_of_file(key)) is not None}
    return len(ranks) or None


def _found(
    storage: Storage, root: AnyPlace, directory: str, files: Mapping[str, int]
) -> tuple[int, StateFound, Mapping[str, int]]:
    """Returns the slot of what is committed, what there is to show, and the files there."""
    last = max((slot for key in files if (slot := slot_of(key))), default=0)
    if last:
        highest = highest_record(storage, directory, last)
        if highest is not None:
            found = folder_state(files, Slots((last,), {last: highest}, {last: b""}))
            if found.state in ("committed", "deleted"):
                return last, found, files
    else:
        found = folder_state(files, Slots())
        if found.state in FOREIGN:
            return 0, found, files
    # Why again: a listing that began before a save or a delete was committed may show neither
    # what that wrote nor all of what it has removed since.
    return _found_now(open_storage(place_below(root, directory)) if directory else storage)


def _found_now(storage: Storage) -> tuple[int, StateFound, Mapping[str, int]]:
    """Returns the same, of records and files that belong together.

    Files of a commit are there before its record, and go after that of the next one. So they are
    listed after the record was read, and what they lack is damage if that record still decides.
    """
    slots: Slots | None = None
    for _ in range(_MOST_LOOKS):
        before = slots
        try:
            slots = read_slots(storage)
        except DamagedCheckpointError as error:
            return 0, StateFound("damaged", error.message), _files_in(storage)
        except StorageError:
            raise
        except CheckpointError as error:
            # Why not damaged: a newer ray_dcp wrote it.
            return 0, StateFound("unreadable", error.message), _files_in(storage)
        if before is not None and before.decides == slots.decides:
            break
        files = _files_in(storage)
        found = folder_state(files, slots)
        if found.state in ("committed", "deleted"):
            break
    return (slots.decides.slot if slots and slots.decides else 0), found, files


def _files_in(storage: Storage) -> dict[str, int]:
    """Returns the lengths of the files of a checkpoint, without those of folders in it."""
    return {
        one.key: one.num_bytes
        for one in storage.list()
        if "/" not in one.key
        or (one.key.count("/") == 1 and PART_NAME.match(one.key.rpartition("/")[2]))
    }
