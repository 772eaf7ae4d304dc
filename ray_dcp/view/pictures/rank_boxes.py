"""Pictures of which rank holds which part of a tensor, and what other ranks would load from whom.

`RankBoxes` are the parts of one tensor with their ranks; `flatten` lays them out on paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.pictures import drawing as draw
from ray_dcp.view.pictures.drawing import WIDTH, Bar, Picture
from ray_dcp.view.resharding import ShardGrid, parse_layout
from ray_dcp.view.run_listing import rank_of_file
from ray_dcp.view.wording import count_text, size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView

IntArray = npt.NDArray[np.int64]

CELLS = (48, 64)
"""Rows and columns of the raster that is drawn where there are too many boxes to see each."""
MOST_BOXES = 400
"""More are drawn as a raster."""
MOST_LEGEND, MOST_BARS = 12, 24
MOST_PAIRS = 4_000_000

_LEFT, _TOP = 46, 20


@dataclass(frozen=True, eq=False)
class RankBoxes:
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
    def ranks(self) -> list[int]:
        """The different ranks, ascending."""
        found: list[int] = np.unique(self.rank).tolist()
        return found


@dataclass(frozen=True, eq=False)
class FlatBoxes:
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
    is_slice: bool


def even_boxes(shape: Sequence[int], parts: Sequence[int]) -> RankBoxes:
    """Returns a tensor cut evenly, as `torch.chunk` and `DTensor` cut it; ranks in row-major order.

    Args:
        shape: Of the tensor.
        parts: Into how many parts each dimension is cut; missing ones into one.

    Raises:
        InvalidRequestError: There are more parts than dimensions, or one is below 1.

    Examples:
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
    counts = np.array([*parts, *[1] * (len(shape) - len(parts))], np.int64)
    at = np.indices(counts.tolist()).reshape(len(counts), -1).T
    step = -(-np.array(shape, np.int64) // counts)
    low, high = np.minimum(at * step, shape), np.minimum((at + 1) * step, shape)
    return RankBoxes(tuple(shape), np.arange(len(at), dtype=np.int64), low, high - low)


def stored_boxes(table: ChunkTable, row: int) -> RankBoxes:
    """Returns the chunks of a stored tensor; their ranks are those that wrote the files.

    Args:
        table: Of the checkpoint.
        row: Of the tensor in `table.names`.
    """
    chunks = np.flatnonzero(table.tensor == row)
    ndim = int(table.ndim[row])
    files, at = np.unique(table.file[chunks], return_inverse=True)
    ranks = [rank_of_file(table.files[file]) for file in files.tolist()]
    known = np.array([-1 if rank is None else rank for rank in ranks], np.int64)
    shape = tuple(table.shape[row, :ndim].tolist())
    return RankBoxes(
        shape, known[at.reshape(-1)], table.offset[chunks, :ndim], table.size[chunks, :ndim]
    )


def flatten(boxes: RankBoxes, dims: tuple[int | None, int | None] | None = None) -> FlatBoxes:
    """Returns boxes in two dimensions: the first part of each other one that is cut, too.

    Args:
        boxes: Of any number of dimensions.
        dims: Rows and columns; by default the dimensions that are cut most, the lower one as rows.
    """
    count, ndim = len(boxes), len(boxes.shape)
    cuts = [len(np.unique(boxes.offset[:, dim])) for dim in range(ndim)]
    if dims is None:
        # Why by length next: where nothing is cut the long dimensions show most.
        order = sorted(range(ndim), key=lambda dim: (-cuts[dim], -boxes.shape[dim], dim))
        first, second = ([None, None, *sorted(order[:2])])[-2:]
        dims = first, second
    others = [dim for dim in range(ndim) if dim not in dims and cuts[dim] > 1]
    keep = np.ones(count, np.bool_)
    for dim in others:
        keep &= boxes.offset[:, dim] == boxes.offset[:, dim].min()
    zero, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    offset = np.stack([zero if dim is None else boxes.offset[:, dim] for dim in dims], axis=1)
    size = np.stack([one if dim is None else boxes.size[:, dim] for dim in dims], axis=1)
    rows, columns = (1 if dim is None else boxes.shape[dim] for dim in dims)
    return FlatBoxes(
        dims, (rows, columns), boxes.rank[keep], offset[keep], size[keep], bool(others)
    )


def raster(flat: FlatBoxes, cells: tuple[int, int] = CELLS) -> IntArray:
    """Returns the rank at the centre of each cell of a grid; -2 where no box is.

    Args:
        flat: Boxes that do not overlap.
        cells: Rows and columns of the grid.

    Complexity:
        O(boxes) in numpy, and a step for each cell at most.
    """
    found = np.full(cells, -2, np.int64)
    scale = np.array(cells) / np.maximum(flat.lengths, 1)
    first = np.ceil(flat.offset * scale - 0.5).astype(np.int64)
    last = np.minimum(np.ceil((flat.offset + flat.size) * scale - 0.5).astype(np.int64), cells)
    # Why only those: a box without a centre in it is too small to be seen.
    for row in np.flatnonzero((first < last).all(axis=1)).tolist():
        (top, left), (below, right) = first[row].tolist(), last[row].tolist()
        found[top:below, left:right] = flat.rank[row]
    return found


def overlaps(before: RankBoxes, after: RankBoxes) -> IntArray | None:
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
        ends = [boxes.offset[:, dim] + boxes.size[:, dim] for boxes in (after, before)]
        found *= np.maximum(np.minimum(ends[0][:, None], ends[1][None, :]) - low, 0)
    return found


def shard_layout(
    boxes: RankBoxes, name: str = "", *, itemsize: int = 0, dtype: str = ""
) -> Picture:
    """Returns a tensor as a rectangle, with its parts in the colours of the ranks that hold them.

    Args:
        boxes: The parts; of more than two dimensions, the two that are cut most are drawn.
        name: FQN.
        itemsize: Bytes of an element, for the size; 0 if unknown.
        dtype: For the title.
    """
    flat = flatten(boxes)
    width, height = _extent(flat, 380)
    label = f"Layout of a tensor of shape {boxes.shape} over {_ranks(boxes)}"
    parts = [_panel(flat, _LEFT, width, height), _legend(boxes, _TOP + height + 20)]
    drawing = draw.svg(WIDTH, _TOP + height + 34, *parts, label=label)
    return draw.pictured(*_heading(boxes, flat, name, itemsize, dtype), drawing)


def reshard(before: RankBoxes, after: RankBoxes, name: str = "", *, itemsize: int = 1) -> Picture:
    """Returns a tensor as it is stored and as other ranks want it, in the colours of who stored it.

    Args:
        before: As stored, without overlaps.
        after: As the ranks of a load want it.
        name: FQN.
        itemsize: Bytes of an element.

    Raises:
        InvalidRequestError: The shapes differ.
    """
    if before.shape != after.shape:
        raise InvalidRequestError(
            f"expected two layouts of one tensor, found shapes {before.shape} and {after.shape}",
            key="after",
        )
    pairs = ((getattr(before, one), getattr(after, one)) for one in ("rank", "offset", "size"))
    both = flatten(RankBoxes(before.shape, *(np.concatenate(pair) for pair in pairs)))
    old, new = flatten(before, both.dims), flatten(after, both.dims)
    width, height = _extent(both, 300)
    second = _LEFT + width + 90
    bottom = _TOP + height + 20
    parts = [
        draw.text(_LEFT, 12, f"stored by {_ranks(before)}"),
        _panel(old, _LEFT, width, height),
        draw.text(second - 50, _TOP + height / 2, "→", font_size=20),
        draw.text(second, 12, f"loaded by {_ranks(after)}"),
        _panel(old, second, width, height, new),
        _legend(before, bottom),
    ]
    drawn, bottom = draw.bars(_takes(before, after, itemsize), 100, bottom + 20, most=MOST_BARS)
    label = f"A tensor stored by {_ranks(before)} and loaded by {_ranks(after)}"
    drawing = draw.svg(WIDTH, bottom + 4, *parts, drawn, label=label)
    return draw.pictured(*_heading(before, both, name, itemsize), drawing)


def picture_layout(view: CheckpointView, name: str) -> Picture:
    """Returns which rank wrote which part of a tensor.

    Args:
        view: Of the checkpoint.
        name: FQN of a tensor.

    Raises:
        MissingKeyError: There is no such name; the message lists similar ones.
        InvalidRequestError: It is an object.
    """
    boxes, dtype = _boxes_of(view, name)
    return shard_layout(boxes, name, itemsize=ITEMSIZE.get(dtype, 0), dtype=dtype)


def picture_reshard(
    view: CheckpointView, name: str, layout: str | int | ShardGrid | Sequence[int]
) -> Picture:
    """Returns a tensor as it is stored, and as the ranks of a load want it.

    Args:
        view: Of the checkpoint.
        name: FQN of a tensor.
        layout: Of the load: `6` for rows over 6 ranks, `4x2` and others as for
            `CheckpointView.reshard`; or into how many parts each dimension is cut.

    Raises:
        MissingKeyError: There is no such name; the message lists similar ones.
        InvalidRequestError: It is an object, or the layout does not fit it.
    """
    boxes, dtype = _boxes_of(view, name)
    if isinstance(layout, str | int | ShardGrid):
        parsed = parse_layout(layout)
        layout = (parsed.rows, parsed.columns)[: len(boxes.shape)]
    after = even_boxes(boxes.shape, layout)
    return reshard(boxes, after, name, itemsize=ITEMSIZE.get(dtype, 1))


# --- pieces -------------------------------------------------------------------------------------


def _boxes_of(view: CheckpointView, name: str) -> tuple[RankBoxes, str]:
    """Returns the parts in which a tensor is stored, and its dtype."""
    info = view.tensors.get(name)
    if info is None:
        view[name]  # raises for a name that is not there
        raise InvalidRequestError(
            f"expected the name of a tensor, but {name!r} is an object", key="name"
        )
    return stored_boxes(view.checkpoint.table, view.names.index(name)), info.dtype


def _heading(
    boxes: RankBoxes, flat: FlatBoxes, name: str, itemsize: int, dtype: str = ""
) -> tuple[str, str]:
    shape = "×".join(map(str, boxes.shape)) or "scalar"
    volume = int(np.prod(boxes.shape, dtype=object)) if boxes.shape else 1
    facts = [shape, dtype, size_text(volume * itemsize) if itemsize else ""]
    facts.append(f"{count_text(len(boxes), 'part')} on {_ranks(boxes)}")
    sliced = (
        f"dimensions {flat.dims[0]} and {flat.dims[1]}; others are cut as well, here is the first "
        f"part of each"
    )
    told = " · ".join(draw.safe(fact) for fact in facts if fact)
    return draw.heading(name, told), draw.aside(sliced if flat.is_slice else "")


def _ranks(boxes: RankBoxes) -> str:
    return count_text(len(boxes.ranks), "rank")


def _name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "a file"


def _extent(flat: FlatBoxes, most: float) -> tuple[float, float]:
    """Returns width and height of a drawing: as the tensor, but never a line."""
    if flat.dims[0] is None:
        return most, 44.0
    ratio = (max(flat.lengths[0], 1) / max(flat.lengths[1], 1)) ** 0.5
    return max(140.0, most / max(ratio, 1.0)), min(max(90.0, most * ratio * 0.7), most * 0.75)


def _patches(
    flat: FlatBoxes, left: float, width: float, height: float
) -> Iterator[tuple[int, tuple[float, float, float, float], str]]:
    """Yields ranks with rectangles of a drawing and what they are; of too many boxes a raster."""
    if len(flat.rank) > MOST_BOXES:
        tall, wide = height / CELLS[0], width / CELLS[1]
        for row, ranks in enumerate(raster(flat).tolist()):
            column = 0
            for rank, run in groupby(ranks):
                length = len([*run])
                if rank > -2:
                    # Why a little more: without it the page shows between cells.
                    place = left + column * wide, _TOP + row * tall, length * wide + 0.3, tall + 0.3
                    yield rank, place, _name(rank)
                column += length
        return
    tall, wide = height / max(flat.lengths[0], 1), width / max(flat.lengths[1], 1)
    rows = zip(flat.rank.tolist(), flat.offset.tolist(), flat.size.tolist(), strict=True)
    for rank, (y, x), (rows_, columns) in rows:
        if rows_ and columns:
            where = [] if flat.dims[0] is None else [f"{y}:{y + rows_}"]
            where.append(f"{x}:{x + columns}")
            place = left + x * wide, _TOP + y * tall, columns * wide, rows_ * tall
            yield rank, place, f"{_name(rank)} [{', '.join(where)}]"


def _panel(
    flat: FlatBoxes, x: float, width: float, height: float, wanted: FlatBoxes | None = None
) -> str:
    """Returns a tensor in the colours of its ranks; with the outlines of parts that are wanted."""
    is_raster = len(flat.rank) > MOST_BOXES
    edge: dict[str, Any] = {} if is_raster else {"stroke": "currentColor", "stroke_width": 0.5}
    parts = []
    for rank, place, told in _patches(flat, x, width, height):
        parts.append(draw.rect(*place, draw.rank_colour(rank), told, **edge))
        if wanted is None and not is_raster:
            parts.append(_label(rank, *place))
    if wanted is not None and len(wanted.rank) <= MOST_BOXES:
        look: dict[str, Any] = {"stroke": "currentColor", "stroke_width": 2.5}
        for rank, place, told in _patches(wanted, x, width, height):
            parts.append(draw.rect(*place, "none", f"wanted by {told}", **look))
            parts.append(_label(rank, *place))
    parts.append(draw.rect(x, _TOP, width, height, "none", stroke="currentColor", opacity=0.55))
    below = _TOP + height
    if flat.dims[1] is not None:
        parts.append(draw.note(x + width, below + 11, flat.lengths[1], "end"))
    if flat.dims[0] is not None:
        parts.append(
            draw.note(x - 6, below, flat.lengths[0], "end") + draw.note(x - 6, _TOP + 9, 0, "end")
        )
    return "".join(parts)


def _label(rank: int, x: float, y: float, width: float, height: float) -> str:
    """Returns a rank in the middle of its part, if there is room for it."""
    if rank < 0 or width < 9 + 6 * len(str(rank)) or height < 13:
        return ""
    look = {"fill": "#fff", "font_weight": "bold", "pointer_events": "none"}
    return draw.text(x + width / 2, y + height / 2 + 4, rank, "middle", **look)


def _legend(boxes: RankBoxes, y: float) -> str:
    ranks = boxes.ranks
    meant = [(draw.rank_colour(rank), _name(rank)) for rank in ranks[:MOST_LEGEND]]
    more = len(ranks) - MOST_LEGEND
    return draw.legend(_LEFT, y, [*meant, *([("none", f"… and {more} more")] if more > 0 else [])])


def _takes(before: RankBoxes, after: RankBoxes, itemsize: int) -> list[Bar]:
    """Returns what each rank of the load takes from whom."""
    common = overlaps(before, after)
    if common is None:
        return []
    rows, sources = [], np.unique(before.rank, return_inverse=True)[1].reshape(-1)
    for rank, elements in zip(after.rank.tolist(), common, strict=True):
        shares = np.bincount(sources, weights=elements * itemsize).astype(np.int64).tolist()
        parts = [
            (share, draw.rank_colour(source), f"{size_text(share)} from {_name(source)}")
            for source, share in zip(before.ranks, shares, strict=True)
            if share
        ]
        told = f"{size_text(sum(shares))} of {count_text(len(parts), 'rank')}"
        rows.append(Bar(_name(rank), parts, told))
    return rows
