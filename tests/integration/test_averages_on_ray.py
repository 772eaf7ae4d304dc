"""Where a Ray is named, several of its processes share an average."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp import averaging
from ray_dcp.errors import DamagedCheckpointError
from tests.support import checkpoints

pytestmark = pytest.mark.usefixtures("ray_session")


def test_ranks_of_the_named_ray_share_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(averaging, "_MOST_RANKS", 2)
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        state = {f"w{k}": torch.randn(50, 7, generator=generator) for k in range(4)}
        state |= {"half": torch.randn(9, generator=generator).bfloat16(), "step": step}
        ray_dcp.save(state, checkpoint_id=tmp_path / f"run/step-{step}", no_dist=True)
    sources = [f"{tmp_path}/run@{step}" for step in (1, 2, 3)]
    alone = ray_dcp.average(sources, tmp_path / "alone", weights=[1, 2, 4], dtype="float32")
    monkeypatch.setattr(averaging, "RANK_BYTES", 1024)
    seen = []
    shared = ray_dcp.average(
        sources, tmp_path / "shared", weights=[1, 2, 4], dtype="float32",
        progress=seen.append,
    )  # fmt: skip
    assert seen[-1].done_bytes == seen[-1].total_bytes == shared.num_bytes
    made, other = ray_dcp.open(tmp_path / "shared"), ray_dcp.open(tmp_path / "alone")
    assert (made.world_size, other.world_size) == (2, 1)
    assert made.names == other.names
    assert made.diff(other).counts == {"unchanged": 6}
    assert made.sources == shared.sources == alone.sources
    # What fails on a rank fails the average, and nothing of it stays.
    place = int(ray_dcp.open(sources[1]).table.payload_offset[0])
    checkpoints.flip(checkpoints.data_file(tmp_path / "run/step-2"), place)
    with pytest.raises(DamagedCheckpointError):
        ray_dcp.average(sources, tmp_path / "failed")
    assert not list((tmp_path / "failed").glob("*.distcp"))
