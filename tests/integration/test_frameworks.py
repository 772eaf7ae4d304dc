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
from tests import titan

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
    from tests.checkpoints import flip

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


def titan_parts(seed):
    class Optimizers:
        """As torchtitan's container: Stateful, with keys by name."""

        def __init__(self, model):
            self.model = model
            self.one = torch.optim.AdamW(model.parameters(), lr=0.05)

        def state_dict(self):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return get_optimizer_state_dict(self.model, self.one)

        def load_state_dict(self, state):
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            set_optimizer_state_dict(self.model, self.one, state)

    class Trainer:
        step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    optimizers = Optimizers(model)
    schedulers = torch.optim.lr_scheduler.StepLR(optimizers.one, 2)
    return model, optimizers, schedulers, Trainer()


def test_torchtitan_s_contract_is_kept_with_its_own_base_class_and_its_checkpoints_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(titan.installed())
    base = importlib.import_module("torchtitan.components.checkpointer.base")
    from ray_dcp.integrations.torchtitan import RayDcpCheckpointManager

    def run(steps, seed=1, last=False, folder="checkpoint", **config):
        model, optimizers, schedulers, trainer = titan_parts(seed)
        settings = RayDcpCheckpointManager.Config(
            enable=True, interval=2, keep_latest_k=2, folder=folder, **config
        )
        manager = settings.build(
            dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
            states={"train_state": trainer}, sd_adapter=None, base_folder=str(tmp_path),
        )  # fmt: skip
        assert isinstance(manager, base.BaseCheckpointManager)
        found = manager.load()
        began = trainer.step
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
        y = x.sum(1, keepdim=True)
        for step in range(trainer.step + 1, steps + 1):
            trainer.step = step
            optimizers.one.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            manager.maybe_wait_for_staging()
            optimizers.one.step()
            schedulers.step()
            manager.save(step, last_step=last and step == steps)
        manager.maybe_wait_for_saving()
        manager.close()
        return model, found, began

    whole, found, _ = run(6, folder="whole")
    assert not found
    run(4)
    resumed, found, began = run(6, seed=2)
    assert (found, began) == (True, 4)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    names = sorted({p.parent.name for p in (tmp_path / "checkpoint").glob("step-*/*.distcp")})
    assert names == ["step-00000004", "step-00000006"]

    # What torchtitan's own manager wrote: DCP, in `step-4`.
    model, optimizers, schedulers, trainer = titan_parts(3)
    trainer.step = 4
    theirs = {**model.state_dict(), "optimizer": optimizers, "lr_scheduler": schedulers,
              "train_state": trainer}  # fmt: skip
    torch.distributed.checkpoint.save(theirs, checkpoint_id=tmp_path / "theirs" / "step-4")
    found_model, found, began = run(4, seed=9, folder="theirs")
    assert (found, began) == (True, 4)
    assert torch.equal(found_model.weight, model.weight)

    last, _, _ = run(2, folder="last", last=True, export_dtype="bfloat16")
    exported = {"weight": torch.zeros(1, 4, dtype=torch.bfloat16)}
    CheckpointManager(tmp_path / "last", read_only=True).restore("latest", exported)
    assert torch.equal(exported["weight"], last.weight.detach().bfloat16())
    with pytest.raises(InvalidRequestError, match="torchtitan's own"):
        run(1, folder="hf", last_save_in_hf=True)
