"""The boxes that a load wants, collected one by one or many at once, and the sink of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from ray_dcp.plan.boxes import widen
from ray_dcp.plan.reading import Wanted
from ray_dcp.plan.values import Int64Array
from ray_dcp.seam.sink import TensorSink

__all__ = ["Boxes"]


class Boxes:
    """Wanted boxes in the making, and the sink of their bytes.

    Args:
        itemsizes: Bytes of a stored element, by tensor; of those that `add` is called for.
    """

    def __init__(self, itemsizes: Mapping[int, int]) -> None:
        self.sink = TensorSink()
        self._itemsizes = itemsizes
        self._tensor: list[int] = []
        self._offset: list[tuple[int, ...]] = []
        self._size: list[tuple[int, ...]] = []
        self._ended: list[Wanted] = []

    def add_direct(
        self,
        tensors: Int64Array,
        targets: Sequence[torch.Tensor],
        shape: Int64Array,
        itemsize: Int64Array,
    ) -> None:
        """Appends targets that are read in place, whole, and their boxes.

        Args:
            tensors: int64[n].
            targets: Of each; the empty ones are left out.
            shape: int64[n, D], theirs, then 1.
            itemsize: int64[n], of an element.
        """
        full = (shape > 0).all(axis=1)
        if not full.all():
            targets = [targets[row] for row in np.flatnonzero(full).tolist()]
            tensors, shape, itemsize = tensors[full], shape[full], itemsize[full]
        self._end()
        zeros = np.zeros_like(shape)
        self._ended.append(Wanted(tensors.astype(np.int32), zeros, shape, itemsize))
        self.sink.add_direct(targets)

    def add(self, tensor: int, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Appends the box of the next row of the sink."""
        self._tensor.append(tensor)
        self._offset.append(offset)
        self._size.append(size)

    def wanted(self) -> Wanted:
        """Returns the boxes as columns."""
        self._end()
        if len(self._ended) == 1:
            return self._ended[0]
        width = max(part.offset.shape[1] for part in self._ended)
        boxes = [widen(part.offset, part.size, width) for part in self._ended]
        return Wanted(
            np.concatenate([part.tensor for part in self._ended]),
            np.concatenate([offset for offset, _ in boxes]),
            np.concatenate([size for _, size in boxes]),
            np.concatenate([part.itemsize for part in self._ended]),
        )

    def _end(self) -> None:
        """Makes columns of what `add` was called for."""
        if not self._tensor and self._ended:
            return
        num = len(self._tensor)
        ndim = np.fromiter(map(len, self._size), np.int64, num)
        width = max(1, int(ndim.max(initial=0)))
        inside = np.arange(width) < ndim[:, None]
        offset, size = np.zeros((num, width), np.int64), np.ones((num, width), np.int64)
        count = int(ndim.sum())
        offset[inside] = np.fromiter(chain.from_iterable(self._offset), np.int64, count)
        size[inside] = np.fromiter(chain.from_iterable(self._size), np.int64, count)
        itemsize = np.fromiter(map(self._itemsizes.__getitem__, self._tensor), np.int64, num)
        self._ended.append(Wanted(np.array(self._tensor, np.int32), offset, size, itemsize))
        self._tensor, self._offset, self._size = [], [], []
