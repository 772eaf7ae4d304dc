"""A planned asynchronous save as a value: what outlives the coordinator that planned it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ray_dcp.plan.values import GlobalPlan
from ray_dcp.protocol.commands import RecordsRead
from ray_dcp.protocol.messages import SaveJoin

__all__ = ["StagedPlan", "company_of"]


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


def company_of(files: Sequence[Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Returns the ranks that share a file, for each file that several write.

    Args:
        files: Of each rank.

    Example:
        >>> company_of([{0}, {1}, {0}])
        {0: (0, 2)}
    """
    ranks: dict[int, list[int]] = {}
    for rank, own in enumerate(files):
        for file in own:
            ranks.setdefault(file, []).append(rank)
    return {file: tuple(found) for file, found in ranks.items() if len(found) > 1}
