"""`RaySession`: the session of a rank that is connected to a Ray; its coordinator is an actor."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from ray_dcp.commit_protocol.error_aggregation import name_ranks
from ray_dcp.commit_protocol.liveness import LONG_WAIT_S
from ray_dcp.commit_protocol.messages import Reply, Request
from ray_dcp.core.checks import check_above_0
from ray_dcp.errors import CheckpointError, DeadlineError
from ray_dcp.runtime import ray_private
from ray_dcp.runtime.actor_names import LEASE_S, NAMESPACE
from ray_dcp.runtime.coordinator import coordinator_of
from ray_dcp.runtime.coordinator_call import call_actor
from ray_dcp.runtime.gatherer import GatheredCalls
from ray_dcp.runtime.process_group import announce_connect
from ray_dcp.runtime.ray_heartbeat import RayHeartbeatSender
from ray_dcp.runtime.session import MARGIN_S, Connection, Session, sessions
from ray_dcp.runtime.staging import RankStaging
from ray_dcp.stage.values import StagerOptions

logger = logging.getLogger(__name__)


class RaySession(Session):
    """A session over an actor of the Ray that this process is connected to.

    It owns nothing but its place.

    Args:
        name: As for `Session`.
        rank: As there.
        world_size: As there.
        actor: What the coordinator is called after; the session's name by default.
        namespace: Ray namespace of the coordinator.
        lease_s: How long an unused coordinator stays, in seconds.
    """

    stages_itself = False

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        actor: str | None = None,
        namespace: str = NAMESPACE,
        lease_s: float = LEASE_S,
    ) -> None:
        self._actor = actor or name
        self.namespace = namespace
        self.lease_s = check_above_0(lease_s, "lease_s")
        self._me = ray_private.this_caller(os.getpid())
        node, _ = ray_private.this_connection() or ("", "")
        who = f"the coordinator of session {self._actor!r}"
        super().__init__(
            name,
            rank,
            world_size,
            who=who,
            node=node,
            heartbeats=RayHeartbeatSender(self._reach, name, rank, who, self._actor),
        )
        self._staging: RankStaging | None = None
        self._staging_lock = threading.Lock()
        self._handle: Any = None
        self.connection = Connection(repr(self), rank)
        self._gathered = GatheredCalls(rank, world_size, self._actor, namespace, lease_s)

    def staging(self, options: StagerOptions | None = None) -> RankStaging:
        """Returns this rank's place at its node's stager, made on first use.

        Args:
            options: For a stager that is made now.

        Raises:
            ParticipantError: No stager starts.
        """
        self._check_open()
        self.connection.check()
        with self._staging_lock:
            if self._staging is None:
                self._staging = RankStaging(
                    f"{self.name}:{self.rank}",
                    namespace=self.namespace,
                    lease_s=self.lease_s,
                    options=options,
                )
            return self._staging

    def coordinator(self) -> Any:
        """Returns the handle of the coordinator."""
        return self._reach(False)

    def register(self) -> None:
        """Registers this rank with the coordinator, which then detects its death.

        Raises:
            ParticipantError: The coordinator is out of reach.
        """
        self._check_open()
        self._ask("register", self.name, self.rank, self._caller, timeout_s=MARGIN_S)

    def enter(self, token: str, timeout_s: float) -> str:
        """Returns the generation on which this rank and all others of the name agree.

        Args:
            token: Tells this process from an earlier one of the same rank.
            timeout_s: How long to wait for the others, in seconds.

        Raises:
            DeadlineError: Some rank did not come in time; the message names them.
            RankDisagreementError: The ranks differ about their number.
        """
        answer = self._enter(token, min(timeout_s, LONG_WAIT_S))
        if not isinstance(answer, str) and timeout_s > LONG_WAIT_S:
            logger.warning(
                "Rank %d has waited %g s to connect as %r: %s did not come yet",
                self.rank,
                LONG_WAIT_S,
                self._actor,
                name_ranks(answer),
            )
            answer = self._enter(token, timeout_s - LONG_WAIT_S)
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
            timeout_s=timeout_s + MARGIN_S,
        )
        return answer

    @property
    def _caller(self) -> ray_private.Caller:
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

    def _batched(self, request: Request, silence_s: float | None) -> Reply | None:
        return self._gathered.call(request, self._caller, silence_s)

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
            self._reach,
            lambda actor: getattr(actor, method).remote(*arguments),
            timeout_s=timeout_s,
            rank=self.rank,
            given_up=given_up,
            uncounted_s=uncounted_s,
        )

    def _reach(self, fresh: bool) -> Any:
        self.connection.check()
        with self._lock:
            if fresh or self._handle is None:
                self._handle = coordinator_of(
                    self._actor, namespace=self.namespace, lease_s=self.lease_s
                )
            return self._handle
