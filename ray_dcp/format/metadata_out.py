"""The `.metadata` that stock DCP reads, built from a chunk table without torch.

A pickle of `torch.distributed.checkpoint.metadata.Metadata`, equal field by field to what torch
itself would build, with texts where torch has platform-bound paths.
Source: torch/distributed/checkpoint/metadata.py, filesystem.py `_StorageInfo`,
default_planner.py `create_default_global_save_plan`.
"""

from __future__ import annotations

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.format.pickle_writer import (
    MEMOIZE_AND_POP,
    Opcodes,
    PickleWriter,
    pickled_int,
    pickled_ints,
    pickled_tuple,
    rows,
)
from ray_dcp.plan.values import BoolArray, ChunkTable, Int64Array, Kind, Path

__all__ = ["ATTEMPT_ATTRIBUTE", "DCP_VERSION", "encode_metadata"]

ATTEMPT_ATTRIBUTE = "ray_dcp_attempt"
"""Extra attribute of the pickled `Metadata`: which attempt it projects. Stock DCP ignores it."""
DCP_VERSION = "1.0.0"
"""What torch writes as `Metadata.version`; no reader looks at it."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NEW = b")\x81"
"""No arguments, then `cls.__new__(cls)`."""
_STATE = b"}("
"""An empty dict and a mark, before its items."""
_BUILD = b"ub"
"""Sets the items, then makes the dict the object's state."""


def encode_metadata(table: ChunkTable, *, checkpoint_id: str, attempt: str) -> bytes:
    """Returns the bytes of `.metadata`.

    Equal arguments give equal bytes. A tensor's chunks come in the order of the table.

    Args:
        table: A finished table: every chunk has its place.
        checkpoint_id: Path or URL, as the user gave it.
        attempt: The attempt that is committed by these bytes' digest in the manifest.

    Raises:
        InternalError: A chunk has no place yet.

    Complexity:
        O(chunks), about 4 us each.
    """
    if table.num_chunks and int(table.item_offset.min()) < 0:
        raise InternalError("A .metadata can be made once all chunks have a place; one has none")
    writer = PickleWriter()
    # Careful: the calls below write what they remember, and must do so before the object is begun.
    shared = _Shared(writer, table)
    fields = {
        "state_dict_metadata": _tensors(writer, table, shared),
        "planner_data": _paths(writer, table, shared),
        "storage_data": _places(writer, table, shared),
        "storage_meta": _storage_meta(writer, checkpoint_id, attempt),
        "version": writer.text(DCP_VERSION),
        ATTEMPT_ATTRIBUTE: writer.text(attempt),
    }
    names = [writer.text(field) for field in fields]
    writer.add(writer.name(_METADATA, "Metadata") + _NEW + _STATE)
    for name, opcodes in zip(names, fields.values(), strict=True):
        writer.add(name)
        writer.add(opcodes)
    writer.add(_BUILD)
    return writer.finish()


class _Shared:
    """Opcodes of what several fields refer to: names and boxes."""

    def __init__(self, writer: PickleWriter, table: ChunkTable) -> None:
        ndim = table.ndim[table.tensor]
        boxes = _sizes(
            writer,
            np.concatenate([table.shape, table.offset, table.size]),
            np.concatenate([table.ndim, ndim, ndim]).astype(np.int64),
        )
        t, c = table.num_tensors, table.num_chunks
        self.shape = boxes[:t]
        """uint8[t, 5]"""
        self.offset = boxes[t : t + c]
        """uint8[c, 5]"""
        self.size = boxes[t + c :]
        """uint8[c, 5]"""
        self.name = writer.references([writer.text_index(name) for name in table.names])
        """uint8[t, 5]"""


def _sizes(writer: PickleWriter, boxes: Int64Array, ndim: Int64Array) -> Opcodes:
    """Returns opcodes that push a `torch.Size` for each row; equal ones are one object."""
    known: dict[tuple[int, ...], int] = {}
    keys = map(tuple, np.concatenate([ndim[:, None], boxes], axis=1).tolist())
    row_of = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    distinct = np.array(list(known), dtype=np.int64).reshape(len(known), boxes.shape[1] + 1)
    head = writer.name("torch", "Size")
    index = np.zeros(len(known), dtype=np.int64)
    for length in np.unique(distinct[:, 0]).tolist():
        mine = np.flatnonzero(distinct[:, 0] == length)
        numbers = [pickled_ints(distinct[mine, 1 + column]) for column in range(length)]
        tuple_of = (b"(", b"t") if length > 3 else (b"", (b")", b"\x85", b"\x86", b"\x87")[length])
        end = tuple_of[1] + b"\x85R" + MEMOIZE_AND_POP
        opcodes = rows(len(mine), head + tuple_of[0], *numbers, end)
        first = writer.remember(opcodes[: -len(MEMOIZE_AND_POP)], count=len(mine))
        index[mine] = first + np.arange(len(mine))
    return writer.references(index[row_of])


def _object(writer: PickleWriter, module: str, name: str, first: str) -> bytes:
    """Returns the opcodes that push a new object and the name of its first attribute."""
    return writer.name(module, name) + _NEW + _STATE + writer.text(first)


def _tensors(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    tensor = _object(writer, _METADATA, "TensorStorageMetadata", "properties")
    tensor += writer.name(_METADATA, "TensorProperties") + _NEW
    heads = rows(
        table.num_tensors,
        shared.name,
        tensor,
        writer.references(_property_states(writer, table)),
        b"b" + writer.text("size"),
        shared.shape,
        writer.text("chunks") + b"](",
    )
    chunk = _object(writer, _METADATA, "ChunkStorageMetadata", "offsets")
    sizes = writer.text("sizes")
    order, starts = _by_tensor(table)
    pieces = (shared.offset[order], sizes, shared.size[order])
    chunks = rows(table.num_chunks, chunk, *pieces, _BUILD)
    head_bytes = len(heads) // max(table.num_tensors, 1)
    ends = (starts * (len(chunks) // max(table.num_chunks, 1))).tolist()
    is_object = (table.kind == Kind.OBJECT).tolist()
    no_tensor = writer.name(_METADATA, "BytesStorageMetadata") + _NEW
    opcodes = [_STATE]
    for row in range(table.num_tensors):
        start = row * head_bytes
        if is_object[row]:
            opcodes.append(heads[start : start + shared.name.shape[1]] + no_tensor)
        else:
            opcodes.append(heads[start : start + head_bytes])
            opcodes.append(chunks[ends[row] : ends[row + 1]] + b"e" + _BUILD)
    opcodes.append(b"u")
    return b"".join(opcodes)


def _by_tensor(table: ChunkTable) -> tuple[Int64Array, Int64Array]:
    """Returns int64[c], the chunks sorted by tensor, and int64[t + 1], where each one's start."""
    counts = np.bincount(table.tensor, minlength=table.num_tensors)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return np.argsort(table.tensor, kind="stable"), starts.astype(np.int64)


def _property_states(writer: PickleWriter, table: ChunkTable) -> list[int]:
    """Returns memo indices of what `TensorProperties.__setstate__` takes, for each tensor."""
    layout = writer.name("torch.serialization", "_get_layout") + writer.text("torch.strided")
    contiguous = writer.name(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    pairs = list(zip(table.dtype.tolist(), table.requires_grad.tolist(), strict=True))
    known = {}
    # Why not a set: equal tables must give equal bytes.
    for dtype, requires_grad in dict.fromkeys(pairs):
        parts = [
            writer.name("torch", table.dtypes[dtype]) if dtype >= 0 else b"N",
            layout + b"\x85R",
            b"\x88" if requires_grad else b"\x89",
            contiguous,
            b"\x89",
        ]
        known[dtype, requires_grad] = writer.remember(pickled_tuple(parts))
    return [known[pair] for pair in pairs]


def _paths(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    if table.num_tensors and all(path is None for path in table.paths):
        return b"N"
    parts: dict[str | int, bytes] = {}
    name_bytes = shared.name.shape[1]
    names = shared.name.tobytes()
    opcodes = [_STATE]
    for row, (name, path) in enumerate(zip(table.names, table.paths, strict=True)):
        opcodes.append(names[row * name_bytes : (row + 1) * name_bytes])
        opcodes.append(_path(writer, parts, path if path is not None else (name,)))
    opcodes.append(b"u")
    return b"".join(opcodes)


def _path(writer: PickleWriter, parts: dict[str | int, bytes], path: Path) -> bytes:
    for part in path:
        if part not in parts:
            is_text = isinstance(part, str)
            parts[part] = writer.text(str(part)) if is_text else pickled_int(int(part))
    return pickled_tuple([parts[part] for part in path])


def _places(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    order, starts = _by_tensor(table)
    index = np.empty(table.num_chunks, dtype=np.int64)
    index[order] = np.arange(table.num_chunks) - starts[table.tensor[order]]
    is_object = table.kind[table.tensor] == Kind.OBJECT
    offset = writer.text("offset")
    hints = (pickled_ints(index), offset, shared.offset)
    return b"".join(
        (
            _STATE,
            _place_rows(writer, table, shared, ~is_object, hints),
            _place_rows(writer, table, shared, is_object, (b"N",)),
            b"u",
        )
    )


def _place_rows(
    writer: PickleWriter, table: ChunkTable, shared: _Shared, which: BoolArray,
    hints: tuple[bytes | Opcodes, ...],
) -> bytes:  # fmt: skip
    """Returns `MetadataIndex` and `_StorageInfo` of some chunks."""
    index = _object(writer, _METADATA, "MetadataIndex", "fqn")
    info = _BUILD + _object(writer, _FILESYSTEM, "_StorageInfo", "relative_path")
    files = writer.references([writer.text_index(file) for file in table.files])
    offset, length = writer.text("offset"), writer.text("length")
    return rows(
        int(which.sum()),
        index,
        shared.name[table.tensor[which]],
        writer.text("index"),
        *(hint if isinstance(hint, bytes) else hint[which] for hint in hints),
        info,
        files[table.file[which]],
        offset,
        pickled_ints(table.item_offset[which]),
        length,
        pickled_ints(table.item_bytes[which]),
        _BUILD,
    )


def _storage_meta(writer: PickleWriter, checkpoint_id: str, attempt: str) -> bytes:
    return b"".join(
        (
            _object(writer, _METADATA, "StorageMeta", "checkpoint_id"),
            writer.text(checkpoint_id),
            writer.text("save_id"),
            writer.text(attempt),
            writer.text("load_id"),
            b"N",
            writer.text("modules"),
            b"]" + _BUILD,
        )
    )
