"""`RayActors`: the actors of a session in a Ray, as one rank reaches them."""

from __future__ import annotations

import threading
from typing import Any

from ray_dcp.coordinator.actor import coordinator_of
from ray_dcp.options import check_above_0
from ray_dcp.session import ray_calls
from ray_dcp.session.connection import Connection
from ray_dcp.session.membership import Membership
from ray_dcp.session.shared_reads import RayPeers
from ray_dcp.stage.link import RankStaging
from ray_dcp.stage.stager_options import StagerOptions
from ray_dcp.store.environment import StorageVariables


class RayActors:
    """The coordinator of a session, and the stager of this rank's node. Thread-safe.

    Args:
        name: Name of the session, and of this rank in it.
        member: This rank in the session.
        rank: This rank.
        actor: Name from which the coordinator's actor name is derived.
        namespace: Ray namespace of the actors.
        lease_s: How long an unused actor stays, in seconds.

    Attributes:
        connection: Connection of this process to the Ray of the actors.
        variables: What storages read in the environment, as the coordinator was told last; None if
            it was not reached yet.
    """

    def __init__(
        self,
        name: str,
        member: Membership,
        rank: int,
        *,
        actor: str,
        namespace: str,
        lease_s: float,
    ) -> None:
        self.actor, self.namespace = actor, namespace
        self.lease_s = check_above_0(lease_s, "lease_s")
        self.connection = Connection(repr(member), rank)
        self.variables: StorageVariables | None = None
        self._name, self._member = name, member
        self._lock, self._staging_lock = threading.Lock(), threading.Lock()
        self._coordinator: Any = None
        self._staging: RankStaging | None = None

    def coordinator(self, fresh: bool = False) -> Any:
        """Returns the handle of the coordinator.

        Args:
            fresh: Whether to look it up again, as the last one is dead.

        Raises:
            ParticipantError: This process has shut down the Ray of the session.
        """
        self.connection.check()
        with self._lock:
            if fresh or self._coordinator is None:
                self.variables = ray_calls.storage_variables()
                self._coordinator = coordinator_of(
                    self.actor,
                    namespace=self.namespace,
                    lease_s=self.lease_s,
                    variables=self.variables,
                )
            return self._coordinator

    def post(self, method: str, *arguments: Any) -> None:
        """Calls a method of the coordinator, if it was ever reached, without waiting for it."""
        if self._coordinator is not None and self.connection.is_up:
            getattr(self._coordinator, method).remote(*arguments)

    def staging(self, options: StagerOptions | None = None) -> RankStaging:
        """Returns this rank's connection to its node's stager, created on first use.

        Args:
            options: Options of a stager that is created now.

        Raises:
            ParticipantError: No stager starts.
        """
        self._member.check()
        self.connection.check()
        with self._staging_lock:
            if self._staging is None:
                self._staging = RankStaging(
                    self._name,
                    job=ray_calls.job_of(self.actor),
                    namespace=self.namespace,
                    lease_s=self.lease_s,
                    options=options,
                )
            return self._staging

    def peers(self) -> RayPeers:
        """Returns the other ranks, for shared reads.

        Raises:
            ParticipantError: This process has shut down the Ray of the session.
        """
        # Why: a call of Ray in a process that is not connected starts another cluster.
        self.connection.check()
        return RayPeers(self.coordinator)

    def close(self) -> None:
        """Leaves the stager."""
        if self._staging is not None:
            self._staging.close()
