"""Asynchronous saves outlive their coordinator: stagers keep their plans, the next one goes on.

A plan lies with two stagers that hold bytes of the save, and where it lies is in Ray's control
store. A rank is told `Noted`, and its handle is staged, only when one stager has the plan and the
control store names the rank's own. Nothing of a plan is believed that storage contradicts: the
commit is the same vote as ever.
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

ANSWER_S = 60.0
"""How long a stager may take to answer where the save does not say after which silence it is lost,
in seconds."""

_GONE = (RayError, ValueError, asyncio.TimeoutError)
"""What asking a stager raises that is dead or does not answer."""

logger = logging.getLogger(__name__)


@dataclass
class _Saved:
    """Where one save's plan is, and who holds its bytes."""

    plan: bytes
    silent_s: float
    """Silence after which a stager counts as lost, in seconds."""
    copies: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Stagers that died, or did not take the plan: none of them is asked again."""
    registered: str = ""
    """What the control store says of it."""
    taken_up: tuple[int, str] | None = None
    """Epoch and attempt, where an earlier coordinator had planned it."""
    asked: set[str] = field(default_factory=set)
    """Who was asked, or is to be asked, what it had told the earlier one."""
    unasked: list[str] = field(default_factory=list)
    """Of these the ones that are still to be asked."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


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
        self._turn = asyncio.Lock()

    def note(self, held: PartsHeld) -> bool:
        """Takes that a stager holds bytes of a save; returns whether `keep` has to be called."""
        saved = self._saved.get(held.key)
        if saved is None:
            planned = self._coordination.staged_plan(held.key)
            if planned is None:
                return False
            saved = self._saved[held.key] = _Saved(
                pickle.dumps(planned, pickle.HIGHEST_PROTOCOL),
                planned.first.options.heartbeat_timeout_s,
            )
        if held.stager in saved.holders:
            return False
        saved.holders.append(held.stager)
        if saved.taken_up is not None and held.stager not in saved.asked:
            saved.asked.add(held.stager)
            saved.unasked.append(held.stager)
        return True

    async def hold(self, held: PartsHeld) -> None:
        """Returns when a stager has the plan, and another coordinator would ask this one's stager.

        Where no stager takes the plan that is a warning: each of them is dead, or silent for as
        long as one that is lost.
        """
        self.note(held)
        saved = self._saved.get(held.key)
        if saved is not None:
            async with saved.turn:
                await self._register(held.key, saved)

    def lost(self, stager: str) -> None:
        """Takes that a stager is lost, and with it the plans that it kept."""
        for saved in self._saved.values():
            saved.lost.add(stager)
            saved.copies = [one for one in saved.copies if one != stager]

    @property
    def is_busy(self) -> bool:
        """Whether `keep` is at work, or has nothing to do."""
        return self._turn.locked() or not self._saved

    async def keep(self) -> None:
        """Puts plans and names where the next coordinator finds them; forgets what is over."""
        async with self._turn:
            for key, saved in list(self._saved.items()):
                async with saved.turn:
                    if key not in self._coordination.active:
                        await self._forget(key, saved)
                        continue
                    await self._hear(key, saved)
                    await self._register(key, saved)
                # Why out of turn: nobody's call waits for a second copy.
                await self._copy(key, saved, COPIES)

    async def resume(self) -> None:
        """Takes up what an earlier coordinator of this name had planned and not ended."""
        for name in await asyncio.to_thread(hooks.names_from, self._prefix):
            if not name[len(self._prefix) :].partition(":")[0].isdigit():
                continue  # of a coordinator whose name begins with this one's
            try:
                await self._resume(name)
            except (CheckpointError, *_GONE) as error:
                logger.warning("A staged save was not taken up after a restart: %r", error)

    async def _register(self, key: OpKey, saved: _Saved) -> None:
        """Makes sure that one stager has the plan, and that the control store says all there is."""
        if key not in self._coordination.active:
            return
        await self._copy(key, saved, 1)
        holders = dict.fromkeys([*saved.holders, *saved.unasked])
        text = json.dumps([saved.copies, [*holders]])
        if text == saved.registered:
            return
        try:
            await asyncio.to_thread(hooks.remember, self._name(key), text)
        except (CheckpointError, RayError) as error:
            logger.warning(
                "Operation %d of session %s is lost if its coordinator dies: Ray's control store "
                "did not take where its plan is (%r); it is asked again", key.seq, key.session,
                error,
            )  # fmt: skip
        else:
            saved.registered = text

    async def _copy(self, key: OpKey, saved: _Saved, wanted: int) -> None:
        """Has stagers that hold bytes of a save keep its plan, until so many do."""
        for stager in list(saved.holders):
            if len(saved.copies) >= wanted or stager in saved.lost or stager in saved.copies:
                continue
            try:
                await self._ask(
                    stager, "keep_plan", self._name(key), saved.plan, timeout_s=saved.silent_s
                )
            except _GONE as error:
                saved.lost.add(stager)
                logger.warning(
                    "Stager %s did not take the plan of operation %d of session %s: %r. %s",
                    stager, key.seq, key.session, error,
                    f"{', '.join(saved.copies)} has it" if saved.copies else
                    "Nobody has it: the save is lost if its coordinator dies",
                )  # fmt: skip
            else:
                saved.copies.append(stager)

    async def _forget(self, key: OpKey, saved: _Saved) -> None:
        del self._saved[key]
        with suppress(CheckpointError, RayError):
            await asyncio.to_thread(hooks.remember, self._name(key), "")
        for stager in saved.copies:
            with suppress(*_GONE):
                await self._ask(stager, "drop_plan", self._name(key))

    async def _resume(self, name: str) -> None:
        text = await asyncio.to_thread(hooks.recall, name)
        copies, holders = json.loads(text or "[[], []]")
        data: bytes | None = None
        for asked in asyncio.as_completed([self._ask(each, "plan_of", name) for each in copies]):
            with suppress(*_GONE):
                data = await asked
            if data is not None:
                break
        if data is None:
            logger.warning(
                "An asynchronous save of a coordinator that died can't be taken up: none of the "
                "stagers %s has its plan any more. It ends with what its storage says (%s)",
                copies, name,
            )  # fmt: skip
            await asyncio.to_thread(hooks.remember, name, "")
            return
        planned = pickle.loads(data)
        first, key = planned.first, planned.first.key
        saved = self._saved[key] = _Saved(
            data, first.options.heartbeat_timeout_s, copies, registered=text,
            taken_up=(planned.epoch, planned.attempt), asked=set(holders), unasked=[*holders],
        )  # fmt: skip
        logger.warning(
            "Took up attempt %s of %s: operation %d of session %s with %d ranks, planned by a "
            "coordinator (epoch %d) that died; it asks stagers %s what they hold and have written",
            planned.attempt, first.target.url, key.seq, key.session, first.world_size,
            planned.epoch, ", ".join(holders),
        )  # fmt: skip
        self._carry_out(self._coordination.resume(planned))
        await self._hear(key, saved)

    async def _hear(self, key: OpKey, saved: _Saved) -> None:
        """Takes again what stagers had told the coordinator that is gone."""
        if saved.taken_up is not None and saved.unasked:
            epoch, attempt = saved.taken_up
            asked = [self._shares(key, epoch, attempt, saved, each) for each in saved.unasked]
            await asyncio.gather(*asked)

    async def _shares(
        self, key: OpKey, epoch: int, attempt: str, saved: _Saved, stager: str
    ) -> None:
        try:
            # Why its name: another process may have taken the place of the one that is meant.
            who, found = await self._ask(stager, "shares", attempt, timeout_s=saved.silent_s)
        except asyncio.TimeoutError:
            if stager not in saved.lost:
                return  # asked again by the next `keep`
        except (RayError, ValueError):
            pass  # it is dead: the coordinator's watch sees it, if it matters
        else:
            self._receive(_told(key, epoch, attempt, who, found))
        saved.unasked.remove(stager)

    def _receive(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if isinstance(request, PartsHeld):
                self.note(request)
            with suppress(CheckpointError):
                self._carry_out(self._coordination.receive(request))

    async def _ask(
        self, stager: str, method: str, *arguments: Any, timeout_s: float = ANSWER_S
    ) -> Any:
        actor, _, _ = stager.partition("#")
        handle = await asyncio.to_thread(ray_calls.get_actor, actor, namespace=self._namespace)
        asked: Any = getattr(handle, method).remote(*arguments)
        return await asyncio.wait_for(asked, timeout_s)

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
