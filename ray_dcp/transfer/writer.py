"""Writes part files as a plan says: frames, payloads and deferred items, checksums on the way.

Small tensors are packed with their frames into a joined buffer; large ones are hashed and
written slice by slice, while a slice is still in the processor's cache. Memory that others may
write to is copied first (`sources`). Reading back is in `reader`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ray_dcp.errors import CheckpointError
from ray_dcp.options import SaveOptions
from ray_dcp.plan.values import FilePlan, RankPlan, UInt64Array
from ray_dcp.protocol.messages import FileReceipt
from ray_dcp.store.storage import PartWriter, Storage
from ray_dcp.transfer.part_file import PartFile
from ray_dcp.transfer.sources import (
    BytesLike,
    Deferred,
    ItemPieces,
    ManySource,
    PieceSource,
    Source,
)
from ray_dcp.transfer.threads import Stop, run_tasks

__all__ = [
    "BytesLike",
    "Deferred",
    "ManySource",
    "PieceSource",
    "Source",
    "part_key",
    "write_file",
    "write_part",
    "write_pieces",
]

_NO_CHECKS: UInt64Array = np.zeros(0, dtype=np.uint64)


def part_key(plan: FilePlan, attempt: str) -> str:
    """Returns the key of a part file.

    Args:
        plan: Of the file.
        attempt: Id of the attempt that writes it.
    """
    return plan.key.replace("{attempt}", attempt)


def write_part(
    storage: Storage,
    rank_plan: RankPlan,
    attempt: str,
    *,
    source: Source,
    deferred: Deferred,
    options: SaveOptions,
) -> tuple[FileReceipt, ...]:
    """Writes all files of one rank's plan and returns their receipts, in the plan's order.

    Args:
        storage: Where to.
        rank_plan: What to write.
        attempt: Id of the attempt, put into the keys.
        source: Gives an item's bytes; called from several threads, possibly more than once a row.
        deferred: Gives a deferred item's bytes; called once a row, from several threads.
        options: `num_threads` and `sync_files` count.

    Raises:
        CheckpointError: The first error of a file; the others were given up and leave nothing
            visible, but files that were complete by then stay, under keys of this attempt.
        Exception: Whatever `source` or `deferred` raised.
    """
    receipts: dict[int, FileReceipt] = {}
    stop = Stop()

    def write(index: int) -> None:
        receipts[index] = _write_file(
            storage, rank_plan.files[index], attempt, source, deferred, options, stop
        )

    num_files = len(rank_plan.files)
    run_tasks(range(num_files), write, min(options.num_threads, num_files), stop)
    return tuple(receipts[index] for index in range(num_files))


def write_file(
    storage: Storage,
    file_plan: FilePlan,
    attempt: str,
    *,
    source: Source,
    deferred: Deferred,
    sync: bool = True,
) -> FileReceipt:
    """Writes one part file, publishes it, and returns its receipt.

    A file of the same content that another writer of this attempt published first is fine.

    Args:
        storage: Where to.
        file_plan: What to write.
        attempt: Id of the attempt, put into the key.
        source: Gives an item's bytes.
        deferred: Gives a deferred item's bytes.
        sync: Durable when the call returns.

    Raises:
        StorageError: The storage refused.
        CheckpointExistsError: The key is taken by other bytes.
        InternalError: Plan and items contradict each other.
        Exception: Whatever `source` or `deferred` raised.

    Complexity:
        O(bytes); a small tensor costs about 2 us.
    """
    options = SaveOptions(sync_files=sync)
    return _write_file(storage, file_plan, attempt, source, deferred, options, Stop())


def write_pieces(
    storage: Storage,
    file_plan: FilePlan,
    attempt: str,
    source: PieceSource,
    *,
    options: SaveOptions,
) -> FileReceipt:
    """Writes one part file from staged pieces, publishes it, and returns its receipt.

    Args:
        storage: Where to.
        file_plan: What to write.
        attempt: Id of the attempt, put into the key.
        source: Gives the bytes; may wait for them.
        options: `sync_files` counts.

    Raises:
        CheckpointError: As `write_file`.
        Exception: Whatever `source` raised.
    """
    return _write(storage, file_plan, attempt, lambda key: source, options, Stop())


def _write_file(
    storage: Storage,
    plan: FilePlan,
    attempt: str,
    source: Source,
    deferred: Deferred,
    options: SaveOptions,
    stop: Stop,
) -> FileReceipt:
    def pieces(key: str) -> PieceSource:
        return ItemPieces(plan, key, source, deferred)

    return _write(storage, plan, attempt, pieces, options, stop)


def _write(
    storage: Storage,
    plan: FilePlan,
    attempt: str,
    pieces: Callable[[str], PieceSource],
    options: SaveOptions,
    stop: Stop,
) -> FileReceipt:
    key = part_key(plan, attempt)
    writer: PartWriter | None = None
    try:
        writer = storage.open_writer(key, sync=options.sync_files)
        file = PartFile(writer, plan, key, pieces(key), stop)
        receipt = file.write()
        file.commit(storage, receipt)
    except BaseException as exc:
        if writer is not None:
            writer.abort()
        if isinstance(exc, CheckpointError) and exc.key is None:
            exc.key = key
        raise
    # Why not before: what somebody else published is compared with them.
    return replace(receipt, checks=_NO_CHECKS) if plan.checks_at_end else receipt
