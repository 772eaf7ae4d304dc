"""Which committed saves are told to Ray Train, and when: decided alike by every rank, alone.

Ray Train registers one report each time that its controller looks, and `report` waits while one is
not taken. So saves that follow each other faster are not all reported: the newest counts. What the
ranks decide by is the same on all: the steps, their outcomes, and when each was planned, as its
manifest tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Committed", "Pace"]

_SLACK = 1.5
"""Times the interval of the controller: what it needs to look is on top of it."""


@dataclass(frozen=True)
class Committed:
    """A save that is committed."""

    step: int
    created_s: float | None
    """By the coordinator's clock; None when its manifest does not travel."""


@dataclass
class Pace:
    """What was reported last.

    Args:
        interval_s: How often Ray Train's controller looks, in seconds.
    """

    interval_s: float
    last_s: float | None = None
    """When what was reported last was planned."""

    def due(self, found: Sequence[Committed], *, final: bool = False) -> Committed | None:
        """Returns what to report now, if anything, and takes it as reported.

        Args:
            found: Committed and not reported, in the order of their steps.
            final: No later call will come.

        Example:
            >>> pace = Pace(2.0)
            >>> pace.due([Committed(1, 100.0)])
            Committed(step=1, created_s=100.0)
            >>> pace.due([Committed(2, 101.0)])
            >>> pace.due([Committed(2, 101.0), Committed(3, 104.0)])
            Committed(step=3, created_s=104.0)
        """
        if not found:
            return None
        newest = found[-1]
        known = newest.created_s is not None and self.last_s is not None
        # Why above zero: a clock that was set back must not keep a run from being reported.
        too_soon = 0 <= _since(newest, self.last_s) < self.interval_s * _SLACK
        if known and not final and too_soon:
            return None
        self.last_s = newest.created_s
        return newest


def _since(one: Committed, last_s: float | None) -> float:
    return (one.created_s or 0.0) - (last_s or 0.0)
