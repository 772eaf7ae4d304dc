"""Steps of several items: their folders are theirs, and who takes over a run ends their save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp import CheckpointManager, errors
from ray_dcp.io.records import Announced, fence
from ray_dcp.manager import Item
from ray_dcp.store.local import LocalStorage
from tests.support.checkpoints import flip


def manager(root: Path, **given: Any) -> CheckpointManager:
    return CheckpointManager(root, 1, items={"model": Item()}, **given)


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value)}}


def step(root: Path, number: int) -> Path:
    return root / f"step-{number:08}"


def test_what_the_user_keeps_in_a_step_s_folder_stays(tmp_path: Path) -> None:
    own = [step(tmp_path, 5) / name for name in ("ema", "eval.best", "model-old", "model.x")]
    with manager(tmp_path) as made:
        made.save(5, state(1))
        for path in own:
            ray_dcp.save({"ema": torch.ones(2)}, checkpoint_id=path)
        made.save(5, state(2), replace=True)
        assert not (step(tmp_path, 5) / "model").exists()
        made.save(6, state(6))
        made.delete(5)
    assert all(ray_dcp.verify(path).ok for path in own)
    assert not (step(tmp_path, 5) / "model.1").exists()


@pytest.mark.parametrize(
    ("folder", "key"), [("model", "manifest-"), ("", "chunks."), ("", "manifest-")]
)
def test_a_writer_that_is_taken_over_before_its_step_is_committed_does_not_commit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, key: str
) -> None:
    """The next writer finds items without a step, as a crash leaves them, and removes them."""
    first = manager(tmp_path, takeover=True)
    writes = LocalStorage.write
    paused_in = str(step(tmp_path, 5) / folder)

    def write(storage: LocalStorage, name: str, *args: Any, **how: Any) -> Any:
        if storage.url != paused_in or not name.startswith(key):
            return writes(storage, name, *args, **how)
        monkeypatch.undo()
        # Its items are committed before the next writer comes, and its step after it.
        written = writes(storage, name, *args, **how) if folder else None
        with manager(tmp_path, takeover=True) as second:
            second.save(6, state(6))
            second.join()
        return written if folder else writes(storage, name, *args, **how)

    monkeypatch.setattr(LocalStorage, "write", write)
    with pytest.raises(errors.CheckpointExistsError):
        first.save(5, state(5))
    first.close()
    with CheckpointManager(tmp_path, items={"model": Item()}, read_only=True) as reader:
        assert reader.all_steps() == [6]
    assert not list(step(tmp_path, 5).rglob("*.distcp"))


def test_a_deletion_that_was_ended_meanwhile_does_not_fail_the_save_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who protects a step from a deletion that is announced leaves an abort record there."""
    writes = LocalStorage.write
    shared = LocalStorage(str(tmp_path / ".manager"))

    def write(storage: LocalStorage, key: str, *args: Any, **how: Any) -> Any:
        if storage.url == str(step(tmp_path, 5) / "model.1") and key.startswith("manifest-"):
            monkeypatch.undo()
            mark = Announced(5, "0123456789abcdef", "step-00000005")
            shared.write(mark.key, b"")
            fence(shared, lambda name: LocalStorage(str(tmp_path / name)), "it is read", 5)
        return writes(storage, key, *args, **how)

    with manager(tmp_path) as made:
        made.save(5, state(1))
        monkeypatch.setattr(LocalStorage, "write", write)
        made.save(5, state(2), replace=True)
        found = state(0)
        made.restore(5, found)
    assert found["model"]["w"].tolist() == [2.0] * 300


def test_a_step_is_copied_and_verified_with_its_items(tmp_path: Path) -> None:
    with manager(tmp_path / "run") as made:
        made.save(5, state(1), metrics={"loss": 1.0})
        made.save(5, state(2), replace=True, metrics={"loss": 2.0})
    other = step(tmp_path / "other", 5)
    copied = ray_dcp.copy(step(tmp_path / "run", 5), other)
    assert copied.verify().ok
    with manager(tmp_path / "other") as reader:
        found = state(0)
        reader.restore(5, found)
        assert reader.step_info(5).metrics == {"loss": 2.0}
    assert found["model"]["w"].tolist() == [2.0] * 300
    (data,) = other.glob("model*/*.distcp")
    flip(data, 600)
    (problem, *_) = ray_dcp.open(other).verify().problems
    assert (problem.file, problem.fqn) == (f"{data.parent.name}/{data.name}", "w")
    shutil.rmtree(data.parent)
    assert [one.file for one in ray_dcp.verify(other).problems] == [data.parent.name]


def test_a_copied_step_that_is_replaced_is_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items lie in folders that were named for records which did not come along."""
    with manager(tmp_path / "run") as made:
        made.save(5, state(1))
        made.save(5, state(2), replace=True)
    other = step(tmp_path / "other", 5)
    ray_dcp.copy(step(tmp_path / "run", 5), other)
    writes = LocalStorage.write

    def write(storage: LocalStorage, key: str, *args: Any, **how: Any) -> Any:
        if storage.url == str(other) and key.startswith("chunks."):
            raise errors.StorageError("the disk is full")
        return writes(storage, key, *args, **how)

    with manager(tmp_path / "other") as made:
        monkeypatch.setattr(LocalStorage, "write", write)
        with pytest.raises(errors.StorageError, match="full"):
            made.save(5, state(3), replace=True)
        monkeypatch.undo()
        found = state(0)
        made.restore(5, found)
        assert found["model"]["w"].tolist() == [2.0] * 300
        made.save(5, state(4), replace=True)
        made.restore(5, found)
        assert found["model"]["w"].tolist() == [4.0] * 300
    assert len([folder for folder in other.iterdir() if folder.is_dir()]) == 1


def test_a_copy_of_a_step_that_fails_leaves_none_of_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path / "run") as made:
        made.save(5, state(1))
    other = step(tmp_path / "other", 5)
    opens = LocalStorage.open_writer

    def open_writer(storage: LocalStorage, key: str, **how: Any) -> Any:
        if storage.url == str(other):
            raise errors.StorageError("the disk is full")
        return opens(storage, key, **how)

    monkeypatch.setattr(LocalStorage, "open_writer", open_writer)
    with pytest.raises(errors.StorageError, match="full"):
        ray_dcp.copy(step(tmp_path / "run", 5), other)
    assert not list(other.rglob("*.distcp"))
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.open(other / "model")
