"""Tries whether a store without files creates a key for exactly one of several who want it.

Tried once for each store of a process, with small objects that are removed again: some servers
take the condition and ignore it (rclone's and JuiceFS's S3 gateways do), which no name tells.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ray_dcp.core.processes import ProcessLock
from ray_dcp.errors import StorageError
from ray_dcp.store.storage import TEMP_PREFIX, KeyExistsError, KeyMissingError

Create = Callable[[str, bytes], object]
Read = Callable[[str], bytes]
Delete = Callable[[list[str]], object]

# Why few: SeaweedFS has more of them wait for seconds.
_RACERS = 4
_LOCK = ProcessLock()
_KNOWN: dict[str, bool] = {}
# Why cleared in a child: whoever tries a store now is not there.
_UNDER_WAY: dict[str, threading.Lock] = {}
os.register_at_fork(after_in_child=_UNDER_WAY.clear)


def creates_if_absent_in(store: str, create: Create, read: Read, delete: Delete) -> bool:
    """Returns whether a key has exactly one winner in a store.

    Args:
        store: Names the store, as its bucket's URL; probed once.
        create: Creates a hidden key, conditionally, or raises `KeyExistsError`.
        read: Reads one, or raises `KeyMissingError`.
        delete: Removes some.

    Raises:
        StorageError: It could not be tried: the store did not answer, or this process may not
            write there. Not remembered.
    """
    with _LOCK:
        turn = _UNDER_WAY.setdefault(store, threading.Lock())
    with turn:
        if store not in _KNOWN:
            _KNOWN[store] = _tried(create, read, delete)
        return _KNOWN[store]


def _tried(create: Create, read: Read, delete: Delete) -> bool:
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
        # Why read: the answer to a key that was created may be lost, and a server that ignores the
        # condition may still say that it refused.
        if not put(first, b"first") and get(first) != b"first":
            return False
        if put(first, b"second") or get(first) != b"first":
            return False
        values = [str(number).encode() for number in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as threads:
            won = list(threads.map(lambda value: put(race, value), values))
        stands = get(race)
        # Why none is fine: the answer to the winner was lost, and it met itself.
        return sum(won) <= 1 and stands in values and (not any(won) or won[int(stands)])
    finally:
        for key in (first, race):
            with suppress(StorageError):
                delete([key])
