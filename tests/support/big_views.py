"""Checkpoints and runs of any size to look at, made without saving: tables, records, no data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.values import ChunkTable, offsets_of
from ray_dcp.format.manifest import FileEntry, Manifest, encode_record, record_key
from ray_dcp.format.table import encode_table

ROW_BYTES = 4096


def table(
    num_tensors: int, parts: int, attempt: str, *, changed: int = 0, files: int = 8
) -> ChunkTable:
    """Returns a table of row-sharded tensors of one checksum block a chunk.

    Args:
        num_tensors: How many.
        parts: Chunks of each.
        attempt: In the names of files.
        changed: The first so many tensors have other checksums than with 0.
        files: How many.
    """
    count = num_tensors * parts
    tensor = np.repeat(np.arange(num_tensors, dtype=np.int32), parts)
    part = np.tile(np.arange(parts, dtype=np.int64), num_tensors)
    file = (part * files // parts).astype(np.int32)
    order = np.lexsort((tensor, file))
    tensor, part, file = tensor[order], part[order], file[order]
    place = np.zeros(count, np.int64)
    for one in range(files):
        own = np.flatnonzero(file == one)
        place[own] = np.arange(len(own)) * ROW_BYTES
    checks = (tensor.astype(np.uint64) << np.uint64(32)) + part.astype(np.uint64)
    checks[tensor < changed] += np.uint64(1 << 62)
    num_bytes = np.full(count, ROW_BYTES, np.int64)
    return ChunkTable(
        names=tuple(f"model.layers.{i // 8}.weight_{i % 8}" for i in range(num_tensors)),
        paths=tuple(("model", f"layers.{i // 8}.weight_{i % 8}") for i in range(num_tensors)),
        dtypes=("float32",),
        files=tuple(f"__{i}_0.{attempt}.distcp" for i in range(files)),
        kind=np.zeros(num_tensors, np.int8),
        dtype=np.zeros(num_tensors, np.int8),
        ndim=np.full(num_tensors, 2, np.int8),
        shape=np.tile(np.array([parts, ROW_BYTES // 4], np.int64), (num_tensors, 1)),
        requires_grad=np.ones(num_tensors, np.bool_),
        tensor=tensor,
        offset=np.stack([part, np.zeros(count, np.int64)], axis=1),
        size=np.tile(np.array([1, ROW_BYTES // 4], np.int64), (count, 1)),
        file=file,
        item_offset=place,
        item_bytes=num_bytes,
        payload_offset=place,
        payload_bytes=num_bytes,
        block_bytes=num_bytes,
        check_start=offsets_of(np.ones(count, np.int64)),
        checks=checks,
    )


def checkpoint(path: Path, found: ChunkTable, attempt: str, *, created_s: float = 1e9) -> Path:
    """Writes table and manifest of a checkpoint, and data files of zeros with checksums."""
    path.mkdir(parents=True, exist_ok=True)
    files = tuple(_file(path / key, found, at) for at, key in enumerate(found.files))
    none = np.zeros(found.num_chunks + 1, np.int64)
    data = encode_table(replace(found, check_start=none, checks=np.zeros(0, np.uint64)))
    entry = FileEntry(f"chunks.{attempt}.table", len(data), digest_bytes(data).hex())
    (path / entry.key).write_bytes(data)
    manifest = Manifest(
        attempt=attempt, epoch=1, world_size=len(found.files), created_s=created_s, files=files,
        table=entry, metadata=None, replaced_metadata=None, plan_digest="0" * 64,
        num_tensors=found.num_tensors, num_chunks=found.num_chunks,
        payload_bytes=int(found.payload_bytes.sum()), previous_slot=0,
    )  # fmt: skip
    (path / record_key(1)).write_bytes(encode_record(manifest))
    return path


def _file(path: Path, found: ChunkTable, at: int) -> FileEntry:
    """Writes a sparse data file, and the checksums of its chunks behind it."""
    own = found.file == at
    end = found.checks[own].astype("<u8").tobytes()
    with path.open("wb") as file:
        file.seek(int(found.payload_bytes[own].sum()))
        file.write(end)
    return FileEntry(path.name, path.stat().st_size, digest_bytes(end).hex())
