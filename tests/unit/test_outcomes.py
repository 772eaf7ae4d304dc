"""What a save reports holds on storage, all ranks raise the same error, and none hangs."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ray_dcp
from ray_dcp.commit_protocol import commands, messages
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core import processes
from ray_dcp.core.phases import STAGE
from ray_dcp.core.processes import wait_any
from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    ParticipantError,
    PlanConflictError,
    RankDisagreementError,
    SaveCancelledError,
    StorageError,
)
from ray_dcp.format.manifest import AbortRecord, decode_record, encode_record, record_key
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.outcome import outcome
from ray_dcp.rank.rank_load import drive
from ray_dcp.session.call import Call
from ray_dcp.session.call_bound import longest_s
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.session.rank_progress import RankProgress, WatchedStorage
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import Location
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError
from ray_dcp.testing import StorageConformance
from tests.crash.crashes import OPERATIONS, check_crashes
from tests.crash.invariants import INVARIANTS, nothing_is_left
from tests.support.arrays import ArrayCapture, ArrayWork, state_of
from tests.support.checkpoints import check_stock, save_stock
from tests.support.processes import eventually
from tests.support.protocol import Play
from tests.support.storages import Gate, UnconditionalStorage
from tests.support.world import (
    load_and_check,
    load_rank,
    loads_whole,
    run_ranks,
    save,
    save_rank,
    save_ranks,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:.*no_dist.*:UserWarning",
    "ignore:Detected an existing checkpoint:UserWarning",
)


def failing(monkeypatch, name, error, when=lambda *_: True):
    """Makes a function of `os`, as `store.local` sees it, fail for some calls; returns these."""
    real, hit = getattr(os, name), []

    def call(*args, **kwargs):
        if when(*args):
            hit.append(args)
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    monkeypatch.setattr(local.os, name, call)
    return hit


# Files that only their rank can see


def test_a_save_whose_files_only_their_rank_can_see_fails_and_names_them(tmp_path):
    (tmp_path / "a").mkdir()
    ranks = save_ranks(
        state_of(), 2, str(tmp_path / "a"), opener=lambda _: open_storage(str(tmp_path / "b"))
    )
    errors = [result.error for result in run_ranks(ranks)]
    assert {type(error) for error in errors} == {StorageError}
    assert "__0_0." in errors[0].message
    assert "__1_0." in errors[0].message
    with pytest.raises(CheckpointNotFoundError):
        load_and_check(state_of(), 1, str(tmp_path / "a"))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_has_another_length_where_the_commit_is_made_fails_the_save(tmp_path, change):
    def performer(task):
        if isinstance(task, commands.WriteTable):
            (file,) = tmp_path.glob("__0_0.*")
            file.write_bytes((file.read_bytes() + b"x")[: file.stat().st_size + change])
        return perform(task)

    (result,) = run_ranks(save_ranks(state_of(), 1, str(tmp_path)), performer=performer)
    assert isinstance(result.error, StorageError)
    assert "has another length" in result.error.message


# Durable


def test_who_learns_that_a_key_is_taken_knows_that_its_name_is_durable(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    storage.write("a", b"1", create=True)
    synced = []
    real = local.sync_directory
    monkeypatch.setattr(local, "sync_directory", lambda path: (synced.append(path), real(path)))
    with pytest.raises(KeyExistsError):
        storage.write("a", b"2", create=True)
    assert synced == [str(tmp_path)]


def test_a_commit_whose_name_could_not_be_made_durable_is_not_reported_as_committed(
    tmp_path, monkeypatch
):
    (rank,) = save_ranks(state_of(), 1, str(tmp_path))
    real = local.sync_directory
    broken = []

    def sync(path):
        broken.extend(tmp_path.glob("manifest-*"))
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(local, "sync_directory", sync)
    (result,) = run_ranks([rank])
    assert broken
    assert isinstance(result.error, CommitUnknownError)


def test_a_deleted_name_is_durably_gone_before_what_it_refers_to(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    storage.write(".metadata", b"1")
    hit = failing(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StorageError):
        storage.delete([".metadata"])
    assert hit


def test_what_a_filesystem_refuses_only_when_a_file_is_closed_fails_the_write(
    tmp_path, monkeypatch
):
    writer = LocalStorage(tmp_path).open_writer("a", sync=False)
    writer.write(b"1")
    real = os.close

    def close(fd):
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(local.os, "close", close)
    with pytest.raises(StorageError, match="EDQUOT"):
        writer.commit()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# Stock DCP beside it


def test_a_commit_that_a_rank_finds_on_storage_is_published_for_stock_dcp(tmp_path):
    path = str(tmp_path)
    save(state_of(1), 1, path)

    def die_before_publishing(task):
        if isinstance(task, commands.PublishMetadata):
            raise RuntimeError("the coordinator is gone")
        return perform(task)

    session = inline_session(performer=die_before_publishing)
    (rank,) = save_ranks(state_of(2), 1, path)
    assert drive(rank, session.call).slot == 2
    check_stock(path, state_of(2))


def test_files_of_a_stock_checkpoint_that_came_later_are_not_collected(tmp_path):
    save_stock(tmp_path, {"a": torch.zeros(13, 7)})

    def stock_saves_before_collecting(task):
        if isinstance(task, commands.CollectReplaced):
            save_stock(tmp_path, {"a": torch.ones(13, 7)})
        return perform(task)

    (rank,) = save_ranks(state_of(), 1, str(tmp_path))
    run_ranks([rank], performer=stock_saves_before_collecting)
    check_stock(tmp_path, {"a": np.ones((13, 7), np.float32)})


# What an overwrite may delete


def test_deleting_never_follows_a_link_out_of_the_checkpoint(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "sub").symlink_to(outside)
    storage = LocalStorage(inside)
    with pytest.raises(StorageError, match="outside"):
        storage.delete(["sub/precious"])
    assert (outside / "precious").read_text() == "mine"


def test_an_overwrite_deletes_only_files_that_bear_the_name_of_the_replaced_attempt(tmp_path):
    path = str(tmp_path)
    (first,) = save(state_of(1), 1, path)
    manifest = decode_record(first.manifest)
    entry = type(manifest.table)("precious", 4, "0" * 32)
    changed = type(manifest)(**{**vars(manifest), "files": (*manifest.files, entry)})
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "manifest-00000001.json").write_bytes(encode_record(changed))
    save(state_of(2), 1, path)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not list(tmp_path.glob(f"*{first.attempt}*"))


# What the ranks are told


def test_a_refusal_of_a_coordinator_that_contradicts_itself_does_not_hide_a_commit(tmp_path):
    session = inline_session()

    def call(request):
        reply = session.call(request)
        if isinstance(request, messages.SaveReceipt):
            return messages.Refused(InternalError("the coordinator contradicted itself"))
        return reply

    (rank,) = save_ranks(state_of(), 1, str(tmp_path))
    assert drive(rank, call).slot == 1
    load_and_check(state_of(), 1, str(tmp_path))


def test_a_refusal_of_a_coordinator_that_contradicts_itself_is_made_final(tmp_path):
    """Its machine may go on: the failure that the rank reports must stay one."""
    session, attempts = inline_session(), []

    def call(request):
        if isinstance(request, messages.SaveReceipt):
            attempts.append(request.attempt)
            return messages.Refused(InternalError("the coordinator contradicted itself"))
        return session.call(request)

    (rank,) = save_ranks(state_of(), 1, str(tmp_path))
    with pytest.raises(InternalError, match="contradicted itself"):
        drive(rank, call)
    assert outcome(str(tmp_path), attempts[0]) == "aborted"


def test_a_rank_waits_as_long_as_its_coordinator_may_take_and_not_much_longer():
    key, target = messages.OpKey("s", 0), messages.Target("memory://x")
    saving = SaveOptions(plan_timeout_s=1000, write_timeout_s=2000, commit_timeout_s=500)
    loading = LoadOptions(plan_timeout_s=1000, read_timeout_s=2000)
    # joining, sending rows twice, reading and planning; the storage is read.
    assert 5000 < longest_s(messages.SaveJoin(key, 0, 2, target, saving, b""), saving) < 5300
    assert 3000 < longest_s(messages.LoadJoin(key, 0, 2, target, loading), loading) < 3300
    # writing, then building, table, record, publishing and collecting.
    assert 4500 < longest_s(messages.SaveReceipt(key, 0, "a", 1), saving) < 4800
    assert 3000 < longest_s(messages.LoadDone(key, 0), loading) < 3300


# The one error of all ranks


def test_a_rank_that_comes_after_others_disagreed_is_told_what_they_were_told():
    play = Play(world_size=4)
    play.join(0)
    play.join(1, target=messages.Target("memory://other"))
    play.expire()
    told = play.errors("SaveJoin")[0]
    assert type(told) is RankDisagreementError
    assert play.join(2).error is told
    assert play.join(3, target=messages.Target("memory://third")).error is told


def test_an_error_of_the_coordinators_work_names_the_checkpoint():
    play = Play()
    play.join(0)
    play.join(1)
    failed = PlanConflictError("'w' differs")
    play.done(commands.Failed(failed))
    assert {error.checkpoint_id for error in play.errors("SaveJoin").values()} == {"memory://ckpt"}
    assert failed.checkpoint_id is None


def test_an_error_on_the_way_to_the_coordinator_names_the_checkpoint():
    def out_of_reach(request):
        raise ParticipantError("the coordinator is gone")

    target, here = messages.Target("memory://ckpt"), {"rank": 0, "world_size": 1}
    save = save_rank(
        messages.OpKey("s", 0), target=target, options=SaveOptions(), capture=lambda: None, **here
    )
    load = load_rank(
        messages.OpKey("s", 1),
        target=target,
        options=LoadOptions(),
        plan=lambda found: None,
        **here,
    )
    for steps in (save, load):
        with pytest.raises(ParticipantError) as caught:
            drive(steps, out_of_reach)
        assert caught.value.checkpoint_id == "memory://ckpt"


# --- a storage that can't create a key only if it is absent -------------------------------------


OLD, NEW, NEXT = state_of(1), state_of(2), state_of(3)
STATES = [OLD, NEW, NEXT]


class TestUnconditional(StorageConformance):
    @pytest.fixture
    def storage(self, request):
        return UnconditionalStorage(MemoryStorage(place_of(request)))


def place_of(request):
    return "unconditional-" + "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def place(request):
    return MemoryStorage(place_of(request))


def opener(place, **more):
    return lambda _: UnconditionalStorage(place, **more)


def save_without(place, state, world_size=2, *, opened=None, **more):
    """Returns how each rank's save ended on a place that has no conditions."""
    opened = opened or opener(place)
    ranks = save_ranks(state, world_size, place.url, opener=opened, **more)
    return run_ranks(ranks, performer=partial(perform, opener=opened))


def test_a_save_says_that_its_coordinator_alone_decides_and_loads(place):
    for step, state in enumerate([OLD, NEW], 1):
        results = save_without(place, state)
        for result in results:
            (warning,) = result.get().warnings
            assert "coordinator alone decides" in warning
            assert place.url in warning
            assert result.get().slot == step
        load_and_check(state, 3, place.url)
    (with_conditions,) = save(NEXT, 1, place.url)
    assert with_conditions.warnings == ()


INTERRUPTED = {"save.overwrite", "delete", "collect"}


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.name in INTERRUPTED], ids=str)
def test_whatever_is_interrupted_leaves_a_whole_checkpoint(operation):
    """All invariants but one: what an undecided attempt left is not collected by a later save.

    Whether it is still at work can't be told where it can't be fenced off.
    """
    numbers = count()
    kept = [invariant for invariant in INVARIANTS if invariant is not nothing_is_left]
    reached = check_crashes(
        operation,
        storage=lambda: UnconditionalStorage(
            MemoryStorage(f"unconditional-{operation}-{next(numbers)}")
        ),
        invariants=kept,
        every=15,
    )
    assert sum(reached.stood.values()) == sum(reached.points.values()) > 4


# two jobs at once: what the warning warns of


def test_of_two_jobs_that_save_at_once_the_later_record_stands_and_loads_whole(place):
    """Not protected: both are told of success. What stands is one of them, never a mixture."""
    theirs = []

    def other_job(key):
        if key == record_key(1) and not theirs:
            theirs.append(None)  # once: the other job puts this key as well
            theirs[:] = save_without(place, NEXT, session="other")

    ours = save_without(place, NEW, opened=opener(place, between=other_job))
    assert {result.get().slot for result in (*ours, *theirs)} == {1}
    assert place.read(record_key(1)) == ours[0].get().manifest
    assert loads_whole(place.url, STATES) == 1


def test_a_record_that_is_there_before_is_not_replaced(place):
    save_without(place, OLD)
    theirs = place.read(record_key(1))
    record = encode_record(AbortRecord(attempt=new_attempt(), reason="late", rank=0))
    task = commands.CreateRecord(messages.Target(place.url), 1, record, create_if_absent=False)
    found = perform(task, opener=opener(place))
    assert isinstance(found, commands.SlotTaken)
    assert found.attempt == decode_record(theirs).attempt
    assert found.record == place.read(record_key(1)) == theirs


def test_a_job_that_finds_another_record_after_its_own_lost(place):
    started = []

    class Slow(UnconditionalStorage):
        """Writes its record, and another job that had looked before it does so as well."""

        def write(self, key, data, *, create=False):
            super().write(key, data, create=create)
            if key == record_key(1):
                started.append(key)
                place.write(key, theirs)

    (lone,) = save(OLD, 1, "memory://unconditional-lender")
    theirs = lone.manifest
    results = save_without(place, NEW, opened=lambda _: Slow(place))
    assert started
    assert {type(result.error) for result in results} == {CheckpointExistsError}
    assert lone.attempt in str(results[0].error)


class Forgetful(UnconditionalStorage):
    """Answers that a record was written, and does nothing, as HDFS does where it can't rename."""

    def write(self, key, data, *, create=False):
        if not key.startswith("manifest-"):
            super().write(key, data, create=create)


def test_a_record_that_is_not_there_after_it_was_written_is_no_commit(place):
    save_without(place, OLD)
    before = [entry.key for entry in place.list()]
    results = save_without(place, NEW, opened=lambda _: Forgetful(place))
    assert {type(result.error) for result in results} == {CommitUnknownError}
    assert "is not there" in str(results[0].error)
    assert set(before) <= {entry.key for entry in place.list()}
    assert loads_whole(place.url, STATES) == 0


class HdfsRename(MemoryFileSystem):
    """Renames as HDFS does: never onto a file, and over HTTP without an error."""

    protocol = "hdfs-rename"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    refused: ClassVar[str | None] = None

    def mv(self, path1, path2, **kwargs):
        if not self.exists(path2) and not (self.refused and self.refused in path2):
            super().mv(path1, path2, **kwargs)


@pytest.fixture
def hdfs(monkeypatch):
    monkeypatch.setattr(HdfsRename, "store", {})
    monkeypatch.setattr(HdfsRename, "pseudo_dirs", [""])
    return Location("/run", filesystem=HdfsRename())


def test_where_a_rename_replaces_nothing_each_save_is_what_stock_dcp_sees(hdfs):
    for number in (1.0, 2.0):
        with pytest.warns(UserWarning, match="coordinator alone decides"):
            ray_dcp.save({"w": torch.full((4,), number)}, checkpoint_id=hdfs, no_dist=True)
    checkpoint = ray_dcp.open(hdfs).checkpoint
    assert not checkpoint.metadata_is_stale
    assert not open_storage(hdfs).unpublished()
    assert ray_dcp.read_state_dict(hdfs)["w"].tolist() == [2.0] * 4


@pytest.mark.parametrize("refused", ["manifest-", ".distcp", "chunks."])
def test_a_rename_that_does_nothing_fails_the_save_and_the_previous_one_stands(
    hdfs, monkeypatch, refused
):
    with pytest.warns(UserWarning, match="coordinator alone decides"):
        ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=hdfs, no_dist=True)
    monkeypatch.setattr(HdfsRename, "refused", refused)
    kind = CommitUnknownError if refused == "manifest-" else StorageError
    with pytest.raises(kind, match="did not rename") as caught:
        ray_dcp.save({"w": torch.zeros(4)}, checkpoint_id=hdfs, no_dist=True)
    # The error of the coordinator itself, and not one around it.
    assert str(caught.value).count("ray_dcp.outcome(") == (kind is CommitUnknownError)
    assert ray_dcp.read_state_dict(hdfs)["w"].tolist() == [1.0] * 4


# who may decide


@pytest.mark.parametrize("there", [None, open_storage])
def test_a_rank_without_its_coordinator_only_looks(place, there):
    """The restarted coordinator knows nothing: with conditions the ranks would fence it off.

    Nor where a condition seems to hold on the rank's machine: what the coordinator saw counts.
    """
    restarted = Coordination(epoch=2, new_attempt=new_attempt)
    before = place.list()

    def to_the_next_life(generator):
        request = next(generator)
        while not isinstance(request, messages.SaveReceipt):
            request = generator.send((yield request))
        asked.append(request.attempt)
        try:
            restarted.receive(request)
        except CommitUnknownError as error:
            generator.throw(error)

    asked = []
    ranks = save_ranks(NEW, 2, place.url, opener=there or opener(place))
    results = run_ranks(
        [to_the_next_life(rank) for rank in ranks], performer=partial(perform, opener=opener(place))
    )
    assert {type(result.error) for result in results} == {CommitUnknownError}
    assert before == []
    assert [entry.key for entry in place.list("manifest-")] == []
    (attempt,) = set(asked)
    assert outcome(place.url, attempt) == "open"
    # The place is as good as new.
    save_without(place, NEXT, session="after")
    assert loads_whole(place.url, STATES) == 2


@pytest.mark.parametrize("create_if_absent", [True, False])
def test_a_commit_that_may_still_arrive_is_not_declared_failed(create_if_absent):
    """An abort keeps a late manifest out only where a record is created if absent."""
    play = Play()
    play.to_record(commands.RecordsRead(0, None, None, (), create_if_absent=create_if_absent))
    while isinstance(play.task, commands.CreateRecord):
        play.fail(StorageError("the answer was lost"))
        if isinstance(play.task, commands.ReadRecord):
            play.done(commands.SlotFree(1))
    assert isinstance(play.task, commands.CreateAbort) == create_if_absent
    if not create_if_absent:
        assert play.task is None
        errors = play.errors("SaveReceipt")
        assert {type(error) for error in errors.values()} == {CommitUnknownError}
        assert "the answer was lost" in str(errors[0])


# --- nothing waits for ever -----------------------------------------------------------------------


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
    with Call(session, 60.0) as call:
        return drive(
            save_rank(
                call.next_key(), rank=0, world_size=1, target=messages.Target(url),
                options=SaveOptions(**options), progress=call.progress,
                capture=lambda: ArrayCapture(state or state_of(1), 0, 1), **more,
            ),
            call.ask,
        )  # fmt: skip


def one_load(url, session, *, opener, **options):
    with Call(session, 60.0) as call:
        return drive(
            load_rank(
                call.next_key(), rank=0, world_size=1, target=messages.Target(url),
                options=LoadOptions(**options), opener=opener, progress=call.progress,
                plan=lambda c: ArrayWork(c, state_of(1), 0, 1),
            ),
            call.ask,
        )  # fmt: skip


def test_the_tasks_of_a_save_follow_each_other_in_one_thread_that_ends_with_it(url, monkeypatch):
    monkeypatch.setattr(processes, "IDLE_S", PATIENCE_S)
    performed_by, session = [], inline_session(performer=lambda task: here(task))

    def here(task):
        performed_by.append(threading.current_thread())
        return perform(task)

    for state in (state_of(1), state_of(2)):
        performed_by.clear()
        one_save(url, session, state=state)
        assert len(performed_by) > 4
        (thread,) = set(performed_by)
        assert eventually(lambda thread=thread: not thread.is_alive())


def test_a_thread_without_a_task_ends_and_another_takes_its_place(monkeypatch):
    monkeypatch.setattr(processes, "IDLE_S", 0.01)
    tasks = processes.TaskThread("tasks")
    first = tasks.begin(threading.current_thread).result(PATIENCE_S)
    assert eventually(lambda: not first.is_alive())
    assert tasks.begin(threading.current_thread).result(PATIENCE_S) is not first
    tasks.end()


# Storages that hang


def test_a_write_that_hangs_is_given_up_at_the_deadline_and_names_the_file(url, gate):
    begin_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"write its part within 2 s") as caught:
        one_save(url, inline_session(), opener=gate().opener, write_timeout_s=2)
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
        one_save(url, inline_session(), opener=held.opener, write_timeout_s=2)
    assert writers()
    held.open()
    assert eventually(lambda: not writers())
    assert not [key for key in keys(url) if key.endswith(".distcp")]


def test_a_read_that_hangs_is_given_up_at_the_deadline_and_names_the_file(url, gate):
    save(state_of(1), 1, url)
    held = gate()
    # Without checksums, as these are read while the reads are planned, which has a deadline too.
    with pytest.raises(DeadlineError, match=r"read its share within 2 s") as caught:
        one_load(url, inline_session(), opener=held.opener, read_timeout_s=2, verify="never")
    assert caught.value.key.startswith("__0_0.")
    # What it reads could still be written into tensors, so nobody may load meanwhile.
    with pytest.raises(ParticipantError, match="hang in the storage"):
        one_load(url, inline_session(), opener=Gate("nothing").opener, plan_timeout_s=0.1)
    held.open()
    load_and_check(state_of(1), 1, url)


def test_a_commit_that_hangs_is_outvoted_by_its_rank_and_loses_when_it_comes_back(url, gate):
    held = gate("manifest-*")
    session = inline_session(performer=partial(perform, opener=held.opener))
    with pytest.raises(ParticipantError, match="was declared failed in slot 1"):
        one_save(url, session, commit_timeout_s=2)
    held.open()
    assert eventually(lambda: session.coordinator_info()["active"] == ())
    assert loads_whole(url, [state_of(1)]) is None


def test_a_commit_that_hangs_for_coordinator_and_rank_is_unknown_and_ends_when_it_comes_back(
    url, gate
):
    held = gate("manifest-*")
    session = inline_session(performer=partial(perform, opener=held.opener))
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
    session = inline_session(performer=partial(perform, opener=held.opener))
    with pytest.raises(DeadlineError, match="table to end within"):
        one_save(url, session, commit_timeout_s=2)
    # The next save of this session is not in its way.
    held.open()
    one_save(url, session)
    load_and_check(state_of(1), 1, url)


def test_a_rank_without_coordinator_does_not_wait_for_a_storage_that_hangs(url, gate):
    held = gate("manifest-*")
    session = inline_session()

    def call(request):
        if isinstance(request, messages.SaveReceipt):
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
    held, progress, session = gate(), RankProgress(), inline_session()
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
    assert [type(request) for request in asked] == [messages.SaveJoin]
    assert caught.value.checkpoint_id == url
    assert keys(url) == ["manifest-00000001.json"]


# Ctrl-C and cancel


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_the_only_rank_writes_leaves_no_data_and_no_open_attempt(url, gate, writers):
    save(state_of(1), 1, url)
    before = {key for key in keys(url) if key.endswith(".distcp")}
    held = gate(on_arrival=interrupt)
    session = inline_session()
    with pytest.raises(KeyboardInterrupt):
        one_save(url, session, opener=held.opener, state=state_of(2))
    held.open()
    assert eventually(lambda: not writers())
    assert {key for key in keys(url) if key.endswith(".distcp")} == before
    assert session.coordinator_info()["active"] == ()
    assert loads_whole(url, [state_of(1), state_of(2)]) == 0
    records = [key for key in keys(url) if key.startswith("manifest-")]
    assert len(records) == 2, "the attempt is declared failed"


def test_a_wait_that_ends_too_early_leaves_no_cycle_of_objects():
    future: Future[str] = Future()
    wait_any([future], 0.0)
    future.set_result("a reply")
    freed = weakref.ref(future)
    del future
    assert freed() is None, "the reply of a long call needs the collector"


def test_a_second_ctrl_c_while_the_first_is_reported_leaves_no_open_attempt(url, gate):
    session, may_go_on = inline_session(), threading.Event()

    def interrupt_twice():
        session._transport._thread.loop.call_soon_threadsafe(may_go_on.wait, PATIENCE_S)
        interrupt()
        for after_s, then in ((0.1, held.open), (0.6, interrupt), (1.0, may_go_on.set)):
            threading.Timer(after_s, then).start()

    held = gate(on_arrival=interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        one_save(url, session, opener=held.opener)
    assert may_go_on.wait(PATIENCE_S)
    assert eventually(lambda: session.coordinator_info()["active"] == ())
    one_save(url, session)
    load_and_check(state_of(1), 1, url)


def test_ctrl_c_in_the_middle_of_the_commit_waits_for_its_end(url, gate):
    held = gate("manifest-*", on_arrival=interrupt)
    threading.Timer(0.3, held.open).start()
    session = inline_session(performer=partial(perform, opener=held.opener))
    with pytest.raises(KeyboardInterrupt):
        one_save(url, session)
    assert session.coordinator_info()["active"] == ()
    assert loads_whole(url, [state_of(1)]) == 0
    assert ".metadata" in keys(url)


def test_a_save_of_one_process_is_cancelled_by_another_thread(url, gate):
    held, session = gate(), inline_session()
    came = []

    def run():
        try:
            one_save(url, session, opener=held.opener)
        except SaveCancelledError as error:
            came.append(error)

    saving = threading.Thread(target=run)
    saving.start()
    assert held.reached.wait(PATIENCE_S)
    assert session.cancel(messages.OpKey("inline", 0), "enough")
    assert session.cancel(messages.OpKey("inline", 0), "enough")
    saving.join(PATIENCE_S)
    assert "enough" in came[0].message
    held.open()
    assert eventually(lambda: not [k for k in keys(url) if k.endswith(".distcp")])
    one_save(url, session)
    assert not session.cancel(messages.OpKey("inline", 1), "too late")
    load_and_check(state_of(1), 1, url)


def test_what_a_rank_waits_for_is_no_file():
    progress = RankProgress(lambda: 0.0)
    progress.enter(STAGE)
    progress.waits_for("room for staged bytes")
    assert progress.look()[:2] == ("staging", "")
    assert progress.doing.key is None
    error = progress.overdue("stage", "write_timeout_s", 1.0, 0)
    assert error.key is None
    assert "it waits for room for staged bytes, and" in error.message


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
