"""`RunHistory`: what a rank knows of the last saves of a run, for `SaveOptions(unchanged="link")`.

It answers two questions. *Which items will not change?* A guess, which decides in which files they
lie: parameters that are not trained, and what was equal in two saves in a row. *Which published
files may a writer reuse?* Those of the last committed step that it knows; the writer compares
checksums. What it reads (a manifest, the ends of this rank's own files) it reads after the commit,
in a thread of its own. What can't be read is not known, and costs bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ray_dcp.commit_protocol.messages import SaveGo, SaveOutcome, Target
from ray_dcp.core.checksums import CHECK_BYTES, digest, num_blocks_many
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.processes import begin, wait_any
from ray_dcp.core.values import (
    BoolArray,
    Columns,
    FilePlan,
    Kind,
    RankPlan,
    Settled,
    UInt64Array,
    offsets_of,
    volume,
)
from ray_dcp.errors import CheckpointError, LimitError
from ray_dcp.format.manifest import FileEntry, Manifest, decode_record, record_key
from ray_dcp.io.checkpoint import newest_record
from ray_dcp.io.writer import NOTHING_PUBLISHED, Published, file_layout
from ray_dcp.store.storage import PublishedFile, Storage
from ray_dcp.view.run_listing import folders_in, step_of

LEAST_SETTLED_BYTES = 1 << 20
"""Fewer bytes than this are not worth files of their own."""
WORTH_A_PLAN = 8
"""What is found to be settled moves to the settled files only if it has an eighth of their bytes:
all of them are written anew then."""
WAIT_S = 1.0
"""How long a save waits for what is read of the last one, in seconds; it mostly ended long ago."""
_MOST_RUNS = 8
_MOST_PLANNED = 8
_MOST_STEPS = 3
"""How many of the newest steps are looked at for a committed one."""

_Checks = tuple[str, UInt64Array]
"""Digest of a file, and its block checksums."""


@dataclass(eq=False)
class _Run:
    """What is known of the saves of one run."""

    published: Published = field(default_factory=dict)
    """Settled files of this rank in the last committed step."""
    found: tuple[tuple[str, Manifest], ...] = ()
    """Steps that earlier processes committed, and their URLs, newest first."""
    guesses: dict[str, Settled] = field(default_factory=dict)
    """By name; of all other names only the guess of the capture is known."""
    plan: bytes = b""
    """Digest of the plan of the last save whose checksums were read."""
    checks: Mapping[int, _Checks] = field(default_factory=dict)
    """By file, those of that save."""
    reading: Future[None] | None = None


@dataclass(frozen=True)
class _Planned:
    """This rank's part of a save that is not committed yet."""

    run: _Run
    target: Target
    plan: RankPlan
    digest: bytes
    columns: Columns
    num_deferred: tuple[int, ...]
    """Number of checksums of the deferred items of each file."""


class RunHistory:
    """The last saves of the runs that one rank of a session saved to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._planned: OrderedDict[str, _Planned] = OrderedDict()

    def guess(
        self, target: Target, columns: Columns, opener: Callable[[Target], Storage]
    ) -> Columns:
        """Returns the items of a save with a guess which of them will not change.

        Args:
            target: Where they are saved to.
            columns: The items, with the guesses of the capture.
            opener: What opens the storage.
        """
        name = "/*".join(_run_of(target.url))
        with self._lock:
            run = self._runs.get(name)
            is_new = run is None
            run = self._runs[name] = run or _Run()
            self._runs.move_to_end(name)
            while len(self._runs) > _MOST_RUNS:
                self._runs.popitem(last=False)
        if is_new:
            self._read(run, partial(_find, run, target, opener))
        else:
            _wait(run)
        known = np.array([run.guesses.get(one, 0) for one in columns.names], dtype=np.int8)
        settled = np.maximum(columns.settled, known[columns.name])
        settled[columns.kind != Kind.TENSOR] = Settled.UNKNOWN
        sizes = np.array([*(ITEMSIZE.get(one, 0) for one in columns.dtypes), 0], dtype=np.int64)
        num_bytes = volume(columns.size) * sizes[columns.dtype]
        if int(num_bytes[settled == Settled.SETTLED].sum()) < LEAST_SETTLED_BYTES:
            settled[settled == Settled.SETTLED] = Settled.UNKNOWN
        return replace(columns, settled=settled)

    def planned(
        self, target: Target, go: SaveGo, columns: Columns, num_deferred: tuple[int, ...]
    ) -> None:
        """Registers this rank's part of a save.

        Args:
            target: As for `guess`, which was called before.
            go: What this rank writes.
            columns: Its items.
            num_deferred: For each file the number of checksums of its deferred items.
        """
        with self._lock:
            run = self._runs["/*".join(_run_of(target.url))]
            planned = _Planned(run, target, go.plan, go.digest, columns, num_deferred)
            self._planned[go.attempt] = planned
            while len(self._planned) > _MOST_PLANNED:
                self._planned.popitem(last=False)

    def published(self, attempt: str) -> Published:
        """Returns the files of the last committed step that a save may reuse.

        Args:
            attempt: Of the save.
        """
        with self._lock:
            save = self._planned.get(attempt)
        if save is None:
            return NOTHING_PUBLISHED
        _wait(save.run)
        for url, manifest in () if save.run.published else save.run.found:
            if manifest.plan_digest == save.digest.hex():
                return published_files(url, save.plan, tuple(manifest.files))
        return save.run.published

    def committed(
        self, attempt: str, outcome: SaveOutcome, opener: Callable[[Target], Storage]
    ) -> None:
        """Begins to read what a save has committed.

        Args:
            attempt: Of the save.
            outcome: Of the save.
            opener: What opens the storage.
        """
        with self._lock:
            save = self._planned.pop(attempt, None)
        if save is not None:
            self._read(save.run, partial(_record_save, save, outcome, opener))

    def _read(self, run: _Run, work: Callable[[], None]) -> None:
        def read() -> None:
            with suppress(CheckpointError):
                work()

        # Suppressed: the node has no thread left. Nothing is known then.
        with suppress(LimitError):
            run.reading = begin(read, "ray_dcp reads what was committed")


def _wait(run: _Run) -> None:
    if run.reading is not None:
        wait_any([run.reading], WAIT_S)


def _run_of(url: str) -> tuple[str, str]:
    """Returns the folder of a run, and what follows the name of a step in it.

    Examples:
        >>> _run_of("/run/step-7"), _run_of("/run/step-7/model"), _run_of("/run/latest")
        (('/run', ''), ('/run', '/model'), ('/run', ''))
    """
    folder, _, name = url.rstrip("/").rpartition("/")
    above, _, step = folder.rpartition("/")
    is_item = step_of(name) is None and step_of(step) is not None
    return (above, f"/{name}") if is_item else (folder, "")


def _find(run: _Run, target: Target, opener: Callable[[Target], Storage]) -> None:
    """Finds the newest steps that earlier processes committed."""
    root, item = _run_of(target.url)
    folders = folders_in(opener(replace(target, url=root)))
    steps = sorted((step_of(one), one) for one in folders if step_of(one) is not None)
    urls = [target.url, *(f"{root}/{name}{item}" for _, name in reversed(steps))]
    found = []
    for url in urls[: _MOST_STEPS + 1]:
        # Suppressed: what can't be read is not reused.
        with suppress(CheckpointError):
            committed = newest_record(opener(replace(target, url=url)))
            if committed is not None:
                found.append((url, committed.manifest))
    run.found = tuple(found)


def published_files(url: str, plan: RankPlan, entries: tuple[FileEntry, ...]) -> Published:
    """Returns the settled files of a rank's plan, as a committed checkpoint has them.

    Args:
        url: Of the checkpoint.
        plan: What the rank wrote.
        entries: All data files of the checkpoint.
    """
    found: dict[bytes, tuple[PublishedFile, ...]] = {}
    for file in plan.files:
        if file.settled:
            entry, layout = entries[file.file], file_layout(file)
            one = PublishedFile(url, entry.key, entry.num_bytes, entry.digest)
            found[layout] = (*found.get(layout, ()), one)
    return found


def _record_save(save: _Planned, outcome: SaveOutcome, opener: Callable[[Target], Storage]) -> None:
    """Records what a save committed, and compares it with the save before."""
    run, storage = save.run, opener(save.target)
    record = decode_record(outcome.manifest or storage.read(record_key(outcome.slot)))
    if not isinstance(record, Manifest) or record.attempt != outcome.attempt:
        return
    entries = tuple(record.files)
    run.published = published_files(save.target.url, save.plan, entries)
    before = run.checks if run.plan == save.digest else {}
    found: dict[int, _Checks] = {}
    for file, num_deferred in zip(save.plan.files, save.num_deferred, strict=True):
        entry = entries[file.file]
        known = before.get(file.file)
        if known is None or known[0] != entry.digest:
            known = _read_checks(storage, file, entry, num_deferred)
        if known is not None:
            found[file.file] = known
    run.guesses = {**run.guesses, **_guess_settled(save, before, found)}
    run.plan, run.checks = save.digest, found


def _read_checks(
    storage: Storage, file: FilePlan, entry: FileEntry, num_deferred: int
) -> _Checks | None:
    """Returns the block checksums at the end of a file; None if they are not those committed."""
    count = int(num_blocks_many(file.payload_bytes, file.block_bytes).sum()) + num_deferred
    length = count * CHECK_BYTES
    if length > entry.num_bytes:
        return None
    checks = np.frombuffer(storage.read(entry.key, entry.num_bytes - length, length), dtype="<u8")
    return (entry.digest, checks) if digest(checks).hex() == entry.digest else None


def _guess_settled(
    save: _Planned, before: Mapping[int, _Checks], found: Mapping[int, _Checks]
) -> dict[str, Settled]:
    """Returns what follows from the checksums of two saves in a row, by name.

    An item that changes although it was settled stays out of the settled files from then on:
    otherwise one that changes now and then would make all of them be written anew again and again.
    """
    names, name = save.columns.names, save.columns.name
    changed, equal = set[int](), dict[int, int]()
    settled_bytes, moved = 0, dict[str, Settled]()
    for file in save.plan.files:
        settled_bytes += int(file.payload_bytes.sum()) if file.settled else 0
        if file.file not in before or file.file not in found:
            continue
        same = _equal_pieces(file, before[file.file][1], found[file.file][1])
        owner = name[file.row]
        changed.update(owner[~same].tolist())
        if file.settled:
            moved.update((names[one], Settled.CHANGED) for one in owner[~same].tolist())
            continue
        for one, num_bytes in zip(
            owner[same].tolist(), file.payload_bytes[same].tolist(), strict=True
        ):
            equal[one] = equal.get(one, 0) + num_bytes
    known = save.run.guesses
    new = [one for one in equal if one not in changed and known.get(names[one]) != Settled.CHANGED]
    num_bytes = sum(equal[one] for one in new)
    if num_bytes >= max(LEAST_SETTLED_BYTES, settled_bytes // WORTH_A_PLAN):
        moved.update((names[one], Settled.SETTLED) for one in new)
    return moved


def _equal_pieces(file: FilePlan, before: UInt64Array, now: UInt64Array) -> BoolArray:
    """Returns which pieces have the same checksums in two saves of a plan: bool[m]."""
    counts = num_blocks_many(file.payload_bytes, file.block_bytes)
    stop = int(counts.sum())
    differing = np.concatenate([[0], np.cumsum(before[:stop] != now[:stop])])
    starts = offsets_of(counts)
    same: BoolArray = differing[starts[1:]] == differing[starts[:-1]]
    return same
