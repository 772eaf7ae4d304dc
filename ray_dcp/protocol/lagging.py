"""Which ranks' bytes are written so slowly that another stager should help. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from statistics import median

__all__ = ["Pace", "laggards"]

LEAST_WAIT_S = 0.5
"""Nobody is helped before so many seconds of writing: a pace is not known earlier."""

HELP_COSTS_S = 1.0
"""Whoever would be done by itself in less than this is not helped: to hand a few hundred megabytes
to another node takes about as long."""

TIMES_SLOWER = 2.0
"""Whoever would take more than so many times as long as the others took is helped."""


@dataclass(frozen=True)
class Pace:
    """How far the writing of one rank's bytes is."""

    written_bytes: int
    total_bytes: int
    done_s: float | None = None
    """After how many seconds all of it was written; None while it is not."""


def laggards(paces: Mapping[int, Pace], elapsed_s: float) -> dict[int, str]:
    """Returns the ranks whose bytes another stager should write, each with what was seen.

    Only when at least half of the ranks are done is it known how long it should take.

    Args:
        paces: By rank.
        elapsed_s: Since writing began, in seconds.

    Example:
        >>> done = Pace(100, 100, done_s=4.0)
        >>> laggards({0: done, 1: Pace(10, 100), 2: done}, 5.0)
        {1: 'after 5.0 s 10 of 100 bytes were written, where others took 4.0 s for theirs'}
        >>> laggards({0: done, 1: Pace(90, 100), 2: done}, 5.0)
        {}
    """
    done = [pace.done_s for pace in paces.values() if pace.done_s is not None]
    if not done or 2 * len(done) < len(paces):
        return {}
    usual_s = median(done)
    if elapsed_s < max(LEAST_WAIT_S, usual_s):
        return {}
    found: dict[int, str] = {}
    for rank, pace in paces.items():
        if pace.done_s is not None or not pace.total_bytes:
            continue
        # At this pace it would end after elapsed * total / written.
        left_s = inf
        if pace.written_bytes:
            left_s = elapsed_s * (pace.total_bytes / pace.written_bytes - 1)
        if left_s > HELP_COSTS_S and elapsed_s + left_s > TIMES_SLOWER * usual_s:
            found[rank] = (
                f"after {elapsed_s:.1f} s {pace.written_bytes} of {pace.total_bytes} bytes were "
                f"written, where others took {usual_s:.1f} s for theirs"
            )
    return found
