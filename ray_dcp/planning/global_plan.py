"""The plan of a save: from what every rank holds to who writes what, and where.

`make_plan` merges the ranks' columns (`merge`: copies, conflicts), divides the bytes among the
ranks (`sharing`: who writes) and lays out the files (`layout`: where). `rank_plan` and `RankPlans`
return one rank's part of the plan: its files, in the order of their bytes.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ray_dcp.core.columns import check
from ray_dcp.core.grouping import run_of
from ray_dcp.core.values import (
    NO_GROUPS,
    Columns,
    FilePlan,
    GlobalPlan,
    RankPlan,
)
from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.planning.layout import LARGE_BYTES, lay_out
from ray_dcp.planning.merge import check_held, distinct_boxes, group_values, merge
from ray_dcp.planning.sharing import share_out

MIN_PIECE_BYTES = LARGE_BYTES
"""Shortest piece into which a replicated box is cut. Why: a piece costs about 1 KiB on storage and
a row in every table, and a piece that starts on a page should be worth that."""


MIN_WRITER_BYTES = 16 << 20
"""Least that a rank should write if other ranks hold the same bytes. Why: a small file costs a
storage as much as a large one, and 10,000 ranks would write 10,000 small files."""


def make_plan(
    columns: Sequence[Columns],
    *,
    part_bytes: int = 1 << 30,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    min_writer_bytes: int = 0,
    to_lowest_rank: bool = False,
    nodes: Sequence[int] | None = None,
    checked: bool = False,
) -> GlobalPlan:
    """Decides who writes what, and where, for one state.

    Every element of every tensor is in exactly one chunk, each chunk is one range of the C-order
    bytes of an item that its rank holds, and files never overlap. Equal columns give equal plans,
    in every process.

    Args:
        columns: What each rank holds; the index is the rank. At least one.
        part_bytes: Target length of a file; at least 1.
        min_piece_bytes: Shortest piece into which a replicated box is cut; at least 1.
        min_writer_bytes: Least that a rank writes in total, approximately, if it is assigned bytes
            that other ranks hold as well. Ignored where there are too few bytes.
        to_lowest_rank: The lowest rank that holds a replicated item writes all of it.
        nodes: Number of each rank's node (`sharing.node_numbers`). The bytes written are balanced
            over nodes first. By default each rank is on a node of its own.
        checked: The columns come from `columns.decode`, which has checked them.

    Returns:
        The plan. A rank that writes nothing has no file.

    Raises:
        InvalidRequestError: A rank's columns are invalid.
        PlanConflictError: Ranks disagree about an FQN, or boxes overlap or reach out of their
            tensor. All conflicts are reported at once.
        CoverageError: No rank holds some elements of a tensor, and there is no other fault.
        UnsupportedValueError: A tensor's dtype has no raw bytes that can be stored.

    Complexity:
        A few sorts of as many numbers as there are rows: 1.4 us a row for 1000 ranks that hold
        1000 shards each (2 shared cores).
    """
    if not checked:
        _check(columns)
    held = merge(columns)
    boxes = distinct_boxes(held)
    check_held(held, boxes)
    pieces = share_out(
        held,
        boxes,
        world_size=len(columns),
        min_piece_bytes=min_piece_bytes,
        min_writer_bytes=min_writer_bytes,
        to_lowest_rank=to_lowest_rank,
        nodes=nodes,
    )
    layout = lay_out(held, pieces, part_bytes=part_bytes)
    row = pieces.held[layout.piece]
    plan = GlobalPlan(
        world_size=len(columns),
        table=layout.table,
        source_rank=held.rank[row],
        source_row=held.row[row],
        source_start=pieces.start[layout.piece],
        file_rank=layout.file_rank,
        file_bytes=layout.file_bytes,
        disagreements=pieces.disagreements,
        digest=b"",
        groups=group_values(held, boxes, pieces.differing),
    )
    return replace(plan, digest=_digest_of(plan))


def _check(columns: Sequence[Columns]) -> None:
    wrong = [f"rank {rank}: {line}" for rank, own in enumerate(columns) for line in check(own)]
    if wrong:
        raise InvalidRequestError("the items can't be planned:\n  " + "\n  ".join(wrong))


def _digest_of(plan: GlobalPlan) -> bytes:
    """Returns 32 bytes that name everything that the ranks will write and report.

    Disagreements are not part of it: they change only the rank that an item comes from.
    """
    table, groups = plan.table, plan.groups
    arrays = (plan.source_rank, plan.source_row, plan.source_start, plan.file_bytes)
    words = [
        plan.world_size, table.names, table.paths, table.dtypes, table.files, groups.told,
    ]  # fmt: skip
    state = blake2b(json.dumps(words).encode(), digest_size=32)
    columns: tuple[npt.NDArray[Any], ...] = (
        table.kind, table.dtype, table.ndim, table.shape, table.requires_grad, table.tensor,
        table.offset, table.size, table.file, table.item_offset, table.item_bytes,
        table.payload_offset, table.payload_bytes, table.block_bytes, groups.rank, groups.place,
        groups.group, *arrays,
    )  # fmt: skip
    for array in columns:
        state.update(str((array.dtype.str, array.shape)).encode())
        state.update(np.ascontiguousarray(array).data)
    return state.digest()


_tables: WeakKeyDictionary[GlobalPlan, bytes] = WeakKeyDictionary()


def encoded_table(plan: GlobalPlan) -> bytes:
    """Returns the planned chunk table as it is stored, encoded once for all saves of a plan."""
    data = _tables.get(plan)
    if data is None:
        data = _tables[plan] = encode_table(plan.table)
    return data


def pack_for_commit(plan: GlobalPlan) -> bytes:
    """Returns the part of a plan that its commit needs; with many rows, about a byte per row.

    The assignment of bytes to ranks, and the contents that must be equal, are left out.
    """
    few = {field.name: getattr(plan, field.name) for field in fields(plan)} | {
        "table": encoded_table(plan),
        "source_rank": None,
        "source_row": plan.source_row[plan.table.payload_offset < 0],
        "source_start": None,
        "groups": NO_GROUPS,
    }
    return pickle.dumps(few, pickle.HIGHEST_PROTOCOL)


def unpack_for_commit(data: bytes) -> GlobalPlan:
    """Returns the plan encoded by `pack_for_commit`, without the parts that it leaves out."""
    few = pickle.loads(data)
    table = decode_table(few["table"])
    row = np.zeros(table.num_chunks, dtype=np.int32)
    row[table.payload_offset < 0] = few["source_row"]
    known = {"table": table, "source_rank": 0 * row, "source_row": row, "source_start": 0 * row}
    plan = GlobalPlan(**{**few, **known})
    _tables[plan] = few["table"]
    return plan


def rank_plan(plan: GlobalPlan, rank: int) -> RankPlan:
    """Returns what one rank writes; no files if it writes nothing.

    Args:
        plan: The plan of all ranks.
        rank: One of them.

    Complexity:
        O(chunks of the rank).
    """
    # Invariant: files are sorted by rank.
    start, stop = run_of(plan.file_rank, rank)
    files = tuple(_file_plan(plan, file) for file in range(start, stop))
    return RankPlan(rank, files)


class RankPlans(Sequence[RankPlan]):
    """The plans of all ranks, each made on access.

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
    )
