"""`python -m tests.support.programs.stock_golden DIR`: two ranks save with stock DCP, of the torch
that runs it.

What the versions that were tried have written lies in `tests/golden/stock-VERSION`, and is read by
`tests/unit/test_io_opening.py`. Nothing but torch is needed here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

WORLD_SIZE = 2
VERSION = ".".join(torch.__version__.split(".")[:2])


def state(*, checkpointable: bool) -> dict[str, Any]:
    """Returns what both ranks save together, whole and in plain tensors.

    Args:
        checkpointable: With a tensor that says by its attributes what it is a part of; torch knows
            these from 2.14 on.
    """
    parts = {"parts": torch.arange(6, dtype=torch.int16)} if checkpointable else {}
    return {
        "model": {
            "weight": torch.arange(15.0).reshape(5, 3),
            "replicated": torch.arange(4),
            "bias": torch.nn.Parameter(torch.tensor([0.5, -2.0, 1e30], dtype=torch.bfloat16)),
            "turned": torch.arange(12, dtype=torch.int32).reshape(3, 4).t(),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 3),
            "flags": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j, -3j]),
            "bits": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
            **parts,
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((5, 3), 0.25)}},
            "param_groups": [{"lr": 0.125, "betas": (0.9, 0.99), "params": [0]}],
        },
        "nothing": {},
        "step": 7,
        "note": {"text": "golden", "items": [1, 2]},
    }


def save(path: str, rank: int) -> None:
    """Saves as one of the ranks, whose group is there."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    values = state(checkpointable=hasattr(stock, "CheckpointableTensor"))
    model = values["model"]
    model["weight"] = distribute_tensor(model["weight"], mesh, [Shard(0)])
    model["replicated"] = distribute_tensor(model["replicated"], mesh, [Replicate()])
    if "parts" in model:
        start = 3 * rank
        part = model["parts"][start : start + 3].clone()
        part.global_shape, part.global_offsets = (6,), ((start,),)
        part.local_offsets, part.local_sizes = ((0,),), ((3,),)
        model["parts"] = part
    stock.save(values, checkpoint_id=path)


def main() -> None:
    """Saves on two ranks, each a process of its own."""
    if len(sys.argv) == 2:
        with tempfile.TemporaryDirectory() as meeting:
            command = [
                sys.executable,
                "-m",
                "tests.support.programs.stock_golden",
                sys.argv[1],
                f"{meeting}/group",
            ]
            ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(WORLD_SIZE)]
            sys.exit(max(abs(rank.wait()) for rank in ranks))
    _, path, group, rank = sys.argv
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{group}", rank=int(rank), world_size=WORLD_SIZE
    )
    save(path, int(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
