"""What ranks run in tests and benchmarks: models in several parallel layouts, and plain states.

Everything here is importable on the ranks. State lives in `HELD`, one per rank process.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ray_dcp
from ray_dcp.cli.demo import digests_of

HELD: dict[str, Any] = {}


class Layer(nn.Module):
    """Two linear layers that tensor parallelism can cut."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A few layers with uneven sizes and a buffer."""

    def __init__(self, width: int = 22, hidden: int = 48, num_layers: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(13, width, bias=False)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(num_layers))
        self.outlet = nn.Linear(width, 7)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        self.calls += 1
        return self.outlet(x)


def build(layout: str, seed: int) -> None:
    """Makes model and optimizer in a layout: fsdp2, hsdp, tp, tp_dp, ddp or plain."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    model: nn.Module = Model()
    if layout == "fsdp2":
        _shard(model, init_device_mesh("cpu", (world_size,)))
    elif layout == "hsdp":
        _shard(model, init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s")))
    elif layout == "tp":
        _tensor_parallel(model, init_device_mesh("cpu", (world_size,)))
    elif layout == "tp_dp":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        _shard(model, mesh["dp"])
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    HELD.update(model=model, optimizer=optimizer, scheduler=scheduler, layout=layout, steps=0)


def _shard(model: Model, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def train(steps: int) -> None:
    """Takes optimizer steps on random data; the same data on every rank."""
    for _ in range(steps):
        HELD["steps"] += 1
        generator = torch.Generator().manual_seed(HELD["steps"])
        loss = HELD["model"](torch.randn(5, 13, generator=generator)).square().mean()
        loss.backward()
        HELD["optimizer"].step()
        HELD["optimizer"].zero_grad()
        HELD["scheduler"].step()
    torch.rand(3)
    random.random()
    np.random.rand(2)


def state_dict() -> dict[str, Any]:
    """Returns model, optimizer, scheduler, RNG states and Python objects."""
    model, optimizer = get_state_dict(HELD["model"], HELD["optimizer"])
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": HELD["scheduler"].state_dict(),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1],
        },
        "notes": {"steps": HELD["steps"], "tags": ["a", "b"], "ratio": 0.1, "none": None},
    }


def seed_all(seed: int) -> None:
    """Gives every rank the same RNG states."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def save(path: str, **kwargs: Any) -> None:
    """Saves what `state_dict` returns."""
    ray_dcp.save(state_dict(), checkpoint_id=path, **kwargs)


def restore(path: str) -> tuple[int, int]:
    """Loads in place; returns bytes needed and read by the whole job."""
    state = state_dict()
    report = ray_dcp.load(state, checkpoint_id=path)
    set_state_dict(
        HELD["model"],
        HELD["optimizer"],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    HELD["scheduler"].load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"]["torch"])
    random.setstate(state["rng"]["python"])
    HELD["numpy"] = state["rng"]["numpy"]
    np.random.set_state(("MT19937", state["rng"]["numpy"], *np.random.get_state()[2:]))
    HELD["steps"] = state["notes"]["steps"]
    return report.bytes_needed, report.bytes_read


def digests() -> dict[str, str]:
    """Returns SHA-256 of every whole value. Collective for sharded values."""
    return digests_of(state_dict())


def uneven_state(fill: bool) -> dict[str, Any]:
    """Returns row-sharded tensors of uneven shapes over all ranks, and a few plain values.

    Args:
        fill: Give the true content; False leaves garbage to be overwritten by a load.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {
        "a": (17, 5),
        "b": (3, 1000),
        "c": (1, 7),
        "d": (1031, 64),
        "e": (8,),
        "f": (100, 3, 3),
    }
    state: dict[str, Any] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        count = int(np.prod(shape))
        whole = torch.arange(count, dtype=torch.float32).reshape(shape) + 1000 * number
        state[name] = distribute_tensor(
            whole if fill else torch.full(shape, -1.0), mesh, [Shard(0)]
        )
    state["plain"] = torch.arange(50) if fill else torch.full((50,), -1)
    state["scalar"] = torch.tensor(3.5 if fill else 0.0)
    state["note"] = {"text": "hello" if fill else ""}
    return state


def save_uneven(path: str) -> None:
    """Saves `uneven_state`."""
    ray_dcp.save(uneven_state(True), checkpoint_id=path)


def save_uneven_in_the_background(path: str) -> None:
    """Saves `uneven_state` by `async_save`."""
    ray_dcp.async_save(uneven_state(True), checkpoint_id=path).committed()


def check_uneven(path: str) -> tuple[list[str], int, int]:
    """Loads `uneven_state` and returns names that differ, bytes needed, bytes read."""
    found = uneven_state(False)
    expected = uneven_state(True)
    report = ray_dcp.load(found, checkpoint_id=path)
    wrong = []
    for name, value in expected.items():
        if isinstance(value, DTensor):
            same = torch.equal(found[name].to_local(), value.to_local())
        elif isinstance(value, torch.Tensor):
            same = torch.equal(found[name], value)
        else:
            same = found[name] == value
        if not same:
            wrong.append(name)
    return wrong, report.bytes_needed, report.bytes_read
