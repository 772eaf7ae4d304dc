"""Pictures of how one tensor is cut: as it is stored, or as other ranks would read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.quantities import count_text, size_text
from ray_dcp.core.values import ChunkTable, Int64Array
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import WIDTH, Bar, Picture
from ray_dcp.view.resharding import ShardGrid, chunk_bounds, parse_layout
from ray_dcp.view.run_listing import rank_of_file

MOST_BOXES = 400
"""Maximum number of parts of a tensor that are drawn."""
MOST_LEGEND, MOST_BARS = 12, 24
_EDGE, _ROOF = 46, 20
"""Left and upper edge of the picture of a tensor, in pixels."""


@dataclass(frozen=True, eq=False)
class RankBoxes:
    """Parts of one tensor with their ranks, one row per part.

    Attributes:
        shape: Shape of the tensor.
        rank: int64[n]; -1 if unknown.
        offset: int64[n, ndim], start of the part in each dimension.
        size: int64[n, ndim], length of the part in each dimension.
    """

    shape: tuple[int, ...]
    rank: Int64Array
    offset: Int64Array
    size: Int64Array

    @property
    def ranks(self) -> list[int]:
        """The distinct ranks, ascending."""
        found: list[int] = np.unique(self.rank).tolist()
        return found

    def __str__(self) -> str:
        return count_text(len(self.ranks), "rank")


def stored_boxes(table: ChunkTable, row: int) -> RankBoxes:
    """Returns the chunks of a stored tensor with the ranks that wrote their files.

    Args:
        table: Chunk table of the checkpoint.
        row: Index of the tensor in `table.names`.
    """
    chunks = np.flatnonzero(table.tensor == row)
    ndim = int(table.ndim[row])
    ranks = [rank_of_file(table.files[file]) for file in table.file[chunks].tolist()]
    known = np.array([-1 if rank is None else rank for rank in ranks], np.int64)
    shape = tuple(table.shape[row, :ndim].tolist())
    return RankBoxes(shape, known, table.offset[chunks, :ndim], table.size[chunks, :ndim])


def _even_boxes(shape: tuple[int, ...], parts: Sequence[int]) -> RankBoxes:
    """Returns an evenly cut tensor, as DTensor cuts; ranks in row-major order."""
    if len(parts) > len(shape) or any(part < 1 for part in parts):
        raise InvalidRequestError(
            f"expected at most {len(shape)} numbers of parts, each at least 1, for a tensor of "
            f"shape {shape}, found {tuple(parts)}",
            key="layout",
        )
    counts = np.array([*parts, *[1] * (len(shape) - len(parts))], np.int64)
    at = np.indices(counts.tolist()).reshape(len(counts), -1).T
    low, high = chunk_bounds(np.array(shape, np.int64), at, counts)
    return RankBoxes(shape, np.arange(len(at), dtype=np.int64), low, high - low)


def shard_layout(boxes: RankBoxes, name: str, dtype: str, num_bytes: int) -> Picture:
    """Returns a picture of a tensor as a rectangle whose parts have the colours of their ranks.

    Args:
        boxes: The parts. Of more than two dimensions, the two with the most cuts are drawn.
        name: FQN.
        dtype: Name of the torch dtype.
        num_bytes: Number of bytes of the whole tensor.
    """
    dims = _drawn_dims(boxes)
    flat = _flat(boxes, dims)
    width, height = _extent(flat, 380)
    label = f"Layout of a tensor of shape {boxes.shape} over {boxes}"
    parts = [_draw_map(flat, len(dims), _EDGE, width, height), _legend(boxes, _ROOF + height + 20)]
    drawing = draw.svg(WIDTH, _ROOF + height + 34, *parts, label=label)
    return draw.pictured(*_draw_heading(boxes, flat, dims, name, dtype, num_bytes), drawing)


def reshard_layout(
    before: RankBoxes,
    layout: str | int | ShardGrid | Sequence[int],
    name: str,
    dtype: str,
    num_bytes: int,
) -> Picture:
    """Returns a picture of a tensor as it is stored and as the ranks of a load need it.

    Args:
        before: The stored parts.
        layout: Layout of the load, or the number of parts of each dimension.
        name: FQN.
        dtype: Name of the torch dtype.
        num_bytes: Number of bytes of the whole tensor.

    Raises:
        InvalidRequestError: The layout does not fit the tensor.
    """
    if isinstance(layout, str | int | ShardGrid):
        parsed = parse_layout(layout)
        layout = (parsed.rows, parsed.columns)[: len(before.shape)]
    after = _even_boxes(before.shape, layout)
    pairs = ((getattr(before, one), getattr(after, one)) for one in ("rank", "offset", "size"))
    dims = _drawn_dims(RankBoxes(before.shape, *(np.concatenate(pair) for pair in pairs)))
    old, new = _flat(before, dims), _flat(after, dims)
    width, height = _extent(old, 300)
    second, bottom = _EDGE + width + 90, _ROOF + height + 20
    parts = [
        draw.text(_EDGE, 12, f"stored by {before}"),
        _draw_map(old, len(dims), _EDGE, width, height),
        draw.text(second - 50, _ROOF + height / 2, "→", font_size=20),
        draw.text(second, 12, f"loaded by {after}"),
        _draw_map(old, len(dims), second, width, height, new),
        _legend(before, bottom),
    ]
    takes = _bars_by_source(before, after, ITEMSIZE.get(dtype, 1))
    drawn, bottom = draw.bars(takes, 100, bottom + 20, len(after.rank) - len(takes))
    label = f"A tensor stored by {before} and loaded by {after}"
    drawing = draw.svg(WIDTH, bottom + 4, *parts, drawn, label=label)
    return draw.pictured(*_draw_heading(before, old, dims, name, dtype, num_bytes), drawing)


def _drawn_dims(boxes: RankBoxes) -> list[int]:
    """Returns the dimensions that are drawn as rows and columns: the two with the most cuts."""
    cuts = [len(np.unique(offsets)) for offsets in boxes.offset.T]
    # Why by length next: if no dimension is cut, the long ones show most.
    order = sorted(range(len(cuts)), key=lambda dim: (-cuts[dim], -boxes.shape[dim], dim))
    return sorted(order[:2])


def _flat(boxes: RankBoxes, dims: Sequence[int]) -> RankBoxes:
    """Returns boxes as rows and columns; of each other dimension that is cut, the first part."""
    others = np.delete(boxes.offset, dims, axis=1)
    keep = (others == others.min(axis=0, initial=1 << 62)).all(axis=1)
    missing = 2 - len(dims)
    sides = ((0, 0), (missing, 0))
    offset = np.pad(boxes.offset[keep][:, dims], sides)
    size = np.pad(boxes.size[keep][:, dims], sides, constant_values=1)
    shape = (*[1] * missing, *(boxes.shape[dim] for dim in dims))
    return RankBoxes(shape, boxes.rank[keep], offset, size)


def _draw_heading(
    boxes: RankBoxes, flat: RankBoxes, dims: Sequence[int], name: str, dtype: str, num_bytes: int
) -> tuple[str, str]:
    shape = "×".join(map(str, boxes.shape)) or "scalar"
    parts = f"{count_text(len(boxes.rank), 'part')} on {boxes}"
    told = " · ".join([shape, draw.safe(dtype), size_text(num_bytes), parts])
    sliced = f"dimensions {dims} are drawn; others are cut as well, and their first parts are shown"
    is_slice = len(flat.rank) < len(boxes.rank)
    return draw.heading(name, told), draw.aside(sliced if is_slice else "")


def _rank_name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "a file"


def _extent(flat: RankBoxes, most: float) -> tuple[float, float]:
    """Returns width and height of a drawing: proportions of the tensor, within limits."""
    ratio = (max(flat.shape[0], 1) / max(flat.shape[1], 1)) ** 0.5
    return max(140.0, most / max(ratio, 1.0)), min(max(44.0, most * ratio * 0.7), most * 0.75)


def _draw_map(
    flat: RankBoxes,
    ndim: int,
    x: float,
    width: float,
    height: float,
    wanted: RankBoxes | None = None,
) -> str:
    """Returns a tensor in the colours of its ranks, with outlines of the wanted parts."""
    parts = _patches(flat, ndim, x, width, height, is_labelled=wanted is None)
    if wanted is not None:
        parts += _patches(wanted, ndim, x, width, height, is_outline=True)
    parts.append(draw.rect(x, _ROOF, width, height, "none", stroke="currentColor", opacity=0.55))
    below = _ROOF + height
    if ndim:
        parts.append(draw.note(x + width, below + 11, flat.shape[1], "end"))
    if ndim > 1:
        parts.append(draw.note(x - 6, below, flat.shape[0], "end"))
    if len(flat.rank) > MOST_BOXES:
        parts.append(draw.note(x, below + 11, f"the first {MOST_BOXES} parts"))
    return "".join(parts)


def _patches(
    flat: RankBoxes,
    ndim: int,
    left: float,
    width: float,
    height: float,
    *,
    is_labelled: bool = True,
    is_outline: bool = False,
) -> list[str]:
    """Returns the first boxes of a tensor, in the colours of their ranks or as outlines."""
    tall, wide = height / max(flat.shape[0], 1), width / max(flat.shape[1], 1)
    parts = []
    columns = (one[:MOST_BOXES].tolist() for one in (flat.rank, flat.offset, flat.size))
    for rank, low, size in zip(*columns, strict=True):
        if not all(size):
            continue
        ranges = [f"{start}:{start + length}" for start, length in zip(low, size, strict=True)]
        told = f"{_rank_name(rank)} [{', '.join(ranges[-max(ndim, 1) :])}]"
        x, y = left + low[1] * wide, _ROOF + low[0] * tall
        across, down = size[1] * wide, size[0] * tall
        fill, told = ("none", f"wanted by {told}") if is_outline else (draw.rank_colour(rank), told)
        edge = {"stroke": "currentColor", "stroke_width": 2.5 if is_outline else 0.5}
        parts.append(draw.rect(x, y, across, down, fill, told, **edge))
        if is_labelled and rank >= 0 and across >= 9 + 6 * len(str(rank)) and down >= 13:
            look = {"fill": "#fff", "font_weight": "bold", "pointer_events": "none"}
            parts.append(draw.text(x + across / 2, y + down / 2 + 4, rank, "middle", **look))
    return parts


def _legend(boxes: RankBoxes, y: float) -> str:
    ranks = boxes.ranks
    meant = [(draw.rank_colour(rank), _rank_name(rank)) for rank in ranks[:MOST_LEGEND]]
    more = len(ranks) - MOST_LEGEND
    return draw.legend(_EDGE, y, [*meant, *([("none", f"… and {more} more")] if more > 0 else [])])


def _bars_by_source(before: RankBoxes, after: RankBoxes, itemsize: int) -> list[Bar]:
    """Returns bars of the bytes that each rank of a load takes from each rank that stored them."""
    rows, sources = [], np.unique(before.rank, return_inverse=True)[1].reshape(-1)
    columns = (after.rank[:MOST_BARS].tolist(), after.offset, after.size)
    for rank, offset, size in zip(*columns, strict=False):
        low = np.maximum(offset, before.offset)
        common = np.minimum(offset + size, before.offset + before.size) - low
        num_bytes = np.maximum(common, 0).prod(axis=1) * itemsize
        shares = np.bincount(sources, weights=num_bytes).astype(np.int64).tolist()
        parts = [
            (share, draw.rank_colour(source), f"{size_text(share)} from {_rank_name(source)}")
            for source, share in zip(before.ranks, shares, strict=True)
            if share
        ]
        told = f"{size_text(sum(shares))} of {count_text(len(parts), 'rank')}"
        rows.append(Bar(_rank_name(rank), parts, told))
    return rows
