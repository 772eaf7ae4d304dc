"""What Ray Train workers run in tests and benchmarks: a small Transformer, on any number of ranks.

The global batch of a step is the same whatever the number of ranks, so that the loss is, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BATCH = 6
"""Samples of a step, over all ranks: 1, 2, 3 and 6 ranks have equal shares."""
WIDTH = 16


class Transformer(nn.Module):
    """One layer over a few tokens, without anything random."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x))).squeeze(-1)


def batch_of(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's share of a step's samples."""
    made = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, 5, 4, generator=made)
    y = x.sum(-1)
    return x[rank::world_size], y[rank::world_size]


def made(layout: str, width: int = WIDTH) -> dict[str, Any]:
    """Returns model, optimizer, scheduler and EMA copy in a layout: ddp, fsdp2 or bare."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = Transformer(width)
    ema = torch.optim.swa_utils.AveragedModel(Transformer(width))
    if layout == "fsdp2":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif layout == "ddp" and dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 50)
    return {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "samples": 0,
    }  # fmt: skip


def train_one_step(state: dict[str, Any], step: int, rank: int = 0, world_size: int = 1) -> float:
    """Returns the loss of this rank's share."""
    x, y = batch_of(step, rank, world_size)
    loss = (state["model"](x) - y).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["samples"] += BATCH
    return float(loss.detach())


def uninterrupted(num_steps: int) -> list[float]:
    """Returns the losses of a training without ranks and without interruptions."""
    state = made("bare")
    return [train_one_step(state, step) for step in range(num_steps)]


def note(folder: str, rank: int, **facts: Any) -> None:
    """Notes what a rank did, in one write."""
    line = json.dumps({"rank": rank, "time": time.time(), "pid": os.getpid(), **facts})
    with Path(folder, f"log-{rank}").open("a") as file:
        file.write(f"{line}\n")


def notes(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Returns what was noted, in the order of time."""
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("log-*"))
        for line in path.read_text().splitlines()
    ]
    for line in sorted(lines, key=lambda one: one["time"]):
        if kind is None or kind in line:
            yield line


def mean_losses(folder: Path) -> dict[int, float]:
    """Returns the loss of each step over all ranks; of a step made again, the last."""
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for line in notes(folder, "step"):
        ranks = by_step.setdefault(line["step"], {})
        if any(one["world_size"] != line["world_size"] for one in ranks.values()):
            ranks.clear()
        ranks[line["rank"]] = line
    return {
        step: sum(one["loss"] for one in ranks.values()) / len(ranks)
        for step, ranks in by_step.items()
    }
