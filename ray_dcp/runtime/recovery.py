"""Recovery of asynchronous saves from lost coordinators; which stagers are lost.

`StagedPlans`: Ray's control store keeps the plans of a coordinator's asynchronous saves, of many
rows about a byte each, and the next coordinator goes on with them. A rank gets its `Ack`, and its
handle is staged, only when the control store has the plan and names the rank's stager. Storage
overrules a plan: the commit is the same vote as ever.

`StagerWatch` asks the stagers that hold bytes of a save whether they live: which died or froze.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from ray_dcp.commit_protocol.commands import Command
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import OpKey, PartsHeld, PartsWritten, Request
from ray_dcp.errors import CheckpointError
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.stage.values import StageProgress, StageReport

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often stagers are asked, in seconds."""


@dataclass
class _Seen:
    handle: Any = None
    heard_s: float = 0.0
    asking: set[asyncio.Task[None]] = field(default_factory=set)


class StagerWatch:
    """Asks each stager of an active save whether it lives. Used in the event loop's thread.

    Args:
        coordination: Gets the losses.
        carry_out: Does what it commands.
        namespace: Ray namespace of the stagers.
        lost: Called for each stager that is lost, before `coordination` is.
        clock: Seconds in which this process could listen (`liveness.AwakeClock`).
    """

    def __init__(
        self,
        coordination: Coordination,
        carry_out: Callable[[tuple[Command, ...]], None],
        namespace: str,
        lost: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._coordination = coordination
        self._carry_out = carry_out
        self._namespace = namespace
        self._on_lost = lost
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._lost: set[str] = set()

    async def watch(self) -> None:
        """Looks for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Looks once at all stagers that are needed now."""
        now_s = self._clock()
        needed = self._coordination.stagers()
        self._lost &= needed.keys()
        self._seen = {name: self._seen.get(name, _Seen(heard_s=now_s)) for name in needed}
        for name, keys in needed.items():
            seen = self._seen[name]
            timeout_s = min(keys.values())
            if not seen.asking:
                task = asyncio.ensure_future(self._ask(name, seen))
                seen.asking.add(task)
                task.add_done_callback(seen.asking.discard)
            if now_s - seen.heard_s > timeout_s:
                why = (
                    f"it was not heard of for {now_s - seen.heard_s:.0f} s, though Ray does not "
                    f"say that it died: frozen, or its machine is out of reach"
                )
                # Why: the next save on its node would wait for it as long.
                with suppress(CheckpointError, RayError):
                    if seen.handle is not None:
                        ray_calls.kill(seen.handle, no_restart=True)
                self._lose(name, why)

    async def _ask(self, name: str, seen: _Seen) -> None:
        try:
            if seen.handle is None:
                actor, _, _ = name.partition("#")
                seen.handle = await asyncio.to_thread(
                    ray_calls.get_actor, actor, namespace=self._namespace
                )
            process = await seen.handle.name.remote()
        except (ActorDiedError, ValueError) as error:
            what = "that it died" if isinstance(error, ActorDiedError) else "that there is none"
            self._lose(name, f"Ray says {what}")
            return
        except RayError:
            return  # a connection broke: only silence beyond the bound is a loss
        seen.heard_s = self._clock()
        if process != name:
            self._lose(name, "another stager has its place")

    def _lose(self, name: str, why: str) -> None:
        self._seen.pop(name, None)
        if name not in self._lost:
            self._lost.add(name)
            logger.warning(
                "Lost stager %s: %s. Saves fail whose bytes it had not written: %s",
                name,
                why,
                "; ".join(
                    f"ranks {ranks} in operation {key.seq} of session {key.session}"
                    for key, ranks in self._coordination.held_by(name).items()
                ),
            )
        self._on_lost(name)
        self._carry_out(self._coordination.stager_lost(name, why))


def parts_written(report: StageReport) -> PartsWritten:
    """Returns a stager's report as the protocol's message.

    Args:
        report: Of one file, by the stager.
    """
    key, epoch = report.key.save
    files = () if report.receipt is None else (report.receipt,)
    return PartsWritten(key, report.key.rank, report.key.attempt, epoch, files, report.error)


@dataclass
class _Saved:
    """One save: its plan, and who holds its bytes."""

    plan: str
    """As the control store has it."""
    silent_s: float
    """Silence after which a stager counts as lost, in seconds."""
    holders: list[str] = field(default_factory=list)
    registered: str = ""
    """Them, as the control store has them."""
    is_kept: bool = False
    """The control store has the plan."""
    taken_up: tuple[int, str] | None = None
    """Epoch and attempt, where an earlier coordinator had planned it."""
    unasked: list[str] = field(default_factory=list)
    """Who is to be asked for its reports to the earlier one."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class StagedPlans:
    """The plans of a coordinator's asynchronous saves. Used in the event loop's thread.

    *Invariant*: where the control store has a plan it has the holders of the save as well, so that
    who looks for these finds it, to take it up or to remove it.

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
        """Notes that a stager holds bytes of a save; returns whether `keep` has to be called."""
        saved = self._saved.get(held.key)
        if saved is None:
            planned = self._coordination.staged_plan(held.key)
            if planned is None:
                return False
            data = pickle.dumps(planned, pickle.HIGHEST_PROTOCOL)
            saved = self._saved[held.key] = _Saved(
                b64encode(data).decode(), planned.first.options.heartbeat_timeout_s
            )
        if held.stager in saved.holders:
            return False
        saved.holders.append(held.stager)
        if saved.taken_up is not None:
            saved.unasked.append(held.stager)
        return True

    async def hold(self, held: PartsHeld) -> None:
        """Returns when another coordinator would find the plan, and would ask this one's stager.

        Where the control store takes neither that is a warning.
        """
        self.note(held)
        saved = self._saved.get(held.key)
        if saved is not None:
            async with saved.turn:
                await self._register(held.key, saved)

    def lost(self, stager: str) -> None:
        """Notes that a stager is lost: it is not asked any more."""
        for saved in self._saved.values():
            saved.unasked = [one for one in saved.unasked if one != stager]

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
                        await self._forget(key)
                        continue
                    await self._ask_stagers(key, saved)
                    await self._register(key, saved)

    async def resume(self) -> None:
        """Takes up what an earlier coordinator of this name had planned and not ended."""
        for name in await asyncio.to_thread(ray_private.names_from, self._prefix):
            if not name[len(self._prefix) :].partition(":")[0].isdigit():
                continue  # of a coordinator whose name begins with this one's
            try:
                await self._resume(name)
            except (CheckpointError, RayError) as error:
                logger.warning("A staged save was not taken up after a restart: %r", error)

    async def _register(self, key: OpKey, saved: _Saved) -> None:
        """Makes sure that the control store has the plan, and knows all who hold bytes."""
        text = json.dumps(saved.holders)
        if key not in self._coordination.active or (saved.is_kept and text == saved.registered):
            return
        name = self._name(key)
        try:
            await asyncio.to_thread(ray_private.remember, name, text)
            saved.registered = text
            if not saved.is_kept:
                await asyncio.to_thread(ray_private.remember, _plan_of(name), saved.plan)
                saved.is_kept = True
        except (CheckpointError, RayError) as error:
            logger.warning(
                "Operation %d of session %s is lost if its coordinator dies: Ray's control store "
                "did not take its plan (%r); it is asked again",
                key.seq,
                key.session,
                error,
            )

    async def _forget(self, key: OpKey) -> None:
        del self._saved[key]
        with suppress(CheckpointError, RayError):
            await self._remove(self._name(key))

    async def _remove(self, name: str) -> None:
        for one in (_plan_of(name), name):
            await asyncio.to_thread(ray_private.remember, one, "")

    async def _resume(self, name: str) -> None:
        text = await asyncio.to_thread(ray_private.recall, name)
        plan = await asyncio.to_thread(ray_private.recall, _plan_of(name))
        if not plan:  # no rank got an `Ack`, or the save was over
            await self._remove(name)
            return
        holders: list[str] = json.loads(text)
        planned = pickle.loads(b64decode(plan))
        first, key = planned.first, planned.first.key
        saved = self._saved[key] = _Saved(
            plan,
            first.options.heartbeat_timeout_s,
            holders,
            registered=text,
            is_kept=True,
            taken_up=(planned.epoch, planned.attempt),
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
        await self._ask_stagers(key, saved)

    async def _ask_stagers(self, key: OpKey, saved: _Saved) -> None:
        """Asks stagers again what they had reported to the earlier coordinator."""
        if saved.taken_up is not None and saved.unasked:
            epoch, attempt = saved.taken_up
            asked = [self._shares(key, epoch, attempt, saved, each) for each in saved.unasked]
            await asyncio.gather(*asked)

    async def _shares(
        self, key: OpKey, epoch: int, attempt: str, saved: _Saved, stager: str
    ) -> None:
        actor, _, _ = stager.partition("#")
        try:
            handle = await asyncio.to_thread(ray_calls.get_actor, actor, namespace=self._namespace)
            # Why its name: another process may have taken the place of the one that is meant.
            who, found = await asyncio.wait_for(handle.shares.remote(attempt), saved.silent_s)
        except (ActorDiedError, ValueError):
            pass  # it is dead: the coordinator's watch sees it, if it matters
        except (RayError, asyncio.TimeoutError):
            return  # asked again by the next `keep`, unless it is lost by then
        else:
            self._receive(_reported(key, epoch, attempt, who, found))
        saved.unasked = [one for one in saved.unasked if one != stager]

    def _receive(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if isinstance(request, PartsHeld):
                self.note(request)
            with suppress(CheckpointError):
                self._carry_out(self._coordination.receive(request))

    def _name(self, key: OpKey) -> str:
        return f"{self._prefix}{key.seq}:{key.session}"


def _plan_of(name: str) -> str:
    return f"plan:{name}"


def _reported(
    key: OpKey, epoch: int, attempt: str, stager: str, shares: list[StageProgress]
) -> list[Request]:
    """Returns what a stager and its ranks had reported to the earlier coordinator."""
    found: list[Request] = []
    for share in shares:
        if share.is_sealed:
            name = share.key
            found.append(PartsHeld(key, name.rank, attempt, epoch, stager))
        found += map(parts_written, share.reports)
    return found
