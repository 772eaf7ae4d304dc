"""Adapters, with the real frameworks on the CPU."""

from __future__ import annotations

import importlib
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.manager import CheckpointManager
from tests.support import titan

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds


def example(name: str) -> dict[str, Any]:
    """Returns what a program of docs/examples defines."""
    return runpy.run_path(str(EXAMPLES / name))


# --- Lightning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_lightning_trains_saves_removes_and_goes_on_as_if_it_had_not_stopped(
    tmp_path, in_background
):
    fit = partial(example("lightning_trainer.py")["fit"], in_background=in_background)
    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "run", 3)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt"]
    resumed = fit(tmp_path / "run", 4)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["epoch=2.ckpt", "epoch=3.ckpt"]


def test_a_lightning_checkpoint_comes_back_exactly_and_damage_is_seen(tmp_path):
    from ray_dcp.integrations.lightning import RayDcpCheckpointIO
    from tests.support.checkpoints import flip

    io = RayDcpCheckpointIO()
    given = {
        "state_dict": {"a.b": torch.ones(2, 3), "shared": torch.zeros(())},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{1: 2}]}],
        "tuple": (1, [None, torch.arange(500)], {}),
        "epoch": 3,
    }
    io.save_checkpoint(given, tmp_path / "c")
    found = io.load_checkpoint(tmp_path / "c", map_location=lambda tensor, _: tensor)
    assert str(found) == str(given)
    assert torch.equal(found["tuple"][1][1], torch.arange(500))
    with pytest.raises(InvalidRequestError):
        io.save_checkpoint(given, tmp_path / "d", storage_options={"a": 1})
    (file,) = (tmp_path / "c").glob("*.distcp")
    for offset in range(0, file.stat().st_size, 512):
        flip(file, offset)
    with pytest.raises(CheckpointError):
        io.load_checkpoint(tmp_path / "c")
    io.remove_checkpoint(tmp_path / "c")
    assert list(tmp_path.glob("c*")) == []
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(tmp_path / "c")


# --- Hugging Face -------------------------------------------------------------------------------


def test_a_hugging_face_trainer_saves_and_goes_on_as_if_it_had_not_stopped(tmp_path):
    fit = example("hf_trainer.py")["fit"]
    whole, _, steps = fit(tmp_path / "whole", 8)
    assert steps == [6, 8]
    fit(tmp_path / "run", 4)
    resumed, callback, steps = fit(tmp_path / "run", 8)
    assert callback.restored.step == 4
    assert resumed.state.global_step == 8
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        # Not to the last bit: every pass over the data has another order.
        assert torch.allclose(one, other, rtol=1e-5)
    with pytest.raises(CheckpointNotFoundError):
        fit(tmp_path / "nothing", 2, resume="latest")
    with pytest.raises(InvalidRequestError):
        importlib.import_module("ray_dcp.integrations.hf").RayDcpCallback("run")


# --- torchtitan ---------------------------------------------------------------------------------


def test_torchtitan_s_contract_is_kept_with_its_own_base_class_and_its_checkpoints_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(titan.installed())
    base = importlib.import_module("torchtitan.components.checkpointer.base")
    Trainer = example("torchtitan_manager.py")["Trainer"]  # noqa: N806 - a class

    def run(steps, folder="checkpoint", last=False, **config):
        trainer = Trainer(tmp_path / folder, **config)
        assert isinstance(trainer.manager, base.BaseCheckpointManager)
        return trainer.model, trainer.train(steps, last=last)

    whole, began = run(6, "whole")
    assert began is None
    assert run(4)[1] is None
    resumed, began = run(6, seed=2)
    assert began == 4
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    names = sorted({p.parent.name for p in (tmp_path / "checkpoint").glob("step-*/*.distcp")})
    assert names == ["step-00000004", "step-00000006"]

    # What torchtitan's own manager wrote: DCP, in `step-4`.
    other = Trainer(tmp_path / "none", seed=3)
    other.state.step = 4
    theirs = {**other.model.state_dict(), "optimizer": other.optimizers,
              "lr_scheduler": other.schedulers, "train_state": other.state}  # fmt: skip
    torch.distributed.checkpoint.save(theirs, checkpoint_id=tmp_path / "theirs" / "step-4")
    found, began = run(4, "theirs", seed=9)
    assert began == 4
    assert torch.equal(found.weight, other.model.weight)

    last, _ = run(2, "last", last=True, export_dtype="bfloat16")
    exported = {"weight": torch.zeros(1, 4, dtype=torch.bfloat16)}
    CheckpointManager(tmp_path / "last", read_only=True).restore("latest", exported)
    assert torch.equal(exported["weight"], last.weight.detach().bfloat16())
    with pytest.raises(InvalidRequestError, match="torchtitan's own"):
        run(1, "hf", last_save_in_hf=True)
