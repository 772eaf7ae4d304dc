"""The fingerprint of what a rank holds: 32 bytes, equal when the plan would be.

A plan is a pure function of the ranks' columns, without the content of any item, and of a few
options. So a fingerprint is the hash of exactly these, and of the version of what computes it:
nothing that a plan depends on can be left out. A mesh, a placement or a stride counts by the boxes
that it leads to, and by whether holders share them; what leads to the same boxes has the same plan.

The first half names all but the boxes: it is equal on ranks that hold parts of the same tensors, so
the ranks of one pipeline stage differ from those of others there, without a row of any. The second
half is of the boxes, and of the rank's number where it stands in names of its own.
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
"""Of the first half."""
_FORM = 5
"""To be raised by whoever changes which plan follows from the same items."""

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
        columns: What the rank holds. Of `value`, only counts where there is one.
        world_size: Number of ranks.
        part_bytes: As for `make_plan`.
        to_lowest_rank: As there.

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
    """`fingerprint` of many ranks that hold the same items at other places, one after another.

    Args:
        columns: What one of them holds.
        world_size: As for `fingerprint`.
        part_bytes: As there.
        to_lowest_rank: As there.

    Attributes:
        has_own: Whether some of the items are of one rank alone, by its number in their names.
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
    """Returns the ranks that hold boxes of the same items together, ascending; lowest ranks first.

    Args:
        fingerprints: Of all ranks.

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
    # Why another digest: it takes a tenth of the time, and is made for each rank of a mesh.
    boxes = (columns.size, columns.offset)
    parts = [np.ascontiguousarray(box, dtype="<i8").data for box in boxes]
    return items + digest_parts((items + str((columns.size.shape, number)).encode(), *parts))


def _add(state: blake2b, key: str, array: npt.NDArray[Any]) -> None:
    state.update(f"{key} {array.dtype.str} {array.shape}".encode())
    state.update(np.ascontiguousarray(array).data)


_Vocabulary = tuple[tuple[str, ...], tuple[NamePath | None, ...], tuple[str, ...]]

_known: list[tuple[_Vocabulary, bytes]] = []
"""The last vocabulary and its digest. Why: a coordinator checks the fingerprints of ranks that name
the same things, of which `columns.decode` makes the same objects."""


def _vocabulary(
    names: tuple[str, ...], paths: tuple[NamePath | None, ...], dtypes: tuple[str, ...]
) -> bytes:
    words = names, paths, dtypes
    # Careful: not by equality. A key that is a number is equal to its text, and told apart below.
    for known, digest in tuple(_known):
        if all(one is other for one, other in zip(known, words, strict=True)):
            return digest
    digest = blake2b(json.dumps(words).encode()).digest()
    digest += json.dumps(int_keys(paths)).encode()
    _known[:] = [(words, digest)]
    return digest


def plan_key(fingerprints: Sequence[bytes], nodes: Sequence[int] = ()) -> bytes:
    """Returns 32 bytes that name the plan of ranks with these fingerprints, in their order.

    Args:
        fingerprints: Of each rank.
        nodes: Which ranks share a node, as `sharing.node_numbers` tells it.
    """
    # Why no separators: they are all of one length.
    state = blake2b(b"".join(fingerprints), digest_size=FINGERPRINT_BYTES)
    state.update(np.array(nodes, dtype=np.int64).tobytes())
    return state.digest()
