"""Verifies every file of a checkpoint, and reports which bytes are not what was committed.

For our checkpoints every byte counts: payloads have checksums, frames and headers follow from the
chunk table, the rest is zero.

**Items of stock DCP** have only the CRC32s of their zips, which torch writes and never looks at
again. `check_stock_item` compares each record with its CRC. CRCs do not cover the names, which a
zip has twice; but where it is compressed the second may be a copy of the first. Nothing is
unpickled.

**Files without chunks** (`.metadata`, records, headers and indices of safetensors files) change
nothing of what a load gives: it goes by the newest record and the chunk table, or by what the data
files themselves contain. But other programs read them.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import block_checks, digest_bytes
from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    StorageError,
)
from ray_dcp.format.manifest import MAX_RECORD_BYTES, Manifest, decode_record, slot_of
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.format.safe_pickle import MAX_PICKLE_BYTES
from ray_dcp.format.safetensors import (
    TensorEntry,
    header,
    parse_header,
    saved_offsets,
    sharding_metadata,
)
from ray_dcp.format.step_info import info_slot
from ray_dcp.format.stream_transforms import MAX_OBJECT_BYTES, ZSTD, unpacked_item
from ray_dcp.format.torch_items import check_directory, torch_save_frame
from ray_dcp.io.checkpoint import Checkpoint, projects, read_checkpoint, what_became_of
from ray_dcp.io.reader import item_bytes_at_most, locate_item
from ray_dcp.io.records import info_below
from ray_dcp.io.threads import Stop, run_tasks
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import Told, open_storage, place_below
from ray_dcp.store.storage import Storage, read_if_there
from ray_dcp.view.trace import trace_notes
from ray_dcp.view.wording import few

_RECORDS = {"data.pkl", "version", "byteorder"}
"""Of every item, but for its storages and for what torch marks with a dot."""
_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
"""Longest end of an item that is looked at for the zip's directory; torch's has a few records."""


def check_stock_item(
    storage: Storage,
    key: str,
    start: int,
    stop: int,
    *,
    transforms: Sequence[str] = (),
    max_bytes: int = MAX_OBJECT_BYTES,
) -> tuple[int, str | None]:
    """Compares every record of one item with its CRC32, and its name with those of torch.

    Args:
        storage: Where the checkpoint lies.
        key: The file.
        start: First byte of the item in the file.
        stop: Behind its last byte.
        transforms: Stream transforms of the item, by `.metadata`.
        max_bytes: Longest item to unpack.

    Returns:
        Bytes that were compared; what could not be checked, or None.

    Raises:
        DamagedCheckpointError: What was compared is not what was written.
        StorageError: The storage refused.
    """
    unknown = set(transforms) - {ZSTD}
    if unknown:
        names = ", ".join(sorted(unknown))[:200]
        return 0, f"holds items that went through {names}: not checked"
    item: io.BufferedIOBase
    if transforms:
        stored = storage.read(key, start, stop - start)
        item = io.BytesIO(unpacked_item(stored, transforms, max_bytes=max_bytes))
    else:
        item = io.BufferedReader(_Range(storage, key, start, stop), 64 << 10)
    try:
        # First: of records that the directory calls encrypted `zipfile` asks for a password.
        item_bytes = item.seek(0, io.SEEK_END)
        item.seek(max(0, item_bytes - _TAIL_BYTES))
        check_directory(item.read(), item_bytes)
        with zipfile.ZipFile(item) as archive:
            _check_names(archive.infolist())
            return _check_records(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise DamagedCheckpointError(f"the zip of torch.save is damaged: {error}") from error


def _check_names(found: Sequence[zipfile.ZipInfo]) -> None:
    """Checks that a load finds each record that torch wrote.

    Raises:
        ValueError: One has a name that torch gives none, or nothing is in the pickle.
    """
    if any(one.filename.endswith("/data.pkl") and not one.file_size for one in found):
        raise ValueError("expected a pickle in data.pkl, found nothing")
    names = [one.filename for one in found]
    folders = {name.partition("/")[0] for name in names}
    records = [name.partition("/")[2] for name in names]
    storages = sum(name.startswith("data/") for name in records)
    expected = {"data.pkl", *(f"data/{number}" for number in range(storages))}
    other = {name for name in records if not name.startswith(".")} - _RECORDS - expected
    if len(folders) != 1 or len(set(records)) < len(records) or other or expected - {*records}:
        wrong = ", ".join(map(repr, names))[:500]
        raise ValueError(f"expected data.pkl, data/0 and so on in one folder, found {wrong}")


def _check_records(archive: zipfile.ZipFile) -> tuple[int, str | None]:
    checked, unchecked = 0, 0
    for record in archive.infolist():
        if record.CRC == 0 and record.file_size:
            unchecked += record.file_size
            continue
        with archive.open(record) as stream:
            while piece := stream.read(_PIECE_BYTES):
                checked += len(piece)
    note = f"{unchecked} bytes were saved without CRC32 and not checked" if unchecked else None
    return checked, note


class _Range(io.RawIOBase):
    """A part of a stored file as a file of its own, read-only and seekable."""

    def __init__(self, storage: Storage, key: str, start: int, stop: int) -> None:
        super().__init__()
        self._storage = storage
        self._key = key
        self._start = start
        self._length = stop - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError(f"byte {origin + offset} lies before the item")
        self._at = origin + offset
        return self._at

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        length = max(0, min(len(target), self._length - self._at))
        data = self._storage.read(self._key, self._start + self._at, length) if length else b""
        target[: len(data)] = data
        self._at += len(data)
        return len(data)


INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20


def metadata_problem(
    storage: Storage, manifest: Manifest, table: ChunkTable
) -> Problem | str | None:
    """Returns what is wrong with the `.metadata` that stock DCP reads beside a manifest; or a note.

    Why a missing or older one is no damage: a crash between commit and publication leaves it, and
    the checkpoint is whole.
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
    # Careful: the bit that flipped may be one of the attempt. The files' names have it, too.
    is_earlier = _attempt_of(data) is not None and manifest.attempt.encode() not in data
    if digest == manifest.replaced_metadata or is_earlier:
        return f"{key} is of an earlier save: stock DCP reads that one"
    what = "expected the bytes that the manifest names, found others"
    return Problem(key, None, 0, len(data), what)


def record_notes(storage: Storage, decides: int) -> list[str]:
    """Returns a note for each record that can't be read and that nobody needs any more.

    Args:
        storage: Where they lie.
        decides: Slot of the current manifest.
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
            notes.append(f"{entry.key} is damaged, but nothing is decided by it")
    return notes


def index_problem(storage: Storage, key: str, table: ChunkTable) -> Problem | None:
    """Returns what is wrong with the index of a Hugging Face folder.

    Ours goes by it only for a tensor that several files hold.
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
    if not wrong:
        return None
    what = f"expected the files that hold each tensor, found other ones for {few(wrong)}"
    return Problem(key, None, 0, len(data), what)


def is_header_of(data: bytes, table: ChunkTable, rows: Sequence[int]) -> bool:
    """Whether a save in the container `safetensors` wrote these bytes before a file's chunks.

    Args:
        data: The file up to its first raw byte.
        table: What is stored.
        rows: All chunks in the file.
    """
    expected: dict[str, tuple[TensorEntry, tuple[int, ...]]] = {}
    for row in rows:
        tensor = int(table.tensor[row])
        name, ndim = table.names[tensor], int(table.ndim[tensor])
        size = tuple(table.size[row, :ndim].tolist())
        begin = int(table.payload_offset[row]) - len(data)
        end = begin + int(table.payload_bytes[row])
        entry = TensorEntry(name, table.dtypes[table.dtype[tensor]], size, begin, end)
        expected[name] = entry, tuple(table.offset[row, :ndim].tolist())
    try:
        found = parse_header(data)
        offsets = saved_offsets(found.metadata) or {}
        if {entry.name: (entry, offsets.get(entry.name)) for entry in found.entries} != expected:
            return False
        # Why: the order of empty tensors, which all begin at one byte, only the header knows.
        return header(found.entries, sharding_metadata(offsets)) == data
    except CheckpointError:
        return False


def _attempt_of(metadata: bytes) -> str | None:
    """Returns the attempt that a `.metadata` of ours belongs to; None for any other bytes."""
    try:
        return decode_metadata(metadata).attempt
    except CheckpointError:
        return None


_NUM_THREADS = 4
_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class Problem:
    """Some bytes of a checkpoint are missing or are not what was committed."""

    file: str
    """Key of the file, relative to the checkpoint."""
    fqn: str | None
    """Whose bytes they are; None for bytes that belong to no tensor or object."""
    start: int
    """First byte concerned in the file."""
    stop: int
    """Behind the last byte concerned."""
    what: str
    """What was expected and what was found."""

    def __str__(self) -> str:
        whose = "" if self.fqn is None else f" of {self.fqn!r}"
        return f"{self.file} bytes [{self.start}, {self.stop}){whose}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    checked_bytes: int
    """Bytes that were compared with a checksum or with known content."""
    problems: tuple[Problem, ...]
    """All damage, in the order of files and bytes."""
    notes: tuple[str, ...] = ()
    """What could not be checked, and what is odd but harmless."""
    unread: tuple[Problem, ...] = ()
    """What the storage did not give, also when it was asked again: it may be whole, or not."""

    @property
    def ok(self) -> bool:
        """No damage was found, and everything could be read."""
        return not self.problems and not self.unread


class VerifyInterrupted(KeyboardInterrupt):
    """A `verify` was interrupted; `report` has what it found until then."""

    def __init__(self, report: VerifyReport) -> None:
        super().__init__("verify was interrupted")
        self.report = report


_MOST_LOOKS = 20
"""How often a checkpoint is verified that is replaced each time meanwhile."""


def verify(path: AnyPlace, *, told: Told | None = None) -> VerifyReport:
    """Returns which bytes of the checkpoint at a path are damaged, in all items of a step.

    Damage is reported, not raised, also where it keeps the checkpoint from being opened at all.
    A file that seems damaged is read again before it is reported. Where another save replaces the
    checkpoint meanwhile, that one is verified.

    Args:
        path: Path or URL of the checkpoint.
        told: Called with the bytes of the files that are done, and of all, from any thread.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        UncommittedCheckpointError: Files of a save are there, but it was never committed.
        UnsupportedValueError: A safetensors file holds a dtype that is not read here.
        StorageError: The storage refused to list, or to give what tells of all files; or other
            saves replaced the checkpoint all the time.
        VerifyInterrupted: Ctrl-C, a `KeyboardInterrupt` with the report until then.

    Complexity:
        Reads every data file once, a few at a time, with 8 MiB of memory for each.
    """
    storage = open_storage(path)
    became: CheckpointError | None = None
    for _ in range(_MOST_LOOKS):
        try:
            checkpoint = read_checkpoint(storage, checkpoint_id=storage.url, checks_later=True)
        except DamagedCheckpointError as error:
            return VerifyReport(0, (_unopenable(storage, error),))
        report = verify_opened(storage, checkpoint, path, told=told)
        if report.ok:
            return report
        became = what_became_of(storage, checkpoint)
        if became is None or isinstance(became, CheckpointNotFoundError):
            break
    if became is not None:
        raise became
    return report


def verify_opened(
    storage: Storage,
    checkpoint: Checkpoint,
    path: AnyPlace | None,
    *,
    told: Told | None = None,
) -> VerifyReport:
    """Returns which bytes of an opened checkpoint, and of the items of a step, are damaged.

    Args:
        storage: Where it lies.
        checkpoint: What was read when it was opened.
        path: The same as the user named it; None where that is not known: items are left out.
        told: As for `verify`.

    Raises:
        StorageError: The storage refused to list or read.
    """
    reports = [verify_checkpoint(storage, checkpoint, told=told)]
    try:
        folders = () if path is None else items_of(storage, checkpoint)
    except DamagedCheckpointError as error:
        folders = ()
        reports.append(VerifyReport(0, (Problem(error.key or "", None, 0, 0, error.message),)))
    for folder in folders:
        try:
            reports.append(_verify_item(place_below(path or "", folder), folder, told))
        except KeyboardInterrupt as error:
            found = [error.report] if isinstance(error, VerifyInterrupted) else []
            raise VerifyInterrupted(_joined([*reports, *found])) from error
    return _joined(reports)


def _joined(reports: Iterable[VerifyReport | _FileCheck]) -> VerifyReport:
    """Returns one report of several; what is noted of several is noted once."""
    reports = list(reports)
    return VerifyReport(
        sum(report.checked_bytes for report in reports),
        tuple(problem for report in reports for problem in report.problems),
        tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        tuple(one for report in reports for one in report.unread),
    )


def items_of(storage: Storage, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the folders of the items of which a step of a `CheckpointManager` consists.

    Args:
        storage: Where the step lies.
        checkpoint: The step's own.

    Returns:
        Empty for a checkpoint that is not a step, or that is all in one.

    Raises:
        DamagedCheckpointError: What a manager noted is damaged, so that it is not known.
        StorageError: The storage can't be read.
    """
    if checkpoint.manifest is None:
        return ()
    slots = [info_slot(entry.key) for entry in storage.list("step-info-")]
    info = info_below(storage, "", slots, checkpoint.slot)
    return () if info is None else tuple(info.items.values())


def _verify_item(path: AnyPlace, folder: str, told: Told | None) -> VerifyReport:
    try:
        return _in_folder(folder, verify(path, told=told))
    except CheckpointNotFoundError as error:
        return VerifyReport(0, (Problem(folder, None, 0, 0, error.message),))
    except StorageError as error:
        return VerifyReport(0, (), unread=(Problem(folder, None, 0, 0, error.message),))
    except VerifyInterrupted as error:
        raise VerifyInterrupted(_in_folder(folder, error.report)) from error


def _in_folder(folder: str, report: VerifyReport) -> VerifyReport:
    problems, unread = (
        tuple(replace(one, file=f"{folder}/{one.file}") for one in some)
        for some in (report.problems, report.unread)
    )
    return replace(report, problems=problems, unread=unread)


def _unopenable(storage: Storage, error: DamagedCheckpointError) -> Problem:
    """Returns what keeps a checkpoint from being opened, as a problem of the whole file."""
    found = {entry.key: entry.num_bytes for entry in storage.list()}
    # Why not only `key`: it may be a name that the file should not ask for.
    named = (key for key in found if key in error.message)
    key = error.key if error.key in found else next(named, error.key or "")
    return Problem(key, None, 0, found.get(key, 0), error.message)


def verify_checkpoint(
    storage: Storage, checkpoint: Checkpoint, *, told: Told | None = None
) -> VerifyReport:
    """Returns which bytes of an opened checkpoint are damaged.

    Args:
        storage: Where it lies.
        checkpoint: What was read when it was opened.
        told: Called with the bytes of the files that are done, and of all, from any thread.

    Raises:
        StorageError: The storage refused to list or read.
    """
    found = {entry.key: entry.num_bytes for entry in storage.list()}
    expected = (
        {e.key: e.num_bytes for e in checkpoint.manifest.files} if checkpoint.manifest else {}
    )
    table = checkpoint.table
    transforms = None if checkpoint.foreign is None else checkpoint.foreign.transforms
    rows = _rows_by_file(table)
    ends = checkpoint.check_file.ends(found) if checkpoint.check_file else [b""] * len(table.files)
    checks: dict[str, _FileCheck] = {}
    stop = Stop()
    total, done = sum(found.get(key, 0) for key in table.files), Counter[str]()

    def run(number: int) -> None:
        key = table.files[number]

        def checked(end: bytes | str) -> _FileCheck:
            check = _FileCheck(storage, table, key, rows[number], transforms, end, stop)
            check.run(found.get(key), expected.get(key))
            return check

        check = checked(ends[number])
        if check.problems or check.unread:
            # Why again: what was altered or cut off on its way here comes whole the next time.
            first = check
            file = checkpoint.check_file
            check = checked(file.end_of(number, found.get(key)) if file else b"")
            if not check.problems and not check.unread:
                why = (first.problems or first.unread)[0]
                check.notes.append(f"{key} is whole, but was not when it was first read: {why}")
        checks[key] = check
        if told is not None:
            done[key] = found.get(key, 0)
            told(done.total(), total)

    try:
        run_tasks(range(len(table.files)), run, _NUM_THREADS, stop)
    except KeyboardInterrupt as error:
        ended = [checks[key] for key in table.files if key in checks]
        raise VerifyInterrupted(_joined(ended)) from error
    others = _other_files(storage, checkpoint, found)
    return _joined([*(checks[key] for key in table.files), others])


def _other_files(storage: Storage, checkpoint: Checkpoint, keys: Iterable[str]) -> VerifyReport:
    """Returns problems and notes of the files that hold no chunks."""
    manifest, table = checkpoint.manifest, checkpoint.table
    if manifest is not None:
        found = [metadata_problem(storage, manifest, table)]
        found += record_notes(storage, checkpoint.slot)
        found += trace_notes(storage, manifest.attempt)
    else:
        is_index = checkpoint.kind == "safetensors"
        indices = [k for k in keys if is_index and k.endswith(INDEX_SUFFIX) and "/" not in k]
        found = [index_problem(storage, key, table) for key in indices]
    problems = tuple(one for one in found if isinstance(one, Problem))
    return VerifyReport(0, problems, tuple(one for one in found if isinstance(one, str)))


def _rows_by_file(table: ChunkTable) -> list[list[int]]:
    """Returns the chunks of each file, in the order of its bytes."""
    order = np.lexsort((table.item_offset, table.file))
    bounds = np.searchsorted(table.file[order], np.arange(len(table.files) + 1))
    return [order[bounds[i] : bounds[i + 1]].tolist() for i in range(len(table.files))]


@dataclass
class _FileCheck:
    """Goes through one data file, front to back."""

    _storage: Storage
    _table: ChunkTable
    key: str
    _rows: list[int]
    """Its chunks."""
    _transforms: Sequence[tuple[str, ...] | None] | None
    _end: bytes | str
    """Its own checksums, or why they can't be read."""
    _stop: Stop
    """Ends the check of a long file early."""
    checked_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[Problem] = field(default_factory=list)
    _num_bytes: int = 0
    _window_start: int = 0
    _window: memoryview = field(default_factory=lambda: memoryview(b""))

    def run(self, num_bytes: int | None, expected_bytes: int | None) -> None:
        """Checks the file.

        Args:
            num_bytes: Its length on storage; None if it is not there.
            expected_bytes: Its length by the manifest; None if that is not known.
        """
        if num_bytes is None:
            self._report(None, 0, expected_bytes or 0, f"the file is missing{self._losses()}")
            return
        self._num_bytes = num_bytes
        if expected_bytes is not None and num_bytes != expected_bytes:
            low, high = sorted((num_bytes, expected_bytes))
            self._report(None, low, high, f"expected {expected_bytes} bytes, found {num_bytes}")
        try:
            self._check_items(checksummed=expected_bytes is not None)
        except StorageError as error:
            what = f"unreadable: {error.message}"
            self.unread.append(Problem(self.key, None, 0, num_bytes, what))

    def _losses(self) -> str:
        names = dict.fromkeys(self._name(row) for row in self._rows)
        some = ", ".join(map(repr, list(names)[:3]))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f", and with it bytes of {some}{more}" if names else ""

    def _check_items(self, *, checksummed: bool) -> None:
        end = self._check_header() if checksummed else 0
        for row in self._rows:
            start = int(self._table.item_offset[row])
            stop = start + int(self._table.item_bytes[row])
            if stop > self._num_bytes:
                self._report(
                    row,
                    start,
                    stop,
                    f"expected it to end at byte {stop}, but the file ends at {self._num_bytes}",
                )
                continue
            if self._table.block_bytes[row] > 0:
                self._check_gap(end, start)
                self._check_frame(row, start, stop)
                if isinstance(self._end, bytes):
                    self._check_payload(row)
            elif self._table.payload_offset[row] < 0:
                self._check_zip(row, start, stop)
            else:
                self.notes.append(f"{self.key} holds no checksums: only its length was checked")
            end = stop
        if checksummed:
            self._check_end(end)

    def _check_end(self, start: int) -> None:
        """Checks what follows the last item: zeros, and the file's own checksums."""
        if isinstance(self._end, str):
            # Why all of it: without them it is not known which of its bytes are sound.
            self._report(None, 0, self._num_bytes, self._end)
            return
        # Careful: a file that is too long or too short was reported.
        stop = max(start, self._num_bytes - len(self._end))
        self._check_gap(start, stop)
        self.checked_bytes += self._num_bytes - stop

    def _check_header(self) -> int:
        """Checks the header of a safetensors file; returns where the first item may begin."""
        if not self.key.endswith(".safetensors") or not self._rows:
            return 0
        table = self._table
        stop = min(int(table.payload_offset[row]) for row in self._rows)
        if stop <= self._num_bytes:
            found = bytes(self._bytes(0, stop))
            self.checked_bytes += stop
            if not is_header_of(found, table, self._rows):
                what = "expected the header of the tensors in this file, found other bytes"
                self._report(None, 0, stop, what)
        return stop

    def _check_gap(self, start: int, stop: int) -> None:
        """Bytes between items are zero."""
        for low in range(start, stop, _WINDOW_BYTES):
            high = min(stop, low + _WINDOW_BYTES)
            self._compare(None, low, bytes(high - low), "expected zeros between items")

    def _check_frame(self, row: int, start: int, stop: int) -> None:
        """Before and after the raw bytes of a tensor is a frame that its shape decides."""
        table = self._table
        low = int(table.payload_offset[row])
        high = low + int(table.payload_bytes[row])
        if (low, high) == (start, stop):
            return
        tensor = table.tensor[row]
        size = tuple(table.size[row, : table.ndim[tensor]].tolist())
        frame = torch_save_frame(table.dtypes[table.dtype[tensor]], size)
        what = "expected the frame of a tensor of this dtype and shape"
        self._compare(row, start, frame.header, what)
        self._compare(row, high, frame.footer, what)

    def _compare(self, row: int | None, start: int, expected: bytes, what: str) -> None:
        found = bytes(self._bytes(start, start + len(expected)))
        self.checked_bytes += len(expected)
        if found != expected:
            wrong = np.flatnonzero(
                np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)
            )
            self._report(
                row, start + int(wrong[0]), start + int(wrong[-1]) + 1, f"{what}, found other bytes"
            )

    def _check_payload(self, row: int) -> None:
        table = self._table
        start, num_bytes = int(table.payload_offset[row]), int(table.payload_bytes[row])
        block = int(table.block_bytes[row])
        checks = table.checks[table.check_start[row] : table.check_start[row + 1]]
        step = max(_WINDOW_BYTES // block, 1) * block
        bad: list[npt.NDArray[np.int64]] = []
        for low in range(0, num_bytes, step):
            high = min(num_bytes, low + step)
            found = block_checks(self._bytes(start + low, start + high), block)
            first = low // block
            bad.append(first + np.flatnonzero(found != checks[first : first + len(found)]))
        self.checked_bytes += num_bytes
        blocks = np.concatenate(bad) if bad else np.empty(0, np.int64)
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
            if len(run):
                low, high = int(run[0]) * block, min(num_bytes, (int(run[-1]) + 1) * block)
                what = f"{len(run)} block(s) do not match their checksums"
                self._report(row, start + low, start + high, what)

    def _check_zip(self, row: int, start: int, stop: int) -> None:
        transforms = (self._transforms[row] if self._transforms is not None else None) or ()
        try:
            if not transforms and self._table.kind[self._table.tensor[row]] == Kind.TENSOR:
                locate_item(self._storage, self._table, row)  # as a load finds its raw bytes
            checked, note = check_stock_item(
                self._storage,
                self.key,
                start,
                stop,
                transforms=transforms,
                max_bytes=item_bytes_at_most(self._table, row),
            )
        except DamagedCheckpointError as error:
            self._report(row, start, stop, error.message)
            return
        self.checked_bytes += checked
        if note is not None:
            self.notes.append(f"{self.key}: {note}")

    def _bytes(self, start: int, stop: int) -> memoryview:
        """Returns bytes of the file, read ahead: items lie side by side."""
        if not self._window_start <= start <= stop <= self._window_start + len(self._window):
            if self._stop.asked:
                raise KeyboardInterrupt
            length = min(max(stop - start, _WINDOW_BYTES), self._num_bytes - start)
            self._window = memoryview(self._storage.read(self.key, start, length))
            self._window_start = start
            if len(self._window) < stop - start:
                raise StorageError(
                    f"expected bytes [{start}, {stop}) of {self.key}, but it became shorter",
                    key=self.key,
                )
        return self._window[start - self._window_start : stop - self._window_start]

    def _name(self, row: int) -> str:
        tensor = int(self._table.tensor[row])
        return self._table.names[tensor]

    def _report(self, row: int | None, start: int, stop: int, what: str) -> None:
        fqn = None if row is None else self._name(row)
        self.problems.append(Problem(self.key, fqn, start, stop, what))
