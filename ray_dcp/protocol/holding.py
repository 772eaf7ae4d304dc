"""Which stager each rank's staged bytes are to be written by: that of its node, or one that helps.

A helper is no use before it holds the bytes of all ranks that share a file: until then each rank's
are held by the stager of its node, which goes on writing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ray_dcp.protocol.messages import PartsHeld

__all__ = ["Holding"]


class Holding:
    """What was told of who holds whose bytes; it may come in any order, and twice.

    Args:
        kin: From a rank to the ranks with which it shares a file, and itself.
    """

    def __init__(self, kin: Callable[[int], frozenset[int]]) -> None:
        self._kin = kin
        self._homes: dict[int, PartsHeld] = {}
        self._helpers: dict[int, PartsHeld] = {}
        self._chosen: dict[int, str] = {}

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
        return self._helpers[rank] if self.is_helped(rank) else self._homes.get(rank)

    def is_helped(self, rank: int) -> bool:
        """Returns whether one helper holds all bytes of the files that a rank has a part of."""
        found = {self._helpers[one].stager for one in self._kin(rank) if one in self._helpers}
        return len(found) == 1 and self._kin(rank) <= self._helpers.keys()

    def is_stranded(self, rank: int) -> bool:
        """Returns whether only a helper is known that lacks bytes of the files, and no other."""
        return rank in self._helpers and self.of(rank) is None

    def by(self, stager: str) -> list[int]:
        """Returns the ranks whose bytes a stager is to write."""
        return [rank for rank, held in self.all() if held.stager == stager]

    def all(self) -> Iterator[tuple[int, PartsHeld]]:
        """Yields each rank of which it is known, with who is to write its bytes."""
        for rank in {**self._homes, **self._helpers}:
            held = self.of(rank)
            if held is not None:
                yield rank, held

    def free(self, rank: int, busy: frozenset[str]) -> tuple[str, ...]:
        """Returns the stagers that could help a rank; one for those that share files.

        Args:
            rank: Whose stager lags.
            busy: Stagers that have still to write.
        """
        free = dict.fromkeys(held.stager for _, held in self.all() if held.stager not in busy)
        kin = self._kin(rank)
        if len(kin) == 1 or not free:
            return tuple(free)
        lead = min(kin)
        if self._chosen.get(lead) not in free:
            self._chosen[lead] = tuple(free)[lead % len(free)]
        return (self._chosen[lead],)

    def is_overtaken(self, rank: int, incarnation: int) -> bool:
        """Returns whether it does not matter what becomes of a rank's bytes with one stager."""
        held, helper = self.of(rank), self._helpers.get(rank)
        is_idle = helper is not None and helper is not held and helper.incarnation == incarnation
        return is_idle or (held is not None and held.incarnation > incarnation)

    def newest(self, rank: int) -> int:
        """Returns the highest incarnation that was told of; -1 for none."""
        found = (self._homes.get(rank), self._helpers.get(rank))
        return max((held.incarnation for held in found if held is not None), default=-1)

    def clear(self) -> None:
        """Forgets all."""
        self._homes.clear()
        self._helpers.clear()
