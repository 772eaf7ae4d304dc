"""Asynchronous saves on real ranks: whole, survived, taken over, cancelled; and nothing is left."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from ray_dcp.errors import ParticipantError, SaveCancelledError
from tests.support.attempts import one_error
from tests.support.processes import eventually, lives
from tests.support.programs import async_saves as programs
from tests.support.servers.s3 import shared_memory

NUM_RANKS = 2


def committed(path: Path, attempt: str) -> bool:
    return eventually(lambda: ray_dcp.outcome(path, attempt) == "committed")


def test_a_state_that_changes_right_after_staging_is_saved_as_it_was(ranks, tmp_path):
    path = str(tmp_path / "c")
    for step in (1, 2):
        came = ranks.run(programs.save_and_change, path, step)
        assert [one.error for one in came] == [None, None]
        assert came[0].value.staging == "object_store"
        assert came[0].value.path == "native"
        attempt = came[0].value.attempt
        assert [one.value.bytes_written for one in came] == [
            sum(file.stat().st_size for file in Path(path).glob(f"__{rank}_*.{attempt}.distcp"))
            for rank in range(NUM_RANKS)
        ]
        assert ranks.run(programs.mixed_is, path, step) == [True, True]
    assert ray_dcp.verify(path).ok
    state = {"sharded": torch.zeros(6, 4), "step": 0, "bf16": torch.zeros(3, dtype=torch.bfloat16)}
    stock.load(state, checkpoint_id=path)
    assert state["step"] == 2
    assert torch.equal(state["sharded"], torch.arange(24.0).reshape(6, 4) + 2)


def survived(ranks, path: Path) -> None:
    """Checks that a save whose ranks died is committed and whole."""
    assert committed(path, Path(f"{path}.attempt").read_text())
    ranks.resize(NUM_RANKS)
    assert programs.large_is(str(path), 5, NUM_RANKS)
    assert ray_dcp.verify(path).ok


@pytest.mark.parametrize("victims", [(0,), (0, 1)], ids=["rank 0", "all ranks"])
def test_a_staged_save_survives_the_death_of_its_ranks(ranks, tmp_path, monkeypatch, victims):
    path = tmp_path / "c"
    # The rank that is left waits for the commit, and nothing is written before the gate.
    monkeypatch.setattr(ranks, "options", replace(ranks.options, release_s=2.0))
    with pytest.raises(ParticipantError, match="died"):
        ranks.run(partial(programs.save_large, str(path), 5, victims=victims))
    assert not list(path.glob("__*.distcp"))
    Path(f"{path}.gate").touch()
    survived(ranks, path)


def test_a_staged_save_survives_its_coordinator_and_all_its_ranks(ranks, tmp_path):
    for number in range(2):
        path = tmp_path / f"c{number}"
        came = ranks.run(programs.save_large, str(path), 5, "coordinator")
        assert [one.error for one in came] == [None, None]
        epoch, attempt = came[0].value
        assert epoch > 1 + number
        assert ray_dcp.outcome(path, attempt) == "committed"
        assert programs.large_is(str(path), 5, 2)
    path = tmp_path / "without ranks"
    with pytest.raises(ParticipantError, match="died"):
        ranks.run(partial(programs.save_large, str(path), 5, "coordinator", victims=(0, 1)))
    survived(ranks, path)


def test_a_coordinator_that_dies_right_after_a_commit_does_not_hold_up_the_next_save(
    ranks, tmp_path
):
    path = str(tmp_path / "c")
    came = ranks.run(programs.save_and_kill_coordinator, path, 4)
    assert [one.error for one in came] == [None, None]
    assert came[0].value > 4
    assert ranks.run(programs.mixed_is, path, 4) == [True, True]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stager_that_is_lost_fails_its_save_by_name_and_the_next_one_has_another(
    ranks, tmp_path, blow
):
    path = tmp_path / "c"
    ranks.run(programs.save_and_change, str(path), 1)
    before = ranks.run(programs.stager_facts)[0]
    hit = partial(programs.save_large, str(path), 6, "stager", int(blow), heartbeat_timeout_s=3.0)
    came = ranks.run(hit)
    one_error(
        came, ParticipantError, "the stager", "files unwritten", "Ray says that"
        if blow == signal.SIGKILL else "frozen, or its machine is out of reach",
    )  # fmt: skip
    assert ranks.run(programs.mixed_is, str(path), 1) == [True, True]
    came = ranks.run(programs.save_and_change, str(path), 2)
    assert [one.error for one in came] == [None, None]
    assert ranks.run(programs.mixed_is, str(path), 2) == [True, True]
    assert ranks.run(programs.stager_facts)[0]["pid"] != before["pid"]
    assert eventually(lambda: not lives(before["pid"]))


def test_a_cancelled_save_fails_on_all_ranks_and_leaves_what_stood(ranks, tmp_path):
    path = tmp_path / "c"
    ranks.run(programs.save_and_change, str(path), 1)
    came = ranks.run(partial(programs.save_large, str(path), 2, canceller=1))
    one_error(came, SaveCancelledError, "cancel")
    assert ranks.run(programs.mixed_is, str(path), 1) == [True, True]


@pytest.mark.parametrize("max_pending", [1, 2])
def test_a_second_save_waits_or_goes_along(ranks, tmp_path, max_pending):
    came = ranks.run(programs.save_twice, str(tmp_path / "c"), "wait", max_pending)
    assert came == [["NoneType", "NoneType"]] * 2


def test_warming_up_touches_the_store_for_the_first_save(ranks):
    # What staged bytes may take of the store is given to who asks first.
    came = ranks.run(programs.warm, 400 << 20)
    limit_bytes = ranks.run(programs.stager_facts)[0]["limit_bytes"]
    assert max(came) >= 0.9 * limit_bytes


def test_all_staging_memory_comes_back_and_nothing_stays_in_shared_memory(ranks, tmp_path):
    before = shared_memory()
    came = ranks.run(programs.save_and_change, str(tmp_path / "c"), 1)
    assert [one.error for one in came] == [None, None]
    assert eventually(lambda: ranks.run(programs.stager_facts)[0]["used_bytes"] == 0)
    assert eventually(lambda: shared_memory() <= before)


def test_a_hundred_saves_leave_no_descriptor_no_actor_and_one_state_in_the_store(ranks, tmp_path):
    before = ranks.run(programs.save_many, str(tmp_path / "c"), 10)
    after = ranks.run(programs.save_many, str(tmp_path / "c"), 100)
    for (rank, stager, actors), (rank_then, stager_then, actors_then) in zip(
        after, before, strict=True
    ):
        # Ray has a few connections more or less at any time.
        assert rank <= rank_then + 8
        assert stager <= stager_then + 8
        assert actors <= actors_then
    one_state = len(after) * (3 << 20)

    def used_bytes() -> int:
        return int(ranks.run(programs.stager_facts)[0]["used_bytes"])

    # The last one is kept.
    assert eventually(lambda: used_bytes() <= 1.2 * one_state)
    assert used_bytes() >= one_state
