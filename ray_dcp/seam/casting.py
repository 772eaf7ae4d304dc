"""A save planner that casts floating tensors on the way, one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

__all__ = ["CastingSavePlanner"]


class CastingSavePlanner(DefaultSavePlanner):
    """Saves floating tensors as another dtype.

    Args:
        dtype: Of what is saved.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def create_local_plan(self) -> SavePlan:
        """Plans what the cast tensors will be."""
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[self._cast(item) for item in plan.items])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's
        """Casts a tensor when its bytes are wanted."""
        made = super().transform_object(write_item, object)
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            return made.to(self._dtype)
        return made

    def _cast(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or not data.properties.dtype.is_floating_point:
            return item
        properties = dataclasses.replace(data.properties, dtype=self._dtype)
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(data, properties=properties)
        )
