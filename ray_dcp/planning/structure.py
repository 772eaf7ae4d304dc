"""The chunks of a regular layout, of which a table has the rows of few ranks; the others' follow.

Ranks that hold boxes of the same items, on a mesh of their own, are a *part* of the job: all of
it, or a stage of a pipeline. Those of a part whose files are alike make a *class*. The chunk table
has the rows of one rank of each class, its *leader*, the lowest. Another rank of the class has the
same rows, in files of its own, with boxes that lie as far from the leader's as the mesh of the
part says. So ten million rows are a thousand.

`expand` makes the chunks of all ranks; `ranks_around` returns which ranks have chunks of what a
load wants, so that only those are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ray_dcp.core.grouping import group_rows, offsets_of, within
from ray_dcp.core.rank_names import name_for, path_for
from ray_dcp.core.values import BoolArray, ChunkTable, Int32Array, Int64Array, pad
from ray_dcp.errors import InternalError
from ray_dcp.planning.reads import Wanted

MOST_BYTES = 2 << 30
"""Of memory for all that is made of a structure: 14 million chunks of matrices. Why a bound: a
short file may claim a large mesh."""
MOST_RANKS = 1 << 22
_AT_ONCE = 1 << 18
"""Of so many numbers boxes are made at once, for temporaries that are small."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where the ranks of a part hold their boxes.

    A rank's place is its number among those of the part, in their order.

    Attributes:
        strides: Distance in places between neighbours along each dimension of the mesh.
        lengths: Length of each dimension; their product is the number of ranks.
        tensors: int64[k], the tensors of the table that these ranks hold, each once, in the order
            in which they name them.
        offset: int64[k, D], where the box of place 0 starts.
        steps: int64[dimensions, k, D], how far the boxes of neighbours lie apart.
    """

    strides: tuple[int, ...]
    lengths: tuple[int, ...]
    tensors: Int64Array
    offset: Int64Array
    steps: Int64Array


@dataclass(frozen=True, eq=False)
class Structure:
    """What tells the chunks of `w` ranks from a table with those of the leaders.

    Attributes:
        meshes: Of the parts.
        part: int32[c], the part of each class.
        leaders: int64[c], the lowest rank of each class, ascending.
        kind: int32[w], the class of each rank.
        file_kind: int32[f], the class whose leader has each file of the table, ascending.
        own: int64[o], the tensors of the table that stand for one of each rank (`rank_names`),
            ascending.
    """

    meshes: tuple[Mesh, ...]
    part: Int32Array
    leaders: Int64Array
    kind: Int32Array
    file_kind: Int32Array
    own: Int64Array

    @property
    def world_size(self) -> int:
        """Number of ranks, `w`."""
        return len(self.kind)

    @cached_property
    def _coordinates(self) -> Int64Array:
        """Place of each rank along each dimension of its mesh: int64[dimensions, w]."""
        most = max(len(mesh.lengths) for mesh in self.meshes)
        found = np.zeros((most, self.world_size), dtype=np.int64)
        part = self.part[self.kind]
        for index, mesh in enumerate(self.meshes):
            ranks = np.flatnonzero(part == index)
            place = np.arange(len(ranks))
            for dim, (stride, length) in enumerate(zip(mesh.strides, mesh.lengths, strict=True)):
                found[dim, ranks] = place // stride % length
        return found

    def rows(self, num_tensors: int) -> Int64Array:
        """Returns where each part has each tensor in `starts`' terms: int64[parts, t], -1: not."""
        found = np.full((len(self.meshes), num_tensors), -1, dtype=np.int64)
        first = offsets_of(np.array([len(mesh.tensors) for mesh in self.meshes]))
        for index, mesh in enumerate(self.meshes):
            found[index, mesh.tensors] = first[index] + np.arange(len(mesh.tensors))
        return found

    def tensors(self, num_tensors: int) -> Tensors:
        """Returns the tensors of all ranks, in the order in which ranks come upon them.

        Args:
            num_tensors: Of the table.
        """
        is_own = np.zeros(num_tensors, dtype=bool)
        is_own[self.own] = True
        part = self.part[self.kind]
        slot = np.full((len(self.meshes), num_tensors), -1, dtype=np.int64)
        seen = np.zeros(num_tensors, dtype=bool)
        counts = np.zeros(self.world_size, dtype=np.int64)
        news, owns, lowest = [], [], []
        for index, mesh in enumerate(self.meshes):
            own = mesh.tensors[is_own[mesh.tensors]]
            slot[index, own] = np.arange(len(own))
            new = mesh.tensors[is_own[mesh.tensors] | ~seen[mesh.tensors]]
            seen[mesh.tensors] = True
            counts[part == index] = len(own)
            lowest.append(int(np.argmax(part == index)))
            news.append(new)
            owns.append(own)
        counts[lowest] = [len(new) for new in news]
        starts = offsets_of(counts)
        base, rank = np.zeros((2, int(starts[-1])), dtype=np.int64)
        number = np.full(num_tensors, -1, dtype=np.int64)
        of_own = starts[:-1, None] + np.arange(max(map(len, owns), default=0))
        for index, own in enumerate(owns):
            ranks = np.flatnonzero(part == index)
            base[of_own[ranks][:, : len(own)]] = own
            rank[of_own[ranks][:, : len(own)]] = ranks[:, None]
        for first, new in zip(lowest, news, strict=True):
            at = starts[first] + np.arange(len(new))
            base[at], rank[at] = new, first
            mine = is_own[new]
            of_own[first, : int(mine.sum())] = at[mine]
            number[new[~mine]] = at[~mine]
        return Tensors(base, rank, number, slot, of_own)

    def starts(self, shape: Int64Array, rank: Int64Array, row: Int64Array) -> Int64Array:
        """Returns where boxes start by the meshes: int64[m, D].

        Args:
            shape: int64[t, D], of the tensors.
            rank: int64[m].
            row: int64[m], as `rows` gave it.
        """
        offset, steps, most = self._boxes(shape)
        found = offset[row]
        for coordinate, step in zip(self._coordinates, steps, strict=True):
            found += step[row] * coordinate[rank][:, None]
        return np.asarray(np.minimum(found, most[row]))

    def _boxes(self, shape: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns offset, steps, and the largest offset, of all tensors of all parts in turn."""
        dimensions = len(self._coordinates)
        offset = np.concatenate([mesh.offset for mesh in self.meshes])
        steps = np.concatenate([_deepened(mesh.steps, dimensions) for mesh in self.meshes], axis=1)
        tensor = np.concatenate([mesh.tensors for mesh in self.meshes])
        return offset, steps, np.maximum(shape[tensor], offset)


class Tensors(NamedTuple):
    """The tensors of all ranks."""

    base: Int64Array
    """int64[n], of the table."""
    rank: Int64Array
    """int64[n], whose they are where each rank has its own."""
    number: Int64Array
    """int64[t], of each tensor of the table that is not one of each rank."""
    slot: Int64Array
    """int64[parts, t], where a part's ranks have one of their own in `of_own`; -1: it is none."""
    of_own: Int64Array
    """int64[w, o], the numbers of each rank's own."""

    def of(self, part: Int32Array, rank: Int64Array, tensor: Int32Array) -> Int32Array:
        """Returns the numbers of tensors of the table, as these ranks of these parts mean them."""
        slot = self.slot[part, tensor]
        found = self.number[tensor]
        own = np.flatnonzero(slot >= 0)
        found[own] = self.of_own[rank[own], slot[own]]
        return found.astype(np.int32)


class Expanded(NamedTuple):
    """The chunks of all ranks, and where each comes from."""

    table: ChunkTable
    chunk: Int64Array
    """int64[c], row of the leaders' table."""
    rank: Int64Array
    """int64[c], whose chunk it is."""


def files_of(structure: Structure) -> tuple[Int64Array, Int64Array]:
    """Returns `(rank, file of the leaders' table)` of each file of all ranks, in their order."""
    counts = np.bincount(structure.file_kind, minlength=len(structure.leaders))
    own = counts[structure.kind]
    rank = np.repeat(np.arange(structure.world_size), own)
    return rank, offsets_of(counts)[structure.kind[rank]] + within(own)


def is_expandable(table: ChunkTable, structure: Structure) -> bool:
    """Whether the chunks of all ranks are as many as are made of a table of any length."""
    return structure.world_size <= MOST_RANKS and _bytes_of(table, structure) <= MOST_BYTES


def _bytes_of(table: ChunkTable, structure: Structure) -> int:
    """Returns how much memory all chunks take while they are made and checked, at most.

    Files and names count twice: a reader may hold them with some chunks and without any.
    """
    width: int = table.shape.shape[1]
    dimensions = max(len(mesh.lengths) for mesh in structure.meshes)
    chars = np.array([len(name) for name in table.files], dtype=np.int64)
    texts = np.zeros(len(structure.leaders), dtype=np.int64)
    np.add.at(texts, structure.file_kind, 400 + 12 * chars)
    own = 0
    for tensor in structure.own.tolist():
        own += 1200 + 8 * len(table.names[tensor]) + 16 * len(table.paths[tensor] or ())
    held = sum(len(mesh.tensors) for mesh in structure.meshes)
    return (
        num_chunks_of(table, structure) * (120 + 16 * width)
        + int(texts[structure.kind].sum())
        + structure.world_size * (own + len(structure.own) * 32 * width)
        + structure.world_size * (100 + 8 * dimensions + 64 * width)
        + len(structure.meshes) * table.num_tensors * 16
        + held * width * 8 * (4 + 2 * dimensions)
    )


def num_chunks_of(table: ChunkTable, structure: Structure) -> int:
    """Returns how many chunks all ranks have."""
    counts = np.bincount(structure.file_kind[table.file], minlength=len(structure.leaders))
    ranks = np.bincount(structure.kind, minlength=len(counts))
    return sum(one * many for one, many in zip(counts.tolist(), ranks.tolist(), strict=True))


def expand(table: ChunkTable, structure: Structure, ranks: Int64Array | None = None) -> Expanded:
    """Returns the chunks of all ranks, in the order of their files.

    Args:
        table: Of the leaders; without checksums.
        structure: What tells the others.
        ranks: int64[k], ascending: only the chunks of these; of all tensors and files all the same.

    Raises:
        InternalError: A file's name is not that of its leader, or a leader has a chunk of a tensor
            that its part does not hold.

    Complexity:
        O(chunks of these ranks + all files); about 0.2 us a chunk.
    """
    kind = structure.file_kind[table.file]
    counts = np.bincount(kind, minlength=len(structure.leaders))
    ranks = np.arange(structure.world_size) if ranks is None else ranks
    own = counts[structure.kind[ranks]]
    rank = np.repeat(ranks, own)
    chunk = offsets_of(counts)[structure.kind[rank]] + within(own)
    file_rank, file = files_of(structure)
    file_starts = np.searchsorted(file_rank, np.arange(structure.world_size))
    first = np.searchsorted(structure.file_kind, np.arange(len(structure.leaders)))
    number = file_starts[rank] + table.file[chunk] - first[structure.kind[rank]]
    row = structure.rows(table.num_tensors)[structure.part[kind], table.tensor]
    if (row < 0).any():
        name = table.names[int(table.tensor[int(np.argmin(row))])]
        raise InternalError(f"expected chunks of tensors of their part, found one of {name}")
    leader = structure.leaders[structure.kind[rank]]
    offset = table.offset[chunk]
    moves = np.flatnonzero(rank != leader)
    step = max(1, _AT_ONCE // max(1, table.shape.shape[1]))
    for begin in range(0, len(moves), step):
        some = moves[begin : begin + step]
        rows = row[chunk[some]]
        offset[some] += structure.starts(table.shape, rank[some], rows)
        offset[some] -= structure.starts(table.shape, leader[some], rows)
    columns = ("item_offset", "item_bytes", "payload_offset", "payload_bytes", "block_bytes")
    tensors = structure.tensors(table.num_tensors)
    part = structure.part[structure.kind[rank]]
    whole = replace(
        _of_all(table, structure, tensors),
        files=names_of(table.files, structure, file_rank, file),
        tensor=tensors.of(part, rank, table.tensor[chunk]),
        offset=offset,
        size=table.size[chunk],
        file=number.astype(np.int32),
        check_start=np.zeros(len(chunk) + 1, dtype=np.int64),
        **{name: getattr(table, name)[chunk] for name in columns},
    )
    return Expanded(whole, chunk, rank)


def _of_all(table: ChunkTable, structure: Structure, tensors: Tensors) -> ChunkTable:
    """Returns a table with the tensors of all ranks, and chunks as before."""
    if not len(structure.own):
        return table
    is_own = np.zeros(table.num_tensors, dtype=bool)
    is_own[structure.own] = True
    names, paths, world_size = [], [], structure.world_size
    for base, rank in zip(tensors.base.tolist(), tensors.rank.tolist(), strict=True):
        name, path = table.names[base], table.paths[base]
        own = is_own[base]
        names.append(name_for(name, rank, world_size) if own else name)
        paths.append(path_for(path, rank, world_size) if own else path)
    columns = ("kind", "dtype", "ndim", "shape", "requires_grad")
    return replace(
        table,
        names=tuple(names),
        paths=tuple(paths),
        **{name: getattr(table, name)[tensors.base] for name in columns},
    )


def names_of(
    names: Sequence[str],
    structure: Structure,
    rank: Int32Array | Int64Array,
    file: Int64Array,
) -> tuple[str, ...]:
    """Returns the keys of all ranks' files.

    Args:
        names: Of the leaders' files.
        structure: Of the table.
        rank: As `files_of` gave it.
        file: As `files_of` gave it.

    Raises:
        InternalError: A file's name is not that of its leader.
    """
    ends = []
    for name, leader in zip(names, structure.leaders[structure.file_kind].tolist(), strict=True):
        start = f"__{leader}_"
        if not name.startswith(start):
            raise InternalError(f"expected a file of rank {leader}, found {name}", key=name)
        ends.append(name[len(start) :])
    pairs = zip(rank.tolist(), file.tolist(), strict=True)
    return tuple([f"__{one}_{ends[place]}" for one, place in pairs])


def _deepened(steps: Int64Array, dimensions: int) -> Int64Array:
    """Returns steps along more dimensions, in which nothing moves."""
    return np.pad(steps, ((0, dimensions - len(steps)), (0, 0), (0, 0)))


_MOST_PAIRS = 1 << 20
"""Of ranks and boxes of two dimensions looked at together: about 100 MB of temporaries."""


_MOST_MARKS = 1 << 28
"""Of classes and their tensors, a byte each. Why a bound: a short file may claim many of both."""


def ranks_around(
    table: ChunkTable, structure: Structure, wanted: Sequence[Wanted], tensors: Sequence[int]
) -> Int64Array:
    """Returns the ranks that have chunks of what is wanted, ascending; seldom others as well.

    Args:
        table: Of the leaders.
        structure: What tells the others.
        wanted: Boxes; of tensors as `expand` numbers them.
        tensors: Of which every chunk is wanted, numbered so too.

    Complexity:
        O(ranks x boxes that differ in more than their tensor) in numpy, a few 10 ns each.
    """
    if len(structure.leaders) * table.num_tensors > _MOST_MARKS:
        return np.arange(structure.world_size)
    known = structure.tensors(table.num_tensors)
    is_own = np.zeros(table.num_tensors, dtype=bool)
    is_own[structure.own] = True
    has = np.zeros((len(structure.leaders), table.num_tensors), dtype=bool)
    has[structure.file_kind[table.file], table.tensor] = True
    chosen = np.zeros(structure.world_size, dtype=bool)
    numbers = np.concatenate(
        [
            np.array(tensors, dtype=np.int64),
            *(boxes.tensor[is_own[known.base[boxes.tensor]]] for boxes in wanted),
        ]
    )
    base = known.base[numbers]
    chosen[known.rank[numbers[is_own[base]]]] = True
    chosen |= np.asarray(has[:, base[~is_own[base]]].any(axis=1))[structure.kind]
    extents = _extents(table, structure)
    width = table.shape.shape[1]
    for boxes in wanted:
        used = np.flatnonzero((boxes.size > 0).all(axis=1) & ~is_own[known.base[boxes.tensor]])
        most = max(width, boxes.offset.shape[1])
        tensor = known.base[boxes.tensor[used]]
        low = pad(boxes.offset[used], most, 0)[:, :width]
        high = low + pad(boxes.size[used], most, 1)[:, :width]
        for part, mesh in enumerate(structure.meshes):
            _mark(chosen, table, structure, part, mesh, extents, has, (tensor, low, high))
    return np.flatnonzero(chosen)


def _extents(table: ChunkTable, structure: Structure) -> tuple[Int64Array, Int64Array]:
    """Returns how far chunks reach from where their rank's box starts: int64[rows of meshes, D]."""
    kind = structure.file_kind[table.file]
    row = structure.rows(table.num_tensors)[structure.part[kind], table.tensor]
    start = structure.starts(table.shape, structure.leaders[kind], row)
    count = sum(len(mesh.tensors) for mesh in structure.meshes)
    low = np.full((count, table.shape.shape[1]), np.iinfo(np.int64).max)
    high = np.full_like(low, np.iinfo(np.int64).min)
    np.minimum.at(low, row, table.offset - start)
    np.maximum.at(high, row, table.offset + table.size - start)
    # Why: no rank has anything of these, and the ends must not overflow.
    nothing = high < low
    low[nothing], high[nothing] = 0, 0
    return low, high


def _mark(
    chosen: BoolArray,
    table: ChunkTable,
    structure: Structure,
    part: int,
    mesh: Mesh,
    extents: tuple[Int64Array, Int64Array],
    has: BoolArray,
    boxes: tuple[Int64Array, Int64Array, Int64Array],
) -> None:
    """Marks the ranks of one part that meet a box."""
    ranks = np.flatnonzero(structure.part[structure.kind] == part)
    all_rows = structure.rows(table.num_tensors)[part]
    mine = np.flatnonzero(all_rows[boxes[0]] >= 0)
    if not len(mine):
        return
    tensor, low, high = (array[mine] for array in boxes)
    row = all_rows[tensor]
    place = np.full(table.num_tensors, -1, dtype=np.int64)
    place[mesh.tensors] = np.arange(len(mesh.tensors))
    at = place[tensor]
    # Most tensors of a model lie alike: they are looked at once.
    # The row of zeros: tensors may have no dimension at all.
    alike = [
        np.zeros(len(tensor), np.int64),
        *table.shape[tensor].T,
        *mesh.offset[at].T,
        *np.concatenate(mesh.steps[:, at], axis=1).T,
        *extents[0][row].T,
        *extents[1][row].T,
        *low.T,
        *high.T,
    ]
    first, group = group_rows([np.ascontiguousarray(column) for column in alike])
    kinds = structure.kind[ranks]
    of_group = np.zeros((len(first), len(structure.leaders)), dtype=bool)
    np.logical_or.at(of_group, group, has[:, tensor].T)
    step = max(1, _MOST_PAIRS // (len(ranks) * max(1, table.shape.shape[1] // 2)))
    for begin in range(0, len(first), step):
        some = first[begin : begin + step]
        rows, everyone = np.repeat(row[some], len(ranks)), np.tile(ranks, len(some))
        start = structure.starts(table.shape, everyone, rows)
        lows, highs = (np.repeat(array[some], len(ranks), axis=0) for array in (low, high))
        meets = (start + extents[0][rows] < highs) & (start + extents[1][rows] > lows)
        met = meets.all(axis=1).reshape(len(some), len(ranks))
        chosen[ranks] |= (met & of_group[begin : begin + step][:, kinds]).any(axis=0)
