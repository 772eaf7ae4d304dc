"""The gatherer: an actor that sends the requests of a group of ranks in few messages.

A large job has one gatherer for each group of ranks, created on the node of the rank that calls
first. Its ranks send their requests to it, so that the coordinator receives a few large messages
instead of one from every rank. A batch has the same effect as its requests one by one.
`GatheredCalls` is the rank's side.

`BatchWindow` sends a batch when the requests of all ranks of the group have arrived, or `GATHER_S`
after the first one: ranks may be late, dead or not asked. *Why* at all: a call takes about 0.6 ms
of the coordinator's CPU (measured with Ray 2.60), which is 0.6 s a phase with 1,024 ranks.

A gatherer holds nothing that its ranks don't hold as well. A rank whose gatherer is dead, frozen or
out of reach sends the same request to the coordinator, which recognises a request that arrives
twice: a bad gatherer costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.commit_protocol.commands import step_of
from ray_dcp.commit_protocol.messages import (
    LoadDone,
    LoadJoin,
    LoadReady,
    MessageBatch,
    OpKey,
    Reply,
    Request,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
)
from ray_dcp.coordinator.actor import MOST_CALLS, coordinator_of
from ray_dcp.coordinator.loop import Waiting
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls
from ray_dcp.session.names import gatherer_name
from ray_dcp.session.ray_calls import Caller
from ray_dcp.store.environment import StorageVariables

LOOK_S = 5.0
"""Interval at which the gatherer checks whether it is needed, in seconds."""

logger = logging.getLogger(__name__)

MOST_GATHERERS = 64
"""Most gatherers, so also most messages that a coordinator receives in a phase. A job with no more
ranks than this needs no gatherers."""


def group_of(rank: int, world_size: int, most: int = MOST_GATHERERS) -> range | None:
    """Returns the group of ranks that share a rank's gatherer; None if there are no gatherers.

    A group has consecutive ranks, which are on one node or few.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        most: Most gatherers.

    Raises:
        InvalidRequestError: The rank is not between 0 and `world_size - 1`.

    Examples:
        >>> group_of(7, 10, most=4), group_of(7, 4096), group_of(7, 64)
        (range(6, 9), range(0, 64), None)
    """
    if not 0 <= rank < world_size:
        raise InvalidRequestError(
            f"expected a rank from 0 to {world_size - 1}, found {rank}", rank=rank
        )
    if world_size <= most:
        return None
    size = -(-world_size // most)
    start = rank - rank % size
    return range(start, min(start + size, world_size))


def is_gathered(request: Request) -> bool:
    """Returns whether a request is sent to a gatherer: all ranks make it at about the same time."""
    steps = SaveJoin | SaveReceipt | SaveStaged | LoadJoin | LoadReady | LoadDone
    failed = getattr(request, "error", None) is not None
    return isinstance(request, steps) and not failed


def _share_values(request: Request, first: Request) -> Request:
    """Returns a request that shares its call's values with another one, so that they are sent once.

    *Why*: to send and read them for each rank takes as long as all other work on a join.
    """
    if not isinstance(request, SaveJoin) or not isinstance(first, SaveJoin):
        return request
    alike = (request.target, request.options) == (first.target, first.options)
    if not alike or request.target.filesystem is not None:
        return request
    return replace(request, target=first.target, options=first.options)


class BatchWindow:
    """The requests that one gatherer has received and not sent yet.

    Args:
        ranks: Ranks of its group.
        clock: Returns monotonic seconds.

    Examples:
        >>> from ray_dcp.options import LoadOptions
        >>> from ray_dcp.commit_protocol.messages import Target
        >>> def join(rank):
        ...     return LoadJoin(OpKey("run", 0), rank, 128, Target("memory://x"), LoadOptions())
        >>> window = BatchWindow(range(2, 4), lambda: 0.0)
        >>> window.take(join(3))
        []
        >>> [message.ranks for message in window.take(join(2))]
        [(2, 3)]
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float]) -> None:
        self._num_ranks = len(frozenset(ranks))
        self._clock = clock
        self._steps: dict[tuple[OpKey, str], tuple[float, dict[int, Request]]] = {}
        """When the requests of each step are sent at the latest, and the requests by rank."""

    def take(self, request: Request) -> list[MessageBatch]:
        """Adds a rank's request; returns the messages to send now."""
        at = (request.key, step_of(request))
        _, requests = self._steps.setdefault(at, (self._clock() + bounds.GATHER_S, {}))
        requests[request.rank] = request
        return [self._take_batch(at)] if len(requests) == self._num_ranks else []

    def due(self) -> list[MessageBatch]:
        """Returns the messages to send although ranks are missing. Call it at `next_s`."""
        now_s = self._clock()
        return [self._take_batch(at) for at, (due_s, _) in [*self._steps.items()] if due_s <= now_s]

    @property
    def next_s(self) -> float | None:
        """The clock time at which the next incomplete message is due; None if there is none."""
        return min((due_s for due_s, _ in self._steps.values()), default=None)

    def _take_batch(self, at: tuple[OpKey, str]) -> MessageBatch:
        _, requests = self._steps.pop(at)
        found = [requests[rank] for rank in sorted(requests)]
        return MessageBatch(*at, tuple(_share_values(request, found[0]) for request in found))


class Gatherer:
    """Forwards the requests of ranks in batches. Used in the event loop's thread.

    Args:
        coordinator: Name from which the coordinator's actor name is derived.
        ranks: Ranks of the group.
        namespace: Ray namespace of the coordinator.
        lease_s: The gatherer exits when all its ranks have left, and after this time without a
            call, in seconds.
        variables: What storages read in the environment of a rank: a coordinator that is created
            from here gets it.
    """

    def __init__(
        self,
        coordinator: str,
        ranks: range,
        namespace: str,
        lease_s: float,
        variables: StorageVariables,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._reach = partial(
            coordinator_of, coordinator, namespace=namespace, lease_s=lease_s, variables=variables
        )
        self._coordinator: Any = None
        self._window = BatchWindow(ranks, self._loop.time)
        self._waiting: dict[Waiting, list[asyncio.Future[Reply | None]]] = {}
        self._callers: dict[int, Caller] = {}
        self._silence_s: float | None = None
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
            request: The request; it may arrive again.
            caller: The rank's process for Ray.
            silence_s: See `Coordination.receive`.

        Returns:
            None if the coordinator can't be reached: the rank has to call it itself.
        """
        self._last_call_s = self._loop.time()
        self._present.add(request.rank)
        self._callers[request.rank], self._silence_s = caller, silence_s
        future: asyncio.Future[Reply | None] = self._loop.create_future()
        at = (request.key, request.rank, step_of(request))
        self._waiting.setdefault(at, []).append(future)
        for message in self._window.take(request):
            self._start_task(self._send(message))
        self._set_timer()
        return await future

    async def leave(self, rank: int) -> None:
        """Removes a rank; the gatherer exits with the last one."""
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
            self._start_task(self._send(message))
        self._set_timer()

    async def _send(self, message: MessageBatch) -> None:
        """Sends a batch until all its ranks have replies, or the coordinator is out of reach."""
        left = set(message.ranks)
        try:
            while left:
                if self._coordinator is None:
                    self._coordinator = await asyncio.to_thread(self._reach)
                callers = [self._callers[rank] for rank in message.ranks]
                replies = await self._coordinator.call_batch.remote(
                    message, callers, self._silence_s
                )
                for rank, reply in replies.replies:
                    left.discard(rank)
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

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
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


@ray_calls.starting_no_ray()
def gatherer_of(coordinator: str, ranks: range, *, namespace: str, lease_s: float) -> Any:
    """Returns the handle of a group's gatherer, and creates the actor if there is none.

    Args:
        coordinator: Name from which the coordinator's actor name is derived.
        ranks: Ranks of the group.
        namespace: Ray namespace of the actor.
        lease_s: See `Gatherer`; applies if the actor is created.
    """
    node_id = ray.get_runtime_context().get_node_id()
    actor = ray.remote(Gatherer).options(
        name=gatherer_name(coordinator, ranks, namespace),
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        max_concurrency=MOST_CALLS,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
    )
    lease_s = check_above_0(lease_s, "lease_s")
    variables = ray_calls.storage_variables()
    return ray_calls.named_actor(actor, coordinator, ranks, namespace, lease_s, variables)


class GatheredCalls:
    """The calls of one rank of one session that are sent by a gatherer. Thread-safe.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        coordinator: Name from which the coordinator's actor name is derived.
        namespace: Ray namespace of the actors.
        lease_s: How long an unused gatherer stays, in seconds.
    """

    def __init__(
        self, rank: int, world_size: int, coordinator: str, namespace: str, lease_s: float
    ) -> None:
        self._rank = rank
        self._reach: Callable[[], Any] | None = None
        ranks = group_of(rank, world_size, MOST_GATHERERS)
        if ranks is not None:
            self._reach = partial(
                gatherer_of, coordinator, ranks, namespace=namespace, lease_s=lease_s
            )
        self._handle: Any = None
        self._is_silent = False

    def call(self, request: Request, caller: Caller, silence_s: float | None) -> Reply | None:
        """Returns the reply to a request; None if the rank has to call the coordinator itself.

        Args:
            request: A request of this rank.
            caller: This rank's process for Ray.
            silence_s: See `Session.call`.
        """
        if self._reach is None or not is_gathered(request) or self._is_silent:
            return None
        if not ray.is_initialized():
            return None
        try:
            if self._handle is None:
                self._handle = self._reach()
            with ray_calls.starting_no_ray(), ray_calls.inside():
                answer = self._handle.call.remote(request, caller, silence_s)
            # What shuts Ray down meanwhile ends the wait with a `RayError`.
            done, _ = ray_calls.wait(
                [answer], timeout=bounds.GATHERER_ANSWER_S if silence_s is None else silence_s
            )
            if done:
                reply: Reply | None = ray_calls.get(answer)
                return reply
            # Why not again: it may be frozen, or a rank is late; either way calls arrive apart.
            self._is_silent = True
            logger.warning(
                "The gatherer of rank %d gave no reply in time; it is not used again", self._rank
            )
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
