"""`WorkerGroup` under real Ray: running, resizing, dying ranks, and nothing left at the end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from ray_dcp.commit_protocol.messages import Exchange
from ray_dcp.errors import InvalidRequestError, ParticipantError
from ray_dcp.session.discovery import current_session
from ray_dcp.worker_group import WorkerGroup, this_rank
from tests.support.processes import PATIENCE_S, eventually, lives
from tests.support.programs.forks import plain_environment

pytestmark = pytest.mark.usefixtures("ray_session")

NUM_RANKS = 3


def sum_of_ranks() -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


def session_name() -> str | None:
    session = current_session()
    return None if session is None else session.name


def exchange_after_death_of(victim: int) -> object:
    """Rank `victim` dies; the others wait for it at the coordinator."""
    session = current_session()
    assert session is not None
    key = session.next_key()
    if session.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    reply = session.call(Exchange(key, session.rank, session.world_size, "t", {}, 120.0))
    raise reply.error


def test_state_stays_with_the_ranks_that_stay(ranks):
    ranks.resize(2)
    ranks.keep(lambda: {"rank": this_rank().rank})
    ranks.resize(3)
    assert ranks.run(lambda: this_rank().state) == [{"rank": 0}, {"rank": 1}, None]
    ranks.resize(1)
    assert ranks.run(sum_of_ranks) == [(0, 1, 0.0)]
    assert ranks.run(lambda: this_rank().state) == [{"rank": 0}]


def test_a_remade_group_gets_a_new_session_and_a_known_one_keeps_its_own(ranks):
    ranks.resize(2)
    first = ranks.run(session_name)
    assert first[0] is not None
    assert first == [first[0]] * 2
    assert ranks.run(session_name) == first
    ranks.resize(3)
    second = ranks.run(session_name)
    assert second == [second[0]] * 3
    assert second[0] != first[0]
    ranks.resize(1)
    assert ranks.run(session_name) == [None]


def test_a_subgroup_has_a_session_of_its_own(ranks):
    ranks.resize(3)

    def names() -> tuple[str | None, str | None]:
        import torch.distributed as dist

        pair = dist.new_group([0, 2])
        whole = current_session()
        if dist.get_rank() == 1:
            with pytest.raises(InvalidRequestError, match="to be in the process group"):
                current_session(pair)
            return whole.name, None
        part = current_session(pair)
        assert (part.rank, part.world_size) == ([0, 2].index(dist.get_rank()), 2)
        return whole.name, part.name

    (whole, first), (_, none), (_, last) = ranks.run(names)
    assert first == last != whole
    assert none is None


def test_what_a_function_raises_comes_back_as_it_was_with_its_rank(ranks):
    ranks.resize(2)

    def fails() -> None:
        if this_rank().rank == 1:
            raise KeyError("layers.0")

    with pytest.raises(KeyError) as caught:
        ranks.run(fails)
    assert caught.value.args == ("layers.0",)
    assert any("rank 1" in note for note in caught.value.__notes__)
    here = "closure"
    assert ranks.run(lambda a, *, b: (here, a, b), 1, b=2) == [("closure", 1, 2)] * 2


def test_a_killed_rank_is_named_in_seconds_and_those_who_wait_for_ever_are_released(
    ranks, monkeypatch
):
    ranks.resize(3)
    pids = ranks.pids

    def hang() -> None:
        import threading

        if this_rank().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    # What they still have after the death of another.
    monkeypatch.setattr(ranks, "options", replace(ranks.options, release_s=2.0))
    started_s = time.monotonic()
    with pytest.raises(ParticipantError, match="rank 1 died") as caught:
        ranks.run(hang)
    assert time.monotonic() - started_s < PATIENCE_S
    assert caught.value.rank == 1
    assert "ranks 0, 2 still waited" in str(caught.value)
    assert eventually(lambda: not any(map(lives, pids)))
    with pytest.raises(ParticipantError, match="resize"):
        ranks.run(lambda: 1)
    ranks.resize(2)
    assert ranks.run(sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_no_process_gets_another_number(ranks):
    """torch's cached meshes hold the place that the process had: shards would be another's."""
    ranks.resize(3)
    pids = ranks.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ParticipantError, match="rank 1 died"):
        ranks.run(lambda: 1)
    ranks.resize(3)
    assert [now == before for now, before in zip(ranks.pids, pids, strict=True)] == [
        True,
        False,
        True,
    ]
    assert ranks.run(sum_of_ranks) == [(rank, 3, 3.0) for rank in range(3)]


def test_the_coordinator_names_a_dead_rank_to_those_who_wait_there(ranks):
    ranks.resize(3)
    ranks.run(session_name)
    started_s = time.monotonic()
    # The released ranks raise what the coordinator told them, well before their own deadline.
    with pytest.raises(ParticipantError, match="rank 2 died") as caught:
        ranks.run(exchange_after_death_of, 2)
    assert time.monotonic() - started_s < PATIENCE_S
    told, _ = caught.value.failures[0]
    assert isinstance(told, ParticipantError)
    assert "rank 2" in str(told)


def test_shutdown_leaves_no_process_and_the_group_can_not_be_used_again():
    group = WorkerGroup(2)
    pids = group.pids
    assert all(map(lives, pids))
    group.shutdown()
    group.shutdown()
    assert eventually(lambda: not any(map(lives, pids)))
    assert ray.is_initialized()
    with pytest.raises(InvalidRequestError, match="shut down"):
        group.run(lambda: 1)


def test_more_than_the_cluster_has_is_refused_with_what_it_has():
    with pytest.raises(ParticipantError, match="CPUs"):
        WorkerGroup(2, num_cpus=100, start_timeout_s=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"world_size": 0},
        {"world_size": 1, "num_cpus": -1},
        {"world_size": 1, "release_s": 0},
        {"world_size": 1, "run_timeout_s": "1"},
        {"world_size": 1, "env_vars": 3},
        {"world_size": 1, "num_cpu": 1},
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_anything_starts(wrong):
    with pytest.raises(InvalidRequestError):
        WorkerGroup(**wrong)


GROUP = """
import ray
from ray_dcp.worker_group import WorkerGroup
if __name__ == "__main__":
    with WorkerGroup(1) as ranks:
        print(ranks.run(lambda: 7), ray.get_runtime_context().gcs_address)
"""


def test_a_worker_group_leaves_alone_a_cluster_that_nobody_named(programs):
    # Why so short: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="rd", dir="/tmp") as folder:
        newest = Path(folder) / "ray" / "ray_current_cluster"
        newest.parent.mkdir()
        newest.write_text("127.0.0.1:9")
        environment = plain_environment(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled")
        (ended,) = programs.run("-c", GROUP, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("[7] ")
    assert not ended.stdout.endswith("127.0.0.1:9\n")
