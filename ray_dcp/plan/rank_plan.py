"""One rank's part of a global plan: its files, in the order of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.grouping import run_of
from ray_dcp.plan.values import FilePlan, GlobalPlan, RankPlan

__all__ = ["RankPlans", "rank_plan"]


def rank_plan(plan: GlobalPlan, rank: int) -> RankPlan:
    """Returns what one rank writes. No files when it has nothing to write.

    Args:
        plan: The plan of all ranks.
        rank: One of them.

    Raises:
        InvalidRequestError: The plan has no such rank.

    Complexity:
        O(chunks of the rank).
    """
    if not 0 <= rank < plan.world_size:
        raise InvalidRequestError(
            f"expected a rank from 0 to {plan.world_size - 1}, found {rank}", rank=rank
        )
    part = plan.part_of(rank)
    if part is not None:
        return part
    # Invariant: files are in the order of their ranks.
    start, stop = run_of(plan.file_rank, rank)
    files = tuple(_file_plan(plan, file) for file in range(start, stop))
    return RankPlan(rank, plan.container, files)


class RankPlans(Sequence[RankPlan]):
    """The parts of all ranks, each made when it is asked for.

    Args:
        plan: The plan of all ranks.
    """

    def __init__(self, plan: GlobalPlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return self._plan.world_size

    @overload
    def __getitem__(self, rank: int) -> RankPlan: ...

    @overload
    def __getitem__(self, rank: slice) -> list[RankPlan]: ...

    def __getitem__(self, rank: int | slice) -> RankPlan | list[RankPlan]:
        ranks = range(len(self))[rank]
        if isinstance(ranks, range):
            return [rank_plan(self._plan, one) for one in ranks]
        return rank_plan(self._plan, ranks)


def _file_plan(plan: GlobalPlan, file: int) -> FilePlan:
    table = plan.table
    chunks = np.arange(*run_of(table.file, file))
    # Invariant: a file's deferred chunks come last.
    fixed = int(np.count_nonzero(table.payload_offset[chunks] >= 0))
    own = chunks[:fixed]
    tensor = table.tensor[own]
    return FilePlan(
        file=file,
        key=table.files[file],
        header=plan.file_headers[file],
        num_bytes=int(plan.file_bytes[file]),
        dtypes=table.dtypes,
        row=plan.source_row[own],
        source_start=plan.source_start[own],
        dtype=table.dtype[tensor],
        ndim=table.ndim[tensor],
        size=table.size[own],
        requires_grad=table.requires_grad[tensor],
        item_offset=table.item_offset[own],
        item_bytes=table.item_bytes[own],
        payload_offset=table.payload_offset[own],
        payload_bytes=table.payload_bytes[own],
        block_bytes=table.block_bytes[own],
        deferred=plan.source_row[chunks[fixed:]],
        checks_at_end=plan.checks_at_end,
    )
