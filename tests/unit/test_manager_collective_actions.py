"""What the ranks of a manager do together, when one of them dies or its storage hangs."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from ray_dcp.commit_protocol.messages import Exchange
from ray_dcp.errors import ParticipantError, StorageError
from ray_dcp.manager import CheckpointManager, Item
from ray_dcp.manager.collective_actions import agree
from ray_dcp.options import SaveOptions
from ray_dcp.store.local import LocalStorage, LocalWriter
from ray_dcp.store.storage import os_failure
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
