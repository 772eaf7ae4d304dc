"""The save machine, fed by hand: no storage, no ranks; and what it concludes from silence."""

import dataclasses

import pytest

from ray_dcp.commit_protocol.commands import (
    BuildCommit,
    CollectReplaced,
    CreateAbort,
    CreateRecord,
    Failed,
    Finished,
    MakePlan,
    Overtaken,
    Published,
    PublishMetadata,
    ReadRecords,
    RecordCreated,
    RecordsRead,
    SlotFree,
    SlotTaken,
    WriteTable,
)
from ray_dcp.commit_protocol.liveness import Doing, Heartbeat, Liveness
from ray_dcp.commit_protocol.messages import (
    Left,
    LoadReady,
    OpKey,
    Refused,
    Renumbered,
    SaveOutcome,
    Target,
)
from ray_dcp.commit_protocol.save import REPLACED_SINCE
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    ParticipantError,
    RankDisagreementError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.format.manifest import Verdict
from ray_dcp.options import SaveOptions
from tests.support.protocol import BUILT, KEY, TARGET, Play

# --- Saves ----------------------------------------------------------------------------------------


REPLACED = RecordsRead(4, "attempt a0 committed in slot 3", None, ("__0_0.a0.distcp",))
FULL = StorageError("the disk is full", key="__0_0")


@pytest.fixture
def play():
    return Play()


def write_all(play, **errors):
    for rank in range(play.world_size):
        play.receipt(rank, error=errors.get(f"rank_{rank}"))


def told(play, rank=0, step="SaveReceipt"):
    """Returns a rank's outcome: an error, or what it was told."""
    reply = play.reply(rank, step)
    return reply.error if isinstance(reply, Refused) else reply


def test_a_save_does_its_steps_in_the_order_that_a_crash_can_interrupt():
    play = Play(world_size=3)
    play.to_end(REPLACED)
    tasks = [type(command.task) for command in play.commands if hasattr(command, "task")]
    assert tasks == [
        ReadRecords, MakePlan, BuildCommit, WriteTable, CreateRecord, PublishMetadata,
        CollectReplaced,
    ]  # fmt: skip
    armed = [command.phase for command in play.commands if hasattr(command, "after_s")]
    assert armed == [
        "joining", "reading", "planning", "writing", "building", "table", "record",
        "publishing", "collecting",
    ]  # fmt: skip
    # Each rank got its part of the plan, and all are told the same after the last task.
    assert [play.reply(rank, "SaveJoin").plan.rank for rank in range(3)] == [0, 1, 2]
    assert [told(play, rank) for rank in range(3)] == [SaveOutcome("a1", 5, BUILT.record)] * 3
    assert (play.coordination.active, play.timer) == ((), None)


def test_the_commit_takes_the_slot_after_the_one_that_planning_saw_and_tells_what_was(play):
    decided = (Verdict("a0", True),)
    play.to_writing(dataclasses.replace(REPLACED, decided=decided))
    write_all(play)
    assert (play.task.previous_slot, play.task.decided) == (4, decided)
    play.done(BUILT)
    play.done(Finished())
    assert play.task == CreateRecord(TARGET, 5, BUILT.record)


@pytest.mark.parametrize("step", ["SaveJoin", "SaveReceipt"])
def test_a_request_that_comes_twice_is_answered_twice_the_same(play, step):
    play.to_writing()
    send = play.join if step == "SaveJoin" else play.receipt
    if step == "SaveReceipt":
        assert play.receipt(0) is play.receipt(0) is None
        play.receipt(1)
        for result in (BUILT, Finished(), RecordCreated(1), Published()):
            play.done(result)
        assert isinstance(play.join(1), SaveOutcome)
    first, before = play.reply(0, step), len(play.commands)
    assert send(0) == first
    assert len(play.commands) == before + 1


# Errors of ranks


def test_the_error_holds_the_error_of_every_rank_that_failed():
    play = Play(world_size=4)
    play.to_writing()
    play.lose(0)
    write_all(play, rank_2=FULL, rank_1=StorageError("no route"))
    play.done(RecordCreated(1))
    error = told(play, 3)
    assert (error.message, error.rank) == ("no route", 1)  # before the one that is missing
    assert set(error.failures) == {0, 1, 2}
    assert str(error.failures[2][0]) == "the disk is full [rank 2, key __0_0]"
    assert "ranks 0, 2 failed too" in error.__notes__[0]


def test_a_failure_waits_only_a_moment_for_the_errors_of_other_ranks():
    play = Play(world_size=4)
    play.to_writing()
    play.receipt(1, error=FULL)
    assert (play.timer.after_s, play.task) == (bounds.ERRORS_S, None)
    armed = play.timer
    play.receipt(2, error=FULL)
    play.lose(3)
    assert play.timer is armed  # not prolonged
    play.expire()
    play.done(RecordCreated(1))
    assert set(told(play, 1).failures) == {1, 2, 3}
    # Rank 0 finished its part too late, and learns the same.
    assert play.receipt(0).error is told(play, 1)


def test_a_timer_of_an_earlier_phase_ends_nothing(play):
    play.to_writing()
    assert play.coordination.expired(KEY, "joining") == ()
    assert play.receipt(0) is play.receipt(1) is None
    assert isinstance(play.task, BuildCommit)


# Disagreement


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target": Target("memory://other")}, "rank 1: save to memory://other"),
        ({"options": SaveOptions(overwrite=False)}, "with overwrite=False"),
        ({"world_size": 3}, "world size 3"),
        ("load", "rank 1: load from"),
    ],
)
def test_ranks_that_call_different_things_are_named_with_what_they_asked(play, changed, said):
    play.join(0)
    reply = play.join_load(1) if changed == "load" else play.join(1, **changed)
    assert type(reply.error) is RankDisagreementError
    assert said in reply.error.message
    assert "rank 0: save to memory://ckpt" in reply.error.message
    assert "ray_dcp.train.checkpointer" not in reply.error.message
    assert play.errors("SaveJoin")[0] is reply.error


def test_ranks_that_save_to_local_folders_of_their_own_are_told_what_saves_to_one_place(play):
    for rank in range(4):
        play.join(rank, target=Target(f"/tmp/folder-{rank}"))
    for error in play.errors("SaveJoin").values():
        assert type(error) is RankDisagreementError
        assert "In Ray Train's workers, ray_dcp.train.checkpointer" in error.message


# Fences


@pytest.mark.parametrize("stray", [{"attempt": "a0"}, {"epoch": 7}])
def test_a_receipt_of_another_attempt_or_epoch_is_refused_without_harm(play, stray):
    play.to_writing()
    with pytest.raises(CommitUnknownError) as caught:
        play.receipt(0, **stray)
    assert caught.value.attempt == stray.get("attempt", "a1")
    assert play.receipt(0) is None
    play.receipt(1)
    assert [receipt.file for receipt in play.task.receipts] == [0, 1]
    for result in (BUILT, Finished(), RecordCreated(1), Published()):
        play.done(result)
    for key in (KEY, OpKey("run", 9)):  # one that is over, one that nobody knows
        with pytest.raises(CommitUnknownError):
            play.receipt(0, key=key, **stray)


@pytest.mark.parametrize("ahead_first", [False, True])
def test_after_a_restart_nobody_waits_for_a_rank_that_had_begun_with_the_old_coordinator(
    ahead_first,
):
    play = Play(world_size=2, epoch=2)
    if ahead_first:
        with pytest.raises(CommitUnknownError):
            play.receipt(1, attempt="old", epoch=1)
        play.join(0)
    else:
        play.join(0)
        assert type(play.receipt(1, attempt="old", epoch=1).error) is CommitUnknownError
    error = told(play, step="SaveJoin")
    assert (type(error), error.rank) == (ParticipantError, 1)
    assert "restarted" in error.message


# The vote

OURS = SlotTaken(1, "a1", False, BUILT.record)
DELETED = SlotTaken(1, "d1", False, b"", is_delete=True)
ABOVE = Overtaken(9, "later", was_committed=False)
REMEMBERED = dataclasses.replace(ABOVE, was_committed=True)
NO_ANSWER = Failed(FULL)
NEVER = (NO_ANSWER, SlotFree(1), NO_ANSWER)
"""A commit that does not happen; what comes next is the answer to the abort record."""

VOTES = {
    "the slot has this attempt: the answer was lost": ([OURS], SaveOutcome, ""),
    "an abort of another attempt is passed by": (
        [SlotTaken(1, "other", True, b""), RecordCreated(2)], SaveOutcome, "",
    ),
    "another attempt has won": ([SlotTaken(1, "b7", False, b"")], CheckpointExistsError, "b7"),
    "the place was deleted": ([DELETED], CheckpointExistsError, "the checkpoint id was deleted"),
    "an abort of this attempt": (
        [SlotTaken(1, "a1", True, b"")], SaveCancelledError, "declared failed by somebody else",
    ),
    "what is unknown is read back": ([NO_ANSWER, OURS], SaveOutcome, ""),
    "what did not happen is tried again": (
        [NO_ANSWER, SlotFree(1), RecordCreated(1)], SaveOutcome, "",
    ),
    "what never happens is fenced off": ([*NEVER, RecordCreated(1)], StorageError, "disk is full"),
    "it turns up while it is fenced off": ([*NEVER, OURS], SaveOutcome, ""),
    "the storage says nothing": ([NO_ANSWER] * 4, CommitUnknownError, "'a1'"),
    "too late, below one that decides": (
        [RecordCreated(1, ABOVE)], CheckpointExistsError, "later",
    ),
    "an abort too late: it was committed and replaced": (
        [*NEVER, RecordCreated(1, REMEMBERED)], CheckpointExistsError, "later",
    ),
}  # fmt: skip


@pytest.mark.parametrize("vote", VOTES)
def test_what_the_slots_say_decides_a_commit(play, vote):
    results, outcome, said = VOTES[vote]
    play.to_record()
    for result in results:
        play.done(result)
    if outcome is SaveOutcome:
        assert isinstance(play.task, PublishMetadata)
        play.done(Published())
    elif outcome is not CommitUnknownError:
        assert isinstance(play.task, CollectReplaced)
        assert play.task.keys[-1] == BUILT.table_key
        play.done(Finished())
    assert type(told(play)) is outcome
    assert said in str(told(play))
    assert play.coordination.active == ()


ABORTS = {
    "it passes a delete by and tells of it": (
        [DELETED, RecordCreated(2)], "the id was deleted in slot 1",
    ),
    "one above decides": ([RecordCreated(1, ABOVE)], "attempt later committed in slot 9"),
    "none is needed where no commit was tried": ([NO_ANSWER] * 2, "No abort record"),
}  # fmt: skip


@pytest.mark.parametrize("abort", ABORTS)
def test_a_failure_stays_what_it_was_with_what_its_abort_record_met(play, abort):
    results, note = ABORTS[abort]
    play.to_writing()
    write_all(play, rank_0=StorageError("no route"))
    for result in results:
        play.done(result)
    error = told(play, 1)
    assert (type(error), error.message) == (StorageError, "no route")
    assert note in error.__notes__[-1]


def test_a_vote_that_takes_too_long_is_unknown_to_the_ranks_and_goes_on(play):
    play.to_record()
    play.expire()
    assert type(told(play)) is CommitUnknownError
    play.done(RecordCreated(1))
    assert isinstance(play.task, PublishMetadata)
    play.done(Published())
    assert play.coordination.active == ()
    assert type(play.receipt(0).error) is CommitUnknownError


# What follows


@pytest.mark.parametrize(
    ("results", "warning"),
    [
        ([Failed(FULL)], ".metadata could not be published"),
        ([Published(superseded=True)], REPLACED_SINCE),
        ([Published(), Failed(FULL)], "could not all be deleted"),
    ],
)
@pytest.mark.parametrize("overtaken", [None, REMEMBERED])
def test_what_fails_after_a_commit_is_a_warning_and_the_rest_is_left(
    play, results, warning, overtaken
):
    play.to_record(REPLACED)
    play.done(RecordCreated(5, overtaken))
    for result in results:
        play.done(result)
    assert isinstance(told(play), SaveOutcome)
    assert warning in told(play).warnings[0]
    assert (play.task, play.coordination.active) == (None, ())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_failed_save_deletes_what_it_wrote_after_it_is_fenced_off(play, hangs):
    play.to_writing()
    write_all(play)
    play.fail(InternalError("a receipt does not fit"))
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    assert play.task.keys == ("__0_0.a1.distcp", "__1_0.a1.distcp")
    if hangs:
        play.expire()
        assert play.coordination.active == ()
    play.done(Finished())
    assert play.coordination.active == ()


# Several operations


def test_finished_operations_are_remembered_up_to_a_bound_and_never_begin_again():
    play = Play(world_size=1)
    for seq in range(40):
        play.join(0, key=OpKey("run", seq), error=FULL)
    assert isinstance(play.join(0, key=OpKey("run", 39), error=FULL), Refused)
    with pytest.raises(ParticipantError, match="long ago"):
        play.send(LoadReady(OpKey("run", 3), 0, None))
    # Whoever begins one of them missed it, and all that came since.
    assert play.join(0, key=OpKey("run", 3)) == Renumbered(40)
    assert play.coordination.active == ()


def test_who_is_late_with_the_same_call_twice_has_missed_one_and_makes_the_next():
    play = Play(world_size=2)
    for seq in range(2):
        play.join(0, key=OpKey("run", seq))
        play.expire()
    assert isinstance(play.join(1, key=OpKey("run", 0)), Refused)
    assert play.join(1, key=OpKey("run", 1)) == Renumbered(2)


# --- Slow, frozen, absent and gone ----------------------------------------------------------------


TIMEOUT_S = 10.0


@dataclasses.dataclass
class Beating(Play):
    """A play whose ranks promise to beat."""

    silence_s: float = TIMEOUT_S

    def beat(self, rank, *doings):
        """Returns for whom the rank is told to log long waits."""
        doings = doings or (writing(),)
        return self.coordination.heartbeat(Heartbeat(KEY.session, rank, TIMEOUT_S, doings))

    def check_silence(self, now_s):
        self.now_s = now_s
        self._take(self.coordination.check_silence())


def writing(done=0, total=0, **more):
    return Doing(KEY.seq, KEY.seq, "writing", 5.0, done, total, **more)


# Silence


def test_a_rank_that_is_silent_for_its_timeout_is_blamed_long_before_the_deadline():
    play = Beating(world_size=3)
    play.coordination.place(KEY.session, 2, "pid 7 on host-b")
    play.to_writing()
    play.receipt(0)
    for now_s in (4.0, 8.0, 12.0):
        play.now_s = now_s
        play.beat(1)
    play.check_silence(12.0)
    assert play.timer.after_s == bounds.LOST_ERRORS_S < bounds.ERRORS_S
    play.expire()
    play.done(RecordCreated(1))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is DeadlineError
    assert error.rank == 2
    assert "pid 7 on host-b" in error.message
    assert "every 10 s" in error.message
    assert "12 s ago" in error.message
    assert "holds the GIL), or its machine is out of reach" in error.message


def test_a_rank_that_has_not_joined_or_promised_no_beats_is_not_judged_by_its_silence():
    play = Beating(world_size=2)
    play.coordination.place(KEY.session, 1, "pid 7 on host-b")
    play.join(0)
    play.now_s = 500.0
    play.beat(0)
    play.check_silence(500.0)
    assert play.timer.after_s == SaveOptions().plan_timeout_s
    assert play.errors("SaveJoin") == {}


def test_a_rank_that_began_to_beat_and_then_freezes_is_blamed_without_a_promise():
    play = Beating(world_size=2, silence_s=None)
    play.to_writing()
    play.receipt(0)
    play.beat(1)
    play.check_silence(TIMEOUT_S)
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    assert play.errors("SaveReceipt")[0].rank == 1


def test_beats_for_calls_before_an_operation_are_none_for_it():
    play, key = Beating(world_size=3), OpKey(KEY.session, 5)
    for rank in (0, 1):
        play.join(rank, key=key)
    for play.now_s in (5.0, TIMEOUT_S):
        play.beat(0, Doing(3, 5, "planning"))
        play.beat(1, Doing(3, 4, "planning"))
    play.check_silence(TIMEOUT_S)
    play.expire()
    error = play.errors("SaveJoin")[0]
    assert error.rank == 1
    assert "it left the call" in error.message


def test_who_dies_in_another_session_is_not_missed():
    play = Play(world_size=2)
    play.join(0)
    assert play.coordination.lost("another", [1], "killed") == ()


def test_what_ranks_promised_is_forgotten_when_their_operation_ends():
    liveness = Liveness(lambda: 0.0)
    liveness.requested(KEY, 0, TIMEOUT_S)
    assert liveness.due_s(KEY) == {0: TIMEOUT_S}
    liveness.ended(KEY)
    assert liveness.due_s(KEY) == {}


def test_a_rank_that_speaks_again_is_told_the_outcome_and_not_taken_back():
    play = Beating(world_size=2)
    play.to_writing()
    play.now_s = TIMEOUT_S
    play.beat(0)
    play.check_silence(TIMEOUT_S)
    play.beat(1)
    assert play.receipt(1) is None
    play.receipt(0)
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    errors = play.errors("SaveReceipt")
    assert errors[0] is errors[1]
    assert play.receipt(1).error is errors[0]


# What is told of a rank that is missing


def writes(**doing):
    def begin(play):
        play.to_writing()
        play.receipt(0)
        play.beat(1, writing(**doing))

    return begin


def ended_before(play):
    play.to_end()
    play.join(0, key=OpKey(KEY.session, 1))


def captures(play):
    play.join(0)
    play.beat(1, Doing(KEY.seq, KEY.seq, "capturing", 598.0))


FATES = {
    "slow": (
        writes(done=1_200_000_000, total=4_000_000_000), 0.4,
        "rank 1 last wrote 1.2 of 4.0 GB 0.4 s ago (slow)",
    ),
    "stuck": (
        writes(done=3_000_000, total=4_000_000, quiet_s=300.0, key="__1_0.a1.distcp"), 0.0,
        "last wrote 3.0 of 4.0 MB 300 s ago (stuck in __1_0.a1.distcp)",
    ),
    "beats no more": (writes(done=1, total=2), 19.0, "rank 1 was last heard 19 s ago"),
    "called before": (
        ended_before, 43.0,
        "rank 1 never called: its last operation was #0 (save to memory://ckpt), which ended "
        "43 s ago",
    ),
    "captures": (captures, 0.0, "rank 1 has been capturing for 598.0 s"),
    "was never heard": (
        lambda play: play.join(0), 600.0,
        "rank 1 was never heard by this coordinator, which began 600 s ago",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fate", FATES)
def test_a_deadline_says_what_is_known_of_the_rank_that_missed_it(fate):
    begin, after_s, said = FATES[fate]
    play = Beating(world_size=2)
    begin(play)
    play.now_s += after_s
    play.expire()
    if play.todo:
        play.done(RecordCreated(1))
    error = next(reply.error for reply in play.replies.values() if isinstance(reply, Refused))
    assert error.rank == 1
    assert said in error.message


def at(play, now_s, *beating):
    """Lets ranks beat, and the coordinator look; returns what long waits the ranks are told."""
    play.now_s = now_s
    told = [play.beat(rank, Doing(KEY.seq, KEY.seq, "waiting")) for rank in beating]
    play.check_silence(now_s)
    return told


def test_who_waits_for_long_is_told_once_for_whom():
    play = Beating(world_size=4)
    play.coordination.place(KEY.session, 3, "pid 7 on host-b")
    play.join(2)
    play.join(1)
    for now_s in range(0, 31, 5):
        assert at(play, now_s, 1, 2) == [(), ()]
    (wait,), none = at(play, 36, 1, 2)
    assert none == ()
    assert (
        "operation 0 of session 'run' (save to memory://ckpt) has been joining for" in wait.lower()
    )
    assert "it waits for ranks 0, 3: rank 0 was never heard" in wait
    assert "rank 3 (pid 7 on host-b) was never heard" in wait
    for now_s in range(40, 100, 5):
        assert at(play, now_s, 1, 2) == [(), ()]


# Cancelling, leaving, and ranks ahead of a restarted coordinator


@pytest.mark.parametrize("why", ["its commit has begun", "it failed by itself", "it is over"])
def test_a_save_is_not_cancelled_nor_left_when_that_is_too_late(why):
    play = Play()
    if why == "its commit has begun":
        play.to_record()
    elif why == "it is over":
        play.to_end()
        assert play.coordination.withdraw(1, Left(KEY, "late", True)) == ()
        assert isinstance(play.join(1), SaveOutcome)
    else:
        play.join(0, error=StorageError("full"))
        play.join(1)
    assert play.coordination.cancel(KEY, "too late") == ()
    assert not play.coordination.is_cancelled(KEY)


def test_a_save_that_is_cancelled_before_anybody_has_joined_fails_the_first_who_does():
    play = Play()
    assert play.coordination.cancel(KEY, "not today") == ()
    assert play.coordination.is_cancelled(KEY)
    play.join(0)
    assert type(play.errors("SaveJoin")[0]) is SaveCancelledError
    assert play.coordination.is_cancelled(KEY)
    assert type(play.join(1).error) is SaveCancelledError


def test_a_rank_that_left_before_anybody_joined_fails_those_who_do():
    play = Play(world_size=2)
    assert play.coordination.withdraw(1, Left(KEY, "its disk is gone")) == ()
    play.join(0)
    error = play.errors("SaveJoin")[0]
    assert (type(error), error.rank) == (ParticipantError, 1)
    assert "it left the call: its disk is gone" in error.message


@pytest.mark.parametrize("first", [False, True])
def test_ranks_that_join_again_after_a_restart_do_not_wait_for_one_that_went_on(first):
    play = Play(world_size=3)
    at_work = Heartbeat(KEY.session, 2, TIMEOUT_S, (writing(),), (KEY,))
    if first:
        assert play.coordination.present(at_work) == ()
        assert isinstance(play.coordination.outcome(KEY), Refused)
    play.join(0)
    if not first:
        play._take(play.coordination.present(at_work))
    play.join(1)
    error = play.errors("SaveJoin")[0]
    assert (type(error), error.rank) == (ParticipantError, 2)
    assert "had begun it before" in error.message
