"""Who holds staged bytes is noted whichever way a rank says it: another coordinator may need it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ray_dcp.protocol.aggregation import MessageBatch
from ray_dcp.protocol.messages import Ack, OpKey, PartsHeld, SaveStaged
from ray_dcp.runtime.coordinator import Coordinator

KEY = OpKey("run", 3)
HELD = [PartsHeld(KEY, rank, "a1", 1, f"stager {rank}") for rank in range(2)]
STAGED = [SaveStaged(KEY, rank, "a1", 1, held=held) for rank, held in enumerate(HELD)]


class Actor(Coordinator):
    """A coordinator without Ray, which answers at once."""

    def __init__(self) -> None:
        self.noted: list[PartsHeld] = []
        self.kept = 0
        self._loop = asyncio.get_running_loop()
        self._called = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._waiting = {}
        self._tracing = SimpleNamespace(hears=lambda *_: None, hears_together=lambda *_: None)
        self._coordination = SimpleNamespace(receive=self._receive)
        self._plans = SimpleNamespace(note=self._note, keep=self._keep)
        self._together = SimpleNamespace(call=self._told)
        self._tasks = set()

    def _receive(self, request: object, beats_s: float | None = None) -> tuple[()]:
        for futures in self._waiting.values():
            for future in futures:
                future.set_result(Ack())
        return ()

    def _carry_out(self, commands: object) -> None:
        pass

    def _note(self, held: PartsHeld) -> bool:
        self.noted.append(held)
        return held.rank == 1

    async def _keep(self) -> None:
        self.kept += 1

    async def _told(self, message: object, beats_s: float | None) -> object:
        return Ack()


@pytest.mark.parametrize("together", [False, True])
def test_they_are_noted_and_kept(together):
    async def story() -> Actor:
        actor = Actor()
        if together:
            message = MessageBatch(
                KEY, "SaveStaged", (0, 1), (*STAGED, SaveStaged(KEY, 2, "a1", 1))
            )
            await actor.call_together(message, ())
        else:
            for request in (*STAGED, SaveStaged(KEY, 2, "a1", 1)):
                await actor.call(request)
        await asyncio.gather(*actor._tasks)
        return actor

    actor = asyncio.run(story())
    assert actor.noted == HELD
    assert actor.kept == 1
