"""The fingerprint of what a rank holds: 32 bytes, equal when the plan would be equal.

A plan is a pure function of the ranks' columns, without the content of any item, and of a few
options. A fingerprint is the hash of exactly these inputs and of the version of the code that
computes it, so nothing that a plan depends on is left out. A mesh, a placement or a stride enters
only through the boxes that it leads to, and through whether holders share them; whatever leads to
the same boxes has the same plan.

The first half covers everything but the boxes: it is equal on ranks that hold parts of the same
tensors, so it separates the ranks of one pipeline stage from the others without sending a row. The
second half covers the boxes, and the rank's number where per-rank names contain it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import digest_parts
from ray_dcp.core.columns import int_keys
from ray_dcp.core.rank_names import is_own, number_in, without_rank
from ray_dcp.core.values import Columns, Int64Array, NamePath
from ray_dcp.version import __version__

FINGERPRINT_BYTES = 32

_ITEMS_BYTES = 16
"""Length of the first half."""
_FORM = 5
"""Version of the planning code: raise it when the same items lead to another plan."""

_ARRAYS = (
    "name", "kind", "dtype", "ndim", "shape", "requires_grad", "splittable",
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
    options = (world_size, part_bytes, to_lowest_rank)
    items, number = _items_of(columns, options), number_in(columns.names, world_size)
    return _named(items, columns, number)


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
        options = (world_size, part_bytes, to_lowest_rank)
        self._items = _items_of(columns, options)
        names = without_rank(columns, world_size).names
        self.has_own = any(is_own(name, world_size) for name in names)

    def of_boxes(self, columns: Columns, rank: int) -> bytes:
        """Returns the fingerprint of a rank that holds the boxes of `columns` of the same items."""
        return _named(self._items, columns, rank if self.has_own else None)


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


def _items_of(columns: Columns, options: tuple[int | str | bool | None, ...]) -> bytes:
    words = [__version__, _FORM, *options]
    state = blake2b(json.dumps(words).encode(), digest_size=_ITEMS_BYTES)
    own = without_rank(columns, int(options[0] or 0))
    state.update(_vocabulary(own.names, own.paths, own.dtypes))
    for key in _ARRAYS:
        _add(state, key, getattr(columns, key))
    state.update(np.ascontiguousarray(columns.value != 0).data)
    return state.digest()


def _named(items: bytes, columns: Columns, number: int | None) -> bytes:
    # Why another digest: it takes a tenth of the time, and one is made for each rank of a mesh.
    boxes = (columns.size, columns.offset)
    parts = [np.ascontiguousarray(box, dtype="<i8").data for box in boxes]
    return items + digest_parts((items + str((columns.size.shape, number)).encode(), *parts))


def _add(state: blake2b, key: str, array: npt.NDArray[Any]) -> None:
    state.update(f"{key} {array.dtype.str} {array.shape}".encode())
    state.update(np.ascontiguousarray(array).data)


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
        nodes: Node number of each rank; see `sharing.node_numbers`.
    """
    # Why no separators: all fingerprints have the same length.
    state = blake2b(b"".join(fingerprints), digest_size=FINGERPRINT_BYTES)
    state.update(np.array(nodes, dtype=np.int64).tobytes())
    return state.digest()
