"""Four real processes: model and optimizer of one parallel layout into those of another."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from ray_dcp.torch_adapter.capture import Capture, capture

from .adapter_support import frozen, load, stored
from .test_adapter_capture import LAYOUTS, WORLD, rows, torch_rows

REPOSITORY = Path(__file__).parents[2]


def test_model_and_optimizer_move_from_fsdp_with_tp_to_hsdp() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from tests.unit.test_adapter_gloo import main; main()"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(port)],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, told, strict=True):
        if rank.returncode:
            pytest.fail(output)


def main() -> None:
    rank, port = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    try:
        model, optimizer = trained("fsdp2 + tp", learning_rate=0.1)
        state = state_of(model, optimizer)
        given = {"model": model, "optimizer": optimizer}
        captured = capture(given, rank=rank, world_size=WORLD)
        assert rows(captured.columns) == torch_rows(state)
        assert captured.warnings == ()
        checkpoint = stored(*gathered(captured))

        other = LAYOUTS["hsdp"]()
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.2)
        load(checkpoint, {"model": other, "optimizer": other_optimizer})
        expected, found = full(state), full(state_of(other, other_optimizer))
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key
        assert expected["optimizer.param_groups.0.lr"] == 0.1
    finally:
        dist.destroy_process_group()


def trained(layout: str, learning_rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = LAYOUTS[layout]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * learning_rate
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def gathered(captured: Capture) -> list[Capture]:
    """Every rank's capture, on every rank."""
    mine = frozen(captured)
    columns = mine.columns
    fixed = columns.kind == 0
    data = [
        bytes(mine.source(row)) if fixed[row] else mine.deferred(row) for row in range(len(columns))
    ]
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, (columns, data))
    return [
        Capture(columns, lambda row, data=data: memoryview(data[row]), data.__getitem__)  # type: ignore[misc]
        for columns, data in everyone
    ]


def full(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names to whole tensors and plain values."""
    found: dict[str, Any] = {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, dict) or (isinstance(value, list) and name != f"{prefix}params"):
            found.update(full(value, f"{name}."))
        elif isinstance(value, DTensor):
            found[name] = value.full_tensor()
        elif isinstance(value, (torch.Tensor, int, float)):
            found[name] = value
    return found
