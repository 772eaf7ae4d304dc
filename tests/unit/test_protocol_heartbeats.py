"""Slow, frozen, absent and gone: what the machines conclude from heartbeats and from silence."""

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
    Finished,
    Published,
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
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.opening import open_storage
from tests.gated_storage import Gate
from tests.inline_ranks import Shell
from tests.numpy_ranks import load_ranks, save, state_of
from tests.protocol_play import BUILT, KEY, NOTHING, Play, join_of, receipt_file

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
    assert play.timer.after_s == LOST_GRACE_S < GRACE_S
    play.expire()
    play.done(RecordCreated(1))
    error = play.errors("SaveReceipt")[0]
    assert type(error) is DeadlineError
    assert error.rank == 2
    assert "pid 7 on host-b" in error.message
    assert "every 10 s" in error.message
    assert "12 s ago" in error.message
    assert "frozen (stopped, swapped out, or a thread holds the GIL)" in error.message


def test_nobody_is_blamed_before_the_timeout_nor_for_being_slow_while_it_beats():
    play = Beating(world_size=2)
    play.to_writing()
    play.receipt(0)
    play.listen(TIMEOUT_S - 0.01)
    assert (play.timer.phase, play.timer.after_s) == ("writing", SaveOptions().write_timeout_s)
    for step in range(1, 100):
        play.clock.now_s = 9.0 * step
        play.beat(0)
        play.beat(1)
        play.listen(9.0 * step)
    play.receipt(1)
    assert isinstance(play.task, BuildCommit)


def test_a_rank_that_has_not_joined_or_promised_no_beats_is_not_judged_by_its_silence():
    play = Beating(world_size=2)
    play.coordination.place(KEY.session, 1, "pid 7 on host-b")
    play.join(0)
    play.clock.now_s = 500.0
    play.beat(0)
    play.listen(500.0)
    assert play.timer.after_s == SaveOptions().plan_timeout_s
    assert play.errors("SaveJoin") == {}
    silent = Play(world_size=2)
    silent.to_writing()
    silent._take(silent.coordination.listen())
    assert silent.coordination.next_silence_s is None


def test_a_rank_that_beat_before_it_joined_and_is_silent_now_is_blamed():
    play = Beating(world_size=2)
    play.beat(1, Doing(KEY.seq, KEY.seq, "capturing"))
    play.join(0)
    play.clock.now_s = TIMEOUT_S
    play.beat(0)
    play.listen(TIMEOUT_S)
    assert play.errors("SaveJoin")[0].rank == 1


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


def writes(**doing):
    def begin(play):
        play.to_writing()
        play.receipt(0)
        play.beat(1, writing(**doing))

    return begin


def ended_before(play):
    play.to_end()
    play.join(0, key=OpKey(KEY.session, 1))


def is_in_another_operation(play):
    play.send(Exchange(OpKey(KEY.session, 7), 1, 2, "plans", {}, 900.0))
    play.join(0)


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
    "is elsewhere": (
        is_in_another_operation, 0.0,
        "its last operation was #7 (exchange 'plans'), which has not ended",
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
    play.clock.now_s += after_s
    play.expire()
    if play.todo:
        play.done(RecordCreated(1))
    error = next(reply.error for reply in play.replies.values() if isinstance(reply, Refused))
    assert error.rank == 1
    assert said in error.message


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


@pytest.mark.parametrize("why", ["its commit has begun", "it failed by itself", "it is over"])
def test_a_save_is_not_cancelled_nor_left_when_that_is_too_late(why):
    play = Play()
    if why == "its commit has begun":
        play.to_record()
    elif why == "it is over":
        play.to_end()
        assert play.coordination.withdraw(KEY, 1, "late") == ()
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


@pytest.mark.parametrize("first", [False, True])
def test_ranks_that_join_again_after_a_restart_do_not_wait_for_one_that_went_on(first):
    play = Play(world_size=3)
    if first:
        assert play.coordination.works(KEY, 2) == ()
        assert isinstance(play.coordination.outcome(KEY), Refused)
    play.join(0)
    play._take(play.coordination.works(KEY, 2))
    play.join(1)
    error = play.errors("SaveJoin")[0]
    assert (type(error), error.rank) == (ParticipantError, 2)
    assert "had begun it before" in error.message


def test_a_rank_that_does_its_share_here_changes_nothing_by_asking():
    play = Play()
    play.to_writing()
    assert play.coordination.works(KEY, 1) == ()
    assert play.coordination.outcome(KEY) is None
    play.receipt(0)
    play.receipt(1)
    for result in (BUILT, Finished(), RecordCreated(1), Published()):
        play.done(result)
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
