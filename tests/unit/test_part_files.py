"""Part files: written as planned and whole or not at all; read verified and in bounded memory."""

from __future__ import annotations

import gc
import io
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from ray_dcp import errors
from ray_dcp.core.checksums import block_checks, digest
from ray_dcp.core.processes import Stop, run_tasks
from ray_dcp.io import read_jobs, reader
from ray_dcp.io.reader import read_chunks
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store import local
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import StorageWrapper
from tests.support.processes import open_below
from tests.support.storages import Fault, FaultyStorage
from tests.unit.io_cases import Chunk, Piece, Sink, file_plan, pad, raw, table_of, write_file

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


# Reading


def random_array(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def written(storage, arrays, *, block_bytes=None, rows=None):
    """Writes each array as one tensor, or cut into pieces of `rows` rows; returns the table."""
    chunks = []
    for tensor, array in enumerate(arrays):
        step = rows or max(len(array), 1) if array.ndim else 1
        for start in range(0, max(len(array), 1) if array.ndim else 1, step):
            data = array[start : start + step] if array.ndim else array
            chunks.append(Chunk(tensor, (start,) + (0,) * (array.ndim - 1), data))
    plan = file_plan(
        [Piece(row, "float32", chunk.data.shape) for row, chunk in enumerate(chunks)],
        block_bytes=block_bytes,
    )
    receipt = write_file(
        storage, plan, "a1", source=lambda row: raw(chunks[row].data), deferred=None
    )
    names = [f"layer.{tensor}" for tensor in range(len(arrays))]
    shapes = [array.shape for array in arrays]
    return table_of(names, ["float32"] * len(arrays), shapes, chunks, plan, receipt)


def wanted_of(*boxes):
    width = max(len(box[1]) for box in boxes) or 1
    return Wanted(
        tensor=np.array([box[0] for box in boxes], np.int32),
        offset=pad([box[1] for box in boxes], width, 0),
        size=pad([box[2] for box in boxes], width, 1),
        itemsize=np.full(len(boxes), 4),
    )


def whole(arrays):
    return wanted_of(*[(i, (0,) * a.ndim, a.shape) for i, a in enumerate(arrays)])


def read(storage, table, wanted, sink=None, **options):
    plan = plan_reads(table, wanted)
    sink = sink or Sink((np.prod(wanted.size, axis=1) * 4).tolist())
    stats = read_chunks(storage, table, plan, wanted, sink, options=LoadOptions(**options))
    return sink, stats


@pytest.fixture
def memory():
    storage = MemoryStorage("part-files")
    yield storage
    storage.delete(entry.key for entry in storage.list())


def flip(storage, position, file=KEY):
    stored = bytearray(storage.read(file))
    stored[position] ^= 16
    storage.write(file, stored)


def test_many_small_tensors_are_read_by_few_requests(memory):
    arrays = [random_array(16, 16) + i for i in range(3000)]
    table = written(memory, arrays)
    counted = FaultyStorage(memory)
    sink, stats = read(counted, table, whole(arrays))
    assert [bytes(b) for b in sink.buffers] == [a.tobytes() for a in arrays]
    assert len(counted.calls) == 3
    assert stats.blocks_checked == 3000
    assert stats.bytes_needed == 3000 * 1024
    assert stats.bytes_read < 2 * stats.bytes_needed


def test_only_edge_blocks_of_a_row_range_go_through_scratch(memory):
    array = random_array(3000, 1000)
    table = written(memory, [array])
    sink, stats = read(memory, table, wanted_of((0, (701, 0), (1003, 1000))))
    assert sink.buffers[0] == array[701:1704].tobytes()
    block = int(table.block_bytes[0])
    assert stats.bytes_needed < stats.bytes_read <= stats.bytes_needed + 2 * block


def scratch_peaks(monkeypatch):
    peaks = []
    real = reader.TargetFiller._scratch

    def note(self, num_bytes):
        peaks.append(num_bytes)
        return real(self, num_bytes)

    monkeypatch.setattr(reader.TargetFiller, "_scratch", note)
    return peaks


def test_scratch_memory_stays_within_its_limit(memory, monkeypatch):
    array = random_array(1000, 1000)
    table = written(memory, [array])
    limit = 200_000
    peaks = scratch_peaks(monkeypatch)
    monkeypatch.setattr(read_jobs, "SCRATCH_BYTES", limit)
    sink, _ = read(memory, table, wanted_of((0, (3, 7), (990, 900))), num_threads=2)
    assert sink.buffers[0] == np.ascontiguousarray(array[3:993, 7:907]).tobytes()
    assert max(peaks) <= limit
    assert len(peaks) >= array.nbytes // limit


MODEL = "model.safetensors"


def as_model(storage, table):
    """Returns the table of the same file under the name of one that nobody saves over."""
    os.rename(os.path.join(storage.url, KEY), os.path.join(storage.url, MODEL))
    return replace(table, files=(MODEL,))


def test_columns_that_nothing_verifies_are_copied_from_the_pages_of_the_file(storage, monkeypatch):
    array = random_array(1000, 1000)
    table, peaks = as_model(storage, written(storage, [array])), scratch_peaks(monkeypatch)
    box = (0, (3, 500), (990, 400))
    sink, stats = read(storage, table, wanted_of(box), verify="never", num_threads=2)
    assert sink.buffers[0] == np.ascontiguousarray(array[3:993, 500:900]).tobytes()
    assert peaks == []
    assert stats.bytes_needed < stats.bytes_read < array.nbytes
    # Verified bytes are those that are copied, and the pages of a file may change.
    sink, _ = read(storage, table, wanted_of(box))
    assert sink.buffers[0] == np.ascontiguousarray(array[3:993, 500:900]).tobytes()
    assert len(peaks) > 0


@pytest.mark.parametrize(
    "reason", ["an old kernel", "a wrapper that changes what is read", "a file that is saved over"]
)
def test_columns_are_read_where_the_pages_of_the_file_can_not_be_mapped(
    storage, monkeypatch, reason
):
    array = random_array(1000, 1000)
    table, used = written(storage, [array]), storage
    peaks = scratch_peaks(monkeypatch)
    if reason != "a file that is saved over":
        table = as_model(storage, table)
    if reason == "an old kernel":
        monkeypatch.setattr(local, "_POPULATE_READ", 1 << 20)
    elif reason == "a wrapper that changes what is read":
        used = Inverted(storage)
        array = np.frombuffer((~np.frombuffer(array.tobytes(), np.uint8)).tobytes(), "<u4")
        array = array.reshape(1000, 1000)
    sink, _ = read(used, table, wanted_of((0, (0, 500), (1000, 400))), verify="never")
    assert sink.buffers[0] == np.ascontiguousarray(array[:, 500:900]).tobytes()
    assert len(peaks) > 0


class Inverted(StorageWrapper):
    def read_into(self, key, start, target):
        super().read_into(key, start, target)
        np.frombuffer(target, np.uint8)[:] = ~np.frombuffer(target, np.uint8)


def test_a_file_that_is_cut_off_before_its_pages_are_mapped_is_damaged(storage):
    array = random_array(1000, 1000)
    table = as_model(storage, written(storage, [array]))
    os.truncate(os.path.join(storage.url, MODEL), array.nbytes // 2)
    with pytest.raises(errors.DamagedCheckpointError, match="cut off"):
        read(storage, table, wanted_of((0, (0, 500), (1000, 400))), verify="never")


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("shape", [(300, 1000), (16, 16), (60, 100)])
def test_damage_names_tensor_file_and_bytes(memory, shape, at):
    arrays = [random_array(*shape), random_array(*shape)]
    table = written(memory, arrays)
    start, block, length = int(table.payload_offset[1]), int(table.block_bytes[1]), arrays[1].nbytes
    flip(memory, start + at % length)
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        read(memory, table, whole(arrays))
    low = at % length // block * block
    text = str(caught.value)
    assert f"bytes [{start + low}, {start + min(low + block, length)}) of {KEY}" in text
    assert "'layer.1' is damaged" in text
    assert "earlier step" in text
    assert (caught.value.key, caught.value.checkpoint_id) == (KEY, memory.url)


def test_never_reads_no_more_than_needed_and_checks_nothing(memory):
    array = random_array(300, 1000)
    table = written(memory, [array])
    flip(memory, int(table.payload_offset[0]))
    _, stats = read(memory, table, wanted_of((0, (1, 3), (1, 7))), verify="never")
    assert (stats.bytes_read, stats.blocks_checked) == (28, 0)
    sink, _ = read(memory, table, whole([array]), verify="never")
    assert sink.buffers[0] != array.tobytes()


@pytest.mark.parametrize("damage", ["gone", "short"])
@pytest.mark.parametrize("shape", [(16, 16), (300, 1000)])
def test_a_missing_or_short_file_is_damage_and_named(memory, shape, damage):
    arrays = [random_array(*shape)]
    table = written(memory, arrays)
    stored = memory.read(KEY)
    if damage == "gone":
        memory.delete([KEY])
    else:
        memory.write(KEY, stored[: int(table.payload_offset[0]) + 100])
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        read(memory, table, whole(arrays))
    assert caught.value.key == KEY
    assert KEY in caught.value.message


def stock_table(storage, tensors, shapes=None):
    """Writes items as stock DCP does, one after the other."""
    stored, places = bytearray(), []
    for tensor in tensors:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        places.append((len(stored), len(stream.getvalue())))
        stored += stream.getvalue()
    storage.write("__0_0.distcp", stored)
    shapes = shapes or [tuple(t.shape) for t in tensors]
    chunks = [Chunk(i, (0,) * len(s), np.zeros(s, np.float32)) for i, s in enumerate(shapes)]
    plan = file_plan([Piece(i, "float32", s) for i, s in enumerate(shapes)])
    names = [f"layer.{i}" for i in range(len(tensors))]
    table = table_of(
        names, ["float32"] * len(names), shapes, chunks, plan, None, key="__0_0.distcp"
    )
    return replace(
        table,
        item_offset=np.array([p[0] for p in places]),
        item_bytes=np.array([p[1] for p in places]),
        payload_offset=np.full(len(places), -1),
        block_bytes=np.zeros(len(places), np.int64),
        check_start=np.zeros(len(places) + 1, np.int64),
    )


def test_a_stock_item_that_is_rubbish_among_alike_ones_is_damage_and_named(memory):
    table = stock_table(memory, [torch.zeros(16, 16)] * 3)
    data = bytearray(memory.read("__0_0.distcp"))
    start = int(table.item_offset[2])
    data[start : start + 4] = b"junk"
    memory.write("__0_0.distcp", data)
    with pytest.raises(errors.DamagedCheckpointError, match=r"'layer\.2' in __0_0\.distcp"):
        read(memory, table, whole([np.zeros((16, 16), np.float32)] * 3))


@pytest.mark.parametrize("shape", [(16, 16), (600, 1000)])
def test_a_stock_item_of_another_shape_or_dtype_is_damage(memory, shape):
    table = stock_table(memory, [torch.zeros(*shape)], [(*shape[::-1], 1)])
    with pytest.raises(errors.DamagedCheckpointError, match=r"'layer\.0' as float32 of size"):
        read(memory, table, wanted_of((0, (0, 0, 0), (*shape[::-1], 1))))
    table = stock_table(memory, [torch.zeros(*shape, dtype=torch.int32)])
    with pytest.raises(errors.DamagedCheckpointError, match="found int32"):
        read(memory, table, wanted_of((0, (0, 0), shape)))


@pytest.mark.parametrize("whole_item_bytes", [1, 1 << 20])
def test_a_row_that_needs_an_opaque_chunk_is_never_done(memory, monkeypatch, whole_item_bytes):
    monkeypatch.setattr(reader, "WHOLE_ITEM_BYTES", whole_item_bytes)
    table = stock_table(memory, [torch.full((3, 2), 5.0), torch.ones(3, 2).to_sparse()])
    table = replace(
        table,
        names=("w",),
        kind=np.zeros(1, np.int8),
        dtype=np.zeros(1, np.int8),
        ndim=np.full(1, 2, np.int8),
        shape=np.array([[6, 2]]),
        requires_grad=np.zeros(1, bool),
        tensor=np.zeros(2, np.int32),
        offset=np.array([[0, 0], [3, 0]]),
    )
    sink, stats = read(memory, table, wanted_of((0, (0, 0), (6, 2)), (0, (0, 0), (3, 2))))
    assert stats.opaque == (1,)
    assert sink.finished == [1]
    assert sink.buffers[0][:24] == np.full(6, 5, np.float32).tobytes()
