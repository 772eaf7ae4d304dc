"""Which ranks have chunks of what is wanted, where all chunks follow from the rows of few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_dcp.plan.boxes import pad
from ray_dcp.plan.grouping import group_rows
from ray_dcp.plan.reading import Wanted
from ray_dcp.plan.structure import Mesh, Structure
from ray_dcp.plan.values import BoolArray, ChunkTable, Int64Array

__all__ = ["ranks_around"]

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
        [np.array(tensors, dtype=np.int64), *(boxes.tensor[is_own[known.base[boxes.tensor]]]
                                              for boxes in wanted)]
    )  # fmt: skip
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
        np.zeros(len(tensor), np.int64), *table.shape[tensor].T,
        *mesh.offset[at].T, *np.concatenate(mesh.steps[:, at], axis=1).T,
        *extents[0][row].T, *extents[1][row].T, *low.T, *high.T,
    ]  # fmt: skip
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
