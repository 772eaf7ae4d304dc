"""An evaluator that dies at any call: each step has a verdict, or is evaluated again.

Beside it a job saves and removes: no step goes while it is evaluated, and none before it was.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import suppress

import torch

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.manager import BestN, LatestN
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.following import _follow
from tests.support.storages import Call, CrashError, Fault, Script

_NUMBERS = itertools.count()


class DiesAt(Script):
    """The process dies before its call of a number: after the call before it was done."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number = number

    def choose(self, call: Call) -> Fault | None:
        if len(self._calls) != self.number:
            return None
        return Fault(operation=call.operation, stops=True)


class Job:
    """A job that keeps the newest step and the best, which it knows when it was evaluated."""

    def __init__(self) -> None:
        self.url = f"memory://evaluated-{next(_NUMBERS)}"
        keep = LatestN(1) | BestN(1, "acc", mode="max", later=True)
        self.manager = ray_dcp.CheckpointManager(
            self.url, retention=keep, no_dist=True, chkpt_on_preemption=False
        )
        self.evaluated = set[int]()
        self.saved = 0
        for _ in range(2):
            self.save()

    def save(self) -> None:
        self.saved += 1
        self.manager.save(self.saved, {"w": torch.tensor([float(self.saved)])})
        self.manager.join()

    def evaluate(self, script: DiesAt, until: int) -> None:
        """Evaluates as a process whose storage follows a script."""
        root = Root(Target(self.url), script.opener)
        steps = _follow(root, "acc", -1, 0, 1.0)
        try:
            self._evaluate(steps, until)
        finally:
            # A process that died gives nothing back.
            with suppress(CrashError):
                steps.close()

    def _evaluate(self, steps: Iterator[ray_dcp.FollowedStep], until: int) -> None:
        for found in steps:
            if self.saved < until:
                self.save()
            assert found.step in self.manager.all_steps(), "it went while it was evaluated"
            value = found.view["w"][0]
            assert value == found.step
            self.evaluated.add(found.step)
            found.record({"acc": -abs(value - 2), "other": value})


def verdicts(job: Job) -> Iterator[tuple[int, dict[str, float]]]:
    for one in ray_dcp.open(job.url):
        if one.is_readable:
            yield one.step, dict(one.metrics)


def check(number: int | None) -> int:
    """Lets an evaluator die at a call, and another one go on; returns how many calls it made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = Job()
        script = DiesAt(number)
        try:
            job.evaluate(script, until=3)
        except CrashError:
            assert number is not None
        gone = {*range(1, job.saved + 1)} - {*job.manager.all_steps()}
        assert gone <= job.evaluated, "a step went before it was evaluated"
        job.evaluate(DiesAt(None), until=4)
        for step, metrics in verdicts(job):
            assert metrics == {"acc": -abs(step - 2.0), "other": float(step)}
        assert job.evaluated == {*range(1, job.saved + 1)}
        job.save()
        assert job.manager.best_step() == 2
        assert {2, job.saved} <= {*job.manager.all_steps()}
        job.manager.close()
    return len(script.calls)


def test_each_step_has_a_verdict_or_is_evaluated_again():
    num_calls = check(None)
    assert num_calls >= 30
    for number in range(1, num_calls + 1):
        check(number)
