"""Columns of whole numbers as a few bytes: ranks write alike, place by place of their files.

Rows come in runs, the chunks of a file each. They are packed place by place: the first of each run,
then the second of each, as differences from one to the next. Where every rank of a mesh has a slab
of each tensor these are the same again and again, and zstd leaves less than a byte of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from ray_dcp.core.grouping import within
from ray_dcp.core.values import Int64Array

pa: Any = pyarrow

MOST_RATIO = 256
"""Most bytes that are made of a packed one. Who packs better than that adds bytes to it: so a short
file can't take much memory, and no table that was written is refused."""

_SKIPPED = 0x184D2A50
"""Magic of a frame without content. Source: RFC 8878, 3.1.2."""
_FRAME_BYTES = 8
_LEVEL = 1


def pack(columns: Sequence[npt.NDArray[np.integer[Any]]], runs: Int64Array) -> bytes:
    """Returns columns of one length, compressed.

    Args:
        columns: Of 64 bits at most each.
        runs: int64[f], how long the runs of rows are; together as long as the columns.

    Example:
        >>> runs = np.array([2, 1])
        >>> data = pack([np.array([7, 8, 9])], runs)
        >>> [column.tolist() for column in unpack(data, 1, runs)]
        [[7, 8, 9]]
    """
    order = _by_place(runs)
    steps = [np.diff(column[order].astype(np.int64), prepend=0) for column in columns]
    return pack_bytes(b"".join(np.ascontiguousarray(step, "<i8").data for step in steps))


def unpack(data: bytes | memoryview, num_columns: int, runs: Int64Array) -> list[Int64Array]:
    """Returns the columns that `pack` was given.

    Args:
        data: What it gave.
        num_columns: How many there are.
        runs: As there.

    Raises:
        ValueError: They are no such columns.
    """
    order = _by_place(runs)
    raw = unpack_bytes(data, 8 * num_columns * len(order))
    found = []
    for steps in np.frombuffer(raw, "<i8").reshape(num_columns, len(order)):
        column = np.empty(len(order), dtype=np.int64)
        column[order] = np.cumsum(steps)
        found.append(column)
    return found


def pack_bytes(data: bytes) -> bytes:
    """Returns bytes compressed, at most to the `MOST_RATIO`th part."""
    packed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(data, asbytes=True)
    lack = -(-len(data) // MOST_RATIO) - len(packed)
    if lack <= 0:
        return packed
    rest = max(0, lack - _FRAME_BYTES)
    return packed + _SKIPPED.to_bytes(4, "little") + rest.to_bytes(4, "little") + bytes(rest)


def unpack_bytes(data: bytes | memoryview, num_bytes: int) -> memoryview:
    """Returns the bytes that `pack_bytes` was given.

    Args:
        data: What it gave.
        num_bytes: How many there are.

    Raises:
        ValueError: They are others; nothing is made of more than `MOST_RATIO` times as many.
    """
    if not 0 <= num_bytes <= MOST_RATIO * len(data):
        raise ValueError(f"{len(data)} bytes can't hold {num_bytes}")
    try:
        return memoryview(pa.Codec("zstd").decompress(data, decompressed_size=num_bytes))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{len(data)} bytes do not hold {num_bytes}: {error}") from error


def _by_place(runs: Int64Array) -> Int64Array:
    """Returns the rows by place in their run, of each place in their order."""
    place = within(runs)
    small = int(runs.max(initial=0)) <= np.iinfo(np.uint16).max
    # Why: of numbers of two bytes numpy sorts ten times as fast.
    return np.argsort(place.astype(np.uint16) if small else place, kind="stable")
