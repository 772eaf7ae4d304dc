"""What stock DCP of every torch that was tried has written is read under every torch.

The checkpoints lie in `tests/golden`; `python -m tests.support.programs.stock_golden` writes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from tests.support.exchange_cases import blanks, differences
from tests.support.programs.stock_golden import state

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("stock-*"))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Planner(stock.DefaultLoadPlanner):
    """A planner of the user's."""


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    return request.param


def expected(golden: Path) -> dict[str, Any]:
    """Returns what was saved there, in plain tensors."""
    since_2_14 = float(golden.name.partition("-")[2].partition(".")[2]) >= 14
    return state(checkpointable=since_2_14)


def plain(values: Any) -> Any:
    """Returns the values without parameters, which a load into plain tensors does not make."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    return values.detach() if isinstance(values, torch.nn.Parameter) else values


@pytest.mark.parametrize("planner", [None, Planner], ids=["native", "hooks"])
def test_it_loads_bit_by_bit(golden: Path, planner: type[Planner] | None):
    wanted = plain(expected(golden))
    into = blanks(wanted)
    ray_dcp.load(into, checkpoint_id=golden, planner=planner and planner(), no_dist=True)
    assert differences(into, wanted) == []


def test_it_is_whole_and_read_whole(golden: Path):
    report = ray_dcp.verify(golden)
    assert report.problems == ()
    assert report.checked_bytes > 1_000
    wanted = plain(expected(golden))
    del wanted["nothing"]  # of which stock DCP leaves no trace
    found = ray_dcp.read_state_dict(golden)
    found["optimizer"]["state"] = {
        int(key): value for key, value in found["optimizer"]["state"].items()
    }
    assert differences(found, wanted) == []


def test_a_save_of_it_is_read_by_the_stock_dcp_of_this_torch(golden: Path, tmp_path: Path):
    ray_dcp.import_checkpoint(golden, tmp_path / "c")
    wanted = plain(expected(golden))
    into = blanks(wanted)
    stock.load(into, checkpoint_id=tmp_path / "c", no_dist=True)
    assert differences(into, wanted) == []
