"""Compresses columns of integers whose rows repeat from file to file.

Rows come in runs, each the chunks of one file. They are packed by their place in the run: the first
row of each run, then the second of each, as differences from one to the next:

    runs     a0 a1 a2 | b0 b1 | c0 c1 c2
    packed   a0 b0 c0   a1 b1 c1   a2 c2      as a0, b0 - a0, c0 - b0, ...

If every rank of a mesh has a slab of each tensor, these differences repeat, and zstd needs less
than a byte per row.

*Trust*: packed bytes may be forged. Unpacking takes at most a fixed multiple of their length in
memory, and its caller states the number of columns and their dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from ray_dcp.core.values import Int64Array, within

pa: Any = pyarrow

Runs = npt.NDArray[np.integer[Any]]
Column = Runs | npt.NDArray[np.bool_]

MOST_RATIO = 160
"""Most bytes that one packed byte may unpack to. Better compressed data is padded to this ratio: so
a short file can't take much memory, and everything that was packed can be unpacked."""

MOST_TEXT_RATIO = 8
"""The same limit for JSON text. Why lower: the objects made of it take more memory than the
text."""

_SKIPPED = 0x184D2A50
"""Magic number of a frame without content. Source: RFC 8878, 3.1.2."""
_FRAME_BYTES = 8
_LEVEL = 1
_TAIL = Struct("<QQQ")
"""Lengths of the packed text, of the text, and of the whole record."""


def pack(columns: Sequence[Column], runs: Runs) -> bytes:
    """Compresses columns of equal length.

    Args:
        columns: At least one; elements have at most 64 bits.
        runs: Lengths of the runs of rows; their sum is the length of the columns.

    Examples:
        >>> data = pack([np.array([7, 8, 9]), np.array([True, False, True])], np.array([2, 1]))
        >>> [column.tolist() for column in unpack(data, [np.int8, np.bool_], np.array([2, 1]))]
        [[7, 8, 9], [True, False, True]]
    """
    order = _by_place(runs)
    steps = [np.diff(column[order].astype(np.int64), prepend=0) for column in columns]
    return pack_bytes(b"".join(np.ascontiguousarray(step, "<i8").data for step in steps))


def unpack(
    data: bytes | memoryview, dtypes: Sequence[npt.DTypeLike], runs: Runs
) -> list[npt.NDArray[Any]]:
    """Returns the columns that `pack` was given.

    Args:
        data: The result of `pack`.
        dtypes: The dtype of each column.
        runs: See `pack`.

    Raises:
        ValueError: The bytes are not such columns.
    """
    num_bytes = 8 * len(dtypes) * float(runs.sum(dtype=np.float64))
    if (runs < 0).any() or num_bytes > MOST_RATIO * len(data):
        raise ValueError(f"{len(data)} bytes can't hold {len(dtypes)} columns of such runs")
    order = _by_place(runs)
    raw = unpack_bytes(data, 8 * len(dtypes) * len(order))
    found = []
    rows = np.frombuffer(raw, "<i8").reshape(len(dtypes), len(order))
    for dtype, steps in zip(dtypes, rows, strict=True):
        numbers = steps.cumsum()
        there = numbers.astype(dtype)
        if (there.astype(np.int64) != numbers).any():
            raise ValueError(f"numbers that {there.dtype} does not have")
        column = np.empty_like(there)
        column[order] = there
        found.append(column)
    return found


def pack_record(fields: Mapping[str, Any], frames: Sequence[bytes]) -> bytes:
    """Returns a record of a JSON object and packed columns, for `unpack_record`.

    Args:
        fields: The JSON object: names and counts.
        frames: Results of `pack`.
    """
    text = json.dumps([fields, list(map(len, frames))]).encode()
    packed = pack_bytes(text, MOST_TEXT_RATIO)
    tail = _TAIL.pack(len(packed), len(text), sum(map(len, frames)) + len(packed) + _TAIL.size)
    return b"".join([*frames, packed, tail])


def record_bytes(data: bytes | memoryview) -> int:
    """Returns the length of the record at the end of the given bytes.

    Raises:
        ValueError: The bytes don't end with a record.
    """
    num_bytes = int.from_bytes(data[-8:], "little")
    if not _TAIL.size <= num_bytes <= len(data):
        raise ValueError(f"expected a record at the end of {len(data)} bytes")
    return num_bytes


def unpack_record(data: bytes | memoryview) -> tuple[dict[str, Any], list[memoryview]]:
    """Returns the arguments of `pack_record`: the JSON object and the packed columns.

    Raises:
        ValueError: The bytes are not a record.
    """
    if record_bytes(data) != len(data):
        raise ValueError(f"expected a record of {len(data)} bytes, found another length")
    view = memoryview(data)
    packed, num_chars, _ = _TAIL.unpack(view[-_TAIL.size :])
    end = len(view) - _TAIL.size
    if packed > end:
        raise ValueError(f"expected at most {end} bytes of text, found {packed}")
    text = unpack_bytes(view[end - packed : end], num_chars, MOST_TEXT_RATIO)
    try:
        fields, lengths = json.loads(bytes(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected fields and lengths: {error}") from error
    whole = isinstance(lengths, list) and all(type(one) is int and one >= 0 for one in lengths)
    if not isinstance(fields, dict) or not whole or sum(lengths) != end - packed:
        raise ValueError("expected fields, and the lengths of all columns")
    starts = [0, *accumulate(lengths)]
    return fields, [view[low:high] for low, high in pairwise(starts)]


def pack_bytes(data: bytes, most_ratio: int = MOST_RATIO) -> bytes:
    """Compresses bytes, at most by the factor `most_ratio`."""
    packed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(data, asbytes=True)
    lack = -(-len(data) // most_ratio) - len(packed)
    if lack <= 0:
        return packed
    rest = max(0, lack - _FRAME_BYTES)
    return packed + _SKIPPED.to_bytes(4, "little") + rest.to_bytes(4, "little") + bytes(rest)


def unpack_bytes(
    data: bytes | memoryview, num_bytes: int, most_ratio: int = MOST_RATIO
) -> memoryview:
    """Returns the bytes that `pack_bytes` was called on.

    Args:
        data: The result of `pack_bytes`.
        num_bytes: Number of bytes expected.
        most_ratio: See `pack_bytes`.

    Raises:
        ValueError: The data is damaged, or unpacks to another number of bytes.
    """
    if not 0 <= num_bytes <= most_ratio * len(data):
        raise ValueError(f"{len(data)} bytes can't hold {num_bytes}")
    try:
        return memoryview(pa.Codec("zstd").decompress(data, decompressed_size=num_bytes))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{len(data)} bytes do not hold {num_bytes}: {error}") from error


def _by_place(runs: Runs) -> Int64Array:
    """Returns the rows sorted by place in their run; rows of equal place stay in order."""
    place = within(runs)
    small = len(runs) == 0 or int(runs.max()) <= np.iinfo(np.uint16).max
    # Why uint16: numpy sorts numbers of two bytes ten times as fast.
    return np.argsort(place.astype(np.uint16) if small else place, kind="stable")
