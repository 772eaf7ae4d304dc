"""The stager: one actor per node, which holds what ranks hand over, writes it and reports.

It never pickles or unpickles a value: it gets bytes, and the plan says where they go. Its decisions
are in `ray_dcp.stage`; the actor is a thin shell. Calls are answered at once, whatever is being
written: the event loop only looks things up, threads write.

`StagingAddress` says how a rank reaches the staging memory of its node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.commit_protocol.liveness import OUT_OF_REACH_S
from ray_dcp.core.checks import check_above_0
from ray_dcp.errors import CheckpointError, LimitError
from ray_dcp.runtime import metrics, ray_calls, ray_private
from ray_dcp.runtime.actor_names import NAMESPACE, stager_name
from ray_dcp.runtime.ray_private import Caller, store_bytes
from ray_dcp.stage.memory import free_memory_bytes
from ray_dcp.stage.memory_tier import Part, TierEntry, registered_name
from ray_dcp.stage.values import (
    Grant,
    InFlight,
    MemoryAddress,
    StageKey,
    StageOrder,
    StageProgress,
    StageReport,
    StagerOptions,
    Unknown,
)
from ray_dcp.stage.write_queue import WriteQueue, object_channel, shared_channel, step_behind


@dataclass(frozen=True)
class StagingAddress:
    """How a node's staging memory is reached."""

    stager: str
    """Name of the stager, different for each process that ever was one."""
    pid: int
    arena: MemoryAddress | None
    """None where there is no shared memory."""
    object_bytes: int
    """Longest window that may come as an object of the store."""


REPORT_TRIES = 8
"""How often a report is sent to a coordinator that is dead: over about half a minute, as another
one may take its place."""

logger = logging.getLogger(__name__)


SHARE_OF_MEMORY = 0.5
"""Part of the memory that is free when it starts that staged bytes may take."""

SHARE_OF_STORE = 0.35
"""Part of a node's object store that staged bytes may take. Ray begins to spill at 80 %, and gives
memory back up to half a second late."""

STUCK_S = 30.0
"""A writer that is in the storage for so long without a byte counts as stuck, in seconds."""

KEPT_S = 900.0
"""It stays at least so long after its last rank while it keeps a checkpoint, in seconds: for
ranks that are started anew."""


@dataclass
class _Rank:
    caller: Caller
    process: str
    owner: str
    pidfd: int = -1


class Stager:
    """Holds and writes staged bytes.

    Args:
        lease_s: It leaves after so many seconds without calls, ranks and work.
        options: How to stage.
    """

    def __init__(self, lease_s: float, options: StagerOptions) -> None:
        self._loop = asyncio.get_running_loop()
        self._self = ray.get_runtime_context().current_actor
        self._node_id = ray.get_runtime_context().get_node_id()
        self._lease_s = lease_s
        self._ranks: dict[str, _Rank] = {}
        self._gone: dict[str, float] = {}
        """Owners of memory that have gone, and when."""
        self._warming = ThreadPoolExecutor(1, initializer=step_behind, initargs=(19, "idle"))
        self._last_call_s = self._loop.time()
        limit_of_store = max(int(SHARE_OF_STORE * store_bytes(self._node_id)), 1)
        limit_bytes = options.limit_bytes or int(SHARE_OF_MEMORY * free_memory_bytes())
        objects = object_channel(min(limit_bytes, limit_of_store), options)
        channels, arena = {"object_store": objects}, None
        with suppress(LimitError):
            channels["shared"] = shared_channel(limit_bytes, options)
            arena = channels["shared"].arena
        self._limit_bytes = limit_bytes
        self._queue = WriteQueue(channels, self._report)
        self._place = StagingAddress(
            f"{stager_name(self._node_id)}#{os.getpid()}-{secrets.token_hex(6)}",
            os.getpid(),
            arena.address if arena is not None else None,
            objects.slot_bytes,
        )
        self._registered: set[str] = set()
        self._watching = ray_calls.run_for_ever(self._watch(), self._self, no_restart=True)

    async def info(self) -> dict[str, Any]:
        """Returns `stager`, `node_id`, `pid`, `limit_bytes`, `used_bytes`, `ranks`, `active`."""
        self._touch()
        return {
            "stager": self._place.stager,
            "node_id": self._node_id,
            "pid": os.getpid(),
            "limit_bytes": self._limit_bytes,
            "used_bytes": self._queue.used_bytes(),
            "ranks": sorted(self._ranks),
            "active": self._queue.num_active(),
        }

    async def place(self) -> StagingAddress:
        """Returns how its memory is reached."""
        self._touch()
        return self._place

    async def enter(
        self, name: str, process: str, caller: Caller, pid: int | None, owner: str
    ) -> tuple[int, ...]:
        """Takes that a rank is there: while it lives the stager stays, and it sees it die.

        Args:
            name: Of the rank on this node; a process that comes under it replaces another one.
            process: Names its process.
            caller: Who it is for Ray.
            pid: Its process id, if both are in one process namespace.
            owner: Names its memory.

        Returns:
            Slots of shared memory that a rank with such memory had before.
        """
        self._touch()
        before = self._ranks.pop(name, None)
        if before is not None:
            self._unwatch(before)
            self._gone[before.owner] = self._loop.time()
            if before.process != process:
                self._queue.process_died(before.process)
        rank = self._ranks[name] = _Rank(caller, process, owner)
        self._gone.pop(owner, None)
        if pid is not None:
            # Suppressed: then Ray's tables tell, a second later.
            with suppress(AttributeError, OSError):
                rank.pidfd = os.pidfd_open(pid)
                self._loop.add_reader(rank.pidfd, self._ended, name, process)
        return self._queue.owned(owner)

    async def leave(self, name: str, process: str) -> None:
        """Takes that a rank will not call again."""
        self._touch()
        self._ended(name, process)

    async def warm(self, name: str, num_bytes: int, channel: str) -> tuple[int, ...]:
        """Returns the slots that a rank will get first; of shared memory when that was touched."""
        self._touch()
        slots = self._queue.expect(name, num_bytes, channel)
        for slot in slots if channel == "shared" else ():
            await self._loop.run_in_executor(self._warming, self._queue.warm, slot)
        return tuple(slots)

    async def name(self) -> str:
        """Returns the name of this process as a stager, at once: so it is known to live."""
        self._touch()
        return self._place.stager

    async def begin(self, stager: str, order: StageOrder, reporter: Any) -> Grant | Unknown:
        """Returns the first slots of what a rank will hand over. See `WriteQueue.begin`.

        Args:
            stager: Who is meant.
            order: What is handed over.
            reporter: Handle of the actor that gets a report of each file, or None. Its method
                `take_report` may be called twice with the same; False when nobody needs the share.
        """
        self._touch()
        if stager != self._place.stager:
            return Unknown("stager")
        return self._queue.begin(order, reporter)

    async def more(self, key: StageKey, have: int) -> Grant | Unknown:
        """Returns further slots when there are some. See `WriteQueue.more`."""
        self._touch()
        return await asyncio.wrap_future(self._queue.more(key, have))

    async def deliver(self, key: StageKey, window: int, refs: dict[int, Any] | None = None) -> None:
        """Accepts full windows. See `WriteQueue.deliver`.

        Args:
            key: Whose.
            window: The last of them.
            refs: None when the bytes are in the slots; else, by window, the object that has them (a
                list of uint8 arrays), or None for one of which nothing is needed.
        """
        self._touch()
        if refs is None:
            self._queue.deliver(key, window)
            return
        try:
            # Careful: no local name of the arrays may outlive this, or the objects count for ever.
            objects = await asyncio.gather(*(ref for ref in refs.values() if ref is not None))
        except Exception as error:  # noqa: BLE001 - the rank reads no answer; it waits in `seal`
            first_line, _, _ = str(error).partition("\n")
            self._queue.fail_unreadable(key, f"{type(error).__name__}: {first_line}")
            return
        for number, ref in refs.items():
            self._queue.deliver(key, number, [] if ref is None else objects.pop(0))

    async def seal(
        self, key: StageKey, window: int, refs: dict[int, Any] | None = None
    ) -> bool | Unknown:
        """Accepts the last full windows, as `deliver`; returns when all are here."""
        await self.deliver(key, window, refs)
        return await asyncio.wrap_future(self._queue.seal(key))

    async def progress(self, key: StageKey) -> StageProgress | None:
        """Returns how far it is; None when it does not know the key."""
        self._touch()
        return self._queue.progress(key)

    async def shares(self, attempt: str) -> tuple[str, list[StageProgress]]:
        """Returns its name, and how far it is with each rank's share of an attempt."""
        self._touch()
        return self._place.stager, self._queue.shares(attempt)

    async def in_flight(self, url: str) -> list[InFlight]:
        """Returns the saves to a place, or below it, that may still be committed."""
        self._touch()
        return self._queue.in_flight(url)

    async def kept(self, attempt: str) -> TierEntry | None:
        """Returns what is in memory of an attempt, for loads; None when nothing is."""
        self._touch()
        return self._queue.kept(attempt)

    async def fetch(self, channel: str, parts: list[Part]) -> Any:
        """Returns bytes that are kept, for another process. See `WriteQueue.fetch`."""
        self._touch()
        return await asyncio.to_thread(self._queue.fetch, channel, parts)

    async def cancel(self, key: StageKey, by_rank: bool = False) -> None:
        """Gives up. See `WriteQueue.cancel`."""
        self._touch()
        self._queue.cancel(key, by_rank=by_rank)

    async def release(self, key: StageKey, committed: bool = False) -> None:
        """Forgets a key, whose outcome is known. See `WriteQueue.release`."""
        self._touch()
        self._queue.release(key, committed=committed)

    def _report(self, reporter: Any, report: StageReport) -> None:
        """Returns when a report was answered, or can't be. Not in the loop's thread."""
        if reporter is not None:
            asyncio.run_coroutine_threadsafe(self._deliver(reporter, report), self._loop).result()

    async def _deliver(self, reporter: Any, report: StageReport) -> None:
        try:
            awaited = partial(self._queue.awaits, report.key)
            if await deliver(reporter.take_report.remote, report, awaited) is False:
                self._queue.cancel(report.key, "because nobody knows of the save any more")
        except (RayError, OSError) as error:
            logger.warning(
                "Nobody took what became of file %d of %s (%s: %s). It is kept until it is "
                "released",
                report.file,
                report.key,
                type(error).__name__,
                error,
            )

    def _touch(self) -> None:
        self._last_call_s = self._loop.time()

    # Ranks that die, and the stager's own end

    def _ended(self, name: str, process: str) -> None:
        rank = self._ranks.get(name)
        if rank is not None and rank.process == process:
            del self._ranks[name]
            self._unwatch(rank)
            self._gone[rank.owner] = self._loop.time()
        self._queue.process_died(process)
        self._last_call_s = self._loop.time()

    def _unwatch(self, rank: _Rank) -> None:
        if rank.pidfd >= 0:
            self._loop.remove_reader(rank.pidfd)
            os.close(rank.pidfd)
            rank.pidfd = -1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._lease_s / 4))
            metrics.staging_memory(self._queue.used_bytes(), self._limit_bytes)
            unseen = {name: rank for name, rank in self._ranks.items() if rank.pidfd < 0}
            if unseen:
                callers = {rank.caller for rank in unseen.values()}
                # Suppressed: Ray's tables did not answer; they are asked again.
                with suppress(CheckpointError, RayError):
                    dead = await asyncio.to_thread(ray_private.gone, callers)
                    for name, rank in unseen.items():
                        if rank.caller in dead:
                            self._ended(name, rank.process)
            gone_s = self._loop.time() - self._lease_s
            self._gone = {owner: at_s for owner, at_s in self._gone.items() if at_s > gone_s}
            present = {*self._gone, *(rank.owner for rank in self._ranks.values())}
            await asyncio.to_thread(self._queue.shrink, present)
            # Suppressed: loads on this node find what is kept all the same.
            with suppress(CheckpointError, RayError):
                await self._register()
            await self._retire_if_stuck()
            idle_s = self._loop.time() - self._last_call_s
            lease_s = max(self._lease_s, KEPT_S) if self._queue.kept_attempts() else self._lease_s
            if not self._ranks and not self._queue.num_active() and idle_s >= lease_s:
                await self._register(())
                ray_calls.kill(self._self, no_restart=True)

    async def _retire_if_stuck(self) -> None:
        """Ends this actor, whose memory hangs in a storage, once no job depends on it.

        A rank that is handing over has its bytes still, and hands them to the next stager.
        """
        stuck = self._queue.stuck(STUCK_S)
        if not stuck or self._queue.is_needed():
            return
        logger.warning(
            "The stager of node %s ends, and the next save starts another: %d writers have hung in "
            "the storage since their saves failed, the first at %s. Look whether that storage "
            "answers",
            self._node_id,
            len(stuck),
            stuck[0],
        )
        await self._register(())
        ray_calls.kill(self._self, no_restart=True)

    async def _register(self, kept: Collection[str] | None = None) -> None:
        """Lets the other nodes find what is kept here."""
        now = set(self._queue.kept_attempts() if kept is None else kept)
        for attempt in self._registered ^ now:
            text = self._place.stager if attempt in now else ""
            name = registered_name(attempt, self._node_id)
            await asyncio.to_thread(ray_private.remember, name, text)
        self._registered = now


async def deliver(
    take: Callable[[StageReport], Awaitable[bool | None]],
    report: StageReport,
    is_awaited: Callable[[], bool],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> bool | None:
    """Returns the coordinator's answer to a report, which is repeated while it is out of reach.

    Args:
        take: Sends it.
        report: May come twice.
        is_awaited: Whether the save may still need it; if not, None is returned.
        sleep: Waits for seconds.

    Raises:
        RayError: It refused the report twice, is dead, or out of reach for `OUT_OF_REACH_S`.
    """
    waited_s, num_refused = 0.0, 0
    for tries in count(1):
        try:
            return await take(report)
        except (RayError, OSError) as error:
            num_refused += isinstance(error, RayTaskError)
            is_dead = isinstance(error, ActorDiedError) and tries >= REPORT_TRIES
            if num_refused > 1 or is_dead or waited_s >= OUT_OF_REACH_S:
                raise
        if not is_awaited():
            break
        pause_s = min(0.1 * 2 ** min(tries, 7), 10.0)
        await sleep(pause_s)
        waited_s += pause_s
    return None


@ray_private.starting_no_ray()
def stager_of(
    node_id: str,
    *,
    namespace: str = NAMESPACE,
    lease_s: float,
    options: StagerOptions | None = None,
) -> Any:
    """Returns the handle of a node's stager, after making it if there is none.

    Args:
        node_id: Ray's hex id of the node.
        namespace: Ray namespace to look in.
        lease_s: See `Stager`; counts when the actor is made.
        options: See `Stager`; counts when the actor is made.
    """
    actor = ray.remote(Stager).options(
        name=stager_name(node_id),
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return actor.remote(check_above_0(lease_s, "lease_s"), options or StagerOptions())
