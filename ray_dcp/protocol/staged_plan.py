"""A planned asynchronous save as a value: what outlives the coordinator that planned it."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dcp.plan.values import GlobalPlan
from ray_dcp.protocol.commands import RecordsRead
from ray_dcp.protocol.messages import SaveJoin

__all__ = ["StagedPlan"]


@dataclass(frozen=True, eq=False)
class StagedPlan:
    """What another coordinator needs to end a save that is planned, as a value.

    What was written so far is not in it: the stagers know that.
    """

    first: SaveJoin
    epoch: int
    """Of the coordinator that planned it."""
    attempt: str
    plan: GlobalPlan
    files: tuple[frozenset[int], ...]
    """`FilePlan.file` of each rank's part."""
    seen: RecordsRead
    warnings: tuple[str, ...]
