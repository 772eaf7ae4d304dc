"""When a rank finds its coordinator frozen and has Ray start another, over one that is played."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.commit_protocol.messages import Left, OpKey, Refused
from ray_dcp.core.phases import WRITE
from ray_dcp.errors import DeadlineError, LimitError, ParticipantError, StorageError
from ray_dcp.runtime import heartbeat, ray_calls, ray_session
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.ray_session import RayHeartbeatSender
from tests.support.processes import eventually

TIMEOUT_S = 0.6


@dataclass(frozen=True, eq=False)
class Sent:
    """A heartbeat, and which incarnation it was sent to."""

    life: int
    beat: Heartbeat


class Incarnations:
    """A coordinator that Ray starts anew; `frozen` are the incarnations that answer nothing."""

    def __init__(self):
        self.life, self.frozen, self.killed, self.pulses = 0, set(), [], None
        self.plan = ""
        self.beats, self.answers, self.num_lost = [], {}, 0
        self.answered_s = []
        self.beat = SimpleNamespace(remote=self._sent)

    def _sent(self, beat):
        self.beats.append(beat)
        is_lost = len(self.beats) <= self.num_lost
        return Sent(-1 if is_lost else self.life, beat)

    def get(self, sent):
        self.answered_s.append(time.monotonic())
        return HeartbeatAck("id", sent.life, "pid 1", **self.answers)

    def recall(self, name):
        if name.startswith("staged:"):
            return self.plan if name.endswith(":4:s") else ""
        return "" if self.pulses is None else str(next(self.pulses))

    def wait(self, refs, *, num_returns, timeout):
        time.sleep(0.01)
        done = [ref for ref in refs if ref.life == self.life and self.life not in self.frozen]
        return done, [ref for ref in refs if ref not in done]


@pytest.fixture
def sender(coordinator):
    return RayHeartbeatSender(lambda fresh: coordinator, "s", 0, "the coordinator")


@pytest.fixture
def progress(sender):
    """A call of the user, for which the sender sends heartbeats until the end of the test."""
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    yield progress
    sender.remove(progress)


@pytest.fixture
def coordinator(monkeypatch):
    fake = Incarnations()
    monkeypatch.setattr(ray_session.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_session, "KILL_S", 1000.0)
    monkeypatch.setattr(ray_calls, "wait", fake.wait)
    monkeypatch.setattr(ray_calls, "get", fake.get)
    monkeypatch.setattr(ray_calls, "recall", fake.recall)
    monkeypatch.setattr(ray_calls, "kill", lambda actor, **_: fake.killed.append(fake.life))
    monkeypatch.setattr(ray_calls, "id_of", lambda actor: "id")
    monkeypatch.setattr(ray_calls, "life_of", lambda _: ray_calls.Life(fake.life, True))
    return fake


def test_each_incarnation_that_freezes_is_found_frozen_and_is_ended_once(coordinator, sender):
    for life in range(2):
        coordinator.life = life
        coordinator.frozen.add(life)
        progress = RankProgress()
        sender.add(progress, TIMEOUT_S)
        assert eventually(lambda: sender.failure(False, True) is not None)
        assert type(sender.failure(False, True)) is DeadlineError
        # Another call of the user finds it still there, as Ray takes its time to end it.
        sender.remove(progress)
        again = RankProgress()
        sender.add(again, TIMEOUT_S)
        assert not eventually(lambda: sender.failure(False, True) is not None, 3 * TIMEOUT_S)
        sender.remove(again)
        assert coordinator.killed == [*range(life + 1)]


def test_only_a_staged_save_whose_plan_is_kept_waits_for_the_next_incarnation(coordinator, sender):
    coordinator.frozen.add(0)
    coordinator.plan = "a plan"
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.killed == [0], 20)
    assert eventually(lambda: sender.failure(False, True) is not None, 20)
    assert sender.failure(False, True, OpKey("s", 4)) is None
    assert type(sender.failure(False, True, OpKey("s", 5))) is DeadlineError
    coordinator.plan = ""
    assert type(sender.failure(False, True, OpKey("s", 4))) is DeadlineError
    sender.remove(progress)


def test_a_heartbeat_that_got_lost_does_not_count_once_a_later_one_is_answered(coordinator, sender):
    coordinator.num_lost = 1
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    progress.enter(WRITE)  # which is told at once
    assert not eventually(lambda: sender.failure(False, True) is not None, 3 * TIMEOUT_S)
    sender.remove(progress)


def test_one_that_lives_and_only_this_rank_can_not_reach_is_not_ended(coordinator, sender):
    coordinator.frozen.add(0)
    coordinator.pulses = count()  # it goes on to write that it lives
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: sender.failure(False, True) is not None)
    error = sender.failure(False, True)
    assert type(error) is DeadlineError
    assert "rank 0 can't reach it" in error.message
    assert coordinator.killed == []
    assert len(coordinator.beats) == heartbeat.MOST_UNANSWERED
    coordinator.frozen.clear()
    assert eventually(lambda: sender.failure(False, True) is None)
    sender.remove(progress)


def test_one_that_wrote_that_it_lives_and_then_froze_is_ended(coordinator, sender):
    coordinator.frozen.add(0)
    coordinator.pulses = iter(lambda: 7, None)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.killed == [0])
    sender.remove(progress)


def test_what_a_rank_has_left_is_said_until_a_coordinator_knows(coordinator, sender, monkeypatch):
    monkeypatch.setattr(heartbeat, "LEFT_TIMEOUT_S", TIMEOUT_S)
    coordinator.answers = {"is_up_to_date": False}  # it takes saves up
    left = Left(OpKey("s", 4), "Ctrl-C", is_interrupt=True)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(sender.leave, left, 60.0)
        assert eventually(lambda: len(coordinator.beats) > 1)
        assert not said.done()
        coordinator.answers = {}
        said.result(60)
    assert all(beat.left == (left,) for beat in coordinator.beats)
    num_said = len(coordinator.beats)
    assert not eventually(lambda: len(coordinator.beats) > num_said, 0.3)


def test_a_coordinator_that_died_stops_who_moves_bytes_and_the_next_one_may_begin_a_call(
    coordinator, sender, progress, monkeypatch
):
    def die(sent):
        coordinator.life = 1
        raise ActorDiedError

    progress.enter(WRITE)
    assert eventually(lambda: coordinator.answered_s)
    assert sender.failure(True, False) is None
    monkeypatch.setattr(ray_calls, "get", die)
    assert eventually(lambda: progress.abandoned is not None)
    assert type(progress.abandoned) is type(sender.failure(True, False)) is ParticipantError
    assert sender.failure(True, True) is None


def test_what_is_left_while_an_answer_comes_is_said_in_the_next_heartbeat(
    coordinator, sender, monkeypatch
):
    first, second = (Left(OpKey("s", seq), "Ctrl-C") for seq in (4, 5))
    get, later = coordinator.get, iter([second])

    def leave_and_get(sent):
        for left in later:
            sender.leave(left, 0.0)
        return get(sent)

    monkeypatch.setattr(ray_calls, "get", leave_and_get)
    sender.leave(first, 60.0)
    assert eventually(lambda: coordinator.beats[-1].left == (second,))
    assert eventually(lambda: sender._thread is None)


def test_a_heartbeat_that_fails_is_sent_again_and_what_an_answer_says_is_logged(
    coordinator, sender, monkeypatch, caplog
):
    errors = iter([StorageError("out of order")])

    def fail_once(sent):
        for error in errors:
            raise error
        return HeartbeatAck("id", 0, "pid 1", waits=("It waits for rank 3",))

    monkeypatch.setattr(ray_calls, "get", fail_once)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: "It waits for rank 3" in caplog.messages)
    assert "out of order" in caplog.text
    sender.remove(progress)


def test_a_short_timeout_does_not_wait_for_its_first_heartbeat(coordinator, sender, monkeypatch):
    monkeypatch.setattr(heartbeat, "FIRST_HEARTBEAT_S", 1000.0)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    sender.remove(progress)


def test_calls_at_once_beat_as_often_as_the_shortest_timeout_needs(coordinator, sender, progress):
    other = RankProgress()
    sender.add(other, 1000.0)
    assert eventually(lambda: coordinator.beats and len(coordinator.beats[-1].doings) == 2)
    assert coordinator.beats[-1].timeout_s == TIMEOUT_S
    sender.remove(other)


def test_what_a_rank_has_left_is_not_said_for_ever(coordinator, monkeypatch, sender):
    monkeypatch.setattr(heartbeat, "OUT_OF_REACH_S", 0.3)
    coordinator.answers = {"is_up_to_date": False}
    sender.leave(Left(OpKey("s", 4), "Ctrl-C", is_interrupt=True), 20.0)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats and not coordinator.beats[-1].left)
    sender.remove(progress)


def test_a_call_that_got_no_thread_is_forgotten(coordinator, monkeypatch, sender):

    def refuse(*_):
        raise LimitError("no threads")

    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "start_thread", refuse)
        with pytest.raises(LimitError, match="no threads"):
            sender.add(RankProgress(), TIMEOUT_S)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    assert len(coordinator.beats[-1].doings) == 1
    sender.remove(progress)


def test_the_time_in_the_queue_is_counted_from_answer_to_answer(coordinator, sender):
    progress, key = RankProgress(), OpKey("s", 4)
    progress.begin(key)
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: len(coordinator.answered_s) > 2)
    last_s = coordinator.answered_s[-1]
    coordinator.answers = {"queued": (4,)}
    assert eventually(lambda: sender.queued_s(key) > 0)
    assert sender.queued_s(key) <= time.monotonic() - last_s
    assert sender.queued_s(OpKey("s", 5)) == 0
    sender.remove(progress)


def test_a_rank_that_moves_bytes_stops_when_the_save_has_failed_elsewhere(coordinator, sender):
    progress, key = RankProgress(), OpKey("s", 4)
    progress.begin(key)
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    assert coordinator.beats[-1].awaits == ()  # it has not joined yet
    full = StorageError("full")
    progress.enter(WRITE)
    assert eventually(lambda: coordinator.beats[-1].awaits == (key,))
    coordinator.answers = {"failed": {key: Refused(full)}}
    assert eventually(lambda: progress.stop.asked)
    assert progress.stop.error is full
    progress.begin(OpKey("s", 5))
    assert not progress.stop.asked
    sender.remove(progress)
