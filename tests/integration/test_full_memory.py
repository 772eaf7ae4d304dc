"""Saves while others have filled the memory of the node: no rank ends, and each save has an end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ray_dcp
from tests.support.daemons import Daemons, driven
from tests.support.disks import Disk, Tmpfs, here, small_disk

MB = 1_000_000
STORE_BYTES = 200 * MB


@pytest.fixture(scope="module")
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """A directory for the object store, a little larger than that."""
    where = tmp_path_factory.mktemp("shm") / "tmpfs"
    with small_disk(where, num_bytes=STORE_BYTES + 20 * MB) as disk:
        yield disk


@pytest.fixture(scope="module")
def ray_session(shared_memory: Disk) -> Iterator[str]:
    """A Ray whose object store is there."""
    where = {"plasma_directory": str(shared_memory.path)}
    with closing(Daemons(object_store_memory=STORE_BYTES, **where)) as daemons:
        yield from driven(daemons)


NUM_RANKS = 2


def save(path: str, num_bytes: int) -> tuple[int, str]:
    """Saves as much on each rank; returns the rank's process, and where the bytes were staged."""
    rank = dist.get_rank()
    state = {f"rank{rank}": torch.full((num_bytes,), 1 + rank, dtype=torch.uint8)}
    handle = ray_dcp.async_save(state, checkpoint_id=path)
    handle.committed(300)
    return os.getpid(), handle.report().staging


def is_whole(path: Path, num_bytes: int) -> bool:
    state = {f"rank{n}": torch.zeros(num_bytes, dtype=torch.uint8) for n in range(NUM_RANKS)}
    ray_dcp.load(state, checkpoint_id=path, no_dist=True)
    return all(bool((state[f"rank{n}"] == 1 + n).all()) for n in range(NUM_RANKS))


def test_ranks_live_and_their_save_commits_where_others_fill_the_object_stores_memory(
    shared_memory, ranks, tmp_path
):
    pids, num_bytes = ranks.pids, 30 * MB
    for left in (30 * MB, 1 * MB, 0):
        shared_memory.leave(left, here)
        path = tmp_path / f"left-{left}"
        came = ranks.run(save, str(path), num_bytes)
        assert [pid for pid, _ in came] == pids
        assert is_whole(path, num_bytes)
        if isinstance(shared_memory, Tmpfs):
            assert "process" in {staging for _, staging in came}
    shared_memory.make_room(here)
    path = tmp_path / "with room"
    assert {staging for _, staging in ranks.run(save, str(path), num_bytes)} == {"object_store"}
    assert is_whole(path, num_bytes)
