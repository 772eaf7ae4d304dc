"""Saves and loads of numpy-backed ranks through the real code, in one thread without Ray."""

import io
from functools import partial

import numpy as np
import pytest
import torch

from ray_dcp.commit_protocol.commands import (
    CreateRecord,
    Failed,
)
from ray_dcp.commit_protocol.messages import OpKey, SaveReceipt, Target
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DamagedCheckpointError,
    DeadlineError,
    MissingKeyError,
    ParticipantError,
    StorageError,
)
from ray_dcp.format.manifest import AbortRecord, decode_record, encode_record
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.session import InlineSession
from ray_dcp.runtime.standing import standing_records
from ray_dcp.runtime.tasks import outcome, perform
from ray_dcp.store.storage import MemoryStorage
from tests.support.arrays import state_of
from tests.support.checkpoints import check_stock, save_stock, stock_load
from tests.support.storages import ChangeScript
from tests.support.world import (
    load_and_check,
    load_rank,
    load_ranks,
    loads_whole,
    run_ranks,
    save,
    save_rank,
    save_ranks,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def url(request):
    """A place in memory of this test alone."""
    return f"memory://{request.node.name.replace('[', '-').replace(']', '')}"


def keys(url):
    return [entry.key for entry in MemoryStorage(url.removeprefix("memory://")).list()]


# Errors


def test_an_error_of_user_code_in_one_rank_is_raised_by_all_with_its_traceback(url):
    def broken():
        raise ValueError("bad hook")

    ranks = save_ranks(state_of(), 3, url)
    ranks[1] = save_rank(
        OpKey("save", 0), rank=1, world_size=3, target=Target(url), options=SaveOptions(),
        capture=broken,
    )  # fmt: skip
    errors = [result.error for result in run_ranks(ranks)]
    assert len({id(error) for error in errors}) == 3
    assert {error.message for error in errors} == {
        "capturing the state dict failed: ValueError: bad hook"
    }
    cause, stack = errors[0].failures[1]
    assert type(cause) is ValueError
    assert stack[-1].name == "broken"
    assert "ValueError: bad hook" in errors[2].__notes__[0]
    assert keys(url) == []


def test_an_error_that_can_not_be_pickled_does_not_make_the_others_wait(url):
    class LocalError(Exception):
        pass

    def broken():
        raise LocalError(io.BytesIO())

    ranks = save_ranks(state_of(), 2, url)
    ranks[0] = save_rank(
        OpKey("save", 0), rank=0, world_size=2, target=Target(url), options=SaveOptions(),
        capture=broken,
    )  # fmt: skip
    error = run_ranks(ranks)[1].error
    assert "LocalError" in error.message
    assert isinstance(error.failures[0][0], CheckpointError)


def test_a_rank_whose_file_can_not_be_written_fails_the_save_on_all_and_leaves_no_data(url):
    save(state_of(1), 2, url)
    script = ChangeScript(1)
    results = run_ranks(
        save_ranks(state_of(2), 3, url, opener=script.opener),
        performer=partial(perform, opener=script.opener),
    )
    assert script.hit
    errors = [result.error for result in results]
    assert {type(error) for error in errors} == {StorageError}
    assert {(error.rank, error.key) for error in errors} == {(1, script.changes[1].key)}
    assert "manifest-00000002.json" in keys(url)
    assert not [key for key in keys(url) if key.startswith("__2")]
    assert loads_whole(url, [state_of(1), state_of(2)]) == 0


def test_a_load_that_one_rank_can_not_plan_touches_nothing_on_any(url):
    save(state_of(), 2, url)
    ranks, works = load_ranks(state_of(), 3, url)

    def plan(checkpoint):
        raise MissingKeyError("no such key", key="w")

    ranks[2] = load_rank(
        OpKey("load", 0), rank=2, world_size=3, target=Target(url), options=LoadOptions(), plan=plan
    )
    errors = [result.error for result in run_ranks(ranks)]
    assert {(type(e), e.rank, e.key) for e in errors} == {(MissingKeyError, 2, "w")}
    assert works[0].dones == []


# Ranks that freeze or die


@pytest.mark.parametrize("fate", ["freeze", "die"])
@pytest.mark.parametrize("step", ["SaveJoin", "SaveReceipt"])
def test_a_rank_that_is_gone_is_named_on_all_others_and_the_old_checkpoint_stays(url, fate, step):
    save(state_of(1), 2, url)
    results = run_ranks(
        save_ranks(state_of(2), 3, url, options=SaveOptions(heartbeat_timeout_s=7.0)),
        fate=lambda r: fate if r.rank == 1 and type(r).__name__ == step else "live",
    )
    assert [result.ended for result in results] == [True, False, True]
    expected = DeadlineError if fate == "freeze" else ParticipantError
    for index in (0, 2):
        assert type(results[index].error) is expected
        assert results[index].error.rank == 1
        # By its silence, long before the deadline, once it takes part.
        silent = "every 7 s" in results[index].error.message
        assert silent == (fate == "freeze" and step == "SaveReceipt")
    assert loads_whole(url, [state_of(1), state_of(2)]) == 0


# A coordinator that is gone


def lose_answers_from(session, step):
    """Calls a session, but never gets an answer from this step on."""

    def call(request):
        reply = session.call(request)
        if type(request).__name__ == step:
            raise ParticipantError("the coordinator is gone")
        return reply

    return call


def one_rank(url, state=None):
    (rank,) = save_ranks(state or state_of(), 1, url)
    return rank


def test_a_commit_whose_answer_is_lost_is_found_on_storage(url):
    found = drive(one_rank(url), lose_answers_from(InlineSession(), "SaveReceipt"))
    assert found.slot == 1
    assert "did not confirm" in found.warnings[0]
    load_and_check(state_of(), 1, url)


def test_a_rank_without_coordinator_fences_its_attempt_off_before_it_reports_a_failure(url):
    session = InlineSession()

    def call(request):
        if isinstance(request, SaveReceipt):
            raise ParticipantError("the coordinator is gone")
        return session.call(request)

    with pytest.raises(ParticipantError, match="is gone"):
        drive(one_rank(url), call)
    assert keys(url)[-1] == "manifest-00000001.json"
    with pytest.raises(CheckpointNotFoundError):
        load_and_check(state_of(), 1, url)


def test_a_receipt_after_a_restart_of_the_coordinator_fails_for_good(url):
    sessions = {True: InlineSession(), False: InlineSession()}
    attempts = []

    def call(request):
        if isinstance(request, SaveReceipt):
            attempts.append(request)
        return sessions[not isinstance(request, SaveReceipt)].call(request)

    with pytest.raises(ParticipantError, match="declared failed"):
        drive(one_rank(url), call)
    # The old coordinator is still there, and gets the receipt after all: it can't commit now.
    late = sessions[True].call(attempts[0])
    assert isinstance(late.error, CheckpointError)
    assert outcome(url, attempts[0].attempt) == "aborted"


def test_without_coordinator_and_storage_the_outcome_is_unknown(url):
    script = ChangeScript(1, lasting=True)
    (rank,) = save_ranks(state_of(), 1, url, opener=script.opener)

    def call(request):
        if isinstance(request, SaveReceipt):
            raise ParticipantError("the coordinator is gone")
        return InlineSession().call(request)

    with pytest.raises(CommitUnknownError) as caught:
        drive(rank, call)
    assert caught.value.attempt


# What tasks find and leave in the slots of a place


@pytest.fixture
def storage(request):
    return MemoryStorage(request.node.name.replace("[", "-").replace("]", ""))


def abort(attempt):
    return encode_record(AbortRecord(attempt=attempt, reason="test", rank=None))


def test_an_abort_below_a_manifest_of_the_same_attempt_decides(storage):
    (first,) = save(state_of(1), 1, storage.url)
    (second,) = save(state_of(2), 1, storage.url)
    # As before the second one removed what it replaced.
    storage.write("manifest-00000001.json", first.manifest)
    storage.write("manifest-00000004.json", second.manifest)
    storage.write("manifest-00000002.json", abort(second.attempt))
    storage.write("manifest-00000003.json", abort("other"))
    found = standing_records(storage)
    assert (found.last_slot, found.slot) == (4, 1)
    assert found.manifest.attempt == first.attempt


def test_a_damaged_record_does_not_stop_a_save_but_one_that_must_not_overwrite(storage):
    save(state_of(1), 1, storage.url)
    storage.write("manifest-00000002.json", b"rubbish")
    kept = run_ranks(save_ranks(state_of(2), 1, storage.url, options=SaveOptions(overwrite=False)))
    assert "unreadable records in slots [2]" in kept[0].error.message
    assert type(kept[0].error) is CheckpointExistsError
    (outcome,) = save(state_of(2), 1, storage.url)
    assert outcome.slot == 3
    assert "slot 2 can't be read" in outcome.warnings[0]
    load_and_check(state_of(2), 2, storage.url)


def test_a_slot_whose_record_is_damaged_is_an_error_and_no_free_slot(storage):
    storage.write("manifest-00000001.json", b"rubbish")
    result = perform(CreateRecord(Target(storage.url), 1, abort("a1")))
    assert isinstance(result, Failed)
    assert isinstance(result.error, DamagedCheckpointError)


# Saves of numpy-backed ranks beside stock DCP: it reads ours, and ours replace its own


def test_a_stock_checkpoint_is_replaced_with_its_files(tmp_path):
    save_stock(tmp_path, {"w": torch.full((6, 4), 1.0)})
    before = (tmp_path / ".metadata").read_bytes()
    (tmp_path / "notes.txt").write_text("mine")
    (first, _) = save(state_of(2), 2, str(tmp_path))
    assert decode_record(first.manifest).replaced_metadata == digest_bytes(before).hex()
    assert not list(tmp_path.glob("__?_?.distcp"))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    check_stock(tmp_path, state_of(2))
    load_and_check(state_of(2), 3, str(tmp_path))


@pytest.mark.parametrize("is_stock", [False, True])
def test_overwrite_false_leaves_what_stands(tmp_path, is_stock):
    if is_stock:
        save_stock(tmp_path, {"w": torch.full((6, 4), 3.0)})
    else:
        save(state_of(1), 2, str(tmp_path))
    options = SaveOptions(overwrite=False)
    results = run_ranks(save_ranks(state_of(2), 2, str(tmp_path), options=options))
    assert {type(result.error) for result in results} == {CheckpointExistsError}
    if is_stock:
        assert stock_load(tmp_path, {"w": np.zeros((6, 4), np.float32)})["w"][0, 0] == 3
    else:
        assert loads_whole(str(tmp_path), [state_of(1), state_of(2)]) == 0


def test_at_every_fault_over_a_stock_checkpoint_one_of_the_two_loads_whole(tmp_path):
    for change in range(100):
        path = tmp_path / str(change)
        save_stock(path, {"w": torch.full((6, 4), 7.0)})
        script = ChangeScript(change)
        results = run_ranks(
            save_ranks(state_of(2), 2, str(path), opener=script.opener),
            performer=partial(perform, opener=script.opener),
        )
        if results[0].error is None:
            load_and_check(state_of(2), 2, str(path))
        else:
            assert stock_load(path, {"w": np.zeros((6, 4), np.float32)})["w"][5, 3] == 7
        if not script.hit:
            break
    assert change >= 6
