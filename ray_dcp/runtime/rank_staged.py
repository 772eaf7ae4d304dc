"""A save whose bytes the node's stager writes, while its rank waits for the outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import OpKey, Reply, Request, SaveOutcome, Target
from ray_dcp.runtime.keeping import Keeping
from ray_dcp.runtime.plan_memory import PlanMemory
from ray_dcp.runtime.rank_captured import Captured
from ray_dcp.runtime.rank_join import join_save
from ray_dcp.runtime.vitals import Vitals

__all__ = ["save_staged_rank"]


def save_staged_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: SaveOptions,
    capture: Callable[[], Captured],
    keeping: Keeping,
    vitals: Vitals,
    memory: PlanMemory | None = None,
    node: str = "",
) -> Generator[Request, Reply, SaveOutcome]:
    """Returns the part of one rank in a save whose bytes somebody else writes.

    Args:
        key: As for `save_rank`, and so the following.
        rank: This rank.
        world_size: Number of ranks.
        target: Where to save.
        options: How.
        capture: Makes the local plan; called once, at the start.
        keeping: Holds the bytes, and writes them.
        vitals: Where it notes how far it is.
        memory: Plans of earlier saves of this rank's session.
        node: Names the node of this rank.

    Raises:
        CheckpointError: As `save_rank` does.
    """
    go, captured = yield from join_save(
        key, rank=rank, world_size=world_size, target=target, options=options, capture=capture,
        staged=keeping.survives, vitals=vitals, memory=memory, node=node,
    )  # fmt: skip
    committed = False
    try:
        vitals.enter("staging")
        # What goes wrong here is told to all by `finish`.
        keeping.stage(vitals.key or key, go, captured, target, options, vitals)
        outcome = yield from keeping.finish()
        committed = vitals.over = True
    finally:
        keeping.release(committed=committed)
    warnings = dict.fromkeys([*captured.warnings, *go.warnings, *outcome.warnings])
    return replace(outcome, warnings=tuple(warnings))
