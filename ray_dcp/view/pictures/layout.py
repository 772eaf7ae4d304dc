"""Pictures of which rank holds which part of a tensor, and what other ranks would load from whom.

`Boxes` are the parts of one tensor with their ranks; `flatten` lays them out on paper. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np
import numpy.typing as npt

from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.listing import rank_of_file
from ray_dcp.view.pictures.drawing import (
    GREY,
    WIDTH,
    Picture,
    clip,
    div,
    rank_colour,
    rect,
    safe,
    svg,
    tag,
    text,
)
from ray_dcp.view.wording import size_text

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


@dataclass(frozen=True)
class Patch:
    """A rectangle of a drawing."""

    rank: int
    left: float
    top: float
    width: float
    height: float
    where: str = ""
    """Indices of the part that it is; empty in a raster."""


def patches(flat: Flat, width: float, height: float) -> list[Patch]:
    """Returns the boxes as rectangles of a drawing.

    Args:
        flat: The boxes.
        width: Of the drawing.
        height: Of the drawing.
    """
    tall, wide = height / max(flat.lengths[0], 1), width / max(flat.lengths[1], 1)
    found = []
    for rank, start, size in zip(
        flat.rank.tolist(), flat.offset.tolist(), flat.size.tolist(), strict=True
    ):
        slices = [f"{low}:{low + length}" for low, length in zip(start, size, strict=True)]
        where = f"[{slices[1] if flat.dims[0] is None else ', '.join(slices)}]"
        left, top = start[1] * wide, start[0] * tall
        found.append(Patch(rank, left, top, size[1] * wide, size[0] * tall, where))
    return found


def raster_patches(flat: Flat, width: float, height: float) -> list[Patch]:
    """Returns the raster of too many boxes, cells of one rank beside each other as one rectangle.

    Args:
        flat: The boxes.
        width: Of the drawing.
        height: Of the drawing.
    """
    cells = raster(flat)
    tall, wide = height / cells.shape[0], width / cells.shape[1]
    found = []
    for row, ranks in enumerate(cells.tolist()):
        column = 0
        for rank, run in groupby(ranks):
            length = len([*run])
            if rank > -2:
                found.append(Patch(rank, column * wide, row * tall, length * wide, tall))
            column += length
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


MOST_BOXES = 400
"""More are drawn as a raster."""
MOST_LEGEND = 16
MOST_BARS = 24
MOST_PAIRS = 4_000_000

_LEFT, _TOP = 46, 20


def shard_layout(boxes: Boxes, name: str = "", *, itemsize: int = 0, dtype: str = "") -> Picture:
    """Returns a tensor as a rectangle, with its parts in the colours of the ranks that hold them.

    Args:
        boxes: The parts; of more than two dimensions, the two that are cut most are drawn.
        name: FQN.
        itemsize: Bytes of an element, for the size; 0 if unknown.
        dtype: For the title.
    """
    flat = flatten(boxes)
    width, height = _extent(flat, 380)
    parts = [_panel(flat, _LEFT, _TOP, width, height)]
    legend, bottom = _legend(boxes.rank.tolist(), _LEFT + width + 26, _TOP, height)
    drawing = svg(
        min(WIDTH, _LEFT + width + 26 + 150),
        max(_TOP + height + 12, bottom),
        *parts,
        legend,
        label=f"Layout of a tensor of shape {boxes.shape} over {boxes.num_ranks} ranks",
    )
    return Picture(div(_heading(boxes, flat, name, itemsize, dtype), drawing))


def reshard(before: Boxes, after: Boxes, name: str = "", *, itemsize: int = 1) -> Picture:
    """Returns a tensor as it is stored and as other ranks want it, in the colours of who stored it.

    Args:
        before: As stored, without overlaps.
        after: As the ranks of a load want it.
        name: FQN.
        itemsize: Bytes of an element.

    Raises:
        InvalidRequestError: The shapes differ.
    """
    check_one_tensor(before, after)
    both = flatten(_joined(before, after))
    old, new = _flat_as(before, both), _flat_as(after, both)
    width, height = _extent(both, 300)
    second = _LEFT + width + 90
    arrow = tag(
        "path",
        d=f"M{_LEFT + width + 22} {_TOP + height / 2}h34m-8 -6l8 6l-8 6",
        fill="none",
        stroke="currentColor",
        stroke_width=1.5,
        opacity=0.6,
    )
    parts = [
        text(_LEFT, 12, f"stored by {_ranks(before.num_ranks)}", opacity=0.8),
        _panel(old, _LEFT, _TOP, width, height),
        arrow,
        text(second, 12, f"loaded by {_ranks(after.num_ranks)}", opacity=0.8),
        _panel(old, second, _TOP, width, height, labels=False, faint_lines=True),
        _outlines(new, second, _TOP, width, height),
    ]
    bottom = _TOP + height + 20
    legend, bottom = _legend_row(before.rank.tolist(), _LEFT, bottom)
    bars, bottom = _bars(before, after, itemsize, bottom)
    drawing = svg(
        WIDTH,
        bottom,
        *parts,
        legend,
        bars,
        label=f"A tensor stored by {before.num_ranks} ranks and loaded by {after.num_ranks}",
    )
    return Picture(div(_heading(before, both, name, itemsize, ""), drawing))


def overlaps(before: Boxes, after: Boxes) -> IntArray | None:
    """Returns how many elements each part of one layout has in common with each of another.

    Args:
        before: `n` parts.
        after: `m` parts.

    Returns:
        int64[m, n]; None for more than 4 million pairs.
    """
    if len(before) * len(after) > MOST_PAIRS:
        return None
    found = np.ones((len(after), len(before)), np.int64)
    for dim in range(len(before.shape)):
        low = np.maximum(after.offset[:, dim, None], before.offset[None, :, dim])
        ends = (b.offset[:, dim] + b.size[:, dim] for b in (after, before))
        high = np.minimum(next(ends)[:, None], next(ends)[None, :])
        found *= np.maximum(high - low, 0)
    return found


# --- pieces -------------------------------------------------------------------------------------


def _heading(boxes: Boxes, flat: Flat, name: str, itemsize: int, dtype: str) -> str:
    shape = "×".join(map(str, boxes.shape)) or "scalar"
    volume = int(np.prod(boxes.shape, dtype=object)) if boxes.shape else 1
    facts = [shape, dtype, size_text(volume * itemsize) if itemsize else ""]
    facts.append(f"{len(boxes)} part{'s' * (len(boxes) != 1)} on {_ranks(boxes.num_ranks)}")
    told = " · ".join(safe(fact) for fact in facts if fact)
    note = ""
    if flat.is_slice:
        note = f"<div style='opacity:.75'>dimensions {flat.dims[0]} and {flat.dims[1]}; "
        note += "others are cut as well, here is the first part of each</div>"
    title = f"<b><code>{safe(name)}</code></b> · " if name else ""
    return f"<div>{title}{told}</div>{note}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _extent(flat: Flat, most: float) -> tuple[float, float]:
    """Returns width and height of a drawing: as the tensor, but never a line."""
    rows, columns = flat.lengths
    if flat.dims[0] is None:
        return most, 44.0
    ratio = (max(rows, 1) / max(columns, 1)) ** 0.5
    return (
        (most, max(90.0, most * ratio * 0.7))
        if ratio < 1
        else (max(140.0, most / ratio), min(most * 0.75, most * ratio * 0.7))
    )


def _panel(
    flat: Flat,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    labels: bool = True,
    faint_lines: bool = False,
) -> str:
    fills = _fills(flat, x, y, width, height, labels, faint_lines)
    frame = tag(
        "rect",
        x=x,
        y=y,
        width=width,
        height=height,
        fill="none",
        stroke="currentColor",
        stroke_width=1,
        opacity=0.55,
    )
    rows, columns = flat.lengths
    parts = [tag("g", fills), frame]
    if flat.dims[1] is not None:
        parts.append(
            text(x + width, y + height + 11, columns, size=10, text_anchor="end", opacity=0.7)
        )
    if flat.dims[0] is not None:
        parts.append(text(x - 6, y + height, rows, size=10, text_anchor="end", opacity=0.7))
        parts.append(text(x - 6, y + 9, 0, size=10, text_anchor="end", opacity=0.7))
    return "".join(parts)


def _fills(
    flat: Flat, x: float, y: float, width: float, height: float, labels: bool, faint: bool
) -> str:
    if len(flat.rank) > MOST_BOXES:
        # Why a little more: without it the page shows between cells.
        cells = (
            ((x + p.left, y + p.top, p.width + 0.3, p.height + 0.3), p.rank)
            for p in raster_patches(flat, width, height)
        )
        return "".join(rect(*place, _colour(rank), _name(rank)) for place, rank in cells)
    parts = []
    line, opacity = (0.5, 0.25) if faint else (1, 0.6)
    look = {"fill_opacity": 0.85, "stroke_width": line, "stroke_opacity": opacity}
    for p in patches(flat, width, height):
        if not p.width or not p.height:
            continue
        place, told = (x + p.left, y + p.top, p.width, p.height), f"{_name(p.rank)} {p.where}"
        parts.append(rect(*place, _colour(p.rank), told, stroke="currentColor", **look))
        if labels and p.rank >= 0:
            parts.append(_label(p, x, y, pointer_events="none"))
    return "".join(parts)


def _label(patch: Patch, x: float, y: float, pointer_events: str | None = None) -> str:
    """Returns the rank in the middle of its part, if there is room for it."""
    if patch.width < 9 + 6 * len(str(patch.rank)) or patch.height < 13:
        return ""
    return text(
        x + patch.left + patch.width / 2,
        y + patch.top + patch.height / 2 + 4,
        patch.rank,
        text_anchor="middle",
        fill="#fff",
        font_weight="bold",
        pointer_events=pointer_events,
    )


def _outlines(flat: Flat, x: float, y: float, width: float, height: float) -> str:
    if len(flat.rank) > MOST_BOXES:
        return text(x + width / 2, y + height / 2, f"{len(flat.rank)} parts", text_anchor="middle")
    parts = []
    for p in patches(flat, width, height):
        told = f"wanted by {_name(p.rank)}"
        place = x + p.left, y + p.top, p.width, p.height
        parts.append(rect(*place, "none", told, stroke="currentColor", stroke_width=2.5))
        parts.append(_label(p, x, y))
    return tag("g", "".join(parts))


def _legend(ranks: Iterable[int], x: float, y: float, height: float) -> tuple[str, float]:
    found = sorted(set(ranks))
    parts = []
    for index, rank in enumerate(found[:MOST_LEGEND]):
        left, top = x + 74 * (index // 8), y + 17 * (index % 8)
        parts.append(rect(left, top, 11, 11, _colour(rank), fill_opacity=0.85))
        parts.append(text(left + 16, top + 10, _name(rank)))
    bottom = y + 17 * min(len(found), 8)
    if len(found) > MOST_LEGEND:
        parts.append(text(x, bottom + 11, f"… {len(found) - MOST_LEGEND} more", opacity=0.7))
        bottom += 17
    return tag("g", "".join(parts)) if parts else "", bottom + 4


def _legend_row(ranks: Iterable[int], x: float, y: float) -> tuple[str, float]:
    found = sorted(set(ranks))
    parts = [text(x, y + 10, "stored by", opacity=0.7)]
    for index, rank in enumerate(found[:MOST_LEGEND]):
        left = x + 62 + 44 * index
        parts.append(rect(left, y, 11, 11, _colour(rank), fill_opacity=0.85))
        parts.append(text(left + 15, y + 10, rank if rank >= 0 else "?"))
    if len(found) > MOST_LEGEND:
        parts.append(text(x + 62 + 44 * MOST_LEGEND, y + 10, "…", opacity=0.7))
    return tag("g", "".join(parts)), y + 24


def _bars(before: Boxes, after: Boxes, itemsize: int, y: float) -> tuple[str, float]:
    """Returns what each rank of the load takes from whom, as bars."""
    common = overlaps(before, after)
    if common is None:
        return "", y
    wanted = common.sum(axis=1) * itemsize
    top = int(wanted.max(initial=0))
    if not top:
        return "", y
    parts, scale = [], (WIDTH - _LEFT - 200) / top
    for index in range(min(len(after), MOST_BARS)):
        rank = int(after.rank[index])
        parts.append(text(_LEFT + 46, y + 11, _name(rank), text_anchor="end"))
        x = _LEFT + 54.0
        shares = np.bincount(_positions(before.rank), weights=common[index] * itemsize)
        sources = np.unique(before.rank)
        for source, num_bytes in zip(sources.tolist(), shares.tolist(), strict=True):
            if num_bytes:
                told = f"{size_text(int(num_bytes))} from {_name(source)}"
                parts.append(
                    rect(x, y + 2, num_bytes * scale, 11, _colour(source), told, fill_opacity=0.85)
                )
                x += num_bytes * scale
        count = int((shares > 0).sum())
        told = f"{size_text(int(wanted[index]))} of {_ranks(count)}"
        parts.append(text(x + 8, y + 11, told, size=10, opacity=0.8))
        y += 16
    if len(after) > MOST_BARS:
        parts.append(text(_LEFT, y + 11, f"… and {len(after) - MOST_BARS} more", opacity=0.7))
        y += 16
    return tag("g", "".join(parts)), y + 4


def _positions(ranks: IntArray) -> IntArray:
    found: IntArray = np.unique(ranks, return_inverse=True)[1].reshape(-1)
    return found


def _joined(one: Boxes, other: Boxes) -> Boxes:
    return Boxes(
        one.shape,
        np.concatenate([one.rank, other.rank]),
        np.concatenate([one.offset, other.offset]),
        np.concatenate([one.size, other.size]),
    )


def _flat_as(boxes: Boxes, like: Flat) -> Flat:
    """Returns boxes in the dimensions that another drawing has."""
    columns = []
    for dim in like.dims:
        count = len(boxes)
        if dim is None:
            columns.append((np.zeros(count, np.int64), np.ones(count, np.int64)))
        else:
            columns.append((boxes.offset[:, dim], boxes.size[:, dim]))
    keep = np.ones(len(boxes), np.bool_)
    for dim in range(len(boxes.shape)):
        if dim not in like.dims:
            keep &= boxes.offset[:, dim] == boxes.offset[:, dim].min(initial=0)
    offset = np.stack([column[0] for column in columns], axis=1)[keep]
    size = np.stack([column[1] for column in columns], axis=1)[keep]
    return Flat(like.dims, like.lengths, boxes.rank[keep], offset, size, like.is_slice)


def _colour(rank: int) -> str:
    return GREY if rank < 0 else rank_colour(rank)


def _name(rank: int) -> str:
    return clip(f"rank {rank}", 100) if rank >= 0 else "a file"
