"""What ranks say of what they hold, when a plan is used again, and replicas that differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ray_dcp
from ray_dcp.core.columns import ColumnsBuilder, encode
from ray_dcp.errors import InvalidRequestError, PlanConflictError, RankDisagreementError
from ray_dcp.format.manifest import Manifest, decode_record
from ray_dcp.format.table import encode_table
from ray_dcp.options import SaveOptions
from ray_dcp.planning import global_plan
from ray_dcp.planning.fingerprint import fingerprint
from ray_dcp.planning.global_plan import MIN_WRITER_BYTES, make_plan
from ray_dcp.planning.merge import contents_of
from ray_dcp.planning.regular import probes
from ray_dcp.protocol import planning
from ray_dcp.protocol.commands import Failed, MakePlan
from ray_dcp.protocol.messages import SaveAgain, SendItems, Target
from ray_dcp.runtime import rank_save, tasks
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.capture import Capture, capture
from ray_dcp.torch_adapter.replica_digests import (
    SEGMENT_BYTES,
    content_digest,
    content_digests,
    content_digests_on_device,
)
from tests.crash.array_states import ArrayCapture, same_state, sample_state
from tests.crash.ranks import load_state
from tests.crash.unconditional_storage import UnconditionalStorage
from tests.protocol_play import KEY, Play
from tests.warm_ranks import Warm

from .adapter_support import as_rank

# --- Warm saves -----------------------------------------------------------------------------------


@pytest.fixture
def warm(tmp_path):
    return Warm(3, str(tmp_path / "ckpt"))


def loads(warm, state, world_size=2):
    return same_state(state, load_state(open_storage(Target(warm.url)), state, world_size))


def committed(results):
    return [result.get() for result in results]


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
    assert type(again) is SaveAgain
    steps = rank_save.join_save(
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


def test_a_coordinator_that_forgot_everything_asks(warm):
    committed(warm.save(sample_state(0)))
    warm.restart_coordinator()
    committed(warm.save(sample_state(1)))
    assert warm.senders == {0, 1, 2}
    assert warm.plans_made == 1
    # What they know is what comes out again, so it is not sent a second time.
    assert {type(reply).__name__ for reply in warm.replies} == {"SendItems", "SaveAgain"}
    assert loads(warm, sample_state(1))
    committed(warm.save(sample_state(2)))
    assert warm.was_warm


def test_ranks_that_forgot_everything_are_told_again(warm):
    committed(warm.save(sample_state(0)))
    warm.restart(3)
    committed(warm.save(sample_state(1)))
    assert warm.plans_made == 0
    assert loads(warm, sample_state(1))
    committed(warm.save(sample_state(2)))
    assert warm.was_warm


def test_one_rank_that_forgot_makes_the_others_tell_no_rows(warm):
    committed(warm.save(sample_state(0)))
    warm.memories[1] = type(warm.memories[1])()
    committed(warm.save(sample_state(1)))
    assert warm.senders == {1}
    assert warm.plans_made == 0
    assert sorted(type(reply).__name__ for reply in warm.replies) == [
        "SaveAgain", "SaveAgain", "SaveGo",
    ]  # fmt: skip
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


@pytest.mark.parametrize("step", ["SaveJoin", "SaveReceipt"])
def test_messages_that_come_twice_do_no_harm(warm, step):
    committed(warm.save(sample_state(0)))
    warm.restart_coordinator()

    def fate(request):
        return "twice" if type(request).__name__ == step else "live"

    committed(warm.save(sample_state(1), fate=fate))
    assert loads(warm, sample_state(1))


def test_a_rank_that_dies_when_it_is_asked_fails_the_save_for_all(warm):
    committed(warm.save(sample_state(0)))
    warm.restart_coordinator()

    def fate(request):
        return "die" if getattr(request, "asked", 0) and request.rank == 1 else "live"

    results = warm.save(sample_state(1), fate=fate)
    assert ["rank 1" in str(results[rank].error) for rank in (0, 2)] == [True, True]
    assert loads(warm, sample_state(0))


def test_a_restart_while_ranks_are_asked_asks_again():
    """A rank may have answered the old coordinator: its answer opens the save at the new one."""
    play = Play(world_size=2)
    joins = []
    for rank in range(2):
        builder = ColumnsBuilder()
        builder.tensor("w", "float32", (4,), offset=(2 * rank,), size=(2,))
        columns = builder.build()
        steps = rank_save.join_save(
            KEY, rank=rank, world_size=2, target=Target("memory://x"),
            options=SaveOptions(), capture=partial(Holding, columns),
        )  # fmt: skip
        joins.append(replace(next(steps), columns=b"", known=bytes(32)))
    assert play.send(replace(joins[0], contents=b"", asked=1)) is None
    play.send(joins[1])
    asked = {key[0]: reply for key, reply in play.replies.items()}
    assert asked == {0: SendItems(rows=True), 1: SendItems(rows=True)}
    assert {key[1] for key in play.replies} == {"SaveJoin", "SaveJoin 1"}


def test_a_rank_that_can_not_say_what_it_holds_fails_the_save_for_all(tmp_path, monkeypatch):
    """Its items are only looked at when it is asked for them, after the others have joined."""
    monkeypatch.setattr(rank_save, "ROWS_AT_ONCE", 0)
    warm = Warm(3, str(tmp_path / "ckpt"))

    def capture(state, rank, world_size):
        found = ArrayCapture(state, rank, world_size)
        if rank == 1:
            found.columns = replace(found.columns, kind=found.columns.kind + np.int8(50))
        return found

    results = warm.save(sample_state(0), capture=capture)
    assert {type(result.error) for result in results} == {InvalidRequestError}
    assert all("rank 1" in str(result.error) for result in results)


class Holding:
    warnings = ()

    def __init__(self, columns):
        self.columns = columns


def test_a_fingerprint_of_another_version_is_refused():
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", (4,))
    rows = encode(builder.build())
    result = perform(MakePlan((rows,), "torch_save", 1 << 30, False, (b"",), (bytes(32),)))
    assert isinstance(result, Failed)
    assert type(result.error) is RankDisagreementError
    assert "same version" in result.error.message


# --- Regular layouts ------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MANY_UNKNOWN", 2)
    monkeypatch.setattr(rank_save, "ROWS_AT_ONCE", 0)
    return Warm(12, str(tmp_path / "ckpt"))


def test_a_first_save_of_many_ranks_moves_the_rows_of_few(job):
    state = {"a": np.arange(48.0).reshape(24, 2), "b": np.arange(36), "step": 3}
    for result in job.save(state):
        result.get()
    assert job.senders == set(probes(12))
    assert job.plans_made == 1
    storage = open_storage(Target(job.url))
    assert same_state(state, load_state(storage, state, 2))
    for result in job.save(state):
        result.get()
    assert job.was_warm


def test_a_rank_that_is_not_like_the_others_sends_its_rows(job):
    state = {"a": np.arange(48.0).reshape(24, 2), "step": 3}
    states = [dict(state) for _ in range(12)]
    states[7]["rep.mine"] = np.arange(4)
    for result in job.save(states):
        result.get()
    assert job.senders == {*probes(12), 7}
    assert job.plans_made == 1
    for result in job.save(states):
        result.get()
    assert job.was_warm


@pytest.mark.parametrize(
    ("mesh", "shards"),
    [
        ((12,), (0,)),
        ((3, 4), (0, 1)),
        ((4, 3), (None, 1)),
        ((2, 3, 2), (1, None, 0)),
        ((5, 3), (0, 0)),
    ],
)
def test_a_mesh_needs_the_rows_of_a_few_ranks_alone(mesh, shards):
    held = []
    for at in np.ndindex(mesh):
        offset, size = [0, 0], [60, 60]
        for place, length, axis in zip(at, mesh, shards, strict=True):
            if axis is not None:
                size[axis] //= length
                offset[axis] += place * size[axis]
        builder = ColumnsBuilder()
        builder.tensor(
            "t", "float32", (60, 60), offset=offset, size=size, splittable=None in shards
        )
        held.append(builder.build())
    few = probes(len(held))
    assert len(few) < len(held)
    rows = tuple(encode(own) if rank in few else b"" for rank, own in enumerate(held))
    how = {"container": "torch_save", "part_bytes": 1 << 20}
    names = tuple(fingerprint(own, world_size=len(held), **how) for own in held)
    contents = tuple(map(contents_of, held))
    planned = perform(MakePlan(rows, *how.values(), False, contents, names))
    expected = make_plan(held, part_bytes=1 << 20, min_writer_bytes=MIN_WRITER_BYTES)
    assert planned.plan.digest == expected.digest


SLABS = {
    "a": np.arange(48.0).reshape(24, 2), "b": np.arange(36), "step": 3,
    "rep.scalar": np.array(7), "note": "x",
}  # fmt: skip


def test_it_is_the_same_plan_for_whoever_begins_anew(job):
    for result in job.save(SLABS):
        result.get()
    job.restart_coordinator()
    for result in job.save(SLABS):
        result.get()
    assert job.plans_made == 1
    assert all(isinstance(reply, SaveAgain | SendItems) for reply in job.replies)
    job.restart(12)
    for result in job.save(SLABS):
        result.get()
    assert not job.senders
    assert not job.plans_made
    changed = [{**SLABS, "note": "y"} if rank == 4 else SLABS for rank in range(12)]
    for result in job.save(changed):
        result.get()
    storage = open_storage(Target(job.url))
    assert same_state(SLABS, load_state(storage, SLABS, 3))


# --- Replicas that differ -------------------------------------------------------------------------


MIB = 1 << 20


def of_rank(state, rank: int, world_size: int) -> Capture:
    """What a rank captures; a state that is a function is made in a process group."""
    if not callable(state):
        return capture(state, rank=rank, world_size=world_size)
    with as_rank(rank, world_size):
        return capture(state(rank), rank=rank, world_size=world_size)


def save(warm: Warm, states, replicas="warn"):
    """Saves; returns the outcomes of the ranks."""
    options = SaveOptions(num_threads=1, replicas=replicas)
    return warm.save(states, options=options, capture=of_rank)


def placed(local: torch.Tensor, mesh, placements, shape) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated(length: int):
    """Each rank holds another number everywhere."""

    def state(rank: int):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.full((length,), float(rank))
        return {"w": placed(local, mesh, [Replicate()], (length,))}

    return state


def hsdp(rows: int, differs: bool):
    """Two replicas of two shards; the second replica of the second shard is another."""

    def state(rank: int):
        mesh = init_device_mesh("cpu", (2, 2))
        value = float(rank % 2) + (10 if differs and rank == 3 else 0)
        local = torch.full((rows // 2, 1024), value)
        return {"w": placed(local, mesh, [Replicate(), Shard(0)], (rows, 1024))}

    return state


def test_dtensor_replicas_that_differ_are_refused_when_asked_for(tmp_path):
    warm = Warm(2, str(tmp_path / "ckpt"))
    results = save(warm, replicated(1000), "check")
    assert [type(result.error) for result in results] == [PlanConflictError] * 2
    assert "'w' on rank 1" in results[0].error.message


def test_replicas_of_a_shard_that_differ_are_the_lowest_ranks(tmp_path):
    warm = Warm(4, str(tmp_path / "ckpt"))
    results = save(warm, hsdp(80 * MIB // 4096, differs=True))
    assert "'w' on rank 3" in results[0].get().warnings[0]
    saved = ray_dcp.read_state_dict(warm.url)["w"]
    assert [half.unique().tolist() for half in saved.chunk(2)] == [[0], [1]]


def test_replicas_that_differ_later_are_never_mixed(tmp_path):
    warm = Warm(4, str(tmp_path / "ckpt"))
    assert save(warm, hsdp(4096, differs=False), "check")[0].get().warnings == ()
    assert save(warm, hsdp(4096, differs=False), "check")[0].get().warnings == ()
    assert warm.was_warm
    assert "'w' on rank 3" in save(warm, hsdp(4096, differs=True))[0].get().warnings[0]
    saved = ray_dcp.read_state_dict(warm.url)["w"]
    assert [half.unique().tolist() for half in saved.chunk(2)] == [[0], [1]]
    results = save(warm, hsdp(4096, differs=True), "check")
    assert [type(result.error) for result in results] == [PlanConflictError] * 4


@pytest.mark.parametrize("at", [3 * MIB + 17, 20 * MIB + 5, 40 * MIB - 1])
def test_one_byte_of_a_large_plain_tensor_that_differs_is_found(tmp_path, at):
    states = [{"w": torch.zeros(40 * MIB // 4)} for _ in range(2)]
    states[1]["w"].view(torch.uint8)[at] = 1
    warm = Warm(2, str(tmp_path / "ckpt"))
    assert "'w' on rank 1" in save(warm, states)[0].get().warnings[0]
    assert not ray_dcp.read_state_dict(warm.url)["w"].any()
    assert isinstance(save(warm, states, "check")[0].error, PlanConflictError)


def test_the_digest_of_a_large_tensor_sees_every_byte_and_its_length():
    large = torch.zeros((3 << 20) // 4 + 5)
    digest = content_digest(large)
    for at in (0, SEGMENT_BYTES - 1, SEGMENT_BYTES, (1 << 20) + 3, large.nbytes - 1):
        changed = large.clone()
        changed.view(torch.uint8)[at] = 1
        assert content_digest(changed) != digest
    assert content_digest(torch.zeros((3 << 20) // 4 + 6)) != digest


LENGTHS = [0, 1, 63, 1024, *(SEGMENT_BYTES * n + more for n in (1, 2, 700) for more in (-1, 0, 1))]


def test_a_device_digests_as_the_host_does():
    values = torch.Generator().manual_seed(5)
    tensors = [
        torch.randint(0, 256, (length,), dtype=torch.uint8, generator=values) for length in LENGTHS
    ]
    numbers = torch.randn(300, 400, generator=values)
    tensors += [
        numbers, numbers.T, numbers.bfloat16()[1:, 1:], numbers.bfloat16().view(-1)[1:],
        numbers > 0, torch.complex(numbers, -numbers).conj(), numbers.to(torch.float8_e4m3fn),
        torch.full((1 << 15,), -1), torch.zeros(1 << 15), torch.tensor(3.0, requires_grad=True),
    ]  # fmt: skip
    assert content_digests_on_device(tensors) == content_digests(tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_digests_as_the_host_does():
    tensors = [torch.randn(length) for length in (0, 1, 5000, 3 << 20)]
    assert content_digests([one.cuda() for one in tensors]) == content_digests(tensors)


# --- The chunk table of a plan --------------------------------------------------------------------


WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)


def manifest_of(storage) -> Manifest:
    keys = sorted(entry.key for entry in storage.list() if entry.key.startswith("manifest-"))
    return decode_record(storage.read(keys[-1]))


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_it_loads_verifies_and_is_encoded_once(container, tmp_path, monkeypatch):
    options = replace(WITHOUT, container=container)
    made = []

    def counted(table):
        made.append(table)
        return encode_table(table)

    for module in (tasks, global_plan):
        monkeypatch.setattr(module, "encode_table", counted)
    warm = Warm(2, str(tmp_path / "ckpt"))
    tables = []
    for step in range(3):
        for result in warm.save(sample_state(step), options=options):
            result.get()
        storage = open_storage(Target(warm.url))
        assert same_state(sample_state(step), load_state(storage, sample_state(step), 3))
        tables.append(manifest_of(storage).table.digest)
    assert warm.was_warm
    # Only where the data files have no room for them, the table has the checksums of one save.
    num_tables = 1 if container == "torch_save" else 3
    assert len(made) == len(set(tables)) == num_tables
    assert ray_dcp.verify(warm.url).ok
    # Nothing of the earlier attempts is left.
    kept = {entry.key for entry in storage.list()}
    table = manifest_of(storage).table
    assert {key for key in kept if key.startswith("chunks.")} == {table.key}
    assert ray_dcp.delete(warm.url).kept == ()
    assert [entry.key for entry in storage.list() if "manifest" not in entry.key] == []
