"""Arithmetic on boxes: volumes, intersections, strides, and how a box is written in messages.

A box is an offset and a size in every dimension, as two int64 rows of width `D` (padding as told
in `ray_dcp.plan.values`). Everything works on all rows at once. Whether boxes together cover
something is decided in `coverage`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_dcp.plan.values import BoolArray, Int64Array

__all__ = ["box_text", "contains", "intersect", "pad", "strides", "volume", "widen"]


def volume(size: Int64Array) -> Int64Array:
    """Returns the number of elements of each box.

    Args:
        size: int64[n, D], lengths; padding counts 1.

    Returns:
        int64[n].

    Example:
        >>> volume(np.array([[2, 3], [4, 0], [1, 1]]))
        array([6, 0, 1])
    """
    # Why column by column: along rows of two or three numbers numpy takes five times as long.
    result = np.ones(len(size), dtype=np.int64)
    for dim in range(size.shape[1]):
        result *= size[:, dim]
    return result


def intersect(
    offset_a: Int64Array, size_a: Int64Array, offset_b: Int64Array, size_b: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Returns what box `a[i]` and box `b[i]` have in common, for every row.

    Args:
        offset_a: int64[n, D].
        size_a: int64[n, D].
        offset_b: int64[n, D], or anything that broadcasts to it.
        size_b: As `offset_b`.

    Returns:
        `(offset int64[n, D], size int64[n, D], nonempty bool[n])`; size is 0 in a dimension where
        the boxes do not meet.

    Example:
        >>> o, s, full = intersect(*(np.array([[v]]) for v in (0, 4, 2, 4)))
        >>> o.item(), s.item(), full.item()
        (2, 2, True)
    """
    low = np.maximum(offset_a, offset_b)
    size = np.minimum(offset_a + size_a, offset_b + size_b) - low
    np.maximum(size, 0, out=size)
    return low, size, np.asarray((size > 0).all(axis=1))


def contains(
    outer_offset: Int64Array, outer_size: Int64Array, offset: Int64Array, size: Int64Array
) -> BoolArray:
    """Tells for every row whether the box lies within the outer box.

    Args:
        outer_offset: int64[n, D].
        outer_size: int64[n, D].
        offset: int64[n, D].
        size: int64[n, D]; negative lengths lie nowhere.

    Returns:
        bool[n]. A box of volume 0 must be within the bounds as well, its end included.
    """
    found = np.ones(len(size), dtype=bool)
    for dim in range(size.shape[1]):
        low, length = offset[:, dim], size[:, dim]
        end = outer_offset[:, dim] + outer_size[:, dim]
        found &= (low >= outer_offset[:, dim]) & (length >= 0) & (low + length <= end)
    return found


def strides(size: Int64Array) -> Int64Array:
    """Returns the C-order strides of boxes, in elements.

    Args:
        size: int64[n, D].

    Returns:
        int64[n, D]; the last column is 1.

    Example:
        >>> strides(np.array([[2, 3, 4]]))
        array([[12,  4,  1]])
    """
    result = np.ones_like(size)
    for dim in range(size.shape[1] - 2, -1, -1):
        np.multiply(result[:, dim + 1], size[:, dim + 1], out=result[:, dim])
    return result


def pad(array: Int64Array, width: int, fill: int) -> Int64Array:
    """Returns the rows widened to `width` columns.

    Args:
        array: int64[n, D] with `D <= width`. Returned itself when it is that wide already.
        width: Columns of the result.
        fill: 0 for offsets, 1 for sizes and shapes.
    """
    missing = width - array.shape[1]
    if missing == 0:
        return array
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)


def widen(offset: Int64Array, size: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
    """Returns offsets and sizes padded to `width` columns."""
    return pad(offset, width, 0), pad(size, width, 1)


def box_text(
    offset: Int64Array | Sequence[int], size: Int64Array | Sequence[int], ndim: int
) -> str:
    """Returns a box as it is written in messages, as slices of the global tensor.

    Args:
        offset: `D` numbers.
        size: `D` numbers.
        ndim: How many of them count.

    Example:
        >>> box_text([0, 4, 0], [2, 4, 1], 2)
        '[0:2, 4:8]'
    """
    parts = (f"{int(o)}:{int(o) + int(s)}" for o, s in zip(offset[:ndim], size[:ndim], strict=True))
    return f"[{', '.join(parts)}]"
