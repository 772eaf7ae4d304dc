"""Staging on one node: how long training waits, how soon it is durable, what it costs.

Every round measures the limits beside it: a copy of the same tensors into warm memory of this
process, and a plain direct write of as many bytes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.bench.single import raw_write

GOALS = (("stall / copy", 1.25, 1.10), ("first / steady stall", 2.0, 1.5),
         ("durable / raw direct write", 0.75, 0.90), ("CPU s per GB", 0.35, 0.20),
         ("extra memory / state", 1.2, 1.2))  # fmt: skip
"""Name, limit, goal."""


def staging(rounds: int, directory: str | None) -> None:
    """1.4 GB in 243 tensors, then 20,000 of 1 KB, through a stager, over and over."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    import ray

    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    temp = tempfile.mkdtemp(prefix="rb", dir="/tmp")
    before = set(os.listdir("/dev/shm"))
    ray.init(num_cpus=4, object_store_memory=256 << 20, include_dashboard=False,
             log_to_driver=False, configure_logging=False, _temp_dir=temp)  # fmt: skip
    try:
        for small in (False, True):
            _measure(rounds, root, small)
    finally:
        ray.shutdown()
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(temp, ignore_errors=True)
    left = {name for name in os.listdir("/dev/shm") if name not in before}
    print(f"  left in /dev/shm: {sorted(left) or 'nothing'}")


def _measure(rounds: int, root: Path, small: bool) -> None:
    import ray
    import torch

    from ray_dcp.options import SaveOptions
    from ray_dcp.planning.global_plan import make_plan, rank_plan
    from ray_dcp.protocol.messages import Target
    from ray_dcp.runtime.staging import RankStaging
    from ray_dcp.stage.values import StageKey
    from ray_dcp.torch_adapter.capture import capture

    if small:
        state = {f"layers.{i}.weight": torch.randn(256) for i in range(20_000)}
    else:
        sizes = [(1200, 1200)] * 200 + [(3072, 512)] * 40 + [(4096, 1024)] * 3
        scale = 1.41e9 / (4 * sum(a * b for a, b in sizes))
        state = {f"l{i}": torch.randn(int(a * scale), b) for i, (a, b) in enumerate(sizes)}
    arrays = [t.view(-1).view(torch.uint8).numpy() for t in state.values()]
    num_bytes = sum(a.nbytes for a in arrays)
    private = np.ones(num_bytes, dtype=np.uint8)

    def copy() -> None:
        at = 0
        for array in arrays:
            np.copyto(private[at : at + array.size], array)
            at += array.size

    options = SaveOptions()
    captured = capture(state, rank=0, world_size=1)
    plan = rank_plan(
        make_plan([captured.columns], container="torch_save", part_bytes=options.part_bytes), 0
    )
    staging = RankStaging.open("bench", namespace="small" if small else "large")
    idle = _memory_of(staging.info()["pid"])
    began = time.perf_counter()
    staging.warm(num_bytes).result()
    print(f"  warm-up in the background: {time.perf_counter() - began:.2f} s")
    names = ("copy", "copy cpu", "stall", "durable", "raw", "cpu")
    rows: dict[str, list[float]] = {name: [] for name in names}
    first, slowest, most = 0.0, 0.0, 0
    for number in range(rounds + 1):
        copy()
        copy_cpu, began = time.thread_time(), time.perf_counter()
        copy()
        copied_s, copy_cpu = time.perf_counter() - began, time.thread_time() - copy_cpu
        target = Target(str(root / f"save{number}"))
        pids = [os.getpid(), staging.info()["pid"]]
        key = StageKey(f"s{number}", 0, f"a{number}")
        cpu, began = _cpu_s(pids), time.perf_counter()
        staged = staging.stage(key, plan, captured, target=target, options=options)
        stall_s = time.perf_counter() - began
        # Published files are durable. Asking the stager would cost what is measured.
        while _published(target.url) < len(plan.files):
            time.sleep(0.005)
            if number == 0:
                asked = time.perf_counter()
                ray.get(staged.stager.ping.remote())
                slowest = max(slowest, time.perf_counter() - asked)
        durable_s = time.perf_counter() - began
        cpu = _cpu_s(pids) - cpu
        while len(staged.progress().reports) < len(plan.files):
            time.sleep(0.005)
        assert all(report.receipt for report in staged.progress().reports)
        most = max(most, _memory_of(pids[1]) - idle)
        staged.release()
        shutil.rmtree(target.url)
        began = time.perf_counter()
        raw_write(root / "raw", num_bytes)
        raw_s = time.perf_counter() - began
        (root / "raw").unlink()
        if number == 0:
            first = stall_s
            continue
        values = (copied_s, copy_cpu, stall_s, durable_s, raw_s, cpu)
        for name, value in zip(names, values, strict=True):
            rows[name].append(value)
    median = {name: statistics.median(values) for name, values in rows.items()}
    found = (median["stall"] / median["copy"], first / median["stall"],
             median["raw"] / median["durable"], median["cpu"] / num_bytes * 1e9,
             most / num_bytes)  # fmt: skip
    print(f"\nstaging, {num_bytes / 1e9:.3f} GB in {len(state)} tensors   (load average "
          f"{os.getloadavg()[0]:.1f}; medians of {rounds})")  # fmt: skip
    for name, value in median.items():
        print(f"  {name:10}{value:9.4f} s")
    print(f"  {'first':10}{first:9.4f} s")
    print(f"  {'slowest':10}{slowest:9.4f} s   answer to a call while it writes")
    for (name, limit, goal), value in zip(GOALS, found, strict=True):
        better = value >= limit if name.startswith("durable") else value <= limit
        # The limits are for large tensors: what 20,000 calls cost is not a copy's doing.
        verdict = f"   limit {limit}, goal {goal}{'' if better else '   MISSED'}"
        print(f"  {name:30}{value:7.2f}{'' if small else verdict}")
    staging.close()
    ray.kill(staged.stager)


def _published(folder: str) -> int:
    try:
        return sum(name.endswith(".distcp") for name in os.listdir(folder) if name[0] != ".")
    except FileNotFoundError:
        return 0


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_of(pid: int) -> int:
    """Returns the resident memory of a process, shared memory included, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")
