"""Chunks of all ranks of a mesh, told by those of a few: the rows of the others follow.

Ranks whose files are alike make a *class*. The chunk table has the rows of one rank of each class,
its *leader*, the lowest. Another rank of the class has the same rows, in files of its own, with
boxes that lie as far from the leader's as the mesh says. So ten million rows are a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.plan.grouping import offsets_of, within
from ray_dcp.plan.values import ChunkTable, Int32Array, Int64Array

__all__ = [
    "MOST_NUMBERS",
    "MOST_RANKS",
    "Expanded",
    "Structure",
    "expand",
    "files_of",
    "is_expandable",
    "names_of",
    "num_chunks_of",
]

MOST_NUMBERS = 1 << 28
"""Of all chunks together: those of 22 million chunks of matrices, 2 GiB. Why a bound: a short file
may claim a large mesh."""
MOST_RANKS = 1 << 22


@dataclass(frozen=True, eq=False)
class Structure:
    """What tells the chunks of `w` ranks from a table of `t` tensors with those of the leaders.

    Attributes:
        strides: Distance in ranks between neighbours along each dimension of the mesh.
        lengths: Length of each dimension; their product is `w`.
        offset: int64[t, D], where rank 0's box of each tensor starts.
        steps: int64[dimensions, t, D], how far the boxes of neighbours lie apart.
        leaders: int64[c], the lowest rank of each class, ascending.
        kind: int32[w], the class of each rank.
        file_kind: int32[f], the class whose leader has each file of the table, ascending.
    """

    strides: tuple[int, ...]
    lengths: tuple[int, ...]
    offset: Int64Array
    steps: Int64Array
    leaders: Int64Array
    kind: Int32Array
    file_kind: Int32Array

    @property
    def world_size(self) -> int:
        """Number of ranks, `w`."""
        return len(self.kind)

    def starts(self, shape: Int64Array, rank: Int64Array, tensor: Int64Array) -> Int64Array:
        """Returns where boxes start by the mesh: int64[m, D].

        Args:
            shape: int64[t, D], of the tensors.
            rank: int64[m].
            tensor: int64[m].
        """
        found = self.offset[tensor]
        for stride, length, step in zip(self.strides, self.lengths, self.steps, strict=True):
            found += step[tensor] * (rank // stride % length)[:, None]
        return np.asarray(np.minimum(found, np.maximum(shape, self.offset)[tensor]))


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
    numbers = num_chunks_of(table, structure) * (8 + 2 * table.shape.shape[1])
    return numbers <= MOST_NUMBERS and structure.world_size <= MOST_RANKS


def num_chunks_of(table: ChunkTable, structure: Structure) -> int:
    """Returns how many chunks all ranks have."""
    counts = np.bincount(structure.file_kind[table.file], minlength=len(structure.leaders))
    ranks = np.bincount(structure.kind, minlength=len(counts))
    return sum(one * many for one, many in zip(counts.tolist(), ranks.tolist(), strict=True))


def expand(table: ChunkTable, structure: Structure) -> Expanded:
    """Returns the chunks of all ranks, in the order of their files.

    Args:
        table: Of the leaders; without checksums.
        structure: What tells the others.

    Raises:
        InternalError: A file's name is not that of its leader.

    Complexity:
        O(chunks of all ranks); about 0.2 us a chunk.
    """
    kind = structure.file_kind[table.file]
    counts = np.bincount(kind, minlength=len(structure.leaders))
    own = counts[structure.kind]
    rank = np.repeat(np.arange(structure.world_size), own)
    chunk = offsets_of(counts)[structure.kind[rank]] + within(own)
    file_rank, file = files_of(structure)
    file_starts = np.searchsorted(file_rank, np.arange(structure.world_size))
    first = np.searchsorted(structure.file_kind, np.arange(len(structure.leaders)))
    number = file_starts[rank] + table.file[chunk] - first[structure.kind[rank]]
    tensor = table.tensor[chunk]
    leader = structure.leaders[structure.kind[rank]]
    offset = table.offset[chunk]
    moves = np.flatnonzero(rank != leader)
    where = rank[moves], tensor[moves]
    offset[moves] += structure.starts(table.shape, *where)
    offset[moves] -= structure.starts(table.shape, leader[moves], tensor[moves])
    columns = ("item_offset", "item_bytes", "payload_offset", "payload_bytes", "block_bytes")
    whole = replace(
        table,
        files=names_of(table.files, structure, file_rank, file),
        tensor=tensor,
        offset=offset,
        size=table.size[chunk],
        file=number.astype(np.int32),
        check_start=np.zeros(len(chunk) + 1, dtype=np.int64),
        **{name: getattr(table, name)[chunk] for name in columns},
    )
    return Expanded(whole, chunk, rank)


def names_of(
    names: tuple[str, ...],
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
