"""The reserve of a run: a file that makes room for the records of a deletion on a full disk.

It is deleted there, and created again when there is space.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from ray_dcp.errors import (
    CheckpointError,
)
from ray_dcp.io.records import T
from ray_dcp.store.storage import Storage, is_full, read_if_there

RESERVE = "reserve"
RESERVE_BYTES = 64 << 10
"""Enough for a lease, an announcement and some records, with the overhead of any filesystem."""


def keep_reserve(shared: Storage) -> None:
    """Creates the reserve of a run; does nothing if there is no space for it.

    Args:
        shared: Shared storage of the run's managers.
    """
    # Why not on an object store: it does not fill up, and each request costs a round trip.
    if hasattr(shared, "request_bytes"):
        return
    with suppress(CheckpointError):
        # Why random: a compressing filesystem would reserve nothing for zeros.
        shared.write(RESERVE, os.urandom(RESERVE_BYTES))


def freeing(shared: Storage, work: Callable[[], T]) -> T:
    """Calls `work` and returns its result; if the disk is full, retries without the reserve.

    Args:
        shared: Shared storage of the run's managers.
        work: The call; may be repeated once.

    Raises:
        CheckpointError: The error of `work`.
    """
    try:
        return work()
    except CheckpointError as error:
        if not is_full(error) or read_if_there(shared, RESERVE, 0) is None:
            raise
    shared.delete([RESERVE])
    try:
        return work()
    finally:
        keep_reserve(shared)
