"""What the ranks of a manager do together, when one of them dies or its storage hangs."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp import errors
from ray_dcp.commit_protocol.messages import Exchange
from ray_dcp.errors import ParticipantError, StorageError
from ray_dcp.io.records import Announced, fence
from ray_dcp.manager import CheckpointManager, Item
from ray_dcp.manager.collective_actions import agree
from ray_dcp.options import SaveOptions
from ray_dcp.store.local import LocalStorage, LocalWriter
from ray_dcp.store.storage import os_failure
from tests.support.checkpoints import flip
from tests.support.threads import DeadRankError, run_as_ranks


def state(step=0):
    return {"model": {"w": torch.full((8,), float(step))}, "data": {"at": step}}


def save_items(root, step, dies=lambda *_: False):
    """Saves a step of two items on two ranks; returns how each of them ended."""

    def work(rank):
        items = {"model": Item(), "data": Item()}
        manager = CheckpointManager(root, 1, items=items, chkpt_on_preemption=False)
        return manager.save(step, state(step))

    return run_as_ranks(work, 2, dies)


def commits(request, exchange):
    return (
        isinstance(request, Exchange)
        and "the commit of step" in request.tag
        and request.tag.endswith(exchange)
    )


def steps_at(root):
    return CheckpointManager(root, read_only=True).all_steps()


def test_a_step_that_was_committed_before_a_rank_died_is_told_as_committed(tmp_path):
    ended = save_items(
        tmp_path, 1, lambda rank, request, after: rank == 1 and commits(request, "decided")
    )
    assert isinstance(ended[1], DeadRankError)
    assert (ended[0], steps_at(tmp_path)) == (True, [1])


def test_a_step_that_is_told_as_failed_never_appears(tmp_path):
    ended = save_items(
        tmp_path, 1, lambda rank, request, after: not rank and after and commits(request, "facts")
    )
    assert isinstance(ended[0], DeadRankError)
    assert isinstance(ended[1], ParticipantError)
    assert steps_at(tmp_path) == []
    # Rank 1 has ended the attempt, so that rank 0 could not commit it any more.
    (record,) = (tmp_path / "step-00000001").glob("manifest-*.json")
    assert b'"kind":"abort"' in record.read_bytes()


@pytest.fixture
def hangs():
    """What waits until the end of the test."""
    over = threading.Event()
    yield over.wait
    over.set()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_decision_that_waits_for_the_storage_for_ever_ends_in_time_on_all_ranks(
    hangs, world_size
):
    from ray_dcp.saving import session_for

    def work(_):
        agree(
            session_for(None, False), "what to do", lambda _: hangs(), SaveOptions(), timeout_s=0.2,
        )  # fmt: skip

    for error in run_as_ranks(work, world_size):
        assert isinstance(error, StorageError)
        assert "what to do still waits" in str(error)


def test_a_step_can_be_saved_after_its_decision_was_left(tmp_path, monkeypatch, hangs):
    item = Item(save_options=SaveOptions(plan_timeout_s=5.0))
    manager = CheckpointManager(tmp_path, 1, item=item, chkpt_on_preemption=False)
    manager.save(1, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "list", lambda self, prefix="": hangs() and [])
        with pytest.raises(StorageError, match="still waits for it"):
            manager.save(2, state(2))
    assert manager.save(2, state(2))
    manager.close()
    assert steps_at(tmp_path) == [1, 2]


def test_where_one_rank_has_no_space_all_save_once_more_after_retention(tmp_path, monkeypatch):
    left, append = [1], LocalWriter._append

    def full(self, data):
        if left and "/step-00000003/__1_" in self._path:
            left.pop()
            raise os_failure(OSError(errno.ENOSPC, ""), "write", self._key, self._path)
        append(self, data)

    monkeypatch.setattr(LocalWriter, "_append", full)

    def work(rank):
        manager = CheckpointManager(tmp_path, 1, max_to_keep=2, chkpt_on_preemption=False)
        for step in (1, 2, 3):
            assert manager.save(step, {f"w{rank}": torch.full((1 << 18,), float(step))})
        return True

    assert run_as_ranks(work, 2, lambda *_: False) == [True, True]
    assert left == []
    assert steps_at(tmp_path) == [2, 3]


# --- the folders of items -------------------------------------------------------------------------


def manager_at(root: Path, **given: Any) -> CheckpointManager:
    return CheckpointManager(root, 1, items={"model": Item()}, **given)


def item_state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value)}}


def step(root: Path, number: int) -> Path:
    return root / f"step-{number:08}"


def test_what_the_user_keeps_in_a_step_s_folder_stays(tmp_path: Path) -> None:
    own = [step(tmp_path, 5) / name for name in ("ema", "eval.best", "model-old", "model.x")]
    with manager_at(tmp_path) as made:
        made.save(5, item_state(1))
        for path in own:
            ray_dcp.save({"ema": torch.ones(2)}, checkpoint_id=path)
        made.save(5, item_state(2), replace=True)
        assert not (step(tmp_path, 5) / "model").exists()
        made.save(6, item_state(6))
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
    first = manager_at(tmp_path, takeover=True)
    writes = LocalStorage.write
    paused_in = str(step(tmp_path, 5) / folder)

    def write(storage: LocalStorage, name: str, *args: Any, **how: Any) -> Any:
        if storage.url != paused_in or not name.startswith(key):
            return writes(storage, name, *args, **how)
        monkeypatch.undo()
        # Its items are committed before the next writer comes, and its step after it.
        written = writes(storage, name, *args, **how) if folder else None
        with manager_at(tmp_path, takeover=True) as second:
            second.save(6, item_state(6))
            second.join()
        return written if folder else writes(storage, name, *args, **how)

    monkeypatch.setattr(LocalStorage, "write", write)
    with pytest.raises(errors.CheckpointExistsError):
        first.save(5, item_state(5))
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

    with manager_at(tmp_path) as made:
        made.save(5, item_state(1))
        monkeypatch.setattr(LocalStorage, "write", write)
        made.save(5, item_state(2), replace=True)
        found = item_state(0)
        made.restore(5, found)
    assert found["model"]["w"].tolist() == [2.0] * 300


def test_a_step_is_copied_and_verified_with_its_items(tmp_path: Path) -> None:
    with manager_at(tmp_path / "run") as made:
        made.save(5, item_state(1), metrics={"loss": 1.0})
        made.save(5, item_state(2), replace=True, metrics={"loss": 2.0})
    other = step(tmp_path / "other", 5)
    copied = ray_dcp.copy(step(tmp_path / "run", 5), other)
    assert copied.verify().ok
    with manager_at(tmp_path / "other") as reader:
        found = item_state(0)
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
    with manager_at(tmp_path / "run") as made:
        made.save(5, item_state(1))
        made.save(5, item_state(2), replace=True)
    other = step(tmp_path / "other", 5)
    ray_dcp.copy(step(tmp_path / "run", 5), other)
    writes = LocalStorage.write

    def write(storage: LocalStorage, key: str, *args: Any, **how: Any) -> Any:
        if storage.url == str(other) and key.startswith("chunks."):
            raise errors.StorageError("the disk is full")
        return writes(storage, key, *args, **how)

    with manager_at(tmp_path / "other") as made:
        monkeypatch.setattr(LocalStorage, "write", write)
        with pytest.raises(errors.StorageError, match="full"):
            made.save(5, item_state(3), replace=True)
        monkeypatch.undo()
        found = item_state(0)
        made.restore(5, found)
        assert found["model"]["w"].tolist() == [2.0] * 300
        made.save(5, item_state(4), replace=True)
        made.restore(5, found)
        assert found["model"]["w"].tolist() == [4.0] * 300
    assert len([folder for folder in other.iterdir() if folder.is_dir()]) == 1


def test_a_copy_of_a_step_that_fails_leaves_none_of_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_at(tmp_path / "run") as made:
        made.save(5, item_state(1))
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
