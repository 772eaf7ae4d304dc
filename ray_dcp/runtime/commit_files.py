"""All bytes of a commit but the data: chunk table, manifest and `.metadata`, from the receipts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import (
    FileEntry,
    FilesColumns,
    Manifest,
    encode_record,
)
from ray_dcp.format.metadata_out import encode_metadata, fill_metadata, metadata_template
from ray_dcp.format.table import encode_table
from ray_dcp.format.table_groups import end_of
from ray_dcp.format.table_places import place_runs
from ray_dcp.format.tensor_stats import combine, decode_parts, encode_stats, stats_key
from ray_dcp.plan.finish import checked_receipts, finish_table
from ray_dcp.plan.structural_plan import StructuralPlan
from ray_dcp.plan.values import GlobalPlan, Int64Array
from ray_dcp.protocol.commands import BuildCommit, CommitBuilt
from ray_dcp.protocol.receipts import FileReceipts, join_receipts
from ray_dcp.transfer.opening import METADATA_KEY

__all__ = ["build_commit"]

MOST_KEPT_BYTES = 64 << 20
"""Longest `.metadata` of which that is kept, too."""


class _Table(NamedTuple):
    """A chunk table on storage."""

    data: bytes
    digest: str
    end: FileEntry | None
    """Its last bytes, where its rows are in groups."""

    def entry(self, key: str) -> FileEntry:
        return FileEntry(key, len(self.data), self.digest)


def build_commit(task: BuildCommit) -> CommitBuilt:
    """Returns what a task of this kind asks for.

    Raises:
        InternalError: Receipts and plan do not fit.
        DamagedCheckpointError: A receipt has changed on its way.
    """
    plan, key = task.plan, f"chunks.{task.attempt}.parquet"
    places, receipts = checked_receipts(plan, task.attempt, join_receipts(task.receipts))
    table = _shared_table(plan) if plan.checks_at_end else _own_table(task, receipts)
    metadata = None
    if plan.container == "torch_save" and task.stock_metadata:
        metadata = _metadata(task, places, receipts)
    record = encode_record(
        Manifest(
            attempt=task.attempt,
            epoch=task.epoch,
            world_size=plan.world_size,
            container=plan.container,
            created_s=time.time(),
            files=FilesColumns(
                tuple(receipts.keys.split("\n")) if len(receipts) else (),
                tuple(receipts.num_bytes.tolist()),
                receipts.digests.hex(),
            ),
            table=table.entry(key),
            metadata=None if metadata is None else _entry(METADATA_KEY, metadata),
            replaced_metadata=task.replaced_metadata,
            plan_digest=plan.digest.hex(),
            num_tensors=plan.num_tensors,
            num_chunks=plan.num_chunks,
            payload_bytes=plan.fixed_bytes + int(places[:, 1].sum()),
            previous_slot=task.previous_slot,
            decided=task.decided,
            deferred=place_runs(places) if plan.checks_at_end else (),
            table_end=None if table.end is None else replace(table.end, key=key),
        )
    )
    stats = _stats(task) if task.stats else b""
    return CommitBuilt(
        key, table.data, record, metadata, stats_key(task.attempt) if stats else "", stats
    )


def _stats(task: BuildCommit) -> bytes:
    """Returns what is told of the tensors beside the checkpoint."""
    plan = task.plan
    table = plan.few.table if isinstance(plan, StructuralPlan) else plan.table
    lengths = dict(zip(table.names, table.shape.prod(axis=1).tolist(), strict=True))
    return encode_stats(task.attempt, combine(map(decode_parts, task.stats), lengths))


_shared: WeakKeyDictionary[GlobalPlan, _Table] = WeakKeyDictionary()


def _shared_table(plan: GlobalPlan) -> _Table:
    """Returns the chunk table, which is encoded once for all saves of a plan."""
    found = _shared.get(plan)
    if found is None:
        if isinstance(plan, StructuralPlan):
            found = _table(encode_table(plan.few.table, plan.structure))
        else:
            found = _table(encode_table(plan.table))
        _shared[plan] = found
    return found


def _own_table(task: BuildCommit, receipts: FileReceipts) -> _Table:
    """Returns a chunk table with the checksums, as the data files have no room for them."""
    table = finish_table(task.plan, task.attempt, receipts)
    return _table(encode_table(replace(table, files=task.plan.table.files)))


def _table(data: bytes) -> _Table:
    start = end_of(data)
    end = None if start is None else _entry("", data[start:])
    return _Table(data, digest_bytes(data).hex(), end)


_templates: WeakKeyDictionary[GlobalPlan, tuple[bytes, bytes]] = WeakKeyDictionary()


def _metadata(task: BuildCommit, places: Int64Array, receipts: FileReceipts) -> bytes:
    """Returns `.metadata`; what is the same in all saves of a plan is encoded once."""
    plan, name = task.plan, places.tobytes()
    known, template = _templates.get(plan, (b"", b""))
    if not template or known != name:
        table = finish_table(plan, task.attempt, receipts)
        template = metadata_template(replace(table, files=plan.table.files))
        if len(template) <= MOST_KEPT_BYTES:
            _templates[plan] = name, template
    filled = fill_metadata(template, checkpoint_id=task.target.url, attempt=task.attempt)
    if filled is not None:
        return filled
    table = finish_table(plan, task.attempt, receipts)
    return encode_metadata(table, checkpoint_id=task.target.url, attempt=task.attempt)


def _entry(key: str, data: bytes) -> FileEntry:
    return FileEntry(key, len(data), digest_bytes(data).hex())
