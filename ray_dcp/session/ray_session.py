"""`RaySession`: the session of a rank that is connected to a Ray; its coordinator is an actor.

`attach` and `attach_named` connect this process to a Ray that the user named, and never to one that
happens to run on this machine. They restore what `ray.init` changes in the process (signal
handlers, logging). `RayHeartbeats` carries heartbeats to the actor, which Ray may restart.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.commit_protocol.messages import OpKey, Reply, Request, SaveJoin
from ray_dcp.commit_protocol.replica_quorum import ReadyToSave, SaveQuorum
from ray_dcp.coordinator.actor import coordinator_of
from ray_dcp.coordinator.gatherer import GatheredCalls
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError, DeadlineError, InvalidRequestError, ParticipantError
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls
from ray_dcp.session.heartbeat import (
    HeartbeatSender,
    HeartbeatTransport,
    SenderState,
    Silence,
)
from ray_dcp.session.job_store import announce_connect
from ray_dcp.session.names import NAMESPACE, coordinator_name, pulse_name, staged_plan_name
from ray_dcp.session.ray_calls import call_actor
from ray_dcp.session.session import Connection, Session, named_address, sessions
from ray_dcp.session.shared_reads import RayPeers
from ray_dcp.stage.link import RankStaging
from ray_dcp.stage.stager_options import StagerOptions
from ray_dcp.store.environment import StorageVariables


def attached_address() -> str | None:
    """Returns the address of the cluster that this process is connected to, or None."""
    if not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def attach_named(address: str | None) -> str | None:
    """Connects to the cluster that was named, and returns its address.

    Args:
        address: The caller's argument; if None, `RAY_ADDRESS` applies.

    Returns:
        None if no cluster was named and this process is not connected to one.

    Raises:
        InvalidRequestError: The process is already connected to another cluster.
        ParticipantError: The cluster can't be reached.
    """
    connected = attached_address()
    if connected is not None:
        if address not in (None, "auto", connected):
            raise InvalidRequestError(
                f"Expected this process to use the Ray at {address}, but it is connected to the "
                f"one at {connected}. Leave the address out, or call ray.shutdown() first",
                key="address",
            )
        return connected
    named = address or named_address()
    if named is None:
        return None
    _init(named)
    return attached_address()


def num_free_cpus() -> int:
    """Returns the number of CPUs that nobody uses now in the cluster of this process."""
    return int(ray.available_resources().get("CPU", 0))


def attach(address: str) -> None:
    """Connects to the Ray that the job's first rank named.

    Args:
        address: `host:port` of the cluster's control store.

    Raises:
        ParticipantError: This process is connected to another Ray, or can't reach this one.
    """
    connected = attached_address()
    if connected == address:
        return
    if connected is not None:
        raise ParticipantError(
            f"Expected all ranks in one Ray, but the group's first rank is in the one at "
            f"{address} and this process in the one at {connected}. Connect every "
            f"rank to the same cluster (ray.init(address=...)), or none"
        )
    _init(address)


def _init(address: str) -> None:
    try:
        with ray_calls.signal_handlers_kept():
            _probe(address)
            ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
            )
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ParticipantError(
            f"Expected a Ray cluster at {address}, but connecting gave {type(error).__name__}: "
            f"{error}. Start it, or correct the address (argument or RAY_ADDRESS)"
        ) from error


def _probe(address: str) -> None:
    """Raises `OSError` if nothing listens at `host:port`; Ray itself retries for many minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():  # else a word that only Ray knows, such as "auto"
        socket.create_connection((host.strip("[]"), int(port)), bounds.PROBE_S).close()


class RayHeartbeats(HeartbeatTransport):
    """Carries heartbeats to an actor; has Ray replace one that is frozen.

    Args:
        reach: Returns the coordinator's handle; its argument requests a fresh one.
        rank: This rank, for errors.
        coordinator: Actor name of the coordinator.
    """

    def __init__(self, reach: Callable[[bool], Any], rank: int = 0, coordinator: str = "") -> None:
        self._reach = reach
        self._rank = rank
        self._coordinator = coordinator
        self._num_restarts: int | None = None
        """Of the coordinator, when it was seen last."""
        self._killed_s, self._killed_restarts = float("-inf"), 0
        self._begin()

    def _begin(self) -> None:
        """Resets the state of an earlier thread."""
        self._fresh = False
        self._actor_id = ""
        self._pulse: str | None = None

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """See `HeartbeatTransport.in_thread`."""
        self._begin()
        with ray_calls.starting_no_ray():
            yield

    @property
    def alive(self) -> bool:
        """Whether this process is connected to a Ray."""
        return bool(ray.is_initialized())

    def send(self, beat: Heartbeat) -> Any:
        """See `HeartbeatTransport.send`."""
        actor = self._reach(self._fresh)
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
            return ray_calls.recall(pulse_name(self._coordinator)) or None
        return None

    def _replace(self, num_restarts: int, last: HeartbeatAck | None) -> None:
        """Makes Ray kill the frozen incarnation and start the next one.

        *Why*: all saves of this session would fail until somebody killed it by hand. If it thaws
        meanwhile, that does no harm: the next incarnation has a higher epoch.
        """
        with suppress(CheckpointError, RayError, ValueError):
            if not self.has_ended(last):
                ray_calls.kill(self._reach(False), no_restart=False)
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
            return bool(ray_calls.recall(staged_plan_name(self._coordinator, key)))
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
                f"it lives, as Ray's control store says: rank {self._rank} can't reach it. Look at "
                f"the network between the two nodes, and call again"
            )
        else:
            why = (
                "its process is frozen (stopped, swapped out, or a thread holds the GIL). Another "
                "takes its place: call again; raise heartbeat_timeout_s if such pauses are normal"
            )
        return Silence("frozen", why)


logger = logging.getLogger(__name__)


class RaySession(Session):
    """A session over an actor of the Ray that this process is connected to.

    Args:
        name: As for `Session`.
        rank: As for `Session`.
        world_size: As for `Session`.
        actor: Name from which the coordinator's actor name is derived; by default, the session's
            name.
        namespace: Ray namespace of the coordinator.
        lease_s: How long an unused coordinator stays, in seconds.
    """

    stages_itself = False
    connection: Connection
    """Connection of this process to the Ray of its coordinator."""

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        actor: str | None = None,
        namespace: str = NAMESPACE,
        lease_s: float = bounds.ACTOR_LEASE_S,
    ) -> None:
        self._actor = actor or name
        self.namespace = namespace
        self.lease_s = check_above_0(lease_s, "lease_s")
        self._me = ray_calls.this_caller(os.getpid())
        node, _ = ray_calls.this_connection() or ("", "")
        who = f"the coordinator of session {self._actor!r}"
        super().__init__(name, rank, world_size, who=who, node=node)
        self._heartbeats = HeartbeatSender(
            RayHeartbeats(self._look_up, rank, coordinator_name(self._actor, namespace)),
            name,
            rank,
            who,
        )
        self._staging: RankStaging | None = None
        self._staging_lock = threading.Lock()
        self._handle: Any = None
        self._variables: StorageVariables | None = None
        self.connection = Connection(repr(self), rank)
        self._gathered = GatheredCalls(rank, world_size, self._actor, namespace, lease_s)

    def staging(self, options: StagerOptions | None = None) -> RankStaging:
        """Returns this rank's connection to its node's stager, created on first use.

        Args:
            options: Options of a stager that is created now.

        Raises:
            ParticipantError: No stager starts.
        """
        self._check_open()
        self.connection.check()
        with self._staging_lock:
            if self._staging is None:
                self._staging = RankStaging(
                    f"{self.name}:{self.rank}",
                    job=ray_calls.job_of(self._actor),
                    namespace=self.namespace,
                    lease_s=self.lease_s,
                    options=options,
                )
            return self._staging

    @property
    def is_outlived(self) -> bool:
        """See `Session.is_outlived`."""
        return self.closed or self.connection.is_replaced

    def coordinator(self) -> Any:
        """Returns the handle of the coordinator."""
        return self._look_up(False)

    def peers(self) -> RayPeers | None:
        """See `Session.peers`.

        Raises:
            ParticipantError: This process has shut down the Ray of the session.
        """
        # Why: a call of Ray in a process that is not connected starts another cluster.
        self.connection.check()
        return RayPeers(self.coordinator)

    def register(self) -> None:
        """Registers this rank with the coordinator, which then detects its death.

        Raises:
            ParticipantError: The coordinator is out of reach.
        """
        self._check_open()
        self._ask("register", self.name, self.rank, self._sender, timeout_s=bounds.MARGIN_S)

    def call(self, request: Request, *, silence_s: float | None = None) -> Reply:
        """See `Session.call`."""
        if self.rank == 0 and isinstance(request, SaveJoin):
            self._renew_variables()
        return super().call(request, silence_s=silence_s)

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
                self._actor,
                name_ranks(answer),
            )
            answer = self._enter(token, timeout_s - bounds.LONG_WAIT_S)
        if isinstance(answer, str):
            return answer
        raise DeadlineError(
            f"Expected {self.world_size} ranks to connect as {self._actor!r} within "
            f"{timeout_s:g} s, but ranks {answer} did not come. Start them, or correct world_size",
            rank=self.rank,
        )

    def _enter(self, token: str, timeout_s: float) -> str | list[int]:
        answer: str | list[int] = self._ask(
            "enter",
            self.rank,
            self.world_size,
            token,
            timeout_s,
            timeout_s=timeout_s + bounds.MARGIN_S,
        )
        return answer

    @property
    def _sender(self) -> ray_calls.Caller:
        return self._me

    def _close(self) -> None:
        if sessions.explicit is self:
            announce_connect(False)
            sessions.explicit = None
        self._gathered.close()
        if self._staging is not None:
            self._staging.close()
        if self._handle is not None and self.connection.is_up:
            self._handle.leave.remote(self.name, self.rank)

    # A replica of a run; see `ReplicaQuorum`

    def begin_replica(self) -> None:
        """Registers this process as the replica of `own_values`."""
        self._ask("begin_replica", *self.own_values, self._sender, timeout_s=bounds.MARGIN_S)

    def ready(self, request: ReadyToSave) -> SaveQuorum | None:
        """Returns with whom this replica saves a step; None if others do, or did, without it."""
        found: SaveQuorum | None = self._ask(
            "ready", request, self._sender, timeout_s=bounds.PRESENT_S + bounds.MARGIN_S
        )
        return found

    def replica_steps(self) -> None:
        """Reports that this replica makes its first step; does not wait."""
        if self._handle is not None and self.connection.is_up:
            self._handle.replica_steps.remote(*self.own_values, self._sender)

    def end_replica(self) -> None:
        """Reports that this replica saves no more; does not wait."""
        if self._handle is not None and self.connection.is_up:
            self._handle.end_replica.remote(self.own_values[0], self._sender)

    def _call_gatherer(self, request: Request, silence_s: float | None) -> Reply | None:
        return self._gathered.call(request, self._sender, silence_s)

    def _ask(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        given_up: Callable[[bool], CheckpointError | None] = lambda _: None,
        uncounted_s: Callable[[], float] = lambda: 0.0,
    ) -> Any:
        return call_actor(
            self._who,
            self._look_up,
            lambda actor: getattr(actor, method).remote(*arguments),
            timeout_s=timeout_s,
            rank=self.rank,
            given_up=given_up,
            uncounted_s=uncounted_s,
        )

    def _renew_variables(self) -> None:
        """Passes the coordinator what storages read in the environment, if that has changed."""
        self.connection.check()  # else Ray would start anew where it was shut down
        variables = ray_calls.storage_variables()
        if self._variables is not None and variables.values != self._variables.values:
            self._ask("renew", variables, timeout_s=bounds.MARGIN_S)
            self._variables = variables

    def _look_up(self, fresh: bool) -> Any:
        self.connection.check()
        with self._lock:
            if fresh or self._handle is None:
                self._variables = ray_calls.storage_variables()
                self._handle = coordinator_of(
                    self._actor,
                    namespace=self.namespace,
                    lease_s=self.lease_s,
                    variables=self._variables,
                )
            return self._handle
