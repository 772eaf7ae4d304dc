"""`follow` yields each committed step and keeps it meanwhile; results are metrics of the step."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.format.step_info import RecordedMetric, latest_values, recorded_in
from ray_dcp.io.records import Announced, announced
from ray_dcp.manager import BestN, LatestN
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.following import _follow
from ray_dcp.store.local import LocalStorage
from tests.support import checkpoints
from tests.support.storages import Call, CrashError, Fault, Script


def manager_of(run: Path, **given: Any) -> ray_dcp.CheckpointManager:
    return ray_dcp.CheckpointManager(run, no_dist=True, chkpt_on_preemption=False, **given)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step))}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with manager_of(tmp_path / "run") as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step), metrics={"loss": 1.0})
    return tmp_path / "run"


def followed(run: object, **given: Any) -> list[int]:
    return [found.step for found in ray_dcp.follow(run, timeout_s=0, **given)]


def recorded(run: Path) -> list[str]:
    return sorted(path.name for path in (run / ".manager" / "metrics").glob("*"))


def test_each_committed_step_comes_once_and_new_ones_are_waited_for(run: Path):
    seen = []
    with manager_of(run) as manager:
        for found in ray_dcp.follow(run, timeout_s=0, poll_s=1e-3):
            seen.append(found.step)
            assert found.view["w"][0] == found.step
            assert found.metrics == {"loss": 1.0}
            if found.step in (10, 40):
                later = found.step + 30 if found.step == 10 else 50
                manager.save(later, state(later), metrics={"loss": 1.0})
    assert seen == [10, 20, 30, 40, 50]
    assert followed(run, newer_than=30) == [40, 50]


def test_a_step_that_is_saved_again_comes_again(run: Path):
    steps = ray_dcp.follow(run, timeout_s=0)
    first = next(steps)
    with manager_of(run) as manager:
        manager.save(30, state(31), replace=True)
    assert [found.view["w"][0] for found in steps] == [20, 31]
    assert first.step == 10


def test_runs_of_other_programs_are_followed_too(tmp_path: Path):
    for step in (3, 12):
        checkpoints.save_stock(tmp_path / f"epoch=1-step={step}", state(step))
    for found in ray_dcp.follow(tmp_path, metric="acc", timeout_s=0):
        found.record({"acc": found.step / 100})
    run = ray_dcp.open(tmp_path)
    assert [one.metrics for one in run] == [{"acc": 0.03}, {"acc": 0.12}]
    assert run["best:acc"]["w"][0] == 12
    assert followed(tmp_path, metric="acc") == []


def test_what_is_recorded_is_a_metric_of_the_step_everywhere(run: Path, tmp_path: Path):
    for found in ray_dcp.follow(run, metric="eval/loss é", timeout_s=0):
        found.record({"eval/loss é": abs(found.step - 20) / 7, "big": 1e300})
    with manager_of(run, read_only=True) as manager:
        assert manager.best_step("eval/loss é") == 20
        assert manager.step_info(30).metrics == {"loss": 1.0, "eval/loss é": 10 / 7, "big": 1e300}
    listed = CliRunner().invoke(main, ["ls", str(run), "--json"])
    assert "eval/loss é" in json.dumps(json.loads(listed.stdout), ensure_ascii=False)
    # A copy has them, and a deletion takes them along.
    copied = CliRunner().invoke(main, ["cp", str(run), str(tmp_path / "copy")])
    assert copied.exit_code == 0, copied.output
    assert ray_dcp.open(tmp_path / "copy")["best:eval/loss é:min"]["w"][0] == 20
    assert len(recorded(run)) == 6
    with manager_of(run) as manager:
        manager.delete(10)
    removed = CliRunner().invoke(main, ["rm", f"{run}@20", "--yes"])
    assert removed.exit_code == 0, removed.output
    assert {key.partition(".")[0] for key in recorded(run)} == {"30"}


def test_a_new_value_takes_the_place_of_the_old_one(run: Path):
    ray_dcp.record_metrics(run, 20, {"acc": 0.5, "loss": 0.25})
    ray_dcp.record_metrics(run, 20, {"acc": 0.4})
    assert ray_dcp.open(run).step(20).metrics == {"acc": 0.4, "loss": 0.25}
    assert len(recorded(run)) == 2
    # One that was killed before it removed the old value.
    keys = [f"metrics/{name}" for name in recorded(run)]
    ((step, attempt),) = latest_values(recorded_in(keys))
    (run / ".manager" / RecordedMetric(step, attempt, 7, "acc", 0.9).key).touch()
    assert ray_dcp.open(run).step(20).metrics["acc"] == 0.9


def test_an_evaluator_that_stops_leaves_a_step_that_is_evaluated_again(run: Path):
    for found in ray_dcp.follow(run, metric="acc", timeout_s=0):
        if found.step == 20:
            break
        found.record({"acc": 1.0})
    assert followed(run, metric="acc") == [20, 30]
    fails = ray_dcp.follow(run, metric="acc", timeout_s=0)
    assert next(fails).step == 20
    with pytest.raises(ZeroDivisionError):
        fails.throw(ZeroDivisionError)
    assert not list((run / ".manager").glob("reading/*"))


def test_no_step_is_deleted_while_it_is_looked_at(run: Path):
    with manager_of(run) as manager:
        for found in ray_dcp.follow(run, timeout_s=0):
            if found.step == 20:
                with pytest.raises(CheckpointError, match="is being read"):
                    manager.delete(20)
                manager.delete(30)
        assert manager.all_steps() == [10, 20]
        manager.delete(20)


def test_metrics_call_off_a_deletion_that_is_announced(run: Path):
    """As a tag does: retention decided without them, and has to decide again."""
    (found,) = [one for one in ray_dcp.follow(run, timeout_s=0) if one.step == 20]
    shared = LocalStorage(str(run / ".manager"))
    mark = Announced(20, "0123456789abcdef", "step-00000020")
    shared.write(mark.key, b"")
    found.record({"acc": 1.0})
    assert announced(shared) == []
    with pytest.raises(CheckpointError):
        ray_dcp.delete(run / "step-00000020", expected=found.attempt, attempt=mark.attempt)
    assert ray_dcp.open(f"{run}@20").attempt == found.attempt


@pytest.mark.parametrize("what", ["deleted", "saved again"])
def test_what_was_evaluated_and_is_gone_gets_no_metrics(run: Path, what: str):
    (found,) = [one for one in ray_dcp.follow(run, timeout_s=0) if one.step == 30]
    with manager_of(run) as manager:
        if what == "deleted":
            manager.delete(30)
        else:
            manager.save(30, state(31), replace=True)
    with pytest.raises(CheckpointNotFoundError, match=what):
        found.record({"acc": 1.0})
    assert recorded(run) == []
    with pytest.raises(CheckpointNotFoundError, match="expected step 31"):
        ray_dcp.record_metrics(run, 31, {"acc": 1.0})


def test_steps_wait_for_a_metric_that_comes_later(tmp_path: Path):
    keep = LatestN(1) | BestN(1, "acc", mode="max", later=True)
    with manager_of(tmp_path / "run", retention=keep) as manager:
        for step in range(1, 6):
            manager.save(step, state(step))
        manager.join()
        assert manager.all_steps() == [1, 2, 3, 4, 5]
        for found in ray_dcp.follow(tmp_path / "run", metric="acc", timeout_s=0):
            found.record({"acc": math.nan if found.step == 3 else -abs(found.step - 2)})
        manager.save(6, state(6))
        manager.join()
        # The newest of those that have it stays with the best: 6 may yet be no good.
        assert manager.all_steps() == [2, 5, 6]
        ray_dcp.record_metrics(tmp_path / "run", 6, {"acc": -9})
        manager.save(7, state(7))
        manager.join()
        assert manager.all_steps() == [2, 6, 7]
        assert manager.best_step() == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metric": ""}, "metric must be"),
    ({"metric": 3}, "metric must be"),
    ({"poll_s": 0}, "poll_s must be"),
    ({"timeout_s": -1}, "timeout_s must be"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_a_wrong_call_is_refused_at_once(run: Path, arguments: dict[str, Any], said: str):
    with pytest.raises(InvalidRequestError, match=said):
        ray_dcp.follow(run, **arguments)


@pytest.mark.parametrize("metrics", [{}, {"acc": "high"}, {"": 1.0}, {"a" * 151: 1.0}])
def test_wrong_metrics_are_refused_and_none_is_written(run: Path, metrics: dict[str, Any]):
    with pytest.raises(InvalidRequestError):
        ray_dcp.record_metrics(run, 10, {**({"ok": 1.0} if metrics else {}), **metrics})
    assert recorded(run) == []


def test_files_that_other_programs_renamed_are_no_metrics(run: Path):
    ray_dcp.record_metrics(run, 10, {"acc": 0.5})
    (key,) = (run / ".manager" / "metrics").iterdir()
    shutil.copy(key, key.with_name(f"{key.name} (conflicted copy)"))
    key.with_name("10.stock.1.!zz=1").touch()
    assert ray_dcp.open(run).step(10).metrics == {"loss": 1.0, "acc": 0.5}


@given(
    st.integers(0, 10**18 - 1),
    st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable()),
    st.floats(),
)
def test_a_key_is_read_back_as_it_was_written(step: int, name: str, value: float):
    metric = RecordedMetric(step, "0123456789abcdef", 3, name, value)
    (found,) = recorded_in([metric.key])
    assert found[:4] == metric[:4]
    assert repr(found.value) == repr(value)
    assert set(metric.key.partition("/")[2]) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.!=-"
    )


# --- an evaluator that dies at any call ---------------------------------------------------------


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
    for number in range(1, num_calls + 1, 2):
        check(number)
