"""Ranks that are threads of one process: sessions of one coordination, without Ray and clocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest

from ray_dcp import saving
from ray_dcp.commit_protocol.commands import step_of
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import OpKey
from ray_dcp.runtime.rank_progress import Activity
from ray_dcp.runtime.rank_save import PlanMemory
from ray_dcp.runtime.tasks import new_attempt, perform
from tests.inline_ranks import Shell

LIMIT_S = 300.0


class DeadRankError(BaseException):
    """The rank died: no code of ours may catch it."""


class RankThread:
    """The session of a rank; implements `RankSession`.

    Args:
        shared: What the ranks share.
        rank: This one.
        dies: Whether it dies instead of sending a request; `after` its reply if the second
            argument is true.
    """

    node = ""
    skipped_calls = 0

    def __init__(self, shared, rank, world_size, dies=lambda *_: False):
        self._shared, self.rank, self.world_size, self._dies = shared, rank, world_size, dies
        self._keys = (OpKey("threads", seq) for seq in count())
        self.plans = PlanMemory()

    def next_key(self):
        return next(self._keys)

    def activity(self, timeout_s, key=None):
        return Activity(self, timeout_s, key)

    def begin_call(self, progress, timeout_s):
        """Nobody listens."""

    end_call = leave = lambda self, *_: None

    def cancel(self, key, reason):
        return False

    def call(self, request, *, silence_s=None):
        if self._dies(request, False):
            self._shared.lose(request)
        reply = self._shared.call(request)
        if self._dies(request, True):
            self._shared.lose(request)
        return reply


class Shared:
    """The coordination of the ranks."""

    def __init__(self):
        self._shell = Shell(Coordination(epoch=1, new_attempt=new_attempt), perform)
        self._changed = threading.Condition()
        self._replies, self._waiting = {}, set()

    def call(self, request):
        at = request.key, request.rank, step_of(request)
        with self._changed:
            self._waiting.add(at)
            refused = self._shell.receive(request)
            self._work_off()
            found = self._changed.wait_for(lambda: refused or at in self._replies, LIMIT_S)
            assert found, f"{at} hangs"
            self._waiting.discard(at)
            return self._replies.pop(at, refused)

    def wait_for(self, *ranks):
        """Returns when just these ranks wait for an answer."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: {at[1] for at in self._waiting - self._replies.keys()} == {*ranks}, LIMIT_S
            )

    def expire(self):
        """Lets the deadline pass for which ranks wait."""
        with self._changed:
            assert self._shell.expire()
            self._work_off()

    def lose(self, request):
        with self._changed:
            self._shell.lose(request)
            self._work_off()
        raise DeadRankError

    def _work_off(self):
        while self._shell.tasks:
            self._shell.perform(0)
        answers, self._shell.answers = self._shell.answers, []
        for one in answers:
            self._replies[(one.key, *one.ranks, one.step)] = one.reply
        self._changed.notify_all()


def run_as_ranks(work: Callable[[int], object], world_size: int, dies=lambda *_: False) -> list:
    """Runs work in a thread for each rank; returns what each gave or raised.

    Args:
        work: Of a rank; what it calls of ray_dcp finds the session of its thread.
        world_size: Number of ranks.
        dies: From rank, request and whether its reply came to whether the rank dies then.
    """
    shared, here, ended = Shared(), threading.local(), [None] * world_size

    def run(rank):
        here.session = RankThread(
            shared, rank, world_size, lambda request, after: dies(rank, request, after)
        )
        try:
            ended[rank] = work(rank)
        except BaseException as error:
            ended[rank] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            saving, "current_session",
            lambda group, alone: None if alone else getattr(here, "session", None),
        )  # fmt: skip
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    return ended
