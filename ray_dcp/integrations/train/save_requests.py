"""Save requests: saves that the controller asks workers for, beside those of their own interval.

`SaveRequests` is a rank's side. The training thread calls it at every `save`; the actor's main
thread, on which Ray Train calls into a worker, brings requests. Ranks are at different steps when
they are asked, and yet must save the same one. So each is held first: it reports the last step that
it has decided, and decides no further one until it learns from which step on to save. At steps at
which nobody asks, ranks exchange nothing.

`ask_all` is the controller's side: it asks all ranks of a worker group for one save, and waits for
it. It reaches the ranks through a `Call`, without Ray. `next_round_s` and its neighbours decide
when a run whose node is preempted is saved once more: as late as a save still fits. They are pure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["unknown", "waiting", "saving", "committed", "failed"]

HOLD_S = 60.0
"""How long a rank waits for the word after it was held, in seconds: whoever held it may be dead.
Longer than two calls to all ranks may take, as one that goes on does not save with the others."""


@dataclass(frozen=True)
class Asked:
    """A save that was asked for."""

    seq: str
    """Which request."""
    reason: str
    after_step: int
    """It is made at the first step after this one."""
    linger_s: float = 0.0
    """The worker group ends after it: how long to wait for that once it is committed, in seconds,
    instead of making steps that would be lost."""


@dataclass(frozen=True)
class Held:
    """What a rank tells when it is held."""

    last_step: int
    """That it has decided; -1 for none."""
    stage_s: float | None
    """How long training waited for recent saves, at most, in seconds."""
    commit_s: float | None
    """How long recent saves took until they were committed, at most, in seconds."""


class SaveRequests:
    """What the two threads of one worker share; for the checkpointer that was made last."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._owner = 0
        self._last_step = -1
        self._seconds: tuple[float | None, float | None] = (None, None)
        self._held: tuple[str, float] | None = None
        self._asked: Asked | None = None
        self._taken: str = ""
        self._ended: dict[str, bool] = {}

    # For the training thread

    def open(self, last_step: int = -1) -> int:
        """Begins to take requests for a new checkpointer; returns the number that it shows."""
        with self._changed:
            self._is_open = True
            self._owner += 1
            self._last_step = last_step
            self._held = self._asked = None
            self._taken = ""
            self._ended = {}
            return self._owner

    def close(self, owner: int) -> None:
        """Ends that."""
        with self._changed:
            if owner != self._owner:
                return
            self._is_open = False
            self._held = self._asked = None
            self._changed.notify_all()

    def at(self, step: int, owner: int) -> Asked | None:
        """Returns what was asked for this step; waits while this rank is held.

        Args:
            step: That is decided now.
            owner: Who decides it, as `open` gave it.
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
        """Notes that steps are counted from another one on, which was restored.

        Args:
            step: The one.
            owner: Who restored it, as `open` gave it.
        """
        with self._changed:
            if owner == self._owner:
                self._last_step = step

    def took(self, stage_s: float, commit_s: float) -> None:
        """Notes how long a save took; the longest of what is known counts, and fades.

        Args:
            stage_s: That training waited, in seconds.
            commit_s: Until it was committed, in seconds.
        """
        with self._changed:
            self._seconds = (_faded(self._seconds[0], stage_s), _faded(self._seconds[1], commit_s))

    def seconds(self) -> tuple[float | None, float | None]:
        """Returns how long recent saves took: `stage_s` and `commit_s` of `took`."""
        with self._changed:
            return self._seconds

    def ended(self, asked: Asked, committed: bool) -> None:
        """Tells how a save ended that was asked for; lingers where the worker group ends now."""
        with self._changed:
            self._ended[asked.seq] = committed
            if not committed:
                return
            end_s = time.monotonic() + asked.linger_s
            while self._taken == asked.seq and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    # For whoever asks

    def hold(self, seq: str) -> Held | None:
        """Keeps this rank from deciding a step; None when it can't be asked.

        Args:
            seq: Of the request.
        """
        with self._changed:
            if not self._is_open or self._held is not None or self._asked is not None:
                return None
            self._held = (seq, time.monotonic() + HOLD_S)
            return Held(self._last_step, *self._seconds)

    def ask(self, asked: Asked) -> bool:
        """Gives the word to a rank that is held; returns whether it was still held."""
        with self._changed:
            if self._held is None or self._held[0] != asked.seq:
                return False
            self._held = None
            self._asked = asked
            self._changed.notify_all()
            return True

    def drop(self, seq: str) -> None:
        """Takes a request back, and lets a rank go on that is held or lingers for it."""
        with self._changed:
            if self._held is not None and self._held[0] == seq:
                self._held = None
            if self._asked is not None and self._asked.seq == seq:
                self._asked = None
            if self._taken == seq:
                self._taken = ""
            self._changed.notify_all()

    def state(self, seq: str) -> State:
        """Returns how far the save is that was asked for."""
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
"""Of this worker: a process is one."""


SPARE = 2.0
"""Times the duration of a save that must be left before the deadline."""
SPARE_S = 2.0
"""And this on top, in seconds."""


def next_round_s(now_s: float, deadline_s: float | None, took_s: float | None) -> float | None:
    """Returns how long to wait before saving again, in seconds; None when that is not worth it.

    Args:
        now_s: Seconds since 1970.
        deadline_s: When the node goes; None when nobody said.
        took_s: How long the last save took, with the request for it; None without one.

    Examples:
        >>> next_round_s(100.0, 130.0, 4.0), next_round_s(120.0, 130.0, 4.0)
        (20.0, None)
    """
    if deadline_s is None or took_s is None:
        return None
    wait_s = deadline_s - (SPARE * took_s + SPARE_S) - now_s
    return wait_s if wait_s > took_s else None


def is_last_round(left_s: float, took_s: float | None) -> bool:
    """Tells whether no further save would be worth it after one that is begun now.

    Args:
        left_s: Seconds until the node goes.
        took_s: How long a save takes, as far as is known.

    Examples:
        >>> is_last_round(30.0, 4.0), is_last_round(10.0, 4.0), is_last_round(10.0, None)
        (False, True, False)
    """
    return took_s is not None and next_round_s(took_s, left_s, took_s) is None


MARGIN = 1.25
"""How much longer than the ones before a save may take."""
MARGIN_S = 0.5
"""And this on top, in seconds."""
LOOK_S = 0.05
"""How often ranks are asked how far they are, in seconds."""


Call = Callable[..., list[Any]]
"""Calls a method of the `SaveRequests` of each worker of a group: gets its name and arguments,
returns what each gave, by rank, and raises where one does not answer."""


def save_fits(left_s: float | None, stage_s: float | None) -> bool:
    """Tells whether a save is worth it in the time that is left, as far as earlier ones tell.

    It is when its bytes would be with the stagers, from where they go on to storage for as long as
    the machines live.

    Args:
        left_s: Seconds that are left; None for no end.
        stage_s: How long training waited for earlier saves; None when there was none.

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
    """Asks all ranks to save at the same step, the next that none of them has decided.

    Args:
        call: Reaches them.
        seq: Of the request; never used before.
        reason: For the log.
        linger_s: See `Asked.linger_s`; where `left_s` is given, only if no further save would fit.
        left_s: Seconds in which it must be committed; None for no end.
        took_s: How long the last such save took, with the request for it; None when there was none.

    Returns:
        None; why they are not asked, in words.

    Raises:
        Exception: A worker does not answer.
    """
    try:
        held: Sequence[Held | None] = call("hold", seq)
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
        told = call("ask", Asked(seq, reason, after, linger_s if ends else 0.0))
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
    """Returns how the save of a request ended; how far it is when the limit has passed.

    Args:
        call: Reaches who were asked.
        seq: As there.
        limit_s: How long to wait, in seconds.
        clock: Seconds that only go forward.
        wait: Lets seconds pass.

    Raises:
        Exception: A worker does not answer.
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
    """Calls a method of the `SaveRequests` of this process: what the workers are told to run."""
    return getattr(REQUESTS, method)(*arguments)
