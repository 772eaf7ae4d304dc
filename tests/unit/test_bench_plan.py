"""The bench of planning says what it should, on a few ranks."""

import gc

import pytest

from tests.bench import plan, plan_templates


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


@pytest.mark.parametrize("regular", [True, False])
def test_the_second_save_is_warm(regular):
    found = plan.measure(3, 5, regular, 3)
    assert [save["rows moved"] for save in found["saves"]] == [15, 0, 0]
    assert ["MakePlan" in save["cpu_s"] for save in found["saves"]] == [True, False, False]
    assert {save["messages"] for save in found["saves"]} == {6}
    assert any(key.endswith(".parquet") for key in found["files"])


def test_the_first_save_of_the_next_job_moves_no_rows():
    found = plan_templates.measure(3, 5, regular=False)
    assert [found[job]["rows moved"] for job in ("cold", "template")] == [15, 0]
    assert "MakePlan" not in found["template"]["cpu_s"]
    assert found["template_bytes"] > 0


def test_of_many_ranks_that_hold_the_same_one_sends_it(monkeypatch):
    monkeypatch.setattr("ray_dcp.runtime.rank_join.ROWS_AT_ONCE", 0)
    same = next(plan.slabs(1, 4, regular=True))
    monkeypatch.setattr(plan, "slabs", lambda world, tensors, regular: [same] * world)
    found = plan.measure(5, 4, True, 2)
    assert [save["rows moved"] for save in found["saves"]] == [4, 0]


def test_peers_limit_and_balance_are_numbers():
    assert plan.stock_row_us(2, 3) > 0
    assert plan.limit_row_us(2, 300) >= 0
    found = plan.balance(16, plan.LAYER, 1)
    assert 1 <= found.over_writers < 1.01
    assert found[2] > 16
    assert found[3:] == (16, 2, 16, 2)
    assert plan.balance(16, plan.SMALL, 1)[2:] == (16, 4, 2, 4, 2)
