"""When a rank finds its coordinator frozen and has Ray start another, over one that is played."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from ray_dcp.commit_protocol.liveness import HeartbeatAck
from ray_dcp.errors import DeadlineError
from ray_dcp.runtime import heartbeat, ray_calls, ray_private
from ray_dcp.runtime.heartbeat import HeartbeatSender
from ray_dcp.runtime.rank_progress import RankProgress
from tests.polling import eventually

TIMEOUT_S = 0.6


@dataclass(frozen=True, eq=False)
class Sent:
    """A heartbeat, and which incarnation it was sent to."""

    life: int


class Incarnations:
    """A coordinator that Ray starts anew; `frozen` are the incarnations that answer nothing."""

    def __init__(self):
        self.life, self.frozen, self.killed = 0, set(), []
        self.beat = SimpleNamespace(remote=lambda beat: Sent(self.life))

    def wait(self, refs, *, num_returns, timeout):
        time.sleep(0.01)
        done = [ref for ref in refs if ref.life == self.life and self.life not in self.frozen]
        return done, [ref for ref in refs if ref not in done]


@pytest.fixture
def coordinator(monkeypatch):
    fake = Incarnations()
    monkeypatch.setattr(heartbeat.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(heartbeat, "KILL_S", 1000.0)
    monkeypatch.setattr(ray_calls, "wait", fake.wait)
    monkeypatch.setattr(ray_calls, "get", lambda ref: HeartbeatAck("id", ref.life, "pid 1"))
    monkeypatch.setattr(ray_calls, "kill", lambda actor, **_: fake.killed.append(fake.life))
    monkeypatch.setattr(ray_private, "id_of", lambda actor: "id")
    monkeypatch.setattr(ray_private, "life_of", lambda _: ray_private.Life(fake.life, True))
    return fake


def test_each_incarnation_that_freezes_is_found_frozen_and_is_ended_once(coordinator):
    sender = HeartbeatSender(lambda fresh: coordinator, "s", 0, "the coordinator")
    for life in range(3):
        coordinator.life = life
        coordinator.frozen.add(life)
        progress = RankProgress()
        sender.add(progress, TIMEOUT_S)
        assert eventually(lambda: sender.failure(False, True) is not None, 20)
        assert type(sender.failure(False, True)) is DeadlineError
        # Another call of the user finds it still there, as Ray takes its time to end it.
        sender.remove(progress)
        again = RankProgress()
        sender.add(again, TIMEOUT_S)
        assert not eventually(lambda: sender.failure(False, True) is not None, 3 * TIMEOUT_S)
        sender.remove(again)
        assert coordinator.killed == [*range(life + 1)]


def test_one_that_answers_is_not_found_frozen(coordinator):
    sender = HeartbeatSender(lambda fresh: coordinator, "s", 0, "the coordinator")
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert not eventually(lambda: sender.failure(False, True) is not None, 3 * TIMEOUT_S)
    sender.remove(progress)
    assert coordinator.killed == []
