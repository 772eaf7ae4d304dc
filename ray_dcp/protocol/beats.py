"""Beats: what a rank tells while it takes part, so that slow, frozen and absent are told apart.

A beat is no step of an operation: it is answered at once, changes no machine, and may be lost.
Only values and clocks live here; who is blamed when is decided in `attendance`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LONG_WAIT_S", "AwakeClock", "Beat", "BeatHeard", "Doing", "beat_interval_s"]

LONG_WAIT_S = 30.0
"""A wait for other ranks that lasts longer is logged, once, in seconds."""

LONGEST_INTERVAL_S = 5.0
BEATS_IN_TIMEOUT = 6
"""Beats that fit into a timeout: some may be late or lost before anybody is blamed."""


def beat_interval_s(timeout_s: float) -> float:
    """Returns how often to beat.

    Args:
        timeout_s: `heartbeat_timeout_s`, in seconds.

    Example:
        >>> beat_interval_s(60.0), beat_interval_s(2.0)
        (5.0, 0.3333333333333333)
    """
    return min(LONGEST_INTERVAL_S, timeout_s / BEATS_IN_TIMEOUT)


@dataclass(frozen=True)
class Doing:
    """What a rank does of one call of its user, at the moment of a beat.

    Ages, no times: clocks of two machines are never compared.
    """

    first_seq: int
    """Lowest operation that this call named."""
    last_seq: int
    """Highest operation that this call named."""
    phase: str
    """`"capturing"`, `"waiting"`, `"opening"`, `"planning"`, `"staging"` (with
    others, into one file), `"writing"` or `"reading"`."""
    phase_s: float = 0.0
    """How long it has been in this phase, in seconds."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Bytes to be moved in this phase; 0 when that is not known."""
    quiet_s: float = 0.0
    """How long ago bytes last moved, or the phase began, in seconds."""
    key: str | None = None
    """Storage key at which it is now; the one that takes longest."""


@dataclass(frozen=True)
class Beat:
    """Rank → coordinator: I live, and this is how far I am. Answer: `BeatHeard`, at once."""

    session: str
    rank: int
    timeout_s: float
    """Silence of this rank, from now on and while it does this, means that it is frozen."""
    doings: tuple[Doing, ...] = ()
    """One for each call of the user that is under way."""


@dataclass(frozen=True)
class BeatHeard:
    """Coordinator → rank: I live as well, and this is who I am."""

    actor_id: str
    num_restarts: int
    """How often Ray had started it anew when this process began."""
    place: str
    """Where it is, for messages: `"pid 12 on node-3"`."""
    waits: tuple[str, ...] = ()
    """For whom operations have waited for long, in words, to be logged by this rank."""


class AwakeClock:
    """A clock that stands still while its own process does.

    *Why*: a process that was stopped for a while must not conclude that all others were silent
    so long. Whoever reads it calls `tick` regularly; a tick that comes late counts for less.

    Args:
        clock: Seconds that never go back.
        tick_s: How often `tick` is called, in seconds.

    Example:
        >>> times = iter([0.0, 1.0, 100.0, 100.5])
        >>> awake = AwakeClock(lambda: next(times), 1.0)
        >>> awake.tick(), awake.tick(), awake()
        (1.0, 3.0, 3.5)
    """

    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        self._clock = clock
        self._most_s = 2 * tick_s
        self._ticked_s = clock()
        self._awake_s = 0.0

    def tick(self) -> float:
        """Returns the seconds that this process was awake, and notes that it is."""
        now_s = self._clock()
        self._awake_s += min(now_s - self._ticked_s, self._most_s)
        self._ticked_s = now_s
        return self._awake_s

    def __call__(self) -> float:
        """Returns the seconds that this process was awake."""
        return self._awake_s + min(self._clock() - self._ticked_s, self._most_s)
