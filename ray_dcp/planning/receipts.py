"""Checks the receipts of a plan's files against the plan."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ray_dcp.commit_protocol.messages import FileReceipts
from ray_dcp.core.checksums import length_with_checks, num_blocks_many
from ray_dcp.core.grouping import offsets_of
from ray_dcp.core.values import BoolArray, GlobalPlan, Int64Array
from ray_dcp.errors import InternalError


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
            f"its deferred items, found {next(iter(receipts.take(np.array([file]))))}"
            for file in np.flatnonzero(_misfits(plan, keys, receipts)).tolist()
        ]
    if wrong:
        raise InternalError("receipts do not fit the plan: " + "; ".join(wrong), key=attempt)
    # Invariant: deferred chunks and places are both sorted by file and, within a file, by row.
    return receipts.places[:, 1:]


def _misfits(plan: GlobalPlan, keys: list[str], receipts: FileReceipts) -> BoolArray:
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
