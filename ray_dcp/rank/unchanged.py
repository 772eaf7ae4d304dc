"""`RunHistory`: what a rank knows of the last saves of a run, for `SaveOptions(unchanged="link")`.

It answers two questions. *Which items will not change?* A guess, which decides in which files they
lie: parameters that are not trained, and what was equal in two saves in a row. *Which published
files may a writer reuse?* Those whose bytes this process knows (`planning.sources.Known`): it wrote
them, or has read them through their checksums. The writer compares checksums.

What it reads, it reads after the commit, in threads of its own: the manifest and the ends of this
rank's own files; then, at low priority, all bytes of files that come due. A process that goes on
with a run reads the files of its newest steps for `SETTLED_READ_S`, and writes what it could not
read. What can't be read is not known, and costs bytes. After damage was found in the run, by
whatever part of this process, or by another one that marked a step, nothing is known any more, and
the next save writes everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ray_dcp.commit_protocol.messages import FileReceipt, SaveGo, SaveOutcome, Target
from ray_dcp.core import bounds
from ray_dcp.core.checksums import CHECK_BYTES, digest, num_blocks_many
from ray_dcp.core.damage import DAMAGE
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.processes import Stop, begin, wait_any
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
from ray_dcp.errors import CheckpointError, LimitError, SaveCancelledError
from ray_dcp.format.manifest import FileEntry, Manifest, decode_record, record_key
from ray_dcp.io.checkpoint import newest_record
from ray_dcp.io.writer import NOTHING_PUBLISHED, Published, file_layout, is_intact
from ray_dcp.planning.sources import Known
from ray_dcp.stage.write_queue import step_behind
from ray_dcp.store.storage import Entry, PublishedFile, Storage, place_of
from ray_dcp.view.damage_marks import committed_steps_with, mark_found, read_marks
from ray_dcp.view.run_listing import folders_in, step_of

LEAST_SETTLED_BYTES = 1 << 20
"""Fewer bytes than this are not worth files of their own."""
WORTH_A_PLAN = 8
"""What is found to be settled moves to the settled files only if it has an eighth of their bytes:
all of them are written anew then."""
SLOW_S = 600.0
"""How long the files that come due are read, in seconds, before a later save warns of it."""
_MOST_RUNS = 8
_MOST_PLANNED = 8
_MOST_STEPS = 8
"""How many of the newest steps are looked at for one with the same plan."""

_MOST_SOURCES = 4
"""How many of the last names of a file are known: the newest ones may be deleted."""

logger = logging.getLogger(__name__)

_now_s = time.monotonic

_Checks = tuple[str, UInt64Array]
"""Digest of a file, and its block checksums."""


@dataclass(eq=False)
class _Bytes:
    """Bytes on a disk, or in an object, that one or several names have."""

    known: Known


class _Source(NamedTuple):
    """A settled file of this rank in a committed checkpoint, whose bytes this process knows."""

    target: Target
    """The checkpoint."""
    file: PublishedFile
    plan: FilePlan
    bytes: _Bytes


class _Found(NamedTuple):
    """A step that an earlier process committed."""

    target: Target
    manifest: Manifest


@dataclass(eq=False)
class _Run:
    """What is known of the saves of one run."""

    target: Target
    """The run."""
    url: str
    """URL of the run, as its storage has it."""
    sources: dict[bytes, tuple[_Source, ...]] = field(default_factory=dict)
    """Files that may be reused, by layout, newest first."""
    found: tuple[_Found, ...] = ()
    """Steps that earlier processes committed, newest first, until they were looked into."""
    guesses: dict[str, Settled] = field(default_factory=dict)
    """By name; of all other names only the guess of the capture is known."""
    plan: bytes = b""
    """Digest of the plan of the last save whose checksums were read."""
    checks: Mapping[int, _Checks] = field(default_factory=dict)
    """By file, those of that save."""
    reading: Future[None] | None = None
    checking: Future[None] | None = None
    """Reads the bytes of files."""
    checking_since_s: float = 0.0
    is_slow_told: bool = False
    stop: Stop = field(default_factory=Stop)
    """Ends what reads the bytes of files."""
    marks: frozenset[tuple[int, str]] = frozenset()
    """Damage marks that the sources take into account."""
    num_damaged: int = 0
    """`DAMAGE.count` when the sources were found."""
    num_distrusted: int = 0
    """How often all sources were dropped, as something was damaged."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def distrust(self) -> None:
        """Drops all sources."""
        with self.lock:
            self.sources, self.found = {}, ()
            self.num_distrusted += 1

    def look_for_damage(self) -> None:
        """Drops all sources if this process found damage in the run since they were found."""
        count = DAMAGE.count
        if DAMAGE.has_below(self.url, self.num_damaged):
            self.distrust()
        self.num_damaged = count

    def look_for_marks(self, opener: Callable[[Target], Storage]) -> None:
        """Drops all sources if any process marked a step since, or the marks can't be read."""
        try:
            marks = read_marks(self.target, opener)
        except CheckpointError:
            self.distrust()
            return
        if marks - self.marks:
            self.distrust()
        self.marks = marks

    def check_due(self, opener: Callable[[Target], Storage]) -> None:
        """Begins to read the files that come due, unless that is still under way."""
        if self.stop.asked:
            return
        now_s = _now_s()
        if self.checking is None or self.checking.done():
            due = partial(_check_due, self, opener)
            self.checking_since_s, self.is_slow_told = now_s, False
            self.checking = begin(partial(_checked, due), "ray_dcp reads what was linked")
        elif now_s - self.checking_since_s > SLOW_S and not self.is_slow_told:
            self.is_slow_told = True
            logger.warning(
                "Files of the run %s that saves link are being read since %.0f s, which has not "
                "ended: its storage is slow, or hangs. Until it ends, saves write what they can't "
                "link any more, and a damaged file is not found",
                self.url,
                now_s - self.checking_since_s,
            )

    def add(self, layout: bytes, source: _Source, num_distrusted: int) -> None:
        """Adds a source, or replaces what is known of it, unless damage was found since."""
        with self.lock:
            if num_distrusted == self.num_distrusted:
                others = [one for one in self.sources.get(layout, ()) if one.file != source.file]
                self.sources[layout] = (source, *others[: _MOST_SOURCES - 1])

    def drop(self, layout: bytes, source: _Source) -> None:
        """Drops a source that can't be read."""
        with self.lock:
            kept = tuple(one for one in self.sources.get(layout, ()) if one.file != source.file)
            self.sources[layout] = kept


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
    begun_s: float
    num_distrusted: int


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
        storage = opener(target)
        name = "/*".join(_run_of(place_of(storage)))
        with self._lock:
            run = self._runs.get(name)
            is_new = run is None
            if run is None:
                at = replace(target, url=_run_of(target.url)[0])
                run = _Run(at, _run_of(storage.url)[0], num_damaged=DAMAGE.count)
            self._runs[name] = run
            self._runs.move_to_end(name)
            while len(self._runs) > _MOST_RUNS:
                _, forgotten = self._runs.popitem(last=False)
                forgotten.stop.because(SaveCancelledError("the run is known no more"))
        if is_new:
            _read(run, partial(_find, run, target, opener))
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
        self,
        target: Target,
        go: SaveGo,
        columns: Columns,
        num_deferred: tuple[int, ...],
        opener: Callable[[Target], Storage],
    ) -> None:
        """Registers this rank's part of a save.

        Args:
            target: As for `guess`, which was called before.
            go: What this rank writes.
            columns: Its items.
            num_deferred: For each file the number of checksums of its deferred items.
            opener: What opens the storage.
        """
        with self._lock:
            run = self._runs.get("/*".join(_run_of(place_of(opener(target)))))
        if run is None:
            return  # Forgotten since the guess, for newer runs.
        run.look_for_marks(opener)
        with self._lock:
            run.look_for_damage()
            self._planned[go.attempt] = _Planned(
                run, target, go.plan, go.digest, columns, num_deferred, _now_s(),
                run.num_distrusted,
            )  # fmt: skip
            while len(self._planned) > _MOST_PLANNED:
                self._planned.popitem(last=False)

    def published(self, attempt: str, opener: Callable[[Target], Storage]) -> Published:
        """Returns the files of committed steps that a save may reuse.

        Args:
            attempt: Of the save.
            opener: What opens the storage.
        """
        with self._lock:
            save = self._planned.get(attempt)
        if save is None:
            return NOTHING_PUBLISHED
        run, now_s = save.run, _now_s()
        _wait(run)
        if run.found and not run.sources:
            _check_found(save, opener)
        with run.lock:
            sources = dict(run.sources)
        return {
            layout: tuple(one.file for one in some if one.bytes.known.may_be_linked(now_s))
            for layout, some in sources.items()
        }

    def committed(
        self,
        attempt: str,
        outcome: SaveOutcome,
        receipts: Sequence[FileReceipt],
        opener: Callable[[Target], Storage],
    ) -> None:
        """Begins to read what a save has committed, and then files that come due.

        Args:
            attempt: Of the save.
            outcome: Of the save.
            receipts: Of this rank's files, as far as they are known.
            opener: What opens the storage.
        """
        with self._lock:
            save = self._planned.pop(attempt, None)
        if save is not None:
            _read(save.run, partial(_record_save, save, outcome, receipts, opener))

    def close(self) -> None:
        """Ends what is being read, at its next piece; nothing is read any more."""
        with self._lock:
            runs = [*self._runs.values()]
        for run in runs:
            run.stop.because(SaveCancelledError("the session is closed"))

    def wait(self) -> None:
        """Waits until all that is being read has been read."""
        with self._lock:
            runs = [*self._runs.values()]
        for run in runs:
            for name in ("reading", "checking"):  # the first begins the second
                future: Future[None] | None = getattr(run, name)
                if future is not None:
                    wait_any([future])


def _read(run: _Run, work: Callable[[], None]) -> None:
    def read() -> None:
        with suppress(CheckpointError):
            work()

    # Suppressed: the node has no thread left. Nothing is known then.
    with suppress(LimitError):
        run.reading = begin(read, "ray_dcp reads what was committed")


def _wait(run: _Run) -> None:
    if run.reading is not None:
        wait_any([run.reading], bounds.SETTLED_READ_S)


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
    """Finds the newest steps that earlier processes committed, without those marked as damaged.

    A mark is of an attempt: a step that was saved again is found, whoever saved it.
    """
    root, item = _run_of(target.url)
    folders = folders_in(opener(run.target))
    marks = run.marks = read_marks(run.target, opener)
    numbered = ((step_of(one), one) for one in folders)
    steps = sorted(one for one in numbered if one[0] is not None)
    urls = [target.url, *(f"{root}/{name}{item}" for _, name in reversed(steps))]
    marked, found = {step for step, _ in marks}, list[_Found]()
    for url in urls:
        if len(found) > _MOST_STEPS:
            break
        at = replace(target, url=url)
        # Suppressed: what can't be read is not reused.
        with suppress(CheckpointError):
            committed = newest_record(opener(at))
            if committed is None:
                continue
            manifest, step = committed.manifest, step_of(url.rstrip("/").removesuffix(item))
            if step not in marked or _mark_of(at, manifest, opener) not in marks:
                found.append(_Found(at, manifest))
    run.found = tuple(found)


def _mark_of(
    target: Target, manifest: Manifest, opener: Callable[[Target], Storage]
) -> tuple[int | None, str]:
    """Returns step and attempt under which a checkpoint, or an item of a step, is marked."""
    item = _run_of(target.url)[1]
    if not item:
        return step_of(target.url.rstrip("/")), manifest.attempt
    folder = target.url.rstrip("/").removesuffix(item)
    of_step = newest_record(opener(replace(target, url=folder)))
    return step_of(folder), "" if of_step is None else of_step.manifest.attempt


def _check_found(save: _Planned, opener: Callable[[Target], Storage]) -> None:
    """Reads files that earlier processes committed, for a while; what is whole is a source."""
    run, found = save.run, save.run.found
    run.found = ()
    same = next((one for one in found if one.manifest.plan_digest == save.digest.hex()), None)
    if same is None:
        return
    stop, entries = Stop(), tuple(same.manifest.files)
    ended = SaveCancelledError("the run is known no more")
    run.stop.failed.add_done_callback(lambda _: stop.because(ended))
    url = opener(same.target).url

    def check() -> None:
        for file in save.plan.files:
            if file.settled:
                published = _published(url, entries[file.file])
                source = _Source(same.target, published, file, _Bytes(Known(_now_s())))
                _check(run, source, save.num_distrusted, opener, stop)

    # Suppressed: the node has no thread left; everything is written.
    with suppress(LimitError):
        run.checking = begin(partial(_checked, check), "ray_dcp reads what may be linked")
        wait_any([run.checking], bounds.SETTLED_READ_S)
    # Why stopped: what was not read by now is written by this save, and known from then on.
    stop.because(SaveCancelledError("the save writes these files"))


def _checked(check: Callable[[], None]) -> None:
    with suppress(CheckpointError):
        check()


def _check_due(run: _Run, opener: Callable[[Target], Storage]) -> None:
    """Reads the newest file of each layout that comes due, at low priority."""
    step_behind(19)
    with run.lock:
        newest, num_distrusted = [some[0] for some in run.sources.values()], run.num_distrusted
    for source in newest:
        if source.bytes.known.is_due(_now_s()):
            _check(run, source, num_distrusted, opener, run.stop)


def _check(
    run: _Run,
    source: _Source,
    num_distrusted: int,
    opener: Callable[[Target], Storage],
    stop: Stop,
) -> None:
    """Reads a file: it is a source from now on, or it is damaged, or it can't be read.

    Raises:
        SaveCancelledError: `stop` was signalled.
    """
    layout, since_s = file_layout(source.plan), _now_s()
    storage = opener(source.target)
    try:
        # Why twice: bytes may have been altered in transit.
        is_whole = any(is_intact(storage, source.plan, source.file, stop) for _ in range(2))
    except SaveCancelledError:
        raise
    except CheckpointError:
        run.drop(layout, source)
        return
    if is_whole:
        source.bytes.known = Known(since_s)
        run.add(layout, source, num_distrusted)
    else:
        _report_damage(run, source, opener, stop)


def _report_damage(
    run: _Run, source: _Source, opener: Callable[[Target], Storage], stop: Stop
) -> None:
    """Makes a damaged file known: to this process, to its user, and to all that use the run."""
    run.distrust()
    DAMAGE.add(source.file.url)
    where = f"{source.file.url}/{source.file.key}"
    key = where.removeprefix(f"{run.url}/")

    def is_damaged(entry: Entry) -> bool:
        return _is_damaged_copy(run, source, entry, opener, stop)

    def find() -> dict[int, str]:
        steps = committed_steps_with(run.target, key, opener, is_damaged)
        run.marks |= {*steps.items()}
        return steps

    what = f"{where} is damaged: its bytes do not match the checksums that were committed"
    mark_found(run.target, what, find, "The next save writes everything anew", opener)


def _is_damaged_copy(
    run: _Run, source: _Source, entry: Entry, opener: Callable[[Target], Storage], stop: Stop
) -> bool:
    """Returns whether another file of a run is a copy of a damaged one, and damaged, too."""
    folder, _, name = entry.key.rpartition("/")
    target = replace(run.target, url=f"{run.target.url.rstrip('/')}/{folder}")
    # Suppressed: what can't be read, or not any more, may be whole.
    with suppress(CheckpointError):
        storage = opener(target)
        other = FileEntry(name, source.file.num_bytes, source.file.digest)
        if _read_checks(storage, source.plan, other, 0) is not None:
            file = replace(source.file, url=storage.url, key=name)
            return not any(is_intact(storage, source.plan, file, stop) for _ in range(2))
    return False


def _published(url: str, entry: FileEntry) -> PublishedFile:
    return PublishedFile(url, entry.key, entry.num_bytes, entry.digest)


def _record_save(
    save: _Planned,
    outcome: SaveOutcome,
    receipts: Sequence[FileReceipt],
    opener: Callable[[Target], Storage],
) -> None:
    """Records what a save committed, compares it with the save before, and reads what comes due."""
    run, storage = save.run, opener(save.target)
    record = decode_record(outcome.manifest or storage.read(record_key(outcome.slot)))
    if not isinstance(record, Manifest) or record.attempt != outcome.attempt:
        return
    entries = tuple(record.files)
    how = {one.key: one.reused for one in receipts}
    # Why not elsewhere: no file of such a storage is ever linked, so none is read for that.
    can_reuse = getattr(storage, "reuse", None) is not None
    for file in save.plan.files if can_reuse else ():
        if file.settled:
            one = _published(storage.url, entries[file.file])
            _add_committed(save, file, one, how.get(one.key))
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
    run.check_due(opener)


def _add_committed(
    save: _Planned, file: FilePlan, published: PublishedFile, reused: str | None
) -> None:
    """Adds a committed file to the sources, if its bytes are known.

    Args:
        save: The save.
        file: Plan of the file.
        published: The file.
        reused: How it got its bytes, as in `FileReceipt`; None if that is not known.
    """
    run, layout = save.run, file_layout(file)
    with run.lock:
        some = [one for one in run.sources.get(layout, ()) if one.file.digest == published.digest]
        of_them = {one.bytes for one in some}
        if reused == "":
            found = _Bytes(Known(save.begun_s))
        elif not some:
            return
        elif reused == "linked" and len(of_them) == 1:
            (found,) = of_them
            found.known = found.known.linked()
        else:
            # Why the least that is known: any of them may be the one that was copied.
            known = [one.known.linked() for one in of_them]
            found = _Bytes(
                Known(min(one.since_s for one in known), max(one.num_links for one in known))
            )
    run.add(layout, _Source(save.target, published, file, found), save.num_distrusted)


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
