"""`verify` accounts for every byte of a checkpoint and tells whose bytes are wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ray_dcp
from ray_dcp.errors import StorageError
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.manager import Item
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Entry
from ray_dcp.view.verify import verify_opened
from tests.support import arrays, checkpoints, world
from tests.support.storages import Fault, FaultyStorage


@pytest.fixture
def copied(saved_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_checkpoint, tmp_path / "copy")


@pytest.mark.parametrize("world_size", [1, 5])
def test_an_undamaged_checkpoint_is_ok_and_every_byte_of_its_files_was_compared(world_size: int):
    url = f"memory://verify-{world_size}"
    world.save(arrays.state_of(), world_size, url)
    report = ray_dcp.verify(url)
    assert (report.ok, report.problems, report.notes) == (True, (), ())
    assert report.checked_bytes == ray_dcp.open(url).num_bytes


def test_damage_is_told_by_file_tensor_and_block(copied: Path):
    file, first, last = checkpoints.payload_of(copied, "model.large")
    checkpoints.flip(file, last)
    (problem,) = ray_dcp.verify(copied).problems
    assert (problem.file, problem.fqn) == (file.name, "model.large")
    block_bytes = problem.stop - problem.start
    assert first < problem.start <= last < problem.stop == last + 1
    assert block_bytes <= 16 << 10
    assert str(problem) == (
        f"{file.name} bytes [{problem.start}, {problem.stop}) of 'model.large': "
        "1 block(s) do not match their checksums"
    )


def test_blocks_that_lie_together_are_one_problem_and_others_are_not(copied: Path):
    file, first, last = checkpoints.payload_of(copied, "model.large")
    block = int(ray_dcp.open(copied).table.block_bytes.max())
    for offset in (first, first + block, first + 5 * block, last):
        checkpoints.flip(file, offset)
    problems = ray_dcp.verify(copied).problems
    found = [(p.start - first, p.what.split()[0]) for p in problems]
    assert (found[:2], len(found)) == ([(0, "2"), (5 * block, "1")], 3)


def test_a_missing_file_is_told_with_what_was_in_it(copied: Path):
    file = checkpoints.data_file(copied)
    num_bytes = file.stat().st_size
    file.unlink()
    (problem,) = ray_dcp.verify(copied).problems
    assert (problem.file, problem.start, problem.stop) == (file.name, 0, num_bytes)
    assert "missing" in problem.what
    assert "10 in all" in problem.what


def test_another_metadata_is_a_note_because_the_checkpoint_is_whole(tmp_path: Path):
    path = checkpoints.save(tmp_path / "c")
    earlier = (path / ".metadata").read_bytes()
    checkpoints.save(path)
    assert ray_dcp.verify(path).notes == ()
    data = (path / ".metadata").read_bytes()
    place = (decode_metadata(data).checkpoint_id or "").encode()
    for found, told in (
        (earlier, ".metadata is that of an earlier save, which stock DCP reads"),
        (data.replace(place, place[:-1] + b"?"), ".metadata was made at another place, "),
    ):
        (path / ".metadata").write_bytes(found)
        report = ray_dcp.verify(path)
        assert report.ok
        assert [note[: len(told)] for note in report.notes] == [told]


def test_a_tensor_larger_than_what_is_read_at_once_is_checked_to_its_end(tmp_path: Path):
    values = torch.arange(5 << 20, dtype=torch.int32)
    ray_dcp.save({"w": values}, checkpoint_id=tmp_path, no_dist=True)
    report = ray_dcp.verify(tmp_path)
    assert report.problems == ()
    assert report.checked_bytes == ray_dcp.open(tmp_path).num_bytes
    file, first, last = checkpoints.payload_of(tmp_path, "w")
    offset = first + (18 << 20)
    checkpoints.flip(file, offset)
    (problem,) = ray_dcp.verify(tmp_path).problems
    assert problem.start <= offset < problem.stop <= last + 1
    assert problem.stop - problem.start <= 1 << 20


def test_a_file_that_can_not_be_read_is_told_and_the_others_are_checked(saved_checkpoint: Path):
    inner = open_storage(saved_checkpoint)
    checkpoint = read_checkpoint(inner, checkpoint_id=inner.url)
    error = StorageError("input/output error")
    fault = Fault(operation="read", key="*.distcp", error=error, times=2)
    storage = FaultyStorage(inner, [fault])
    report = verify_opened(storage, checkpoint)
    storage.assert_hit()
    assert (report.ok, report.problems) == (False, ())
    (unread,) = report.unread
    assert "unreadable: input/output error" in unread.what


def test_an_item_that_can_not_be_listed_hides_no_damage_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    items = {"first": Item(), "second": Item()}
    with ray_dcp.CheckpointManager(tmp_path, 1, items=items) as manager:
        manager.save(5, {name: {"w": torch.ones(300)} for name in items})
    file = checkpoints.data_file(tmp_path / "step-00000005" / "first")
    checkpoints.flip(file, file.stat().st_size // 2)
    listed = LocalStorage.list

    def refused(self: LocalStorage, prefix: str = "") -> list[Entry]:
        if self.url.endswith("second"):
            raise StorageError("input/output error")
        return listed(self, prefix)

    monkeypatch.setattr(LocalStorage, "list", refused)
    report = ray_dcp.verify(tmp_path / "step-00000005")
    assert [one.file for one in report.problems] == [f"first/{file.name}"]
    assert [(one.file, one.what) for one in report.unread] == [("second", "input/output error")]


@pytest.mark.parametrize("effect", ["before", "flip"])
def test_what_fails_or_is_altered_once_on_its_way_is_read_again(
    saved_checkpoint: Path, effect: str
):
    inner = open_storage(saved_checkpoint)
    checkpoint = read_checkpoint(inner, checkpoint_id=inner.url)
    storage = FaultyStorage(inner, [Fault(operation="read", key="*.distcp", effect=effect)])
    report = verify_opened(storage, checkpoint)
    storage.assert_hit()
    assert report.ok
    assert ["was not at the first read" in note for note in report.notes] == [True]


def test_a_stock_checkpoint_is_verified_by_its_crcs_and_what_has_none_is_noted(
    stock_checkpoint: Path, tmp_path: Path
):
    report = ray_dcp.verify(stock_checkpoint)
    assert report.problems == ()
    payload = sum(tensor.nbytes for tensor in checkpoints.tensors().values())
    assert payload < report.checked_bytes <= ray_dcp.open(stock_checkpoint).num_bytes
    config = torch.utils.serialization.config
    before, config.save.compute_crc32 = config.save.compute_crc32, False
    try:
        checkpoints.save_stock(tmp_path)
    finally:
        config.save.compute_crc32 = before
    report = ray_dcp.verify(tmp_path)
    assert report.ok
    assert any("without CRC32" in note for note in report.notes)
