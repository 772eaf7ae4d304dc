"""Asynchronous saves outlive their coordinator: stagers keep their plans, the next one goes on.

A plan lies with two stagers that hold bytes of the save, and where it lies is in Ray's control
store. Nothing of it is believed that storage contradicts: the commit is the same vote as ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.commands import Command
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import OpKey, PartsHeld, Request
from ray_dcp.runtime import hooks, ray_calls
from ray_dcp.runtime.stager_watch import parts_written
from ray_dcp.stage.values import StageProgress

__all__ = ["StagedPlans"]

COPIES = 2
"""Stagers that keep a plan."""

ANSWER_S = 10.0
"""How long a stager may take to answer, in seconds."""

_GONE = (RayError, ValueError, asyncio.TimeoutError)
"""What asking a stager raises that is dead or does not answer."""

logger = logging.getLogger(__name__)


@dataclass
class _Saved:
    """Where one save's plan is, and who holds its bytes."""

    copies: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    is_told: bool = False
    taken_up: tuple[int, str] | None = None
    """Epoch and attempt, where an earlier coordinator had planned it."""
    asked: frozenset[str] = frozenset()
    """Who was known to hold bytes of it when it was taken up."""
    unasked: list[str] = field(default_factory=list)
    """Who is still to be asked what it had told the earlier one."""


class StagedPlans:
    """The plans of a coordinator's asynchronous saves. Used in the event loop's thread.

    Args:
        actor: Name of the coordinator.
        coordination: What knows the plans, and takes them up.
        carry_out: Does what it commands.
        namespace: Ray namespace of the stagers.
    """

    def __init__(
        self,
        actor: str,
        coordination: Coordination,
        carry_out: Callable[[tuple[Command, ...]], None],
        namespace: str,
    ) -> None:
        self._prefix = f"staged:{actor}:"
        self._coordination = coordination
        self._carry_out = carry_out
        self._namespace = namespace
        self._saved: dict[OpKey, _Saved] = {}
        self._plans: dict[OpKey, bytes] = {}
        self._turn = asyncio.Lock()

    def note(self, held: PartsHeld) -> bool:
        """Takes that a stager holds bytes of a save; returns whether `keep` has to be called."""
        saved = self._saved.setdefault(held.key, _Saved())
        if held.stager in saved.holders:
            return False
        if held.key not in self._plans:
            planned = self._coordination.staged_plan(held.key)
            if planned is None:
                return False
            self._plans[held.key] = pickle.dumps(planned, pickle.HIGHEST_PROTOCOL)
        saved.holders.append(held.stager)
        saved.is_told = False
        if saved.taken_up is not None and held.stager not in saved.asked:
            saved.unasked.append(held.stager)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether `keep` is at work, or has nothing to do."""
        return self._turn.locked() or not self._saved

    async def keep(self) -> None:
        """Puts plans and names where the next coordinator finds them; forgets what is over."""
        async with self._turn:
            active = set(self._coordination.active)
            for key, saved in list(self._saved.items()):
                with suppress(CheckpointError, *_GONE):
                    if key not in active:
                        await self._forget(key, saved)
                    elif not saved.is_told:
                        await self._hear(key, saved)
                        await self._tell(key, saved)

    async def resume(self) -> None:
        """Takes up what an earlier coordinator of this name had planned and not ended."""
        for name in await asyncio.to_thread(hooks.names_from, self._prefix):
            if not name[len(self._prefix) :].partition(":")[0].isdigit():
                continue  # of a coordinator whose name begins with this one's
            try:
                await self._resume(name)
            except (CheckpointError, *_GONE) as error:
                logger.warning("A staged save was not taken up after a restart: %r", error)

    async def _tell(self, key: OpKey, saved: _Saved) -> None:
        data = self._plans[key]
        for stager in saved.holders:
            if len(saved.copies) < COPIES and stager not in saved.copies:
                with suppress(*_GONE):
                    await self._ask(stager, "keep_plan", self._name(key), data)
                    saved.copies.append(stager)
        text = json.dumps([saved.copies, saved.holders])
        saved.is_told = True
        await asyncio.to_thread(hooks.remember, self._name(key), text)

    async def _forget(self, key: OpKey, saved: _Saved) -> None:
        del self._saved[key]
        self._plans.pop(key, None)
        await asyncio.to_thread(hooks.remember, self._name(key), "")
        for stager in saved.copies:
            with suppress(*_GONE):
                await self._ask(stager, "drop_plan", self._name(key))

    async def _resume(self, name: str) -> None:
        copies, holders = json.loads(await asyncio.to_thread(hooks.recall, name) or "[[], []]")
        data: bytes | None = None
        for stager in copies:
            with suppress(*_GONE):
                data = data or await self._ask(stager, "plan_of", name)
        if data is None:
            await asyncio.to_thread(hooks.remember, name, "")
            return
        planned = pickle.loads(data)
        key = planned.first.key
        saved = self._saved[key] = _Saved(
            copies, [], is_told=True, taken_up=(planned.epoch, planned.attempt),
            asked=frozenset(holders), unasked=holders,
        )  # fmt: skip
        self._plans[key] = data
        self._carry_out(self._coordination.resume(planned))
        await self._hear(key, saved)
        logger.info(
            "Took up attempt %s, which epoch %d had planned", planned.attempt, planned.epoch
        )

    async def _hear(self, key: OpKey, saved: _Saved) -> None:
        """Takes again what stagers had told the coordinator that is gone."""
        while saved.taken_up is not None and saved.unasked:
            stager = saved.unasked.pop(0)
            found: list[StageProgress] = []
            with suppress(*_GONE):
                found = await self._ask(stager, "shares", saved.taken_up[1])
            self._receive(_told(key, *saved.taken_up, stager, found))

    def _receive(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if isinstance(request, PartsHeld):
                self.note(request)
            with suppress(CheckpointError):
                self._carry_out(self._coordination.receive(request))

    async def _ask(self, stager: str, method: str, *arguments: Any) -> Any:
        actor, _, _ = stager.partition("#")
        handle = await asyncio.to_thread(ray_calls.get_actor, actor, namespace=self._namespace)
        asked: Any = getattr(handle, method).remote(*arguments)
        return await asyncio.wait_for(asked, ANSWER_S)

    def _name(self, key: OpKey) -> str:
        return f"{self._prefix}{key.seq}:{key.session}"


def _told(
    key: OpKey, epoch: int, attempt: str, stager: str, shares: list[StageProgress]
) -> list[Request]:
    """Returns what a stager's ranks and itself had told the coordinator that is gone."""
    told: list[Request] = []
    for share in shares:
        if share.is_sealed:
            incarnation = share.key.incarnation
            rank = share.key.rank
            told.append(PartsHeld(key, rank, attempt, epoch, stager, incarnation, share.helps))
        told += [parts_written(report, stager) for report in share.reports]
    return told
