"""Which checkpoint stands at a place, and what a place without one is told to hold."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InternalError,
    StorageError,
    UncommittedCheckpointError,
)
from ray_dcp.format.manifest import AbortRecord, FileEntry, Manifest, encode_record, record_key
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.format.safetensors import header, sharding_metadata
from ray_dcp.format.table import encode_table
from ray_dcp.io.checkpoint import (
    checkpoint_from,
    find_checkpoint,
    newest_record,
    read_checkpoint,
)
from ray_dcp.io.reader import read_chunks, read_item
from ray_dcp.io.records import read_slots
from ray_dcp.io.writer import write_part
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.planning.finish import finish_table
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store.fault_injection import Fault, FaultyStorage
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from tests.unit.io_cases import Sink, raw

STATE = {
    "w": np.arange(60_000, dtype=np.float32).reshape(200, 300),
    "b": np.arange(5, dtype=np.float32),
    "s": np.array(7, np.float32),
}


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "ckpt")


def object_bytes(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def save(
    storage,
    attempt,
    slot,
    *,
    previous=None,
    replaced=None,
    container="torch_save",
    publish=True,
    scale=1.0,
):
    """A whole save by two ranks, as the design orders it; returns the manifest."""
    ranks = []
    for rank in range(2):
        builder = ColumnsBuilder()
        builder.tensor("w", "float32", (200, 300), offset=(100 * rank, 0), size=(100, 300))
        builder.tensor("b", "float32", (5,))
        builder.tensor("s", "float32", ())
        builder.object("step")
        ranks.append(builder.build())
    plan = make_plan(ranks, container=container)
    receipts = {}
    for rank in range(2):
        state = {**STATE, "w": STATE["w"][100 * rank : 100 * rank + 100]}
        rows = [raw(state[name] * np.float32(scale)) for name in ("w", "b", "s")]
        for receipt in write_part(
            storage,
            rank_plan(plan, rank),
            attempt,
            source=rows.__getitem__,
            deferred=lambda row: object_bytes({"step": scale}),
            options=SaveOptions(container=container),
        ):
            receipts[receipt.file] = receipt
    table = finish_table(plan, attempt, receipts)
    encoded = encode_table(table)
    metadata = encode_metadata(table, checkpoint_id=storage.url, attempt=attempt)
    entries = {}
    for key, data in ((f"table.{attempt}.table", encoded), (".metadata", metadata)):
        entries[key] = FileEntry(key, len(data), digest_bytes(data).hex())
    manifest = Manifest(
        attempt=attempt,
        epoch=1,
        world_size=2,
        container=container,
        created_s=0.0,
        files=tuple(
            FileEntry(r.key, r.num_bytes, r.digest.hex()) for _, r in sorted(receipts.items())
        ),
        table=entries[f"table.{attempt}.table"],
        metadata=entries[".metadata"] if container == "torch_save" else None,
        replaced_metadata=replaced,
        plan_digest=plan.digest.hex(),
        num_tensors=table.num_tensors,
        num_chunks=table.num_chunks,
        payload_bytes=int(table.payload_bytes.sum()),
        previous_slot=slot - 1 if previous is None else previous,
    )
    storage.write(f"table.{attempt}.table", encoded)
    storage.write(record_key(slot), encode_record(manifest), create=True)
    if publish and container == "torch_save":
        storage.write(".metadata", metadata)
    return manifest


def abort(storage, attempt, slot):
    record = AbortRecord(attempt=attempt, reason="deadline", rank=1)
    storage.write(record_key(slot), encode_record(record), create=True)


def stock_save(root, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(root))


def tensors_of(storage, checkpoint):
    """Reads all plain tensors of a checkpoint, whole."""
    table = checkpoint.table
    rows = np.flatnonzero(table.kind == 0)
    wanted = Wanted(
        tensor=rows.astype(np.int32),
        offset=np.zeros_like(table.shape[rows]),
        size=table.shape[rows],
        itemsize=np.full(len(rows), 4),
    )
    plan = plan_reads(table, wanted)
    assert plan.uncovered == ()
    sink = Sink((np.prod(wanted.size, axis=1, dtype=np.int64) * 4).tolist())
    read_chunks(storage, table, plan, wanted, sink, options=LoadOptions())
    assert sorted(sink.finished) == list(range(len(rows)))
    return {
        table.names[row]: np.frombuffer(data, np.float32).reshape(
            tuple(table.shape[row, : table.ndim[row]])
        )
        for row, data in zip(rows, sink.buffers, strict=True)
    }


def assert_state(found, scale=1.0):
    assert sorted(found) == ["b", "s", "w"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, STATE[name] * np.float32(scale))


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_a_committed_save_is_found_and_read(storage, container):
    manifest = save(storage, "a1", 1, container=container)
    checkpoint = read_checkpoint(storage)
    assert (checkpoint.kind, checkpoint.slot, checkpoint.attempt) == ("native", 1, "a1")
    assert checkpoint.manifest == manifest
    assert checkpoint.checkpoint_id == storage.url
    assert not checkpoint.metadata_is_stale
    assert_state(tensors_of(storage, checkpoint))
    table = checkpoint.table
    (chunk,) = np.flatnonzero(table.tensor == table.names.index("step"))
    item = read_item(storage, table, int(chunk))
    assert torch.load(io.BytesIO(item), weights_only=True) == {"step": 1.0}


def test_stock_dcp_reads_what_was_written(storage):
    save(storage, "a1", 1)
    state = {name: torch.zeros(array.shape) for name, array in STATE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=storage.url)
    assert_state({name: tensor.numpy() for name, tensor in state.items()})


def test_a_rank_opens_what_the_coordinator_decided(storage):
    save(storage, "a1", 1)
    decided = read_checkpoint(storage)
    save(storage, "a2", 2, scale=2.0)
    found = checkpoint_from(storage, decided.kind, decided.slot, decided.record)
    assert (found.slot, found.attempt) == (1, "a1")
    assert_state(tensors_of(storage, found))


def test_the_last_commit_stands(storage):
    save(storage, "a1", 1)
    save(storage, "a2", 2, scale=2.0)
    save(storage, "a10", 3, scale=3.0)
    checkpoint = read_checkpoint(storage)
    assert (checkpoint.slot, checkpoint.attempt) == (3, "a10")
    assert_state(tensors_of(storage, checkpoint), 3.0)


def test_an_abort_before_the_manifest_of_its_attempt_decides(storage):
    save(storage, "a1", 1)
    abort(storage, "a2", 2)
    save(storage, "a2", 3, previous=1, scale=2.0, publish=False)
    assert read_checkpoint(storage).attempt == "a1"
    abort(storage, "a3", 4)
    assert read_checkpoint(storage).slot == 1
    slots = read_slots(storage, whole=True)
    assert sorted({**slots.older, **slots.records}) == [1, 2, 3, 4]


def test_an_abort_after_the_manifest_changes_nothing(storage):
    save(storage, "a1", 1)
    save(storage, "a2", 2, scale=2.0)
    abort(storage, "a2", 3)
    assert read_checkpoint(storage).attempt == "a2"


def test_only_records_that_can_matter_are_read(storage):
    for slot in range(1, 5):
        save(storage, f"a{slot}", slot)
    counted = FaultyStorage(storage)
    assert newest_record(counted).slot == 4
    assert [c.key for c in counted.calls if c.operation == "read"] == [record_key(4)]
    save(storage, "a5", 9, previous=2)
    counted = FaultyStorage(storage)
    assert newest_record(counted).slot == 9
    read = [c.key for c in counted.calls if c.operation == "read"]
    assert read == [record_key(9), record_key(4), record_key(3)]


def test_where_nothing_was_committed_there_is_no_newest_record(storage):
    assert newest_record(storage) is None
    abort(storage, "a1", 1)
    assert newest_record(storage) is None
    with pytest.raises(UncommittedCheckpointError, match="never committed"):
        read_checkpoint(storage)


def test_a_damaged_record_decides_nothing_and_names_the_way_out(storage):
    save(storage, "a1", 1)
    save(storage, "a2", 2)
    data = bytearray(storage.read(record_key(2)))
    data[len(data) // 2] ^= 1
    storage.write(record_key(2), data)
    with pytest.raises(DamagedCheckpointError, match=f"move {record_key(2)} away") as caught:
        read_checkpoint(storage, checkpoint_id="run/step-2")
    assert caught.value.key == record_key(2)
    assert caught.value.checkpoint_id == "run/step-2"
    storage.delete([record_key(2)])
    assert read_checkpoint(storage).attempt == "a1"


@pytest.mark.parametrize("look", [read_checkpoint, find_checkpoint])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_table_is_told(storage, damage, look):
    save(storage, "a1", 1)
    data = bytearray(storage.read("table.a1.table"))
    data[len(data) // 2] ^= 1
    if damage == "gone":
        storage.delete(["table.a1.table"])
    else:
        storage.write("table.a1.table", data if damage == "flip" else data[:-1])
    with pytest.raises(DamagedCheckpointError, match="manifest names") as caught:
        look(storage, checkpoint_id="run/step-1")
    assert caught.value.checkpoint_id == "run/step-1"
    assert caught.value.key == "table.a1.table"


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_what_is_found_without_decoding_is_what_opens(storage, container):
    save(storage, "a1", 1, container=container)
    found = find_checkpoint(storage)
    opened = read_checkpoint(storage)
    assert (found.kind, found.slot, found.record) == ("native", 1, opened.record)
    assert found.manifest == opened.manifest


def test_a_stock_checkpoint_is_found_without_decoding_and_read_with_it(tmp_path):
    stock_save(tmp_path, {"w": torch.ones(3)})
    storage = LocalStorage(tmp_path)
    storage.write(".metadata", storage.read(".metadata")[:-20])
    found = find_checkpoint(storage)
    assert (found.kind, found.slot) == ("stock", 0)
    with pytest.raises(DamagedCheckpointError, match="a pickle"):
        checkpoint_from(storage, found.kind, found.slot, found.record)


@pytest.mark.parametrize("change", [{"num_chunks": 99}, {"num_tensors": 1}, {"files": ()}])
def test_a_table_that_does_not_fit_its_manifest_is_damage(storage, change):
    manifest = save(storage, "a1", 1)
    storage.write(record_key(1), encode_record(replace(manifest, **change)))
    with pytest.raises(DamagedCheckpointError, match="of the manifest's files"):
        read_checkpoint(storage)


def test_a_table_collected_while_it_is_opened_means_a_newer_commit(storage):
    save(storage, "a1", 1)

    class Overtaken(FaultyStorage):
        def read(self, key, start=0, num_bytes=None):
            if key == "table.a1.table":
                save(storage, "a2", 2, scale=2.0)
                storage.delete(["table.a1.table"])
            return super().read(key, start, num_bytes)

    checkpoint = read_checkpoint(Overtaken(storage))
    assert checkpoint.attempt == "a2"
    assert_state(tensors_of(storage, checkpoint), 2.0)


# `.metadata` beside a manifest


@pytest.mark.parametrize("earlier", [False, True], ids=["missing", "earlier"])
def test_metadata_that_is_missing_or_of_an_earlier_save_is_stale(storage, earlier):
    if earlier:
        save(storage, "a1", 1)
    save(storage, "a2", 1 + earlier, publish=False)
    checkpoint = read_checkpoint(storage)
    assert checkpoint.attempt == "a2"
    assert checkpoint.metadata_is_stale


def test_metadata_of_ours_without_its_manifest_is_uncommitted(storage):
    save(storage, "a1", 1)
    storage.delete([record_key(1)])
    with pytest.raises(UncommittedCheckpointError, match="a1 never committed"):
        read_checkpoint(storage)
    with pytest.raises(UncommittedCheckpointError, match="a1"):
        find_checkpoint(storage)


def test_what_stock_dcp_left_when_it_died_over_ours_changes_nothing(storage):
    save(storage, "a1", 1)
    for key in ("__0_0.distcp", "__1_0.distcp", ".metadata.tmp"):
        storage.write(key, b"half")
    assert_state(tensors_of(storage, read_checkpoint(storage)))


def test_a_stock_save_over_ours_is_an_error_that_names_both(storage):
    save(storage, "a1", 1)
    stock_save(storage.url, {"x": torch.ones(3)})
    with pytest.raises(DamagedCheckpointError, match="two checkpoints") as caught:
        read_checkpoint(storage)
    text = str(caught.value)
    assert record_key(1) in text
    assert ".metadata" in text
    assert "move the manifest-*.json files away" in text
    storage.delete([record_key(1)])
    assert read_checkpoint(storage).kind == "stock"


def test_metadata_that_can_not_be_read_beside_ours_is_foreign(storage):
    save(storage, "a1", 1)
    storage.write(".metadata", b"rubbish")
    with pytest.raises(DamagedCheckpointError, match="can't be read"):
        read_checkpoint(storage)


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
def test_the_foreign_metadata_that_a_commit_replaces_is_only_stale(storage, container):
    stock_save(storage.url, {"x": torch.ones(3)})
    replaced = digest_bytes(storage.read(".metadata")).hex()
    save(storage, "a1", 1, replaced=replaced, publish=False, container=container)
    checkpoint = read_checkpoint(storage)
    assert checkpoint.attempt == "a1"
    assert checkpoint.metadata_is_stale == (container == "torch_save")


# stock DCP and plain files


def test_a_stock_checkpoint_is_found_and_read(storage):
    stock_save(storage.url, {n: torch.from_numpy(np.array(a)) for n, a in STATE.items()})
    checkpoint = read_checkpoint(storage)
    assert (checkpoint.kind, checkpoint.slot, checkpoint.attempt) == ("stock", 0, None)
    assert checkpoint.foreign.table is checkpoint.table
    assert_state(tensors_of(storage, checkpoint))
    again = checkpoint_from(storage, "stock", 0, checkpoint.record)
    assert_state(tensors_of(storage, again))


def test_an_aborted_save_over_a_stock_checkpoint_leaves_it_standing(storage):
    stock_save(storage.url, {n: torch.from_numpy(np.array(a)) for n, a in STATE.items()})
    abort(storage, "a1", 1)
    assert read_checkpoint(storage).kind == "stock"


def test_stock_files_without_metadata_are_uncommitted(storage):
    stock_save(storage.url, {"x": torch.ones(3)})
    storage.delete([".metadata"])
    with pytest.raises(UncommittedCheckpointError, match=r"neither .* nor \.metadata"):
        read_checkpoint(storage)


def test_plain_safetensors_files_are_a_checkpoint(tmp_path):
    save_file({"w": STATE["w"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": STATE["b"], "s": STATE["s"]}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    storage = LocalStorage(tmp_path)
    checkpoint = read_checkpoint(storage)
    assert (checkpoint.kind, checkpoint.record) == ("safetensors", b"")
    assert_state(tensors_of(storage, checkpoint))
    assert_state(tensors_of(storage, checkpoint_from(storage, "safetensors", 0, b"")))


def test_sharded_safetensors_files_are_put_together(tmp_path):
    storage = LocalStorage(tmp_path)
    for rank in range(2):
        part = STATE["w"][100 * rank : 100 * rank + 100]
        entries = [("w", "float32", part.shape, 0, part.nbytes)]
        head = header(entries, sharding_metadata({"w": (100 * rank, 0)}))
        storage.write(f"shard-{rank}.safetensors", head + part.tobytes())
    checkpoint = read_checkpoint(storage)
    assert checkpoint.table.shape.tolist() == [[200, 300]]
    np.testing.assert_array_equal(tensors_of(storage, checkpoint)["w"], STATE["w"])


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path):
    tensors = {f"layer.{'x' * 60}.{i}": np.full(1, i, np.float32) for i in range(1500)}
    save_file(tensors, tmp_path / "model.safetensors")
    storage = LocalStorage(tmp_path)
    found = tensors_of(storage, read_checkpoint(storage))
    assert {name: array.item() for name, array in found.items()} == {
        name: array.item() for name, array in tensors.items()
    }


def test_damaged_safetensors_files_are_told(tmp_path):
    storage = LocalStorage(tmp_path)
    save_file({"w": STATE["w"]}, tmp_path / "model.safetensors")
    data = storage.read("model.safetensors")
    for bad in (data[:-1], data[:40], b"", b"\xff" * 100, data[:8] + b"x" + data[9:]):
        storage.write("model.safetensors", bad)
        with pytest.raises(DamagedCheckpointError) as caught:
            read_checkpoint(storage)
        assert caught.value.key == "model.safetensors"
    storage.write("model.safetensors", data)
    save_file({"w": STATE["w"].astype(np.float64)}, tmp_path / "other.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"one dtype.*float64"):
        read_checkpoint(storage)


def test_a_shard_without_its_offset_is_damage(tmp_path):
    storage = LocalStorage(tmp_path)
    data = header([("w", "float32", (1,), 0, 4)], sharding_metadata({"v": (0,)}))
    storage.write("model.safetensors", data + bytes(4))
    with pytest.raises(DamagedCheckpointError, match="DCP_SHARDING_INFO"):
        read_checkpoint(storage)


# nothing there


STEPS = [f"step-{step}/.metadata" for step in range(20)]
NOTHING = {
    "nothing": ([], r"there is nothing; check the path"),
    "a folder of checkpoints": (
        [*STEPS[9:11], "step-100/.metadata", "hf/model.safetensors", "logs/x.txt",
         "run/last/manifest-00000001.json"],
        "hf, run/last, step-9, step-10, step-100: load one of them",
    ),
    "a long list": (STEPS, "step-0, step-1, step-2, … step-17, step-18, step-19 .20 in all"),
    "other files": (["model.bin", "sub/x²1"], "found model.bin, sub/; check the path"),
    "metadata of each rank": (["__0.metadata", "__0_0.distcp"], "use_collectives=False"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "told"), NOTHING.values(), ids=NOTHING)
def test_a_place_without_a_checkpoint_says_what_it_holds(storage, keys, told):
    for key in keys:
        storage.write(key, b"")
    with pytest.raises(CheckpointNotFoundError, match=told) as caught:
        read_checkpoint(storage)
    assert not isinstance(caught.value, UncommittedCheckpointError)
    assert storage.url in str(caught.value)


def test_a_storage_that_fails_is_no_missing_checkpoint():
    storage = MemoryStorage("opening-fails")
    for operation in ("list", "read"):
        faulty = FaultyStorage(storage, [Fault(operation=operation)])
        with pytest.raises(StorageError, match="scripted") as caught:
            read_checkpoint(faulty)
        assert caught.value.checkpoint_id == storage.url
        faulty.assert_hit()


def test_a_wrong_decision_is_an_internal_error(storage):
    with pytest.raises(InternalError, match="kind"):
        checkpoint_from(storage, "zip", 0, b"")
    record = encode_record(AbortRecord(attempt="a1", reason="x", rank=None))
    with pytest.raises(InternalError, match="abort"):
        checkpoint_from(storage, "native", 1, record)
