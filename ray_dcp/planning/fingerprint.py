"""The fingerprint of what a rank holds: 32 bytes, equal when the plan would be equal.

A plan is a pure function of the ranks' columns, without the content of any item, and of a few
options. A fingerprint is the hash of exactly these inputs and of the version of the code that
computes it, so nothing that a plan depends on is left out. A mesh, a placement or a stride enters
only through the boxes that it leads to, and through whether holders share them; whatever leads to
the same boxes has the same plan.

The first half covers everything but the boxes: it is equal on ranks that hold parts of the same
tensors, so it separates the ranks of one pipeline stage from the others without sending a row. The
second half covers the boxes, and the rank's number where per-rank names contain it.

**Regular layouts.** If every rank holds the part of each tensor that its position in a mesh
determines (`Shard` and `Replicate` of DTensors, equal slabs, uneven last slabs), its boxes follow
from those of rank 0 and one step for each dimension of the mesh, so the other ranks' rows need not
be sent. The caller passes neither mesh nor placements: they are inferred from the rows of a few
ranks.

    rank   0    1    2    3        strides (1, 2), lengths (2, 2)
    box    A   A+s  A+t A+s+t      steps s (rank 1 - rank 0) and t (rank 2 - rank 0)

A rank's fingerprint proves that it holds the inferred boxes, so a wrong guess costs time and
nothing else: ranks that hold something else send their rows. Inferred boxes are planned like boxes
that were sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from ray_dcp.core import __version__
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.columns import int_keys, is_own, number_in, without_rank
from ray_dcp.core.values import Columns, Int64Array, NamePath

FINGERPRINT_BYTES = 32

_ITEMS_BYTES = 16
"""Length of the first half."""
_FORM = 7
"""Version of the planning code: raise it when the same items lead to another plan."""

_ARRAYS = (
    "name", "kind", "dtype", "ndim", "shape", "requires_grad", "splittable", "settled",
)  # fmt: skip


def fingerprint(
    columns: Columns,
    *,
    world_size: int,
    part_bytes: int,
    to_lowest_rank: bool = False,
) -> bytes:
    """Returns 32 bytes that change with everything that the plan depends on.

    Args:
        columns: What the rank holds. Of `value`, only whether it is 0 matters.
        world_size: Number of ranks.
        part_bytes: See `make_plan`.
        to_lowest_rank: See `make_plan`.

    Complexity:
        O(rows), about 0.3 us a row.

    Examples:
        >>> from ray_dcp.core.columns import ColumnsBuilder
        >>> def of(dtype, value):
        ...     builder = ColumnsBuilder()
        ...     _ = builder.tensor("w", dtype, (4, 2), value=value)
        ...     return fingerprint(builder.build(), world_size=2, part_bytes=1 << 30)
        >>> of("float32", 1) == of("float32", 2), of("float32", 1) == of("bfloat16", 1)
        (True, False)
    """
    of = Fingerprints(
        columns, world_size=world_size, part_bytes=part_bytes, to_lowest_rank=to_lowest_rank
    )
    return of.of_boxes(columns, number_in(columns.names, world_size))


class Fingerprints:
    """Computes `fingerprint` for many ranks that hold the same items at different places.

    Args:
        columns: What one of these ranks holds.
        world_size: See `fingerprint`.
        part_bytes: See `fingerprint`.
        to_lowest_rank: See `fingerprint`.

    Attributes:
        has_own: Whether some items belong to one rank alone, by the number in their names.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        world_size: int,
        part_bytes: int,
        to_lowest_rank: bool = False,
    ) -> None:
        own = without_rank(columns, world_size)
        self.has_own = any(is_own(name, world_size) for name in own.names)
        words = [__version__, _FORM, world_size, part_bytes, to_lowest_rank]
        state = blake2b(json.dumps(words).encode(), digest_size=_ITEMS_BYTES)
        state.update(_vocabulary(own.names, own.paths, own.dtypes))
        for key in _ARRAYS:
            array = getattr(columns, key)
            state.update(f"{key} {array.dtype.str} {array.shape}".encode())
            state.update(np.ascontiguousarray(array).data)
        state.update(np.ascontiguousarray(columns.value != 0).data)
        self._items = state.digest()

    def of_boxes(self, columns: Columns, rank: int | None) -> bytes:
        """Returns the fingerprint of a rank that holds the boxes of `columns` of the same items.

        Args:
            columns: What the rank holds.
            rank: Number of the rank. It counts only if `has_own`.
        """
        about = self._items + str((columns.size.shape, rank if self.has_own else None)).encode()
        boxes = [
            np.ascontiguousarray(box, "<i8").tobytes() for box in (columns.size, columns.offset)
        ]
        # Why another digest: it takes a tenth of the time, and one is made for each rank of a mesh.
        return self._items + digest_bytes(b"".join((about, *boxes)))


def alike(fingerprints: Sequence[bytes]) -> list[Int64Array]:
    """Groups the ranks that hold boxes of the same items: ascending, the lowest rank's group first.

    Args:
        fingerprints: Fingerprint of each rank.

    Examples:
        >>> [ranks.tolist() for ranks in alike([b"a" * 32, b"b" * 32, b"a" * 16 + b"c" * 16])]
        [[0, 2], [1]]
    """
    found: dict[bytes, list[int]] = {}
    for rank, name in enumerate(fingerprints):
        found.setdefault(name[:_ITEMS_BYTES], []).append(rank)
    return [np.array(ranks, dtype=np.int64) for ranks in found.values()]


_Vocabulary = tuple[tuple[str, ...], tuple[NamePath | None, ...], tuple[str, ...]]

_known: list[tuple[_Vocabulary, bytes]] = []
"""The last vocabulary and its digest. Why: a coordinator checks the fingerprints of ranks that use
the same names, for which `columns.decode` returns the same objects."""


def _vocabulary(
    names: tuple[str, ...], paths: tuple[NamePath | None, ...], dtypes: tuple[str, ...]
) -> bytes:
    words = names, paths, dtypes
    # Careful: compare by identity. A key that is a number equals its text, but the digests differ.
    for known, digest in tuple(_known):
        if all(one is other for one, other in zip(known, words, strict=True)):
            return digest
    digest = blake2b(json.dumps(words).encode()).digest()
    digest += json.dumps(int_keys(paths)).encode()
    _known[:] = [(words, digest)]
    return digest


def plan_key(fingerprints: Sequence[bytes], nodes: Sequence[int] = ()) -> bytes:
    """Returns 32 bytes that name the plan of ranks with these fingerprints, in rank order.

    Args:
        fingerprints: Fingerprint of each rank.
        nodes: Node number of each rank; see `share_out.node_numbers`.
    """
    # Why no separators: all fingerprints have the same length.
    state = blake2b(b"".join(fingerprints), digest_size=FINGERPRINT_BYTES)
    state.update(np.array(nodes, dtype=np.int64).tobytes())
    return state.digest()


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
        at_once = max(1, _AT_ONCE // max(1, self.first.offset.size))
        for start in range(0, len(ranks), at_once):
            own = ranks[start : start + at_once]
            offset = np.repeat(self.first.offset[None], len(own), axis=0)
            for stride, length, step in zip(self.strides, self.lengths, self.steps, strict=True):
                if step.any():
                    offset += step * (own // stride % length)[:, None, None]
            for one, size in zip(*_move_items(self.first, offset), strict=True):
                yield replace(self.first, offset=one, size=size)


def infer(known: Mapping[int, Columns], world_size: int) -> Regular | None:
    """Returns the mesh that the boxes of the ranks form; None if they form none.

    Args:
        known: What the ranks of `probes` hold; other ranks may be included.
        world_size: Number of ranks.
    """
    first = known.get(0)
    if first is None or any(rank not in known for rank in probes(world_size)):
        return None
    if not all(_hold_same_tensors(first, known[rank]) for rank in probes(world_size)):
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
        offset, size = _move_items(first, expected)
        found = known[rank]
        if not (np.array_equal(offset, found.offset) and np.array_equal(size, found.size)):
            strides.append(rank)
            steps.append(found.offset - first.offset)
    ends = [*strides[1:], world_size]
    lengths = [end // stride for stride, end in zip(strides, ends, strict=True)]
    return Regular(first, tuple(strides), tuple(lengths), np.stack(steps))


def _hold_same_tensors(one: Columns, other: Columns) -> bool:
    """Returns whether two ranks hold boxes of the same tensors, in the same order."""
    return (
        one.names == other.names
        and one.paths == other.paths
        and one.dtypes == other.dtypes
        and one.offset.shape == other.offset.shape
    )


def _move_items(first: Columns, offset: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns rank 0's items moved to other offsets, clipped to the bounds of their tensors."""
    offset = np.minimum(offset, np.maximum(first.shape, first.offset))
    inside = np.maximum(first.shape - offset, 0)
    size = np.where(offset == first.offset, first.size, np.minimum(first.size, inside))
    return offset, size
