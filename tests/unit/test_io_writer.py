"""A part file is what the plan says, verified by its receipt, or it is not there at all."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from ray_dcp import errors
from ray_dcp.core.checksums import block_bytes_for, block_checks, digest
from ray_dcp.io.threads import Stop, run_tasks
from ray_dcp.io.writer import write_part, write_pieces
from ray_dcp.options import SaveOptions
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import StorageWrapper
from tests.support.processes import open_below
from tests.support.storages import Fault, FaultyStorage
from tests.unit.io_cases import Piece, file_plan, rank_plan, raw, write_file

KEY = "__0_0.a1.distcp"


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "ckpt")


def arrays_of(*sizes):
    generator = np.random.default_rng(7)
    return [generator.standard_normal(size).astype(np.float32) for size in sizes]


def source_of(arrays):
    return lambda row: raw(arrays[row])


def plan_of(arrays, **kwargs):
    pieces = [Piece(row, "float32", array.shape) for row, array in enumerate(arrays)]
    return file_plan(pieces, **kwargs)


def no_deferred(row):
    raise AssertionError(f"row {row} is not deferred")


def test_the_receipt_has_the_checksums_of_what_is_stored(storage):
    arrays = arrays_of((3, 5), (200, 300), (1500, 1000), (0,))
    plan = plan_of(arrays)
    blob = os.urandom(200_000)
    plan = file_plan(
        [Piece(row, "float32", array.shape) for row, array in enumerate(arrays)], deferred=(4, 5)
    )
    receipt = write_file(
        storage,
        plan,
        "a1",
        source=source_of(arrays),
        deferred=lambda row: blob if row == 4 else bytearray(b"tiny"),
    )
    stored = storage.read(KEY)
    expected = []
    places = zip(plan.payload_offset, plan.payload_bytes, plan.block_bytes, strict=True)
    for offset, length, block in places:
        expected.append(block_checks(stored[offset : offset + length], int(block)))
    for place in receipt.deferred:
        item = stored[place.item_offset : place.item_offset + place.item_bytes]
        assert item == (blob if place.row == 4 else b"tiny")
        assert place.item_offset % 64 == 0
        assert place.item_offset >= plan.num_bytes
        assert place.block_bytes == block_bytes_for(len(item))
        expected.append(block_checks(item, place.block_bytes))
    assert [place.row for place in receipt.deferred] == [4, 5]
    assert receipt.digest == digest(np.concatenate(expected))
    assert stored.endswith(np.concatenate(expected).astype("<u8").tobytes())
    assert receipt.num_bytes == len(stored)


@pytest.mark.parametrize(
    "source",
    [
        lambda row: memoryview(b"short"),
        lambda row: memoryview(np.zeros((3, 5), np.float32)),
        lambda row: memoryview(bytes(120))[::2],
    ],
)
def test_an_item_that_does_not_fit_the_plan_is_an_internal_error(storage, source):
    plan = plan_of(arrays_of((3, 5)))
    with pytest.raises(errors.InternalError, match="plan") as caught:
        write_file(storage, plan, "a1", source=source, deferred=no_deferred)
    assert caught.value.key == KEY
    assert storage.list() == []
    assert storage.unpublished() == ()


@pytest.mark.parametrize("operation", ["open_writer", "writer.write", "commit"])
def test_a_failing_storage_leaves_nothing_and_its_error_names_the_key(tmp_path, operation):
    inner = LocalStorage(tmp_path)
    error = errors.StorageError("[ENOSPC] No space left on device")
    storage = FaultyStorage(inner, [Fault(operation=operation, error=error)])
    arrays = arrays_of((600, 1000))
    with pytest.raises(errors.StorageError, match="ENOSPC") as caught:
        write_file(storage, plan_of(arrays), "a1", source=source_of(arrays), deferred=no_deferred)
    assert caught.value.key == KEY
    storage.assert_hit()
    assert inner.list() == []
    assert inner.unpublished() == ()
    gc.collect()
    assert open_below(tmp_path) == []


def test_what_the_source_raises_comes_out_and_leaves_nothing(storage):
    def source(row):
        raise errors.StateDictError("this tensor is gone")

    with pytest.raises(errors.StateDictError, match="gone") as caught:
        write_file(storage, plan_of(arrays_of((3,))), "a1", source=source, deferred=no_deferred)
    assert caught.value.key == KEY
    assert storage.list() == []
    assert storage.unpublished() == ()

    def broken(row):
        raise RuntimeError("cuda")

    with pytest.raises(RuntimeError, match="cuda"):
        write_file(storage, plan_of(arrays_of((3,))), "a1", source=broken, deferred=no_deferred)
    assert storage.unpublished() == ()


def test_a_lost_answer_to_commit_is_an_error_and_another_writer_takes_the_file(tmp_path):
    inner = LocalStorage(tmp_path)
    storage = FaultyStorage(inner, [Fault(operation="commit", effect="after")])
    arrays = arrays_of((3, 5), (1500, 1000))
    plan = file_plan([Piece(r, "float32", a.shape) for r, a in enumerate(arrays)], deferred=(2,))
    write = {"source": source_of(arrays), "deferred": lambda row: b"object" * 5000}
    with pytest.raises(errors.StorageError):
        write_file(storage, plan, "a1", **write)
    storage.assert_hit()
    assert write_file(storage, plan, "a1", **write).num_bytes == inner.list()[0].num_bytes
    assert inner.unpublished() == ()


class StaleListings(StorageWrapper):
    """A storage whose listings do not show what was written last."""

    def list(self, prefix=""):
        return []


@pytest.mark.parametrize("what", ["listing", 1])
def test_a_writer_that_meets_its_own_file_takes_no_bad_network_for_another_writer(storage, what):
    """As after an answer to its create that was lost, so that it was asked again."""
    arrays = arrays_of((3, 5), (1500, 1000))
    plan = plan_of(arrays)
    write_file(storage, plan, "a1", source=source_of(arrays), deferred=no_deferred)
    seen = StaleListings(storage)
    if what != "listing":
        seen = FaultyStorage(storage, [Fault(operation="read", effect="flip", nth=what)])
    receipt = write_file(seen, plan, "a1", source=source_of(arrays), deferred=no_deferred)
    assert receipt.num_bytes == storage.list()[0].num_bytes


@pytest.mark.parametrize("change", ["length", "object"])
def test_a_key_taken_by_other_bytes_is_refused(storage, change):
    arrays = arrays_of((3, 5), (1500, 1000))
    plan = file_plan([Piece(r, "float32", a.shape) for r, a in enumerate(arrays)], deferred=(2,))
    write = {"source": source_of(arrays), "deferred": lambda row: b"object"}
    write_file(storage, plan, "a1", **write)
    stored = bytearray(storage.read(KEY))
    if change == "object":
        stored[-1] ^= 1
    else:
        stored += b"x"
    storage.write(KEY, stored)
    with pytest.raises(errors.CheckpointExistsError, match="other bytes") as caught:
        write_file(storage, plan, "a1", **write)
    assert caught.value.key == KEY
    assert storage.read(KEY) == stored
    assert storage.unpublished() == ()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_the_first_error_of_a_part_stops_its_other_files(num_threads):
    inner = MemoryStorage("part-errors")
    inner.delete(entry.key for entry in inner.list())
    storage = FaultyStorage(inner, [Fault(operation="writer.write", key="__0_0*")])
    arrays = arrays_of(*[(300, 1000)] * 12)
    files = [
        file_plan([Piece(row, "float32", (300, 1000))], file=row, key=f"__0_{row}.{{attempt}}")
        for row in range(12)
    ]
    with pytest.raises(errors.StorageError, match="scripted") as caught:
        write_part(
            storage,
            rank_plan(*files),
            "a1",
            source=source_of(arrays),
            deferred=no_deferred,
            options=SaveOptions(num_threads=num_threads),
        )
    storage.assert_hit()
    assert caught.value.key == "__0_0.a1"
    assert "__0_0.a1" not in [entry.key for entry in inner.list()]
    opened = [call.key for call in storage.calls if call.operation == "open_writer"]
    assert len(opened) <= 12
    if num_threads == 1:
        assert opened == ["__0_0.a1"]


class Busy:
    """Arrays that another thread writes to: at each look at one, and at each write to a file."""

    def __init__(self, arrays):
        self.arrays = arrays

    def change(self):
        for array in self.arrays:
            array += 1

    def source(self, row):
        self.change()
        return raw(self.arrays[row])

    def on(self, storage):
        writers = type(storage).open_writer

        def open_writer(key, **how):
            writer = writers(storage, key, **how)
            write = writer.write

            def change_and_write(data):
                self.change()
                write(data)

            writer.write = change_and_write
            return writer

        storage.open_writer = open_writer
        return storage


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_stored_has_its_checksum_also_where_tensors_change_meanwhile(storage, sync):
    arrays = [np.zeros(size, np.float32) for size in (3, 30_000, 700, 900_000, 3_000_001)]
    plan = plan_of(arrays)
    busy = Busy(arrays)
    receipt = write_file(
        busy.on(storage), plan, "a1", source=busy.source, deferred=no_deferred, sync=sync
    )
    assert arrays[0][0] > len(arrays)  # it was written to, by looks and by writes
    places = zip(plan.payload_offset, plan.payload_bytes, plan.block_bytes, strict=True)
    stored = [
        block_checks(storage.read(KEY, int(start), int(length)), int(block_bytes))
        for start, length, block_bytes in places
    ]
    assert receipt.digest == digest(np.concatenate(stored))


class Parts:
    """A `PieceSource` of one large piece, in parts of these lengths."""

    def __init__(self, *lengths):
        self.lengths = lengths
        self.ends = []

    def small(self, first, stop):
        raise AssertionError("there is no small piece")

    def parts(self, piece):
        return (memoryview(bytes(length)) for length in self.lengths)

    def num_bytes(self, piece):
        return sum(self.lengths)

    def written(self, end):
        self.ends.append(end)


@pytest.mark.parametrize("lengths", [(1 << 20,), (2 << 20, 2 << 20)])
def test_a_staged_piece_of_another_length_than_planned_is_refused(tmp_path, lengths):
    plan = file_plan([Piece(0, "uint8", (3 << 20,))])
    with pytest.raises(errors.InternalError, match="a piece up to byte"):
        write_pieces(LocalStorage(tmp_path), plan, "a", Parts(*lengths), options=SaveOptions())
    assert list(tmp_path.iterdir()) == []


def test_a_plan_with_other_frames_than_ours_is_an_internal_error(storage):
    arrays = arrays_of((3, 5))
    plan = plan_of(arrays)
    object.__setattr__(plan, "item_bytes", plan.item_bytes + 1)
    with pytest.raises(errors.InternalError, match="room for all pieces"):
        write_file(storage, plan, "a1", source=source_of(arrays), deferred=no_deferred)


def test_an_error_keeps_other_threads_from_beginning_more():
    begun = []
    stop = Stop()

    def work(task):
        begun.append(task)
        if task == 0:
            raise ValueError(task)
        stop.wait(180)

    with pytest.raises(ValueError, match="0"):
        run_tasks(range(100), work, 2, stop)
    assert len(begun) <= 2
