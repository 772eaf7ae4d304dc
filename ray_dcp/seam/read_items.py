"""The tensor boxes that a load planner wants, filled in its terms: resolve, fill, commit.

`Boxes` is the `TargetSink` of loads with a planner of the user's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from ray_dcp.errors import InternalError, ShapeMismatchError
from ray_dcp.options import LoadOptions
from ray_dcp.seam.failures import call_user_code
from ray_dcp.seam.tensors import dtype_name, is_plain, loses_nothing, writable_bytes

__all__ = ["BoxItem", "Boxes"]

Offsets = tuple[int, ...]


class BoxItem:
    """One `ReadItem` of a tensor: a box of the stored tensor, and its target once resolved.

    Args:
        item: As planned.
        tensor: Index into the chunk table's `names`.
        offset: Where the box starts in the stored tensor.
        size: Its lengths.
        dtype: As stored.
    """

    def __init__(
        self, item: ReadItem, tensor: int, offset: Offsets, size: Offsets, dtype: torch.dtype
    ) -> None:
        self.item = item
        self.tensor = tensor
        self.offset = offset
        self.size = size
        self.dtype = dtype
        self.target: torch.Tensor | None = None
        self.filling: torch.Tensor | None = None
        """What the bytes go into: the target itself, or a temporary of the stored dtype."""
        self.late: list[tuple[Offsets, torch.Tensor]] = []
        """Pieces that only `copy_` can bring into the target, by their start in the box."""
        self.missing = torch.Size(size).numel()
        """Elements that `place` has not brought; `done` does not count."""
        self.is_committed = False

    @property
    def fqn(self) -> str:
        """What the caller calls it."""
        return self.item.dest_index.fqn

    def resolve(self, boxes: Boxes) -> torch.Tensor:
        """Returns the target, asking the planner the first time."""
        if self.target is None:
            self.target = boxes.target_of(self)
        return self.target

    def common(self, origin: Offsets, size: Offsets) -> tuple[Offsets, Offsets] | None:
        """Returns offset and size of what a chunk has in common with the box, if anything."""
        low = tuple(map(max, self.offset, origin))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.size, origin, size, strict=True)
        )
        lengths = tuple(h - l_ for l_, h in zip(low, high, strict=True))
        return (low, lengths) if all(n > 0 for n in lengths) else None


class Boxes:
    """All boxes of one load, as the sink that the reader fills.

    Attributes:
        rows: The boxes of raw bytes, by wanted row.
        others: Boxes that are brought by `place` alone.
    """

    def __init__(self, planner: LoadPlanner, options: LoadOptions, rank: int) -> None:
        self.rows: Sequence[BoxItem] = ()
        self.others: Sequence[BoxItem] = ()
        self._planner = planner
        self._name = type(planner).__name__
        self._options = options
        self._rank = rank
        # Planners are written for DCP's reader, which has one thread.
        self._lock = threading.RLock()

    def call(self, hook: str, code: Callable[[], Any]) -> Any:
        """Runs a hook of the planner; no two at a time."""
        with self._lock:
            return call_user_code(f"{self._name}.{hook}", code, rank=self._rank)

    def buffer(self, row: int) -> memoryview:
        """Returns the bytes to fill for a wanted row; see `TargetSink`."""
        with self._lock:
            return writable_bytes(self._filling(self.rows[row]))

    def done(self, row: int) -> None:
        """Hands a filled row to the planner; see `TargetSink`."""
        box = self.rows[row]
        if not box.late:
            self._commit(box)

    def place(
        self, box: BoxItem, piece: torch.Tensor, origin: Offsets, low: Offsets, size: Offsets
    ) -> None:
        """Brings a part of a box from a loaded tensor.

        Args:
            box: The box.
            piece: What was loaded.
            origin: Where the piece starts in the stored tensor.
            low: Where the part starts in the stored tensor.
            size: Its lengths.
        """
        part = _narrow(piece, tuple(a - o for a, o in zip(low, origin, strict=True)), size)
        start = tuple(a - o for a, o in zip(low, box.offset, strict=True))
        with self._lock:
            # Why later: a copy of the temporary into the target would undo it.
            box.late.append((start, part))
            box.missing -= part.numel()
            if box.missing <= 0:
                self._commit(box)

    def finish(self) -> None:
        """Commits what is left: boxes of no elements, and those brought in both ways.

        Raises:
            InternalError: A box was never filled.
        """
        for box in (*self.rows, *self.others):
            if box.is_committed and not box.late:
                continue
            if 0 not in box.size and not box.late:
                raise InternalError(f"{box.fqn!r} was never read", rank=self._rank, key=box.fqn)
            self._commit(box)

    def casts(self) -> tuple[tuple[str, str, str], ...]:
        """Returns `(FQN, stored dtype, target dtype)` of the boxes resolved so far."""
        found = {
            (box.fqn, dtype_name(box.dtype), dtype_name(box.target.dtype)): None
            for box in (*self.rows, *self.others)
            if box.target is not None and box.target.dtype != box.dtype
        }
        return tuple(found)

    def target_of(self, box: BoxItem) -> torch.Tensor:
        """Asks the planner for the tensor to fill, and checks it."""
        target = self.call(
            f"resolve_tensor for {box.fqn!r}",
            lambda: self._planner.resolve_tensor(box.item).detach(),
        )
        if tuple(target.shape) != box.size:
            raise ShapeMismatchError(
                f"{self._name} planned to read {box.size} elements of {box.fqn!r}, but "
                f"resolves a tensor of shape {tuple(target.shape)}",
                rank=self._rank,
                key=box.fqn,
            )
        self._check_dtype(box, target.dtype)
        resolved: torch.Tensor = target
        return resolved

    def _check_dtype(self, box: BoxItem, dtype: torch.dtype) -> None:
        policy = self._options.dtype
        if policy == "cast" or dtype == box.dtype:
            return
        if policy == "widen" and loses_nothing(box.dtype, dtype):
            return
        raise ShapeMismatchError(
            f"{box.fqn!r} is stored as {box.dtype}, but its target is {dtype}, which "
            f"{'may lose values' if policy == 'widen' else 'is another dtype'}; make the target "
            f"{box.dtype}, or load with LoadOptions(dtype='cast')",
            rank=self._rank,
            key=box.fqn,
        )

    def _filling(self, box: BoxItem) -> torch.Tensor:
        if box.filling is None:
            target = box.resolve(self)
            is_direct = (
                target.dtype == box.dtype
                and is_plain(target)
                and target.is_cpu
                and target.is_contiguous()
                and not (target.is_conj() or target.is_neg())
            )
            box.filling = target if is_direct else torch.empty(box.size, dtype=box.dtype)
        return box.filling

    def _commit(self, box: BoxItem) -> None:
        with self._lock:
            target = box.resolve(self)
            if box.filling is not None and box.filling is not target:
                target.copy_(box.filling)
            for start, part in box.late:
                _narrow(target, start, tuple(part.shape)).copy_(part)
            box.late.clear()
            box.is_committed = True
            self.call(
                f"commit_tensor for {box.fqn!r}",
                lambda: self._planner.commit_tensor(box.item, target),
            )
            # Temporaries, ours and the planner's, are not needed any more.
            box.filling = None
            box.target = None


def _narrow(tensor: torch.Tensor, start: Offsets, size: Offsets) -> torch.Tensor:
    """Returns a part as a view; a whole dimension is left alone, as subclasses may refuse it."""
    for dim, (low, length) in enumerate(zip(start, size, strict=True)):
        if low != 0 or length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, low, length)
    return tensor
