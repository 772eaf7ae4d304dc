"""Verifies every file of a checkpoint; reports the bytes that are not those that were written.

In checkpoints of ray_dcp, every byte is verified: payloads have checksums, frames and headers
follow from the chunk table, and all other bytes are zero.

**Items of stock DCP** only have the CRC32 values of their zip records. `check_stock_item` compares
each record with its CRC32. The CRC32 does not cover the record's name, which a zip file contains
twice; the names are therefore compared with those that torch writes. Nothing is unpickled.

**Files without chunks** (`.metadata`, records, headers and indices of safetensors files) do not
affect a load, which uses the newest record and the chunk table, or the data files themselves. Other
programs read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.damage import DAMAGE
from ray_dcp.core.processes import Stop, run_tasks
from ray_dcp.core.quantities import size_text
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    StorageError,
)
from ray_dcp.format.job_parts import KEY
from ray_dcp.format.manifest import MAX_RECORD_BYTES, Manifest, decode_record, slot_of
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.format.safe_pickle import MAX_PICKLE_BYTES
from ray_dcp.format.save_trace import trace_key
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.checkpoint import Checkpoint, is_ours, projects, read_checkpoint, what_became_of
from ray_dcp.io.records import info_below
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target, open_storage, place_below
from ray_dcp.store.storage import Storage, read_if_there
from ray_dcp.view.file_check import FileCheck, Problem, rows_by_file
from ray_dcp.view.progress import Meter, ShowProgress, reporting, uncounted
from ray_dcp.view.run_listing import committed_steps, list_checkpoints, read_trace
from ray_dcp.view.wording import few

_NUM_THREADS = 4
_MOST_TOLD = 3


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Result of `verify`."""

    checked_bytes: int
    """Number of bytes that were compared with a checksum or with known content."""
    problems: tuple[Problem, ...]
    """All damage, ordered by file and byte."""
    notes: tuple[str, ...] = ()
    """What could not be checked, and harmless irregularities."""
    unread: tuple[Problem, ...] = ()
    """What the storage could not read, even when asked again. It may be intact or damaged."""

    @property
    def ok(self) -> bool:
        """Whether everything could be read, and no damage was found."""
        return not self.problems and not self.unread

    def __repr__(self) -> str:
        told = [f"damaged: {one}" for one in self.problems]
        told += [f"unread: {one}" for one in self.unread]
        return (
            f"VerifyReport({'; '.join(told[:_MOST_TOLD]) or 'ok'}"
            f"{f'; … ({len(told)} in all)' if len(told) > _MOST_TOLD else ''}, "
            f"{size_text(self.checked_bytes)} checked)"
        )


class VerifyInterrupted(KeyboardInterrupt):
    """A verification was interrupted; `report` has the results until then."""

    def __init__(self, report: VerifyReport) -> None:
        super().__init__("verify was interrupted")
        self.report = report


Reports = list["VerifyReport | FileCheck"]
Seen = dict[object, "FileCheck"]
"""Checks of files that other files share, by what both are on the disk and should hold."""

_MOST_LOOKS = 20
"""How often a verification is repeated because the checkpoint was replaced meanwhile."""


def verify(path: AnyPlace, *, progress: ShowProgress = False) -> VerifyReport:
    """Returns the damaged bytes of the checkpoint at a path, or of all steps of a run.

    Items of a step count. Files of a run have the names of their steps before theirs; a file that
    several steps share is read once.

    Damage is reported and not raised, even if the checkpoint can't be opened. A file that seems
    damaged is read again before it is reported. If another save replaces the checkpoint meanwhile,
    the new checkpoint is verified.

    Args:
        path: Path or URL of the checkpoint, or of a directory of checkpoints.
        progress: Whether to draw a bar; or a function that receives a `Progress` about ten times a
            second.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        UncommittedCheckpointError: There are files of a save that never committed.
        UnsupportedValueError: A safetensors file has an unsupported dtype.
        StorageError: The storage can't be listed, a record or the chunk table can't be read, or
            other saves kept replacing the checkpoint.
        VerifyInterrupted: `KeyboardInterrupt` with the results until then.

    Complexity:
        Reads every data file once, a few at a time, with 8 MiB of memory for each.
    """
    seen: Seen = {}
    with reporting(progress, "verifying", as_target(path).url) as meter:
        try:
            return _run_to_report(lambda found: _verify(path, found, meter, seen))
        # Why StorageError: what lies beside the steps of a run may be unreadable.
        except (CheckpointNotFoundError, StorageError):
            # Suppressed: then the error of the path itself is raised.
            with suppress(StorageError):
                steps = committed_steps(list_checkpoints(path))
                folders = [one.name for one in steps if one.name != "."]
                if folders:
                    return _run_to_report(
                        lambda found: _verify_all(path, folders, found, meter, seen, may_go=True)
                    )
            raise


def verify_unseen(path: AnyPlace, seen: Seen, *, progress: ShowProgress = False) -> VerifyReport:
    """Returns what `verify` does, without reading again what earlier calls have read.

    The damage of a file that several steps share is reported for each of them; its bytes count as
    checked in the first.

    Args:
        path: As for `verify`.
        seen: Checks of earlier calls, such as those for other steps of a run; this one's are added.
        progress: As for `verify`.

    Raises:
        CheckpointError: As `verify` does.
    """
    with reporting(progress, "verifying", as_target(path).url) as meter:
        return _run_to_report(lambda found: _verify(path, found, meter, seen))


def verify_opened(
    storage: Storage,
    checkpoint: Checkpoint,
    path: AnyPlace | None = None,
    *,
    progress: ShowProgress = False,
) -> VerifyReport:
    """Returns the damaged bytes of an opened checkpoint, and of the items of a step.

    Args:
        storage: Storage of the checkpoint.
        checkpoint: The opened checkpoint.
        path: Location of the checkpoint; None if unknown: items are then left out.
        progress: As for `verify`.

    Raises:
        StorageError: The storage can't be listed or read.
        VerifyInterrupted: As for `verify`.
    """
    with reporting(progress, "verifying", storage.url) as meter:
        return _run_to_report(
            lambda found: _verify_opened(storage, checkpoint, path, found, meter, {})
        )


def _run_to_report(work: Callable[[Reports], None]) -> VerifyReport:
    """Returns what `work` appends to a list; raises it in a `VerifyInterrupted` after Ctrl-C."""
    found: Reports = []
    try:
        work(found)
    except KeyboardInterrupt as error:
        raise VerifyInterrupted(_join_reports(found)) from error
    return _join_reports(found)


def _join_reports(reports: Iterable[VerifyReport | FileCheck]) -> VerifyReport:
    """Returns one report of several, without repeated notes."""
    reports = list(reports)
    return VerifyReport(
        sum(report.checked_bytes for report in reports),
        tuple(problem for report in reports for problem in report.problems),
        tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        tuple(one for report in reports for one in report.unread),
    )


def _verify(path: AnyPlace, found: Reports, meter: Meter, seen: Seen) -> None:
    storage = open_storage(path)
    became: CheckpointError | None = None
    for _ in range(_MOST_LOOKS):
        found.clear()
        try:
            checkpoint = read_checkpoint(storage, checkpoint_id=storage.url, checks_later=True)
        except DamagedCheckpointError as error:
            DAMAGE.add(storage.url)
            found.append(VerifyReport(0, (_open_problem(storage, error),)))
            return
        _verify_opened(storage, checkpoint, path, found, meter, seen)
        if _join_reports(found).ok:
            return
        became = what_became_of(storage, checkpoint)
        if became is None or isinstance(became, CheckpointNotFoundError):
            break
    if became is not None:
        found.clear()
        raise became


def _verify_opened(
    storage: Storage,
    checkpoint: Checkpoint,
    path: AnyPlace | None,
    found: Reports,
    meter: Meter,
    seen: Seen,
) -> None:
    _check_files(storage, checkpoint, found, meter, seen)
    if _join_reports(found).problems:
        # Why: a save of this process could link to files of this checkpoint.
        DAMAGE.add(storage.url)
    try:
        folders = () if path is None else items_of(storage, checkpoint)
    except DamagedCheckpointError as error:
        folders = ()
        found.append(VerifyReport(0, (Problem(error.key or "", None, 0, 0, error.message),)))
    _verify_all(path or "", folders, found, meter, seen)


def _verify_all(
    path: AnyPlace,
    folders: Iterable[str],
    found: Reports,
    meter: Meter,
    seen: Seen,
    *,
    may_go: bool = False,
) -> None:
    """Verifies several checkpoints below a path: items of a step, or steps of a run.

    Args:
        path: Where they lie.
        folders: Their names.
        found: Reports to add to.
        meter: Counts what is read.
        seen: Checks of files that were read before.
        may_go: Whether each may be deleted meanwhile, as a step by its retention.
    """
    for folder in folders:
        own: Reports = []
        try:
            _verify(place_below(path, folder), own, meter, seen)
        except (CheckpointNotFoundError, StorageError) as error:
            what = (Problem(folder, None, 0, 0, error.message),)
            if isinstance(error, StorageError):
                found.append(VerifyReport(0, (), (), what))
            elif may_go:
                found.append(VerifyReport(0, (), (f"{folder} was deleted meanwhile",)))
            else:
                found.append(VerifyReport(0, what))
        finally:
            found.append(_in_folder(folder, _join_reports(own)))


def _in_folder(folder: str, report: VerifyReport) -> VerifyReport:
    problems, unread = (
        tuple(replace(one, file=f"{folder}/{one.file}") for one in some)
        for some in (report.problems, report.unread)
    )
    return replace(report, problems=problems, unread=unread)


def items_of(storage: Storage, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the folders of the items of a step; see `named_items`."""
    return tuple(named_items(storage, checkpoint).values())


def named_items(storage: Storage, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Returns the folder of each item of a step of a `CheckpointManager`, or part of a job's step.

    Args:
        storage: Storage of the step.
        checkpoint: The checkpoint of the step itself.

    Returns:
        An empty mapping for a step with a single state, and for a checkpoint that is not a step.

    Raises:
        DamagedCheckpointError: The info of the step is damaged.
        StorageError: The storage can't be read.
    """
    if checkpoint.manifest is None:
        return {}
    slots = [info_slot(entry.key) for entry in storage.list("step-info-")]
    info = info_below(storage, "", slots, checkpoint.slot)
    return {} if info is None else info.items


def items_instead(storage: Storage, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the folders of the items of a step that has no state of its own beside them.

    The checkpoint of such a step has only their names; that of a step of a Ray Train run, whose
    workers save parts with their state, is that state.

    Raises:
        CheckpointError: As `named_items`.
    """
    return items_of(storage, checkpoint) if has_names_alone(checkpoint) else ()


def has_names_alone(checkpoint: Checkpoint) -> bool:
    """Returns whether a checkpoint is that of a step which only names its items."""
    names = checkpoint.table.names
    return all(name in ("step", KEY) or name.startswith("items.") for name in names)


def _open_problem(storage: Storage, error: DamagedCheckpointError) -> Problem:
    """Returns the error that prevents opening a checkpoint, as a problem of a whole file."""
    found = {entry.key: entry.num_bytes for entry in storage.list()}
    # Why not only `key`: it may be a name that the damaged file contains.
    named = (key for key in found if key in error.message)
    key = error.key if error.key in found else next(named, error.key or "")
    return Problem(key, None, 0, found.get(key, 0), error.message)


def _check_files(
    storage: Storage, checkpoint: Checkpoint, found: Reports, meter: Meter, seen: Seen
) -> None:
    """Checks all files of a checkpoint, and appends a report of each data file and of the others.

    After an error, the reports of the files that are done have been appended.
    """
    entries = storage.list()
    sizes = {entry.key: entry.num_bytes for entry in entries}
    shares = {entry.key: entry.shares for entry in entries if entry.shares is not None}
    manifest, table, ends_of = checkpoint.manifest, checkpoint.table, checkpoint.check_file
    expected = {} if manifest is None else {e.key: e.num_bytes for e in manifest.files}
    rows = rows_by_file(table)
    ends = ends_of.ends(sizes) if ends_of else [b""] * len(table.files)
    checks: dict[str, FileCheck] = {}
    stop = Stop()
    meter.expect(sum(sizes.get(key, 0) for key in table.files))

    def checked(number: int, end: bytes | str, meter: Meter) -> FileCheck:
        key = table.files[number]
        transforms = checkpoint.transforms
        check = FileCheck(storage, table, key, rows[number], transforms, end, stop, meter)
        check.run(sizes.get(key), expected.get(key))
        return check

    def run(number: int) -> None:
        key = table.files[number]
        same = None
        if key in shares and key in expected and isinstance(ends[number], bytes):
            # Why all this: the file must hold the same, as another checkpoint may link it for a
            # plan of its own.
            rows_of = _held(table, rows[number])
            same = (shares[key], sizes[key], expected[key], ends[number], rows_of)
            known = seen.get(same)
            if known is not None:
                checks[key] = known.of(key, table, rows[number])
                meter.add(sizes[key], key)
                return
        check = read = checked(number, ends[number], meter)
        if first := (*check.problems, *check.unread):
            # Why again: bytes may have been altered or cut off in transit.
            end = ends_of.end_of(number, sizes.get(key)) if ends_of else b""
            check = checked(number, end, uncounted())
            if not check.problems and not check.unread:
                check.notes.append(f"{key} is intact, but was not at the first read: {first[0]}")
        checks[key] = check
        if same is not None and not check.unread:
            seen[same] = check
        read.count(sizes.get(key, 0))

    try:
        run_tasks(range(len(table.files)), run, _NUM_THREADS, stop)
    finally:
        found += [checks[key] for key in table.files if key in checks]
    found.append(_other_files(storage, checkpoint, sizes))


def _held(table: ChunkTable, rows: Sequence[int]) -> bytes:
    """Returns a digest of all that a file should hold, beside what its checksums say."""
    tensors = table.tensor[rows]
    columns = (
        table.item_offset[rows], table.item_bytes[rows], table.payload_offset[rows],
        table.payload_bytes[rows], table.block_bytes[rows], table.size[rows], table.ndim[tensors],
        table.dtype[tensors],
    )  # fmt: skip
    parts = [repr(table.dtypes).encode(), *(np.ascontiguousarray(one).tobytes() for one in columns)]
    return digest_bytes(b"".join(parts))


def _other_files(storage: Storage, checkpoint: Checkpoint, keys: Iterable[str]) -> VerifyReport:
    """Returns problems and notes of the files that contain no chunks."""
    manifest, table = checkpoint.manifest, checkpoint.table
    found: list[Problem | str | None] = []
    if manifest is not None:
        found += [_metadata_problem(storage, manifest, table)]
        found += _record_notes(storage, checkpoint.slot)
        try:
            read_trace(storage, manifest.attempt)
        except CheckpointError:
            found.append(
                f"{trace_key(manifest.attempt)} is damaged; only ray-dcp timeline reads it"
            )
    elif checkpoint.kind == "safetensors":
        indices = [key for key in keys if key.endswith(_INDEX_SUFFIX) and "/" not in key]
        found += [_index_problem(storage, key, table) for key in indices]
    problems = tuple(one for one in found if isinstance(one, Problem))
    return VerifyReport(0, problems, tuple(one for one in found if isinstance(one, str)))


_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20


def _metadata_problem(
    storage: Storage, manifest: Manifest, table: ChunkTable
) -> Problem | str | None:
    """Returns a problem or a note about the `.metadata` that stock DCP reads beside a manifest.

    Why a missing or older one is no problem: a crash between commit and publication leaves it, and
    the checkpoint is intact.
    """
    if manifest.metadata is None:
        return None
    key, expected = manifest.metadata.key, manifest.metadata.digest
    data = read_if_there(storage, key, MAX_PICKLE_BYTES + 1)
    if data is None:
        return f"{key} is missing: stock DCP can't read this checkpoint"
    digest = digest_bytes(data).hex()
    if digest == expected:
        return None
    if projects(data, manifest.attempt, table):
        place = decode_metadata(data).checkpoint_id
        note = f"{key} was made at another place, {place!r}: stock DCP reads it all the same"
        return None if place == storage.url else note
    # Careful: the flipped bit may be one of the attempt id, which the names of files contain, too.
    is_earlier = is_ours(data) and manifest.attempt.encode() not in data
    if digest == manifest.replaced_metadata or is_earlier:
        return f"{key} is that of an earlier save, which stock DCP reads"
    return Problem(key, None, 0, len(data), "expected the bytes that the manifest names")


def _record_notes(storage: Storage, decides: int) -> list[str]:
    """Returns a note for each damaged record that has no effect any more.

    Args:
        storage: Storage of the checkpoint.
        decides: Slot of the valid manifest.
    """
    notes = []
    for entry in storage.list("manifest-"):
        slot = slot_of(entry.key)
        if slot is None or slot == decides:
            continue
        try:
            data = read_if_there(storage, entry.key, MAX_RECORD_BYTES + 1)
            if data is not None:
                decode_record(data, key=entry.key)
        except CheckpointError:
            notes.append(f"{entry.key} is damaged, but has no effect")
    return notes


def _index_problem(storage: Storage, key: str, table: ChunkTable) -> Problem | None:
    """Returns a problem of the index of a Hugging Face folder.

    A load of ray_dcp uses the index only for tensors that several files contain.
    """
    data = storage.read(key, 0, _MAX_INDEX_BYTES + 1)
    try:
        fields = json.loads(data)
        found: Any = fields["weight_map"]
        named = {str(name): str(file) for name, file in found.items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        what = f"expected JSON with a weight_map, found {type(error).__name__}"
        return Problem(key, None, 0, len(data), what)
    held: dict[str, set[str]] = {name: set() for name in table.names}
    for tensor, file in zip(table.tensor.tolist(), table.file.tolist(), strict=True):
        held[table.names[tensor]].add(table.files[file])
    wrong = sorted(n for n in {*held, *named} if named.get(n) not in held.get(n, ()))
    what = f"expected the files that contain each tensor, found others for {few(wrong)}"
    return Problem(key, None, 0, len(data), what) if wrong else None
