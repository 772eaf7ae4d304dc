"""How a rank joins a save: with a fingerprint of its items where that is enough, else with rows."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from ray_dcp.errors import InternalError
from ray_dcp.options import SaveOptions
from ray_dcp.plan.columns import encode
from ray_dcp.plan.contents import contents_of, without_contents
from ray_dcp.plan.fingerprint import fingerprint
from ray_dcp.plan.values import Columns
from ray_dcp.protocol.messages import (
    OpKey,
    Reply,
    Request,
    SaveAgain,
    SaveGo,
    SaveJoin,
    SendItems,
    Target,
)
from ray_dcp.runtime.plan_memory import PlanMemory, Remembered
from ray_dcp.runtime.rank_captured import Captured
from ray_dcp.runtime.telling import attempt, naming, refusal
from ray_dcp.runtime.vitals import Vitals

__all__ = ["join_save"]

ROWS_AT_ONCE = 64
"""Up to so many ranks send their rows with the first join of a session, which spares a round trip.
With more, the coordinator asks one rank of each fingerprint: most hold the same."""


def join_save(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: SaveOptions,
    capture: Callable[[], Captured],
    staged: bool = False,
    vitals: Vitals | None = None,
    memory: PlanMemory | None = None,
    node: str = "",
) -> Generator[Request, Reply, tuple[SaveGo, Captured]]:
    """Returns the first half of a rank's save: what it is to write, and what it captured.

    Args:
        key: The operation.
        rank: This rank.
        world_size: Number of ranks.
        target: Where to save.
        options: How.
        capture: Makes the local plan; called once, at the start.
        staged: Whether stagers write the bytes.
        vitals: Where it notes how far it is.
        memory: Plans of earlier saves of this rank's session; this one's is added.
        node: Names the node of this rank, where that is known.

    Raises:
        CheckpointError: The save failed, on this rank or on another: the same error on all.
    """
    vitals = vitals or Vitals()
    plans = memory or PlanMemory()
    vitals.begin(key)
    vitals.enter("capturing")
    captured, error = attempt(capture, "capturing the state dict", rank)
    join = SaveJoin(key, rank, world_size, target, options, b"", error, staged, node=node)
    known: Remembered | None = None
    if captured is not None:
        first = partial(_first, join, captured.columns, plans)
        described, error = attempt(first, "encoding the plan", rank)
        join, known = described or (replace(join, error=error), None)
    stats = getattr(captured, "stats", b"")  # of a `MeasuredCapture`
    join = replace(join, stats=stats, capture_s=vitals.doing.phase_s)
    vitals.enter("waiting")
    with naming(target.url):
        reply = yield join
        while isinstance(reply, SendItems) and captured is not None:
            again = partial(_again, join, reply, captured.columns)
            answer, error = attempt(again, "encoding the plan", rank)
            join = answer or replace(join, error=error, asked=join.asked + 1)
            reply = yield join
        if isinstance(reply, SaveAgain) and known is not None and reply.digest == known.digest:
            told = (reply.attempt, reply.epoch, known.plan, reply.warnings)
            reply = SaveGo(*told, origin=reply.origin, create_if_absent=reply.create_if_absent)
        elif isinstance(reply, SaveAgain):
            raise InternalError(
                f"expected the coordinator to send rank {rank} its part of the plan, but it named "
                f"one that this rank does not have. Please report this",
                rank=rank,
            )
        if not isinstance(reply, SaveGo) or captured is None:
            raise refusal(reply, rank)
    if reply.digest:
        plans.put(join.fingerprint, Remembered(reply.digest, reply.plan, *reply.groups))
    return reply, captured


def _first(
    join: SaveJoin, columns: Columns, memory: PlanMemory
) -> tuple[SaveJoin, Remembered | None]:
    """Returns the join, and the part of an earlier plan that it names."""
    options = join.options
    name = fingerprint(
        columns, world_size=join.world_size, container=options.container,
        part_bytes=options.part_bytes, to_lowest_rank=options.dedup_save_to_lowest_rank,
    )  # fmt: skip
    known = memory.get(name)
    if known is not None:
        values = known.values(contents_of(columns))
        return replace(join, fingerprint=name, known=known.digest, values=values), known
    few = join.world_size <= ROWS_AT_ONCE
    rows = encode(without_contents(columns)) if few else b""
    return replace(join, fingerprint=name, columns=rows, contents=contents_of(columns)), None


def _again(join: SaveJoin, asked: SendItems, columns: Columns) -> SaveJoin:
    rows = encode(without_contents(columns)) if asked.rows else b""
    return replace(join, columns=rows, contents=contents_of(columns), asked=join.asked + 1)
