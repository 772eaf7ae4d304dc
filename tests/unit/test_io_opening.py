"""Which checkpoint stands at a place, and what a place without one is told to hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ray_dcp
from ray_dcp import errors
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from ray_dcp.format.safetensors import header
from ray_dcp.io.checkpoint import checkpoint_from, find_checkpoint, newest_record, read_checkpoint
from ray_dcp.options import SaveOptions
from ray_dcp.store.local import LocalStorage
from tests.support import checkpoints
from tests.support.checkpoints import sharding_metadata
from tests.support.storages import FaultyStorage

W = np.arange(600, dtype=np.float32).reshape(20, 30)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "ckpt")


def save(storage, value=1.0, **options):
    """Saves one value; returns what is found then."""
    state = {"w": torch.full((20, 30), value), "step": value}
    options = SaveOptions(**options)
    ray_dcp.save(state, checkpoint_id=storage.url, no_dist=True, options=options)
    return read_checkpoint(storage)


def value_at(storage):
    found = ray_dcp.read_state_dict(storage.url)
    assert set(found["w"].flatten().tolist()) == {found["step"]}
    return found["step"]


def stock_save(storage):
    return checkpoints.save_stock(storage.url, {"w": torch.full((20, 30), 7.0), "step": 7.0})


def abort(storage, slot):
    record = AbortRecord(attempt="a1", reason="deadline", rank=1)
    storage.write(record_key(slot), encode_record(record), create=True)


def flip(storage, key):
    data = bytearray(storage.read(key))
    data[len(data) // 2] ^= 1
    storage.write(key, data)


def test_a_committed_save_is_found_and_read_also_beside_what_stock_dcp_left(storage):
    assert newest_record(storage) is None
    checkpoint = save(storage)
    assert (checkpoint.kind, checkpoint.slot, checkpoint.metadata_is_stale) == ("native", 1, False)
    assert checkpoint.checkpoint_id == storage.url
    found = find_checkpoint(storage)
    assert (found.kind, found.slot, found.record) == ("native", 1, checkpoint.record)
    for key in ("__0_0.distcp", "__1_0.distcp", ".metadata.tmp"):
        storage.write(key, b"half")
    assert value_at(storage) == 1


def record_in_an_earlier_slot(storage):
    save(storage)
    save(storage)
    storage.write(record_key(1), storage.read(record_key(2)))
    storage.delete([record_key(2)])


def without(storage, key, saves=save):
    saves(storage)
    storage.delete([key])


def metadata_beside_ours(storage, data=None):
    save(storage)
    stock_save(storage) if data is None else storage.write(".metadata", data)


UNCOMMITTED, DAMAGED = errors.UncommittedCheckpointError, errors.DamagedCheckpointError
OF_OTHERS = r"two checkpoints.*manifest-00000001.*\.metadata.*move the manifest-\*\.json files away"


@pytest.mark.parametrize("look", [read_checkpoint, find_checkpoint])
@pytest.mark.parametrize(
    ("arrange", "error", "told"),
    [
        (lambda storage: abort(storage, 1), UNCOMMITTED, "never committed"),
        (partial(without, key=record_key(1)), UNCOMMITTED, "[0-9a-f]{16} never committed"),
        (partial(without, key=".metadata", saves=stock_save), UNCOMMITTED, r"nor \.metadata"),
        (record_in_an_earlier_slot, DAMAGED, "files changed places.*manifest-00000001"),
        (metadata_beside_ours, DAMAGED, OF_OTHERS),
        (partial(metadata_beside_ours, data=b"rubbish"), DAMAGED, "can't be read"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_told(storage, look, arrange, error, told):
    arrange(storage)
    with pytest.raises(error, match=told):
        look(storage)


@pytest.mark.parametrize("change", [{"num_chunks": 99}, {"num_tensors": 1}, {"files": ()}])
def test_a_table_that_does_not_fit_its_manifest_is_damage(storage, change):
    manifest = save(storage).manifest
    storage.write(record_key(1), encode_record(replace(manifest, **change)))
    with pytest.raises(errors.DamagedCheckpointError, match="of the manifest's files"):
        read_checkpoint(storage)


def test_a_damaged_record_decides_nothing_and_names_the_way_out(storage):
    save(storage)
    abort(storage, 2)
    flip(storage, record_key(2))
    with pytest.raises(errors.DamagedCheckpointError, match=f"move {record_key(2)} away") as caught:
        read_checkpoint(storage, checkpoint_id="run/step-2")
    assert caught.value.key == record_key(2)
    assert caught.value.checkpoint_id == "run/step-2"
    storage.delete([record_key(2)])
    assert value_at(storage) == 1


def test_a_damaged_table_is_told_with_its_place(storage):
    key = save(storage).manifest.table.key
    storage.delete([key])
    for look in (read_checkpoint, find_checkpoint):
        with pytest.raises(errors.DamagedCheckpointError, match="manifest names") as caught:
            look(storage, checkpoint_id="run/step-1")
        assert (caught.value.checkpoint_id, caught.value.key) == ("run/step-1", key)


def test_a_table_collected_while_it_is_opened_means_a_newer_commit(storage):
    key = save(storage).manifest.table.key

    class Overtaken(FaultyStorage):
        def read(self, at, start=0, num_bytes=None):
            if at == key:
                save(storage, 2.0)
            return super().read(at, start, num_bytes)

    assert read_checkpoint(Overtaken(storage)).attempt == read_checkpoint(storage).attempt
    assert value_at(storage) == 2


# `.metadata` beside a manifest


@pytest.mark.parametrize("earlier", [False, True], ids=["missing", "earlier"])
def test_metadata_that_is_missing_or_of_an_earlier_save_is_stale(storage, earlier):
    save(storage)
    before = storage.read(".metadata")
    save(storage, 2.0)
    storage.delete([".metadata"])
    if earlier:
        storage.write(".metadata", before)
    assert read_checkpoint(storage).metadata_is_stale
    assert value_at(storage) == 2


def test_the_foreign_metadata_that_a_commit_replaces_is_only_stale(storage):
    stock_save(storage)
    before = storage.read(".metadata")
    save(storage)
    storage.write(".metadata", before)
    assert read_checkpoint(storage).metadata_is_stale
    assert value_at(storage) == 1


# stock DCP and plain files


def test_a_stock_checkpoint_is_found_and_read_also_below_an_aborted_save(storage):
    stock_save(storage)
    checkpoint = read_checkpoint(storage)
    assert (checkpoint.kind, checkpoint.slot, checkpoint.attempt) == ("stock", 0, None)
    abort(storage, 1)
    again = checkpoint_from(storage, "stock", 0, checkpoint.record)
    assert again.table.names == checkpoint.table.names == ("w", "step")
    assert value_at(storage) == 7


def test_plain_safetensors_files_are_a_checkpoint(tmp_path):
    names = [f"layer.{'x' * 60}.{number}" for number in range(1500)]  # more than the first read
    save_file({"w": W}, tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict.fromkeys(names, W[0]), tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    storage = LocalStorage(tmp_path)
    checkpoint = read_checkpoint(storage)
    assert (checkpoint.kind, checkpoint.record) == ("safetensors", b"")
    assert checkpoint_from(storage, "safetensors", 0, b"").table.names == checkpoint.table.names
    view = ray_dcp.open(tmp_path)
    np.testing.assert_array_equal(view["w"][...], W)
    np.testing.assert_array_equal(view[names[-1]][...], W[0])


def test_sharded_safetensors_files_are_put_together(tmp_path):
    storage = LocalStorage(tmp_path)
    for rank in range(2):
        part = W[10 * rank : 10 * rank + 10]
        entries = [("w", "float32", part.shape, 0, part.nbytes)]
        head = header(entries, sharding_metadata({"w": (10 * rank, 0)}))
        storage.write(f"shard-{rank}.safetensors", head + part.tobytes())
    np.testing.assert_array_equal(ray_dcp.open(tmp_path)["w"][...], W)


def test_damaged_safetensors_files_are_told(tmp_path):
    storage = LocalStorage(tmp_path)
    save_file({"w": W}, tmp_path / "model.safetensors")
    data = storage.read("model.safetensors")
    for bad in (data[:-1], data[:40], b"", b"\xff" * 100, data[:8] + b"x" + data[9:]):
        storage.write("model.safetensors", bad)
        with pytest.raises(errors.DamagedCheckpointError) as caught:
            read_checkpoint(storage)
        assert caught.value.key == "model.safetensors"
    storage.write("model.safetensors", data)
    save_file({"w": W.astype(np.float64)}, tmp_path / "other.safetensors")
    with pytest.raises(errors.DamagedCheckpointError, match=r"one dtype.*float64"):
        read_checkpoint(storage)


def test_a_shard_without_its_offset_is_damage(tmp_path):
    storage = LocalStorage(tmp_path)
    data = header([("w", "float32", (1,), 0, 4)], sharding_metadata({"v": (0,)}))
    storage.write("model.safetensors", data + bytes(4))
    with pytest.raises(errors.DamagedCheckpointError, match="DCP_SHARDING_INFO"):
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
    with pytest.raises(errors.CheckpointNotFoundError, match=told) as caught:
        read_checkpoint(storage)
    assert not isinstance(caught.value, errors.UncommittedCheckpointError)
    assert storage.url in str(caught.value)
