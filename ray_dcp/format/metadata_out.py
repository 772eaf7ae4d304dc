"""The `.metadata` that stock DCP reads, built from a chunk table without torch.

A pickle of `torch.distributed.checkpoint.metadata.Metadata`, equal field by field to what torch
itself would build, with texts where torch has platform-bound paths.
Source: torch/distributed/checkpoint/metadata.py, filesystem.py `_StorageInfo`,
default_planner.py `create_default_global_save_plan`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.format.pickle_writer import (
    MEMOIZE_AND_POP,
    Opcodes,
    PickleWriter,
    pickled_int,
    pickled_ints,
    pickled_text,
    pickled_tuple,
    rows,
    side_by_side,
    uneven_rows,
    with_length,
)
from ray_dcp.plan.grouping import group_rows
from ray_dcp.plan.values import BoolArray, ChunkTable, Int64Array, Kind

__all__ = [
    "ATTEMPT_ATTRIBUTE",
    "DCP_VERSION",
    "encode_metadata",
    "fill_metadata",
    "metadata_template",
]

ATTEMPT_ATTRIBUTE = "ray_dcp_attempt"
"""Extra attribute of the pickled `Metadata`: which attempt it projects. Stock DCP ignores it."""
DCP_VERSION = "1.0.0"
"""What torch writes as `Metadata.version`; no reader looks at it."""

_ATTEMPT_MARK = "attempt\0attempt\0"
"""As long as an attempt id. No state dict has such a name."""
_ID_MARK = "checkpoint\0id\0"

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NEW = b")\x81"
"""No arguments, then `cls.__new__(cls)`."""
_STATE = b"}("
"""An empty dict and a mark, before its items."""
_TUPLES = np.frombuffer(b")\x85\x86\x87", dtype=np.uint8)[:, None]
"""What makes a tuple of 0 to 3 values, one row each."""
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
        O(chunks), about 1 us each.
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


def metadata_template(table: ChunkTable) -> bytes:
    """Returns what `.metadata` has in common in all saves of a plan, for `fill_metadata`.

    Args:
        table: A finished table, with `{attempt}` in the names of its files.

    Raises:
        InternalError: A chunk has no place yet.
    """
    files = tuple(key.replace("{attempt}", _ATTEMPT_MARK) for key in table.files)
    named = replace(table, files=files)
    return encode_metadata(named, checkpoint_id=_ID_MARK, attempt=_ATTEMPT_MARK)


def fill_metadata(template: bytes, *, checkpoint_id: str, attempt: str) -> bytes | None:
    """Returns what `encode_metadata` returns of the same table with its files' final names.

    Args:
        template: Of `metadata_template`.
        checkpoint_id: As there.
        attempt: As there.

    Returns:
        None where it has to be encoded: by chance a text is equal to one of these, or the attempt
        has another length than usual.
    """
    own, mark = pickled_text(checkpoint_id), pickled_text(_ID_MARK)
    known = own in template or pickled_text(attempt) in template
    if known or len(attempt) != len(_ATTEMPT_MARK) or template.count(mark) != 1:
        return None
    filled = template.replace(mark, own).replace(_ATTEMPT_MARK.encode(), attempt.encode())
    return with_length(filled)


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
        self.name = writer.references(writer.text_indices(table.names))
        """uint8[t, 5]"""


def _sizes(writer: PickleWriter, boxes: Int64Array, ndim: Int64Array) -> Opcodes:
    """Returns opcodes that push a `torch.Size` for each row; equal ones are one object."""
    first, row_of = group_rows([ndim, *boxes.T])
    ndim, boxes = ndim[first], boxes[first]
    head = writer.name("torch", "Size")
    index = np.zeros(len(first), dtype=np.int64)
    for length in np.unique(ndim).tolist():
        mine = np.flatnonzero(ndim == length)
        numbers = [pickled_ints(boxes[mine, column]) for column in range(length)]
        tuple_of = (b"(", b"t") if length > 3 else (b"", (b")", b"\x85", b"\x86", b"\x87")[length])
        end = tuple_of[1] + b"\x85R" + MEMOIZE_AND_POP
        opcodes = rows(len(mine), head + tuple_of[0], *numbers, end)
        start = writer.remember(opcodes[: -len(MEMOIZE_AND_POP)], count=len(mine))
        index[mine] = start + np.arange(len(mine))
    return writer.references(index[row_of])


def _object(writer: PickleWriter, module: str, name: str, first: str) -> bytes:
    """Returns the opcodes that push a new object and the name of its first attribute."""
    return writer.name(module, name) + _NEW + _STATE + writer.text(first)


def _tensors(writer: PickleWriter, table: ChunkTable, shared: _Shared) -> bytes:
    tensor = _object(writer, _METADATA, "TensorStorageMetadata", "properties")
    tensor += writer.name(_METADATA, "TensorProperties") + _NEW
    is_object = table.kind == Kind.OBJECT
    plain = np.flatnonzero(~is_object)
    heads = side_by_side(
        len(plain),
        shared.name[plain],
        tensor,
        writer.references(_property_states(writer, table))[plain],
        b"b" + writer.text("size"),
        shared.shape[plain],
        writer.text("chunks") + b"](",
    )
    order, starts = _by_tensor(table)
    order = order[~is_object[table.tensor[order]]]
    chunks = side_by_side(
        len(order),
        _object(writer, _METADATA, "ChunkStorageMetadata", "offsets"),
        shared.offset[order],
        writer.text("sizes"),
        shared.size[order],
        _BUILD,
    )
    tails = side_by_side(len(plain), b"e" + _BUILD)
    opcodes, ends = uneven_rows(np.diff(starts)[plain], heads, chunks, tails)
    no_tensor = writer.name(_METADATA, "BytesStorageMetadata") + _NEW
    pieces = [_STATE]
    done = 0
    for row_before, row in enumerate(np.flatnonzero(is_object).tolist()):
        end = int(ends[row - row_before])
        pieces += (opcodes[done:end], shared.name[row].tobytes(), no_tensor)
        done = end
    return b"".join((*pieces, opcodes[done:], b"u"))


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
    paths = [
        (name,) if path is None else path
        for name, path in zip(table.names, table.paths, strict=True)
    ]
    counts = np.fromiter(map(len, paths), dtype=np.int64, count=len(paths))
    parts = _part_indices(writer, list(chain.from_iterable(paths)))
    heads, tails = shared.name, _TUPLES[np.minimum(counts, 3)]
    if int(counts.max(initial=0)) > 3:
        heads = side_by_side(len(paths), heads, b"(")
        tails = side_by_side(len(paths), b"t")
    opcodes, _ = uneven_rows(counts, heads, writer.references(parts), tails)
    return _STATE + opcodes + b"u"


def _part_indices(writer: PickleWriter, parts: list[str | int]) -> list[int]:
    """Returns memo indices of the components of paths."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return writer.text_indices(texts)
    numbers = {
        part: writer.remember(pickled_int(int(part)))
        for part in dict.fromkeys(part for part in parts if not isinstance(part, str))
    }
    text = iter(writer.text_indices(texts))
    return [next(text) if isinstance(part, str) else numbers[part] for part in parts]


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
    files = writer.references(writer.text_indices(table.files))
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
