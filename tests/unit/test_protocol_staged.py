"""Asynchronous saves: the machine, fed by hand; who is helped; plans that outlive a coordinator."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import ray_dcp
from ray_dcp.core.values import FilePlan, RankPlan
from ray_dcp.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    InternalError,
    ParticipantError,
    SaveCancelledError,
    SaveSkippedError,
    StorageError,
)
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.commands import (
    Answer,
    BuildCommit,
    Failed,
    Finished,
    OutcomeRead,
    Published,
    ReadOutcome,
    ReadRecords,
    RecordCreated,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.holders import HELP_COSTS_S, LEAST_WAIT_S, Pace, find_stragglers
from ray_dcp.protocol.liveness import Heartbeat
from ray_dcp.protocol.messages import (
    Ack,
    FileReceipt,
    OpKey,
    PartsHeld,
    PartsWritten,
    Refused,
    SaveGo,
    SaveOutcome,
    SaveStaged,
    TakeOver,
    Target,
)
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.coordinator import Coordinator
from ray_dcp.runtime.recovery import StagedPlans
from ray_dcp.runtime.tasks import perform, settle
from ray_dcp.stage.values import StageKey, StageProgress
from tests.inline_ranks import Shell
from tests.protocol_play import BUILT, KEY, NOTHING, TARGET, Play, join_of, planned, receipt_file

# --- The machine, fed by hand ---------------------------------------------------------------------


FILES_OF_A_RANK = 2


def staged_plan(world_size):
    """Returns a plan in which rank r writes the files 2 r and 2 r + 1."""
    found = planned(world_size)
    parts = tuple(
        RankPlan(rank, "torch_save", tuple(file_plan(FILES_OF_A_RANK * rank + i) for i in range(2)))
        for rank in range(world_size)
    )
    return replace(found, parts=parts)


def file_plan(file):
    ints = np.zeros(0, np.int64)
    return FilePlan(
        file, f"__{file}.{{attempt}}.distcp", b"", 0, (), ints, ints, ints, ints, ints, ints,
        ints, ints, ints, ints, ints, ints,
    )  # fmt: skip


class StagedPlay(Play):
    """A `Play` whose saves are asynchronous, with a stager `s<rank>` for each rank."""

    def join_staged(self, rank, *, options=None, **changed):
        return self.join(rank, options=options or self.options, staged=True, **changed)

    def held(self, rank, *, key=KEY, incarnation=0, stager=None, attempt="a1", epoch=1):
        stager = stager or f"s{rank}"
        return self.send(PartsHeld(key, rank, attempt, epoch, stager, incarnation))

    def written(self, rank, *files, key=KEY, incarnation=0, error=None, attempt="a1"):
        receipts = tuple(file if isinstance(file, FileReceipt) else of_file(file) for file in files)
        stager = f"s{rank}.{incarnation}"
        return self.send(PartsWritten(key, rank, attempt, 1, stager, incarnation, receipts, error))

    def staged(self, rank, *, key=KEY, incarnation=0, error=None, attempt="a1"):
        return self.send(SaveStaged(key, rank, attempt, 1, incarnation, error))

    def lose_stager(self, stager):
        return self._take(self.coordination.stager_lost(stager, "it died"))

    def lag(self, rank, key=KEY):
        commands = self.coordination.reassign(key, rank, "it is slow")
        self._take(commands)
        return commands

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
        self.done(staged_plan(self.world_size))

    def to_staged(self, **changed):
        self.to_writing(**changed)
        key = changed.get("key", KEY)
        for rank in range(self.world_size):
            assert self.held(rank, key=key) == Ack()
            assert self.staged(rank, key=key) is None

    def write_all(self, *, ranks=None, key=KEY, incarnation=0, attempt="a1"):
        for rank in range(self.world_size) if ranks is None else ranks:
            for file in (2 * rank, 2 * rank + 1):
                noted = self.written(rank, file, key=key, incarnation=incarnation, attempt=attempt)
                assert noted == Ack()


def of_file(file, digest=bytes(16)):
    return replace(receipt_file(file), digest=digest)


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
def test_it_commits_when_every_file_has_a_receipt_whoever_wrote_it(play, staged_first):
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
    assert isinstance(play.reply(0, "SaveStaged 0"), SaveOutcome)
    assert isinstance(play.staged(1), SaveOutcome)


def test_a_rank_that_dies_when_a_stager_holds_its_bytes_does_not_matter(play):
    play.to_staged()
    play.lag(0)  # it is asked to hand over to another one; its slow stager has all that it had
    play.lose(0, 1)
    play.write_all()
    commit(play)
    early = StagedPlay()
    early.to_writing()
    early.write_all()  # the receipts came before it was known who holds the bytes
    for rank in range(2):
        early.held(rank)
    early.lose(0, 1)
    commit(early)


def fails(play, *, expire=True):
    """Ends a save that fails; returns its error, which all who wait get."""
    play.end_abort(expire=expire)
    errors = [play.reply(rank, "SaveStaged 0") for rank in range(2)]
    (error,) = {reply.error for reply in errors if isinstance(reply, Refused)}
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


def test_a_file_told_of_twice_counts_once_and_with_other_bytes_fails_the_save(play):
    play.to_staged()
    play.write_all()
    assert play.written(0, 0, incarnation=1) == Ack()
    task = commit(play)
    assert [receipt.file for receipt in task.receipts] == [0, 1, 2, 3]
    other = StagedPlay()
    other.to_staged()
    other.written(0, 0)
    other.written(0, of_file(0, b"x" * 16), incarnation=1)
    assert isinstance(fails(other), InternalError)


def test_an_error_of_a_stager_fails_the_save_and_stagers_are_told_so(play):
    play.to_staged()
    assert play.written(1, error=StorageError("the disk is full", key="__2")) == Ack()
    error = fails(play)
    assert (type(error), error.rank) == (StorageError, 1)
    assert play.written(0, 0).error is error


def test_a_lost_stager_makes_its_living_rank_hand_its_unwritten_files_over(play):
    play.to_staged()
    play.written(0, 1)
    play.lose_stager("s0")
    asked = play.reply(0, "SaveStaged 0")
    assert asked == TakeOver(1, (0,), "it died", lost=True)
    assert play.held(0, incarnation=1, stager="t0") == Ack()
    assert play.staged(0, incarnation=1) is None
    play.written(0, 0, incarnation=1)
    play.write_all(ranks=[1])
    play.lose_stager("s1")  # which has nothing more to write
    commit(play)
    assert isinstance(play.reply(0, "SaveStaged 1"), SaveOutcome)


@pytest.mark.parametrize("stager_first", [True, False])
def test_a_save_fails_that_lost_a_stager_and_the_rank_whose_bytes_it_held(play, stager_first):
    play.to_staged()
    if stager_first:
        play.lose_stager("s0")
    play.lose(0)
    if not stager_first:
        play.lose_stager("s0")
    play.end_abort(expire=True)
    error = play.reply(1, "SaveStaged 0").error
    assert (type(error), error.rank) == (ParticipantError, 0)
    assert stager_first or "2 files unwritten" in error.message


def test_a_stager_that_lags_is_helped_once_and_whoever_is_first_counts(play):
    play.to_staged()
    play.write_all(ranks=[1])
    assert len(play.lag(0)) == 1
    assert play.lag(0) == ()
    assert play.reply(0, "SaveStaged 0").lost is False
    play.held(0, incarnation=1, stager="s1")
    play.staged(0, incarnation=1)
    assert play.written(0, error=StorageError("late")) == Ack()  # it was overtaken
    play.written(0, 0)
    play.written(0, 0, incarnation=1)
    play.written(0, 1, incarnation=1)
    task = commit(play)
    assert sorted(receipt.file for receipt in task.receipts) == [0, 1, 2, 3]


def test_who_is_much_slower_than_the_others_is_helped(play):
    play.to_staged()
    for now_s, written in ((0.0, 0), (1.0, 1)):
        play._take(play.coordination.stager_heard({KEY: {0: (written, 100)}}, now_s))
    assert play.reply(0, "SaveStaged 0") is None
    play.write_all(ranks=[1])
    play._take(play.coordination.stager_heard({KEY: {0: (2, 100)}}, 9.0))
    asked = play.reply(0, "SaveStaged 0")
    assert (asked.files, asked.lost, asked.helpers) == ((0, 1), False, ("s1",))
    assert "2 of 100 bytes" in asked.reason


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


# --- the queue ----------------------------------------------------------------------------------

SECOND = OpKey("run", 1)
ELSEWHERE = Target("memory://other")


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
    play.done(staged_plan(2))
    assert isinstance(play.reply(0, "SaveJoin", key=SECOND), SaveGo)


def test_a_save_that_is_queued_for_long_says_behind_which_one(play):
    now = [0.0]
    play.coordination = Coordination(epoch=1, new_attempt=lambda: "a1", clock=lambda: now[0])
    play.to_staged()
    join_second(play)
    told = []
    for now[0] in range(0, 50, 5):
        told += play.coordination.hear(Heartbeat("run", 0, 60.0))
        play.coordination.listen()
    (wait,) = told
    assert "Operation 1 of session 'run' (save to memory://other) has been queued for 30 s" in wait
    assert "it waits for operation 0 (save to memory://ckpt), which is writing" in wait


def test_two_saves_are_under_way_when_two_are_allowed(play):
    play.to_staged()
    join_second(play, max_pending=2)
    assert isinstance(play.task, ReadRecords)


def test_a_save_is_skipped_on_all_ranks_or_on_none(play):
    play.to_staged()
    join_second(play, when_full="skip")
    for rank in range(2):
        assert isinstance(play.reply(rank, "SaveJoin", key=SECOND).error, SaveSkippedError)
    play.write_all()
    commit(play)


@pytest.mark.parametrize("begun", [False, True])
def test_a_save_replaces_one_of_which_nothing_is_written(play, begun):
    play.to_staged()
    if begun:
        play.written(0, 0)
    join_second(play, when_full="replace")
    if begun:
        assert not play.todo
        play.write_all()
        commit(play)
    else:
        play.end_abort()
        assert isinstance(play.reply(0, "SaveStaged 0").error, SaveCancelledError)
    assert isinstance(play.task, ReadRecords)


def test_two_saves_of_one_id_are_not_under_way_at_once(play):
    play.to_staged()
    for rank in range(2):
        play.join_staged(rank, key=SECOND, options=SaveOptions(max_pending=2))
    error = play.reply(1, "SaveJoin", key=SECOND).error
    assert isinstance(error, CheckpointExistsError)
    assert "operation 0" in error.message


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
            assert self.held(rank) == Ack()
            self.staged(rank)
        self.write_all()


@pytest.fixture
def resumed(play):
    play.to_writing()
    play.held(0)
    play.written(0, 0, 1)
    return Resumed(world_size=play.world_size, epoch=2).take_up(play)


def test_a_save_is_taken_up_twice_and_committed_under_the_newest_epoch(resumed):
    third = Resumed(world_size=2, epoch=3).take_up(resumed)
    third.say_again()
    task = commit(third)
    assert (task.attempt, task.epoch) == ("a1", 3)
    assert {file.file for file in task.receipts} == {0, 1, 2, 3}
    assert isinstance(third.reply(0, "SaveStaged 0"), SaveOutcome)


def test_a_dead_rank_does_not_matter_once_its_stager_has_said_that_it_holds_its_bytes(resumed):
    resumed.held(1)
    resumed.lose(1)
    assert not resumed.todo
    resumed.lose(0)
    resumed.held(0)
    resumed.write_all(ranks=[0, 1])
    assert "lost" in resumed.task.reason


def taken_up(play, outcome=None):
    play.to_staged()
    return Resumed(world_size=play.world_size, epoch=2).take_up(play, outcome)


@pytest.mark.parametrize("when_full", ["wait", "skip", "replace"])
@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (OutcomeRead(3, b"manifest"), SaveOutcome),
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
    reply = resumed.reply(0, "SaveStaged 0")
    assert isinstance(reply.error if isinstance(reply, Refused) else reply, told)
    assert resumed.coordination.active == (SECOND,)
    assert isinstance(resumed.task, ReadRecords)


def test_a_failure_that_could_not_be_recorded_is_unknown_as_another_could_commit_it(play):
    play.to_writing()
    play.cancel()
    while play.todo:
        play.done(Failed(StorageError("no answer")))
    play.staged(0)
    assert isinstance(play.reply(0, "SaveStaged 0").error, CommitUnknownError)


# --- When a slow stager is helped -----------------------------------------------------------------


def others(done_s: float, count: int = 3) -> dict[int, Pace]:
    return {rank: Pace(100, 100, done_s=done_s) for rank in range(1, count + 1)}


@pytest.mark.parametrize("usual_s", [0.6, 4.0, 60.0])
def test_a_tenth_of_the_pace_is_seen_as_soon_as_the_others_are_done(usual_s):
    assert find_stragglers({0: Pace(10, 100), **others(usual_s)}, usual_s) == {
        0: f"after {usual_s:.1f} s 10 of 100 bytes were written, where others took "
        f"{usual_s:.1f} s for theirs"
    }
    assert find_stragglers({0: Pace(9, 100), **others(usual_s)}, 0.99 * usual_s) == {}


def test_what_has_written_nothing_is_helped_but_not_at_once():
    paces = {0: Pace(0, 100), **others(0.1)}
    assert find_stragglers(paces, 0.9 * LEAST_WAIT_S) == {}
    assert set(find_stragglers(paces, LEAST_WAIT_S)) == {0}


def test_nobody_is_helped_who_ends_before_help_could_come():
    """Ten times as slow as the others, but with less left to do than help costs."""
    elapsed_s = 0.6
    left = HELP_COSTS_S / elapsed_s
    soon, late = round(1000 / (1 + 0.9 * left)), round(1000 / (1 + 1.1 * left))
    assert find_stragglers({0: Pace(soon, 1000), **others(0.06)}, elapsed_s) == {}
    assert set(find_stragglers({0: Pace(late, 1000), **others(0.06)}, elapsed_s)) == {0}


def test_nobody_is_helped_who_takes_less_than_twice_as_long():
    assert find_stragglers({0: Pace(55, 100), **others(10.0)}, 10.0) == {}
    assert set(find_stragglers({0: Pace(45, 100), **others(10.0)}, 10.0)) == {0}


def test_nobody_is_helped_before_half_of_the_ranks_are_done():
    slow = {rank: Pace(1, 100) for rank in (10, 11, 12)}
    assert find_stragglers({**slow, **others(1.0, count=2)}, 50.0) == {}
    assert set(find_stragglers({**slow, **others(1.0, count=3)}, 50.0)) == {10, 11, 12}


def test_a_rank_without_bytes_is_never_helped():
    assert find_stragglers({0: Pace(0, 0), **others(1.0)}, 50.0) == {}


# --- Plans that outlive a coordinator ------------------------------------------------------------


class Stager:
    """What a coordinator calls of a stager."""

    def __init__(self, name, gate=None):
        self.name, self.gate = name, gate
        self.plans = {}
        self.sealed = []
        self.asked = []
        for method in ("keep_plan", "plan_of", "drop_plan", "shares"):
            setattr(self, method, SimpleNamespace(remote=getattr(self, f"_{method}")))

    async def _keep_plan(self, name, data):
        if self.gate is not None:
            await self.gate.wait()
        self.plans[name] = data

    async def _plan_of(self, name):
        return self.plans.get(name)

    async def _drop_plan(self, name):
        self.plans.pop(name, None)

    async def _shares(self, attempt):
        self.asked.append(attempt)
        keys = [StageKey(f"1:{KEY.seq}:{KEY.session}", rank, attempt) for rank in self.sealed]
        return self.name, [StageProgress(key, 8, 8, True, ()) for key in keys]


class Cluster:
    """Ray's control store and stagers, by the names of their actors."""

    def __init__(self, monkeypatch):
        self.stagers = {}
        self.store = {}
        monkeypatch.setattr(ray_calls, "get_actor", self._get_actor)
        monkeypatch.setattr(ray_private, "remember", self._remember)
        monkeypatch.setattr(ray_private, "recall", lambda name: self.store.get(name, ""))
        monkeypatch.setattr(
            ray_private,
            "names_from",
            lambda prefix: [n for n in self.store if n.startswith(prefix)],
        )

    def add(self, number, gate=None):
        self.stagers[f"s{number}"] = Stager(f"s{number}#0", gate)
        return self.stagers[f"s{number}"]

    def _get_actor(self, name, namespace):
        if name not in self.stagers:
            raise ValueError(f"no actor {name}")
        return self.stagers[name]

    def _remember(self, name, text):
        if text:
            self.store[name] = text
        else:
            self.store.pop(name, None)


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


class Actor(Coordinator):
    """A coordinator without Ray, in which the save of a play is planned_play."""

    def __init__(self, play):
        self._loop = asyncio.get_running_loop()
        self._called, self._resumed = asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._waiting, self._watching, self._timers, self._tasks = {}, {}, {}, set()
        self._performing = 0
        nothing = lambda *_: None  # noqa: E731
        self._tracing = SimpleNamespace(hears=nothing, hears_together=nothing, tells=nothing)
        self._switchboard = SimpleNamespace(tidy=lambda: None)
        self._together = SimpleNamespace(answer=nothing, tell=nothing, call=self._told)
        self._coordination = play.coordination
        self._plans = StagedPlans("actor", play.coordination, self._carry_out, "namespace")

    async def _perform(self, command):
        """Leaves its tasks undone."""

    async def _told(self, message, beats_s):
        """Hears nothing from the machine."""

    async def settled(self):
        """Lets everything go on that can."""
        for _ in range(50):
            await asyncio.sleep(0)


def planned_play(world_size=2):
    play = StagedPlay(world_size=world_size)
    play.to_writing()
    return play


def held_by_stager(rank, stager=None):
    return PartsHeld(KEY, rank, "a1", 1, f"s{rank if stager is None else stager}#0")


def another_coordinator():
    """Returns the next coordinator's state after it has looked for what it can take up."""

    async def story():
        coordination = Coordination(epoch=2, new_attempt=lambda: "a2")
        plans = StagedPlans("actor", coordination, lambda commands: None, "namespace")
        await plans.resume()
        return coordination

    return asyncio.run(story())


def test_nobody_is_told_that_bytes_are_held_before_the_plan_is(cluster):
    play = planned_play()

    async def story():
        gate = asyncio.Event()
        cluster.add(0, gate)
        actor = Actor(play)
        call = asyncio.ensure_future(actor.call(held_by_stager(0)))
        again = asyncio.ensure_future(actor.call(held_by_stager(0)))
        await actor.settled()
        assert not call.done()
        assert not again.done()
        gate.set()
        assert await call == await again == Ack()
        return dict(cluster.store)

    # As it was when the rank was told: everybody may die now.
    cluster.store = asyncio.run(story())
    assert another_coordinator().active == (KEY,)


def test_a_rank_is_told_only_when_its_own_stager_would_be_asked(cluster):
    play = planned_play()

    async def story():
        actor = Actor(play)
        for rank in range(2):
            cluster.add(rank).sealed = [rank]
            assert await actor.call(held_by_stager(rank)) == Ack()
        return dict(cluster.store)

    cluster.store = asyncio.run(story())
    coordination = another_coordinator()
    assert [stager.asked for stager in cluster.stagers.values()] == [["a1"], ["a1"]]
    assert coordination.held_by("s1#0") == {KEY: [1]}


def test_a_stager_that_is_lost_has_its_plan_kept_by_another(cluster):
    play = planned_play()

    async def story():
        actor = Actor(play)
        for number in range(3):
            cluster.add(number)
        for rank in range(2):
            await actor.call(held_by_stager(rank))
        await actor._plans.keep()
        for number in (0, 1):
            del cluster.stagers[f"s{number}"]
            actor._plans.lost(f"s{number}#0")
        taken = PartsHeld(KEY, 0, "a1", 1, "s2#0", incarnation=1)
        assert await actor.call(taken) == Ack()
        return dict(cluster.store)

    cluster.store = asyncio.run(story())
    assert another_coordinator().active == (KEY,)


@pytest.mark.parametrize("ended", ["committed", "aborted"])
def test_a_save_that_had_ended_does_not_keep_the_next_one_waiting(tmp_path, ended):
    """Its plan may be there still: whoever ended it died before it could forget it."""
    target = Target(str(tmp_path / "c"))
    before = StagedPlay()
    before.to_writing(target=target)
    planned_save = before.coordination.staged_plan(KEY)
    attempt = planned_save.attempt
    if ended == "committed":
        handle = ray_dcp.async_save({"x": 1}, checkpoint_id=target.url, no_dist=True)
        handle.committed(180)
        attempt = handle.report().attempt
        (tmp_path / "c" / ".metadata").unlink()  # it did not come to that
    else:
        settle(target, attempt, reason="played", rank=None)
    planned_save = pickle.loads(pickle.dumps(planned_save))
    object.__setattr__(planned_save, "attempt", attempt)

    shell = Shell(Coordination(epoch=2, new_attempt=lambda: "a2"), perform)
    shell._carry_out(shell.coordination.resume(planned_save))
    elsewhere = Target(str(tmp_path / "d"))
    for rank in range(2):
        assert not shell.receive(join_of(rank, key=SECOND, target=elsewhere, staged=True))
    while shell.tasks and KEY in shell.coordination.active:
        shell.perform(0)
    assert shell.coordination.active == (SECOND,)
    assert len(shell.tasks) == 1  # what the second one begins with
    assert (tmp_path / "c" / ".metadata").exists() == (ended == "committed")
