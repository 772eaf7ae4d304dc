"""`list_checkpoints` tells which checkpoints are below a directory, and their state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from ray_dcp.view.run_listing import ListedCheckpoint, list_checkpoints
from tests.support import checkpoints


@pytest.fixture
def run(saved_checkpoint: Path, stock_checkpoint: Path, tmp_path: Path) -> Path:
    for name in ("step-10", "step-9", "best"):
        shutil.copytree(saved_checkpoint, tmp_path / name)
    shutil.copytree(stock_checkpoint, tmp_path / "old" / "iter_0000020")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.txt").write_text("no checkpoint")
    return tmp_path


def by_name(root: Path) -> dict[str, ListedCheckpoint]:
    return {item.name: item for item in list_checkpoints(root)}


def test_checkpoints_are_listed_by_run_and_step_and_those_without_step_last(run: Path):
    found = [(item.name, item.step) for item in list_checkpoints(run)]
    assert found == [("step-9", 9), ("step-10", 10), ("best", None), ("old/iter_0000020", 20)]


def test_a_save_that_was_never_committed_is_told_as_such(run: Path):
    for manifest in (run / "best").glob("manifest-*"):
        manifest.unlink()
    assert by_name(run)["best"].state == "in flight"
    (run / "best" / ".metadata").unlink()
    assert by_name(run)["best"].state == "in flight"
    (run / "old" / "iter_0000020" / ".metadata").unlink()
    assert by_name(run)["old/iter_0000020"].state == "in flight"


def test_a_failed_save_over_a_stock_checkpoint_leaves_it_a_stock_checkpoint(run: Path):
    record = AbortRecord(attempt="a1", reason="a rank died", rank=None)
    path = run / "old" / "iter_0000020"
    (path / record_key(1)).write_bytes(encode_record(record))
    (path / "__0_0.a1.distcp").write_bytes(b"")
    assert by_name(run)["old/iter_0000020"].state == "stock"
    assert ray_dcp.open(path).kind == "stock"


@pytest.mark.parametrize("more", [-1, 1, None])
def test_a_file_that_is_missing_or_has_another_length_is_damage(run: Path, more: int | None):
    file = checkpoints.data_file(run / "step-9")
    num_bytes = file.stat().st_size
    detail = "is missing"
    if more is None:
        file.unlink()
    else:
        os.truncate(file, num_bytes + more)
        detail = f"has {num_bytes + more} bytes instead of {num_bytes}"
    found = by_name(run)
    assert (found["step-9"].state, found["step-10"].state) == ("damaged", "committed")
    assert found["step-9"].detail == f"{file.name} {detail}"


def test_a_checkpoint_is_listed_once_also_as_the_root_itself(tmp_path: Path):
    for _ in range(2):
        checkpoints.save(tmp_path / "step-10")
    for root, name in ((tmp_path, "step-10"), (tmp_path / "step-10", ".")):
        (item,) = list_checkpoints(root)
        assert (item.name, item.step, item.state) == (name, 10, "committed")


def test_nothing_is_listed_where_nothing_is_and_what_is_in_memory_is(tmp_path: Path):
    assert list_checkpoints(tmp_path) == list_checkpoints(tmp_path / "nothing") == ()
    for step in (2, 1):
        ray_dcp.save({"w": torch.ones(3)}, checkpoint_id=f"memory://listing/step-{step}")
    found = [(item.name, item.state) for item in list_checkpoints("memory://listing")]
    assert found == [("step-1", "committed"), ("step-2", "committed")]
