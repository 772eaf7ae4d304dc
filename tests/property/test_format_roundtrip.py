"""Any table and any frame: what is written is what is read, by us and by torch."""

import io
import math
import pickle
import warnings

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import Kind
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.format.torch_items import (
    frame_bytes_many,
    parse_torch_save,
    torch_save_frame,
)
from tests.format_cases import difference, table_of

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
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        tensors.append((name, path, kind, dtype, shape, draw(st.booleans()), chunks))
    return table_of(tensors, files=files, checks=draw(st.booleans()))


@settings(max_examples=40, deadline=None)
@given(table=tables())
def test_a_chunk_table_is_read_back_equal(table):
    assert difference(decode_table(encode_table(table)), table) == []


@settings(max_examples=30, deadline=None)
@given(table=tables(kinds=(Kind.TENSOR, Kind.OBJECT)))
def test_our_metadata_stock_torch_s_and_what_we_read_agree(table):
    data = encode_metadata(table, checkpoint_id="/x", attempt="a1")
    theirs = pickle.loads(data)
    ours = decode_metadata(data).table
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
    for row, (tensor, entry) in enumerate(theirs.state_dict_metadata.items()):
        if table.kind[row] == Kind.TENSOR:
            assert str(entry.properties.dtype) == f"torch.{table.dtypes[table.dtype[row]]}"
            assert entry.properties.requires_grad == table.requires_grad[row]
            assert tuple(entry.size) == tuple(table.shape[row][: table.ndim[row]])
        assert tensor == table.names[row]


@settings(max_examples=40, deadline=None)
@given(dtype=st.sampled_from(sorted(ITEMSIZE)), size=SIZES, seed=st.integers(0, 9))
def test_torch_loads_any_frame_and_we_find_its_payload(dtype, size, seed):
    num_bytes = math.prod(size) * ITEMSIZE[dtype]
    payload = np.random.default_rng(seed).integers(0, 2, num_bytes, dtype=np.uint8).tobytes()
    frame = torch_save_frame(dtype, size)
    item = frame.header + payload + frame.footer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.load(io.BytesIO(item), weights_only=True)
    assert (tuple(loaded.shape), loaded.dtype) == (size, getattr(torch, dtype))
    assert bytes(loaded.untyped_storage()) == payload
    found = parse_torch_save(item[: len(frame.header)], len(item))
    assert found.is_contiguous
    assert (found.dtype, found.size) == (dtype, size)
    assert (found.payload_offset, found.payload_bytes) == (len(frame.header), num_bytes)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(sorted(ITEMSIZE)),
            st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 18)), max_size=3),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_lengths_of_many_frames_equal_those_of_each(rows):
    names = sorted({dtype for dtype, _ in rows})
    size = np.ones((len(rows), 3), dtype=np.int64)
    for row, (_, lengths) in enumerate(rows):
        size[row, : len(lengths)] = lengths
    dtype = np.array([names.index(name) for name, _ in rows])
    ndim = np.array([len(lengths) for _, lengths in rows])
    headers, footers = frame_bytes_many(names, dtype, ndim, size)
    frames = [torch_save_frame(name, tuple(lengths)) for name, lengths in rows]
    assert headers.tolist() == [len(frame.header) for frame in frames]
    assert footers.tolist() == [len(frame.footer) for frame in frames]


@settings(max_examples=30, deadline=None)
@given(
    size=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(),
    dtype=st.sampled_from(["float32", "int8", "bfloat16", "uint16"]),
    narrow=st.integers(0, 3),
)
def test_any_view_that_stock_torch_saved_is_found(size, order, dtype, narrow):
    base = torch.arange(math.prod(size)).to(getattr(torch, dtype)).reshape(size)
    axes = list(range(len(size)))
    order.shuffle(axes)
    view = base.permute(axes)
    view = view.narrow(0, min(narrow, view.shape[0] - 1), 1) if narrow else view
    buffer = io.BytesIO()
    torch.save(view, buffer)
    item = buffer.getvalue()
    found = parse_torch_save(item[:1024], len(item))
    raw = bytearray(item[found.payload_offset : found.payload_offset + found.payload_bytes])
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    rebuilt = torch.empty(0, dtype=base.dtype).set_(
        storage, found.storage_offset, found.size, found.stride
    )
    assert rebuilt.tolist() == view.tolist()
