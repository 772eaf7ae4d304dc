"""The values of planning (columns of items, chunk tables, plans) and the arithmetic on boxes.

All tables are structs of arrays, so that a plan of ten million rows is a few numpy arrays and not
ten million objects. A box is an offset and a size in every dimension, as two int64 rows. Boxes of
different rank share one array: a box of `ndim` dimensions is padded to the table's width `D` with
offset 0 and size (and global shape) 1, which changes neither its volume nor any intersection. A
0-d tensor has `ndim` 0 and only padding; its volume is 1. With `D` = 3:

    [4:8, 0:2] of a (8, 2) tensor    offset 4 0 0    size 4 2 1    shape 8 2 1
    a 0-d tensor                     offset 0 0 0    size 1 1 1    shape 1 1 1

*Runs* of rows are described by their lengths:

    counts          2 0 3
    offsets_of      0 2 2 5
    within          0 1 | | 0 1 2

The arithmetic processes all rows at once. Decisions are made by the modules of `planning`, such as
`planning.coverage`, which checks that boxes together cover a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

NamePath = tuple["str | int", ...]
"""The place of a value in the nested state dict: str for mapping keys (an `IntKey` if the key is a
number), int for list indices."""


class IntKey(str):
    """The text of a mapping key that is a number. DCP treats it like any other text.

    Examples:
        >>> IntKey(7) == "7", IntKey("7").key
        (True, 7)
    """

    __slots__ = ()

    @property
    def key(self) -> int:
        """The key as a number."""
        return int(self)


class Kind(IntEnum):
    """How the bytes of an item are produced."""

    TENSOR = 0
    """*Fixed*: the raw C-order bytes of a box; planning knows their length and place."""
    OBJECT = 1
    """*Deferred*: a Python object as `torch.save` writes it; its length is known once
    serialised."""
    OPAQUE = 2
    """*Deferred*: a tensor box whose bytes only `torch.load` understands (a tensor subclass that
    pickles as itself, a stream transform)."""


class Settled(IntEnum):
    """The guess whether an item changes between saves. Of several holders, the highest counts."""

    UNKNOWN = 0
    """Planned as an item that changes."""
    SETTLED = 1
    """Is not expected to change."""
    CHANGED = 2
    """Was expected not to change, but did."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The items that one rank holds, one row per item (a DCP `WriteItem`).

    Attributes:
        names: Vocabulary of FQNs, each once.
        paths: Place of each name in the nested state dict, aligned with `names`; None if the state
            dict was not flattened.
        dtypes: Vocabulary of torch dtype names without prefix (`"bfloat16"`).
        name: int32[n], index into `names`.
        kind: int8[n], a `Kind`.
        dtype: int8[n], index into `dtypes`; -1 for objects.
        ndim: int8[n]; 0 for objects.
        shape: int64[n, D], global shape, padded with 1.
        offset: int64[n, D], where the box starts in the global tensor, padded with 0.
        size: int64[n, D], lengths of the box, padded with 1.
        requires_grad: bool[n]. For objects: whether the object is a mapping without values at any
            depth; see `ChunkTable.is_empty_mapping`.
        splittable: bool[n], whether a box that several ranks hold may be split among them: DTensor
            replicas, and plain floating tensors of at least 4 MiB.
        value: uint64[n], a digest of all bytes of an item that several ranks may hold with
            different content (plain tensors, boxes of DTensor replicas, objects); 0 for none.
        settled: int8[n], a `Settled`: the guess whether the item changes between saves.
    """

    names: tuple[str, ...]
    paths: tuple[NamePath | None, ...]
    dtypes: tuple[str, ...]
    name: Int32Array
    kind: Int8Array
    dtype: Int8Array
    ndim: Int8Array
    shape: Int64Array
    offset: Int64Array
    size: Int64Array
    requires_grad: BoolArray
    splittable: BoolArray
    value: UInt64Array
    settled: Int8Array

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The place of every chunk of a checkpoint: the columns of the chunk table on storage.

    Tensor arrays have `t` entries in order of first appearance over the ranks, chunk arrays have
    `c` entries. A planned table has no checksums yet and -1 as the place of deferred chunks.

    Attributes:
        names: FQN of each tensor or object.
        paths: Aligned with `names`; see `Columns.paths`.
        dtypes: Vocabulary of dtype names.
        files: Keys of the files, relative to the checkpoint.
        kind: int8[t], a `Kind`.
        dtype: int8[t], index into `dtypes`; -1 for objects.
        ndim: int8[t].
        shape: int64[t, D], global shape.
        requires_grad: bool[t]; see `Columns`.
        tensor: int32[c], the tensor that the chunk belongs to.
        offset: int64[c, D], where the chunk's box starts in the global tensor.
        size: int64[c, D], lengths of the box. A chunk of volume 0 is legal.
        file: int32[c], index into `files`.
        item_offset: int64[c], first byte of the framed item in its file (a `torch.save` zip, or
            for safetensors files the payload itself).
        item_bytes: int64[c], length of the framed item.
        payload_offset: int64[c], first raw byte in the file; -1 if only the item's own header
            contains it (checkpoints written by stock DCP).
        payload_bytes: int64[c], length of the raw bytes.
        block_bytes: int64[c], length of a checksum block of this chunk; 0 if it has no checksums.
        check_start: int64[c + 1], where the chunk's block checksums start in `checks`.
        checks: uint64[k], xxh3-64 of every block, the last of a chunk possibly shorter.
    """

    names: tuple[str, ...]
    paths: tuple[NamePath | None, ...]
    dtypes: tuple[str, ...]
    files: tuple[str, ...]
    kind: Int8Array
    dtype: Int8Array
    ndim: Int8Array
    shape: Int64Array
    requires_grad: BoolArray
    tensor: Int32Array
    offset: Int64Array
    size: Int64Array
    file: Int32Array
    item_offset: Int64Array
    item_bytes: Int64Array
    payload_offset: Int64Array
    payload_bytes: Int64Array
    block_bytes: Int64Array
    check_start: Int64Array
    checks: UInt64Array

    @property
    def num_tensors(self) -> int:
        """Number of tensors and objects, `t`."""
        return len(self.names)

    @property
    def num_chunks(self) -> int:
        """Number of chunks, `c`."""
        return len(self.tensor)

    @property
    def is_empty_mapping(self) -> BoolArray:
        """bool[t], the objects that are mappings without values: DCP flattens them to nothing.

        Why stored in `requires_grad`: objects don't use it, and a new column would change the
        format.
        """
        empty: BoolArray = (self.kind == Kind.OBJECT) & self.requires_grad
        return empty


@dataclass(frozen=True, eq=False)
class FilePlan:
    """One part file that one rank writes: pieces in file order, then the deferred items.

    Attributes:
        file: Index into the global plan's `files`.
        key: Key with `{attempt}` where the attempt id goes.
        num_bytes: End of the fixed items; the first deferred item may start there.
        dtypes: Vocabulary of dtype names.
        row: int32[m], row of the rank's `Columns` that the piece belongs to.
        source_start: int64[m], first byte of the piece in that item's C-order bytes.
        dtype: int8[m], index into `dtypes`.
        ndim: int8[m].
        size: int64[m, D], shape of the piece (for its frame).
        requires_grad: bool[m].
        item_offset: int64[m], where the piece's frame starts in the file.
        item_bytes: int64[m].
        payload_offset: int64[m], where its raw bytes start in the file.
        payload_bytes: int64[m].
        block_bytes: int64[m], length of its checksum blocks.
        deferred: int32[k], rows of the rank's `Columns` that follow, in this order. The file ends
            with its block checksums (`checksums.end_checks`).
        settled: Whether no item of the file is expected to change between saves.
    """

    file: int
    key: str
    num_bytes: int
    dtypes: tuple[str, ...]
    row: Int32Array
    source_start: Int64Array
    dtype: Int8Array
    ndim: Int8Array
    size: Int64Array
    requires_grad: BoolArray
    item_offset: Int64Array
    item_bytes: Int64Array
    payload_offset: Int64Array
    payload_bytes: Int64Array
    block_bytes: Int64Array
    deferred: Int32Array
    settled: bool = False


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes: its part of a global plan."""

    rank: int
    files: tuple[FilePlan, ...]


@dataclass(frozen=True, eq=False)
class ValueGroups:
    """Which contents must be equal on which ranks; see `planning.merge`.

    Attributes:
        rank: int32[m], the rank that holds the item, ascending.
        place: int32[m], index into that rank's nonzero digests (`merge.contents_of`).
        group: int32[m], ascending within a rank. All ranks of a group hold the same items of it, in
            the same order.
        told: `(group, fqn)` of each item that differed when the plan was made; each has a group of
            its own.
    """

    rank: Int32Array
    place: Int32Array
    group: Int32Array
    told: tuple[tuple[int, str], ...]


_NONE = np.zeros(0, dtype=np.int32)

NO_GROUPS = ValueGroups(_NONE, _NONE, _NONE, ())
"""No item that several ranks hold has a digest."""


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """Which rank writes what, and where, for one state and world size. `digest` identifies it.

    Attributes:
        world_size: Number of ranks.
        table: The planned chunk table; `files` hold `{attempt}` where the attempt id goes. Its
            chunks are sorted by (file, payload_offset), with a file's deferred chunks after its
            fixed ones.
        source_rank: int32[c], the rank that writes the chunk.
        source_row: int32[c], the row of that rank's `Columns`.
        source_start: int64[c], first byte of the chunk in that item's C-order bytes.
        file_rank: int32[f], the rank that writes the file; ascending.
        file_bytes: int64[f], length of the fixed area of the file.
        disagreements: `(fqn, ranks)` for items whose content differed between ranks; the plan takes
            the lowest rank's copy, whole.
        digest: 32 bytes that identify the plan.
        groups: Which contents must be equal for the plan to be used again.
        settled: bool[f], whether no item of a file is expected to change between saves.
    """

    world_size: int
    table: ChunkTable
    source_rank: Int32Array
    source_row: Int32Array
    source_start: Int64Array
    file_rank: Int32Array
    file_bytes: Int64Array
    disagreements: tuple[tuple[str, tuple[int, ...]], ...]
    digest: bytes
    groups: ValueGroups = NO_GROUPS
    settled: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @cached_property
    def fixed_bytes(self) -> int:
        """Raw bytes of all chunks that are not deferred."""
        fixed = self.table.payload_bytes
        return int(fixed[fixed > 0].sum())


def volume(size: Int64Array) -> Int64Array:
    """Returns the number of elements of each box.

    Args:
        size: int64[n, D], lengths; padding counts 1.

    Returns:
        int64[n].

    Examples:
        >>> volume(np.array([[2, 3], [4, 0], [1, 1]]))
        array([6, 0, 1])
    """
    # Why column by column: numpy takes five times as long along rows of two or three numbers.
    result = np.ones(len(size), dtype=np.int64)
    for dim in range(size.shape[1]):
        result *= size[:, dim]
    return result


def intersect(
    offset_a: Int64Array, size_a: Int64Array, offset_b: Int64Array, size_b: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Returns the intersection of box `a[i]` and box `b[i]`, for every row.

    Args:
        offset_a: int64[n, D].
        size_a: int64[n, D].
        offset_b: int64[n, D], or anything that broadcasts to it.
        size_b: As `offset_b`.

    Returns:
        `(offset int64[n, D], size int64[n, D], nonempty bool[n])`; size is 0 in a dimension in
        which the boxes don't meet.

    Examples:
        >>> o, s, full = intersect(*(np.array([[v]]) for v in (0, 4, 2, 4)))
        >>> o.item(), s.item(), full.item()
        (2, 2, True)
    """
    low = np.maximum(offset_a, offset_b)
    size = np.minimum(offset_a + size_a, offset_b + size_b) - low
    np.maximum(size, 0, out=size)
    return low, size, np.asarray((size > 0).all(axis=1))


def contains(
    outer_offset: Int64Array, outer_size: Int64Array, offset: Int64Array, size: Int64Array
) -> BoolArray:
    """Returns whether each box lies within its outer box.

    Args:
        outer_offset: int64[n, D].
        outer_size: int64[n, D].
        offset: int64[n, D].
        size: int64[n, D]; a box with a negative length lies within no box.

    Returns:
        bool[n]. A box of volume 0 must lie within the bounds too, including its end.
    """
    found = np.ones(len(size), dtype=bool)
    for dim in range(size.shape[1]):
        low, length = offset[:, dim], size[:, dim]
        end = outer_offset[:, dim] + outer_size[:, dim]
        found &= (low >= outer_offset[:, dim]) & (length >= 0) & (low + length <= end)
    return found


def strides(size: Int64Array) -> Int64Array:
    """Returns the C-order strides of boxes, in elements.

    Args:
        size: int64[n, D].

    Returns:
        int64[n, D]; the last column is 1.

    Examples:
        >>> strides(np.array([[2, 3, 4]]))
        array([[12,  4,  1]])
    """
    result = np.ones_like(size)
    for dim in range(size.shape[1] - 2, -1, -1):
        np.multiply(result[:, dim + 1], size[:, dim + 1], out=result[:, dim])
    return result


def pad(array: Int64Array, width: int, fill: int) -> Int64Array:
    """Returns an array of rows padded to `width` columns.

    Args:
        array: int64[n, D] with `D <= width`. Returned itself if `D == width`.
        width: Columns of the result.
        fill: 0 for offsets, 1 for sizes and shapes.
    """
    missing = width - array.shape[1]
    if missing == 0:
        return array
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)


def padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> Int64Array:
    """Returns rows of any lengths as an array, padded at their ends.

    Args:
        rows: `n` rows.
        width: `D`, at least the longest length.
        fill: Value of the padding.
    """
    ndim = np.fromiter(map(len, rows), np.int64, len(rows))
    result = np.full((len(rows), width), fill, dtype=np.int64)
    numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(ndim.sum()))
    result[np.arange(width) < ndim[:, None]] = numbers
    return result


def widen(offset: Int64Array, size: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
    """Returns offsets and sizes padded to `width` columns."""
    return pad(offset, width, 0), pad(size, width, 1)


def box_text(
    offset: Int64Array | Sequence[int], size: Int64Array | Sequence[int], ndim: int
) -> str:
    """Returns a box in the form used in messages: slices of the global tensor.

    Args:
        offset: `D` numbers.
        size: `D` numbers.
        ndim: How many of these are not padding.

    Examples:
        >>> box_text([0, 4, 0], [2, 4, 1], 2)
        '[0:2, 4:8]'
    """
    parts = (f"{int(o)}:{int(o) + int(s)}" for o, s in zip(offset[:ndim], size[:ndim], strict=True))
    return f"[{', '.join(parts)}]"


# --- Equal rows, and runs of rows ----------------------------------------------------------------

_ODD = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


def group_rows(columns: Sequence[npt.NDArray[np.integer]]) -> tuple[Int64Array, Int64Array]:
    """Numbers the distinct rows in order of first appearance.

    Args:
        columns: At least one one-dimensional array of integers; all have the same length `n`.

    Returns:
        `(first int64[g], group int64[n])`: the first row of each group, ascending, and the group
        of every row. The result is exact: a hash finds candidates, and their values decide.

    Complexity:
        One sort of n 64-bit numbers.

    Examples:
        >>> first, group = group_rows([np.array([7, 8, 7]), np.array([1, 1, 1])])
        >>> first.tolist(), group.tolist()
        ([0, 1], [0, 1, 0])
    """
    code = _hashed(columns)
    order = np.argsort(code, kind="stable")
    first, group = _numbered(order, [code])
    if all(np.array_equal(column, column[first][group]) for column in columns):
        return first, group
    return _numbered(np.lexsort(tuple(columns)), columns)


def _hashed(columns: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.uint64]:
    code = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        code ^= column.astype(np.int64).view(np.uint64)
        code *= np.uint64(_ODD)
        code ^= code >> np.uint64(29)
        code *= np.uint64(_MIX)
        code ^= code >> np.uint64(32)
    return code


def _numbered(
    order: npt.NDArray[np.int64], columns: Sequence[npt.NDArray[np.integer]]
) -> tuple[Int64Array, Int64Array]:
    """Groups equal neighbours in a stable sorted order."""
    count = len(order)
    fresh = np.zeros(count, dtype=bool)
    fresh[:1] = True
    for column in columns:
        ordered = column[order]
        fresh[1:] |= ordered[1:] != ordered[:-1]
    first = order[fresh]
    by_appearance = np.argsort(first)
    rank = np.empty(len(first), dtype=np.int64)
    rank[by_appearance] = np.arange(len(first))
    group = np.empty(count, dtype=np.int64)
    group[order] = rank[np.cumsum(fresh) - 1]
    return first[by_appearance], group


def first_rows(code: npt.NDArray[np.integer], count: int) -> Int64Array:
    """Returns the first row that holds each of the numbers `0..count-1`; -1 if no row does."""
    first = np.full(count, -1, dtype=np.int64)
    # Careful: of repeated indices, numpy keeps the last assignment, so go backwards.
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1, dtype=np.int64)
    return first


def offsets_of(counts: npt.NDArray[np.integer]) -> Int64Array:
    """Returns where runs of these lengths start, and where the last one ends: int64[n + 1]."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def run_of(ordered: npt.NDArray[np.integer], value: int) -> tuple[int, int]:
    """Returns the start and the end of a value's run in an ascending array.

    Examples:
        >>> run_of(np.array([1, 1, 4], np.int32), 1), run_of(np.array([1, 1, 4], np.int32), 3)
        ((0, 2), (2, 2))
    """
    # Careful: numpy converts the whole array if the values to find have another dtype.
    wanted = np.array([value, value + 1], dtype=ordered.dtype)
    start, stop = np.searchsorted(ordered, wanted).tolist()
    return start, stop


def within(counts: npt.NDArray[np.integer]) -> Int64Array:
    """Returns the position of every element in its run.

    Examples:
        >>> within(np.array([2, 0, 3])).tolist()
        [0, 1, 0, 1, 2]
    """
    starts = offsets_of(counts)
    return np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], counts)


def running_max(values: Int64Array, group: Int64Array) -> Int64Array:
    """Returns, for each row, the greatest value of its group up to this row.

    Args:
        values: int64[n], 0 or more, n at least 1.
        group: int64[n], ascending, 0 or more.
    """
    span = int(values.max()) + 1
    if (int(group[-1]) + 1) * span < 1 << 62:
        result: Int64Array = np.maximum.accumulate(values + group * span) - group * span
        return result
    distinct, code = np.unique(values, return_inverse=True)
    code = np.maximum.accumulate(code + group * len(distinct)) - group * len(distinct)
    return np.asarray(distinct[code], dtype=np.int64)
