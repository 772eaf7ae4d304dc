"""Between padded numpy arrays and Arrow's lists of different lengths, for the chunk table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.checksums import digest_many
from ray_dcp.plan.arrow_arrays import (
    ArrowArray,
    from_numpy,
    from_texts,
    is_missing,
    texts,
    to_numpy,
)
from ray_dcp.plan.values import BoolArray, ChunkTable, Int8Array, Int64Array, IntKey, Path

__all__ = [
    "ArrowArray",
    "chunkless",
    "damaged",
    "digests_of",
    "int_column",
    "padded",
    "paths_of",
    "paths_to_arrow",
    "ragged",
]

_MAX_INDEX_CHARS = 20

pa: Any = pyarrow


def damaged(expected: str, found: str) -> DamagedCheckpointError:
    """Returns the error for a chunk table that is not as it must be."""
    return DamagedCheckpointError(
        f"Expected {expected} in the chunk table, found {found}; it is damaged, load an "
        "earlier step"
    )


def ragged(
    rows: Int64Array, ndim: npt.NDArray[np.integer[Any]], null: BoolArray | None = None
) -> ArrowArray:
    """Returns the first `ndim` numbers of each row as a list.

    Args:
        rows: int64[n, D].
        ndim: int[n].
        null: bool[n], rows that have no list at all.
    """
    used = np.arange(rows.shape[1]) < np.asarray(ndim)[:, None]
    starts = np.concatenate([[0], np.cumsum(ndim, dtype=np.int64)])
    if starts[-1] >= 1 << 31:
        raise damaged("fewer than 2**31 dimensions over all chunks", str(starts[-1]))
    return pa.ListArray.from_arrays(
        from_numpy(starts.astype(np.int32)),
        from_numpy(rows[used].astype(np.int64, copy=False)),
        mask=None if null is None else from_numpy(null),
    )


def padded(column: ArrowArray, width: int, blank: int) -> tuple[Int8Array, Int64Array]:
    """Returns the lengths of lists, and the lists padded to rows of one width.

    Args:
        column: Lists of numbers.
        width: Length of the rows, at most 127.
        blank: What to pad with.

    Returns:
        int8[n] and int64[n, width].

    Raises:
        DamagedCheckpointError: A list is longer than `width`, or it or a number is missing.
    """
    values = column.flatten()
    if column.null_count or values.null_count:
        raise damaged("numbers in every list", "missing ones")
    lengths = to_numpy(column.value_lengths())
    if len(lengths) and int(lengths.max()) > width:
        raise damaged(f"at most {width} dimensions", str(int(lengths.max())))
    if len(lengths) and int(lengths.min()) == width:
        # Why: nothing to pad, as in most checkpoints, and a tenth of the time.
        rows = to_numpy(values).reshape(len(lengths), width).astype(np.int64, copy=False)
    else:
        rows = np.full((len(lengths), width), blank, dtype=np.int64)
        rows[np.arange(width) < lengths[:, None]] = to_numpy(values)
    return lengths.astype(np.int8), rows


def int_column(column: ArrowArray, dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    """Returns a column of numbers as an array, Arrow's own memory where it can.

    Raises:
        DamagedCheckpointError: A number is missing.
    """
    if column.null_count:
        raise damaged("a number in every row", "missing ones")
    return to_numpy(column).astype(dtype, copy=False)


def paths_to_arrow(paths: Sequence[Path | None]) -> tuple[ArrowArray, ArrowArray]:
    """Returns paths as lists of texts, and which of their components are list indices.

    Of a component that is the number of a mapping's key that is missing.

    Args:
        paths: Of str and int; None stays a missing list.
    """
    missing = np.array([path is None for path in paths], dtype=bool)
    parts: list[Any] = list(chain.from_iterable(path for path in paths if path is not None))
    kinds = list(map(type, parts))
    is_index = np.array([kind is int for kind in kinds], dtype=bool)
    words = list(map(str, parts)) if is_index.any() else parts
    is_key = np.array([kind is IntKey for kind in kinds]) if IntKey in kinds else None
    lengths = [0 if path is None else len(path) for path in paths]
    starts = from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = from_numpy(missing) if missing.any() else None
    return (
        pa.ListArray.from_arrays(starts, from_texts(words), mask=mask),
        pa.ListArray.from_arrays(starts, from_numpy(is_index, null=is_key), mask=mask),
    )


def paths_of(words: ArrowArray, is_index: ArrowArray) -> tuple[Path | None, ...]:
    """Returns the paths that `paths_to_arrow` wrote.

    Raises:
        DamagedCheckpointError: The two columns do not fit each other, or an index is no number.
    """
    if not (words.is_valid().equals(is_index.is_valid()) and _lengths(words) == _lengths(is_index)):
        raise damaged("path_is_index for every component of path", "something else")
    parts, marks = words.flatten(), is_index.flatten()
    if parts.null_count:
        raise damaged("a text for every component of path", "none")
    components: list[Any] = texts(parts)
    for position in np.flatnonzero(to_numpy(marks, blank=False)).tolist():
        components[position] = _index(str(components[position]))
    if marks.null_count:
        for position in np.flatnonzero(is_missing(marks)).tolist():
            components[position] = IntKey(_index(str(components[position])))
    found: list[Path | None] = []
    start = 0
    for length in _lengths(words):
        if length is None:
            found.append(None)
            continue
        found.append(tuple(components[start : start + length]))
        start += length
    return tuple(found)


def chunkless(table: ChunkTable) -> Int64Array:
    """Returns the tensors that have no chunk."""
    counts = np.bincount(table.tensor, minlength=table.num_tensors)
    return np.flatnonzero(counts == 0)


def digests_of(table: ChunkTable) -> list[bytes | None]:
    """Returns the digest of each chunk's block checksums; None where it has none."""
    if not len(table.checks):
        return [None] * table.num_chunks
    digests = digest_many(table.checks, table.check_start)
    if (table.block_bytes > 0).all():
        return [*digests]
    return [
        found if block_bytes > 0 else None
        for found, block_bytes in zip(digests, table.block_bytes.tolist(), strict=True)
    ]


def _lengths(column: ArrowArray) -> list[int | None]:
    lengths: list[int | None] = column.value_lengths().to_pylist()
    return lengths


def _index(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isdecimal() or len(text) > _MAX_INDEX_CHARS or str(int(text)) != text:
        raise damaged("a list index in path", repr(text[:50]))
    return int(text)
