"""What a chunk table has of one save alone: the attempt in its files' names, and deferred items.

The file of a table is the same in all saves of a plan: `{attempt}` stands in the names of its
files, and deferred items, whose length shows when they are written, have no place. The manifest
has the attempt, and the places as runs of equal ones, in the order of the table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ray_dcp.core.checksums import num_blocks_many
from ray_dcp.core.grouping import offsets_of
from ray_dcp.core.values import ChunkTable, Int64Array
from ray_dcp.format.manifest import Manifest, PlaceRun
from ray_dcp.format.table_check import check_table, damaged

MOST_CHECKS = 1 << 29
"""Of which no byte is in the table: those of 512 TiB in blocks of 1 MiB."""


class DeferredRows(NamedTuple):
    """Which of all deferred chunks a part of a table has."""

    rows: Int64Array
    """int64[k], their numbers, in the order of the part."""
    total: int
    """How many there are in the whole table."""


def checks_follow(manifest: Manifest) -> bool:
    """Whether the data files end with their block checksums; else the chunk table has them.

    Why not always: the files of early versions in the container `safetensors` end with a tensor.
    """
    return manifest.container == "torch_save"


def place_runs(places: Int64Array) -> tuple[PlaceRun, ...]:
    """Returns the places of deferred items as a manifest has them.

    Args:
        places: int64[k, 3], item offset, item bytes and block bytes of each.

    Examples:
        >>> place_runs(np.array([[64, 9, 1024], [64, 9, 1024], [128, 9, 1024]]))
        (PlaceRun(item_offset=64, item_bytes=9, block_bytes=1024, num_items=2), \
PlaceRun(item_offset=128, item_bytes=9, block_bytes=1024, num_items=1))
    """
    changes = np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1
    starts = np.concatenate([np.zeros(min(len(places), 1), np.int64), changes])
    counts = np.diff(np.append(starts, len(places)))
    rows = np.column_stack([places[starts], counts]).tolist()
    return tuple(PlaceRun(*row) for row in rows)


def with_places(
    table: ChunkTable, manifest: Manifest, deferred: DeferredRows | None = None
) -> ChunkTable:
    """Returns the chunk table of one attempt, or a part of it.

    Args:
        table: What all saves of the plan share; of each file all chunks or none.
        manifest: Of the attempt.
        deferred: Which deferred chunks are in `table`; None: all.

    Returns:
        Checksums that data files end with are 0, to be filled in (`io.table_parts.CheckFile`).

    Raises:
        DamagedCheckpointError: They do not belong together, or the whole contradicts itself.
    """
    if (np.diff(table.file) < 0).any():
        raise damaged("chunks in the order of their files", "another order")
    late = np.flatnonzero(table.payload_offset < 0)
    rows, total = (np.arange(len(late)), len(late)) if deferred is None else deferred
    # Why Python's sum: it does not overflow.
    told = sum(run.num_items for run in manifest.deferred)
    if told != total or len(rows) != len(late):
        raise damaged(f"{told} deferred items, as its manifest says,", f"{total}")
    runs = np.array(manifest.deferred, dtype=np.int64).reshape(-1, 4)
    found = runs[np.searchsorted(np.cumsum(runs[:, 3]), rows, side="right"), :3]
    whole = placed(table, manifest.attempt, found)
    lengths = (whole.item_offset, whole.payload_bytes, whole.block_bytes)
    if any((column < 0).any() for column in lengths):
        raise damaged("a place for each chunk", "none")
    counts = num_blocks_many(whole.payload_bytes, whole.block_bytes)
    if int(counts.max(initial=0)) > MOST_CHECKS or int(counts.sum()) > MOST_CHECKS:
        raise damaged(f"at most {MOST_CHECKS} checksums", "more")
    check_start, checks = offsets_of(counts), table.checks
    if checks_follow(manifest):
        if len(checks):
            raise damaged("no checksums beside those that its files end with", f"{len(checks)}")
        # Why zeros: memory that is never touched is never taken.
        checks = np.zeros(int(check_start[-1]), np.uint64)
    elif not np.array_equal(table.check_start, check_start):
        raise damaged(f"{check_start[-1]} checksums, block by block", f"{len(checks)}")
    whole = replace(whole, check_start=check_start, checks=checks)
    check_table(whole)
    return whole


def placed(table: ChunkTable, attempt: str, places: Int64Array) -> ChunkTable:
    """Returns a planned chunk table with the names of one attempt's files and all places.

    Args:
        table: What all saves of the plan share.
        attempt: Takes the place of `{attempt}` in names.
        places: int64[k, 3], item offset, item bytes and block bytes of each deferred chunk.
    """
    late = np.flatnonzero(table.payload_offset < 0)
    columns = {name: getattr(table, name).copy() for name in _PLACES}
    for name, which in _PLACES.items():
        columns[name][late] = places[:, which]
    files = tuple(key.replace("{attempt}", attempt) for key in table.files)
    return replace(table, files=files, **columns)


_PLACES = {
    "item_offset": 0,
    "item_bytes": 1,
    "block_bytes": 2,
    "payload_offset": 0,
    "payload_bytes": 1,
}
"""Columns of a chunk table, and what of a deferred chunk's place they have."""


def starts_of_files(table: ChunkTable) -> Int64Array:
    """Returns where the chunks of each file begin, and how many there are: int64[f + 1].

    Args:
        table: Its chunks in the order of their files.
    """
    return np.searchsorted(table.file, np.arange(len(table.files) + 1)).astype(np.int64)
