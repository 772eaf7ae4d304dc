"""What ranks do for `tests/property/test_roundtrips.py`: each order of wrappers, on other ranks.

`python -m tests.support.module_ranks FOLDER WRAPS...` is one of four ranks with gloo, of which one,
two or all train a model: as shards, replicas, or replicas of shards. Rank 0 prints one line of
JSON: what is not as it was, by case. Wraps may name an optimizer: `AC | DDP @ Lookahead`.

All ranks have the same data, and their numbers are powers of two, so that the mean of gradients is
exact: losses are the same to the last digit whoever shares the model out.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import schedulefree
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_optimizer import Lookahead, ScheduleFreeWrapper
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ray_dcp
from tests.support.wrapping import wrapped

LAYOUTS = (("2", "2x2"), ("2x2", "1"), ("1", "2"))
"""Which ranks save, and which ones load."""


def _lookahead(parameters: Any) -> Any:
    return Lookahead(torch.optim.AdamW(parameters, lr=0.01), k=2)


def _schedule_free(parameters: Any) -> Any:
    return ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=0.01, momentum=0.5), momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.5),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
    "schedulefree": partial(schedulefree.AdamWScheduleFree, lr=0.01, foreach=False),
    "Lookahead": _lookahead,
    "ScheduleFreeWrapper": _schedule_free,
}
"""By name; a case that names none has AdamW."""

OPTIMIZED = tuple(
    f"{wraps} @ {name}"
    for wraps in ("compile+AC | DDP", "compile+AC+FSDP2 | FSDP2", "compile+AC | FSDP1 orig+compile")
    for name in OPTIMIZERS
    if name != "AdamW"
    # Why: Lookahead can't step DTensors.
    if not (name == "Lookahead" and "FSDP2" in wraps)
)
"""Wraps and optimizers that are tried by hand."""


class Notes(nn.Module):
    """A history that grows, as an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[torch.Tensor] = []

    def get_extra_state(self) -> Any:
        return {"all": torch.tensor(self.history), "last": self.history[-1:]}

    def set_extra_state(self, state: Any) -> None:
        self.history = list(state["all"].unbind())


class Job:
    """A training: a wrapped model, its optimizer and scheduler, what it notes, an average."""

    def __init__(self, text: str, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        text, _, optimizer = text.partition(" @ ")
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())
        self.model = wrapped(text, net, mesh)
        self.optimizer = OPTIMIZERS[optimizer or "AdamW"](self.model.parameters())
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        self.notes = Notes()
        self.scores = torchmetrics.CatMetric()
        self.scores.persistent(True)
        self.mean = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "train": {"model": self.model, "optimizer": self.optimizer},
            "more": [self.scheduler, (nn.ModuleList([self.notes, self.scores]), self.mean)],
        }

    def train(self, num_steps: int) -> list[float]:
        """Takes steps and returns their losses."""
        found = []
        for _ in range(num_steps):
            self.step += 1
            output = self.model(torch.linspace(-1, self.step, 12).reshape(3, 4))
            loss = output.square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            found.append(loss.item())
            self.notes.history.append(loss.detach())
            self.scores.update(loss.detach())
            with torch.no_grad():
                source = nn.Linear(1, 1)
                source.weight.fill_(loss.item())
                source.bias.fill_(self.step)
            self.mean.update_parameters(source)
        return found

    def noted(self) -> list[Any]:
        return [
            [float(value) for value in self.notes.history],
            [float(value) for some in self.scores.value for value in some.reshape(-1)],
            [value.tolist() for value in self.mean.state_dict().values()],
            self.scheduler.state_dict(),
        ]


class World:
    """The meshes of this rank, and its groups, by layout."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        names = ("replicate", "shard")
        self.meshes = {
            "1": DeviceMesh("cpu", [0]),
            "2": DeviceMesh("cpu", [0, 1]),
            "2x2": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names),
        }

    def run(self, text: str, saved: str, loaded: str, path: Path) -> list[str]:
        """Returns what is wrong on any rank, the same on all."""
        expected = self.on(saved, lambda: self.save(text, saved, path))
        found = self.on(loaded, lambda: self.load(text, loaded, path))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (expected, found))
        wanted = every[0][0]
        return [
            f"rank {rank}: {each} for {wanted}"
            for rank, (kept, got) in enumerate(every)
            for each in (kept, got)
            if each not in (None, wanted)
        ]

    def on(self, layout: str, work: Callable[[], Any]) -> Any:
        """Returns what work gives on the ranks of a layout, when all of them are done."""
        value = None
        if self.rank < self.meshes[layout].size():
            try:
                value = work()
            except Exception:
                value = traceback.format_exc()[-1500:]
        dist.barrier()
        return value

    def save(self, text: str, layout: str, path: Path) -> Any:
        job = Job(text, self.meshes[layout], 1)
        job.train(3)
        ray_dcp.save(job.state(), checkpoint_id=path, **self.group(layout))
        return job.noted(), job.train(2)

    def load(self, text: str, layout: str, path: Path) -> Any:
        job = Job(text, self.meshes[layout], 2)
        job.step = 3
        ray_dcp.load(job.state(), checkpoint_id=path, **self.group(layout))
        return job.noted(), job.train(2)

    def group(self, layout: str) -> dict[str, Any]:
        """Returns the ranks that save or load together."""
        if layout == "1":
            return {"no_dist": True}
        mesh = self.meshes[layout]
        return {"process_group": mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD}


def main(folder: str, *texts: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    world, found = World(), {}
    for number, text in enumerate(texts):
        for saved, loaded in LAYOUTS:
            path = Path(folder, f"{number}-{saved}-{loaded}")
            found[f"{text}, {saved} to {loaded}"] = world.run(text, saved, loaded, path)
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
