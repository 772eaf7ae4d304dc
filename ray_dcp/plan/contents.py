"""A rank's items without the digests of their content, and these alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.plan.values import Columns

__all__ = ["contents_of", "with_contents", "without_contents"]


def contents_of(columns: Columns) -> bytes:
    """Returns the digests of content that are not 0, 8 bytes each, in the order of the rows."""
    contents: bytes = columns.value[columns.value != 0].astype("<u8").tobytes()
    return contents


def without_contents(columns: Columns) -> Columns:
    """Returns columns that only say which items have a digest of content."""
    return replace(columns, value=(columns.value != 0).astype(np.uint64))


def with_contents(columns: Columns, contents: bytes, rank: int) -> Columns:
    """Returns what `without_contents` was made of.

    Args:
        columns: What came of `without_contents`.
        contents: `contents_of` the same columns.
        rank: Whose they are, for the message.

    Raises:
        InternalError: They do not belong together.
    """
    rows = np.flatnonzero(columns.value)
    if len(contents) != 8 * len(rows):
        raise InternalError(
            f"expected {len(rows)} digests of content, but found {len(contents)} bytes. Please "
            f"report this",
            rank=rank,
        )
    value = np.zeros(len(columns), dtype=np.uint64)
    value[rows] = np.frombuffer(contents, dtype="<u8")
    return replace(columns, value=value)
