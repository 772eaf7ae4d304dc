"""Rows that a planner of the user's planned, as the columns that native planning works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from ray_dcp.errors import StateDictError
from ray_dcp.plan.values import Columns, Kind, Path

__all__ = ["Row", "columns_of", "tensor_data_of"]


@dataclass(frozen=True)
class Row:
    """One item; the fields are those of `Columns`, unpadded."""

    name: str
    kind: Kind
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    requires_grad: bool = False
    splittable: bool = False
    value: int = 0


def columns_of(rows: Sequence[Row], paths: Mapping[str, Path]) -> Columns:
    """Returns the rows as columns, boxes padded to the width of the widest.

    Args:
        rows: In the order of the planner's items.
        paths: FQN to its place in the nested state dict; names that it lacks get None.
    """
    names = tuple(dict.fromkeys(row.name for row in rows))
    dtypes = tuple(dict.fromkeys(row.dtype for row in rows if row.dtype is not None))
    name_index = {name: index for index, name in enumerate(names)}
    dtype_index: dict[str | None, int] = {dtype: index for index, dtype in enumerate(dtypes)}
    width = max((1, *(len(row.shape) for row in rows)))

    def boxes(field: str, fill: int) -> Any:
        padded = [(*getattr(r, field), *[fill] * (width - len(r.shape))) for r in rows]
        return np.array(padded, dtype=np.int64).reshape(len(rows), width)

    return Columns(
        names=names,
        paths=tuple(paths.get(name) for name in names),
        dtypes=dtypes,
        name=np.array([name_index[row.name] for row in rows], dtype=np.int32),
        kind=np.array([row.kind for row in rows], dtype=np.int8),
        dtype=np.array([dtype_index.get(row.dtype, -1) for row in rows], dtype=np.int8),
        ndim=np.array([len(row.shape) for row in rows], dtype=np.int8),
        shape=boxes("shape", 1),
        offset=boxes("offset", 0),
        size=boxes("size", 1),
        requires_grad=np.array([row.requires_grad for row in rows], dtype=np.bool_),
        splittable=np.array([row.splittable for row in rows], dtype=np.bool_),
        value=np.array([row.value for row in rows], dtype=np.uint64),
    )


def tensor_data_of(item: WriteItem, planner: str, rank: int) -> TensorWriteData:
    """Returns the `TensorWriteData` of an item, which must describe a box.

    Args:
        item: Of a tensor.
        planner: Its class, for the error.
        rank: For the error.

    Raises:
        StateDictError: It describes none.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        raise StateDictError(
            f"{planner} planned {item.index.fqn!r} as {item.type.name} without tensor_data",
            rank=rank,
            key=item.index.fqn,
        )
    if not len(data.size) == len(data.chunk.offsets) == len(data.chunk.sizes):
        raise StateDictError(
            f"{planner} planned {item.index.fqn!r} with a chunk at "
            f"{tuple(data.chunk.offsets)} of {tuple(data.chunk.sizes)}, but the tensor has "
            f"{len(data.size)} dimensions: {tuple(data.size)}",
            rank=rank,
            key=item.index.fqn,
        )
    return data
