"""How a rank of a large job calls its coordinator: through its group's gatherer, if that helps.

A gatherer that is dead, frozen or slow costs time and nothing else: the rank sends the same request
to the coordinator itself, which recognises a request that arrives twice.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ray_dcp.protocol import aggregation
from ray_dcp.protocol.messages import Reply, Request

if TYPE_CHECKING:
    from ray_dcp.runtime.ray_private import Caller


LOOK_S = 0.5
"""How often a call that waits looks whether Ray is still up, in seconds."""

PATIENCE_S = 60.0
"""How long a rank that sends no heartbeats waits for an answer before it calls the coordinator
itself, in seconds; one that sends them waits for its `heartbeat_timeout_s`."""

ALIVE_S = 5.0
"""How long a gatherer may take to say that it lives, in seconds."""

logger = logging.getLogger(__name__)


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
        self._world_size = world_size
        self._coordinator = coordinator
        self._namespace = namespace
        self._lease_s = lease_s
        self._handle: Any = None
        self._is_frozen = False

    def call(self, request: Request, caller: Caller, beats_s: float | None) -> Reply | None:
        """Returns the reply to a request; None where the rank has to ask the coordinator itself.

        Args:
            request: Of this rank.
            caller: Who this rank is for Ray.
            beats_s: See `Session.call`.
        """
        if not 0 <= self._rank < self._world_size or not aggregation.is_gathered(request):
            return None
        ranks = aggregation.group_of(self._rank, self._world_size, aggregation.MOST_GATHERERS)
        if ranks is None or self._is_frozen:
            return None
        import ray
        from ray.exceptions import RayError

        from ray_dcp.runtime import ray_calls, ray_private

        if not ray.is_initialized():
            return None
        from ray_dcp.runtime.gatherer import gatherer_of

        end_s = time.monotonic() + (PATIENCE_S if beats_s is None else beats_s)
        try:
            if self._handle is None:
                self._handle = gatherer_of(
                    self._coordinator, ranks, namespace=self._namespace, lease_s=self._lease_s
                )
            with ray_private.starting_no_ray(), ray_calls.inside():
                answer = self._handle.call.remote(request, caller, beats_s)
            while ray.is_initialized():
                left_s = end_s - time.monotonic()
                done, _ = ray_calls.wait([answer], timeout=max(0.0, min(left_s, LOOK_S)))
                if done:
                    reply: Reply | None = ray_calls.get(answer)
                    return reply
                if left_s <= 0:
                    self._doubt()
                    return None
        except (RayError, ConnectionError, ValueError) as error:
            logger.info("Rank %d calls its coordinator itself: %s", self._rank, error)
            self._handle = None
        return None

    def close(self) -> None:
        """Tells the gatherer that this rank will not call again. Never raises."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        import ray

        if ray.is_initialized():
            with suppress(Exception):
                handle.leave.remote(self._rank)

    def _doubt(self) -> None:
        """Looks whether the gatherer lives: one that is frozen is not asked again."""
        from ray_dcp.runtime import ray_calls

        with ray_calls.inside():
            asked = self._handle.pid.remote()
        done, _ = ray_calls.wait([asked], timeout=ALIVE_S)
        self._is_frozen = not done
        if not done:
            logger.warning("The gatherer of rank %d is frozen; it is not used again", self._rank)
