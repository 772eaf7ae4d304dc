"""What checksums cost: a save with and without them, a load that verifies all, some or nothing."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import ray_dcp
from ray_dcp.core.checksums import block_bytes_for, block_checks, num_blocks
from ray_dcp.core.values import UInt64Array
from tests.bench.measure import Sample, drop_cache, once, show, warm_cache
from tests.bench.single import raw_read, raw_write

SAVED, UNCHECKED, RAW, HASHED = "checksums", "no checksums", "O_DIRECT write", "hashing alone"


def checksums(rounds: int, directory: str | None) -> None:
    """1.4 GB in 243 tensors, to storage that is the limit (direct I/O), and from it."""
    warnings.simplefilter("ignore")
    sizes = [(1200, 1200)] * 200 + [(3072, 512)] * 40 + [(4096, 1024)] * 3
    scale = 1.41e9 / (4 * sum(a * b for a, b in sizes))
    state = {f"layers.{i}.weight": torch.randn(int(a * scale), b) for i, (a, b) in enumerate(sizes)}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
    print(
        "There is no option that leaves the checksums of a save out: `no checksums` is a patch in\n"
        "this process that writes zeros for them. It saves the hashing, and nothing else."
    )
    try:
        _saves(state, num_bytes, root, rounds)
        _loads(state, num_bytes, root, rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _saves(state: dict[str, torch.Tensor], num_bytes: int, root: Path, rounds: int) -> None:
    def save(name: str) -> None:
        ray_dcp.save(state, checkpoint_id=str(root / name), no_dist=True)

    def save_unchecked() -> None:
        with null_checksums():
            save(UNCHECKED)

    contestants: dict[str, Callable[[], object]] = {
        SAVED: lambda: save(SAVED),
        UNCHECKED: save_unchecked,
        f"limit: {RAW}": lambda: raw_write(root / "raw", num_bytes),
        f"limit: {HASHED}": lambda: _hash(state),
    }
    folders = (SAVED, UNCHECKED)
    runs = _rounds(
        contestants,
        rounds,
        lambda name: name in folders and shutil.rmtree(root / name, ignore_errors=True),
    )
    rows = _medians(runs)
    show("save, 1.4 GB, direct I/O", rows, num_bytes, UNCHECKED)
    _ratios("save", runs[SAVED], runs[UNCHECKED], num_bytes)
    alone = rows[f"limit: {HASHED}"]
    print(f"  hashing alone: {alone.cpu_s / num_bytes * 1e9:.3f} CPU-s per GB")


def _loads(state: dict[str, torch.Tensor], num_bytes: int, root: Path, rounds: int) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    path = str(root / SAVED)

    def load(verify: str) -> Callable[[], object]:
        options = ray_dcp.LoadOptions(verify=verify)
        return lambda: ray_dcp.load(
            dict(targets), checkpoint_id=path, no_dist=True, options=options
        )

    contestants: dict[str, Callable[[], object]] = {
        f"verify={verify}": load(verify) for verify in ("always", "sample", "never")
    }
    contestants["limit: preadv into the targets"] = lambda: raw_read(root / "raw", targets)
    for cache, prepare in (("warm", warm_cache), ("cold", drop_cache)):
        runs = _rounds(contestants, rounds, lambda name, ready=prepare: ready(root))
        show(f"load, 1.4 GB, {cache} cache", _medians(runs), num_bytes, "verify=never")
        for verify in ("always", "sample"):
            name = f"verify={verify}"
            _ratios(f"load, {cache}, {name}", runs[name], runs["verify=never"], num_bytes)
    load("always")()
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor, targets[name])]
    print(f"\nvalues that differ after loading: {len(wrong)}")


def _rounds(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    before: Callable[[str], object],
) -> dict[str, list[Sample]]:
    """Returns every run of each contestant; the order is turned round after each round.

    A round more comes first and does not count.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(rounds + 1):
        for name in order:
            before(name)
            sample = once(contestants[name])
            if number:
                samples[name].append(sample)
        order.reverse()
    return samples


def _medians(runs: dict[str, list[Sample]]) -> dict[str, Sample]:
    return {
        name: Sample(
            statistics.median(sample.wall_s for sample in own),
            statistics.median(sample.cpu_s for sample in own),
            max(sample.peak_bytes for sample in own),
        )
        for name, own in runs.items()
    }


def _ratios(what: str, checked: list[Sample], unchecked: list[Sample], num_bytes: int) -> None:
    """Prints medians over pairs of runs that came one soon after the other, and the best runs."""
    walls = sorted(a.wall_s / b.wall_s - 1 for a, b in zip(checked, unchecked, strict=True))
    cpus = [(a.cpu_s - b.cpu_s) * 1e9 / num_bytes for a, b in zip(checked, unchecked, strict=True)]
    best = min(a.wall_s for a in checked) / min(b.wall_s for b in unchecked) - 1
    low, high = walls[len(walls) // 4], walls[-1 - len(walls) // 4]
    print(
        f"  {what}: checksums cost {statistics.median(walls):+.1%} of the wall time (quartiles "
        f"{low:+.1%} to {high:+.1%}, best runs {best:+.1%}), "
        f"{statistics.median(cpus):+.3f} CPU-s per GB"
    )


def _hash(state: dict[str, torch.Tensor]) -> None:
    for tensor in state.values():
        data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        block_checks(data, block_bytes_for(len(data)))


@contextmanager
def null_checksums() -> Iterator[None]:
    """Lets writers in this process record 0 for every block, without looking at it."""

    def no_checks(data: memoryview, block_bytes: int) -> UInt64Array:
        return np.zeros(num_blocks(len(data), block_bytes), np.uint64)

    writer = "ray_dcp.io.writer"
    with (
        mock.patch(f"{writer}.block_checks", no_checks),
        mock.patch(f"{writer}.block_check", return_value=0),
    ):
        yield
