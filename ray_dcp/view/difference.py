"""`CheckpointDiff`: what changed from one checkpoint to another, and by how much.

What changed is decided by stored hashes; what they can't decide is read and compared. By how much
is reckoned from the values, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import InvalidRequestError, MissingKeyError
from ray_dcp.format.numbers import READABLE, as_numbers
from ray_dcp.store.watching import Told
from ray_dcp.view.diffing import Change, diff_tables
from ray_dcp.view.naming import nearest

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView
    from ray_dcp.view.tensor_handle import TensorHandle

__all__ = ["ChangeName", "CheckpointDiff", "TensorDiff", "ValueDiff", "diff_checkpoints"]

ChangeName = Literal["unchanged", "changed", "undecided", "reshaped", "retyped", "added", "removed"]

_SLAB_BYTES = 32 << 20
"""Of each of the two tensors, so much is in memory at a time."""


@dataclass(frozen=True)
class TensorDiff:
    """What became of one tensor or object."""

    name: str
    change: ChangeName
    """`undecided`: hashes can't tell, and nothing was read."""
    num_bytes: int
    """Stored in the second checkpoint, or in the first if it was removed."""
    changed_bytes: int
    """Of these, bytes in checksum blocks that differ; all where hashes did not decide."""
    first: str = ""
    """Dtype and shape in the first checkpoint, as `float32[4, 2]`; empty if it is not there."""
    second: str = ""
    """The same in the second."""
    was_read: bool = False
    """Hashes did not decide: the bytes were read and compared."""


@dataclass(frozen=True)
class ValueDiff:
    """By how much a tensor changed. NaN and infinities are left out of the first three."""

    name: str
    norm: float
    """Euclidean norm of second minus first."""
    max_abs: float
    """Largest absolute difference of an element."""
    relative: float
    """`norm` over the norm of the first; `inf` when that is 0 and `norm` is not."""
    num_changed: int
    """Elements that differ; NaN where NaN was counts as equal."""
    num_elements: int
    num_nonfinite: int
    """Elements that are NaN or infinite in the second."""


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointDiff:
    """What changed from one checkpoint to another.

    Attributes:
        first: The earlier checkpoint.
        second: The later one.
        tensors: Every tensor and object of either, those of the first in its order.
        bytes_read: Payload bytes that were read to decide: 0 where hashes did.
        notes: Why something had to be read, or could not be told.

    Example:
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
        """How many there are of each change, only of those that occur."""
        names = [Change(code).name.lower() for code in Change]
        found = [one.change for one in self.tensors]
        return {name: found.count(name) for name in names if name in found}

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of all that is not the same in both."""
        return tuple(one.name for one in self.tensors if one.change != "unchanged")

    @property
    def changed_bytes(self) -> int:
        """Bytes of the second checkpoint in blocks that differ, with all that was added."""
        return sum(one.changed_bytes for one in self.tensors if one.change != "removed")

    @property
    def is_empty(self) -> bool:
        """Both hold the same."""
        return not self.changed

    def values(
        self, names: Sequence[str] | None = None, *, told: Told | None = None
    ) -> Iterator[ValueDiff]:
        """Reads tensors that changed and yields by how much.

        Args:
            names: Which; all tensors that changed and have the same shape in both, if None.
            told: Called with the bytes read so far, and in all.

        Raises:
            MissingKeyError: A name is in neither, or in one only.
            InvalidRequestError: It is no tensor, has another shape, or a dtype without numbers.
            DamagedCheckpointError: Stored bytes do not match their checksums.

        Complexity:
            Reads both tensors once; 64 MiB of memory, or one row of each.
        """
        chosen = self.comparable if names is None else [self._checked(name) for name in names]
        total = sum(2 * self.second.tensors[name].num_bytes for name in chosen)
        done = 0
        for name in chosen:
            yield _value_diff(self.first[name], self.second[name])
            done += 2 * self.second.tensors[name].num_bytes
            if told is not None:
                told(done, total)

    @property
    def comparable(self) -> tuple[str, ...]:
        """Names of the tensors that may have changed and have numbers of one shape in both."""
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
        from ray_dcp.view.pictures.of_runs import picture_diff

        return picture_diff(self).html

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"CheckpointDiff({self.first.url!r} -> {self.second.url!r}: {told or 'nothing'})"


def diff_checkpoints(
    first: CheckpointView,
    second: CheckpointView,
    *,
    read: bool = True,
    told: Told | None = None,
) -> CheckpointDiff:
    """Returns what changed from one checkpoint to another; see `CheckpointView.diff`."""
    found = diff_tables(first.table, second.table)
    tensors = [
        TensorDiff(
            name, Change(change).name.lower(), num_bytes, changed_bytes,  # type: ignore[arg-type]
            _told(first, name) if row >= 0 else "", _told(second, name) if other >= 0 else "",
        )
        for name, change, row, other, num_bytes, changed_bytes in zip(
            found.names, found.change.tolist(), found.first.tolist(), found.second.tolist(),
            found.num_bytes.tolist(), found.changed_bytes.tolist(), strict=True,
        )
    ]  # fmt: skip
    undecided = [at for at, one in enumerate(tensors) if one.change == "undecided"]
    if not undecided:
        return CheckpointDiff(first, second, tuple(tensors))
    why = _why(first, second)
    if not read:
        note = f"hashes can't tell of {len(undecided)} tensors or objects: {why}; nothing was read"
        return CheckpointDiff(first, second, tuple(tensors), notes=(note,))
    total, done = sum(2 * tensors[at].num_bytes for at in undecided), 0
    for at in undecided:
        one = tensors[at]
        same = _same_bytes(first, second, one.name)
        tensors[at] = replace(
            one,
            change="unchanged" if same else "changed",
            changed_bytes=0 if same else one.num_bytes,
            was_read=True,
        )
        done += 2 * one.num_bytes
        if told is not None:
            told(done, total)
    note = f"{len(undecided)} tensors or objects were read and compared: {why}"
    return CheckpointDiff(first, second, tuple(tensors), done, (note,))


def _why(first: CheckpointView, second: CheckpointView) -> str:
    without = [view.url for view in (first, second) if view.kind != "native"]
    if without:
        return f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no hashes"
    return "they were cut into other chunks"


def _told(view: CheckpointView, name: str) -> str:
    info = view.tensors.get(name)
    return "object" if info is None else f"{info.dtype}{list(info.shape)}"


def _same_bytes(first: CheckpointView, second: CheckpointView, name: str) -> bool:
    if name not in first.tensors:
        return first.read_object(name) == second.read_object(name)
    pair = first[name], second[name]
    if any(handle.is_opaque for handle in pair):
        return first.read_object(name) == second.read_object(name)
    return all(np.array_equal(_bytes(left), _bytes(right)) for left, right in _slabs(*pair))


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _slabs(
    first: TensorHandle, second: TensorHandle
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yields the same part of both tensors, one after the other."""
    shape = first.shape
    if not shape:
        yield first.raw(...), second.raw(...)
        return
    row_bytes = prod(shape[1:]) * 8
    step = max(1, _SLAB_BYTES // max(row_bytes, 1))
    for low in range(0, shape[0], step):
        part = slice(low, min(low + step, shape[0]))
        yield first.raw(part), second.raw(part)


@dataclass
class _Sums:
    """What is added up over the slabs of a tensor."""

    difference: float = 0.0
    before: float = 0.0
    max_abs: float = 0.0
    changed: int = 0
    elements: int = 0
    nonfinite: int = 0

    def add(self, left: npt.NDArray[Any], right: npt.NDArray[Any]) -> None:
        both = np.isfinite(left) & np.isfinite(right)
        # Why over finite ones alone: one NaN would hide by how much all others changed.
        delta = np.abs((right - left)[both])
        self.difference += float(np.dot(delta, delta))
        finite = np.abs(left[np.isfinite(left)])
        self.before += float(np.dot(finite, finite))
        self.max_abs = max(self.max_abs, float(delta.max(initial=0.0)))
        equal = (left == right) | (np.isnan(left) & np.isnan(right))
        self.changed += int(left.size - np.count_nonzero(equal))
        self.elements += left.size
        self.nonfinite += int(right.size - np.count_nonzero(np.isfinite(right)))


def _value_diff(first: TensorHandle, second: TensorHandle) -> ValueDiff:
    sums = _Sums()
    left, right = partial(as_numbers, dtype=first.dtype), partial(as_numbers, dtype=second.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for one, other in _slabs(first, second):
            sums.add(left(one).reshape(-1), right(other).reshape(-1))
    norm, before = sqrt(sums.difference), sqrt(sums.before)
    relative = norm / before if before else (float("inf") if norm else 0.0)
    return ValueDiff(
        second.name, norm, sums.max_abs, relative, sums.changed, sums.elements, sums.nonfinite
    )
