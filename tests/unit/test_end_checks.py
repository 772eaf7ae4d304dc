"""Block checksums, and files that end with their own: in no receipt and no other file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash

import ray_dcp
from ray_dcp import DamagedCheckpointError, InvalidRequestError, SaveOptions, errors
from ray_dcp.commit_protocol.messages import join_receipts, pack_receipts
from ray_dcp.core import checksums as cs
from ray_dcp.io.checkpoint import checkpoint_from, newest_record, read_checkpoint
from ray_dcp.io.writer import write_part
from ray_dcp.planning.global_plan import checked_receipts, make_plan, rank_plan
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import MemoryStorage
from tests.support.arrays import ArrayCapture, sample_state
from tests.support.world import save_state


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
