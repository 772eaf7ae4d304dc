"""From a plan and its files' receipts to the chunk table of what was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ray_dcp.core.checksums import length_with_checks, num_blocks_many
from ray_dcp.core.grouping import offsets_of
from ray_dcp.core.values import ChunkTable, GlobalPlan, Int64Array
from ray_dcp.errors import InternalError
from ray_dcp.protocol.messages import (
    DeferredPlace,
    FileReceipt,
    FileReceipts,
    check_digests,
    pack_receipts,
)

Receipts = Mapping[int, FileReceipt] | FileReceipts
"""By file, or as columns in the order of the files."""


def finish_table(plan: GlobalPlan, attempt: str, receipts: Receipts) -> ChunkTable:
    """Returns the planned table with checksums, the places of deferred items and final keys.

    A deferred chunk's payload is its whole item: `payload_offset` is `item_offset`, and its block
    checksums cover all of it.

    Args:
        plan: The plan. With `checks_at_end` the table has no checksums.
        attempt: Id of the attempt under which the files were written.
        receipts: The receipt of each of the plan's files, by its index.

    Raises:
        InternalError: Receipts and plan do not fit: a file is missing or not planned, has another
            key or length, another number of checksums, or deferred items other than planned. All
            such files are named.
        DamagedCheckpointError: A receipt's checksums do not have its digest.
    """
    table = plan.table
    found, written = checked_receipts(plan, attempt, receipts)
    deferred = np.flatnonzero(table.payload_offset < 0)
    places = np.stack([table.item_offset, table.item_bytes, table.block_bytes])
    places[:, deferred] = found.T
    payload_offset, payload_bytes = table.payload_offset.copy(), table.payload_bytes.copy()
    payload_offset[deferred], payload_bytes[deferred] = places[:2, deferred]
    # Careful: a plan whose files have the checksums leads to a table without any.
    blocks = num_blocks_many(payload_bytes, 0 * places[2] if plan.checks_at_end else places[2])
    return replace(
        table,
        files=tuple(key.replace("{attempt}", attempt) for key in table.files),
        item_offset=places[0],
        item_bytes=places[1],
        payload_offset=payload_offset,
        payload_bytes=payload_bytes,
        block_bytes=places[2],
        check_start=offsets_of(blocks),
        checks=written.checks,
    )


def checked_receipts(
    plan: GlobalPlan, attempt: str, receipts: Receipts
) -> tuple[Int64Array, FileReceipts]:
    """Returns all that the receipts add to the plan, in the order of its chunks.

    Args:
        plan: The plan.
        attempt: As for `finish_table`.
        receipts: As there.

    Returns:
        `(int64[k, 3], receipts)`: item offset, item bytes and block bytes of each deferred chunk,
        and the receipts as columns, by file.

    Raises:
        CheckpointError: As `finish_table` does.
    """
    if not isinstance(receipts, FileReceipts) or not _fit(plan, attempt, receipts):
        named = receipts
        if isinstance(named, FileReceipts):
            named = {receipt.file: receipt for receipt in named}
        wrong = _check_receipts(plan, attempt, named)
        if wrong:
            raise InternalError("receipts do not fit the plan: " + "; ".join(wrong), key=attempt)
        receipts = pack_receipts(named[file] for file in range(len(plan.file_rank)))
        check_digests(receipts)
    # Invariant: deferred chunks and places are both in the order of files and, within, rows.
    return receipts.places[:, 1:], receipts


def num_checks(plan: GlobalPlan, receipts: FileReceipts) -> Int64Array:
    """Returns how many block checksums each file has, by plan and places of deferred items.

    Args:
        plan: The plan.
        receipts: Of its files, in their order.
    """
    places = receipts.places
    late = offsets_of(num_blocks_many(places[:, 2], places[:, 3]))[offsets_of(receipts.num_places)]
    return np.array(_shape_of(plan).fixed_checks, dtype=np.int64) + np.diff(late)


def _fit(plan: GlobalPlan, attempt: str, receipts: FileReceipts) -> bool:
    """Whether receipts are as planned, looked at as columns; what is wrong is told elsewhere."""
    shape = _shape_of(plan)
    places, starts = receipts.places, offsets_of(receipts.num_places)
    if not (
        np.array_equal(receipts.file, np.arange(len(plan.file_rank)))
        and receipts.keys == shape.keys.replace("{attempt}", attempt)
        and np.array_equal(receipts.num_places, shape.num_places)
        and np.array_equal(places[:, 0], shape.rows)
        and (places[:, 2] >= 0).all()
        and (places[:, 3] > 0).all()
    ):
        return False
    # Where each deferred item may begin: where the one before it ends, or the fixed area.
    ends = places[:, 1] + places[:, 2]
    has = np.flatnonzero(receipts.num_places)
    before = np.append(0, ends)[:-1] if len(ends) else ends
    before[starts[has]] = plan.file_bytes[has]
    expected = plan.file_bytes.copy()
    expected[has] = ends[starts[has + 1] - 1]
    told = num_checks(plan, receipts)
    if plan.checks_at_end:
        expected, told = length_with_checks(expected, told), np.zeros_like(told)
    return bool(
        (places[:, 1] >= before).all()
        and np.array_equal(receipts.num_bytes, expected)
        and np.array_equal(receipts.count, told)
    )


def _check_receipts(
    plan: GlobalPlan, attempt: str, receipts: Mapping[int, FileReceipt]
) -> list[str]:
    wrong = [
        f"file {file} is not planned" for file in receipts if file not in range(len(plan.file_rank))
    ]
    shape = _shape_of(plan)
    for file, template in enumerate(plan.table.files):
        key = template.replace("{attempt}", attempt)
        receipt = receipts.get(file)
        if receipt is None:
            wrong.append(f"{key} of rank {plan.file_rank[file]} has none")
            continue
        fixed, rows = shape.fixed_checks[file], shape.deferred.get(file, [])
        end = int(plan.file_bytes[file])
        told = _check_receipt(receipt, file, key, fixed, rows, end, plan.checks_at_end)
        wrong += [f"{key} of rank {plan.file_rank[file]}: {line}" for line in told]
    return wrong


class _Shape(NamedTuple):
    """What receipts of a plan have to look like."""

    fixed_checks: list[int]
    deferred: dict[int, list[int]]
    keys: str
    num_places: Int64Array
    rows: Int64Array


_shapes: WeakKeyDictionary[GlobalPlan, _Shape] = WeakKeyDictionary()


def _shape_of(plan: GlobalPlan) -> _Shape:
    """Why kept: a plan that is used again has the same every time."""
    shape = _shapes.get(plan)
    if shape is None:
        table = plan.table
        blocks = num_blocks_many(np.maximum(table.payload_bytes, 0), table.block_bytes)
        starts = np.searchsorted(table.file, np.arange(len(table.files) + 1))
        deferred: dict[int, list[int]] = {}
        late = np.flatnonzero(table.payload_offset < 0)
        for chunk in late.tolist():
            rows = deferred.setdefault(int(table.file[chunk]), [])
            rows.append(int(plan.source_row[chunk]))
        shape = _shapes[plan] = _Shape(
            np.diff(offsets_of(blocks)[starts]).tolist(),
            deferred,
            "\n".join(table.files),
            np.bincount(table.file[late], minlength=len(table.files)),
            plan.source_row[late].astype(np.int64),
        )
    return shape


def _check_receipt(
    receipt: FileReceipt,
    file: int,
    key: str,
    fixed_checks: int,
    rows: list[int],
    end: int,
    checks_at_end: bool,
) -> list[str]:
    if (receipt.file, receipt.key) != (file, key):
        return [f"expected the receipt of file {file}, found that of {receipt.file}, {receipt.key}"]
    found = [place.row for place in receipt.deferred]
    if found != rows:
        return [f"expected the places of rows {rows}, found those of {found}"]
    wrong = []
    for place in receipt.deferred:
        if place.item_offset < end or place.item_bytes < 0 or place.block_bytes <= 0:
            wrong.append(f"expected an item at byte {end} or later, found {place}")
        end = max(end, place.item_offset + place.item_bytes)
    expected = fixed_checks
    if receipt.deferred:
        expected += int(_deferred_checks(receipt.deferred).sum())
    if checks_at_end:
        end, expected = length_with_checks(end, expected), 0
    if receipt.num_bytes != end:
        wrong.append(f"expected {end} bytes, found {receipt.num_bytes}")
    if len(receipt.checks) != expected:
        wrong.append(f"expected {expected} block checksums, found {len(receipt.checks)}")
    return wrong


def _deferred_checks(places: tuple[DeferredPlace, ...]) -> Int64Array:
    lengths = np.array([(place.item_bytes, place.block_bytes) for place in places], dtype=np.int64)
    lengths = lengths.reshape(-1, 2)
    return num_blocks_many(lengths[:, 0], lengths[:, 1])
