"""Ranks in one process without Ray: by the real code, one missing a call, and with gatherers."""

import io
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ray_dcp import errors
from ray_dcp.commit_protocol import commands
from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    MessageBatch,
    OpKey,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
    Target,
    join_receipts,
    pack_receipts,
)
from ray_dcp.commit_protocol.plan_cache import PlanMemory
from ray_dcp.coordinator.gatherer import BatchWindow, group_of
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core.checksums import digest, digest_bytes
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DamagedCheckpointError,
    DeadlineError,
    InternalError,
    MissingKeyError,
    ParticipantError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.format.manifest import AbortRecord, decode_record, encode_record
from ray_dcp.manager.agreement import agree
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.place.outcome import outcome
from ray_dcp.place.records import standing_records
from ray_dcp.rank.rank_load import drive
from ray_dcp.session.call import Call
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.session.session import Session
from ray_dcp.store.memory import MemoryStorage
from tests.support.arrays import ArrayCapture, same_state, sample_state, state_of
from tests.support.checkpoints import check_stock, save_stock, stock_load
from tests.support.storages import ChangeScript
from tests.support.threads import Shared, ThreadTransport
from tests.support.world import (
    World,
    load_and_check,
    load_rank,
    load_ranks,
    load_state,
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


@pytest.mark.parametrize("error", [StorageError("no answer"), ValueError("no answer")])
def test_an_error_of_the_coordinator_is_raised_by_all_with_its_traceback(url, error):
    def refuse(target):
        raise error

    performer = partial(perform, opener=refuse)
    raised = [
        result.error for result in run_ranks(save_ranks(state_of(), 2, url), performer=performer)
    ]
    is_ours = isinstance(error, CheckpointError)
    assert {type(one) for one in raised} == {StorageError if is_ours else InternalError}
    for one in raised:
        assert "no answer" in one.message
        assert any("in refuse" in note for note in one.__notes__)
    assert error.__traceback__ is not None
    assert not hasattr(error, "__notes__"), "what was raised is not changed"


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
    found = drive(one_rank(url), lose_answers_from(inline_session(), "SaveReceipt"))
    assert found.slot == 1
    assert "did not confirm" in found.warnings[0]
    load_and_check(state_of(), 1, url)


def test_a_rank_without_coordinator_fences_its_attempt_off_before_it_reports_a_failure(url):
    session = inline_session()

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
    sessions = {True: inline_session(), False: inline_session()}
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
        return inline_session().call(request)

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
    result = perform(commands.CreateRecord(Target(storage.url), 1, abort("a1")))
    assert isinstance(result, commands.Failed)
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


# --- a rank that misses a call --------------------------------------------------------------------


LIMIT_S = 120.0
"""Far more than any call here takes, in seconds."""


class Rank(Session):
    def save(self, path):
        """Returns what came of a save: an outcome or an error."""
        try:
            with Call(self, 60.0) as call:
                return drive(
                    save_rank(
                        call.next_key(), rank=self.rank, world_size=self.world_size,
                        target=Target(path), options=SaveOptions(), progress=call.progress,
                        capture=lambda: ArrayCapture(state_of(1), self.rank, self.world_size),
                        memory=self.plans,
                    ),
                    call.ask,
                )  # fmt: skip
        except CheckpointError as error:
            return error

    def agree(self, what):
        """Returns what the ranks agree on: the highest of their numbers."""
        try:
            return agree(self, what, max, SaveOptions(), facts=self.rank, timeout_s=60.0)
        except CheckpointError as error:
            return error


class Job:
    def __init__(self, pool, world_size=2):
        self.pool, self.hub = pool, Shared()
        self.ranks = [
            Rank(ThreadTransport(self.hub, rank, world_size)) for rank in range(world_size)
        ]

    def all_do(self, what, *arguments):
        """Returns what comes of a call of all ranks."""
        calls = [self.pool.submit(getattr(rank, what), *arguments) for rank in self.ranks]
        return [call.result(LIMIT_S) for call in calls]

    def without_rank_1(self, what, *arguments):
        """Returns what comes of a call that rank 1 does not make."""
        others = [rank for rank in self.ranks if rank.rank != 1]
        calls = [self.pool.submit(getattr(rank, what), *arguments) for rank in others]
        self.hub.wait_for(*(rank.rank for rank in others))
        self.hub.expire()
        return [call.result(LIMIT_S) for call in calls]


@pytest.fixture
def job():
    with ThreadPoolExecutor(4) as pool:
        yield Job(pool, 3)


def test_a_save_that_one_rank_missed_fails_alone_and_the_next_ones_are_saved(job, tmp_path):
    for error in job.without_rank_1("save", str(tmp_path / "step-1")):
        assert type(error) is DeadlineError
        assert error.rank == 1
    for step in (2, 3):
        outcomes = job.all_do("save", str(tmp_path / f"step-{step}"))
        assert [type(outcome) for outcome in outcomes] == [SaveOutcome] * 3, outcomes
        load_and_check(state_of(1), 2, str(tmp_path / f"step-{step}"))


def test_a_rank_that_comes_first_after_a_call_that_it_missed_waits_for_the_others(job, tmp_path):
    job.without_rank_1("save", str(tmp_path / "step-1"))
    path = str(tmp_path / "step-2")
    early = job.pool.submit(job.ranks[1].save, path)
    job.hub.wait_for(1)
    calls = [early, *(job.pool.submit(job.ranks[rank].save, path) for rank in (0, 2))]
    outcomes = [call.result(LIMIT_S) for call in calls]
    assert [type(outcome) for outcome in outcomes] == [SaveOutcome] * 3, outcomes


def test_ranks_whose_calls_are_one_apart_agree_once_the_odd_one_has_failed(job, tmp_path):
    extra = job.pool.submit(job.ranks[0].save, str(tmp_path / "extra"))
    job.hub.wait_for(0)
    others = [job.pool.submit(job.ranks[rank].save, str(tmp_path / "step-1")) for rank in (1, 2)]
    for error in [call.result(LIMIT_S) for call in (extra, *others)]:
        assert type(error) is RankDisagreementError
    # Rank 0 comes to that step now, and the others go on.
    left = job.pool.submit(job.ranks[0].save, str(tmp_path / "step-1"))
    job.hub.wait_for(0)
    job.hub.expire()
    assert type(left.result(LIMIT_S)) is DeadlineError
    outcomes = job.all_do("save", str(tmp_path / "step-2"))
    assert [type(outcome) for outcome in outcomes] == [SaveOutcome] * 3, outcomes


# --- gatherers ------------------------------------------------------------------------------------


KEY = OpKey("run", 0)
WORLD = 6
GROUPS = (range(2), range(2, 4), range(4, 6))


class Gathered:
    """Ranks that save again and again."""

    def __init__(self, name):
        self.url = f"memory://{name}-{random.getrandbits(60):x}"
        self.memories = [PlanMemory() for _ in range(WORLD)]
        self.world = World(GROUPS)
        self.seq = 0

    def save(self, state, *, choose=None, options=None, urls=None, capture=ArrayCapture, **how):
        self.seq += 1
        world = World(GROUPS, self.world.coordination, **how)
        ranks = [
            save_rank(
                OpKey("s", self.seq), rank=rank, world_size=WORLD,
                target=Target(urls[rank] if urls else self.url),
                options=options or SaveOptions(num_threads=1), memory=self.memories[rank],
                capture=partial(capture, state, rank, WORLD),
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        return world, world.run(ranks, choose)

    @property
    def storage(self):
        return MemoryStorage(self.url.removeprefix("memory://"))

    def holds(self, state):
        return same_state(state, load_state(self.storage, state, 2))


def test_a_warm_save_is_one_message_of_each_group_in_each_phase():
    job = Gathered("warm")
    _, results = job.save(sample_state(0))
    assert {result.get().slot for result in results} == {1}
    world, results = job.save(sample_state(1))
    assert {result.get().slot for result in results} == {2}
    assert world.messages == {"SaveJoin": 3, "SaveReceipt": 3}
    assert not world.direct
    assert job.holds(sample_state(1))


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_and_whoever_dies_all_ranks_commit(seed):
    dice = random.Random(seed)
    job = Gathered(f"dice-{seed}")
    for number in range(2):
        state = sample_state(number)
        deaths = dice.choice((0.0, 0.1, 0.4))
        world, results = job.save(
            state, choose=dice.randrange, kill=lambda group, most=deaths: dice.random() < most
        )
        assert len({result.get().attempt for result in results}) == 1
        assert job.holds(state)
        assert bool(world.direct) == any(group.is_dead for group in world.groups)


def test_a_rank_that_fails_fails_all_at_once():
    class Failing(ArrayCapture):
        def source(self, row):
            if self.rank == 4:
                raise OSError("the disk is gone")
            return super().source(row)

        def __init__(self, state, rank, world_size):
            self.rank = rank
            super().__init__(state, rank, world_size)

    job = Gathered("fails")
    job.save(sample_state(0))
    world, results = job.save(sample_state(1), capture=Failing)
    for result in results:
        with pytest.raises(errors.CheckpointError, match="the disk is gone"):
            result.get()
    assert world.direct == {"SaveReceipt": 1}
    assert job.holds(sample_state(0))


# --- the gatherer by itself ---------------------------------------------------------------------


def join(rank, **changes):
    plain = SaveJoin(
        KEY, rank, 10, Target("memory://x"), SaveOptions(), b"",
        fingerprint=bytes([rank]) * 32, known=b"d" * 32, values=bytes([rank]),
    )  # fmt: skip
    return replace(plain, **changes)


def receipt_of(file, key=None, places=()):
    checks = np.arange(file + 1, dtype=np.uint64)
    return FileReceipt(file, key or f"__{file}_0.a1.distcp", 10, digest(checks), places)


def test_receipts_are_joined_by_file():
    whole = join_receipts([receipt_of(5), receipt_of(1), receipt_of(7)])
    assert whole.file.tolist() == [1, 5, 7]
    assert [one.key for one in whole] == [f"__{file}_0.a1.distcp" for file in (1, 5, 7)]
    assert [one.digest for one in whole] == [receipt_of(file).digest for file in (1, 5, 7)]
    with pytest.raises(errors.InternalError, match="one receipt for file 5, but found two"):
        join_receipts([receipt_of(5), receipt_of(5, key="again")])
    with pytest.raises(errors.InternalError, match="of one line"):
        pack_receipts([receipt_of(5, key="a\nb")])
    assert len(join_receipts([])) == 0


def test_a_message_is_sent_when_it_is_whole_or_has_waited():
    now = [0.0]
    window = BatchWindow(range(3), lambda: now[0])
    assert window.take(join(2)) == []
    assert window.take(join(0)) == []
    assert window.due() == []
    now[0] = window.next_s
    assert [message.ranks for message in window.due()] == [(0, 2)]
    assert window.next_s is None
    later = [join(rank, asked=1) for rank in (2, 0, 1)]
    assert [m.ranks for one in later for m in window.take(one)] == [(0, 1, 2)]


def test_joins_of_one_call_share_its_values_and_others_keep_their_own():
    """What all ranks of a message say alike is sent once."""
    window = BatchWindow(range(3), lambda: 0.0)
    other = Target("memory://x", {"token": "mine"})
    joins = [join(0), join(1, node="b"), join(2, target=other)]
    copies = [pickle.loads(pickle.dumps(one)) for one in joins]
    (message,) = [message for one in reversed(copies) for message in window.take(one)]
    assert list(message.requests) == joins
    first, second, third = message.requests
    assert first.target is second.target
    assert first.options is second.options
    assert third.target.storage_options == {"token": "mine"}
    assert message.only({1}).requests == (second,)


def test_groups_are_few_and_of_neighbours():
    for world_size in (65, 100, 128, 1000, 10240):
        groups = {group_of(rank, world_size) for rank in range(world_size)}
        assert len(groups) <= 64
        ranks = sorted(rank for group in groups for rank in group)
        assert ranks == list(range(world_size))
    assert group_of(0, 64) is None
    with pytest.raises(errors.InvalidRequestError, match="rank from 0 to 99, found 100"):
        group_of(100, 100)


def test_receipts_of_another_attempt_are_refused_one_by_one():
    job = Gathered("fence")
    job.save(sample_state(0))
    world = World(GROUPS, job.world.coordination)
    stray = [SaveReceipt(OpKey("s", 1), rank, "other", 1, (receipt_of(rank),)) for rank in range(2)]
    told = dict(world.shell.receive_batch(MessageBatch(KEY, "SaveReceipt", tuple(stray))).replies)
    assert set(told) == {0, 1}
    assert all(isinstance(reply.error, errors.CommitUnknownError) for reply in told.values())
