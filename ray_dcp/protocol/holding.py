"""Which stager writes each rank's staged bytes: that of its node, or one that helps."""

from __future__ import annotations

from collections.abc import Iterator

from ray_dcp.protocol.messages import PartsHeld

__all__ = ["Holding"]


class Holding:
    """What was told of who holds whose bytes; it may come in any order, and twice."""

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

    def clear(self) -> None:
        """Forgets all."""
        self._homes.clear()
        self._helpers.clear()
