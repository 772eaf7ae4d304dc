"""`Retrying`: does a call again after a growing, random pause, until a total deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["Retrying", "pauses"]

T = TypeVar("T")

FIRST_S = 0.1
MOST_S = 10.0


def pauses(random_share: Callable[[], float], first_s: float = FIRST_S) -> Iterator[float]:
    """Yields how long to wait before each further try, in seconds: up to twice as long each time.

    Args:
        random_share: Returns numbers in [0, 1): jitter, so that who failed together does not try
            again together.
        first_s: Longest first pause.

    Example:
        >>> found = pauses(lambda: 1.0)
        >>> [round(next(found), 1) for _ in range(8)]
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    """
    limit_s = first_s
    while True:
        # Why not from 0: at least half of the pause is sure to be made.
        yield limit_s * (0.5 + random_share() / 2)
        limit_s = min(2 * limit_s, MOST_S)


class Retrying:
    """Repeats calls that failed in a way that may pass.

    Args:
        timeout_s: Total deadline of a call with all its repetitions, in seconds.
        clock: Seconds that never go back.
        sleep: Waits for so many seconds.
        random_share: See `pauses`.

    Example:
        >>> answers = iter([ConnectionError(), 42])
        >>> def ask():
        ...     answer = next(answers)
        ...     if isinstance(answer, Exception):
        ...         raise answer
        ...     return answer
        >>> retrying = Retrying(10, sleep=lambda _: None)
        >>> retrying.call(ask, lambda error: isinstance(error, ConnectionError))
        42
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._random_share = random_share

    def call(self, act: Callable[[], T], may_pass: Callable[[Exception], bool]) -> T:
        """Returns what `act` returns, after as many tries as that takes.

        Args:
            act: May happen several times.
            may_pass: Tells whether an error may be another one, or none, next time.

        Raises:
            Exception: The last error of `act`, with a note of how often it was tried.
        """
        end_s = self._clock() + self._timeout_s
        waits = pauses(self._random_share)
        tries = 1
        while True:
            try:
                return act()
            except Exception as error:
                wait_s = next(waits)
                if not may_pass(error) or self._clock() + wait_s > end_s:
                    if tries > 1:
                        # Why not add_note: Python 3.10 has none.
                        notes = [*getattr(error, "__notes__", ()), f"tried {tries} times"]
                        error.__notes__ = notes
                    raise
            self._sleep(wait_s)
            tries += 1
