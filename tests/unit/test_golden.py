"""Checkpoints of the format as it is, and of stock DCP of each torch that was tried, are read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from ray_dcp import SaveOptions
from ray_dcp.format import table as table_format
from ray_dcp.format.manifest import FORMAT_VERSION, decode_record
from ray_dcp.format.table import decode_table, end_of
from ray_dcp.io.checkpoint import newest_record
from ray_dcp.store.opening import open_storage
from tests.support import world
from tests.support.arrays import GOLDEN_ARRAYS, State, same_state
from tests.support.checkpoints import GOLDEN
from tests.support.exchange_cases import blanks, differences
from tests.support.format_cases import difference
from tests.support.programs.stock_golden import state
from tests.support.world import Warm, load_state

ATTEMPT = "0123456789abcdef"

ARRAYS = GOLDEN_ARRAYS
OBJECTS = ARRAYS | {"step": 7, "note": "golden"}


@dataclass(frozen=True)
class Golden:
    """A checkpoint that is kept."""

    states: list[State]
    """Of each rank."""
    chunks: int
    has_groups: bool = False
    stock_metadata: bool = False

    @property
    def state(self) -> State:
        return {name: value for state in self.states for name, value in state.items()}


CASES = {
    "arrays": Golden([ARRAYS] * 3, 8),
    "objects": Golden([OBJECTS] * 3, 10, stock_metadata=True),
    "groups": Golden([OBJECTS] * 3, 10, has_groups=True),
}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def saved(name: str, path: Path) -> None:
    """Saves a case as it was saved when it was kept."""
    case = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "new_attempt", lambda: ATTEMPT)
        patch.setattr(table_format, "GROUP_ROWS", 3 if case.has_groups else 1 << 16)
        options = SaveOptions(num_threads=1, stock_metadata=case.stock_metadata)
        warm = Warm(len(case.states), str(path))
        for result in warm.save(list(case.states), options=options):
            result.get()


@pytest.fixture
def golden(name: str) -> Path:
    path = GOLDEN / f"format-{FORMAT_VERSION}-{name}"
    if os.environ.get("RENEW_GOLDEN") and not path.exists():
        saved(name, path)
    return path


def table_of(path: Path) -> bytes:
    (table,) = path.glob("chunks.*.table")
    return table.read_bytes()


def test_it_loads_and_is_whole(name: str, golden: Path) -> None:
    case = CASES[name]
    storage = open_storage(str(golden))
    committed = newest_record(storage)
    assert committed is not None
    assert committed.manifest.format_version == FORMAT_VERSION
    for world_size in (1, 5):
        assert same_state(case.state, load_state(storage, case.state, world_size))
    report = ray_dcp.verify(golden)
    assert (report.problems, report.notes) == ((), ())
    first = next(iter(case.state))
    wanted = {
        first: torch.zeros(case.state[first].shape, dtype=torch.from_numpy(case.state[first]).dtype)
    }
    ray_dcp.load(wanted, checkpoint_id=golden, no_dist=True)
    assert np.array_equal(wanted[first].numpy(), case.state[first])
    assert np.array_equal(ray_dcp.open(golden)[first][5], case.state[first][5])


def test_its_table_is_of_the_kind_that_it_stands_for(name: str, golden: Path) -> None:
    case = CASES[name]
    assert decode_table(table_of(golden)).num_chunks == case.chunks
    assert (end_of(table_of(golden)) is not None) == case.has_groups


def test_a_save_writes_what_was_written(name: str, golden: Path, tmp_path: Path) -> None:
    """Byte by byte, but for clocks, paths, and what other libraries do inside of their formats."""
    saved(name, tmp_path / "now")
    now = {one.relative_to(tmp_path / "now"): one for one in (tmp_path / "now").rglob("*.*")}
    then = {one.relative_to(golden): one for one in golden.rglob("*.*")}
    assert {*now} == {*then}
    has_objects = "step" in CASES[name].state
    for key, one in then.items():
        if key.suffix == ".distcp" and not has_objects:
            assert now[key].read_bytes() == one.read_bytes(), key
    mine, its = (decode_table(table_of(one)) for one in (tmp_path / "now", golden))
    assert difference(mine, its) == []
    records = []
    for path in (tmp_path / "now", golden):
        data = (path / "manifest-00000001.json").read_bytes()
        decode_record(data)
        fields = json.loads(data)["record"]
        # Why not the pickles of objects: torch writes its own version into them.
        others = ["created_s", "metadata", "plan_digest", "table", "table_end"]
        others += ["files", "deferred", "payload_bytes"] * has_objects
        records.append({key: value for key, value in fields.items() if key not in others})
    assert records[0] == records[1]


STOCK = sorted((Path(__file__).parents[1] / "golden").glob("stock-*"))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Planner(stock.DefaultLoadPlanner):
    """A planner of the user's."""


@pytest.fixture(params=STOCK, ids=lambda path: path.name)
def stock_golden(request: pytest.FixtureRequest) -> Path:
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
def test_a_stock_checkpoint_loads_bit_by_bit(stock_golden: Path, planner: type[Planner] | None):
    wanted = plain(expected(stock_golden))
    into = blanks(wanted)
    ray_dcp.load(into, checkpoint_id=stock_golden, planner=planner and planner(), no_dist=True)
    assert differences(into, wanted) == []


def test_a_stock_checkpoint_is_whole_and_read_whole(stock_golden: Path):
    report = ray_dcp.verify(stock_golden)
    assert report.problems == ()
    assert report.checked_bytes > 1_000
    wanted = plain(expected(stock_golden))
    del wanted["nothing"]  # of which stock DCP leaves no trace
    found = ray_dcp.read_state_dict(stock_golden)
    found["optimizer"]["state"] = {
        int(key): value for key, value in found["optimizer"]["state"].items()
    }
    assert differences(found, wanted) == []


def test_an_import_of_it_is_read_by_the_stock_dcp_of_this_torch(stock_golden: Path, tmp_path: Path):
    ray_dcp.import_checkpoint(stock_golden, tmp_path / "c")
    wanted = plain(expected(stock_golden))
    into = blanks(wanted)
    stock.load(into, checkpoint_id=tmp_path / "c", no_dist=True)
    assert differences(into, wanted) == []
