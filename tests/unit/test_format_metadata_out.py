import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ray_dcp import InternalError
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import Kind
from ray_dcp.format.metadata import encode_metadata
from tests.support.format_cases import many_table, mixed_table, table_of


def encoded(table):
    return encode_metadata(table, checkpoint_id="/data/step-1", attempt="a1")


def as_torch_builds_it(table):
    """The same Metadata, made of torch's own objects."""
    names, places = {}, {}
    for row, name in enumerate(table.names):
        if table.kind[row] == Kind.OBJECT:
            names[name] = md.BytesStorageMetadata()
            continue
        names[name] = md.TensorStorageMetadata(
            properties=md.TensorProperties(
                dtype=getattr(torch, table.dtypes[table.dtype[row]]),
                requires_grad=bool(table.requires_grad[row]),
            ),
            size=torch.Size(table.shape[row][: table.ndim[row]].tolist()),
            chunks=[],
        )
    for row, tensor in enumerate(table.tensor.tolist()):
        name = table.names[tensor]
        index = md.MetadataIndex(name)
        if table.kind[tensor] != Kind.OBJECT:
            ndim = table.ndim[tensor]
            offset = torch.Size(table.offset[row][:ndim].tolist())
            size = torch.Size(table.size[row][:ndim].tolist())
            chunks = names[name].chunks
            index = md.MetadataIndex(name, offset, len(chunks))
            chunks.append(md.ChunkStorageMetadata(offset, size))
        places[index] = _StorageInfo(
            table.files[table.file[row]], int(table.item_offset[row]), int(table.item_bytes[row])
        )
    return md.Metadata(
        state_dict_metadata=names,
        planner_data={
            name: (name,) if path is None else path
            for name, path in zip(table.names, table.paths, strict=True)
        },
        storage_data=places,
        storage_meta=md.StorageMeta("/data/step-1", "a1", None, []),
        version="1.0.0",
    )


def typed(value):
    """A value with the types of all its parts, so that torch.Size and tuple differ."""
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(part) for part in value]
    if dataclasses.is_dataclass(value):
        return type(value), typed(value.__dict__)
    return type(value), value


def assert_same(found, expected):
    assert found.__dict__.pop("ray_dcp_attempt") == "a1"
    assert found == expected
    found.storage_data = dict(sorted(found.storage_data.items(), key=str))
    expected.storage_data = dict(sorted(expected.storage_data.items(), key=str))
    assert typed(found) == typed(expected)
    for one, other in zip(found.storage_data, expected.storage_data, strict=True):
        assert one.index == other.index


HERE = [dtype for dtype in ITEMSIZE if hasattr(torch, dtype)]


def every_dtype():
    return table_of(
        [
            (dtype, (dtype,), Kind.TENSOR, dtype, (3, 2), bool(grad % 2), [((0, 0), (3, 2), 0)])
            for grad, dtype in enumerate(HERE)
        ]
    )


def large_numbers():
    table = many_table(300)
    rows = np.arange(300) * (1 << 40)
    return dataclasses.replace(table, item_offset=rows, payload_offset=rows + 384)


TABLES = {
    "mixed": mixed_table,
    "empty": lambda: table_of([], files=()),
    "every dtype": every_dtype,
    "many": lambda: many_table(1000),
    "beyond 4 GiB": large_numbers,
    "odd names": lambda: table_of(
        [(name, (name, -3, 0, 1 << 40, "0"), Kind.TENSOR, "int8", (1,), False, [((0,), (1,), 0)])
         for name in ("", "a.b", "ü\u4e2d", "x" * 300, "state_dict_metadata", "size", "\ud800")]
    ),
    "paths of every length": lambda: table_of(
        [(f"t{n}", ("t", 1, "u", "t", 300, "v")[:n], Kind(n % 2), "int8" if n % 2 == 0 else None,
          (2,) * (n % 2 == 0), False, [((0,), (2,), 0)] if n % 2 == 0 else [((), (), 0)])
         for n in (3, 0, 6, 1, 2, 5, 4)]
    ),
    "chunks in mixed order": lambda: table_of(
        [("w", ("w",), Kind.TENSOR, "int8", (4, 1 << 33), False,
          [((i, 0), (1, 1 << 33), 0) for i in (2, 0, 3, 1)])]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_torch_unpickles_what_it_would_have_built_itself(name):
    table = TABLES[name]()
    # Through a pickle: that sets attributes in another order and leaves out those that are None.
    expected = pickle.loads(pickle.dumps(as_torch_builds_it(table)))
    assert_same(pickle.loads(encoded(table)), expected)


def test_every_torch_since_2_0_reads_the_properties(monkeypatch):
    """Up to 2.14 torch unpacks five values, and from 2.15 on five or six."""
    states = []
    monkeypatch.setattr(md.TensorProperties, "__setstate__", lambda _, state: states.append(state))
    pickle.loads(encoded(every_dtype()))
    assert len(states) == len(HERE)
    assert {len(state) for state in states} == {5}


def test_a_chunk_without_a_place_is_refused():
    table = mixed_table()
    place = table.item_offset.copy()
    place[3] = -1
    with pytest.raises(InternalError, match="have a place"):
        encoded(dataclasses.replace(table, item_offset=place))
