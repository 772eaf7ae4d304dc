"""What a load reads: chunks, byte ranges, and which rank reads what several ranks need.

`plan_reads` finds which stored chunks meet which wanted boxes, and whether they cover all of them.

`share_reads` takes the file ranges that every rank needs and decides what each rank reads itself
and what it receives from others, so that a byte that several ranks need is read once.

Pure: nothing here opens a file. `io.read_jobs` plans the reads of one rank, `io.shared_read` sends
the shared bytes to other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ray_dcp.core.values import (
    BoolArray,
    ChunkTable,
    Int32Array,
    Int64Array,
    intersect,
    offsets_of,
    volume,
    widen,
    within,
)
from ray_dcp.planning.coverage import missing_volumes

_BATCH_PAIRS = 2_000_000
"""Candidate pairs that are compared at once: about 200 MB of temporaries in two dimensions."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The boxes that a caller wants filled, one row per target buffer.

    Attributes:
        tensor: int32[w], index into the chunk table's `names`; a tensor, never an object.
        offset: int64[w, D], where the box starts in the global tensor, padded with 0.
        size: int64[w, D], lengths of the box, padded with 1. A box of volume 0 needs no bytes.
        itemsize: int64[w], bytes of an element as stored.
    """

    tensor: Int32Array
    offset: Int64Array
    size: Int64Array
    itemsize: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Every (chunk, wanted) pair with a common part, sorted by (file, place in the file).

    The place is `payload_offset`, or `item_offset` where that is unknown. Pairs of one chunk are
    adjacent, in the order of the wanted rows.

    Attributes:
        chunk: int32[p], row of the chunk table.
        wanted: int32[p], row of the `Wanted`.
        offset: int64[p, D], where the common part starts in the global tensor.
        size: int64[p, D], its lengths, all above 0.
        uncovered: `(wanted row, missing bytes)` for each wanted box that the chunks don't fill.
        bytes_needed: Bytes of all wanted boxes together.
    """

    chunk: Int32Array
    wanted: Int32Array
    offset: Int64Array
    size: Int64Array
    uncovered: tuple[tuple[int, int], ...]
    bytes_needed: int

    def __len__(self) -> int:
        return len(self.chunk)


class TensorBoxes(NamedTuple):
    """Boxes of tensors, such as those of chunks."""

    tensor: Int32Array
    """int32[n], the tensor of each box."""
    offset: Int64Array
    """int64[n, D], where each box starts."""
    size: Int64Array
    """int64[n, D], lengths of each box."""
    num_tensors: int


def plan_reads(table: ChunkTable, wanted: Wanted) -> ReadPlan:
    """Returns which part of which chunk goes to which target.

    Chunks may overlap (third-party checkpoints). Each of them is listed then, and the last one read
    fills the common part.

    Args:
        table: The stored chunks.
        wanted: The wanted boxes. The part of a box that reaches out of its tensor is uncovered.

    Complexity:
        O(chunks) plus O(pairs of a wanted box and a chunk of its tensor), in numpy; memory for
        two million pairs at a time.
    """
    width = max(1, table.offset.shape[1], wanted.offset.shape[1])
    box = widen(wanted.offset, wanted.size, width)
    chunk_box = widen(table.offset, table.size, width)
    by_tensor = TensorBoxes(table.tensor, *chunk_box, table.num_tensors)
    chunk, row, offset, size = meetings(by_tensor, wanted.tensor, box)
    elements = volume(box[1])
    missing = missing_volumes(row, offset, size, *box)
    place = np.where(table.payload_offset < 0, table.item_offset, table.payload_offset)
    order = np.lexsort((row, chunk, place[chunk], table.file[chunk]))
    lacking = np.flatnonzero(missing)
    uncovered = zip(lacking.tolist(), (missing * wanted.itemsize)[lacking].tolist(), strict=True)
    return ReadPlan(
        chunk=chunk[order].astype(np.int32),
        wanted=row[order].astype(np.int32),
        offset=offset[order],
        size=size[order],
        uncovered=tuple(uncovered),
        bytes_needed=int((elements * wanted.itemsize).sum()),
    )


def meetings(
    boxes: TensorBoxes, tensor: Int32Array, wanted: tuple[Int64Array, Int64Array]
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Returns all pairs of a box and a wanted box of the same tensor that have a common part.

    Args:
        boxes: The boxes available.
        tensor: int32[w], the tensor of each wanted box.
        wanted: Offsets and sizes of the wanted boxes: int64[w, D] each, with the `D` of `boxes`.

    Returns:
        `(box, wanted row, offset, size)`, the last two of the common part.
    """
    order = np.argsort(boxes.tensor, kind="stable")
    starts = offsets_of(np.bincount(boxes.tensor, minlength=boxes.num_tensors))
    counts = (starts[1:] - starts[:-1])[tensor]
    found = []
    for low, high in _batches(counts):
        rows = np.repeat(np.arange(low, high), counts[low:high])
        box = order[starts[tensor[rows]] + within(counts[low:high])]
        pair = (boxes.offset[box], boxes.size[box], wanted[0][rows], wanted[1][rows])
        offset, size, meets = intersect(*pair)
        found.append((box[meets], rows[meets], offset[meets], size[meets]))
    box, rows, offset, size = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box, rows, offset, size


def _batches(counts: Int64Array) -> list[tuple[int, int]]:
    """Splits the wanted rows into runs with few enough candidate pairs each; at least one run."""
    ends = np.cumsum(counts)
    bounds = [0]
    while bounds[-1] < len(counts):
        done = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, done + _BATCH_PAIRS, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return list(pairwise(bounds)) or [(0, 0)]


UNIT_BYTES = 16 << 20
"""Length of what one rank reads and sends at once. Why: the object store takes a millisecond per
object, so a unit is long; several units must fit into the memory budget, so it is not longer."""

MIN_SAVED_BYTES = 64 << 10
"""Least bytes that sharing a unit must save. Why: a message costs as much as reading fewer."""


@dataclass(frozen=True, eq=False)
class Ranges:
    """Byte ranges of files, sorted by (file, low).

    Attributes:
        file: int32[r], index into the chunk table's `files`.
        low: int64[r], first byte.
        high: int64[r], end of the last byte, exclusive; above `low`.
    """

    file: Int32Array
    low: Int64Array
    high: Int64Array

    def __len__(self) -> int:
        return len(self.file)

    @property
    def num_bytes(self) -> int:
        """Total length of all ranges, in bytes."""
        return int((self.high - self.low).sum())

    def encode(self) -> bytes:
        """Returns the ranges as bytes for `decode`."""
        parts = (self.file.astype("<i4"), self.low.astype("<i8"), self.high.astype("<i8"))
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def decode(cls, data: bytes) -> Ranges:
        """Returns the ranges that `encode` was called on."""
        count = len(data) // 20
        return cls(
            np.frombuffer(data, "<i4", count).astype(np.int32),
            np.frombuffer(data, "<i8", count, 4 * count).astype(np.int64),
            np.frombuffer(data, "<i8", count, 12 * count).astype(np.int64),
        )


@dataclass(frozen=True)
class ShareCost:
    """What a unit costs a rank that reads it itself, and one that receives it from its reader.

    Examples:
        Eight ranks on one node need all 16 MiB of a unit: first from an object store, then from a
        disk whose page cache they share.

        >>> one = lambda v: np.array([v])
        >>> unit = one(16 << 20), one(8 * 16 << 20), one(8), one(1)
        >>> ShareCost(request_s=0.03, bytes_per_s=1e8, cached=False).pays(*unit).tolist()
        [True]
        >>> ShareCost(request_s=2e-5, bytes_per_s=3e9, cached=True).pays(*unit).tolist()
        [False]
    """

    request_s: float
    """Latency of a storage request: time to its first byte, in seconds."""
    bytes_per_s: float
    """Throughput of one rank reading by one request."""
    cached: bool
    """Whether bytes that one rank of a node has read cost the others on that node only a copy."""
    message_s: float = 2e-3
    """Time until another rank knows that a unit is available, in seconds."""
    copy_bytes_per_s: float = 2e9
    """Throughput of copies into and out of the object store."""
    network_bytes_per_s: float = 1e9
    """Throughput to another node; each node receives a unit once."""

    def pays(
        self, unit_bytes: Int64Array, demand_bytes: Int64Array, ranks: Int64Array, nodes: Int64Array
    ) -> BoolArray:
        """Returns for each unit whether its ranks get it sooner if one of them reads it for all.

        Args:
            unit_bytes: int64[u], length of the unit.
            demand_bytes: int64[u], bytes of it that its ranks need, summed over the ranks.
            ranks: int64[u], number of ranks that need a part of it.
            nodes: int64[u], number of nodes that these ranks are on.
        """
        own_bytes = demand_bytes / ranks
        again_s = self.request_s + own_bytes / self.bytes_per_s
        read_s = self.request_s + unit_bytes / self.bytes_per_s
        put_s = unit_bytes / self.copy_bytes_per_s
        share_s = (
            (read_s + put_s) / ranks
            + self.message_s
            + own_bytes / self.copy_bytes_per_s
            + (nodes > 1) * unit_bytes / self.network_bytes_per_s
        )
        return np.asarray((again_s > share_s) & ((nodes > 1) | (not self.cached)))


@dataclass(frozen=True)
class ReadNeeds:
    """What a rank reports so that bytes are read once for all ranks that need them."""

    ranges: bytes
    """The ranges that the rank has to read, from `Ranges.encode`."""
    node: str
    """The rank's node; ranks of one node share its memory."""
    cost: ShareCost | None
    """What reading costs on that node; None shares whatever saves bytes, whether or not it pays."""


@dataclass(frozen=True, eq=False)
class RankShare:
    """The units that one rank reads for others or receives from them, sorted by (file, low).

    Attributes:
        unit: int32[u], number of the unit in the load.
        file: int32[u], index into the chunk table's `files`.
        low: int64[u], first byte in the file.
        high: int64[u], end of the last byte, exclusive.
        reader: int32[u], the rank that reads the unit.
        ranks: int32[u], number of ranks that need a part of it, the reader included.
        here: Number of ranks on this rank's node that read for others, this rank included.
    """

    unit: Int32Array
    file: Int32Array
    low: Int64Array
    high: Int64Array
    reader: Int32Array
    ranks: Int32Array
    here: int = 1

    def __len__(self) -> int:
        return len(self.unit)


@dataclass(frozen=True, eq=False)
class ReadShares:
    """All units of a load: the columns of `RankShare`, and which ranks need which unit.

    Attributes:
        file: int32[u].
        low: int64[u].
        high: int64[u].
        reader: int32[u].
        start: int64[u + 1]; `group[start[i]:start[i + 1]]` are the groups that need unit `i`.
        group: int32[m], groups; ranks with equal needs form one group.
        groups: int32[world_size], the group of each rank; -1 for a rank that needs nothing.
        node: int64[world_size], the node of each rank.
    """

    file: Int32Array
    low: Int64Array
    high: Int64Array
    reader: Int32Array
    start: Int64Array
    group: Int32Array
    groups: Int32Array
    node: Int64Array

    def __len__(self) -> int:
        return len(self.file)

    def of_rank(self, rank: int) -> RankShare:
        """Returns the part of one rank."""
        sizes = np.bincount(self.groups[self.groups >= 0], minlength=1)
        counts = np.add.reduceat(sizes[self.group], self.start[:-1]) if len(self) else self.low
        owner = np.repeat(np.arange(len(self)), np.diff(self.start))
        chosen = owner[self.group == self.groups[rank]] if self.groups[rank] >= 0 else owner[:0]
        return RankShare(
            unit=chosen.astype(np.int32),
            file=self.file[chosen],
            low=self.low[chosen],
            high=self.high[chosen],
            reader=self.reader[chosen],
            ranks=counts[chosen].astype(np.int32),
            here=int((self.node[np.unique(self.reader)] == self.node[rank]).sum()) or 1,
        )


def may_pay(needs: Collection[ReadNeeds]) -> bool:
    """Returns whether sharing reads can pay at all.

    It can't if fewer than two ranks take part, or if all of them read through one cache and share
    only what pays. Why: this spares the planning for 10,000 ranks.

    Args:
        needs: Needs of the ranks that take part.
    """
    cached = all(each.cost is not None and each.cost.cached for each in needs)
    return len(needs) > 1 and not (cached and len({each.node for each in needs}) == 1)


def merged(file: Int32Array, low: Int64Array, high: Int64Array) -> Ranges:
    """Returns the union of ranges: sorted, with touching ranges joined.

    Args:
        file: int32[r].
        low: int64[r].
        high: int64[r]; empty ranges are ignored.

    Examples:
        >>> found = merged(np.array([1, 0, 0]), np.array([5, 10, 0]), np.array([9, 20, 10]))
        >>> found.file.tolist(), found.low.tolist(), found.high.tolist()
        ([0, 1], [0, 5], [20, 9])
    """
    kept = high > low
    file, low, high = file[kept], low[kept], high[kept]
    order = np.lexsort((low, file))
    file, low, high = file[order], low[order], high[order]
    if not len(file):
        return Ranges(file.astype(np.int32), low, high)
    base = _bases(file, high)
    line_low, reach = low + base[file], np.maximum.accumulate(high + base[file])
    first = np.flatnonzero(np.append(True, line_low[1:] > reach[:-1]))
    last = np.append(first[1:], len(file)) - 1
    return Ranges(file[first].astype(np.int32), low[first], reach[last] - base[file[first]])


def share_reads(
    needs: Mapping[int, Ranges],
    *,
    world_size: int,
    nodes: Sequence[str] = (),
    cost: ShareCost | None = None,
    unit_bytes: int = UNIT_BYTES,
    min_saved_bytes: int = MIN_SAVED_BYTES,
) -> ReadShares:
    """Decides which bytes one rank reads for several, and which rank that is.

    The needed bytes are cut into units. A unit that several ranks need is read, if that pays, by
    the one of these ranks that has the least to read so far. Each rank reads all other bytes
    itself. Units are numbered in file order: ranks that read and use them in this order never wait
    for each other in a circle.

    Args:
        needs: Ranges that each rank reads, from `merged`; ranks that don't take part are left out.
        world_size: Ranks are `0 … world_size - 1`.
        nodes: The node of each rank; if empty, all ranks are on one node.
        cost: Cost of reads; None shares every unit that saves `min_saved_bytes`.
        unit_bytes: Longest unit.
        min_saved_bytes: Least bytes that sharing a unit must save, summed over all ranks.

    Complexity:
        O(ranges of ranks with distinct needs + units x groups that need them), in numpy, and
        about 5 us per unit.
    """
    ranks = sorted(rank for rank in needs if len(needs[rank]))
    groups = np.full(world_size, -1, np.int32)
    by_content: dict[bytes, int] = {}
    distinct: list[Ranges] = []
    for rank in ranks:
        content = needs[rank].encode()
        if content not in by_content:
            by_content[content] = len(distinct)
            distinct.append(needs[rank])
        groups[rank] = by_content[content]
    node = _numbered(nodes, world_size)
    if len(ranks) < 2:
        return _shares_of([], groups, node)
    whole = merged(*(np.concatenate([getattr(r, n) for r in distinct]) for n in _COLUMNS))
    units = _cut_into_units(whole, unit_bytes)
    unit, group, demand = _pair_units_with_groups(units, distinct)
    members = [np.flatnonzero(groups == one) for one in range(len(distinct))]
    sizes = np.array([len(one) for one in members])
    num_nodes = np.array([len(set(node[one].tolist())) for one in members])
    starts = offsets_of(np.bincount(unit, minlength=len(units)))
    length = units.high - units.low
    total = np.add.reduceat(demand * sizes[group], starts[:-1])
    num_ranks = np.add.reduceat(sizes[group], starts[:-1])
    # Careful: an upper bound if groups have nodes in common.
    on_nodes = np.minimum(np.add.reduceat(num_nodes[group], starts[:-1]), len(set(node.tolist())))
    shared = (num_ranks > 1) & (total - length >= min_saved_bytes)
    if cost is not None:
        shared &= cost.pays(length, total, num_ranks, on_nodes)
    load = np.zeros(world_size, np.int64)
    for rank in ranks:
        load[rank] = needs[rank].num_bytes
    for row in np.flatnonzero(shared[unit]).tolist():
        load[members[group[row]]] -= demand[row]
    found = []
    for index in np.flatnonzero(shared).tolist():
        own = group[starts[index] : starts[index + 1]]
        able = np.concatenate([members[one] for one in own.tolist()])
        reader = int(able[np.argmin(load[able])])
        load[reader] += length[index]
        found.append((units.file[index], units.low[index], units.high[index], reader, own))
    return _shares_of(found, groups, node)


_COLUMNS = ("file", "low", "high")


def _bases(file: Int32Array, high: Int64Array) -> Int64Array:
    """Returns where each file begins on one common axis on which no two files touch."""
    length = np.zeros(int(file.max()) + 1, np.int64)
    np.maximum.at(length, file, high + 1)
    return offsets_of(length)[:-1]


def _cut_into_units(whole: Ranges, unit_bytes: int) -> Ranges:
    counts = -(-(whole.high - whole.low) // unit_bytes)
    row, nth = np.repeat(np.arange(len(whole)), counts), within(counts)
    low = whole.low[row] + nth * unit_bytes
    return Ranges(whole.file[row], low, np.minimum(low + unit_bytes, whole.high[row]))


def _pair_units_with_groups(
    units: Ranges, distinct: Sequence[Ranges]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns `(unit, group, bytes that the group needs of it)` of all pairs that meet, by unit."""
    base = _bases(units.file, units.high)
    unit_low, unit_high = units.low + base[units.file], units.high + base[units.file]
    found = []
    for group, ranges in enumerate(distinct):
        low, high = ranges.low + base[ranges.file], ranges.high + base[ranges.file]
        first = np.searchsorted(unit_high, low, side="right")
        counts = np.searchsorted(unit_low, high, side="left") - first
        row = np.repeat(np.arange(len(ranges)), counts)
        unit = first[row] + within(counts)
        num_bytes = np.minimum(high[row], unit_high[unit]) - np.maximum(low[row], unit_low[unit])
        starts = np.flatnonzero(np.append(True, unit[1:] != unit[:-1]))
        found.append(
            (unit[starts], np.full(len(starts), group), np.add.reduceat(num_bytes, starts))
        )
    unit, member, demand = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(unit, kind="stable")
    return unit[order], member[order], demand[order]


def _numbered(nodes: Sequence[str], world_size: int) -> Int64Array:
    if not nodes:
        return np.zeros(world_size, np.int64)
    known = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
    return np.array([known[name] for name in nodes], np.int64)


def _shares_of(
    found: Sequence[tuple[int, int, int, int, Int64Array]], groups: Int32Array, node: Int64Array
) -> ReadShares:
    own = [row[4] for row in found]
    return ReadShares(
        file=np.array([row[0] for row in found], np.int32),
        low=np.array([row[1] for row in found], np.int64),
        high=np.array([row[2] for row in found], np.int64),
        reader=np.array([row[3] for row in found], np.int32),
        start=offsets_of(np.array([len(one) for one in own], np.int64)),
        group=np.concatenate([*own, np.zeros(0)]).astype(np.int32),
        groups=groups,
        node=node,
    )
