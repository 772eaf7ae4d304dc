"""What one rank does in a save or a load: generators of requests that take replies.

They know neither torch nor Ray: who captures a state dict or plans its targets is handed in, and
who carries the requests (`drive`, `inline.run_ranks`) is not their business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ray_dcp.errors import CheckpointError
from ray_dcp.options import LoadOptions
from ray_dcp.plan.reading import ReadPlan, plan_reads
from ray_dcp.protocol.messages import (
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    Reply,
    Request,
    Target,
)
from ray_dcp.protocol.verdict import located
from ray_dcp.runtime.peers import Peers
from ray_dcp.runtime.rank_read import KeptIn, LoadWork, ReadCounts, Reading
from ray_dcp.runtime.rank_save import Captured, save_rank
from ray_dcp.runtime.telling import attempt, naming, refusal, reported
from ray_dcp.runtime.vitals import Vitals
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.checkpoint import Checkpoint
from ray_dcp.transfer.reader import Prepared

__all__ = [
    "Captured",
    "LoadResult",
    "LoadWork",
    "drive",
    "load_rank",
    "save_rank",
]

T = TypeVar("T")
Opener = Callable[[Target], Storage]


LoadPlanning = Generator[Request, Reply, LoadWork]
"""A plan that asks the other ranks before it ends with the work."""


@dataclass(frozen=True)
class LoadResult:
    """What came of a load on one rank."""

    outcome: LoadOutcome
    checkpoint: Checkpoint
    bytes_needed: int
    """Of this rank."""
    bytes_read: int
    """By this rank."""
    bytes_from_peers: int = 0
    """Of this rank."""


def load_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: LoadOptions,
    plan: Callable[[Checkpoint], LoadWork | LoadPlanning],
    opener: Opener = open_storage,
    vitals: Vitals | None = None,
    kept: KeptIn | None = None,
    peers: Peers | None = None,
) -> Generator[Request, Reply, LoadResult]:
    """Returns the part of one rank in a load.

    Args:
        key: The operation.
        rank: This rank.
        world_size: Number of ranks.
        target: What to load.
        options: How.
        plan: From the checkpoint to what this rank wants of it, or a generator that ends with
            that, for planners that talk to the other ranks; changes nothing yet.
        opener: What opens the storage.
        vitals: Where it notes how far it is, and is told to stop.
        kept: Returns the storage with what nodes keep of an attempt in memory, or None.
        peers: How the other ranks are reached, to share reads with them.

    Returns:
        A generator that ends when every rank has loaded.

    Raises:
        CheckpointError: The load failed, on this rank or on another: the same error on all. No
            target was touched unless the failure came while reading.
    """
    vitals = vitals or Vitals()
    vitals.begin(key)
    with naming(target.url):
        reading = Reading(opener, target, options, vitals, rank, kept, peers)
        storage, error = attempt(reading.open, "opening the storage", rank)
        vitals.enter("waiting")
        go = yield LoadJoin(key, rank, world_size, target, options, error)
        if not isinstance(go, LoadGo) or storage is None:
            raise refusal(go, rank)

        checkpoint, error = attempt(partial(reading.checkpoint, go), "opening", rank)
        work: LoadWork | None = None
        prepared: Prepared | None = None
        if checkpoint is not None:
            vitals.enter("planning")
            work, read_plan, error = yield from _planned(plan, checkpoint, rank)
            if work is not None and read_plan is not None:
                prepare = partial(reading.prepare, checkpoint, work, read_plan)
                prepared, error = attempt(prepare, "planning the reads", rank)
        vitals.enter("waiting")
        may_share = world_size > 1 and prepared is not None
        needs = reading.needs(prepared) if may_share and prepared is not None else None
        proceed = yield LoadReady(key, rank, error, needs)
        if not isinstance(proceed, LoadProceed):
            raise refusal(proceed, rank)
        if checkpoint is None or work is None or prepared is None:
            raise error or refusal(proceed, rank)
        # Why not `key`: the call may have another number by now.
        fill = partial(reading.fill, checkpoint, work, prepared, proceed.share, vitals.key or key)
        counts, error = attempt(fill, "reading", rank)
        vitals.enter("waiting")
        if vitals.abandoned is not None:
            raise located(vitals.abandoned, target.url)
        counts = counts or ReadCounts()
        done = LoadDone(
            key, rank, counts.needed, counts.read, error, counts.from_memory,
            counts.from_peers, counts.instead,
        )  # fmt: skip
        outcome = yield done
        vitals.over = True
        if not isinstance(outcome, LoadOutcome):
            raise refusal(outcome, rank)
        return LoadResult(outcome, checkpoint, counts.needed, counts.read, counts.from_peers)


def drive(generator: Generator[Request, Reply, T], call: Callable[[Request], Reply]) -> T:
    """Returns what a rank generator ends with, after carrying its requests.

    Args:
        generator: Of this module.
        call: Returns the reply to a request. A `CheckpointError` that it raises (nobody
            answered) goes to the generator, which finds out what it can.

    Raises:
        CheckpointError: What the generator raises.
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


def _planned(
    plan: Callable[[Checkpoint], LoadWork | LoadPlanning], checkpoint: Checkpoint, rank: int
) -> Generator[Request, Reply, tuple[LoadWork | None, ReadPlan | None, CheckpointError | None]]:
    try:
        planned = plan(checkpoint)
        work = (yield from planned) if isinstance(planned, Generator) else planned
        read_plan = plan_reads(checkpoint.table, work.wanted)
        work.check_coverage(read_plan)
    except Exception as error:  # noqa: BLE001 - told to every rank, which raises it
        return None, None, reported(error, "planning the reads", rank)
    return work, read_plan, None
