"""Vectorised operations on equal rows and runs of rows, which planning is built from.

Nothing here depends on the meaning of a row. *Runs* are described by their lengths:

    counts          2 0 3
    offsets_of      0 2 2 5
    within          0 1 | | 0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ray_dcp.core.values import Int64Array

_ODD = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


def group_rows(columns: Sequence[npt.NDArray[np.integer]]) -> tuple[Int64Array, Int64Array]:
    """Numbers the distinct rows in order of first appearance.

    Args:
        columns: At least one one-dimensional array of integers; all have the same length `n`.

    Returns:
        `(first int64[g], group int64[n])`: the first row of each group, ascending, and the group
        of every row. The result is exact: a hash finds candidates, and their values decide.

    Complexity:
        One sort of n 64-bit numbers.

    Examples:
        >>> first, group = group_rows([np.array([7, 8, 7]), np.array([1, 1, 1])])
        >>> first.tolist(), group.tolist()
        ([0, 1], [0, 1, 0])
    """
    code = _hashed(columns)
    order = np.argsort(code, kind="stable")
    first, group = _numbered(order, [code])
    if all(np.array_equal(column, column[first][group]) for column in columns):
        return first, group
    return _numbered(np.lexsort(tuple(columns)), columns)


def _hashed(columns: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.uint64]:
    code = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        code ^= column.astype(np.int64).view(np.uint64)
        code *= np.uint64(_ODD)
        code ^= code >> np.uint64(29)
        code *= np.uint64(_MIX)
        code ^= code >> np.uint64(32)
    return code


def _numbered(
    order: npt.NDArray[np.int64], columns: Sequence[npt.NDArray[np.integer]]
) -> tuple[Int64Array, Int64Array]:
    """Groups equal neighbours in a stable sorted order."""
    count = len(order)
    fresh = np.zeros(count, dtype=bool)
    fresh[:1] = True
    for column in columns:
        ordered = column[order]
        fresh[1:] |= ordered[1:] != ordered[:-1]
    first = order[fresh]
    by_appearance = np.argsort(first)
    rank = np.empty(len(first), dtype=np.int64)
    rank[by_appearance] = np.arange(len(first))
    group = np.empty(count, dtype=np.int64)
    group[order] = rank[np.cumsum(fresh) - 1]
    return first[by_appearance], group


def first_rows(code: npt.NDArray[np.integer], count: int) -> Int64Array:
    """Returns the first row that holds each of the numbers `0..count-1`; -1 if no row does."""
    first = np.full(count, -1, dtype=np.int64)
    # Careful: of repeated indices, numpy keeps the last assignment, so go backwards.
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1, dtype=np.int64)
    return first


def offsets_of(counts: npt.NDArray[np.integer]) -> Int64Array:
    """Returns where runs of these lengths start, and where the last one ends: int64[n + 1]."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def run_of(ordered: npt.NDArray[np.integer], value: int) -> tuple[int, int]:
    """Returns the start and the end of a value's run in an ascending array.

    Examples:
        >>> run_of(np.array([1, 1, 4], np.int32), 1), run_of(np.array([1, 1, 4], np.int32), 3)
        ((0, 2), (2, 2))
    """
    # Careful: numpy converts the whole array if the values to find have another dtype.
    wanted = np.array([value, value + 1], dtype=ordered.dtype)
    start, stop = np.searchsorted(ordered, wanted).tolist()
    return start, stop


def within(counts: npt.NDArray[np.integer]) -> Int64Array:
    """Returns the position of every element in its run.

    Examples:
        >>> within(np.array([2, 0, 3])).tolist()
        [0, 1, 0, 1, 2]
    """
    starts = offsets_of(counts)
    return np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], counts)


def running_max(values: Int64Array, group: Int64Array) -> Int64Array:
    """Returns, for each row, the greatest value of its group up to this row.

    Args:
        values: int64[n], 0 or more, n at least 1.
        group: int64[n], ascending, 0 or more.
    """
    span = int(values.max()) + 1
    if (int(group[-1]) + 1) * span < 1 << 62:
        result: Int64Array = np.maximum.accumulate(values + group * span) - group * span
        return result
    distinct, code = np.unique(values, return_inverse=True)
    code = np.maximum.accumulate(code + group * len(distinct)) - group * len(distinct)
    return np.asarray(distinct[code], dtype=np.int64)
