"""A model of the Hugging Face hub into FSDP2 on two ranks, beside stock DCP's reader."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ray_dcp
from tests.bench.measure import drop_cache, warm_cache
from tests.support.programs.hub_ranks import write_model

SHAPES = {
    "545 MB in 113 matrices (dense)": [(1024, 1024)] * 64
    + [(4096, 1024)] * 32
    + [(1024, 4096)] * 17,
    "328 MB in 10,000 matrices (experts)": [(64, 256)] * 10_000,
}
"""Models in bfloat16, by name."""
RANKS, FILES = 2, 4


def hub(rounds: int, directory: str | None) -> int:
    """Prints seconds of the slower rank, medians of interleaved rounds; returns wrong tensors."""
    root = Path(tempfile.mkdtemp(prefix="hub-", dir=directory))
    wrong = 0
    try:
        for title, shapes in SHAPES.items():
            torch.manual_seed(0)
            state = {f"w.{i}": torch.randn(shape).bfloat16() for i, shape in enumerate(shapes)}
            write_model(root / "model", state, FILES)
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            given = (port, str(root), title, shapes, rounds)
            torch.multiprocessing.spawn(_rank, given, nprocs=RANKS)
            wrong += int((root / "wrong").read_text())
            shutil.rmtree(root / "model")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return wrong


def _rank(
    rank: int, port: int, root: str, title: str, shapes: list[tuple[int, int]], rounds: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    folder, wrong = Path(root, "model"), 0
    if rank == 0:
        print(f"\n{title}, {RANKS} ranks   (load average {os.getloadavg()[0]:.1f})")
        print(f"  {'':28}{'ray_dcp s':>11}{'stock s':>9}{'x':>7}")
    for dim, cache in ((0, "cached"), (1, "cached"), (0, "cold"), (1, "cold")):
        ours, theirs = _targets(shapes, mesh, dim), _targets(shapes, mesh, dim)
        runs: dict[str, Callable[[], object]] = {
            "ours": partial(ray_dcp.load, ours, checkpoint_id=folder),
            "theirs": partial(_load_stock, theirs, folder),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                if rank == 0:
                    (drop_cache if cache == "cold" else warm_cache)(folder)
                dist.barrier()
                begin_s = time.perf_counter()
                run()
                dist.barrier()
                if number:
                    seconds[name].append(time.perf_counter() - begin_s)
        wrong += sum(not ours[name].to_local().equal(theirs[name].to_local()) for name in ours)
        medians = [statistics.median(found) for found in seconds.values()]
        if rank == 0:
            told = f"{'rows' if dim == 0 else 'columns'} sharded, {cache}"
            print(f"  {told:28}{medians[0]:11.3f}{medians[1]:9.3f}{medians[1] / medians[0]:7.2f}")
    if rank == 0:
        Path(root, "wrong").write_text(str(wrong))
    dist.destroy_process_group()


def _targets(shapes: list[tuple[int, int]], mesh: DeviceMesh, dim: int) -> dict[str, DTensor]:
    return {
        f"w.{i}": distribute_tensor(
            torch.zeros(shape).bfloat16(), mesh, [Shard(dim)], src_data_rank=None
        )
        for i, shape in enumerate(shapes)
    }


def _load_stock(state: dict[str, DTensor], folder: Path) -> None:
    stock.load(state, storage_reader=stock.HuggingFaceStorageReader(str(folder)))
