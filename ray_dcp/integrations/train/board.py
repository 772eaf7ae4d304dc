"""Where a rank is asked for a save that its own interval does not ask for.

The training thread comes here at every `save`; the actor's main thread, on which Ray Train calls
into a worker, asks. Ranks are at different steps when they are asked, and yet must save the same
one. So each is held first: it tells the last step it has decided, and decides no further one until
it is told from which on to save. Nothing is exchanged at steps at which nobody asks.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

__all__ = ["BOARD", "Asked", "Board", "Held", "State"]

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


class Board:
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


BOARD = Board()
"""Of this worker: a process is one."""
