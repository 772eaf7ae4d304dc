"""The gatherer: an actor that sends the requests of a group of ranks in few messages; who calls it.

One for each group of ranks of a large job, created on the node of the rank that calls first. It
holds nothing that is not held elsewhere: if it dies or can't reach the coordinator, its ranks call
the coordinator themselves, which recognises a request that arrives twice: a gatherer that is dead,
frozen or slow costs time and nothing else. `protocol.aggregation` decides what is sent when.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.commit_protocol import aggregation
from ray_dcp.commit_protocol.aggregation import BatchWindow, MessageBatch
from ray_dcp.commit_protocol.commands import step_of
from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import OpKey, Reply, Request
from ray_dcp.core.checks import check_above_0
from ray_dcp.errors import CheckpointError
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.actor_names import MOST_CALLS, gatherer_name
from ray_dcp.runtime.coordinator import coordinator_of
from ray_dcp.runtime.ray_private import Caller

LOOK_S = 5.0
"""How often it looks whether anybody needs it, in seconds."""

logger = logging.getLogger(__name__)

Waiting = tuple[OpKey, int, str]


class Gatherer:
    """Forwards the requests of ranks in batches; in the event loop's thread.

    Args:
        coordinator: What the coordinator is called after.
        ranks: Of the group.
        namespace: Ray namespace of the coordinator.
        lease_s: It leaves when all its ranks have, and after so many seconds without a call.
    """

    def __init__(self, coordinator: str, ranks: range, namespace: str, lease_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reach = partial(coordinator_of, coordinator, namespace=namespace, lease_s=lease_s)
        self._coordinator: Any = None
        self._window = BatchWindow(ranks, self._loop.time)
        self._waiting: dict[Waiting, list[asyncio.Future[Reply | None]]] = {}
        self._callers: dict[int, tuple[Caller, float | None]] = {}
        self._present: set[int] = set()
        self._lease_s = lease_s
        self._last_call_s = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._self = ray.get_runtime_context().current_actor
        self._tasks.add(ray_calls.run_for_ever(self._watch(), self._self, no_restart=True))

    async def call(self, request: Request, caller: Caller, silence_s: float | None) -> Reply | None:
        """Returns the coordinator's reply to a request of a rank of the group.

        Args:
            request: May come again.
            caller: Who the rank is for Ray.
            silence_s: See `Coordination.receive`.

        Returns:
            None when the coordinator can't be reached: the rank has to find out by itself.
        """
        self._last_call_s = self._loop.time()
        self._present.add(request.rank)
        self._callers[request.rank] = (caller, silence_s)
        future: asyncio.Future[Reply | None] = self._loop.create_future()
        at = (request.key, request.rank, step_of(request))
        self._waiting.setdefault(at, []).append(future)
        for message in self._window.take(request):
            self._start(self._send(message, isinstance(request, Opening)))
        self._set_timer()
        return await future

    async def pid(self) -> int:
        """Returns its process, at once: so it is known to live."""
        return os.getpid()

    async def leave(self, rank: int) -> None:
        """Removes a rank; with the last one it ends."""
        self._present.discard(rank)
        if not self._present and not self._waiting:
            ray_calls.kill(self._self, no_restart=True)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._window.next_s
        self._timer = None if at_s is None else self._loop.call_at(at_s, self._send_late)

    def _send_late(self) -> None:
        for message in self._window.due():
            self._start(self._send(message, True))
        self._set_timer()

    async def _send(self, message: MessageBatch, opens: bool) -> None:
        """Sends a message until all its ranks have replies, or the coordinator is out of reach."""
        left = set(message.ranks)
        try:
            while left:
                if self._coordinator is None:
                    self._coordinator = await asyncio.to_thread(self._reach)
                callers_of = [self._callers[rank] for rank in message.ranks]
                # Why only then: the coordinator registers a rank's process once.
                callers = [caller for caller, _ in callers_of] if opens else []
                silence_s = callers_of[0][1]
                replies = await self._coordinator.call_batch.remote(message, callers, silence_s)
                self._window.replied(message, replies)
                for ranks, reply in replies.replies:
                    left.difference_update(ranks)
                    for rank in ranks:
                        self._answer((message.key, rank, message.step), reply)
                if left:
                    message = message.only(left)
        except (RayError, CheckpointError, ConnectionError):
            self._coordinator = None
        finally:
            for rank in left:
                self._answer((message.key, rank, message.step), None)

    def _answer(self, at: Waiting, reply: Reply | None) -> None:
        for future in self._waiting.pop(at, []):
            if not future.done():
                future.set_result(reply)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # Why kept: the event loop itself holds tasks weakly.
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._lease_s))
            idle_s = self._loop.time() - self._last_call_s
            if not self._waiting and idle_s >= self._lease_s:
                ray_calls.kill(self._self, no_restart=True)


@ray_private.starting_no_ray()
def gatherer_of(coordinator: str, ranks: range, *, namespace: str, lease_s: float) -> Any:
    """Returns the handle of a group's gatherer, after making it if there is none.

    Args:
        coordinator: What the coordinator is called after.
        ranks: Of the group.
        namespace: Ray namespace to look in.
        lease_s: See `Gatherer`; counts when the actor is made.
    """
    node_id = ray.get_runtime_context().get_node_id()
    actor = ray.remote(Gatherer).options(
        name=gatherer_name(coordinator, ranks),
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        max_concurrency=MOST_CALLS,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
    )
    return actor.remote(coordinator, ranks, namespace, check_above_0(lease_s, "lease_s"))


ANSWER_S = 60.0
"""How long a rank that sends no heartbeats waits for an answer before it calls the coordinator
itself, in seconds; one that sends them waits for its `heartbeat_timeout_s`."""

ALIVE_S = 5.0
"""How long a gatherer may take to answer that it lives, in seconds."""


class GatheredCalls:
    """The calls of one rank of one session that go by way of a gatherer. Thread-safe.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        coordinator: What the coordinator is called after.
        namespace: Ray namespace of the actors.
        lease_s: How long an unused gatherer stays, in seconds.
    """

    def __init__(
        self, rank: int, world_size: int, coordinator: str, namespace: str, lease_s: float
    ) -> None:
        self._rank = rank
        self._reach: Callable[[], Any] | None = None
        ranks = aggregation.group_of(rank, world_size, aggregation.MOST_GATHERERS)
        if ranks is not None:
            self._reach = partial(
                gatherer_of, coordinator, ranks, namespace=namespace, lease_s=lease_s
            )
        self._handle: Any = None
        self._is_frozen = False

    def call(self, request: Request, caller: Caller, silence_s: float | None) -> Reply | None:
        """Returns the reply to a request; None where the rank has to ask the coordinator itself.

        Args:
            request: Of this rank.
            caller: Who this rank is for Ray.
            silence_s: See `Session.call`.
        """
        if self._reach is None or not aggregation.is_gathered(request) or self._is_frozen:
            return None
        if not ray.is_initialized():
            return None
        try:
            if self._handle is None:
                self._handle = self._reach()
            with ray_private.starting_no_ray(), ray_calls.inside():
                answer = self._handle.call.remote(request, caller, silence_s)
            # What shuts Ray down meanwhile ends the wait with a `RayError`.
            done, _ = ray_calls.wait([answer], timeout=ANSWER_S if silence_s is None else silence_s)
            if done:
                reply: Reply | None = ray_calls.get(answer)
                return reply
            self._check_alive()
        except (RayError, ConnectionError, ValueError) as error:
            logger.info("Rank %d calls its coordinator itself: %s", self._rank, error)
            self._handle = None
        return None

    def close(self) -> None:
        """Removes this rank from the gatherer. Never raises."""
        handle, self._handle = self._handle, None
        if handle is not None and ray.is_initialized():
            with suppress(Exception):
                handle.leave.remote(self._rank)

    def _check_alive(self) -> None:
        """Checks whether the gatherer lives: one that is frozen is not used again."""
        with ray_calls.inside():
            asked = self._handle.pid.remote()
        done, _ = ray_calls.wait([asked], timeout=ALIVE_S)
        self._is_frozen = not done
        if not done:
            logger.warning("The gatherer of rank %d is frozen; it is not used again", self._rank)
