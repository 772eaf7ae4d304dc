"""The stager: one actor per node, which holds what ranks hand over, writes it and reports.

It never pickles or unpickles a value: it gets bytes, and the plan says where they go. Its decisions
are in `ray_dcp.stage`; the actor is a thin shell. Calls are answered at once, whatever is being
written: the event loop only looks things up, threads write.

Windows are objects of Ray's store, which their rank has put. *Why* they outlive it: the stager maps
them, and the store keeps what a process has mapped when its owner dies. On this node others can
map them as well then, by the stager's reference; Ray moves none to another node whose owner is
dead, so `fetch` returns a copy. (Ray 2.56 removed puts for another owner.)

`StagingAddress` says how a rank reaches the stager of its node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.commit_protocol.liveness import OUT_OF_REACH_S
from ray_dcp.commit_protocol.messages import Ack, PartsWritten, Reply
from ray_dcp.coordinator import metrics
from ray_dcp.core.processes import pid_namespace
from ray_dcp.errors import CheckpointError
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls
from ray_dcp.session.ray_calls import Caller, store_bytes
from ray_dcp.session.session import NAMESPACE, stager_name
from ray_dcp.stage.memory import runs_of
from ray_dcp.stage.orders import (
    SHARE_OF_STORE,
    Grant,
    InFlight,
    StagedWindow,
    StageKey,
    StageOrder,
    StageProgress,
    StagerOptions,
    Unknown,
)
from ray_dcp.stage.windows import Part, TierEntry, registered_name
from ray_dcp.stage.write_queue import WriteQueue


@dataclass(frozen=True)
class StagingAddress:
    """How a node's stager is reached."""

    stager: str
    """Name of the stager, different for each process that ever was one."""
    pid: int
    pid_namespace: str
    """Where `pid` names it; empty when it is not known."""
    window_bytes: int
    """Longest window that it takes."""


REPORT_TRIES = 8
"""How often a report is sent to a coordinator that is dead: over about half a minute, as another
one may take its place."""

logger = logging.getLogger(__name__)


STUCK_S = 30.0
"""A writer that is in the storage for so long without a byte counts as stuck, in seconds."""

KEPT_S = 900.0
"""It stays at least so long after its last rank while it keeps a checkpoint, in seconds: for
ranks that are started anew."""


@dataclass
class _Rank:
    caller: Caller
    process: str
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
        self._warmed: dict[str, int] = {}
        """How many bytes of the store each rank has touched or will."""
        self._last_call_s = self._loop.time()
        share = max(int(SHARE_OF_STORE * store_bytes(self._node_id)), 1)
        self._limit_bytes = min(options.limit_bytes or share, share)
        window_bytes = options.window_bytes_within(self._limit_bytes)
        self._queue = WriteQueue(self._limit_bytes, window_bytes, self._report)
        self._place = StagingAddress(
            f"{stager_name(self._node_id)}#{os.getpid()}-{secrets.token_hex(6)}",
            os.getpid(),
            pid_namespace(),
            window_bytes,
        )
        self._registered: set[str] = set()
        self._watching = ray_calls.run_for_ever(self._watch(), self._self, no_restart=True)

    async def info(self) -> dict[str, Any]:
        """Returns `stager`, `node_id`, `pid`, `limit_bytes`, `used_bytes`, `ranks`, `active`."""
        self._note_call()
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
        """Returns the address of this stager."""
        self._note_call()
        return self._place

    async def enter(self, name: str, process: str, caller: Caller, pid: int | None) -> None:
        """Registers a rank. The stager stays while a registered rank lives, and notices its death.

        Args:
            name: Of the rank on this node; a process that comes under it replaces another one.
            process: Names its process.
            caller: Who it is for Ray.
            pid: Its process id, if both are in one process namespace.
        """
        self._note_call()
        before = self._ranks.pop(name, None)
        if before is not None:
            self._unwatch(before)
            if before.process != process:
                self._queue.process_died(before.process)
        rank = self._ranks[name] = _Rank(caller, process)
        if pid is not None:
            # Suppressed: then Ray's tables tell, a second later.
            with suppress(AttributeError, OSError):
                rank.pidfd = os.pidfd_open(pid)
                self._loop.add_reader(rank.pidfd, self._forget_rank, name, process)

    async def leave(self, name: str, process: str) -> None:
        """Deregisters a rank, which sends no more calls."""
        self._note_call()
        self._forget_rank(name, process)

    async def warm(self, name: str, num_bytes: int) -> int:
        """Returns how many bytes of the store a rank may touch: its part of the budget.

        Args:
            name: Of the rank.
            num_bytes: How many it will stage.
        """
        self._note_call()
        others = sum(taken for other, taken in self._warmed.items() if other != name)
        self._warmed[name] = max(min(num_bytes, self._limit_bytes - others), 0)
        return self._warmed[name]

    async def name(self) -> str:
        """Returns the name of this process as a stager, at once: so it is known to live."""
        self._note_call()
        return self._place.stager

    async def begin(self, stager: str, order: StageOrder, reporter: Any) -> Grant | Unknown:
        """Registers an order and grants its first windows. See `WriteQueue.begin`.

        Args:
            stager: Who is meant.
            order: What is handed over.
            reporter: Handle of the coordinator that gets a report of each file, or None. Its `call`
                may come twice with the same; it answers `Ack` while the share is needed.
        """
        self._note_call()
        if stager != self._place.stager:
            return Unknown("stager")
        return self._queue.begin(order, reporter)

    async def more(self, key: StageKey, have: int) -> Grant | Unknown:
        """Returns when more windows than `have` are granted. See `WriteQueue.more`."""
        self._note_call()
        return await asyncio.wrap_future(self._queue.more(key, have))

    async def deliver(self, key: StageKey, refs: dict[int, Any]) -> None:
        """Accepts full windows. See `WriteQueue.deliver`.

        Args:
            key: Whose.
            refs: By window, the object that has its bytes (a list of buffers).
        """
        self._note_call()
        try:
            # Careful: no local name of the arrays may outlive this, or the objects count for ever.
            objects = await asyncio.gather(*refs.values())
        except Exception as error:  # noqa: BLE001 - the rank hears of it in `seal` and `more`
            first_line, _, _ = str(error).partition("\n")
            self._queue.fail_unreadable(key, f"{type(error).__name__}: {first_line}")
            return
        for number, ref in refs.items():
            lent = ref if isinstance(ref, ray.ObjectRef) else None
            self._queue.deliver(key, number, runs_of(objects.pop(0)), lent)

    async def seal(self, key: StageKey, refs: dict[int, Any]) -> bool | Unknown:
        """Accepts the last full windows, as `deliver`; returns when all are here."""
        await self.deliver(key, refs)
        return await asyncio.wrap_future(self._queue.seal(key))

    async def progress(self, key: StageKey) -> StageProgress | None:
        """Returns the progress of a share; None if the key is unknown."""
        self._note_call()
        return self._queue.progress(key)

    async def shares(self, attempt: str) -> tuple[str, list[StageProgress]]:
        """Returns the name of this stager, and the progress of each share of an attempt."""
        self._note_call()
        return self._place.stager, self._queue.shares(attempt)

    async def in_flight(self, url: str) -> list[InFlight]:
        """Returns the saves to a place, or below it, that may still be committed."""
        self._note_call()
        return self._queue.in_flight(url)

    async def kept(self, attempt: str) -> TierEntry | None:
        """Returns the index of the bytes of an attempt in memory; None if there are none."""
        self._note_call()
        return self._queue.kept(attempt)

    async def lend(self, caller: Caller, load: str, windows: list[StagedWindow]) -> list[Any]:
        """Returns references to windows that are kept, for a load on this node; None for others.

        Args:
            caller: Who loads. What it does not give back comes back with its death.
            load: Names the load.
            windows: Which.
        """
        self._note_call()
        return self._queue.lend((caller, load), windows)

    async def take_back(self, caller: Caller, load: str) -> None:
        """Ends a load's use of the windows that were lent to it."""
        self._note_call()
        self._queue.take_back((caller, load))

    async def fetch(self, parts: list[Part]) -> Any:
        """Returns bytes that are kept, as arrays. See `WriteQueue.fetch`."""
        self._note_call()
        return self._queue.fetch(parts)

    async def cancel(self, key: StageKey, by_rank: bool = False) -> None:
        """Cancels a share. See `WriteQueue.cancel`."""
        self._note_call()
        self._queue.cancel(key, by_rank=by_rank)

    async def release(self, key: StageKey, committed: bool = False) -> None:
        """Forgets a key, whose outcome is known. See `WriteQueue.release`."""
        self._note_call()
        self._queue.release(key, committed=committed)

    def _report(self, reporter: Any, report: PartsWritten) -> None:
        """Delivers a report and waits for its answer. Must not run in the thread of the loop."""
        if reporter is not None:
            asyncio.run_coroutine_threadsafe(self._deliver(reporter, report), self._loop).result()

    async def _deliver(self, reporter: Any, report: PartsWritten) -> None:
        key = StageKey.of(report)
        try:
            awaited = partial(self._queue.awaits, key)
            answer = await deliver(reporter.call.remote, report, awaited)
            if answer is not None and not isinstance(answer, Ack):
                self._queue.cancel(key, "because nobody knows of the save any more")
        except (RayError, OSError) as error:
            logger.warning(
                "Nobody took what became of a file of %s (%s: %s). It is kept until it is released",
                key,
                type(error).__name__,
                error,
            )

    def _note_call(self) -> None:
        self._last_call_s = self._loop.time()

    # Ranks that die, and the stager's own end

    def _forget_rank(self, name: str, process: str) -> None:
        rank = self._ranks.get(name)
        if rank is not None and rank.process == process:
            del self._ranks[name]
            self._unwatch(rank)
            self._warmed.pop(name, None)
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
            loads: list[Any] = self._queue.borrowers()
            callers = {*(rank.caller for rank in unseen.values()), *(who for who, _ in loads)}
            # Suppressed: Ray's tables did not answer; they are asked again.
            with suppress(CheckpointError, RayError):
                dead = await asyncio.to_thread(ray_calls.gone, callers) if callers else set()
                for name, rank in unseen.items():
                    if rank.caller in dead:
                        self._forget_rank(name, rank.process)
                for load in loads:
                    if load[0] in dead:
                        self._queue.take_back(load)
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
            await asyncio.to_thread(ray_calls.remember, name, text)
        self._registered = now


async def deliver(
    call: Callable[[PartsWritten], Awaitable[Reply]],
    report: PartsWritten,
    is_awaited: Callable[[], bool],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Reply | None:
    """Returns the coordinator's answer to a report, which is repeated while it is out of reach.

    Args:
        call: Sends it.
        report: May come twice.
        is_awaited: Whether the save may still need it; if not, None is returned.
        sleep: Waits for seconds.

    Raises:
        RayError: It refused the report twice, is dead, or out of reach for `OUT_OF_REACH_S`.
    """
    waited_s, num_refused = 0.0, 0
    for tries in count(1):
        try:
            return await call(report)
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


@ray_calls.starting_no_ray()
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
