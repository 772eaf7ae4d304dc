"""Slow, frozen, killed and cancelled, under real Ray: who hangs is named, and nobody else hangs.

Rank 0 and 1 are threads of the test, rank 2 where it must be hit is a process of its own.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import contextmanager, suppress

import pytest
import ray

from ray_dcp.commit_protocol.messages import SaveOutcome, Target
from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    ParticipantError,
    SaveCancelledError,
)
from ray_dcp.options import SaveOptions
from ray_dcp.place.outcome import outcome
from ray_dcp.rank.rank_load import drive
from ray_dcp.session.call import Call
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.session.session import Session
from ray_dcp.store.opening import open_storage
from tests.support.arrays import ArrayCapture, state_of
from tests.support.processes import eventually
from tests.support.storages import Gate
from tests.support.world import load_and_check, save_rank

pytestmark = pytest.mark.usefixtures("ray_session")

QUICK = 2.0
"""A heartbeat timeout that a test can wait for, in seconds."""

SECONDS = 60.0
"""What everybody is told within, far below each phase's own deadline."""


def try_save(session, path, opener=open_storage, heartbeat_s=60.0, **options):
    """Saves on one rank; returns what came of it and how long it took, in seconds."""
    options = SaveOptions(heartbeat_timeout_s=heartbeat_s, **options)
    rank, world_size = session.rank, session.world_size
    begin_s = time.monotonic()
    try:
        with Call(session, heartbeat_s) as call:
            came = drive(
                save_rank(
                    call.next_key(), rank=rank, world_size=world_size, target=Target(path),
                    options=options, opener=opener, progress=call.progress,
                    capture=lambda: ArrayCapture(state_of(1), rank, world_size),
                ),
                call.ask,
            )  # fmt: skip
    except CheckpointError as error:
        came = error
    return came, time.monotonic() - begin_s


@ray.remote(num_cpus=0)
class Other:
    """The last rank, in a process that may be hit when its bytes begin to be written."""

    def ready(self, name: str, rank: int, world_size: int) -> int:
        self.session = RayTransport(name, rank, world_size).join()
        return os.getpid()

    def save(self, path: str, blow: int, heartbeat_s: float):
        gate = Gate(on_arrival=lambda: os.kill(os.getpid(), blow))
        if blow == signal.SIGSTOP:
            gate.open()
        return try_save(self.session, path, gate.opener, heartbeat_s)


@contextmanager
def ranks(num_here: int, *, world_size: int | None = None):
    """Gives the sessions of ranks that are threads of this process."""
    name = f"test-{secrets.token_hex(4)}"
    world_size = world_size or num_here
    sessions = [Session(RayTransport(name, rank, world_size)) for rank in range(num_here)]
    try:
        yield sessions
    finally:
        for each in sessions:
            each.close()


def no_parts(path) -> bool:
    return not [entry.key for entry in open_storage(str(path)).list() if ".distcp" in entry.key]


def test_a_rank_that_freezes_is_blamed_after_its_silence_and_told_the_same_when_it_thaws(
    threads, tmp_path
):
    with ranks(2, world_size=3) as sessions:
        other = Other.remote()
        pid = ray.get(other.ready.remote(sessions[0].name, 2, 3))
        frozen = other.save.remote(str(tmp_path), signal.SIGSTOP, QUICK)
        saves = [
            threads.submit(try_save, each, str(tmp_path), heartbeat_s=QUICK) for each in sessions
        ]
        told = [save.result(180) for save in saves]
        os.kill(pid, signal.SIGCONT)
        thawed, _ = ray.get(frozen, timeout=400)
    for error, seconds in told:
        assert type(error) is DeadlineError
        assert error.rank == 2
        assert f"pid {pid} on" in error.message
        assert "frozen" in error.message
        assert QUICK <= seconds < SECONDS
    assert str(thawed) == str(told[0][0])


def test_a_rank_that_is_slow_but_beats_is_waited_for(threads, tmp_path):
    gate, path, heartbeat_s = Gate(), str(tmp_path), 3 * QUICK
    with ranks(2) as sessions:
        slow = threads.submit(try_save, sessions[1], path, gate.opener, heartbeat_s=heartbeat_s)
        fast = threads.submit(try_save, sessions[0], path, heartbeat_s=heartbeat_s)
        assert eventually(lambda: gate.reached.is_set() or fast.done())
        assert not fast.done(), fast.result()
        assert not eventually(lambda: fast.done() or slow.done(), 1.5 * heartbeat_s)
        gate.open()
        assert isinstance(fast.result(180)[0], SaveOutcome)
        assert isinstance(slow.result(180)[0], SaveOutcome)
    load_and_check(state_of(1), 2, str(tmp_path))


@pytest.mark.parametrize(("when", "thaws"), [("joining", False), ("writing", True)])
def test_ranks_give_a_frozen_coordinator_up_and_settle(threads, tmp_path, when, thaws):
    path = str(tmp_path / "c")
    gate = Gate()
    with ranks(3 if when == "joining" else 2) as sessions:
        epoch = sessions[0].coordinator_info()["epoch"]
        pid = sessions[0].coordinator_info()["pid"]
        saves = [
            threads.submit(try_save, each, path, gate.opener, heartbeat_s=QUICK)
            for each in sessions[:2]
        ]
        if when == "writing":
            assert gate.reached.wait(180)
        else:
            assert eventually(lambda: sessions[2].coordinator_info()["active"])
        os.kill(pid, signal.SIGSTOP)
        gate.open()
        told = [save.result(180) for save in saves]
        if thaws:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for error, seconds in told:
            assert type(error) is DeadlineError, error
            assert "frozen" in error.message
            assert seconds < 2 * SECONDS
        # If it thaws, it can't commit what was settled; if not, another takes its place.
        if when == "writing":
            assert outcome(path, attempts_at(path)[0]) == "aborted"
            saves = [threads.submit(try_save, each, path) for each in sessions]
            ends = [save.result(180)[0] for save in saves]
            assert [type(end) for end in ends] == [SaveOutcome, SaveOutcome], ends
        assert eventually(lambda: sessions[0].coordinator_info()["epoch"] > epoch)


def test_who_begins_a_save_anew_does_not_wait_for_a_rank_that_gave_the_coordinator_up(
    threads, tmp_path
):
    path = str(tmp_path)
    with ranks(2, world_size=3) as sessions:
        pid = sessions[0].coordinator_info()["pid"]
        quick = threads.submit(try_save, sessions[0], path, heartbeat_s=QUICK)
        patient = threads.submit(try_save, sessions[1], path)
        assert eventually(lambda: sessions[1].coordinator_info()["active"])
        os.kill(pid, signal.SIGSTOP)
        gave_up, _ = quick.result(180)
        told, _ = patient.result(180)
    assert type(gave_up) is DeadlineError
    assert "frozen" in gave_up.message
    assert type(told) is ParticipantError
    assert told.rank == 0
    assert "it left the call: DeadlineError" in told.message


def attempts_at(path) -> list[str]:
    """Returns the attempts that records at a place name."""
    from ray_dcp.format.manifest import decode_record, record_key

    storage = open_storage(path)
    keys = [entry.key for entry in storage.list("manifest-")]
    assert record_key(1) in keys
    return [decode_record(storage.read(key)).attempt for key in sorted(keys)]


def test_a_killed_coordinator_ends_a_save_in_seconds_for_ranks_that_write(threads, tmp_path):
    gate = Gate()
    with ranks(2) as sessions:
        pid = sessions[0].coordinator_info()["pid"]
        saves = [threads.submit(try_save, each, str(tmp_path), gate.opener) for each in sessions]
        assert gate.reached.wait(180)
        # The first beat has come, and with it the call that sees the coordinator die.
        assert eventually(lambda: all(each._presence._ack for each in sessions))
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        told = [save.result(180)[0] for save in saves]
        ended_s = time.monotonic() - killed_s
        gate.open()
    assert all(isinstance(error, ParticipantError) for error in told), told
    assert all(str(tmp_path) in str(error) for error in told)
    assert ended_s < SECONDS
    print(f"told {ended_s:.2f} s after the kill")


def test_a_save_is_cancelled_on_all_ranks_from_any_of_them_until_it_is_committed(threads, tmp_path):
    gate = Gate()
    with ranks(2) as sessions:
        saves = [threads.submit(try_save, each, str(tmp_path), gate.opener) for each in sessions]
        assert gate.reached.wait(180)
        (key,) = sessions[0].coordinator_info()["active"]
        assert sessions[1].cancel(key, "not needed any more")
        assert sessions[0].cancel(key, "not needed any more")
        told = [save.result(180) for save in saves]
        gate.open()
        for error, _ in told:
            assert type(error) is SaveCancelledError
            assert "not needed any more" in error.message
        assert eventually(lambda: no_parts(tmp_path))
        saves = [threads.submit(try_save, each, str(tmp_path)) for each in sessions]
        assert all(isinstance(save.result(180)[0], SaveOutcome) for save in saves)
        assert not sessions[0].cancel(sessions[0].next_key().__class__(key.session, 1), "late")
    load_and_check(state_of(1), 2, str(tmp_path))


def test_ctrl_c_on_one_rank_cancels_the_save_on_the_others(
    threads, programs, tmp_path, ray_session
):
    gate = Gate()
    with ranks(2, world_size=3) as sessions:
        arguments = (ray_session, sessions[0].name, "2", "3", str(tmp_path))
        rank = programs.start("-m", "tests.support.programs.interrupted_rank", *arguments)
        try:
            assert rank.stdout.readline() == "ready\n"
            saves = [
                threads.submit(try_save, each, str(tmp_path), gate.opener) for each in sessions
            ]
            print("go", file=rank.stdin, flush=True)
            said = rank.stdout.read()
            told = [save.result(180) for save in saves]
        finally:
            gate.open()
            rank.kill()
    assert said == "interrupted\n"
    for error, seconds in told:
        assert type(error) is SaveCancelledError
        assert "KeyboardInterrupt on rank 2" in error.message
        assert seconds < 2 * SECONDS
    assert eventually(lambda: no_parts(tmp_path))
