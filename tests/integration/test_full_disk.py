"""Saves onto a disk that is full: all ranks are told, nothing is lost, and room is all it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ray_dcp
from ray_dcp.errors import CommitUnknownError, StorageError
from ray_dcp.runtime.worker_group import WorkerGroup
from ray_dcp.store.local import LocalStorage
from tests.attempts import names_at, one_error, save_sound, step_that_loads, try_save
from tests.crash.array_states import sample_state
from tests.crash.invariants import INVARIANTS, Aftermath, a_later_save_works, nothing_is_left
from tests.crash.ranks import save_ranks
from tests.crash.registry import OLD, Place
from tests.disks import PAGE, here, small_disk
from tests.inline_ranks import run_ranks

NEW = sample_state(2)
LOOKING = [check for check in INVARIANTS if check not in (a_later_save_works, nothing_is_left)]


@pytest.fixture(params=["tmpfs where it can be mounted", "quota"])
def disk(request, tmp_path):
    with small_disk(tmp_path / "disk", may_mount=request.param != "quota") as disk:
        yield disk


def test_at_every_free_byte_a_save_fails_on_all_ranks_or_is_committed(disk):
    storage = LocalStorage(disk.path / "step-1")
    told, names = [], ("[ENOSPC] No space left on device; free space there", str(storage.url))
    for pages in range(0, 100, 3):
        Place(storage).save(OLD)
        disk.leave(pages * PAGE, here)
        results = run_ranks(save_ranks(NEW, 3, storage.url, session=f"{pages}"))
        disk.make_room(here)
        errors = [result.error for result in results]
        told.append(type(errors[0]))
        assert {type(error) for error in errors} == {told[-1]}
        after = Aftermath(storage, allowed=(NEW,), earlier=(OLD,))
        for error in filter(None, errors):
            assert all(name in str(error) for name in names), error
            unsure = isinstance(error, CommitUnknownError)
            after = replace(after, allowed=(OLD, NEW) if unsure else (OLD,))
        for invariant in LOOKING:
            invariant(after)
        if errors[0] is None:
            break
        a_later_save_works(after)
        nothing_is_left(after)
    assert told[-1] is type(None), told
    assert set(told[:-1]) <= {StorageError, CommitUnknownError}
    assert told.count(StorageError) >= 3
    assert told.count(CommitUnknownError) <= 2


def test_the_rank_that_finds_the_disk_full_is_named(disk):
    storage = LocalStorage(disk.path / "step-1")
    Place(storage).save(OLD)
    disk.leave(1 << 20, here)
    large = {"large": np.random.default_rng(0).standard_normal(500_000)}
    results = run_ranks(save_ranks(large, 2, storage.url))
    for result in results:
        assert isinstance(result.error, StorageError)
        assert result.error.rank in (0, 1)
        assert f"rank {result.error.rank}" in str(result.error)
        assert f"__{result.error.rank}_0." in str(result.error)
        assert result.error.failures.keys() <= {0, 1}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("disk", ["tmpfs where it can be mounted"], indirect=True)
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
    import torch

    return {f"big-{rank}": torch.full((1 << 18,), float(rank))}
