"""Real ranks of a Ray on a full disk; in a file of its own, as the others save in this process."""

from __future__ import annotations

import pytest
import torch

import ray_dcp
from ray_dcp.errors import StorageError
from ray_dcp.store.local import LocalStorage
from ray_dcp.worker_group import WorkerGroup
from tests.crash.invariants import Aftermath, nothing_is_left
from tests.support.attempts import names_at, one_error, save_sound, step_that_loads, try_save
from tests.support.disks import PAGE, small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", may_mount=True) as disk:
        yield disk


@pytest.mark.usefixtures("ray_session")
def test_real_ranks_are_told_of_a_full_disk_and_save_again_when_there_is_room(disk):
    path = str(disk.path / "step-1")
    with WorkerGroup(2, release_s=60) as ranks:
        ranks.run(save_sound, path, 1)
        kept = names_at(disk.path)
        disk.leave(4 * PAGE, ranks.run)
        failed = ranks.run(try_save, path, big_state)
        error = one_error(failed, StorageError, "[ENOSPC]", path)
        assert error.rank in (0, 1)
        assert f"rank {error.rank}" in str(error)
        disk.make_room(ranks.run)
        assert kept <= names_at(disk.path)
        assert ranks.run(step_that_loads, path) == [1, 1]
        report = ray_dcp.verify(path)
        assert report.ok
        assert report.checked_bytes > 0
        ranks.run(save_sound, path, 2)
        assert ranks.run(step_that_loads, path) == [2, 2]
    nothing_is_left(Aftermath(LocalStorage(path), allowed=()))


def big_state(rank):
    """A megabyte on each rank."""
    return {f"big-{rank}": torch.full((1 << 18,), float(rank))}
