"""Which steps are saved and kept: pure policies, and what ranks decide together."""

from __future__ import annotations

import errno
import math
import random
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp import errors
from ray_dcp.commit_protocol.messages import Exchange, Target
from ray_dcp.errors import InvalidRequestError, ParticipantError, StorageError
from ray_dcp.io.records import Announced, fence
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
from ray_dcp.manager.collective_actions import agree
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
from ray_dcp.options import SaveOptions
from ray_dcp.store.local import LocalStorage, LocalWriter
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import os_failure
from tests.support.checkpoints import flip
from tests.support.manager_places import root_of
from tests.support.storages import interpose
from tests.support.threads import DeadRankError, run_as_ranks


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
        ({1: 2.0, "loss": 1.0}, "texts as names"), ({"loss": 10**400}, "that a float can hold"),
        ({"loss": Fraction(10**400)}, "that a float can hold"),
        ({"loss": torch.ones(2)}, "must be a number"), ({"loss": Decimal("NaN")}, "which is NaN"),
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


def state(step=0):
    return {"model": {"w": torch.full((8,), float(step))}, "data": {"at": step}}


def save_items(root, step, dies=lambda *_: False):
    """Saves a step of two items on two ranks; returns how each of them ended."""

    def work(rank):
        items = {"model": Item(), "data": Item()}
        manager = CheckpointManager(root, 1, items=items, chkpt_on_preemption=False)
        return manager.save(step, state(step))

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
    assert isinstance(ended[1], ParticipantError)
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
        assert isinstance(error, StorageError)
        assert "what to do still waits" in str(error)


def test_a_step_can_be_saved_after_its_decision_was_left(tmp_path, monkeypatch, hangs):
    item = Item(save_options=SaveOptions(plan_timeout_s=5.0))
    manager = CheckpointManager(tmp_path, 1, item=item, chkpt_on_preemption=False)
    manager.save(1, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "list", lambda self, prefix="": hangs() and [])
        with pytest.raises(StorageError, match="still waits for it"):
            manager.save(2, state(2))
    assert manager.save(2, state(2))
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
