"""A plan of a regular layout from the rows of few ranks: no row of the others is ever made.

Where each tensor lies in equal slabs over a whole mesh of ranks, or is held whole by all of them,
each rank writes what every other one does, at another place of the tensors, but for the few that
are given a part of what all hold. So only the rows of one rank of each sort are planned. The plan
is that of the rows, as `make_plan` would make it; other layouts are left to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ray_dcp.plan import global_plan
from ray_dcp.plan.boxes import volume
from ray_dcp.plan.global_plan import MIN_PIECE_BYTES, plan_of_layout
from ray_dcp.plan.grouping import offsets_of
from ray_dcp.plan.layout import lay_out
from ray_dcp.plan.loads import Loads
from ray_dcp.plan.merging import Boxes, Held, merge
from ray_dcp.plan.regular import Regular
from ray_dcp.plan.sharing import (
    ITEM_COST_BYTES,
    Cuts,
    Pieces,
    cut_boxes,
    itemsizes,
    lead_lengths,
    leads_of,
    share_alike,
)
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.structure import Structure, is_expandable
from ray_dcp.plan.values import NO_GROUPS, BoolArray, Int32Array, Int64Array, Kind, ValueGroups

__all__ = ["make_structural_plan"]

LEAST_RANKS_A_CLASS = 4
"""Where ranks of a class are fewer on average, little is saved."""


def make_structural_plan(
    regular: Regular,
    sizes: Int32Array,
    *,
    part_bytes: int,
    min_writer_bytes: int,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    nodes: Sequence[int] | None = None,
) -> StructuralPlan | None:
    """Returns the plan of a regular layout, in the container `torch_save`.

    Args:
        regular: What every rank holds; `first.value` is the same on all.
        sizes: int32[w], numbers that are equal for ranks whose boxes are of the same sizes;
            each is a rank that has them.
        part_bytes: As for `make_plan`.
        min_writer_bytes: As there.
        min_piece_bytes: As there.
        nodes: As there.

    Returns:
        None where the layout is not of this sort, or has few chunks; nothing is said about
        whether it makes a checkpoint.

    Raises:
        UnsupportedValueError: As `make_plan`.

    Complexity:
        O(ranks + items of one rank + chunks of a rank of each class).
    """
    world_size, first = len(sizes), regular.first
    if world_size < 2 or len(np.unique(first.name)) < len(first):
        return None
    own, shared = _sorts(regular)
    stop = _num_holders(regular, own)
    if not ((own & _tiled(regular, own)) | (shared & _is_whole(regular))).all():
        return None
    held = merge([first])
    rows = np.arange(len(first))
    boxes = Boxes(rows, np.arange(len(first) + 1), rows)
    itemsize = itemsizes(held, boxes)
    load = Loads(_loads(regular, sizes, stop, itemsize), nodes)
    num_bytes = volume(held.size) * itemsize
    members = np.flatnonzero(shared)
    cuttable = held.splittable & (held.kind == Kind.TENSOR) & (num_bytes >= 2 * min_piece_bytes)
    lead = lead_lengths(held, boxes, members)
    ranks = np.arange(world_size, dtype=np.int32)
    found = [Cuts(*np.zeros((4, 0), dtype=np.int64))]
    if len(members):
        found += share_alike(
            members, num_bytes[members], lead, cuttable[members], ranks, load,
            min_piece_bytes, min_writer_bytes,
        )  # fmt: skip
    # What lies behind the last elements is one box, which all hold that have no elements.
    for low in np.unique(stop[own & (stop < world_size - 1)]).tolist():
        members = np.flatnonzero(own & (stop == low))
        lead = leads_of(regular.boxes(low)[1][members])
        none = np.zeros(len(members), dtype=np.int64)
        behind = share_alike(
            members, none, lead, none > 0, ranks[low:], load, min_piece_bytes, min_writer_bytes
        )
        found += [cut._replace(row=cut.row + low) for cut in behind]
    cuts = Cuts(*map(np.concatenate, zip(*found, strict=True)))
    leaders, kind = _classes(sizes, cuts.row)
    if len(leaders) * LEAST_RANKS_A_CLASS > world_size:
        return None
    everybody = merge([regular.of(rank) for rank in leaders.tolist()])
    everybody = replace(everybody, rank=leaders[everybody.rank].astype(np.int32))
    pieces = _pieces(everybody, itemsize, stop, cuts, leaders, world_size)
    layout = lay_out(everybody, pieces, container="torch_save", part_bytes=part_bytes)
    few = plan_of_layout(
        everybody, pieces, layout, NO_GROUPS, world_size, "torch_save", checks_at_end=True
    )
    tensors = held.first
    structure = Structure(
        strides=regular.strides,
        lengths=regular.lengths,
        offset=held.offset[tensors],
        steps=_padded(regular.steps, held.offset.shape[1])[:, tensors],
        leaders=leaders,
        kind=kind,
        file_kind=np.searchsorted(leaders, few.file_rank).astype(np.int32),
    )
    plan = StructuralPlan(few, structure, _groups(regular, shared, world_size))
    if plan.num_chunks < global_plan.CHECKS_AT_END_CHUNKS:
        return None
    return plan if is_expandable(few.table, structure) else None


def _sorts(regular: Regular) -> tuple[BoolArray, BoolArray]:
    """Tells which items every rank has a part of its own of, and which all have the same of."""
    along = (regular.steps != 0).sum(axis=2)
    return (along == 1).all(axis=0), (along == 0).all(axis=0)


def _is_whole(regular: Regular) -> BoolArray:
    """Tells of which items rank 0 has everything."""
    first = regular.first
    return np.asarray(((first.offset == 0) & (first.size == first.shape)).all(axis=1))


def _tiled(regular: Regular, own: BoolArray) -> BoolArray:
    """Tells of which items the ranks' boxes cover everything once.

    On a mesh of one dimension the last ranks may have no elements.
    """
    first = regular.first
    fits = own & (first.kind == Kind.TENSOR) & (first.offset == 0).all(axis=1)
    lengths = np.array(regular.lengths, dtype=np.int64)
    # Why not on other meshes: those who have none would hold boxes at several places.
    may_lack = (len(lengths) == 1) & (first.value == 0)
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


def _num_holders(regular: Regular, own: BoolArray) -> Int64Array:
    """Returns how many ranks hold elements of each item that all have their own part of; else 0."""
    world_size = int(np.prod(regular.lengths))
    found = np.where(own, world_size, 0)
    if len(regular.lengths) == 1:
        step = regular.steps[0].max(axis=1)
        dim = regular.steps[0].argmax(axis=1)
        length = np.take_along_axis(regular.first.shape, dim[:, None], axis=1)[:, 0]
        found = np.where(own, np.minimum(-(-length // np.maximum(step, 1)), world_size), 0)
    return np.asarray(found, dtype=np.int64)


def _written(stop: Int64Array, rank: int | Int64Array, world_size: int) -> BoolArray:
    """Tells which items a rank writes that nobody else could: also nothing, if it alone has that.

    Args:
        stop: Of `_num_holders`.
        rank: Which rank, or ranks, as a column.
        world_size: Number of ranks.
    """
    return np.asarray((rank < stop) | ((rank == world_size - 1) & (stop == rank)))


def _loads(
    regular: Regular, sizes: Int32Array, stop: Int64Array, itemsize: Int64Array
) -> Int64Array:
    """Returns what each rank writes of its own."""
    found = np.zeros(len(sizes), dtype=np.int64)
    for rank in np.unique(sizes).tolist():
        _, size = regular.boxes(rank)
        own = _written(stop, rank, len(sizes))
        weight = volume(size)[own] * itemsize[own] + ITEM_COST_BYTES
        found[sizes == rank] = weight.sum()
    return found


def _classes(sizes: Int32Array, writers: npt.NDArray[np.integer]) -> tuple[Int64Array, Int32Array]:
    """Returns `(leaders, class of each rank)`; who writes of what all hold is a class alone."""
    lowest = sizes.astype(np.int64)
    alone = np.zeros(len(sizes), dtype=bool)
    alone[writers] = True
    for rank in np.unique(sizes).tolist():
        alike = np.flatnonzero((sizes == rank) & ~alone)
        lowest[alike] = alike[:1]
    lowest[alone] = np.flatnonzero(alone)
    leaders, kind = np.unique(lowest, return_inverse=True)
    return leaders, kind.astype(np.int32)


def _pieces(
    everybody: Held,
    itemsize: Int64Array,
    stop: Int64Array,
    cuts: Cuts,
    leaders: Int64Array,
    world_size: int,
) -> Pieces:
    """Returns what the leaders write: their own items, and what they were given of the others."""
    count = len(stop)
    row = np.flatnonzero(_written(stop, leaders[:, None], world_size))
    given = np.searchsorted(leaders, cuts.row) * count + cuts.box
    boxes = Boxes(given, np.arange(len(given) + 1), given)
    offset, size, start = cut_boxes(
        everybody, boxes, itemsize[cuts.box], np.arange(len(given)), cuts.first, cuts.rows
    )
    size = np.concatenate([everybody.size[row], size])
    item = itemsize[np.concatenate([row % count, cuts.box])]
    return Pieces(
        held=np.concatenate([row, given]),
        offset=np.concatenate([everybody.offset[row], offset]),
        size=size,
        start=np.concatenate([np.zeros(len(row), dtype=np.int64), start]),
        num_bytes=volume(size) * item,
        disagreements=(),
        differing=np.zeros(0, dtype=bool),
    )


def _groups(regular: Regular, shared: BoolArray, world_size: int) -> ValueGroups:
    """Returns which contents have to be equal: those of what all hold, as one group."""
    valued = regular.first.value > 0
    place = (offsets_of(valued.astype(np.int64))[:-1])[valued & shared].astype(np.int32)
    if not len(place):
        return NO_GROUPS
    return ValueGroups(
        rank=np.repeat(np.arange(world_size, dtype=np.int32), len(place)),
        place=np.tile(place, world_size),
        group=np.zeros(world_size * len(place), dtype=np.int32),
        told=(),
    )


def _padded(steps: Int64Array, width: int) -> Int64Array:
    more = width - steps.shape[2]
    return np.pad(steps, ((0, 0), (0, 0), (0, more))) if more else steps
