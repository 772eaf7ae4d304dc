"""The machine of asynchronous saves, fed by hand: no storage, no ranks, no stagers."""

from __future__ import annotations

import pickle

import pytest

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
from ray_dcp.commit_protocol.liveness import Doing, Heartbeat
from ray_dcp.commit_protocol.messages import (
    Ack,
    Left,
    OpKey,
    PartsHeld,
    PartsWritten,
    Refused,
    SaveGo,
    SaveOutcome,
    SaveStaged,
    Target,
)
from ray_dcp.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    ParticipantError,
    SaveSkippedError,
    StorageError,
)
from ray_dcp.options import SaveOptions
from tests.support.protocol import BUILT, KEY, NOTHING, TARGET, Play, planned, receipt_file


class StagedPlay(Play):
    """A `Play` whose saves are asynchronous, with a stager `s<rank>` for each rank."""

    def join_staged(self, rank, *, options=None, **changed):
        return self.join(rank, options=options or self.options, staged=True, **changed)

    def held(self, rank, *, key=KEY, attempt="a1", epoch=1):
        return self.send(PartsHeld(key, rank, attempt, epoch, f"s{rank}"))

    def written(self, rank, *files, key=KEY, error=None, attempt="a1"):
        receipts = tuple(map(receipt_file, files))
        return self.send(PartsWritten(key, rank, attempt, 1, receipts, error))

    def staged(self, rank, *, key=KEY, error=None, attempt="a1"):
        return self.send(SaveStaged(key, rank, attempt, 1, error))

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
            assert self.held(rank, key=key) == Ack()
            assert self.staged(rank, key=key) is None

    def write_all(self, *, ranks=None, key=KEY, attempt="a1"):
        for rank in range(self.world_size) if ranks is None else ranks:
            for file in (2 * rank, 2 * rank + 1):
                assert self.written(rank, file, key=key, attempt=attempt) == Ack()


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
    assert isinstance(play.reply(0, "SaveStaged"), SaveOutcome)
    assert isinstance(play.staged(1), SaveOutcome)


def fails(play, *, expire=True):
    """Ends a save that fails; returns its error, which all who wait get."""
    play.end_abort(expire=expire)
    errors = [play.reply(rank, "SaveStaged") for rank in range(2)]
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


def test_a_file_that_is_reported_twice_counts_once(play):
    play.to_staged()
    play.write_all()
    assert play.written(0, 0, 1) == Ack()
    task = commit(play)
    assert [receipt.file for receipt in task.receipts] == [0, 1, 2, 3]


def test_a_file_that_its_rank_does_not_write_counts_for_nobody(play):
    play.to_staged()
    assert play.written(0, 2) == Ack()
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
    play.done(planned(2, files=2))
    assert isinstance(play.reply(0, "SaveJoin", key=SECOND), SaveGo)


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
        left = (Left(SECOND, "it waited for long"),) if how == "says so" else ()
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
            assert self.held(rank) == Ack()
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
    assert isinstance(third.reply(0, "SaveStaged"), SaveOutcome)


@pytest.mark.parametrize("late", ["before its rank waits", "after its rank waits"])
def test_a_stager_that_reports_late_takes_nothing_from_the_one_that_holds_the_bytes_now(
    resumed, late
):
    """Rank 0 turned from s9, which froze, to s0: both hold its bytes, and s9 is killed."""
    if late == "before its rank waits":
        resumed.held(0)
    else:
        resumed.send(SaveStaged(KEY, 0, "a1", 1, held=PartsHeld(KEY, 0, "a1", 1, "s0")))
    assert resumed.send(PartsHeld(KEY, 0, "a1", 1, "s9")) == Ack()
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
    assert isinstance(refused, Refused)
    assert "was restarted" in refused.error.message


def taken_up(play, outcome=None):
    play.to_staged()
    return Resumed(world_size=play.world_size, epoch=2).take_up(play, outcome)


@pytest.mark.parametrize("when_full", ["wait", "skip"])
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
    reply = resumed.reply(0, "SaveStaged")
    assert isinstance(reply.error if isinstance(reply, Refused) else reply, told)
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
    assert isinstance(resumed.reply(1, "SaveStaged"), SaveOutcome)


def test_a_failure_that_could_not_be_recorded_is_unknown_as_another_could_commit_it(play):
    play.to_writing()
    play.cancel()
    while play.todo:
        play.done(Failed(StorageError("no answer")))
    play.staged(0)
    assert isinstance(play.reply(0, "SaveStaged").error, CommitUnknownError)
