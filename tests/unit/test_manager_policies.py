"""Save and retention policies: pure functions of facts, their combinations and their refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager import (
    AnyOf,
    AtSteps,
    BestN,
    CheckpointManager,
    EveryMinutes,
    EveryOptimal,
    EverySteps,
    KeepEveryHours,
    KeepEverySteps,
    LatestN,
    SaveFacts,
    StepFacts,
    root_writer,
)
from ray_dcp.manager.leases import this_process
from ray_dcp.manager.policies import (
    best_of,
    check_metrics,
    check_retention,
    check_save_policy,
    superfluous,
)
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.settings import Settings
from ray_dcp.store.opening import open_storage
from tests.support.manager_places import root_of


def due(policy, steps=range(30), **facts):
    return [step for step in steps if policy.due(SaveFacts(step=step, **facts))]


def run_of(*values, metric="loss"):
    return [StepFacts(step=i, metrics={metric: v}) for i, v in enumerate(values)]


def test_the_optimal_interval_has_bounds_and_says_what_is_lost():
    facts = SaveFacts(step=1, since_save_s=100.0, cost_s=2.0)
    assert EveryOptimal(4, least_s=300).interval_s(facts) == 300
    assert EveryOptimal(4, most_s=90).due(facts)
    assert not EveryOptimal(4, most_s=90).due(replace(facts, saving=True))
    assert not EveryOptimal(4).due(facts)
    assert EveryOptimal(4).due(replace(facts, cost_s=None))  # the first one, to measure it
    assert EveryOptimal(1).interval_s(replace(facts, cost_s=7200.0)) == 3600 + 7200
    assert "1.7 % of training time is lost" in EveryOptimal(4).describe(facts)
    assert EveryOptimal(4).describe(SaveFacts(step=1)) == "no save was measured yet"


def test_a_writer_measures_saves_and_counts_writers_that_ended_without_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(now_s=0.0)
    now = SimpleNamespace(monotonic=lambda: clock.now_s, time=lambda: clock.now_s)
    monkeypatch.setattr(root_writer, "time", now)

    def writer(started: str) -> Writer:
        root = root_of(open_storage(Target(str(tmp_path))))
        settings = Settings(policy=EveryOptimal(4))
        holder = replace(this_process(), started=started)  # a process that is gone
        return Writer(root, settings, holder=holder)

    def train(writer: Writer, steps: Sequence[int]) -> list[int]:
        """Trains steps of 10 s; a save stops them for 3 s, and 2 steps beside it take 1 s more."""
        begun = []
        saving = None
        for step in steps:
            clock.now_s += 10.0 + (saving is not None)
            if saving is not None and step == begun[-1] + 2:
                ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / saving.name)
                writer.finish(saving, True)
                saving = None
            if writer.due(step, False):
                saving = writer.begin(step)
                begun.append(step)
                clock.now_s += 3.0
        return begun

    first = writer("1")
    assert train(first, range(45)) == [0, 38]  # the root of 2 * 5 s * 4 h is 379 s
    facts = first.facts(45)
    assert (facts.cost_s, facts.durable_s, facts.failures) == (5.0, 25.0, 0)
    second = writer("2")
    assert train(second, range(50, 54)) == [50]
    assert second.facts(54).failures == 1
    second.close()
    third = writer("3")
    assert train(third, range(60, 64)) == [60]
    assert third.facts(64).failures == 1
    assert third.facts(64).ran_s == 385.0 + 45.0  # until step 38 was begun, and its own
    clock.now_s += 50 * 365 * 86400.0  # the clock was wrong and is set right
    assert train(third, range(64, 68)) == [64]
    third.close()
    fourth = writer("4")
    assert train(fourth, range(70, 74)) == [70]
    assert fourth.facts(74).ran_s < 100 * 86400


@pytest.mark.parametrize(
    "policy",
    [EverySteps(10) & AtSteps(15), EverySteps(3) & ~EverySteps(3), ~(EverySteps(1) | AtSteps(7))],
    ids=repr,
)
def test_policies_whose_parts_contradict_each_other_are_refused_and_no_others(policy):
    with pytest.raises(InvalidRequestError, match="contradict each other"):
        check_save_policy(policy)
    for fine in (EverySteps(7) & ~EverySteps(2), AtSteps(10**9), EverySteps(10) & AtSteps(20)):
        assert check_save_policy(fine) is fine


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0), lambda: EverySteps(True), lambda: EverySteps(2.0),
        lambda: EveryMinutes(0), lambda: EveryMinutes(math.inf), lambda: EveryMinutes("1"),
        lambda: EveryOptimal(0), lambda: EveryOptimal("4"), lambda: EveryOptimal(most_s=-1),
        lambda: EveryOptimal(least_s=20, most_s=10),
        lambda: AtSteps(), lambda: AtSteps(-1), lambda: AtSteps(1.5), lambda: AnyOf(),
        lambda: EverySteps(1) | LatestN(1), lambda: check_save_policy(LatestN(1)),
        lambda: LatestN(0), lambda: LatestN(True), lambda: BestN(1, ""),
        lambda: BestN(1, "loss", mode="lowest"), lambda: KeepEverySteps(0),
        lambda: KeepEveryHours(-1), lambda: KeepEveryHours(math.nan),
        lambda: LatestN(1) & EverySteps(1), lambda: check_retention(EverySteps(1)),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused(make):
    with pytest.raises(InvalidRequestError):
        make()


def test_the_best_steps_are_kept_by_mode_and_of_equal_ones_the_newer():
    steps = run_of(3.0, 1.0, 1.0, 2.0, 5.0)
    assert superfluous(steps, BestN(2, "loss")) == (0, 3)
    assert superfluous(steps, BestN(1, "loss", mode="max")) == (0, 1, 2, 3)
    assert superfluous(steps, BestN(1, "loss")) == (0, 1, 3)


def test_a_step_without_the_metric_or_with_nan_is_no_candidate_and_hours_count_from_the_last():
    steps = [*run_of(math.nan, 4.0), StepFacts(step=2), StepFacts(step=3)]
    assert [facts.step for facts in best_of(steps, "loss", "min")] == [1]
    assert superfluous(steps, BestN(3, "loss")) == (0, 2)
    at = [0.0, 0.9, 1.1, 1.9, 2.2]
    steps = [StepFacts(step=i, created_s=3600.0 * hours) for i, hours in enumerate(at)]
    assert list(KeepEveryHours(1).keeps(steps)) == [True, False, True, False, True]


def test_tags_and_protected_steps_stay_whatever_the_policy_says():
    steps = [StepFacts(step=s, tags=frozenset({"release"} if s == 1 else ())) for s in range(5)]
    assert superfluous(steps, LatestN(1), protected={2}) == (0, 3)
    assert superfluous(steps, None) == ()
    assert superfluous([], LatestN(1)) == ()

    class Short:
        def keeps(self, steps):
            return [True]

    with pytest.raises(InvalidRequestError, match="of each of 5 steps"):
        superfluous(steps, Short())


@given(
    values=st.lists(st.floats(allow_nan=True), min_size=1, max_size=12),
    n=st.integers(1, 4),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_newest_step_is_never_given_up(values, n, mode):
    steps = run_of(*values)
    newest = len(values) - 1
    for policy in (
        BestN(n, "loss", mode),
        ~LatestN(n),
        KeepEverySteps(n + 1) & BestN(n, "loss", mode),
        LatestN(n) & ~LatestN(n),
    ):
        assert newest not in superfluous(steps, policy)
    kept = set(range(len(values))) - set(superfluous(steps, LatestN(n) | BestN(n, "loss", mode)))
    assert kept >= set(range(max(0, newest - n + 1), newest + 1))


@pytest.mark.parametrize(
    ("metrics", "match"),
    [
        ({}, "which is missing"), (None, "which is missing"), ({"loss": math.nan}, "which is NaN"),
        ({"loss": "low"}, "must be a number"), ({"loss": None}, "must be a number"),
        ({1: 2.0, "loss": 1.0}, "texts as names"),
    ],
)  # fmt: skip
def test_metrics_by_which_nothing_can_be_ranked_are_refused(metrics, match):
    with pytest.raises(InvalidRequestError, match=match):
        check_metrics(metrics, LatestN(1) | BestN(1, "loss"))


def test_a_retention_policy_that_raises_removes_nothing_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        fails = False

        def keeps(self, steps: Any) -> list[bool]:
            if self.fails:
                raise KeyError("loss")
            return [one.step > steps[-1].step - 2 for one in steps]

    policy = Failing()
    with CheckpointManager(tmp_path, 1, retention=policy) as manager:
        for number in range(1, 4):
            manager.save(number, {"w": torch.ones(2)})
        manager.join()
        policy.fails = True
        manager.save(4, {"w": torch.ones(2)})
        assert manager.all_steps() == [2, 3, 4]
        assert "raised KeyError: 'loss'" in caplog.text
        policy.fails = False
        manager.save(5, {"w": torch.ones(2)})
        manager.join()
        assert manager.all_steps() == [4, 5]
