"""Any table and any bytes: what is written is what is read, by us, by torch and by numpy slices.

And any order of wrappers: a model goes on by the same losses on other ranks. RAY_DCP_THOROUGH tries
all orders.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import Kind
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.io import read_jobs
from ray_dcp.io.read_jobs import geometry
from ray_dcp.io.reader import read_chunks
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store.memory import MemoryStorage
from tests.support import module_ranks, wrapping
from tests.support.format_cases import difference, table_of
from tests.support.module_ranks import LAYOUTS
from tests.support.programs.forks import Programs
from tests.unit.io_cases import Chunk, Piece, Sink, file_plan, pad, raw, write_file
from tests.unit.io_cases import table_of as table_of_plan

HERE = sorted(dtype for dtype in ITEMSIZE if hasattr(torch, dtype))
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
PATHS = st.lists(st.one_of(TEXT, st.integers(-(1 << 62), 1 << 62)), max_size=4).map(tuple)
SIZES = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@st.composite
def tables(draw, kinds=tuple(Kind), chunkless=True):
    names = draw(st.lists(TEXT, max_size=6, unique=True))
    files = tuple(f"__{i}_0.a.distcp" for i in range(draw(st.integers(1, 3))))
    tensors = []
    for name in names:
        kind = draw(st.sampled_from(kinds))
        path = draw(st.one_of(st.none(), PATHS))
        if kind == Kind.OBJECT:
            tensors.append((name, path, kind, None, (), False, [((), (), 0)]))
            continue
        shape = draw(SIZES)
        chunks = []
        for _ in range(draw(st.integers(0 if chunkless else 1, 3))):
            offset = tuple(draw(st.integers(0, n)) for n in shape)
            size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
            chunks.append((offset, size, draw(st.integers(0, len(files) - 1))))
        dtype = draw(st.sampled_from(HERE))
        tensors.append((name, path, kind, dtype, shape, draw(st.booleans()), chunks))
    return table_of(tensors, files=files, checks=draw(st.booleans()))


@settings(max_examples=40)
@given(table=tables())
def test_a_chunk_table_is_read_back_equal(table):
    assert difference(decode_table(encode_table(table)), table) == []


@settings(max_examples=30)
@given(table=tables(kinds=(Kind.TENSOR, Kind.OBJECT)))
def test_our_metadata_stock_torch_s_and_what_we_read_agree(table):
    data = encode_metadata(table, checkpoint_id="/x", attempt="a1")
    theirs = pickle.loads(data)
    found = decode_metadata(data)
    assert (found.attempt, found.checkpoint_id, found.transforms) == ("a1", "/x", None)
    ours = found.table
    again = decode_metadata(pickle.dumps(theirs)).table
    # Two chunks at one offset are one entry of DCP's storage data: the last of them.
    assert difference(ours, again) == []
    assert ours.names == table.names == tuple(theirs.state_dict_metadata)
    order = np.argsort(table.tensor, kind="stable")
    width = ours.offset.shape[1]
    assert width <= table.offset.shape[1]
    assert np.array_equal(ours.tensor, table.tensor[order])
    assert np.array_equal(ours.offset, table.offset[order, :width])
    assert np.array_equal(ours.size, table.size[order, :width])
    if all(path is not None for path in table.paths):
        assert ours.paths == table.paths
    for row, (tensor, entry) in enumerate(theirs.state_dict_metadata.items()):
        if table.kind[row] == Kind.TENSOR:
            assert str(entry.properties.dtype) == f"torch.{table.dtypes[table.dtype[row]]}"
            assert entry.properties.requires_grad == table.requires_grad[row]
            assert tuple(entry.size) == tuple(table.shape[row][: table.ndim[row]])
        assert tensor == table.names[row]


DTYPES = {"uint8": "u1", "int16": "<i2", "float32": "<f4", "int64": "<i8", "complex128": "<c16"}


@st.composite
def saves(draw):
    """Tensors cut into chunks along a random grid."""
    names, dtypes, arrays, chunks = [], [], [], []
    for tensor in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        count = int(np.prod(shape))
        itemsize = np.dtype(DTYPES[dtype]).itemsize
        data = draw(st.randoms(use_true_random=False)).randbytes(count * itemsize)
        arrays.append(np.frombuffer(data, DTYPES[dtype]).reshape(shape))
        names.append(f"model.{tensor}")
        dtypes.append(dtype)
        cuts = [
            sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) if n else [0, 0]
            for n in shape
        ]
        for cell in np.ndindex(*[len(c) - 1 for c in cuts]):
            low = tuple(c[i] for c, i in zip(cuts, cell, strict=True))
            high = tuple(c[i + 1] for c, i in zip(cuts, cell, strict=True))
            box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
            chunks.append(Chunk(tensor, low, arrays[-1][box]))
    order = draw(st.permutations(range(len(chunks))))
    return names, dtypes, arrays, [chunks[index] for index in order]


@st.composite
def questions(draw, arrays):
    """Boxes of those tensors."""
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        tensor = draw(st.integers(0, len(arrays) - 1))
        low = [draw(st.integers(0, n)) for n in arrays[tensor].shape]
        size = [draw(st.integers(0, n - a)) for n, a in zip(arrays[tensor].shape, low, strict=True)]
        boxes.append((tensor, tuple(low), tuple(size)))
    return boxes


def wanted_of(boxes, arrays):
    width = max([len(a.shape) for a in arrays], default=1) or 1
    return Wanted(
        tensor=np.array([b[0] for b in boxes], np.int32),
        offset=pad([b[1] for b in boxes], width, 0),
        size=pad([b[2] for b in boxes], width, 1),
        itemsize=np.array([arrays[b[0]].itemsize for b in boxes], np.int64),
    )


@st.composite
def limits(draw):
    """Thresholds so small that every path is taken by small tensors."""
    sizes = st.sampled_from([1, 8, 40, 200, 1 << 20])
    return {
        (read_jobs, "DIRECT_BYTES"): draw(sizes),
        (read_jobs, "SLICE_BYTES"): draw(sizes),
        (read_jobs, "SPAN_BYTES"): draw(sizes),
        (read_jobs, "SCRATCH_BYTES"): draw(st.sampled_from([1, 64, 1 << 20])),
        (read_jobs, "FREE_GAP_BYTES"): 0,
        (read_jobs, "MOST_GAP_BYTES"): draw(st.sampled_from([0, 16, 1 << 16])),
    }


def options_of(draw):
    return LoadOptions(
        verify=draw(st.sampled_from(["always", "always", "sample", "never"])),
        num_threads=draw(st.integers(1, 3)),
    )


def write(storage, names, dtypes, arrays, chunks, block_bytes):
    plan = file_plan(
        [Piece(i, dtypes[c.tensor], c.data.shape) for i, c in enumerate(chunks)],
        block_bytes=block_bytes,
        large=512,
    )
    receipt = write_file(
        storage, plan, "a1", source=lambda row: raw(chunks[row].data), deferred=None
    )
    return table_of_plan(names, dtypes, [a.shape for a in arrays], chunks, plan, receipt)


def read(storage, table, boxes, arrays, options, patches):
    wanted = wanted_of(boxes, arrays)
    plan = plan_reads(table, wanted)
    sink = Sink([int(np.prod(b[2])) * arrays[b[0]].itemsize for b in boxes])
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in patches.items():
            patch.setattr(module, name, value)
        stats = read_chunks(storage, table, plan, wanted, sink, options=options)
    return sink, stats, plan, wanted


def slice_bytes(arrays, box):
    tensor, low, size = box
    index = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
    return np.ascontiguousarray(arrays[tensor][index]).tobytes()


@settings(max_examples=40)
@given(data=st.data(), block_bytes=st.sampled_from([1, 3, 8, 16, 64, 4096]))
def test_what_is_read_are_the_slices_of_what_was_written(data, block_bytes):
    names, dtypes, arrays, chunks = data.draw(saves())
    boxes = data.draw(questions(arrays))
    options = options_of(data.draw)
    storage = MemoryStorage("property-roundtrip")
    storage.delete(entry.key for entry in storage.list())
    table = write(storage, names, dtypes, arrays, chunks, block_bytes)
    sink, stats, plan, _ = read(storage, table, boxes, arrays, options, data.draw(limits()))
    assert [bytes(b) for b in sink.buffers] == [slice_bytes(arrays, b) for b in boxes]
    assert sorted(sink.finished) == list(range(len(boxes)))
    assert stats.bytes_needed == plan.bytes_needed
    assert (stats.blocks_checked == 0) == (options.verify == "never" or len(plan) == 0)


@settings(max_examples=40)
@given(data=st.data(), block_bytes=st.sampled_from([1, 3, 8, 16, 64, 4096]))
def test_a_flipped_bit_is_found_where_it_is_read_and_nowhere_else(data, block_bytes):
    names, dtypes, arrays, chunks = data.draw(saves())
    boxes = data.draw(questions(arrays))
    options = replace(options_of(data.draw), verify="always")
    storage = MemoryStorage("property-damage")
    storage.delete(entry.key for entry in storage.list())
    table = write(storage, names, dtypes, arrays, chunks, block_bytes)
    file = table.files[0]
    stored = bytearray(storage.read(file))
    position = data.draw(st.integers(0, len(stored) - 1)) if stored else 0
    wanted = wanted_of(boxes, arrays)
    plan = plan_reads(table, wanted)
    extents = geometry(table, wanted, plan, table.payload_offset, "always")
    payload = table.payload_offset[plan.chunk]
    if len(plan) and data.draw(st.booleans()):  # aim at a byte that is needed
        pair = data.draw(st.integers(0, len(plan) - 1))
        edge = data.draw(st.sampled_from([extents.chunk_low[pair], extents.chunk_high[pair] - 1]))
        position = int(payload[pair] + edge)
    if stored:
        stored[position] ^= 1 << data.draw(st.integers(0, 7))
    storage.write(file, stored)
    patches = data.draw(limits())
    block = np.full(len(plan), block_bytes)
    inside = (position >= payload + extents.read_low) & (position < payload + extents.read_high)
    local = np.where(inside, position - payload, 0) // block * block
    edges = (extents.chunk_low, extents.chunk_high - 1)
    at_edge = np.logical_or(*[e // block * block == local for e in edges])
    needed = inside & (extents.chunk_contiguous | at_edge)
    damage = None
    try:
        sink, *_ = read(storage, table, boxes, arrays, options, patches)
    except DamagedCheckpointError as exc:
        damage = exc
    if damage is None:
        assert not needed.any(), "a damaged block was taken"
        assert [bytes(b) for b in sink.buffers] == [slice_bytes(arrays, b) for b in boxes]
    else:
        assert inside.any(), "an error for bytes that nobody asked for"
        assert damage.key == file
        told = re.search(rf"bytes \[(\d+), (\d+)\) of {file}", str(damage))
        low, high = map(int, told.groups())
        assert low <= position < high
        assert high - low <= block_bytes
        hit = table.tensor[plan.chunk[np.flatnonzero(inside)[0]]]
        assert f"'{names[hit]}' is damaged" in str(damage)


@settings(max_examples=30)
@given(data=st.data())
def test_stock_items_of_any_stride_are_read_as_what_they_hold(data):
    names, dtypes, arrays, chunks = data.draw(saves())
    boxes = data.draw(questions(arrays))
    storage = MemoryStorage("property-stock")
    storage.delete(entry.key for entry in storage.list())
    stored, places = bytearray(), []
    for chunk in chunks:
        tensor = torch.from_numpy(np.array(chunk.data))
        if data.draw(st.booleans()):
            tensor = tensor.mT.contiguous().mT if tensor.ndim >= 2 else tensor
        if data.draw(st.booleans()):
            tensor = torch.stack([torch.zeros_like(tensor), tensor])[1]
        stream = io.BytesIO()
        torch.save(tensor, stream)
        places.append((len(stored), len(stream.getvalue())))
        stored += stream.getvalue() + bytes(data.draw(st.integers(0, 9)))
    storage.write("__0_0.distcp", stored)
    plan = file_plan([Piece(i, dtypes[c.tensor], c.data.shape) for i, c in enumerate(chunks)])
    native = table_of_plan(
        names, dtypes, [a.shape for a in arrays], chunks, plan, None, key="__0_0.distcp"
    )
    table = replace(
        native,
        item_offset=np.array([p[0] for p in places], np.int64),
        item_bytes=np.array([p[1] for p in places], np.int64),
        payload_offset=np.full(len(chunks), -1),
        block_bytes=np.zeros(len(chunks), np.int64),
        check_start=np.zeros(len(chunks) + 1, np.int64),
    )
    patches = data.draw(limits())
    from ray_dcp.io import reader

    patches[(reader, "WHOLE_ITEM_BYTES")] = data.draw(st.sampled_from([1, 1 << 20]))
    sink, stats, *_ = read(storage, table, boxes, arrays, options_of(data.draw), patches)
    assert stats.opaque == ()
    assert [bytes(b) for b in sink.buffers] == [slice_bytes(arrays, b) for b in boxes]
    assert sorted(sink.finished) == list(range(len(boxes)))


# --- models, however they are wrapped and whoever shares them out ---------------------------------

if os.environ.get("RAY_DCP_THOROUGH"):
    WRAPS = (*wrapping.WRAPPED, *module_ranks.OPTIMIZED)
else:
    WRAPS = (*wrapping.FEW[1::2], "compile+AC | DDP @ Lookahead", " | FSDP1 orig @ Lookahead")


@pytest.fixture(scope="module")
def on_ranks(programs: Programs, tmp_path_factory: Any) -> dict[str, list[str]]:
    """What is not as it was, by case of `tests.support.module_ranks`."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = programs.run(
        "-m", "tests.support.module_ranks", str(folder), *WRAPS, ranks=4,
        imports=["pytorch_optimizer", "schedulefree", "torchmetrics"],
    )  # fmt: skip
    assert [one.returncode for one in ended] == [0] * 4, "\n".join(one.stderr for one in ended)
    return json.loads(ended[0].stdout.splitlines()[-1])


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("wraps", WRAPS)
def test_a_wrapped_model_goes_on_by_the_same_losses_on_other_ranks(
    wraps: str, layouts: tuple[str, str], on_ranks: Any
):
    """With its optimizer, scheduler, extra state, metric and average, in lists and tuples."""
    assert on_ranks[f"{wraps}, {layouts[0]} to {layouts[1]}"] == []
