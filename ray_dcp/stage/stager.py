"""The stager: an actor of one job on one node, which writes the bytes that ranks stage.

It belongs to one job and its environment, as keys, endpoints and modules of a storage come from
there: two jobs, or two environments, have two stagers. It ends soon after its ranks.

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

from ray_dcp.commit_protocol.error_aggregation import reply_error
from ray_dcp.commit_protocol.messages import Ack, PartsHeld, PartsWritten, Reply, SaveOutcome
from ray_dcp.coordinator import metrics
from ray_dcp.core import bounds
from ray_dcp.core.processes import pid_namespace
from ray_dcp.core.wire_error import text_of
from ray_dcp.errors import CheckpointError, ParticipantError
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls
from ray_dcp.session.names import (
    NAMESPACE,
    kept_key,
    parts_of,
    stager_name,
    stager_process,
    stagers_key,
)
from ray_dcp.session.ray_calls import Caller, store_bytes
from ray_dcp.stage.node_share import NodeShare
from ray_dcp.stage.orders import (
    Grant,
    Holder,
    InFlight,
    StagedWindow,
    StageKey,
    StageOrder,
    StageProgress,
    Unknown,
)
from ray_dcp.stage.stager_options import SHARE_OF_STORE, StagerOptions
from ray_dcp.stage.tier_files import Part, TierEntry
from ray_dcp.stage.window_bytes import runs_of
from ray_dcp.stage.write_queue import WriteQueue
from ray_dcp.store.environment import StorageVariables


@dataclass(frozen=True)
class StagingAddress:
    """The address of a node's stager."""

    stager: str
    """Name of the stager, different for each process that ever was one."""
    pid: int
    pid_namespace: str
    """Where `pid` names it; empty when it is not known."""
    window_bytes: int
    """Longest window that it takes."""


Report = PartsHeld | PartsWritten
"""What a stager reports to a coordinator."""

REPORT_TRIES = 8
"""How often a report is sent to a coordinator that is dead: over about half a minute, as another
one may take its place."""

logger = logging.getLogger(__name__)


LOOK_S = 10.0
"""How often a stager looks for the others of its node, in seconds; a new one tells them at once."""


@dataclass
class _Rank:
    caller: Caller
    process: str
    pidfd: int = -1


class Stager:
    """The actor that holds and writes the staged bytes of a node.

    Args:
        lease_s: The stager exits after this time without calls, ranks and work, in seconds.
        options: How the node stages.
        actor: Name of this actor.
        namespace: Ray namespace of this actor.
    """

    def __init__(self, lease_s: float, options: StagerOptions, actor: str, namespace: str) -> None:
        self._actor, self._namespace = actor, namespace
        self._loop = asyncio.get_running_loop()
        self._self = ray.get_runtime_context().current_actor
        self._node_id = ray.get_runtime_context().get_node_id()
        self._lease_s = lease_s
        self._ranks: dict[str, _Rank] = {}
        self._warmed: dict[str, int] = {}
        """How many bytes of the store each rank has touched or will."""
        self._last_call_s = self._loop.time()
        node_bytes = max(int(SHARE_OF_STORE * store_bytes(self._node_id)), 1)
        most_bytes = min(options.limit_bytes or node_bytes, node_bytes)
        window_bytes = options.window_bytes_within(most_bytes)
        self._share = NodeShare(node_bytes, most_bytes)
        self._queue = WriteQueue(0, window_bytes, self._report)
        self._place = StagingAddress(
            stager_process(actor, f"{os.getpid()}-{secrets.token_hex(6)}"),
            os.getpid(),
            pid_namespace(),
            window_bytes,
        )
        self._registered: set[str] = set()
        self._had_ranks = False
        # Why not in a thread: nothing else runs before the constructor returns.
        self._own_key = stagers_key(self._node_id, actor, namespace)
        ray_calls.remember(self._own_key, self._place.stager)
        self._others: dict[str, Any] = {}
        """The other stagers of this node, by their keys."""
        self._looked_s = float("-inf")
        self._find_others()
        self._queue.limit(self._share.limit_bytes, self._share.fair_bytes)
        self._watching = ray_calls.run_for_ever(self._watch(), self._self, no_restart=True)

    async def info(self) -> dict[str, Any]:
        """Returns `stager`, `node_id`, `pid`, `limit_bytes`, `used_bytes`, `ranks`, `active`."""
        self._note_call()
        return {
            "stager": self._place.stager,
            "node_id": self._node_id,
            "pid": os.getpid(),
            "limit_bytes": self._share.limit_bytes,
            "used_bytes": self._queue.used_bytes(),
            "ranks": sorted(self._ranks),
            "active": self._queue.num_active(),
        }

    async def place(self) -> StagingAddress:
        """Returns the address of this stager."""
        self._note_call()
        return self._place

    async def enter(
        self,
        name: str,
        process: str,
        caller: Caller,
        pid: int | None,
        variables: StorageVariables,
    ) -> None:
        """Registers a rank. The stager stays while a registered rank lives, and notices its death.

        Args:
            name: Name of the rank on this node; a process that enters under it replaces the one
                before.
            process: Name of the rank's process.
            caller: The rank's process for Ray.
            pid: Process id of the rank, if both are in one process namespace.
            variables: Variables that the storages read in the environment.
        """
        self._note_call()
        variables.become()
        self._had_ranks = True
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
            name: Name of the rank on this node.
            num_bytes: Number of bytes that the rank will stage.
        """
        self._note_call()
        others = sum(taken for other, taken in self._warmed.items() if other != name)
        self._warmed[name] = max(min(num_bytes, self._share.limit_bytes - others), 0)
        return self._warmed[name]

    async def name(self) -> str:
        """Returns the name of this process as a stager, at once: so it is known to live."""
        self._note_call()
        return self._place.stager

    async def begin(
        self, stager: str, order: StageOrder, reporter: Any, variables: StorageVariables
    ) -> Grant | Unknown:
        """Registers an order and grants its first windows. See `WriteQueue.begin`.

        Args:
            stager: The stager that is meant.
            order: The rank's share of the save.
            reporter: Handle of the coordinator, which receives a report of each file, or None. Its
                `call` may receive a report twice; it answers `Ack` while the share is needed.
            variables: Variables that the rank's storages read in the environment now, as keys are
                renewed.
        """
        self._note_call()
        if stager != self._place.stager:
            return Unknown("stager")
        variables.become()
        return self._queue.begin(order, reporter)

    async def more(self, key: StageKey, have: int, wait_s: float | None = None) -> Grant | Unknown:
        """Returns when more windows than `have` are granted. See `WriteQueue.more`.

        Args:
            key: Key of the share.
            have: Number of windows that the rank has been granted.
            wait_s: Time in seconds after which the answer names the saves that have the room.
        """
        self._note_call()
        future = self._queue.more(key, have)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), wait_s)
        except asyncio.TimeoutError:
            holders = [*self._queue.holders()]
            for other in [*self._others.values()]:
                # Suppressed: it has ended, or is busy; what it holds is not described.
                with suppress(RayError, asyncio.TimeoutError):
                    holders += await asyncio.wait_for(other.holders.remote(), bounds.PEER_S)
            return Grant(have, holders=tuple(holders))

    async def holders(self) -> tuple[Holder, ...]:
        """Returns the saves that have room here now."""
        return self._queue.holders()

    async def share_node(self, key: str, keys: Collection[str], bound_bytes: int) -> int:
        """Makes room for another stager of this node; returns the most bytes that this one has.

        Args:
            key: Key of the other stager.
            keys: Keys of all stagers that the other one knows.
            bound_bytes: Most bytes that the other stager has staged.
        """
        self._share.meet([key, *keys], self._own_key)
        if {key, *keys} - {self._own_key, *self._others}:
            self._looked_s = float("-inf")
        self._share.heard(key, bound_bytes)
        self._queue.limit(self._share.limit_bytes, self._share.fair_bytes)
        return self._share.bound_bytes(self._queue.used_bytes())

    async def deliver(self, key: StageKey, refs: dict[int, Any]) -> None:
        """Accepts full windows. See `WriteQueue.deliver`.

        Args:
            key: Key of the share.
            refs: For each window, the object with its bytes, which is a list of buffers.
        """
        self._note_call()
        try:
            # Careful: no local name of the arrays may outlive this, or the objects count for ever.
            objects = await asyncio.gather(*refs.values())
        except Exception as error:  # noqa: BLE001 - the rank hears of it in `seal` and `more`
            first_line, _, _ = text_of(error).partition("\n")
            self._queue.fail_unreadable(key, first_line)
            return
        for number, ref in refs.items():
            lent = ref if isinstance(ref, ray.ObjectRef) else None
            self._queue.deliver(key, number, runs_of(objects.pop(0)), lent)

    async def seal(self, key: StageKey, refs: dict[int, Any]) -> bool | Unknown:
        """Accepts the last full windows, as `deliver`; returns when the rank may go on, or die.

        That is when all windows are here, and the coordinator knows that they are.

        Raises:
            CheckpointError: The share, or its save, failed.
            ParticipantError: The coordinator is out of reach of this stager.
        """
        await self.deliver(key, refs)
        answer = await asyncio.wrap_future(self._queue.seal(key))
        held = self._queue.held(key, self._place.stager)
        if isinstance(answer, Unknown) or held is None or held[0] is None:
            return answer
        reporter, report = held
        try:
            reply = await deliver(reporter.call.remote, report, partial(self._queue.awaits, key))
        except (RayError, OSError) as error:
            raise ParticipantError(
                f"Expected the coordinator of session {key.save.session!r} to be within reach of "
                f"the stager of node {self._node_id}, which has all bytes of rank {key.rank}, but "
                f"Ray reports {type(error).__name__}: {error}. Look at the network between the two "
                f"nodes, and save again",
                rank=key.rank,
            ) from None
        if reply is None:  # why the share has ended meanwhile
            return await asyncio.wrap_future(self._queue.seal(key))
        if not isinstance(reply, Ack | SaveOutcome):
            raise reply_error(reply, key.rank)
        return True

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
            caller: The process that loads. What it does not return is taken back when it dies.
            load: Name of the load.
            windows: The windows to lend.
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
        """Removes a share whose outcome is known. See `WriteQueue.release`."""
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
        # Suppressed: Ray's tables did not answer; the next stager does it.
        with suppress(CheckpointError, RayError):
            await asyncio.to_thread(self._forget_lost_nodes)
        while True:
            # Suppressed: Ray's tables did not answer; the share stays as it is.
            with suppress(CheckpointError, RayError):
                await self._share_with_others()
            await asyncio.sleep(min(1.0, self._lease_s / 4))
            metrics.staging_memory(self._queue.used_bytes(), self._share.limit_bytes)
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
            # Why so soon after its ranks: it works for their job alone.
            lease_s = min(self._lease_s, bounds.AFTER_RANKS_S) if self._had_ranks else self._lease_s
            if self._queue.kept_attempts():
                lease_s = max(self._lease_s, bounds.KEPT_S)
            if not self._ranks and not self._queue.num_active() and idle_s >= lease_s:
                await self._end()

    async def _retire_if_stuck(self) -> None:
        """Ends this actor, whose memory hangs in a storage, once no job depends on it.

        A rank that is handing over has its bytes still, and hands them to the next stager.
        """
        stuck = self._queue.stuck(bounds.STUCK_S)
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
        await self._end()

    async def _end(self) -> None:
        """Removes the entries of this stager from the control store, and ends its process."""
        with suppress(CheckpointError, RayError):
            await self._register(())
            await asyncio.to_thread(ray_calls.remember, self._own_key, "")
        ray_calls.kill(self._self, no_restart=True)
        # Why: the kill takes a moment, in which it would enter itself again.
        await self._loop.create_future()

    # The other stagers of this node

    def _find_others(self) -> None:
        """Finds the other stagers, and removes the entries of those that have ended."""
        keys = {*ray_calls.names_from(stagers_key(self._node_id))}
        if self._own_key not in keys:
            ray_calls.remember(self._own_key, self._place.stager)
        found: dict[str, Any] = {}
        for key in keys - {self._own_key}:
            *_, namespace, actor = parts_of(key)
            try:
                found[key] = self._others.get(key) or ray_calls.get_actor(actor, namespace)
            except ValueError:
                self._remove_entries(key)
        self._others = found
        self._share.only([*found])

    def _remove_entries(self, key: str) -> None:
        """Removes the entries of a stager that has ended, on any node, from the control store."""
        *_, node_id, namespace, actor = parts_of(key)
        for kept in ray_calls.names_from(kept_key(namespace=namespace)):
            if parts_of(kept)[-2:] == [node_id, actor]:
                ray_calls.remember(kept, "")
        ray_calls.remember(key, "")

    def _forget_lost_nodes(self) -> None:
        """Removes the entries of stagers of nodes that have ended from the control store."""
        lost = {node["NodeID"] for node in ray_calls.nodes() if not node["Alive"]}
        for key in ray_calls.names_from(stagers_key()):
            if parts_of(key)[-3] in lost:
                self._remove_entries(key)

    async def _share_with_others(self) -> None:
        """Agrees with the other stagers of this node how many bytes each may stage."""
        if self._loop.time() >= self._looked_s + LOOK_S:
            self._looked_s = self._loop.time()
            await asyncio.to_thread(self._find_others)
        for key, other in [*self._others.items()]:
            try:
                most_bytes = self._share.bound_bytes(self._queue.used_bytes())
                asked = other.share_node.remote(self._own_key, [*self._others], most_bytes)
                self._share.heard(key, await asyncio.wait_for(asked, bounds.PEER_S))
            except ActorDiedError:
                self._others.pop(key, None)
                self._share.only([*self._others])
                self._looked_s = float("-inf")  # its name is gone in a moment, and its entries then
            except (RayError, asyncio.TimeoutError):
                continue  # what it had counts until it answers
        self._queue.limit(self._share.limit_bytes, self._share.fair_bytes)

    async def _register(self, kept: Collection[str] | None = None) -> None:
        """Registers the bytes in memory, so that other nodes find them."""
        now = set(self._queue.kept_attempts() if kept is None else kept)
        for attempt in self._registered ^ now:
            text = self._place.stager if attempt in now else ""
            name = kept_key(attempt, self._node_id, self._actor, namespace=self._namespace)
            await asyncio.to_thread(ray_calls.remember, name, text)
        self._registered = now


async def deliver(
    call: Callable[[Report], Awaitable[Reply]],
    report: Report,
    is_awaited: Callable[[], bool],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Reply | None:
    """Returns the coordinator's answer to a report, which is repeated while it is out of reach.

    Args:
        call: Sends the report.
        report: The report; it may arrive twice.
        is_awaited: Returns whether the save may still need the report; if not, None is returned.
        sleep: Waits for a number of seconds.

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
            if num_refused > 1 or is_dead or waited_s >= bounds.OUT_OF_REACH_S:
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
    job: str = "",
    namespace: str = NAMESPACE,
    lease_s: float,
    options: StagerOptions | None = None,
) -> Any:
    """Returns the handle of a node's stager of a job, after making it if there is none.

    It gets the runtime environment of this process: Ray passes it on.

    Args:
        node_id: Ray's hex id of the node.
        job: The job of the stager; see `ray_calls.job_of`.
        namespace: Ray namespace to look in.
        lease_s: See `Stager`; applies if the actor is created.
        options: See `Stager`; applies if the actor is created.
    """
    name = stager_name(node_id, job, namespace)
    actor = ray.remote(Stager).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=0,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    lease_s = check_above_0(lease_s, "lease_s")
    settings = options or StagerOptions()
    return ray_calls.named_actor(actor, lease_s, settings, name, namespace)
