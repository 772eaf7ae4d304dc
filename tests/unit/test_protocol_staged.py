"""Asynchronous saves: their machine, fed by hand, and plans that outlive their coordinator.

The coordinator, its plans and the machine are real; Ray's control store is a dict, and stagers are
objects that answer.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from ray_dcp import InternalError
from ray_dcp.commit_protocol import messages
from ray_dcp.commit_protocol.commands import (
    Answer,
    BuildCommit,
    CreateRecord,
    Failed,
    Finished,
    OutcomeRead,
    Published,
    ReadOutcome,
    ReadRecords,
    RecordCreated,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.liveness import (
    AwakeClock,
    Doing,
    Heartbeat,
    HeartbeatAck,
)
from ray_dcp.coordinator.actor import Coordinator, StagedPlans, StagerWatch
from ray_dcp.core import bounds
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    ParticipantError,
    SaveSkippedError,
    StorageError,
)
from ray_dcp.options import SaveOptions
from ray_dcp.session import ray_calls
from ray_dcp.session.names import staged_plan_name, stagers_key
from ray_dcp.stage.orders import StageKey, StageProgress
from ray_dcp.stage.stager import REPORT_TRIES, deliver
from tests.support.protocol import BUILT, KEY, NOTHING, TARGET, Play, planned, receipt_file


class StagedPlay(Play):
    """A `Play` whose saves are asynchronous, with a stager `s<rank>` for each rank."""

    def join_staged(self, rank, *, options=None, **changed):
        return self.join(rank, options=options or self.options, staged=True, **changed)

    def held(self, rank, *, key=KEY, attempt="a1", epoch=1):
        return self.send(messages.PartsHeld(key, rank, attempt, epoch, f"s{rank}"))

    def written(self, rank, *files, key=KEY, error=None, attempt="a1"):
        receipts = tuple(map(receipt_file, files))
        return self.send(messages.PartsWritten(key, rank, attempt, 1, receipts, error))

    def staged(self, rank, *, key=KEY, error=None, attempt="a1"):
        return self.send(messages.SaveStaged(key, rank, attempt, 1, error))

    def lose_stager(self, stager):
        return self._take(self.coordination.stager_lost(stager, "it died"))

    def cancel(self):
        self._take(self.coordination.cancel(KEY, "the user wants it"))

    def end_abort(self, *, expire=False):
        """Ends the abort record, and what is deleted then."""
        if expire:
            self.expire()
        self.done(RecordCreated(1))
        self.done(Finished())

    def finish(self):
        """Ends all tasks from the chunk table on."""
        for result in (Finished(), RecordCreated(1), Published(), Finished()):
            if self.todo and not isinstance(self.task, ReadRecords):
                self.done(result)

    def reply(self, rank, step, key=KEY):
        return next(
            (
                command.reply
                for command in reversed(self.commands)
                if isinstance(command, Answer)
                and (command.key, command.step) == (key, step)
                and rank in command.ranks
            ),
            None,
        )

    def to_writing(self, *, key=KEY, options=None, target=TARGET):
        for rank in range(self.world_size):
            self.join_staged(rank, key=key, options=options, target=target)
        self.done(NOTHING)
        self.done(planned(self.world_size, files=2))

    def to_staged(self, **changed):
        self.to_writing(**changed)
        key = changed.get("key", KEY)
        for rank in range(self.world_size):
            assert self.held(rank, key=key) == messages.Ack()
            assert self.staged(rank, key=key) is None

    def write_all(self, *, ranks=None, key=KEY, attempt="a1"):
        for rank in range(self.world_size) if ranks is None else ranks:
            for file in (2 * rank, 2 * rank + 1):
                assert self.written(rank, file, key=key, attempt=attempt) == messages.Ack()


@pytest.fixture
def play():
    return StagedPlay()


def commit(play):
    """Carries a save whose files are all written to its end; returns what it committed."""
    task = play.done(BUILT)
    assert isinstance(task, BuildCommit)
    play.finish()
    return task


@pytest.mark.parametrize("staged_first", [True, False])
def test_it_commits_when_every_file_has_a_receipt(play, staged_first):
    play.to_writing()
    for rank in range(2):
        play.held(rank)
        if staged_first:
            play.staged(rank)
    play.written(0, 0, 1)
    play.written(1, 3)
    assert not play.todo
    play.written(1, 2)
    if not staged_first:
        assert play.staged(0) is None
    task = commit(play)
    assert sorted(receipt.file for receipt in task.receipts) == [0, 1, 2, 3]
    assert isinstance(play.reply(0, "SaveStaged"), messages.SaveOutcome)
    assert isinstance(play.staged(1), messages.SaveOutcome)


def fails(play, *, expire=True):
    """Ends a save that fails; returns its error, which all who wait get."""
    play.end_abort(expire=expire)
    errors = [play.reply(rank, "SaveStaged") for rank in range(2)]
    (error,) = {reply.error for reply in errors if isinstance(reply, messages.Refused)}
    return error


@pytest.mark.parametrize("how", ["dies", "can not stage"])
def test_a_rank_whose_bytes_are_not_held_fails_the_save(play, how):
    play.to_writing()
    play.held(0)
    play.staged(0)
    if how == "dies":
        play.lose(1)
    else:
        play.staged(1, error=StorageError("no memory"))
    error = fails(play)
    assert (type(error), error.rank) == (ParticipantError if how == "dies" else StorageError, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_writes_nothing_may_die_before_the_others_are_staged(play, when):
    for rank in range(2):
        play.join_staged(rank)
    play.done(NOTHING)
    plan = planned(2, files=2)
    play.done(replace(plan, parts=(plan.parts[0], RankPlan(1, ()))))
    if when == "before":
        play.lose(1)
    play.held(0)
    play.staged(0)
    play.write_all(ranks=[0])
    if when == "after":
        assert not play.todo
        play.lose(1)
    assert [receipt.file for receipt in commit(play).receipts] == [0, 1]
    assert isinstance(play.reply(0, "SaveStaged"), messages.SaveOutcome)


def test_a_file_that_is_reported_twice_counts_once(play):
    play.to_staged()
    play.write_all()
    assert play.written(0, 0, 1) == messages.Ack()
    task = commit(play)
    assert [receipt.file for receipt in task.receipts] == [0, 1, 2, 3]


def test_a_file_that_its_rank_does_not_write_counts_for_nobody(play):
    play.to_staged()
    assert play.written(0, 2) == messages.Ack()
    play.write_all()
    assert [receipt.file for receipt in commit(play).receipts] == [0, 1, 2, 3]


def test_what_is_of_another_attempt_epoch_or_coordinator_is_refused(play):
    with pytest.raises(CommitUnknownError, match="restarted"):
        play.written(0, 0)
    play.to_staged()
    with pytest.raises(CommitUnknownError, match="a9"):
        play.written(0, 0, attempt="a9")
    with pytest.raises(CommitUnknownError, match="epoch 7"):
        play.held(0, epoch=7)
    play.write_all()
    commit(play)


def test_files_that_a_stager_does_not_write_are_blamed_on_it_at_the_deadline(play):
    play.to_staged()
    play.write_all(ranks=[1])
    error = fails(play)
    assert (type(error), error.rank) == (DeadlineError, 0)
    assert "s0 has not written 2 files of rank 0" in error.message


# --- the queue ----------------------------------------------------------------------------------

SECOND = messages.OpKey("run", 1)
ELSEWHERE = messages.Target("memory://other")


def join_second(play, **options):
    for rank in range(play.world_size):
        play.join_staged(rank, key=SECOND, options=SaveOptions(**options), target=ELSEWHERE)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_waits_until_the_one_before_has_ended(play, fails):
    play.to_staged()
    join_second(play)
    assert not play.todo
    assert play.reply(0, "SaveJoin", key=SECOND) is None
    if fails:
        play.written(0, error=StorageError("full"))
        play.end_abort(expire=True)
    else:
        play.write_all()
        commit(play)
    assert isinstance(play.task, ReadRecords)
    play.done(NOTHING)
    play.done(planned(2, files=2))
    assert isinstance(play.reply(0, "SaveJoin", key=SECOND), messages.SaveGo)


def test_a_save_that_is_queued_for_long_says_behind_which_one(play):
    play.to_staged()
    join_second(play)
    told = []
    for play.now_s in range(0, 50, 5):
        told += play.coordination.heartbeat(Heartbeat("run", 0, 60.0, (Doing(0, 1, "waiting"),)))
        play.coordination.check_silence()
    (wait,) = told
    assert "Operation 1 of session 'run' (save to memory://other) has been queued for 30 s" in wait
    assert "it waits for operation 0 (save to memory://ckpt), which is writing" in wait


@pytest.mark.parametrize("how", ["says so", "says nothing", "is heard no more"])
def test_a_queued_save_that_a_rank_has_left_is_not_begun(play, how):
    play.to_staged()
    play.silence_s = 60.0
    join_second(play)
    both, third = Doing(0, 1, "waiting"), Doing(2, 2, "waiting")
    for play.now_s in range(0, 100, 5):
        play.coordination.heartbeat(Heartbeat("run", 1, 60.0, (both,)))
        # Rank 0 has left the second save for a third one, for which it sends heartbeats.
        left = (messages.Left(SECOND, "it waited for long"),) if how == "says so" else ()
        beat = Heartbeat("run", 0, 60.0, (third,), left=left)
        if how != "is heard no more":
            play.coordination.heartbeat(beat)
        play._take(play.coordination.present(beat))
        play._take(play.coordination.check_silence())
        if how == "says so":
            break
    for rank in range(2):
        error = play.reply(rank, "SaveJoin", key=SECOND).error
        assert type(error) is (ParticipantError if how == "says so" else DeadlineError)
        assert "rank 0" in error.message
        assert ("it left the call" in error.message) == (how != "is heard no more")
    play.write_all()
    commit(play)
    assert not play.todo  # the second one is not begun


def test_two_saves_are_under_way_when_two_are_allowed(play):
    play.to_staged()
    join_second(play, max_pending=2)
    assert isinstance(play.task, ReadRecords)


def test_a_save_whose_vote_stays_open_after_its_ranks_were_told_holds_no_other_up(play):
    play.to_staged()
    play.write_all()
    play.done(BUILT)
    play.done(Finished())
    assert isinstance(play.task, CreateRecord)
    play.expire()
    assert type(play.staged(0).error) is CommitUnknownError
    join_second(play)
    assert isinstance(play.todo[-1].task, ReadRecords)


def test_a_save_is_skipped_on_all_ranks_or_on_none(play):
    play.to_staged()
    join_second(play, when_full="skip")
    for rank in range(2):
        assert isinstance(play.reply(rank, "SaveJoin", key=SECOND).error, SaveSkippedError)
    play.write_all()
    commit(play)


def test_two_saves_of_one_id_are_not_under_way_at_once(play):
    play.to_staged()
    for rank in range(2):
        play.join_staged(rank, key=SECOND, options=SaveOptions(max_pending=2))
    error = play.reply(1, "SaveJoin", key=SECOND).error
    assert isinstance(error, CheckpointExistsError)
    assert "operation 0" in error.message


def test_a_queued_save_whose_rank_dies_fails_at_once(play):
    play.to_staged()
    join_second(play)
    play.lose(1)
    assert isinstance(play.reply(0, "SaveJoin", key=SECOND).error, ParticipantError)


# Another coordinator


UNDECIDED = OutcomeRead()


class Resumed(StagedPlay):
    """A coordinator that takes up what the one of another play had planned."""

    def take_up(self, before, outcome=UNDECIDED):
        planned = pickle.loads(pickle.dumps(before.coordination.staged_plan(KEY)))
        self._take(self.coordination.resume(planned))
        assert self.todo.pop().task == ReadOutcome(TARGET, "a1")
        if outcome is not None:
            self.told(outcome)
        return self

    def told(self, outcome):
        task = ReadOutcome(TARGET, "a1")
        self._take(self.coordination.performed(KEY, task, outcome))

    def say_again(self):
        for rank in range(self.world_size):
            assert self.held(rank) == messages.Ack()
            self.staged(rank)
        self.write_all()


@pytest.fixture
def resumed(play):
    play.to_writing()
    play.held(0)
    play.written(0, 0, 1)
    return Resumed(world_size=play.world_size, epoch=2).take_up(play)


def test_only_what_is_planned_and_neither_over_nor_failing_can_be_taken_up(play):
    def known():
        return play.coordination.staged_plan(KEY) is not None

    for rank in range(play.world_size):
        assert not known()
        play.join_staged(rank)
    assert not known()
    play.done(NOTHING)
    play.done(planned(play.world_size, files=2))
    assert known()
    for rank in range(play.world_size):
        play.held(rank)
    # All is written and nothing committed: who dies now must leave it to another coordinator.
    play.write_all()
    assert isinstance(play.task, BuildCommit)
    assert known()
    commit(play)
    assert not known()
    other, written = StagedPlay(), Play()
    other.to_staged()
    other.cancel()
    assert other.coordination.staged_plan(KEY) is None
    written.to_writing()  # by its ranks
    assert written.coordination.staged_plan(KEY) is None


def test_a_save_is_taken_up_twice_and_committed_under_the_newest_epoch(resumed):
    third = Resumed(world_size=2, epoch=3).take_up(resumed)
    third.say_again()
    task = commit(third)
    assert (task.attempt, task.epoch) == ("a1", 3)
    assert {file.file for file in task.receipts} == {0, 1, 2, 3}
    assert isinstance(third.reply(0, "SaveStaged"), messages.SaveOutcome)


@pytest.mark.parametrize("late", ["before its rank waits", "after its rank waits"])
def test_a_stager_that_reports_late_takes_nothing_from_the_one_that_holds_the_bytes_now(
    resumed, late
):
    """Rank 0 turned from s9, which froze, to s0: both hold its bytes, and s9 is killed."""
    if late == "before its rank waits":
        resumed.held(0)
    else:
        resumed.send(messages.SaveStaged(KEY, 0, "a1", 1, stager="s0"))
    assert resumed.send(messages.PartsHeld(KEY, 0, "a1", 1, "s9")) == messages.Ack()
    assert resumed.coordination.held_by("s0") == {KEY: [0]}
    resumed.lose_stager("s9")
    resumed.say_again()
    commit(resumed)


def test_a_rank_without_its_part_of_the_plan_fails_the_save_that_was_taken_up(resumed):
    resumed.staged(0)
    resumed.join_staged(1)
    resumed.held(0)
    resumed.write_all(ranks=[0])
    resumed.end_abort()
    refused = resumed.reply(1, "SaveJoin")
    assert isinstance(refused, messages.Refused)
    assert "was restarted" in refused.error.message


def taken_up(play, outcome=None):
    play.to_staged()
    return Resumed(world_size=play.world_size, epoch=2).take_up(play, outcome)


@pytest.mark.parametrize("when_full", ["wait", "skip"])
@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (OutcomeRead(3, b"manifest"), messages.SaveOutcome),
        # An abort record, or a commit that was replaced: each rank reads which.
        (OutcomeRead(3), CommitUnknownError),
    ],
)
def test_a_save_that_storage_has_decided_is_dropped_and_the_next_one_begins_only_then(
    play, outcome, told, when_full
):
    resumed = taken_up(play)
    assert resumed.staged(0) is None
    join_second(resumed, when_full=when_full)
    assert resumed.reply(0, "SaveJoin", key=SECOND) is None
    resumed.told(outcome)
    reply = resumed.reply(0, "SaveStaged")
    assert isinstance(reply.error if isinstance(reply, messages.Refused) else reply, told)
    assert resumed.coordination.active == (SECOND,)
    assert isinstance(resumed.task, ReadRecords)


@pytest.mark.parametrize("outcome", [OutcomeRead(), Failed(StorageError("no answer")), None])
def test_a_save_that_nothing_decides_goes_on_where_it_was_taken_up(play, outcome):
    resumed = taken_up(play, outcome)
    resumed.say_again()
    assert isinstance(resumed.task, BuildCommit)
    if outcome is None:
        resumed.told(OutcomeRead(3))  # late: the vote decides
    commit(resumed)
    assert isinstance(resumed.reply(1, "SaveStaged"), messages.SaveOutcome)


def test_a_failure_that_could_not_be_recorded_is_unknown_as_another_could_commit_it(play):
    play.to_writing()
    play.cancel()
    while play.todo:
        play.done(Failed(StorageError("no answer")))
    play.staged(0)
    assert isinstance(play.reply(0, "SaveStaged").error, CommitUnknownError)


# --- plans that outlive a coordinator -------------------------------------------------------------


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
        self.store[stagers_key("node", f"s{number}", "namespace")] = f"s{number}#0"
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
        self._threads = {}
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


def planned_save(world_size=2):
    play = StagedPlay(world_size=world_size)
    play.to_writing()
    return play


def held(rank, stager=None):
    return messages.PartsHeld(KEY, rank, "a1", 1, f"s{rank if stager is None else stager}#0")


def keep_plan(cluster, play, *ranks):
    """Leaves what Ray keeps when the stagers of these ranks have reported what they hold."""

    async def story():
        actor = Actor(play)
        for rank in ranks:
            cluster.add(rank).sealed = [rank]
            assert await actor.call(held(rank)) == messages.Ack()
        return dict(cluster.store)

    cluster.store = asyncio.run(story())


def plans(store):
    return [name for name in store if name.startswith(staged_plan_name("actor"))]


def another_coordinator():
    """Returns the next coordinator's state after it has looked for what it can take up."""

    async def story():
        coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
        plans = StagedPlans("actor", coordination, lambda commands: None, "namespace")
        await plans.resume()
        return coordination

    with ThreadPoolExecutor(1) as pool:  # a loop of its own
        return pool.submit(asyncio.run, story()).result(60)


def test_a_plan_is_stored_once_as_soon_as_ranks_have_their_parts(cluster):
    play = StagedPlay(world_size=2)

    async def story():
        actor = Actor(play)
        play.to_writing()
        actor._carry_out(play.commands)
        await actor._plans.hold(KEY)
        assert len(plans(cluster.store)) == 1
        cluster.is_down = True  # a second try would be a warning
        for rank in range(2):
            assert await actor.call(held(rank)) == messages.Ack()

    asyncio.run(story())
    assert another_coordinator().active == (KEY,)


def test_nobody_is_told_that_bytes_are_held_before_the_plan_is(cluster):
    play = planned_save()

    async def story():
        cluster.is_open.clear()
        actor = Actor(play)
        call = asyncio.ensure_future(actor.call(held(0)))
        again = asyncio.ensure_future(actor.call(held(0)))
        await actor.settled()
        assert not call.done()
        assert not again.done()
        cluster.is_open.set()
        assert await call == await again == messages.Ack()
        return dict(cluster.store)

    # As it was when the stager had its answer: everybody may die now.
    cluster.store = asyncio.run(story())
    assert another_coordinator().active == (KEY,)


def test_the_next_coordinator_asks_all_stagers_of_its_namespace(cluster):
    keep_plan(cluster, planned_save(), 0, 1)
    cluster.store[stagers_key("node", "s2", "another")] = "s2#0"
    cluster.stagers["s2"] = Stager("s2#0")
    coordination = another_coordinator()
    asked = [stager.asked for stager in cluster.stagers.values()]
    assert asked == [["a1"], ["a1"], []]
    assert coordination.held_by("s1#0") == {KEY: [1]}


def test_where_the_plan_is_not_taken_the_rank_is_told_with_a_warning_and_it_is_asked_again(
    cluster, caplog
):
    play = planned_save()

    async def story():
        actor = Actor(play)
        cluster.is_down = True
        told = await actor.call(held(0))
        assert not plans(cluster.store)
        cluster.is_down = False
        await actor._plans.keep()
        return told

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(story()) == messages.Ack()
    assert "Ray's control store did not take its plan" in caplog.text
    assert another_coordinator().active == (KEY,)


def test_the_plan_outlives_all_stagers_and_goes_with_its_save(cluster):
    play = planned_save()

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
    assert not plans(cluster.store)


def test_a_stager_that_is_registered_later_is_asked_too_and_none_twice(cluster):
    keep_plan(cluster, planned_save(2), 0)

    async def go_on():
        coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
        plans = StagedPlans("actor", coordination, lambda commands: None, "namespace")
        await plans.resume()
        cluster.add(1).sealed = [1]
        for _ in range(2):
            await plans.keep()
        return coordination

    assert asyncio.run(go_on()).held_by("s1#0") == {KEY: [1]}
    assert [stager.asked for stager in cluster.stagers.values()] == [["a1"], ["a1"]]


def test_a_save_whose_stager_is_gone_fails_by_the_word_of_its_rank(cluster):
    """Coordinator and stager died together: only the rank knows which one it was."""
    play = planned_save(1)
    keep_plan(cluster, play, 0)
    cluster.stagers.clear()
    resumed = Resumed(world_size=1, epoch=2).take_up(play)
    resumed.send(messages.SaveStaged(KEY, 0, "a1", 1, stager="s0#0"))
    watch = StagerWatch(resumed.coordination, resumed._take, "namespace", lambda: 0.0)

    async def story():
        await watch.look()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(story())
    resumed.end_abort()
    assert "lost" in resumed.reply(0, "SaveStaged").error.message


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
    now_s = [0.0]
    clock = AwakeClock(lambda: now_s[0], 1.0) if lost[-1] == set() else lambda: now_s[0]
    watch = StagerWatch(play.coordination, lambda commands: None, "namespace", clock)

    async def story():
        after = []
        for seconds in passed_s:
            await watch.look()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            after.append({f"s{rank}" for rank in range(2)} - play.coordination.stagers().keys())
            now_s[0] += seconds
        return after

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(story())[-2:] == lost
    told = [record.getMessage() for record in caplog.records]
    assert sorted(message[12:14] for message in told) == sorted(lost[-1])
    assert all("ranks [" in message and "operation 0" in message for message in told)


def test_a_stager_out_of_reach_for_a_moment_is_asked_again_what_it_holds(cluster):
    keep_plan(cluster, planned_save(1), 0)
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
    keep_plan(cluster, planned_save(1), 0)

    async def go_on():
        after = StagedPlay(epoch=2)
        actor = Actor(after)
        actor._resumed.clear()
        left = Heartbeat(KEY.session, 0, 60.0, left=(messages.Left(KEY, "Ctrl-C", True),))
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
    before = planned_save(1)
    coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
    coordination.cancel(KEY, "the user")
    coordination.resume(before.coordination.staged_plan(KEY))
    assert coordination.is_cancelled(KEY)
    assert KEY in coordination.active  # until the abort record is there


# --- Reports to a coordinator that is out of reach ------------------------------------------------


REPORT = messages.PartsWritten(KEY, 0, "a1", 1)
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
    assert 100.0 < sum(told.slept) < bounds.OUT_OF_REACH_S
    assert max(told.slept) == 10.0


def test_one_that_stays_out_of_reach_is_given_up():
    told = Told(repeat(UNREACHABLE))
    with pytest.raises(ActorUnavailableError):
        told.run()
    assert bounds.OUT_OF_REACH_S <= sum(told.slept) < bounds.OUT_OF_REACH_S + 10.0


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
