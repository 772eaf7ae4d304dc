"""Slow, frozen, absent and gone: what the machines conclude from heartbeats and from silence."""

import pickle
import threading
from concurrent.futures import Future

import pytest

from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    ParticipantError,
    RankDisagreementError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.commands import (
    BuildCommit,
    CheckpointRead,
    CreateAbort,
    ReadRecords,
    RecordCreated,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.liveness import AwakeClock, Doing, Heartbeat, Liveness, beat_interval_s
from ray_dcp.protocol.messages import (
    Exchange,
    LoadJoin,
    LoadReady,
    OpKey,
    Refused,
    SaveOutcome,
    SaveReceipt,
    Target,
)
from ray_dcp.protocol.operation import GRACE_S, LOST_GRACE_S
from ray_dcp.runtime.inline import Shell
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.opening import open_storage
from tests.gated_storage import Gate
from tests.numpy_ranks import load_ranks, save, state_of
from tests.protocol_play import KEY, NOTHING, Play, join_of, receipt_file

TIMEOUT_S = 10.0


class Now:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Beating(Play):
    """A play whose ranks promise to beat, with a clock."""

    def __post_init__(self):
        super().__post_init__()
        self.clock = Now()
        self.coordination = type(self.coordination)(
            epoch=self.epoch, new_attempt=lambda: "a1", clock=self.clock
        )

    def send(self, request):
        return self._take(self.coordination.receive(request, beats_s=TIMEOUT_S), request.rank)

    def beat(self, rank, *doings):
        """Returns for whom the rank is told to log long waits."""
        return self.coordination.hear(Heartbeat(KEY.session, rank, TIMEOUT_S, doings))

    def listen(self, now_s):
        self.clock.now_s = now_s
        self._take(self.coordination.listen())


def writing(done=0, total=0, **more):
    return Doing(KEY.seq, KEY.seq, "writing", 5.0, done, total, **more)


# Silence


def test_a_rank_that_is_silent_for_its_timeout_is_blamed_long_before_the_deadline():
    play = Beating(world_size=3)
    play.coordination.place(KEY.session, 2, "pid 7 on host-b")
    play.to_writing()
    play.receipt(0)
    for now_s in (4.0, 8.0, 12.0):
        play.clock.now_s = now_s
        play.beat(1)
    play.listen(12.0)
    assert play.timer.after_s == LOST_GRACE_S
    play.expire()
    play.done(RecordCreated(1))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is DeadlineError
    assert error.rank == 2
    assert "pid 7 on host-b" in error.message
    assert "every 10 s" in error.message
    assert "12 s ago" in error.message
    assert "frozen (stopped, swapped out, or a thread holds the GIL)" in error.message


def test_nobody_is_blamed_before_the_timeout():
    play = Beating(world_size=2)
    play.to_writing()
    play.listen(TIMEOUT_S - 0.01)
    assert play.timer.phase == "writing"
    assert play.timer.after_s == SaveOptions().write_timeout_s


def test_a_rank_that_beats_is_never_blamed_for_being_slow():
    play = Beating(world_size=2)
    play.to_writing()
    play.receipt(0)
    for step in range(1, 1000):
        play.clock.now_s = 9.0 * step
        play.beat(0)
        play.beat(1)
        play.listen(9.0 * step)
    play.receipt(1)
    assert isinstance(play.task, BuildCommit)


def test_a_rank_that_only_has_not_joined_is_not_judged_by_its_silence():
    play = Beating(world_size=2)
    play.coordination.place(KEY.session, 1, "pid 7 on host-b")
    play.join(0)
    play.clock.now_s = 500.0
    play.beat(0)
    play.listen(500.0)
    assert play.timer.after_s == SaveOptions().plan_timeout_s
    assert play.errors("SaveJoin") == {}


def test_a_rank_that_beat_before_it_joined_and_is_silent_now_is_blamed():
    play = Beating(world_size=2)
    play.beat(1, Doing(KEY.seq, KEY.seq, "capturing"))
    play.join(0)
    play.clock.now_s = TIMEOUT_S
    play.beat(0)
    play.listen(TIMEOUT_S)
    assert play.errors("SaveJoin")[0].rank == 1


def test_a_rank_that_promised_no_beats_is_not_judged_by_its_silence():
    play = Play(world_size=2)
    play.to_writing()
    play._take(play.coordination.listen())
    assert play.coordination.next_silence_s is None


def test_the_silence_of_a_rank_whose_receipt_is_here_does_no_harm():
    play = Beating(world_size=2)
    play.to_writing()
    play.receipt(1)
    play.clock.now_s = 3 * TIMEOUT_S
    play.beat(0)
    play.listen(3 * TIMEOUT_S)
    play.receipt(0)
    assert isinstance(play.task, BuildCommit)


def test_a_rank_that_speaks_again_is_told_the_outcome_and_not_taken_back():
    play = Beating(world_size=2)
    play.to_writing()
    play.clock.now_s = TIMEOUT_S
    play.beat(0)
    play.listen(TIMEOUT_S)
    play.beat(1)
    assert play.receipt(1) is None
    play.receipt(0)
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    errors = play.errors("SaveReceipt")
    assert errors[0] is errors[1]
    assert play.receipt(1).error is errors[0]


def test_the_silence_in_one_operation_does_not_fail_the_next():
    play = Beating(world_size=2)
    play.to_writing()
    play.listen(TIMEOUT_S)
    play.expire()
    play.done(RecordCreated(1))
    later = OpKey(KEY.session, 1)
    play.join(0, key=later)
    play.join(1, key=later)
    assert isinstance(play.todo[-1].task, ReadRecords)


def test_ranks_that_freeze_together_are_blamed_together():
    play = Beating(world_size=4)
    play.to_writing()
    play.clock.now_s = TIMEOUT_S
    play.beat(0)
    play.beat(3)
    play.listen(TIMEOUT_S)
    play.receipt(0)
    play.receipt(3)
    play.done(RecordCreated(1))
    assert set(play.errors("SaveReceipt")[0].failures) == {1, 2}


def test_a_frozen_rank_ends_a_load_for_the_others():
    play = Beating(world_size=2, load_options=LoadOptions(read_timeout_s=3600))
    play.join_load(0)
    play.join_load(1)
    play.clock.now_s = TIMEOUT_S
    play.beat(0)
    play.listen(TIMEOUT_S)
    assert play.errors("LoadJoin")[0].rank == 1


def test_a_lost_rank_ends_the_wait_for_the_others_errors_sooner_than_one_that_failed():
    play = Play(world_size=3)
    play.to_writing()
    play.lose(1)
    assert play.timer.after_s == LOST_GRACE_S < GRACE_S


def test_a_clock_of_a_process_that_was_stopped_does_not_count_that_time():
    now = Now()
    awake = AwakeClock(now, 1.0)
    now.now_s = 1000.0
    assert awake.tick() == 2.0
    now.now_s = 1000.5
    assert awake() == 2.5


@pytest.mark.parametrize("timeout_s", [0.6, 2.0, 60.0, 3600.0])
def test_several_beats_fit_into_the_timeout(timeout_s):
    assert beat_interval_s(timeout_s) * 5 < timeout_s
    assert beat_interval_s(timeout_s) <= 5.0


# What is told of a rank that is missing


def missing(play, rank=1):
    """Returns what the deadline error says after the timer ran out."""
    play.expire()
    if play.todo:
        play.done(RecordCreated(1))
    return next(reply.error for reply in play.replies.values() if isinstance(reply, Refused))


def test_a_deadline_says_of_a_slow_rank_how_far_it_is():
    play = Beating(world_size=2)
    play.to_writing()
    play.receipt(0)
    play.clock.now_s = 3599.6
    play.beat(1, writing(1_200_000_000, 4_000_000_000))
    play.clock.now_s = 3600.0
    assert "rank 1 last wrote 1.2 of 4.0 GB 0.4 s ago (slow)" in missing(play).message


def test_a_deadline_says_of_a_stuck_rank_in_which_file():
    play = Beating(world_size=2)
    play.to_writing()
    play.receipt(0)
    play.beat(1, writing(3_000_000, 4_000_000, quiet_s=300.0, key="__1_0.a1.distcp"))
    error = missing(play)
    assert "last wrote 3.0 of 4.0 MB 300 s ago (stuck in __1_0.a1.distcp)" in error.message


def test_a_deadline_says_when_a_rank_that_beats_no_more_was_last_heard():
    play = Beating(world_size=2, options=SaveOptions(write_timeout_s=9))
    play.to_writing()
    play.receipt(0)
    play.beat(1, writing(1, 2))
    play.clock.now_s = 9.0
    assert "rank 1 was last heard 9.0 s ago" in missing(play).message


def test_a_deadline_says_of_a_rank_that_never_called_what_it_called_last():
    play = Beating(world_size=2)
    play.clock.now_s = 100.0
    play.to_end()
    play.clock.now_s = 143.0
    play.join(0, key=OpKey(KEY.session, 1))
    error = missing(play)
    assert error.rank == 1
    assert (
        "rank 1 never called: its last operation was #0 (save to memory://ckpt), which ended "
        "43 s ago"
    ) in error.message


def test_a_deadline_says_of_a_rank_in_another_operation_that_it_has_not_ended():
    play = Beating(world_size=2)
    other = OpKey(KEY.session, 7)
    play.send(Exchange(other, 1, 2, "plans", {}, 900.0))
    play.join(0)
    told = missing(play).message
    assert "its last operation was #7 (exchange 'plans'), which has not ended" in told


def test_a_deadline_says_of_a_rank_that_captures_how_long_it_does():
    play = Beating(world_size=2)
    play.join(0)
    play.clock.now_s = 600.0
    play.beat(1, Doing(KEY.seq, KEY.seq, "capturing", 598.0))
    assert "rank 1 has been capturing for 598.0 s" in missing(play).message


def test_a_deadline_says_that_a_rank_was_never_heard():
    play = Beating(world_size=2)
    play.join(0)
    play.clock.now_s = 600.0
    told = missing(play).message
    assert "rank 1 was never heard by this coordinator, which began 600 s ago" in told


def at(play, now_s, *beating):
    """Lets ranks beat, and the coordinator look; returns what long waits the ranks are told."""
    play.clock.now_s = now_s
    told = [play.beat(rank, Doing(KEY.seq, KEY.seq, "waiting")) for rank in beating]
    play.listen(now_s)
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


def test_each_phase_in_which_a_load_waits_for_ranks_is_told():
    play = Beating(world_size=2)
    play.join_load(0)
    told = [at(play, now_s, 0) for now_s in range(0, 50, 5)]
    play.join_load(1)
    play.done(CheckpointRead("ours", 1, b""))
    play.send(LoadReady(KEY, 1, None))
    told += [at(play, now_s, 1, 0) for now_s in range(50, 100, 5)]
    waits = [wait for both in told for waits in both for wait in waits]
    assert ["joining" in wait for wait in waits] == [True, False]
    assert ["planning" in wait for wait in waits] == [False, True]
    assert "it waits for rank 0: rank 0 has been waiting for" in waits[1]


def test_ranks_that_write_for_long_are_no_reason_for_a_warning():
    play = Beating(world_size=2)
    play.to_writing()
    play.receipt(0)
    assert {at(play, now_s, 0, 1)[0] for now_s in range(0, 100, 5)} == {()}


def test_what_is_told_of_ranks_outside_an_operation_is_not_mixed_up_with_its_own():
    attendance = Liveness(Now())
    join = LoadJoin(OpKey("run", 3), 1, 2, Target("memory://x"), LoadOptions())
    attendance.came(join, None)
    attendance.hear(Heartbeat("run", 1, 60.0, (Doing(9, 12, "reading", done_bytes=10**6),)))
    assert "last read 1.0 MB" in attendance.tell(OpKey("run", 10), 1)
    assert "never called" in attendance.tell(OpKey("run", 8), 1)
    assert attendance.due_s(OpKey("run", 8)) == {}
    assert attendance.due_s(OpKey("run", 12)) == {1: 60.0}


def test_of_an_operation_that_is_over_nobody_can_be_silent():
    attendance = Liveness(Now())
    join = LoadJoin(OpKey("run", 3), 1, 2, Target("memory://x"), LoadOptions())
    attendance.came(join, 60.0)
    assert attendance.due_s(join.key) == {1: 60.0}
    attendance.ended(join.key)
    assert attendance.due_s(join.key) == {}


def test_beats_are_values():
    beat = Heartbeat("run", 1, 60.0, (writing(1, 2),))
    assert pickle.loads(pickle.dumps(beat)) == beat


# Ranks that call different things


def test_all_ranks_that_differ_are_named_not_only_the_first_two():
    play = Play(world_size=4)
    play.join(0)
    play.join(1, target=Target("memory://other"))
    play.join(2, options=SaveOptions(overwrite=False))
    assert play.errors("SaveJoin") == {}
    play.join(3)
    errors = play.errors("SaveJoin")
    assert sorted(errors) == [0, 1, 2, 3]
    assert type(errors[0]) is RankDisagreementError
    for call in (
        "ranks 0, 3: save to memory://ckpt,",
        "rank 1: save to memory://other",
        "rank 2: save to memory://ckpt with overwrite=False",
    ):
        assert call in errors[0].message


def test_who_differs_after_the_grace_is_told_what_the_others_were_told():
    play = Play(world_size=4)
    play.join(0)
    play.join(1, target=Target("memory://other"))
    play.join(1, target=Target("memory://other"))
    assert play.timer.after_s == GRACE_S
    play.expire()
    told = play.errors("SaveJoin")[0]
    assert "ranks 2" not in told.message
    assert play.join(2, options=SaveOptions(overwrite=False)).error is told


def test_a_disagreement_beats_the_death_of_a_rank_but_waits_not_for_it():
    play = Play(world_size=3)
    play.join(0)
    play.join(1, target=Target("memory://other"))
    play.lose(2)
    assert type(play.errors("SaveJoin")[0]) is RankDisagreementError


# Cancelling, leaving, and ranks ahead of a restarted coordinator


def test_a_save_can_be_cancelled_until_its_commit_and_the_answer_stays_the_same():
    play = Play()
    play.to_writing()
    play._take(play.coordination.cancel(KEY, "enough"))
    assert play.coordination.is_cancelled(KEY)
    play._take(play.coordination.cancel(KEY, "again"))
    assert play.coordination.is_cancelled(KEY)
    play.done(RecordCreated(1))
    play.receipt(0)
    assert type(play.errors("SaveReceipt")[0]) is SaveCancelledError
    assert "enough" in play.errors("SaveReceipt")[0].message
    assert play.coordination.is_cancelled(KEY)


def test_a_save_whose_commit_has_begun_is_not_cancelled():
    play = Play()
    play.to_record()
    assert play.coordination.cancel(KEY, "too late") == ()
    assert not play.coordination.is_cancelled(KEY)


def test_a_save_that_failed_by_itself_was_not_cancelled():
    play = Play()
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


def test_a_rank_that_leaves_a_save_cancels_it():
    play = Play()
    play.to_writing()
    play.receipt(0)
    play._take(play.coordination.withdraw(KEY, 1, "KeyboardInterrupt on rank 1"))
    assert isinstance(play.task, CreateAbort)
    play.done(RecordCreated(1))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is SaveCancelledError
    assert "rank 1 left it: KeyboardInterrupt" in error.message


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_that_leaves_a_load_is_named_on_the_others(joined):
    play = Play()
    if joined:
        play.join_load(0)
    play._take(play.coordination.withdraw(KEY, 1, "KeyboardInterrupt"))
    if not joined:
        play.join_load(0)
    error = play.errors("LoadJoin")[0]
    assert (type(error), error.rank) == (ParticipantError, 1)


def test_leaving_an_operation_that_is_over_changes_nothing():
    play = Play()
    play.to_end()
    assert play.coordination.withdraw(KEY, 1, "late") == ()
    assert not play.coordination.is_cancelled(KEY)
    assert isinstance(play.join(1), SaveOutcome)


def test_ranks_that_join_again_after_a_restart_do_not_wait_for_one_that_went_on():
    play = Play(world_size=3)
    play.join(0)
    play._take(play.coordination.works(KEY, 2))
    play.join(1)
    error = play.errors("SaveJoin")[0]
    assert (type(error), error.rank) == (ParticipantError, 2)
    assert "had begun it before" in error.message


def test_a_rank_that_went_on_is_known_before_the_others_join_again():
    play = Play(world_size=2)
    assert play.coordination.works(KEY, 1) == ()
    assert isinstance(play.coordination.outcome(KEY), Refused)
    play.join(0)
    assert play.errors("SaveJoin")[0].rank == 1


def test_a_rank_that_does_its_share_here_changes_nothing_by_asking():
    play = Play()
    play.to_writing()
    assert play.coordination.works(KEY, 1) == ()
    assert play.coordination.outcome(KEY) is None
    play.receipt(0)
    play.receipt(1)
    assert isinstance(play.task, BuildCommit)


def test_who_asks_for_the_outcome_is_told_what_all_are_told():
    play = Play()
    play.to_end()
    assert play.coordination.outcome(KEY) is play.reply(0, "SaveReceipt")


def test_messages_of_a_promise_to_beat_need_no_beats_to_be_taken():
    play = Beating()
    for rank in range(2):
        play.send(join_of(rank))
    play.done(NOTHING)
    assert play.coordination.next_silence_s == TIMEOUT_S
    with pytest.raises(Exception, match="a9"):
        play.send(SaveReceipt(KEY, 0, "a9", 1, (receipt_file(0),)))


@pytest.mark.parametrize("coordinator_dies", [False, True])
def test_a_rank_whose_storage_hangs_while_it_plans_its_reads_hears_that_the_load_failed(
    tmp_path, coordinator_dies
):
    """What `heartbeat` does for a rank that does its share: asks for the outcome, and stops it."""
    save(state_of(1), 2, str(tmp_path))
    shell, gate, vitals = Shell(Coordination(epoch=1, new_attempt=str), perform), Gate(), []
    ranks = []
    for rank in range(2):
        vitals.append(RankProgress())
        opener = gate.opener if rank else open_storage
        loading, _ = load_ranks(state_of(1), 2, str(tmp_path), opener=opener, vitals=vitals[rank])
        ranks.append(loading[rank])
        shell.receive(next(loading[rank]))
    shell.perform(0)
    key, go = shell.answers[0].key, shell.answers[0].reply
    ended = Future()
    hanging = threading.Thread(target=lambda: ended.set_result(result_of(ranks[1], go)))
    hanging.start()
    assert gate.reached.wait(120)
    assert vitals[1].waits_for_others  # so it asks, and is known to take part:
    assert shell.coordination.works(key, 1) == ()
    if coordinator_dies:
        assert vitals[1].is_working
        vitals[1].abandon(ParticipantError("the coordinator died"))
    else:
        shell.receive(LoadReady(key, 0, StorageError("no such file")))
        shell.expire()
        vitals[1].stop.because(shell.coordination.outcome(key).error)
    found = ended.result(120)
    error = found if coordinator_dies else found.error
    assert error.message == ("the coordinator died" if coordinator_dies else "no such file")
    gate.open()
    hanging.join(120)


def result_of(generator, reply):
    try:
        return generator.send(reply)
    except CheckpointError as error:
        return error
