"""Lists the checkpoints of runs by names, lengths of files, small records.

`list_checkpoints` returns every checkpoint at or below a directory with its state. `folder_state`
is pure: it derives the state of a folder from the names and lengths of its files and from its
records. `verify` checks the bytes.

`list_run` returns the step folders of a run by their names alone, newest first. Whether a folder
contains a checkpoint is found out by the load that tries it. `read_trace` reads the trace that a
save wrote beside its checkpoint.
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
from ray_dcp.core.processes import collector_paused, run_tasks
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import Manifest, slot_of
from ray_dcp.format.names import SHARED_FOLDER
from ray_dcp.format.save_trace import MAX_TRACE_BYTES, SaveTrace, decode_trace, trace_key
from ray_dcp.format.step_info import CatalogueRow, info_slot
from ray_dcp.format.verdicts import verdict_in
from ray_dcp.io.checkpoint import METADATA_KEY, Checkpoint
from ray_dcp.io.records import Slots, highest_record, info_below, read_info, read_slots
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, place_below
from ray_dcp.store.storage import NETWORK_DISK, Entry, Storage, read_if_there, read_traits_of
from ray_dcp.view.shared_files import SharedFiles, read_catalogue_rows, read_notes

T = TypeVar("T")

MARKED = "marked as damaged; ray-dcp verify --mark looks again"
"""Detail of a step that has a damage mark."""
_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})", re.DOTALL)
_MOST_SHOWN = 8


@dataclass(frozen=True)
class ListedStep:
    """A folder of a run that contains a checkpoint, or files of a save."""

    name: str
    """Name of the folder, which is directly in the run."""
    step: int
    """Number at the end of the name."""


@dataclass(frozen=True)
class ListedRun:
    """The content of a directory of checkpoints."""

    url: str
    """Absolute path or URL."""
    steps: tuple[ListedStep, ...]
    """The steps, newest first; of equal steps, in descending order of names."""
    others: tuple[str, ...] = ()
    """Other files and folders directly in the directory; folders end with `/`."""
    is_checkpoint: bool = False
    """The directory itself is a checkpoint, or has files of a save."""

    def checkpoint_id(self, name: str) -> str:
        """Returns the path or URL of a folder of the run."""
        return f"{self.url.rstrip('/')}/{name}"

    def in_words(self) -> str:
        """Returns the content as text, for messages."""
        names = [f"{folder.name}/" for folder in self.steps] + list(self.others)
        if not names:
            return "nothing"
        more = f", … ({len(names)} in all)" if len(names) > _MOST_SHOWN else ""
        return ", ".join(names[:_MOST_SHOWN]) + more


def step_of(name: str) -> int | None:
    """Returns the number at the end of the name of a folder; None if there is none.

    Args:
        name: Name or path, without slashes at the end.

    Examples:
        >>> step_of("step-000120"), step_of("epoch=3-step=70"), step_of("final")
        (120, 70, None)
    """
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def _has_number(name: str, step: int) -> bool:
    """Returns whether the number of a step is in the name of a folder, as in those of managers.

    They may have text after it. A copy of a step has its info, but any name.

    Examples:
        >>> _has_number("runs/500.ckpt", 500), _has_number("best", 500)
        (True, False)
    """
    return step in map(int, re.findall(r"\d+", name.rpartition("/")[2]))


def list_run(run: AnyPlace) -> ListedRun:
    """Returns the step folders of a run.

    A step folder is directly in the run, has a name that ends with a number, and contains files of
    a checkpoint directly. Folders below it are not searched.

    Args:
        run: Path or URL.

    Returns:
        A run without steps if there are none, or if the directory does not exist.

    Raises:
        InvalidRequestError: `run` is not a path or URL that can be listed.
        StorageError: The storage can't be listed.

    Complexity:
        One listing of all files at and below the run. No file is read.
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
    others = [*sorted(others), *sorted(files)]
    return ListedRun(storage.url, tuple(steps), tuple(others), _is_checkpoint(files))


def folders_in(storage: Storage) -> dict[str, list[str]]:
    """Returns the keys of the files of each folder, relative to it; "" has files without a folder.

    Raises:
        StorageError: The storage can't be listed.
    """
    folders: dict[str, list[str]] = {}
    for entry in storage.list():
        name, slash, rest = entry.key.partition("/")
        folders.setdefault(name if slash else "", []).append(rest if slash else name)
    return folders


def _is_checkpoint(keys: Iterable[str]) -> bool:
    """Returns whether the names of files are those of a checkpoint, or of an unfinished save."""
    return any(
        key == METADATA_KEY
        or slot_of(key) is not None
        or ("/" not in key and key.endswith((".distcp", ".safetensors")))
        for key in keys
    )


OUR_FILE = re.compile(r"__\d+_\d+\..+\.distcp")
"""Data files that ray_dcp writes."""
STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")
"""Data files that stock DCP writes."""

_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.(?:.+\.)?distcp")


def rank_of_file(key: str) -> int | None:
    """Returns the rank in the name of a data file of ray_dcp or stock DCP; None if it has none.

    Args:
        key: Key of the file.

    Examples:
        >>> rank_of_file("__12_0.distcp"), rank_of_file("model.safetensors")
        (12, None)
    """
    match = _RANK.fullmatch(key)
    return int(match[1]) if match else None


def num_ranks(files: Iterable[str]) -> int | None:
    """Returns the number of ranks in the names of data files; None if the names have no ranks."""
    ranks = {rank for key in files if (rank := rank_of_file(key)) is not None}
    return len(ranks) or None


State = Literal[
    "committed", "in flight", "aborted", "damaged", "stock", "safetensors", "deleted", "unreadable"
]

FOREIGN: tuple[State, ...] = ("stock", "safetensors")
"""States of checkpoints of other programs, which ray_dcp reads and never deletes."""


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
        files: Lengths of its files, by key.
        slots: Its deciding records.
    """
    decides = None if slots.decides is None else slots.decides.record
    known = {record.attempt for record in slots.records.values()}
    known |= {vote.attempt for vote in decides.decided} if decides is not None else set()
    pending = tuple(sorted(attempts_of(files) - known))
    if isinstance(decides, Manifest):
        wrong = _find_wrong_files(files, decides)
        state: State = "damaged" if wrong else "committed"
        return StateFound(state, "; ".join(wrong), decides, pending)
    # Why by name: reading the `.metadata` of a large checkpoint takes seconds.
    ours = any(OUR_FILE.fullmatch(key) for key in files)
    theirs = any(STOCK_FILE.fullmatch(key) for key in files)
    if METADATA_KEY in files and (theirs or not ours):
        return StateFound("stock", in_flight=pending)
    is_unfinished = bool(pending) or theirs or (ours and not slots.used)
    if not is_unfinished and not ours and any(key.endswith(".safetensors") for key in files):
        return StateFound("safetensors")
    if decides is not None and pending:
        return StateFound("in flight", "it was deleted, and is being saved again", None, pending)
    if decides is not None:
        return StateFound("deleted", "files are left: ray_dcp.collect removes them" if ours else "")
    if is_unfinished:
        missing = METADATA_KEY if theirs and not ours else "manifest"
        return StateFound("in flight", f"it has no {missing}", None, pending)
    return StateFound("aborted", "it has records of saves, but none of a commit")


def wrong_lengths(storage: Storage, checkpoint: Checkpoint) -> list[str]:
    """Returns a text for each file of an opened checkpoint that is missing or too short.

    Args:
        storage: Storage of the checkpoint. It is listed; no file is read.
        checkpoint: The opened checkpoint.

    Raises:
        StorageError: The storage can't be listed.
    """
    files = {entry.key: entry.num_bytes for entry in storage.list()}
    if checkpoint.manifest is not None:
        return _find_wrong_files(files, checkpoint.manifest)
    return [
        f"{key} has {files[key]} bytes, and needs {end}" if key in files else f"{key} is missing"
        for key, end in needed_lengths(checkpoint.table).items()
        if files.get(key, -1) < end
    ]


def needed_lengths(table: ChunkTable) -> dict[str, int]:
    """Returns the length that each file has at least, by the places of what it holds."""
    ends = np.zeros(len(table.files), np.int64)
    np.maximum.at(ends, table.file, table.item_offset + table.item_bytes)
    return dict(zip(table.files, ends.tolist(), strict=True))


def _find_wrong_files(files: Mapping[str, int], manifest: Manifest) -> list[str]:
    return [
        f"{entry.key} has {files[entry.key]} bytes instead of {entry.num_bytes}"
        if entry.key in files
        else f"{entry.key} is missing"
        for entry in (*manifest.files, manifest.table)
        if files.get(entry.key) != entry.num_bytes
    ]


_MOST_LOOKS = 20
"""How often a folder is read again. Each retry means that a save or delete intervened."""
_MOST_THREADS = 32
"""Number of folders of a remote storage that are read concurrently; each takes a round trip or
two."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A directory that contains a checkpoint, or files of a save."""

    name: str
    """Path relative to the root that was listed; `.` for the root itself."""
    step: int | None
    """Number at the end of the name; None if there is none."""
    state: State
    """`committed`. `in flight`: files of a save that may still commit, or that crashed. `aborted`:
    only records of saves that failed. `damaged`: committed, but files are missing, have the wrong
    length or can't be read. `stock`, `safetensors`: written by another program. `deleted`: by
    `ray_dcp.delete`. `unreadable`: the storage failed, or a newer ray_dcp wrote it."""
    num_bytes: int
    """Number of bytes of all files in the directory, including those that no commit refers to."""
    num_ranks: int | None
    """Number of ranks that saved it; None if unknown."""
    created_s: float | None
    """Time of the save by the coordinator's clock, in seconds since 1970; None if unknown."""
    detail: str = ""
    """Description of what is damaged or missing."""
    in_flight: tuple[str, ...] = ()
    """Ids of attempts that have files here and that no record decides. Beside a committed
    checkpoint, they are saves that would replace it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics passed to a `CheckpointManager`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the user, passed to a `CheckpointManager`."""
    tags: tuple[str, ...] = ()
    """Tags, sorted."""
    note: str = ""
    is_marked_damaged: bool = False
    """Whether a process has recorded that it found the step damaged; `detail` says it, too. The
    step can be loaded all the same, as each load verifies."""
    items: Mapping[str, str] = field(default_factory=dict)
    """Folder of each named item of the step, relative to the step; empty for a step with a single
    state."""
    manifest: Manifest | None = field(default=None, repr=False)
    """The valid manifest; None if ray_dcp has committed none."""
    run: str = ""
    """Folder of its run, relative to the root; empty for the root. An item of a step is in the run
    of the step."""
    trust: str = ""
    """Name by which its run trusts steps; empty if none is recorded."""
    is_item: bool = False
    """Whether it is an item of a step, or a part of a job's step, and no step itself."""

    @property
    def is_trusted(self) -> bool | None:
        """Whether it is trusted, by the name that the run has; None without a verdict or a name."""
        return verdict_in(self.trust, self.metrics, self.tags) if self.trust else None

    @property
    def is_readable(self) -> bool:
        """Whether it can be loaded, judged by the names and lengths of its files."""
        return self.state in ("committed", *FOREIGN)


@dataclass(frozen=True)
class _RunFiles:
    """What the folder `.manager` of a run has about its steps."""

    shared: SharedFiles = field(default_factory=SharedFiles)
    notes: Mapping[int, str] = field(default_factory=dict)
    rows: Mapping[str, CatalogueRow] = field(default_factory=dict)
    """Rows of the catalogue file, by folder."""


def list_checkpoints(
    root: AnyPlace, *, told: Callable[[int, int], object] | None = None
) -> tuple[ListedCheckpoint, ...]:
    """Returns every checkpoint at or below a directory, sorted by run, step and name.

    Args:
        root: Path, URL, `Location` or filesystem.
        told: Called with the number of folders that were read and of all folders, from any thread.

    Returns:
        An empty tuple if there are none, or if the directory does not exist.

    Raises:
        StorageError: The storage can't be listed.

    Complexity:
        One listing, and one or two small reads for each checkpoint; 32 at a time on remote storage.
    """
    storage = open_storage(root)
    with collector_paused():
        directories: dict[str, dict[str, int]] = {}
        entries, refused = readable_entries(storage)
        found = [_unreadable(name, "", why) for name, why in refused.items()]
        for entry in entries:
            directory, _, name = entry.key.rpartition("/")
            directories.setdefault(directory, {})[name] = entry.num_bytes
        shared = _read_shared(storage, directories)
        checkpoints = {name for name, files in directories.items() if _is_checkpoint(files)}
        # Why: of a step whose items alone are durable, nothing but its info is there.
        above = {name.rpartition("/")[0] for name in checkpoints if name}
        checkpoints |= {
            name
            for name in above.intersection(directories)
            if any(info_slot(key) is not None for key in directories[name])
        }
        todo = [item for item in directories.items() if item[0] in checkpoints]
        checkpoints.discard("")

        def look(item: tuple[str, dict[str, int]]) -> None:
            # Why: a folder in a checkpoint is an item of a step, even if its name ends in a number.
            steps = [above for above in folders_above(item[0]) if above in checkpoints]
            run = (steps[-1] if steps else item[0]).rpartition("/")[0]
            files = shared.get(run, _RunFiles())
            try:
                found.append(_list_one(storage, root, *item, files, run, is_item=bool(steps)))
            except StorageError as error:
                found.append(_unreadable(item[0], run, error.message, sum(item[1].values())))
            if told is not None:
                told(len(found), len(todo))

        look_into(storage, todo, look)
        found = _with_items(found, storage, root, directories)
        found.sort(key=lambda item: (item.run, item.step is None, item.step or 0, item.name))
    return tuple(found)


def _with_items(
    found: Sequence[ListedCheckpoint],
    storage: Storage,
    root: AnyPlace,
    directories: Mapping[str, Mapping[str, int]],
) -> list[ListedCheckpoint]:
    """Returns checkpoints with what steps of items and their items are by each other.

    An item stands if its step does, and a step if all its items do.
    """
    by_name = {one.name: one for one in found}
    below: dict[str, list[str]] = {}
    for name in by_name:
        if name != ".":
            below.setdefault(name.rpartition("/")[0] or ".", []).append(name)
    for step in found:
        folder = "" if step.name == "." else f"{step.name}/"
        inside = below.get(step.name, ())
        is_committed = step.manifest is not None
        items, is_begun = step.items, False
        if not is_committed and inside:
            files = directories.get(folder.rstrip("/"), {})
            items, is_begun = _items_begun(storage, step, files)
        if not items:
            for name in inside:
                if step.state == by_name[name].state == "deleted":
                    by_name[name] = replace(by_name[name], is_item=True)
            continue
        its = {f"{folder}{one}": name for name, one in items.items()}
        if step.state == "committed":
            named = {item: by_name.get(name) for name, item in its.items()}
            by_name[step.name] = _judged(step, named, root)
        for name in inside:
            one = by_name[name]
            base, _, number = name.removeprefix(folder).partition(".")
            # Why a number: any other folder belongs to the user, whatever it contains.
            is_named = base in items and (not number or number.isdecimal())
            if name in its and is_committed:
                by_name[name] = replace(one, is_item=True)
            elif is_named and one.state == "committed":
                by_name[name] = replace(
                    one, is_item=True, state="in flight", detail="its step is not committed"
                )
            elif is_named:
                by_name[name] = replace(one, is_item=True)
        there = (by_name[name] for name in inside)
        left = [
            one.name.rpartition("/")[2] for one in there if one.is_item and one.state != "deleted"
        ]
        if is_committed or step.state not in ("aborted", "deleted") or not left:
            continue
        if step.state == "deleted" and not is_begun:
            told = f"parts of it are left: {', '.join(left)}; ray-dcp gc deletes them"
            by_name[step.name] = replace(step, detail=told, items=items)
            continue
        told = f"parts are there, and no record of the step: {', '.join(left)}"
        by_name[step.name] = replace(step, state="in flight", detail=told, items=items)
    return [*by_name.values()]


def _items_begun(
    storage: Storage, step: ListedCheckpoint, files: Mapping[str, int]
) -> tuple[Mapping[str, str], bool]:
    """Returns the items of the last save that was begun of a step which is not committed.

    Also whether it was begun after the last record of the step.
    """
    last = max((slot for key in files if (slot := info_slot(key)) is not None), default=None)
    if last is None:
        return {}, False
    is_begun = last >= max((slot_of(key) or 0 for key in files), default=0)
    # Suppressed: what they are is not known, and they are told as checkpoints of their own.
    with suppress(DamagedCheckpointError):
        info = read_info(storage, "" if step.name == "." else step.name, last)
        return ({} if info is None else info.items), is_begun
    return {}, False


def _judged(
    step: ListedCheckpoint, items: Mapping[str, ListedCheckpoint | None], root: AnyPlace
) -> ListedCheckpoint:
    """Returns a committed step, as damaged if one of its items is."""
    place = place_below(root, step.name) if step.name != "." else root
    wrong = []
    for name, one in items.items():
        state: State = "deleted" if one is None else one.state
        detail = "" if one is None else one.detail
        if one is None or not one.is_readable:
            # Why again: the listing may have begun before the step was committed.
            _, now, _ = _found_now(open_storage(place_below(place, step.items[name])))
            state, detail = now.state, now.detail
        if state != "committed":
            missing = state in ("deleted", "aborted")
            wrong.append(f"{name}: {'missing' if missing else detail or state}")
    if not wrong:
        return step
    # Why again: the items of a step go after it.
    _, now, _ = _found_now(open_storage(place))
    if now.manifest is None or step.manifest is None:
        return replace(step, state=now.state, detail=now.detail, manifest=now.manifest)
    if now.manifest.attempt != step.manifest.attempt:
        return step
    told = "; ".join([step.detail] * bool(step.detail) + wrong)
    return replace(step, state="damaged", detail=told)


Listed = TypeVar("Listed", bound=ListedCheckpoint)


def committed_steps(listed: Iterable[Listed]) -> list[Listed]:
    """Returns the checkpoints of a run that were committed, without the items of steps.

    Those that are damaged or can't be read count.
    """
    shown = [one for one in listed if one.is_readable or one.state in ("damaged", "unreadable")]
    names = {one.name for one in shown}
    return [one for one in shown if one.name.rpartition("/")[0] not in names]


def look_into(storage: Storage, todo: Sequence[T], look: Callable[[T], object]) -> None:
    """Calls `look` for each folder, for up to 32 folders at a time on storage with high latency.

    Args:
        storage: Storage of the folders.
        todo: The folders.
        look: Reads one folder.
    """
    # Why only there: a local file is read in less time than it takes to switch threads.
    is_remote = read_traits_of(storage).request_s >= NETWORK_DISK.request_s
    run_tasks(todo, look, min(_MOST_THREADS, len(todo)) if is_remote else 1)


def readable_entries(storage: Storage) -> tuple[list[Entry], dict[str, str]]:
    """Returns the entries of a storage, and an error message for each local folder it can't list.

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


def _unreadable(directory: str, run: str, why: str, num_bytes: int = 0) -> ListedCheckpoint:
    name, step = directory or ".", step_of(directory)
    return ListedCheckpoint(name, step, "unreadable", num_bytes, None, None, why, run=run)


def _read_shared(storage: Storage, directories: dict[str, dict[str, int]]) -> dict[str, _RunFiles]:
    """Removes the folder `.manager` of each run from a listing; returns its content, by run."""
    keys: dict[str, list[str]] = {}
    for directory in list(directories):
        run, shared, below = f"/{directory}/".partition(f"/{SHARED_FOLDER}/")
        if shared:
            names = directories.pop(directory)
            keys.setdefault(run.lstrip("/"), []).extend(below + name for name in names)
    found = {}
    for run, some in keys.items():
        folder = f"{run}/{SHARED_FOLDER}/" if run else f"{SHARED_FOLDER}/"
        notes = read_notes(storage, folder, some)
        rows = read_catalogue_rows(storage, folder, some)
        found[run] = _RunFiles(SharedFiles.of(some), notes, rows)
    return found


def folders_above(path: str) -> Iterator[str]:
    """Yields the directories that contain a path, the deepest first, without the root."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _list_one(
    storage: Storage,
    root: AnyPlace,
    directory: str,
    files: Mapping[str, int],
    of_run: _RunFiles,
    run: str,
    *,
    is_item: bool,
) -> ListedCheckpoint:
    name = directory or storage.url.rstrip("/").rpartition("/")[2]
    name_in_run = directory.removeprefix(f"{run}/")
    slot, found, files = _read_state(storage, root, directory, files)
    manifest, detail = found.manifest, found.detail
    shared, info, row = of_run.shared, None, of_run.rows.get(name_in_run)
    if manifest is not None and row is not None and row.attempt == manifest.attempt:
        info = row.info
    elif manifest is not None:
        try:
            info = info_below(storage, directory, map(info_slot, files), slot)
        except DamagedCheckpointError as error:
            unknown = f"its metrics and items are not known: {error.message}"
            detail = f"{detail}; {unknown}" if detail else unknown
    step = None if is_item else step_of(name)
    if step is None and info is not None and _has_number(name, info.step):
        step = info.step
    # Why: tags and notes are for steps directly in the run.
    number = step if name_in_run and "/" not in name_in_run else None
    attempt = manifest.attempt if manifest else ""
    recorded = {} if number is None else shared.recorded.get((number, attempt), {})
    is_marked = number is not None and (number, attempt) in shared.marks
    if is_marked:
        detail = f"{detail}; {MARKED}" if detail else MARKED
    own: dict[str, Mapping[str, Any]] = {"metrics": recorded}
    if info is not None:
        metrics = {**info.metrics, **recorded}
        own = {"metrics": metrics, "metadata": info.metadata, "items": info.items}
    return ListedCheckpoint(
        name=directory or ".",
        step=step,
        state=found.state,
        num_bytes=sum(files.values()),
        num_ranks=manifest.world_size if manifest else num_ranks(files),
        created_s=manifest.created_s if manifest else None,
        detail=detail,
        in_flight=found.in_flight,
        tags=() if number is None else tuple(sorted(shared.tags.get(number, ()))),
        note="" if number is None else of_run.notes.get(number, ""),
        is_marked_damaged=is_marked,
        manifest=manifest,
        run=run,
        trust=shared.trust,
        is_item=False,  # `_with_items` finds that out.
        **own,
    )


def _read_state(
    storage: Storage, root: AnyPlace, directory: str, files: Mapping[str, int]
) -> tuple[int, StateFound, Mapping[str, int]]:
    """Returns the slot of the deciding record, the state, and the files of a directory."""
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
    # Why again: a listing that began before a commit or delete may lack files that were written,
    # and contain files that have been removed since.
    return _found_now(open_storage(place_below(root, directory)) if directory else storage)


def _found_now(storage: Storage) -> tuple[int, StateFound, Mapping[str, int]]:
    """Returns what `_read_state` does, from a record and a listing that are consistent.

    The files of a commit exist before its record, and are removed after the next record. Files are
    therefore listed after the record was read; missing files are damage if the record still
    decides.
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
    entries = storage.list()
    return {e.key: e.num_bytes for e in entries if "/" not in e.key}


def read_trace(storage: Storage, attempt: str | None) -> SaveTrace | None:
    """Returns the trace of an attempt; None if there is none.

    Args:
        storage: Storage of the checkpoint.
        attempt: Id of the committed attempt; None for a checkpoint of another program.

    Raises:
        DamagedCheckpointError: The trace is damaged. The checkpoint does not need it.
        StorageError: The trace can't be read.
    """
    if attempt is None:
        return None
    key = trace_key(attempt)
    data = read_if_there(storage, key, MAX_TRACE_BYTES + 1)
    if data is None:
        return None
    found = decode_trace(data, key=key)
    if found.attempt != attempt:
        raise DamagedCheckpointError(
            f"expected the trace of attempt {attempt}, found that of {found.attempt}", key=key
        )
    return found
