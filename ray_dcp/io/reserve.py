"""A small file in a run, whose space a deletion may use on a full disk.

To free space takes a record of what is deleted, and a writer lease: on a disk without a free block
neither can be written. The file is given up for them, and made again when there is space.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ray_dcp.errors import CheckpointError
from ray_dcp.store.storage import Storage, is_full, read_if_there

T = TypeVar("T")

RESERVE = "reserve"
RESERVE_BYTES = 64 << 10
"""Blocks for a lease, an announcement and some records, whatever the filesystem adds to them."""


def keep_reserve(shared: Storage) -> None:
    """Makes the reserve of a run; does nothing where there is no space for it.

    Args:
        shared: What the managers of the run share.
    """
    # Why not there: an object store does not fill up, and each of its requests is waited for.
    if hasattr(shared, "request_bytes"):
        return
    with suppress(CheckpointError):
        # Why random: a filesystem that compresses would keep nothing of zeros.
        shared.write(RESERVE, os.urandom(RESERVE_BYTES))


def freeing(shared: Storage, work: Callable[[], T]) -> T:
    """Returns what work gives; where it fails as the disk is full, once more without the reserve.

    Args:
        shared: What the managers of the run share.
        work: May be done twice.

    Raises:
        CheckpointError: As work does.
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
