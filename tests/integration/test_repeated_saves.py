"""Saves of one run on real ranks: the first uses their group, and the second sends no rows.

Uses of the group are counted by the sequence number of its own backend, which every collective and
every message of the group raises, whoever asks for it in whichever thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ray_dcp
from ray_dcp.commit_protocol.messages import Reply, Request, SaveGo, SaveJoin, SendItems
from ray_dcp.errors import MissingKeyError
from ray_dcp.session.discovery import current_session
from tests.support.attempts import sound_state
from tests.support.processes import eventually
from tests.support.programs import unchanged as programs
from tests.support.programs.unchanged import holds, inodes, path_of

NUM_RANKS = 2

Said = tuple[int, int, list[str]]


def state_of(step: int, more: int = 0) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(64 * (3 + more), dtype=torch.float32).reshape(64, -1) + step
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "plain": torch.full((5,), float(step)),
        "step": step,
    }


def save_and_listen(path: str, step: int, more: int = 0, *, staged: bool = False) -> Said:
    """Saves; returns the bytes of rows and of content that this rank sent, and what it was told."""
    session = current_session()
    call, said = type(session).call, []

    def listen(request: Request, **options: object) -> Reply:
        reply = call(session, request, **options)
        said.append((request, reply))
        return reply

    session.call = listen
    try:
        save = ray_dcp.async_save if staged else ray_dcp.save
        saved = save(state_of(step, more), checkpoint_id=path)
        if staged:
            saved.result(120)
    finally:
        del session.call
    joins = [(request, reply) for request, reply in said if isinstance(request, SaveJoin)]
    return (
        sum(len(request.columns) for request, _ in joins),
        sum(len(request.contents) for request, _ in joins),
        [type(reply).__name__ if getattr(reply, "part", reply) else AGAIN for _, reply in joins],
    )


def loads(path: str, step: int, more: int = 0) -> bool:
    state, expected = state_of(0, more), state_of(step, more)
    ray_dcp.load(state, checkpoint_id=path)
    same = torch.equal(state["sharded"].to_local(), expected["sharded"].to_local())
    return same and torch.equal(state["plain"], expected["plain"]) and state["step"] == step


def coordinator_pid() -> int:
    return int(current_session().coordinator_info()["pid"])


GO, AGAIN, SEND = SaveGo.__name__, "the part that it knows", SendItems.__name__


def test_a_second_save_sends_no_rows(ranks, tmp_path):
    path = [str(tmp_path / f"step{step}") for step in range(6)]
    first = ranks.run(save_and_listen, path[0], 0)
    assert [told for _, _, told in first] == [[GO]] * 2
    assert all(rows > 0 for rows, _, _ in first)
    assert ranks.run(save_and_listen, path[1], 1) == [(0, 0, [AGAIN])] * 2
    assert ranks.run(loads, path[1], 1) == [True] * 2
    # An asynchronous save uses the same plan; so does the synchronous one after it.
    assert ranks.run(save_and_listen, path[2], 2, staged=True) == [(0, 0, [AGAIN])] * 2
    assert ranks.run(loads, path[2], 2) == [True] * 2
    # Another shape is another plan.
    changed = ranks.run(save_and_listen, path[3], 3, 1)
    assert [told for _, _, told in changed] == [[GO]] * 2
    assert ranks.run(loads, path[3], 3, 1) == [True] * 2

    # A coordinator that died has lost its plans; the next one asks for rows and plans anew.
    pid = ranks.run(coordinator_pid)[0]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: ranks.run(coordinator_pid)[0] != pid)
    again = ranks.run(save_and_listen, path[4], 4)
    assert [told for _, _, told in again] == [[SEND, AGAIN]] * 2
    assert all(rows > 0 for rows, _, _ in again)
    assert ranks.run(loads, path[4], 4) == [True] * 2
    assert ranks.run(save_and_listen, path[5], 5) == [(0, 0, [AGAIN])] * 2
    assert ranks.run(loads, path[5], 5) == [True] * 2


def totals(came: Sequence[Any], step: int) -> dict[str, int]:
    names = ("bytes_written", "bytes_linked", "bytes_copied")
    return {name: sum(getattr(reports[step], name) for reports in came) for name in names}


@pytest.mark.parametrize("staging", ["call", "background"])
def test_stagers_link_what_did_not_change(ranks, tmp_path, staging):
    came = ranks.run(programs.save_steps, str(tmp_path), 3, "async_save", staging=staging)
    for step in range(3):
        path = path_of(tmp_path, step)
        assert holds(path, step)
        sizes = {file.stat().st_ino: file.stat().st_size for file in path.glob("*.distcp")}
        shared = inodes(path) & inodes(path_of(tmp_path, step - 1)) if step else set()
        linked = sum(sizes[inode] for inode in shared)
        assert totals(came, step) == {
            "bytes_written": sum(sizes.values()) - linked,
            "bytes_linked": linked,
            "bytes_copied": 0,
        }
        assert bool(linked) == bool(step)
        trace = ray_dcp.open(path).trace
        assert (trace.linked_bytes, trace.num_bytes) == (linked, sum(sizes.values()) - linked)


def test_ranks_link_what_they_wrote_together(ranks, tmp_path):
    ranks.run(programs.save_steps, str(tmp_path), 2)
    assert inodes(path_of(tmp_path, 0)) & inodes(path_of(tmp_path, 1))
    assert holds(path_of(tmp_path, 1), 1)


def test_another_number_of_ranks_writes_anew_and_then_links(ranks, tmp_path):
    ranks.run(programs.save_steps, str(tmp_path), 1)
    ranks.resize(1)
    ranks.run(programs.save_steps, str(tmp_path), 3)
    for step in range(3):
        assert holds(path_of(tmp_path, step), step)
    assert inodes(path_of(tmp_path, 1)) & inodes(path_of(tmp_path, 2))


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_s3_copies_what_did_not_change(place, how):
    reports = programs.save_steps(place, 3, how)
    assert all(report.bytes_copied > 0 for report in reports[1:])
    for step in (1, 0, 2):
        assert holds(path_of(place, step), step)
        ray_dcp.delete(path_of(place, step))


def test_an_object_longer_than_a_request_is_copied_too(place):
    small = ray_dcp.Location(
        place.url, storage_options={**place.storage_options, "request_bytes": 5 << 20}
    )
    model = programs.Tuned(width=2000)
    for step in range(2):
        model.set_step(step)
        handle = ray_dcp.async_save(
            {"model": model}, checkpoint_id=path_of(small, step), options=programs.LINK
        )
        handle.committed(120)
    assert handle.report().bytes_copied > 5 << 20
    found = {"model.base.weight": torch.zeros(2000, 2000)}
    ray_dcp.load(found, checkpoint_id=path_of(small, 1))
    assert torch.equal(found["model.base.weight"], model.base.weight)


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
