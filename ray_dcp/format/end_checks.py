"""Block checksums at the end of the file whose bytes they are of.

A checkpoint of many chunks has many checksums: 8 bytes for each block. Whoever writes a file writes
them behind its last item, from the next multiple of 64 bytes on, little-endian, so that they pass
through nobody else's hands: the manifest has their digest, and how many they are follows from the
chunk table. DCP looks only at the items that `.metadata` names, and never at what is behind them.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from ray_dcp.plan.values import Int64Array, UInt64Array

__all__ = ["ALIGNMENT", "CHECK_BYTES", "end_checks", "length_with_checks"]

ALIGNMENT = 64
CHECK_BYTES = 8


def end_checks(end: int, checks: UInt64Array) -> bytes:
    """Returns what follows the last item of a file; nothing where it has no checksums.

    Args:
        end: Where that item ends.
        checks: uint64[k], of all blocks of the file, in the order of its chunks.

    Example:
        >>> list(end_checks(62, np.array([1], np.uint64)))
        [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    """
    if not len(checks):
        return b""
    return bytes(-end % ALIGNMENT) + np.ascontiguousarray(checks, dtype="<u8").tobytes()


@overload
def length_with_checks(end: int, num_checks: int) -> int: ...


@overload
def length_with_checks(end: Int64Array, num_checks: Int64Array) -> Int64Array: ...


def length_with_checks(end: Any, num_checks: Any) -> Any:
    """Returns how long a file is with its checksums, or each of many files.

    Args:
        end: Where its last item ends.
        num_checks: How many checksums follow.

    Example:
        >>> length_with_checks(60, 2), length_with_checks(60, 0)
        (80, 60)
    """
    lengths = end + (-end % ALIGNMENT) * (num_checks > 0) + CHECK_BYTES * num_checks
    return int(lengths) if isinstance(end, int) else lengths
