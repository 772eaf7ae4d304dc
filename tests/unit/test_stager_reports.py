"""What a stager tells a coordinator that is out of reach for a while, or for good."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from ray_dcp.commit_protocol.liveness import OUT_OF_REACH_S
from ray_dcp.runtime.stager import REPORT_TRIES, deliver
from ray_dcp.stage.orders import StageKey, StageReport
from tests.support.protocol import KEY

REPORT = StageReport(StageKey((KEY, 1), 0, "a1"), 0, None)
UNAVAILABLE = ActorUnavailableError("its node is out of reach", b"\0" * 16)
REFUSED = RayTaskError("take_report", "trace", ValueError("no"))


class Told:
    """A coordinator that answers, or fails, as it is said; `slept` is the waits."""

    def __init__(self, answers, awaited=()):
        self.num_told, self.slept = 0, []
        self._answers, self._awaited = iter(answers), iter(awaited or repeat(True))

    def run(self):
        return asyncio.run(deliver(self._take, REPORT, lambda: next(self._awaited), self._sleep))

    async def _take(self, report):
        assert report is REPORT
        self.num_told += 1
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _sleep(self, seconds):
        self.slept.append(seconds)


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_coordinator_is_told_until_it_can_be_reached(answer):
    told = Told(chain(repeat(UNAVAILABLE, 30), [answer]))
    assert told.run() is answer
    assert told.num_told == 31
    assert 100.0 < sum(told.slept) < OUT_OF_REACH_S
    assert max(told.slept) == 10.0


def test_one_that_stays_out_of_reach_is_given_up():
    told = Told(repeat(UNAVAILABLE))
    with pytest.raises(ActorUnavailableError):
        told.run()
    assert OUT_OF_REACH_S <= sum(told.slept) < OUT_OF_REACH_S + 10.0


@pytest.mark.parametrize(("error", "times"), [(ActorDiedError(), REPORT_TRIES), (REFUSED, 2)])
def test_one_that_is_dead_or_refuses_is_given_up_sooner(error, times):
    told = Told(repeat(error))
    with pytest.raises(type(error)):
        told.run()
    assert told.num_told == times


def test_nobody_is_told_what_is_not_awaited_any_more():
    told = Told(repeat(UNAVAILABLE), awaited=[True, True, False])
    assert told.run() is None
    assert told.num_told == 3
