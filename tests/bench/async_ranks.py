"""Rows of the bench of asynchronous saves that need ranks of their own."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from ray_dcp.options import SaveOptions
from tests.bench.async_rows import Table

RANKS = 2
ROUNDS_OF_LIMIT = 8


# --- restore from memory ------------------------------------------------------------------------


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
    from ray_dcp.runtime.worker_group import WorkerGroup

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
    from ray_dcp.runtime.discovery import current_session

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
    from tests.bench.async_saves import MemoryCopy

    state = _share(num_bytes)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    _connected().staging()
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


# --- the object store ----------------------------------------------------------------------------


def objects(rounds: int, num_bytes: int, root: Path, table: Table) -> None:
    """A Ray worker stages in the object store, and copies in memory."""
    import ray

    rank = ray.remote(num_cpus=0)(StoreRank).remote(num_bytes)
    found: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        came = ray.get(rank.save.remote(str(root / "objects")))
        shutil.rmtree(root / "objects")
        # The first ones touch memory.
        for what, value in came.items() if number > 1 else ():
            found.setdefault(what, []).append(value)
    for name, values in found.items():
        table.fact(name, values, "" if "/" in name else "s")
    limit = ray.get(rank.limit.remote())
    table.fact("limit: ray.put of as much / memcpy, best round", [limit], "")
    table.row("objects", found["stall / memcpy"])
    ray.get(rank.leave.remote())


class StoreRank:
    """A rank that stages."""

    def __init__(self, num_bytes: int) -> None:
        import ray_dcp
        from tests.bench.async_saves import MemoryCopy
        from tests.bench.measure import state_of

        self._state = state_of(num_bytes)
        self._num_bytes = sum(tensor.nbytes for tensor in self._state.values())
        self._copy = MemoryCopy(self._state)
        self._session = ray_dcp.connect(name="store", namespace="store")
        ray_dcp.warm_up(self._state).result(600)
        self._pids = [os.getpid(), self._session.staging().info()["pid"]]

    def save(self, path: str) -> dict[str, float]:
        """Returns how long a save took, and a copy in memory just before.

        It begins when the memory of the one before is free: jobs save less often than that takes.
        """
        import ray_dcp
        from tests.bench.processes import cpu_s
        from tests.support.processes import eventually

        assert eventually(lambda: not self._session.staging().info()["used_bytes"])
        copy_s = self._copy.seconds()
        cpu, began = cpu_s(self._pids), time.perf_counter()
        handle = ray_dcp.async_save(self._state, checkpoint_id=path)
        handle.staged(600)
        stall_s = time.perf_counter() - began
        handle.committed(600)
        durable_s = time.perf_counter() - began
        stage_s = handle.report().seconds["stage"]
        return {
            "memcpy": copy_s,
            "stall": stall_s,
            "copy of the stall": stage_s,
            "durable": durable_s,
            "CPU of rank and stager": cpu_s(self._pids) - cpu,
            "stall / memcpy": stall_s / copy_s,
        }

    def limit(self) -> float:
        """Returns how long `ray.put` takes for windows of the state, in copies in memory.

        The best of some rounds: where the store has never been touched it takes ten times as long.
        """
        import numpy as np
        import ray

        from ray_dcp.stage.orders import StagerOptions
        from tests.support.processes import eventually

        length = StagerOptions().window_bytes
        windows = [np.ones(length, np.uint8)] * max(1, self._num_bytes // length)
        ratios, held = [], []
        for _ in range(ROUNDS_OF_LIMIT):
            held.clear()
            # What is dropped is free a moment later; what was never touched takes much longer.
            assert eventually(lambda: _share_of_store_free() > 0.95)
            copy_s = self._copy.seconds()
            began = time.perf_counter()
            held.extend(ray.put([window]) for window in windows)
            ratios.append((time.perf_counter() - began) / copy_s)
        return min(ratios)

    def leave(self) -> None:
        self._session.close()


def _share_of_store_free() -> float:
    import ray

    name = "object_store_memory"
    free: float = ray.available_resources().get(name, 0.0)
    return free / ray.cluster_resources()[name]
