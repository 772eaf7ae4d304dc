"""Any table: what is written is what is read, by us and by torch."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import Kind
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.format.table import decode_table, encode_table
from tests.support.format_cases import difference, table_of

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
