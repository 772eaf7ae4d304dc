"""`Boxes`: which rank holds which part of one tensor, and how that is laid out on paper. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.values import ChunkTable
from ray_dcp.view.file_names import rank_of_file

__all__ = ["Boxes", "Flat", "check_one_tensor", "even_boxes", "flatten", "raster", "stored_boxes"]

IntArray = npt.NDArray[np.int64]

CELLS = (48, 64)
"""Rows and columns of the raster in which more boxes are drawn than can be told apart."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """Parts of one tensor with their ranks, one row a part.

    Attributes:
        shape: Of the tensor.
        rank: int64[n]; -1 where nobody knows.
        offset: int64[n, ndim], where the part begins.
        size: int64[n, ndim], its lengths.
    """

    shape: tuple[int, ...]
    rank: IntArray
    offset: IntArray
    size: IntArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def num_ranks(self) -> int:
        """Number of different ranks."""
        return len(np.unique(self.rank))


@dataclass(frozen=True, eq=False)
class Flat:
    """Boxes in two dimensions: rows and columns of a drawing.

    Attributes:
        dims: Which dimensions of the tensor are rows and columns; None is one of length 1.
        lengths: Rows and columns.
        rank: int64[n].
        offset: int64[n, 2].
        size: int64[n, 2].
        is_slice: Other dimensions are cut as well, and this is their first part.
    """

    dims: tuple[int | None, int | None]
    lengths: tuple[int, int]
    rank: IntArray
    offset: IntArray
    size: IntArray
    is_slice: bool = False


def even_boxes(shape: Sequence[int], parts: Sequence[int]) -> Boxes:
    """Returns a tensor cut evenly, as `torch.chunk` and `DTensor` cut it; ranks in row-major order.

    Args:
        shape: Of the tensor.
        parts: Into how many parts each dimension is cut; missing ones into one.

    Raises:
        InvalidRequestError: There are more parts than dimensions, or one is below 1.

    Example:
        >>> boxes = even_boxes((10, 4), (3,))
        >>> boxes.offset.tolist(), boxes.size.tolist()
        ([[0, 0], [4, 0], [8, 0]], [[4, 4], [4, 4], [2, 4]])
        >>> even_boxes((4, 4), (2, 2)).rank.tolist()
        [0, 1, 2, 3]
    """
    if len(parts) > len(shape) or any(part < 1 for part in parts):
        raise InvalidRequestError(
            f"expected at most {len(shape)} numbers of parts, each at least 1, for a tensor of "
            f"shape {tuple(shape)}, found {tuple(parts)}",
            key="parts",
        )
    cuts = []
    for length, part in zip(shape, [*parts, *[1] * (len(shape) - len(parts))], strict=True):
        step = -(-length // part)
        starts = [min(index * step, length) for index in range(part)]
        cuts.append([(start, min(step, length - start)) for start in starts])
    found = list(product(*cuts))
    return Boxes(
        tuple(shape),
        np.arange(len(found), dtype=np.int64),
        np.array([[start for start, _ in box] for box in found], np.int64).reshape(len(found), -1),
        np.array([[size for _, size in box] for box in found], np.int64).reshape(len(found), -1),
    )


def stored_boxes(table: ChunkTable, row: int) -> Boxes:
    """Returns the chunks of a stored tensor; their ranks are those that wrote the files.

    Args:
        table: Of the checkpoint.
        row: Of the tensor in `table.names`.
    """
    chunks = np.flatnonzero(table.tensor == row)
    files = table.file[chunks]
    ranks = {file: rank_of_file(table.files[file]) for file in np.unique(files).tolist()}
    known = {file: -1 if rank is None else rank for file, rank in ranks.items()}
    ndim = int(table.ndim[row])
    return Boxes(
        tuple(table.shape[row, :ndim].tolist()),
        np.array([known[file] for file in files.tolist()], np.int64),
        table.offset[chunks, :ndim],
        table.size[chunks, :ndim],
    )


def flatten(boxes: Boxes) -> Flat:
    """Returns boxes in the two dimensions that are cut most, the lower one as rows.

    Args:
        boxes: Of any number of dimensions.
    """
    ndim = len(boxes.shape)
    count = len(boxes)
    if ndim == 0:
        ones = np.ones((count, 2), np.int64)
        return Flat((None, None), (1, 1), boxes.rank, ones * 0, ones)
    cuts = [len(np.unique(boxes.offset[:, dim])) for dim in range(ndim)]
    if ndim == 1:
        zero, one = np.zeros((count, 1), np.int64), np.ones((count, 1), np.int64)
        offset, size = np.hstack([zero, boxes.offset]), np.hstack([one, boxes.size])
        return Flat((None, 0), (1, boxes.shape[0]), boxes.rank, offset, size)
    # Why by length next: where nothing is cut the long dimensions show most.
    order = sorted(range(ndim), key=lambda dim: (-cuts[dim], -boxes.shape[dim], dim))
    rows, columns = sorted(order[:2])
    others = [dim for dim in range(ndim) if dim not in (rows, columns) and cuts[dim] > 1]
    keep = np.ones(count, np.bool_)
    for dim in others:
        keep &= boxes.offset[:, dim] == boxes.offset[:, dim].min()
    dims = [rows, columns]
    return Flat(
        (rows, columns),
        (boxes.shape[rows], boxes.shape[columns]),
        boxes.rank[keep],
        boxes.offset[keep][:, dims],
        boxes.size[keep][:, dims],
        bool(others),
    )


def raster(flat: Flat, cells: tuple[int, int] = CELLS) -> IntArray:
    """Returns the rank at the centre of each cell of a grid; -2 where no box is.

    Args:
        flat: Boxes that do not overlap.
        cells: Rows and columns of the grid.

    Complexity:
        O(boxes) in numpy, and a step for each cell at most.
    """
    found = np.full(cells, -2, np.int64)
    bounds = []
    for axis in (0, 1):
        scale = cells[axis] / max(flat.lengths[axis], 1)
        first = np.ceil(flat.offset[:, axis] * scale - 0.5).astype(np.int64)
        last = np.ceil((flat.offset[:, axis] + flat.size[:, axis]) * scale - 0.5).astype(np.int64)
        bounds.append((np.maximum(first, 0), np.minimum(last, cells[axis])))
    (top, below), (left, right) = bounds
    # Why only those: a box without a centre in it is too small to be seen.
    for row in np.flatnonzero((top < below) & (left < right)).tolist():
        found[top[row] : below[row], left[row] : right[row]] = flat.rank[row]
    return found


def check_one_tensor(before: Boxes, after: Boxes) -> None:
    """Checks that two layouts can be of one tensor.

    Raises:
        InvalidRequestError: The shapes differ.
    """
    if before.shape != after.shape:
        raise InvalidRequestError(
            f"expected two layouts of one tensor, found shapes {before.shape} and {after.shape}",
            key="after",
        )
