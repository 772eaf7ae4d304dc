"""What a soak does to its processes: kills and freezes them at random moments of a save."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.soak_leaks import is_marked

KINDS = (
    "rank killed",
    "rank frozen",
    "coordinator killed",
    "coordinator frozen",
    "all ranks killed",
)


@dataclass(frozen=True)
class Strike:
    """One process, or all ranks, are hit."""

    kind: str
    after_s: float
    """How long after the save began."""
    hold_s: float
    """How long a frozen process stays so."""
    rank: int


def choose(numbers: random.Random, world_size: int) -> Strike:
    """Returns a random strike."""
    return Strike(
        kind=numbers.choice(KINDS),
        # Why squared: most of a save of this size is over in a fraction of a second.
        after_s=0.8 * numbers.random() ** 2,
        hold_s=numbers.choice([0.5, 2.0, 8.0]),
        rank=numbers.randrange(world_size),
    )


class Striker:
    """Carries strikes out, each in a thread of its own; frozen processes always go on again.

    Args:
        mark: What the processes of this soak bear; no other is ever hit, also when a number is
            used again.

    Attributes:
        done: How many of each kind hit a process that lived.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.done: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def strike(
        self, strike: Strike, pids: list[int], coordinator: Callable[[], int | None]
    ) -> None:
        """Begins a strike and returns at once.

        Args:
            strike: Which.
            pids: Of the ranks.
            coordinator: Returns the pid of their coordinator, None when they have none; called
                before this returns.
        """
        if strike.kind.startswith("coordinator"):
            pid = coordinator()
            victims = [] if pid is None else [pid]
        elif strike.kind.startswith("all"):
            victims = list(pids)
        else:
            victims = [pids[strike.rank]]
        thread = threading.Thread(target=self._carry_out, args=[strike, victims], daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Waits until all strikes are over, and everybody who was frozen goes on."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def stop(self) -> None:
        """Ends all strikes: nobody stays frozen."""
        self._over.set()
        self.wait()

    def _carry_out(self, strike: Strike, victims: list[int]) -> None:
        self._over.wait(strike.after_s)
        frozen = strike.kind.endswith("frozen")
        blow = signal.SIGSTOP if frozen else signal.SIGKILL
        hit = [self._signal(pid, blow) for pid in victims]
        self.done[strike.kind] += any(hit)
        if frozen:
            self._over.wait(strike.hold_s)
            for pid in victims:
                self._signal(pid, signal.SIGCONT)

    def _signal(self, pid: int, what: int) -> bool:
        if not is_marked(pid, self._mark):
            return False
        try:
            os.kill(pid, what)
        except ProcessLookupError:
            return False
        return True
