"""Checks that boxes fill their tensors exactly once: overlaps, gaps and boxes out of bounds.

The checks apply to what ranks report that they hold, to chunk tables, and to the results of a read
plan. The caller chooses the error to raise and its wording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, contains, running_max, volume

_PAIRS_TOLD = 8

Box = tuple[Int64Array, Int64Array]


@dataclass(frozen=True)
class Coverage:
    """The faults in how boxes fill their regions; every field is empty when there are none.

    Attributes:
        outside: Boxes that reach out of their region, or have a negative length.
        overlaps: Pairs of boxes that have elements in common, at most 8 per region.
        gaps: `(region, elements missing, offset, size)`; offset and size are those of the first
            hole.
    """

    outside: tuple[int, ...] = ()
    overlaps: tuple[tuple[int, int], ...] = ()
    gaps: tuple[tuple[int, int, Int64Array, Int64Array], ...] = ()


def check_coverage(
    region: Int64Array, offset: Int64Array, size: Int64Array, shape: Int64Array
) -> Coverage:
    """Checks that the boxes of each region lie within it, are disjoint, and cover all of it.

    Boxes of volume 0 are legal anywhere within the bounds.

    Args:
        region: int64[n], the region of each box; any order.
        offset: int64[n, D].
        size: int64[n, D].
        shape: int64[g, D], the regions, which start at 0.

    Returns:
        All faults. Regions with a box out of bounds are not checked further.

    Complexity:
        A few sorts of n rows where cuts straight through a region separate its boxes: slices
        along one dimension, even and uneven meshes, slices of slices. Only regions whose boxes
        overlap, or that no straight cut separates (a pinwheel), cost a Python loop over their
        boxes:

            slices of slices      pinwheel
            +--+-----+            +-----+--+
            |  |     |            |     |  |
            |  +--+--+            +--+--+  |
            |  |  |  |            |  |  |  |
            |  |  |  |            |  +--+--+
            |  |  |  |            |  |     |
            +--+--+--+            +--+-----+
    """
    inside = contains(np.zeros_like(offset), shape[region], offset, size)
    usable = np.ones(len(shape), dtype=bool)
    usable[region[~inside]] = False
    elements = volume(size)
    rows = np.flatnonzero(usable[region] & (elements > 0))
    # Why exact: boxes that straight cuts separate are disjoint, so their volumes add up.
    covered = _segment_sum(region[rows], elements[rows], len(shape))
    doubtful = ~_separable(region[rows], offset[rows], size[rows], len(shape))
    overlaps: list[tuple[int, int]] = []
    gaps: list[tuple[int, int, Int64Array, Int64Array]] = []
    suspects = np.flatnonzero(usable & (doubtful | (covered != volume(shape))))
    for index, own in zip(suspects, _members(region[rows], suspects), strict=True):
        mine = rows[own]
        overlaps += [
            (int(mine[a]), int(mine[b])) for a, b in _overlapping(offset[mine], size[mine])
        ]
        found = list(holes(offset[mine], size[mine], np.zeros_like(shape[index]), shape[index]))
        if found:
            missing = sum(int(np.prod(hole_size)) for _, hole_size in found)
            gaps.append((int(index), missing, *min(found, key=lambda hole: hole[0].tolist())))
    outside = tuple(np.flatnonzero(~inside).tolist())
    return Coverage(outside, tuple(overlaps), tuple(gaps))


def lacks_parts(table: ChunkTable) -> BoolArray:
    """Returns which tensors have more elements than their chunks hold together: bool[t]."""
    have = _segment_sum(table.tensor, volume(table.size), table.num_tensors)
    return np.asarray(have < volume(table.shape))


def missing_volumes(
    region: Int64Array,
    offset: Int64Array,
    size: Int64Array,
    region_offset: Int64Array,
    region_size: Int64Array,
) -> Int64Array:
    """Returns the number of elements of each region that no box holds. Boxes may overlap.

    Args:
        region: int64[n], the region of each box; any order.
        offset: int64[n, D], boxes within their region.
        size: int64[n, D], all above 0.
        region_offset: int64[g, D].
        region_size: int64[g, D].

    Returns:
        int64[g].
    """
    count = len(region_size)
    missing = volume(region_size) - _segment_sum(region, volume(size), count)
    doubtful = np.flatnonzero(~_separable(region, offset, size, count))
    for index, own in zip(doubtful, _members(region, doubtful), strict=True):
        found = holes(offset[own], size[own], region_offset[index], region_size[index])
        missing[index] = sum(int(np.prod(hole_size)) for _, hole_size in found)
    return missing


def holes(
    offset: Int64Array, size: Int64Array, region_offset: Int64Array, region_size: Int64Array
) -> Iterator[Box]:
    """Yields the parts of one region that no box holds, as disjoint boxes.

    Args:
        offset: int64[n, D], boxes; they may overlap and reach out of the region.
        size: int64[n, D].
        region_offset: int64[D].
        region_size: int64[D].

    Examples:
        >>> a = np.array
        >>> found = holes(a([[0], [5]]), a([[3], [5]]), a([0]), a([8]))
        >>> [(offset.tolist(), size.tolist()) for offset, size in found]
        [([3], [2])]
    """
    order = np.lexsort(offset.T[::-1])
    low, high = offset[order], (offset + size)[order]
    todo = [(region_offset, region_offset + region_size, np.arange(len(order)))]
    while todo:
        start, stop, rows = todo.pop()
        meets = (np.minimum(high[rows], stop) > np.maximum(low[rows], start)).all(axis=1)
        rows = rows[meets]
        if (stop <= start).any():
            continue
        if len(rows) == 0:
            yield start, stop - start
            continue
        # The middle box halves the remaining row of boxes; up to 2 D parts lie around it.
        middle = rows[len(rows) // 2]
        rest = np.delete(rows, len(rows) // 2)
        for dim in range(len(start)):
            below, above = max(low[middle, dim], start[dim]), min(high[middle, dim], stop[dim])
            if above < stop[dim]:
                todo.append((_replace(start, dim, above), stop, rest))
            if below > start[dim]:
                todo.append((start, _replace(stop, dim, below), rest))
            start, stop = _replace(start, dim, below), _replace(stop, dim, above)


def _replace(corner: Int64Array, dim: int, value: int) -> Int64Array:
    result = corner.copy()
    result[dim] = value
    return result


def _segment_sum(group: npt.NDArray[np.integer], values: Int64Array, count: int) -> Int64Array:
    """Returns exact sums by group (`np.bincount` would add as floats)."""
    result = np.zeros(count, dtype=np.int64)
    np.add.at(result, group, values)
    return result


def _members(group: Int64Array, wanted: Int64Array) -> Iterator[Int64Array]:
    """Yields the rows of each wanted group."""
    if len(wanted) == 0:
        return
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    starts = np.searchsorted(ordered, wanted, side="left")
    stops = np.searchsorted(ordered, wanted, side="right")
    for start, stop in zip(starts, stops, strict=True):
        yield order[start:stop]


def _separable(region: Int64Array, offset: Int64Array, size: Int64Array, count: int) -> BoolArray:
    """Returns which regions' boxes can be separated by straight cuts, so that none overlap.

    False is inconclusive: the boxes overlap, or they are disjoint but lie like a pinwheel.

    Args:
        region: int64[n].
        offset: int64[n, D].
        size: int64[n, D], all above 0.
        count: Number of regions.
    """
    part = region
    rows = np.arange(len(region))
    dim, barren, width = 0, 0, offset.shape[1]
    while barren < width:
        sizes = np.bincount(part)
        crowded = sizes[part] > 1
        rows, part = rows[crowded], part[crowded]
        if len(rows) == 0:
            break
        finer = _cut_at_gaps(part, offset[rows, dim], size[rows, dim])
        barren = barren + 1 if finer is None else 0
        part = part if finer is None else finer
        dim = (dim + 1) % width
    result = np.ones(count, dtype=bool)
    result[region[rows]] = False
    return result


def _cut_at_gaps(part: Int64Array, start: Int64Array, length: Int64Array) -> Int64Array | None:
    """Returns finer parts, cut wherever no interval crosses; None if there is no such place."""
    if (start == start[0]).all():
        return None
    order = np.lexsort((start, part))
    part, start = part[order], start[order]
    reach = running_max(start + length[order], part)
    fresh = np.zeros(len(part), dtype=bool)
    fresh[0] = True
    between = part[1:] != part[:-1]
    cuts = ~between & (start[1:] >= reach[:-1])
    if not cuts.any():
        return None
    fresh[1:] = between | cuts
    finer = np.empty(len(part), dtype=np.int64)
    finer[order] = np.cumsum(fresh) - 1
    return finer


def _overlapping(offset: Int64Array, size: Int64Array) -> list[tuple[int, int]]:
    """Returns the first pairs of boxes that overlap.

    The sweep runs along the dimension with the most distinct starts, so that a box is compared only
    with boxes whose interval in that dimension meets its own.
    """
    high = offset + size
    axis = max(range(offset.shape[1]), key=lambda dim: len(np.unique(offset[:, dim])), default=0)
    order = np.lexsort((*offset.T, offset[:, axis]))
    starts = offset[order, axis]
    pairs: list[tuple[int, int]] = []
    for place, row in enumerate(order):
        stop = int(np.searchsorted(starts, high[row, axis], side="left"))
        others = order[place + 1 : stop]
        shared = np.minimum(high[others], high[row]) > np.maximum(offset[others], offset[row])
        pairs += [(int(row), int(other)) for other in others[shared.all(axis=1)]]
        if len(pairs) >= _PAIRS_TOLD:
            break
    return sorted((min(pair), max(pair)) for pair in pairs[:_PAIRS_TOLD])
