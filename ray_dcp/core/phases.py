"""The phases of a save or load on one rank, measured by one clock. Pure.

The code that saves or loads advances a `PhaseClock` from step to step. Heartbeats, events, metrics,
reports, DCP's logger and the trace read this clock; none of them has another one. A rank sends its
phases with the message that its part is held or written. The trace compares ranks, and has the
clocks of all begin by the coordinator's one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What a rank does at a time, under the names that each reader has for it."""

    phase: str
    """Name in events and reports; see `Event`."""
    doing: str
    """Name in heartbeats; see `Doing.phase`."""
    dcp: str = ""
    """Name in DCP's logger; empty if DCP logs no such step."""


BEGIN = Step("", "beginning")
"""The step before the first one; its time counts for the first one."""

CAPTURE = Step("capture", "capturing", "local_step")
PLAN = Step("plan", "waiting", "global_step")
STAGE = Step("stage", "staging", "stage_state_dict")
WRITE = Step("write", "writing", "write_data")
STAGED = Step("write", "waiting", "write_data")
"""The bytes are staged; the staging backend, or a later step, writes them."""
PLUG_IN_WRITE = Step("write", "writing with a plug-in", "write_data")
COMMIT = Step("commit", "waiting", "finish_checkpoint")

AWAIT_STAGED = Step("plan", "waiting for a save that is staged")
OPEN = Step("plan", "opening", "read_metadata")
JOIN = Step("plan", "waiting", "read_metadata")
PLAN_READS = Step("plan", "planning", "local_step")
COMPARE = Step("plan", "reading", "local_step")
READ = Step("read", "reading", "read_data")
PLUG_IN_READ = Step("read", "reading with a plug-in", "read_data")
FINISH = Step("finish", "waiting", "finish_load")


class PhaseClock:
    """Measures the phases of one save or load on one rank. Thread-safe.

    Every moment from begin to end belongs to exactly one phase; a phase may occur repeatedly.

    Args:
        clock: Returns monotonic seconds.

    Attributes:
        step: The current step.
        seconds: Duration of each phase that has ended, in seconds.
        bytes: Bytes that each phase moved; phases that moved none are left out.
        waited_s: How long training has waited for the operation after `release`, in seconds.
        on_step: Called with each step and the time at which it began. The last call has None as the
            step, and the error if there was one.
        on_phase: Called with each phase that has ended, its duration, and the bytes that it moved.
            The clock drops both after the last call.

    Examples:
        >>> now = iter([0.0, 1.0, 3.0, 6.0])
        >>> phases = PhaseClock(lambda: next(now))
        >>> _ = phases.enter(STAGE)
        >>> phases.count(100)
        >>> _ = phases.enter(WRITE)
        >>> phases.end(), phases.seconds, phases.bytes
        (6.0, {'stage': 3.0, 'write': 3.0}, {'stage': 100})
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step = BEGIN
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}
        self.waited_s = 0.0
        self.on_step: Callable[[Step | None, float, BaseException | None], None] = _ignore
        self.on_phase: Callable[[str, float, int], None] = _ignore
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = self._phase_s = self._step_s = self._moved_s = clock()
        self._released_s: float | None = None
        self._ended_s: float | None = None
        self._counted_bytes = self._done_bytes = self._total_bytes = 0
        self._last_moved = (0, 0)

    def enter(self, step: Step, total_bytes: int = 0) -> float:
        """Ends the current step and begins the next; returns the time. No effect after the end.

        Args:
            step: The step that begins.
            total_bytes: Bytes that the step will move, if known.
        """
        return self._advance(step, total_bytes, None)

    def end(self, error: BaseException | None = None) -> float | None:
        """Ends the last phase and returns the total duration; None if it had ended already.

        Args:
            error: The error that the operation failed with.
        """
        return None if self._ended_s is not None else self._advance(None, 0, error) - self._began_s

    def release(self, at_s: float | None = None) -> None:
        """Records when training continues (default: now); only the first call counts."""
        if self._released_s is None:
            self._released_s = self._clock() if at_s is None else at_s

    @property
    def spent(self) -> tuple[tuple[str, float], ...]:
        """Each phase so far and its duration, in seconds, in the order in which they began."""
        with self._lock:
            found, phase = dict(self.seconds), self.step.phase
            if phase and self._ended_s is None:
                found[phase] = found.get(phase, 0.0) + self._clock() - self._phase_s
            return tuple(found.items())

    @property
    def held_s(self) -> float:
        """How long training has waited for the operation, in seconds."""
        until_s = [s for s in (self._released_s, self._ended_s) if s is not None]
        return min(until_s, default=self._clock()) - self._began_s + self.waited_s

    def count(self, num_bytes: int) -> None:
        """Adds bytes that the current phase has moved completely."""
        with self._lock:
            self._counted_bytes += num_bytes

    def moved(self, num_bytes: int) -> None:
        """Records progress: bytes went to the storage or came from it."""
        with self._lock:
            self._done_bytes += num_bytes
            self._moved_s = self._clock()

    def _advance(self, step: Step | None, total_bytes: int, error: BaseException | None) -> float:
        ended = None
        with self._lock:
            if self._ended_s is not None:
                return self._ended_s
            now_s, phase = self._clock(), self.step.phase
            if self.step is BEGIN and step is not None:
                now_s = self._began_s
            elif phase and (step is None or step.phase != phase):
                ended = (phase, now_s - self._phase_s, self._counted_bytes)
                self.seconds[phase] = self.seconds.get(phase, 0.0) + ended[1]
                if ended[2]:
                    self.bytes[phase] = self.bytes.get(phase, 0) + ended[2]
                self._phase_s, self._counted_bytes = now_s, 0
            if step is None:
                self._ended_s = now_s
            else:
                self.step = step
            if self._total_bytes:
                self._last_moved = self._done_bytes, self._total_bytes
            self._step_s = self._moved_s = now_s
            self._done_bytes, self._total_bytes = 0, total_bytes
        if ended is not None:
            self.on_phase(*ended)
        self.on_step(step, now_s, error)
        if step is None:
            # Why: the listener has this clock in most cases, and nothing follows the end.
            self.on_step = self.on_phase = _ignore
        return now_s


def _ignore(*_: object) -> None:
    """Default of `on_step` and `on_phase`."""
