"""`Retrying`: repeats failed calls with exponential backoff and jitter, up to a deadline."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ray_dcp.core.wire_error import add_note

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_S = 0.1
MOST_S = 10.0
TELL_S = 5.0


def pauses(random_share: Callable[[], float]) -> Iterator[float]:
    """Yields the pause before each retry, in seconds. Its upper bound doubles up to `MOST_S`.

    Args:
        random_share: Returns numbers in [0, 1), as jitter: callers that failed together do not
            retry together.

    Examples:
        >>> found = pauses(lambda: 1.0)
        >>> [round(next(found), 1) for _ in range(8)]
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    """
    limit_s = FIRST_S
    while True:
        # Why half of it is fixed: the store is never retried without a pause.
        yield limit_s * (0.5 + random_share() / 2)
        limit_s = min(2 * limit_s, MOST_S)


class Retrying:
    """Retries calls after transient errors. Thread-safe.

    One object serves all calls to one store. After a call has used up its deadline, calls of the
    same kind get a single try, so that an outer retry loop does not multiply the deadline. Retries
    are allowed again when such a call succeeds or another `timeout_s` has passed.

    Args:
        timeout_s: Deadline of a call including all retries, in seconds.
        clock: Monotonic clock, in seconds.
        sleep: Waits for a number of seconds.
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
        """Calls `act` until it succeeds, and returns its result.

        After `TELL_S` without success, a WARNING is logged, once until a call succeeds.

        Args:
            act: The call; must be safe to repeat.
            worth_s: Returns for how long an error is retried, in seconds since the first try;
                0 for a permanent error.
            say: Returns the text of an error for the warning.
            kind: Kind of the call. Each kind has its own budget, as a store may refuse writes and
                still serve reads.

        Raises:
            Exception: The last error of `act`, with a note of the number of retries.
        """
        start_s = self._clock()
        waits = pauses(self._random_share)
        tries = 0
        while True:
            try:
                result = act()
            except Exception as error:
                if tries:
                    add_note(error, f"retried {tries} times")
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
