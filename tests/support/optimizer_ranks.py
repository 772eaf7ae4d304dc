"""What ranks do for `tests/property/test_optimizer_roundtrip.py`, all cases in one go.

`python -m tests.support.optimizer_ranks FOLDER` is one of four ranks with gloo, of which two, three
or all share a module out. Rank 0 prints one line of JSON: what is not as it was, by case.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.serialization import add_safe_globals

import ray_dcp
from tests.support import optimizers
from tests.support.comparing import differences
from tests.support.optimizers import Net, contents


@dataclass(frozen=True)
class RankCase:
    """One optimizer, saved in one layout and loaded in another."""

    optimizer: str
    saved: str = "2"
    loaded: str = "3"
    writer: str = "ours"
    same: bool = False
    """Into the same module and optimizer, which were trained on."""
    story: str = ""
    """`frozen`, `frozen afterwards`, `empty group`, `one of two` or nothing."""

    def __str__(self) -> str:
        how = "rollback" if self.same else f"{self.saved} to {self.loaded}"
        return ", ".join(filter(None, [self.optimizer, how, self.writer, self.story]))


_FEW = ("AdamW", "subclass", "8 bits", "fp32 master of bf16")
_ALL = (
    *_FEW,
    "local codes",
    "counters of one element",
    "int64 counters",
    "state of no parameter",
    "texts and records",
)
_WRAPPERS = ("its own form", "torch's form", "of several, at any depth")
_STORIES = ("frozen", "frozen afterwards", "empty group", "one of two")

CASES: dict[str, RankCase] = {
    str(case): case
    for case in (
        *(RankCase(name) for name in (*_ALL, *_WRAPPERS)),
        *(RankCase(name, "2", "2", same=True) for name in ("subclass", "state of no parameter")),
        RankCase("8 bits", "2x2", "3"),
        RankCase("subclass", "3", "2x2"),
        RankCase("local codes", "2", "2x2"),
        RankCase("local codes", "2x2", "2"),
        RankCase("counters of one element", "2", "3"),
        RankCase("counters of one element", "3", "2"),
        *(RankCase(name, writer="stock") for name in ("8 bits", "fp32 master of bf16")),
        *(RankCase("AdamW", story=story) for story in _STORIES),
        *(RankCase("AdamW", "2", "2", same=True, story=story) for story in _STORIES[:2]),
    )
}  # fmt: skip


class Failed(Exception):
    """Work raised on some rank.

    Args:
        lines: What.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__(*lines)
        self.lines = lines


class World:
    """The meshes of this rank, and its sessions, by layout."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        names = ("replicate", "shard")
        self.meshes = {
            "2": DeviceMesh("cpu", [0, 1]),
            "3": DeviceMesh("cpu", [0, 1, 2]),
            "2x2": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names),
        }
        self.groups = {
            layout: mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
            for layout, mesh in self.meshes.items()
            if self.has(layout)
        }
        self.now = "2"
        self._later: dict[Any, dict[str, Any]] = {}

    def has(self, layout: str) -> bool:
        """Whether this rank is in a mesh."""
        return self.rank < self.meshes[layout].size()

    def build(self, case: RankCase, layout: str, seed: int) -> Job:
        torch.manual_seed(seed)
        own = (optimizers.CASES | optimizers.WRAPPERS)[case.optimizer]
        modules = [Net(only_matrices=own.only_matrices, dtype=own.dtype)]
        if case.story == "one of two":
            modules.append(Net(dtype=own.dtype))
        for module in modules:
            for part in (module.up, module):
                fully_shard(part, mesh=self.meshes[layout])
        if case.story == "empty group":
            groups = [{"params": [], "lr": 0.5}, {"params": list(modules[0].parameters())}]
            return Job(modules, torch.optim.AdamW(groups), own.gradients)
        if case.story == "one of two":
            together = [p for module in modules for p in module.parameters()]
            return Job(modules, torch.optim.AdamW(together), own.gradients)
        return Job(modules, own.make(modules[0]), own.gradients)

    def run(self, case: RankCase, path: Path) -> list[str]:
        """Returns what is wrong on any rank, the same on all."""
        try:
            saved, expected, changed = self.together(
                case.saved, lambda: self.trained_and_saved(case, path)
            ) or (None, None, None)
            later = self.together(case.saved, lambda: self.later(case))
            expected, later, changed = self.told((expected, later, changed))
            job = self.together(case.loaded, lambda: self.target(case, saved))
            self.together(case.loaded, lambda: self.load(job, path))
            found = self.together(case.loaded, job.contents if job else list)
            if wrong := self.all_of(changed + (differences(found, expected) if job else [])):
                return wrong
            found = self.together(case.loaded, lambda: job.after_steps(case))
            return self.all_of([f"later: {e}" for e in differences(found, later)] if job else [])
        except Failed as error:
            return error.lines

    def together(self, layout: str, work: Callable[[], Any]) -> Any:
        """Returns what work gives on the ranks of a layout, when all of them are done.

        Raises:
            Failed: It raised somewhere: on all ranks.
        """
        value, wrong = None, []
        if self.has(layout):
            self.now = layout
            try:
                value = work()
            except (Exception, stock.CheckpointException):
                wrong = [traceback.format_exc()[-1500:]]
        if lines := self.all_of(wrong):
            raise Failed(lines)
        return value

    def all_of(self, wrong: list[str]) -> list[str]:
        """Returns what all ranks say."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, wrong)
        return [f"rank {rank}: {line}" for rank, lines in enumerate(every) for line in lines]

    def told(self, value: Any) -> Any:
        """Returns what rank 0 says."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def later(self, case: RankCase) -> dict[str, Any]:
        """Returns what a job that was never saved holds after the next steps."""
        key = (case.optimizer, case.saved, case.story)
        if key not in self._later:
            self._later[key] = self.twin(case).after_steps(case)
        return self._later[key]

    def twin(self, case: RankCase) -> Job:
        """Returns a job that is as the saved one when it was saved."""
        job = self.build(case, case.saved, 1)
        job.train(range(1))
        if case.story == "frozen":
            job.freeze()
        job.train(range(1, 2))
        return job

    def trained_and_saved(self, case: RankCase, path: Path) -> tuple[Job, Any, list[str]]:
        """Returns the job, what it held when it was saved, and what the save changed of it."""
        job = self.twin(case)
        expected = job.contents()
        self.save(case, job, path)
        return job, expected, [f"saving: {e}" for e in differences(job.contents(), expected)]

    def target(self, case: RankCase, saved: Job) -> Job:
        """Returns what to load into."""
        job = saved if case.same else self.build(case, case.loaded, 2)
        if case.story == "frozen afterwards" or (case.story == "frozen" and not case.same):
            job.freeze()
        if case.same:
            job.train(range(20, 21))
        return job

    def save(self, case: RankCase, job: Job, path: Path) -> None:
        if case.writer == "stock":
            stock.save(job.named(), checkpoint_id=path, process_group=self.groups[self.now])
        else:
            ray_dcp.save(job.state(), checkpoint_id=path, process_group=self.groups[self.now])

    def load(self, job: Job, path: Path) -> None:
        ray_dcp.load(job.state(), checkpoint_id=path, process_group=self.groups[self.now])


class Job:
    """Modules that are shared out over ranks, and their optimizer; the first one is saved."""

    def __init__(self, modules: list[Any], optimizer: Any, gradients: str) -> None:
        self.modules, self.optimizer, self.gradients = modules, optimizer, gradients

    def state(self) -> dict[str, Any]:
        return {"model": self.modules[0], "optimizer": self.optimizer}

    def named(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.modules[0], self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def train(self, steps: range) -> None:
        whole = nn.ModuleList(self.modules)
        whole.calls = self.modules[0].calls
        optimizers.train(whole, self.optimizer, steps, gradients=self.gradients)

    def freeze(self, *, free: bool = False) -> None:
        self.modules[0].embed.weight.requires_grad_(free)
        self.modules[0].up.bias.requires_grad_(free)

    def contents(self) -> dict[str, Any]:
        found = contents(nn.ModuleList(self.modules), self.optimizer)
        return {path: value for path, value in found.items() if not path.startswith("model.1.")}

    def after_steps(self, case: RankCase) -> dict[str, Any]:
        """Returns what it holds after the next steps."""
        if case.story == "frozen afterwards":
            self.freeze(free=True)
        self.train(range(4, 5))
        return self.contents()


def on_ranks(folder: Path) -> dict[str, list[str]]:
    """Runs all cases; returns what is wrong on any rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    world = World()
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        found[name] = world.run(case, folder / str(number))
    dist.barrier()
    dist.destroy_process_group()
    return found


def main(folder: str) -> None:
    add_safe_globals(optimizers.SAFE_GLOBALS)
    warnings.simplefilter("ignore")
    print(json.dumps(on_ranks(Path(folder))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
