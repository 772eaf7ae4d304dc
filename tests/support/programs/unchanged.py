"""What ranks do in tests of `SaveOptions(unchanged="link")`; importable on the ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ray_dcp
from ray_dcp.asynchronous import SaveReport
from ray_dcp.options import SaveOptions

LINK = SaveOptions(unchanged="link")
WIDTH = 600
"""1.4 MB of weights: above the least that is worth files of its own."""


class Tuned(nn.Module):
    """A module with a large part that is not trained, and a small one that is."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        with torch.no_grad():
            self.base.weight.copy_(torch.arange(width * width).reshape(width, width))
            self.base.bias.zero_()
        self.lora = nn.Linear(8, 8)

    def set_step(self, step: int) -> None:
        """Trains the small part."""
        with torch.no_grad():
            self.lora.weight.fill_(step)
            self.lora.bias.fill_(step)


def path_of(root: Any, step: int) -> Any:
    """Returns the place of a step below a path, URL or `Location`."""
    return f"{root}/step-{step}" if isinstance(root, str) else root / f"step-{step}"


def save_steps(root: Any, steps: int, how: str = "save", **options: Any) -> list[SaveReport]:
    """Saves steps of a run whose large part does not change.

    Args:
        root: Folder of the run.
        steps: How many.
        how: `save` or `async_save`.
        **options: Of the saves, beside `unchanged`.

    Returns:
        The reports of asynchronous saves.
    """
    model, reports = Tuned(), []
    own = {"rank": ray_dcp.PerRank(dist.get_rank() if dist.is_initialized() else 0)}
    asked = SaveOptions(unchanged="link", **options)
    for step in range(steps):
        model.set_step(step)
        state = {"model": model, **own}
        if how == "save":
            ray_dcp.save(state, checkpoint_id=path_of(root, step), options=asked)
            continue
        handle = ray_dcp.async_save(state, checkpoint_id=path_of(root, step), options=asked)
        handle.staged(120)
        model.base.weight.data.zero_()  # what is captured must be what is compared
        handle.committed(120)
        model.base.weight.data.copy_(Tuned().base.weight.data)
        reports.append(handle.report())
    return reports


def holds(place: Any, step: int) -> bool:
    """Returns whether a checkpoint has the values of a step, verified."""
    expected, model = Tuned(), Tuned()
    expected.set_step(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray_dcp.load({"model": model}, checkpoint_id=place, no_dist=True)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return ray_dcp.verify(place).ok and all(torch.equal(one, other) for one, other in pairs)


def inodes(path: Path) -> set[int]:
    """Returns the identities of the data files of a checkpoint."""
    return {file.stat().st_ino for file in path.glob("*.distcp")}
