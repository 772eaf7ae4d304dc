"""Recovery of asynchronous saves from a lost coordinator, and detection of lost stagers.

`StagedPlans`: Ray's control store keeps the plans of a coordinator's asynchronous saves, with about
a byte for each row, and the next coordinator resumes them. A rank gets its `Ack`, and its handle is
staged, only when the control store has the plan and names the rank's stager. The storage overrules
a plan: the commit is the same vote as ever.

`StagerWatch` asks the stagers that hold bytes of a save whether they live, and marks those lost
that died or froze.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from ray_dcp.commit_protocol.commands import Command
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import OpKey, PartsHeld, PartsWritten, Request
from ray_dcp.errors import CheckpointError
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.actor_names import staged_plan_name
from ray_dcp.stage.orders import StageReport

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Interval at which stagers are asked, in seconds."""


@dataclass
class _Seen:
    handle: Any = None
    heard_s: float = 0.0
    asking: asyncio.Task[None] | None = None


class StagerWatch:
    """Asks each stager of an active save whether it lives. Used in the event loop's thread.

    Args:
        coordination: Receives the losses.
        carry_out: Executes its commands.
        namespace: Ray namespace of the stagers.
        lost: Called for each lost stager, before `coordination` receives the loss.
        clock: Returns the seconds in which this process could receive messages
            (`liveness.AwakeClock`).
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
        """Watches until the process ends."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Asks all stagers that are needed now, once."""
        now_s = self._clock()
        needed = self._coordination.stagers()
        self._lost &= needed.keys()
        self._seen = {name: self._seen.get(name, _Seen(heard_s=now_s)) for name in needed}
        for name, keys in needed.items():
            seen = self._seen[name]
            timeout_s = min(keys.values())
            if seen.asking is None or seen.asking.done():
                seen.asking = asyncio.ensure_future(self._ask(name, seen))
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
    """Returns a stager's report as a message of the protocol.

    Args:
        report: The stager's report of one file.
    """
    key, epoch = report.key.save
    files = () if report.receipt is None else (report.receipt,)
    return PartsWritten(key, report.key.rank, report.key.attempt, epoch, files, report.error)


@dataclass
class _Saved:
    """One save: its plan, and the stagers that hold its bytes."""

    plan: str
    """`StagedPlan`, pickled, in base64."""
    silent_s: float
    """Silence, in seconds, after which a stager counts as lost."""
    holders: list[str] = field(default_factory=list)
    kept: int = 0
    """Number of holders that the control store has, with the plan; 0 before it has either."""
    resumed: tuple[int, str] | None = None
    """Epoch and attempt, if an earlier coordinator planned the save."""
    unasked: list[str] = field(default_factory=list)
    """Stagers that have to repeat their reports to the earlier coordinator."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class StagedPlans:
    """The plans of a coordinator's asynchronous saves, kept in Ray's control store.

    The control store has one entry for each save: its plan, and the stagers that hold its bytes.
    Used in the event loop's thread.

    Args:
        actor: Name of the coordinator.
        coordination: Supplies the plans, and resumes them.
        carry_out: Executes its commands.
        namespace: Ray namespace of the stagers.
    """

    def __init__(
        self,
        actor: str,
        coordination: Coordination,
        carry_out: Callable[[tuple[Command, ...]], None],
        namespace: str,
    ) -> None:
        self._actor = actor
        self._coordination = coordination
        self._carry_out = carry_out
        self._namespace = namespace
        self._saved: dict[OpKey, _Saved] = {}
        self._turn = asyncio.Lock()

    def note(self, held: PartsHeld) -> bool:
        """Records that a stager holds bytes of a save; returns whether `keep` has to be called."""
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
        if saved.resumed is not None:
            saved.unasked.append(held.stager)
        return True

    async def hold(self, held: PartsHeld) -> None:
        """Returns when another coordinator would find the plan and ask the stager.

        If the control store accepts neither, a warning is logged.
        """
        self.note(held)
        saved = self._saved.get(held.key)
        if saved is not None:
            async with saved.turn:
                await self._keep(held.key, saved)

    def lost(self, stager: str) -> None:
        """Records that a stager is lost: it is not asked any more."""
        for saved in self._saved.values():
            saved.unasked = [one for one in saved.unasked if one != stager]

    @property
    def is_busy(self) -> bool:
        """Whether `keep` is running, or has nothing to do."""
        return self._turn.locked() or not self._saved

    async def keep(self) -> None:
        """Stores plans and holders for the next coordinator; removes those of ended saves."""
        async with self._turn:
            for key, saved in list(self._saved.items()):
                async with saved.turn:
                    if key not in self._coordination.active:
                        del self._saved[key]
                        with suppress(CheckpointError, RayError):
                            await asyncio.to_thread(ray_private.remember, self._name(key), "")
                        continue
                    await self._ask_stagers(key, saved)
                    await self._keep(key, saved)

    async def resume(self) -> None:
        """Resumes the saves that an earlier coordinator of this name planned and did not end."""
        prefix = staged_plan_name(self._actor)
        for name in await asyncio.to_thread(ray_private.names_from, prefix):
            if not name.removeprefix(prefix).partition(":")[0].isdigit():
                continue  # of a coordinator whose name begins with this one's
            try:
                await self._resume(name)
            except (CheckpointError, RayError) as error:
                logger.warning("A staged save was not resumed after a restart: %r", error)

    async def _keep(self, key: OpKey, saved: _Saved) -> None:
        """Stores the plan and all holders, unless the control store has them."""
        number = len(saved.holders)
        if key not in self._coordination.active or saved.kept == number:
            return
        text = json.dumps([saved.plan, *saved.holders])
        try:
            await asyncio.to_thread(ray_private.remember, self._name(key), text)
            saved.kept = number
        except (CheckpointError, RayError) as error:
            logger.warning(
                "Operation %d of session %s is lost if its coordinator dies: Ray's control store "
                "did not take its plan (%r); it is asked again",
                key.seq,
                key.session,
                error,
            )

    async def _resume(self, name: str) -> None:
        text = await asyncio.to_thread(ray_private.recall, name)
        if not text:
            return
        plan, *holders = json.loads(text)
        planned = pickle.loads(b64decode(plan))
        first, key = planned.first, planned.first.key
        saved = self._saved[key] = _Saved(
            plan,
            first.options.heartbeat_timeout_s,
            holders,
            kept=len(holders),
            resumed=(planned.epoch, planned.attempt),
            unasked=[*holders],
        )
        logger.warning(
            "Resumed attempt %s of %s: operation %d of session %s with %d ranks, planned by a "
            "coordinator (epoch %d) that died; stagers %s have to report again what they hold and "
            "have written",
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
        """Asks stagers for the reports that they sent to the earlier coordinator."""
        if saved.resumed is not None and saved.unasked:
            epoch, attempt = saved.resumed
            asked = [self._shares(key, epoch, attempt, saved, each) for each in saved.unasked]
            await asyncio.gather(*asked)

    async def _shares(
        self, key: OpKey, epoch: int, attempt: str, saved: _Saved, stager: str
    ) -> None:
        actor, _, _ = stager.partition("#")
        try:
            handle = await asyncio.to_thread(ray_calls.get_actor, actor, namespace=self._namespace)
            # Why its name: another process may have replaced the expected one.
            who, found = await asyncio.wait_for(handle.shares.remote(attempt), saved.silent_s)
        except (ActorDiedError, ValueError):
            pass  # it is dead: the coordinator's watch detects that, if it matters
        except (RayError, asyncio.TimeoutError):
            return  # asked again by the next `keep`, unless it is lost by then
        else:
            for share in found:
                if share.is_sealed:
                    held = PartsHeld(key, share.key.rank, attempt, epoch, who)
                    self.note(held)
                    self._receive(held)
                for report in share.reports:
                    self._receive(parts_written(report))
        saved.unasked = [one for one in saved.unasked if one != stager]

    def _receive(self, request: Request) -> None:
        # Suppressed: another attempt or epoch, which concerns no save of this coordinator.
        with suppress(CheckpointError):
            self._carry_out(self._coordination.receive(request))

    def _name(self, key: OpKey) -> str:
        return staged_plan_name(self._actor, key)
