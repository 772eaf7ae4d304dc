"""The part of one rank in a load: generators that yield requests and receive replies.

They import neither torch nor Ray: the caller passes in the code that plans targets, and `drive`
carries the requests. Each step of a rank has its deadline. Storage is read in separate threads;
user code receives the values in the thread that called `load`.

`load_newest_rank` loads the newest sound checkpoint of a run. Rank 0 lists the steps once, and the
other ranks use its list. Whether a step loads is one outcome for all ranks, so that all of them try
the same steps in the same order, and fall back on the same error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ray_dcp.commit_protocol.error_aggregation import located, reply_error
from ray_dcp.commit_protocol.messages import (
    Exchange,
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    ReadCounts,
    Reply,
    Request,
    Target,
)
from ray_dcp.core.phases import COMPARE, FINISH, JOIN, OPEN, PLAN, PLAN_READS, READ, Step
from ray_dcp.core.processes import run_within
from ray_dcp.core.values import ChunkTable
from ray_dcp.core.wire_error import add_note, to_wire
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    DeadlineError,
    InvalidRequestError,
    ParticipantError,
    SaveCancelledError,
    UnsafeCheckpointError,
)
from ray_dcp.io.checkpoint import Checkpoint, checkpoint_from
from ray_dcp.io.reader import (
    Prepared,
    naming_tensor,
    prepare_reads,
    read_items,
    read_prepared,
)
from ray_dcp.io.shared_read import SharedReadStorage, SmallFiles
from ray_dcp.options import LoadOptions, plain_integer
from ray_dcp.planning.reads import (
    RankShare,
    ReadNeeds,
    ReadPlan,
    ShareCost,
    merged,
    plan_reads,
)
from ray_dcp.rank.rank_save import (
    decided_on_rank_0,
    naming_checkpoint,
    result_or_error,
)
from ray_dcp.session.rank_progress import RankProgress, WatchedStorage
from ray_dcp.stage.memory_tier import MemoryTierStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyMissingError, Storage, read_traits_of
from ray_dcp.view.run_listing import ListedRun, ListedStep, list_run

if TYPE_CHECKING:
    from ray_dcp.session.shared_reads import RayPeers
    from ray_dcp.torch_adapter.targets import Targets

KeptIn = Callable[[Storage, str], MemoryTierStorage | None]
"""Returns the storage with what nodes keep in memory of an attempt; None if they keep nothing."""


MOST_RANGES = 1 << 16
"""Most separate ranges that a rank shares. With more, planning who reads what would cost more than
it saves, and the rank reads for itself."""

BATCH_BYTES = 64 << 20
"""Bytes of objects that are read before the caller's thread receives them."""

logger = logging.getLogger(__name__)

C = TypeVar("C")
T = TypeVar("T")

_hung: set[object] = set()
"""Reads that timed out, and may still write into targets when their storage answers."""
_ended = threading.Condition()
"""Notified when one of these reads ends."""


def _begin_anew() -> None:
    """Resets a forked child: reads that hang do so in its parent."""
    global _ended
    _ended = threading.Condition()
    _hung.clear()


os.register_at_fork(after_in_child=_begin_anew)


LoadPlanning = Generator[Request, Reply, "Targets"]
"""A planner that exchanges messages with the other ranks before it returns the work."""


@dataclass(frozen=True)
class LoadResult:
    """The result of a load on one rank."""

    total: ReadCounts
    """Bytes of all ranks."""
    checkpoint: Checkpoint
    own: ReadCounts
    """Bytes of this rank."""


@dataclass(kw_only=True, eq=False)
class RankLoad:
    """The part of one rank in a load."""

    key: OpKey
    """Key of the operation, before any renumbering."""
    rank: int
    world_size: int
    target: Target
    """Location of the checkpoint."""
    options: LoadOptions
    plan: Callable[[Checkpoint], Targets | LoadPlanning]
    """Returns what this rank loads from a checkpoint, or a generator that returns it, for planners
    that communicate with the other ranks. Changes no target."""
    opener: Callable[[Target], Storage] = open_storage
    """Opens the storage."""
    progress: RankProgress = field(default_factory=RankProgress)
    """Progress of this rank, and whether it has to stop."""
    kept: KeptIn | None = None
    """Finds what nodes keep of an attempt in memory; None if this rank can't ask them."""
    peers: RayPeers | None = None
    """Access to the other ranks, to share reads with them; None if there is none."""
    _storage: Storage = field(init=False)
    _opened: SmallFiles = field(init=False)

    def run(self) -> Generator[Request, Reply, LoadResult]:
        """Yields the requests of this rank, until every rank has loaded.

        Raises:
            CheckpointError: The load failed, on this rank or on another: the same error on all
                ranks. No target has changed, unless the failure happened while reading.
        """
        key, rank, progress = self.key, self.rank, self.progress
        progress.begin(key)
        with naming_checkpoint(self.target.url):
            storage, error = result_or_error(self.open, "opening the storage", rank)
            progress.enter(JOIN)
            go = yield LoadJoin(key, rank, self.world_size, self.target, self.options, error)
            if not isinstance(go, LoadGo) or storage is None:
                raise reply_error(go, rank)

            progress.enter(PLAN_READS)
            checkpoint, error = result_or_error(partial(self.checkpoint, go), "opening", rank)
            work: Targets | None = None
            prepared: Prepared | None = None
            tried: ReadCounts | None = None
            if checkpoint is not None:
                work, read_plan, error = yield from _make_plan(self.plan, checkpoint, rank)
                if work is not None and read_plan is not None:
                    prepare = partial(self.prepare, checkpoint, work, read_plan)
                    prepared, error = result_or_error(prepare, "planning the reads", rank)
                if work is not None and error is None:
                    try_out = partial(self.load_trials, checkpoint, work)
                    tried, error = result_or_error(try_out, "checking what is stored", rank)
            progress.enter(PLAN)
            if progress.abandoned is not None:
                raise located(progress.abandoned, self.target.url)
            may_share = self.world_size > 1 and prepared is not None
            needs = self.needs(prepared) if may_share and prepared is not None else None
            untaken = None if work is None else work.untaken
            proceed = yield LoadReady(key, rank, error, needs, untaken)
            if not isinstance(proceed, LoadProceed):
                raise reply_error(proceed, rank)
            if checkpoint is None or work is None or prepared is None:
                raise error or reply_error(proceed, rank)
            fill = partial(self.fill, checkpoint, work, prepared, proceed)
            counts, error = result_or_error(fill, "reading", rank)
            counts = ReadCounts.total([counts or ReadCounts(), tried or ReadCounts()])
            progress.count(counts.bytes_read)
            progress.memory_bytes += counts.bytes_from_memory
            progress.enter(FINISH)
            if progress.abandoned is not None:
                raise located(progress.abandoned, self.target.url)
            outcome = yield LoadDone(key, rank, counts, error)
            progress.over = True
            if not isinstance(outcome, LoadOutcome):
                raise reply_error(outcome, rank)
            progress.is_good = True
            return LoadResult(outcome.counts, checkpoint, counts)

    def open(self) -> Storage:
        """Returns the storage.

        Raises:
            DeadlineError: Opening it exceeds `plan_timeout_s`.
            ParticipantError: A read of an earlier load still hangs in this process after
                `plan_timeout_s`.
            CheckpointError: The storage can't be opened.
        """
        self.progress.enter(OPEN)
        with _ended:
            alone = _ended.wait_for(lambda: not _hung, self.options.plan_timeout_s)
        if not alone:
            raise ParticipantError(
                f"Expected no read of an earlier load to be left in this process, but "
                f"{len(_hung)} hang in the storage and could still write into tensors. Wait until "
                f"the storage answers, or restart rank {self.rank}",
                rank=self.rank,
            )
        opened = self._in_time(partial(self.opener, self.target), "open the storage")
        self._opened = SmallFiles(opened)
        self._storage = WatchedStorage(self._opened, self.progress)
        return self._storage

    def checkpoint(self, go: LoadGo) -> Checkpoint:
        """Returns the checkpoint that every rank loads.

        Args:
            go: The coordinator's reply.

        Raises:
            DeadlineError: Reading it exceeds `plan_timeout_s`.
            CheckpointError: It can't be read.
        """
        read = partial(
            checkpoint_from,
            self._storage,
            go.kind,
            go.slot,
            go.record,
            table=go.table,
            checks_later=True,
        )
        found = self._in_time(read, "read what is stored")
        found.in_time = partial(self._in_time, what="read which chunks are stored")
        if found.manifest is not None:
            self._opened.expect(found.manifest.files)
        return found

    def prepare(self, checkpoint: Checkpoint, work: Targets, read_plan: ReadPlan) -> Prepared:
        """Returns the reads of this rank; changes no target.

        Args:
            checkpoint: The checkpoint.
            work: The values to load.
            read_plan: Plan of `work.wanted`.

        Raises:
            DeadlineError: It exceeds `plan_timeout_s`.
            CheckpointError: The checkpoint can't be read, or does not match `work`.
        """
        storage = self._storage
        table, options = checkpoint.table, self.options

        def prepare() -> Prepared:
            if checkpoint.check_file is not None and options.verify != "never":
                items = (*work.objects, *work.whole_items)
                chunks = {*read_plan.chunk.tolist(), *(chunk for chunk, _ in items)}
                checkpoint.know_checks(sorted(chunks))
            return prepare_reads(storage, table, read_plan, work.wanted, options=options)

        return self._in_time(prepare, "find what is stored")

    def load_trials(self, checkpoint: Checkpoint, work: Targets) -> ReadCounts:
        """Reads the values that show whether the rest can be loaded; changes no target.

        Args:
            checkpoint: The checkpoint.
            work: The values to load, prepared.

        Returns:
            Bytes of this rank that `fill` does not read again.

        Raises:
            StateDictError: Targets that share memory receive different values, or the groups of an
                optimizer do not fit.
            CheckpointError: The values can't be read.
        """
        total = ReadCounts()
        for trial in work.trials():
            read_plan = plan_reads(checkpoint.table, trial.wanted)
            prepared = self.prepare(checkpoint, trial, read_plan)
            counts = self._fill(self._storage, checkpoint, trial, prepared, step=COMPARE)
            if trial is work.decisive:
                total = counts
        return total

    def needs(self, prepared: Prepared) -> ReadNeeds | None:
        """Returns the reads that this rank can share with others; None if it reads for itself.

        Args:
            prepared: The reads of this rank.
        """
        choice, traits = self.options.share_reads, read_traits_of(self._opened)
        if choice is False or self.peers is None or not traits.shared:
            return None
        ranges = merged(*prepared.reads())
        if not len(ranges) or len(ranges) > MOST_RANGES:
            return None
        cost = None
        if choice == "auto":
            cost = ShareCost(traits.request_s, traits.bytes_per_s, traits.cached)
        return ReadNeeds(ranges.encode(), self.peers.node, cost)

    def fill(
        self,
        checkpoint: Checkpoint,
        work: Targets,
        prepared: Prepared,
        proceed: LoadProceed,
    ) -> ReadCounts:
        """Reads all values and puts them into place.

        Args:
            checkpoint: The checkpoint.
            work: The values to load.
            prepared: The reads for them.
            proceed: The coordinator's reply: the rank's share of the shared reads, and the names
                that no rank loads.

        Raises:
            StateDictError: No rank loads a name that some rank has to load; no target has changed.
            DeadlineError: It exceeds `read_timeout_s`.
            CheckpointError: The checkpoint can't be read, or does not match `work`.
        """
        if proceed.untaken is not None:
            work.check_taken(proceed.untaken)
        storage = self._storage
        memory = self._in_memory(checkpoint.attempt)
        source = storage if memory is None else WatchedStorage(memory, self.progress)
        shared = self._shared_source(source, checkpoint, prepared, proceed.share)
        if memory is None and shared is None:
            return self._fill(storage, checkpoint, work, prepared)
        most = None if memory is None else memory.most_threads
        try:
            with nullcontext() if memory is None else closing(memory):
                counts = self._fill(source, checkpoint, work, prepared, shared, most)
        except (DeadlineError, SaveCancelledError):
            raise
        except CheckpointError as error:
            from_memory = 0 if memory is None else memory.bytes_from_memory
            from_peers = 0 if shared is None else shared.bytes_from_peers
            if not from_memory and not from_peers:
                raise
            logger.warning(
                "What was in memory or came from other ranks could not be used, storage is read: "
                "%s",
                error,
            )
            counts = self._fill(storage, checkpoint, work, prepared)
            return replace(counts, bytes_read_instead=from_peers)
        return replace(counts, bytes_from_memory=0 if memory is None else memory.bytes_from_memory)

    def _in_memory(self, attempt: str | None) -> MemoryTierStorage | None:
        # Why so late: what was committed just now is kept a moment later.
        if self.kept is None or attempt is None or not self.options.from_memory:
            return None
        return self.kept(self._opened, attempt)

    def _shared_source(
        self,
        storage: Storage,
        checkpoint: Checkpoint,
        prepared: Prepared,
        share: RankShare | None,
    ) -> SharedReadStorage | None:
        if share is None or self.peers is None:
            return None
        progress, options = self.progress, self.options
        # Why not `key`: the call may have another number by now.
        key = progress.key or self.key
        exchange = self.peers.exchange(key, self.rank, share.here, progress.check)
        return SharedReadStorage(
            storage,
            checkpoint.table.files,
            share,
            self.rank,
            prepared.reads(),
            exchange,
            num_threads=options.num_threads,
            check=progress.check,
            moved=progress.moved,
        )

    def _fill(
        self,
        storage: Storage,
        checkpoint: Checkpoint,
        work: Targets,
        prepared: Prepared,
        shared: SharedReadStorage | None = None,
        most_threads: int | None = None,
        step: Step = READ,
    ) -> ReadCounts:
        table, options = checkpoint.table, self.options
        if most_threads is not None:
            options = replace(options, num_threads=min(options.num_threads, most_threads))
        self.progress.enter(step, prepared.read_plan.bytes_needed)
        end_s = time.monotonic() + options.read_timeout_s

        transforms = None if checkpoint.foreign is None else checkpoint.foreign.transforms

        def take_items(items: Sequence[_Item]) -> int:
            for batch in _batches(table, items):
                numbers = [chunk for chunk, _ in batch]
                how: dict[str, Any] = {"verify": options.verify, "transforms": transforms}
                read = partial(read_items, storage, table, numbers, **how)
                for (chunk, take), data in zip(batch, self._read(read, end_s), strict=True):
                    with naming_tensor(table, chunk):
                        take(data)
            return sum(int(table.item_bytes[chunk]) for chunk, _ in items)

        source, failed = storage if shared is None else shared, True
        try:
            if shared is not None:
                # Why first: other ranks wait for what this one reads for them.
                self._read(shared.start, end_s)
            # Why before tensors: an object that is refused or damaged is found while no target
            # has changed.
            items_bytes = take_items(work.objects)
            fill = partial(read_prepared, source, prepared, work.sink, options=options)
            stats = self._read(fill, end_s)
            failed = False
        finally:
            if shared is not None:
                self._read(partial(shared.finish, failed=failed), end_s)
        if shared is not None:
            stats = replace(stats, bytes_read=shared.bytes_from_storage)
        opaque = [(chunk, partial(work.place_item, chunk)) for chunk in stats.opaque]
        opaque_bytes = take_items(opaque)
        items_bytes += take_items(work.whole_items)
        needed = stats.bytes_needed + items_bytes
        read = stats.bytes_read + items_bytes + opaque_bytes
        work.finish()
        if shared is None:
            return ReadCounts(needed, read)
        return ReadCounts(
            needed,
            read,
            bytes_from_peers=shared.bytes_from_peers,
            bytes_read_instead=shared.bytes_instead,
        )

    def _in_time(self, work: Callable[[], T], what: str) -> T:
        timeout_s = self.options.plan_timeout_s
        overdue = partial(
            self.progress.overdue, what, "LoadOptions.plan_timeout_s", timeout_s, self.rank
        )
        return run_within(work, timeout_s, self.progress.stop, overdue)

    def _read(self, work: Callable[[], T], end_s: float) -> T:
        """Returns the result of a read; a read that times out is registered until it ends."""
        mark = object()
        under_way = {mark}

        def marked() -> T:
            try:
                return work()
            finally:
                with _ended:
                    under_way.clear()
                    _hung.discard(mark)
                    _ended.notify_all()

        overdue = partial(
            self.progress.overdue,
            "read its share",
            "LoadOptions.read_timeout_s",
            self.options.read_timeout_s,
            self.rank,
        )
        try:
            return run_within(marked, end_s - time.monotonic(), self.progress.stop, overdue)
        finally:
            with _ended:
                _hung.update(under_way)


_Item = tuple[int, Callable[[bytes], None]]


def _batches(table: ChunkTable, items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yields runs of objects of about `BATCH_BYTES`, each of which few threads read."""
    batch: list[_Item] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += int(table.item_bytes[item[0]])
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def drive(generator: Generator[Request, Reply, T], call: Callable[[Request], Reply]) -> T:
    """Carries the requests of a rank's generator, and returns its value.

    Args:
        generator: A generator of this module or of `rank_save`.
        call: Returns the reply to a request. A `CheckpointError` that it raises (no coordinator
            answered) is passed to the generator, which settles what it can.

    Raises:
        CheckpointError: The generator raised it.
    """
    try:
        request = next(generator)
        while True:
            try:
                reply = call(request)
            except CheckpointError as error:
                request = generator.throw(error)
            else:
                request = generator.send(reply)
    except StopIteration as end:
        value: T = end.value
        return value


def _make_plan(
    plan: Callable[[Checkpoint], Targets | LoadPlanning], checkpoint: Checkpoint, rank: int
) -> Generator[Request, Reply, tuple[Targets | None, ReadPlan | None, CheckpointError | None]]:
    try:
        planned = plan(checkpoint)
        work = (yield from planned) if isinstance(planned, Generator) else planned
        read_plan = plan_reads(checkpoint.table, work.wanted)
        work.check_coverage(read_plan)
    except Exception as error:  # noqa: BLE001 - reported to every rank, which raises it
        return None, None, to_wire(error, "planning the reads", rank=rank)
    return work, read_plan, None


_SKIPPED = (DamagedCheckpointError, CheckpointNotFoundError, KeyMissingError)


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """A range of steps of a run.

    Raises:
        InvalidRequestError: A bound is not an integer, or the range is empty.
    """

    at_most: int | None = None
    """Highest step; None for no limit."""
    newer_than: int | None = None
    """Only steps above this one; None for no limit."""

    def __post_init__(self) -> None:
        for name in ("at_most", "newer_than"):
            bound = plain_integer(getattr(self, name))
            object.__setattr__(self, name, bound)
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
                raise InvalidRequestError(
                    f"{name} must be a step, a whole number, but is {bound!r}", key=name
                )
        if None not in (self.at_most, self.newer_than) and not (
            self.newer_than < self.at_most  # type: ignore[operator]
        ):
            raise InvalidRequestError(
                f"no step is newer than {self.newer_than} and at most {self.at_most}; give bounds "
                f"with steps between them",
                key="newer_than",
            )

    def __contains__(self, step: int) -> bool:
        return (self.at_most is None or step <= self.at_most) and (
            self.newer_than is None or step > self.newer_than
        )

    def __str__(self) -> str:
        bounds = [
            f"{text} {bound}"
            for text, bound in (("newer than", self.newer_than), ("at most", self.at_most))
            if bound is not None
        ]
        return f" {' and '.join(bounds)}" if bounds else ""


@dataclass(frozen=True)
class Newest(Generic[T]):
    """The newest step that loaded."""

    value: T
    """Result of its load."""
    checkpoint_id: str
    step: int
    skipped: tuple[tuple[str, CheckpointError], ...] = field(default=())
    """Newer checkpoints that did not load, newest first, each with its error."""


def load_newest_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    run: Target,
    steps: StepRange,
    timeout_s: float,
    load: Callable[[str, bool], Generator[Request, Reply, T]],
    choose: Callable[[ListedRun], ListedRun] | None = None,
) -> Generator[Request, Reply, Newest[T]]:
    """Loads the newest step that can be loaded, as the part of one rank.

    Args:
        key: The operation with which the ranks agree on the steps; `load` has keys of its own.
        rank: This rank.
        world_size: Number of ranks.
        run: The directory of the step folders; the same on all ranks.
        steps: The steps that may be loaded; the same on all ranks.
        timeout_s: Deadline for all ranks to join, in seconds.
        load: As for `first_that_loads`, from a checkpoint id.
        choose: Returns the listed run with some of its steps; called on rank 0, and may raise.

    Returns:
        A generator that returns the same step on every rank.

    Raises:
        CheckpointNotFoundError: No step of the run is committed.
        DamagedCheckpointError: All committed steps are damaged; the message names all of them. The
            targets hold parts of several checkpoints.
        CheckpointError: An error against which an older step does not help, with a note on each
            skipped step.
    """
    names = yield from _agreed_names(key, rank, world_size, run, steps, timeout_s, choose)
    ids = {names.checkpoint_id(folder.name): folder.step for folder in names.steps}
    found, skipped = yield from first_that_loads(ids, load)
    if found is None:
        raise _nothing_loaded(names.url, steps, skipped)
    checkpoint_id, value = found
    return Newest(value, checkpoint_id, ids[checkpoint_id], tuple(skipped))


def first_that_loads(
    candidates: Iterable[C], load: Callable[[C, bool], Generator[Request, Reply, T]]
) -> Generator[Request, Reply, tuple[tuple[C, T] | None, list[tuple[C, CheckpointError]]]]:
    """Loads the first candidate that can be loaded, and returns it with its result.

    Args:
        candidates: Candidates in order of preference; the same on all ranks.
        load: Returns this rank's part in the load of a candidate. Its second argument says whether
            another load failed before (see `with_time_to_join`).

    Returns:
        The candidate and its result, or None, and the skipped candidates with their errors.

    Raises:
        CheckpointError: An error against which another candidate does not help, with a note on each
            skipped one.
    """
    skipped: list[tuple[C, CheckpointError]] = []
    is_late = False
    for one in candidates:
        for _ in range(2):  # one bad read is no proof of damage
            try:
                return (one, (yield from load(one, is_late))), skipped
            except CheckpointError as error:
                failed, is_late = error, True
                if not falls_back(error):
                    if skipped:
                        told = f"Newer checkpoints were skipped before: {_reasons(skipped)}"
                        add_note(error, told)
                    raise
        skipped.append((one, failed))
    return None, skipped


def with_time_to_join(options: LoadOptions) -> LoadOptions:
    """Returns the options for a load after one that failed.

    *Why*: a rank that still reads what another rank found damaged joins the next load late.
    """
    return replace(options, plan_timeout_s=options.plan_timeout_s + options.read_timeout_s)


def falls_back(error: CheckpointError) -> bool:
    """Returns whether an older checkpoint may load although one failed with this error.

    It may if the checkpoint is damaged or missing on every rank that failed. It does not help
    against a request that does not match, a storage that fails or a rank that died. *Why* an unsafe
    checkpoint is not skipped: it is not damaged, and a person has to decide whether to trust it.

    Args:
        error: Error of the load, the same on every rank.
    """
    causes = [error, *(cause for cause, _ in error.failures.values())]
    return all(
        isinstance(cause, _SKIPPED) and not isinstance(cause, UnsafeCheckpointError)
        for cause in causes
    )


def _agreed_names(
    key: OpKey,
    rank: int,
    world_size: int,
    run: Target,
    steps: StepRange,
    timeout_s: float,
    choose: Callable[[ListedRun], ListedRun] | None,
) -> Generator[Request, Reply, ListedRun]:
    """Returns the steps to try, as listed by rank 0.

    *Why* one rank: the ranks list at different times, and a network filesystem may show different
    files to different machines.
    """

    def listed() -> list[Any]:
        found = _candidates(run, steps)
        found = found if choose is None else choose(found)
        return [found.url, [[folder.name, folder.step] for folder in found.steps]]

    tag = f"newest step{steps} of {run.url}"
    request = Exchange(key, rank, world_size, tag, {}, timeout_s)
    url, names = yield from decided_on_rank_0(request, listed, "listing the run")
    return ListedRun(url, tuple(ListedStep(name, step) for name, step in names))


def _candidates(run: Target, steps: StepRange) -> ListedRun:
    listed = list_run(run)
    wanted = tuple(folder for folder in listed.steps if folder.step in steps)
    if wanted:
        return ListedRun(listed.url, wanted)
    if listed.is_checkpoint and not listed.steps:
        hint = "; it is itself a checkpoint: load it with ray_dcp.load"
    else:
        hint = "; give the directory in which each checkpoint has a folder that ends in its step"
    raise CheckpointNotFoundError(
        f"expected a checkpoint{steps} in a folder of the run {listed.url}, found "
        f"{listed.in_words()}{hint}",
        checkpoint_id=listed.url,
    )


def _nothing_loaded(
    url: str, steps: StepRange, skipped: Sequence[tuple[str, CheckpointError]]
) -> CheckpointError:
    damaged = [path for path, error in skipped if not isinstance(error, CheckpointNotFoundError)]
    if not damaged:
        return CheckpointNotFoundError(
            f"expected a committed checkpoint{steps} in the run {url}, but none of "
            f"{len(skipped)} folder(s) holds one: {_reasons(skipped)}",
            checkpoint_id=url,
        )
    return DamagedCheckpointError(
        f"expected a sound checkpoint{steps} in the run {url}, but none of {len(skipped)} "
        f"folder(s) can be loaded: {_reasons(skipped)}. The state dict may hold parts of what was "
        f"tried: load into it again before you use it. `ray-dcp verify` lists all the damage",
        checkpoint_id=url,
    )


def _reasons(skipped: Sequence[tuple[object, CheckpointError]]) -> str:
    return "; ".join(f"{path}: {error.message}" for path, error in skipped)
