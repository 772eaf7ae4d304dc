"""What the storages of remote stores share: retries, a trial of their conditions, and redaction.

* `Retrying` repeats failed calls with exponential backoff and jitter, up to a deadline.
* `creates_if_absent_in` determines by a trial whether conditional creation in a store has exactly
  one winner. The trial runs once per store and process, with small objects that are removed again.
  It is needed because some servers accept the condition and ignore it (the S3 gateways of rclone
  and JuiceFS), and nothing else distinguishes them.
* `redacted` removes credentials from messages, as libraries may quote their options in errors.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ray_dcp.core.processes import ProcessLock, start_thread
from ray_dcp.errors import StorageError
from ray_dcp.store.storage import TEMP_PREFIX, KeyExistsError, KeyMissingError

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


_SHORTEST = 4


def redacted(text: str, options: Mapping[str, object]) -> str:
    """Returns a text without the values of options that look like credentials.

    Args:
        text: Text of an error.
        options: Options as the user gave them; may be nested.

    Examples:
        >>> redacted("bad key hush-hush for eu-1", {"secret": "hush-hush", "region": "eu-1"})
        'bad key … for eu-1'
    """
    for value in sorted(_credentials(options), key=len, reverse=True):
        text = text.replace(value, "…")
    return text


def _credentials(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _credentials(value)
        elif isinstance(value, str) and len(value) >= _SHORTEST and _is_credential(str(name)):
            yield value


def _is_credential(name: str) -> bool:
    # Why a list of harmless names: names of secrets differ between providers.
    harmless = ("endpoint", "region", "bucket", "account_name", "url", "host", "timeout")
    return not any(word in name.lower() for word in harmless)


Create = Callable[[str, bytes], object]
Read = Callable[[str], bytes]
Delete = Callable[[list[str]], object]

# Why few: SeaweedFS delays a larger number of concurrent creations by seconds.
_RACERS = 4
_LOCK = ProcessLock()
_KNOWN: dict[str, bool] = {}
# Why cleared in a forked child: it lacks the thread that holds the lock.
_UNDER_WAY: dict[str, threading.Lock] = {}
os.register_at_fork(after_in_child=_UNDER_WAY.clear)


def creates_if_absent_in(store: str, create: Create, read: Read, delete: Delete) -> bool:
    """Returns whether creating a key in a store has exactly one winner.

    The result is cached by `store`; a failure is not.

    Args:
        store: Identifies the store, for example by the URL of its bucket.
        create: Creates a hidden key conditionally, or raises `KeyExistsError`.
        read: Reads a hidden key, or raises `KeyMissingError`.
        delete: Removes hidden keys.

    Raises:
        StorageError: The trial failed: the store did not answer, or this process may not write.
    """
    with _LOCK:
        turn = _UNDER_WAY.setdefault(store, threading.Lock())
    with turn:
        if store not in _KNOWN:
            _KNOWN[store] = _probe_create(create, read, delete)
        return _KNOWN[store]


def _probe_create(create: Create, read: Read, delete: Delete) -> bool:
    token = secrets.token_hex(6)
    first, race = f"{TEMP_PREFIX}{token}-probe", f"{TEMP_PREFIX}{token}-race"

    def put(key: str, value: bytes) -> bool:
        with suppress(KeyExistsError):
            create(key, value)
            return True
        return False

    def get(key: str) -> bytes | None:
        with suppress(KeyMissingError):
            return read(key)
        return None

    try:
        # Why read back: the answer to a successful creation may be lost, and a server that ignores
        # the condition may still answer that it refused.
        if not put(first, b"first") and get(first) != b"first":
            return False
        if put(first, b"second") or get(first) != b"first":
            return False
        values = [str(number).encode() for number in range(_RACERS)]
        won, failures = [False] * _RACERS, list[Exception]()

        def take_part(number: int) -> None:
            try:
                won[number] = put(race, values[number])
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                failures.append(error)

        racers = [
            start_thread(partial(take_part, number), "ray_dcp probe") for number in range(_RACERS)
        ]
        for racer in racers:
            racer.join()
        for failure in failures:
            raise failure
        stands = get(race)
        # Why no winner is fine: the winner's answer was lost, and its retry found its own key.
        return sum(won) <= 1 and stands in values and (not any(won) or won[int(stands)])
    finally:
        for key in (first, race):
            with suppress(StorageError):
                delete([key])
