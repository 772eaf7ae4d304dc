"""Save requests: saves that the controller requests, in addition to those of `save_interval`.

Ranks are at different steps when a request arrives, but must save the same step. A request
therefore has two phases:

    controller                     each rank
    hold(seq)  ------------------> blocks its next decision
               <------------------ last decided step, durations of recent saves
    ask(first step after the
        maximum of all)  --------> continues, and saves at that step
    state(seq) ------------------> waiting, saving, committed or failed

Without a request, ranks exchange nothing.

`SaveRequests` is a rank's side. The training thread calls it at every `save`. The actor's main
thread, on which Ray Train calls into a worker, delivers requests. `ask_all` and `follow` are the
controller's side; they access the ranks through a `Call`, without Ray. `next_round_s` and related
functions determine when a run on a preempted node is saved once more: as late as a save still fits.
They are pure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["unknown", "waiting", "saving", "committed", "failed"]

HOLD_S = 60.0
"""How long a held rank waits for the second phase, in seconds. *Why a limit*: the controller may be
dead. *Why this long*: two calls to all ranks must fit, as a rank that continues early does not save
with the others."""


@dataclass(frozen=True)
class RequestedSave:
    """A requested save."""

    seq: str
    """Id of the request."""
    reason: str
    after_step: int
    """The save is made at the first step after this one."""
    linger_s: float = 0.0
    """How long to wait for the end of the worker group after the commit, in seconds, as further
    steps would be lost; 0 if the group does not end."""


@dataclass(frozen=True)
class HeldRank:
    """Answer of a held rank."""

    last_step: int
    """Last step for which the rank has decided whether to save; -1 if there is none."""
    stage_s: float | None
    """Maximum time that training waited for a recent save, in seconds."""
    commit_s: float | None
    """Maximum time from the start of a recent save to its commit, in seconds."""


class SaveRequests:
    """State shared by the two threads of a worker, for the newest checkpointer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._owner = 0
        self._last_step = -1
        self._seconds: tuple[float | None, float | None] = (None, None)
        self._held: tuple[str, float] | None = None
        self._asked: RequestedSave | None = None
        self._taken: str = ""
        self._ended: dict[str, bool] = {}

    # Called by the training thread

    def open(self, last_step: int = -1) -> int:
        """Accepts requests for a new checkpointer; returns its owner number."""
        with self._changed:
            self._is_open = True
            self._owner += 1
            self._last_step = last_step
            self._held = self._asked = None
            self._taken = ""
            self._ended = {}
            return self._owner

    def close(self, owner: int) -> None:
        """Stops accepting requests, unless there is a newer owner."""
        with self._changed:
            if owner != self._owner:
                return
            self._is_open = False
            self._held = self._asked = None
            self._changed.notify_all()

    def at(self, step: int, owner: int) -> RequestedSave | None:
        """Returns the request for a step, or None; waits while this rank is held.

        Args:
            step: The step to decide.
            owner: Owner number of the checkpointer.
        """
        with self._changed:
            if owner != self._owner:
                return None
            while self._held is not None:
                left_s = self._held[1] - time.monotonic()
                if left_s <= 0:
                    self._held = None
                    break
                self._changed.wait(left_s)
            self._last_step = max(step, self._last_step)
            asked = self._asked
            if asked is None or step <= asked.after_step:
                return None
            self._asked = None
            self._taken = asked.seq
            return asked

    def went_back(self, step: int, owner: int) -> None:
        """Resets the last decided step after a restore.

        Args:
            step: The restored step.
            owner: Owner number of the checkpointer.
        """
        with self._changed:
            if owner == self._owner:
                self._last_step = step

    def took(self, stage_s: float, commit_s: float) -> None:
        """Records the durations of a save, as a maximum that decays towards recent values.

        Args:
            stage_s: Time that training waited, in seconds.
            commit_s: Time until the commit, in seconds.
        """
        with self._changed:
            self._seconds = (_faded(self._seconds[0], stage_s), _faded(self._seconds[1], commit_s))

    def seconds(self) -> tuple[float | None, float | None]:
        """Returns the durations of recent saves: `stage_s` and `commit_s` of `took`."""
        with self._changed:
            return self._seconds

    def ended(self, asked: RequestedSave, committed: bool) -> None:
        """Records the outcome of a requested save; waits up to `linger_s` after a commit."""
        with self._changed:
            self._ended[asked.seq] = committed
            if not committed:
                return
            end_s = time.monotonic() + asked.linger_s
            while self._taken == asked.seq and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    # Called by the controller

    def hold(self, seq: str) -> HeldRank | None:
        """Holds this rank before its next decision; returns None if it can't accept a request.

        Args:
            seq: Id of the request.
        """
        with self._changed:
            if not self._is_open or self._held is not None or self._asked is not None:
                return None
            self._held = (seq, time.monotonic() + HOLD_S)
            return HeldRank(self._last_step, *self._seconds)

    def ask(self, asked: RequestedSave) -> bool:
        """Delivers a request and releases this rank; returns False if it was no longer held."""
        with self._changed:
            if self._held is None or self._held[0] != asked.seq:
                return False
            self._held = None
            self._asked = asked
            self._changed.notify_all()
            return True

    def drop(self, seq: str) -> None:
        """Withdraws a request, and releases this rank if it is held or lingers for it."""
        with self._changed:
            if self._held is not None and self._held[0] == seq:
                self._held = None
            if self._asked is not None and self._asked.seq == seq:
                self._asked = None
            if self._taken == seq:
                self._taken = ""
            self._changed.notify_all()

    def state(self, seq: str) -> State:
        """Returns the state of a requested save."""
        with self._changed:
            if seq in self._ended:
                return "committed" if self._ended[seq] else "failed"
            if self._taken == seq:
                return "saving"
            waits = self._asked is not None and self._asked.seq == seq
            return "waiting" if waits else "unknown"


def _faded(known_s: float | None, seconds: float) -> float:
    return seconds if known_s is None else max(seconds, (known_s + seconds) / 2)


REQUESTS = SaveRequests()
"""The save requests of this worker process."""


SPARE = 2.0
"""A save is started this many of its durations (plus `SPARE_S`) before the deadline."""
SPARE_S = 2.0
"""Fixed part of that reserve, in seconds."""


def next_round_s(now_s: float, deadline_s: float | None, took_s: float | None) -> float | None:
    """Returns how long to wait before saving again, in seconds; None if that does not pay.

        now_s                                           deadline_s
          |---- wait_s ----|---- SPARE * took_s ----|-SPARE_S-|

    It pays if the wait is longer than a save takes.

    Args:
        now_s: Current time, in seconds since the epoch.
        deadline_s: End of the node; None if unknown.
        took_s: Duration of the last save with its request, in seconds; None if there was none.

    Examples:
        >>> next_round_s(100.0, 130.0, 4.0), next_round_s(120.0, 130.0, 4.0)
        (20.0, None)
    """
    if deadline_s is None or took_s is None:
        return None
    wait_s = deadline_s - (SPARE * took_s + SPARE_S) - now_s
    return wait_s if wait_s > took_s else None


def is_last_round(left_s: float, took_s: float | None) -> bool:
    """Returns whether a save that starts now is the last one that pays.

    Args:
        left_s: Time until the end of the node, in seconds.
        took_s: Expected duration of a save, in seconds; None if unknown.

    Examples:
        >>> is_last_round(30.0, 4.0), is_last_round(10.0, 4.0), is_last_round(10.0, None)
        (False, True, False)
    """
    return took_s is not None and next_round_s(took_s, left_s, took_s) is None


MARGIN = 1.25
"""A save is expected to take at most this many times as long as earlier ones (plus `MARGIN_S`)."""
MARGIN_S = 0.5
"""Fixed part of that margin, in seconds."""
LOOK_S = 0.05
"""Interval of state queries to the ranks, in seconds."""


Call = Callable[..., list[Any]]
"""Calls a method of the `SaveRequests` of each worker of a group. It receives the name and the
arguments, returns the results by rank, and raises if a worker does not answer."""


def save_fits(left_s: float | None, stage_s: float | None) -> bool:
    """Returns whether a save fits into the time left, judging by earlier saves.

    It fits if its bytes can be staged in time: the node agents write staged bytes as long as the
    machines live.

    Args:
        left_s: Time left, in seconds; None if there is no limit.
        stage_s: Time that training waited for earlier saves, in seconds; None if there were none.

    Examples:
        >>> save_fits(5, 0.2), save_fits(0.3, 0.2), save_fits(5, None), save_fits(None, 0.2)
        (True, False, True, True)
    """
    return left_s is None or (stage_s or 0.0) * MARGIN + MARGIN_S <= left_s


def ask_all(
    call: Call,
    seq: str,
    reason: str,
    *,
    linger_s: float = 0.0,
    left_s: float | None = None,
    took_s: float | None = None,
) -> str | None:
    """Requests that all ranks save at the same step, the first that none of them has decided.

    Args:
        call: Calls the ranks.
        seq: Unique id of the request.
        reason: Reason, for the log.
        linger_s: See `RequestedSave.linger_s`; if `left_s` is given, used only if no further save
            pays.
        left_s: Time in which the save must be committed, in seconds; None if there is no limit.
        took_s: Duration of the last requested save with its request, in seconds; None if there was
            none.

    Returns:
        None if the save was requested; otherwise the reason why not.

    Raises:
        Exception: A worker did not answer.
    """
    try:
        held: Sequence[HeldRank | None] = call("hold", seq)
        answers = [one for one in held if one is not None]
        if not held or len(answers) < len(held):
            call("drop", seq)
            missing = [rank for rank, one in enumerate(held) if one is None]
            return f"rank(s) {missing} have no open checkpointer, or are asked"
        if not save_fits(left_s, _longest(one.stage_s for one in answers)):
            call("drop", seq)
            return f"no save fits in {left_s or 0:.1f} s: earlier ones took longer"
        commit_s = _longest(one.commit_s for one in answers)
        after = max(one.last_step for one in answers)
        ends = left_s is None or is_last_round(left_s, _longest((commit_s, took_s)))
        told = call("ask", RequestedSave(seq, reason, after, linger_s if ends else 0.0))
    except Exception:
        call("drop", seq)
        raise
    if not all(told):
        call("drop", seq)
        return "a rank had waited for the word for too long"
    return None


def follow(
    call: Call,
    seq: str,
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> State:
    """Waits for a requested save, and returns its outcome, or its state at the timeout.

    Args:
        call: Calls the ranks.
        seq: Id of the request.
        limit_s: Timeout, in seconds.
        clock: Monotonic clock, in seconds.
        wait: Waits for a number of seconds.

    Raises:
        Exception: A worker did not answer.
    """
    end_s = clock() + limit_s
    while True:
        states: list[State] = call("state", seq)
        for worst in ("failed", "unknown"):
            if worst in states:
                return "failed"
        if all(one == "committed" for one in states):
            return "committed"
        if clock() >= end_s:
            return "saving" if "waiting" not in states else "waiting"
        wait(LOOK_S)


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((one for one in seconds if one is not None), default=None)


def of_this_worker(method: str, *arguments: Any) -> Any:
    """Calls a method of the `SaveRequests` of this process. The controller runs it on workers."""
    return getattr(REQUESTS, method)(*arguments)
