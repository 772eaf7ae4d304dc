"""Checkpoints of a stock DCP that is newer than all that were tried: refused, never as damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InvalidRequestError
from tests import checkpoints


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(4), "step": 0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of stock DCP, of which the later one has a field that only a newer torch knows."""
    for step in (1, 2):
        state = {"w": torch.full((4,), float(step)), "step": step}
        checkpoints.save_stock(tmp_path / f"step-{step}", state)
    metadata = tmp_path / "step-2" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"\x05sizes", b"\x07lengths"))
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        lambda run, state: ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True),
        lambda run, state: ray_dcp.load_newest(state, run, no_dist=True),
        lambda run, _: ray_dcp.read_state_dict(run / "step-2"),
        lambda run, _: ray_dcp.verify(run / "step-2"),
        lambda run, _: ray_dcp.open(run / "step-2"),
    ],
    ids=["load", "load_newest", "read_state_dict", "verify", "open"],
)
def test_it_is_refused_as_newer_and_no_earlier_step_is_taken(
    run: Path, read: Callable[[Path, Any], Any]
):
    state = blank()
    with pytest.raises(CheckpointError, match=r"without sizes: a newer torch wrote") as told:
        read(run, state)
    assert not isinstance(told.value, DamagedCheckpointError)
    assert state["step"] == 0
    assert not state["w"].any()


def test_the_run_is_listed_and_the_other_step_loads(run: Path):
    assert [step.step for step in ray_dcp.open(run).steps] == [1, 2]
    shown = CliRunner().invoke(main, ["verify", str(run / "step-2")])
    assert shown.exit_code != 0
    assert "newer torch" in shown.output
    state = blank()
    assert ray_dcp.load_newest(state, run, at_most=1, no_dist=True).step == 1
    assert state["w"].tolist() == [1.0] * 4


def test_its_files_are_kept_until_a_save_takes_its_place(run: Path):
    before = {path.name for path in (run / "step-2").iterdir()}
    with pytest.raises(InvalidRequestError, match="another program wrote"):
        ray_dcp.collect(run / "step-2")
    assert {path.name for path in (run / "step-2").iterdir()} == before
    ray_dcp.save({"w": torch.full((4,), 7.0), "step": 7}, checkpoint_id=run / "step-2")
    state = blank()
    ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True)
    assert state["step"] == 7
