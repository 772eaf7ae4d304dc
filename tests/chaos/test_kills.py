"""Real kills under real Ray: whoever dies or freezes is named, and a whole checkpoint stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import ray_dcp
from ray_dcp.errors import CommitUnknownError, DeadlineError, ParticipantError
from ray_dcp.runtime.workers import WorkerGroup
from tests.attempts import one_error, save_sound, step_that_loads
from tests.chaos import victims
from tests.polling import eventually

pytestmark = pytest.mark.usefixtures("ray_session")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks():
    with WorkerGroup(3, run_timeout_s=90, release_s=15) as group:
        yield group


@pytest.fixture
def place(ranks, tmp_path: Path):
    """Where step 1 stands; after the test step 1 or 2 must, and a save of step 3 must work."""
    path = tmp_path / "c"
    ranks.run(save_sound, str(path), 1)
    yield path
    assert stands(ranks, path) in (1, 2)
    ranks.run(save_sound, str(path), 3)
    assert stands(ranks, path) == 3


def stands(ranks: WorkerGroup, path: Path) -> int:
    """Returns the step that loads whole on every rank; nothing of it is damaged."""
    report = ray_dcp.verify(path)
    assert report.ok, report.problems
    (step,) = set(ranks.run(step_that_loads, str(path)))
    return step


def told(error: ParticipantError, rank: int) -> Exception:
    """Returns what a rank that lived was told."""
    return error.failures[rank][0]


@pytest.mark.parametrize(
    ("victim", "death"),
    [
        (1, victims.deadly_to_pickle),
        (0, victims.deadly_to_pickle),
        (1, victims.too_large_to_survive),
    ],
    ids=["rank 1 while it plans", "rank 0 while it plans", "rank 1 in the middle of its file"],
)
def test_a_rank_that_dies_is_named_on_the_others_in_seconds(ranks, place, victim, death):
    started_s = time.monotonic()
    with pytest.raises(ParticipantError, match=f"rank {victim} died") as caught:
        ranks.run(victims.save_with, str(place), victim, death)
    assert time.monotonic() - started_s < 15
    for rank in {0, 1, 2} - {victim}:
        error = told(caught.value, rank)
        assert type(error) is ParticipantError
        assert error.rank == victim
        assert f"rank {victim}" in error.message
        assert str(place) in str(error)
    torn = [file.stat().st_size for file in place.glob(".tmp-*__1_*")]
    assert torn == ([1 << 20] if death is victims.too_large_to_survive else [])
    ranks.resize(3)
    assert stands(ranks, place) == 1


@pytest.mark.parametrize("when", ["planning", "writing"])
def test_a_frozen_rank_is_named_at_the_deadline_and_told_the_same_when_it_thaws(ranks, place, when):
    if when == "planning":
        freeze, option = victims.frozen_when_asked, {"plan_timeout_s": 2.0}
    else:
        freeze, option = partial(victims.frozen_when_writing, str(place)), {"write_timeout_s": 3.0}
    with thawed(ranks.pids[2], lambda: all_told(place, 0, 1)):
        attempts = ranks.run(victims.try_save_with, str(place), 2, freeze, **option)
    (name, deadline_s), *_ = option.items()
    error = one_error(attempts, DeadlineError, "rank 2 did not", name, str(place))
    assert error.rank == 2
    assert all(deadline_s <= seen.seconds < deadline_s + 5 for seen in attempts[:2])
    assert stands(ranks, place) == 1


def all_told(place: Path, *ranks: int) -> bool:
    return all(Path(f"{place}.told-{rank}").exists() for rank in ranks)


@contextmanager
def thawed(pid: int, condition: Callable[[], bool]):
    """Wakes a process up that stopped itself, once the others are done with it."""

    def wake() -> None:
        eventually(condition, 30)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_coordinator_killed_between_saves_is_made_again_with_a_higher_epoch(ranks, place):
    before = ranks.run(victims.session_facts)[0]
    os.kill(before["pid"], signal.SIGKILL)
    ranks.run(save_sound, str(place), 2)
    after = ranks.run(victims.session_facts)[0]
    assert after["session"] == before["session"]
    assert after["epoch"] > before["epoch"]
    assert stands(ranks, place) == 2


def test_a_coordinator_killed_while_ranks_join_does_not_stop_the_save(ranks, place):
    attempts = ranks.run(
        victims.try_save_with, str(place), 1, victims.coordinator_killed_when_asked
    )
    assert [seen.error for seen in attempts] == [None] * 3
    assert stands(ranks, place) == 2


@pytest.mark.parametrize("file", ["*__1_*", "*chunks.*", "*manifest-*2.json", "manifest-*2.json"])
def test_a_coordinator_killed_when_a_file_appears_leaves_one_outcome(ranks, place, file):
    pid = ranks.run(victims.session_facts)[0]["pid"]
    with killed(pid, place, file):
        attempts = ranks.run(victims.try_save_with, str(place), 1, large_of_1)
    errors = [seen.error for seen in attempts]
    found = stands(ranks, place)
    if not any(isinstance(error, CommitUnknownError) for error in errors):
        assert [error is None for error in errors] == [found == 2] * 3, errors
    # A save whose parts were not all there is not committed; one with a manifest is.
    assert (found, file) not in {(2, "*__1_*"), (1, "manifest-*2.json")}
    assert all(str(place) in str(error) for error in errors if error is not None)
    assert max(seen.seconds for seen in attempts) < 30


@contextmanager
def killed(pid: int, place: Path, file: str):
    """Kills a process as soon as there is a new file of such a name."""
    before = set(os.listdir(place))
    seen = []

    def watch() -> None:
        if victims.appears(place, file, before, within_s=30):
            os.kill(pid, signal.SIGKILL)
            seen.append(file)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert seen == [file]


def large_of_1():
    return victims.large(1)


def test_a_killed_driver_leaves_a_whole_checkpoint_and_no_coordinator(
    ranks, place, ray_session, tmp_path
):
    path = tmp_path / "of the driver"
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.victims", ray_session, str(path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    try:
        session = driver.stdout.readline().strip()
        assert session
        assert victims.coordinator_lives(session)
        assert victims.appears(path, "*__1_*", set(os.listdir(path)), within_s=30)
    finally:
        driver.kill()
        driver.wait(30)
        driver.stdout.close()
    assert eventually(lambda: not victims.coordinator_lives(session), 30)
    assert stands(ranks, path) in (1, 2)
    ranks.run(save_sound, str(path), 3)
    assert stands(ranks, path) == 3
