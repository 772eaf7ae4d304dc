"""Checkpoints of a stock DCP that is newer than all that were tried: refused, never as damage."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ray_dcp
from ray_dcp import CheckpointError, DamagedCheckpointError, InvalidRequestError, saving
from ray_dcp.cli.main import main
from ray_dcp.core import NEWEST_TORCH, OLDEST_TORCH
from tests.support import checkpoints, damage

REPOSITORY = Path(__file__).parents[2]


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(4), "step": 0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of stock DCP, of which the later one has a field that only a newer torch knows."""
    for step in (1, 2):
        state = {"w": torch.full((4,), float(step)), "step": step}
        checkpoints.save_stock(tmp_path / f"step-{step}", state)
    metadata = tmp_path / "step-2" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"\x05sizes", b"\x07lengths"))
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        lambda run, state: ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True),
        lambda run, state: ray_dcp.load_newest(state, run, no_dist=True),
        lambda run, _: ray_dcp.read_state_dict(run / "step-2"),
        lambda run, _: ray_dcp.verify(run / "step-2"),
        lambda run, _: ray_dcp.open(run / "step-2"),
    ],
    ids=["load", "load_newest", "read_state_dict", "verify", "open"],
)
def test_it_is_refused_as_newer_and_no_earlier_step_is_taken(
    run: Path, read: Callable[[Path, Any], Any]
):
    state = blank()
    with pytest.raises(CheckpointError, match=r"without sizes: a newer torch wrote") as told:
        read(run, state)
    assert not isinstance(told.value, DamagedCheckpointError)
    assert state["step"] == 0
    assert not state["w"].any()


def test_the_run_is_listed_and_the_other_step_loads(run: Path):
    assert [step.step for step in ray_dcp.open(run).steps] == [1, 2]
    shown = CliRunner().invoke(main, ["verify", str(run / "step-2")])
    assert shown.exit_code != 0
    assert "newer torch" in shown.output
    state = blank()
    assert ray_dcp.load_newest(state, run, at_most=1, no_dist=True).step == 1
    assert state["w"].tolist() == [1.0] * 4


def test_its_files_are_kept_until_a_save_takes_its_place(run: Path):
    before = {path.name for path in (run / "step-2").iterdir()}
    with pytest.raises(InvalidRequestError, match="another program wrote"):
        ray_dcp.collect(run / "step-2")
    assert {path.name for path in (run / "step-2").iterdir()} == before
    ray_dcp.save({"w": torch.full((4,), 7.0), "step": 7}, checkpoint_id=run / "step-2")
    state = blank()
    ray_dcp.load(state, checkpoint_id=run / "step-2", no_dist=True)
    assert state["step"] == 7


# --- torch itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_new"),
    [("2.9.1", False), (f"{NEWEST_TORCH}.7+cu132", False), ("2.99.0a0+git1", True), ("3.0", True)],
)
def test_a_torch_that_was_not_tried_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    is_new: bool,
):
    monkeypatch.setattr(torch, "__version__", version)
    saving._note_untried.cache_clear()
    for _ in range(2):
        ray_dcp.save(blank(), checkpoint_id=tmp_path, no_dist=True)
        ray_dcp.load(blank(), checkpoint_id=tmp_path, no_dist=True)
    saving._note_untried.cache_clear()
    lines = [one.getMessage() for one in caplog.records if "was not tried" in one.getMessage()]
    assert lines == ([lines[0]] if is_new else [])
    assert all(version in line and NEWEST_TORCH in line for line in lines)


def test_the_pages_and_the_golden_checkpoints_name_the_versions_that_were_tried():
    tried = re.search(
        r"torch (2\.[\d., and]+) were tried", (REPOSITORY / "docs/limits.md").read_text()
    )
    assert tried is not None
    versions = re.findall(r"2\.\d+", tried[1])
    assert versions[0] == OLDEST_TORCH
    assert versions[-1] == NEWEST_TORCH
    assert (
        f'"torch>={OLDEST_TORCH}",  # tried: {tried[1]} ('
        in (REPOSITORY / "pyproject.toml").read_text()
    )
    golden = {path.name for path in (REPOSITORY / "tests" / "golden").glob("stock-*")}
    assert golden == {f"stock-{version}" for version in versions}


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
