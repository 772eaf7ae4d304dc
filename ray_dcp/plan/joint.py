"""Fewer files for each node: the files of several of its ranks become one.

A *joint* file is the files of some ranks, one after the other, each from a page on, and behind them
the deferred items of all. So a rank's *extent* of it, the fixed items, is known before a byte is
written, and is what the file would be without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ray_dcp.plan.grouping import offsets_of
from ray_dcp.plan.values import GlobalPlan, Int32Array, Int64Array

__all__ = [
    "EXTENT_ALIGNMENT",
    "Extents",
    "Joined",
    "extents_of",
    "have_their_places",
    "join_files",
    "may_share",
    "most_files",
]

EXTENT_ALIGNMENT = 4096
"""Where the first item of an extent is put as in a file of its own."""


class Joined(NamedTuple):
    """Which file each of the ranks' own files becomes a part of, and where it begins there."""

    file: Int64Array
    start: Int64Array


def most_files(writers: Int64Array, nodes: Sequence[int], files_per_node: int) -> Int64Array:
    """Returns how many files each rank may have of its own before any are joined: int64[w].

    Args:
        writers: Ranks that write something.
        nodes: Number of each rank's node.
        files_per_node: How many the ranks of a node may have together.

    Example:
        >>> most_files(np.arange(3), (0, 0, 1), 3).tolist()
        [1, 1, 3]
    """
    node = np.array(nodes, dtype=np.int64)
    count = np.bincount(node[writers], minlength=int(node.max()) + 1)
    return np.asarray(np.maximum(files_per_node // np.maximum(count, 1), 1)[node])


def join_files(
    rank: Int64Array, ends: Int64Array, nodes: Sequence[int], files_per_node: int
) -> Joined:
    """Returns what the ranks' files become, so that no node has more than it may.

    Those of a node are joined in the order of their ranks, in runs of about equal bytes.

    Args:
        rank: int64[f], whose each file is, ascending.
        ends: int64[f], where its fixed items end.
        nodes: Number of each rank's node.
        files_per_node: As for `most_files`.

    Example:
        Four ranks of a node, of which the last has as much as the others together.

        >>> join_files(np.arange(4), np.array([10, 10, 10, 30]), (0, 0, 0, 0), 2)
        Joined(file=array([0, 0, 0, 1]), start=array([   0, 4096, 8192,    0]))
    """
    node = np.array(nodes, dtype=np.int64)[rank]
    run = np.zeros(len(rank), dtype=np.int64)
    start = np.zeros(len(rank), dtype=np.int64)
    for own in _groups(node):
        if len(own) <= files_per_node:
            run[own] = np.arange(len(own))
            continue
        run[own] = _runs(ends[own], files_per_node)
        length = -(-ends[own] // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
        line = offsets_of(length)[:-1]
        first = np.flatnonzero(np.diff(run[own], prepend=-1))
        start[own] = line - line[first][run[own]]
    _, lead, member = np.unique(node * len(rank) + run, return_index=True, return_inverse=True)
    # Files are in the order of the lowest rank that has a part of each.
    number = np.empty(len(lead), dtype=np.int64)
    number[np.argsort(lead)] = np.arange(len(lead))
    return Joined(number[member], start)


def _groups(node: Int64Array) -> list[Int64Array]:
    order = np.argsort(node, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(node[order])) + 1) if len(order) else []


def _runs(ends: Int64Array, count: int) -> Int64Array:
    """Returns which of at most `count` runs each file is in; none of them is empty."""
    weight = ends + 1
    line = np.cumsum(weight)
    run = (2 * line - weight) * count // (2 * int(line[-1]))
    return np.asarray(np.cumsum(np.diff(run, prepend=run[:1]) != 0))


class Extents(NamedTuple):
    """Who has a part of which file of a plan with joint ones.

    Attributes:
        chunk: int64[c], all chunks by rank, and within a rank in the order of the table.
        first: int64[w + 1], where each rank's begin in `chunk`.
        company: For each file the ranks with a part of it, ascending.
    """

    chunk: Int64Array
    first: Int64Array
    company: list[Int32Array]


def extents_of(plan: GlobalPlan) -> Extents | None:
    """Returns who has a part of which file; None where each file is of one rank.

    Complexity:
        O(chunks).
    """
    owner, file = plan.source_rank, plan.table.file
    if np.array_equal(owner, plan.file_rank[file]):
        return None
    order = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[order], np.arange(plan.world_size + 1))
    pairs = np.unique(file.astype(np.int64) * plan.world_size + owner)
    ranks = (pairs % plan.world_size).astype(np.int32)
    cuts = np.searchsorted(pairs // plan.world_size, np.arange(1, len(plan.files)))
    return Extents(order, first, np.split(ranks, cuts))


def have_their_places(plan: GlobalPlan) -> bool:
    """Whether each file's items lie in it as its writers put them there, one after another.

    First the fixed items of its ranks, whose extents begin on pages and do not meet, then the
    deferred ones, in both lots the lowest rank first, which is the one that the file is of.

    Args:
        plan: With the rows of all that it plans, in the order of their files.
    """
    table, writer = plan.table, plan.source_rank
    if not plan.num_chunks:
        return True
    late = table.payload_offset < 0
    place = table.file.astype(np.int64) * 2 + late
    first = np.flatnonzero(np.diff(table.file, prepend=-1))
    lowest = np.minimum.reduceat(writer, first)
    within = (np.diff(place) == 0) & ~late[1:]
    end = table.item_offset + table.item_bytes
    fresh = np.diff(writer) != 0
    begins = table.item_offset[1:]
    begins = np.where(fresh, begins // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT, begins)
    in_turn = (np.diff(place) > 0) | ((np.diff(place) == 0) & (np.diff(writer) >= 0))
    return bool(
        np.array_equal(late, table.item_offset < 0)
        and (lowest >= 0).all()
        and int(writer.max()) < plan.world_size
        and np.array_equal(lowest, plan.file_rank[table.file[first]])
        and in_turn.all()
        and (~within | (begins >= end[:-1])).all()
        and (late | (end <= plan.file_bytes[table.file])).all()
    )


def may_share(plan: GlobalPlan, nodes: Sequence[int]) -> bool:
    """Whether each file is of one rank, or of ranks of one node.

    Args:
        plan: With the rows of all that it plans.
        nodes: Number of each rank's node; empty where ranks may share no file.
    """
    owner = plan.file_rank[plan.table.file]
    if not nodes:
        return np.array_equal(plan.source_rank, owner)
    node = np.array(nodes, dtype=np.int64)
    return np.array_equal(node[plan.source_rank], node[owner])
