"""All bytes of a commit but the data: chunk table, manifest and `.metadata`, from the receipts."""

from __future__ import annotations

import time
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import (
    CHECKS_VERSION,
    USUAL_VERSION,
    FileEntry,
    Manifest,
    encode_record,
)
from ray_dcp.format.metadata_out import encode_metadata
from ray_dcp.format.table import encode_table
from ray_dcp.format.table_checks import encode_checks
from ray_dcp.format.tensor_stats import combine, decode_parts, encode_stats, stats_key
from ray_dcp.plan.finish import finish_table, places_and_checks
from ray_dcp.plan.grouping import offsets_of
from ray_dcp.plan.values import GlobalPlan
from ray_dcp.protocol.commands import BuildCommit, CommitBuilt
from ray_dcp.protocol.messages import FileReceipt
from ray_dcp.transfer.opening import METADATA_KEY

__all__ = ["build_commit"]

SPLIT_CHUNKS = 100_000
"""From so many chunks on, what all saves of a plan share is encoded once, if no `.metadata` is
wanted, which would have to name them all again. A smaller table is one file, for people to look
into."""


class _Files(NamedTuple):
    table: FileEntry
    table_bytes: bytes
    checks: FileEntry | None = None
    checks_bytes: bytes = b""
    metadata: bytes | None = None


def build_commit(task: BuildCommit) -> CommitBuilt:
    """Returns what a task of this kind asks for.

    Raises:
        InternalError: Receipts and plan do not fit.
        DamagedCheckpointError: A receipt has changed on its way.
    """
    receipts = _by_file(task.receipts)
    table = task.plan.table
    wants_metadata = task.plan.container == "torch_save" and task.stock_metadata
    is_split = table.num_chunks >= SPLIT_CHUNKS and not wants_metadata
    files = _split(task, receipts) if is_split else _whole(task, receipts, wants_metadata)
    manifest = Manifest(
        attempt=task.attempt,
        epoch=task.epoch,
        world_size=task.plan.world_size,
        container=task.plan.container,
        created_s=time.time(),
        files=tuple(
            FileEntry(receipt.key, receipt.num_bytes, receipt.digest.hex())
            for _, receipt in sorted(receipts.items())
        ),
        table=files.table,
        metadata=None if files.metadata is None else _entry(METADATA_KEY, files.metadata),
        replaced_metadata=task.replaced_metadata,
        plan_digest=task.plan.digest.hex(),
        num_tensors=table.num_tensors,
        num_chunks=table.num_chunks,
        payload_bytes=_payload_bytes(task.plan, receipts),
        previous_slot=task.previous_slot,
        decided=task.decided,
        checks=files.checks,
        format_version=USUAL_VERSION if files.checks is None else CHECKS_VERSION,
    )
    record = encode_record(manifest)
    checks_key = "" if files.checks is None else files.checks.key
    stats = _stats(task) if task.stats else b""
    return CommitBuilt(
        files.table.key, files.table_bytes, record, files.metadata, checks_key, files.checks_bytes,
        stats_key(task.attempt) if stats else "", stats,
    )  # fmt: skip


def _stats(task: BuildCommit) -> bytes:
    """Returns what is told of the tensors beside the checkpoint."""
    table = task.plan.table
    lengths = dict(zip(table.names, table.shape.prod(axis=1).tolist(), strict=True))
    return encode_stats(task.attempt, combine(map(decode_parts, task.stats), lengths))


def _whole(task: BuildCommit, receipts: dict[int, FileReceipt], wants_metadata: bool) -> _Files:
    table = finish_table(task.plan, task.attempt, receipts)
    data = encode_table(table)
    metadata = None
    if wants_metadata:
        metadata = encode_metadata(table, checkpoint_id=task.target.url, attempt=task.attempt)
    return _Files(_entry(_table_key(task), data), data, metadata=metadata)


def _split(task: BuildCommit, receipts: dict[int, FileReceipt]) -> _Files:
    places, checks = places_and_checks(task.plan, task.attempt, receipts)
    counts = [len(receipts[file].checks) for file in range(len(receipts))]
    checks_bytes = encode_checks(offsets_of(np.array(counts, np.int64)), places, checks)
    data, digest = _encoded(task.plan)
    return _Files(
        FileEntry(_table_key(task), len(data), digest),
        data,
        _entry(f"chunks.{task.attempt}.checks", checks_bytes),
        checks_bytes,
    )


_encoded_plans: WeakKeyDictionary[GlobalPlan, tuple[bytes, str]] = WeakKeyDictionary()


def _encoded(plan: GlobalPlan) -> tuple[bytes, str]:
    """Returns what all saves of a plan share of their chunk tables, and its digest."""
    found = _encoded_plans.get(plan)
    if found is None:
        data = encode_table(plan.table)
        found = _encoded_plans[plan] = (data, digest_bytes(data).hex())
    return found


def _payload_bytes(plan: GlobalPlan, receipts: dict[int, FileReceipt]) -> int:
    fixed = plan.table.payload_bytes
    deferred = sum(place.item_bytes for one in receipts.values() for place in one.deferred)
    return int(fixed[fixed > 0].sum()) + deferred


def _table_key(task: BuildCommit) -> str:
    return f"chunks.{task.attempt}.parquet"


def _by_file(receipts: tuple[FileReceipt, ...]) -> dict[int, FileReceipt]:
    found: dict[int, FileReceipt] = {}
    for receipt in receipts:
        if receipt.file in found:
            raise InternalError(
                f"Expected one receipt for file {receipt.file}, but found two: "
                f"{found[receipt.file].key} and {receipt.key}. Please report this",
                key=receipt.key,
            )
        found[receipt.file] = receipt
    return found


def _entry(key: str, data: bytes) -> FileEntry:
    return FileEntry(key, len(data), digest_bytes(data).hex())
