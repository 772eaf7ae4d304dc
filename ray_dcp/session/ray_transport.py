"""`RayTransport`: reaches a coordinator that is an actor, which Ray may restart."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.commit_protocol.messages import OpKey, Reply, Request, SaveJoin
from ray_dcp.commit_protocol.replica_quorum import ReadyToSave, SaveQuorum
from ray_dcp.coordinator.gatherer import GatheredCalls
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError, DeadlineError
from ray_dcp.session import ray_calls
from ray_dcp.session.call_bound import CallBound
from ray_dcp.session.heartbeat import HeartbeatTransport, SenderState, Silence
from ray_dcp.session.names import NAMESPACE, coordinator_name, pulse_name, staged_plan_name
from ray_dcp.session.ray_actors import RayActors
from ray_dcp.session.session import Session

logger = logging.getLogger(__name__)


class RayTransport(HeartbeatTransport):
    """A transport over an actor of the Ray that this process is connected to.

    Args:
        session: As for `Transport`.
        rank: As for `Transport`.
        world_size: As for `Transport`.
        actor: Name from which the coordinator's actor name is derived; by default, the session's
            name.
        namespace: Ray namespace of the coordinator.
        lease_s: How long an unused coordinator stays, in seconds.
    """

    ray: RayActors

    def __init__(
        self,
        session: str,
        rank: int,
        world_size: int,
        *,
        actor: str | None = None,
        namespace: str = NAMESPACE,
        lease_s: float = bounds.ACTOR_LEASE_S,
    ) -> None:
        actor = actor or session
        node, _ = ray_calls.this_connection() or ("", "")
        super().__init__(
            session, rank, world_size, who=f"the coordinator of session {actor!r}", node=node
        )
        self.ray = RayActors(
            f"{session}:{rank}",
            self.member,
            rank,
            actor=actor,
            namespace=namespace,
            lease_s=lease_s,
        )
        self._gathered = GatheredCalls(rank, world_size, actor, namespace, self.ray.lease_s)
        self._caller = ray_calls.this_caller(os.getpid())
        self._name = coordinator_name(actor, namespace)
        self._num_restarts: int | None = None
        """Of the coordinator, when it was seen last."""
        self._killed_s, self._killed_restarts = float("-inf"), 0
        self._begin()

    def _begin(self) -> None:
        """Resets what an earlier thread has found out by heartbeats."""
        self._fresh = False
        self._actor_id = ""
        self._pulse: str | None = None

    @property
    def caller(self) -> ray_calls.Caller:
        """See `Transport.caller`."""
        return self._caller

    def join(self) -> Session:
        """Registers this rank, so that the coordinator detects its death; returns its session.

        Raises:
            ParticipantError: The coordinator is out of reach.
        """
        bound = CallBound(bounds.MARGIN_S)
        self.ask("register", self.session, self.rank, self.caller, bound=bound)
        return Session(self)

    def call(self, request: Request, silence_s: float | None, bound: CallBound) -> Reply:
        """See `Transport.call`."""
        if self.rank == 0 and isinstance(request, SaveJoin):
            self._renew_variables()
        found = self._gathered.call(request, self.caller, silence_s)
        return found or super().call(request, silence_s, bound)

    def ask(self, method: str, *arguments: Any, bound: CallBound) -> Any:
        """See `Transport.ask`."""
        return ray_calls.call_actor(
            self.who,
            self.ray.coordinator,
            lambda actor: getattr(actor, method).remote(*arguments),
            bound,
            rank=self.rank,
        )

    def _renew_variables(self) -> None:
        """Passes the coordinator what storages read in the environment, if that has changed."""
        self.ray.connection.check()  # else Ray would start anew where it was shut down
        variables, before = ray_calls.storage_variables(), self.ray.variables
        if before is not None and variables.values != before.values:
            self.ask("renew", variables, bound=CallBound(bounds.MARGIN_S))
            self.ray.variables = variables

    @property
    def is_replaced(self) -> bool:
        """See `Transport.is_replaced`."""
        return self.ray.connection.is_replaced

    def close(self) -> None:
        """See `Transport.close`."""
        self._gathered.close()
        self.ray.close()
        self.ray.post("leave", self.session, self.rank)

    # The ranks of `connect`

    def enter(self, token: str, timeout_s: float) -> str:
        """Returns the generation on which all ranks of this name agree.

        Args:
            token: Distinguishes this process from an earlier one of the same rank.
            timeout_s: How long to wait for the other ranks, in seconds.

        Raises:
            DeadlineError: Some ranks did not come in time; the message names them.
            RankDisagreementError: The ranks differ about their number.
        """
        answer = self._enter(token, min(timeout_s, bounds.LONG_WAIT_S))
        if not isinstance(answer, str) and timeout_s > bounds.LONG_WAIT_S:
            logger.warning(
                "Rank %d has waited %g s to connect as %r: %s did not come yet",
                self.rank,
                bounds.LONG_WAIT_S,
                self.ray.actor,
                name_ranks(answer),
            )
            answer = self._enter(token, timeout_s - bounds.LONG_WAIT_S)
        if isinstance(answer, str):
            return answer
        raise DeadlineError(
            f"Expected {self.world_size} ranks to connect as {self.ray.actor!r} within "
            f"{timeout_s:g} s, but ranks {answer} did not come. Start them, or correct world_size",
            rank=self.rank,
        )

    def _enter(self, token: str, timeout_s: float) -> str | list[int]:
        bound = CallBound(timeout_s + bounds.MARGIN_S)
        answer: str | list[int] = self.ask(
            "enter", self.rank, self.world_size, token, timeout_s, bound=bound
        )
        return answer

    # A replica of a run; see `ReplicaQuorum`

    def begin_replica(self, rank: int, world_size: int) -> None:
        """Registers this process as a replica.

        Args:
            rank: Its number.
            world_size: Number of replicas.
        """
        bound = CallBound(bounds.MARGIN_S)
        self.ask("begin_replica", rank, world_size, self.caller, bound=bound)

    def ready(self, request: ReadyToSave) -> SaveQuorum | None:
        """Returns with whom this replica saves a step; None if others do, or did, without it."""
        bound = CallBound(bounds.PRESENT_S + bounds.MARGIN_S)
        found: SaveQuorum | None = self.ask("ready", request, self.caller, bound=bound)
        return found

    def replica_steps(self, rank: int, world_size: int) -> None:
        """Reports that a replica makes its first step; does not wait."""
        self.ray.post("replica_steps", rank, world_size, self.caller)

    def end_replica(self, rank: int) -> None:
        """Reports that a replica saves no more; does not wait."""
        self.ray.post("end_replica", rank, self.caller)

    # Heartbeats

    @property
    def alive(self) -> bool:
        """See `HeartbeatTransport.alive`."""
        return bool(ray.is_initialized())

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """See `HeartbeatTransport.in_thread`."""
        self._begin()
        with ray_calls.starting_no_ray():
            yield

    def send_heartbeat(self, beat: Heartbeat) -> Any:
        """See `HeartbeatTransport.send_heartbeat`."""
        actor = self.ray.coordinator(self._fresh)
        self._fresh, self._actor_id = False, ray_calls.id_of(actor)
        with ray_calls.inside():
            return actor.beat.remote(beat)

    def wait(self, sent: Sequence[Any], wait_s: float) -> list[Any]:
        """See `HeartbeatTransport.wait`."""
        done, _ = ray_calls.wait([*sent], num_returns=1, timeout=wait_s)
        return done

    def ack(self, ref: Any) -> HeartbeatAck | None:
        """See `HeartbeatTransport.ack`."""
        try:
            ack: HeartbeatAck = ray_calls.get(ref)
        except RayTaskError:
            raise  # it lives, and has an error of its own
        except RayError as error:
            self._fresh = isinstance(error, ActorDiedError)
            return None
        self._pulse, self._num_restarts = None, ack.num_restarts
        return ack

    # The coordinator's end

    def has_ended(self, last: HeartbeatAck | None) -> bool:
        """Returns whether the incarnation that answered last has ended, by Ray's tables."""
        if last is None:
            return False
        try:
            return ray_calls.life_of(last.actor_id).num_restarts != last.num_restarts
        except (CheckpointError, RayError):
            return False

    def _last_pulse(self) -> str | None:
        """Returns what the coordinator last wrote to the control store; None if unknown."""
        with suppress(CheckpointError, RayError):
            return ray_calls.recall(pulse_name(self._name)) or None
        return None

    def _replace(self, num_restarts: int, last: HeartbeatAck | None) -> None:
        """Makes Ray kill the frozen incarnation and start the next one.

        *Why*: all saves of this session would fail until somebody killed it by hand. If it thaws
        meanwhile, that does no harm: the next incarnation has a higher epoch.
        """
        with suppress(CheckpointError, RayError, ValueError):
            if not self.has_ended(last):
                ray_calls.kill(self.ray.coordinator(), no_restart=False)
                self._killed_s, self._killed_restarts = time.monotonic(), num_restarts

    @property
    def _is_being_replaced(self) -> bool:
        return time.monotonic() < self._killed_s + bounds.KILL_S

    def may_continue(self, key: OpKey) -> bool:
        """See `HeartbeatTransport.may_continue`."""
        if not self._is_being_replaced:
            return False
        # Why only with a plan: without one, the next incarnation does not know the save, and to
        # wait until Ray has ended a stopped process would take many seconds more.
        with suppress(CheckpointError, RayError):
            return bool(ray_calls.recall(staged_plan_name(self._name, key)))
        return True

    def silence(self, silent_s: float, timeout_s: float, state: SenderState) -> Silence:
        """See `HeartbeatTransport.silence`."""
        if self._pulse is None and silent_s > timeout_s / 2:
            self._pulse = self._last_pulse()
        if silent_s <= timeout_s:
            return Silence("none")
        heard, life = state.last, ray_calls.life_of(self._actor_id)
        before, self._num_restarts = self._num_restarts, life.num_restarts
        ends = heard is not None and heard.num_restarts == life.num_restarts
        is_killed = self._is_being_replaced and life.num_restarts == self._killed_restarts
        # Why the second: the heartbeats without an answer were sent to the one before.
        late = (is_killed and heard is None) or before not in (None, life.num_restarts)
        if late or not (life.is_running or ends):
            # Why: one that is being started, or started anew, is late and not frozen. One that
            # has answered and is just being ended, as another rank found it frozen, is.
            return Silence("late")
        # Why: one that this rank alone can't reach works for all others.
        lives = self._pulse is not None and self._last_pulse() not in (None, self._pulse)
        if not state.is_frozen and not lives:
            self._replace(life.num_restarts, heard)
        if lives:
            why = (
                f"it lives, as Ray's control store says: rank {self.rank} can't reach it. Look at "
                f"the network between the two nodes, and call again"
            )
        else:
            why = (
                "its process is frozen (stopped, swapped out, or a thread holds the GIL). Another "
                "takes its place: call again; raise heartbeat_timeout_s if such pauses are normal"
            )
        return Silence("frozen", why)
