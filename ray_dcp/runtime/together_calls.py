"""Calls of gatherers that wait in a coordinator: each is told as soon as any of its ranks is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ray_dcp.protocol.commands import Answer, Answers, Command
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import OpKey, Reply
from ray_dcp.protocol.together import Batch, Batches, Together, Told

__all__ = ["TogetherCalls"]


class TogetherCalls:
    """The gatherers' part of a coordinator; in the event loop's thread.

    Args:
        coordination: Decides.
        carry_out: Carries out commands, and hands back the answers among them.
    """

    def __init__(
        self, coordination: Coordination, carry_out: Callable[[Sequence[Command]], None]
    ) -> None:
        self._coordination = coordination
        self._carry_out = carry_out
        self._batches = Batches()
        self._futures: dict[Batch, asyncio.Future[Told]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def call(self, message: Together, beats_s: float | None) -> Told:
        """Returns what ranks are told, when that is known of any.

        Args:
            message: May come again, for those of its ranks that were not told.
            beats_s: See `Coordination.receive`.
        """
        batch = self._batches.add(message)
        future = self._futures[batch] = asyncio.get_running_loop().create_future()
        try:
            commands, refused = self._coordination.receive_together(message, beats_s=beats_s)
            for rank, reply in refused.items():
                batch.put((rank,), reply)
            self._carry_out(commands)
            told: Told = await future
            return told
        finally:
            if self._futures.pop(batch, None) is not None:
                self._batches.remove(batch)

    def answer(self, command: Answer | Answers) -> None:
        """Takes an answer."""
        self._batches.answer(command)

    def refuse(self, key: OpKey, reply: Reply) -> None:
        """Takes that all who wait in an operation are told the same."""
        self._batches.refuse(key, reply)
        self.tell()

    def tell(self) -> None:
        """Ends the calls that have something to tell."""
        for batch in self._batches.ready():
            future = self._futures.pop(batch, None)
            if future is not None and not future.done():
                future.set_result(Told(tuple(batch.told)))
