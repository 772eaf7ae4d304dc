"""The thread of a coordinator's loop: each call ends, also when the loop is stopped."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress

import pytest

from ray_dcp.coordinator.loop import LoopThread
from ray_dcp.errors import ParticipantError

ROUNDS, THREADS, CALLS = 40, 4, 60


class Turns:
    async def one(self) -> None:
        await asyncio.sleep(0)


@pytest.fixture
def threads_alternate():
    """Threads take turns after each few instructions, so that all orders of them occur."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_call_ends_whenever_the_loop_is_stopped(threads_alternate):
    for turn in range(ROUNDS):
        loop, answers = LoopThread(Turns), list[Future[None]]()
        is_asked = threading.Semaphore(0)

        def ask(loop=loop, answers=answers, is_asked=is_asked):
            for _ in range(CALLS):
                answers.append(loop.ask("one"))
                is_asked.release()

        threads = [threading.Thread(target=ask) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for _ in range(1 + turn * THREADS * CALLS // ROUNDS):
            is_asked.acquire()
        loop.stop()
        for thread in threads:
            thread.join()
        assert len(answers) == THREADS * CALLS
        for answer in answers:
            # Suppressed: calls from behind the end, which fail at once, or are cancelled.
            with suppress(CancelledError, ParticipantError):
                assert answer.result(20) is None
