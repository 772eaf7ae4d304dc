"""The training group is used once, to make the session: later saves and loads leave it alone.

Counted by the sequence number of the group's own backend, which every collective and every message
of the group raises, whoever asks for it in whichever thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)

import ray_dcp
from ray_dcp.errors import MissingKeyError
from tests.support.attempts import sound_state

NUM_RANKS = 2


class MySavePlanner(DefaultSavePlanner):
    """Takes the path on which a user's planner is called."""


class MyLoadPlanner(DefaultLoadPlanner):
    """The same."""


class MyWriter(FileSystemWriter):
    """Takes the path on which a user's storage is called."""


class MyReader(FileSystemReader):
    """The same."""


def uses(call: Callable[[], Any]) -> int:
    """Returns how often a call used any process group, the new ones included."""
    groups = dist.distributed_c10d._world.pg_map
    before = sum(map(sequence, groups))
    call()
    return sum(map(sequence, groups)) - before


def sequence(group: dist.ProcessGroup) -> int:
    return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def test_only_the_first_operation_uses_the_group(ranks, tmp_path):
    ranks.resize(1)
    ranks.resize(2)  # another group: it has no session yet

    def save_and_load(path: str) -> list[int]:
        first, second, target = sound_state(1), sound_state(2), sound_state(0, fill=False)
        found = [
            uses(lambda: ray_dcp.save(first, checkpoint_id=path)),
            uses(lambda: ray_dcp.save(second, checkpoint_id=path)),
            uses(lambda: ray_dcp.load(target, checkpoint_id=path)),
        ]
        assert target["step"] == 2
        return found

    (one, *none), other = ranks.run(save_and_load, str(tmp_path / "c"))
    assert 1 <= one <= 4  # a broadcast and a gather, each of a size and a text
    assert none == [0, 0]
    assert other == [one, 0, 0]
    assert ranks.run(save_and_load, str(tmp_path / "c")) == [[0, 0, 0]] * 2


def test_plug_ins_of_the_user_and_failures_leave_the_group_alone_too(ranks, tmp_path):
    def count(path: str) -> dict[str, int]:
        state, target = sound_state(3), sound_state(0, fill=False)
        ray_dcp.save(state, checkpoint_id=path)

        def fail() -> None:
            with pytest.raises(MissingKeyError):
                ray_dcp.load({"absent": 1}, checkpoint_id=path)

        found = {
            "planner": uses(
                lambda: ray_dcp.save(state, checkpoint_id=path, planner=MySavePlanner())
            ),
            "load planner": uses(
                lambda: ray_dcp.load(target, checkpoint_id=path, planner=MyLoadPlanner())
            ),
            "writer": uses(lambda: ray_dcp.save(state, storage_writer=MyWriter(f"{path}-foreign"))),
            "reader": uses(
                lambda: ray_dcp.load(target, storage_reader=MyReader(f"{path}-foreign"))
            ),
            "failure": uses(fail),
        }
        assert target["step"] == 3
        return found

    for found in ranks.run(count, str(tmp_path / "c")):
        assert found == dict.fromkeys(found, 0)
