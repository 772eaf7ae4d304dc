"""What one rank reads in a load, each step under its deadline: storage in threads of their own.

What user code does with the values happens in the thread that called `load`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    ParticipantError,
    SaveCancelledError,
)
from ray_dcp.options import LoadOptions
from ray_dcp.plan.read_once import RankShare, ReadNeeds, ShareCost, merged
from ray_dcp.plan.reading import ReadPlan, Wanted
from ray_dcp.plan.values import ChunkTable
from ray_dcp.protocol.messages import LoadGo, OpKey, Target
from ray_dcp.runtime.peers import Peers
from ray_dcp.runtime.rank_memory import KeptIn, MemorySource
from ray_dcp.runtime.vitals import Vitals, WatchedStorage
from ray_dcp.store.storage import Storage, read_traits_of
from ray_dcp.transfer.blocks import naming
from ray_dcp.transfer.checkpoint import Checkpoint
from ray_dcp.transfer.opening import checkpoint_from
from ray_dcp.transfer.reader import (
    Prepared,
    ReadStats,
    TargetSink,
    prepare_reads,
    read_item,
    read_prepared,
)
from ray_dcp.transfer.relay import Relay
from ray_dcp.transfer.threads import run_within

__all__ = ["KeptIn", "LoadWork", "ReadCounts", "Reading"]

MOST_RANGES = 1 << 16
"""A rank that has to read more separate ranges than this reads for itself: the plan of who reads
what would cost more than it spares."""

BATCH_BYTES = 64 << 20
"""Objects that are read before the caller's thread takes them, in bytes."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

_hung: set[object] = set()
"""Reads that were given up and may still write into targets when their storage answers."""
_ended = threading.Condition()
"""Told when one of them has ended."""


@dataclass(frozen=True)
class ReadCounts:
    """What one rank read, in bytes."""

    needed: int = 0
    read: int = 0
    from_memory: int = 0
    """Of those that were read."""
    from_peers: int = 0
    """Got from another rank, and not among those that were read."""
    instead: int = 0
    """Of those that were read, what should have come from another rank."""


class LoadWork(Protocol):
    """What a rank wants of a checkpoint; `ray_dcp.seam.targets.Targets` is one."""

    @property
    def wanted(self) -> Wanted:
        """The boxes of raw tensor bytes."""
        ...

    @property
    def sink(self) -> TargetSink:
        """Where they go."""
        ...

    @property
    def objects(self) -> Sequence[tuple[int, Callable[[bytes], None]]]:
        """Chunks to read whole, and what takes their bytes."""
        ...

    def place_item(self, chunk: int, data: bytes, /) -> None:
        """Takes a whole `torch.save` item of a tensor chunk that has no raw bytes."""
        ...

    def check_coverage(self, plan: ReadPlan, /) -> None:
        """Raises `CoverageError` when something wanted is stored nowhere."""
        ...

    def finish(self) -> None:
        """Puts everything into place, after all bytes have come."""
        ...


class Reading:
    """The storage of one load on one rank.

    Args:
        opener: What opens it.
        target: What to load.
        options: Its deadlines, and how to read.
        vitals: Where it notes how far it is.
        rank: This rank.
        kept: As for `rank.load_rank`.
        peers: How the other ranks are reached.
    """

    def __init__(
        self,
        opener: Callable[[Target], Storage],
        target: Target,
        options: LoadOptions,
        vitals: Vitals,
        rank: int,
        kept: KeptIn | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._peers = peers or Peers()
        self._memory = MemorySource(kept if options.from_memory else None)
        self._opener = opener
        self._target = target
        self._options = options
        self._vitals = vitals
        self._rank = rank
        self._storage: Storage | None = None
        self._opened: Storage | None = None

    def open(self) -> Storage:
        """Returns the storage.

        Raises:
            DeadlineError: It takes longer than `plan_timeout_s`.
            ParticipantError: A read of an earlier load still hangs in this process, and did so
                for `plan_timeout_s`.
            CheckpointError: It can't be opened.
        """
        self._vitals.enter("opening")
        with _ended:
            alone = _ended.wait_for(lambda: not _hung, self._options.plan_timeout_s)
        if not alone:
            raise ParticipantError(
                f"Expected no read of an earlier load to be left in this process, but "
                f"{len(_hung)} hang in the storage and could still write into tensors. Wait until "
                f"the storage answers, or restart rank {self._rank}",
                rank=self._rank,
            )
        opened = self._in_time(partial(self._opener, self._target), "open the storage")
        self._opened = opened
        self._storage = WatchedStorage(opened, self._vitals)
        return self._storage

    def checkpoint(self, go: LoadGo) -> Checkpoint:
        """Returns the checkpoint that every rank loads.

        Args:
            go: Which.

        Raises:
            DeadlineError: It takes longer than `plan_timeout_s`.
            CheckpointError: It can't be read.
        """
        self._vitals.enter("opening")
        storage = self._storage or self.open()
        read = partial(
            checkpoint_from, storage, go.kind, go.slot, go.record, table=go.table, checks_later=True
        )
        found = self._in_time(read, "read what is stored")
        found.in_time = partial(self._in_time, what="read which chunks are stored")
        if self._opened is not None:
            self._memory.ask(self._opened, found.attempt)
        return found

    def prepare(
        self, checkpoint: Checkpoint, work: LoadWork, read_plan: ReadPlan
    ) -> Prepared:  # fmt: skip
        """Returns what is to be read; no target is touched.

        Args:
            checkpoint: What is stored.
            work: What is wanted.
            read_plan: Of `work.wanted`.

        Raises:
            DeadlineError: It takes longer than `plan_timeout_s`.
            CheckpointError: It can't be read, or does not fit.
        """
        storage = self._storage or self.open()
        table, options = checkpoint.table, self._options

        def prepare() -> Prepared:
            if checkpoint.check_file is not None and options.verify != "never":
                chunks = {*read_plan.chunk.tolist(), *(chunk for chunk, _ in work.objects)}
                checkpoint.know_checks(sorted(chunks))
            return prepare_reads(storage, table, read_plan, work.wanted, options=options)

        return self._in_time(prepare, "find what is stored")

    def needs(self, prepared: Prepared) -> ReadNeeds | None:
        """Returns what this rank may get from others or read for them; None: nothing.

        Args:
            prepared: What is to be read.
        """
        choice, traits = self._options.share_reads, read_traits_of(self._opened)
        if choice is False or not self._peers.node or not traits.shared:
            return None
        ranges = merged(*prepared.reads())
        if not len(ranges) or len(ranges) > MOST_RANGES:
            return None
        cost = None
        if choice == "auto":
            cost = ShareCost(traits.request_s, traits.bytes_per_s, traits.cached)
        return ReadNeeds(ranges.encode(), self._peers.node, cost)

    def fill(
        self,
        checkpoint: Checkpoint,
        work: LoadWork,
        prepared: Prepared,
        share: RankShare | None = None,
        key: OpKey | None = None,
    ) -> ReadCounts:
        """Puts everything that is wanted into place.

        Args:
            checkpoint: What is stored.
            work: What is wanted.
            prepared: What is to be read for it.
            share: What is to be read for others, or comes from them.
            key: Of the load; with a share.

        Raises:
            DeadlineError: It takes longer than `read_timeout_s`.
            CheckpointError: It can't be read, or does not fit.
        """
        storage = self._storage or self.open()
        memory = self._memory.found()
        source = storage if memory is None else WatchedStorage(memory, self._vitals)
        relay = self._relay(source, checkpoint, prepared, share, key)
        if memory is None and relay is None:
            return self._fill(storage, checkpoint, work, prepared)
        most = None if memory is None else memory.most_threads
        try:
            counts = self._fill(source, checkpoint, work, prepared, relay, most)
        except (DeadlineError, SaveCancelledError):
            raise
        except CheckpointError as error:
            from_memory = 0 if memory is None else memory.bytes_from_memory
            from_peers = 0 if relay is None else relay.bytes_from_peers
            if not from_memory and not from_peers:
                raise
            logger.warning(
                "What was in memory or came from other ranks could not be used, storage is read: "
                "%s", error,
            )  # fmt: skip
            counts = self._fill(storage, checkpoint, work, prepared)
            return replace(counts, instead=from_peers)
        return replace(counts, from_memory=0 if memory is None else memory.bytes_from_memory)

    def _relay(
        self,
        storage: Storage,
        checkpoint: Checkpoint,
        prepared: Prepared,
        share: RankShare | None,
        key: OpKey | None,
    ) -> Relay | None:
        if share is None or key is None:
            return None
        vitals, options = self._vitals, self._options
        exchange = self._peers.exchange(key, self._rank, vitals.check)
        if exchange is None:
            return None
        return Relay(
            storage, checkpoint.table.files, share, self._rank, prepared.reads(), exchange,
            budget_bytes=self._peers.budget_bytes(share.here),
            num_threads=options.num_threads, check=vitals.check, moved=vitals.moved,
        )  # fmt: skip

    def _fill(
        self,
        storage: Storage,
        checkpoint: Checkpoint,
        work: LoadWork,
        prepared: Prepared,
        relay: Relay | None = None,
        most_threads: int | None = None,
    ) -> ReadCounts:
        table, options = checkpoint.table, self._options
        if most_threads is not None:
            options = replace(options, num_threads=min(options.num_threads, most_threads))
        self._vitals.enter("reading", prepared.read_plan.bytes_needed)
        end_s = time.monotonic() + options.read_timeout_s

        def chunks() -> ReadStats:
            if relay is None:
                return read_prepared(storage, prepared, work.sink, options=options)
            failed = True
            relay.start()
            try:
                stats = read_prepared(relay, prepared, work.sink, options=options)
                failed = False
            finally:
                relay.finish(failed=failed)
            return replace(stats, bytes_read=relay.bytes_from_storage)

        stats = self._read(chunks, end_s)
        needed, read = stats.bytes_needed, stats.bytes_read
        opaque = [(chunk, partial(work.place_item, chunk)) for chunk in stats.opaque]
        transforms = None if checkpoint.foreign is None else checkpoint.foreign.transforms
        for batch in _batches(table, [*opaque, *work.objects]):

            def items(batch: Sequence[_Item] = batch) -> list[bytes]:
                return [
                    read_item(storage, table, chunk, verify=options.verify, transforms=transforms)
                    for chunk, _ in batch
                ]

            for (chunk, take), data in zip(batch, self._read(items, end_s), strict=True):
                read += int(table.item_bytes[chunk])
                with naming(table, chunk):
                    take(data)
        needed += sum(int(table.item_bytes[chunk]) for chunk, _ in work.objects)
        work.finish()
        if relay is None:
            return ReadCounts(needed, read)
        return ReadCounts(
            needed, read, from_peers=relay.bytes_from_peers, instead=relay.bytes_instead
        )

    def _in_time(self, work: Callable[[], T], what: str) -> T:
        timeout_s = self._options.plan_timeout_s
        overdue = partial(
            self._vitals.overdue, what, "LoadOptions.plan_timeout_s", timeout_s, self._rank
        )
        return run_within(work, timeout_s, self._vitals.stop, overdue)

    def _read(self, work: Callable[[], T], end_s: float) -> T:
        """Returns what a read gives; one that is given up is remembered until it ends."""
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
            self._vitals.overdue, "read its share", "LoadOptions.read_timeout_s",
            self._options.read_timeout_s, self._rank,
        )  # fmt: skip
        try:
            return run_within(marked, end_s - time.monotonic(), self._vitals.stop, overdue)
        finally:
            with _ended:
                _hung.update(under_way)


_Item = tuple[int, Callable[[bytes], None]]


def _batches(table: ChunkTable, items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Cuts objects into runs of about `BATCH_BYTES`, so that few threads read them."""
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
