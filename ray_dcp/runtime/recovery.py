"""Recovery of asynchronous saves from lost coordinators, and from lost or lagging stagers.

`StagedPlans`: stagers keep the plans of a coordinator's asynchronous saves, and the next
coordinator goes on with them. Two stagers that hold bytes of the save have its plan, and Ray's
control store has their names. A rank gets its `Ack`, and its handle is staged, only when one stager
has the plan and the control store names the rank's own. Storage overrules a plan: the commit is
the same vote as ever.

`StagerWatch` asks the stagers that hold bytes of a save how far they are: which died, froze or lag.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.commands import Command
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import OpKey, PartsHeld, PartsWritten, Request
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.stager_backend import key_of
from ray_dcp.stage.values import StageKey, StageProgress, StageReport

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often stagers are asked, in seconds. They answer in a millisecond, and the whole save waits
for as long as nobody sees that one of them is slow."""


@dataclass
class _Seen:
    handle: Any = None
    heard_s: float = 0.0
    asking: set[asyncio.Task[None]] = field(default_factory=set)


class StagerWatch:
    """Asks each stager of an active save how far it is. Used in the event loop's thread.

    Args:
        coordination: What is told.
        carry_out: Does what it commands.
        namespace: Ray namespace of the stagers.
        lost: Told of each stager that is lost, before `coordination` is.
    """

    def __init__(
        self,
        coordination: Coordination,
        carry_out: Callable[[tuple[Command, ...]], None],
        namespace: str,
        lost: Callable[[str], None],
    ) -> None:
        self._coordination = coordination
        self._carry_out = carry_out
        self._namespace = namespace
        self._tell_lost = lost
        self._seen: dict[str, _Seen] = {}
        self._lost: set[str] = set()

    async def watch(self) -> None:
        """Looks for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Looks once at all stagers that are needed now."""
        now_s = asyncio.get_running_loop().time()
        needed = self._coordination.stagers()
        self._lost &= needed.keys()
        self._seen = {name: self._seen.get(name, _Seen(heard_s=now_s)) for name in needed}
        for name, keys in needed.items():
            seen = self._seen[name]
            patience_s = min(keys.values())
            if not seen.asking:
                task = asyncio.ensure_future(self._ask(name, seen))
                seen.asking.add(task)
                task.add_done_callback(seen.asking.discard)
            elif now_s - seen.heard_s > patience_s:
                why = (
                    f"it was not heard of for {now_s - seen.heard_s:.0f} s, though Ray does not "
                    f"say that it died: frozen, or its machine is out of reach"
                )
                self._lose(name, why)

    async def _ask(self, name: str, seen: _Seen) -> None:
        try:
            if seen.handle is None:
                actor, _, _ = name.partition("#")
                seen.handle = await asyncio.to_thread(
                    ray_calls.get_actor, actor, namespace=self._namespace
                )
            process, paces = await seen.handle.pulse.remote()
        except (RayActorError, ValueError) as error:
            self._lose(name, f"Ray says {type(error).__name__}")
            return
        except RayError:
            return
        now_s = seen.heard_s = asyncio.get_running_loop().time()
        if process != name:
            self._lose(name, "another stager has its place")
            return
        self._carry_out(self._coordination.stager_heard(_by_operation(paces), now_s))

    def _lose(self, name: str, why: str) -> None:
        self._seen.pop(name, None)
        if name not in self._lost:
            self._lost.add(name)
            logger.warning(
                "Lost stager %s: %s. It had bytes of %s: ranks that live hand theirs to another "
                "stager, and a save whose rank is dead as well fails",
                name,
                why,
                "; ".join(
                    f"ranks {ranks} in operation {key.seq} of session {key.session}"
                    for key, ranks in self._coordination.held_by(name).items()
                ),
            )
        self._tell_lost(name)
        self._carry_out(self._coordination.stager_lost(name, why))


def parts_written(report: StageReport, stager: str = "") -> PartsWritten:
    """Returns a stager's report as the protocol's message.

    Args:
        report: Of one file, as the stager tells it.
        stager: Who; for messages.
    """
    key, epoch = key_of(report.key.save)
    files = () if report.receipt is None else (report.receipt,)
    return PartsWritten(
        key,
        report.key.rank,
        report.key.attempt,
        epoch,
        stager,
        report.key.incarnation,
        files,
        report.error,
    )


def _by_operation(paces: Mapping[StageKey, tuple[int, int]]) -> dict[Any, dict[int, Any]]:
    found: dict[Any, dict[int, Any]] = {}
    for key, pace in paces.items():
        operation, _ = key_of(key.save)
        found.setdefault(operation, {})[key.rank] = pace
    return found


COPIES = 2
"""Stagers that keep a plan."""

ANSWER_S = 60.0
"""How long a stager may take to answer where the save does not say after which silence it is lost,
in seconds."""

_GONE = (RayError, ValueError, asyncio.TimeoutError)
"""What asking a stager raises that is dead or does not answer."""


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
        for name in await asyncio.to_thread(ray_private.names_from, self._prefix):
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
            await asyncio.to_thread(ray_private.remember, self._name(key), text)
        except (CheckpointError, RayError) as error:
            logger.warning(
                "Operation %d of session %s is lost if its coordinator dies: Ray's control store "
                "did not take where its plan is (%r); it is asked again",
                key.seq,
                key.session,
                error,
            )
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
                    stager,
                    key.seq,
                    key.session,
                    error,
                    f"{', '.join(saved.copies)} has it"
                    if saved.copies
                    else "Nobody has it: the save is lost if its coordinator dies",
                )
            else:
                saved.copies.append(stager)

    async def _forget(self, key: OpKey, saved: _Saved) -> None:
        del self._saved[key]
        with suppress(CheckpointError, RayError):
            await asyncio.to_thread(ray_private.remember, self._name(key), "")
        for stager in saved.copies:
            with suppress(*_GONE):
                await self._ask(stager, "drop_plan", self._name(key))

    async def _resume(self, name: str) -> None:
        text = await asyncio.to_thread(ray_private.recall, name)
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
                copies,
                name,
            )
            await asyncio.to_thread(ray_private.remember, name, "")
            return
        planned = pickle.loads(data)
        first, key = planned.first, planned.first.key
        saved = self._saved[key] = _Saved(
            data,
            first.options.heartbeat_timeout_s,
            copies,
            registered=text,
            taken_up=(planned.epoch, planned.attempt),
            asked=set(holders),
            unasked=[*holders],
        )
        logger.warning(
            "Took up attempt %s of %s: operation %d of session %s with %d ranks, planned by a "
            "coordinator (epoch %d) that died; it asks stagers %s what they hold and have written",
            planned.attempt,
            first.target.url,
            key.seq,
            key.session,
            first.world_size,
            planned.epoch,
            ", ".join(holders),
        )
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
            name = share.key
            told.append(PartsHeld(key, name.rank, attempt, epoch, stager, name.incarnation))
        told += [parts_written(report, stager) for report in share.reports]
    return told
