"""Determines by a trial whether conditional creation in a store has exactly one winner.

The trial (`creates_if_absent_in`) runs once per store and process, with small objects that are
removed again. It is needed because some servers accept the condition and ignore it (the S3 gateways
of rclone and JuiceFS), and nothing else distinguishes them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ray_dcp.core.processes import ProcessLock, start_thread
from ray_dcp.errors import StorageError
from ray_dcp.store.storage import TEMP_PREFIX, KeyExistsError, KeyMissingError

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
