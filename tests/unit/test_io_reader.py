"""Bytes arrive where they are wanted, verified, with bounded memory; damage is told precisely."""

from __future__ import annotations

import gc
import io
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp import errors
from ray_dcp.io import read_jobs, reader
from ray_dcp.io.reader import read_chunks
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import LOCAL_DISK, OBJECT_STORE
from tests.support.processes import open_below
from tests.support.storages import FaultyStorage
from tests.unit.io_cases import Chunk, Piece, Sink, file_plan, pad, raw, table_of, write_file

FILE = "__0_0.a1.distcp"


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
def storage():
    storage = MemoryStorage("transfer-reader")
    yield storage
    storage.delete(entry.key for entry in storage.list())


def flip(storage, position, file=FILE):
    stored = bytearray(storage.read(file))
    stored[position] ^= 16
    storage.write(file, stored)


def test_many_small_tensors_are_read_by_few_requests(storage):
    arrays = [random_array(16, 16) + i for i in range(3000)]
    table = written(storage, arrays)
    counted = FaultyStorage(storage)
    sink, stats = read(counted, table, whole(arrays))
    assert [bytes(b) for b in sink.buffers] == [a.tobytes() for a in arrays]
    assert len(counted.calls) == 3
    assert stats.blocks_checked == 3000
    assert stats.bytes_needed == 3000 * 1024
    assert stats.bytes_read < 2 * stats.bytes_needed
    far = Far(storage)
    sink, _ = read(far, table, whole(arrays))
    assert [bytes(b) for b in sink.buffers] == [a.tobytes() for a in arrays]
    assert len(far.reads) == 1


class Far:
    """A storage whose requests take a round trip, which notes the ranges it is asked for."""

    read_traits = OBJECT_STORE

    def __init__(self, inner, **more):
        self.inner, self.reads = inner, []
        self.__dict__.update(more)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read_into(self, key, start, target):
        self.reads.append((start, start + len(target)))
        self.inner.read_into(key, start, target)


def test_a_long_tensor_is_read_in_order_by_slices_and_by_longer_ones_from_afar(storage):
    array = random_array(10240, 1024)
    table = written(storage, [array])
    for traits, shortest, longest in (
        ({"read_traits": LOCAL_DISK}, 8 << 20, 11 << 20),
        ({}, 8 << 20, 11 << 20),
        ({"request_bytes": 12 << 20}, 12 << 20, 16 << 20),
    ):
        far = Far(storage, **traits)
        sink, _ = read(far, table, whole([array]), num_threads=1)
        assert sink.buffers[0] == array.tobytes()
        assert far.reads == sorted(far.reads)
        assert [low for low, _ in far.reads[1:]] == [high for _, high in far.reads[:-1]]
        assert all(shortest <= high - low <= longest for low, high in far.reads[:-1])


def test_only_edge_blocks_of_a_row_range_go_through_scratch(storage):
    array = random_array(3000, 1000)
    table = written(storage, [array])
    sink, stats = read(storage, table, wanted_of((0, (701, 0), (1003, 1000))))
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


def test_scratch_memory_stays_within_its_limit(storage, monkeypatch):
    array = random_array(1000, 1000)
    table = written(storage, [array])
    limit = 200_000
    peaks = scratch_peaks(monkeypatch)
    monkeypatch.setattr(read_jobs, "SCRATCH_BYTES", limit)
    sink, _ = read(storage, table, wanted_of((0, (3, 7), (990, 900))), num_threads=2)
    assert sink.buffers[0] == np.ascontiguousarray(array[3:993, 7:907]).tobytes()
    assert max(peaks) <= limit
    assert len(peaks) >= array.nbytes // limit


@pytest.mark.parametrize("shape", [(300, 1000), (16, 16), (60, 100)])
def test_damage_names_tensor_file_and_bytes(storage, shape):
    arrays = [random_array(*shape), random_array(*shape)]
    table = written(storage, arrays)
    start, block = int(table.payload_offset[1]), int(table.block_bytes[1])
    position = start + arrays[1].nbytes - 1
    flip(storage, position)
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        read(storage, table, whole(arrays))
    low = (arrays[1].nbytes - 1) // block * block
    text = str(caught.value)
    assert f"bytes [{start + low}, {start + arrays[1].nbytes}) of {FILE}" in text
    assert "'layer.1' is damaged" in text
    assert "earlier step" in text
    assert caught.value.key == FILE
    assert caught.value.checkpoint_id == storage.url


def test_never_reads_no_more_than_needed_and_checks_nothing(storage):
    array = random_array(300, 1000)
    table = written(storage, [array])
    flip(storage, int(table.payload_offset[0]))
    _, stats = read(storage, table, wanted_of((0, (1, 3), (1, 7))), verify="never")
    assert (stats.bytes_read, stats.blocks_checked) == (28, 0)
    sink, _ = read(storage, table, whole([array]), verify="never")
    assert sink.buffers[0] != array.tobytes()


@pytest.mark.parametrize("damage", ["gone", "short"])
@pytest.mark.parametrize("shape", [(16, 16), (300, 1000)])
def test_a_missing_or_short_file_is_damage_and_named(storage, shape, damage):
    arrays = [random_array(*shape)]
    table = written(storage, arrays)
    stored = storage.read(FILE)
    if damage == "gone":
        storage.delete([FILE])
    else:
        storage.write(FILE, stored[: int(table.payload_offset[0]) + 100])
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        read(storage, table, whole(arrays))
    assert caught.value.key == FILE
    assert FILE in caught.value.message


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


def test_a_stock_item_that_is_rubbish_among_alike_ones_is_damage_and_named(storage):
    table = stock_table(storage, [torch.zeros(16, 16)] * 3)
    data = bytearray(storage.read("__0_0.distcp"))
    start = int(table.item_offset[2])
    data[start : start + 4] = b"junk"
    storage.write("__0_0.distcp", data)
    with pytest.raises(errors.DamagedCheckpointError, match=r"'layer\.2' in __0_0\.distcp"):
        read(storage, table, whole([np.zeros((16, 16), np.float32)] * 3))


@pytest.mark.parametrize("shape", [(16, 16), (600, 1000)])
def test_a_stock_item_of_another_shape_or_dtype_is_damage(storage, shape):
    table = stock_table(storage, [torch.zeros(*shape)], [(*shape[::-1], 1)])
    with pytest.raises(errors.DamagedCheckpointError, match=r"'layer\.0' as float32 of size"):
        read(storage, table, wanted_of((0, (0, 0, 0), (*shape[::-1], 1))))
    table = stock_table(storage, [torch.zeros(*shape, dtype=torch.int32)])
    with pytest.raises(errors.DamagedCheckpointError, match="found int32"):
        read(storage, table, wanted_of((0, (0, 0), shape)))


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


def test_a_stock_item_that_asks_for_code_is_refused_or_left_to_safe_loading(storage):
    table = stock_table(storage, [torch.zeros(4)])
    stream = io.BytesIO()
    torch.save(Evil(), stream)
    storage.write("__0_0.distcp", stream.getvalue())
    table = replace(table, item_bytes=np.array([len(stream.getvalue())]))
    with pytest.raises(errors.UnsafeCheckpointError):
        read(storage, table, wanted_of((0, (0,), (4,))))


@pytest.mark.parametrize("num_columns", [1024, 512])
def test_a_disk_is_asked_early_for_rows_of_which_a_part_is_wanted(
    tmp_path, monkeypatch, num_columns
):
    rows = torch.randn(4096, 1024)
    ray_dcp.save({"w": rows}, checkpoint_id=tmp_path, no_dist=True)
    asked = []
    monkeypatch.setattr(LocalStorage, "read_ahead", lambda *given: asked.append(given[3]))
    state = {"w": torch.zeros(4096, num_columns)}
    options = LoadOptions(resize={"w": 1})
    report = ray_dcp.load(state, checkpoint_id=tmp_path, no_dist=True, options=options)
    assert state["w"].equal(rows[:, :num_columns])
    assert sum(asked) >= report.bytes_needed == state["w"].nbytes


def test_reading_leaks_no_descriptors_even_when_it_fails(tmp_path):
    storage = LocalStorage(tmp_path)
    arrays = [random_array(300, 1000), random_array(16)]
    table = written(storage, arrays)
    sink, _ = read(storage, table, whole(arrays))
    assert sink.buffers[0] == arrays[0].tobytes()
    flip(storage, int(table.payload_offset[0]))
    with pytest.raises(errors.DamagedCheckpointError):
        read(storage, table, whole(arrays))
    del storage
    gc.collect()
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("whole_item_bytes", [1, 1 << 20])
def test_a_row_that_needs_an_opaque_chunk_is_never_done(storage, monkeypatch, whole_item_bytes):
    monkeypatch.setattr(reader, "_WHOLE_ITEM_BYTES", whole_item_bytes)
    table = stock_table(storage, [torch.full((3, 2), 5.0), torch.ones(3, 2).to_sparse()])
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
    sink, stats = read(storage, table, wanted_of((0, (0, 0), (6, 2)), (0, (0, 0), (3, 2))))
    assert stats.opaque == (1,)
    assert sink.finished == [1]
    assert sink.buffers[0][:24] == np.full(6, 5, np.float32).tobytes()
