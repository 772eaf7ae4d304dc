"""Who writes what: replicated boxes are cut or handed to one of their holders, balanced by bytes.

Where the pieces go in which file is decided in `layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import UnsupportedValueError
from ray_dcp.format.dtypes import ITEMSIZE
from ray_dcp.plan.boxes import volume
from ray_dcp.plan.grouping import group_rows, within
from ray_dcp.plan.merging import Boxes, Held, ranks_text
from ray_dcp.plan.values import BoolArray, Int64Array, Kind

__all__ = ["ITEM_COST_BYTES", "Pieces", "share_out"]

ITEM_COST_BYTES = 1024
"""What an item weighs beside its bytes when ranks are balanced: its frame and its handling, so
that a thousand scalars do not count as nothing."""

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is written, one row a future chunk.

    Attributes:
        held: int64[p], the row of `Held` that it comes from; its rank writes it.
        offset: int64[p, D], where the piece starts in the global tensor.
        size: int64[p, D].
        start: int64[p], its first byte in the C-order bytes of the held item.
        num_bytes: int64[p], its raw bytes; 0 for objects, a guess for opaque tensors.
        disagreements: `(fqn, ranks whose content is not that of the planned copy)`.
        differing: bool[g], the boxes that these are about.
    """

    held: Int64Array
    offset: Int64Array
    size: Int64Array
    start: Int64Array
    num_bytes: Int64Array
    disagreements: tuple[tuple[str, tuple[int, ...]], ...]
    differing: BoolArray


def share_out(
    held: Held,
    boxes: Boxes,
    *,
    world_size: int,
    min_piece_bytes: int,
    to_lowest_rank: bool = False,
) -> Pieces:
    """Decides which holder writes which piece of which box.

    A box that its holders may share is cut along its first dimension longer than 1, so that each
    piece is one range of the item's bytes: into as many pieces as there are holders, or fewer
    when there are not so many rows or pieces would get too small. Where a box has fewer pieces
    than holders, they go to the holders that have least to write, neighbours to one rank where
    possible, so that a reader finds them together. Content that differs between the ranks is
    taken whole from the lowest.

    Args:
        held: Items of all ranks.
        boxes: Their distinct boxes.
        world_size: Number of ranks.
        min_piece_bytes: Don't cut into smaller pieces than this.
        to_lowest_rank: The lowest holder writes every box, whole.

    Raises:
        UnsupportedValueError: A dtype is unknown; all FQNs concerned are named.
    """
    itemsize = _itemsizes(held, boxes)
    num_bytes = volume(held.size[boxes.row]) * itemsize
    holders = np.diff(boxes.start)
    differing, disagreements = _disagreements(held, boxes)
    count = _piece_counts(held, boxes, num_bytes, min_piece_bytes)
    whole = differing | to_lowest_rank
    count[whole] = 1

    box = np.repeat(np.arange(len(count)), count)
    place = within(count)
    offset, size, start = _cut(held, boxes, itemsize, box, place, count)
    length = volume(size) * itemsize[box]
    # A piece goes to its own holder where there are as many, else to the first or who is free.
    choice = np.where((count == holders)[box], place, 0)
    free = np.flatnonzero(((count < holders) & ~whole)[box])
    row = boxes.holder[boxes.start[box] + choice]
    fixed = np.ones(len(box), dtype=bool)
    fixed[free] = False
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, held.rank[row[fixed]], length[fixed] + ITEM_COST_BYTES)
    row[free] = _balanced(held, boxes, box[free], length[free] + ITEM_COST_BYTES, load)
    return Pieces(row, offset, size, start, length, disagreements, differing)


def _itemsizes(held: Held, boxes: Boxes) -> Int64Array:
    """Returns bytes of an element of each box, 0 for objects."""
    known = [ITEMSIZE.get(name, 0) for name in held.dtypes]
    kind, dtype = held.kind[boxes.row], held.dtype[boxes.row]
    itemsize = np.array([*known, 0], dtype=np.int64)[dtype]
    bad = boxes.row[(kind == Kind.TENSOR) & (itemsize == 0)]
    if len(bad):
        told = sorted(
            {f"{held.names[held.tensor[row]]!r} of {held.dtypes[held.dtype[row]]}" for row in bad}
        )
        raise UnsupportedValueError(
            "expected tensors of a dtype whose raw bytes can be stored, but found "
            + ", ".join(told)
            + f" on {ranks_text(held.rank[bad].tolist())}: dequantise or convert them"
        )
    itemsize[(kind == Kind.OPAQUE) & (itemsize == 0)] = 1
    return itemsize


def _disagreements(
    held: Held, boxes: Boxes
) -> tuple[BoolArray, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Tells which boxes' holders took different digests of their content, and names them."""
    value = held.value[boxes.holder]
    most = np.iinfo(np.uint64).max
    highest = np.maximum.reduceat(value, boxes.start[:-1]) if len(value) else value
    taken = np.where(value == 0, most, value)
    lowest = np.minimum.reduceat(taken, boxes.start[:-1]) if len(value) else value
    differing = (highest > 0) & (lowest != highest)
    told = []
    for box in np.flatnonzero(differing):
        rows = boxes.holder[boxes.start[box] : boxes.start[box + 1]]
        rows = rows[held.value[rows] > 0]
        other = rows[held.value[rows] != held.value[rows[0]]]
        ranks = tuple(sorted(held.rank[other].tolist()))
        told.append((held.names[held.tensor[boxes.row[box]]], ranks))
    return differing, tuple(told)


def _piece_counts(
    held: Held, boxes: Boxes, num_bytes: Int64Array, min_piece_bytes: int
) -> Int64Array:
    if len(boxes.row) == 0:
        return np.zeros(0, dtype=np.int64)
    shared = np.logical_and.reduceat(held.splittable[boxes.holder], boxes.start[:-1])
    shared &= held.kind[boxes.row] == Kind.TENSOR
    size = held.size[boxes.row]
    rows = np.take_along_axis(size, _lead(size)[:, None], axis=1)[:, 0]
    most = np.minimum(np.minimum(np.diff(boxes.start), rows), num_bytes // min_piece_bytes)
    return np.where(shared, np.maximum(most, 1), 1)


def _lead(size: Int64Array) -> npt.NDArray[np.intp]:
    """Returns each box's first dimension longer than 1 (0 where there is none)."""
    return np.asarray(np.argmax(size > 1, axis=1))


def _cut(
    held: Held,
    boxes: Boxes,
    itemsize: Int64Array,
    box: Int64Array,
    place: Int64Array,
    count: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns `(offset, size, first byte)` of piece `place` of `count[box]` near-equal ones."""
    row = boxes.row[box]
    offset, size = held.offset[row], held.size[row]
    start = np.zeros(len(box), dtype=np.int64)
    cut = np.flatnonzero(count[box] > 1)
    lead = _lead(size[cut])
    length, pieces, index = size[cut, lead], count[box[cut]], place[cut]
    base, longer = length // pieces, length % pieces
    first = index * base + np.minimum(index, longer)
    start[cut] = first * (volume(size[cut]) // length) * itemsize[box[cut]]
    offset[cut, lead] += first
    size[cut, lead] = base + (index < longer)
    return offset, size, start


def _balanced(
    held: Held, boxes: Boxes, box: Int64Array, weight: Int64Array, load: Int64Array
) -> Int64Array:
    """Returns the holder's row for each piece, so that the ranks' loads become near-equal.

    Pieces with the same holders are laid on a line, which is cut where each holder has its
    share: as much as lifts it to the common level. Off by at most one piece at each cut.

    Args:
        held: Items of all ranks.
        boxes: Their boxes.
        box: int64[k], the box of each piece.
        weight: int64[k], above 0.
        load: int64[world size], what each rank writes anyway; grows.
    """
    result = np.empty(len(box), dtype=np.int64)
    if len(box) == 0:
        return result
    group = _holder_classes(held, boxes)[box]
    order = np.argsort(group, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        start, stop = boxes.start[box[members[0]] : box[members[0]] + 2].tolist()
        ranks = held.rank[boxes.holder[start:stop]]
        line = np.cumsum(weight[members])
        shares = np.cumsum(_shares(load[ranks], int(line[-1])))
        middle = line - weight[members] // 2
        chosen = np.minimum(np.searchsorted(shares, middle, side="left"), len(ranks) - 1)
        np.add.at(load, ranks[chosen], weight[members])
        result[members] = boxes.holder[boxes.start[box[members]] + chosen]
    return result


def _holder_classes(held: Held, boxes: Boxes) -> Int64Array:
    """Numbers the boxes so that those of one number have the same holders."""
    ranks = held.rank[boxes.holder].astype(np.uint64)
    mixed = (ranks + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(31)
    counts = np.diff(boxes.start)
    sums = [np.add.reduceat(code, boxes.start[:-1]).view(np.int64) for code in (mixed, mixed**2)]
    first, group = group_rows([*sums, counts])
    leader = np.repeat(boxes.start[first[group]], counts) + within(counts)
    if np.array_equal(ranks, ranks[leader]):
        return group
    # The sums of different ranks were equal: balance each box by itself.
    return np.arange(len(counts), dtype=np.int64)


def _shares(load: Int64Array, total: int) -> Int64Array:
    """Returns how much each gets so that all come to one level, as far as `total` reaches.

    Example:
        >>> _shares(np.array([5, 0, 9]), 9).tolist()
        [2, 7, 0]
    """
    ordered = np.sort(load)
    levels = (total + np.cumsum(ordered)) // np.arange(1, len(load) + 1)
    reached = np.flatnonzero(levels >= ordered)
    return np.asarray(np.maximum(levels[reached[-1]] - load, 0))
