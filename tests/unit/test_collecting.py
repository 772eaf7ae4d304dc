"""What a save, a delete and a collector leave at a place, and what they never touch."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp import errors
from ray_dcp.commit_protocol import commands
from ray_dcp.commit_protocol.garbage import MOST_DECIDED, owner_of, sweep, verdicts, was_committed
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Fenced, Lost
from ray_dcp.coordinator.tasks import perform
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    FileEntry,
    Manifest,
    Verdict,
    decode_record,
    record_key,
    slot_of,
)
from ray_dcp.io.checkpoint import find_checkpoint, newest_record
from ray_dcp.io.records import read_slots
from ray_dcp.place.collect import collect
from ray_dcp.place.delete import delete
from ray_dcp.place.outcome import outcome, settle
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import StorageTraits
from ray_dcp.view.checkpoint_view import read_view
from ray_dcp.view.run_listing import list_checkpoints
from tests.support.arrays import state_of
from tests.support.checkpoints import check_stock, save_stock, stock_load
from tests.support.storages import Fault, FaultyStorage, Script
from tests.support.world import load_and_check, loads_whole, run_ranks, save, save_ranks

ONE, TWO, THREE = state_of(1), state_of(2), state_of(3)
STATES = [ONE, TWO, THREE]
TEMP = ".tmp-0123456789ab-"
DEAD = "0123456789abcdef"

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:.*no_dist.*:UserWarning",
    "ignore:Detected an existing checkpoint:UserWarning",
)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "step-1")


@pytest.fixture
def place(tmp_path):
    """A storage with nothing in it."""
    return LocalStorage(tmp_path / "step-1")


def stock_save(path, value=1.0):
    save_stock(path, {"w": torch.full((6, 4), value)})


def stock_value(path):
    return [*set(stock_load(path, {"w": np.zeros((6, 4), np.float32)})["w"].flat)]


def names(place):
    return {entry.key for entry in (*place.list(), *place.unpublished())}


def needed(place):
    """Names of what stands, and of what says so."""
    decides = read_slots(place).decides
    if isinstance(decides.record, DeleteRecord):
        return {record_key(decides.slot)}
    manifest = decides.record
    metadata = {".metadata"} if manifest.metadata is not None else set()
    files = {entry.key for entry in (*manifest.files, manifest.table)}
    return {record_key(decides.slot), *files, *metadata}


def saved(url, state=ONE, world_size=1, **more):
    (outcome, *_) = save(state, world_size, url, **more)
    return outcome


def stopped_before(url, kind, state=TWO, opener=open_storage, **more):
    """Saves up to a task, which never happens; returns that task: what a zombie may still do."""
    caught = []

    class StopError(BaseException):
        pass

    def performer(task):
        if isinstance(task, kind):
            caught.append(task)
            raise StopError
        return perform(task, opener)

    with pytest.raises(StopError):
        run_ranks(save_ranks(state, 1, url, session="zombie", **more), performer=performer)
    return caught[0]


class Meanwhile(FaultyStorage):
    """Lets something happen right before the first calls of an operation on keys like this."""

    def __init__(self, inner, operation, key, act, times=1):
        super().__init__(inner)
        real, left = getattr(self, operation), [None] * times

        def call(at="", *more, **how):
            if left and fnmatch(at, key):
                left.pop()
                act()
            return real(at, *more, **how)

        setattr(self, operation, call)


# Saves collect


def test_after_a_save_there_is_the_checkpoint_one_record_and_what_is_not_ours(place):
    place.write("notes.txt", b"mine")
    place.write("sub/__0_0.0123456789abcdef.distcp", b"somebody's copy")
    for state in STATES:
        saved(place.url, state, 2)
    assert names(place) - needed(place) == {"notes.txt", "sub/__0_0.0123456789abcdef.distcp"}
    assert sorted(read_slots(place).used) == [3]
    load_and_check(THREE, 2, place.url)


def test_a_save_removes_what_dead_attempts_left_and_their_unpublished_files(tmp_path, path):
    storage = LocalStorage(path)
    saved(path)
    stopped_before(path, commands.CreateRecord)
    # What processes leave that are killed while they write.
    for key in (f"__0_0.{DEAD}.distcp", f"chunks.{DEAD}.table", record_key(9), ".metadata"):
        (tmp_path / "step-1" / f"{TEMP}{key}").write_bytes(b"half")
    (tmp_path / "step-1" / f"{TEMP}notes").write_bytes(b"not ours")
    saved(path, THREE)
    assert names(storage) - needed(storage) == {f"{TEMP}notes"}
    assert [entry for entry in Path(path).iterdir() if entry.is_dir()] == []


def test_a_failed_save_leaves_no_folder(tmp_path):
    class Full(LocalStorage):
        def open_writer(self, key, **how):
            writer = super().open_writer(key, **how)
            writer.abort()
            raise errors.StorageError("the disk is full", key=key)

    ranks = save_ranks(ONE, 1, str(tmp_path), opener=lambda _: Full(tmp_path))
    assert isinstance(run_ranks(ranks)[0].error, errors.StorageError)
    assert [entry.name for entry in tmp_path.iterdir()] == [record_key(1)]


def test_a_save_whose_metadata_could_not_be_published_removes_nothing(place):
    saved(place.url)
    before = names(place)

    def performer(task):
        if isinstance(task, commands.PublishMetadata):
            return commands.Failed(errors.StorageError("read-only"))
        return perform(task)

    (result,) = run_ranks(save_ranks(TWO, 1, place.url), performer=performer)
    assert ".metadata could not be published" in result.get().warnings[0]
    assert before < names(place)
    # A collector brings `.metadata` up to date before it removes what the old one names.
    report = collect(place.url)
    assert report.warnings == report.kept == ()
    assert names(place) == needed(place)
    assert not find_checkpoint(place, checkpoint_id=place.url).metadata_is_stale
    load_and_check(TWO, 1, place.url)


def test_files_that_can_not_be_removed_warn_and_the_next_save_removes_them(place):
    attempt = saved(place.url, THREE).attempt

    def failing(task):
        if isinstance(task, commands.CollectReplaced):
            script = [Fault(operation="delete", key=f"__0_0.{attempt}*")]
            return perform(task, lambda _: FaultyStorage(place, script))
        return perform(task)

    (result,) = run_ranks(save_ranks(ONE, 1, place.url), performer=failing)
    assert "could not all be deleted" in result.get().warnings[0]
    assert names(place) > needed(place)
    saved(place.url, TWO)
    assert names(place) == needed(place)


def test_where_records_can_not_be_created_only_if_absent_unknown_attempts_keep_their_files(place):
    """Two saves may both believe to have won there."""

    class Plain(FaultyStorage):
        traits = StorageTraits(create_if_absent=False, durable=False, shared=True)

        def write(self, key, data, *, create=False):
            assert not create
            super().write(key, data)

    def opener(_):
        return Plain(place)

    def performer(task):
        return perform(task, opener)

    for step, state in enumerate(STATES):
        if step == 1:
            stopped_before(place.url, commands.CreateRecord, TWO, opener=opener)
        else:
            (result,) = run_ranks(save_ranks(state, 1, place.url), performer=performer)
            result.get()
    left = names(place) - needed(place)
    assert {name.partition(".")[0] for name in left} == {"__0_0", "chunks"}
    deleted = delete(place.url, opener=opener)
    assert {kept.key for kept in deleted.kept} == left == names(place) - needed(place)
    assert deleted.fenced == ()
    assert loads_whole(place.url, STATES) is None
    # Where they can be, the next save takes them away.
    saved(place.url)
    assert names(place) == needed(place)


# Delete


def test_a_deleted_checkpoint_is_gone_and_says_so(place):
    attempt = saved(place.url, world_size=2).attempt
    place.write("notes.txt", b"mine")
    sizes = {entry.key: entry.num_bytes for entry in place.list()}
    report = delete(place.url)
    assert report.checkpoint == attempt
    assert set(report.deleted) == sizes.keys() - {"notes.txt"}
    assert report.num_bytes == sum(sizes[key] for key in report.deleted)
    assert [kept.key for kept in report.kept] == ["notes.txt"]
    assert names(place) == {"notes.txt", record_key(2)}
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r"was deleted on 20.*load another"
    ) as caught:
        load_and_check(ONE, 1, place.url)
    assert type(caught.value) is errors.CheckpointNotFoundError
    assert newest_record(place) is None
    assert outcome(place.url, attempt) == "committed"


def test_a_delete_decodes_no_metadata_that_the_manifest_knows(place, monkeypatch):
    saved(place.url)
    script, decoded = Script(), []
    for module in ("io.checkpoint", "place.listing", "place.stock_files"):
        monkeypatch.setattr(f"ray_dcp.{module}.decode_metadata", decoded.append)
    delete(place.url, opener=script.opener)
    assert names(place) == {record_key(2)}
    reads = [call.key for call in script.calls if call.operation == "read"]
    # Before it is decided, and before `.metadata` goes: another program may have written since.
    assert reads.count(".metadata") == 2
    assert decoded == []


def test_a_second_delete_is_fine_and_finishes_the_first(place):
    saved(place.url)
    faulty = FaultyStorage(place, [Fault(operation="delete", key="__0_0*", effect="before")])
    report = delete(place.url, opener=lambda _: faulty)
    faulty.assert_hit()
    assert "Not everything could be deleted" in report.warnings[0]
    assert "it could not be deleted" in {kept.reason for kept in report.kept}
    # No record goes before the files that it tells of.
    assert record_key(1) in names(place)
    assert loads_whole(place.url, STATES) is None
    again = delete(place.url)
    assert again.warnings == again.kept == ()
    assert again.checkpoint is None
    assert names(place) == needed(place) == {record_key(2)}
    assert delete(place.url).deleted == ()
    assert names(place) == {record_key(2)}


def test_another_checkpoint_than_the_expected_one_is_not_deleted(place):
    first = saved(place.url).attempt
    standing = saved(place.url, TWO).attempt
    for expected in (first, ""):
        with pytest.raises(errors.CheckpointExistsError, match=f"the save {standing} stands"):
            delete(place.url, expected=expected)
    load_and_check(TWO, 1, place.url)
    assert delete(place.url, expected=standing).checkpoint == standing


def test_to_delete_nothing_is_an_error(place):
    with pytest.raises(errors.CheckpointNotFoundError, match="there is nothing"):
        delete(place.url)
    place.write("notes.txt", b"mine")
    with pytest.raises(errors.CheckpointNotFoundError, match=r"found notes\.txt"):
        delete(place.url)
    assert names(place) == {"notes.txt"}


@pytest.mark.parametrize("what", ["stock", "safetensors"])
@pytest.mark.parametrize("call", [delete, collect])
def test_what_another_program_wrote_is_refused_with_the_way_out(tmp_path, call, what):
    if what == "stock":
        stock_save(tmp_path)
    else:
        (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = names(LocalStorage(tmp_path))
    with pytest.raises(errors.InvalidRequestError, match="remove the directory"):
        call(str(tmp_path))
    assert names(LocalStorage(tmp_path)) == before


def test_a_stock_checkpoint_is_not_deleted_with_what_a_failed_save_of_ours_left_there(tmp_path):
    stock_save(tmp_path, 3.0)
    stopped_before(str(tmp_path), commands.CreateRecord)
    with pytest.raises(errors.InvalidRequestError, match="written by another program"):
        delete(str(tmp_path))
    report = collect(str(tmp_path), abort_unfinished=True)
    assert len(report.deleted) == 2
    assert stock_value(tmp_path) == [3.0]


def test_a_stock_checkpoint_that_was_saved_over_ours_stays_and_stands(tmp_path):
    saved(str(tmp_path))
    stock_save(tmp_path, 4.0)
    with pytest.raises(errors.DamagedCheckpointError, match="two checkpoints"):
        load_and_check(ONE, 1, str(tmp_path))
    report = delete(str(tmp_path))
    assert not any(key.endswith(".metadata") for key in report.deleted)
    assert stock_value(tmp_path) == [4.0]
    assert find_checkpoint(LocalStorage(tmp_path)).kind == "stock"
    with pytest.raises(errors.InvalidRequestError, match="written by another program"):
        delete(str(tmp_path))


def test_a_stock_checkpoint_that_a_commit_replaced_is_deleted_with_it(tmp_path):
    stock_save(tmp_path, 4.0)
    stopped_before(str(tmp_path), commands.PublishMetadata)
    report = delete(str(tmp_path))
    assert ".metadata" in report.deleted
    assert "__0_0.distcp" in report.deleted
    assert names(LocalStorage(tmp_path)) == {record_key(2)}


def test_a_stock_checkpoint_that_came_after_a_delete_loads_and_is_listed(tmp_path):
    saved(str(tmp_path))
    delete(str(tmp_path))
    stock_save(tmp_path, 5.0)
    assert find_checkpoint(LocalStorage(tmp_path)).kind == "stock"
    assert [item.state for item in list_checkpoints(tmp_path)] == ["stock"]
    saved(str(tmp_path), TWO)
    load_and_check(TWO, 1, str(tmp_path))
    assert names(LocalStorage(tmp_path)) == needed(LocalStorage(tmp_path))


def test_a_dry_run_leaves_it_to_others_to_publish_metadata(place):
    saved(place.url)
    place.delete([".metadata"])
    before = names(place)
    collect(place.url, dry_run=True)
    collect(place.url, abort_unfinished=True, dry_run=True)
    assert names(place) == before
    collect(place.url)
    assert names(place) == {*before, ".metadata"}


def test_a_dry_run_tells_and_changes_nothing(place):
    saved(place.url)
    stopped_before(place.url, commands.CreateRecord)
    before = {entry.key: place.read(entry.key) for entry in place.list()}
    told = [delete(place.url, dry_run=True), collect(place.url, dry_run=True)]
    told.append(collect(place.url, abort_unfinished=True, dry_run=True))
    assert {entry.key: place.read(entry.key) for entry in place.list()} == before
    assert all(report.dry_run for report in told)
    done = collect(place.url, abort_unfinished=True)
    assert (done.deleted, done.fenced) == (told[2].deleted, told[2].fenced)
    deleted = delete(place.url)
    assert set(deleted.deleted) | set(done.deleted) == {
        *told[0].deleted, record_key(2)
    }  # fmt: skip
    assert told[1].deleted == ()
    assert len(told[1].kept) == 2


def test_a_damaged_record_does_not_keep_a_place_from_being_deleted_but_from_being_collected(place):
    saved(place.url)
    place.write(record_key(1), b"rubbish")
    with pytest.raises(errors.DamagedCheckpointError, match="Nothing is collected before"):
        collect(place.url)
    delete(place.url)
    assert names(place) == {record_key(2)}


def test_a_delete_that_gets_no_answer_says_that_it_is_unknown_and_may_be_repeated(place):
    saved(place.url)
    script = [
        Fault(operation="write", key="manifest-*", nth=number, effect="after")
        for number in range(1, 9)
    ] + [Fault(operation="read", key=record_key(2), nth=number) for number in range(1, 9)]
    with pytest.raises(errors.StorageError, match="unknown: delete again"):
        delete(place.url, opener=lambda _: FaultyStorage(place, script))
    delete(place.url)
    assert names(place) == {record_key(2)}


# A save that a delete comes before


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (commands.CreateRecord, "id was deleted"),
        (commands.BuildCommit, "deleted it in slot 2 meanwhile"),
    ],
)
def test_a_delete_ends_a_save_that_is_under_way_which_is_told_so(place, kind, said):
    saved(place.url)

    def performer(task):
        if isinstance(task, kind):
            delete(place.url)
        return perform(task)

    (result,) = run_ranks(save_ranks(TWO, 1, place.url), performer=performer)
    assert type(result.error) is errors.CheckpointExistsError
    assert said in result.error.message
    assert loads_whole(place.url, STATES) is None
    assert not [key for key in names(place) if slot_of(key) is None]


def test_a_delete_that_a_save_comes_before_deletes_that_as_well(place):
    saved(place.url)
    zombie = stopped_before(place.url, commands.CreateRecord)
    storage = Meanwhile(place, "write", "manifest-*", lambda: perform(zombie))
    report = delete(place.url, opener=lambda _: storage)
    assert report.checkpoint == decode_record(zombie.record).attempt
    assert names(place) == {record_key(3)}


def test_metadata_that_a_zombie_publishes_after_a_delete_is_taken_back(place):
    task = stopped_before(place.url, commands.PublishMetadata, ONE)
    late = Meanwhile(place, "write", ".metadata", lambda: delete(place.url))
    assert perform(task, lambda _: late) == commands.Published(superseded=True)
    assert names(place) == {record_key(2)}
    assert perform(task) == commands.Published(superseded=True)
    assert names(place) == {record_key(2)}


def test_metadata_that_is_published_after_a_later_commit_is_put_right(place):
    task = stopped_before(place.url, commands.PublishMetadata, ONE)
    late = Meanwhile(place, "write", ".metadata", lambda: saved(place.url, TWO))
    assert perform(task, lambda _: late) == commands.Published(superseded=True)
    assert not find_checkpoint(place).metadata_is_stale
    check_stock(place.url, TWO)


# Zombies in slots that are free again


def zombie_of(place):
    """The commit of a save that lies still before it, and the attempt."""
    task = stopped_before(place.url, commands.CreateRecord, ONE)
    return task, decode_record(task.record).attempt


def test_a_zombie_in_a_slot_that_is_free_again_changes_nothing_and_is_told(place):
    saved(place.url)
    task, attempt = zombie_of(place)
    last = [saved(place.url, state).attempt for state in (TWO, THREE)][-1]
    assert read_slots(place).used == (3,)
    assert perform(task) == commands.RecordCreated(2, commands.Overtaken(3, last, False))
    assert loads_whole(place.url, STATES) == 2
    assert outcome(place.url, attempt) == "aborted"
    assert isinstance(settle(Target(place.url), attempt, reason="", rank=0), Fenced)
    assert collect(place.url).deleted == (record_key(2),)
    assert outcome(place.url, attempt) == "aborted"


def test_who_learns_of_a_commit_when_it_is_replaced_and_its_record_gone_is_told_that(place):
    attempt = saved(place.url).attempt
    last = [saved(place.url, state).attempt for state in (TWO, THREE)][-1]
    found = settle(Target(place.url), attempt, reason="", rank=0)
    assert found == Lost(3, last)
    assert outcome(place.url, attempt) == "committed"
    delete(place.url)
    assert settle(Target(place.url), attempt, reason="", rank=0).is_delete
    assert outcome(place.url, attempt) == "committed"


def test_an_abort_in_a_slot_that_is_free_again_does_not_undo_a_commit(place):
    """A rank that lay still since before the commit ends the attempt, long after it."""
    attempt = saved(place.url).attempt
    for state in (TWO, THREE):
        saved(place.url, state)
    task = commands.CreateAbort(Target(place.url), 1, attempt, "late", 0)
    created = perform(task)
    assert created.overtaken.was_committed
    vote_says = settle(Target(place.url), attempt, reason="", rank=0)
    assert isinstance(vote_says, Lost)
    assert outcome(place.url, attempt) == "committed"
    assert loads_whole(place.url, STATES) == 2


def test_a_commit_of_which_the_answer_was_lost_and_the_record_removed_was_one(place):
    """The write arrives, the answer is lost, others commit and remove the record: then it asks."""
    task, _ = zombie_of(place)
    assert perform(task) == commands.RecordCreated(1)
    last = [saved(place.url, state).attempt for state in (TWO, THREE)][-1]
    again = perform(task)
    assert again == commands.RecordCreated(1, commands.Overtaken(3, last, True))
    assert loads_whole(place.url, STATES) == 2


def test_a_record_that_is_removed_between_a_refusal_and_a_look_at_it_is_no_bug(place):
    task, attempt = zombie_of(place)
    perform(task)
    removed = Meanwhile(place, "read", record_key(1), lambda: saved(place.url, TWO), times=9)
    result = perform(task, lambda _: removed)
    assert isinstance(result, commands.RecordCreated)
    assert result.overtaken.was_committed
    assert outcome(place.url, attempt) == "committed"


# Looking while records are removed


def test_a_record_that_is_removed_while_it_is_looked_for_means_a_newer_one(place):
    def moving(times):
        return Meanwhile(place, "read", "manifest-*", lambda: saved(place.url, THREE), times)

    saved(place.url)
    assert find_checkpoint(moving(3)).slot == 4
    with pytest.raises(errors.StorageError, match="changed 20 times"):
        find_checkpoint(moving(1000))


def test_an_older_record_that_could_not_be_removed_is_not_taken_for_the_newest(place):
    first = saved(place.url).manifest
    saved(place.url, TWO)
    place.write(record_key(1), first)

    def replace():
        saved(place.url, THREE)
        place.write(record_key(1), first)

    assert read_slots(Meanwhile(place, "read", record_key(2), replace)).decides.slot == 3


class Torn(FaultyStorage):
    """A directory that is first read while one record is removed and the next one comes."""

    torn = True

    def list(self, prefix=""):
        found = super().list(prefix)
        if self.torn and prefix == "manifest-":
            self.torn = False
            return []
        return found


def test_a_listing_that_shows_neither_of_two_records_is_not_believed(place):
    saved(place.url)
    assert find_checkpoint(Torn(place)).slot == 1
    task, _ = zombie_of(place)
    saved(place.url, TWO)
    saved(place.url, THREE)
    assert perform(task, lambda _: Torn(place)).overtaken is not None


# Collect


def test_a_save_that_a_collector_ends_fails_as_cancelled(place):
    def performer(task):
        if isinstance(task, commands.CreateRecord):
            collect(place.url, abort_unfinished=True)
        return perform(task)

    (result,) = run_ranks(save_ranks(TWO, 1, place.url), performer=performer)
    assert type(result.error) is errors.SaveCancelledError
    assert names(place) == {record_key(1)}


def test_a_save_that_commits_before_it_is_ended_is_kept(place):
    task = stopped_before(place.url, commands.CreateRecord)
    committing = Meanwhile(place, "write", "*", lambda: perform(task))
    report = collect(place.url, abort_unfinished=True, opener=lambda _: committing)
    assert report.fenced == report.deleted == ()
    load_and_check(TWO, 1, place.url)


def test_what_a_commit_left_undone_is_collected_without_ending_anybody(place):
    """The save dies after its commit: its record tells of whom it found."""
    first = saved(place.url).attempt
    dead = decode_record(stopped_before(place.url, commands.CreateRecord).record).attempt
    stopped_before(place.url, commands.CollectReplaced, THREE)
    report = collect(place.url)
    assert {key for key in report.deleted if first in key or dead in key} == {
        key for key in report.deleted if not key.startswith("manifest-")
    }
    assert any(dead in key for key in report.deleted)
    assert report.kept == report.fenced == ()
    assert names(place) == needed(place)
    load_and_check(THREE, 1, place.url)


def test_files_that_an_old_metadata_names_stay_while_it_can_not_be_replaced(tmp_path):
    path = str(tmp_path)
    first = saved(path).attempt
    stopped_before(path, commands.PublishMetadata, TWO)

    class ReadOnlyMetadata(LocalStorage):
        def write(self, key, data, *, create=False):
            if key == ".metadata":
                raise errors.StorageError("refused", key=key)
            super().write(key, data, create=create)

    report = collect(path, opener=lambda _: ReadOnlyMetadata(path))
    assert "could not be brought up to date" in report.warnings[0]
    assert {kept.key for kept in report.kept} == {
        f"__0_0.{first}.distcp", f"chunks.{first}.table"
    }  # fmt: skip
    check_stock(path, ONE)
    collect(path)
    assert names(LocalStorage(tmp_path)) == needed(LocalStorage(tmp_path))


# A load finds an old `.metadata`


def test_a_load_publishes_the_metadata_that_a_dead_save_did_not(tmp_path):
    path = str(tmp_path)
    saved(path)
    stopped_before(path, commands.PublishMetadata, TWO)
    load_and_check(TWO, 2, path)
    check_stock(path, TWO)


def test_a_deleted_checkpoint_is_listed_as_deleted(tmp_path):
    saved(str(tmp_path / "step-1"))
    saved(str(tmp_path / "step-2"))
    gone = read_view(tmp_path / "step-1").attempt
    delete(str(tmp_path / "step-1"))
    assert [(item.name, item.state) for item in list_checkpoints(tmp_path)] == [
        ("step-1", "deleted"), ("step-2", "committed")
    ]  # fmt: skip
    (tmp_path / "step-1" / f"__0_0.{gone}.distcp").write_bytes(b"left")
    (first, _) = list_checkpoints(tmp_path)
    assert (first.state, first.detail) == (
        "deleted", "files are left: ray_dcp.collect removes them"
    )  # fmt: skip
    (tmp_path / "step-1" / f"__0_0.{DEAD}.distcp").write_bytes(b"left")
    (first, _) = list_checkpoints(tmp_path)
    assert (first.state, first.detail) == ("in flight", "it was deleted, and is being saved again")


def test_unpublished_files_are_those_of_their_attempt(tmp_path):
    storage = LocalStorage(tmp_path)
    attempt = saved(str(tmp_path)).attempt
    kept = {f"{TEMP}__0_0.{DEAD}.distcp", f"{TEMP}{record_key(2)}", f"{TEMP}.metadata"}
    for key in (*kept, f"{TEMP}__0_0.{attempt}.distcp"):
        (tmp_path / key).write_bytes(b"half")
    assert collect(str(tmp_path)).deleted == (f"{TEMP}__0_0.{attempt}.distcp",)
    report = collect(str(tmp_path), abort_unfinished=True)
    assert set(report.deleted) == kept
    assert report.fenced == (DEAD,)
    (tmp_path / f"{TEMP}.metadata").write_bytes(b"half")  # now there is no attempt to end
    assert collect(str(tmp_path), abort_unfinished=True).deleted == (f"{TEMP}.metadata",)
    assert names(storage) == needed(storage) | {record_key(2)}


# --- whose a file is, by its name and the records -------------------------------------------------

A, B, C = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "0123456789abcdef"


def names_of(attempt):
    """Every name that an attempt gives to a file."""
    published = [
        f"__0_0.{attempt}.distcp",
        f"__4095_12.{attempt}.distcp",
        f"chunks.{attempt}.table",
    ]
    return [*published, f"{TEMP}__0_0.{attempt}.distcp", f"{TEMP}chunks.{attempt}.table"]


def manifest_of(attempt, **changed):
    digest = "0" * 32
    record = Manifest(
        attempt=attempt, epoch=1, world_size=1, created_s=0.0,
        files=(FileEntry(f"__0_0.{attempt}.distcp", 1, digest),),
        table=FileEntry(f"chunks.{attempt}.table", 1, digest),
        metadata=None, replaced_metadata=None, plan_digest="00", num_tensors=0, num_chunks=0,
        payload_bytes=0, previous_slot=0,
    )  # fmt: skip
    return dataclasses.replace(record, **changed)


@pytest.mark.parametrize("attempt", [A, C])
def test_every_file_of_an_attempt_is_told_by_its_name(attempt):
    for key in names_of(attempt):
        owned = owner_of(key)
        assert owned is not None, key
        assert owned.attempt == attempt
        expected = "temp" if ".tmp-" in key else "table" if "chunks" in key else "data"
        assert owned.kind == expected


@pytest.mark.parametrize(
    "key",
    [
        "__0_0.distcp", "__0.metadata", f"__0_0.{A}.distcp.bak", f"x__0_0.{A}.distcp",
        f"sub/__0_0.{A}.distcp", f"__0_0.{A}.distcp\n", f"__0_0.{A.upper()}.distcp",
        f"__0_0.{A}0.distcp", f"__0_0.{A[1:]}.distcp", f"__٠_0.{A}.distcp",
        f"chunks.{A}.table/x", f"chunks.{A}.table.tmp", "chunks.table", "chunks.0.table",
        f"{A}/notes.txt", f"{A}/model.safetensors",
        f"{A}/rank-00000-part-00000.safetensors",
        "manifest-1.json", "sub/manifest-00000001.json", "sub/.metadata", ".tmp-", ".tmp-x",
        f".tmp-0123456789aX-__0_0.{A}.distcp", f"{TEMP}{TEMP}__0_0.{A}.distcp", f"{TEMP}notes",
        f"{TEMP}__0_0.distcp", f"a/b/{TEMP}__0_0.{A}.distcp", "", "/", "..", f"../__0_0.{A}.distcp",
        f"{TEMP}probe-first",
    ],
)  # fmt: skip
def test_a_name_that_is_not_exactly_ours_is_somebody_elses(key):
    assert owner_of(key) is None


@pytest.mark.parametrize("attempt", ["a", "run-7", A[:-1], A + "a", A.upper()])
def test_an_attempt_that_was_not_made_up_owns_nothing_whatever_records_say(attempt):
    assert [key for key in names_of(attempt) if owner_of(key) is not None] == []
    found = sweep(names_of(attempt), standing=None, last_slot=9, dead=[attempt], all_dead=True)
    assert found.delete == ()


keys = st.one_of(
    st.text(max_size=30),
    st.builds(
        lambda folder, prefix, middle, end: folder + prefix + middle + end,
        st.sampled_from(["", "", f"{A}/", "sub/", "../", f"{A}/{B}/"]),
        st.sampled_from(["", TEMP, ".tmp-", "__0_0.", "chunks.", "manifest-"]),
        st.sampled_from(["", A, B, "00000001", "00000", "٣", "\n", ".."]),
        st.sampled_from(["", ".distcp", ".table", ".json", ".safetensors", ".metadata", "\n"]),
    ),
    st.sampled_from([*names_of(A), *names_of(B), ".metadata", *map(record_key, range(1, 9))]),
)


attempts = st.sampled_from([A, B, C])


@given(
    st.lists(keys, unique=True), st.none() | attempts, st.sets(attempts), st.booleans(),
    st.booleans(), st.integers(0, 9), st.sets(attempts),
)  # fmt: skip
def test_nothing_that_stands_or_may_stand_or_is_named_is_swept(
    found, own, dead, all_dead, anonymous, last_slot, named
):
    standing = None if own is None else manifest_of(own)
    done = sweep(
        found, standing=standing, last_slot=last_slot, dead=dead, all_dead=all_dead,
        anonymous=anonymous, named=dict.fromkeys(named, "named"),
    )  # fmt: skip
    needed = set() if standing is None else {f"__0_0.{own}.distcp", f"chunks.{own}.table"}
    assert not needed & set(done.delete)
    assert ".metadata" not in done.delete
    assert not set(done.delete) & {kept.key for kept in done.kept}
    for key in done.delete:
        owned = owner_of(key)
        assert owned is not None
        if owned.kind == "record":
            assert slot_of(key) <= last_slot
        elif owned.attempt is None:
            assert all_dead or anonymous
        else:
            assert owned.attempt not in named
            assert all_dead or owned.attempt in dead | {own}
    # Every file is accounted for.
    for key in set(found) - set(done.delete) - {kept.key for kept in done.kept}:
        assert key in needed or key == ".metadata" or (slot_of(key) or 0) > last_slot
    assert not set(done.unfinished) & (dead | {own} | named)
    if all_dead:
        assert done.unfinished == ()


# What a record says of earlier attempts


def test_a_record_remembers_what_decided_before_it_and_who_was_overtaken():
    records = {
        5: manifest_of(A, decided=(Verdict("old", True), Verdict("older", False)), previous_slot=4),
        6: AbortRecord(attempt=B, reason="", rank=None),
    }
    found = verdicts(records, [C, B, A])
    assert found == (
        Verdict("old", True), Verdict("older", False), Verdict(A, True), Verdict(B, False),
        Verdict(C, False),
    )  # fmt: skip
    later = manifest_of("x", decided=found)
    assert was_committed(later, A)
    assert not was_committed(later, B)
    assert not was_committed(later, "never heard of")


def test_what_is_remembered_is_bounded_and_the_newest():
    decided = tuple(Verdict(f"a{number}", True) for number in range(MOST_DECIDED))
    found = verdicts({7: manifest_of(A, decided=decided)}, [C])
    assert len(found) == MOST_DECIDED
    assert found[-2:] == (Verdict(A, True), Verdict(C, False))
    assert found[0] == Verdict("a2", True)
