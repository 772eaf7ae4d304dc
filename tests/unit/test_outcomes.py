"""What a save reports holds on storage and for stock DCP, and all ranks raise the same error."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch

from ray_dcp.commit_protocol.commands import (
    CollectReplaced,
    Failed,
    Published,
    PublishMetadata,
    WriteTable,
)
from ray_dcp.commit_protocol.messages import (
    LoadDone,
    LoadJoin,
    OpKey,
    Refused,
    SaveJoin,
    SaveReceipt,
    Target,
)
from ray_dcp.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    InternalError,
    ParticipantError,
    PlanConflictError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.format.manifest import decode_record, encode_record
from ray_dcp.io.checkpoint import find_checkpoint
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.session import InlineSession, longest_s
from ray_dcp.runtime.tasks import outcome, perform
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError
from tests.support.arrays import state_of
from tests.support.checkpoints import check_stock, save_stock
from tests.support.protocol import Play
from tests.support.world import load_and_check, load_rank, run_ranks, save, save_rank, save_ranks

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
        if isinstance(task, WriteTable):
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


def test_a_temporary_name_that_can_not_be_removed_does_not_fail_a_write(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    hit = failing(monkeypatch, "unlink", errno.EIO)
    storage.write("a", b"1", create=True)
    assert hit
    assert [entry.key for entry in storage.list()] == ["a"]


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


def test_metadata_written_after_a_later_commit_is_put_right(tmp_path):
    """A save hangs between its look at the slots and its `.metadata`; another one overtakes."""
    path = str(tmp_path)
    (first, *_) = save(state_of(1), 1, path)
    old = (tmp_path / ".metadata").read_bytes()

    class Overtaken:
        def __init__(self, inner):
            self.inner, self.url, self.traits = inner, inner.url, inner.traits
            self.read, self.list, self.delete = inner.read, inner.list, inner.delete

        def write(self, key, data, **how):
            if key == ".metadata" and data == old:
                save(state_of(2), 1, path)
            self.inner.write(key, data, **how)

    task = PublishMetadata(Target(path), first.slot, old)
    result = perform(task, lambda target: Overtaken(open_storage(target)))
    assert result == Published(superseded=True)
    assert not find_checkpoint(open_storage(path)).metadata_is_stale
    check_stock(path, state_of(2))


def test_a_commit_that_a_rank_finds_on_storage_is_published_for_stock_dcp(tmp_path):
    path = str(tmp_path)
    save(state_of(1), 1, path)

    def die_before_publishing(task):
        if isinstance(task, PublishMetadata):
            raise RuntimeError("the coordinator is gone")
        return perform(task)

    session = InlineSession(performer=die_before_publishing)
    (rank,) = save_ranks(state_of(2), 1, path)
    assert drive(rank, session.call).slot == 2
    load_and_check(state_of(2), 1, path)
    check_stock(path, state_of(2))


def test_files_of_a_stock_checkpoint_that_came_later_are_not_collected(tmp_path):
    save_stock(tmp_path, {"a": torch.zeros(13, 7)})

    def stock_saves_before_collecting(task):
        if isinstance(task, CollectReplaced):
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
    session = InlineSession()

    def call(request):
        reply = session.call(request)
        if isinstance(request, SaveReceipt):
            return Refused(InternalError("the coordinator contradicted itself"))
        return reply

    (rank,) = save_ranks(state_of(), 1, str(tmp_path))
    assert drive(rank, call).slot == 1
    load_and_check(state_of(), 1, str(tmp_path))


def test_a_refusal_of_a_coordinator_that_contradicts_itself_is_made_final(tmp_path):
    """Its machine may go on: the failure that the rank reports must stay one."""
    session, attempts = InlineSession(), []

    def call(request):
        if isinstance(request, SaveReceipt):
            attempts.append(request.attempt)
            return Refused(InternalError("the coordinator contradicted itself"))
        return session.call(request)

    (rank,) = save_ranks(state_of(), 1, str(tmp_path))
    with pytest.raises(InternalError, match="contradicted itself"):
        drive(rank, call)
    assert outcome(str(tmp_path), attempts[0]) == "aborted"


def test_a_rank_waits_as_long_as_its_coordinator_may_take_and_not_much_longer():
    key, target = OpKey("s", 0), Target("memory://x")
    saving = SaveOptions(plan_timeout_s=1000, write_timeout_s=2000, commit_timeout_s=500)
    loading = LoadOptions(plan_timeout_s=1000, read_timeout_s=2000)
    # joining, sending rows twice, reading and planning; the storage is read.
    assert 5000 < longest_s(SaveJoin(key, 0, 2, target, saving, b""), saving) < 5300
    assert 3000 < longest_s(LoadJoin(key, 0, 2, target, loading), loading) < 3300
    # writing, then building, table, record, publishing and collecting.
    assert 4500 < longest_s(SaveReceipt(key, 0, "a", 1), saving) < 4800
    assert 3000 < longest_s(LoadDone(key, 0), loading) < 3300


# The one error of all ranks


def test_a_rank_that_comes_after_others_disagreed_is_told_what_they_were_told():
    play = Play(world_size=4)
    play.join(0)
    play.join(1, target=Target("memory://other"))
    play.expire()
    told = play.errors("SaveJoin")[0]
    assert type(told) is RankDisagreementError
    assert play.join(2).error is told
    assert play.join(3, target=Target("memory://third")).error is told


def test_an_error_of_the_coordinators_work_names_the_checkpoint():
    play = Play()
    play.join(0)
    play.join(1)
    failed = PlanConflictError("'w' differs")
    play.done(Failed(failed))
    assert {error.checkpoint_id for error in play.errors("SaveJoin").values()} == {"memory://ckpt"}
    assert failed.checkpoint_id is None


def test_an_error_on_the_way_to_the_coordinator_names_the_checkpoint():
    def out_of_reach(request):
        raise ParticipantError("the coordinator is gone")

    target, here = Target("memory://ckpt"), {"rank": 0, "world_size": 1}
    save = save_rank(
        OpKey("s", 0), target=target, options=SaveOptions(), capture=lambda: None, **here
    )
    load = load_rank(
        OpKey("s", 1), target=target, options=LoadOptions(), plan=lambda found: None, **here
    )
    for steps in (save, load):
        with pytest.raises(ParticipantError) as caught:
            drive(steps, out_of_reach)
        assert caught.value.checkpoint_id == "memory://ckpt"
