"""FSDP2 by Accelerate: what it saves itself, and what ray_dcp saves, go on with the same losses.

Run as `python -m tests.support.programs.accelerate_ranks FOLDER save|load` on each rank; `load` may
have another number of ranks.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from ray_dcp.integrations.accelerate import load_state, save_state


class Average:
    """An object of the program's own: the mean of the losses so far."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Training:
    """What a program prepares; each instance is as a new process begins."""

    def __init__(self, seed: int, accumulated: int = 2, *, fsdp2: bool = True) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        if fsdp2:
            # Why: on CPU, Accelerate makes DDP of it.
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        torch.manual_seed(seed)
        sharded = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"
        )
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=sharded if fsdp2 else None,
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=6
            ),
            gradient_accumulation_steps=accumulated,
        )
        random.seed(10 * seed + self.accelerator.process_index)
        model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        data = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        assert self.accelerator.is_fsdp2 is fsdp2
        assert all(isinstance(one, DTensor) is fsdp2 for one in self.model.parameters())
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)

    def steps(self, batches: Any, count: int) -> list[float]:
        """Trains; the losses have noise of the rank's own random state."""
        found = []
        for _, batch in zip(range(count), batches, strict=False):
            with self.accelerator.accumulate(self.model):
                # Why of Python: a new iterator of torch's loaders draws a number of torch's.
                noise = torch.tensor([[random.gauss(0, 0.1)] for _ in batch])
                loss = (self.model(batch + noise) - batch.sum(1, keepdim=True)).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            mean = self.accelerator.reduce(loss.detach(), "mean")
            self.average.mean = 0.5 * self.average.mean + 0.5 * mean
            found.append(loss.item())
        return [*found, self.average.mean.item(), self.scheduler.get_last_lr()[0]]


def main(folder: Path, mode: str) -> None:
    losses: dict[str, list[float]] = {}
    if mode == "save":
        training = Training(seed=1)
        batches = iter(training.loader)
        training.steps(batches, 6)
        (folder / "stock").mkdir(exist_ok=True)
        handle = save_state(training.accelerator, folder / "ours")
        training.accelerator.save_state(str(folder / "stock"))
        losses["uninterrupted"] = training.steps(batches, 4)
        handle.result()
        training.accelerator.wait_for_everyone()
    for kind in ("ours", "stock"):
        # Why: accelerate leaves the count of accumulated steps at 0 on ranks without a file.
        training = Training(seed=2, accumulated=2 if mode == "save" else 1)
        if kind == "ours":
            load_state(training.accelerator, folder / "ours")
        else:
            training.accelerator.load_state(str(folder / "stock"))
        if mode == "save":
            batches = iter(training.loader)
        else:  # Random states and places in the data belong to a number of ranks.
            random.seed(3)
            torch.manual_seed(3)
            batches = iter(torch.randn(4, 2, 4))
        losses[kind] = training.steps(batches, 4)
    print(json.dumps(losses))
    training.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
