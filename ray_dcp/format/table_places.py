"""The parts of a chunk table that belong to one save: the attempt in file names, deferred items.

The file of a table is the same for all saves of a plan: its file names contain `{attempt}`, and
deferred items, whose length is known only once they are written, have no place. The manifest has
the attempt, and the places as runs of equal ones, in the order of the table.
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
"""Most checksums that are outside the table: those of 512 TiB in blocks of 1 MiB."""


class DeferredRows(NamedTuple):
    """Which of all deferred chunks a part of a table contains."""

    rows: Int64Array
    """int64[k], numbers of the deferred chunks, in the order of the part."""
    total: int
    """Number of deferred chunks in the whole table."""


def checks_follow(manifest: Manifest) -> bool:
    """Returns whether the data files end with their block checksums, or the chunk table has them.

    Why not always: early versions wrote `safetensors` files that end with a tensor.
    """
    return manifest.container == "torch_save"


def place_runs(places: Int64Array) -> tuple[PlaceRun, ...]:
    """Returns the places of deferred items in the form of a manifest.

    Args:
        places: int64[k, 3], item offset, item bytes and block bytes of each item.

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
    """Returns the chunk table of one attempt, or of a part of it.

    Args:
        table: The table that all saves of the plan share, with all chunks of a file or none.
        manifest: Manifest of the attempt.
        deferred: Which deferred chunks `table` contains; None means all.

    Returns:
        The table. Checksums at the end of data files are 0 in it, and are filled in later
        (`io.table_parts.CheckFile`).

    Raises:
        DamagedCheckpointError: Table and manifest don't belong together, or the result contradicts
            itself.
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
        # Why zeros: the system allocates memory only once it is written to.
        checks = np.zeros(int(check_start[-1]), np.uint64)
    elif not np.array_equal(table.check_start, check_start):
        raise damaged(f"{check_start[-1]} checksums, block by block", f"{len(checks)}")
    whole = replace(whole, check_start=check_start, checks=checks)
    check_table(whole)
    return whole


def placed(table: ChunkTable, attempt: str, places: Int64Array) -> ChunkTable:
    """Returns a planned chunk table with the file names of one attempt and all places.

    Args:
        table: The table that all saves of the plan share.
        attempt: Id that replaces `{attempt}` in file names.
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
"""Columns of a chunk table, with the column of `places` that fills them for deferred chunks."""


def starts_of_files(table: ChunkTable) -> Int64Array:
    """Returns where the chunks of each file begin, and the number of chunks: int64[f + 1].

    Args:
        table: A chunk table whose chunks are in file order.
    """
    return np.searchsorted(table.file, np.arange(len(table.files) + 1)).astype(np.int64)
