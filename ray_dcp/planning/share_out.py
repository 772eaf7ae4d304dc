"""`share_out`: which rank writes which bytes.

Replicated boxes are cut, or assigned whole, so that the bytes are balanced. The ranks of a node
write through one disk or network card: `Loads` levels the nodes first, then the ranks of each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import (
    BoolArray,
    Int32Array,
    Int64Array,
    Kind,
    Settled,
    offsets_of,
    volume,
)
from ray_dcp.errors import UnsupportedValueError
from ray_dcp.planning.merge import (
    DistinctBoxes,
    Held,
)

MIN_WRITER_BYTES = 16 << 20
"""Least that a rank should write if other ranks hold the same bytes. Why: a small file costs a
storage as much as a large one, and 10,000 ranks would write 10,000 small files."""
Ranks = npt.NDArray[np.integer]


def node_numbers(nodes: Sequence[str]) -> tuple[int, ...]:
    """Returns the number of each rank's node, in order of first appearance.

    The same partition has the same numbers, whatever the names of its nodes.

    Args:
        nodes: Name of each rank's node; a rank with an empty name is on a node of its own.

    Examples:
        >>> node_numbers(["b", "b", "a", "", "", "b"])
        (0, 0, 1, 2, 3, 0)
    """
    known: dict[object, int] = {}
    return tuple([known.setdefault(name or rank, len(known)) for rank, name in enumerate(nodes)])


class Loads:
    """The bytes that each rank writes, as far as they are assigned.

    Args:
        rank_bytes: int64[w], what each rank writes in any case. The object owns the array and adds
            to it.
        nodes: Number of each rank's node; by default each rank is on a node of its own.
    """

    def __init__(self, rank_bytes: Int64Array, nodes: Sequence[int] | None = None) -> None:
        self._bytes = rank_bytes
        if not nodes:
            nodes = range(len(rank_bytes))
        self._node = np.array(nodes, dtype=np.int64)
        self._node_bytes = np.zeros(int(self._node.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(self._node_bytes, self._node, rank_bytes)

    def add(self, ranks: Ranks, num_bytes: Int64Array) -> None:
        """Adds bytes to the loads of ranks; a rank may occur several times."""
        np.add.at(self._bytes, ranks, num_bytes)
        np.add.at(self._node_bytes, self._node[ranks], num_bytes)

    def by_node(self, ranks: Ranks) -> npt.NDArray[np.intp]:
        """Returns the positions of ranks in an order in which the ranks of a node are adjacent.

        Examples:
            >>> Loads(np.zeros(4, dtype=np.int64), (0, 1, 0, 1)).by_node(np.arange(4)).tolist()
            [0, 2, 1, 3]
        """
        return np.argsort(self._node[ranks], kind="stable")

    def writers(self, holders: Ranks, total: int, min_bytes: int) -> Int64Array:
        """Returns which holders write: their positions, ascending.

        Nodes are chosen first, then ranks of each node: as many as leave every one of them with at
        least `min_bytes`, including what it writes in any case. If these are not all, holders that
        reach `min_bytes` at the lowest level are preferred, then holders that have a file already,
        and among equal holders those at equal distances.

        Args:
            holders: int[k], ranks, ascending.
            total: Bytes that they share.
            min_bytes: Least that a writer should have; if 0, all holders write.

        Examples:
            Four ranks on two nodes share 40 bytes: two of them write, as each should have 20.

            >>> loads = Loads(np.zeros(4, dtype=np.int64), (0, 0, 1, 1))
            >>> loads.writers(np.arange(4), 40, 20).tolist()
            [0, 2]
        """
        if min_bytes <= 0:
            return np.arange(len(holders))
        load = self._bytes[holders]
        names, node = np.unique(self._node[holders], return_inverse=True)
        node_load, most = self._node_bytes[names], np.zeros(len(names), dtype=np.int64)
        np.maximum.at(most, node, load)
        # Why not node_load alone: other ranks of the node write to files of their own.
        chosen = _choose_sharers(node_load, most, total, min_bytes)
        share = np.zeros(len(names), dtype=np.int64)
        share[chosen] = level_shares(node_load[chosen], total)
        low = load + _level_groups(node, load, share)
        lowest = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(lowest, node, low)
        writes = (share > 0)[node]
        for index in np.flatnonzero((share > 0) & (lowest < min_bytes)).tolist():
            own = np.flatnonzero(node == index)
            writes[own] = _choose_sharers(load[own], load[own], int(share[index]), min_bytes)
        return np.flatnonzero(writes)

    def shares(self, ranks: Ranks, total: int) -> Int64Array:
        """Returns how many of `total` bytes each of the given ranks gets.

        Examples:
            The second node writes 6 bytes in any case.

            >>> loads = Loads(np.array([0, 0, 6, 0]), (0, 0, 1, 1))
            >>> loads.shares(np.arange(4), 10).tolist()
            [4, 4, 0, 2]
        """
        names, node = np.unique(self._node[ranks], return_inverse=True)
        share = level_shares(self._node_bytes[names], total)
        return _level_groups(node, self._bytes[ranks], share)


def level_shares(load: Int64Array, total: int) -> Int64Array:
    """Returns how much each load gets so that all reach one level, as far as `total` allows.

        load 5   XXXXX##      `#`: 9 bytes lift two of three loads to level 7
        load 0   #######
        load 9   XXXXXXXXX

    Examples:
        >>> level_shares(np.array([5, 0, 9]), 9).tolist()
        [2, 7, 0]
    """
    return _level_groups(np.zeros(len(load), dtype=np.int64), load, np.array([total]))


def _level_groups(group: Int64Array, load: Int64Array, share: Int64Array) -> Int64Array:
    """Does as `level_shares` for several groups at once, each with its own total.

    Args:
        group: int64[k], the group of each member, from 0; no group is empty.
        load: int64[k], the load of each member.
        share: int64[groups], the bytes that each group shares.
    """
    order = np.lexsort((load, group))
    of, ordered = group[order], load[order]
    first = np.flatnonzero(np.diff(of, prepend=-1))
    line = np.cumsum(ordered)
    below = line - np.repeat(line[first] - ordered[first], np.diff(np.append(first, len(of))))
    number = np.arange(len(of)) - first[of] + 1
    levels = (share[of] + below) // number
    # A load that lies above the level of those below it lies above all levels that follow.
    reached = np.bincount(of, weights=levels >= ordered).astype(np.int64)
    level = levels[first + reached - 1]
    return np.asarray(np.maximum(level[group] - load, 0))


def _choose_sharers(load: Int64Array, most: Int64Array, total: int, min_bytes: int) -> BoolArray:
    """Returns which of several nodes (or ranks) share `total`; at least one.

    Args:
        load: int64[k], what each writes in any case.
        most: int64[k], the part of it in one file of a holder; 0 if there is no such file.
        total: Bytes that they share.
        min_bytes: Least that one file of each should have.
    """
    # The level at which a file of each has enough, and more than before.
    enough = load + np.maximum(min_bytes - most, 1)
    has_file = most > 0
    rank = np.where(has_file, np.maximum(load + 1, min_bytes), enough)
    order = np.lexsort((-load, enough, ~has_file, rank))
    count = _count_sharers(load, enough, order[:0], order, total)
    if count == 0:
        # Too little for the first: only the one whose file lacks least gets it.
        order, count = np.lexsort((load, enough - load)), 1
    keys = np.stack([rank, has_file, enough, load])
    alike = (keys == keys[:, order[count - 1, None]]).all(axis=0)
    taken, equal = order[:count][~alike[order[:count]]], np.flatnonzero(alike)
    num_equal = count - len(taken)
    taken = np.append(taken, equal[np.arange(num_equal) * len(equal) // num_equal])
    chosen = np.zeros(len(load), dtype=bool)
    chosen[taken] = True
    # Holders that have files already get bytes without a further file.
    more = order[has_file[order] & ~chosen[order]]
    chosen[more[: _count_sharers(load, enough, taken, more, total)]] = True
    return chosen


def _count_sharers(
    load: Int64Array, enough: Int64Array, taken: Int64Array, more: Int64Array, total: int
) -> int:
    """Returns how many of the first of `more` may share so that each reaches its `enough`."""
    low, high = 0, len(more)
    while low < high:
        middle = (low + high + 1) // 2
        those = np.append(taken, more[:middle])
        level = int((load[those] + level_shares(load[those], total)).min())
        if level >= enough[those].max():
            low = middle
        else:
            high = middle - 1
    return low


ITEM_COST_BYTES = 1024
"""Weight of an item beside its bytes when ranks are balanced. Why: each item has a frame and takes
time to handle, so that a thousand scalars do not count as nothing."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is written, one row per future chunk.

    Attributes:
        held: int64[p], the row of `Held` that the piece comes from; the rank of that row writes it.
        offset: int64[p, D], where the piece starts in the global tensor.
        size: int64[p, D].
        start: int64[p], its first byte in the C-order bytes of the held item.
        num_bytes: int64[p], its raw bytes; 0 for objects, a guess for opaque tensors.
        settled: bool[p], whether it is not expected to change between saves.
        disagreements: `(fqn, ranks whose content is not that of the planned copy)`.
        differing: bool[g], the boxes of the disagreements.
    """

    held: Int64Array
    offset: Int64Array
    size: Int64Array
    start: Int64Array
    num_bytes: Int64Array
    settled: BoolArray
    disagreements: tuple[tuple[str, tuple[int, ...]], ...]
    differing: BoolArray


def share_out(
    held: Held,
    boxes: DistinctBoxes,
    *,
    world_size: int,
    min_piece_bytes: int,
    min_writer_bytes: int = 0,
    to_lowest_rank: bool = False,
    nodes: Sequence[int] | None = None,
) -> Pieces:
    """Decides which holder writes which piece of which box.

    Boxes with the same holders are laid on a line, which is cut where each holder has its share,
    that is as much as lifts it to the common level. A box that its holders may split is cut there
    along its first dimension longer than 1, so that each piece is one range of the item's bytes:

        boxes    |       a       |   b   |       c        |
        shares   |   holder 0  |   holder 1  |  holder 2  |
        pieces   |      0      |1|   1   | 1 |     2      |

    Every other box stays whole and goes to the holder in whose share its middle lies. Content that
    differs between the ranks comes whole from the lowest rank.

    Boxes that are expected to change, and those that are not, are each balanced by themselves: the
    latter may not be written at all.

    Args:
        held: Items of all ranks.
        boxes: Their distinct boxes.
        world_size: Number of ranks.
        min_piece_bytes: Shortest piece into which a box is cut.
        min_writer_bytes: Least that each writer should write; fewer ranks write if needed.
        to_lowest_rank: The lowest holder writes every box, whole.
        nodes: Number of each rank's node; None if nodes are unknown.

    Raises:
        UnsupportedValueError: A dtype is unknown; the message names all FQNs concerned.

    Examples:
        Two ranks hold 100 bytes `x` that they may split, and 40 bytes `y`; rank 0 alone holds 20
        bytes `z`. Rank 0 writes `z` in any case; the other 140 bytes lift both to 80. On the line
        of `x` and `y`, rank 0 has the first 60 bytes, so that `x` is cut there; the middle of `y`
        lies in the share of rank 1.

        >>> from ray_dcp.core.columns import ColumnsBuilder
        >>> from ray_dcp.planning.merge import distinct_boxes, merge
        >>> def columns_of(rank):
        ...     builder = ColumnsBuilder()
        ...     builder.tensor("x", "uint8", (100,), splittable=True)
        ...     builder.tensor("y", "uint8", (40,))
        ...     if rank == 0:
        ...         builder.tensor("z", "uint8", (20,))
        ...     return builder.build()
        >>> held = merge([columns_of(rank) for rank in (0, 1)])
        >>> pieces = share_out(held, distinct_boxes(held), world_size=2, min_piece_bytes=1)
        >>> for row, start, num_bytes in zip(pieces.held, pieces.start, pieces.num_bytes):
        ...     print(f"rank {held.rank[row]}: {num_bytes} bytes of", held.names[held.name[row]],
        ...           f"from byte {start} on")
        rank 0: 20 bytes of z from byte 0 on
        rank 1: 40 bytes of y from byte 0 on
        rank 0: 60 bytes of x from byte 0 on
        rank 1: 40 bytes of x from byte 60 on
    """
    itemsize = _itemsizes(held, boxes)
    num_bytes = volume(held.size[boxes.row]) * itemsize
    differing, disagreements = _disagreements(held, boxes)
    free = (np.diff(boxes.start) > 1) & ~differing & (not to_lowest_rank)
    cuttable = free & _splittable(held, boxes) & (num_bytes >= 2 * min_piece_bytes)
    settled = _find_settled(held, boxes)
    lead = _lead_lengths(held.size[boxes.row])
    # Each part: boxes, their first row and number of rows, and the row of `Held` that writes them.
    parts: list[tuple[Int64Array, Int64Array, Int64Array, Int64Array]] = []
    for own in (~settled, settled) if settled.any() else (~settled,):
        loads = Loads(np.zeros(world_size, dtype=np.int64), nodes)
        fixed = np.flatnonzero(own & ~free)
        writer = boxes.holder[boxes.start[:-1][fixed]]
        loads.add(held.rank[writer], num_bytes[fixed] + ITEM_COST_BYTES)
        parts.append((fixed, np.zeros_like(fixed), lead[fixed], writer))
        for members in _by_holders(held, boxes, np.flatnonzero(own & free)):
            start, stop = boxes.start[members[0] : members[0] + 2].tolist()
            ranks = held.rank[boxes.holder[start:stop]]
            total = int((num_bytes[members] + ITEM_COST_BYTES).sum())
            chosen = loads.writers(ranks, total, min_writer_bytes)
            whole, line = members[~cuttable[members]], members[cuttable[members]]
            if len(whole):
                place = _assign_whole(num_bytes[whole] + ITEM_COST_BYTES, ranks[chosen], loads)
                writer = boxes.holder[boxes.start[whole] + chosen[place]]
                parts.append((whole, np.zeros_like(whole), lead[whole], writer))
            if len(line):
                index, first, count, place = _cut_line(
                    num_bytes[line], lead[line], ranks[chosen], loads, min_piece_bytes
                )
                cut = line[index]
                writer = boxes.holder[boxes.start[cut] + chosen[place]]
                parts.append((cut, first, count, writer))
    box, first, count, row = (np.concatenate(column) for column in zip(*parts, strict=True))
    offset, size, begin = _cut_boxes(held, boxes, itemsize, box, first, count)
    length = volume(size) * itemsize[box]
    return Pieces(row, offset, size, begin, length, settled[box], disagreements, differing)


def _itemsizes(held: Held, boxes: DistinctBoxes) -> Int64Array:
    """Returns the bytes per element of each box, 0 for objects."""
    known = [ITEMSIZE.get(name, 0) for name in held.dtypes]
    kind, dtype = held.kind[boxes.row], held.dtype[boxes.row]
    itemsize = np.array([*known, 0], dtype=np.int64)[dtype]
    bad = boxes.row[(kind == Kind.TENSOR) & (itemsize == 0)]
    if len(bad):
        told = sorted(
            {f"{held.names[held.name[row]]!r} of {held.dtypes[held.dtype[row]]}" for row in bad}
        )
        raise UnsupportedValueError(
            "expected tensors of a dtype whose raw bytes can be stored, but found "
            + ", ".join(told)
            + f" on {name_ranks(held.rank[bad].tolist())}: dequantise or convert them"
        )
    itemsize[(kind == Kind.OPAQUE) & (itemsize == 0)] = 1
    return itemsize


def _disagreements(
    held: Held, boxes: DistinctBoxes
) -> tuple[BoolArray, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Returns which boxes have holders with different content digests, and names these boxes."""
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
        told.append((held.names[held.name[boxes.row[box]]], ranks))
    return differing, tuple(told)


def _splittable(held: Held, boxes: DistinctBoxes) -> BoolArray:
    """Returns the boxes that every holder allows to be split: bool[g]."""
    shared = np.logical_and.reduceat(held.splittable[boxes.holder], boxes.start[:-1])
    return np.asarray(shared & (held.kind[boxes.row] == Kind.TENSOR))


def _find_settled(held: Held, boxes: DistinctBoxes) -> BoolArray:
    """Returns the boxes that are not expected to change between saves: bool[g]."""
    highest = np.maximum.reduceat(held.settled[boxes.holder], boxes.start[:-1])
    return np.asarray((highest == Settled.SETTLED) & (held.kind[boxes.row] == Kind.TENSOR))


def _lead_lengths(size: Int64Array) -> Int64Array:
    """Returns the length of each box's first dimension longer than 1."""
    return np.take_along_axis(size, _leading_dimension(size)[:, None], axis=1)[:, 0]


def _leading_dimension(size: Int64Array) -> npt.NDArray[np.intp]:
    """Returns each box's first dimension longer than 1 (0 if there is none)."""
    return np.asarray(np.argmax(size > 1, axis=1))


def _cut_boxes(
    held: Held,
    boxes: DistinctBoxes,
    itemsize: Int64Array,
    box: Int64Array,
    first: Int64Array,
    count: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns `(offset, size, first byte)` of `count` leading rows of each box from `first` on."""
    row = boxes.row[box]
    offset, size = held.offset[row], held.size[row]
    start = np.zeros(len(box), dtype=np.int64)
    cut = np.flatnonzero(count != _lead_lengths(size))
    lead = _leading_dimension(size[cut])
    start[cut] = first[cut] * (volume(size[cut]) // size[cut, lead]) * itemsize[box[cut]]
    offset[cut, lead] += first[cut]
    size[cut, lead] = count[cut]
    return offset, size, start


def _by_holders(held: Held, boxes: DistinctBoxes, free: Int64Array) -> list[Int64Array]:
    """Returns groups of boxes that the same ranks hold."""
    ranks, starts = held.rank[boxes.holder], boxes.start.tolist()
    found: dict[bytes, list[int]] = {}
    for box in free.tolist():
        holders = ranks[starts[box] : starts[box + 1]].tobytes()
        found.setdefault(holders, []).append(box)
    return [np.array(members, dtype=np.int64) for members in found.values()]


def _assign_whole(weight: Int64Array, ranks: Int32Array, loads: Loads) -> Int64Array:
    """Returns which of the ranks gets each box; each cut is off by at most a box.

    Args:
        weight: int64[k], above 0.
        ranks: Ranks that share the boxes.
        loads: What each rank writes; this function adds to it.
    """
    line = np.cumsum(weight)
    shares = np.cumsum(loads.shares(ranks, int(line[-1])))
    chosen = np.searchsorted(shares, line - weight // 2, side="left")
    chosen = np.minimum(chosen, len(ranks) - 1)
    loads.add(ranks[chosen], weight)
    return np.asarray(chosen)


def _cut_line(
    num_bytes: Int64Array,
    rows: Int64Array,
    ranks: Int32Array,
    loads: Loads,
    min_piece_bytes: int,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Cuts a line of boxes where each rank has its share, at the nearest whole row.

    Args:
        num_bytes: int64[k], bytes of each box; each is long enough for two pieces.
        rows: int64[k], number of leading rows of each box.
        ranks: Ranks that share the boxes.
        loads: What each rank writes; this function adds to it.
        min_piece_bytes: A cut that would leave a shorter end of a box moves to that end.

    Returns:
        `(box, first row, number of rows, index into ranks)` of each piece.
    """
    # Why node by node: a node is off by at most a row then, however many of its ranks share.
    order = loads.by_node(ranks)
    ranks = ranks[order]
    ends = np.cumsum(num_bytes)
    cuts = np.cumsum(loads.shares(ranks, int(ends[-1])))[:-1]
    box = np.minimum(np.searchsorted(ends, cuts, side="right"), len(ends) - 1)
    height = num_bytes[box] // rows[box]
    row = (cuts - (ends - num_bytes)[box] + height // 2) // height
    row[row * height < min_piece_bytes] = 0
    at_end = (rows[box] - row) * height < min_piece_bytes
    row[at_end] = rows[box[at_end]]
    # Pieces begin at every box, and at every cut within one.
    before = offsets_of(rows)
    cut = before[box] + row
    begin = np.unique(np.concatenate([before[:-1], cut[cut < before[-1]]]))
    owner = np.searchsorted(cut, begin, side="right")
    piece_box = np.searchsorted(before, begin, side="right") - 1
    count = np.diff(np.append(begin, before[-1]))
    loads.add(ranks[owner], count * (num_bytes // rows)[piece_box] + ITEM_COST_BYTES)
    return piece_box, begin - before[piece_box], count, order[owner]
