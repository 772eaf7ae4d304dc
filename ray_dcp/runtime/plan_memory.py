"""A rank's parts of the last plans, so that the next save of the same items needs no rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ray_dcp.plan.agreement import digests_of
from ray_dcp.plan.values import Int32Array, RankPlan

__all__ = ["PlanMemory", "Remembered"]

MOST_PLANS = 8
"""A job that saves two layouts in turn (weights and their averages) uses two."""


@dataclass(frozen=True, eq=False)
class Remembered:
    """This rank's part of a plan.

    Attributes:
        digest: Of the global plan.
        plan: What this rank writes.
        place: int32[k], those of the rank's digests of content that others have as well.
        group: int32[k], ascending; see `ray_dcp.plan.agreement`.
    """

    digest: bytes
    plan: RankPlan
    place: Int32Array
    group: Int32Array

    def values(self, contents: bytes) -> bytes:
        """Returns what this rank tells of its content, from `contents_of` its items."""
        return digests_of(self.place, self.group, contents)


class PlanMemory:
    """The newest plan of each of the last fingerprints, of one rank of one session. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, Remembered] = OrderedDict()

    def get(self, fingerprint: bytes) -> Remembered | None:
        """Returns what is remembered of items of this fingerprint."""
        with self._lock:
            found = self._plans.get(fingerprint)
            if found is not None:
                self._plans.move_to_end(fingerprint)
            return found

    def put(self, fingerprint: bytes, remembered: Remembered) -> None:
        """Remembers a plan."""
        with self._lock:
            self._plans[fingerprint] = remembered
            self._plans.move_to_end(fingerprint)
            while len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
