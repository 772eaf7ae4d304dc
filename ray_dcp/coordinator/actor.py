"""The coordinator of a Ray session: an async actor that runs a `CoordinatorLoop`.

There is one for each session, detached. Ray restarts it if it dies, and it exits when nobody needs
it.

`Membership` keeps the living ranks in Ray's control store. *Why*: if a machine with the coordinator
and some ranks is lost, the next coordinator must know which ranks are missing; those never call it.
`SharedReadDispatch` holds the `SharedUnit`s of each load in progress. `Rendezvous` lets ranks that
only share a name agree on a session, without a process group; `WaitingReplicas` those of a run that
replaces them one by one on who saves a step. `coordinator_of` returns the handle of a session's
coordinator, and creates it if there is none.

`StagedPlans`: Ray's control store keeps the plans of a coordinator's asynchronous saves, with about
a byte for each row, and the next coordinator resumes them. A stager gets its `Ack`, and the handle
of its rank is staged, only when the control store has the plan. The storage overrules a plan: the
commit is the same vote as ever. `StagerWatch` asks the stagers that hold bytes of a save whether
they live, and marks those lost that died or froze.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from ray_dcp.commit_protocol.commands import Answer, Command
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.liveness import HeartbeatAck
from ray_dcp.commit_protocol.load import Decline, Give, ReadMessage, SharedUnit, Skip, Take
from ray_dcp.commit_protocol.messages import (
    Ack,
    OpKey,
    PartsHeld,
    Reply,
    Request,
    SaveGo,
)
from ray_dcp.commit_protocol.replica_quorum import Answers, ReadyToSave, ReplicaQuorum, SaveQuorum
from ray_dcp.commit_protocol.save import StagedPlan
from ray_dcp.coordinator.loop import CoordinatorLoop, Member
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    InvalidRequestError,
    RankDisagreementError,
)
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls
from ray_dcp.session.names import (
    NAMESPACE,
    actor_of,
    coordinator_name,
    epoch_key,
    parts_of,
    pulse_name,
    roster_key,
    staged_plan_name,
    stagers_key,
)
from ray_dcp.session.ray_calls import Caller
from ray_dcp.store.environment import StorageVariables

logger = logging.getLogger(__name__)

MOST_CALLS = 1_000_000
"""Most calls of an actor that wait at once; each rank waits in two or three. *Why*: Ray admits 1000
by default, so that with more ranks the last one to join would never be admitted."""

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
        clock: Returns the seconds in which this process could receive messages
            (`liveness.AwakeClock`).
    """

    def __init__(
        self,
        coordination: Coordination,
        carry_out: Callable[[tuple[Command, ...]], None],
        namespace: str,
        clock: Callable[[], float],
    ) -> None:
        self._coordination = coordination
        self._carry_out = carry_out
        self._namespace = namespace
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
                self._report_lost(name, why)

    async def _ask(self, name: str, seen: _Seen) -> None:
        try:
            if seen.handle is None:
                seen.handle = await asyncio.to_thread(
                    ray_calls.get_actor, actor_of(name), namespace=self._namespace
                )
            process = await seen.handle.name.remote()
        except (ActorDiedError, ValueError) as error:
            what = "that it died" if isinstance(error, ActorDiedError) else "that there is none"
            self._report_lost(name, f"Ray says {what}")
            return
        except RayError:
            return  # a connection broke: only silence beyond the bound is a loss
        seen.heard_s = self._clock()
        if process != name:
            self._report_lost(name, "another stager has its place")

    def _report_lost(self, name: str, why: str) -> None:
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
        self._carry_out(self._coordination.stager_lost(name, why))


@dataclass
class _Resumed:
    """A save that an earlier coordinator planned."""

    epoch: int
    """Epoch of that coordinator, which is in the names of shares."""
    attempt: str
    answered: set[str] = field(default_factory=set)
    """Actor names of the stagers that have answered, or are gone."""


class StagedPlans:
    """The plans of a coordinator's asynchronous saves, kept in Ray's control store.

    The control store has one entry for each save, written once, while ranks stage: its plan. Who
    has its bytes is not written down: the next coordinator asks all stagers of the namespace.
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
        self._stored: dict[OpKey, asyncio.Future[bool]] = {}
        """For each save, whether the control store has its plan."""
        self._resumed: dict[OpKey, _Resumed] = {}
        self._turn = asyncio.Lock()

    def begin(self, key: OpKey) -> None:
        """Begins to store the plan of a save, if it is asynchronous and planned."""
        if key in self._stored:
            return
        planned = self._coordination.staged_plan(key)
        if planned is not None:
            self._stored[key] = asyncio.ensure_future(self._store(planned))

    async def hold(self, key: OpKey) -> None:
        """Returns when another coordinator would find the plan of a save.

        If the control store does not accept it, a warning is logged.
        """
        self.begin(key)
        if key in self._stored:
            await asyncio.wait([self._stored[key]])

    @property
    def is_busy(self) -> bool:
        """Whether `keep` is running, or has nothing to do."""
        return self._turn.locked() or not self._stored

    async def keep(self) -> None:
        """Stores plans that were not accepted, asks stagers, and removes plans of ended saves."""
        async with self._turn:
            for key, stored in list(self._stored.items()):
                await asyncio.wait([stored])
                if key not in self._coordination.active:
                    del self._stored[key]
                    self._resumed.pop(key, None)
                    with suppress(CheckpointError, RayError):
                        await asyncio.to_thread(ray_calls.remember, self._name(key), "")
                    continue
                await self._ask_stagers(key)
                if not stored.result():
                    del self._stored[key]
                    await self.hold(key)

    async def resume(self) -> None:
        """Resumes the saves that an earlier coordinator of this name planned and did not end."""
        prefix = staged_plan_name(self._actor)
        for name in await asyncio.to_thread(ray_calls.names_from, prefix):
            try:
                await self._resume(name)
            except (CheckpointError, RayError) as error:
                logger.warning("A staged save was not resumed after a restart: %r", error)

    async def _store(self, planned: StagedPlan) -> bool:
        key = planned.first.key

        def write() -> None:
            data = pickle.dumps(planned, pickle.HIGHEST_PROTOCOL)
            ray_calls.remember(self._name(key), b64encode(data).decode())

        try:
            await asyncio.to_thread(write)
        except Exception as error:  # noqa: BLE001 - the save goes on
            logger.warning(
                "Operation %d of session %s is lost if its coordinator dies: Ray's control store "
                "did not take its plan (%r); it is asked again",
                key.seq,
                key.session,
                error,
            )
            return False
        return True

    async def _resume(self, name: str) -> None:
        text = await asyncio.to_thread(ray_calls.recall, name)
        if not text:
            return
        planned: StagedPlan = pickle.loads(b64decode(text))
        first, key = planned.first, planned.first.key
        self._stored[key] = asyncio.get_running_loop().create_future()
        self._stored[key].set_result(True)
        self._resumed[key] = _Resumed(planned.epoch, planned.attempt)
        logger.warning(
            "Resumed attempt %s of %s: operation %d of session %s with %d ranks, planned by a "
            "coordinator (epoch %d) that died; the stagers have to report again what they hold and "
            "have written",
            planned.attempt,
            first.target.url,
            key.seq,
            key.session,
            first.world_size,
            planned.epoch,
        )
        self._carry_out(self._coordination.resume(planned))
        await self._ask_stagers(key)

    async def _ask_stagers(self, key: OpKey) -> None:
        """Asks each stager once for the reports that it sent to the earlier coordinator."""
        resumed = self._resumed.get(key)
        if resumed is None:
            return
        entries = map(parts_of, await asyncio.to_thread(ray_calls.names_from, stagers_key()))
        actors = {actor for *_, namespace, actor in entries if namespace == self._namespace}
        asked = [self._ask_stager(key, resumed, each) for each in actors - resumed.answered]
        await asyncio.gather(*asked)

    async def _ask_stager(self, key: OpKey, resumed: _Resumed, actor: str) -> None:
        try:
            handle = await asyncio.to_thread(ray_calls.get_actor, actor, self._namespace)
            who, found = await asyncio.wait_for(
                handle.shares.remote(resumed.attempt), bounds.RESUMED_ANSWER_S
            )
        except (ActorDiedError, ValueError):
            pass  # it is dead: the coordinator's watch detects that, if it matters
        except (RayError, asyncio.TimeoutError):
            return  # asked again by the next `keep`
        else:
            for share in found:
                if share.is_sealed:
                    rank = share.key.rank
                    self._receive(PartsHeld(key, rank, resumed.attempt, resumed.epoch, who))
                for report in share.reports:
                    self._receive(report)
        resumed.answered.add(actor)

    def _receive(self, request: Request) -> None:
        # Suppressed: another attempt or epoch, which concerns no save of this coordinator.
        with suppress(CheckpointError):
            self._carry_out(self._coordination.receive(request))

    def _name(self, key: OpKey) -> str:
        return staged_plan_name(self._actor, key)


class Membership:
    """The registered ranks that have neither left nor died. Used in the event loop's thread.

    Args:
        key: Key under which the control store keeps it.

    Attributes:
        ever: Whether a rank was ever registered, by this process or an earlier one.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        kept = json.loads(ray_calls.recall(self._key) or "[]")
        self._members: dict[Member, Caller] = {
            (session, rank): Caller(*caller) for session, rank, caller in kept
        }
        self._changed = False
        self.ever = bool(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, session: str, rank: int, caller: Caller) -> None:
        """Registers a rank."""
        if self._members.get((session, rank)) != caller:
            self._members[session, rank] = caller
            self._changed = self.ever = True

    def is_of(self, session: str, rank: int, caller: Caller) -> bool:
        """Returns whether a rank is registered with this process."""
        return self._members.get((session, rank)) == caller

    def remove(self, session: str, rank: int) -> None:
        """Removes a rank that has left; ignores an unknown one."""
        self.ever = True
        self._changed |= self._members.pop((session, rank), None) is not None

    async def take_dead(self) -> list[tuple[str, int, Caller]]:
        """Removes and returns the ranks whose processes have ended.

        Raises:
            InternalError: This version of Ray does not report which processes live.
        """
        watched = dict(self._members)
        if not watched:
            return []
        dead = await asyncio.to_thread(ray_calls.gone, set(watched.values()))
        # A rank that spoke meanwhile may be another process by now.
        taken = [
            (session, rank, caller)
            for (session, rank), caller in watched.items()
            if caller in dead and self._members.get((session, rank)) == caller
        ]
        for session, rank, _ in taken:
            self.remove(session, rank)
        return taken

    async def keep(self) -> None:
        """Stores the ranks for the next coordinator, if they have changed."""
        if self._changed:
            self._changed = False
            members = [
                (session, rank, astuple(caller))
                for (session, rank), caller in self._members.items()
            ]
            text = json.dumps(members) if members else ""
            await asyncio.to_thread(ray_calls.remember, self._key, text)

    def clear(self) -> None:
        """Removes all ranks."""
        self._members.clear()


class SharedReadDispatch:
    """The shared reads of all loads of one coordinator.

    *Invariant*: used in the event loop's thread only.

    Args:
        is_over: Returns whether a load has an outcome, or is unknown.
    """

    def __init__(self, is_over: Callable[[OpKey], bool]) -> None:
        self._is_over = is_over
        self._loads: dict[OpKey, dict[int, SharedUnit]] = {}
        self._changes: dict[tuple[OpKey, int], asyncio.Event] = {}
        """Set, and replaced, when a unit changes for which a call waits."""

    async def share(self, message: ReadMessage) -> Any:
        """Applies a rank's message; returns its reply, None if it has none or the load is over.

        Args:
            message: The message; it may arrive twice.
        """
        key = message.key
        if self._is_over(key):
            self._drop(key)
            return None
        units = self._loads.setdefault(key, defaultdict(SharedUnit))
        match message:
            case Give(unit=number):
                unit = units[number]
                unit.give(message.handle, message.takers)
                self._notify(key, number)
                await self._until(key, number, lambda: unit.state == "gone")
            case Take(unit=number):
                unit = units[number]
                await self._until(key, number, lambda: unit.state != "open", message.wait_s)
                if unit.state == "open" or key not in self._loads:
                    return None
                handle = unit.take(message.rank)
                self._notify(key, number)
                return handle or ()
            case Skip() | Decline():
                for number in message.units:
                    if isinstance(message, Skip):
                        units[number].skip(message.rank)
                    elif units[number].state == "open":
                        units[number].withdraw()
                    self._notify(key, number)
        return None

    def tidy(self) -> None:
        """Drops loads that are over, with the handles that keep their bytes alive."""
        for key in [key for key in self._loads if self._is_over(key)]:
            self._drop(key)

    async def _until(
        self, key: OpKey, number: int, is_so: Callable[[], bool], wait_s: float | None = None
    ) -> None:
        """Returns when a unit is as it should be, the load is over, or the time has passed."""
        loop = asyncio.get_running_loop()
        end_s = None if wait_s is None else loop.time() + wait_s
        while not is_so() and key in self._loads:
            change = self._changes.setdefault((key, number), asyncio.Event())
            try:
                left_s = None if end_s is None else end_s - loop.time()
                await asyncio.wait_for(change.wait(), left_s)
            except asyncio.TimeoutError:
                return

    def _notify(self, key: OpKey, number: int) -> None:
        change = self._changes.pop((key, number), None)
        if change is not None:
            change.set()

    def _drop(self, key: OpKey) -> None:
        for number in self._loads.pop(key, ()):
            self._notify(key, number)


class _Round:
    """One rendezvous. Must be created in the event loop.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.tokens: dict[int, str] = {}
        """The last token of each rank that has entered it, or got its error."""
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The generation; or the error if the ranks disagree about their number."""
        self.error: RankDisagreementError | None = None
        self.forgotten_s = 0.0
        """When ranks that did not get the error begin another rendezvous, by the loop's clock."""

    def fail(self, error: RankDisagreementError, forgotten_s: float) -> None:
        """Ends the rendezvous for all ranks that wait."""
        self.error, self.forgotten_s = error, forgotten_s
        self.answer.set_exception(error)
        self.answer.exception()  # so that it counts as retrieved, also if no rank waits

    @property
    def missing(self) -> list[int]:
        """Ranks that have not entered."""
        return [rank for rank in range(self.world_size) if rank not in self.tokens]


class Rendezvous:
    """Ranks that enter under one name, and get a generation once all have entered.

    Each rank enters with a token that it never used before. A rank that enters with another token
    is a new process: the ranks that entered before belong to an earlier session, and a new
    rendezvous begins. A job that is restarted under its old name therefore never gets an answer
    meant for the earlier job. Used in one event loop's thread.

    Args:
        new_generation: Returns a token that no rendezvous had before.

    Attributes:
        num_waiting: Number of ranks that wait in `join`.
    """

    def __init__(self, new_generation: Callable[[], str]) -> None:
        self._new_generation = new_generation
        self._round: _Round | None = None
        self.num_waiting = 0

    async def join(
        self, rank: int, world_size: int, token: str, timeout_s: float
    ) -> str | list[int]:
        """Returns the generation once all ranks have entered, or the missing ranks.

        Args:
            rank: The rank.
            world_size: Number of ranks that it expects.
            token: Distinguishes this process from an earlier one of the same rank.
            timeout_s: How long to wait for the other ranks, in seconds.

        Raises:
            InvalidRequestError: The rank is not between 0 and `world_size - 1`.
            RankDisagreementError: The ranks differ about their number. Every rank gets this error,
                once.
        """
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidRequestError(
                f"Expected a rank from 0 to world_size - 1, but found rank {rank} of "
                f"{world_size}. Give each process its own number",
                rank=rank,
            )
        now_s, own = asyncio.get_running_loop().time(), self._round
        if own is not None and own.error is not None:
            if rank not in own.tokens and now_s < own.forgotten_s:
                own.tokens[rank] = token
                raise own.error
            own = None
        if own is None or (own.answer.done() and own.tokens.get(rank) != token):
            own = self._round = _Round(world_size)
        others = sorted(own.tokens)
        own.tokens[rank] = token
        if world_size != own.world_size:
            error = RankDisagreementError(
                f"Expected every rank to give one world_size, but rank {rank} gives "
                f"{world_size} and ranks {others} gave {own.world_size}",
                rank=rank,
            )
            own.fail(error, now_s + timeout_s)
        elif not own.missing and not own.answer.done():
            own.answer.set_result(self._new_generation())
        self.num_waiting += 1
        try:
            generation = await asyncio.wait_for(asyncio.shield(own.answer), timeout_s)
            # Why: another process may have taken its place meanwhile.
            return generation if own.tokens[rank] == token else own.missing
        except asyncio.TimeoutError:
            return own.missing
        finally:
            self.num_waiting -= 1


REPLICAS = ""
"""Session under which the replicas of a run are registered, whatever sessions they save in."""


class WaitingReplicas:
    """The replicas of a run that wait until they may save a step. Used in the event loop's thread.

    Args:
        new_session: See `ReplicaQuorum`.
        clock: Returns the time, in seconds.
    """

    def __init__(self, new_session: Callable[[], str], clock: Callable[[], float]) -> None:
        self._new_session, self._clock = new_session, clock
        self._quorum: ReplicaQuorum | None = None
        self._waiting: dict[int, list[asyncio.Future[SaveQuorum | None]]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a replica waits for an answer."""
        return self._quorum is not None and self._quorum.is_waiting

    def begin(self, rank: int, world_size: int, caller: Caller) -> None:
        """Registers the process of a replica."""
        self._of(world_size).begin(rank, str(caller))

    def steps(self, rank: int, world_size: int, caller: Caller) -> None:
        """Records that the process of a replica makes its first step."""
        self._of(world_size).steps(rank, str(caller))

    def lost(self, rank: int, caller: Caller, why: str) -> None:
        """Records that the process of a replica has ended or left."""
        if self._quorum is not None:
            self._answer(self._quorum.lost(rank, str(caller), why, self._clock()))

    async def ready(self, request: ReadyToSave) -> SaveQuorum | None:
        """Returns with whom a replica saves a step; None if the others do, or did, without it."""
        quorum = self._of(request.world_size)
        future: asyncio.Future[SaveQuorum | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request.rank, []).append(future)
        self._answer(quorum.ready(request, self._clock()))
        while not future.done():
            next_s = quorum.next_s
            left_s = None if next_s is None else max(0.0, next_s - self._clock())
            await asyncio.wait([future], timeout=left_s)
            if not future.done():
                self._answer(quorum.look(self._clock()))
        return future.result()

    def _of(self, world_size: int) -> ReplicaQuorum:
        if self._quorum is None:
            self._quorum = ReplicaQuorum(world_size, self._new_session)
        return self._quorum

    def _answer(self, answers: Answers) -> None:
        for rank, answer in answers:
            for future in self._waiting.pop(rank, ()):
                if not future.done():
                    future.set_result(answer)


WATCH_S = 0.5
"""Interval at which Ray is asked whether the ranks of a running operation live, in seconds."""

PULSE_S = 0.5
"""Interval at which the coordinator writes that it lives while operations run, in seconds."""

QUIET_WATCH_S = 5.0
"""The same while no operation runs; an operation that begins ends the wait."""

logger = logging.getLogger(__name__)


class Coordinator(CoordinatorLoop):
    """The loop as an actor: Ray reports deaths, and keeps what the next incarnation needs.

    Ray's tables are read in threads.

    Args:
        name: Name of this actor, under which its epoch is counted.
        lease_s: The actor exits when all its ranks have left or died, or when no rank ever
            registered and no call arrived for this time, in seconds.
        namespace: Ray namespace of the stagers.
        variables: What storages read in the environment: that of a rank, as scripts set keys there
            after Ray has started the process.
    """

    def __init__(
        self,
        name: str,
        lease_s: float,
        namespace: str,
        variables: StorageVariables,
    ) -> None:
        variables.become()
        # Why not in a thread: nothing else runs before the constructor returns.
        super().__init__(ray_calls.next_epoch(epoch_key(name)))
        self._name = name
        self._lease_s = lease_s
        self._shared_reads = SharedReadDispatch(lambda key: key not in self._coordination.active)
        self._rendezvous = Rendezvous(lambda: secrets.token_hex(6))
        self._replicas = WaitingReplicas(lambda: secrets.token_hex(6), self._loop.time)
        self._members = Membership(roster_key(name))
        self._has_pulse = False
        self._plans = StagedPlans(name, self._coordination, self._carry_out, namespace)
        self._stagers = StagerWatch(self._coordination, self._carry_out, namespace, self._awake)
        self._self = ray.get_runtime_context().current_actor
        actor_id = ray.get_runtime_context().get_actor_id() or ""
        lives, me = ray_calls.life_of(actor_id).num_restarts, ray_calls.this_caller(os.getpid())
        self._ack = HeartbeatAck(actor_id, lives, str(me))
        if lives > 0:
            logger.warning(
                "The coordinator of session %s died and was started anew (%s, epoch %d): "
                "asynchronous saves that were staged go on, other saves and loads that were under "
                "way fail and have to be called again",
                name,
                me,
                self.epoch,
            )
        self._start_task(self._resume())
        watches = (self._watch(), self._check_silence(), self._stagers.watch(), self._write_pulse())
        for watch in watches:
            self._tasks.add(ray_calls.run_for_ever(watch, self._self, no_restart=False))

    @property
    def _node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def enter(
        self, rank: int, world_size: int, token: str, timeout_s: float
    ) -> str | list[int]:
        """See `Rendezvous.join`."""
        try:
            return await self._rendezvous.join(rank, world_size, token, timeout_s)
        finally:
            self._last_call_s = self._loop.time()

    async def begin_replica(self, rank: int, world_size: int, caller: Caller) -> None:
        """Registers the process of a replica of a run, so that its death is detected."""
        self._note_call()
        self._members.add(REPLICAS, rank, caller)
        self._replicas.begin(rank, world_size, caller)

    async def replica_steps(self, rank: int, world_size: int, caller: Caller) -> None:
        """Records that the process of a replica makes its first step, so that it is awaited."""
        await self.begin_replica(rank, world_size, caller)
        self._replicas.steps(rank, world_size, caller)

    async def ready(self, request: ReadyToSave, caller: Caller) -> SaveQuorum | None:
        """See `WaitingReplicas.ready`.

        Args:
            request: What the replica says; the identity of its process is the caller's.
            caller: Its process.
        """
        await self.begin_replica(request.rank, request.world_size, caller)
        try:
            return await self._replicas.ready(replace(request, process=str(caller)))
        finally:
            self._last_call_s = self._loop.time()

    async def end_replica(self, rank: int, caller: Caller) -> None:
        """Removes the process of a replica, which saves no more."""
        if self._members.is_of(REPLICAS, rank, caller):
            self._members.remove(REPLICAS, rank)
        self._replicas.lost(rank, caller, "has ended")

    async def call(
        self, request: Request, caller: Caller | None = None, silence_s: float | None = None
    ) -> Reply:
        """See `CoordinatorLoop.call`.

        Args:
            request: As there.
            caller: The rank's process for Ray; without it, its death is not detected.
            silence_s: As there.
        """
        reply = await super().call(request, caller, silence_s)
        if isinstance(request, PartsHeld) and isinstance(reply, Ack):
            # Why first: the rank may die once its stager has it, and this actor with it.
            await self._plans.hold(request.key)
        return reply

    async def share(self, message: ReadMessage) -> Any:
        """Accepts a rank's message about shared reads; see `SharedReadDispatch.share`."""
        return await self._shared_reads.share(message)

    async def renew(self, variables: StorageVariables) -> None:
        """Takes what storages read in the environment now: rank 0 has other keys."""
        variables.become()

    async def leave(self, session: str, rank: int) -> None:
        """See `CoordinatorLoop.leave`."""
        self._members.remove(session, rank)
        await super().leave(session, rank)

    def _register(self, session: str, rank: int, caller: Caller) -> None:
        self._members.add(session, rank, caller)
        super()._register(session, rank, caller)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        super()._carry_out(commands)
        for command in commands:
            if isinstance(command, Answer) and isinstance(command.reply, SaveGo):
                self._plans.begin(command.key)
        self._shared_reads.tidy()

    # Life and death

    async def _write_pulse(self) -> None:
        """Writes to the control store that this process lives, for ranks that can't reach it."""
        name = pulse_name(self._name)
        for number in count():
            await asyncio.sleep(PULSE_S)
            active = bool(self._coordination.active)
            if active or self._has_pulse:
                # Suppressed: a rank that can't read it either goes by what it can reach.
                with suppress(CheckpointError, RayError):
                    text = f"{self.epoch}:{number}" if active else ""
                    await asyncio.to_thread(ray_calls.remember, name, text)
                    self._has_pulse = active

    async def _resume(self) -> None:
        try:
            if self.epoch > 1:
                await self._plans.resume()
        finally:
            self._resumed.set()

    async def _watch(self) -> None:
        await self._resumed.wait()
        while True:
            await self._pause()
            try:
                for session, rank, caller in await self._members.take_dead():
                    reason = f"Ray says that its process ({caller}) has ended"
                    if session == REPLICAS:
                        self._replicas.lost(rank, caller, f"has ended ({caller})")
                    else:
                        self._report_lost(session, rank, reason)
                await self._members.keep()
                # Why a task: a stager that is frozen must not keep it from seeing who died.
                if not self._plans.is_busy:
                    self._start_task(self._plans.keep())
            except CheckpointError as error:
                # Why go on: deadlines and leases work without this look.
                logger.warning("Ranks that die are only seen at deadlines: %s", error)
                self._members.clear()
            idle_s = self._loop.time() - self._last_call_s
            needless = self._members.ever or idle_s >= self._lease_s
            if not self._members and needless and self._is_idle() and await self._forget_session():
                # Why not exit_actor: it waits for the call in which it is made, also when the
                # actor makes that call to itself. A call that comes just now is repeated.
                ray_calls.kill(self._self, no_restart=True)

    async def _forget_session(self) -> bool:
        """Removes what the control store has of this session, which has ended.

        Returns False, and takes it back, if a call has come meanwhile.

        *Why* not without ranks that left or died: then ranks may be idle that never registered, and
        the next incarnation has to count on.
        """
        if not self._members.ever:
            return True
        # Suppressed: what is left is overwritten by the next session of this name.
        with suppress(CheckpointError, RayError):
            for key in (epoch_key(self._name), roster_key(self._name), pulse_name(self._name)):
                await asyncio.to_thread(ray_calls.remember, key, "")
        if not self._members and self._is_idle():
            return True
        with suppress(CheckpointError, RayError):
            await asyncio.to_thread(ray_calls.remember, epoch_key(self._name), str(self.epoch))
        return False

    async def _pause(self) -> None:
        if self._coordination.active or self._replicas.is_waiting:
            await asyncio.sleep(min(WATCH_S, self._lease_s))
            return
        self._called.clear()
        try:
            await asyncio.wait_for(self._called.wait(), min(QUIET_WATCH_S, self._lease_s))
        except asyncio.TimeoutError:
            return

    def _is_idle(self) -> bool:
        busy = self._performing or self._rendezvous.num_waiting or self._waiting
        return not (busy or self._coordination.active or self._replicas.is_waiting)


@ray_calls.starting_no_ray()
def coordinator_of(
    session: str,
    *,
    namespace: str = NAMESPACE,
    lease_s: float,
    variables: StorageVariables,
) -> Any:
    """Returns the handle of a session's coordinator, and creates the actor if there is none.

    Ranks may call it at once: one of them creates the actor, and all get it. It runs on any node,
    preferably the caller's, and outlives its creator.

    Args:
        session: Name of the session.
        namespace: Ray namespace of the actor.
        lease_s: See `Coordinator`; applies if the actor is created.
        variables: See `Coordinator`; applies if the actor is created.
    """
    name = coordinator_name(session, namespace)
    # Why no max_task_retries: Ray would also repeat the call in which the actor leaves.
    actor = ray.remote(Coordinator).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=MOST_CALLS,
        num_cpus=0,
        # Why explicit: a trial of Ray Tune has all that its processes start go into its placement
        # group, and Ray kills what is in there together with the trial.
        scheduling_strategy="DEFAULT",
    )
    lease_s = check_above_0(lease_s, "lease_s")
    return ray_calls.named_actor(actor, name, lease_s, namespace, variables)
