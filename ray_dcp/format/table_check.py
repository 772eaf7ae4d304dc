"""Checks that a chunk table does not contradict itself, before it is used to read.

Whether its chunks cover their tensors is checked by `planning.coverage`.
"""

from __future__ import annotations

import numpy as np

from ray_dcp.core.checksums import num_blocks_many
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, Kind
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.names import check_file_keys

_MAX_VOLUME = float(1 << 62)


def damaged(expected: str, found: str) -> DamagedCheckpointError:
    """Returns the error for an invalid chunk table."""
    return DamagedCheckpointError(
        f"Expected {expected} in the chunk table, found {found}; it is damaged, load an "
        "earlier step"
    )


def check_table(table: ChunkTable, *, files: bool = True) -> None:
    """Checks a table's lengths, indices, boxes, places and numbers of checksums.

    A planned table passes too: it may lack all checksums and the places of deferred chunks.

    Args:
        table: The table; not changed.
        files: Also check that file names stay in the checkpoint's directory.

    Raises:
        DamagedCheckpointError: The table contradicts itself; the message names the first chunk or
            tensor at fault.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
    """
    _check_lengths(table)
    if files:
        check_file_keys(table.files)
    _check_tensors(table)
    _check_chunks(table)
    _check_places(table)
    _check_checksums(table)


def volumes(size: Int64Array) -> Int64Array:
    """Returns the volume of each box; -1 if a length is negative or the volume is beyond 2**62.

    Args:
        size: int64[n, D], lengths of each box.
    """
    rough, found = np.ones(len(size)), np.ones(len(size), np.int64)
    bad = np.zeros(len(size), np.bool_)
    # Why column by column: numpy takes five times as long along rows of two or three numbers.
    with np.errstate(over="ignore"):
        for dim in range(size.shape[1]):
            rough *= size[:, dim]
            found *= size[:, dim]
            bad |= size[:, dim] < 0
    return np.where(bad | (rough > _MAX_VOLUME), -1, found)


def _check_lengths(table: ChunkTable) -> None:
    per_tensor = (table.paths, table.kind, table.dtype, table.ndim, table.requires_grad)
    per_chunk = (
        table.file, table.item_offset, table.item_bytes, table.payload_offset,
        table.payload_bytes, table.block_bytes,
    )  # fmt: skip
    width = table.shape.shape[1:]
    boxes = (table.offset.shape, table.size.shape)
    if (
        any(len(column) != table.num_tensors for column in per_tensor)
        or any(len(column) != table.num_chunks for column in per_chunk)
        or table.shape.shape != (table.num_tensors, *width)
        or boxes != ((table.num_chunks, *width),) * 2
        or len(width) != 1
    ):
        raise damaged("columns of equal length", "different lengths")
    if len(set(table.names)) != table.num_tensors:
        raise damaged("each FQN once", "one twice")
    if len(set(table.files)) != len(table.files):
        raise damaged("each file once", "one twice")


def _check_tensors(table: ChunkTable) -> None:
    is_object = table.kind == Kind.OBJECT
    known = np.array([dtype in ITEMSIZE for dtype in table.dtypes] + [False], dtype=bool)
    in_range = (table.dtype >= -1) & (table.dtype < len(table.dtypes))
    dtype_fits = in_range & ((table.dtype >= 0) | is_object)
    # Careful: index -1 selects the False that was appended.
    plain = known[np.where(in_range, table.dtype, -1)] | (table.kind != Kind.TENSOR)
    width = table.shape.shape[1]
    padding = np.arange(width) >= table.ndim[:, None]
    _require(table, "a known kind", np.isin(table.kind, [int(kind) for kind in Kind]))
    _require(table, "a dtype of the vocabulary", dtype_fits)
    _require(table, "a dtype that has raw bytes", plain)
    _require(table, f"0 to {width} dimensions", (table.ndim >= 0) & (table.ndim <= width))
    _require(table, "a global shape", ((table.shape >= 0) & ((table.shape == 1) | ~padding)).all(1))
    _require(table, "less than 2**62 elements", volumes(table.shape) >= 0)


def _check_chunks(table: ChunkTable) -> None:
    _require_chunk(table, "a tensor", (table.tensor >= 0) & (table.tensor < table.num_tensors))
    _require_chunk(table, "a file", (table.file >= 0) & (table.file < len(table.files)))
    ndim = table.ndim[table.tensor]
    fits = np.ones(table.num_chunks, np.bool_)
    for dim in range(table.shape.shape[1]):
        shape = table.shape[:, dim][table.tensor]
        offset, size = table.offset[:, dim], table.size[:, dim]
        # Why not offset + size <= shape: the sum may overflow.
        fits &= (offset >= 0) & (size >= 0) & (offset <= shape - size)
        fits &= (dim < ndim) | ((offset == 0) & (size == 1))
    _require_chunk(table, "a box inside its tensor", fits)


def _check_places(table: ChunkTable) -> None:
    placed = table.item_offset >= 0
    numbers = (table.item_offset, table.item_bytes, table.payload_offset, table.payload_bytes)
    _require_chunk(table, "a place in its file", np.minimum.reduce(numbers) >= -1)
    whole = ~placed | ((table.item_bytes >= 0) & (table.payload_bytes >= 0))
    ends = table.item_offset <= np.iinfo(np.int64).max - np.maximum(table.item_bytes, 0)
    _require_chunk(table, "a length", whole & ends)
    told = placed & (table.payload_offset >= 0)
    skipped = table.payload_offset - table.item_offset
    inside = (skipped >= 0) & (table.payload_bytes <= table.item_bytes - skipped)
    _require_chunk(table, "its raw bytes inside its item", ~told | inside)
    plain = table.kind[table.tensor] == Kind.TENSOR
    itemsizes = np.array([ITEMSIZE.get(dtype, 0) for dtype in table.dtypes] + [0], dtype=np.int64)
    expected = volumes(table.size) * itemsizes[table.dtype[table.tensor]]
    fits = ~plain | (table.payload_bytes == expected)
    _require_chunk(table, "as many raw bytes as its box", fits)


def _check_checksums(table: ChunkTable) -> None:
    starts = table.check_start
    if (
        len(starts) != table.num_chunks + 1
        or int(starts[0]) != 0
        or int(starts[-1]) != len(table.checks)
    ):
        raise damaged(f"{len(table.checks)} checksums over all chunks", "another sum")
    _require_chunk(table, "blocks of 0 or more bytes", table.block_bytes >= 0)
    if len(table.checks):
        expected = num_blocks_many(table.payload_bytes, table.block_bytes)
        _require_chunk(table, "a checksum for every block", np.diff(starts) == expected)
    elif starts.any():
        raise damaged("no checksums", "some")


def _require(table: ChunkTable, expected: str, fits: BoolArray) -> None:
    if not fits.all():
        raise damaged(f"{expected} for {table.names[int(np.argmin(fits))]!r}", "none that fits")


def _require_chunk(table: ChunkTable, expected: str, fits: BoolArray) -> None:
    if fits.all():
        return
    row = int(np.argmin(fits))
    tensor = int(table.tensor[row])
    name = table.names[tensor] if 0 <= tensor < table.num_tensors else "?"
    raise damaged(f"{expected} for chunk {row} of {name!r}", "none that fits")
