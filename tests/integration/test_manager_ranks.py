"""A manager on two real ranks: both decide the same, whatever each one sees."""

from __future__ import annotations

import os
import signal
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    RankDisagreementError,
)
from ray_dcp.manager import (
    BestN,
    CheckpointManager,
    EveryOptimal,
    Item,
    LatestN,
    root_writer,
)
from tests.support.attempts import Attempt, attempt, check_sound, one_error, sound_state
from tests.support.checkpoints import flip

NUM_RANKS = 2

_made: dict[str, CheckpointManager] = {}
"""Managers of a rank, by root."""


def manager_at(root: str, **given: Any) -> CheckpointManager:
    """Returns this rank's manager of a root, made by the first call."""
    if root not in _made:
        interval = None if "save_policy" in given else given.pop("interval", 10)
        _made[root] = CheckpointManager(root, interval, **given)
    return _made[root]


def restore(root: str, step: Any) -> Attempt:
    def call() -> Any:
        state = sound_state(0, fill=False)
        report = manager_at(root).restore(step, state)
        check_sound(state, report.step)
        return report.step, [number for number, _ in report.skipped]

    return attempt(call)


def values(attempts: list[Attempt]) -> list[Any]:
    for one in attempts:
        if one.error is not None:
            raise one.error
    return [one.value for one in attempts]


def test_steps_are_saved_kept_and_restored_alike_on_both_ranks(ranks, tmp_path):
    root = str(tmp_path)

    def train(root: str) -> Any:
        manager = manager_at(root, retention=LatestN(1) | BestN(1, "loss"))
        # Each rank measures another loss: rank 0's counts.
        for step in range(10, 60, 10):
            loss = (1.0 if step == 20 else 2.0) + 9.0 * dist.get_rank() * (step == 20)
            manager.save_async(step, sound_state(step), metrics={"loss": loss})
        assert not manager.save(55, sound_state(55))
        manager.join()
        return None

    ranks.run(train, root)

    def look(root: str) -> Any:
        manager = manager_at(root)
        return manager.all_steps(), manager.best_step(), manager.step_info(20).metrics

    assert ranks.run(look, root) == [([20, 50], 20, {"loss": 1.0})] * 2
    assert values(ranks.run(restore, root, "latest")) == [(50, [])] * 2
    assert values(ranks.run(restore, root, "best")) == [(20, [])] * 2
    assert values(ranks.run(restore, root, 20)) == [(20, [])] * 2
    one_error(ranks.run(restore, root, 30), CheckpointNotFoundError, "found steps 20, 50")

    # What only rank 1 reads is damaged: both fall back, and both may save that step again.
    (mine,) = (tmp_path / "step-00000050").glob("__1_*.distcp")
    for offset in range(0, mine.stat().st_size, 512):
        flip(mine, offset)
    attempts = ranks.run(restore, root, "auto")
    assert values(attempts) == [(20, [50])] * 2
    assert [len(one.warnings) for one in attempts] == [1, 0]

    def again(root: str) -> Any:
        manager = manager_at(root)
        saved = manager.save(50, sound_state(50), metrics={"loss": 3.0})
        manager.close()
        return saved

    assert ranks.run(again, root) == [True, True]


def test_what_is_left_after_a_save_is_the_same_on_all_ranks_without_waiting_for_it(ranks, tmp_path):
    def train(root: str) -> Any:
        from ray_dcp import xla

        manager = xla.CheckpointManager(root, 10, max_to_keep=2, chkpt_on_preemption=False)
        found = []
        for step in (70, 80, 10, 20, 10):
            assert manager.save(step, sound_state(step))
            found.append((manager.all_steps(), manager.latest_step()))
        manager.close()
        return found

    kept = [([70], 70), ([70, 80], 80), ([10, 80], 10), ([10, 20], 20), ([10, 20], 10)]
    assert ranks.run(train, str(tmp_path)) == [kept] * 2


def test_one_rank_that_is_preempted_makes_the_step_due_on_all(ranks, tmp_path):
    def train(root: str) -> Any:
        manager = manager_at(root, chkpt_on_preemption=True)
        said = [manager.should_save(3), manager.reached_preemption(3)]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        said += [manager.should_save(4), manager.save(4, sound_state(4))]
        said += [manager.save(5, sound_state(5)), manager.reached_preemption(5)]
        manager.close()
        return said, manager.all_steps()

    expected = ([False, False, True, True, False, True], [4])
    assert ranks.run(train, str(tmp_path)) == [expected, expected]


def test_times_are_those_of_rank_0(ranks, tmp_path):
    def train(root: str) -> Any:
        policy = EveryOptimal(least_s=300)
        manager = manager_at(root, save_policy=policy, chkpt_on_preemption=False)
        # Rank 1's clock runs far ahead; rank 0's is the one that counts.
        begun_s, root_writer.time = time.monotonic(), types.SimpleNamespace(time=time.time)
        root_writer.time.monotonic = lambda: begun_s + 1e9 * dist.get_rank()
        said = [manager.save(1, sound_state(1))]
        root_writer.time.monotonic = lambda: begun_s + (301.0 if dist.get_rank() == 0 else 0.0)
        said += [manager.save(2, sound_state(2)), manager.save(3, sound_state(3))]
        root_writer.time = time
        manager.close()
        return said

    assert ranks.run(train, str(tmp_path)) == [[False, True, False]] * 2


def try_save(root: str, step: int, how: str, **telling: Any) -> Attempt:
    def call() -> Any:
        manager = manager_at(root)
        state: Any = sound_state(step)
        if how == "no dict on rank 1" and dist.get_rank() == 1:
            state = [1]
        if how == "meta on rank 1" and dist.get_rank() == 1:
            state["plain"] = torch.ones(7).to("meta")
        return manager.save(step + (how == "other steps") * 10 * dist.get_rank(), state, **telling)

    return attempt(call)


def test_what_one_rank_can_not_do_fails_alike_on_both_and_leaves_the_step_before(ranks, tmp_path):
    root = str(tmp_path)

    def make(root: str) -> None:
        manager_at(root, max_to_keep=1, chkpt_on_preemption=False)

    ranks.run(make, root)
    assert values(ranks.run(try_save, root, 10, "well")) == [True, True]
    one_error(ranks.run(try_save, root, 20, "no dict on rank 1"), InvalidRequestError, "rank 1")
    one_error(ranks.run(try_save, root, 20, "other steps"), RankDisagreementError)
    failed = ranks.run(try_save, root, 20, "meta on rank 1")
    assert all(isinstance(one.error, CheckpointError) for one in failed)
    one_error(ranks.run(try_save, root, 10, "well"), InvalidRequestError, "committed already")
    one_error(ranks.run(try_save, root, 0, "well"), InvalidRequestError, "older than the newest")
    assert values(ranks.run(restore, root, "latest")) == [(10, [])] * 2
    assert values(ranks.run(try_save, root, 20, "well")) == [True, True]

    def rest(root: str) -> Any:
        manager = manager_at(root)
        manager.tag(20, "kept")
        manager.save(30, sound_state(30))
        gone = manager.rewind(20)
        manager.close()
        return gone, manager.all_steps(), manager.step_info(20).tags

    assert ranks.run(rest, root) == [([30], [20], {"kept"})] * 2
    assert {p.parent.name for p in Path(root).glob("step-*/*.distcp")} == {"step-00000020"}


def test_items_become_a_step_on_both_ranks_at_once(ranks, tmp_path):
    def train(root: str) -> Any:
        manager = manager_at(
            root, items={"model": Item(), "data": Item()}, chkpt_on_preemption=False,
            max_pending_async=2,
        )  # fmt: skip
        for step in (10, 20):
            manager.save_async(step, {"model": sound_state(step), "data": {"at": step}})
        manager.join()
        manager.save(30, {"model": sound_state(30), "data": {"at": 30}})
        found = {"model": sound_state(0, fill=False), "data": {"at": 0}}
        step = manager.restore("latest", found).step
        manager.close()
        return manager.all_steps(), step, found["data"]["at"], found["model"]["step"]

    assert ranks.run(train, str(tmp_path)) == [([10, 20, 30], 30, 30, 30)] * 2
