"""Builds all bytes of a commit except the data, from the receipts of the ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from weakref import WeakKeyDictionary

from ray_dcp.commit_protocol.commands import (
    BuildCommit,
    CommitBuilt,
)
from ray_dcp.commit_protocol.messages import (
    join_receipts,
)
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.values import GlobalPlan
from ray_dcp.format.manifest import (
    FileEntry,
    FilesColumns,
    Manifest,
    encode_record,
)
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.format.table import end_of, place_runs, placed
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.planning.global_plan import checked_receipts, encoded_table


def build_commit(task: BuildCommit) -> CommitBuilt:
    """Returns the result of `BuildCommit`.

    Raises:
        InternalError: Receipts and plan do not match.
    """
    plan, key = task.plan, f"chunks.{task.attempt}.table"
    receipts = join_receipts(task.receipts)
    places = checked_receipts(plan, task.attempt, receipts)
    table, entry, end = _table_of(plan)
    metadata = None
    if task.stock_metadata:
        finished = placed(plan.table, task.attempt, places)
        url = task.target.url
        metadata = encode_metadata(finished, checkpoint_id=url, attempt=task.attempt)
    record = encode_record(
        Manifest(
            attempt=task.attempt,
            epoch=task.epoch,
            world_size=plan.world_size,
            created_s=time.time(),
            files=FilesColumns(
                tuple(receipts.keys.split("\n")) if len(receipts) else (),
                tuple(receipts.num_bytes.tolist()),
                receipts.digests.hex(),
            ),
            table=replace(entry, key=key),
            metadata=None if metadata is None else _entry(METADATA_KEY, metadata),
            replaced_metadata=task.replaced_metadata,
            plan_digest=plan.digest.hex(),
            num_tensors=plan.table.num_tensors,
            num_chunks=plan.table.num_chunks,
            payload_bytes=plan.fixed_bytes + int(places[:, 1].sum()),
            previous_slot=task.previous_slot,
            decided=task.decided,
            deferred=place_runs(places),
            table_end=None if end is None else replace(end, key=key),
            about=task.about,
        )
    )
    return CommitBuilt(key, table, record, metadata)


_tables: WeakKeyDictionary[GlobalPlan, tuple[bytes, FileEntry, FileEntry | None]] = (
    WeakKeyDictionary()
)


def _table_of(plan: GlobalPlan) -> tuple[bytes, FileEntry, FileEntry | None]:
    """Returns the chunk table of a plan, encoded once for all its saves.

    Returns:
        The table, its entry, and that of its last bytes if its rows are grouped; without keys.
    """
    found = _tables.get(plan)
    if found is None:
        data = encoded_table(plan)
        start = end_of(data)
        end = None if start is None else _entry("", data[start:])
        found = _tables[plan] = (data, _entry("", data), end)
    return found


def _entry(key: str, data: bytes) -> FileEntry:
    return FileEntry(key, len(data), digest_bytes(data).hex())
