"""The tensors that differ between two checkpoints, and by how much: `CheckpointView.diff`.

Block checksums are hashes of the content. If both checkpoints cut a tensor into equal chunks and
each chunk into equal blocks, the chunk tables decide whether it changed (`diff_tables`, pure
numpy). Otherwise, the bytes are read and compared. The values are read only to compute by how much
a tensor changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import as_numbers
from ray_dcp.core.values import ChunkTable, Int64Array, Kind, offsets_of, within
from ray_dcp.view.tensor_handle import TensorHandle, parts_of

ChangeName = Literal["unchanged", "changed", "undecided", "reshaped", "retyped", "added", "removed"]


@dataclass(frozen=True)
class TensorDiff:
    """Change of one tensor or object."""

    name: str
    change: ChangeName
    """Kind of change. `undecided`: hashes can't decide, and the tensor was not read."""
    num_bytes: int
    """Stored bytes in the second checkpoint, or in the first if it was removed."""
    changed_bytes: int
    """Stored bytes in checksum blocks that differ; all bytes if hashes did not decide."""
    first: str = ""
    """Dtype and shape in the first checkpoint, such as `float32[4, 2]`; "" if it has none."""
    second: str = ""
    """Dtype and shape in the second checkpoint."""
    was_read: bool = False
    """Whether the bytes were read and compared, as hashes did not decide."""


class _Stored(NamedTuple):
    """A tensor or object of a chunk table."""

    row: int
    kind: int
    dtype: str
    shape: list[int]
    num_bytes: int

    def __str__(self) -> str:
        return "object" if self.kind == Kind.OBJECT else f"{self.dtype}{self.shape}"


def _bytes_of_tensors(table: ChunkTable) -> Int64Array:
    sizes = np.where(table.payload_bytes >= 0, table.payload_bytes, table.item_bytes)
    num_bytes = np.bincount(table.tensor, weights=sizes, minlength=table.num_tensors)
    return num_bytes.astype(np.int64)


def _stored_tensors(table: ChunkTable) -> dict[str, _Stored]:
    columns = (table.kind, table.dtype, table.ndim, table.shape, _bytes_of_tensors(table))
    rows = zip(table.names, *(column.tolist() for column in columns), strict=True)
    return {
        name: _Stored(row, kind, table.dtypes[dtype] if dtype >= 0 else "", shape[:ndim], size)
        for row, (name, kind, dtype, ndim, shape, size) in enumerate(rows)
    }


def diff_tables(first: ChunkTable, second: ChunkTable) -> list[TensorDiff]:
    """Returns the differences of two checkpoints by their hashes.

    Args:
        first: Chunk table of the earlier checkpoint.
        second: Chunk table of the later checkpoint.

    Returns:
        All tensors and objects: those of the first in its order, then those added.

    Complexity:
        O(chunks log chunks + checksums), in numpy.
    """
    old, new = _stored_tensors(first), _stored_tensors(second)
    found = {}
    for name in {**old, **new}:
        one, other = old.get(name), new.get(name)
        change: ChangeName = "undecided"
        if one is None or other is None:
            change = "added" if one is None else "removed"
        elif (one.kind, one.dtype) != (other.kind, other.dtype):
            change = "retyped"
        elif one.shape != other.shape:
            change = "reshaped"
        num_bytes = (other or old[name]).num_bytes
        was, now = (str(stored or "") for stored in (one, other))
        added = num_bytes if change == "added" else 0
        found[name] = TensorDiff(name, change, num_bytes, added, was, now)
    alike = [name for name, one in found.items() if one.change == "undecided"]
    rows = (np.array([some[name].row for name in alike], np.int64) for some in (old, new))
    for name, change, changed_bytes in zip(alike, *_decided(first, second, *rows), strict=True):
        found[name] = replace(found[name], change=change, changed_bytes=changed_bytes)
    return [*found.values()]


def new_bytes(first: ChunkTable, second: ChunkTable) -> int | None:
    """Returns the bytes of tensors that the first lacks; None if hashes can't decide."""
    # Why: of two saves of a plan the columns are the same objects, and only their bytes may differ.
    if first.names is second.names and first.shape is second.shape:
        rows = np.arange(first.num_tensors)
        changes, _ = _decided(first, second, rows, rows)
        if "undecided" in changes:
            return None
        return int(_bytes_of_tensors(second)[np.array(changes, str) == "changed"].sum())
    found = diff_tables(first, second)
    if any(one.change == "undecided" for one in found):
        return None
    return sum(one.num_bytes for one in found if one.change not in ("unchanged", "removed"))


def _decided(
    first: ChunkTable, second: ChunkTable, rows: Int64Array, others: Int64Array
) -> tuple[list[ChangeName], list[int]]:
    """Returns whether tensors of equal shape and dtype changed, and their bytes that differ."""
    counts, other_counts = (
        np.bincount(table.tensor, minlength=table.num_tensors)[tensors]
        for table, tensors in ((first, rows), (second, others))
    )
    # Why: chunks are compared in pairs, so that both checkpoints must have equally many.
    paired = np.flatnonzero(counts == other_counts)
    left, right = _chunks(first, rows[paired]), _chunks(second, others[paired])
    width = min(first.offset.shape[1], second.offset.shape[1])
    same_box = first.kind[first.tensor[left]] == Kind.OBJECT
    same_box |= (first.offset[left, :width] == second.offset[right, :width]).all(axis=1) & (
        first.size[left, :width] == second.size[right, :width]
    ).all(axis=1)
    blocks, payload = first.block_bytes[left], second.payload_bytes[right]
    has_hashes = (blocks > 0) & (second.block_bytes[right] > 0)
    has_hashes &= (first.payload_bytes[left] >= 0) & (payload >= 0)
    # Deferred items of different lengths differ.
    other_length = same_box & has_hashes & (first.payload_bytes[left] != payload)
    same_blocks = same_box & has_hashes & (blocks == second.block_bytes[right]) & ~other_length
    pairs = np.flatnonzero(same_blocks)
    num_bytes = np.where(other_length, payload, 0)
    num_bytes[pairs] = _bytes_in_blocks_that_differ(first, second, left[pairs], right[pairs])

    owner = np.repeat(paired, counts[paired])
    columns = other_length | (num_bytes > 0), ~(same_blocks | other_length), num_bytes
    changed, open_, sums = (np.bincount(owner, one, len(rows)) for one in columns)
    change = np.where((open_ > 0) | (counts != other_counts), "undecided", "unchanged")
    change[changed > 0] = "changed"
    return change.tolist(), sums.astype(np.int64).tolist()


def _chunks(table: ChunkTable, tensors: Int64Array) -> Int64Array:
    """Returns the chunks of some tensors, sorted by tensor and offset."""
    order = np.lexsort((*table.offset.T[::-1], table.tensor))
    counts = np.bincount(table.tensor, minlength=table.num_tensors)
    starts = offsets_of(counts)[:-1]
    found: Int64Array = np.repeat(starts[tensors], counts[tensors]) + within(counts[tensors])
    return order[found].astype(np.int64)


def _bytes_in_blocks_that_differ(
    first: ChunkTable, second: ChunkTable, left: Int64Array, right: Int64Array
) -> Int64Array:
    """Returns the bytes of each pair of chunks in blocks with different checksums."""
    counts = first.check_start[left + 1] - first.check_start[left]
    owner, place = np.repeat(np.arange(len(left)), counts), within(counts)
    mine = first.checks[first.check_start[left][owner] + place]
    theirs = second.checks[second.check_start[right][owner] + place]
    wrong = np.flatnonzero(mine != theirs)
    chunk = left[owner[wrong]]
    block = first.block_bytes[chunk]
    length = np.minimum(block, first.payload_bytes[chunk] - place[wrong] * block)
    return np.bincount(owner[wrong], weights=length, minlength=len(left)).astype(np.int64)


@dataclass(frozen=True)
class ValueDiff:
    """Amount by which a tensor changed. Norms and maximum ignore NaN and infinities."""

    name: str
    norm: float
    """Euclidean norm of the difference."""
    max_abs: float
    """Maximum absolute difference of an element."""
    relative: float
    """`norm` divided by the norm of the first tensor; `inf` if that is 0 and `norm` is not."""
    num_changed: int
    """Number of elements that differ; NaN equals NaN."""
    num_elements: int
    num_nonfinite: int
    """Number of elements of the second tensor that are NaN or infinite."""


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _parts(
    first: TensorHandle, second: TensorHandle
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yields each part of both tensors."""
    for part in parts_of(first.shape):
        yield first.raw(part), second.raw(part)


def same_values(first: TensorHandle, second: TensorHandle) -> bool:
    """Returns whether two tensors of equal shape and dtype have the same bytes. Both are read."""
    return all(np.array_equal(_bytes(one), _bytes(other)) for one, other in _parts(first, second))


def value_diff(first: TensorHandle, second: TensorHandle) -> ValueDiff:
    """Returns by how much a tensor changed. Both are read, in parts."""
    difference = squares = max_abs = 0.0
    changed = elements = nonfinite = 0
    with np.errstate(invalid="ignore", over="ignore"):
        for one, other in _parts(first, second):
            left = as_numbers(one, first.dtype).reshape(-1)
            right = as_numbers(other, second.dtype).reshape(-1)
            both = np.isfinite(left) & np.isfinite(right)
            # Why only finite elements: one NaN would hide the changes of all others.
            delta = np.abs((right - left)[both])
            equal = (left == right) | (np.isnan(left) & np.isnan(right))
            if first.dtype == second.dtype and first.dtype in ("int64", "uint64"):
                # Why: numbers beyond 2**53 that are near to each other are one as float64.
                equal = (one == other).reshape(-1)
                high, low = np.maximum(one, other), np.minimum(one, other)
                delta = (high.astype(np.uint64) - low.astype(np.uint64)).reshape(-1).astype(float)
            difference += float(np.dot(delta, delta))
            finite = np.abs(left[np.isfinite(left)])
            squares += float(np.dot(finite, finite))
            max_abs = max(max_abs, float(delta.max(initial=0.0)))
            changed += int(left.size - np.count_nonzero(equal))
            elements += left.size
            nonfinite += int(right.size - np.count_nonzero(np.isfinite(right)))
    norm, before = sqrt(difference), sqrt(squares)
    relative = norm / before if before else (float("inf") if norm else 0.0)
    return ValueDiff(second.name, norm, max_abs, relative, changed, elements, nonfinite)
