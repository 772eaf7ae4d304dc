"""Which checkpoint stands at a place, what of it is read, and checkpoints of earlier versions."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
import xxhash
from safetensors.numpy import save_file

import ray_dcp
from ray_dcp import DamagedCheckpointError, InvalidRequestError, SaveOptions, errors
from ray_dcp.commit_protocol.messages import join_receipts, pack_receipts
from ray_dcp.core import checksums as cs
from ray_dcp.format import table as table_format
from ray_dcp.format.manifest import (
    FORMAT_VERSION,
    AbortRecord,
    decode_record,
    encode_record,
    record_key,
)
from ray_dcp.format.safetensors import header
from ray_dcp.format.table import decode_table, end_of
from ray_dcp.io.checkpoint import checkpoint_from, find_checkpoint, newest_record, read_checkpoint
from ray_dcp.io.writer import write_part
from ray_dcp.planning.global_plan import checked_receipts, make_plan, rank_plan
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.opening import open_storage
from tests.support import checkpoints, world
from tests.support.arrays import GOLDEN_ARRAYS, ArrayCapture, State, same_state, sample_state
from tests.support.checkpoints import GOLDEN, sharding_metadata
from tests.support.exchange_cases import blanks, differences
from tests.support.format_cases import difference
from tests.support.programs.stock_golden import state
from tests.support.storages import FaultyStorage
from tests.support.world import Warm, load_state, save_state

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


@pytest.mark.parametrize("found", ["none", "an earlier save's", "what a commit replaced"])
def test_metadata_that_is_not_of_the_last_commit_is_stale(storage, found):
    (stock_save if found == "what a commit replaced" else save)(storage)
    before = storage.read(".metadata")
    save(storage, 2.0)
    storage.delete([".metadata"])
    if found != "none":
        storage.write(".metadata", before)
    assert read_checkpoint(storage).metadata_is_stale
    assert value_at(storage) == 2


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


def test_an_address_that_only_open_reads_is_named(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match=r"ray_dcp.open\('.*run@latest'\).url"):
        read_checkpoint(LocalStorage(tmp_path / "run@latest"))


# --- checksums at the ends of files ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, 1024), (1, 1024), (256 * 1024, 1024), (256 * 1024 + 1, 2048), (3 << 20, 16384),
        (128 << 20, 512 << 10), ((128 << 20) + 1, 1 << 20), (1 << 50, 1 << 20),
    ],
)  # fmt: skip
def test_block_length_is_a_256th_rounded_up_to_a_power_of_two_within_bounds(num_bytes, expected):
    assert cs.block_bytes_for(num_bytes) == expected
    count = cs.num_blocks(num_bytes, expected)
    assert cs.num_blocks_many(np.array([num_bytes]), np.array([expected])).tolist() == [count]
    with pytest.raises(InvalidRequestError):
        cs.block_bytes_for(-1)


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, 12288, 12289])
def test_checks_are_xxh3_64_of_each_block_with_a_shorter_last_one(length):
    data = np.random.default_rng(length).bytes(length)
    expected = [xxhash.xxh3_64_intdigest(data[i : i + 4096]) for i in range(0, length, 4096)]
    found = cs.block_checks(memoryview(data), 4096)
    assert found.dtype == np.uint64
    assert found.tolist() == expected
    assert cs.first_bad_block(data, 4096, found) is None


def test_the_first_block_that_changed_is_found_and_their_number_has_to_fit():
    data = bytearray(np.random.default_rng(0).bytes(20000))
    checks = cs.block_checks(data, 4096)
    data[19999] ^= 1
    assert cs.first_bad_block(data, 4096, checks) == 4
    data[5000] ^= 1
    assert cs.first_bad_block(data, 4096, checks) == 1
    with pytest.raises(DamagedCheckpointError, match="Expected 4 checksum blocks"):
        cs.first_bad_block(data, 4096, checks[:4])
    with pytest.raises(InvalidRequestError):
        cs.block_checks(b"x", 0)


WITHOUT = SaveOptions(num_threads=1, stock_metadata=False)
STATE = {"w": torch.arange(99.0), "o": "x", "big": torch.arange(3000).reshape(60, 50)}
BLANK = {"w": torch.zeros(99), "o": "", "big": torch.zeros(60, 50, dtype=torch.int64)}


def storage_of(world_size, step=0, **kwargs):
    storage = MemoryStorage("end-checks")
    storage.delete([entry.key for entry in storage.list()])
    save_state(storage, sample_state(step), world_size, options=WITHOUT, **kwargs)
    return storage


def opened_in_part(storage):
    slot, record, _ = newest_record(storage)
    return checkpoint_from(storage, "native", slot, record, checks_later=True)


def blank():
    return {**BLANK, "w": BLANK["w"].clone(), "big": BLANK["big"].clone()}


def test_a_rank_reads_the_ends_of_its_own_files_only():
    storage = storage_of(4)
    whole = read_checkpoint(storage).table
    opened = opened_in_part(storage)
    assert not opened.table.checks.any()
    spoiled = opened.table.files[2]
    storage.write(spoiled, storage.read(spoiled)[:-1] + b"!")
    for files in ([1], [1, 3], [0, 1, 3]):
        opened.check_file.read(files)
        of = np.repeat(whole.file, np.diff(whole.check_start))
        there = np.isin(of, sorted({*files, 1}))
        np.testing.assert_array_equal(opened.table.checks, np.where(there, whole.checks, 0))
    with pytest.raises(
        errors.DamagedCheckpointError, match=f"checksums of {spoiled} at its end"
    ) as told:
        opened.check_file.read([2])
    assert told.value.key == spoiled


def test_a_view_reads_the_ends_of_those_files_alone_whose_values_it_gives(tmp_path):
    ray_dcp.save(STATE, checkpoint_id=tmp_path / "c", options=SaveOptions(part_bytes=1 << 20))
    data = sorted(path for path in (tmp_path / "c").iterdir() if path.suffix == ".distcp")
    kept = {path: path.read_bytes() for path in data}
    for path in data:
        path.write_bytes(kept[path][:-8] + bytes(8))
    view = ray_dcp.open(tmp_path / "c")
    assert view.tensors["w"].shape == (99,)
    assert view.names == ("w", "o", "big")
    assert view.files
    for read in (lambda: view["w"][0:3], lambda: view["o"], lambda: view.table):
        with pytest.raises(errors.DamagedCheckpointError, match="at its end"):
            read()
    for path in data:
        path.write_bytes(kept[path])
    assert view["w"][0:3].tolist() == [0, 1, 2]
    assert view["o"] == "x"
    assert view.table.checks.all()
    assert ray_dcp.open(tmp_path / "c").diff(view).changed == ()


def test_a_small_load_reads_each_file_that_tells_of_it_once(tmp_path, monkeypatch):
    ray_dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    reads = []
    read = LocalStorage.read

    def counted(self, key, *args):
        reads.append(key)
        return read(self, key, *args)

    monkeypatch.setattr(LocalStorage, "read", counted)
    ray_dcp.load(blank(), checkpoint_id=tmp_path, no_dist=True)
    (data,) = tmp_path.glob("*.distcp")
    (table,) = tmp_path.glob("*.table")
    # Of the data file its end; what it holds goes straight into the targets.
    assert sorted(reads) == sorted([".metadata", "manifest-00000001.json", table.name, data.name])


def written(world_size=2):
    columns = [ArrayCapture(sample_state(0), rank, world_size) for rank in range(world_size)]
    plan = make_plan([one.columns for one in columns])
    storage = MemoryStorage("end-checks-written")
    storage.delete([entry.key for entry in storage.list()])
    receipts = {
        receipt.file: receipt
        for rank, one in enumerate(columns)
        for receipt in write_part(
            storage, rank_plan(plan, rank), "a1", source=one.source, deferred=one.deferred,
            options=WITHOUT,
        )
    }  # fmt: skip
    return plan, columns, storage, receipts


def test_a_file_that_another_writer_published_has_to_end_alike():
    plan, columns, storage, receipts = written()

    def again():
        return write_part(
            storage, rank_plan(plan, 0), "a1", source=columns[0].source,
            deferred=columns[0].deferred, options=WITHOUT,
        )  # fmt: skip

    key = receipts[0].key
    assert again()[0].digest == receipts[0].digest
    storage.write(key, storage.read(key)[:-1] + b"!")
    with pytest.raises(errors.CheckpointExistsError, match="two writers"):
        again()


def test_what_says_another_number_of_checksums_does_not_fit_the_plan():
    plan, _, _, receipts = written()
    whole = join_receipts(receipts.values())
    assert len(checked_receipts(plan, "a1", whole)) == len(receipts[1].deferred)
    for change in (
        {"num_bytes": receipts[1].num_bytes - 8},
        {"num_bytes": receipts[1].num_bytes + 8},
    ):
        wrong = {**receipts, 1: replace(receipts[1], **change)}
        with pytest.raises(errors.InternalError, match=receipts[1].key):
            checked_receipts(plan, "a1", pack_receipts(wrong[file] for file in sorted(wrong)))


# --- checkpoints that are kept --------------------------------------------------------------------


ATTEMPT = "0123456789abcdef"

ARRAYS = GOLDEN_ARRAYS
OBJECTS = ARRAYS | {"step": 7, "note": "golden"}


@dataclass(frozen=True)
class Golden:
    """A checkpoint that is kept."""

    states: list[State]
    """Of each rank."""
    chunks: int
    has_groups: bool = False
    stock_metadata: bool = False

    @property
    def state(self) -> State:
        return {name: value for state in self.states for name, value in state.items()}


CASES = {
    "arrays": Golden([ARRAYS] * 3, 8),
    "objects": Golden([OBJECTS] * 3, 10, stock_metadata=True),
    "groups": Golden([OBJECTS] * 3, 10, has_groups=True),
}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def saved(name: str, path: Path) -> None:
    """Saves a case as it was saved when it was kept."""
    case = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "new_attempt", lambda: ATTEMPT)
        patch.setattr(table_format, "GROUP_ROWS", 3 if case.has_groups else 1 << 16)
        options = SaveOptions(num_threads=1, stock_metadata=case.stock_metadata)
        warm = Warm(len(case.states), str(path))
        for result in warm.save(list(case.states), options=options):
            result.get()


@pytest.fixture
def golden(name: str) -> Path:
    path = GOLDEN / f"format-{FORMAT_VERSION}-{name}"
    if os.environ.get("RENEW_GOLDEN") and not path.exists():
        saved(name, path)
    return path


def table_of(path: Path) -> bytes:
    (table,) = path.glob("chunks.*.table")
    return table.read_bytes()


def test_it_loads_and_is_whole(name: str, golden: Path) -> None:
    case = CASES[name]
    storage = open_storage(str(golden))
    committed = newest_record(storage)
    assert committed is not None
    assert committed.manifest.format_version == FORMAT_VERSION
    for world_size in (1, 5):
        assert same_state(case.state, load_state(storage, case.state, world_size))
    report = ray_dcp.verify(golden)
    assert (report.problems, report.notes) == ((), ())
    first = next(iter(case.state))
    wanted = {
        first: torch.zeros(case.state[first].shape, dtype=torch.from_numpy(case.state[first]).dtype)
    }
    ray_dcp.load(wanted, checkpoint_id=golden, no_dist=True)
    assert np.array_equal(wanted[first].numpy(), case.state[first])
    assert np.array_equal(ray_dcp.open(golden)[first][5], case.state[first][5])


def test_its_table_is_of_the_kind_that_it_stands_for(name: str, golden: Path) -> None:
    case = CASES[name]
    assert decode_table(table_of(golden)).num_chunks == case.chunks
    assert (end_of(table_of(golden)) is not None) == case.has_groups


def test_a_save_writes_what_was_written(name: str, golden: Path, tmp_path: Path) -> None:
    """Byte by byte, but for clocks, paths, and what other libraries do inside of their formats."""
    saved(name, tmp_path / "now")
    now = {one.relative_to(tmp_path / "now"): one for one in (tmp_path / "now").rglob("*.*")}
    then = {one.relative_to(golden): one for one in golden.rglob("*.*")}
    assert {*now} == {*then}
    has_objects = "step" in CASES[name].state
    for key, one in then.items():
        if key.suffix == ".distcp" and not has_objects:
            assert now[key].read_bytes() == one.read_bytes(), key
    mine, its = (decode_table(table_of(one)) for one in (tmp_path / "now", golden))
    assert difference(mine, its) == []
    records = []
    for path in (tmp_path / "now", golden):
        data = (path / "manifest-00000001.json").read_bytes()
        decode_record(data)
        fields = json.loads(data)["record"]
        # Why not the pickles of objects: torch writes its own version into them.
        others = ["created_s", "metadata", "plan_digest", "table", "table_end"]
        others += ["files", "deferred", "payload_bytes"] * has_objects
        records.append({key: value for key, value in fields.items() if key not in others})
    assert records[0] == records[1]


STOCK = sorted((Path(__file__).parents[1] / "golden").glob("stock-*"))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Planner(stock.DefaultLoadPlanner):
    """A planner of the user's."""


@pytest.fixture(params=STOCK, ids=lambda path: path.name)
def stock_golden(request: pytest.FixtureRequest) -> Path:
    return request.param


def expected(golden: Path) -> dict[str, Any]:
    """Returns what was saved there, in plain tensors."""
    since_2_14 = float(golden.name.partition("-")[2].partition(".")[2]) >= 14
    return state(checkpointable=since_2_14)


def plain(values: Any) -> Any:
    """Returns the values without parameters, which a load into plain tensors does not make."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    return values.detach() if isinstance(values, torch.nn.Parameter) else values


@pytest.mark.parametrize("planner", [None, Planner], ids=["native", "hooks"])
def test_a_stock_checkpoint_loads_bit_by_bit(stock_golden: Path, planner: type[Planner] | None):
    wanted = plain(expected(stock_golden))
    into = blanks(wanted)
    ray_dcp.load(into, checkpoint_id=stock_golden, planner=planner and planner(), no_dist=True)
    assert differences(into, wanted) == []


def test_a_stock_checkpoint_is_whole_and_read_whole(stock_golden: Path):
    report = ray_dcp.verify(stock_golden)
    assert report.problems == ()
    assert report.checked_bytes > 1_000
    wanted = plain(expected(stock_golden))
    del wanted["nothing"]  # of which stock DCP leaves no trace
    found = ray_dcp.read_state_dict(stock_golden)
    found["optimizer"]["state"] = {
        int(key): value for key, value in found["optimizer"]["state"].items()
    }
    assert differences(found, wanted) == []


def test_an_import_of_it_is_read_by_the_stock_dcp_of_this_torch(stock_golden: Path, tmp_path: Path):
    ray_dcp.import_checkpoint(stock_golden, tmp_path / "c")
    wanted = plain(expected(stock_golden))
    into = blanks(wanted)
    stock.load(into, checkpoint_id=tmp_path / "c", no_dist=True)
    assert differences(into, wanted) == []
