"""The save machine, fed by hand: no storage, no ranks."""

import dataclasses
import pickle

import pytest

from ray_dcp.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    ParticipantError,
    PlanConflictError,
    RankDisagreementError,
    SaveCancelledError,
    StorageError,
    UnsupportedValueError,
)
from ray_dcp.format.manifest import Verdict
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.commands import (
    BuildCommit,
    CollectReplaced,
    CreateAbort,
    CreateRecord,
    Failed,
    Finished,
    MakeMetadata,
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
from ray_dcp.protocol.messages import (
    LoadReady,
    OpKey,
    Refused,
    Renumbered,
    SaveGo,
    SaveOutcome,
    SaveReceipt,
    Target,
)
from ray_dcp.protocol.operation import GRACE_S
from ray_dcp.protocol.save import REPLACED_SINCE
from tests.protocol_play import BUILT, KEY, NOTHING, TARGET, Play, planned, receipt_file

REPLACED = RecordsRead(4, "attempt a0 committed in slot 3", None, ("__0_0.a0.distcp",))
FULL = StorageError("the disk is full", key="__0_0")


@pytest.fixture
def play():
    return Play()


def join_all(play, **changed):
    for rank in range(play.world_size):
        play.join(rank, **changed)


def write_all(play, **errors):
    for rank in range(play.world_size):
        play.receipt(rank, error=errors.get(f"rank_{rank}"))


def told(play, rank=0, step="SaveReceipt"):
    """Returns a rank's outcome: an error, or what it was told."""
    reply = play.reply(rank, step)
    return reply.error if isinstance(reply, Refused) else reply


def test_a_save_does_its_steps_in_the_order_that_a_crash_can_interrupt():
    play = Play(world_size=3, options=SaveOptions(stock_metadata="later"))
    play.to_end(REPLACED)
    tasks = [type(command.task) for command in play.commands if hasattr(command, "task")]
    assert tasks == [
        ReadRecords, MakePlan, BuildCommit, WriteTable, CreateRecord, PublishMetadata,
        CollectReplaced, MakeMetadata,
    ]  # fmt: skip
    armed = [command.phase for command in play.commands if hasattr(command, "after_s")]
    assert armed == [
        "joining", "reading", "planning", "writing", "building", "table", "record",
        "publishing", "collecting", "projecting",
    ]  # fmt: skip
    # Each rank got its part of the plan, and all are told the same before the last task.
    assert [play.reply(rank, "SaveJoin").plan.rank for rank in range(3)] == [0, 1, 2]
    assert [told(play, rank) for rank in range(3)] == [SaveOutcome("a1", 5, BUILT.record)] * 3
    play.done(Failed(FULL))
    assert (play.coordination.active, play.timer) == ((), None)


def test_the_commit_takes_the_slot_after_the_one_that_planning_saw_and_tells_what_was(play):
    decided = (Verdict("a0", True),)
    play.to_writing(dataclasses.replace(REPLACED, decided=decided))
    write_all(play)
    assert (play.task.previous_slot, play.task.decided) == (4, decided)
    play.done(BUILT)
    play.done(Finished())
    assert play.task == CreateRecord(TARGET, 5, BUILT.record)


def test_rows_are_handed_to_the_plan_in_the_order_of_ranks_once_the_last_has_joined():
    play = Play(world_size=3)
    play.join(2, rows=b"two")
    play.join(0, rows=b"zero")
    assert play.task is None
    play.join(1, rows=b"one")
    assert play.task == ReadRecords(TARGET)
    play.done(NOTHING)
    assert isinstance(play.task, MakePlan)
    assert (play.task.columns, play.task.nodes) == ((b"zero", b"one", b"two"), (0, 1, 2))


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


def test_an_error_at_join_fails_all_ranks_with_the_original_error_also_after_a_pickle():
    play = Play(world_size=3)
    play.join(0)
    play.join(1, error=UnsupportedValueError("a quantised tensor", key="w"))
    play.join(2)
    errors = pickle.loads(pickle.dumps(play.errors("SaveJoin")))
    assert sorted(errors) == [0, 1, 2]
    assert {(type(e), e.rank, e.key) for e in errors.values()} == {(UnsupportedValueError, 1, "w")}
    assert [e.message for e, _ in errors[0].failures.values()] == ["a quantised tensor"]
    assert play.task is None


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
    assert (play.timer.after_s, play.task) == (GRACE_S, None)
    armed = play.timer
    play.receipt(2, error=FULL)
    play.lose(3)
    assert play.timer is armed  # not prolonged
    play.expire()
    play.done(RecordCreated(1))
    assert set(told(play, 1).failures) == {1, 2, 3}
    # Rank 0 finished its part too late, and learns the same.
    assert play.receipt(0).error is told(play, 1)


# Deadlines and lost ranks


def test_the_deadline_of_joining_names_the_missing_ranks_which_are_told_it_too():
    play = Play(world_size=5, options=SaveOptions(plan_timeout_s=7))
    for rank in (0, 3):
        play.join(rank)
    assert play.timer.after_s == 7
    play.expire()
    error = told(play, step="SaveJoin")
    assert type(error) is DeadlineError
    assert "ranks 1, 2, 4 did not" in error.message
    assert "join the save within 7 s" in error.message
    assert set(error.failures) == {1, 2, 4}
    assert play.join(1).error is error


def test_the_deadline_of_writing_fences_the_attempt_off_before_anybody_is_told():
    play = Play(world_size=3)
    play.to_writing()
    play.receipt(0)
    assert play.timer.after_s == SaveOptions().write_timeout_s
    play.expire()
    assert (type(play.task), play.task.slot, play.task.attempt) == (CreateAbort, 1, "a1")
    assert play.errors("SaveReceipt") == {}
    play.done(RecordCreated(1))
    assert "ranks 1, 2 did not" in told(play).message


def test_the_timer_and_the_result_of_a_phase_that_is_over_do_nothing(play):
    play.join(0)
    timer = play.timer
    play.join(1)
    assert play.coordination.expired(timer.key, timer.phase) == ()
    play.expire()  # a slow storage ends planning
    assert type(told(play, step="SaveJoin")) is DeadlineError
    play.done(NOTHING)
    assert play.task is None


def test_a_lost_rank_is_named_on_all_others_unless_its_receipt_is_here():
    play = Play(world_size=3)
    play.to_writing()
    play.receipt(0)
    play.lose(0)
    play.lose(2, reason="its actor died")
    play.receipt(1)
    play.done(RecordCreated(1))
    error = told(play, 1)
    assert (type(error), error.rank) == (ParticipantError, 2)
    assert "its actor died" in error.message


@pytest.mark.parametrize("back", ["no", "speaks", "is placed"])
def test_a_rank_that_was_lost_before_the_save_fails_it_unless_it_is_there_again(play, back):
    play.lose(1)
    if back == "speaks":
        play.join(1)
    elif back == "is placed":
        play.coordination.place("run", 1, "pid 7 on node-3")
    play.join(0)
    if back == "no":
        assert told(play, step="SaveJoin").rank == 1
    else:
        play.join(1)
        assert isinstance(play.task, ReadRecords)


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
    assert play.errors("SaveJoin")[0] is reply.error


def test_a_rank_that_comes_twice_with_other_content_fails_the_save_until_it_is_planned(play):
    play.join(0, rows=b"mine")
    error = play.join(0, rows=b"another").error
    assert (type(error), error.rank) == (RankDisagreementError, 0)
    later = Play()
    later.to_writing()
    with pytest.raises(RankDisagreementError):
        later.join(1, rows=b"another")
    write_all(later)
    assert isinstance(later.task, BuildCommit)


# Planning


def test_overwrite_false_refuses_what_stands():
    play = Play(options=SaveOptions(overwrite=False))
    join_all(play)
    play.done(REPLACED)
    error = told(play, 1, "SaveJoin")
    assert type(error) is CheckpointExistsError
    assert "attempt a0" in error.message
    assert play.task is None


@pytest.mark.parametrize("replicas", ["warn", "check"])
def test_values_that_differ_between_ranks_warn_or_refuse(replicas):
    play = Play(options=SaveOptions(replicas=replicas))
    join_all(play)
    play.done(NOTHING)
    play.done(planned(2, disagreements="'rng' differs"))
    refused = replicas == "check"
    assert type(told(play, step="SaveJoin")) is (PlanConflictError if refused else SaveGo)


def test_a_plan_that_fails_fails_all_and_so_does_an_attempt_that_somebody_ended_before(play):
    join_all(play)
    play.done(NOTHING)
    play.fail(PlanConflictError("two shapes"))
    assert {type(e) for e in play.errors("SaveJoin").values()} == {PlanConflictError}
    ended = Play()
    ended.to_writing(dataclasses.replace(NOTHING, decided=(Verdict("a1", False),)))
    assert type(told(ended, step="SaveJoin")) is SaveCancelledError
    assert ended.task is None


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
    with pytest.raises(CommitUnknownError):
        play.receipt(0, **stray)


def test_a_receipt_for_an_unknown_save_says_that_the_storage_knows(play):
    with pytest.raises(CommitUnknownError):
        play.send(SaveReceipt(OpKey("run", 9), 0, "a7", 1, (receipt_file(0),)))
    assert play.coordination.active == ()


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


def test_a_result_that_nobody_awaits_is_a_bug_and_changes_nothing(play):
    join_all(play)
    todo = play.todo[0]
    for task in (WriteTable(TARGET, (("t", b""),)), todo.task):
        with pytest.raises(InternalError, match=r"so far.*perform ReadRecords"):
            play.coordination.performed(todo.key, task, Finished())
    play.done(NOTHING)
    with pytest.raises(InternalError, match="so far"):
        play.coordination.performed(KEY, todo.task, NOTHING)
    assert isinstance(play.task, MakePlan)


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


@pytest.mark.parametrize("published", [False, True])
def test_a_committed_save_that_is_slow_to_clean_up_is_a_success(play, published):
    play.to_record(REPLACED)
    play.done(RecordCreated(5))
    if published:
        play.done(Published())
    play.expire()
    assert "took longer" in told(play).warnings[0]
    if not published:
        play.done(Published())
    assert play.task == CollectReplaced(TARGET, ("__0_0.a0.distcp",))
    play.done(Finished())
    assert play.coordination.active == ()


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


def test_a_safetensors_save_takes_an_old_metadata_away_after_the_commit(play):
    play.to_writing()
    write_all(play)
    play.done(type(BUILT)("chunks.a1.table", b"table", b"manifest", None))
    play.done(Finished())
    play.done(RecordCreated(1))
    assert play.task == PublishMetadata(TARGET, 1, None)


# Several operations


def test_saves_of_two_sessions_do_not_touch_each_other():
    play = Play(world_size=1)
    for session in ("one", "two"):
        play.join(0, key=OpKey(session, 0))
    play._take(play.coordination.lost("one", [0], "killed"))
    play.done(NOTHING)
    assert [todo.key.session for todo in play.todo] == ["two"]


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
