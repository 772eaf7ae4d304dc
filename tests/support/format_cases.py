"""Chunk tables and torch objects that the tests of `ray_dcp.format` share."""

import dataclasses
import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ray_dcp.core.checksums import block_bytes_for_many, digest_bytes
from ray_dcp.core.columns import pack, pack_record, record_bytes, unpack, unpack_record
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable, Kind, offsets_of
from ray_dcp.format import table as table_format
from ray_dcp.format.manifest import FileEntry, Manifest, PlaceRun
from ray_dcp.format.table import encode_table


def saved(value, **how):
    """Returns what `torch.save` makes of a value."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def manifest(**changes):
    """Returns the manifest of four files of four ranks, with other fields if wanted."""
    fields = {
        "attempt": "a1", "epoch": 1, "world_size": 4, "container": "torch_save", "created_s": 1.5,
        "files": tuple(FileEntry(f"__{rank}_0.x", 9, "0f" * 16) for rank in range(4)),
        "table": FileEntry("c.table", 10, "00" * 16), "metadata": None,
        "replaced_metadata": None, "plan_digest": "00", "num_tensors": 1, "num_chunks": 4,
        "payload_bytes": 8, "previous_slot": 0, "deferred": (PlaceRun(64, 9, 1024, 4),),
    }  # fmt: skip
    return Manifest(**(fields | changes))


def table_of(tensors, *, files=("__0_0.a1.distcp",), checks=True):
    """A consistent table: tensors are (name, path, kind, dtype, shape, requires_grad, chunks), a
    chunk (offset, size, file)."""
    dtypes = list(dict.fromkeys(t[3] for t in tensors if t[3] is not None))
    width = max((len(t[4]) for t in tensors), default=0)

    def pad(rows, blank):
        full = [tuple(r) + (blank,) * (width - len(r)) for r in rows]
        return np.array(full, dtype=np.int64).reshape(len(full), width)

    rows = [(i, *chunk) for i, t in enumerate(tensors) for chunk in t[6]]
    rows.sort(key=lambda row: row[3])
    payload = []
    for i, _, size, _ in rows:
        _, _, kind, dtype, *_ = tensors[i]
        plain = kind == Kind.TENSOR
        payload.append(int(np.prod(size)) * ITEMSIZE[dtype] if plain else 100 + i)
    payload = np.array(payload, dtype=np.int64)
    place = np.zeros(len(rows), dtype=np.int64)
    ends = [0] * len(files)
    for row, (_, _, _, file) in enumerate(rows):
        place[row] = ends[file]
        ends[file] += int(payload[row]) + 1024
    blocks = block_bytes_for_many(payload) if checks else np.zeros(len(rows), dtype=np.int64)
    return ChunkTable(
        names=tuple(t[0] for t in tensors),
        paths=tuple(t[1] for t in tensors),
        dtypes=tuple(dtypes),
        files=tuple(files),
        kind=np.array([t[2] for t in tensors], dtype=np.int8),
        dtype=np.array([-1 if t[3] is None else dtypes.index(t[3]) for t in tensors], np.int8),
        ndim=np.array([len(t[4]) for t in tensors], dtype=np.int8),
        shape=pad([t[4] for t in tensors], 1),
        requires_grad=np.array([t[5] for t in tensors], dtype=bool),
        tensor=np.array([row[0] for row in rows], dtype=np.int32),
        offset=pad([row[1] for row in rows], 0),
        size=pad([row[2] for row in rows], 1),
        file=np.array([row[3] for row in rows], dtype=np.int32),
        item_offset=place,
        item_bytes=payload + 1024,
        payload_offset=place + 384,
        payload_bytes=payload,
        block_bytes=blocks,
        check_start=np.zeros(len(rows) + 1, dtype=np.int64),
        checks=np.zeros(0, dtype=np.uint64),
    )


def mixed_table():
    """0-d, empty, sharded, object and opaque items, numbers in paths, one tensor without chunk."""
    return table_of(
        [
            ("m.w", ("m", "w"), Kind.TENSOR, "float32", (6, 4), True,
             [((0, 0), (3, 4), 0), ((3, 0), (3, 4), 1)]),
            ("m.scale", ("m", "scale"), Kind.TENSOR, "bfloat16", (), False, [((), (), 0)]),
            ("o.0.lr", ("o", 0, "lr"), Kind.OBJECT, None, (), False, [((), (), 1)]),
            ("empty", ("empty",), Kind.TENSOR, "int64", (0, 3), False, [((0, 0), (0, 3), 0)]),
            ("f8", ("f8", 7), Kind.OPAQUE, "float8_e4m3fn", (5,), False, [((0,), (5,), 0)]),
            ("deep.0", ("deep", "0"), Kind.TENSOR, "uint8", (1, 2, 3, 4, 5), False,
             [((0,) * 5, (1, 2, 3, 4, 5), 1)]),
            ("flat", None, Kind.TENSOR, "float32", (70000,), False, [((0,), (70000,), 1)]),
            ("nowhere", ("nowhere",), Kind.TENSOR, "float32", (2,), False, []),
        ],
        files=("__0_0.a1.distcp", "__1_0.a1.distcp"),
    )  # fmt: skip


def many_table(count):
    """One chunk a tensor, every tensor of its own shape."""
    return table_of(
        [
            (f"model.layers.{i}.weight", ("model", "layers", i, "weight"), Kind.TENSOR, "float32",
             (64, i % 900 + 1), False, [((0, 0), (64, i % 900 + 1), i % 3)])
            for i in range(count)
        ],
        files=("__0_0.a1.distcp", "__1_0.a1.distcp", "__2_0.a1.distcp"),
    )  # fmt: skip


def slabs(world_size, shapes, objects=()):
    """A table of tensors in slabs, of which every rank has one; and objects, each on one rank."""
    files = [f"__{rank}_0.a1.distcp" for rank in range(world_size)]
    cuts = {
        shape: np.linspace(0, shape[0], world_size + 1).astype(int).tolist() for shape in shapes
    }
    tensors = [
        (f"t{i}", ("t", i), Kind.TENSOR, "float32", shape, False,
         [((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:]), rank)
          for rank, (low, high) in enumerate(zip(cuts[shape], cuts[shape][1:], strict=False))])
        for i, shape in enumerate(shapes)
    ]  # fmt: skip
    tensors += [
        (f"o{i}", ("o", i), Kind.OBJECT, None, (), False, [((), (), rank)])
        for i, rank in enumerate(objects)
    ]
    tensors.append(("nowhere", None, Kind.TENSOR, "int8", (0,), False, []))
    table = table_of(tensors, files=files, checks=False)
    late = np.isin(table.tensor, np.flatnonzero(table.kind == Kind.OBJECT))
    return dataclasses.replace(
        table,
        item_offset=np.where(late, -1, table.item_offset),
        payload_offset=np.where(late, -1, table.payload_offset),
    )


def grouped_table():
    """A table on storage whose rows are in groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_format, "GROUP_ROWS", 3)
        return encode_table(slabs(4, [(9, 2), (8, 1)], objects=[2]))


@dataclasses.dataclass
class Stored:
    """What the file of a chunk table says; columns are of int64."""

    fields: dict[str, Any]
    about: list[np.ndarray]
    runs: list[np.ndarray]
    index: list[np.ndarray]
    boxes: list[np.ndarray]
    groups: list[list[np.ndarray]]


def forged(data: bytes, edit: Callable[[Stored], object]) -> bytes:
    """The file of a table after an edit, in which all digests and lengths fit."""
    end = len(data) - record_bytes(data)
    fields, frames = unpack_record(data[end:])
    width, count = fields["width"], len(fields["digests"]) // 32
    shapes = (
        (4 + width, len(fields["names"])), (1, len(fields["files"])), (4, count + 1),
        (2 + 2 * width, fields["boxes"]),
    )  # fmt: skip
    found = Stored(
        fields,
        *(
            unpack(frame, [np.int64] * columns, np.array([rows]))
            for frame, (columns, rows) in zip(frames, shapes, strict=True)
        ),
        groups=[],
    )
    first = offsets_of(found.runs[0])
    rows_of = [
        found.runs[0][slice(*np.searchsorted(first, [low, high]))]
        for low, high in pairwise(found.index[0].tolist())
    ]
    for group, (low, high) in enumerate(pairwise(found.index[3].tolist())):
        found.groups.append(unpack(data[low:high], [np.int64] * (6 + 2 * width), rows_of[group]))
    starts, digests = found.index[3].copy(), fields["digests"]
    edit(found)
    groups = [
        pack(columns, runs if runs.sum() == len(columns[0]) else np.array([len(columns[0])]))
        for columns, runs in zip(found.groups, rows_of, strict=True)
    ]
    if found.fields.get("digests") == digests:
        found.fields["digests"] = b"".join(map(digest_bytes, groups)).hex()
    if np.array_equal(found.index[3], starts):
        found.index[3] = offsets_of(np.array(list(map(len, groups)), dtype=np.int64))
    parts = (found.about, found.runs, found.index, found.boxes)
    frames = [pack(columns, np.array([len(columns[0])])) for columns in parts]
    return b"".join([*groups, pack_record(found.fields, frames)])


def difference(left, right):
    """Names of the fields in which two tables differ, dtypes of arrays included."""
    found = []
    for field in dataclasses.fields(ChunkTable):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b):
                found.append(field.name)
        elif a != b or list(map(type, a)) != list(map(type, b)):
            found.append(field.name)
    return found
