"""Which ranks a coordinator knows to live, kept where a coordinator that is restarted finds it.

*Why*: when a machine with the coordinator and some ranks is lost, the next coordinator must know
whom to miss; those ranks will never call it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import astuple

from ray_dcp.runtime import hooks
from ray_dcp.runtime.hooks import Caller

__all__ = ["Roster"]

Member = tuple[str, int]
"""A session's name and a rank."""


class Roster:
    """The ranks that said that they are there and have neither left nor died.

    Used in one thread, the event loop's.

    Args:
        name: What it is kept under in the cluster.

    Attributes:
        ever: Whether there was any rank, in this process or before it.
    """

    def __init__(self, name: str) -> None:
        self._key = f"roster:{name}"
        kept = json.loads(hooks.recall(self._key) or "[]")
        self._members: dict[Member, Caller] = {
            (session, rank): Caller(*caller) for session, rank, caller in kept
        }
        self._changed = False
        self.ever = bool(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, session: str, rank: int, caller: Caller) -> None:
        """Notes that a rank is there."""
        if self._members.get((session, rank)) != caller:
            self._members[session, rank] = caller
            self._changed = self.ever = True

    def remove(self, session: str, rank: int) -> None:
        """Notes that a rank has left; one that is not known is fine."""
        self.ever = True
        self._changed |= self._members.pop((session, rank), None) is not None

    async def take_dead(self) -> list[tuple[str, int, Caller]]:
        """Returns those whose processes have ended, and forgets them.

        Raises:
            InternalError: This Ray does not tell who lives.
        """
        watched = dict(self._members)
        if not watched:
            return []
        dead = await asyncio.to_thread(hooks.gone, set(watched.values()))
        # A rank that spoke meanwhile may be another process by now.
        taken = [
            (session, rank, caller)
            for (session, rank), caller in watched.items()
            if caller in dead and self._members.get((session, rank)) == caller
        ]
        for session, rank, _ in taken:
            self.remove(session, rank)
        return taken

    async def keep(self) -> None:
        """Puts it where the next coordinator finds it, if it has changed."""
        if self._changed:
            self._changed = False
            members = [
                (session, rank, astuple(caller))
                for (session, rank), caller in self._members.items()
            ]
            text = json.dumps(members) if members else ""
            await asyncio.to_thread(hooks.remember, self._key, text)

    def clear(self) -> None:
        """Forgets everybody."""
        self._members.clear()
