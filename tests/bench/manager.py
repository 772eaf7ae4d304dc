"""A manager: how long a root of 10,000 steps takes to open, and what it adds to a save.

The bare save is `ray_dcp.save` of the same state to a folder of its own; the manager's is that, and
its decision, its info, its look at the step and the retention of the one before.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

NUM_STEPS = 10_000


def manager(rounds: int, directory: str | None) -> None:
    """Measures both; prints each limit beside what was measured."""
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    try:
        _catalogue(rounds, root / "long")
        _overhead(rounds, root)
        _decisions(root / "decisions")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _catalogue(rounds: int, root: Path) -> None:
    import torch

    from ray_dcp.manager import CheckpointManager

    with CheckpointManager(root, 1, chkpt_on_preemption=False) as made:
        made.save(0, {"w": torch.ones(4)}, metrics={"loss": 1.0}, metadata={"commit": "3f2a"})
    first = root / "step-00000000"
    files = {path.name: path.read_bytes() for path in first.iterdir()}
    for step in range(1, NUM_STEPS):
        folder = root / f"step-{step:08d}"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)

    def opened() -> tuple[float, float]:
        cpu, begin = time.process_time(), time.perf_counter()
        found = CheckpointManager(root, read_only=True).all_steps()
        seconds = time.perf_counter() - begin, time.process_time() - cpu
        assert len(found) == NUM_STEPS
        return seconds

    times = [opened() for _ in range(rounds)]
    with CheckpointManager(root, 1, chkpt_on_preemption=False) as writer:
        writer.save(NUM_STEPS, {"w": torch.ones(4)})
        begin = time.perf_counter()
        writer.save(NUM_STEPS + 1, {"w": torch.ones(4)})
        save_s = time.perf_counter() - begin
    wall, cpu = (statistics.median(one) for one in zip(*times, strict=True))
    print(f"  {NUM_STEPS} steps are opened in {wall:.2f} s, CPU {cpu:.2f} s")
    print(f"  a save beside {NUM_STEPS} others:         {1e3 * save_s:6.1f} ms")


def _overhead(rounds: int, root: Path) -> None:
    import torch

    import ray_dcp
    from ray_dcp.manager import BestN, CheckpointManager, LatestN

    for name, count, size in (("1 MB", 16, 1 << 14), ("64 MB", 64, 1 << 18)):
        state = {f"layers.{i}.weight": torch.randn(size) for i in range(count)}
        bare, managed, staged = [], [], []
        place = root / f"managed-{count}"
        retention = LatestN(2) | BestN(1, "loss")
        with CheckpointManager(place, 1, retention=retention, chkpt_on_preemption=False) as manager:
            for step in range(8 * rounds):
                begin = time.perf_counter()
                ray_dcp.save(state, checkpoint_id=root / f"bare-{count}" / str(step))
                middle = time.perf_counter()
                manager.save(2 * step, state, metrics={"loss": float(step % 7)})
                end = time.perf_counter()
                manager.join()  # what others delete must not be measured
                again = time.perf_counter()
                manager.save_async(2 * step + 1, state, metrics={"loss": 9.0})
                staged.append(time.perf_counter() - again)
                manager.join()
                bare.append(middle - begin)
                managed.append(end - middle)
                shutil.rmtree(root / f"bare-{count}" / str(step))
        one, other, stall = (1e3 * statistics.median(ms[2:]) for ms in (bare, managed, staged))
        print(f"  {name}: bare save {one:7.1f} ms, by the manager {other:7.1f} ms, "
              f"over it {other - one:5.1f} ms; save_async returns in {stall:.1f} ms")  # fmt: skip


def _decisions(root: Path) -> None:
    from ray_dcp.manager import CheckpointManager

    with CheckpointManager(root, 1000) as manager:
        begin = time.perf_counter()
        for step in range(1, 1000):
            manager.should_save(step)
        each = (time.perf_counter() - begin) / 999
        print(f"  a step that is not due, one process: {1e6 * each:.1f} us")
