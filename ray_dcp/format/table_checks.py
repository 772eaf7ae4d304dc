"""The part of a large chunk table that differs from save to save, in a file of its own.

A chunk table of many chunks is the same in every save of the same plan, but for the attempt in
the names of its files, the block checksums, and the places of deferred items. So it is encoded
once, with `{attempt}` in its names, and a file beside it has the rest: little-endian, first the
magic, then the numbers of files, deferred chunks and checksums, where the checksums of each file
begin, `(item_offset, item_bytes, block_bytes)` of each deferred chunk, and the checksums, both in
the order of the table. The index is there for readers that need a few files only: the manifest has
the digest of each file's checksums.

Where the data files end with their own checksums (`end_checks`) none are here, and the magic is
another one: the file has only the index and the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.checksums import num_blocks_many
from ray_dcp.format.record_fields import damaged
from ray_dcp.format.table_check import check_table
from ray_dcp.plan.grouping import offsets_of
from ray_dcp.plan.values import ChunkTable, Int64Array, UInt64Array

__all__ = [
    "END_MAGIC",
    "MAGIC",
    "ChecksHead",
    "DeferredRows",
    "MoreOfHead",
    "decode_head",
    "encode_checks",
    "encode_index",
    "join_checks",
    "join_head",
    "starts_of_files",
]

MAGIC = b"RDCPCHK1"
END_MAGIC = b"RDCPCHK2"
"""The checksums are at the ends of the data files."""
MOST_CHECKS = 1 << 29
"""Of which no byte is in this file: those of 512 TiB in blocks of 1 MiB."""
_HEAD = len(MAGIC) + 3 * 8


def encode_checks(
    file_start: Int64Array, places: Int64Array, checks: Sequence[UInt64Array]
) -> tuple[memoryview, ...]:
    """Returns the parts of the file that `join_checks` reads, which are not joined: they are long.

    Args:
        file_start: int64[f + 1], where the checksums of each file begin.
        places: int64[k, 3], item offset, item bytes and block bytes of each deferred chunk.
        checks: uint64[…], the block checksums of all chunks, one array after another.
    """
    words = _head_words(file_start, places, sum(map(len, checks)))
    words += [np.ascontiguousarray(part, dtype="<u8") for part in checks]
    return memoryview(MAGIC), *(part.view(np.uint8).data for part in words if len(part))


def encode_index(file_start: Int64Array, places: Int64Array) -> bytes:
    """Returns the file that stands for checksums which are at the ends of the data files.

    Args:
        file_start: As for `encode_checks`.
        places: As there.
    """
    words = _head_words(file_start, places, int(file_start[-1]))
    return END_MAGIC + b"".join(part.tobytes() for part in words)


def _head_words(file_start: Int64Array, places: Int64Array, num_checks: int) -> list[UInt64Array]:
    counts = np.array([len(file_start) - 1, len(places), num_checks])
    head = (counts, file_start, places.reshape(-1))
    return [np.ascontiguousarray(part, dtype="<i8").view("<u8") for part in head]


def join_checks(table: ChunkTable, data: bytes, attempt: str) -> ChunkTable:
    """Returns the whole chunk table of one attempt.

    Args:
        table: The part that all saves of the plan share.
        data: What `encode_checks` made for this attempt, or `encode_index`: then the checksums are
            0, and have to be filled in.
        attempt: Which.

    Raises:
        DamagedCheckpointError: They do not belong together, or the whole contradicts itself.
    """
    head = decode_head(data, len(data))
    if head.at_end:
        return join_head(table, head, attempt)
    checks = np.frombuffer(data, "<u8", head.num_checks, head.num_bytes).astype(np.uint64)
    return join_head(table, head, attempt, checks)


@dataclass(frozen=True, eq=False)
class ChecksHead:
    """What a file of checksums begins with.

    Attributes:
        file_start: int64[f + 1], where the checksums of each file begin.
        places: int64[k, 3], as for `encode_checks`.
        num_bytes: Its length; the checksums follow.
        at_end: They do not: they are at the ends of the data files.
    """

    file_start: Int64Array
    places: Int64Array
    num_bytes: int
    at_end: bool = False

    @property
    def num_checks(self) -> int:
        """How many checksums there are."""
        return int(self.file_start[-1])


class MoreOfHead(Exception):
    """The head is longer than what was given: `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def decode_head(data: bytes, file_bytes: int) -> ChecksHead:
    """Returns the head of a file of checksums.

    Args:
        data: Its first bytes.
        file_bytes: Its whole length.

    Raises:
        MoreOfHead: `data` is too short.
        DamagedCheckpointError: It is none, or its length is not what it says.
    """
    if len(data) < _HEAD or data[: len(MAGIC)] not in (MAGIC, END_MAGIC):
        raise DamagedCheckpointError(
            "expected a file of checksums, found another one; load an earlier step"
        )
    files, places, checks = np.frombuffer(data, "<i8", 3, len(MAGIC)).tolist()
    at_end = data[: len(MAGIC)] == END_MAGIC
    words = [files + 1, 3 * places, 0 if at_end else checks]
    # Why Python's integers: theirs do not overflow.
    if min(files, places, checks) < 0 or file_bytes != _HEAD + 8 * sum(words):
        raise damaged("as many bytes as the file of checksums says", f"{file_bytes}")
    if at_end and checks > MOST_CHECKS:
        raise damaged(f"at most {MOST_CHECKS} checksums", f"{checks}")
    end = _HEAD + 8 * (words[0] + words[1])
    if len(data) < end:
        raise MoreOfHead(end)
    file_start = np.frombuffer(data, "<i8", words[0], _HEAD).astype(np.int64)
    found = np.frombuffer(data, "<i8", words[1], _HEAD + 8 * words[0]).astype(np.int64)
    # Why in order: of a part of the files the checksums would else be more than of all.
    if file_start[-1] != checks or (file_start[1:] < file_start[:-1]).any():
        raise damaged(f"{checks} checksums, file by file", f"{file_start[-1]}")
    return ChecksHead(file_start, found.reshape(-1, 3), end, at_end)


class DeferredRows(NamedTuple):
    """Which of all deferred chunks a part of a table has."""

    rows: Int64Array
    """int64[k], their numbers, in the order of the part."""
    total: int
    """How many there are in the whole table."""


def join_head(
    table: ChunkTable,
    head: ChecksHead,
    attempt: str,
    checks: UInt64Array | None = None,
    deferred: DeferredRows | None = None,
) -> ChunkTable:
    """Returns the chunk table of one attempt, or a part of it.

    Args:
        table: The part that all saves of the plan share; of each file all chunks or none.
        head: Of the attempt's file of checksums.
        attempt: Which.
        checks: uint64[n], kept as it is; None: zeros, to be filled in later.
        deferred: Which deferred chunks are in `table`; None: all.

    Raises:
        DamagedCheckpointError: They do not belong together, or the whole contradicts itself.
    """
    late = np.flatnonzero(table.payload_offset < 0)
    rows, total = (np.arange(len(late)), len(late)) if deferred is None else deferred
    if len(head.places) != total or len(head.file_start) != len(table.files) + 1:
        raise damaged(
            f"{total} places and {len(table.files)} files in the file of checksums",
            f"{len(head.places)} and {len(head.file_start) - 1}",
        )
    if len(rows) != len(late):
        raise damaged(f"{len(rows)} deferred items in a part of the table", f"{len(late)}")
    places = head.places[rows]
    found = np.stack([table.item_offset, table.item_bytes, table.block_bytes])
    found[:, late] = places.T
    if (found < 0).any() or (found[2, late] == 0).any():
        raise damaged("a place for each deferred item", "a negative number or no block length")
    payload_offset, payload_bytes = table.payload_offset.copy(), table.payload_bytes.copy()
    payload_offset[late], payload_bytes[late] = places[:, 0], places[:, 1]
    check_start = offsets_of(num_blocks_many(payload_bytes, found[2]))
    counts = np.diff(check_start[starts_of_files(table)])
    there = np.ones(len(table.files), dtype=bool)
    if deferred is not None:
        there[:] = False
        there[table.file] = True
    told = np.diff(head.file_start)
    if int(head.file_start[0]) != 0 or not np.array_equal(counts[there], told[there]):
        raise damaged(f"{check_start[-1]} checksums, file by file", "others")
    if checks is None:
        # Why zeros: memory that is never touched is never taken.
        checks = np.zeros(int(check_start[-1]), np.uint64)
    if len(checks) != check_start[-1]:
        raise damaged(f"{check_start[-1]} checksums", f"{len(checks)}")
    whole = replace(
        table,
        files=tuple(key.replace("{attempt}", attempt) for key in table.files),
        item_offset=found[0],
        item_bytes=found[1],
        block_bytes=found[2],
        payload_offset=payload_offset,
        payload_bytes=payload_bytes,
        check_start=check_start,
        checks=checks,
    )
    check_table(whole)
    return whole


def starts_of_files(table: ChunkTable) -> Int64Array:
    """Returns where the chunks of each file begin, and how many there are: int64[f + 1].

    Args:
        table: Its chunks in the order of their files.
    """
    return np.searchsorted(table.file, np.arange(len(table.files) + 1)).astype(np.int64)
