"""A chunk table is only made of receipts that fit the plan; others name the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ray_dcp.core.checksums import digest
from ray_dcp.core.values import GlobalPlan, Kind
from ray_dcp.errors import DamagedCheckpointError, InternalError
from ray_dcp.planning.finish import finish_table
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.protocol.messages import FileReceipt
from tests.plan_cases import Case, Piece, Tensor, write


def planned(container: str = "torch_save") -> tuple[GlobalPlan, dict[int, FileReceipt]]:
    shards = (Piece((0,), (9000,), (0,)), Piece((9000,), (9000,), (1,)))
    case = Case(
        2,
        (
            Tensor("w", Kind.TENSOR, "uint8", (18000,), False, shards),
            Tensor("o", Kind.OBJECT, "", (), False, (Piece((), (), (1,)),)),
            Tensor("p", Kind.OBJECT, "", (), False, (Piece((), (), (1,)),)),
        ),
    )
    columns = case.columns()
    plan = make_plan(columns, container=container)
    return plan, write(case, columns, plan, "a1")[1]


def test_a_finished_table_has_places_checksums_and_keys() -> None:
    plan, receipts = planned()
    table = finish_table(plan, "a1", receipts)
    assert table.files == ("__0_0.a1.distcp", "__1_0.a1.distcp")
    assert np.diff(table.check_start).tolist() == [0, 0, 0, 0], "the files end with them"
    places = receipts[1].deferred
    assert table.item_offset[2:].tolist() == [place.item_offset for place in places]
    assert table.payload_offset[2:].tolist() == [place.item_offset for place in places]
    assert table.payload_bytes[2:].tolist() == [place.item_bytes for place in places]
    assert (plan.table.item_offset[2:] == -1).all(), "the plan itself must not change"


def _deferred(receipt: FileReceipt, **changes: int) -> FileReceipt:
    first = replace(receipt.deferred[0], **changes)
    return replace(receipt, deferred=(first, *receipt.deferred[1:]))


def _some_checks(receipt: FileReceipt) -> FileReceipt:
    checks = np.ones(2, np.uint64)
    return replace(receipt, checks=checks, digest=digest(checks))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: replace(r, key="__1_0.a2.distcp"), "found that of 1, __1_0.a2.distcp"),
        (lambda r: replace(r, file=0), "expected the receipt of file 1, found that of 0"),
        (lambda r: replace(r, num_bytes=r.num_bytes + 1), "bytes, found"),
        (_some_checks, "expected 0 block checksums, found 2"),
        (lambda r: replace(r, deferred=r.deferred[::-1]), "expected the places of rows"),
        (lambda r: replace(r, deferred=r.deferred[:1]), "expected the places of rows"),
        (lambda r: _deferred(r, item_offset=5), "expected an item at byte"),
        (lambda r: _deferred(r, item_bytes=-1), "expected an item at byte"),
        (lambda r: _deferred(r, block_bytes=0), "expected an item at byte"),
    ],
)
def test_a_receipt_that_does_not_fit_is_named(
    change: Callable[[FileReceipt], FileReceipt], told: str
) -> None:
    plan, receipts = planned()
    receipts[1] = change(receipts[1])
    with pytest.raises(InternalError) as caught:
        finish_table(plan, "a1", receipts)
    assert told in str(caught.value)
    assert "__1_0.a1.distcp of rank 1" in str(caught.value)


def test_missing_and_unplanned_files_are_told_together() -> None:
    plan, receipts = planned()
    with pytest.raises(InternalError) as caught:
        finish_table(plan, "a1", {7: receipts[0]})
    for told in ("file 7 is not planned", "__0_0.a1.distcp of rank 0", "__1_0.a1.distcp of rank 1"):
        assert told in str(caught.value)


def test_checksums_that_changed_on_the_way_are_damage() -> None:
    plan, receipts = planned("safetensors")
    assert np.diff(finish_table(plan, "a1", receipts).check_start).tolist() == [9, 9, 1, 1]
    checks = receipts[0].checks.copy()
    checks[1] ^= np.uint64(1)
    receipts[0] = replace(receipts[0], checks=checks)
    with pytest.raises(DamagedCheckpointError, match="a1/rank-00000-part-00000"):
        finish_table(plan, "a1", receipts)
