"""Tensors in four parallel layouts, as ranks save and load them in tests and benchmarks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ray_dcp
from ray_dcp import CheckpointError
from ray_dcp.core import bounds
from ray_dcp.session import shared_reads

LAYOUTS = ("row", "column", "2-D", "replicated")

Shapes = tuple[tuple[int, int], ...]

SHAPES: Shapes = ((512, 1024), (1024, 384), (257, 129), (16, 4096))
"""About 4 MB: whole and odd lengths, wide and tall."""


class Loaded(NamedTuple):
    """What a load did, on one rank."""

    wrong: list[str]
    needed: int
    read: int
    from_peers: int
    instead: int
    seconds: float = 0.0


def whole(number: int, shape: tuple[int, int]) -> torch.Tensor:
    """Returns a whole tensor; equal on all ranks."""
    count = shape[0] * shape[1]
    return (torch.arange(count, dtype=torch.float32) + 1000 * number).reshape(shape)


def state(layout: str, shapes: Shapes, *, filled: bool) -> dict[str, Any]:
    """Returns the tensors of this rank."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    placements: list[Any] = {
        "row": [Shard(0)], "column": [Shard(1)], "replicated": [Replicate()]
    }.get(layout, [Shard(0), Shard(1)])  # fmt: skip
    if layout == "2-D":
        rows = 2 if world_size % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (rows, world_size // rows))
    found = {}
    for number, shape in enumerate(shapes):
        full = whole(number, shape) if filled else torch.zeros(shape)
        found[f"layers.{number}.weight"] = DTensor.from_local(
            _cut(full, mesh, placements), mesh, placements, run_check=False,
            shape=torch.Size(shape), stride=full.stride(),
        )  # fmt: skip
    return found


def _cut(full: torch.Tensor, mesh: Any, placements: list[Any]) -> torch.Tensor:
    """Returns the part of this rank, as `distribute_tensor` cuts, without communication."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            step = -(-full.shape[placement.dim] // mesh.size(dim))
            at = mesh.get_local_rank(dim)
            low = min(at * step, full.shape[placement.dim])
            count = min(step, full.shape[placement.dim] - low)
            full = full.narrow(placement.dim, low, count)
    return full.contiguous()


def save_layout(path: Any, layout: str, shapes: Shapes = SHAPES) -> None:
    """Saves the tensors in a layout."""
    ray_dcp.save(state(layout, shapes, filled=True), checkpoint_id=path)


def load_layout(path: Any, layout: str, share: Any = True, shapes: Shapes = SHAPES) -> Loaded:
    """Loads the tensors into a layout and compares them."""
    found = state(layout, shapes, filled=False)
    options = ray_dcp.LoadOptions(share_reads=share)
    report = ray_dcp.load(found, checkpoint_id=path, options=options)
    expected = state(layout, shapes, filled=True)
    wrong = [
        name for name, value in expected.items()
        if not torch.equal(value.to_local(), found[name].to_local())
    ]  # fmt: skip
    return Loaded(
        wrong, report.bytes_needed, report.bytes_read, report.bytes_from_peers,
        report.bytes_read_instead, report.seconds["read"],
    )  # fmt: skip


def load_while_one(path: Any, told: str, rank: int, does: str) -> Loaded | None:
    """Loads with `rank` failing to hand on what it has read; errors go to a file of each rank.

    Args:
        path: What to load.
        told: Folder of the files.
        rank: Who fails.
        does: `"dies"`, `"refuses"` (says so) or `"says nothing"`.
    """
    real, timeout_s = shared_reads.RayUnitExchange.offer, bounds.TAKE_TIMEOUT_S

    def offer(self: Any, unit: int, takers: int, data: memoryview) -> memoryview | None:
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return memoryview(bytes(data)) if does == "says nothing" else None

    try:
        bounds.TAKE_TIMEOUT_S = 2.0 if does == "says nothing" else timeout_s
        if dist.get_rank() == rank:
            shared_reads.RayUnitExchange.offer = offer  # type: ignore[method-assign]
        return load_layout(path, "replicated")
    except CheckpointError as error:
        Path(told, str(dist.get_rank())).write_text(f"{type(error).__name__} {error.rank}")
        return None
    finally:
        shared_reads.RayUnitExchange.offer, bounds.TAKE_TIMEOUT_S = real, timeout_s  # type: ignore[method-assign]
