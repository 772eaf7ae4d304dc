"""Saves and loads of numpy-backed ranks through the real code, in one thread without Ray."""

import io
from functools import partial

import numpy as np
import pytest

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    MissingKeyError,
    ParticipantError,
    StorageError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.commands import Failed, MakePlan
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import LoadDone, OpKey, SaveOutcome, SaveReceipt, Target
from ray_dcp.protocol.vote import Fenced, Won
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.tasks import new_attempt, outcome, perform, settle
from ray_dcp.store.memory import MemoryStorage
from tests.inline_ranks import run_ranks
from tests.numpy_ranks import (
    NumpyCapture,
    NumpyWork,
    load_and_check,
    load_ranks,
    loads_whole,
    save,
    save_ranks,
    state_of,
)
from tests.rank_saves import load_rank, save_rank
from tests.scripted_storage import ChangeScript


@pytest.fixture
def url(request):
    """A place in memory of this test alone."""
    return f"memory://{request.node.name.replace('[', '-').replace(']', '')}"


def keys(url):
    return [entry.key for entry in MemoryStorage(url.removeprefix("memory://")).list()]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_checkpoint_of_any_world_size_loads_on_any_other(url, world_size):
    state = state_of(world_size)
    outcomes = save(state, world_size, url)
    assert len({outcome.attempt for outcome in outcomes}) == 1
    for other in range(1, 9):
        load_and_check(state, other, url)


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_a_checkpoint_on_a_filesystem_loads_on_other_world_sizes(tmp_path, container):
    state = state_of(1)
    options = SaveOptions(container=container, part_bytes=9000, num_threads=3)
    save(state, 3, str(tmp_path / "ckpt"), options=options)
    for other in (1, 2, 5):
        load_and_check(state, other, str(tmp_path / "ckpt"))
    assert (tmp_path / "ckpt" / ".metadata").exists() == (container == "torch_save")


def test_every_rank_is_told_the_same_manifest(url):
    outcomes = save(state_of(), 4, url)
    assert {outcome.manifest for outcome in outcomes} == {
        MemoryStorage(url.removeprefix("memory://")).read("manifest-00000001.json")
    }


def test_a_save_over_a_checkpoint_replaces_it_and_leaves_no_file_of_it(url):
    save(state_of(1), 3, url)
    before = keys(url)
    (first, *_) = save(state_of(2), 2, url)
    after = keys(url)
    assert first.slot == 2
    assert set(before) & set(after) == {".metadata"}
    assert [key for key in after if key.startswith("manifest-")] == ["manifest-00000002.json"]
    load_and_check(state_of(2), 2, url)


def test_a_state_that_differs_between_ranks_is_taken_from_the_lowest_with_a_warning(url):
    state, other = state_of(), state_of(step={"step": "other"})
    outcomes = save(None, 2, url, states=[state, other])
    assert "'step' on rank 1." in outcomes[1].warnings[0]
    load_and_check(state, 2, url)


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
        save_ranks(state_of(2), 3, url, opener=script.open),
        performer=partial(perform, opener=script.open),
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


def test_a_load_from_nowhere_fails_on_all(url):
    ranks, _ = load_ranks(state_of(), 2, url)
    errors = [result.error for result in run_ranks(ranks)]
    assert {type(error) for error in errors} == {CheckpointNotFoundError}


def test_overwrite_false_leaves_what_stands(url):
    save(state_of(1), 2, url)
    results = run_ranks(save_ranks(state_of(2), 2, url, options=SaveOptions(overwrite=False)))
    assert {type(result.error) for result in results} == {CheckpointExistsError}
    assert loads_whole(url, [state_of(1), state_of(2)]) == 0


# Ranks that freeze or die


@pytest.mark.parametrize("fate", ["freeze", "die"])
@pytest.mark.parametrize("step", ["SaveJoin", "SaveReceipt"])
def test_a_rank_that_is_gone_is_named_on_all_others_and_the_old_checkpoint_stays(url, fate, step):
    save(state_of(1), 2, url)
    results = run_ranks(
        save_ranks(state_of(2), 3, url),
        fate=lambda r: fate if r.rank == 1 and type(r).__name__ == step else "live",
    )
    assert [result.ended for result in results] == [True, False, True]
    expected = DeadlineError if fate == "freeze" else ParticipantError
    for index in (0, 2):
        assert type(results[index].error) is expected
        assert results[index].error.rank == 1
    assert loads_whole(url, [state_of(1), state_of(2)]) == 0


def test_a_rank_that_freezes_while_loading_is_named_on_all_others(url):
    save(state_of(), 2, url)
    ranks, _ = load_ranks(state_of(), 3, url)
    results = run_ranks(
        ranks, fate=lambda r: "freeze" if r.rank == 2 and isinstance(r, LoadDone) else "live"
    )
    assert [type(result.error) for result in results[:2]] == [DeadlineError] * 2
    assert "rank 2" in results[0].error.message


def test_a_rank_that_waits_without_any_deadline_is_a_bug():
    class Deaf(Coordination):
        def receive(self, request, **_):
            return ()

    with pytest.raises(InternalError, match="Nothing will ever happen"):
        run_ranks(
            save_ranks(state_of(), 1, "memory://nowhere"),
            coordination=Deaf(epoch=1, new_attempt=new_attempt),
        )


# Two saves of one id


def test_of_two_overlapping_saves_one_wins_and_the_other_says_so(url):
    one = save_ranks(state_of(1), 2, url, session="one")
    two = save_ranks(state_of(2), 2, url, session="two")
    results = run_ranks([*one, *two])
    kinds = [SaveOutcome if r.error is None else type(r.error) for r in results]
    assert sorted(kinds[::2], key=str) == sorted([SaveOutcome, CheckpointExistsError], key=str)
    assert kinds[0] == kinds[1]
    assert kinds[2] == kinds[3]
    assert loads_whole(url, [state_of(1), state_of(2)]) == kinds.index(SaveOutcome) // 2


def test_an_aborted_save_does_not_stand_in_the_way_of_one_that_overlaps(url):
    one = save_ranks(state_of(1), 2, url, session="one")
    two = save_ranks(state_of(2), 2, url, session="two")
    results = run_ranks(
        [*one, *two],
        fate=lambda r: (
            "die"
            if isinstance(r, SaveReceipt) and (r.key.session, r.rank) == ("one", 1)
            else "live"
        ),
    )
    assert type(results[0].error) is ParticipantError
    assert results[2].get().slot in (1, 2)
    assert loads_whole(url, [state_of(1), state_of(2)]) == 1


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
    (rank,) = save_ranks(state_of(), 1, url, opener=script.open)

    def call(request):
        if isinstance(request, SaveReceipt):
            raise ParticipantError("the coordinator is gone")
        return InlineSession().call(request)

    with pytest.raises(CommitUnknownError) as caught:
        drive(rank, call)
    assert caught.value.attempt


def test_all_ranks_that_settle_an_attempt_are_told_the_same(url):
    (first, *_) = save(state_of(), 1, url)
    won = settle(Target(url), first.attempt, reason="none", rank=0)
    assert won == Won(1, first.manifest)
    fenced = [settle(Target(url), "a9", reason=f"rank {r}", rank=r) for r in range(3)]
    assert fenced == [Fenced(2)] * 3
    assert outcome(url, "a10") == "open"


# The shell


def test_a_session_of_one_process_saves_and_loads(url):
    session = InlineSession()
    state = state_of(5)
    saved = drive(
        save_rank(
            session.next_key(), rank=0, world_size=1, target=Target(url), options=SaveOptions(),
            capture=lambda: NumpyCapture(state, 0, 1),
        ),
        session.call,
    )  # fmt: skip
    works = []
    loaded = drive(
        load_rank(
            session.next_key(), rank=0, world_size=1, target=Target(url), options=LoadOptions(),
            plan=lambda c: works.append(NumpyWork(c, state, 0, 1)) or works[0],
        ),
        session.call,
    )  # fmt: skip
    works[0].check(state)
    assert loaded.checkpoint.slot == saved.slot
    assert loaded.together.bytes_needed == loaded.own.bytes_needed > 0


def test_a_session_of_one_process_waits_for_nobody_else(url):
    (rank, _) = save_ranks(state_of(), 2, url)
    with pytest.raises(InternalError, match="world size 1"):
        drive(rank, InlineSession().call)


def test_a_task_never_raises_but_returns_its_failure():
    told = {"contents": (b"",), "fingerprints": (bytes(32),)}
    failed = perform(MakePlan((b"rubbish",), "torch_save", 1, **told))
    assert isinstance(failed, Failed)
    broken = perform(MakePlan((3,), "torch_save", 1, **told))
    assert isinstance(broken.error, InternalError)


def test_the_bytes_that_a_load_reports_are_those_of_all_ranks(url):
    state = {"a": np.arange(1000, dtype=np.int64), "step": 0}
    save(state, 2, url)
    results = load_and_check(state, 4, url)
    assert {result.together for result in results} == {results[0].together}
    assert sum(result.own.bytes_needed for result in results) == results[0].together.bytes_needed
