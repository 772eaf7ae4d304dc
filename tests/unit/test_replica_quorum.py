"""Which replicas save a step together: whoever is there, and nobody waits long for who is not."""

from __future__ import annotations

import pytest

from ray_dcp.commit_protocol.replica_quorum import (
    Answers,
    ReadyToSave,
    ReplicaQuorum,
    SaveQuorum,
)
from ray_dcp.core import bounds


class Run:
    """Replicas of one run, and the time that their events share."""

    def __init__(self, num_replicas: int) -> None:
        self._size = num_replicas
        self._quorum = ReplicaQuorum(num_replicas, iter("abcdefgh").__next__)
        self.now_s = 0.0
        self.answers: list[tuple[int, SaveQuorum | None]] = []

    def begin(self, *processes: str) -> None:
        for process in processes:
            self._quorum.begin(int(process[0]), process)

    def step(self, process: str) -> None:
        self._quorum.steps(int(process[0]), process)

    def ready(self, step: int | None, *processes: str, **more: bool) -> None:
        for process in processes:
            request = ReadyToSave(int(process[0]), self._size, process, step, **more)
            self._take(self._quorum.ready(request, self.now_s))

    def lose(self, process: str) -> None:
        self._take(self._quorum.lost(int(process[0]), process, "has ended", self.now_s))

    def wait(self) -> float:
        """Lets the time pass until somebody gets an answer; returns how long that took."""
        next_s = self._quorum.next_s
        assert next_s is not None
        waited_s, self.now_s = next_s - self.now_s, next_s
        self._take(self._quorum.look(self.now_s))
        return waited_s

    def _take(self, answers: Answers) -> None:
        self.answers += answers

    def take(self) -> list[tuple[int, SaveQuorum | None]]:
        """Returns the answers since the last call."""
        taken, self.answers = sorted(self.answers, key=lambda one: one[0]), []
        return taken

    def together(self) -> SaveQuorum:
        """Returns the quorum that all answers since the last call have in common."""
        taken = self.take()
        (found,) = {id(one): one for _, one in taken}.values()
        assert found is not None
        assert tuple(rank for rank, _ in taken) == found.ranks
        return found


@pytest.fixture
def three() -> Run:
    """Three replicas that have saved step 10 together."""
    run = Run(3)
    run.begin("0a", "1a", "2a")
    run.ready(10, "0a", "1a", "2a")
    assert run.together() == SaveQuorum("a", (0, 1, 2))
    return run


def test_replicas_that_reach_a_step_save_it_together_in_one_session(three: Run):
    three.ready(20, "2a", "0a")
    assert three.take() == []
    three.ready(20, "1a")
    assert three.together() == SaveQuorum("a", (0, 1, 2))


def test_a_lost_replica_is_not_waited_for_and_its_replacement_takes_part_again(three: Run):
    three.ready(20, "0a", "1a")
    three.lose("2a")
    assert three.together() == SaveQuorum("b", (0, 1), ((2, "has ended"),))
    three.ready(30, "0a", "1a")
    assert three.together().session == "b"
    three.begin("2b")
    three.ready(40, "0a", "1a")
    assert three.take() == []  # It has begun, and may be at this step too.
    three.ready(40, "2b")
    assert three.together() == SaveQuorum("c", (0, 1, 2))
    three.lose("2a")  # Ray says so later than the replacement has come.
    three.ready(50, "0a", "1a", "2b")
    assert three.together() == SaveQuorum("c", (0, 1, 2))


def test_a_replacement_that_is_not_there_yet_is_waited_for_once_and_briefly(three: Run):
    three.begin("2b")
    three.ready(20, "0a", "1a")
    assert three.wait() == bounds.NEW_S
    found = three.together()
    assert found.ranks == (0, 1)
    assert found.missing == ((2, f"was not ready for step 20 within {bounds.NEW_S:.0f} s"),)
    three.ready(30, "0a", "1a")
    assert three.together().ranks == (0, 1)
    three.ready(30, "2b")  # The others have saved it. From now on it is there.
    assert three.take() == [(2, None)]
    three.ready(40, "0a", "1a")
    assert three.take() == []
    three.ready(40, "2b")
    assert three.together().ranks == (0, 1, 2)


def test_a_replacement_that_makes_steps_is_waited_for_like_the_others(three: Run):
    three.begin("2b")
    three.ready(20, "0a", "1a")
    three.wait()
    assert three.together().ranks == (0, 1)
    three.step("2b")
    three.ready(30, "0a", "1a")
    assert three.take() == []
    three.ready(30, "2b")
    assert three.together().ranks == (0, 1, 2)


def test_a_replica_that_does_not_come_costs_a_bounded_time_once(three: Run):
    three.ready(20, "0a")
    three.now_s += 1
    three.ready(20, "1a")
    assert three.wait() == bounds.PRESENT_S - 1
    assert three.together().ranks == (0, 1)
    three.ready(30, "1a", "0a")
    assert three.together().ranks == (0, 1)


def test_of_two_steps_the_later_one_is_saved_and_no_step_twice(three: Run):
    three.ready(20, "0a")
    three.ready(30, "1a")
    assert three.take() == [(0, None)]
    three.ready(30, "0a", "2a")
    assert three.together().ranks == (0, 1, 2)
    three.ready(20, "0a")
    three.ready(30, "2b")
    assert three.take() == [(0, None), (2, None)]


def test_an_answer_that_was_lost_is_given_again(three: Run):
    three.ready(20, "0a", "1a", "2a")
    first = three.together()
    three.ready(20, "1a")
    assert three.take() == [(1, first)]


def test_after_a_failed_save_the_next_one_has_a_session_of_its_own(three: Run):
    three.ready(20, "0a", "2a")
    three.ready(20, "1a", is_anew=True)
    assert three.together() == SaveQuorum("b", (0, 1, 2))


def test_replicas_that_went_back_save_their_steps_again(three: Run):
    three.ready(5, "0a", "1a", "2a", went_back=True)
    assert three.together() == SaveQuorum("b", (0, 1, 2))


def test_replacements_of_all_make_steps_again_that_the_lost_ones_had_saved(three: Run):
    three.lose("0a")
    three.ready(20, "1a")
    three.lose("2a")
    assert three.together().ranks == (1,)
    three.begin("0b", "2b")
    three.ready(20, "0b")
    assert three.take() == [(0, None)]
    three.lose("1a")
    three.ready(20, "0b", "2b")
    found = three.together()
    assert found.ranks == (0, 2)
    assert found.session != "a"


def test_at_the_end_those_that_save_on_are_not_held_up(three: Run):
    three.ready(None, "0a")
    three.ready(20, "1a", "2a")
    assert three.together() == SaveQuorum("b", (1, 2), ((0, "has made its last step"),))
    three.ready(None, "1a", "2a")
    assert three.together() == SaveQuorum("c", (0, 1, 2))
    three.ready(30, "1a")  # One that goes on by itself.
    assert three.take() == []
    for gone in ("0a", "2a"):
        three.lose(gone)
    assert three.together().ranks == (1,)


def test_a_coordinator_that_was_started_anew_waits_for_replicas_that_it_does_not_know():
    run = Run(3)
    run.ready(50, "1a", "2b")
    assert run.take() == []
    assert run.wait() == bounds.NEW_S
    assert run.together() == SaveQuorum("a", (1, 2), ((0, "was not ready for step 50 within 2 s"),))
