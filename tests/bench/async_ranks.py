"""Restores from the memory of the stager, by ranks of their own."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from ray_dcp.options import SaveOptions
from tests.bench.async_saves import MemoryCopy, Table

RANKS = 2


def restore(rounds: int, num_bytes: int, root: Path, table: Table) -> None:
    """Saves, kills all trainers, and has new ones load from the memory of the stager.

    The row is of one trainer, as all others. Where ranks share the processors of a small machine,
    what a load does besides the copy has none to itself: that is told as well.
    """
    for number in (1, RANKS):
        ratios = _restore(number, rounds, num_bytes, root, table)
        if number == 1:
            table.row("restore", ratios)
        else:
            times = statistics.median(ratios)
            table.note(f"restore from memory / memcpy with {number} ranks: {times:.2f}")


def _restore(ranks: int, rounds: int, num_bytes: int, root: Path, table: Table) -> list[float]:
    from ray_dcp.errors import CheckpointError
    from ray_dcp.worker_group import WorkerGroup

    loads, copies, reports = [], [], []
    small = str(root / "small")
    with WorkerGroup(ranks, run_timeout_s=600, release_s=20) as group:
        group.run(_save_small, small)
        for number in range(rounds + 1):
            path = str(root / "kept")
            group.run(save_and_keep, path, num_bytes)
            for pid in group.pids:
                os.kill(pid, signal.SIGKILL)
            # Suppressed by hand: the group finds out that its ranks are dead.
            try:
                group.run(os.getpid)
            except CheckpointError:
                group.resize(ranks)
            came = group.run(load_kept, path, small, num_bytes)
            if number:
                loads.append(max(one["load"] for one in came))
                copies.append(max(one["copy"] for one in came))
                reports.append(came[0]["report"])
            shutil.rmtree(path)
    table.fact(f"load after SIGKILL of all trainers, {ranks} ranks", loads)
    table.fact(f"memcpy of as much, {ranks} ranks at once", copies)
    table.note(f"the load's report: {reports[-1]}")
    return [load / copy for load, copy in zip(loads, copies, strict=True)]


def _connected() -> Any:
    """Returns the session of this rank; one that is alone has to ask for one with a stager."""
    import ray_dcp
    from ray_dcp.session.discovery import current_session

    return current_session() or ray_dcp.connect(name="kept")


def save_and_keep(path: str, num_bytes: int) -> None:
    """Saves this rank's share and keeps it in memory."""
    import ray_dcp

    _connected()
    options = SaveOptions(keep_in_memory=1)
    ray_dcp.async_save(_share(num_bytes), checkpoint_id=path, options=options).committed(600)


def _save_small(path: str) -> None:
    import torch

    import ray_dcp

    ray_dcp.save({"w": torch.ones(8)}, checkpoint_id=path)


def load_kept(path: str, small: str, num_bytes: int) -> dict[str, Any]:
    """Returns how long this rank's share takes to load, and to copy.

    A small load comes first: what a new process imports is no property of the memory tier.
    """
    import torch
    import torch.distributed as dist

    import ray_dcp

    state = _share(num_bytes)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    _connected().ray.staging()
    ray_dcp.load({"w": torch.ones(8)}, checkpoint_id=small)
    dist.barrier()
    copy_s = MemoryCopy(state).seconds()
    dist.barrier()
    began = time.perf_counter()
    report = ray_dcp.load(state, checkpoint_id=path)
    load_s = time.perf_counter() - began
    wrong = [name for name, tensor in state.items() if not tensor.equal(expected[name])]
    assert not wrong, wrong
    return {"load": load_s, "copy": copy_s, "report": str(report)}


def _share(num_bytes: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from tests.bench.measure import state_of

    torch.manual_seed(dist.get_rank())
    state = state_of(num_bytes, dist.get_world_size())
    return {f"rank{dist.get_rank()}.{name}": tensor for name, tensor in state.items()}
