"""Regular layouts: what all ranks of a mesh hold follows from the rows of a few of them.

If every rank holds the part of each tensor that its position in a mesh determines (`Shard` and
`Replicate` of DTensors, equal slabs, uneven last slabs), its boxes follow from those of rank 0 and
one step for each dimension of the mesh, so the other ranks' rows need not be sent. The caller
passes neither mesh nor placements: they are inferred from the rows of a few ranks.

    rank   0    1    2    3        strides (1, 2), lengths (2, 2)
    box    A   A+s  A+t A+s+t      steps s (rank 1 - rank 0) and t (rank 2 - rank 0)

A rank's fingerprint proves that it holds the inferred boxes, so a wrong guess costs time and
nothing else: ranks that hold something else send their rows. Inferred boxes are planned like boxes
that were sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ray_dcp.core.values import Columns, Int64Array

_AT_ONCE = 1 << 16
"""How many numbers are computed at once: they stay in the cache of a core."""


def probes(world_size: int) -> tuple[int, ...]:
    """Returns the ranks whose rows determine the mesh: 0, and where a dimension may begin.

    Examples:
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

    def columns(self, ranks: Int64Array) -> Iterator[Columns]:
        """Yields what each of these ranks holds, if all are as regular as the ranks of `probes`."""
        step = max(1, _AT_ONCE // max(1, self.first.offset.size))
        for start in range(0, len(ranks), step):
            for offset, size in zip(*self._boxes(ranks[start : start + step]), strict=True):
                yield replace(self.first, offset=offset, size=size)

    def _boxes(self, ranks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns offsets and sizes of the boxes of m ranks: two int64[m, n, D]."""
        offset = np.repeat(self.first.offset[None], len(ranks), axis=0)
        for stride, length, step in zip(self.strides, self.lengths, self.steps, strict=True):
            if step.any():
                offset += step * (ranks // stride % length)[:, None, None]
        return _placed(self.first, offset)


def infer(known: Mapping[int, Columns], world_size: int) -> Regular | None:
    """Returns the mesh that the boxes of the ranks form; None if they form none.

    Args:
        known: What the ranks of `probes` hold; other ranks may be included.
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
        # A dimension ends where its steps don't add up. Two dimensions that behave as one count as
        # one.
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
    """Returns whether two ranks hold boxes of the same tensors, in the same order."""
    return (
        one.names == other.names
        and one.paths == other.paths
        and one.dtypes == other.dtypes
        and one.offset.shape == other.offset.shape
    )


def _placed(first: Columns, offset: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns rank 0's items moved to other offsets, clipped to the bounds of their tensors."""
    offset = np.minimum(offset, np.maximum(first.shape, first.offset))
    inside = np.maximum(first.shape - offset, 0)
    size = np.where(offset == first.offset, first.size, np.minimum(first.size, inside))
    return offset, size
