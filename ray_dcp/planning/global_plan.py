"""The plan of a save: from what every rank holds to who writes what, where.

`make_plan` merges the ranks' columns (`merge`: copies, conflicts), divides the bytes among the
ranks (`share_out`: who writes), then lays out the files (`layout`: where). `rank_plan` and
`RankPlans` return one rank's part of the plan: its files, in the order of their bytes.
`checked_receipts` compares what the ranks have written with the plan.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ray_dcp.commit_protocol.messages import FileReceipts
from ray_dcp.core.checksums import length_with_checks, num_blocks_many
from ray_dcp.core.values import (
    NO_GROUPS,
    BoolArray,
    Columns,
    FilePlan,
    GlobalPlan,
    Int64Array,
    RankPlan,
    offsets_of,
    run_of,
)
from ray_dcp.errors import InternalError
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.planning.layout import LARGE_BYTES, lay_out
from ray_dcp.planning.merge import (
    check_held,
    distinct_boxes,
    group_values,
    merge,
)
from ray_dcp.planning.share_out import share_out

MIN_PIECE_BYTES = LARGE_BYTES
"""Shortest piece into which a replicated box is cut. Why: a piece costs about 1 KiB on storage and
a row in every table, and a piece that starts on a page should be worth that."""


def make_plan(
    columns: Sequence[Columns],
    *,
    part_bytes: int = 1 << 30,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    min_writer_bytes: int = 0,
    to_lowest_rank: bool = False,
    nodes: Sequence[int] | None = None,
) -> GlobalPlan:
    """Decides who writes what, and where, for one state.

    Every element of every tensor is in exactly one chunk, each chunk is one range of the C-order
    bytes of an item that its rank holds, and files never overlap. Equal columns give equal plans,
    in every process.

    Args:
        columns: What each rank holds, valid by `columns.check`; the index is the rank. At least
            one.
        part_bytes: Target length of a file; at least 1.
        min_piece_bytes: Shortest piece into which a replicated box is cut; at least 1.
        min_writer_bytes: Least that a rank writes in total, approximately, if it is assigned bytes
            that other ranks hold as well. Ignored where there are too few bytes.
        to_lowest_rank: The lowest rank that holds a replicated item writes all of it.
        nodes: Number of each rank's node (`node_numbers`). The bytes written are balanced
            over nodes first. By default each rank is on a node of its own.

    Returns:
        The plan. A rank that writes nothing has no file.

    Raises:
        PlanConflictError: Ranks disagree about an FQN, or boxes overlap or reach out of their
            tensor. All conflicts are reported at once.
        CoverageError: No rank holds some elements of a tensor, and there is no other fault.
        UnsupportedValueError: A tensor's dtype has no raw bytes that can be stored.

    Complexity:
        A few sorts of as many numbers as there are rows: 1.4 us a row for 1000 ranks that hold
        1000 shards each (2 shared cores).
    """
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
        settled=layout.settled,
    )
    data = encode_table(plan.table)
    named = replace(plan, digest=_digest_of(plan, data))
    _tables[named] = data
    return named


def _digest_of(plan: GlobalPlan, table: bytes) -> bytes:
    """Returns 32 bytes that name everything that the ranks will write and report.

    Disagreements are not part of it: they change only the rank that an item comes from.

    Args:
        plan: The plan.
        table: Its chunk table, encoded.
    """
    groups = plan.groups
    arrays = (plan.source_rank, plan.source_row, plan.source_start, plan.file_bytes)
    words = [plan.world_size, groups.told, len(table), np.flatnonzero(plan.settled).tolist()]
    state = blake2b(json.dumps(words).encode(), digest_size=32)
    state.update(table)
    for array in (*arrays, groups.rank, groups.place, groups.group):
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

    def __getitem__(self, rank: Any) -> Any:
        return rank_plan(self._plan, range(len(self))[rank])


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
        settled=bool(plan.settled[file]),
    )


def checked_receipts(plan: GlobalPlan, attempt: str, receipts: FileReceipts) -> Int64Array:
    """Returns what the receipts add to the plan, in the order of its chunks.

    Args:
        plan: The plan.
        attempt: Id of the attempt that wrote the files.
        receipts: The receipt of each of the plan's files, in their order.

    Returns:
        int64[k, 3]: item offset, item bytes and block bytes of each deferred chunk.

    Raises:
        InternalError: Receipts and plan do not match: a file is missing or not planned, has another
            key or length, or other deferred items than planned. All such files are named.
    """
    keys = [key.replace("{attempt}", attempt) for key in plan.table.files]
    there, files = {*receipts.file.tolist()}, {*range(len(keys))}
    wrong = [f"file {file} is not planned" for file in sorted(there - files)]
    wrong += [
        f"{keys[file]} of rank {plan.file_rank[file]} has none" for file in sorted(files - there)
    ]
    if not wrong:
        wrong = [
            f"{keys[file]} of rank {plan.file_rank[file]}: its key, its length or the places of "
            f"its deferred items, found {[*receipts][file]}"
            for file in np.flatnonzero(_find_misfits(plan, keys, receipts)).tolist()
        ]
    if wrong:
        raise InternalError("receipts do not fit the plan: " + "; ".join(wrong), key=attempt)
    # Invariant: deferred chunks and places are both sorted by file and, within a file, by row.
    return receipts.places[:, 1:]


def _find_misfits(plan: GlobalPlan, keys: list[str], receipts: FileReceipts) -> BoolArray:
    """Returns which files have a receipt that differs from the plan: bool[f]."""
    shape = _shape_of(plan)
    places, num_places = receipts.places, receipts.num_places
    if receipts.keys != "\n".join(keys):
        return np.array([one.key != key for one, key in zip(receipts, keys, strict=True)])
    if not np.array_equal(num_places, shape.num_places):
        return np.asarray(num_places != shape.num_places)
    # Where each deferred item may begin: at the end of the one before, or of the fixed area.
    starts, ends = offsets_of(num_places), places[:, 1] + places[:, 2]
    has = np.flatnonzero(num_places)
    before = np.append(0, ends)[:-1] if len(ends) else ends
    before[starts[has]] = plan.file_bytes[has]
    wrong = (places[:, 0] != shape.rows) | (places[:, 1] < before)
    wrong |= (places[:, 2] < 0) | (places[:, 3] <= 0)
    expected = plan.file_bytes.copy()
    expected[has] = ends[starts[has + 1] - 1]
    late = np.diff(offsets_of(num_blocks_many(places[:, 2], places[:, 3]))[starts])
    found = receipts.num_bytes != length_with_checks(expected, shape.fixed_checks + late)
    found[np.repeat(np.arange(len(keys)), num_places)[wrong]] = True
    return np.asarray(found)


class _Shape(NamedTuple):
    """What the receipts of a plan must look like."""

    fixed_checks: Int64Array
    num_places: Int64Array
    rows: Int64Array


_shapes: WeakKeyDictionary[GlobalPlan, _Shape] = WeakKeyDictionary()


def _shape_of(plan: GlobalPlan) -> _Shape:
    """Why cached: it is the same for every save that uses the plan."""
    shape = _shapes.get(plan)
    if shape is None:
        table = plan.table
        blocks = num_blocks_many(np.maximum(table.payload_bytes, 0), table.block_bytes)
        starts = np.searchsorted(table.file, np.arange(len(table.files) + 1))
        late = np.flatnonzero(table.payload_offset < 0)
        shape = _shapes[plan] = _Shape(
            np.diff(offsets_of(blocks)[starts]),
            np.bincount(table.file[late], minlength=len(table.files)),
            plan.source_row[late].astype(np.int64),
        )
    return shape
