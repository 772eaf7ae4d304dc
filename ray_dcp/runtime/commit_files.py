"""All bytes of a commit but the data: chunk table, manifest and `.metadata`, from the receipts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ray_dcp.format.checksums import digest_bytes, digest_parts
from ray_dcp.format.manifest import (
    FileEntry,
    FilesColumns,
    Manifest,
    encode_record,
)
from ray_dcp.format.metadata_out import encode_metadata, fill_metadata, metadata_template
from ray_dcp.format.table import encode_table
from ray_dcp.format.table_checks import encode_checks, encode_index
from ray_dcp.format.table_groups import end_of
from ray_dcp.format.tensor_stats import combine, decode_parts, encode_stats, stats_key
from ray_dcp.plan.finish import checked_receipts, finish_table, num_checks
from ray_dcp.plan.grouping import offsets_of
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.values import ChunkTable, GlobalPlan, Int64Array
from ray_dcp.protocol.commands import BuildCommit, CommitBuilt
from ray_dcp.protocol.receipts import FileReceipts, join_receipts
from ray_dcp.transfer.opening import METADATA_KEY

__all__ = ["build_commit"]

SPLIT_CHUNKS = 10_000
"""From so many chunks on, what all saves of a plan share is encoded once, as it is where the data
files end with their checksums. A smaller table, of 20 ms, is one file for people to look into."""
MOST_KEPT_BYTES = 64 << 20
"""Longest `.metadata` of which that is kept, too."""


class _Files(NamedTuple):
    table: FileEntry
    table_bytes: bytes
    checks: FileEntry | None = None
    checks_bytes: bytes | tuple[memoryview, ...] = ()
    metadata: bytes | None = None
    table_end: FileEntry | None = None


def build_commit(task: BuildCommit) -> CommitBuilt:
    """Returns what a task of this kind asks for.

    Raises:
        InternalError: Receipts and plan do not fit.
        DamagedCheckpointError: A receipt has changed on its way.
    """
    receipts = join_receipts(task.receipts)
    plan = task.plan
    wants_metadata = task.plan.container == "torch_save" and task.stock_metadata
    is_split = plan.checks_at_end or plan.num_chunks >= SPLIT_CHUNKS
    make = _split if is_split else _whole
    files = make(task, receipts, wants_metadata)
    manifest = Manifest(
        attempt=task.attempt,
        epoch=task.epoch,
        world_size=task.plan.world_size,
        container=task.plan.container,
        created_s=time.time(),
        files=FilesColumns(
            tuple(receipts.keys.split("\n")) if len(receipts) else (),
            tuple(receipts.num_bytes.tolist()),
            receipts.digests.hex(),
        ),
        table=files.table,
        metadata=None if files.metadata is None else _entry(METADATA_KEY, files.metadata),
        replaced_metadata=task.replaced_metadata,
        plan_digest=task.plan.digest.hex(),
        num_tensors=plan.num_tensors,
        num_chunks=plan.num_chunks,
        payload_bytes=_payload_bytes(task.plan, receipts),
        previous_slot=task.previous_slot,
        decided=task.decided,
        checks=files.checks,
        table_end=files.table_end,
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
    plan = task.plan
    table = plan.few.table if isinstance(plan, StructuralPlan) else plan.table
    lengths = dict(zip(table.names, table.shape.prod(axis=1).tolist(), strict=True))
    return encode_stats(task.attempt, combine(map(decode_parts, task.stats), lengths))


def _whole(task: BuildCommit, receipts: FileReceipts, wants_metadata: bool) -> _Files:
    table = finish_table(task.plan, task.attempt, receipts)
    data = encode_table(table)
    metadata = _metadata(task, table) if wants_metadata else None
    return _Files(_entry(_table_key(task), data), data, metadata=metadata)


def _split(task: BuildCommit, receipts: FileReceipts, wants_metadata: bool) -> _Files:
    plan, key = task.plan, f"chunks.{task.attempt}.checks"
    places, receipts = checked_receipts(plan, task.attempt, receipts)
    data, digest, end = _encoded(plan)
    checks_bytes: bytes | tuple[memoryview, ...]
    if plan.checks_at_end:
        checks_bytes = encode_index(offsets_of(num_checks(plan, receipts)), places)
        checks = _entry(key, checks_bytes)
    else:
        checks_bytes = encode_checks(offsets_of(receipts.count), places, receipts.parts)
        checks = FileEntry(key, sum(map(len, checks_bytes)), digest_parts(checks_bytes).hex())
    metadata = _shared_metadata(task, places, receipts) if wants_metadata else None
    table = FileEntry(_table_key(task), len(data), digest)
    if end is not None:
        end = replace(end, key=table.key)
    return _Files(table, data, checks, checks_bytes, metadata, end)


def _metadata(task: BuildCommit, table: ChunkTable) -> bytes:
    return encode_metadata(table, checkpoint_id=task.target.url, attempt=task.attempt)


_templates: WeakKeyDictionary[GlobalPlan, tuple[bytes, bytes]] = WeakKeyDictionary()


def _shared_metadata(task: BuildCommit, places: Int64Array, receipts: FileReceipts) -> bytes:
    """Returns `.metadata`; what is the same in all saves of a plan is encoded once."""
    plan, name = task.plan, places.tobytes()
    known, template = _templates.get(plan, (b"", b""))
    if not template or known != name:
        table = finish_table(plan, task.attempt, receipts)
        template = metadata_template(replace(table, files=plan.table.files))
        if len(template) <= MOST_KEPT_BYTES:
            _templates[plan] = name, template
    filled = fill_metadata(template, checkpoint_id=task.target.url, attempt=task.attempt)
    return filled or _metadata(task, finish_table(plan, task.attempt, receipts))


class _Encoded(NamedTuple):
    """What all saves of a plan share of their chunk tables."""

    data: bytes
    digest: str
    end: FileEntry | None
    """Its last bytes, where its rows are in groups."""


_encoded_plans: WeakKeyDictionary[GlobalPlan, _Encoded] = WeakKeyDictionary()


def _encoded(plan: GlobalPlan) -> _Encoded:
    found = _encoded_plans.get(plan)
    if found is None:
        if isinstance(plan, StructuralPlan):
            data = encode_table(plan.few.table, plan.structure)
        else:
            data = encode_table(plan.table)
        start = end_of(data)
        end = None if start is None else _entry("", data[start:])
        found = _encoded_plans[plan] = _Encoded(data, digest_bytes(data).hex(), end)
    return found


def _payload_bytes(plan: GlobalPlan, receipts: FileReceipts) -> int:
    return plan.fixed_bytes + int(receipts.places[:, 2].sum())


def _table_key(task: BuildCommit) -> str:
    return f"chunks.{task.attempt}.parquet"


def _entry(key: str, data: bytes) -> FileEntry:
    return FileEntry(key, len(data), digest_bytes(data).hex())
