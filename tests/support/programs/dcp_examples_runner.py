"""Runs DCP's examples on this rank, twice: as they are, and with only the imports changed.

Whatever one side saves, the other loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ray_dcp

EXAMPLES = Path(__file__).with_name("dcp_examples.py").read_text()
NAMES = ("fsdp_checkpoint", "async_checkpoint", "hugging_face")


def module(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "examples"}
    exec(compile(text, "dcp_examples", "exec"), found)
    return found


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def torch_save_file(folder: str) -> dict[str, bool]:
    """One rank reads a file of torch.save, and every rank takes its rows."""
    path = f"{folder}/state.pt"
    whole = {"rows": torch.arange(14.0).view(7, 2), "one": torch.ones(1, 3), "flat": torch.ones(4)}
    if dist.get_rank() == 0:
        torch.save({"m": whole}, path)
        alone = {"m": {"flat": torch.zeros(4)}}
        reader, planner = BroadcastingTorchSaveReader(path), DynamicMetaLoadPlanner()
        ray_dcp.load(alone, storage_reader=reader, planner=planner, no_dist=True)
        assert torch.equal(alone["m"]["flat"], whole["flat"])
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    equal = {}
    state = {
        "rows": distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)]),
        "one": distribute_tensor(torch.zeros(1, 3), mesh, [Shard(0)]),
        "flat": torch.zeros(4),
    }
    how: dict[str, Any] = {
        "storage_reader": BroadcastingTorchSaveReader(),
        "planner": DynamicMetaLoadPlanner(),
        "checkpoint_id": path,
    }
    ray_dcp.load({"m": state}, **how)
    found = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
    equal["torch.save"] = all(torch.equal(found[n], whole[n]) for n in whole)
    try:
        ray_dcp.load({"m": {**state, "lost": torch.zeros(1)}}, **how)
    except stock.CheckpointException as error:
        equal["missing key"] = "m.lost" in str(error)
    return equal


def exchanged(folder: str) -> dict[str, bool]:
    """Returns by example, saver and loader whether what was loaded is what was saved."""
    sides = {
        "stock": module(EXAMPLES),
        "ours": module(EXAMPLES.replace("torch.distributed.checkpoint", "ray_dcp")),
    }
    equal = {}
    for saver, loader in (("stock", "ours"), ("ours", "stock"), ("ours", "ours")):
        for name in NAMES:
            place = f"{folder}/{name}-{saver}-{loader}"
            saved = whole(sides[saver][f"{name}_save"](place))
            dist.barrier()
            loaded = whole(sides[loader][f"{name}_load"](place))
            equal[f"{name}: {saver} to {loader}"] = saved.keys() == loaded.keys() and all(
                torch.equal(saved[key], loaded[key]) for key in saved
            )
    return {**equal, **torch_save_file(folder)}
