"""Which bytes of a stored chunk an intersection needs: extents, checksum blocks, slabs, reads.

A chunk's bytes are the C-order bytes of its box, counted from 0 at the chunk's first raw byte
("chunk-local"). Finding the intersections is `reading`'s part; nothing here opens a file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.boxes import strides, volume
from ray_dcp.plan.grouping import running_max
from ray_dcp.plan.values import BoolArray, Int32Array, Int64Array

__all__ = [
    "Slab",
    "affordable_gap",
    "block_ranges",
    "byte_runs",
    "coalesce",
    "needed_blocks",
    "slabs",
]


@dataclass(frozen=True, eq=False)
class Slab:
    """A part of an intersection that is read and copied at once.

    Attributes:
        offset: int64[D], where it starts in the global tensor.
        size: int64[D], lengths.
        low: First byte that it needs, chunk-local.
        high: Behind the last byte that it needs.
    """

    offset: Int64Array
    size: Int64Array
    low: int
    high: int


def byte_runs(
    box_offset: Int64Array,
    box_size: Int64Array,
    offset: Int64Array,
    size: Int64Array,
    itemsize: Int64Array,
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Returns the extent of each intersection in the C-order bytes of a box that holds it.

    Works for both sides of a read: `box` is the chunk's box, or the wanted (target) box.

    Args:
        box_offset: int64[p, D], the box whose bytes are counted, in global coordinates.
        box_size: int64[p, D].
        offset: int64[p, D], the intersection, in global coordinates; within the box, not empty.
        size: int64[p, D].
        itemsize: int64[p], bytes of an element.

    Returns:
        `(low int64[p], high int64[p], contiguous bool[p])`: all bytes of the intersection lie in
        `[low, high)` of the box's bytes, the first and the last byte of that range among them;
        contiguous means that it needs every byte of the range.

    Example:
        A column block of a 4 x 8 box of 2-byte elements.

        >>> a = lambda *v: np.array([v])
        >>> byte_runs(a(0, 0), a(4, 8), a(1, 4), a(2, 4), np.array([2]))
        (array([24]), array([48]), array([False]))
    """
    step = strides(box_size)
    low = ((offset - box_offset) * step).sum(axis=1) * itemsize
    last = ((size - 1) * step).sum(axis=1)
    high = low + (last + 1) * itemsize
    return low, high, (last + 1) == volume(size)


def needed_blocks(
    low: Int64Array, high: Int64Array, block_bytes: Int64Array, payload_bytes: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Returns byte ranges widened to whole checksum blocks, so that they can be verified.

    Args:
        low: int64[p], chunk-local.
        high: int64[p], not below `low`.
        block_bytes: int64[p], the chunk's block length; 0 for a chunk without checksums, whose
            ranges stay as they are.
        payload_bytes: int64[p], the chunk's length, at which the last block ends.

    Returns:
        `(low int64[p], high int64[p])`; the blocks are `low // block_bytes` up to
        `ceil(high / block_bytes)`.

    Example:
        >>> one = lambda v: np.array([v])
        >>> needed_blocks(one(5000), one(9000), one(4096), one(10000))
        (array([4096]), array([10000]))
    """
    step = np.where(block_bytes > 0, block_bytes, 1)
    return low // step * step, np.minimum(-(-high // step) * step, payload_bytes)


def slabs(
    box_offset: Int64Array,
    box_size: Int64Array,
    offset: Int64Array,
    size: Int64Array,
    itemsize: int,
    limit_bytes: int,
) -> list[Slab]:
    """Splits one intersection along its outermost dimensions until each part's extent is small.

    The slabs are disjoint, together the whole intersection, in the order of their bytes.

    Args:
        box_offset: int64[D], the chunk's box, in global coordinates.
        box_size: int64[D].
        offset: int64[D], the intersection, in global coordinates; within the box, not empty.
        size: int64[D].
        itemsize: Bytes of an element.
        limit_bytes: Longest extent (`high - low`) of a slab.

    Raises:
        InvalidRequestError: The limit is below one element.

    Complexity:
        O(number of slabs x D), never more than about twice the necessary slabs.
    """
    if limit_bytes < itemsize:
        raise InvalidRequestError(
            f"a slab needs room for one element of {itemsize} bytes, but the limit is "
            f"{limit_bytes} bytes: raise it"
        )
    step = strides(box_size[None])[0] * itemsize
    found: list[Slab] = []
    _split(offset, size, 0, (offset - box_offset) @ step, step, itemsize, limit_bytes, found)
    return found


def _split(
    offset: Int64Array,
    size: Int64Array,
    dim: int,
    low: int,
    step: Int64Array,
    itemsize: int,
    limit_bytes: int,
    found: list[Slab],
) -> None:
    extent = int((size - 1) @ step) + itemsize
    if extent <= limit_bytes:
        found.append(Slab(offset, size, int(low), int(low) + extent))
        return
    while size[dim] == 1:
        dim += 1
    stride, length = int(step[dim]), int(size[dim])
    inner = extent - (length - 1) * stride
    # Why: `count` rows reach over (count - 1) strides and the extent of one row.
    count = (limit_bytes - inner) // stride + 1 if inner <= limit_bytes else 1
    for start in range(0, length, count):
        part_offset, part_size = offset.copy(), size.copy()
        part_offset[dim] += start
        part_size[dim] = min(count, length - start)
        part_low = int(low) + start * stride
        _split(part_offset, part_size, dim, part_low, step, itemsize, limit_bytes, found)


def block_ranges(
    box_offset: Int64Array,
    box_size: Int64Array,
    offset: Int64Array,
    size: Int64Array,
    itemsize: int,
    *,
    block_bytes: int,
    payload_bytes: int,
    max_gap_bytes: int = 0,
) -> Int64Array:
    """Returns the byte ranges to read for one intersection (or slab), on block bounds.

    Args:
        box_offset: int64[D], the chunk's box, in global coordinates.
        box_size: int64[D].
        offset: int64[D], the intersection, in global coordinates; within the box, not empty.
        size: int64[D].
        itemsize: Bytes of an element.
        block_bytes: The chunk's block length; 0 when it has no checksums.
        payload_bytes: The chunk's length.
        max_gap_bytes: Read through gaps up to this long instead of reading twice.

    Returns:
        int64[r, 2], half-open, chunk-local, ascending, not touching; every byte of the
        intersection lies in one of them. One row when the intersection is contiguous.

    Complexity:
        O(r) where the ranges are more than `max(block_bytes, max_gap_bytes)` apart.
    """
    step = strides(box_size[None])[0] * itemsize
    length, outer = _merged_run(size, step, itemsize, max(max_gap_bytes, block_bytes - 1))
    starts = np.array([(offset - box_offset) @ step], dtype=np.int64)
    for dim in range(outer):
        starts = (starts[:, None] + np.arange(size[dim], dtype=np.int64) * step[dim]).reshape(-1)
    low, high = needed_blocks(
        starts, starts + length, np.full(1, block_bytes), np.full(1, payload_bytes)
    )
    first = np.flatnonzero(np.append(True, low[1:] - high[:-1] > max_gap_bytes))
    return np.stack([low[first], high[np.append(first[1:], len(high)) - 1]], axis=1)


def _merged_run(
    size: Int64Array, step: Int64Array, itemsize: int, max_gap_bytes: int
) -> tuple[int, int]:
    """Returns the length of the longest run without a large gap, and how many dims repeat it.

    Why from the innermost dimension: gaps never shrink on the way out, since a dimension's
    stride is at least the length of the wanted part plus the gap inside it.
    """
    length = itemsize
    for dim in range(len(size) - 1, -1, -1):
        if size[dim] > 1:
            if step[dim] - length > max_gap_bytes:
                return length, dim + 1
            length += int((size[dim] - 1) * step[dim])
    return length, 0


def affordable_gap(
    file: Int32Array,
    low: Int64Array,
    high: Int64Array,
    *,
    free_gap_bytes: int,
    max_gap_bytes: int,
    share: float,
) -> int:
    """Returns the longest gap that may be read through, so that little is read in vain.

    Args:
        file: int32[r], the file of each range.
        low: int64[r], first byte in the file; ranges are sorted by (file, low).
        high: int64[r], behind the last byte.
        free_gap_bytes: Gaps up to this long always cost less than another request.
        max_gap_bytes: Gaps above this never do.
        share: Most bytes to read in vain in longer gaps, as a share of the ranges' own bytes.

    Returns:
        `max_gap_bytes` for `coalesce`, from `free_gap_bytes` to `max_gap_bytes`.

    Example:
        >>> low, high = np.array([0, 100, 1000]), np.array([90, 900, 1500])
        >>> for share in (0.01, 0.1):
        ...     affordable_gap(np.zeros(3, np.int32), low, high,
        ...                    free_gap_bytes=8, max_gap_bytes=1000, share=share)
        10
        1000
    """
    if len(low) < 2:
        return max_gap_bytes
    same_file = file[1:] == file[:-1]
    reach = running_max(high, np.cumsum(np.append(True, ~same_file)) - 1)
    gaps = np.sort((low[1:] - reach[:-1])[same_file])
    gaps = gaps[(gaps > free_gap_bytes) & (gaps <= max_gap_bytes)]
    affordable = np.searchsorted(np.cumsum(gaps), share * float((high - low).sum()), side="right")
    if affordable == len(gaps):
        return max_gap_bytes
    return int(gaps[affordable - 1]) if affordable else free_gap_bytes


def coalesce(
    file: Int32Array,
    low: Int64Array,
    high: Int64Array,
    *,
    max_gap_bytes: int,
    max_bytes: int,
) -> Int64Array:
    """Returns which byte ranges of files are read together.

    Args:
        file: int32[r], the file of each range.
        low: int64[r], first byte in the file; ranges are sorted by (file, low) and may overlap.
        high: int64[r], behind the last byte.
        max_gap_bytes: Read through gaps up to this long.
        max_bytes: Longest read that joins several ranges; a single longer range stays whole.

    Returns:
        int64[g + 1]: read `i` serves the ranges `[bounds[i], bounds[i + 1])` and reaches from the
        first one's `low` to their greatest `high`.

    Example:
        >>> bounds = coalesce(np.array([0, 0, 0, 1]), np.array([0, 10, 90, 0]),
        ...                   np.array([8, 20, 95, 4]), max_gap_bytes=4, max_bytes=100)
        >>> bounds.tolist()
        [0, 2, 3, 4]
    """
    count = len(low)
    if count == 0:
        return np.zeros(1, dtype=np.int64)
    # Careful: ranges may contain one another, so a range's end is the greatest one so far.
    new_file = np.append(True, file[1:] != file[:-1])
    reach = running_max(high, np.cumsum(new_file) - 1)
    apart = new_file.copy()
    apart[1:] |= low[1:] - reach[:-1] > max_gap_bytes
    bounds: list[int] = []
    starts = np.append(np.flatnonzero(apart), count)
    too_long = reach[starts[1:] - 1] - low[starts[:-1]] > max_bytes
    if not too_long.any():
        return starts.astype(np.int64)
    for start, stop, long in zip(starts[:-1], starts[1:], too_long, strict=True):
        bounds.append(int(start))
        while long:
            limit = low[bounds[-1]] + max_bytes
            cut = bounds[-1] + max(
                1, int(np.searchsorted(reach[bounds[-1] : stop], limit, side="right"))
            )
            if cut >= stop:
                break
            bounds.append(cut)
    return np.array([*bounds, count], dtype=np.int64)
