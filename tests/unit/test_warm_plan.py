"""Saves after the first, and of many alike ranks: when a plan is used again, who sends rows.

The chunk table is encoded once for all saves of a plan; `.metadata` follows from it.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

import ray_dcp
from ray_dcp import SaveOptions
from ray_dcp.commit_protocol import plan_cache
from ray_dcp.commit_protocol.commands import Failed, MakePlan
from ray_dcp.commit_protocol.messages import Refused, SaveJoin, SendItems, Target
from ray_dcp.commit_protocol.plan_cache import PlanMemory
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core.columns import ColumnsBuilder, encode
from ray_dcp.errors import RankDisagreementError
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.format.table import encode_table
from ray_dcp.io.checkpoint import newest_record, read_checkpoint
from ray_dcp.planning import global_plan
from ray_dcp.planning.fingerprint import probes
from ray_dcp.rank import rank_save
from ray_dcp.store.opening import open_storage
from tests.support import world
from tests.support.arrays import ArrayCapture, same_state, sample_state
from tests.support.protocol import KEY, Play
from tests.support.storages import UnconditionalStorage
from tests.support.world import Warm, committed, load_state


@pytest.fixture
def warm(tmp_path):
    return Warm(3, str(tmp_path / "ckpt"))


def loads(warm, state, world_size=2):
    return same_state(state, load_state(open_storage(Target(warm.url)), state, world_size))


def test_a_second_save_moves_no_rows_and_makes_no_plan(warm):
    committed(warm.save(sample_state(0)))
    assert warm.senders == {0, 1, 2}
    assert warm.plans_made == 1
    committed(warm.save(sample_state(1)))
    assert warm.was_warm
    assert all(len(join.fingerprint) == 32 for join in warm.joins)
    assert loads(warm, sample_state(1))


def test_warm_and_cold_saves_write_the_same_bytes(warm, tmp_path):
    def files(url):
        storage = open_storage(Target(url))
        found = {}
        for entry in storage.list():
            if entry.key.endswith(".distcp"):
                rank, _, _ = entry.key.partition(".")
                found[rank] = storage.read(entry.key)
        return found

    committed(warm.save(sample_state(0)))
    committed(warm.save(sample_state(1)))
    assert warm.was_warm
    cold = Warm(3, str(tmp_path / "cold"))
    committed(cold.save(sample_state(1)))
    assert files(warm.url) == files(cold.url) != {}


def test_ranks_that_moved_to_other_nodes_are_shared_out_anew(warm):
    warm.nodes = ["x", "x", "y"]
    committed(warm.save(sample_state(0)))
    warm.nodes = ["p", "p", "q"]  # a job that was started anew, on as many nodes
    committed(warm.save(sample_state(1)))
    assert warm.was_warm
    warm.nodes = ["p", "q", "q"]
    committed(warm.save(sample_state(2)))
    assert warm.plans_made == 1
    assert loads(warm, sample_state(2))


def test_a_rank_whose_plan_is_as_before_hears_whether_a_record_has_one_winner(tmp_path):
    alone = Warm(1, str(tmp_path))
    opener = lambda target: UnconditionalStorage(open_storage(target))  # noqa: E731
    alone.perform = lambda task: perform(task, opener)
    for number in range(2):
        committed(alone.save(sample_state(number)))
    (again,) = alone.replies
    assert again.part is None
    steps = world.join_save(
        KEY, rank=0, world_size=1, target=Target(alone.url), options=SaveOptions(num_threads=1),
        capture=partial(ArrayCapture, sample_state(2), 0, 1), memory=alone.memories[0],
    )  # fmt: skip
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(again)
    go, _ = end.value.value
    assert (again.create_if_absent, go.create_if_absent) == (False, False)


def test_a_rank_that_changed_makes_a_new_plan(warm):
    committed(warm.save(sample_state(0)))
    states = [sample_state(1), sample_state(1), {**sample_state(1), "rep.mine": np.arange(3)}]
    committed(warm.save(states))
    assert (warm.senders, warm.plans_made) == ({0, 1, 2}, 1)
    committed(warm.save(states))
    assert warm.was_warm


def forgets_one(warm):
    warm.memories[1] = PlanMemory()


@pytest.mark.parametrize(
    ("forget", "senders", "known"),
    [
        # What the ranks know is what comes out again, so it is not sent a second time.
        (Warm.restart_coordinator, {0, 1, 2}, {0, 1, 2}),
        (lambda warm: warm.restart(3), {0, 1, 2}, set()),
        (forgets_one, {1}, {0, 2}),
    ],
    ids=["the coordinator", "all ranks", "one rank"],
)
def test_who_forgot_the_plan_is_told_it_and_nobody_else(warm, forget, senders, known):
    committed(warm.save(sample_state(0)))
    forget(warm)
    committed(warm.save(sample_state(1)))
    assert warm.senders == senders
    assert warm.plans_made == (forget is Warm.restart_coordinator)
    told = [reply for reply in warm.replies if not isinstance(reply, SendItems)]
    assert sum(reply.part is None for reply in told) == len(known)
    assert loads(warm, sample_state(1))
    committed(warm.save(sample_state(2)))
    assert warm.was_warm


def test_a_rank_of_another_layout_in_between_is_asked_for_content_only(warm, tmp_path):
    """Rank 1 changes and changes back: the others know the plan in between, not the first."""
    other = {**sample_state(1), "rep.more": np.arange(2)}
    committed(warm.save(sample_state(0)))
    committed(warm.save([sample_state(1), other, sample_state(1)]))
    committed(warm.save(sample_state(2)))
    assert [reply for reply in warm.replies if isinstance(reply, SendItems)]
    assert not warm.senders
    assert warm.plans_made == 0
    assert loads(warm, sample_state(2))


@pytest.mark.parametrize(
    ("options", "is_warm"),
    [
        ({"part_bytes": 4096}, False),
        ({"dedup_save_to_lowest_rank": True}, False),
        ({"num_threads": 2, "sync_files": False}, True),
    ],
)
def test_only_options_on_which_a_plan_depends_make_another(warm, options, is_warm):
    committed(warm.save(sample_state(0)))
    committed(warm.save(sample_state(1), options=SaveOptions(**{"num_threads": 1, **options})))
    assert (warm.was_warm, warm.plans_made) == (is_warm, not is_warm)
    assert loads(warm, sample_state(1))


def test_content_that_differs_each_time_stays_warm_and_is_told_exactly(warm):
    def states(step, ranks):
        return [
            {**sample_state(step), "note": f"rank {rank}" if rank in ranks else "same"}
            for rank in range(3)
        ]

    committed(warm.save(states(0, {1, 2})))
    outcome = committed(warm.save(states(1, {2})))[0]
    assert warm.was_warm
    assert "'note' on rank 2" in outcome.warnings[0]
    assert committed(warm.save(states(2, set())))[0].warnings == ()
    assert warm.was_warm
    assert loads(warm, {**sample_state(2), "note": "same"})


def test_many_ranks_that_hold_the_same_send_it_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_save, "ROWS_AT_ONCE", 1)
    warm = Warm(5, str(tmp_path / "ckpt"))
    state = {"rep.w": np.arange(5000.0), "rep.b": np.arange(3), "step": 3}
    committed(warm.save(state))
    assert warm.senders == {0}
    assert loads(warm, state)
    committed(warm.save(state))
    assert warm.was_warm


def test_a_restart_while_ranks_are_asked_asks_again():
    """A rank may have answered the old coordinator: its answer opens the save at the new one."""
    play = Play(world_size=2)
    joins = []
    for rank in range(2):
        builder = ColumnsBuilder()
        builder.tensor("w", "float32", (4,), offset=(2 * rank,), size=(2,))
        columns = builder.build()
        steps = world.join_save(
            KEY, rank=rank, world_size=2, target=Target("memory://x"),
            options=SaveOptions(), capture=partial(Holding, columns),
        )  # fmt: skip
        joins.append(replace(next(steps), columns=b"", known=bytes(32)))
    assert play.send(replace(joins[0], contents=b"", asked=1)) is None
    play.send(joins[1])
    asked = {key[0]: reply for key, reply in play.replies.items()}
    assert asked == {0: SendItems(rows=True), 1: SendItems(rows=True)}
    assert {key[1] for key in play.replies} == {"SaveJoin", "SaveJoin 1"}


@pytest.mark.parametrize("complete", [True, False])
def test_a_join_that_comes_late_does_not_stand_for_the_one_after_it(complete):
    """At a restarted coordinator, what a rank sent before it was asked may come last."""
    play = Play(world_size=2)
    rows = b"rows" if complete else b""
    first = SaveJoin(KEY, 0, 2, Target("memory://x"), SaveOptions(), b"", None)
    first = replace(first, fingerprint=bytes(32), known=bytes(32))
    play.send(replace(first, columns=rows, asked=1))
    play.send(first)
    play.send(replace(first, rank=1, known=b"", fingerprint=bytes([1] * 32), columns=b"rows"))
    asked = {at: reply for at, reply in play.replies.items() if isinstance(reply, SendItems)}
    assert asked == ({} if complete else {(0, "SaveJoin 1"): SendItems(rows=True)})
    assert type(play.task).__name__ == ("ReadRecords" if complete else "NoneType")


def test_a_rank_that_is_asked_for_rows_and_sends_none_is_not_asked_for_ever():
    play = Play(world_size=1)
    join = SaveJoin(KEY, 0, 1, Target("memory://x"), SaveOptions(), b"", None)
    for asked in range(4):
        reply = play.send(replace(join, fingerprint=bytes(32), asked=asked))
        if not isinstance(reply, SendItems):
            break
    assert isinstance(reply, Refused)
    assert "rank 0 without items" in reply.error.message


class Holding:
    warnings = ()
    tied = None

    def __init__(self, columns):
        self.columns = columns


def test_a_fingerprint_of_another_version_is_refused():
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", (4,))
    rows = encode(builder.build())
    result = perform(MakePlan((rows,), 1 << 30, False, (b"",), (bytes(32),)))
    assert isinstance(result, Failed)
    assert type(result.error) is RankDisagreementError
    assert "same version" in result.error.message


WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)


def test_it_loads_verifies_and_is_encoded_once(tmp_path, monkeypatch):
    made = []

    def counted(table):
        made.append(table)
        return encode_table(table)

    monkeypatch.setattr(global_plan, "encode_table", counted)
    warm = Warm(2, str(tmp_path / "ckpt"))
    tables = []
    for step in range(3):
        committed(warm.save(sample_state(step), options=WITHOUT))
        storage = open_storage(Target(warm.url))
        assert same_state(sample_state(step), load_state(storage, sample_state(step), 3))
        tables.append(newest_record(storage).manifest.table.digest)
    assert warm.was_warm
    assert len(made) == len(set(tables)) == 1
    assert ray_dcp.verify(warm.url).ok
    # Nothing of the earlier attempts is left.
    kept = {entry.key for entry in storage.list()}
    table = newest_record(storage).manifest.table
    assert {key for key in kept if key.startswith("chunks.")} == {table.key}
    assert ray_dcp.delete(warm.url).kept == ()
    assert [entry.key for entry in storage.list() if "manifest" not in entry.key] == []


def test_the_metadata_of_stock_dcp_is_that_of_the_table_as_it_was_saved(tmp_path):
    warm = Warm(2, "")
    for step in range(3):
        # Into another folder each time, as jobs do; in the last an object is longer.
        state = sample_state(step, note="x" * (20 if step < 2 else 2000))
        url = str(tmp_path / f"step-{step}")
        committed(warm.save(state, options=SaveOptions(num_threads=1), url=url))
        storage = open_storage(Target(url))
        checkpoint = read_checkpoint(storage)
        attempt = checkpoint.manifest.attempt
        expected = encode_metadata(checkpoint.table, checkpoint_id=url, attempt=attempt)
        assert storage.read(".metadata") == expected


# --- regular layouts ------------------------------------------------------------------------------


def test_probes_are_where_a_dimension_may_begin():
    for mesh in product((1, 2, 3, 4), repeat=3):
        strides = {int(np.prod(mesh[at:])) for at in (1, 2, 3)}
        assert strides - {int(np.prod(mesh))} <= set(probes(int(np.prod(mesh))))
    assert probes(1) == (0,)
    assert len(probes(10240)) < 32


# --- through the protocol -----------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cache, "MANY_UNKNOWN", 2)
    monkeypatch.setattr(rank_save, "ROWS_AT_ONCE", 0)
    return Warm(12, str(tmp_path / "ckpt"))


def test_a_rank_that_is_not_like_the_others_sends_its_rows(job):
    state = {"a": np.arange(48.0).reshape(24, 2), "step": 3}
    states = [dict(state) for _ in range(12)]
    states[7]["rep.mine"] = np.arange(4)
    committed(job.save(states))
    assert job.senders == {*probes(12), 7}
    assert job.plans_made == 1
    committed(job.save(states))
    assert job.was_warm


SLABS = {
    "a": np.arange(48.0).reshape(24, 2), "b": np.arange(36), "step": 3,
    "rep.scalar": np.array(7), "note": "x",
}  # fmt: skip


def test_it_is_the_same_plan_for_whoever_begins_anew(job):
    committed(job.save(SLABS))
    job.restart_coordinator()
    committed(job.save(SLABS))
    assert job.plans_made == 1
    assert all(isinstance(r, SendItems) or r.part is None for r in job.replies)
    job.restart(12)
    committed(job.save(SLABS))
    assert not job.senders
    assert not job.plans_made
    changed = [{**SLABS, "note": "y"} if rank == 4 else SLABS for rank in range(12)]
    committed(job.save(changed))
    storage = open_storage(Target(job.url))
    assert same_state(SLABS, load_state(storage, SLABS, 3))


# --- stages of a pipeline, HSDP in each -----------------------------------------------------------

STAGES = [
    {f"{stage}.a": np.arange(stage, 96.0 + stage).reshape(24, 4), f"{stage}.b": np.arange(32),
     "rep.tied": np.arange(2000) + 1.5, "step": 3, f"rep.{stage}.scalar": np.array(stage)}
    for stage in range(3)
]  # fmt: skip


def of_stage(state, rank, world_size):
    """Of each 8 ranks, 4 have a quarter each, and the others the same."""
    return ArrayCapture(state, rank % 4, 4)


def test_a_pipeline_of_replicated_stages_is_saved_by_the_rows_of_few(job):
    job.restart(24)
    states = [STAGES[rank // 8] for rank in range(24)]
    committed(job.save(states, capture=of_stage))
    # Of each two that hold the same at most one, where a dimension of a mesh may begin.
    assert {0, 1, 2, 8, 9, 10, 16, 17, 18} <= job.senders < set(range(24))
    assert len({rank // 8 * 4 + rank % 4 for rank in job.senders}) == len(job.senders)
    assert job.plans_made == 1
    committed(job.save(states, capture=of_stage))
    assert job.was_warm
    storage = open_storage(Target(job.url))
    whole = STAGES[0] | STAGES[1] | STAGES[2]
    for world_size in (1, 5):
        assert same_state(whole, load_state(storage, whole, world_size))
    assert ray_dcp.verify(job.url).ok
    job.restart(24)
    states[17] = states[17] | {"step": 4}
    committed(job.save(states, capture=of_stage))
    assert same_state(whole, load_state(storage, whole, 2))
