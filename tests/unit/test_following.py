"""`follow` and retention: which steps are kept, for whom, and what is recorded of them."""

from __future__ import annotations

import errno
import itertools
import json
import math
import random
import shutil
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import errors
from ray_dcp.cli.main import main
from ray_dcp.commit_protocol.messages import Exchange, Target
from ray_dcp.format.recorded_metrics import RecordedMetric, latest_values, recorded_in
from ray_dcp.io.announced_deletions import Announced, announced, fence
from ray_dcp.io.lease_holders import this_process
from ray_dcp.manager import (
    AnyOf,
    AtSteps,
    BestN,
    CheckpointManager,
    EveryMinutes,
    EveryOptimal,
    EverySteps,
    Item,
    KeepEveryHours,
    KeepEverySteps,
    LatestN,
    SaveFacts,
    StepFacts,
    root_writer,
)
from ray_dcp.manager.agreement import agree
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.following import _follow
from ray_dcp.manager.metrics import check_metrics
from ray_dcp.manager.retention import best_of, check_retention, superfluous
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policies import check_save_policy
from ray_dcp.manager.settings import Settings
from ray_dcp.options import SaveOptions
from ray_dcp.place.delete import delete
from ray_dcp.rank.rank_load import StepRange
from ray_dcp.store.local import LocalStorage, LocalWriter
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import os_failure
from ray_dcp.worker_group import WorkerOptions
from tests.support import checkpoints
from tests.support.checkpoints import flip
from tests.support.manager_places import root_of
from tests.support.privileges import without_root
from tests.support.storages import Call, CrashError, Fault, Script, interpose
from tests.support.threads import DeadRankError, run_as_ranks


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
                with pytest.raises(errors.CheckpointError, match="is being read"):
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
    with pytest.raises(errors.CheckpointError):
        delete(run / "step-00000020", expected=found.attempt, attempt=mark.attempt)
    assert ray_dcp.open(f"{run}@20").attempt == found.attempt


@pytest.mark.parametrize("what", ["deleted", "saved again"])
def test_what_was_evaluated_and_is_gone_gets_no_metrics(run: Path, what: str):
    (found,) = [one for one in ray_dcp.follow(run, timeout_s=0) if one.step == 30]
    with manager_of(run) as manager:
        if what == "deleted":
            manager.delete(30)
        else:
            manager.save(30, state(31), replace=True)
    with pytest.raises(errors.CheckpointNotFoundError, match=what):
        found.record({"acc": 1.0})
    assert recorded(run) == []
    with pytest.raises(errors.CheckpointNotFoundError, match="expected step 31"):
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
    ({"newer_than": "5"}, "newer_than must be"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_a_wrong_call_is_refused_at_once(run: Path, arguments: dict[str, Any], said: str):
    with pytest.raises(errors.InvalidRequestError, match=said):
        ray_dcp.follow(run, **arguments)


@pytest.mark.parametrize("metrics", [{}, {"acc": "high"}, {"": 1.0}, {"a" * 151: 1.0}])
def test_wrong_metrics_are_refused_and_none_is_written(run: Path, metrics: dict[str, Any]):
    with pytest.raises(errors.InvalidRequestError):
        ray_dcp.record_metrics(run, 10, {**({"ok": 1.0} if metrics else {}), **metrics})
    assert recorded(run) == []
    for step in ("10", -1, 1.5):
        with pytest.raises(errors.InvalidRequestError, match="a step must be"):
            ray_dcp.record_metrics(run, step, {"ok": 1.0})


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
        steps = _follow(root, "acc", StepRange(), 0, 1.0)
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
    for number in range(1, num_calls + 1, 3):
        check(number)


# --- policies -------------------------------------------------------------------------------------


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
    with pytest.raises(errors.InvalidRequestError, match="contradict each other"):
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
    with pytest.raises(errors.InvalidRequestError):
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

    with pytest.raises(errors.InvalidRequestError, match="of each of 5 steps"):
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
        ({}, "which is missing"), (None, "which is missing"), ({"acc": 1.0}, "which is missing"),
        ({"loss": "low"}, "must be a number"), ({"loss": ()}, "must be a number"),
        ({1: 2.0, "loss": 1.0}, "texts as names"), ({"loss": 10**400}, "that a float can hold"),
        ({"loss": Fraction(10**400)}, "that a float can hold"),
        ({"loss": torch.ones(2)}, "must be a number"),
    ],
)  # fmt: skip
def test_metrics_by_which_nothing_can_be_ranked_are_refused(metrics, match):
    with pytest.raises(errors.InvalidRequestError, match=match):
        check_metrics(metrics, LatestN(1) | BestN(1, "loss"))


@pytest.mark.parametrize("nan", [math.nan, Decimal("NaN"), torch.tensor(math.nan)])
def test_a_training_that_diverged_goes_on_saving_and_keeps_its_best_step(tmp_path: Path, nan: Any):
    retention = BestN(1, "loss")
    with manager_of(tmp_path, retention=retention) as manager:
        for step, loss in ((1, 0.5), (2, 0.7), (3, nan), (4, nan)):
            assert manager.save(step, state(step), metrics={"loss": loss})
    with manager_of(tmp_path, retention=retention) as manager:
        assert [*manager.all_steps()] == [1, 4]
        assert manager.best_step("loss") == 1
        loss = manager.step_info(4).metrics["loss"]
        assert math.isnan(loss)


@contextmanager
def may_only_read(run: Path) -> Iterator[Any]:
    """Yields a directory in which this process may create nothing, although root owns it."""
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    with without_root():
        for folder in folders:
            folder.chmod(0o555)
        try:
            yield run
        finally:
            for folder in folders:
                folder.chmod(0o755)


class _ReadOnly(MemoryFileSystem):
    """What other programs hold in memory; of this process's own, nothing can be written."""

    cachable = False

    def _refuse(self, *arguments: Any, **more: Any) -> Any:
        raise PermissionError("the bucket is somebody else's")

    mkdir = makedirs = rm = rm_file = pipe_file = put_file = touch = mv = cp_file = _refuse

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        return super()._open(path, mode, **more) if mode == "rb" else self._refuse()


@contextmanager
def behind_a_filesystem(run: Path) -> Iterator[Any]:
    place = f"/{run.parent.name}/run"
    MemoryFileSystem().put(str(run), place, recursive=True)
    yield ray_dcp.Location(place, filesystem=_ReadOnly())
    MemoryFileSystem().rm(place, recursive=True)


@pytest.mark.parametrize("opened", [may_only_read, behind_a_filesystem])
@pytest.mark.parametrize("ends", [True, False])
def test_who_may_only_read_a_run_reads_it_and_is_warned(
    tmp_path: Path, opened: Any, ends: bool
) -> None:
    writer = manager_of(tmp_path / "run")
    for step in (1, 2):
        writer.save(step, state(step), metrics={"loss": 1.0}, force=True)
    if ends:
        writer.close()
    before = sorted(tmp_path.rglob("*"))
    with opened(tmp_path / "run") as run:
        with pytest.warns(UserWarning, match="not protected from deletion") as warned:
            steps = [one.view["w"][...].tolist() for one in ray_dcp.follow(run, timeout_s=0.01)]
        assert steps == [state(step)["w"].tolist() for step in (1, 2)]
        # Nothing that only who writes can do.
        assert "mounted writable" not in str(warned[0].message)
        assert len({str(one.message) for one in warned}) == 1
        manager = manager_of(run, read_only=True)
        with pytest.warns(UserWarning, match="may not write there"), manager.reading(2) as place:
            assert place.endswith("step-00000002")
        with pytest.warns(UserWarning, match="may remove the step meanwhile"):
            assert [*manager.follow(timeout_s=0.01)] == [2]
        target = state(0)
        assert manager.restore("auto", target).step == 2
        assert torch.equal(target["w"], state(2)["w"])
        assert [one.step for one in ray_dcp.open_run(run)] == [1, 2]
        target = state(0)
        ray_dcp.load_newest(target, run)
        assert torch.equal(target["w"], state(2)["w"])
        if isinstance(run, Path):
            copied = CliRunner().invoke(main, ["cp", str(run), str(tmp_path / "copy")])
            assert copied.exit_code == 0, copied.output
            assert copied.stderr.count("is not protected from deletion") == 1
            shutil.rmtree(tmp_path / "copy")
    assert sorted(tmp_path.rglob("*")) == before
    writer.close()


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


POLICIES = st.recursive(
    st.one_of(
        st.builds(LatestN, st.integers(1, 4)),
        st.builds(BestN, st.integers(1, 3), st.just("loss"), st.sampled_from(["min", "max"])),
        st.builds(KeepEverySteps, st.integers(1, 4)),
        st.builds(KeepEveryHours, st.floats(0.2, 3.0)),
    ),
    lambda some: st.one_of(
        st.builds(lambda a, b: a | b, some, some),
        st.builds(lambda a, b: a & b, some, some),
        st.builds(lambda a: ~a, some),
    ),
    max_leaves=4,
)


@example(policy=~BestN(1, "loss", "max"), losses=[2, 5, 1], at=1, seed=0)
@example(policy=~BestN(1, "loss", "min"), losses=[2, 0, 3], at=1, seed=0)
@example(policy=~BestN(1, "loss") & ~BestN(2, "loss", "max"), losses=[1, 1, 1, 1, 2], at=3, seed=0)
@given(
    policy=POLICIES,
    losses=st.lists(st.integers(0, 5), min_size=2, max_size=8),
    at=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_what_is_not_known_of_a_step_only_makes_more_stay(policy, losses, at, seed):
    order = random.Random(seed)
    steps = [
        StepFacts(step=step, created_s=3600.0 * step * order.uniform(0.8, 1.2),
                  metrics={"loss": float(loss)})
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    one = steps[at % len(steps)]
    others = [facts for facts in steps if facts is not one]
    unsure = superfluous(others, policy, unknown=[replace(one, metrics={})])
    assert set(unsure) <= set(superfluous(steps, policy))
    assert one.step not in unsure


# --- ranks together, when one of them dies or its storage hangs ---------------------------------


def items_of(step=0):
    return {"model": {"w": torch.full((8,), float(step))}, "data": {"at": step}}


def save_items(root, step, dies=lambda *_: False):
    """Saves a step of two items on two ranks; returns how each of them ended."""

    def work(rank):
        items = {"model": Item(), "data": Item()}
        manager = CheckpointManager(root, 1, items=items, chkpt_on_preemption=False)
        return manager.save(step, items_of(step))

    return run_as_ranks(work, 2, dies)


def commits(request, exchange):
    return (
        isinstance(request, Exchange)
        and "the commit of step" in request.tag
        and request.tag.endswith(exchange)
    )


def steps_at(root):
    return CheckpointManager(root, read_only=True).all_steps()


def test_a_step_that_was_committed_before_a_rank_died_is_told_as_committed(tmp_path):
    ended = save_items(
        tmp_path, 1, lambda rank, request, after: rank == 1 and commits(request, "decided")
    )
    assert isinstance(ended[1], DeadRankError)
    assert (ended[0], steps_at(tmp_path)) == (True, [1])


def test_a_step_that_is_told_as_failed_never_appears(tmp_path):
    ended = save_items(
        tmp_path, 1, lambda rank, request, after: not rank and after and commits(request, "facts")
    )
    assert isinstance(ended[0], DeadRankError)
    assert isinstance(ended[1], errors.ParticipantError)
    assert steps_at(tmp_path) == []
    # Rank 1 has ended the attempt, so that rank 0 could not commit it any more.
    (record,) = (tmp_path / "step-00000001").glob("manifest-*.json")
    assert b'"kind":"abort"' in record.read_bytes()


@pytest.fixture
def hangs():
    """What waits until the end of the test."""
    over = threading.Event()
    yield over.wait
    over.set()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_decision_that_waits_for_the_storage_for_ever_ends_in_time_on_all_ranks(
    hangs, world_size
):
    from ray_dcp.saving import session_for

    def work(_):
        agree(
            session_for(None, False), "what to do", lambda _: hangs(), SaveOptions(), timeout_s=0.2,
        )  # fmt: skip

    for error in run_as_ranks(work, world_size):
        assert isinstance(error, errors.StorageError)
        assert "what to do still waits" in str(error)


def test_a_step_can_be_saved_after_its_decision_was_left(tmp_path, monkeypatch, hangs):
    item = Item(save_options=SaveOptions(plan_timeout_s=5.0))
    manager = CheckpointManager(tmp_path, 1, item=item, chkpt_on_preemption=False)
    manager.save(1, items_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "list", lambda self, prefix="": hangs() and [])
        with pytest.raises(errors.StorageError, match="still waits for it"):
            manager.save(2, items_of(2))
    assert manager.save(2, items_of(2))
    manager.close()
    assert steps_at(tmp_path) == [1, 2]


def test_where_one_rank_has_no_space_all_save_once_more_after_retention(tmp_path, monkeypatch):
    left, append = [1], LocalWriter._append

    def full(self, data):
        if left and "/step-00000003/__1_" in self._path:
            left.pop()
            raise os_failure(OSError(errno.ENOSPC, ""), "write", self._key, self._path)
        append(self, data)

    monkeypatch.setattr(LocalWriter, "_append", full)

    def work(rank):
        manager = CheckpointManager(tmp_path, 1, max_to_keep=2, chkpt_on_preemption=False)
        for step in (1, 2, 3):
            assert manager.save(step, {f"w{rank}": torch.full((1 << 18,), float(step))})
        return True

    assert run_as_ranks(work, 2, lambda *_: False) == [True, True]
    assert left == []
    assert steps_at(tmp_path) == [2, 3]


# --- the folders of items -------------------------------------------------------------------------


def manager_at(root: Path, **given: Any) -> CheckpointManager:
    return CheckpointManager(root, 1, items={"model": Item()}, **given)


def item_state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value)}}


def step(root: Path, number: int) -> Path:
    return root / f"step-{number:08}"


def test_what_the_user_keeps_in_a_step_s_folder_stays(tmp_path: Path) -> None:
    own = [step(tmp_path, 5) / name for name in ("ema", "eval.best", "model-old", "model.x")]
    with manager_at(tmp_path) as made:
        made.save(5, item_state(1))
        for path in own:
            ray_dcp.save({"ema": torch.ones(2)}, checkpoint_id=path)
        made.save(5, item_state(2), replace=True)
        assert not (step(tmp_path, 5) / "model").exists()
        made.save(6, item_state(6))
        made.delete(5)
    assert all(ray_dcp.verify(path).ok for path in own)
    assert not (step(tmp_path, 5) / "model.1").exists()


@pytest.mark.parametrize(
    ("folder", "key"), [("model", "manifest-"), ("", "chunks."), ("", "manifest-")]
)
def test_a_writer_that_is_taken_over_before_its_step_is_committed_does_not_commit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, key: str
) -> None:
    """The next writer finds items without a step, as a crash leaves them, and removes them."""
    first = manager_at(tmp_path, takeover=True)
    writes = LocalStorage.write
    paused_in = str(step(tmp_path, 5) / folder)

    def write(storage: LocalStorage, name: str, *args: Any, **how: Any) -> Any:
        if storage.url != paused_in or not name.startswith(key):
            return writes(storage, name, *args, **how)
        monkeypatch.undo()
        # Its items are committed before the next writer comes, and its step after it.
        written = writes(storage, name, *args, **how) if folder else None
        with manager_at(tmp_path, takeover=True) as second:
            second.save(6, item_state(6))
            second.join()
        return written if folder else writes(storage, name, *args, **how)

    monkeypatch.setattr(LocalStorage, "write", write)
    with pytest.raises(errors.CheckpointExistsError):
        first.save(5, item_state(5))
    first.close()
    with CheckpointManager(tmp_path, items={"model": Item()}, read_only=True) as reader:
        assert reader.all_steps() == [6]
    assert not list(step(tmp_path, 5).rglob("*.distcp"))


def test_a_deletion_that_was_ended_meanwhile_does_not_fail_the_save_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who protects a step from a deletion that is announced leaves an abort record there."""
    shared = LocalStorage(str(tmp_path / ".manager"))

    def ended() -> None:
        mark = Announced(5, "0123456789abcdef", "step-00000005")
        shared.write(mark.key, b"")
        fence(shared, lambda name: LocalStorage(str(tmp_path / name)), "it is read", 5)

    with manager_at(tmp_path) as made:
        made.save(5, item_state(1))
        interpose(monkeypatch, LocalStorage, "write", "*/model.1/manifest-*", ended)
        made.save(5, item_state(2), replace=True)
        found = item_state(0)
        made.restore(5, found)
    assert found["model"]["w"].tolist() == [2.0] * 300


def test_a_step_is_copied_and_verified_with_its_items(tmp_path: Path) -> None:
    with manager_at(tmp_path / "run") as made:
        made.save(5, item_state(1), metrics={"loss": 1.0})
        made.save(5, item_state(2), replace=True, metrics={"loss": 2.0})
    other = step(tmp_path / "other", 5)
    copied = ray_dcp.copy(step(tmp_path / "run", 5), other)
    assert copied.verify().ok
    with manager_at(tmp_path / "other") as reader:
        found = item_state(0)
        reader.restore(5, found)
        assert reader.step_info(5).metrics == {"loss": 2.0}
    assert found["model"]["w"].tolist() == [2.0] * 300
    (data,) = other.glob("model*/*.distcp")
    flip(data, 600)
    (problem, *_) = ray_dcp.open(other).verify().problems
    assert (problem.file, problem.fqn) == (f"{data.parent.name}/{data.name}", "w")
    shutil.rmtree(data.parent)
    assert [one.file for one in ray_dcp.verify(other).problems] == [data.parent.name]


def test_a_copied_step_that_is_replaced_is_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items lie in folders that were named for records which did not come along."""
    with manager_at(tmp_path / "run") as made:
        made.save(5, item_state(1))
        made.save(5, item_state(2), replace=True)
    other = step(tmp_path / "other", 5)
    ray_dcp.copy(step(tmp_path / "run", 5), other)
    full = errors.StorageError("the disk is full")
    with manager_at(tmp_path / "other") as made:
        interpose(monkeypatch, LocalStorage, "write", f"{other}/chunks.*", full, times=None)
        with pytest.raises(errors.StorageError, match="full"):
            made.save(5, item_state(3), replace=True)
        monkeypatch.undo()
        found = item_state(0)
        made.restore(5, found)
        assert found["model"]["w"].tolist() == [2.0] * 300
        made.save(5, item_state(4), replace=True)
        made.restore(5, found)
        assert found["model"]["w"].tolist() == [4.0] * 300
    assert len([folder for folder in other.iterdir() if folder.is_dir()]) == 1


def test_a_copy_of_a_step_that_fails_leaves_none_of_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_at(tmp_path / "run") as made:
        made.save(5, item_state(1))
    other = step(tmp_path / "other", 5)
    full = errors.StorageError("the disk is full")
    # Its own file; those of its items lie deeper.
    interpose(monkeypatch, LocalStorage, "open_writer", f"{other}/__*", full, times=None)
    with pytest.raises(errors.StorageError, match="full"):
        ray_dcp.copy(step(tmp_path / "run", 5), other)
    assert not list(other.rglob("*.distcp"))
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.open(other / "model")


def test_seconds_may_be_numbers_of_any_class(tmp_path):
    ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "run" / "step-1")
    seconds = Fraction(1, 100)
    found = ray_dcp.follow(tmp_path / "run", timeout_s=seconds, poll_s=seconds)
    assert [one.step for one in found] == [1]
    assert type(WorkerOptions(run_timeout_s=Fraction(3, 2)).run_timeout_s) is float
