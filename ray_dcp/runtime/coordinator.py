"""The coordinator: an async actor that carries out what `Coordination` commands, and no more.

One a session, detached, restarted by Ray when it dies and leaving by itself when nobody needs it.
It decides nothing: the decisions are in `ray_dcp.protocol`, the storage is in `perform`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

import ray

from ray_dcp.errors import CheckpointError, InternalError, RankDisagreementError
from ray_dcp.protocol.commands import Answer, Arm, Command, Disarm, Perform, step_of
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import OpKey, Refused, Reply, Request
from ray_dcp.runtime import hooks
from ray_dcp.runtime.hooks import Caller
from ray_dcp.runtime.meeting import Meeting
from ray_dcp.runtime.naming import NAMESPACE, check_lease, coordinator_name
from ray_dcp.runtime.perform import new_attempt, perform
from ray_dcp.runtime.roster import Roster

__all__ = ["Coordinator", "coordinator_of"]

WATCH_S = 1.0
"""How often to ask Ray whether the ranks of a running operation live, in seconds."""

QUIET_WATCH_S = 5.0
"""The same while no operation runs; one that begins is looked at at once."""

logger = logging.getLogger(__name__)

Waiting = tuple[OpKey, int, str]


class Coordinator:
    """Answers the requests of a session's ranks.

    *Invariant*: everything but `perform` and Ray's tables happens in the event loop's thread, one
    event after the other, as `Coordination` needs it.

    Args:
        name: Of this actor: what its epoch is counted under.
        lease_s: It leaves when all its ranks have left or died, and when none ever said that it
            is there and nobody called for so long, in seconds.
    """

    def __init__(self, name: str, lease_s: float) -> None:
        self._name = name
        self._lease_s = lease_s
        # Why not in a thread: nothing else runs before the constructor returns.
        self.epoch = hooks.next_epoch(name)
        self._coordination = Coordination(epoch=self.epoch, new_attempt=new_attempt)
        self._meeting = Meeting(lambda: secrets.token_hex(6))
        self._waiting: dict[Waiting, list[asyncio.Future[Reply]]] = {}
        self._timers: dict[OpKey, asyncio.TimerHandle] = {}
        self._roster = Roster(name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._called = asyncio.Event()
        self._performing = 0
        self._entering = 0
        self._loop = asyncio.get_running_loop()
        self._all_met: asyncio.Future[RankDisagreementError | None] = self._loop.create_future()
        self._last_call_s = self._loop.time()
        self._self = ray.get_runtime_context().current_actor
        self._start(self._watch())

    async def info(self) -> dict[str, Any]:
        """Returns what this incarnation is: `epoch`, `pid`, `node_id`, `active` operations."""
        node_id = ray.get_runtime_context().get_node_id()
        active = self._coordination.active
        return {"epoch": self.epoch, "pid": os.getpid(), "node_id": node_id, "active": active}

    async def enter(
        self, rank: int, world_size: int, word: str, timeout_s: float
    ) -> str | list[int]:
        """Returns the generation on which all ranks agree, or the ranks that did not come.

        Args:
            rank: Who.
            world_size: How many it expects.
            word: What tells this process from an earlier one of the same rank.
            timeout_s: How long to wait for the others, in seconds.

        Raises:
            RankDisagreementError: The ranks differ about their number; all are told.
        """
        self._entering += 1
        try:
            met = self._all_met
            try:
                generation = self._meeting.enter(rank, world_size, word)
            except RankDisagreementError as error:
                self._end_meeting(error)
                self._loop.call_later(timeout_s, self._meeting.forget_dispute)
                raise
            if generation is not None:
                self._end_meeting(None)
                return generation
            try:
                dispute = await asyncio.wait_for(asyncio.shield(met), timeout_s)
            except asyncio.TimeoutError:
                return self._meeting.missing
            if dispute is not None:
                raise dispute
            return self._meeting.generation_for(rank, word) or self._meeting.missing
        finally:
            self._entering -= 1
            self._last_call_s = self._loop.time()

    def _end_meeting(self, dispute: RankDisagreementError | None) -> None:
        """Tells all that wait in `enter`, and begins the next meeting."""
        self._all_met.set_result(dispute)
        self._all_met = self._loop.create_future()

    async def call(self, request: Request, caller: Caller | None = None) -> Reply:
        """Returns the reply to a request, when it has one.

        The same request may come any number of times, also while the first one waits.

        Args:
            request: What the rank says.
            caller: Who the rank is for Ray; without it, nobody sees it die.
        """
        self._last_call_s = self._loop.time()
        self._called.set()
        if caller is not None:
            self._roster.add(request.key.session, request.rank, caller)
        at = (request.key, request.rank, step_of(request))
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting.setdefault(at, []).append(future)
        try:
            self._carry_out(self._coordination.receive(request))
        except CheckpointError as error:
            self._forget(at, future)
            return Refused(error)
        try:
            return await future
        finally:
            self._forget(at, future)
            self._last_call_s = self._loop.time()

    async def greet(self, session: str, rank: int, caller: Caller) -> None:
        """Takes that a rank is there: from now on its death is seen, also before it calls.

        Args:
            session: Name of the session.
            rank: Who.
            caller: Who it is for Ray.
        """
        self._last_call_s = self._loop.time()
        self._called.set()
        self._roster.add(session, rank, caller)

    async def leave(self, session: str, rank: int) -> None:
        """Takes that a rank has closed its session and will not call again."""
        self._roster.remove(session, rank)
        self._called.set()

    def _forget(self, at: Waiting, future: asyncio.Future[Reply]) -> None:
        futures = self._waiting.get(at, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._waiting.pop(at, None)

    # Commands

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Answer():
                    self._answer(command)
                case Perform():
                    self._performing += 1
                    self._start(self._perform(command))
                case Arm():
                    self._disarm(command.key)
                    self._timers[command.key] = self._loop.call_later(
                        command.after_s, self._expire, command.key, command.phase
                    )
                case Disarm():
                    self._disarm(command.key)

    def _answer(self, answer: Answer) -> None:
        for future in self._waiting.pop((answer.key, answer.rank, answer.step), []):
            if not future.done():
                future.set_result(answer.reply)

    def _disarm(self, key: OpKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, key: OpKey, phase: str) -> None:
        self._timers.pop(key, None)
        self._carry_out(self._coordination.expired(key, phase))

    async def _perform(self, command: Perform) -> None:
        try:
            result = await asyncio.to_thread(perform, command.task)
            self._carry_out(self._coordination.performed(command.key, command.task, result))
        except Exception as error:  # noqa: BLE001 - nobody else would ever see it
            self._give_up(command.key, error)
        finally:
            self._performing -= 1

    def _give_up(self, key: OpKey, error: Exception) -> None:
        """Refuses all who wait for an operation that contradicted itself."""
        told = InternalError(
            f"The coordinator contradicted itself in operation {key.seq}: "
            f"{type(error).__name__}: {error}. Please report this"
        )
        for at in [at for at in self._waiting if at[0] == key]:
            self._answer(Answer(at[0], at[1], at[2], Refused(told)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # Why kept: the event loop itself holds tasks weakly.
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("A task of the coordinator ended early", exc_info=task.exception())

    # Life and death

    async def _watch(self) -> None:
        while True:
            await self._pause()
            try:
                for session, rank, caller in await self._roster.take_dead():
                    reason = f"Ray says that its process (pid {caller.pid}) has ended"
                    self._carry_out(self._coordination.lost(session, [rank], reason))
                await self._roster.keep()
            except CheckpointError as error:
                # Why go on: deadlines and leases work without this look.
                logger.warning("Ranks that die are only seen at deadlines: %s", error)
                self._roster.clear()
            idle_s = self._loop.time() - self._last_call_s
            needless = self._roster.ever or idle_s >= self._lease_s
            if not self._roster and needless and self._is_idle():
                # Why not exit_actor: it waits for the call in which it is made, also when the
                # actor makes that call to itself. A call that comes just now is repeated.
                ray.kill(self._self, no_restart=True)

    async def _pause(self) -> None:
        if self._coordination.active:
            await asyncio.sleep(min(WATCH_S, self._lease_s))
            return
        self._called.clear()
        try:
            await asyncio.wait_for(self._called.wait(), min(QUIET_WATCH_S, self._lease_s))
        except asyncio.TimeoutError:
            return

    def _is_idle(self) -> bool:
        busy = self._performing or self._entering or self._waiting or self._coordination.active
        return not busy


def coordinator_of(session: str, *, namespace: str = NAMESPACE, lease_s: float) -> Any:
    """Returns the handle of a session's coordinator, after making it if there is none.

    Ranks may call it at once: one of them makes the actor, all get it. It runs where there is
    room, preferably on the caller's node, and survives its creator.

    Args:
        session: Name of the session.
        namespace: Ray namespace to look in.
        lease_s: See `Coordinator`; counts when the actor is made.
    """
    name = coordinator_name(session)
    # Why no max_task_retries: Ray would also repeat the call in which the actor leaves.
    actor = ray.remote(Coordinator).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
    )
    return actor.remote(name, check_lease(lease_s))
