"""One rank's part of a global plan: its files, in the order of their bytes."""

from __future__ import annotations

import numpy as np

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.values import FilePlan, GlobalPlan, RankPlan

__all__ = ["rank_plan"]


def rank_plan(plan: GlobalPlan, rank: int) -> RankPlan:
    """Returns what one rank writes. No files when it has nothing to write.

    Args:
        plan: The plan of all ranks.
        rank: One of them.

    Raises:
        InvalidRequestError: The plan has no such rank.

    Complexity:
        O(files of the plan + chunks of the rank).
    """
    if not 0 <= rank < plan.world_size:
        raise InvalidRequestError(
            f"expected a rank from 0 to {plan.world_size - 1}, found {rank}", rank=rank
        )
    files = np.flatnonzero(plan.file_rank == rank).tolist()
    return RankPlan(rank, plan.container, tuple(_file_plan(plan, file) for file in files))


def _file_plan(plan: GlobalPlan, file: int) -> FilePlan:
    table = plan.table
    start, stop = np.searchsorted(table.file, [file, file + 1]).tolist()
    # Invariant: a file's deferred chunks come last.
    fixed = start + int(np.count_nonzero(table.payload_offset[start:stop] >= 0))
    own = slice(start, fixed)
    tensor = table.tensor[own]
    return FilePlan(
        file=file,
        key=table.files[file],
        header=plan.file_headers[file],
        num_bytes=int(plan.file_bytes[file]),
        dtypes=table.dtypes,
        row=plan.source_row[own].copy(),
        source_start=plan.source_start[own].copy(),
        dtype=table.dtype[tensor],
        ndim=table.ndim[tensor],
        size=table.size[own].copy(),
        requires_grad=table.requires_grad[tensor],
        item_offset=table.item_offset[own].copy(),
        item_bytes=table.item_bytes[own].copy(),
        payload_offset=table.payload_offset[own].copy(),
        payload_bytes=table.payload_bytes[own].copy(),
        block_bytes=table.block_bytes[own].copy(),
        deferred=plan.source_row[fixed:stop].copy(),
    )
