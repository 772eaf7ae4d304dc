"""Which tensors of two checkpoints are the same, by their chunk tables alone: pure, in numpy.

Block checksums are hashes of content. They decide where both checkpoints cut a tensor into the
same chunks and each chunk into the same blocks. Where they don't, the bytes have to be read, which
`difference` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ray_dcp.plan.boxes import widen
from ray_dcp.plan.grouping import offsets_of, within
from ray_dcp.plan.values import BoolArray, ChunkTable, Int64Array, Kind

__all__ = ["Change", "TableDiff", "diff_tables"]


class Change(IntEnum):
    """What became of a tensor or object."""

    UNCHANGED = 0
    CHANGED = 1
    UNDECIDED = 2
    """Hashes can't tell: it has none, or was cut into other chunks."""
    RESHAPED = 3
    """It has another shape."""
    RETYPED = 4
    """It has another dtype, or was an object and is a tensor."""
    ADDED = 5
    REMOVED = 6


@dataclass(frozen=True, eq=False)
class TableDiff:
    """What hashes tell about two checkpoints.

    Attributes:
        names: FQN of everything in either, those of the first in its order, then what was added.
        change: int8[n], a `Change`.
        first: int32[n], row in the first table; -1 for what was added.
        second: int32[n], row in the second table; -1 for what was removed.
        num_bytes: int64[n], stored bytes in the second checkpoint, or in the first if removed.
        changed_bytes: int64[n], of these, bytes in blocks that differ, as far as hashes decide.
    """

    names: tuple[str, ...]
    change: np.ndarray[tuple[int], np.dtype[np.int8]]
    first: np.ndarray[tuple[int], np.dtype[np.int32]]
    second: np.ndarray[tuple[int], np.dtype[np.int32]]
    num_bytes: Int64Array
    changed_bytes: Int64Array

    @property
    def new_bytes(self) -> int | None:
        """Bytes of tensors of the second that the first lacks; None where hashes can't tell."""
        if (self.change == Change.UNDECIDED).any():
            return None
        new = ~np.isin(self.change, (Change.UNCHANGED, Change.REMOVED))
        return int(self.num_bytes[new].sum())


def diff_tables(first: ChunkTable, second: ChunkTable) -> TableDiff:
    """Returns which tensors and objects changed.

    Args:
        first: Of the earlier checkpoint.
        second: Of the later one.

    Complexity:
        O(chunks log chunks + checksums), in numpy; nothing is read.
    """
    of_second = {name: row for row, name in enumerate(second.names)}
    pair = np.fromiter(
        (of_second.get(name, -1) for name in first.names), np.int32, first.num_tensors
    )
    common = np.flatnonzero(pair >= 0)
    added = np.setdiff1d(np.arange(second.num_tensors), pair[common])
    change = np.full(first.num_tensors, Change.REMOVED, np.int8)
    changed_bytes = np.zeros(first.num_tensors, np.int64)
    change[common], changed_bytes[common] = _compare(
        first, second, common, pair[common].astype(np.int64)
    )
    first_bytes, second_bytes = _stored_bytes(first), _stored_bytes(second)
    num_bytes = first_bytes.copy()
    num_bytes[common] = second_bytes[pair[common]]
    return TableDiff(
        names=(*first.names, *(second.names[row] for row in added.tolist())),
        change=np.concatenate([change, np.full(len(added), Change.ADDED, np.int8)]),
        first=np.concatenate(
            [np.arange(first.num_tensors, dtype=np.int32), np.full(len(added), -1, np.int32)]
        ),
        second=np.concatenate([pair, added.astype(np.int32)]),
        num_bytes=np.concatenate([num_bytes, second_bytes[added]]),
        changed_bytes=np.concatenate([changed_bytes, second_bytes[added]]),
    )


def _stored_bytes(table: ChunkTable) -> Int64Array:
    sizes = np.where(table.payload_bytes >= 0, table.payload_bytes, table.item_bytes)
    found = np.bincount(table.tensor, weights=sizes, minlength=table.num_tensors)
    return found.astype(np.int64)


def _compare(
    first: ChunkTable, second: ChunkTable, rows: Int64Array, others: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Returns what became of the tensors that both have, and bytes in blocks that differ."""
    change = np.full(len(rows), Change.UNDECIDED, np.int64)
    changed_bytes = np.zeros(len(rows), np.int64)
    same_type = (first.kind[rows] == second.kind[others]) & (
        _dtype_codes(first, first.dtypes)[rows] == _dtype_codes(second, first.dtypes)[others]
    )
    width = max(first.shape.shape[1], second.shape.shape[1])
    shape, other_shape = (
        widen(np.zeros_like(t.shape), t.shape, width)[1][r]
        for t, r in ((first, rows), (second, others))
    )
    same_shape = (first.ndim[rows] == second.ndim[others]) & (shape == other_shape).all(axis=1)
    change[~same_shape] = Change.RESHAPED
    change[~same_type] = Change.RETYPED
    comparable = np.flatnonzero(same_type & same_shape)
    left, right = (
        _Chunks(first, rows[comparable], width),
        _Chunks(second, others[comparable], width),
    )
    same_cut = left.counts == right.counts
    # Why: chunks are paired one by one, so both sides need as many of each tensor.
    left, right = left.of(same_cut), right.of(same_cut)
    chosen = comparable[same_cut]
    owner = np.repeat(np.arange(len(chosen)), left.counts)
    cut_alike = left.equal_boxes(right)
    has_hashes = left.has_hashes & right.has_hashes
    # Why only now: deferred items of another length have other bytes.
    another_length = has_hashes & (left.payload != right.payload)
    decidable = cut_alike & has_hashes & (left.blocks == right.blocks) & ~another_length
    differs, bytes_differ = _blocks_differ(left, right, decidable)
    differs |= cut_alike & another_length
    bytes_differ[another_length] = right.payload[another_length]
    undecided = ~(decidable | (cut_alike & another_length))
    any_differs = np.bincount(owner, weights=differs, minlength=len(chosen)) > 0
    any_undecided = np.bincount(owner, weights=undecided, minlength=len(chosen)) > 0
    verdict = np.where(any_undecided, Change.UNDECIDED, Change.UNCHANGED)
    verdict[any_differs] = Change.CHANGED
    change[chosen] = verdict
    changed_bytes[chosen] = np.bincount(owner, weights=bytes_differ, minlength=len(chosen))
    return change, changed_bytes


def _dtype_codes(table: ChunkTable, words: tuple[str, ...]) -> Int64Array:
    """Returns dtypes as indices into one vocabulary; other words get further numbers."""
    codes = {word: code for code, word in enumerate(words)}
    for word in table.dtypes:
        codes.setdefault(word, len(codes))
    of_code = np.array([codes[word] for word in table.dtypes] or [-1], np.int64)
    return np.where(table.dtype < 0, -1, of_code[np.maximum(table.dtype, 0)])


class _Chunks:
    """The chunks of some tensors, those of a tensor side by side in the order of their boxes."""

    def __init__(
        self, table: ChunkTable, tensors: Int64Array, width: int, rows: Int64Array | None = None
    ) -> None:
        self._table, self._tensors, self._width = table, tensors, width
        counts = np.bincount(table.tensor, minlength=table.num_tensors)
        self.counts = counts[tensors]
        if rows is None:
            offset, _ = widen(table.offset, table.size, width)
            keys = [offset[:, dim] for dim in reversed(range(width))]
            order = np.lexsort(np.stack([*keys, table.tensor]))
            starts = offsets_of(counts)[:-1]
            rows = order[np.repeat(starts[tensors], self.counts) + within(self.counts)]
        self.rows = rows
        self.payload = np.where(table.payload_bytes >= 0, table.payload_bytes, -1)[rows]
        self.blocks = table.block_bytes[rows]
        self.has_hashes = (self.blocks > 0) & (self.payload >= 0)
        self.check_start = table.check_start[rows]
        self.num_checks = table.check_start[rows + 1] - self.check_start
        self.checks = table.checks

    def of(self, chosen: BoolArray) -> _Chunks:
        """Returns the chunks of some of the tensors."""
        rows = self.rows[np.repeat(chosen, self.counts)]
        return _Chunks(self._table, self._tensors[chosen], self._width, rows)

    def equal_boxes(self, other: _Chunks) -> BoolArray:
        """Whether each chunk is the same box as its counterpart."""
        boxes = [
            widen(t.offset[rows], t.size[rows], self._width)
            for t, rows in ((self._table, self.rows), (other._table, other.rows))
        ]
        same: BoolArray = np.ones(len(self.rows), np.bool_)
        for mine, theirs in zip(*boxes, strict=True):
            same &= (mine == theirs).all(axis=1)
        is_object = self._table.kind[self._table.tensor[self.rows]] == Kind.OBJECT
        same |= is_object
        return same


def _blocks_differ(
    left: _Chunks, right: _Chunks, decidable: BoolArray
) -> tuple[BoolArray, Int64Array]:
    """Returns which chunks differ by their checksums, and how many bytes are in such blocks."""
    differs = np.zeros(len(decidable), np.bool_)
    num_bytes = np.zeros(len(decidable), np.int64)
    rows = np.flatnonzero(decidable & (left.num_checks > 0))
    counts = left.num_checks[rows]
    if not len(rows):
        return differs, num_bytes
    place = within(counts)
    mine = left.checks[np.repeat(left.check_start[rows], counts) + place]
    theirs = right.checks[np.repeat(right.check_start[rows], counts) + place]
    owner = np.repeat(np.arange(len(rows)), counts)
    wrong = mine != theirs
    block = left.blocks[rows][owner[wrong]]
    length = np.minimum(block, left.payload[rows][owner[wrong]] - place[wrong] * block)
    num_bytes[rows] = np.bincount(owner[wrong], weights=length, minlength=len(rows))
    differs[rows] = num_bytes[rows] > 0
    return differs, num_bytes
