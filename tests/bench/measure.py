"""Timing that survives a noisy machine: interleaved rounds, medians, CPU seconds, peak memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Sample:
    """One run of one contestant."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Most resident memory above what was resident at the start."""


def state_of(num_bytes: float = 1.41e9, share: int = 1) -> dict[str, torch.Tensor]:
    """Returns 243 tensors of about so many bytes.

    Args:
        num_bytes: Of all of them.
        share: Cut the rows of each by this number: what one of as many ranks holds.
    """
    sizes = [(1200, 1200)] * 200 + [(3072, 512)] * 40 + [(4096, 1024)] * 3
    scale = num_bytes / share / (4 * sum(rows * width for rows, width in sizes))
    return {
        f"layers.{index}.weight": torch.randn(max(round(rows * scale), 1), width)
        for index, (rows, width) in enumerate(sizes)
    }


def once(run: Callable[[], object]) -> Sample:
    """Runs once and measures; garbage collection happens before, not during."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark VmHWM
    before = _status_bytes("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall, cpu, max(0, _status_bytes("VmHWM") - before))


def interleaved(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, Sample]:
    """Returns the medians over `rounds` rounds in which every contestant runs once.

    A round more comes first and does not count: imports and first-time caches, on all sides.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            before(name)
            sample = once(run)
            if number:
                samples[name].append(sample)
    return {
        name: Sample(
            statistics.median(s.wall_s for s in runs),
            statistics.median(s.cpu_s for s in runs),
            max(s.peak_bytes for s in runs),
        )
        for name, runs in samples.items()
    }


def drop_cache(root: Path) -> None:
    """Evicts the files below a folder from the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def warm_cache(root: Path) -> None:
    """Reads the files below a folder, so that they are in the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def show(title: str, rows: dict[str, Sample], num_bytes: int, base: str) -> None:
    """Prints one line a contestant, with its ratio to `base`."""
    print(f"\n{title}   (load average {os.getloadavg()[0]:.1f})")
    print(f"  {'':34}{'wall s':>9}{'CPU s':>9}{'GB/s':>8}{'peak MB':>9}{'wall x':>8}{'CPU x':>8}")
    for name, row in rows.items():
        print(
            f"  {name:34}{row.wall_s:9.3f}{row.cpu_s:9.3f}{num_bytes / row.wall_s / 1e9:8.2f}"
            f"{row.peak_bytes / 1e6:9.0f}{rows[base].wall_s / row.wall_s:8.2f}"
            f"{rows[base].cpu_s / max(row.cpu_s, 1e-9):8.2f}"
        )
    print(f"  (x: times better than {base})")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
