"""Which stagers hold the bytes of an asynchronous save, and which of them are stragglers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from math import inf
from statistics import median

from ray_dcp.protocol.messages import PartsHeld


class Holders:
    """Which stager is to write each rank's bytes. Reports may come in any order, and twice."""

    def __init__(self) -> None:
        self._homes: dict[int, PartsHeld] = {}
        self._helpers: dict[int, PartsHeld] = {}

    def note(self, held: PartsHeld) -> bool:
        """Takes that a stager holds a rank's bytes; returns whether that is new."""
        rank = held.rank
        same = self._helpers if held.helps else self._homes
        home, helper = self._homes.get(rank), self._helpers.get(rank)
        is_late = rank in same and held.incarnation <= same[rank].incarnation
        if is_late or (held.helps and home is not None and held.incarnation < home.incarnation):
            return False
        same[rank] = held
        if not held.helps and helper is not None and helper.incarnation < held.incarnation:
            del self._helpers[rank]
        return True

    def of(self, rank: int) -> PartsHeld | None:
        """Returns who is to write a rank's bytes; None where nobody is known."""
        return self._helpers.get(rank) or self._homes.get(rank)

    def is_helped(self, rank: int) -> bool:
        """Returns whether a helper holds a rank's bytes."""
        return rank in self._helpers

    def by(self, stager: str) -> list[int]:
        """Returns the ranks whose bytes a stager is to write."""
        return [rank for rank, held in self.all() if held.stager == stager]

    def all(self) -> Iterator[tuple[int, PartsHeld]]:
        """Yields each rank of which it is known, with who is to write its bytes."""
        for rank in {**self._homes, **self._helpers}:
            held = self.of(rank)
            if held is not None:
                yield rank, held

    def free(self, busy: frozenset[str]) -> tuple[str, ...]:
        """Returns the stagers that could help another.

        Args:
            busy: Stagers that have still to write.
        """
        return tuple(
            dict.fromkeys(held.stager for _, held in self.all() if held.stager not in busy)
        )

    def is_overtaken(self, rank: int, incarnation: int) -> bool:
        """Returns whether it does not matter what becomes of a rank's bytes with one stager."""
        held = self.of(rank)
        return held is not None and held.incarnation > incarnation

    def newest(self, rank: int) -> int:
        """Returns the highest incarnation that was told of; -1 for none."""
        found = (self._homes.get(rank), self._helpers.get(rank))
        return max((held.incarnation for held in found if held is not None), default=-1)


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


def find_stragglers(paces: Mapping[int, Pace], elapsed_s: float) -> dict[int, str]:
    """Returns the ranks whose bytes another stager should write, each with what was seen.

    Only when at least half of the ranks are done is it known how long it should take.

    Args:
        paces: By rank.
        elapsed_s: Since writing began, in seconds.

    Example:
        >>> done = Pace(100, 100, done_s=4.0)
        >>> find_stragglers({0: done, 1: Pace(10, 100), 2: done}, 5.0)
        {1: 'after 5.0 s 10 of 100 bytes were written, where others took 4.0 s for theirs'}
        >>> find_stragglers({0: done, 1: Pace(90, 100), 2: done}, 5.0)
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


class WriteProgress:
    """How far the stagers of one save are."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._paces: dict[int, tuple[int, int]] = {}
        self._done_s: dict[int, float] = {}

    def stragglers(
        self, paces: Mapping[int, tuple[int, int]], left: Mapping[int, Sized], now_s: float
    ) -> dict[int, str]:
        """Takes how far stagers are; returns what `find_stragglers` does.

        Args:
            paces: Bytes written and bytes in all, by rank.
            left: Of each rank the files that are not written.
            now_s: Seconds that never go back. Writing began when this was called first.
        """
        began_s = self._began_s = now_s if self._began_s is None else self._began_s
        self._paces.update(paces)
        for rank, files in left.items():
            if not files:
                self._done_s.setdefault(rank, now_s - began_s)
        known = {
            rank: Pace(*self._paces.get(rank, (0, 0)), self._done_s.get(rank)) for rank in left
        }
        return find_stragglers(known, now_s - began_s)
