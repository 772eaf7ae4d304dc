"""`CheckpointDiff`: the tensors that differ between two checkpoints, and by how much.

Block checksums are hashes of the content. If both checkpoints cut a tensor into equal chunks and
each chunk into equal blocks, the chunk tables decide whether it changed (`diff_tables`, pure
numpy). Otherwise, the bytes are read and compared. The values are read only to compute by how much
a tensor changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, Kind, offsets_of, widen, within
from ray_dcp.errors import InvalidRequestError, MissingKeyError
from ray_dcp.view.progress import ShowProgress, reporting
from ray_dcp.view.tensor_handle import parts_of
from ray_dcp.view.wording import nearest

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView
    from ray_dcp.view.tensor_handle import TensorHandle


class Change(IntEnum):
    """Kind of change of a tensor or object."""

    UNCHANGED = 0
    CHANGED = 1
    UNDECIDED = 2
    """Hashes can't decide: there are none, or the chunks were cut differently."""
    RESHAPED = 3
    """The shape differs."""
    RETYPED = 4
    """The dtype differs, or only one of the two is a tensor."""
    ADDED = 5
    REMOVED = 6


@dataclass(frozen=True, eq=False)
class TableDiff:
    """Differences of two checkpoints by their hashes.

    Attributes:
        names: FQNs of both checkpoints: those of the first in its order, then those added.
        change: int8[n], a `Change`.
        num_bytes: int64[n], stored bytes in the second checkpoint, or in the first if removed.
        changed_bytes: int64[n], stored bytes in blocks that differ, as far as hashes decide.
    """

    names: tuple[str, ...]
    change: np.ndarray[tuple[int], np.dtype[np.int8]]
    num_bytes: Int64Array
    changed_bytes: Int64Array

    @property
    def new_bytes(self) -> int | None:
        """Bytes of tensors of the second that the first lacks; None if hashes can't decide."""
        if (self.change == Change.UNDECIDED).any():
            return None
        new = ~np.isin(self.change, (Change.UNCHANGED, Change.REMOVED))
        return int(self.num_bytes[new].sum())


def diff_tables(first: ChunkTable, second: ChunkTable) -> TableDiff:
    """Returns the differences of two checkpoints by their hashes.

    Args:
        first: Chunk table of the earlier checkpoint.
        second: Chunk table of the later checkpoint.

    Complexity:
        O(chunks log chunks + checksums), in numpy.
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
    """Returns the change of each common tensor, and its bytes in blocks that differ."""
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
    counts, other_counts = (np.bincount(t.tensor, minlength=t.num_tensors) for t in (first, second))
    # Why: chunks are compared in pairs, so that both checkpoints must have equally many.
    chosen = comparable[counts[rows[comparable]] == other_counts[others[comparable]]]
    left, right = _Chunks(first, rows[chosen], width), _Chunks(second, others[chosen], width)
    owner = np.repeat(np.arange(len(chosen)), left.counts)
    cut_alike = left.equal_boxes(right)
    has_hashes = left.has_hashes & right.has_hashes
    # Deferred items of different lengths differ.
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
    """Returns the dtypes as indices into `words`; further dtypes get further indices."""
    codes = {word: code for code, word in enumerate(words)}
    for word in table.dtypes:
        codes.setdefault(word, len(codes))
    of_code = np.array([codes[word] for word in table.dtypes] or [-1], np.int64)
    return np.where(table.dtype < 0, -1, of_code[np.maximum(table.dtype, 0)])


class _Chunks:
    """The chunks of some tensors, sorted by tensor and offset."""

    def __init__(self, table: ChunkTable, tensors: Int64Array, width: int) -> None:
        self._table, self._width = table, width
        counts = np.bincount(table.tensor, minlength=table.num_tensors)
        self.counts = counts[tensors]
        offset, _ = widen(table.offset, table.size, width)
        keys = [offset[:, dim] for dim in reversed(range(width))]
        order = np.lexsort(np.stack([*keys, table.tensor]))
        starts = offsets_of(counts)[:-1]
        self.rows = rows = order[np.repeat(starts[tensors], self.counts) + within(self.counts)]
        self.payload = np.where(table.payload_bytes >= 0, table.payload_bytes, -1)[rows]
        self.blocks = table.block_bytes[rows]
        self.has_hashes = (self.blocks > 0) & (self.payload >= 0)
        self.check_start = table.check_start[rows]
        self.num_checks = table.check_start[rows + 1] - self.check_start
        self.checks = table.checks

    def equal_boxes(self, other: _Chunks) -> BoolArray:
        """Returns whether each chunk is the same box as its counterpart."""
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
    """Returns the chunks whose checksums differ, and the number of bytes in such blocks."""
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


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointDiff:
    """Differences of two checkpoints.

    Attributes:
        first: The earlier checkpoint.
        second: The later checkpoint.
        tensors: All tensors and objects of both checkpoints, those of the first in its order.
        bytes_read: Number of payload bytes that were read because hashes did not decide.
        notes: Reasons why tensors were read, or are undecided.

    Examples:
        >>> import ray_dcp, torch
        >>> for name, value in (("a", 1.0), ("b", 1.5)):
        ...     state = {"w": torch.full((4,), value), "frozen": torch.ones(9)}
        ...     _ = ray_dcp.save(state, checkpoint_id=f"memory://doc-diff/{name}")
        >>> a, b = ray_dcp.open("memory://doc-diff/a"), ray_dcp.open("memory://doc-diff/b")
        >>> diff = a.diff(b)
        >>> diff.counts, diff.changed, diff.bytes_read
        ({'unchanged': 1, 'changed': 1}, ('w',), 0)
        >>> [(one.name, one.norm, one.relative) for one in diff.values()]
        [('w', 1.0, 0.5)]
    """

    first: CheckpointView
    second: CheckpointView
    tensors: tuple[TensorDiff, ...]
    bytes_read: int = 0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of tensors and objects of each kind of change that occurs."""
        names = [Change(code).name.lower() for code in Change]
        found = [one.change for one in self.tensors]
        return {name: found.count(name) for name in names if name in found}

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of tensors and objects that differ."""
        return tuple(one.name for one in self.tensors if one.change != "unchanged")

    @property
    def changed_bytes(self) -> int:
        """Bytes of the second checkpoint in blocks that differ or were added."""
        return sum(one.changed_bytes for one in self.tensors if one.change != "removed")

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoints are equal."""
        return not self.changed

    def values(
        self, names: Sequence[str] | None = None, *, progress: ShowProgress = False
    ) -> Iterator[ValueDiff]:
        """Reads tensors that changed, and yields by how much.

        Args:
            names: Tensors to read; by default all that changed and have equal shapes.
            progress: As for `ray_dcp.verify`.

        Raises:
            MissingKeyError: Neither checkpoint has the name.
            InvalidRequestError: The name is not a tensor of both checkpoints, the shapes differ, or
                the dtype has no numbers.
            DamagedCheckpointError: Stored bytes do not match their checksums.

        Complexity:
            Reads both tensors once, with 64 MiB of memory, or one row of each.
        """
        chosen = self.comparable if names is None else [self._checked(name) for name in names]
        sizes = {name: 2 * self.second.tensors[name].num_bytes for name in chosen}
        with reporting(progress, "reading", self.second.url) as meter:
            meter.expect(sum(sizes.values()))
            for name, num_bytes in sizes.items():
                yield _value_diff(self.first[name], self.second[name])
                meter.add(num_bytes)

    @property
    def comparable(self) -> tuple[str, ...]:
        """Names of the tensors that may have changed and have numbers and equal shapes."""
        return tuple(
            one.name
            for one in self.tensors
            if one.change in ("changed", "retyped", "undecided") and self._problem(one.name) is None
        )

    def _checked(self, name: str) -> str:
        known = [one.name for one in self.tensors]
        if name not in known:
            raise MissingKeyError(
                f"expected a tensor that both checkpoints have, but found {name!r} in neither"
                + nearest(name, known),
                key=name,
            )
        problem = self._problem(name)
        if problem is not None:
            raise InvalidRequestError(f"{name!r} {problem}", key=name)
        return name

    def _problem(self, name: str) -> str | None:
        first, second = self.first.tensors.get(name), self.second.tensors.get(name)
        if first is None or second is None:
            return "is not a tensor of both checkpoints"
        if first.shape != second.shape:
            return f"has shape {first.shape} in one and {second.shape} in the other"
        odd = {first.dtype, second.dtype} - READABLE
        return f"is of dtype {', '.join(odd)}, which has no numbers here" if odd else None

    def _repr_html_(self) -> str:
        from ray_dcp.view.tables import picture_diff

        return picture_diff(self).html

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"CheckpointDiff({self.first.url!r} -> {self.second.url!r}: {told or 'nothing'})"


def diff_checkpoints(
    first: CheckpointView,
    second: CheckpointView,
    *,
    read: bool = True,
    progress: ShowProgress = False,
) -> CheckpointDiff:
    """Returns the differences of two checkpoints; see `CheckpointView.diff`."""
    found = diff_tables(first.table, second.table)
    columns = found.change, found.num_bytes, found.changed_bytes
    tensors = [
        TensorDiff(
            name,
            Change(change).name.lower(),  # type: ignore[arg-type]
            num_bytes,
            changed_bytes,
            _told(first, name),
            _told(second, name),
        )
        for name, change, num_bytes, changed_bytes in zip(
            found.names, *(column.tolist() for column in columns), strict=True
        )
    ]
    undecided = [at for at, one in enumerate(tensors) if one.change == "undecided"]
    bytes_read = sum(2 * tensors[at].num_bytes for at in undecided) if read else 0
    with reporting(progress, "comparing", second.url) as meter:
        meter.expect(bytes_read)
        for at in undecided if read else ():
            one = tensors[at]
            same = _same_bytes(first, second, one.name)
            tensors[at] = replace(
                one,
                change="unchanged" if same else "changed",
                changed_bytes=0 if same else one.num_bytes,
                was_read=True,
            )
            meter.add(2 * one.num_bytes)
    notes: tuple[str, ...] = ()
    count = f"{len(undecided)} tensors or objects"
    if undecided and read:
        notes = (f"{count} were read and compared: {_why(first, second)}",)
    elif undecided:
        notes = (f"hashes can't decide {count}: {_why(first, second)}; nothing was read",)
    return CheckpointDiff(first, second, tuple(tensors), bytes_read, notes)


def _why(first: CheckpointView, second: CheckpointView) -> str:
    without = [view.url for view in (first, second) if view.kind != "native"]
    if without:
        return f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no hashes"
    return "they were cut into other chunks"


def _told(view: CheckpointView, name: str) -> str:
    info = view.tensors.get(name)
    if info is None:
        return "object" if name in view else ""
    return f"{info.dtype}{list(info.shape)}"


def _same_bytes(first: CheckpointView, second: CheckpointView, name: str) -> bool:
    if name not in first.tensors:
        return first.read_object(name) == second.read_object(name)
    pair = first[name], second[name]
    if not any(handle.is_opaque for handle in pair):
        # Suppressed: in stock checkpoints, only reading shows that a tensor is a subclass.
        with suppress(InvalidRequestError):
            return all(np.array_equal(_bytes(left), _bytes(right)) for left, right in _slabs(*pair))
    return first.read_object(name) == second.read_object(name)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _slabs(
    first: TensorHandle, second: TensorHandle
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yields each part of both tensors."""
    for part in parts_of(first.shape):
        yield first.raw(part), second.raw(part)


def _value_diff(first: TensorHandle, second: TensorHandle) -> ValueDiff:
    difference = squares = max_abs = 0.0
    changed = elements = nonfinite = 0
    with np.errstate(invalid="ignore", over="ignore"):
        for one, other in _slabs(first, second):
            left = as_numbers(one, first.dtype).reshape(-1)
            right = as_numbers(other, second.dtype).reshape(-1)
            both = np.isfinite(left) & np.isfinite(right)
            # Why only finite elements: one NaN would hide the changes of all others.
            delta = np.abs((right - left)[both])
            difference += float(np.dot(delta, delta))
            finite = np.abs(left[np.isfinite(left)])
            squares += float(np.dot(finite, finite))
            max_abs = max(max_abs, float(delta.max(initial=0.0)))
            equal = (left == right) | (np.isnan(left) & np.isnan(right))
            changed += int(left.size - np.count_nonzero(equal))
            elements += left.size
            nonfinite += int(right.size - np.count_nonzero(np.isfinite(right)))
    norm, before = sqrt(difference), sqrt(squares)
    relative = norm / before if before else (float("inf") if norm else 0.0)
    return ValueDiff(second.name, norm, max_abs, relative, changed, elements, nonfinite)
