"""The name of what a rank holds: 32 bytes, equal when the plan would be.

A plan is a pure function of the ranks' columns, without the content of any item, and of a few
options. So a fingerprint is the hash of exactly these, and of the version of what computes it:
nothing that a plan depends on can be left out. A mesh, a placement or a stride counts by the boxes
that it leads to, and by whether holders share them; what leads to the same boxes has the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from ray_dcp.plan.columns import int_keys
from ray_dcp.plan.values import Columns, Path
from ray_dcp.version import __version__

__all__ = ["FINGERPRINT_BYTES", "fingerprint", "plan_key"]

FINGERPRINT_BYTES = 32

_FORM = 1
"""To be raised by whoever changes which plan follows from the same items."""

_ARRAYS = (
    "name", "kind", "dtype", "ndim", "shape", "offset", "size", "requires_grad", "splittable",
)  # fmt: skip


def fingerprint(
    columns: Columns,
    *,
    world_size: int,
    container: str,
    part_bytes: int,
    to_lowest_rank: bool = False,
) -> bytes:
    """Returns 32 bytes that change with everything that the plan depends on.

    Args:
        columns: What the rank holds. Of `value`, only counts where there is one.
        world_size: Number of ranks.
        container: As for `make_plan`.
        part_bytes: As there.
        to_lowest_rank: As there.

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
    words = [__version__, _FORM, world_size, container, part_bytes, to_lowest_rank]
    state = blake2b(json.dumps(words).encode(), digest_size=FINGERPRINT_BYTES)
    # Why apart: a number as a key equals its text, for the cache too.
    state.update(json.dumps(int_keys(columns.paths)).encode())
    state.update(_vocabulary(columns.names, columns.paths, columns.dtypes))
    for key in _ARRAYS:
        array = getattr(columns, key)
        state.update(f"{key} {array.dtype.str} {array.shape}".encode())
        state.update(np.ascontiguousarray(array).data)
    state.update(np.ascontiguousarray(columns.value != 0).data)
    return state.digest()


@lru_cache(maxsize=16)
def _vocabulary(
    names: tuple[str, ...], paths: tuple[Path | None, ...], dtypes: tuple[str, ...]
) -> bytes:
    """Why cached: a coordinator checks the fingerprints of ranks that name the same things."""
    return blake2b(json.dumps([names, paths, dtypes]).encode()).digest()


def plan_key(fingerprints: Sequence[bytes]) -> bytes:
    """Returns 32 bytes that name the plan of ranks with these fingerprints, in their order."""
    # Why no separators: they are all of one length.
    return blake2b(b"".join(fingerprints), digest_size=FINGERPRINT_BYTES).digest()
