"""What is kept of operations that are not there: those that ended, and those still to begin."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.messages import OpKey

__all__ = ["Early", "Forgotten", "trim"]

EARLY = 1024
"""Operations of which something is known before they begin."""

LAST = 1024
"""Operations of a session that are known to have ended one by one; all before them have."""


class Forgotten:
    """Operations of a session that ended and are not remembered.

    Why not just the highest: keys are named before they are used, and an operation that goes on
    in the background may come after many that were named later.
    """

    def __init__(self) -> None:
        self._before = (-1, 0)
        self._last: set[tuple[int, int]] = set()

    def __contains__(self, key: OpKey) -> bool:
        return (at := (key.seq, key.step)) <= self._before or at in self._last

    def add(self, key: OpKey) -> None:
        """Notes that an operation ended and is not remembered."""
        self._last.add((key.seq, key.step))
        if len(self._last) > LAST:
            self._before = max(self._before, min(self._last))
            self._last = {at for at in self._last if at > self._before}


class Early:
    """What came before the first rank has joined an operation here: it counts when one does."""

    def __init__(self) -> None:
        self._gone: OrderedDict[OpKey, dict[int, CheckpointError]] = OrderedDict()
        self._cancelled: OrderedDict[OpKey, str] = OrderedDict()

    def lose(self, key: OpKey, rank: int, error: CheckpointError) -> None:
        """Notes that a rank will not join an operation."""
        self._gone.setdefault(key, {})[rank] = error
        trim(self._gone, EARLY)

    def cancel(self, key: OpKey, reason: str) -> None:
        """Notes that an operation is cancelled, if it is a save."""
        self._cancelled.setdefault(key, reason)
        trim(self._cancelled, EARLY)

    def is_cancelled(self, key: OpKey) -> bool:
        """Returns whether it was cancelled."""
        return key in self._cancelled

    def take(self, key: OpKey) -> tuple[dict[int, CheckpointError], str | None]:
        """Returns, and forgets, which ranks will not join, and why it is cancelled if it is."""
        return self._gone.pop(key, {}), self._cancelled.pop(key, None)


def trim(memory: OrderedDict[Any, Any], length: int) -> None:
    """Drops the oldest entries until there are no more than `length`."""
    while len(memory) > length:
        memory.popitem(last=False)
