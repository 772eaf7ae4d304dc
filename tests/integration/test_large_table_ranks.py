"""Real ranks, so many tensors that the chunk table has groups: each loads by its part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.format.table import end_of
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.worker_group import WorkerGroup

pytestmark = pytest.mark.usefixtures("ray_session")

TENSORS = 40_000
"""Of each of two ranks: more than a group has rows."""


def state_of(rank: int, fill: float) -> dict[str, object]:
    values = torch.full((TENSORS,), fill) + torch.arange(TENSORS) + rank
    return {f"{rank}.{i}": values[i : i + 1] for i in range(TENSORS)} | {"step": int(fill)}


def save(path: str) -> None:
    import torch.distributed as dist

    options = SaveOptions(stock_metadata=False, num_threads=3, part_bytes=1 << 14)
    ray_dcp.save(state_of(dist.get_rank(), 7.0), checkpoint_id=path, options=options)


def load(path: str) -> tuple[int, int, int]:
    """Loads what the other rank had; returns how many chunks were looked at, of all, and wrong."""
    import torch.distributed as dist

    told: list[tuple[int, int]] = []
    narrow = Checkpoint.narrow

    def listened(self: Checkpoint, *wanted: object) -> object:
        table = narrow(self, *wanted)
        told.append((table.num_chunks, self.manifest.num_chunks))
        return table

    other = 1 - dist.get_rank()
    state = state_of(other, 0.0)
    Checkpoint.narrow = listened
    try:
        options = LoadOptions(strict=False)
        report = ray_dcp.load(state, checkpoint_id=path, options=options)
    finally:
        Checkpoint.narrow = narrow
    expected = state_of(other, 7.0)
    wrong = sum(state[name] != value for name, value in expected.items())
    assert report.bytes_needed >= 4 * TENSORS
    ((mine, whole),) = told
    return mine, whole, int(wrong)


def test_ranks_load_by_their_part_of_a_large_table(tmp_path):
    path = str(tmp_path / "c")
    with WorkerGroup(2, run_timeout_s=180) as ranks:
        ranks.run(save, path)
        (table,) = Path(path).glob("chunks.*.table")
        assert end_of(table.read_bytes()) is not None
        found = ranks.run(load, path)
    assert [(whole, wrong) for _, whole, wrong in found] == [(2 * TENSORS + 1, 0)] * 2
    # One of them needs what is in the second group alone.
    assert TENSORS <= min(mine for mine, _, _ in found) < 2 * TENSORS
    assert ray_dcp.verify(path).ok
