"""Nothing waits for ever: storages that hang, ranks that stop, and a Ctrl-C, without Ray."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from ray_dcp.commit_protocol.messages import OpKey, SaveJoin, SaveReceipt, Target
from ray_dcp.errors import CommitUnknownError, DeadlineError, ParticipantError, SaveCancelledError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.activity import Activity
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.rank_progress import RankProgress, WatchedStorage
from ray_dcp.runtime.session import InlineSession
from ray_dcp.runtime.tasks import outcome, perform
from ray_dcp.store.storage import MemoryStorage
from tests.support.arrays import ArrayCapture, ArrayWork, state_of
from tests.support.processes import eventually
from tests.support.storages import Gate
from tests.support.world import load_and_check, load_rank, loads_whole, save, save_rank, save_ranks

PATIENCE_S = 120.0
"""Far more than any wait here takes, in seconds."""


@pytest.fixture
def url(request):
    """A place in memory of this test alone."""
    url = f"memory://{request.node.name.replace('[', '-').replace(']', '')}"
    MemoryStorage(url.removeprefix("memory://")).delete(keys(url))
    return url


@pytest.fixture
def gate():
    """Makes gates, and opens them all in the end."""
    gates = []

    def make(*arguments, **named):
        gates.append(Gate(*arguments, **named))
        return gates[-1]

    yield make
    for each in gates:
        each.open()


def keys(url):
    return [entry.key for entry in MemoryStorage(url.removeprefix("memory://")).list()]


def one_save(url, session, *, opener=None, state=None, **options):
    """Saves alone, as `ray_dcp.save` does."""
    more = {} if opener is None else {"opener": opener}
    with Activity(session, 60.0) as activity:
        return drive(
            save_rank(
                activity.next_key(), rank=0, world_size=1, target=Target(url),
                options=SaveOptions(**options), progress=activity.progress,
                capture=lambda: ArrayCapture(state or state_of(1), 0, 1), **more,
            ),
            activity.call,
        )  # fmt: skip


def one_load(url, session, *, opener, **options):
    with Activity(session, 60.0) as activity:
        return drive(
            load_rank(
                activity.next_key(), rank=0, world_size=1, target=Target(url),
                options=LoadOptions(**options), opener=opener, progress=activity.progress,
                plan=lambda c: ArrayWork(c, state_of(1), 0, 1),
            ),
            activity.call,
        )  # fmt: skip


# Storages that hang


def test_a_write_that_hangs_is_given_up_at_the_deadline_and_names_the_file(url, gate):
    begin_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"write its part within 2 s") as caught:
        one_save(url, InlineSession(), opener=gate().opener, write_timeout_s=2)
    assert time.monotonic() - begin_s < PATIENCE_S
    assert caught.value.key.startswith("__0_0.")
    assert f"it is at {caught.value.key}" in caught.value.message
    assert loads_whole(url, [state_of(1)]) is None


@pytest.fixture
def writers():
    """Returns a function that tells which threads of this test still write or read.

    Threads that another test of this process abandoned are none of them.
    """
    others = set(threading.enumerate())

    def ours():
        new = set(threading.enumerate()) - others
        return [each for each in new if each.name == "ray_dcp in time"]

    return ours


def test_a_write_that_comes_back_after_it_was_given_up_publishes_nothing(url, gate, writers):
    held = gate()
    with pytest.raises(DeadlineError):
        one_save(url, InlineSession(), opener=held.opener, write_timeout_s=2)
    assert writers()
    held.open()
    assert eventually(lambda: not writers())
    assert not [key for key in keys(url) if key.endswith(".distcp")]


def test_a_read_that_hangs_is_given_up_at_the_deadline_and_names_the_file(url, gate):
    save(state_of(1), 1, url)
    held = gate()
    # Without checksums, as these are read while the reads are planned, which has a deadline too.
    with pytest.raises(DeadlineError, match=r"read its share within 2 s") as caught:
        one_load(url, InlineSession(), opener=held.opener, read_timeout_s=2, verify="never")
    assert caught.value.key.startswith("__0_0.")
    # What it reads could still be written into tensors, so nobody may load meanwhile.
    with pytest.raises(ParticipantError, match="hang in the storage"):
        one_load(url, InlineSession(), opener=Gate("nothing").opener, plan_timeout_s=0.1)
    held.open()
    load_and_check(state_of(1), 1, url)


def test_a_commit_that_hangs_is_outvoted_by_its_rank_and_loses_when_it_comes_back(url, gate):
    held = gate("manifest-*")
    session = InlineSession(performer=partial(perform, opener=held.opener))
    with pytest.raises(ParticipantError, match="was declared failed in slot 1"):
        one_save(url, session, commit_timeout_s=2)
    held.open()
    assert eventually(lambda: session.coordinator_info()["active"] == ())
    assert loads_whole(url, [state_of(1)]) is None


def test_a_commit_that_hangs_for_coordinator_and_rank_is_unknown_and_ends_when_it_comes_back(
    url, gate
):
    held = gate("manifest-*")
    session = InlineSession(performer=partial(perform, opener=held.opener))
    with pytest.raises(CommitUnknownError) as caught:
        one_save(url, session, opener=held.opener, commit_timeout_s=2)
    attempt = caught.value.attempt
    assert outcome(url, attempt) == "open"
    held.open()
    assert eventually(lambda: session.coordinator_info()["active"] == ())
    assert outcome(url, attempt) in ("committed", "aborted")
    stands = loads_whole(url, [state_of(1)]) == 0
    assert stands == (outcome(url, attempt) == "committed")


def test_a_task_that_hangs_before_the_commit_fails_the_save_at_its_deadline(url, gate):
    held = gate("chunks.*")
    session = InlineSession(performer=partial(perform, opener=held.opener))
    with pytest.raises(DeadlineError, match="table to end within"):
        one_save(url, session, commit_timeout_s=2)
    # The next save of this session is not in its way.
    held.open()
    one_save(url, session)
    load_and_check(state_of(1), 1, url)


def test_a_rank_without_coordinator_does_not_wait_for_a_storage_that_hangs(url, gate):
    held = gate("manifest-*")
    session = InlineSession()

    def call(request):
        if isinstance(request, SaveReceipt):
            raise ParticipantError("the coordinator is gone")
        return session.call(request)

    (rank,) = save_ranks(
        state_of(1), 1, url, opener=held.opener, options=SaveOptions(commit_timeout_s=2)
    )
    begin_s = time.monotonic()
    with pytest.raises(CommitUnknownError, match="the storage did not answer within") as caught:
        drive(rank, call)
    assert time.monotonic() - begin_s < PATIENCE_S
    assert "ray_dcp.outcome" in caught.value.message
    assert url in str(caught.value)


# A coordinator that is given up


def test_a_rank_whose_coordinator_is_given_up_while_it_writes_asks_the_storage_at_once(url, gate):
    held, progress, session = gate(), RankProgress(), InlineSession()
    asked = []

    def call(request):
        asked.append(request)
        return session.call(request)

    (rank,) = save_ranks(state_of(1), 1, url, opener=held.opener, progress=progress)

    def give_up():
        held.reached.wait(PATIENCE_S)
        progress.abandon(ParticipantError("the coordinator died"))
        held.open()

    threading.Thread(target=give_up, daemon=True).start()
    with pytest.raises(ParticipantError, match="the coordinator died") as caught:
        drive(rank, call)
    assert [type(request) for request in asked] == [SaveJoin]
    assert caught.value.checkpoint_id == url
    assert keys(url) == ["manifest-00000001.json"]


# Ctrl-C and cancel


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_the_only_rank_writes_leaves_no_data_and_no_open_attempt(url, gate, writers):
    save(state_of(1), 1, url)
    before = {key for key in keys(url) if key.endswith(".distcp")}
    held = gate(on_arrival=interrupt)
    session = InlineSession()
    with pytest.raises(KeyboardInterrupt):
        one_save(url, session, opener=held.opener, state=state_of(2))
    held.open()
    assert eventually(lambda: not writers())
    assert {key for key in keys(url) if key.endswith(".distcp")} == before
    assert session.coordinator_info()["active"] == ()
    assert loads_whole(url, [state_of(1), state_of(2)]) == 0
    records = [key for key in keys(url) if key.startswith("manifest-")]
    assert len(records) == 2, "the attempt is declared failed"


def test_ctrl_c_in_the_middle_of_the_commit_waits_for_its_end(url, gate):
    held = gate("manifest-*", on_arrival=interrupt)
    threading.Timer(0.3, held.open).start()
    session = InlineSession(performer=partial(perform, opener=held.opener))
    with pytest.raises(KeyboardInterrupt):
        one_save(url, session)
    assert session.coordinator_info()["active"] == ()
    assert loads_whole(url, [state_of(1)]) == 0
    assert ".metadata" in keys(url)


def test_a_save_of_one_process_is_cancelled_by_another_thread(url, gate):
    held, session = gate(), InlineSession()
    came = []

    def run():
        try:
            one_save(url, session, opener=held.opener)
        except SaveCancelledError as error:
            came.append(error)

    saving = threading.Thread(target=run)
    saving.start()
    assert held.reached.wait(PATIENCE_S)
    assert session.cancel(OpKey("inline", 0), "enough")
    assert session.cancel(OpKey("inline", 0), "enough")
    saving.join(PATIENCE_S)
    assert "enough" in came[0].message
    held.open()
    assert eventually(lambda: not [k for k in keys(url) if k.endswith(".distcp")])
    one_save(url, session)
    assert not session.cancel(OpKey("inline", 1), "too late")
    load_and_check(state_of(1), 1, url)


def test_a_watched_storage_begins_nothing_after_the_stop(url):
    progress = RankProgress()
    storage = WatchedStorage(MemoryStorage(url.removeprefix("memory://")), progress)
    writer = storage.open_writer("z")
    writer.write(b"1")
    progress.stop.because(ParticipantError("elsewhere"))
    for begin in (
        partial(writer.write, b"2"), writer.commit, partial(storage.write, "y", b""),
        partial(storage.read, "y"), partial(storage.open_writer, "y"), storage.list,
        partial(storage.read_into, "y", 0, memoryview(bytearray(1))),
    ):  # fmt: skip
        with pytest.raises(SaveCancelledError, match="elsewhere"):
            begin()
    writer.abort()
    assert keys(url) == []


def test_a_call_of_the_storage_during_which_the_save_was_stopped_does_not_succeed(url):
    progress = RankProgress()

    class Stopping(MemoryStorage):
        def read(self, key, start=0, num_bytes=None):
            progress.stop.because(ParticipantError("elsewhere"))
            return b""

    storage = WatchedStorage(Stopping(url.removeprefix("memory://")), progress)
    with pytest.raises(SaveCancelledError, match="elsewhere"):
        storage.read("x")
