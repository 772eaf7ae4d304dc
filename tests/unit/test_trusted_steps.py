"""Steps that are trusted: verdicts, what is restored by them, and what retention never deletes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, InvalidRequestError
from ray_dcp.io.announced_deletions import Announced, announced
from ray_dcp.manager import BestN, LatestN, StepFacts, Trust
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.retention import superfluous
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.settings import Settings
from ray_dcp.store.local import LocalStorage
from tests.support.checkpoints import data_file, flip
from tests.unit.test_following import POLICIES, followed, manager_of, state

OK = "eval_ok"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps: 10 and 30 passed the evaluation, 20 failed, 40 was NaN, 50 has no verdict."""
    with manager_of(tmp_path / "run", trust=OK) as manager:
        for step in (10, 20, 30, 40, 50):
            manager.save(step, state(step))
    for step, value in ((10, 1), (20, 0), (30, 0.5), (40, math.nan)):
        ray_dcp.record_metrics(tmp_path / "run", step, {OK: value})
    return tmp_path / "run"


def restored(run: Path, step: Any, **given: Any) -> int:
    into = state(0)
    with manager_of(run, read_only=True) as manager:
        report = manager.restore(step, into, **given)
    assert into["w"][0] == report.step
    return report.step


def newest(run: Path, **given: Any) -> int | None:
    into = state(0)
    report = ray_dcp.load_newest(into, run, no_dist=True, **given)
    assert into["w"][0] == report.step
    return report.step


def test_all_readers_find_the_same_newest_trusted_step(run: Path):
    with manager_of(run, read_only=True) as manager:
        assert manager.latest_step() == 50
        assert manager.latest_step(trust=OK) == 30
        assert next(manager.follow(trust=OK, timeout_s=0)) == 30
        assert list(manager.follow(trust=OK, timeout_s=0, newer_than=30)) == []
    assert [restored(run, step, trust=OK) for step in ("auto", "latest")] == [30, 30]
    assert followed(run, trust=OK) == [10, 30]
    assert [newest(run, trust=OK, **more) for more in ({}, {"at_most": 29})] == [30, 10]
    assert newest(run, trust=lambda facts: facts.metrics.get(OK) == 0) == 20
    view = ray_dcp.open(run)
    assert view.step("trusted").step == view.step(f"trusted:{OK}").step == 30
    assert ray_dcp.open_checkpoint(f"{run}@trusted")["w"][0] == 30
    assert [one.is_trusted for one in view] == [True, False, True, False, None]
    listed = CliRunner().invoke(main, ["ls", str(run), "--json"])
    assert [one["trusted"] for one in json.loads(listed.stdout)] == [True, False, True, False, None]
    shown = CliRunner().invoke(main, ["ls", str(run)])
    assert "TRUST" in shown.stdout
    steps = [line.split() for line in shown.stdout.splitlines() if line.startswith("step-")]
    assert [words.count("yes") for words in steps] == [1, 0, 1, 0, 0]
    copied = CliRunner().invoke(main, ["cp", str(run), str(run.parent / "copy")])
    assert copied.exit_code == 0, copied.output
    assert ray_dcp.open(run.parent / "copy").step("trusted").step == 30


def test_a_tag_and_a_function_are_verdicts_too(run: Path):
    with manager_of(run) as manager:
        manager.tag(20, OK)
        manager.tag(40, "release")
    assert restored(run, "auto", trust="release") == 40
    assert ray_dcp.open(run).step("trusted:release").step == 40
    # A person's tag is worth more than an evaluator's 0.
    assert followed(run, trust=OK) == [10, 20, 30]
    assert restored(run, "auto", trust=lambda one: one.metrics.get(OK, 0) > 0.5) == 10
    with manager_of(run) as manager:
        manager.tag(20, OK, remove=True)
        for step, loss in ((10, 0.2), (20, 0.1), (30, 0.3)):
            ray_dcp.record_metrics(run, step, {"loss": loss})
        assert manager.best_step("loss") == 20
    with manager_of(run, retention=BestN(1, "loss", later=True), read_only=True) as manager:
        assert manager.restore("best", state(0), trust=OK).step == 10


def test_a_damaged_trusted_step_makes_way_for_an_earlier_trusted_one(run: Path):
    file = data_file(run / "step-00000030")
    flip(file, file.stat().st_size // 2)
    for offset in range(0, file.stat().st_size, 64):
        flip(file, offset)
    with pytest.warns(UserWarning, match="Restored step 10 of .* instead of the newer step 30"):
        assert restored(run, "auto", trust=OK) == 10


@pytest.mark.parametrize(
    ("step", "trust", "error", "what"),
    [
        ("auto", "nobody", CheckpointNotFoundError, "that is trusted by 'nobody' in .* found "
         "steps 10, 20, 30, 40, 50, without such a verdict: give one, or restore without"),
        ("latest", lambda one: False, CheckpointNotFoundError, "without such a verdict"),
        (30, OK, InvalidRequestError, "step 30 was chosen by its number"),
        ("auto", "", InvalidRequestError, "trust must be the name of a metric or a tag"),
        ("auto", 3, InvalidRequestError, "trust must be the name"),
        ("auto", "x" * 200, InvalidRequestError, "at most 150 letters"),
        ("auto", lambda one: one.metrics["no"], CheckpointError, "it raised KeyError: 'no'"),
    ],
)  # fmt: skip
def test_a_restore_by_trust_that_can_not_be_is_refused_by_name(run, step, trust, error, what):
    into = state(0)
    with manager_of(run, read_only=True) as manager, pytest.raises(error, match=what):
        manager.restore(step, into, trust=trust)
    assert into["w"][0] == 0


def test_what_is_no_trust_of_a_manager_is_refused(tmp_path: Path):
    for wrong, what in (
        ({"hold_s": 3.0}, "so that it needs trust="),
        ({"trust": OK, "hold_s": -1}, "hold_s must be a number above 0"),
        ({"trust": 1.5}, "trust must be"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            manager_of(tmp_path, **wrong)


def test_an_address_by_trust_that_nothing_has_names_what_there_is(run: Path):
    with pytest.raises(CheckpointNotFoundError, match=r"'eval_o', or a metric .* eval_ok; did you"):
        ray_dcp.open(run).step("trusted:eval_o")
    with pytest.raises(InvalidRequestError, match="names a step of the run"):
        ray_dcp.average([f"{run}@10", f"{run}@30"], f"{run}@trusted:x")


def test_retention_keeps_the_newest_trusted_step_however_many_follow(tmp_path: Path):
    found = []
    with manager_of(tmp_path, retention=LatestN(1), trust=OK) as manager:
        for step in range(1, 7):
            manager.save(step, state(step))
            manager.join()
            found.append(manager.all_steps())
            if step in (2, 4):
                ray_dcp.record_metrics(tmp_path, step, {OK: 1})
    assert found == [[1], [2], [2, 3], [2, 4], [4, 5], [4, 6]]
    assert restored(tmp_path, "auto", trust=OK) == 4


def test_a_verdict_that_comes_while_a_pass_decides_counts(tmp_path: Path):
    """By a scan after the announcement, as what this process knew is older."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    writer = Writer(Root(Target(str(tmp_path))), Settings(kept=LatestN(1), trust=Trust(OK)))
    writer.take_lease()
    found = writer._scan()

    def scan_late():
        ray_dcp.record_metrics(tmp_path, 2, {OK: 1})
        return found_later()

    assert {going.step for going in writer._find_superfluous(found)} == {1, 2}
    found_later, writer._scan = writer._scan, scan_late
    writer.remove_superfluous()
    writer.close()
    with manager_of(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [2, 3]


@pytest.mark.parametrize("how", ["record 0", "record NaN", "untag", "untag by view"])
def test_a_verdict_that_is_taken_back_calls_off_what_was_decided_by_it(tmp_path: Path, how: str):
    """Step 1 was to go since step 2 was trusted."""
    with manager_of(tmp_path, trust=OK) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.tag(2, OK)
        shared = LocalStorage(str(tmp_path / ".manager"))
        shared.write(Announced(1, "0123456789abcdef", "step-00000001").key, b"")
        ray_dcp.record_metrics(tmp_path, 2, {OK: 1})
        assert len(announced(shared)) == 1
        if how.startswith("record"):
            ray_dcp.record_metrics(tmp_path, 2, {OK: float(how.removeprefix("record "))})
        elif how == "untag":
            manager.tag(2, OK, remove=True)
        else:
            ray_dcp.open(tmp_path).tag(2, OK, remove=True)
        assert announced(shared) == []


def test_a_step_is_held_until_its_verdict_or_its_time(tmp_path: Path):
    with manager_of(tmp_path, retention=LatestN(1), trust=OK, hold_s=3600) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
        manager.join()
        assert manager.all_steps() == [1, 2, 3, 4]
        ray_dcp.record_metrics(tmp_path, 1, {OK: 0})
        ray_dcp.record_metrics(tmp_path, 2, {OK: 1})
        manager.save(5, state(5))
        manager.join()
        assert manager.all_steps() == [2, 3, 4, 5]
    steps = [StepFacts(step=step, created_s=100.0 * step) for step in (1, 2, 3, 4)]
    held = {"policy": LatestN(1), "trust": Trust(OK, hold_s=150)}
    assert superfluous(steps, **held, now_s=400) == (1, 2)
    assert superfluous(steps, **held, now_s=450) == (1, 2, 3)
    # After the clock of rank 0 was set back, more stays.
    assert superfluous(steps, **held, now_s=0) == ()


def test_steps_with_nan_are_saved_and_never_all_that_is_left(tmp_path: Path):
    with manager_of(tmp_path, retention=LatestN(2)) as manager:
        for step, loss in enumerate((0.5, 0.4, *4 * [math.nan])):
            assert manager.save(step, state(step), metrics={"loss": loss})
        manager.join()
        assert manager.all_steps() == [1, 4, 5]
        manager.save(6, state(6), metrics={"loss": 0.9})
        manager.join()
        assert manager.all_steps() == [5, 6]
    bad = [StepFacts(step=step, metrics={"loss": math.nan}) for step in range(4)]
    assert superfluous(bad, LatestN(1)) == (1, 2)


def test_making_room_does_not_count_on_the_step_that_is_to_come(tmp_path: Path):
    """The save that needs the room may fail again."""
    with manager_of(tmp_path) as manager:
        for step, loss in ((1, 0.5), (2, math.nan), (3, math.nan)):
            manager.save(step, state(step), metrics={"loss": loss, OK: float(step == 1)})
    trust = Trust(lambda one: one.metrics.get(OK, 1) == 1)
    writer = Writer(Root(Target(str(tmp_path))), Settings(kept=LatestN(1), trust=trust))
    writer.take_lease()
    assert writer.make_room(4, {"loss": 0.5, OK: 1})
    writer.close()
    with manager_of(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [1, 3]


def test_a_function_that_raises_deletes_nothing(tmp_path: Path):
    def broken(one: StepFacts) -> bool:
        return one.metrics["missing"] > 0

    with pytest.raises(CheckpointError, match=r"it raised KeyError: 'missing' \(.*No step is rem"):
        superfluous([StepFacts(step=1), StepFacts(step=2)], LatestN(1), trust=Trust(broken))
    with manager_of(tmp_path, retention=LatestN(1), trust=broken) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.join()
        assert manager.all_steps() == [1, 2]


VALUES = st.sampled_from([0.0, 1.0, 2.0, math.nan])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.dictionaries(st.sampled_from(["loss", OK]), VALUES)),
        st.tuples(st.just("verdict"), st.integers(0, 9), VALUES),
        st.tuples(st.just("tag"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("pass"), st.sets(st.integers(0, 9), max_size=2)),
    ),
    min_size=8,
    max_size=40,
)


@settings(max_examples=150)
@given(
    policy=POLICIES,
    hold_s=st.sampled_from([None, 2.0, 6.0]),
    by_name=st.booleans(),
    order=st.sampled_from(["increasing", "any"]),
    events=EVENTS,
)
def test_no_history_loses_the_newest_trusted_step_or_all_that_is_not_nan(
    policy, hold_s, by_name, order, events
):
    trust = Trust(OK if by_name else lambda one: one.metrics.get(OK), hold_s)
    steps: list[StepFacts] = []
    for now_s, event in enumerate([*events, ("pass", set())]):
        match event:
            case "save", metrics:
                # Numbers go down in one order, as of a run that began anew beside higher steps.
                number = len(steps) and max(one.step for one in steps) + 1
                if order == "any":
                    number = 1000 - now_s
                facts = StepFacts(step=number, created_s=now_s, order_s=now_s, metrics=metrics)
                steps.append(facts)
            case "verdict", place, value if place < len(steps):
                found = {**steps[place].metrics, OK: value}
                steps[place] = replace(steps[place], metrics=found)
            case "tag", place, is_set if place < len(steps):
                steps[place] = replace(steps[place], tags=frozenset({OK} if is_set else ()))
            case "pass", places:
                unknown = [one for place, one in enumerate(steps) if place in places]
                known = [one for one in steps if one not in unknown]
                goes = superfluous(
                    known, policy, unknown=unknown, order=order, trust=trust, now_s=now_s
                )
                left = [one for one in steps if one.step not in goes]
                check_pass(known, [one for one in known if one in left], trust, now_s)
                assert all(one in left for one in unknown)
                steps = left


def check_pass(before: list[StepFacts], left: list[StepFacts], trust: Trust, now_s: float) -> None:
    """Checks what a pass of retention left, oldest first."""
    trusted = [one for one in before if trust.verdict(one)]
    assert trusted[-1:] == [one for one in left if trust.verdict(one)][-1:]
    sound = [one for one in before if not any(map(math.isnan, one.metrics.values()))]
    assert not sound or any(one in left for one in sound)
    assert sound or len(left) >= min(len(before), 2)
    assert before[-1:] == left[-1:]
    waits = [one for one in before if trust.verdict(one) is None]
    if trust.hold_s is not None:
        assert all(one in left for one in waits if now_s - one.created_s < trust.hold_s)


def test_the_newest_trusted_step_is_loaded_past_one_that_is_damaged(run: Path):
    data_file(run / "step-00000030").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-00000010 instead of the newer"):
        assert newest(run, trust=OK) == 10
    with pytest.raises(CheckpointNotFoundError, match=r"trusted by 'eval_ok' .*newer than 30"):
        newest(run, trust=OK, newer_than=30)
    with pytest.raises(CheckpointNotFoundError, match=r"trusted by 'release'.*load without trust="):
        newest(run, trust="release")
    with pytest.raises(InvalidRequestError, match="trust must be the name"):
        newest(run, trust=3)
