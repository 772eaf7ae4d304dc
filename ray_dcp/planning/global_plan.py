"""The plan of a save: from what every rank holds to who writes what, and where.

`make_plan` merges the ranks' columns (`merge`: copies, conflicts), divides the bytes among the
ranks (`share_out`: who writes) and lays out the files (`lay_out`: where). `rank_plan` and
`RankPlans` return one rank's part of the plan: its files, in the order of their bytes.
`checked_receipts` compares what the ranks have written with the plan.

Replicated boxes are cut, or assigned whole, so that the bytes are balanced. The ranks of a node
write through one disk or network card: `Loads` levels the nodes first, then the ranks of each node.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.messages import FileReceipts
from ray_dcp.core.checksums import block_bytes_for_many, length_with_checks, num_blocks_many
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import (
    NO_GROUPS,
    BoolArray,
    ChunkTable,
    Columns,
    FilePlan,
    GlobalPlan,
    Int32Array,
    Int64Array,
    Kind,
    RankPlan,
    Settled,
    offsets_of,
    run_of,
    volume,
)
from ray_dcp.errors import InternalError, UnsupportedValueError
from ray_dcp.format.table import decode_table, encode_table
from ray_dcp.format.torch_items import frames_of
from ray_dcp.planning.merge import (
    DistinctBoxes,
    Held,
    check_held,
    distinct_boxes,
    group_values,
    merge,
)

LARGE_BYTES = 64 << 10
"""Payloads of at least this length start on a page, for direct I/O and mmap."""
LARGE_ALIGNMENT = 4096
SMALL_ALIGNMENT = 64
"""Alignment of all other payloads: the one that `torch.save` uses."""

MIN_PIECE_BYTES = LARGE_BYTES
"""Shortest piece into which a replicated box is cut. Why: a piece costs about 1 KiB on storage and
a row in every table, and a piece that starts on a page should be worth that."""


MIN_WRITER_BYTES = 16 << 20
"""Least that a rank should write if other ranks hold the same bytes. Why: a small file costs a
storage as much as a large one, and 10,000 ranks would write 10,000 small files."""


def make_plan(
    columns: Sequence[Columns],
    *,
    part_bytes: int = 1 << 30,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    min_writer_bytes: int = 0,
    to_lowest_rank: bool = False,
    nodes: Sequence[int] | None = None,
) -> GlobalPlan:
    """Decides who writes what, and where, for one state.

    Every element of every tensor is in exactly one chunk, each chunk is one range of the C-order
    bytes of an item that its rank holds, and files never overlap. Equal columns give equal plans,
    in every process.

    Args:
        columns: What each rank holds, valid by `columns.check`; the index is the rank. At least
            one.
        part_bytes: Target length of a file; at least 1.
        min_piece_bytes: Shortest piece into which a replicated box is cut; at least 1.
        min_writer_bytes: Least that a rank writes in total, approximately, if it is assigned bytes
            that other ranks hold as well. Ignored where there are too few bytes.
        to_lowest_rank: The lowest rank that holds a replicated item writes all of it.
        nodes: Number of each rank's node (`node_numbers`). The bytes written are balanced
            over nodes first. By default each rank is on a node of its own.

    Returns:
        The plan. A rank that writes nothing has no file.

    Raises:
        PlanConflictError: Ranks disagree about an FQN, or boxes overlap or reach out of their
            tensor. All conflicts are reported at once.
        CoverageError: No rank holds some elements of a tensor, and there is no other fault.
        UnsupportedValueError: A tensor's dtype has no raw bytes that can be stored.

    Complexity:
        A few sorts of as many numbers as there are rows: 1.4 us a row for 1000 ranks that hold
        1000 shards each (2 shared cores).
    """
    held = merge(columns)
    boxes = distinct_boxes(held)
    check_held(held, boxes)
    pieces = share_out(
        held,
        boxes,
        world_size=len(columns),
        min_piece_bytes=min_piece_bytes,
        min_writer_bytes=min_writer_bytes,
        to_lowest_rank=to_lowest_rank,
        nodes=nodes,
    )
    layout = lay_out(held, pieces, part_bytes=part_bytes)
    row = pieces.held[layout.piece]
    plan = GlobalPlan(
        world_size=len(columns),
        table=layout.table,
        source_rank=held.rank[row],
        source_row=held.row[row],
        source_start=pieces.start[layout.piece],
        file_rank=layout.file_rank,
        file_bytes=layout.file_bytes,
        disagreements=pieces.disagreements,
        digest=b"",
        groups=group_values(held, boxes, pieces.differing),
        settled=layout.settled,
    )
    data = encode_table(plan.table)
    named = replace(plan, digest=_digest_of(plan, data))
    _tables[named] = data
    return named


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


class FileLayout(NamedTuple):
    """The place of every piece.

    Attributes:
        table: The planned chunk table; file keys have `{attempt}` where the attempt id goes.
        piece: int64[c], row of `Pieces`; sorted by (file, place), a file's deferred pieces last.
        file_rank: int32[f], the rank that writes the file.
        file_bytes: int64[f], where the last fixed item of the file ends.
        settled: bool[f], whether no item of the file is expected to change between saves.
    """

    table: ChunkTable
    piece: Int64Array
    file_rank: Int32Array
    file_bytes: Int64Array
    settled: BoolArray


def lay_out(held: Held, pieces: Pieces, *, part_bytes: int) -> FileLayout:
    """Assigns every piece to a part file of its rank and to a place in that file.

    A file begins with the small payloads, each 64-aligned, so that one read covers many of them.
    The large payloads follow, each on a page, and then the deferred items:

        | small, 64-aligned | large, page-aligned | deferred | block checksums |
                                                  ^ `file_bytes`

    What is not expected to change between saves lies in files of its own, behind the others.

    Args:
        held: Items of all ranks.
        pieces: What is written.
        part_bytes: Target length of a file; a rank's share is cut into nearly equal parts.
    """
    order = _in_file_order(held, pieces)
    file, part = _in_parts(held, pieces, order, part_bytes)
    first = np.flatnonzero(np.diff(file, prepend=-1))
    file_rank = held.rank[pieces.held[order[first]]]
    keys = tuple(
        f"__{rank}_{index}.{{attempt}}.distcp"
        for rank, index in zip(file_rank.tolist(), part.tolist(), strict=True)
    )
    payload, head, foot, end = _places(held, pieces, order, file, len(keys))
    late, row = payload < 0, pieces.held[order]
    length = np.where(late, -1, pieces.num_bytes[order])
    table = ChunkTable(
        names=held.names,
        paths=held.paths,
        dtypes=held.dtypes,
        files=keys,
        kind=held.kind[held.first],
        dtype=held.dtype[held.first],
        ndim=held.ndim[held.first],
        shape=held.shape[held.first],
        requires_grad=held.requires_grad[held.first],
        tensor=held.name[row],
        offset=pieces.offset[order],
        size=pieces.size[order],
        file=file.astype(np.int32),
        item_offset=np.where(late, -1, payload - head),
        item_bytes=np.where(late, -1, head + length + foot),
        payload_offset=payload,
        payload_bytes=length,
        block_bytes=np.where(late, 0, block_bytes_for_many(np.maximum(length, 0))),
        check_start=np.zeros(len(row) + 1, dtype=np.int64),
        checks=np.zeros(0, dtype=np.uint64),
    )
    return FileLayout(table, order, file_rank, end, pieces.settled[order[first]])


def _in_file_order(held: Held, pieces: Pieces) -> Int64Array:
    """Returns the pieces sorted by rank, whether they change, section of the file, and row."""
    section = np.where(pieces.num_bytes >= LARGE_BYTES, 1, 0)
    section[held.kind[pieces.held] != Kind.TENSOR] = 2
    section[pieces.settled] += 3
    rank = held.rank[pieces.held].astype(np.int64)
    code = (rank * 6 + section) * len(held.rank) + pieces.held
    # Why stable: pieces of one row stay in the order of their bytes.
    return np.argsort(code, kind="stable")


def _in_parts(
    held: Held, pieces: Pieces, order: Int64Array, part_bytes: int
) -> tuple[Int64Array, Int64Array]:
    """Returns `(file of each piece, part number of each file)`."""
    if len(order) == 0:
        return order, order
    rank = held.rank[pieces.held[order]]
    weight = pieces.num_bytes[order] + ITEM_COST_BYTES
    group = rank.astype(np.int64) * 2 + pieces.settled[order]
    first = np.flatnonzero(np.diff(group, prepend=-1))
    starts = np.append(first, len(order))
    total = np.add.reduceat(weight, first)
    parts = np.maximum(-(-total // part_bytes), 1)
    step = -(-total // parts)
    line = np.cumsum(weight)
    before = np.repeat(line[first] - weight[first], np.diff(starts))
    part = (line - before - weight // 2) // np.repeat(step, np.diff(starts))
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (np.diff(group) != 0) | (np.diff(part) != 0)
    file = np.cumsum(fresh) - 1
    owner = rank[fresh]
    leaders = np.flatnonzero(np.diff(owner, prepend=-1))
    number = np.arange(len(owner)) - np.repeat(leaders, np.diff(np.append(leaders, len(owner))))
    return file, number


def _places(
    held: Held, pieces: Pieces, order: Int64Array, file: Int64Array, num_files: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Returns `(payload offset, header bytes, footer bytes, end of each file's fixed area)`."""
    rows = pieces.held[order]
    length = pieces.num_bytes[order]
    fixed = held.kind[rows] == Kind.TENSOR
    framed = np.flatnonzero(fixed)
    head, foot = np.zeros((2, len(order)), dtype=np.int64)
    head[framed], foot[framed] = _frames(held, rows[framed], pieces.size[order[framed]])
    payload = np.full(len(order), -1, dtype=np.int64)
    end = np.zeros(num_files, dtype=np.int64)
    large = length >= LARGE_BYTES
    for which, alignment in (
        (fixed & ~large, SMALL_ALIGNMENT),
        (fixed & large, LARGE_ALIGNMENT),
    ):
        at = np.flatnonzero(which)
        tail = length[at] + foot[at]
        payload[at] = _one_after_another(file[at], head[at], tail, end, alignment)
        # Careful: of repeated indices, numpy keeps the last assignment, here the file's last item.
        end[file[at]] = payload[at] + tail
    return payload, head, foot, end


def _frames(held: Held, rows: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array]:
    # Why: a vocabulary may contain dtypes of opaque tensors alone, which have no frame.
    used, code = np.unique(held.dtype[rows], return_inverse=True)
    names = [held.dtypes[index] for index in used.tolist()]
    frames, index = frames_of(names, code, held.ndim[rows], size)
    lengths = np.array([(len(one.header), len(one.footer)) for one in frames], dtype=np.int64)
    head, foot = lengths.reshape(-1, 2)[index].T
    return head, foot


def _one_after_another(
    file: Int64Array, head: Int64Array, tail: Int64Array, end: Int64Array, alignment: int
) -> Int64Array:
    """Returns the payload offsets of items that follow each other, file by file.

    Once a payload is aligned, the next one starts a multiple of the alignment later. These steps
    add up, so one cumulative sum places all items:

        | head | tail       | pad | head | tail       |
               ^ payload                 ^ next payload
               |<--------- step -------->|

    Args:
        file: int64[k], ascending.
        head: int64[k], bytes before each payload.
        tail: int64[k], bytes from each payload's start to its item's end.
        end: int64[f], where each file's first item may start.
        alignment: A power of two.
    """
    if len(file) == 0:
        return file
    before = np.append(0, tail[:-1])
    leads = np.diff(file, prepend=-1) != 0
    before[leads] = end[file[leads]]
    step = -(-(before + head) // alignment) * alignment
    line = np.cumsum(step)
    first = np.flatnonzero(leads)
    counts = np.diff(np.append(first, len(file)))
    return line - np.repeat(line[first] - step[first], counts)


def _digest_of(plan: GlobalPlan, table: bytes) -> bytes:
    """Returns 32 bytes that name everything that the ranks will write and report.

    Disagreements are not part of it: they change only the rank that an item comes from.

    Args:
        plan: The plan.
        table: Its chunk table, encoded.
    """
    groups = plan.groups
    arrays = (plan.source_rank, plan.source_row, plan.source_start, plan.file_bytes)
    words = [plan.world_size, groups.told, len(table), np.flatnonzero(plan.settled).tolist()]
    state = blake2b(json.dumps(words).encode(), digest_size=32)
    state.update(table)
    for array in (*arrays, groups.rank, groups.place, groups.group):
        state.update(str((array.dtype.str, array.shape)).encode())
        state.update(np.ascontiguousarray(array).data)
    return state.digest()


_tables: WeakKeyDictionary[GlobalPlan, bytes] = WeakKeyDictionary()


def encoded_table(plan: GlobalPlan) -> bytes:
    """Returns the planned chunk table as it is stored, encoded once for all saves of a plan."""
    data = _tables.get(plan)
    if data is None:
        data = _tables[plan] = encode_table(plan.table)
    return data


def pack_for_commit(plan: GlobalPlan) -> bytes:
    """Returns the part of a plan that its commit needs; with many rows, about a byte per row.

    The assignment of bytes to ranks, and the contents that must be equal, are left out.
    """
    few = {field.name: getattr(plan, field.name) for field in fields(plan)} | {
        "table": encoded_table(plan),
        "source_rank": None,
        "source_row": plan.source_row[plan.table.payload_offset < 0],
        "source_start": None,
        "groups": NO_GROUPS,
    }
    return pickle.dumps(few, pickle.HIGHEST_PROTOCOL)


def unpack_for_commit(data: bytes) -> GlobalPlan:
    """Returns the plan encoded by `pack_for_commit`, without the parts that it leaves out."""
    few = pickle.loads(data)
    table = decode_table(few["table"])
    row = np.zeros(table.num_chunks, dtype=np.int32)
    row[table.payload_offset < 0] = few["source_row"]
    known = {"table": table, "source_rank": 0 * row, "source_row": row, "source_start": 0 * row}
    plan = GlobalPlan(**{**few, **known})
    _tables[plan] = few["table"]
    return plan


def rank_plan(plan: GlobalPlan, rank: int) -> RankPlan:
    """Returns what one rank writes; no files if it writes nothing.

    Args:
        plan: The plan of all ranks.
        rank: One of them.

    Complexity:
        O(chunks of the rank).
    """
    # Invariant: files are sorted by rank.
    start, stop = run_of(plan.file_rank, rank)
    files = tuple(_file_plan(plan, file) for file in range(start, stop))
    return RankPlan(rank, files)


class RankPlans(Sequence[RankPlan]):
    """The plans of all ranks, each made on access.

    Args:
        plan: The plan of all ranks.
    """

    def __init__(self, plan: GlobalPlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return self._plan.world_size

    def __getitem__(self, rank: Any) -> Any:
        return rank_plan(self._plan, range(len(self))[rank])


def _file_plan(plan: GlobalPlan, file: int) -> FilePlan:
    table = plan.table
    chunks = np.arange(*run_of(table.file, file))
    # Invariant: a file's deferred chunks come last.
    fixed = int(np.count_nonzero(table.payload_offset[chunks] >= 0))
    own = chunks[:fixed]
    tensor = table.tensor[own]
    return FilePlan(
        file=file,
        key=table.files[file],
        num_bytes=int(plan.file_bytes[file]),
        dtypes=table.dtypes,
        row=plan.source_row[own],
        source_start=plan.source_start[own],
        dtype=table.dtype[tensor],
        ndim=table.ndim[tensor],
        size=table.size[own],
        requires_grad=table.requires_grad[tensor],
        item_offset=table.item_offset[own],
        item_bytes=table.item_bytes[own],
        payload_offset=table.payload_offset[own],
        payload_bytes=table.payload_bytes[own],
        block_bytes=table.block_bytes[own],
        deferred=plan.source_row[chunks[fixed:]],
        settled=bool(plan.settled[file]),
    )


def checked_receipts(plan: GlobalPlan, attempt: str, receipts: FileReceipts) -> Int64Array:
    """Returns what the receipts add to the plan, in the order of its chunks.

    Args:
        plan: The plan.
        attempt: Id of the attempt that wrote the files.
        receipts: The receipt of each of the plan's files, in their order.

    Returns:
        int64[k, 3]: item offset, item bytes and block bytes of each deferred chunk.

    Raises:
        InternalError: Receipts and plan do not match: a file is missing or not planned, has another
            key or length, or other deferred items than planned. All such files are named.
    """
    keys = [key.replace("{attempt}", attempt) for key in plan.table.files]
    there, files = {*receipts.file.tolist()}, {*range(len(keys))}
    wrong = [f"file {file} is not planned" for file in sorted(there - files)]
    wrong += [
        f"{keys[file]} of rank {plan.file_rank[file]} has none" for file in sorted(files - there)
    ]
    if not wrong:
        wrong = [
            f"{keys[file]} of rank {plan.file_rank[file]}: its key, its length or the places of "
            f"its deferred items, found {[*receipts][file]}"
            for file in np.flatnonzero(_find_misfits(plan, keys, receipts)).tolist()
        ]
    if wrong:
        raise InternalError("receipts do not fit the plan: " + "; ".join(wrong), key=attempt)
    # Invariant: deferred chunks and places are both sorted by file and, within a file, by row.
    return receipts.places[:, 1:]


def _find_misfits(plan: GlobalPlan, keys: list[str], receipts: FileReceipts) -> BoolArray:
    """Returns which files have a receipt that differs from the plan: bool[f]."""
    shape = _shape_of(plan)
    places, num_places = receipts.places, receipts.num_places
    if receipts.keys != "\n".join(keys):
        return np.array([one.key != key for one, key in zip(receipts, keys, strict=True)])
    if not np.array_equal(num_places, shape.num_places):
        return np.asarray(num_places != shape.num_places)
    # Where each deferred item may begin: at the end of the one before, or of the fixed area.
    starts, ends = offsets_of(num_places), places[:, 1] + places[:, 2]
    has = np.flatnonzero(num_places)
    before = np.append(0, ends)[:-1] if len(ends) else ends
    before[starts[has]] = plan.file_bytes[has]
    wrong = (places[:, 0] != shape.rows) | (places[:, 1] < before)
    wrong |= (places[:, 2] < 0) | (places[:, 3] <= 0)
    expected = plan.file_bytes.copy()
    expected[has] = ends[starts[has + 1] - 1]
    late = np.diff(offsets_of(num_blocks_many(places[:, 2], places[:, 3]))[starts])
    found = receipts.num_bytes != length_with_checks(expected, shape.fixed_checks + late)
    found[np.repeat(np.arange(len(keys)), num_places)[wrong]] = True
    return np.asarray(found)


class _Shape(NamedTuple):
    """What the receipts of a plan must look like."""

    fixed_checks: Int64Array
    num_places: Int64Array
    rows: Int64Array


_shapes: WeakKeyDictionary[GlobalPlan, _Shape] = WeakKeyDictionary()


def _shape_of(plan: GlobalPlan) -> _Shape:
    """Why cached: it is the same for every save that uses the plan."""
    shape = _shapes.get(plan)
    if shape is None:
        table = plan.table
        blocks = num_blocks_many(np.maximum(table.payload_bytes, 0), table.block_bytes)
        starts = np.searchsorted(table.file, np.arange(len(table.files) + 1))
        late = np.flatnonzero(table.payload_offset < 0)
        shape = _shapes[plan] = _Shape(
            np.diff(offsets_of(blocks)[starts]),
            np.bincount(table.file[late], minlength=len(table.files)),
            plan.source_row[late].astype(np.int64),
        )
    return shape
