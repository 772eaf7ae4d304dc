"""Items that stock DCP compressed are unpacked by what `.metadata` says, for whoever reads them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ray_dcp
from ray_dcp.errors import DamagedCheckpointError
from tests.support import damage


@pytest.fixture(scope="module")
def zstd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.save_stock_zstd(tmp_path_factory.mktemp("zstd") / "c")


class Keeping(DefaultLoadPlanner):
    """Takes objects itself, and remembers with which bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[bytes] = []

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.starts.append(value.getvalue()[:2])
        super().load_bytes(read_item, value)


def test_a_planner_with_load_bytes_of_its_own_gets_what_torch_saved(zstd: Path):
    planner, into = Keeping(), damage.blank()
    ray_dcp.load(into, checkpoint_id=zstd, no_dist=True, planner=planner)
    assert planner.starts == [b"PK"] * 3
    assert damage.bits(into) == damage.bits(damage.state())


def test_a_view_reads_compressed_tensors_and_objects(zstd: Path):
    view = ray_dcp.open(zstd)
    assert view["step"] == 10
    large = damage.state()["model"]["large"]
    assert torch.equal(torch.as_tensor(view["model.large"][2:5]), large[2:5])


def test_verify_looks_at_the_crcs_inside(zstd: Path):
    report = ray_dcp.verify(zstd)
    assert report.ok
    assert report.notes == ()
    payload = sum(t.nbytes for t in damage.state()["model"].values())
    assert report.checked_bytes > payload


def test_what_metadata_does_not_call_compressed_is_not_taken_for_it(zstd: Path, tmp_path: Path):
    for key, data in damage.contents_of(zstd).items():
        (tmp_path / key).write_bytes(data)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp"):
        ray_dcp.load(damage.blank(), checkpoint_id=tmp_path, no_dist=True)
    assert {p.file for p in ray_dcp.verify(tmp_path).problems} == {"__0_0.distcp"}
