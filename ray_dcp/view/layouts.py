"""How the tensors of a checkpoint are cut into chunks, and over which files: read off the table.

A mesh is not stored: what is told here is the grid of boxes that it led to.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ray_dcp.format.dtypes import ITEMSIZE
from ray_dcp.plan.values import ChunkTable, Int64Array, Kind

__all__ = ["grids", "layout_of", "layout_text"]

_MOST_DIMS_LOOKED_AT = 8


def grids(table: ChunkTable) -> Int64Array:
    """Returns into how many parts each tensor is cut in each dimension.

    Args:
        table: What is stored.

    Returns:
        int64[t, D]; 1 where it is not cut, 0 in all dimensions where the chunks make no grid.

    Complexity:
        O(chunks log chunks) in numpy.
    """
    width = table.offset.shape[1]
    found = np.ones((table.num_tensors, width), np.int64)
    for dim in range(min(width, _MOST_DIMS_LOOKED_AT)):
        found[:, dim] = np.maximum(_starts(table, dim), 1)
    chunks = np.bincount(table.tensor, minlength=table.num_tensors)
    found[(found.prod(axis=1) != np.maximum(chunks, 1))] = 0
    return found


def _starts(table: ChunkTable, dim: int) -> Int64Array:
    """Returns at how many different offsets of a dimension the chunks of each tensor begin."""
    tensor, offset = table.tensor.astype(np.int64), table.offset[:, dim]
    longest = int(offset.max(initial=0)) + 1
    if longest * max(table.num_tensors, 1) < 1 << 62:
        # Why one number: to sort pairs takes 20 times as long.
        keys = np.sort(tensor * longest + offset)
        tensor = keys // longest
        is_new = np.append(True, keys[1:] != keys[:-1]) if len(keys) else np.zeros(0, bool)
    else:
        order = np.lexsort((offset, tensor))
        tensor, offset = tensor[order], offset[order]
        is_new = np.append(True, (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1]))
    return np.bincount(tensor[is_new], minlength=table.num_tensors)


def layout_of(grid: tuple[int, ...]) -> str:
    """Returns a grid in words.

    Args:
        grid: Parts in each dimension.

    Example:
        >>> layout_of((1, 1)), layout_of((8, 1)), layout_of((1, 2)), layout_of((4, 2))
        ('whole', 'rows/8', 'columns/2', '4x2')
        >>> layout_of((0, 0)), layout_of((1, 1, 3))
        ('irregular', '1x1x3')
    """
    if 0 in grid:
        return "irregular"
    cut = [dim for dim, parts in enumerate(grid) if parts > 1]
    if not cut:
        return "whole"
    if cut == [0]:
        return f"rows/{grid[0]}"
    if cut == [1] and len(grid) == 2:
        return f"columns/{grid[1]}"
    return "x".join(map(str, grid))


def layout_text(table: ChunkTable) -> str:
    """Returns how most bytes of a checkpoint are cut, in words; empty where there are no tensors.

    Args:
        table: What is stored.
    """
    grid = grids(table)
    weights: Counter[str] = Counter()
    itemsize = np.array([ITEMSIZE.get(name, 1) for name in table.dtypes] or [1], np.int64)
    num_bytes = table.shape.prod(axis=1) * itemsize[np.maximum(table.dtype, 0)]
    for row in np.flatnonzero(table.kind != Kind.OBJECT).tolist():
        weights[layout_of(tuple(grid[row, : table.ndim[row]].tolist()))] += int(num_bytes[row])
    return weights.most_common(1)[0][0] if weights else ""
