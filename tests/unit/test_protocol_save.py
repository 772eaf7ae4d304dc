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
    Finished,
    MakePlan,
    Overtaken,
    Published,
    PublishMetadata,
    ReadRecord,
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


def disk_full(rank=None):
    return StorageError("the disk is full", rank=rank, key="__0_0")


def test_a_save_does_its_steps_in_the_order_that_a_crash_can_interrupt():
    play = Play()
    play.to_end(REPLACED)
    tasks = [type(command.task) for command in play.commands if hasattr(command, "task")]
    assert tasks == [
        ReadRecords, MakePlan, BuildCommit, WriteTable, CreateRecord, PublishMetadata,
        CollectReplaced,
    ]  # fmt: skip
    assert play.coordination.active == ()
    assert play.timer is None


def test_the_commit_takes_the_slot_after_the_one_that_planning_saw():
    play = Play()
    play.to_record(REPLACED)
    assert play.task == CreateRecord(TARGET, 5, BUILT.record)


def test_every_rank_is_told_the_same_outcome():
    play = Play(world_size=3)
    play.to_end()
    outcome = SaveOutcome("a1", 1, BUILT.record)
    assert [play.reply(rank, "SaveReceipt") for rank in range(3)] == [outcome] * 3


def test_each_rank_gets_its_own_part_of_the_plan():
    play = Play(world_size=3)
    play.to_writing()
    assert [play.reply(rank, "SaveJoin").plan.rank for rank in range(3)] == [0, 1, 2]


def test_nothing_is_planned_before_the_last_rank_has_joined():
    play = Play(world_size=3)
    play.join(0)
    play.join(2)
    assert play.task is None
    play.join(1)
    assert play.task == ReadRecords(TARGET)


def test_columns_are_handed_to_the_plan_in_the_order_of_ranks():
    play = Play()
    play.join(1, rows=b"one")
    play.join(0, rows=b"zero")
    play.done(NOTHING)
    assert isinstance(play.task, MakePlan)
    assert (play.task.columns, play.task.nodes) == ((b"zero", b"one"), (0, 1))


@pytest.mark.parametrize("step", ["SaveJoin", "SaveReceipt"])
def test_a_request_that_comes_twice_is_answered_twice_the_same(step):
    play = Play()
    play.to_writing()
    send = play.join if step == "SaveJoin" else play.receipt
    if step == "SaveReceipt":
        assert play.receipt(0) is None
        assert play.receipt(0) is None
        play.receipt(1)
        play.done(BUILT)
        play.done(Finished())
        play.done(RecordCreated(1))
        play.done(Published())
    first = play.reply(0, step)
    before = len(play.commands)
    assert send(0) == first
    assert len(play.commands) == before + 1


def test_a_request_after_the_end_is_answered_with_the_outcome():
    play = Play()
    play.to_end()
    assert isinstance(play.join(1), SaveOutcome)
    assert isinstance(play.receipt(1), SaveOutcome)


# Errors of ranks


def test_an_error_at_join_fails_all_ranks_with_the_original_error():
    play = Play(world_size=3)
    play.join(0)
    play.join(1, error=UnsupportedValueError("a quantised tensor", key="w"))
    play.join(2)
    errors = play.errors("SaveJoin")
    assert sorted(errors) == [0, 1, 2]
    assert all(type(error) is UnsupportedValueError for error in errors.values())
    assert {(error.rank, error.key) for error in errors.values()} == {(1, "w")}
    assert set(errors[0].failures) == {1}
    assert play.task is None


def test_the_error_holds_the_error_of_every_rank_that_failed():
    play = Play(world_size=3)
    play.to_writing()
    play.receipt(2, error=disk_full())
    play.receipt(0, error=StorageError("no route"))
    play.receipt(1)
    play.done(RecordCreated(1))
    error = play.reply(1, "SaveReceipt").error
    assert error.message == "no route"
    assert {rank: str(e) for rank, (e, _) in error.failures.items()} == {
        0: "no route [rank 0]", 2: "the disk is full [rank 2, key __0_0]"
    }  # fmt: skip
    assert "rank 2 failed too" in error.__notes__[0]


def test_a_failure_waits_only_a_moment_for_the_errors_of_other_ranks():
    play = Play(world_size=3)
    play.to_writing()
    play.receipt(1, error=disk_full())
    assert play.timer.after_s == GRACE_S
    assert play.task is None
    play.expire()
    play.done(RecordCreated(1))
    assert sorted(play.errors("SaveReceipt")) == [1]
    assert set(play.errors("SaveReceipt")[1].failures) == {1}
    # Rank 0 finished its part too late, and learns the same.
    assert play.receipt(0).error is play.errors("SaveReceipt")[1]


def test_the_moment_of_grace_is_not_prolonged_by_more_errors():
    play = Play(world_size=4)
    play.to_writing()
    play.receipt(1, error=disk_full())
    arms = len([c for c in play.commands if hasattr(c, "after_s")])
    play.receipt(2, error=disk_full())
    play.lose(3)
    assert len([c for c in play.commands if hasattr(c, "after_s")]) == arms


def test_an_error_survives_a_pickle_with_its_failures():
    play = Play(world_size=2)
    play.join(0)
    play.join(1, error=disk_full())
    error = pickle.loads(pickle.dumps(play.errors("SaveJoin")[0]))
    assert error.rank == 1
    assert error.failures[1][0].message == "the disk is full"


# Deadlines and lost ranks


def test_the_deadline_of_joining_names_the_missing_ranks():
    play = Play(world_size=5, options=SaveOptions(plan_timeout_s=7))
    for rank in (0, 3):
        play.join(rank)
    assert play.timer.after_s == 7
    play.expire()
    error = play.errors("SaveJoin")[0]
    assert type(error) is DeadlineError
    assert "ranks 1, 2, 4 did not" in error.message
    assert "join the save within 7 s" in error.message
    assert set(error.failures) == {1, 2, 4}


def test_a_rank_that_comes_after_the_deadline_gets_the_same_error():
    play = Play()
    play.join(0)
    play.expire()
    assert play.join(1).error is play.errors("SaveJoin")[0]


def test_the_deadline_of_writing_fences_the_attempt_off_before_anybody_is_told():
    play = Play(world_size=3)
    play.to_writing()
    play.receipt(0)
    assert play.timer.after_s == SaveOptions().write_timeout_s
    play.expire()
    assert isinstance(play.task, CreateAbort)
    assert (play.task.slot, play.task.attempt) == (1, "a1")
    assert play.errors("SaveReceipt") == {}
    play.done(RecordCreated(1))
    assert "ranks 1, 2 did not" in play.errors("SaveReceipt")[0].message


def test_every_phase_of_a_save_has_a_deadline_of_its_own():
    play = Play()
    play.to_end(REPLACED)
    armed = [command.phase for command in play.commands if hasattr(command, "after_s")]
    assert armed == [
        "joining", "reading", "planning", "writing", "building", "table", "record",
        "publishing", "collecting",
    ]  # fmt: skip


def test_an_old_timer_does_nothing():
    play = Play()
    play.join(0)
    timer = play.timer
    play.join(1)
    assert play.coordination.expired(timer.key, timer.phase) == ()
    assert isinstance(play.task, ReadRecords)


def test_a_lost_rank_is_named_on_all_others():
    play = Play(world_size=3)
    play.to_writing()
    play.receipt(0)
    play.lose(2, reason="its actor died")
    play.receipt(1)
    play.done(RecordCreated(1))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is ParticipantError
    assert error.rank == 2
    assert "its actor died" in error.message


def test_a_rank_that_is_lost_after_its_receipt_does_no_harm():
    play = Play()
    play.to_writing()
    play.receipt(1)
    play.lose(1)
    play.receipt(0)
    assert isinstance(play.task, BuildCommit)


def test_a_rank_that_was_lost_before_the_save_fails_it_at_once():
    play = Play()
    play.lose(1)
    play.join(0)
    assert play.errors("SaveJoin")[0].rank == 1


def test_a_rank_that_was_lost_and_speaks_is_alive():
    play = Play()
    play.lose(1)
    play.join(1)
    play.join(0)
    assert isinstance(play.task, ReadRecords)


def test_a_rank_that_was_lost_and_is_there_again_is_waited_for():
    play = Play()
    play.lose(1)
    play.coordination.place("run", 1, "pid 7 on node-3")
    play.join(0)
    play.join(1)
    assert isinstance(play.task, ReadRecords)


def test_the_original_error_comes_before_the_one_of_a_rank_that_is_missing():
    play = Play(world_size=3)
    play.to_writing()
    play.lose(0)
    play.receipt(1)
    play.receipt(2, error=disk_full())
    play.done(RecordCreated(1))
    error = play.errors("SaveReceipt")[1]
    assert (type(error), error.rank) == (StorageError, 2)
    assert set(error.failures) == {0, 2}


# Disagreement


def test_ranks_that_save_to_other_paths_are_named_with_what_they_asked():
    play = Play(world_size=3)
    play.join(0)
    play.join(2)
    play.join(1, target=Target("memory://other"))
    error = play.errors("SaveJoin")[0]
    assert type(error) is RankDisagreementError
    assert "ranks 0, 2: save to memory://ckpt" in error.message
    assert "rank 1: save to memory://other" in error.message
    assert sorted(play.errors("SaveJoin")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"options": SaveOptions(overwrite=False)}, "with overwrite=False"),
        ({"world_size": 3}, "world size 3"),
    ],
)
def test_other_options_or_world_sizes_disagree(changed, said):
    play = Play()
    play.join(0)
    assert said in play.join(1, **changed).error.message


def test_one_rank_that_loads_while_another_saves_fails_both():
    play = Play()
    play.join(0)
    error = play.join_load(1).error
    assert type(error) is RankDisagreementError
    assert "rank 0: save to" in error.message
    assert "rank 1: load from" in error.message
    assert play.errors("SaveJoin") == {0: error}


def test_a_rank_that_comes_twice_with_other_content_fails_the_save():
    play = Play()
    play.join(0, rows=b"mine")
    error = play.join(0, rows=b"another").error
    assert type(error) is RankDisagreementError
    assert error.rank == 0


def test_a_stranger_can_not_disturb_a_save_that_is_planned():
    play = Play()
    play.to_writing()
    with pytest.raises(RankDisagreementError):
        play.join(1, rows=b"another")
    play.receipt(0)
    play.receipt(1)
    assert isinstance(play.task, BuildCommit)


# Planning


def test_overwrite_false_refuses_what_stands():
    play = Play(options=SaveOptions(overwrite=False))
    play.join(0)
    play.join(1)
    play.done(REPLACED)
    error = play.errors("SaveJoin")[1]
    assert type(error) is CheckpointExistsError
    assert "attempt a0" in error.message
    assert play.task is None


def test_a_plan_that_fails_fails_all():
    play = Play()
    play.join(0)
    play.join(1)
    play.done(NOTHING)
    play.fail(PlanConflictError("two shapes"))
    assert {type(e) for e in play.errors("SaveJoin").values()} == {PlanConflictError}


@pytest.mark.parametrize("replicas", ["warn", "check"])
def test_values_that_differ_between_ranks_warn_or_refuse(replicas):
    play = Play(options=SaveOptions(replicas=replicas))
    play.join(0)
    play.join(1)
    play.done(NOTHING)
    play.done(planned(2, disagreements="'rng' differs"))
    if replicas == "check":
        assert type(play.errors("SaveJoin")[0]) is PlanConflictError
    else:
        assert isinstance(play.reply(0, "SaveJoin"), SaveGo)


def test_a_slow_storage_ends_planning_and_its_late_result_is_dropped():
    play = Play()
    play.join(0)
    play.join(1)
    play.expire()
    assert type(play.errors("SaveJoin")[0]) is DeadlineError
    play.done(NOTHING)
    assert play.task is None


# Fences


@pytest.mark.parametrize("stray", [{"attempt": "a0"}, {"epoch": 7}])
def test_a_receipt_of_another_attempt_or_epoch_is_refused_without_harm(stray):
    play = Play()
    play.to_writing()
    with pytest.raises(CommitUnknownError) as caught:
        play.receipt(0, **stray)
    assert caught.value.attempt == stray.get("attempt", "a1")
    assert play.receipt(0) is None
    play.receipt(1)
    assert [receipt.file for receipt in play.task.receipts] == [0, 1]


def test_a_receipt_of_another_attempt_is_not_told_the_outcome_of_this_one():
    play = Play()
    play.to_end()
    with pytest.raises(CommitUnknownError):
        play.receipt(0, attempt="a0")


def test_a_receipt_for_an_unknown_save_says_that_the_storage_knows():
    play = Play()
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
    error = play.errors("SaveJoin")[0]
    assert (type(error), error.rank) == (ParticipantError, 1)
    assert "restarted" in error.message


def test_a_result_that_nobody_asked_for_is_a_bug_and_changes_nothing():
    play = Play()
    play.join(0)
    play.join(1)
    todo = play.todo[0]
    with pytest.raises(InternalError, match="perform ReadRecords"):
        play.coordination.performed(todo.key, WriteTable(TARGET, (("t", b""),)), Finished())
    with pytest.raises(InternalError):
        play.coordination.performed(todo.key, todo.task, Finished())
    play.done(NOTHING)
    assert isinstance(play.task, MakePlan)


def test_the_same_result_twice_is_a_bug_and_changes_nothing():
    play = Play()
    play.join(0)
    play.join(1)
    task = play.done(NOTHING)
    with pytest.raises(InternalError, match="so far"):
        play.coordination.performed(KEY, task, NOTHING)
    assert isinstance(play.task, MakePlan)


# The vote


def test_a_slot_that_names_this_attempt_means_that_the_answer_was_lost():
    play = Play()
    play.to_record()
    play.done(SlotTaken(1, "a1", False, b"as it stands"))
    play.done(Published())
    assert play.reply(0, "SaveReceipt") == SaveOutcome("a1", 1, b"as it stands")


def test_an_abort_of_another_attempt_is_passed_by():
    play = Play()
    play.to_record()
    play.done(SlotTaken(1, "other", True, b""))
    assert play.task == CreateRecord(TARGET, 2, BUILT.record)


def test_a_commit_of_another_attempt_has_won_the_race():
    play = Play()
    play.to_record()
    play.done(SlotTaken(1, "other", False, b""))
    error = play.errors("SaveReceipt")[1]
    assert type(error) is CheckpointExistsError
    assert "other" in error.message
    assert isinstance(play.task, CollectReplaced)


def test_an_abort_of_this_attempt_ends_it():
    play = Play()
    play.to_record()
    play.done(SlotTaken(1, "a1", True, b""))
    assert type(play.errors("SaveReceipt")[0]) is SaveCancelledError


def test_a_commit_whose_fate_is_unknown_is_read_back():
    play = Play()
    play.to_record()
    play.fail(disk_full())
    assert play.task == ReadRecord(TARGET, 1)
    play.done(SlotTaken(1, "a1", False, BUILT.record))
    assert isinstance(play.task, PublishMetadata)


def test_a_commit_that_did_not_happen_is_tried_again():
    play = Play()
    play.to_record()
    play.fail(disk_full())
    play.done(SlotFree(1))
    assert play.task == CreateRecord(TARGET, 1, BUILT.record)


def refuse_the_commit(play):
    while not isinstance(play.task, CreateAbort):
        play.done(SlotFree(1)) if isinstance(play.task, ReadRecord) else play.fail(disk_full())


def test_a_commit_that_never_happens_is_fenced_off_and_fails_with_the_storage_error():
    play = Play()
    play.to_record()
    refuse_the_commit(play)
    play.done(RecordCreated(1))
    assert type(play.errors("SaveReceipt")[0]) is StorageError


def test_a_commit_that_turns_up_while_it_is_fenced_off_stands():
    play = Play()
    play.to_record()
    refuse_the_commit(play)
    play.done(SlotTaken(1, "a1", False, BUILT.record))
    play.done(Published())
    assert isinstance(play.reply(1, "SaveReceipt"), SaveOutcome)


def test_a_storage_that_says_nothing_leaves_the_commit_unknown():
    play = Play()
    play.to_record()
    for _ in range(20):
        if not play.todo:
            break
        play.fail(disk_full())
    error = play.errors("SaveReceipt")[0]
    assert type(error) is CommitUnknownError
    assert error.attempt == "a1"
    assert play.coordination.active == ()


def test_no_abort_record_is_needed_where_no_commit_was_tried():
    play = Play()
    play.to_writing()
    play.receipt(0, error=disk_full())
    play.receipt(1)
    while isinstance(play.task, CreateAbort | ReadRecord):
        play.fail(StorageError("still full"))
    error = play.errors("SaveReceipt")[1]
    assert type(error) is StorageError
    assert "No abort record" in error.__notes__[-1]


def test_a_vote_that_takes_too_long_is_unknown_to_the_ranks_and_goes_on():
    play = Play()
    play.to_record()
    play.expire()
    assert type(play.errors("SaveReceipt")[0]) is CommitUnknownError
    play.done(RecordCreated(1))
    assert isinstance(play.task, PublishMetadata)
    play.done(Published())
    assert play.coordination.active == ()
    assert type(play.receipt(0).error) is CommitUnknownError


# After the commit


def test_metadata_that_can_not_be_published_warns_and_nothing_is_collected():
    play = Play()
    play.to_record(REPLACED)
    play.done(RecordCreated(5))
    play.fail(disk_full())
    outcome = play.reply(0, "SaveReceipt")
    assert isinstance(outcome, SaveOutcome)
    assert ".metadata" in outcome.warnings[0]
    assert play.task is None


def test_metadata_of_a_later_commit_is_left_alone_and_nothing_is_collected():
    play = Play()
    play.to_record(REPLACED)
    play.done(RecordCreated(5))
    play.done(Published(superseded=True))
    outcome = play.reply(0, "SaveReceipt")
    assert isinstance(outcome, SaveOutcome)
    assert outcome.warnings == (REPLACED_SINCE,)
    assert play.task is None


ABOVE = Overtaken(9, "later", was_committed=False)


def test_a_commit_below_one_that_decides_came_too_late():
    play = Play()
    play.to_record()
    play.done(RecordCreated(1, ABOVE))
    error = play.errors("SaveReceipt")[1]
    assert type(error) is CheckpointExistsError
    assert "later" in error.message
    assert isinstance(play.task, CollectReplaced)


@pytest.mark.parametrize("created", [False, True])
def test_a_commit_that_the_one_above_remembers_was_committed_and_is_replaced(created):
    play = Play()
    play.to_record()
    above = dataclasses.replace(ABOVE, was_committed=True)
    play.done(
        RecordCreated(1, above) if created
        else SlotTaken(1, "a1", False, BUILT.record, overtaken=above)
    )  # fmt: skip
    assert isinstance(play.task, PublishMetadata)
    play.done(Published(superseded=True))
    assert play.reply(0, "SaveReceipt").warnings == (REPLACED_SINCE,)


def test_a_delete_in_the_way_of_a_commit_is_told_as_such():
    play = Play()
    play.to_record()
    play.done(SlotTaken(1, "d1", False, b"", is_delete=True))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is CheckpointExistsError
    assert "the checkpoint id was deleted" in error.message


def test_an_abort_passes_a_delete_by_and_the_error_tells_of_it():
    play = Play()
    play.to_writing()
    play.receipt(0, error=disk_full())
    play.receipt(1)
    play.done(SlotTaken(1, "d1", False, b"", is_delete=True))
    assert (play.task.slot, type(play.task)) == (2, CreateAbort)
    play.done(RecordCreated(2))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is StorageError
    assert "the id was deleted in slot 1" in error.__notes__[-1]


def test_an_abort_below_one_that_decides_ends_the_attempt_and_tells_of_that():
    play = Play()
    play.to_writing()
    play.receipt(0, error=disk_full())
    play.receipt(1)
    play.done(RecordCreated(1, ABOVE))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is StorageError
    assert "attempt later committed in slot 9" in error.__notes__[-1]


def test_an_abort_of_an_attempt_that_was_committed_and_replaced_comes_too_late():
    play = Play()
    play.to_record()
    refuse_the_commit(play)
    play.done(RecordCreated(1, dataclasses.replace(ABOVE, was_committed=True)))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is CheckpointExistsError
    assert "later" in error.message


def test_what_planning_found_decided_goes_into_the_record():
    play = Play()
    decided = (Verdict("a0", True),)
    play.to_writing(dataclasses.replace(REPLACED, decided=decided))
    play.receipt(0)
    play.receipt(1)
    assert isinstance(play.task, BuildCommit)
    assert (play.task.previous_slot, play.task.decided) == (4, decided)


def test_files_that_can_not_be_deleted_only_warn():
    play = Play()
    play.to_record(REPLACED)
    play.done(RecordCreated(5))
    play.done(Published())
    assert play.task == CollectReplaced(TARGET, ("__0_0.a0.distcp",))
    play.fail(disk_full())
    assert "deleted" in play.reply(0, "SaveReceipt").warnings[0]


@pytest.mark.parametrize("published", [False, True])
def test_a_committed_save_that_is_slow_to_clean_up_is_a_success(published):
    play = Play()
    play.to_record(REPLACED)
    play.done(RecordCreated(5))
    if published:
        play.done(Published())
    play.expire()
    assert isinstance(play.reply(0, "SaveReceipt"), SaveOutcome)
    play.done(Finished() if published else Published())
    if not published:
        play.done(Finished())
    assert play.coordination.active == ()


def test_a_failed_save_deletes_what_it_wrote_after_it_is_fenced_off():
    play = Play()
    play.to_writing()
    play.receipt(0)
    play.receipt(1)
    play.fail(InternalError("a receipt does not fit"))
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    assert play.task.keys == ("__0_0.a1.distcp", "__1_0.a1.distcp")
    play.done(Finished())
    assert play.coordination.active == ()


def test_a_safetensors_save_takes_an_old_metadata_away_after_the_commit():
    play = Play()
    play.to_writing()
    play.receipt(0)
    play.receipt(1)
    play.done(type(BUILT)("chunks.a1.parquet", b"table", b"manifest", None))
    play.done(Finished())
    play.done(RecordCreated(1))
    assert play.task == PublishMetadata(TARGET, 1, None)


# Cancel


def test_a_save_can_be_cancelled_before_its_commit_only():
    play = Play()
    play.to_writing()
    play._take(play.coordination.cancel(KEY, "the user asked"))
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    assert type(play.receipt(0).error) is SaveCancelledError
    late = Play()
    late.to_record()
    assert late.coordination.cancel(KEY, "too late") == ()


# Several operations


def test_saves_of_two_sessions_do_not_touch_each_other():
    play = Play(world_size=1)
    play.join(0, key=OpKey("one", 0))
    play.join(0, key=OpKey("two", 0))
    play._take(play.coordination.lost("one", [0], "killed"))
    play.done(NOTHING)
    assert [todo.key.session for todo in play.todo] == ["two"]


def test_finished_operations_are_remembered_up_to_a_bound_and_never_begin_again():
    play = Play(world_size=1)
    for seq in range(40):
        play.join(0, key=OpKey("run", seq), error=disk_full())
    assert isinstance(play.join(0, key=OpKey("run", 39), error=disk_full()), Refused)
    with pytest.raises(ParticipantError, match="long ago"):
        play.send(LoadReady(OpKey("run", 3), 0, None))
    # Whoever begins one of them missed it, and all that came since.
    assert play.join(0, key=OpKey("run", 3)) == Renumbered(40)
    assert play.coordination.active == ()
