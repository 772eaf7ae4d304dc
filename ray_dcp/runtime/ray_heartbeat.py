"""`RayHeartbeatSender`: heartbeats to a coordinator that is an actor, which Ray may start anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.errors import CheckpointError
from ray_dcp.runtime import ray_calls, ray_private
from ray_dcp.runtime.actor_names import coordinator_name, pulse_name
from ray_dcp.runtime.heartbeat import HeartbeatSender

KILL_S = 15.0
"""Seconds that a process which is being ended may take, before it counts as frozen again: Ray
asks it first, and one that is stopped does not answer."""


class RayHeartbeatSender(HeartbeatSender):
    """Sends heartbeats to an actor; has Ray replace one that is frozen.

    Args:
        reach: Returns the coordinator's handle; its argument asks for a fresh one.
        session: Name of the session.
        rank: This rank.
        who: The coordinator in words, for errors.
        actor: What the coordinator is called after.
    """

    def __init__(
        self, reach: Callable[[bool], Any], session: str, rank: int, who: str, actor: str = ""
    ) -> None:
        self._reach = reach
        self._pulse_name = pulse_name(coordinator_name(actor))
        self._num_restarts: int | None = None
        """Of the coordinator, when it was seen last."""
        self._killed_s, self._killed_restarts = float("-inf"), 0
        super().__init__(session, rank, who)

    def _begin(self) -> None:
        super()._begin()
        self._fresh = False
        self._actor_id = ""
        self._pulse: str | None = None

    @property
    def _is_up(self) -> bool:
        return bool(ray.is_initialized())

    @ray_private.starting_no_ray()
    def _send_all(self) -> None:
        super()._send_all()

    def _send(self, beat: Heartbeat) -> Any:
        actor = self._reach(self._fresh)
        self._fresh, self._actor_id = False, ray_private.id_of(actor)
        with ray_calls.inside():
            return actor.beat.remote(beat)

    def _answered(self, wait_s: float) -> list[Any]:
        done, _ = ray_calls.wait([*self._sent], num_returns=1, timeout=wait_s)
        return done

    def _ack_of(self, ref: Any) -> HeartbeatAck | None:
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

    def _is_gone(self) -> bool:
        """Whether the incarnation that answered last has ended, by Ray's tables."""
        heard = self._ack
        if heard is None:
            return False
        try:
            return ray_private.life_of(heard.actor_id).num_restarts != heard.num_restarts
        except (CheckpointError, RayError):
            return False

    def _last_pulse(self) -> str | None:
        """Returns what the coordinator last wrote to the control store; None where unknown."""
        with suppress(CheckpointError, RayError):
            return ray_private.recall(self._pulse_name) or None
        return None

    def _replace(self, num_restarts: int) -> None:
        """Has Ray end the incarnation that is frozen, and start the next.

        *Why*: all that is saved in this session would fail until somebody killed it by hand. That
        it thaws meanwhile does no harm: the next one has a higher epoch.
        """
        with suppress(CheckpointError, RayError, ValueError):
            if not self._is_gone():
                ray_calls.kill(self._reach(False), no_restart=False)
                self._killed_s, self._killed_restarts = time.monotonic(), num_restarts

    @property
    def _is_being_replaced(self) -> bool:
        return time.monotonic() < self._killed_s + KILL_S

    def _check_coordinator(self, timeout_s: float) -> None:
        now_s, silent_s = self._clock(), self._silent_s
        if self._pulse is None and silent_s > timeout_s / 2:
            self._pulse = self._last_pulse()
        if silent_s <= timeout_s:
            return
        heard, life = self._ack, ray_private.life_of(self._actor_id)
        before, self._num_restarts = self._num_restarts, life.num_restarts
        ends = heard is not None and heard.num_restarts == life.num_restarts
        is_killed = self._is_being_replaced and life.num_restarts == self._killed_restarts
        # Why the second: the heartbeats without an answer were sent to the one before.
        late = (is_killed and heard is None) or before not in (None, life.num_restarts)
        if late or not (life.is_running or ends):
            # Why: one that is being started, or started anew, is late and not frozen. One that
            # has answered and is just being ended, as another rank found it frozen, is.
            self._sent = {ref: (now_s, beat) for ref, (_, beat) in self._sent.items()}
            return
        # Why: one that this rank alone can't reach works for all others.
        lives = self._pulse is not None and self._last_pulse() not in (None, self._pulse)
        if self._frozen is None and not lives:
            self._replace(life.num_restarts)
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
        self._frozen = self._silent(silent_s, why)
        self._abandon(self._frozen)
