"""A rank may die once it is told that its bytes are held: another coordinator has the plan then.

The coordinator, its plans and the machine are real; Ray's control store is a dict, and stagers are
objects that answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from ray_dcp import InternalError
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.liveness import OUT_OF_REACH_S, AwakeClock, Heartbeat, HeartbeatAck
from ray_dcp.commit_protocol.messages import Ack, Left, PartsHeld, PartsWritten, SaveStaged
from ray_dcp.runtime import ray_calls
from ray_dcp.runtime.coordinator import Coordinator, StagedPlans, StagerWatch
from ray_dcp.runtime.stager import REPORT_TRIES, deliver
from ray_dcp.stage.orders import StageKey, StageProgress
from tests.support.protocol import KEY
from tests.unit.test_protocol_staged import StagedPlay


class Stager:
    """What a coordinator calls of a stager, which may fail with an error."""

    def __init__(self, called, error=None):
        self.called, self.error = called, error
        self.sealed, self.asked = [], []
        self.name = SimpleNamespace(remote=self._name)
        self.shares = SimpleNamespace(remote=self._shares)

    async def _name(self):
        if self.error:
            raise self.error
        return self.called

    async def _shares(self, attempt):
        name = await self._name()
        self.asked.append(attempt)
        keys = [StageKey(KEY, rank, attempt) for rank in self.sealed]
        return name, [StageProgress(key, 8, 8, True, ()) for key in keys]


class Cluster:
    """Ray's control store and stagers, by the names of their actors."""

    def __init__(self, monkeypatch):
        self.stagers = {}
        self.store = {}
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_down = False
        monkeypatch.setattr(ray_calls, "get_actor", self._get_actor)
        monkeypatch.setattr(ray_calls, "remember", self._remember)
        monkeypatch.setattr(ray_calls, "recall", lambda name: self.store.get(name, ""))
        monkeypatch.setattr(
            ray_calls,
            "names_from",
            lambda prefix: [n for n in self.store if n.startswith(prefix)],
        )

    def add(self, number):
        self.stagers[f"s{number}"] = Stager(f"s{number}#0")
        return self.stagers[f"s{number}"]

    def _get_actor(self, name, namespace):
        if name not in self.stagers:
            raise ValueError(f"no actor {name}")
        return self.stagers[name]

    def _remember(self, name, text):
        assert self.is_open.wait(60)
        if self.is_down:
            raise InternalError("the control store does not answer")
        if text:
            self.store[name] = text
        else:
            self.store.pop(name, None)


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


class Actor(Coordinator):
    """A coordinator without Ray, in which the save of a play is planned."""

    def __init__(self, play):
        self._loop = asyncio.get_running_loop()
        self._called, self._resumed = asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._waiting, self._watching, self._timers, self._tasks = {}, {}, {}, set()
        self._beats, self._ack = {}, HeartbeatAck("id", 0, "pid 1")
        self._performing = []
        nothing = lambda *_: None  # noqa: E731
        self._tracing = SimpleNamespace(record_request=nothing, record_answer=nothing)
        self._shared_reads = SimpleNamespace(tidy=lambda: None)
        self._coordination = play.coordination
        self._plans = StagedPlans("actor", play.coordination, self._carry_out, "namespace")

    async def _perform(self, command):
        """Leaves its tasks undone."""

    async def settled(self):
        """Lets everything go on that can."""
        for _ in range(50):
            await asyncio.sleep(0)


def planned(world_size=2):
    play = StagedPlay(world_size=world_size)
    play.to_writing()
    return play


def held(rank, stager=None):
    return PartsHeld(KEY, rank, "a1", 1, f"s{rank if stager is None else stager}#0")


def keep_plan(cluster, play, *ranks):
    """Leaves what Ray keeps when these ranks of a save were told that their bytes are held."""

    async def story():
        actor = Actor(play)
        for rank in ranks:
            cluster.add(rank).sealed = [rank]
            assert await actor.call(held(rank)) == Ack()
        return dict(cluster.store)

    cluster.store = asyncio.run(story())


def another_coordinator():
    """Returns the next coordinator's state after it has looked for what it can take up."""

    async def story():
        coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
        plans = StagedPlans("actor", coordination, lambda commands: None, "namespace")
        await plans.resume()
        return coordination

    with ThreadPoolExecutor(1) as pool:  # a loop of its own
        return pool.submit(asyncio.run, story()).result(60)


def test_nobody_is_told_that_bytes_are_held_before_the_plan_is(cluster):
    play = planned()

    async def story():
        cluster.is_open.clear()
        actor = Actor(play)
        call = asyncio.ensure_future(actor.call(held(0)))
        again = asyncio.ensure_future(actor.call(held(0)))
        await actor.settled()
        assert not call.done()
        assert not again.done()
        cluster.is_open.set()
        assert await call == await again == Ack()
        return dict(cluster.store)

    # As it was when the rank was told: everybody may die now.
    cluster.store = asyncio.run(story())
    assert another_coordinator().active == (KEY,)


def test_a_rank_is_told_only_when_its_own_stager_would_be_asked(cluster):
    keep_plan(cluster, planned(), 0, 1)
    coordination = another_coordinator()
    assert [stager.asked for stager in cluster.stagers.values()] == [["a1"], ["a1"]]
    assert coordination.held_by("s1#0") == {KEY: [1]}


def test_where_the_plan_is_not_taken_the_rank_is_told_with_a_warning_and_it_is_asked_again(
    cluster, caplog
):
    play = planned()

    async def story():
        actor = Actor(play)
        cluster.is_down = True
        told = await actor.call(held(0))
        assert cluster.store == {}
        cluster.is_down = False
        await actor._plans.keep()
        return told

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(story()) == Ack()
    assert "Ray's control store did not take its plan" in caplog.text
    assert another_coordinator().active == (KEY,)


def test_the_plan_outlives_all_stagers_and_goes_with_its_save(cluster):
    play = planned()

    async def story():
        actor = Actor(play)
        for rank in range(2):
            cluster.add(rank)
            await actor.call(held(rank))
        cluster.stagers.clear()
        assert another_coordinator().active == (KEY,)
        play.cancel()
        play.end_abort()
        await actor._plans.keep()

    asyncio.run(story())
    assert cluster.store == {}


def test_a_holder_of_which_the_earlier_coordinator_did_not_know_is_asked_too(cluster):
    keep_plan(cluster, planned(2), 0)
    cluster.add(1).sealed = [1]

    async def go_on():
        after = StagedPlay(epoch=2)
        actor = Actor(after)
        await actor._plans.resume()
        # Its rank waits already, and says once more who holds its bytes.
        staged = SaveStaged(KEY, 1, "a1", 1, held=held(1))
        call = asyncio.ensure_future(actor.call(staged))
        await actor.settled()
        await asyncio.gather(*actor._tasks)
        assert not actor._plans.note(held(1))
        call.cancel()

    asyncio.run(go_on())
    assert cluster.stagers["s1"].asked == ["a1"]


UNREACHABLE = ActorUnavailableError("connection reset", b"0" * 16)


@pytest.mark.parametrize(
    ("stagers", "passed_s", "lost"),
    [
        ({}, [0, 0, 0], [{"s0", "s1"}] * 2),
        # A broken connection is no loss before it is beyond any bound; a death is.
        ({0: UNREACHABLE, 1: ActorDiedError()}, [0, 0, 3600, 0], [{"s1"}, {"s0", "s1"}]),
        # The coordinator's own process was stopped.
        ({0: None, 1: None}, [0.5, 0.5, 3600, 0.5], [set()] * 2),
    ],
    ids=["gone", "unreachable, dead", "alive"],
)
def test_a_stager_that_is_lost_is_one_warning_with_its_ranks(
    cluster, caplog, stagers, passed_s, lost
):
    play = StagedPlay(world_size=2)
    play.to_staged()
    for number, error in stagers.items():
        cluster.add(number).called, cluster.stagers[f"s{number}"].error = f"s{number}", error
    found, now_s = [], [0.0]
    clock = AwakeClock(lambda: now_s[0], 1.0) if lost[-1] == set() else lambda: now_s[0]
    watch = StagerWatch(play.coordination, lambda commands: None, "namespace", found.append, clock)

    async def story():
        after = []
        for seconds in passed_s:
            await watch.look()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            after.append({*found})
            now_s[0] += seconds
        return after

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(story())[-2:] == lost
    told = [record.getMessage() for record in caplog.records]
    assert sorted(message[12:14] for message in told) == sorted(lost[-1])
    assert all("ranks [" in message and "operation 0" in message for message in told)


def test_a_stager_out_of_reach_for_a_moment_is_asked_again_what_it_holds(cluster):
    keep_plan(cluster, planned(1), 0)
    cluster.add(0).error = ActorUnavailableError("connection reset", b"0" * 16)

    async def go_on():
        coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
        plans = StagedPlans("actor", coordination, lambda commands: None, "namespace")
        await plans.resume()
        cluster.add(0).sealed = [0]
        await plans.keep()
        return coordination

    assert asyncio.run(go_on()).held_by("s0#0") == {KEY: [0]}


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_who_cancels_while_the_next_coordinator_takes_the_save_up_cancels_it(cluster, how):
    keep_plan(cluster, planned(1), 0)

    async def go_on():
        after = StagedPlay(epoch=2)
        actor = Actor(after)
        actor._resumed.clear()
        left = Heartbeat(KEY.session, 0, 60.0, left=(Left(KEY, "Ctrl-C", True),))
        if how == "leave":
            assert not (await actor.beat(left)).is_up_to_date  # and so it says it again
        cancel = partial(actor.cancel, KEY, "the user")
        beat = partial(actor.beat, replace(left, hold_s=60.0))
        call = asyncio.ensure_future(cancel() if how == "cancel" else beat())
        await actor.settled()
        assert not call.done()
        await actor._plans.resume()
        actor._resumed.set()
        return await call, after.coordination

    answer, coordination = asyncio.run(go_on())
    assert answer is True or answer.is_up_to_date
    assert coordination.is_cancelled(KEY)


def test_a_save_that_was_cancelled_before_it_is_taken_up_is_cancelled_then(cluster):
    before = planned(1)
    coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
    coordination.cancel(KEY, "the user")
    coordination.resume(before.coordination.staged_plan(KEY))
    assert coordination.is_cancelled(KEY)
    assert KEY in coordination.active  # until the abort record is there


# --- Reports to a coordinator that is out of reach ------------------------------------------------


REPORT = PartsWritten(KEY, 0, "a1", 1)
REFUSED = RayTaskError("call", "trace", ValueError("no"))


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
    told = Told(chain(repeat(UNREACHABLE, 30), [answer]))
    assert told.run() is answer
    assert told.num_told == 31
    assert 100.0 < sum(told.slept) < OUT_OF_REACH_S
    assert max(told.slept) == 10.0


def test_one_that_stays_out_of_reach_is_given_up():
    told = Told(repeat(UNREACHABLE))
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
    told = Told(repeat(UNREACHABLE), awaited=[True, True, False])
    assert told.run() is None
    assert told.num_told == 3
