"""The boxes that a load wants, collected one by one, and the sink of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from ray_dcp.plan.reading import Wanted
from ray_dcp.seam.sink import TensorSink

__all__ = ["Boxes"]


class Boxes:
    """Wanted boxes in the making, and the sink of their bytes.

    Args:
        itemsizes: Bytes of a stored element, by tensor; may be filled until `wanted` is called.
    """

    def __init__(self, itemsizes: dict[int, int]) -> None:
        self.sink = TensorSink()
        self._itemsizes = itemsizes
        self._tensor: list[int] = []
        self._offset: list[tuple[int, ...]] = []
        self._size: list[tuple[int, ...]] = []

    def add_direct(self, tensors: Sequence[int], targets: Sequence[torch.Tensor]) -> None:
        """Appends targets that are read in place, whole, and their boxes."""
        pairs = [pair for pair in zip(tensors, targets, strict=True) if pair[1].numel()]
        kept = [target for _, target in pairs]
        sizes = [target.shape for target in kept]
        self._itemsizes.update((tensor, target.itemsize) for tensor, target in pairs)
        self._tensor += [tensor for tensor, _ in pairs]
        self._offset += [(0,) * len(size) for size in sizes]
        self._size += sizes
        self.sink.add_direct(kept)

    def add(self, tensor: int, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Appends the box of the next row of the sink."""
        self._tensor.append(tensor)
        self._offset.append(offset)
        self._size.append(size)

    def wanted(self) -> Wanted:
        """Returns the boxes as columns."""
        num = len(self._tensor)
        ndim = np.fromiter(map(len, self._size), np.int64, num)
        width = max(1, int(ndim.max(initial=0)))
        inside = np.arange(width) < ndim[:, None]
        offset, size = np.zeros((num, width), np.int64), np.ones((num, width), np.int64)
        count = int(ndim.sum())
        offset[inside] = np.fromiter(chain.from_iterable(self._offset), np.int64, count)
        size[inside] = np.fromiter(chain.from_iterable(self._size), np.int64, count)
        itemsize = np.fromiter(map(self._itemsizes.__getitem__, self._tensor), np.int64, num)
        return Wanted(np.array(self._tensor, np.int32), offset, size, itemsize)
