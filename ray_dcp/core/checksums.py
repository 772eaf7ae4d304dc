"""Block checksums of raw bytes, which lie at the end of each file.

Pure arithmetic over buffers. `planning.reads` decides which blocks a read has to verify.

A checkpoint of many chunks has many checksums: 8 bytes for each block. The writer of a file appends
them to it, little-endian, from the next multiple of 64 bytes on, so that no checksum has to be
sent to another process: the manifest holds their digest, and their number follows from the chunk
table. DCP reads only the items that `.metadata` names, never the bytes behind them.

    | item | item | ... | item | 0 to 63 zeros | checksum | checksum | ...
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from ray_dcp.core.values import Int64Array, UInt64Array
from ray_dcp.errors import DamagedCheckpointError, InvalidRequestError

Buffer = bytes | bytearray | memoryview

block_check: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest
"""Returns the checksum of one block. Why an alias: a wrapper function would double the cost."""

MIN_BLOCK_BYTES = 1 << 10
"""Shortest block. Why: 8 bytes of checksum per KiB are 0.8 % of the data, and only in chunks below
256 KiB; with 4 KiB, eight ranks that share such a chunk would read 1.3 times what they need."""
MAX_BLOCK_BYTES = 1 << 20
"""Longest block: a partial read has to read this much to verify one byte."""
DIGEST_BYTES = 16
"""Length of a digest (xxh3-128)."""

_BLOCKS_AIMED = 256


def block_bytes_for(num_bytes: int) -> int:
    """Returns the length of the checksum blocks of a chunk.

    This is the smallest power of two that cuts the chunk into at most 256 blocks, but at least 1
    KiB and at most 1 MiB.

    Args:
        num_bytes: Length of the chunk's raw bytes.

    Raises:
        InvalidRequestError: `num_bytes` is negative.

    Examples:
        >>> block_bytes_for(0), block_bytes_for(3 << 20), block_bytes_for(1 << 40)
        (1024, 16384, 1048576)
    """
    return int(block_bytes_for_many(np.array([num_bytes]))[0])


def block_bytes_for_many(num_bytes: Int64Array) -> Int64Array:
    """Returns `block_bytes_for` of each length.

    Args:
        num_bytes: int64[n].

    Returns:
        int64[n].

    Raises:
        InvalidRequestError: A length is negative.
    """
    lengths = np.asarray(num_bytes, dtype=np.int64)
    if lengths.size and int(lengths.min()) < 0:
        raise InvalidRequestError(
            f"A length must be 0 or more bytes, but the shortest of them is {int(lengths.min())}"
        )
    low, high = MIN_BLOCK_BYTES.bit_length(), MAX_BLOCK_BYTES.bit_length()
    steps = [1 << bit for bit in range(low - 1, high)]
    bounds = np.array([_BLOCKS_AIMED * step for step in steps[:-1]], dtype=np.int64)
    choice = np.searchsorted(bounds, lengths, side="left")
    return np.array(steps, dtype=np.int64)[choice]


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """Returns the number of blocks of a chunk; 0 if it is empty or has no checksums.

    Args:
        num_bytes: Length of the chunk's raw bytes.
        block_bytes: Length of a block; 0 for a chunk without checksums.
    """
    return -(-num_bytes // block_bytes) if block_bytes > 0 else 0


def num_blocks_many(num_bytes: Int64Array, block_bytes: Int64Array) -> Int64Array:
    """Returns `num_blocks` of each chunk.

    Args:
        num_bytes: int64[n].
        block_bytes: int64[n].

    Returns:
        int64[n].
    """
    blocks = np.asarray(block_bytes, dtype=np.int64)
    lengths = np.asarray(num_bytes, dtype=np.int64)
    counts = lengths // np.maximum(blocks, 1)
    counts += lengths > counts * blocks
    return np.where(blocks > 0, counts, 0)


def block_checks(buf: Buffer, block_bytes: int) -> UInt64Array:
    """Returns the xxh3-64 (seed 0) of every block of a buffer.

    Args:
        buf: Raw bytes of one chunk, one-dimensional, one byte per element.
        block_bytes: Length of a block; the last may be shorter.

    Returns:
        uint64[k], k = `num_blocks(len(buf), block_bytes)`.

    Raises:
        InvalidRequestError: `block_bytes` is not positive.

    Complexity:
        O(bytes); 10 to 20 GB/s per core, and about 1 us for a small buffer.
    """
    return np.array(_block_checks(buf, block_bytes), dtype=np.uint64)


def _block_checks(buf: Buffer, block_bytes: int) -> list[int]:
    if block_bytes <= 0:
        raise InvalidRequestError(f"A block must have 1 or more bytes, but has {block_bytes}")
    length = len(buf)
    if length <= block_bytes:
        return [block_check(buf)] if length else []
    view, check = memoryview(buf), block_check
    return [check(view[start : start + block_bytes]) for start in range(0, length, block_bytes)]


def digest(checks: UInt64Array) -> bytes:
    """Returns the 16-byte digest of block checksums: their xxh3-128, as little-endian numbers.

    Args:
        checks: uint64[k], the block checksums.
    """
    return xxhash.xxh3_128_digest(np.ascontiguousarray(checks, dtype="<u8").data)


digest_bytes: Callable[[Buffer], bytes] = xxhash.xxh3_128_digest
"""Returns the 16-byte digest of a whole small file: its xxh3-128."""


def first_bad_block(buf: Buffer, block_bytes: int, checks: UInt64Array) -> int | None:
    """Returns the index of the first block that does not match its checksum, or None.

    Args:
        buf: Raw bytes from a block boundary on; the last block may be shorter.
        block_bytes: Length of a block.
        checks: uint64[k], the expected checksums of `buf`'s blocks.

    Raises:
        DamagedCheckpointError: The number of checksums does not match the length of `buf`.
        InvalidRequestError: `block_bytes` is not positive.
    """
    found, expected = _block_checks(buf, block_bytes), checks.tolist()
    if found == expected:
        return None
    if len(found) != len(expected):
        raise DamagedCheckpointError(
            f"Expected {len(expected)} checksum blocks of {block_bytes} bytes, found {len(found)} "
            f"in {len(buf)} bytes; the chunk table does not fit the data, load an earlier step"
        )
    pairs = zip(found, expected, strict=True)
    return next(index for index, (one, other) in enumerate(pairs) if one != other)


ALIGNMENT = 64
CHECK_BYTES = 8


def end_checks(end: int, checks: UInt64Array) -> bytes:
    """Returns the bytes that follow the last item of a file; empty if it has no checksums.

    Args:
        end: End of that item in the file.
        checks: uint64[k], checksums of all blocks of the file, in the order of its chunks.

    Examples:
        >>> list(end_checks(62, np.array([1], np.uint64)))
        [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    """
    if not len(checks):
        return b""
    return bytes(-end % ALIGNMENT) + np.ascontiguousarray(checks, dtype="<u8").tobytes()


def length_with_checks(end: Int64Array, num_checks: Int64Array) -> Int64Array:
    """Returns the length of each file with its checksums.

    Args:
        end: int64[f], end of the last item.
        num_checks: int64[f], number of checksums that follow.

    Examples:
        >>> length_with_checks(np.array([60, 60]), np.array([2, 0])).tolist()
        [80, 60]
    """
    return end + (-end % ALIGNMENT) * (num_checks > 0) + CHECK_BYTES * num_checks
