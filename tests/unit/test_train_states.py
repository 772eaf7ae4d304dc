"""A state that is saved in Ray Train fits any number of ranks and any wrapper around its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ray_dcp
from ray_dcp.errors import StateDictError
from ray_dcp.integrations.train.states import give_back, named_alike

Wrap = Any


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one: enough for every wrapper to do its names."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bare(model: nn.Module) -> nn.Module:
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)


def sharded(model: nn.Module) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=half)


WRAPS: dict[str, Wrap] = {
    "bare": bare,
    "DDP": DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "DDP of compiled": lambda m: DistributedDataParallel(torch.compile(m, backend="eager")),
    "TP": tensor_parallel,
    "FSDP2, mixed": sharded,
}


def made(wrap: str, seed: int) -> dict[str, Any]:
    """Returns the state of a training: model, optimizer, EMA copy, scheduler, scaler, a number."""
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = WRAPS[wrap](plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = torch.optim.swa_utils.AveragedModel(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "ema": ema,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu"),
        "tokens": seed,
    }


def train(state: dict[str, Any], num_steps: int, accumulate: int = 2) -> None:
    for step in range(num_steps * accumulate):
        loss = state["model"](torch.full((3, 4), 0.5 + step)).float().square().mean()
        (loss / accumulate).backward()
        if step % accumulate == accumulate - 1:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["scheduler"].step()
    state["tokens"] += num_steps


def values(state: dict[str, Any]) -> dict[str, Any]:
    """Returns all tensors of a state as they are, whole, by the names under which they lie."""
    found: dict[str, Any] = {"tokens": state["tokens"], "lr": state["scheduler"].get_last_lr()}
    for name, value in named_alike(state).items():
        if name in ("model", "optimizer", "ema"):
            found.update(flat(value.state_dict(), name))
    return found


def flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(one, f"{name}.{key}").items()}
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return {name: value.tolist()}
    return {name: repr(value)}


@pytest.mark.parametrize("loaded_as", WRAPS)
@pytest.mark.parametrize("saved_as", ["DDP", "bare"])
def test_what_one_wrapper_saved_any_other_restores(saved_as: str, loaded_as: str, tmp_path: Path):
    state = made(saved_as, seed=1)
    train(state, 3)
    ray_dcp.save(named_alike(state), checkpoint_id=tmp_path / "c", no_dist=True)
    other = made(loaded_as, seed=2)
    named = named_alike(other)
    ray_dcp.load(named, checkpoint_id=tmp_path / "c", no_dist=True)
    give_back(other, named)
    assert values(other) == values(state)
    assert other["tokens"] == 4
    if loaded_as not in ("FSDP2, mixed", "TP"):
        train(state, 2)
        train(other, 2)
        assert values(other) == values(state)


def test_an_optimizer_that_has_not_stepped_is_restored_with_its_state(tmp_path: Path):
    state = made("bare", seed=1)
    train(state, 1)
    ray_dcp.save(named_alike(state), checkpoint_id=tmp_path / "c", no_dist=True)
    other = made("bare", seed=2)
    assert not other["optimizer"].state
    ray_dcp.load(named_alike(other), checkpoint_id=tmp_path / "c", no_dist=True)
    steps = {int(value["step"]) for value in other["optimizer"].state.values()}
    assert steps == {1}


def test_an_optimizer_of_other_parameters_and_values_that_are_no_modules_stay_as_they_are():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = {"model": nn.Linear(1, 1), "optimizer": optimizer, "step": 3}
    named = named_alike(state)
    assert named["optimizer"] is optimizer
    assert named["step"] == 3


def test_what_is_no_mapping_is_refused_with_the_way_out():
    with pytest.raises(StateDictError, match="'model': model"):
        named_alike(nn.Linear(1, 1))  # type: ignore[arg-type]
