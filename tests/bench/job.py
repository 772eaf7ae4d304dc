"""A step of a job: its parts, a value and a part that is kept, with the limits of each.

The peer of `put` is `async_save` of as much by a rank, in the same rounds. What the coordinator
spends is its CPU for a step of many small parts, those that one process saves.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.bench.async_saves import RAY_SETTINGS, one_node
from tests.bench.measure import state_of
from tests.support.processes import cpu_s, descendants, memory_bytes, watched_memory

COORDINATOR_LIMIT_MS = 2.0
"""CPU of the coordinator for each part of a step."""
KEEP_LIMIT_MS = 50.0
PUT_LIMIT = 1.3
"""Time until a value is committed, of that of `async_save` of as much by a rank."""
DRIVER_LIMIT_MB = 20.0
NUM_PARTS = 64


class Saver:
    """A process of the job, with as many bytes as are asked for."""

    def __init__(self, num_bytes: int) -> None:
        self._state: dict[str, Any] = state_of(num_bytes)

    def pid(self) -> int:
        return os.getpid()

    def state(self) -> Any:
        import ray_dcp

        return ray_dcp.PartValue(self._state)

    def stage(self, part: Any) -> None:
        """Saves as a rank does."""
        import ray_dcp

        ray_dcp.async_save(self._state, checkpoint_id=part).staged(600)

    def save_all(self, parts: list[Any]) -> None:
        """Saves a small part after the other, a few at once."""
        import ray_dcp

        with ThreadPoolExecutor(8) as threads:
            saves = [
                threads.submit(
                    ray_dcp.save, {"w": torch.zeros(8)}, checkpoint_id=part, no_dist=True
                )
                for part in parts
            ]
            for one in saves:
                one.result()


def job(rounds: int, directory: str | None, megabytes: int) -> int:
    """Measures, prints each limit beside what was measured; returns 1 when one is not held."""
    os.environ.update(RAY_SETTINGS)
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        with one_node(6 * megabytes * 1_000_000):
            missed = [_parts(rounds, root), _values(rounds, root, megabytes)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return int(any(missed))


def _parts(rounds: int, root: Path) -> bool:
    import ray

    import ray_dcp

    names = [f"part{number}" for number in range(NUM_PARTS)]
    saver = ray.remote(num_cpus=0)(Saver).remote(1 << 20)
    # Why all are kept: what retention spends is not of the step.
    run = ray_dcp.JobCheckpoints(root / "parts", names)
    spent_ms = []
    for step in range(1, rounds + 2):
        with _cpu_of(_coordinator_pid) as spent, run.step(step) as opened:
            ray.get(saver.save_all.remote([opened.part(name) for name in names]))
        opened.result(600)
        spent_ms.append(1e3 * spent() / NUM_PARTS)
    run.close()
    ray.kill(saver)
    return _row("CPU of the coordinator for a part of 64", spent_ms[1:], COORDINATOR_LIMIT_MS, "ms")


def _values(rounds: int, root: Path, megabytes: int) -> bool:
    import ray

    import ray_dcp

    saver = ray.remote(num_cpus=0)(Saver).remote(megabytes * 1_000_000)
    run = ray_dcp.JobCheckpoints(root / "values", ("big", "small"), max_to_keep=2)

    def timed(step: int, give: Callable[[Any], object]) -> tuple[float, float]:
        """Returns how long a step takes until it is committed, and its big part until durable."""
        with run.step(step) as opened:
            begin_s = time.perf_counter()
            give(opened)
            opened.put("small", [step])
            while not opened.report().parts["big"].is_durable:
                time.sleep(0.002)
            durable_s = time.perf_counter() - begin_s
        opened.result(600)
        committed_s = time.perf_counter() - begin_s
        # Why waited for: the kernel frees a file of 1 GB in one piece, and whoever asks for the
        # disk meanwhile waits, so that the next row would have what retention spends.
        while len([*(root / "values").glob("step-*/big/*.distcp")]) > 2:
            time.sleep(0.01)
        return committed_s, durable_s

    put_s, rank_s, keep_ms, grown_mb = [], [], [], []
    step, this = 0, os.getpid()
    for number in range(rounds + 1):
        before = memory_bytes([this])
        with watched_memory([this]) as peak:
            put, _ = timed(step + 1, lambda one: one.put("big", saver.state.remote()))
        rank, _ = timed(step + 2, lambda one: ray.get(saver.stage.remote(one.part("big"))))
        _, keep = timed(step + 3, lambda one: one.keep("big"))
        step += 3
        if number:
            put_s.append(put)
            rank_s.append(rank)
            keep_ms.append(1e3 * keep)
            grown_mb.append((peak.num_bytes - before) / 1e6)
    run.close()
    ratio = [put / rank for put, rank in zip(put_s, rank_s, strict=True)]
    print(f"  {megabytes} MB: put until committed {statistics.median(put_s):.3f} s, async_save "
          f"{statistics.median(rank_s):.3f} s")  # fmt: skip
    missed = [
        _row("put until committed / async_save by a rank", ratio, PUT_LIMIT, ""),
        _row("memory of the driver, grown by put", grown_mb, DRIVER_LIMIT_MB, "MB"),
        _row(f"keep of {megabytes} MB until durable", keep_ms, KEEP_LIMIT_MS, "ms"),
    ]
    return any(missed)


def _row(title: str, found: list[float], limit: float, unit: str) -> bool:
    value = statistics.median(found)
    missed = "   MISSED" if value > limit else ""
    print(f"  {title:46}{value:9.2f} {unit:2} ({min(found):.2f} to {max(found):.2f})   limit "
          f"{limit:g} {unit}{missed}", flush=True)  # fmt: skip
    return value > limit


def _coordinator_pid() -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::JobCoordinator"):
            found.append(pid)
    return found


@contextmanager
def _cpu_of(pids: Callable[[], list[int]]) -> Iterator[Callable[[], float]]:
    """Yields what returns the CPU seconds that processes used since."""
    known = pids()
    before = cpu_s(known)
    yield lambda: cpu_s(known or pids()) - before
