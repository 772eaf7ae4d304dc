"""The bench of planning says what it should, on a few ranks."""

import gc

import pytest

from ray_dcp.protocol import planning
from tests.bench import plan


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


@pytest.mark.parametrize("layout", ["regular", "irregular"])
def test_the_second_save_is_warm(layout):
    found = plan.measure(3, 5, layout, 3)
    assert [save["rows moved"] for save in found["saves"]] == [15, 0, 0]
    assert ["MakePlan" in save["cpu_s"] for save in found["saves"]] == [True, False, False]
    assert {save["messages"] for save in found["saves"]} == {6}
    assert any(key.endswith(".table") for key in found["files"])


def test_of_many_ranks_that_hold_the_same_one_sends_it(monkeypatch):
    monkeypatch.setattr("ray_dcp.runtime.rank_save.ROWS_AT_ONCE", 0)
    same = next(plan.slabs(1, 4, regular=True))
    monkeypatch.setattr(plan, "slabs", lambda world, tensors, regular: [same] * world)
    found = plan.measure(5, 4, "regular", 2)
    assert [save["rows moved"] for save in found["saves"]] == [4, 0]


@pytest.mark.parametrize(("layout", "rows"), [("HSDP", 7 * 6), ("stages", 5 * 16 * 6)])
def test_layouts_of_large_jobs_move_few_rows(layout, rows, monkeypatch):
    monkeypatch.setattr(planning, "MANY_UNKNOWN", 0)
    found = plan.measure(256, 6, layout, 2)
    assert [save["rows moved"] for save in found["saves"]] == [rows, 0]


def test_the_peer_is_a_number():
    assert plan.stock_row_us(2, 3) > 0
