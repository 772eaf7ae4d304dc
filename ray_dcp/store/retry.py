"""`Retrying`: does a call again after a growing, random pause, until a total deadline."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_S = 0.1
MOST_S = 10.0
TELL_S = 5.0


def pauses(random_share: Callable[[], float], first_s: float = FIRST_S) -> Iterator[float]:
    """Yields how long to wait before each further try, in seconds: up to twice as long each time.

    Args:
        random_share: Returns numbers in [0, 1): jitter, so that who failed together does not try
            again together.
        first_s: Longest first pause.

    Examples:
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
    """Repeats calls that failed in a way that may pass. For several threads.

    One for all calls to one store: whoever tries again after a call of the same kind that used up
    its time, as an outer loop may, gets one try and no second budget, until such a call has
    succeeded or as much time has passed again.

    Args:
        timeout_s: Total deadline of a call with all its repetitions, in seconds.
        clock: Seconds that never go back.
        sleep: Waits for so many seconds.
        random_share: See `pauses`.

    Examples:
        >>> answers = iter([ConnectionError(), 42])
        >>> def ask():
        ...     answer = next(answers)
        ...     if isinstance(answer, Exception):
        ...         raise answer
        ...     return answer
        >>> retrying = Retrying(10, sleep=lambda _: None)
        >>> retrying.call(ask, lambda error: MOST_S if type(error) is ConnectionError else 0.0)
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
        self._is_told = False
        self._down_until_s: dict[str, float] = {}

    def call(
        self,
        act: Callable[[], T],
        worth_s: Callable[[Exception], float],
        say: Callable[[Exception], str] = lambda error: type(error).__name__,
        kind: str = "",
    ) -> T:
        """Returns what `act` returns, after as many tries as that takes.

        After `TELL_S` without success a WARNING says so, once until the store answers.

        Args:
            act: May happen several times.
            worth_s: For how long an error is worth further tries, in seconds from the first one;
                0 when it will be the same next time.
            say: What failed, for that warning.
            kind: Of the call: those of each kind have a budget, as a store may refuse to write and
                still read.

        Raises:
            Exception: The last error of `act`, with a note of how often it was repeated.
        """
        start_s = self._clock()
        waits = pauses(self._random_share)
        tries = 0
        while True:
            try:
                result = act()
            except Exception as error:
                if tries:
                    # Why not add_note: Python 3.10 has none.
                    notes = [*getattr(error, "__notes__", ()), f"retried {tries} times"]
                    error.__notes__ = notes
                now_s, wait_s = self._clock(), next(waits)
                limit_s = min(worth_s(error), self._timeout_s)
                if limit_s <= 0 or start_s < self._down_until_s.get(kind, -math.inf):
                    raise
                if now_s - start_s + wait_s > limit_s:
                    self._down_until_s[kind] = now_s + self._timeout_s
                    raise
                if now_s - start_s + wait_s >= TELL_S and not self._is_told:
                    self._is_told = True
                    logger.warning(
                        "%s. Tried for %.0f s, and again for up to %.0f s",
                        say(error),
                        now_s - start_s,
                        limit_s,
                    )
            else:
                self._is_told = False
                self._down_until_s.pop(kind, None)
                return result
            self._sleep(wait_s)
            tries += 1
