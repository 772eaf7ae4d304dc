"""Keeps the `Handover` of each load that is under way, in the coordinator; decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ray_dcp.protocol.handover import Handover, Listen, News, Word
from ray_dcp.protocol.messages import OpKey

__all__ = ["Switchboard"]


class Switchboard:
    """What the ranks of all loads of one coordinator tell each other.

    *Invariant*: used in the event loop's thread only.

    Args:
        is_over: Whether a load has its outcome, or is not known.
    """

    def __init__(self, is_over: Callable[[OpKey], bool]) -> None:
        self._is_over = is_over
        self._handovers: dict[OpKey, Handover] = {}
        self._told: dict[OpKey, asyncio.Event] = {}

    async def hear(self, word: Word) -> Sequence[News] | None:
        """Takes what a rank says, and returns the news when it listens; None when it is over.

        Args:
            word: May come twice.
        """
        key = word.key
        if self._is_over(key):
            self._drop(key)
            return None
        handover = self._handovers.setdefault(key, Handover())
        told = self._told.setdefault(key, asyncio.Event())
        if not isinstance(word, Listen):
            handover.take(word)
            self._told[key] = asyncio.Event()
            told.set()
            return ()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + word.wait_s
        while not (news := handover.news(word.rank, word.seen)) and loop.time() < end_s:
            if self._handovers.get(key) is not handover:
                return None
            try:
                waiting = self._told[key].wait()
                await asyncio.wait_for(waiting, end_s - loop.time())
            except asyncio.TimeoutError:
                break
        return news

    def tidy(self) -> None:
        """Forgets loads that are over, and with them what keeps their bytes alive."""
        for key in [key for key in self._handovers if self._is_over(key)]:
            self._drop(key)

    def _drop(self, key: OpKey) -> None:
        self._handovers.pop(key, None)
        told = self._told.pop(key, None)
        if told is not None:
            told.set()
