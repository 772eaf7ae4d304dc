"""Checkpoints for tests that look at them, small or of any size, and ways to damage one."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.values import ChunkTable, offsets_of
from ray_dcp.format.manifest import FileEntry, Manifest, encode_record, record_key
from ray_dcp.format.table import encode_table

GOLDEN = Path(__file__).parents[1] / "golden"


def state(large: tuple[int, int] = (600, 500)) -> dict[str, Any]:
    """Returns tensors of many kinds, small and large, and two objects.

    Args:
        large: Shape of the largest.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "weight": torch.randn(37, 11, generator=generator),
            "large": torch.arange(large[0] * large[1], dtype=torch.int64).reshape(large),
            "half": torch.randn(5, 7, generator=generator).bfloat16(),
            "flag": torch.tensor(True),
            "empty": torch.zeros(0, 3),
            "complex": torch.randn(4, 2, generator=generator, dtype=torch.complex64),
            "bits": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        },
        "step": 10,
        "note[x]": {"text": "hello", "items": [1, 2]},
    }


def tensors() -> dict[str, torch.Tensor]:
    """Returns the tensors of `state` by FQN."""
    return {f"model.{name}": value for name, value in state()["model"].items()}


def save(path: Path, **options: Any) -> Path:
    """Saves `state` with ray_dcp as one process."""
    ray_dcp.save(state(), checkpoint_id=path, no_dist=True, options=ray_dcp.SaveOptions(**options))
    return path


def sharding_metadata(offsets: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Returns the `__metadata__` of a safetensors file of DCP, by the start of each chunk."""
    info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}


def save_stock(path: Path, values: dict[str, Any] | None = None) -> Path:
    """Saves values, by default `state`, with torch's own DCP as one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(values or state(), checkpoint_id=path, no_dist=True)
    return path


def data_file(path: Path) -> Path:
    """Returns the largest data file of a checkpoint."""
    return max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)


def payload_of(path: Path, name: str) -> tuple[Path, int, int]:
    """Returns the file that holds a tensor, and the first and last byte of its payload."""
    view = ray_dcp.open(path)
    row = view.table.tensor.tolist().index(view.names.index(name))
    start = int(view.table.payload_offset[row])
    file = path / view.table.files[view.table.file[row]]
    return file, start, start + int(view.table.payload_bytes[row]) - 1


def flip(file: Path, offset: int, mask: int = 1) -> None:
    """Changes bits of one byte in place."""
    data = bytearray(file.read_bytes())
    data[offset] ^= mask
    file.write_bytes(data)


def stock_load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Returns what stock DCP loads of the arrays of a state."""
    found = {
        name: torch.zeros(value.shape, dtype=torch.from_numpy(np.zeros(0, value.dtype)).dtype)
        for name, value in state.items()
        if isinstance(value, np.ndarray)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load(found, checkpoint_id=str(path), no_dist=True)
    return {name: tensor.numpy() for name, tensor in found.items()}


def check_stock(path: Path, state: dict[str, Any]) -> None:
    """Checks that stock DCP loads the arrays of a state."""
    for name, found in stock_load(path, state).items():
        np.testing.assert_array_equal(found, state[name], err_msg=name)


# --- of any size, made without saving ------------------------------------------------------------


ROW_BYTES = 4096


def large_table(
    num_tensors: int, parts: int, attempt: str, *, changed: int = 0, files: int = 8
) -> ChunkTable:
    """Returns a table, made without saving, of row-sharded tensors of one checksum block a chunk.

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


def place_table(path: Path, found: ChunkTable, attempt: str, *, created_s: float = 1e9) -> Path:
    """Writes table and manifest of a checkpoint, and data files of zeros with checksums."""
    path.mkdir(parents=True, exist_ok=True)
    files = tuple(_place_file(path / key, found, at) for at, key in enumerate(found.files))
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


def _place_file(path: Path, found: ChunkTable, at: int) -> FileEntry:
    """Writes a sparse data file, and the checksums of its chunks behind it."""
    own = found.file == at
    end = found.checks[own].astype("<u8").tobytes()
    with path.open("wb") as file:
        file.seek(int(found.payload_bytes[own].sum()))
        file.write(end)
    return FileEntry(path.name, path.stat().st_size, digest_bytes(end).hex())
