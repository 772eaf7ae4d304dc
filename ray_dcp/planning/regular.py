"""Regular layouts: what all ranks of a mesh hold follows from the rows of a few of them.

**The mesh** (`infer`). Where every rank holds the part of each tensor that its place in a mesh says
(`Shard` and `Replicate` of DTensors, equal slabs, uneven last ones), its boxes follow from those of
rank 0 and a step for each dimension of the mesh: the other ranks' rows need not be sent. The caller
gives neither mesh nor placements: they are read off the rows of few ranks. A rank's fingerprint
proves that it holds what follows, so a wrong guess costs time and nothing else: ranks that hold
something else send their rows.

**The owners** (`find_holders`). Along some dimensions of the mesh of its ranks an item is cut,
along the others it is replicated: `Shard` and `Replicate`, FSDP, HSDP, tensor and pipeline
parallel, experts on meshes of their own. The ranks that hold one box follow from that, without the
rows of most ranks. The result is what `merge.distinct_boxes` of all rows would find, and that the
boxes cover each tensor once; other layouts are left to the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ray_dcp.core.grouping import offsets_of
from ray_dcp.core.rank_names import is_own
from ray_dcp.core.values import BoolArray, Columns, Int32Array, Int64Array, Kind, pad, volume
from ray_dcp.planning.coverage import check_coverage
from ray_dcp.planning.merge import Held, differing

_AT_ONCE = 1 << 16
"""Of so many numbers boxes are made at once: they stay in the cache of a core."""


def probes(world_size: int) -> tuple[int, ...]:
    """Returns the ranks whose rows tell the mesh, ascending: 0 and where a dimension may begin.

    Example:
        >>> probes(12)
        (0, 1, 2, 3, 4, 6)
    """
    small = [one for one in range(1, int(world_size**0.5) + 1) if world_size % one == 0]
    divisors = {*small, *(world_size // one for one in small)}
    return (0, *sorted(divisors - {world_size}))


@dataclass(frozen=True, eq=False)
class Regular:
    """A mesh of ranks, and what each of them holds.

    Attributes:
        first: What rank 0 holds.
        strides: Distance in ranks between neighbours along each dimension of the mesh, ascending;
            each is a multiple of the one before.
        lengths: Length of each dimension.
        steps: int64[dimensions, n, D], how far the boxes of neighbours lie apart.
    """

    first: Columns
    strides: tuple[int, ...]
    lengths: tuple[int, ...]
    steps: Int64Array

    def of(self, rank: int) -> Columns:
        """Returns what a rank holds, if it is as regular as those that were looked at."""
        offset, size = self.boxes(rank)
        return replace(self.first, offset=offset, size=size)

    def boxes(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """Returns where the boxes of a rank start, and how large they are."""
        offset, size = self.boxes_of(np.array([rank]))
        return offset[0], size[0]

    def boxes_of(self, ranks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns `boxes` of m ranks: two int64[m, n, D]."""
        offset = np.repeat(self.first.offset[None], len(ranks), axis=0)
        for stride, length, step in zip(self.strides, self.lengths, self.steps, strict=True):
            if step.any():
                offset += step * (ranks // stride % length)[:, None, None]
        return _placed(self.first, offset)

    def many(self, ranks: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yields `boxes` of each of these ranks."""
        step = max(1, _AT_ONCE // max(1, self.first.offset.size))
        for start in range(0, len(ranks), step):
            yield from zip(*self.boxes_of(ranks[start : start + step]), strict=True)


def infer(known: Mapping[int, Columns], world_size: int) -> Regular | None:
    """Returns the mesh on which the boxes of ranks lie; None where there is none.

    Args:
        known: What the ranks of `probes` hold, and perhaps others.
        world_size: Number of ranks.
    """
    first = known.get(0)
    if first is None or any(rank not in known for rank in probes(world_size)):
        return None
    if not all(_alike(first, known[rank]) for rank in probes(world_size)):
        return None
    strides, steps = [1], [np.zeros_like(first.offset)]
    if world_size > 1:
        steps = [known[1].offset - first.offset]
    for rank in probes(world_size)[2:]:
        if rank % strides[-1]:
            continue
        # A dimension goes on as long as its steps add up. Where two look like one, they are one.
        expected = first.offset + steps[-1] * (rank // strides[-1])
        offset, size = _placed(first, expected)
        found = known[rank]
        if not (np.array_equal(offset, found.offset) and np.array_equal(size, found.size)):
            strides.append(rank)
            steps.append(found.offset - first.offset)
    ends = [*strides[1:], world_size]
    lengths = [end // stride for stride, end in zip(strides, ends, strict=True)]
    return Regular(first, tuple(strides), tuple(lengths), np.stack(steps))


def _alike(one: Columns, other: Columns) -> bool:
    """Whether two ranks hold boxes of the same tensors, in one order."""
    return (
        one.names == other.names
        and one.paths == other.paths
        and one.dtypes == other.dtypes
        and one.offset.shape == other.offset.shape
    )


def _placed(first: Columns, offset: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns rank 0's items at other places: what reaches out of a tensor is cut off."""
    offset = np.minimum(offset, np.maximum(first.shape, first.offset))
    inside = np.maximum(first.shape - offset, 0)
    size = np.where(offset == first.offset, first.size, np.minimum(first.size, inside))
    return offset, size


MOST_BOXES = 1 << 16
"""Of tensors that several parts hold: these are looked at one by one."""


@dataclass(frozen=True, eq=False)
class Part:
    """Ranks that hold boxes of the same items.

    Attributes:
        ranks: int64[n], ascending. A rank's place is its number among them.
        regular: What they hold, by place.
        sizes: int32[n], the lowest place whose boxes are of the same sizes.
    """

    ranks: Int64Array
    regular: Regular
    sizes: Int32Array


class Shared(NamedTuple):
    """Boxes that the same ranks hold: several ranks, or one that is alone with its part of it."""

    ranks: Int64Array
    """Ascending."""
    rows: Int64Array
    """Of `Held`, as the lowest of the ranks holds them, ascending."""


class _Cut(NamedTuple):
    """Items of a part that are cut along the same dimensions of its mesh, in the same order."""

    rows: Int64Array
    """int64[k], of the part."""
    stop: Int64Array
    """int64[k], number of cells that have elements; those behind hold one box without any."""
    places: Int64Array
    """int64[cells, h], the places that hold each cell."""


@dataclass(frozen=True, eq=False)
class MeshOwners:
    """Who holds which boxes.

    Attributes:
        shared: In the order in which `distinct_boxes` of all rows would come upon them.
        splittable: bool[n], of the items of one rank of each part: whether all that hold one let it
            be cut.
        alone: Of each part, the items of which each rank has a box that no other has.
        own: Of each part, the rows of items under names that each rank has for itself.
    """

    shared: list[Shared]
    splittable: BoolArray
    alone: list[list[_Cut]]
    own: list[Int64Array]

    def own_rows(self, part: int, place: int) -> Int64Array:
        """Returns the rows of a part's items that only this rank can write.

        They are the same for ranks of a part whose boxes are of the same sizes.
        """
        found = [self.own[part]]
        for cut in self.alone[part]:
            cells = len(cut.places)
            cell = int(np.flatnonzero(cut.places[:, 0] == place)[0])
            # Also nothing is written, by who alone has that.
            last = (cut.stop == cell) & (cell == cells - 1)
            found.append(cut.rows[(cell < cut.stop) | last])
        return np.sort(np.concatenate(found))


def find_holders(parts: Sequence[Part], base: Held) -> MeshOwners | None:
    """Returns who holds which boxes.

    Args:
        parts: All ranks, each in one; lowest ranks first.
        base: What place 0 of each part holds, merged.

    Returns:
        None where that is not to be told from the meshes, or where the boxes do not cover each
        tensor once.

    Complexity:
        O(ranks + items of one rank of each part).
    """
    if differing(base).any():
        return None
    world_size = sum(len(part.ranks) for part in parts)
    own = np.array([is_own(name, world_size) for name in base.names], dtype=bool)[base.tensor]
    if (own & (base.kind != Kind.OBJECT)).any():
        return None
    counts = np.bincount(base.tensor, minlength=len(base.names))
    common = (counts[base.tensor] > 1) & ~own
    starts = offsets_of(np.array([len(part.regular.first) for part in parts]))
    gathered = _Gathered()
    alone: list[list[_Cut]] = []
    several: list[tuple[int, _Cut]] = []
    for index, part in enumerate(parts):
        if len(np.unique(part.regular.first.name)) < len(part.regular.first):
            return None
        mine = slice(starts[index], starts[index + 1])
        cuts = _cuts(part.regular, common[mine], own[mine])
        if cuts is None:
            return None
        alone.append([])
        for cut, is_common in cuts:
            if is_common:
                several.append((index, cut))
            elif cut.places.shape[1] == 1:
                alone[index].append(cut)
                gathered.add_behind(part, cut, starts[index])
            else:
                gathered.add_cells(part, cut, starts[index])
                gathered.add_behind(part, cut, starts[index])
    if several and not _add_common(gathered, parts, base, starts, several):
        return None
    splittable = np.ones(len(base.names), dtype=bool)
    np.logical_and.at(splittable, base.tensor, base.splittable)
    owns = [np.flatnonzero(own[low:high]) for low, high in pairwise(starts.tolist())]
    return MeshOwners(gathered.shared(base), splittable[base.tensor], alone, owns)


class _Gathered:
    """Boxes by the ranks that hold them."""

    def __init__(self) -> None:
        self._rows: dict[bytes, list[Int64Array]] = {}
        self._ranks: dict[bytes, Int64Array] = {}

    def add(self, ranks: Int64Array, rows: Int64Array) -> None:
        name = ranks.tobytes()
        self._ranks.setdefault(name, ranks)
        self._rows.setdefault(name, []).append(rows)

    def add_cells(self, part: Part, cut: _Cut, start: int) -> None:
        """Adds the boxes that have elements."""
        stops = np.unique(np.minimum(cut.stop, len(cut.places))).tolist()
        low = 0
        for high in stops:
            rows = start + cut.rows[cut.stop >= high]
            for places in cut.places[low:high]:
                self.add(part.ranks[places], rows)
            low = high

    def add_behind(self, part: Part, cut: _Cut, start: int) -> None:
        """Adds what lies behind the last elements: one box, which all hold that have none."""
        cells, several = len(cut.places), cut.places.shape[1] > 1
        for stop in np.unique(cut.stop[cut.stop < cells]).tolist():
            if several or stop < cells - 1:
                ranks = part.ranks[np.sort(cut.places[stop:], axis=None)]
                self.add(ranks, start + cut.rows[cut.stop == stop])

    def shared(self, base: Held) -> list[Shared]:
        found = []
        for name, rows in self._rows.items():
            own = rows[0] if len(rows) == 1 else np.sort(np.concatenate(rows))
            found.append(Shared(self._ranks[name], own))
        return sorted(found, key=lambda one: (int(one.ranks[0]), int(base.row[one.rows[0]])))


def _cuts(
    regular: Regular, common: BoolArray, own: BoolArray
) -> Iterator[tuple[_Cut, bool]] | None:
    """Returns how the items of a part are cut; None where they do not cover their tensors.

    Args:
        regular: What the part holds.
        common: bool[n], the items that other parts hold as well; these may be of less.
        own: bool[n], the items that are left out: no other rank has such a name.
    """
    moved = regular.steps != 0
    along = moved.any(axis=2)
    lengths = np.array(regular.lengths, dtype=np.int64)
    linear = moved.any(axis=0).sum(axis=1) == 1
    # Why not where there are several: those who have none would hold boxes at several places.
    may_lack = linear & ~common
    whole = ~along.any(axis=0)
    first = regular.first
    full = whole & ((first.offset == 0) & (first.size == first.shape)).all(axis=1)
    odd = (moved.sum(axis=2) > 1).any() or (regular.steps < 0).any()
    if odd:
        return None
    tiled = (first.kind == Kind.TENSOR) & _tiled(regular, may_lack)
    if not (common | (full | (~whole & tiled))).all():
        return None
    cells = np.where(along, lengths[:, None], 1)
    weight = np.where(along, np.cumprod(cells, axis=0) // cells, 0)
    # Of those that may lack elements, cells are in the order of the elements.
    step = regular.steps.max(axis=2, initial=0)
    least = np.where(along, step, np.iinfo(np.int64).max).min(axis=0)
    weight = np.where(may_lack, step // least, weight)
    num_cells = cells.prod(axis=0)
    dim = moved.any(axis=0).argmax(axis=1)
    length = np.take_along_axis(first.shape, dim[:, None], axis=1)[:, 0]
    stop = np.where(may_lack, np.minimum(-(-length // least), num_cells), num_cells)
    return _by_weight(regular, weight, stop, common, ~own)


def _by_weight(
    regular: Regular, weight: Int64Array, stop: Int64Array, common: BoolArray, which: BoolArray
) -> Iterator[tuple[_Cut, bool]]:
    world_size = int(np.prod(regular.lengths))
    place = np.arange(world_size)
    distances = zip(regular.strides, regular.lengths, strict=True)
    coordinates = [place // stride % length for stride, length in distances]
    distinct, code = np.unique(np.concatenate([weight, common[None]]), axis=1, return_inverse=True)
    for index, column in enumerate(distinct.T.tolist()):
        rows = np.flatnonzero((code.reshape(-1) == index) & which)
        if not len(rows):
            continue
        cell = np.zeros(world_size, dtype=np.int64)
        for one, coordinate in zip(column, coordinates, strict=False):
            cell += one * coordinate
        order = np.argsort(cell, kind="stable").reshape(int(cell.max()) + 1, -1)
        yield _Cut(rows, stop[rows], order), bool(column[-1])


def _tiled(regular: Regular, may_lack: BoolArray) -> BoolArray:
    """Tells of which items the ranks' boxes cover everything, and no element twice.

    Args:
        regular: What the ranks hold.
        may_lack: bool[n], the items of which the last ranks may have no elements.
    """
    first = regular.first
    fits = (first.offset == 0).all(axis=1)
    lengths = np.array(regular.lengths, dtype=np.int64)
    most = np.iinfo(np.int64).max
    for dim in range(first.shape.shape[1]):
        size, shape = first.size[:, dim], first.shape[:, dim]
        along = np.where(regular.steps[:, :, dim] == 0, most, regular.steps[:, :, dim])
        order = np.argsort(along, axis=0, kind="stable")
        steps, count = np.take_along_axis(along, order, axis=0), lengths[order]
        reach = size.copy()
        for step, length in zip(steps, count, strict=True):
            fits &= (step == most) | (step == reach)
            # Careful: a claimed shape may be so large that this overflows; it is refused then.
            reach = np.where(step == most, reach, reach * length)
        fits &= (size > 0) & (size <= shape) & (reach >= shape)
        fits &= may_lack | (reach - size < shape)
    return np.asarray(fits)


class _Box(NamedTuple):
    tensor: int
    offset: Int64Array
    size: Int64Array
    ranks: list[Int64Array]
    lowest: list[tuple[int, int]]
    """Of each of `ranks`: the lowest rank, and the row in which it has the box."""


def _add_common(
    gathered: _Gathered,
    parts: Sequence[Part],
    base: Held,
    starts: Int64Array,
    several: Sequence[tuple[int, _Cut]],
) -> bool:
    """Adds the boxes of tensors that several parts hold; returns whether that could be done."""
    if sum(len(cut.rows) * len(cut.places) for _, cut in several) > MOST_BOXES:
        return False
    width = base.shape.shape[1]
    boxes: dict[tuple[int, bytes, bytes], _Box] = {}
    for index, cut in several:
        part = parts[index]
        offset, size = part.regular.boxes_of(cut.places[:, 0])
        rows = starts[index] + cut.rows
        for cell, places in enumerate(cut.places):
            ranks = part.ranks[places]
            at, lengths = offset[cell, cut.rows], size[cell, cut.rows]
            at, lengths = pad(at, width, 0), pad(lengths, width, 1)
            for row, low, length in zip(rows.tolist(), at, lengths, strict=True):
                which = int(base.tensor[row])
                name = which, low.tobytes(), length.tobytes()
                box = boxes.setdefault(name, _Box(which, low, length, [], []))
                box.ranks.append(ranks)
                box.lowest.append((int(ranks[0]), row))
    offset = np.stack([box.offset for box in boxes.values()])
    size = np.stack([box.size for box in boxes.values()])
    tensor = np.array([box.tensor for box in boxes.values()])
    first = base.first[base.tensor]
    # Why: ranks of which some tell no digest of a tensor are told apart by the rows.
    same = (base.value == base.value[first]).all() and (volume(size) > 0).all()
    used, region = np.unique(tensor, return_inverse=True)
    found = check_coverage(region, offset, size, base.shape[base.first[used]])
    if not same or found.outside or found.overlaps or found.gaps:
        return False
    known: dict[tuple[bytes, ...], Int64Array] = {}
    for box in boxes.values():
        names = tuple([ranks.tobytes() for ranks in box.ranks])
        if names not in known:
            known[names] = np.sort(np.concatenate(box.ranks))
        gathered.add(known[names], np.array([min(box.lowest)[1]]))
    return True
