"""One process: many small tensors, and 1.4 GB in 243 tensors; ours, stock DCP and the limit."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from tests.bench.measure import drop_cache, interleaved, show, state_of, warm_cache

State = dict[str, torch.Tensor]


def small(rounds: int, directory: str | None) -> None:
    """20,000 tensors of 1 KB."""
    state = {f"layers.{i}.weight": torch.randn(256) for i in range(20_000)}
    _compare("20,000 tensors of 1 KB", state, rounds, directory)


def big(rounds: int, directory: str | None) -> None:
    """1.4 GB in 243 tensors."""
    _compare("1.4 GB in 243 tensors", state_of(), rounds, directory)


def _compare(title: str, state: State, rounds: int, directory: str | None) -> None:
    warnings.simplefilter("ignore")
    num_bytes = sum(t.nbytes for t in state.values())
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        saves: dict[str, Callable[[], object]] = {
            "ray_dcp": lambda: ray_dcp.save(state, checkpoint_id=str(root / "ours")),
            "torch DCP": lambda: stock.save(state, checkpoint_id=str(root / "stock")),
            "limit: O_DIRECT write + fsync": lambda: raw_write(root / "raw", num_bytes),
        }
        folders = {"ray_dcp": "ours", "torch DCP": "stock"}

        def remove(name: str) -> None:
            shutil.rmtree(root / folders.get(name, "none"), ignore_errors=True)

        show(f"save, {title}", interleaved(saves, rounds, before=remove), num_bytes, "torch DCP")
        compare_loads(title, state, root, rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def compare_loads(title: str, state: State, root: Path, rounds: int) -> None:
    """Loads what is saved below `root` as `ours`, `stock` and `raw`, warm and cold, in turns."""
    num_bytes = sum(t.nbytes for t in state.values())
    targets = {name: torch.zeros_like(t) for name, t in state.items()}
    ours, theirs = str(root / "ours"), str(root / "stock")
    loads: dict[str, Callable[[], object]] = {
        "ray_dcp": lambda: ray_dcp.load(dict(targets), checkpoint_id=ours),
        "ray_dcp, verify=never": lambda: ray_dcp.load(
            dict(targets), checkpoint_id=ours, options=ray_dcp.LoadOptions(verify="never")
        ),
        "ray_dcp reads stock's files": lambda: ray_dcp.load(dict(targets), checkpoint_id=theirs),
        "torch DCP": lambda: stock.load(dict(targets), checkpoint_id=theirs),
        "limit: preadv into the targets": lambda: raw_read(root / "raw", targets),
    }
    warm = interleaved(loads, rounds, before=lambda name: warm_cache(root))
    show(f"load, warm cache, {title}", warm, num_bytes, "torch DCP")
    cold = interleaved(loads, rounds, before=lambda name: drop_cache(root))
    show(f"load, cold cache, {title}", cold, num_bytes, "torch DCP")
    ray_dcp.load(dict(targets), checkpoint_id=ours)
    wrong = [name for name, t in state.items() if not torch.equal(t, targets[name])]
    print(f"\nvalues that differ after loading: {len(wrong)}")


def raw_write(path: Path, num_bytes: int) -> None:
    piece = mmap.mmap(-1, 8 << 20)
    piece.write(os.urandom(len(piece)))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    try:
        written = 0
        while written < num_bytes:
            written += os.write(fd, piece)
        os.ftruncate(fd, num_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, targets: State) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        views = [memoryview(t.view(-1).view(torch.uint8).numpy()) for t in targets.values()]
        for start in range(0, len(views), 512):
            offset += os.preadv(fd, views[start : start + 512], offset)
    finally:
        os.close(fd)
