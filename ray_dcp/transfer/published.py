"""Tells whether a file that somebody else published is the one that we meant to publish.

A writer that took over from another, or lost the answer to its commit, meets its own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ray_dcp.format.checksums import block_checks, num_blocks
from ray_dcp.format.end_checks import end_checks
from ray_dcp.protocol.messages import FileReceipt
from ray_dcp.store.storage import Storage

__all__ = ["Region", "same_file_is_published"]

_READ_BYTES = 8 << 20


class Region(NamedTuple):
    """Raw bytes in a file with checksums."""

    offset: int
    num_bytes: int
    block_bytes: int


def same_file_is_published(
    storage: Storage,
    receipt: FileReceipt,
    regions: Sequence[Region],
    *,
    checks_at_end: bool = False,
) -> bool:
    """Tells whether the file under a receipt's key has its length and all its checksums.

    Args:
        storage: Where to look.
        receipt: What was to be published.
        regions: Where the receipt's checksums belong, in their order.
        checks_at_end: The file has to end with them.

    Raises:
        StorageError: The file can't be read.
    """
    sizes = [e.num_bytes for e in storage.list(receipt.key) if e.key == receipt.key]
    if sizes != [receipt.num_bytes]:
        return False
    if checks_at_end:
        tail = end_checks(0, receipt.checks)
        if storage.read(receipt.key, receipt.num_bytes - len(tail), len(tail)) != tail:
            return False
    done = 0
    for region in regions:
        # Why: a multiple of the block, as long as one block fits (none is longer than 1 MiB).
        step = max(_READ_BYTES // region.block_bytes, 1) * region.block_bytes
        for start in range(0, region.num_bytes, step):
            length = min(step, region.num_bytes - start)
            found = block_checks(
                storage.read(receipt.key, region.offset + start, length), region.block_bytes
            )
            count = num_blocks(length, region.block_bytes)
            if not np.array_equal(found, receipt.checks[done : done + count]):
                return False
            done += count
    return True
