"""`HeartbeatSender`: sends heartbeats to the coordinator while this rank saves or loads.

It reports what the coordinator can't see: that this process lives, and its progress. It also
detects what the thread that writes can't see: that the coordinator is frozen or gone, or that the
save has failed elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from ray_dcp.commit_protocol.liveness import AwakeClock, Heartbeat, HeartbeatAck, beat_interval_s
from ray_dcp.commit_protocol.messages import Refused
from ray_dcp.errors import CheckpointError, DeadlineError, ParticipantError
from ray_dcp.io.threads import Stop
from ray_dcp.runtime import private_ray, ray_calls, ray_private
from ray_dcp.runtime.rank_progress import RankProgress

FIRST_HEARTBEAT_S = 1.0
"""A call of the user that is over before this many seconds sends no heartbeat at all."""

TICK_S = 1.0
"""How long the sender waits at most before it checks again, in seconds."""

KILL_S = 15.0
"""Seconds that a process which is being ended may take, before it counts as frozen again: Ray
asks it first, and one that is stopped does not answer."""

MOST_UNANSWERED = 3
"""Heartbeats that are sent without an answer; a coordinator that is frozen gets no more."""

logger = logging.getLogger(__name__)


class HeartbeatSender:
    """Sends heartbeats for all calls of one session, in one thread that ends with the last.

    Args:
        reach: Returns the coordinator's handle; its argument asks for a fresh one.
        session: Name of the session.
        rank: This rank.
        who: The coordinator in words, for errors.
    """

    def __init__(self, reach: Callable[[bool], Any], session: str, rank: int, who: str) -> None:
        self._reach = reach
        self._session = session
        self._rank = rank
        self._who = who
        self._own = private_ray.joined()
        self._changed = threading.Condition()
        self._active: dict[RankProgress, float] = {}
        self._thread: threading.Thread | None = None
        self._first_send_s = 0.0
        self._ack: HeartbeatAck | None = None
        self._frozen: CheckpointError | None = None
        self._num_restarts: int | None = None
        """Of the coordinator, when it was seen last."""
        self._killed_s, self._killed_restarts = float("-inf"), 0
        self._begin()

    def _begin(self) -> None:
        """Forgets what an earlier thread had sent."""
        self._clock = AwakeClock(time.monotonic, TICK_S)
        self._sent: dict[Any, float] = {}
        self._watches: dict[Any, Stop] = {}
        self._answered: set[Stop] = set()
        self._phases: list[str] = []
        self._next_s = 0.0
        self._fresh = False
        self._actor_id = ""

    def add(self, progress: RankProgress, timeout_s: float) -> None:
        """Begins to send heartbeats for a call of the user.

        Args:
            progress: Of that call.
            timeout_s: Silence that means a frozen process, for either side, in seconds.
        """
        with self._changed:
            if not self._active:
                first_s = min(FIRST_HEARTBEAT_S, beat_interval_s(timeout_s))
                self._first_send_s = time.monotonic() + first_s
                self._frozen = self._ack = None
            self._active[progress] = timeout_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray_dcp beats", daemon=True)
                self._thread.start()

    def remove(self, progress: RankProgress) -> None:
        """Ends that; with the last one the thread ends, within `TICK_S`."""
        with self._changed:
            self._active.pop(progress, None)
            self._changed.notify_all()

    def failure(
        self, out_of_reach: bool, outlives_restart: bool, goes_on: bool = False
    ) -> CheckpointError | None:
        """Returns why the coordinator will not answer any more; None while it may.

        Args:
            out_of_reach: A call failed.
            outlives_restart: The next incarnation of the coordinator can answer as well.
            goes_on: The next one goes on with the operation: a frozen one is no
                failure while another takes its place.
        """
        if self._frozen is not None and not (goes_on and self._is_being_replaced):
            return self._frozen
        if out_of_reach and not outlives_restart and self._is_gone():
            return self._died()
        return None

    # In the thread

    def _run(self) -> None:
        while True:
            try:
                self._begin()
                self._send_all()
            except SystemExit:  # Ray was shut down under this thread
                return
            except Exception as error:  # noqa: BLE001 - a rank without beats would be blamed
                logger.warning("Beating to %s failed, and is tried again: %r", self._who, error)
            with self._changed:
                if not self._active:
                    self._thread = None
                    return
                self._changed.wait(TICK_S)

    def _is_gone(self) -> bool:
        """Whether the incarnation that answered last has ended, by Ray's tables."""
        heard = self._ack
        if heard is None:
            return False
        try:
            return ray_private.life_of(heard.actor_id).num_restarts != heard.num_restarts
        except (CheckpointError, RayError):
            return False

    def _abandon(self, error: CheckpointError) -> None:
        """Ends what moves bytes for a coordinator that will never answer."""
        with self._changed:
            working = [progress for progress in self._active if progress.is_working]
        for progress in working:
            progress.abandon(error)

    def _died(self) -> ParticipantError:
        where = f" ({self._ack.place})" if self._ack else ""
        return ParticipantError(
            f"Expected {self._who} to live until the end, but its process{where} died. Call again",
            rank=self._rank,
        )

    def _is_silent(self, silent_s: float) -> DeadlineError:
        where = f" ({self._ack.place})" if self._ack else ""
        return DeadlineError(
            f"Expected {self._who}{where} to answer beats, but it has not for {silent_s:.0f} s: "
            f"its process is frozen (stopped, swapped out, or a thread holds the GIL). Another "
            f"takes its place: call again; raise heartbeat_timeout_s if such pauses are normal",
            rank=self._rank,
        )

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

    @ray_private.starting_no_ray()
    def _send_all(self) -> None:
        while True:
            with self._changed:
                if not self._active or not ray.is_initialized():
                    return
                active = dict(self._active)
                wait_s = max(self._first_send_s - time.monotonic(), 0.0)
                if wait_s > 0:
                    self._changed.wait(min(wait_s, TICK_S))
                    self._clock.tick()
                    continue
            if self._own is not None and self._own.is_lost:
                self._abandon(self._own.lost(self._rank))
                return
            timeout_s = min(active.values())
            interval_s = beat_interval_s(timeout_s)
            now_s = self._clock.tick()
            # A phase that has begun since the last heartbeat should be known soon.
            is_new = [progress.phase for progress in active] != self._phases
            due = now_s >= self._next_s or is_new
            if due and len(self._sent) < MOST_UNANSWERED:
                self._send(active, timeout_s, now_s)
                self._next_s = now_s + interval_s
            self._watch(active)
            self._listen(min(interval_s, TICK_S))
            self._check_coordinator(timeout_s)

    def _send(self, active: dict[RankProgress, float], timeout_s: float, now_s: float) -> None:
        actor = self._reach(self._fresh)
        self._fresh, self._actor_id = False, ray_private.id_of(actor)
        doings = tuple(progress.doing for progress in active)
        beat = Heartbeat(self._session, self._rank, timeout_s, doings)
        with ray_calls.inside():
            self._sent[actor.beat.remote(beat)] = now_s
        self._phases = [doing.phase for doing in doings]

    def _watch(self, active: dict[RankProgress, float]) -> None:
        """Asks for the outcome of what this rank works for, once for each."""
        watched = {*self._watches.values(), *self._answered}
        for progress in active:
            key = progress.key if progress.waits_for_others else None
            if key is not None and progress.stop not in watched:
                actor = self._reach(False)
                with ray_calls.inside():
                    ref = actor.watch.remote(key, self._rank)
                self._watches[ref] = progress.stop

    def _listen(self, wait_s: float) -> None:
        refs = [*self._sent, *self._watches]
        if not refs:
            with self._changed:
                self._changed.wait(wait_s)
            return
        done, _ = ray_calls.wait(refs, num_returns=1, timeout=wait_s)
        for ref in done:
            stop = self._watches.pop(ref, None)
            self._sent.pop(ref, None)
            try:
                answer = ray_calls.get(ref)
            except (ActorDiedError, ActorUnavailableError) as error:
                self._fresh = isinstance(error, ActorDiedError)
                # Why: a dead coordinator is not silent, and its plans are lost.
                self._sent.clear()
                if self._is_gone():
                    self._abandon(self._died())
                with self._changed:
                    self._changed.wait(wait_s)
                continue
            if stop is None:
                self._ack, self._frozen = answer, None
                self._num_restarts = answer.num_restarts
                # Why all: whoever answers one lives, and the others may have been lost.
                self._sent.clear()
                for wait in answer.waits:
                    logger.warning("%s", wait)
                continue
            self._answered.add(stop)
            if isinstance(answer, Refused):
                stop.because(answer.error)

    def _check_coordinator(self, timeout_s: float) -> None:
        now_s = self._clock()
        silent_s = now_s - min(self._sent.values(), default=now_s)
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
            self._sent = dict.fromkeys(self._sent, now_s)
            return
        if self._frozen is None:
            self._replace(life.num_restarts)
        self._frozen = self._is_silent(silent_s)
        self._abandon(self._frozen)
