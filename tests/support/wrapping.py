"""Every order in which modules are wrapped: by DDP, FSDP1, FSDP2, compiling, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def _compiled(module: nn.Module, _: DeviceMesh) -> nn.Module:
    return torch.compile(module, backend="eager")


def _group(mesh: DeviceMesh) -> Any:
    return mesh.get_group() if mesh.ndim == 1 else None


def _flat(use_orig_params: bool) -> Wrap:
    def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        # Why both: with a mesh the state has DTensors, with a group ShardedTensors.
        how: dict[str, Any] = {"process_group": _group(mesh)}
        if mesh.ndim == 2:
            how = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            module, use_orig_params=use_orig_params, device_id=device, **how
        )

    return wrap


STEPS: dict[str, Wrap] = {
    "compile": _compiled,
    "AC": lambda module, _: checkpoint_wrapper(module),
    "offload": lambda module, _: offload_wrapper(module),
    "DDP": lambda module, mesh: DistributedDataParallel(module, process_group=_group(mesh)),
    "FSDP1": _flat(False),
    "FSDP1 orig": _flat(True),
    "FSDP2": lambda module, mesh: fully_shard(module, mesh=mesh),
}

WRAPPED = {
    text: [part.split("+") for part in text.split(" | ")]
    for text in (
        " | ",
        " | compile",
        "AC | ",
        "compile+AC | ",
        "AC+compile | ",
        "AC+compile | compile",
        "offload | compile",
        "compile+AC | DDP",
        " | DDP+compile",
        "AC | compile+DDP",
        " | AC",
        "compile | compile+DDP+compile",
        " | FSDP1",
        "FSDP1 | ",
        "AC | FSDP1",
        "compile+AC | FSDP1",
        "AC+compile | FSDP1",
        "FSDP1+AC | ",
        "AC+FSDP1 | FSDP1",
        " | FSDP1+compile",
        "AC | FSDP1+compile",
        " | FSDP1 orig",
        "AC | FSDP1 orig",
        "compile+AC | FSDP1 orig",
        "compile+AC | FSDP1 orig+compile",
        "FSDP2 | FSDP2",
        "compile+AC+FSDP2 | FSDP2",
        "FSDP2+compile+AC | FSDP2",
        "FSDP2 | FSDP2+compile",
    )
}
"""By a text: what wraps each of the layers, innermost first, and then what wraps the whole."""


FEW = (
    "compile+AC | ",
    "compile+AC | DDP",
    "AC | FSDP1",
    " | FSDP1+compile",
    "compile+AC | FSDP1 orig+compile",
    "compile+AC+FSDP2 | FSDP2",
)
"""Those that the suite tries; RAY_DCP_THOROUGH tries all."""


def wrapped(text: str, net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Returns a module whose children, and which itself, are wrapped as a text of `WRAPPED` says.

    Args:
        text: A key of `WRAPPED`.
        net: The module; its children that have parameters are replaced.
        mesh: Ranks that shard it: all of one dimension, or replicas of shards.
    """
    inner, outer = WRAPPED[text]
    for name, layer in list(net.named_children()):
        if any(True for _ in layer.parameters()):
            for step in filter(None, inner):
                layer = STEPS[step](layer, mesh)
            setattr(net, name, layer)
    for step in filter(None, outer):
        net = STEPS[step](net, mesh)
    return net


def with_parts_of_wrappers(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Returns the state of a model and its optimizer, with other names of parameters.

    Args:
        state: `model` by names, and `optimizer` with `state` and `param_groups` by these.
        rename: Returns the other name of a parameter.
    """
    optimizer = state["optimizer"]
    return {
        "model": {rename(name): value for name, value in state["model"].items()},
        "optimizer": {
            "state": {rename(name): value for name, value in optimizer["state"].items()},
            "param_groups": [
                {**group, "params": [rename(name) for name in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        },
    }
