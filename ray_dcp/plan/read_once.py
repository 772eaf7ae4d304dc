"""Who reads what in a load, so that no byte that several ranks need is read by each of them.

Pure: the ranges of files that every rank has to read in, what each reads and gets from others out.
Moving the bytes is `transfer.relay`'s part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ray_dcp.plan.grouping import offsets_of, within
from ray_dcp.plan.values import BoolArray, Int32Array, Int64Array

__all__ = [
    "UNIT_BYTES",
    "Ranges",
    "RankShare",
    "ReadNeeds",
    "ReadShares",
    "ShareCost",
    "may_pay",
    "merged",
    "share_reads",
]

UNIT_BYTES = 16 << 20
"""What is read and handed on at once: long enough for the object store, which takes a
millisecond each, short enough for several to be under way within the budget."""

MIN_SAVED_BYTES = 64 << 10
"""Fewer bytes than this are never worth handing on: a message costs as much as reading them."""


@dataclass(frozen=True, eq=False)
class Ranges:
    """Byte ranges of files, sorted by (file, low).

    Attributes:
        file: int32[r], index into the chunk table's `files`.
        low: int64[r], first byte.
        high: int64[r], behind the last byte; above `low`.
    """

    file: Int32Array
    low: Int64Array
    high: Int64Array

    def __len__(self) -> int:
        return len(self.file)

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranges together."""
        return int((self.high - self.low).sum())

    def encode(self) -> bytes:
        """Returns what `decode` turns back."""
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
    """What it takes a rank to read a unit like all others, and to get it from the one that does.

    Example:
        Eight ranks on one node need all 16 MiB of a unit: from an object store, and from a disk
        whose pages all of them share.

        >>> one = lambda v: np.array([v])
        >>> unit = one(16 << 20), one(8 * 16 << 20), one(8), one(1)
        >>> ShareCost(request_s=0.03, bytes_per_s=1e8, cached=False).pays(*unit).tolist()
        [True]
        >>> ShareCost(request_s=2e-5, bytes_per_s=3e9, cached=True).pays(*unit).tolist()
        [False]
    """

    request_s: float
    """What a request of the storage costs before its first byte."""
    bytes_per_s: float
    """What a rank reads by one request."""
    cached: bool
    """What one rank of a node has read costs the others there a copy only."""
    message_s: float = 2e-3
    """What it takes until another rank knows that a unit is there."""
    copy_bytes_per_s: float = 2e9
    """Into the object store, and out of it."""
    network_bytes_per_s: float = 1e9
    """To another node; each node gets a unit once."""

    def pays(
        self, unit_bytes: Int64Array, demand_bytes: Int64Array, ranks: Int64Array, nodes: Int64Array
    ) -> BoolArray:
        """Returns for each unit whether its ranks have it sooner when one of them reads it.

        Args:
            unit_bytes: int64[u], its length.
            demand_bytes: int64[u], what its ranks need of it, summed.
            ranks: int64[u], how many need some of it.
            nodes: int64[u], on how many nodes.
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
    """What a rank has to read, for it to be read once for all ranks that need it."""

    ranges: bytes
    """`Ranges.encode`."""
    node: str
    """Where the rank is; ranks of one node share its memory."""
    cost: ShareCost | None
    """What reading costs there; None: share all that saves bytes, whether it pays or not."""


@dataclass(frozen=True, eq=False)
class RankShare:
    """The units that one rank reads for others or gets from them, sorted by (file, low).

    Attributes:
        unit: int32[u], number of the unit in the load.
        file: int32[u], index into the chunk table's `files`.
        low: int64[u], first byte in the file.
        high: int64[u], behind the last byte.
        reader: int32[u], the rank that reads it.
        ranks: int32[u], how many ranks need some of it, the reader among them.
        here: How many ranks that read for others are on this rank's node, itself among them.
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
    """All units of a load; the columns of `RankShare`, and who needs what.

    Attributes:
        file: int32[u].
        low: int64[u].
        high: int64[u].
        reader: int32[u].
        start: int64[u + 1], unit `i` is needed by `group[start[i]:start[i + 1]]`.
        group: int32[m], ranks with equal needs are one group.
        groups: int32[world_size], the group of each rank; -1 for one that needs nothing.
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
    """Returns whether it is of use to look what could be shared.

    Not where fewer than two ranks take part, or all read through one cache and share only what
    pays: then nothing does, and it need not be thought about for 10,000 ranks.

    Args:
        needs: Of the ranks that take part.
    """
    cached = all(each.cost is not None and each.cost.cached for each in needs)
    return len(needs) > 1 and not (cached and len({each.node for each in needs}) == 1)


def merged(file: Int32Array, low: Int64Array, high: Int64Array) -> Ranges:
    """Returns the ranges that some ranges cover together: sorted, none touching another.

    Args:
        file: int32[r].
        low: int64[r].
        high: int64[r]; empty ranges count for nothing.

    Example:
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
    """Decides which bytes are read once for several ranks, and by which of them.

    What the ranks need is cut into units; one that several ranks need, where that pays, is read by
    the rank among them which has the least to read. All else everybody reads for himself.
    Units follow each other in files as their numbers do: whoever reads and uses them in this order
    never waits for someone who waits for him.

    Args:
        needs: What ranks read, as `merged` gives it; ranks that do not take part are left out.
        world_size: Ranks are `0 … world_size - 1`.
        nodes: The node of each rank; all on one when empty.
        cost: None shares whatever saves `min_saved_bytes`, what it costs or not.
        unit_bytes: Longest unit.
        min_saved_bytes: Least that a unit must save, over all ranks.

    Complexity:
        O(ranges of ranks with distinct needs + units x groups that need them), in numpy, and
        about 5 us a unit.
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
    units = _cut(whole, unit_bytes)
    incidences = _incidences(units, distinct)
    return _chosen(units, incidences, groups, ranks, node, cost, min_saved_bytes, needs)


_COLUMNS = ("file", "low", "high")


def _bases(file: Int32Array, high: Int64Array) -> Int64Array:
    """Returns where each file begins on one line on which no two files touch."""
    length = np.zeros(int(file.max()) + 1, np.int64)
    np.maximum.at(length, file, high + 1)
    return offsets_of(length)[:-1]


def _cut(whole: Ranges, unit_bytes: int) -> Ranges:
    counts = -(-(whole.high - whole.low) // unit_bytes)
    row, nth = np.repeat(np.arange(len(whole)), counts), within(counts)
    low = whole.low[row] + nth * unit_bytes
    return Ranges(whole.file[row], low, np.minimum(low + unit_bytes, whole.high[row]))


def _incidences(
    units: Ranges, distinct: Sequence[Ranges]
) -> tuple[Int64Array, Int64Array, Int64Array]:  # fmt: skip
    """Returns `(unit, group, bytes that it needs of it)` of all that meet, by unit."""
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


def _chosen(
    units: Ranges,
    incidences: tuple[Int64Array, Int64Array, Int64Array],
    groups: Int32Array,
    ranks: Sequence[int],
    node: Int64Array,
    cost: ShareCost | None,
    min_saved_bytes: int,
    needs: Mapping[int, Ranges],
) -> ReadShares:
    unit, group, demand = incidences
    members = [np.flatnonzero(groups == one) for one in range(int(groups.max()) + 1)]
    sizes = np.array([len(one) for one in members])
    num_nodes = np.array([len(set(node[one].tolist())) for one in members])
    starts = offsets_of(np.bincount(unit, minlength=len(units)))
    length = units.high - units.low
    total = np.add.reduceat(demand * sizes[group], starts[:-1])
    num_ranks = np.add.reduceat(sizes[group], starts[:-1])
    # Careful: an upper bound where groups have nodes in common.
    on_nodes = np.minimum(np.add.reduceat(num_nodes[group], starts[:-1]), len(set(node.tolist())))
    shared = (num_ranks > 1) & (total - length >= min_saved_bytes)
    if cost is not None:
        shared &= cost.pays(length, total, num_ranks, on_nodes)
    load = np.zeros(len(groups), np.int64)
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
