"""Saves before the allocation ends: when they are due, by whose clock, beside loader workers."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import bounds
from ray_dcp.errors import InvalidRequestError
from ray_dcp.manager import AtSteps, BeforeEnd, EverySteps, SaveFacts, allocation_end, root_writer
from ray_dcp.manager.allocation_end import SLURM_END
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.settings import Settings
from ray_dcp.session import ray_calls
from tests.support.processes import eventually
from tests.support.programs.forks import Programs
from tests.unit.test_following import manager_of, state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clocks of rank 0: the one of the day is 10**9 seconds ahead."""
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic, clock.time = lambda: clock.now_s, lambda: 1e9 + clock.now_s
    monkeypatch.setattr(root_writer, "time", clock)
    return clock


def writer_of(run: Path, policy: Any) -> Writer:
    return Writer(Root(Target(str(run))), Settings(policy=policy))


def test_a_save_is_due_while_two_fit_and_again_while_one_does(tmp_path: Path, clock: Any):
    """A save takes 40 s, 50 with the margin, and a step 10 s: due at 110 s and at 60 s."""
    writer = writer_of(tmp_path, BeforeEnd(1e9 + 1000.0, least_s=5) | AtSteps(3))
    begun, step = [], 0
    while clock.now_s < 1000.0:
        step, clock.now_s = step + 1, clock.now_s + 10.0
        if writer.due(step, False):
            begun.append((step, 1000.0 - clock.now_s))
            place = writer.begin(step)
            clock.now_s += 40.0
            ray_dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / place.name, no_dist=True)
            writer.finish(place, True)
    writer.close()
    assert begun == [(3, 970.0), (85, 110.0), (86, 60.0)]
    assert [one.step for one in ray_dcp.open(tmp_path) if one.is_readable] == [3, 85, 86]


@pytest.mark.parametrize("is_failed", [True, False, None])
def test_a_save_that_fails_is_due_again_at_the_next_step(
    tmp_path: Path, clock: Any, is_failed: bool | None
):
    """None: it is in progress. The next step would be due only 60 s before the end."""
    writer = writer_of(tmp_path, BeforeEnd(1e9 + 1000.0, least_s=60))
    clock.now_s = 879.0
    assert not writer.due(1, False)
    clock.now_s = 881.0
    assert writer.due(2, False)
    place = writer.begin(2)
    clock.now_s = 882.0
    if is_failed is not None:
        writer.finish(place, not is_failed)
    assert writer.due(3, False) is (is_failed is True)


@settings(max_examples=200)
@given(
    step_s=st.floats(0.5, 50.0),
    save_s=st.floats(0.1, 200.0),
    slower=st.floats(1.0, 1.2),
    least_s=st.floats(1.0, 100.0),
    begins_s=st.floats(0.0, 2000.0),
    ends_s=st.floats(0.0, 3000.0),
)
def test_before_any_end_a_save_commits_that_loses_less_than_two_and_a_step(
    step_s, save_s, slower, least_s, begins_s, ends_s
):
    """Of training that begins at any time, also near the end; saves vary by 1.2."""
    policy, now_s, kept_s, committed = BeforeEnd(least_s=least_s), begins_s, begins_s, [begins_s]
    while now_s < ends_s:
        now_s += step_s
        facts = SaveFacts(
            step=1, left_s=ends_s - now_s, unsaved_s=now_s - kept_s, durable_s=save_s,
            step_s=step_s,
        )  # fmt: skip
        if policy.due(facts):
            kept_s, now_s = now_s, now_s + save_s * slower
            if now_s <= ends_s:
                committed.append(kept_s)
    expected_s = max(least_s, 1.25 * save_s)
    left_s = ends_s - begins_s
    if left_s > 2 * expected_s + 2 * step_s:
        assert ends_s - committed[-1] <= 2 * expected_s + step_s
    assert len(committed) <= 3
    # Whoever has no more time than for one save, makes that one.
    if expected_s + 2 * step_s < left_s:
        assert len(committed) > 1


def test_the_end_is_that_of_slurm_or_the_earliest_that_is_given(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
):
    def left_s(policy: Any) -> float | None:
        return writer_of(tmp_path, policy).facts(1).left_s

    clock.now_s = 100.0
    monkeypatch.setenv(SLURM_END, "1000000700")
    assert left_s(EverySteps(1)) is None
    assert left_s(BeforeEnd()) == 600
    assert left_s(EverySteps(9) | ~BeforeEnd(np.int64(1e9 + 350))) == 250
    at = datetime.fromtimestamp(1e9 + 101, timezone(timedelta(hours=3)))
    assert left_s(BeforeEnd() | (BeforeEnd(at) & EverySteps(2))) == 1
    found = iter([None, 1e9 + 150, at])
    writer = writer_of(tmp_path, BeforeEnd(lambda: next(found)))
    assert [writer.facts(1).left_s for _ in range(3)] == [None, 50, 1]


@pytest.mark.parametrize(
    ("value", "policy", "what"),
    [
        (None, BeforeEnd(), "SLURM_JOB_END_TIME is not set where rank 0 runs; give BeforeEnd(end="),
        ("soon", BeforeEnd(), "SLURM_JOB_END_TIME is 'soon'"),
        ("nan", BeforeEnd(), "SLURM_JOB_END_TIME is 'nan'"),
        ("1", BeforeEnd(lambda: 1 / 0), "raised ZeroDivisionError: division by zero"),
        ("1", BeforeEnd(lambda: "noon"), "InvalidRequestError: BeforeEnd.end must be seconds"),
    ],
)  # fmt: skip
def test_an_end_that_is_not_known_is_logged_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, value: str, policy: Any, what: str
):
    monkeypatch.delenv(SLURM_END, raising=False)
    if value is not None:
        monkeypatch.setenv(SLURM_END, value)
    with caplog.at_level(logging.WARNING), manager_of(tmp_path, save_policy=policy) as manager:
        assert not any(manager.save(step, state(step)) for step in (1, 2, 3))
    (record,) = caplog.records
    assert what in record.getMessage()


@pytest.mark.parametrize(
    "make",
    [
        lambda: BeforeEnd("18:00"), lambda: BeforeEnd(True), lambda: BeforeEnd(float("inf")),
        lambda: BeforeEnd(datetime(2026, 1, 1)),
        lambda: BeforeEnd(least_s=0), lambda: BeforeEnd(1.0, least_s="1"),
    ],
)  # fmt: skip
def test_an_end_that_is_no_time_is_refused(make: Any):
    with pytest.raises(InvalidRequestError, match="BeforeEnd"):
        make()


def test_a_table_of_nodes_that_does_not_answer_holds_up_one_step_only(
    monkeypatch: pytest.MonkeyPatch,
):
    answered, waits = threading.Event(), list[float]()

    def drained() -> dict[str, float]:
        answered.wait()
        return {"a node": 5.0}

    def note(futures: Any, timeout_s: float) -> None:
        waits.append(timeout_s)

    monkeypatch.delenv(SLURM_END, raising=False)
    monkeypatch.setattr(ray_calls, "draining_nodes", drained)
    monkeypatch.setattr(allocation_end, "wait_any", note)
    end = allocation_end.AllocationEnd([BeforeEnd()])
    assert [end.seconds(["a node", ""]) for _ in range(3)] == [None] * 3
    assert waits == [bounds.NODES_ANSWER_S]
    answered.set()
    assert eventually(lambda: end.seconds() == 5.0)


LOADER = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
import ray_dcp

def ignore(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if __name__ == "__main__":
    os.setpgrp()
    loader = DataLoader(range(40), num_workers=2, worker_init_fn=ignore, prefetch_factor=1)
    with ray_dcp.CheckpointManager(sys.argv[1], 1000, no_dist=True) as manager:
        for step, batch in enumerate(loader, 1):
            if step == 5:  # to the workers, too
                os.killpg(0, signal.SIGTERM)
            if manager.save(step, {"batch": batch}):
                print("saved", step)
        print("batches", step)
"""


def test_sigterm_to_a_rank_and_its_loader_workers_saves_and_goes_on(
    tmp_path: Path, programs: Programs
):
    program = tmp_path / "program.py"
    program.write_text(LOADER)
    (ended,) = programs.run(str(program), str(tmp_path / "run"))
    assert (ended.returncode, ended.stdout.split()) == (0, ["saved", "5", "batches", "40"]), (
        ended.stderr
    )
    assert ray_dcp.open(tmp_path / "run").step("latest").step == 5
