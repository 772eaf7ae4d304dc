"""The name of what a rank holds: 32 bytes, equal when the plan would be.

A plan is a pure function of the ranks' columns, without the content of any item, and of a few
options. So a fingerprint is the hash of exactly these, and of the version of what computes it:
nothing that a plan depends on can be left out. A mesh, a placement or a stride counts by the boxes
that it leads to, and by whether holders share them; what leads to the same boxes has the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.plan.columns import int_keys
from ray_dcp.plan.values import Columns, Int64Array, Path
from ray_dcp.version import __version__

__all__ = ["FINGERPRINT_BYTES", "Fingerprints", "fingerprint", "plan_key"]

FINGERPRINT_BYTES = 32

_FORM = 4
"""To be raised by whoever changes which plan follows from the same items."""

_ARRAYS = (
    "name", "kind", "dtype", "ndim", "shape", "requires_grad", "splittable",
)  # fmt: skip
_BOXES = ("size", "offset")


def fingerprint(
    columns: Columns,
    *,
    world_size: int,
    container: str,
    part_bytes: int,
    to_lowest_rank: bool = False,
    files_per_node: int | None = None,
) -> bytes:
    """Returns 32 bytes that change with everything that the plan depends on.

    Args:
        columns: What the rank holds. Of `value`, only counts where there is one.
        world_size: Number of ranks.
        container: As for `make_plan`.
        part_bytes: As there.
        to_lowest_rank: As there.
        files_per_node: As there.

    Complexity:
        O(rows), about 0.3 us a row.

    Example:
        >>> from ray_dcp.plan.columns import ColumnsBuilder
        >>> def of(dtype, value):
        ...     builder = ColumnsBuilder()
        ...     _ = builder.tensor("w", dtype, (4, 2), value=value)
        ...     return fingerprint(
        ...         builder.build(), world_size=2, container="torch_save", part_bytes=1 << 30
        ...     )
        >>> of("float32", 1) == of("float32", 2), of("float32", 1) == of("bfloat16", 1)
        (True, False)
    """
    options = (world_size, container, part_bytes, to_lowest_rank, files_per_node)
    return _named(_state_of(columns, options), {key: getattr(columns, key) for key in _BOXES})


class Fingerprints:
    """`fingerprint` of many ranks that hold the same items at other places, one after another.

    Args:
        columns: What one of them holds.
        world_size: As for `fingerprint`.
        container: As there.
        part_bytes: As there.
        to_lowest_rank: As there.
        files_per_node: As there.
    """

    def __init__(
        self, columns: Columns, *, world_size: int, container: str, part_bytes: int,
        to_lowest_rank: bool = False, files_per_node: int | None = None,
    ) -> None:  # fmt: skip
        options = (world_size, container, part_bytes, to_lowest_rank, files_per_node)
        self._state = _state_of(columns, options)

    def of(self, columns: Columns) -> bytes:
        """Returns the fingerprint of a rank that differs by `offset` and `size` alone."""
        return self.of_boxes(columns.offset, columns.size)

    def of_boxes(self, offset: Int64Array, size: Int64Array) -> bytes:
        """Returns the fingerprint of a rank that holds these boxes of the same items."""
        return _named(self._state, {"size": size, "offset": offset})


def _state_of(columns: Columns, options: tuple[object, ...]) -> blake2b:
    words = [__version__, _FORM, *options]
    state = blake2b(json.dumps(words).encode(), digest_size=FINGERPRINT_BYTES)
    state.update(_vocabulary(columns.names, columns.paths, columns.dtypes))
    for key in _ARRAYS:
        _add(state, key, getattr(columns, key))
    state.update(np.ascontiguousarray(columns.value != 0).data)
    return state


def _named(state: blake2b, boxes: Mapping[str, Int64Array]) -> bytes:
    state = state.copy()
    for key in _BOXES:
        _add(state, key, boxes[key])
    return state.digest()


def _add(state: blake2b, key: str, array: npt.NDArray[Any]) -> None:
    state.update(f"{key} {array.dtype.str} {array.shape}".encode())
    state.update(np.ascontiguousarray(array).data)


_Vocabulary = tuple[tuple[str, ...], tuple[Path | None, ...], tuple[str, ...]]

_known: list[tuple[_Vocabulary, bytes]] = []
"""The last vocabulary and its digest. Why: a coordinator checks the fingerprints of ranks that name
the same things, of which `columns.decode` makes the same objects."""


def _vocabulary(
    names: tuple[str, ...], paths: tuple[Path | None, ...], dtypes: tuple[str, ...]
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


def plan_key(
    fingerprints: Sequence[bytes], nodes: Sequence[int] = (), joins: bool = False
) -> bytes:
    """Returns 32 bytes that name the plan of ranks with these fingerprints, in their order.

    Args:
        fingerprints: Of each rank.
        nodes: Which ranks share a node, as `loads.node_numbers` tells it.
        joins: Whether ranks of a node may write into one file.
    """
    # Why no separators: they are all of one length.
    state = blake2b(b"".join(fingerprints), digest_size=FINGERPRINT_BYTES)
    state.update(bytes([joins]))
    state.update(np.array(nodes, dtype=np.int64).tobytes())
    return state.digest()
