"""Checkpoints as earlier versions wrote them stay readable."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
import torch

import ray_dcp
from ray_dcp.format.table import decode_table
from ray_dcp.store.opening import open_storage
from ray_dcp.transfer.opening import newest_record

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("version", [2, 3, 5, 6])
def test_it_loads_and_is_whole(version):
    path = GOLDEN / f"format-{version}"
    assert newest_record(open_storage(str(path))).manifest.format_version == version
    state = {
        "model": {"w": torch.zeros(20, 15), "scale": torch.zeros((), dtype=torch.bfloat16)},
        "step": 0,
        "note": "",
    }
    ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["model"]["w"], torch.arange(300.0).reshape(20, 15))
    assert state["model"]["scale"] == 3
    assert (state["step"], state["note"]) == (7, "golden")
    report = ray_dcp.verify(path)
    assert (report.problems, report.notes) == ((), ())
    assert list(ray_dcp.open(path)["model.w"][19]) == list(range(285, 300))


def test_a_table_of_few_rows_is_expanded():
    path = GOLDEN / "format-5-regular"
    state = {"w": torch.zeros(32, 10), "b": torch.zeros(16, dtype=torch.int64), "step": 0}
    ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["w"], torch.arange(320.0).reshape(32, 10))
    assert torch.equal(state["b"], torch.arange(16))
    assert state["step"] == 7
    assert ray_dcp.verify(path).ok
    (table,) = path.glob("chunks.*.parquet")
    assert pyarrow.parquet.read_table(table).num_rows == 5
    assert decode_table(table.read_bytes()).num_chunks == 17


def test_a_table_of_several_meshes_is_expanded():
    path = GOLDEN / "format-5-stages"
    state = {f"{stage}.w": torch.zeros(16, 5) for stage in (0, 1)}
    state |= {f"{stage}.b": torch.zeros(8, dtype=torch.int64) for stage in (0, 1)}
    state |= {"rep.tied": torch.zeros(6), "step": 0}
    ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    for stage in (0, 1):
        expected = torch.arange(80.0).reshape(16, 5) + 100 * stage
        assert torch.equal(state[f"{stage}.w"], expected)
        assert torch.equal(state[f"{stage}.b"], torch.arange(8) + stage)
    assert torch.equal(state["rep.tied"], torch.arange(6.0))
    assert state["step"] == 7
    assert ray_dcp.verify(path).ok
    (table,) = path.glob("chunks.*.parquet")
    assert pyarrow.parquet.read_table(table).num_rows == 8
    assert decode_table(table.read_bytes()).num_chunks == 18
