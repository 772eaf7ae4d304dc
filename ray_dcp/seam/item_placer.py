"""Whole `torch.save` items of tensor chunks into the boxes that want parts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.plan.reading import ReadPlan, Wanted
from ray_dcp.seam.objects import load_object
from ray_dcp.seam.placing import ObjectTaker, Placing
from ray_dcp.seam.sink import copy_into

__all__ = ["ItemPlacer"]


class ItemPlacer:
    """Puts whole `torch.save` items of tensor chunks into the boxes that want parts of them."""

    def __init__(self, placing: Placing, raw: Wanted) -> None:
        self._placing = placing
        self._raw = raw

    def place_item(self, chunk: int, data: bytes) -> None:
        """Puts a tensor item into the buffers of every raw row that it meets.

        Raises:
            UnsafeCheckpointError: It asks for a class that is not on the allow-list.
            DamagedCheckpointError: It is no tensor of the chunk's shape.
        """
        table = self._placing.table
        stored = self._load(chunk, data)
        for row in np.flatnonzero(self._raw.tensor == table.tensor[chunk]).tolist():
            box = (self._raw.offset[row], self._raw.size[row])
            into = self._placing.raw.sink.region(row)
            _copy_common(into, box, stored, (table.offset[chunk], table.size[chunk]))

    def opaque_takers(self, plan: ReadPlan) -> list[tuple[int, ObjectTaker]]:
        """Returns every chunk of the plan with what takes its item to the opaque targets."""
        rows: dict[int, list[int]] = {}
        for chunk, row in zip(plan.chunk.tolist(), plan.wanted.tolist(), strict=True):
            rows.setdefault(chunk, []).append(row)
        wanted = self._placing.opaque.wanted()
        return [(chunk, self._opaque_taker(chunk, rows[chunk], wanted)) for chunk in rows]

    def _opaque_taker(self, chunk: int, rows: list[int], wanted: Wanted) -> ObjectTaker:
        table = self._placing.table

        def take(data: bytes) -> None:
            stored = self._load(chunk, data)
            for row in rows:
                box = (wanted.offset[row], wanted.size[row])
                into = self._placing.opaque.sink.target(row)
                _copy_common(into, box, stored, (table.offset[chunk], table.size[chunk]))

        return take

    def _load(self, chunk: int, data: bytes) -> torch.Tensor:
        table = self._placing.table
        number = int(table.tensor[chunk])
        fqn, ndim = table.names[number], int(table.ndim[number])
        weights_only = self._placing.options.weights_only
        loaded = load_object(data, fqn=fqn, weights_only=weights_only)
        size = tuple(table.size[chunk, :ndim].tolist())
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != size:
            found = tuple(loaded.shape) if isinstance(loaded, torch.Tensor) else type(loaded)
            raise DamagedCheckpointError(
                f"a chunk of {fqn!r} should be a tensor of shape {size}, but is {found}; load an "
                "earlier checkpoint",
                key=fqn,
            )
        return loaded


def _copy_common(
    into: torch.Tensor, wanted: tuple[Any, Any], stored: torch.Tensor, chunk: tuple[Any, Any]
) -> None:
    """Copies what two boxes have in common; boxes are padded offset and size arrays."""
    for dim in range(stored.dim()):
        low = max(int(wanted[0][dim]), int(chunk[0][dim]))
        high = min(int(wanted[0][dim] + wanted[1][dim]), int(chunk[0][dim] + chunk[1][dim]))
        if high <= low:
            return
        into = _narrow(into, dim, low - int(wanted[0][dim]), high - low)
        stored = _narrow(stored, dim, low - int(chunk[0][dim]), high - low)
    copy_into(into, stored)


def _narrow(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    # Why not always: tensor subclasses need not know how to be narrowed.
    if length == tensor.size(dim):
        return tensor
    return tensor.detach().narrow(dim, start, length)
