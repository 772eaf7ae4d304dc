"""`StagerOptions`: how much memory a node stages in, in windows of which length."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ray_dcp.core.checksums import MAX_BLOCK_BYTES
from ray_dcp.errors import InvalidRequestError

MIB = 1 << 20

SHARE_OF_STORE = 0.5
"""Part of a node's object store that staged bytes may take. Ray begins to spill at 80 %, and others
use the store as well."""


@dataclass(frozen=True, kw_only=True)
class StagerOptions:
    """How a node stages.

    Raises:
        InvalidRequestError: A field has a value that it can't have.

    Examples:
        >>> StagerOptions(limit_bytes=64 << 20).window_bytes_within(64 << 20)
        16777216
    """

    limit_bytes: int | None = None
    """Most bytes that all ranks of a node may have staged at a time; at most half of the node's
    object store, which is the default."""
    window_bytes: int = 128 * MIB
    """Longest window, the unit in which bytes are handed over; shorter under a small limit, and for
    bytes from a device. A longer one costs training less: each is one call of `ray.put`."""

    def __post_init__(self) -> None:
        checks = {
            "limit_bytes": self.limit_bytes is None or _is_in(self.limit_bytes, _LEAST_LIMIT),
            "window_bytes": _is_in(self.window_bytes, _LEAST_WINDOW),
        }
        wrong = [name for name, is_right in checks.items() if not is_right]
        if wrong:
            raise InvalidRequestError(
                f"StagerOptions.{wrong[0]} can't be {getattr(self, wrong[0])!r}: expected "
                f"limit_bytes of at least {_LEAST_LIMIT}, and window_bytes of at least "
                f"{_LEAST_WINDOW}",
                key=wrong[0],
            )

    def window_bytes_within(self, limit_bytes: int) -> int:
        """Returns the length of a window: a whole number of MiB, at least four in the limit."""
        return max(
            min(self.window_bytes, limit_bytes // _LEAST_WINDOWS) // MIB * MIB, _LEAST_WINDOW
        )


def _is_in(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= sys.maxsize


_LEAST_WINDOWS = 4
"""A rank fills one window while others are written."""
_LEAST_WINDOW = 2 * MAX_BLOCK_BYTES
"""A window must take a checksum block wherever it begins."""
_LEAST_LIMIT = _LEAST_WINDOW * _LEAST_WINDOWS
