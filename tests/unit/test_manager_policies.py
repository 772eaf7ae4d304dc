"""Save and retention policies: pure functions of facts, their combinations and their refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager import (
    AnyOf,
    AtSteps,
    BestN,
    CheckpointManager,
    EveryMinutes,
    EverySteps,
    KeepEveryHours,
    KeepEverySteps,
    LatestN,
    OnPreemption,
    SaveFacts,
    StepFacts,
)
from ray_dcp.manager.retention import best_of, check_metrics, check_retention, superfluous
from ray_dcp.manager.save_policy import check_save_policy


def due(policy, steps=range(30), **facts):
    return [step for step in steps if policy.due(SaveFacts(step=step, **facts))]


def run_of(*values, metric="loss"):
    return [StepFacts(step=i, metrics={metric: v}) for i, v in enumerate(values)]


def test_intervals_and_named_steps_combine():
    assert due(EverySteps(10)) == [0, 10, 20]
    assert due(EverySteps(10) | AtSteps(1, 2)) == [0, 1, 2, 10, 20]
    assert due(EverySteps(10) & ~AtSteps(0, 20)) == [10]
    assert due(~EverySteps(2) & AtSteps(3, 4, 5)) == [3, 5]


def test_minutes_and_preemption_look_at_facts_and_not_at_a_clock():
    policy = EveryMinutes(5) | OnPreemption()
    assert due(policy, [7], since_save_s=299.9) == []
    assert due(policy, [7], since_save_s=300.0) == [7]
    assert due(policy, [7], preempted=True) == [7]


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
        ({}, "which is missing"),
        (None, "which is missing"),
        ({"loss": math.nan}, "which is NaN"),
        ({"loss": "low"}, "must be a number"),
        ({"loss": None}, "must be a number"),
        ({1: 2.0, "loss": 1.0}, "texts as names"),
    ],
)
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
