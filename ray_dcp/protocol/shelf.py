"""What a coordinator keeps of earlier saves, so that ranks need not say it again.

Soft: whatever is missing here is asked for. Bounded by bytes, the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict

from ray_dcp.protocol.commands import Planned

__all__ = ["Shelf"]

MOST_ROWS_BYTES = 1 << 30
"""Of ranks' rows, as they were sent. Ranks that hold the same need them once."""

MOST_PLANS = 8
"""A job that saves two layouts in turn (weights and their averages) uses two."""

MOST_PLAN_CHUNKS = 32_000_000
"""Of all plans together; a chunk takes about 150 bytes."""


class Shelf:
    """Rows by fingerprint, and plans by the fingerprints of all ranks.

    Args:
        most_rows_bytes: Rows beyond this are forgotten.
    """

    def __init__(self, most_rows_bytes: int = MOST_ROWS_BYTES) -> None:
        self._most_rows_bytes = most_rows_bytes
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()
        self._rows_bytes = 0
        self._plans: OrderedDict[bytes, Planned] = OrderedDict()

    def rows(self, fingerprint: bytes) -> bytes | None:
        """Returns what a rank of this fingerprint holds, encoded; None when it is not known."""
        found = self._rows.get(fingerprint)
        if found is not None:
            self._rows.move_to_end(fingerprint)
        return found

    def put_rows(self, fingerprint: bytes, rows: bytes) -> None:
        """Keeps what a rank sent."""
        self._rows_bytes += len(rows) - len(self._rows.pop(fingerprint, b""))
        self._rows[fingerprint] = rows
        while self._rows_bytes > self._most_rows_bytes:
            _, old = self._rows.popitem(last=False)
            self._rows_bytes -= len(old)

    def plan(self, key: bytes) -> Planned | None:
        """Returns the plan of ranks with these fingerprints; None when it is not known."""
        found = self._plans.get(key)
        if found is not None:
            self._plans.move_to_end(key)
        return found

    def put_plan(self, key: bytes, planned: Planned) -> None:
        """Keeps a plan."""
        self._plans[key] = planned
        self._plans.move_to_end(key)
        while len(self._plans) > MOST_PLANS or (
            len(self._plans) > 1 and self._num_chunks > MOST_PLAN_CHUNKS
        ):
            self._plans.popitem(last=False)

    @property
    def _num_chunks(self) -> int:
        return sum(planned.plan.num_chunks for planned in self._plans.values())
