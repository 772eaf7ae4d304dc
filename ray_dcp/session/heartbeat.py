"""`HeartbeatSender`: sends heartbeats to the coordinator while this rank saves or loads.

A heartbeat says what the coordinator can't see: that this process lives, for which operations it is
present, its progress, and which operations it left. The coordinator delays the answer until there
is an outcome or the next heartbeat is due, so that a rank that moves bytes learns at once that the
save failed elsewhere. A coordinator that does not answer is frozen or gone.

One sender serves every session of several processes. What differs is the transport: how a heartbeat
reaches the coordinator, whether that has ended, and what its silence means.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

from ray_dcp.commit_protocol.liveness import (
    AwakeClock,
    Heartbeat,
    HeartbeatAck,
    beat_interval_s,
)
from ray_dcp.commit_protocol.messages import Left, OpKey
from ray_dcp.core import bounds
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import CheckpointError, DeadlineError, LimitError, ParticipantError
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.session.transport import Presence, Transport

FIRST_HEARTBEAT_S = 1.0
"""A call of the user that ends within this time, in seconds, sends no heartbeat."""

TICK_S = 1.0
"""Longest wait of the sender between two checks, in seconds."""

MOST_UNANSWERED = 3
"""Most heartbeats without an answer; a frozen coordinator gets no more."""

logger = logging.getLogger(__name__)


class HeartbeatTransport(Transport):
    """A transport to another process, which carries heartbeats as well.

    The sender's thread uses it; `alive`, `has_ended`, `may_continue` and `ended_error` are for any.
    """

    def presence(self) -> HeartbeatSender:
        """See `Transport.presence`."""
        return HeartbeatSender(self)

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether this process can reach any coordinator."""

    @abstractmethod
    def send_heartbeat(self, beat: Heartbeat) -> Any:
        """Sends a heartbeat; returns a reference to its answer."""

    @abstractmethod
    def wait(self, sent: Sequence[Any], wait_s: float) -> list[Any]:
        """Returns references to heartbeats that were answered or failed.

        Args:
            sent: References to the heartbeats without an answer, in the order in which they were
                sent; at least one.
            wait_s: How long to wait for one of them, in seconds.
        """

    @abstractmethod
    def ack(self, ref: Any) -> HeartbeatAck | None:
        """Returns the answer; None if the heartbeat did not arrive."""

    @abstractmethod
    def has_ended(self, last: HeartbeatAck | None) -> bool:
        """Returns whether the coordinator that answered last has ended.

        Args:
            last: Its answer; None if there was none yet.
        """

    @abstractmethod
    def silence(self, silent_s: float, timeout_s: float, state: SenderState) -> Silence:
        """Returns what the silence of the coordinator means; called in each turn of the sender.

        Args:
            silent_s: How long the oldest heartbeat has been unanswered, in seconds.
            timeout_s: Silence that means a frozen process, in seconds.
            state: What the sender knows of the coordinator.
        """

    def in_thread(self) -> AbstractContextManager[None]:
        """Returns the context in which the sender's thread sends; entering it begins anew."""
        return nullcontext()

    def may_continue(self, key: OpKey) -> bool:
        """Returns whether the coordinator that replaces a frozen one may continue an operation."""
        return False

    def ended_error(self) -> ParticipantError | None:
        """Returns the error of a coordinator that has ended, if the transport has a better one."""
        return None


@dataclass(frozen=True)
class SenderState:
    """What a sender knows of its coordinator."""

    last: HeartbeatAck | None
    """Its last answer; None if there was none yet."""
    is_frozen: bool
    """Whether it counts as frozen already."""


@dataclass(frozen=True)
class Silence:
    """What the silence of a coordinator means."""

    kind: Literal["none", "late", "frozen"]
    """`"late"`: it is being started, and the wait begins anew."""
    why: str = ""
    """Why a frozen one does not answer, and the way out."""


class HeartbeatSender(Presence):
    """Sends heartbeats for all calls of one session, in one thread that ends with the last call.

    Args:
        transport: Carries the heartbeats.
    """

    def __init__(self, transport: HeartbeatTransport) -> None:
        self._transport = transport
        self._session, self._rank = transport.session, transport.rank
        self._who = transport.who
        self._changed = threading.Condition()
        self._active: dict[RankProgress, float] = {}
        self._left: dict[Left, float] = {}
        """Operations that are reported as left, and until when."""
        self._queued_s: dict[int, float] = {}
        """By number of a call: how long its save was in the queue, as far as is known."""
        self._thread: threading.Thread | None = None
        self._first_send_s = 0.0
        self._ack: HeartbeatAck | None = None
        self._frozen: CheckpointError | None = None
        self._begin()

    def _begin(self) -> None:
        """Resets the state of an earlier thread."""
        self._clock = AwakeClock(time.monotonic, TICK_S)
        self._sent: dict[Any, tuple[float, Heartbeat]] = {}
        self._named: object = None
        self._next_s = self._acked_s = 0.0

    def add(self, progress: RankProgress, timeout_s: float) -> None:
        """See `Presence.add`; begins to send heartbeats."""
        with self._changed:
            if not self._active:
                first_s = min(FIRST_HEARTBEAT_S, beat_interval_s(timeout_s))
                self._first_send_s = time.monotonic() + first_s
                self._frozen = self._ack = None
                self._queued_s.clear()
            self._active[progress] = timeout_s
            try:
                self._run_thread()
            except BaseException:  # also Ctrl-C, while the thread starts
                del self._active[progress]
                raise

    def remove(self, progress: RankProgress) -> None:
        """See `Presence.remove`; after the last call, the thread ends within `TICK_S`."""
        with self._changed:
            self._active.pop(progress, None)
            self._changed.notify_all()

    def leave(self, left: Left, wait_s: float) -> None:
        """See `Presence.leave`.

        The thread reports it until a coordinator has received it, for as long as other ranks retry
        their calls: those that had no reply yet begin the operation at the next coordinator.
        """
        with self._changed:
            self._left[left] = time.monotonic() + bounds.OUT_OF_REACH_S
            self._first_send_s = 0.0
            # Suppressed: without a thread the others see that this rank is not present any more.
            with suppress(LimitError):
                self._run_thread()
                self._changed.notify_all()
                self._changed.wait_for(lambda: left not in self._left, wait_s)

    def queued_s(self, key: OpKey) -> float:
        """See `Presence.queued_s`."""
        return self._queued_s.get(key.seq, 0.0)

    def failure(
        self, out_of_reach: bool, outlives_restart: bool, staged: OpKey | None = None
    ) -> CheckpointError | None:
        """See `Presence.failure`."""
        if self._frozen is not None and not (staged and self._transport.may_continue(staged)):
            return self._frozen
        if out_of_reach and not outlives_restart and self._transport.has_ended(self._ack):
            return self._died_error()
        return None

    def _run_thread(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, "ray_dcp beats")

    # In the thread

    def _run(self) -> None:
        with self._changed:
            # Why: who started this thread may have been interrupted before it could note it.
            if self._thread not in (None, threading.current_thread()):
                return
            self._thread = threading.current_thread()
        while True:
            try:
                self._begin()
                with self._transport.in_thread():
                    self._send_all()
            except SystemExit:  # Ray was shut down under this thread
                return
            except Exception as error:  # noqa: BLE001 - a rank without beats would be blamed
                with self._changed:
                    is_told = not self._active
                    if is_told and isinstance(error, CheckpointError):
                        self._left.clear()  # this process is not connected to that Ray any more
                if not is_told:
                    logger.warning("Beating to %s failed, and is tried again: %r", self._who, error)
            with self._changed:
                if not self._transport.alive:
                    self._left.clear()
                self._changed.notify_all()
                if not self._active and not self._left:
                    self._thread = None
                    return
                self._changed.wait(TICK_S)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                self._left = {left: end_s for left, end_s in self._left.items() if end_s > now_s}
                if not (self._active or self._left) or not self._transport.alive:
                    return
                active = dict(self._active)
                wait_s = self._first_send_s - now_s
                if wait_s > 0:
                    self._changed.wait(min(wait_s, TICK_S))
                    self._clock.tick()
                    continue
            timeout_s = min(active.values(), default=bounds.LEFT_TIMEOUT_S)
            interval_s = beat_interval_s(timeout_s)
            now_s = self._clock.tick()
            beat = self._beat(active, timeout_s, interval_s)
            # A phase that has begun, or ended, since the last heartbeat should be known soon.
            named = ([doing.phase for doing in beat.doings], beat.awaits, beat.left)
            if (now_s >= self._next_s or named != self._named) and (
                len(self._sent) < MOST_UNANSWERED
            ):
                self._sent[self._transport.send_heartbeat(beat)] = (now_s, beat)
                self._named, self._next_s = named, now_s + interval_s
            self._listen(min(interval_s, TICK_S))
            self._check_coordinator(timeout_s)

    def _beat(
        self, active: dict[RankProgress, float], timeout_s: float, hold_s: float
    ) -> Heartbeat:
        awaits = [
            progress.key
            for progress in active
            if progress.key is not None and progress.waits_for_others and not progress.stop.asked
        ]
        left = tuple(self._left)
        doings = tuple(progress.doing for progress in active)
        return Heartbeat(self._session, self._rank, timeout_s, doings, tuple(awaits), left, hold_s)

    def _listen(self, wait_s: float) -> None:
        if not self._sent:
            with self._changed:
                self._changed.wait(wait_s)
            return
        for ref in self._transport.wait([*self._sent], wait_s):
            before = [*self._sent]
            _, beat = self._sent[ref]
            # Why those before: whoever answers one lives, and the others may have been lost.
            for one in before[: before.index(ref) + 1]:
                del self._sent[one]
            ack = self._transport.ack(ref)
            if ack is not None:
                self._process_ack(beat, ack)
                continue
            # Why: a dead coordinator is not silent, and its plans are lost.
            self._sent.clear()
            if self._transport.has_ended(self._ack):
                self.abandon(self._died_error())
            with self._changed:
                self._changed.wait(wait_s)

    def _process_ack(self, beat: Heartbeat, ack: HeartbeatAck) -> None:
        self._ack, self._frozen = ack, None
        for wait in ack.waits:
            logger.warning("%s", wait)
        now_s = self._clock()
        for seq in ack.queued:
            self._queued_s[seq] = self._queued_s.get(seq, 0.0) + (now_s - self._acked_s)
        self._acked_s = now_s
        if not ack.is_up_to_date:
            return
        with self._changed:
            for left in beat.left:
                self._left.pop(left, None)
            self._changed.notify_all()
            working = [(progress.key, progress.stop) for progress in self._active]
        for key, stop in working:
            refused = None if key is None else ack.failed.get(key)
            if refused is not None:
                stop.because(refused.error)

    # The coordinator's end

    def abandon(self, error: CheckpointError) -> None:
        """Stops the calls that move bytes for a coordinator that will never answer."""
        with self._changed:
            working = [progress for progress in self._active if progress.is_working]
        for progress in working:
            progress.abandon(error)

    def _died_error(self) -> ParticipantError:
        return self._transport.ended_error() or ParticipantError(
            f"Expected {self._who} to live until the end, but its process{self._place_text} died. "
            f"Call again",
            rank=self._rank,
        )

    def _silent_error(self, silent_s: float, why: str) -> DeadlineError:
        return DeadlineError(
            f"Expected {self._who}{self._place_text} to answer heartbeats, but it has not for "
            f"{silent_s:.0f} s: {why}",
            rank=self._rank,
        )

    @property
    def _place_text(self) -> str:
        return f" ({self._ack.place})" if self._ack else ""

    @property
    def _silent_s(self) -> float:
        """How long the oldest heartbeat has been unanswered, in seconds."""
        now_s = self._clock()
        return now_s - min((sent_s for sent_s, _ in self._sent.values()), default=now_s)

    def _check_coordinator(self, timeout_s: float) -> None:
        """Records that the coordinator is frozen, if it has been silent for too long."""
        silent_s = self._silent_s
        state = SenderState(self._ack, self._frozen is not None)
        found = self._transport.silence(silent_s, timeout_s, state)
        match found.kind:
            case "none":
                pass
            case "late":
                now_s = self._clock()
                self._sent = {ref: (now_s, beat) for ref, (_, beat) in self._sent.items()}
            case "frozen":
                self._frozen = self._silent_error(silent_s, found.why)
                self.abandon(self._frozen)
