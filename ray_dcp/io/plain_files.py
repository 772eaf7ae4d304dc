"""Plain safetensors files as a checkpoint: the chunk table of a folder of them.

A folder of plain safetensors files has neither a manifest nor a `.metadata`: it is a model of the
Hugging Face hub, or was written by DCP's `HuggingFaceStorageWriter`. Its chunk table is built from
the headers of the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_dcp.core.processes import collector_paused, run_tasks
from ray_dcp.core.values import ChunkTable, Kind, box_text, pad, padded, widen
from ray_dcp.errors import (
    DamagedCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.format import damaged
from ray_dcp.format.safetensors import (
    SafetensorsHeader,
    TensorEntry,
    parse_header,
    saved_offsets,
)
from ray_dcp.format.table import (
    check_table,
)
from ray_dcp.format.torch_items import NeedMoreBytes
from ray_dcp.planning.coverage import check_coverage
from ray_dcp.store.storage import Entry, KeyMissingError, Storage, threads_for

_HEAD_BYTES = 64 << 10
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class _Found:
    """One tensor in one file."""

    file: int
    tensor: TensorEntry
    offset: tuple[int, ...]
    payload_offset: int


def plain_files(storage: Storage) -> list[Entry]:
    """Returns the safetensors files directly in the root of a storage.

    Raises:
        StorageError: The storage can't be listed.
    """
    return [e for e in storage.list() if e.key.endswith(".safetensors") and "/" not in e.key]


def plain_table(storage: Storage) -> ChunkTable:
    """Returns the chunk table of the safetensors files in the root of a storage.

    Unless a file states the global shape of a tensor, it is the extent of all its chunks, as in
    DCP's reader. If several files contain the same tensor and the index names one of them, only
    that file is used for it.

    Args:
        storage: Storage of the files.

    Raises:
        DamagedCheckpointError: A header is damaged, a file is truncated, a tensor has two dtypes
            or numbers of dimensions, or two files contain the same part of a tensor and no index
            selects one.
        UnsupportedValueError: A tensor has an unsupported dtype.
        StorageError: A file can't be read.
    """
    files = plain_files(storage)
    by_file: list[list[_Found]] = [[] for _ in files]

    def read(index: int) -> None:
        file = files[index]
        try:
            header = _read_header(storage, file)
            with collector_paused():
                by_file[index] = _tensors_of(index, header)
        except UnsupportedValueError as exc:
            exc.message = f"{file.key}: {exc.message}"
            raise
        except DamagedCheckpointError as exc:
            exc.key = exc.key or file.key
            raise

    run_tasks(range(len(files)), read, threads_for(storage, len(files)))
    found = [tensor for tensors in by_file for tensor in tensors]
    keys = [file.key for file in files]
    by_name: dict[str, list[_Found]] = {}
    for chunk in found:
        by_name.setdefault(chunk.tensor.name, []).append(chunk)
    shared = [name for name, own in by_name.items() if len(own) > 1]
    if shared:
        named = _named_by_index(storage)
        for name in shared:
            if (file_name := named.get(name)) is not None:
                own = [chunk for chunk in by_name[name] if keys[chunk.file] == file_name]
                by_name[name] = own or by_name[name]
    kept = {id(chunk) for own in by_name.values() for chunk in own}
    table = _table(keys, [chunk for chunk in found if id(chunk) in kept])
    check_table(table, files=False)
    _check_apart(table)
    return table


def _named_by_index(storage: Storage) -> dict[str, str]:
    """Returns the file of each tensor by the index; empty if there is no readable index."""
    try:
        data = storage.read(INDEX_NAME, 0, MAX_INDEX_BYTES + 1)
        found: Any = json.loads(data)["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, KeyMissingError):
        return {}


def _check_apart(table: ChunkTable) -> None:
    """Checks that no two chunks overlap.

    Raises:
        DamagedCheckpointError: Two chunks overlap.

    Complexity:
        That of `check_coverage` for the tensors with several chunks.
    """
    several = np.bincount(table.tensor, minlength=table.num_tensors)[table.tensor] > 1
    rows = np.flatnonzero(several & (table.payload_bytes > 0))
    tensors, region = np.unique(table.tensor[rows], return_inverse=True)
    shape = pad(table.shape[tensors], max(1, table.shape.shape[1]), 1)
    offset, size = widen(table.offset[rows], table.size[rows], shape.shape[1])
    for first, second in check_coverage(region, offset, size, shape).overlaps:
        one, other = int(rows[first]), int(rows[second])
        number = int(table.tensor[one])
        ndim = int(table.ndim[number])
        files = [table.files[int(table.file[row])] for row in (one, other)]
        held = box_text(table.offset[other], table.size[other], ndim)
        raise DamagedCheckpointError(
            f"expected each part of {table.names[number]!r} in one file, but {files[0]} and "
            f"{files[1]} overlap at {held}, and no {INDEX_NAME} says which one counts; move the "
            f"file away that is none of the checkpoint's",
            key=files[1],
        )


def _read_header(storage: Storage, file: Entry) -> SafetensorsHeader:
    num_bytes = min(_HEAD_BYTES, file.num_bytes)
    while True:
        data = storage.read(file.key, 0, num_bytes)
        try:
            with collector_paused():
                return parse_header(data, file.num_bytes)
        except NeedMoreBytes as exc:
            if exc.num_bytes > file.num_bytes or len(data) < num_bytes:
                expected = f"a safetensors header of {exc.num_bytes} bytes"
                raise damaged(expected, f"a file of {len(data)}", key=file.key) from exc
            num_bytes = exc.num_bytes


def _tensors_of(file: int, header: SafetensorsHeader) -> list[_Found]:
    offsets = saved_offsets(header.metadata)
    found = []
    for tensor in header.entries:
        offset = (0,) * len(tensor.size) if offsets is None else offsets.get(tensor.name)
        if offset is None or len(offset) != len(tensor.size):
            expected = f"an offset of {len(tensor.size)} dimensions for {tensor.name!r}"
            raise damaged(expected, str(offset), " in DCP_SHARDING_INFO")
        found.append(_Found(file, tensor, offset, header.data_offset + tensor.begin))
    return found


def _table(files: list[str], found: list[_Found]) -> ChunkTable:
    first: dict[str, _Found] = {}
    for chunk in found:
        known = first.setdefault(chunk.tensor.name, chunk)
        if (known.tensor.dtype, len(known.offset)) != (chunk.tensor.dtype, len(chunk.offset)):
            raise DamagedCheckpointError(
                f"expected one dtype and number of dimensions for {chunk.tensor.name!r}, found "
                f"{known.tensor.dtype} {known.tensor.size} in {files[known.file]} and "
                f"{chunk.tensor.dtype} {chunk.tensor.size} in {files[chunk.file]}; load them "
                f"separately",
                key=files[chunk.file],
            )
    rows = {name: row for row, name in enumerate(first)}
    dtypes = tuple(dict.fromkeys(chunk.tensor.dtype for chunk in first.values()))
    ndim = [len(chunk.offset) for chunk in first.values()]
    width = max(ndim, default=0)
    tensor = np.array([rows[chunk.tensor.name] for chunk in found], np.int32)
    offset = padded([chunk.offset for chunk in found], width, 0)
    size = padded([chunk.tensor.size for chunk in found], width, 1)
    shape = np.zeros((len(rows), width), np.int64)
    np.maximum.at(shape, tensor, offset + size)
    place = np.array([chunk.payload_offset for chunk in found], np.int64)
    length = np.array([chunk.tensor.end - chunk.tensor.begin for chunk in found], np.int64)
    return ChunkTable(
        names=tuple(rows),
        paths=(None,) * len(rows),
        dtypes=dtypes,
        files=tuple(files),
        kind=np.full(len(rows), Kind.TENSOR, np.int8),
        dtype=np.array([dtypes.index(chunk.tensor.dtype) for chunk in first.values()], np.int8),
        ndim=np.array(ndim, np.int8),
        shape=shape,
        requires_grad=np.zeros(len(rows), np.bool_),
        tensor=tensor,
        offset=offset,
        size=size,
        file=np.array([chunk.file for chunk in found], np.int32),
        item_offset=place,
        item_bytes=length,
        payload_offset=place,
        payload_bytes=length,
        block_bytes=np.zeros(len(found), np.int64),
        check_start=np.zeros(len(found) + 1, np.int64),
        checks=np.zeros(0, np.uint64),
    )
