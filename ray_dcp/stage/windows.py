"""Windows of staged bytes: where a rank's bytes lie in them.

The layout is pure, and the same on both sides: rank and stager derive it from the plan, nothing is
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_dcp.core.checksums import MAX_BLOCK_BYTES, block_bytes_for_many
from ray_dcp.core.values import FilePlan, Int32Array, Int64Array, RankPlan
from ray_dcp.errors import InternalError
from ray_dcp.io.writer import DEFERRED_ALIGNMENT

_PAGE = 4096
_LARGE_BYTES = 64 << 10
"""From this length on, a piece has the same place in a page as in its file: for direct I/O."""
_LEAST_PART_BYTES = MAX_BLOCK_BYTES
"""A piece is cut only where at least so much of it still goes into the window."""


@dataclass(frozen=True, eq=False)
class StagingLayout:
    """All staged bytes of one rank, segment by segment, in file order.

    A segment is a run of bytes of one piece in one window. Pieces are those of the `FilePlan`,
    then its deferred items. A piece has no segment when it is empty, and several when it is cut
    at the end of a window; each but the last is a whole number of its checksum blocks.

    Attributes:
        file: int32[s], position in `RankPlan.files`.
        piece: int32[s], number of the piece in its file.
        row: int32[s], row of the rank's `Columns`.
        is_deferred: bool[s].
        start: int64[s], first byte of the segment in the piece.
        source_start: int64[s], first byte of the segment in the item's bytes.
        num_bytes: int64[s], at least 1.
        window: int32[s], ascending.
        offset: int64[s], first byte of the segment in its window.
        file_end: int64[s], where its last byte ends in the file.
        window_first: int64[w + 1], where each window's segments start.
        file_first: int64[f + 1], where each file's segments start.
        used_bytes: int64[w], from each window's start to the end of its last segment.
    """

    file: Int32Array
    piece: Int32Array
    row: Int32Array
    is_deferred: np.ndarray
    start: Int64Array
    source_start: Int64Array
    num_bytes: Int64Array
    window: Int32Array
    offset: Int64Array
    file_end: Int64Array
    window_first: Int64Array
    file_first: Int64Array
    used_bytes: Int64Array

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return len(self.used_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return int(self.num_bytes.sum())

    def files_of(self, window: int) -> frozenset[int]:
        """Returns the files that have bytes in a window."""
        low, high = self.window_first[window : window + 2].tolist()
        return frozenset(self.file[low:high].tolist())


def lay_out_windows(
    plan: RankPlan, deferred_bytes: Sequence[Sequence[int]], window_bytes: int
) -> StagingLayout:
    """Returns where every byte of a rank's plan lies while it is staged.

    Small pieces follow each other without a gap. Large ones start where they will start in a
    page of their file, so that they can be written from where they are, past the page cache.

    Args:
        plan: The files and items that the rank writes.
        deferred_bytes: For each file, the lengths of its deferred items.
        window_bytes: Length of a window: a whole number of pages, at least two of the longest
            checksum blocks.

    Raises:
        InternalError: The lengths do not fit the plan.

    Complexity:
        O(pieces) in numpy, and a few steps of Python for each window.

    Examples:
        A rank writes 5 bytes and 3,000,000 bytes, whose checksum blocks have 16,384, and a window
        has 2 MiB. The large piece begins on a page, as in its file. Of the 2,093,056 bytes that are
        left in the first window it fills 127 whole blocks, 2,080,768 bytes, as a block is verified
        in one window; the other 919,232 bytes begin the second one.

        >>> from ray_dcp.core.columns import ColumnsBuilder
        >>> from ray_dcp.planning.global_plan import make_plan, rank_plan
        >>> builder = ColumnsBuilder()
        >>> _ = builder.tensor("large", "uint8", (3_000_000,))
        >>> _ = builder.tensor("small", "uint8", (5,))
        >>> plan = rank_plan(make_plan([builder.build()]), 0)
        >>> layout = lay_out_windows(plan, [()], 2 << 20)
        >>> for number, offset, piece, start, num_bytes in zip(
        ...     layout.window, layout.offset, layout.piece, layout.start, layout.num_bytes
        ... ):
        ...     print(f"window {number}, byte {offset}: {num_bytes} bytes of piece {piece} "
        ...           f"from {start} on")
        window 0, byte 0: 5 bytes of piece 0 from 0 on
        window 0, byte 4096: 2080768 bytes of piece 1 from 0 on
        window 1, byte 0: 919232 bytes of piece 1 from 2080768 on
    """
    lines = [
        _pieces(index, file, lengths)
        for index, (file, lengths) in enumerate(zip(plan.files, deferred_bytes, strict=True))
    ]
    columns = [np.concatenate(parts) for parts in zip(*lines, strict=True)] or [_NONE] * 7
    file, piece, row, source, num_bytes, place, block = columns
    full = num_bytes > 0
    file, piece, row, source = file[full], piece[full], row[full], source[full]
    num_bytes, place, block = num_bytes[full], place[full], block[full]
    num_fixed = np.array([len(one.row) for one in plan.files] or [0], dtype=np.int64)
    at, start, length, window, offset = _cut_into_windows(
        _line(num_bytes, place), num_bytes, block, window_bytes
    )
    num_windows = int(window[-1]) + 1 if len(window) else 0
    window_first = np.searchsorted(window, np.arange(num_windows + 1))
    ends = offset + length
    return StagingLayout(
        file=file[at].astype(np.int32),
        piece=piece[at].astype(np.int32),
        row=row[at].astype(np.int32),
        is_deferred=piece[at] >= num_fixed[file[at]],
        start=start,
        source_start=source[at] + start,
        num_bytes=length,
        window=window.astype(np.int32),
        offset=offset,
        file_end=place[at] + start + length,
        window_first=window_first.astype(np.int64),
        file_first=np.searchsorted(file[at], np.arange(len(plan.files) + 1)).astype(np.int64),
        used_bytes=ends[window_first[1:] - 1] if num_windows else _NONE,
    )


_NONE = np.zeros(0, dtype=np.int64)


def _pieces(index: int, file: FilePlan, deferred_bytes: Sequence[int]) -> tuple[Int64Array, ...]:
    """Returns (file, piece, row, source start, length, place in the file, block) of each piece."""
    if len(deferred_bytes) != len(file.deferred):
        raise InternalError(
            f"expected lengths of {len(file.deferred)} deferred items, found "
            f"{len(deferred_bytes)}; please report this",
            key=file.key,
        )
    lengths = np.array(deferred_bytes, dtype=np.int64)
    step = -(-lengths // DEFERRED_ALIGNMENT) * DEFERRED_ALIGNMENT
    first = -(-file.num_bytes // DEFERRED_ALIGNMENT) * DEFERRED_ALIGNMENT
    count = len(file.row) + len(lengths)
    return (
        np.full(count, index, dtype=np.int64),
        np.arange(count, dtype=np.int64),
        np.concatenate([file.row, file.deferred]).astype(np.int64),
        np.concatenate([file.source_start, np.zeros_like(lengths)]),
        np.concatenate([file.payload_bytes, lengths]),
        np.concatenate([file.payload_offset, first + np.cumsum(step) - step]),
        np.concatenate([file.block_bytes, block_bytes_for_many(lengths)]),
    )


def _line(num_bytes: Int64Array, place: Int64Array) -> Int64Array:
    """Returns where each piece starts when all lie in one line, large ones as in their page.

        file    |page.....|page.....|page.....|        `*` is a large piece: it starts at the same
                    ****************                   place in a page in both
        line    |page.....|page.....|page.....|
                ab..****************c                  `..` is the gap before it

    What a large piece needs before it depends only on the large one before it: the gaps add up.
    """
    end = np.cumsum(num_bytes)
    large = np.flatnonzero(num_bytes >= _LARGE_BYTES)
    gap = np.zeros_like(num_bytes)
    if len(large):
        # Where the byte before each large piece ends, in a page, if the one before it is right.
        phase = np.concatenate([[0], place[large[:-1]] + num_bytes[large[:-1]]])
        since = np.diff(end[large] - num_bytes[large], prepend=0)
        since[1:] -= num_bytes[large[:-1]]
        gap[large] = (place[large] - phase - since) % _PAGE
    line: Int64Array = end - num_bytes + np.cumsum(gap)
    return line


def _cut_into_windows(
    line: Int64Array,
    num_bytes: Int64Array,
    block: Int64Array,
    window_bytes: int,
) -> tuple[Int64Array, ...]:
    """Cuts the line into windows; returns (piece, start, length, window, offset) of segments."""
    ends = line + num_bytes
    found: list[tuple[Int64Array, ...]] = []
    piece, inside, window = 0, 0, 0
    while piece < len(line):
        base = (int(line[piece]) + inside) // _PAGE * _PAGE
        stop = int(np.searchsorted(ends, base + window_bytes, side="right"))
        at = np.arange(piece, stop)
        start, length = np.zeros_like(at), num_bytes[piece:stop].copy()
        if stop > piece:
            start[0] = inside
            length[0] -= inside
            inside = 0
        if stop < len(line):
            room = base + window_bytes - int(line[stop]) - inside
            whole = int(np.lcm(block[stop], _PAGE))
            part = room // whole * whole
            if part >= (_LEAST_PART_BYTES if stop > piece else 1):
                at, start = np.append(at, stop), np.append(start, inside)
                length = np.append(length, part)
                inside += part
        if not len(at):
            raise InternalError(
                f"expected a checksum block of {block[stop]} bytes to fit into a window of "
                f"{window_bytes}, but it does not; please report this"
            )
        found.append((at, start, length, np.full(len(at), window), line[at] + start - base))
        piece, window = stop, window + 1
    if not found:
        return (_NONE,) * 5
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))
