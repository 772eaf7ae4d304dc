"""One rank's part of a global plan: its files, in the order of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload
from weakref import WeakKeyDictionary

import numpy as np

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.grouping import run_of
from ray_dcp.plan.joint import EXTENT_ALIGNMENT, Extents, extents_of
from ray_dcp.plan.values import FilePlan, GlobalPlan, Int64Array, RankPlan

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
    extents = _extents(plan)
    if extents is not None:
        return RankPlan(rank, plan.container, _file_extents(plan, extents, rank))
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


_known: WeakKeyDictionary[GlobalPlan, list[Extents | None]] = WeakKeyDictionary()


def _extents(plan: GlobalPlan) -> Extents | None:
    """Why kept: all ranks' parts are asked for, one after another."""
    if plan not in _known:
        _known[plan] = [extents_of(plan)]
    return _known[plan][0]


def _file_extents(plan: GlobalPlan, extents: Extents, rank: int) -> tuple[FilePlan, ...]:
    """Returns a rank's part of each file that it has one of."""
    chunks = extents.chunk[extents.first[rank] : extents.first[rank + 1]]
    files = plan.table.file[chunks]
    found = []
    for file in np.unique(files).tolist():
        own = chunks[files == file]
        company = extents.company[file]
        one = _file_plan(plan, file, own)
        if len(company) > 1:
            fixed = len(one.row)
            # Invariant: an extent begins on a page, and its first item less than one behind that.
            start = int(one.item_offset[0]) // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT if fixed else 0
            end = int(one.item_offset[-1] + one.item_bytes[-1]) if fixed else 0
            one = replace(one, start=start, num_bytes=end, company=company)
        found.append(one)
    return tuple(found)


def _file_plan(plan: GlobalPlan, file: int, chunks: Int64Array | None = None) -> FilePlan:
    """Returns what is written of a file: all of it, or these chunks, which one rank writes."""
    table = plan.table
    if chunks is None:
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
