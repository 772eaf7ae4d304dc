"""What a load on other ranks would read: numbers of each rank, and pictures of one tensor.

`preview_reshard` uses the planner and the jobs of a load. It reads only the chunk table. Bytes that
ranks would send to each other count for each of them.

`RankBoxes` has the parts of one tensor with their ranks; `flatten` projects them onto the two
dimensions of a drawing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, Kind
from ray_dcp.errors import InvalidRequestError
from ray_dcp.io.read_jobs import DirectRead, Geometry, Job, ReadCost, geometry, job_reads, make_jobs
from ray_dcp.io.reader import read_cost
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import AMBER, WIDTH, Bar, Picture
from ray_dcp.view.run_listing import rank_of_file
from ray_dcp.view.wording import count_text, nearest, size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView


MOST_RANKS = 100_000
_WHOLE_ITEM_BYTES = 1 << 20
"""Items of stock DCP up to this length are read as a whole."""

_PLAIN = re.compile(r"(\d+)(?::(row|column))?")
_GRID = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True)
class ShardGrid:
    """Layout of tensors over ranks: rows over some ranks, columns over others.

    A tensor of one dimension is cut into rows only, and is equal on all ranks of a row. A tensor
    without dimensions is equal on all ranks. The parts are those of `Shard(0)` and `Shard(1)` of a
    DTensor.
    """

    rows: int = 1
    """Number of parts of the first dimension."""
    columns: int = 1
    """Number of parts of the second dimension."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1 or self.num_ranks > MOST_RANKS:
            raise InvalidRequestError(
                f"a layout must have 1 to {MOST_RANKS} ranks, but got {self.rows} x {self.columns}"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.rows * self.columns

    def __str__(self) -> str:
        if self.columns == 1:
            return f"{self.rows}:row"
        return f"{self.rows}x{self.columns}" if self.rows > 1 else f"{self.columns}:column"


@dataclass(frozen=True)
class RankRead:
    """What one rank would read."""

    rank: int
    bytes_needed: int
    """Bytes of the rank's parts and of the objects, which it holds after the load."""
    bytes_read: int
    """Bytes requested from the storage: whole checksum blocks, and small gaps."""
    num_ranges: int
    """Number of requests to the storage."""
    num_files: int
    scratch_bytes: int
    """Maximum temporary memory of all reading threads together, in addition to the targets."""

    @property
    def peak_bytes(self) -> int:
        """Maximum host memory: targets and temporary memory."""
        return self.bytes_needed + self.scratch_bytes


@dataclass(frozen=True, repr=False)
class ReshardPreview:
    """What a load of a checkpoint on other ranks would read. No tensor has been read.

    Examples:
        >>> import ray_dcp, torch
        >>> _ = ray_dcp.save({"w": torch.ones(1024, 256)}, checkpoint_id="memory://doc-reshard/a")
        >>> found = ray_dcp.open("memory://doc-reshard/a").reshard("4:row")
        >>> [one.bytes_needed for one in found.ranks], found.amplification
        ([262144, 262144, 262144, 262144], 1.0)
    """

    layout: ShardGrid
    ranks: tuple[RankRead, ...]
    stored_bytes: int
    """Number of payload bytes of the selected tensors, each stored once."""
    uncovered: tuple[str, ...] = ()
    """Tensors with parts that the checkpoint does not contain: a load would fail."""

    def __repr__(self) -> str:
        return (
            f"ReshardPreview({self.layout}, {len(self.ranks)} ranks, "
            f"{size_text(self.bytes_read)} read for {size_text(self.bytes_needed)}"
            f"{f', {len(self.uncovered)} uncovered' if self.uncovered else ''})"
        )

    @property
    def bytes_needed(self) -> int:
        """Sum over all ranks."""
        return sum(rank.bytes_needed for rank in self.ranks)

    @property
    def bytes_read(self) -> int:
        """Sum over all ranks."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def amplification(self) -> float:
        """Bytes read divided by bytes needed, over all ranks; 1.0 if no bytes are needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def peak_bytes(self) -> int:
        """Maximum host memory of a rank."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)

    def _repr_html_(self) -> str:
        return _preview_chart(self).html


def parse_layout(text: str | int | ShardGrid) -> ShardGrid:
    """Returns the layout that a text describes.

    Args:
        text: `8` or `8:row`, `8:column`, or `4x2` (4 parts of the rows, 2 of the columns).

    Raises:
        InvalidRequestError: The text describes no layout.

    Examples:
        >>> parse_layout("4x2").num_ranks, str(parse_layout("1x3")), str(parse_layout(8))
        (8, '3:column', '8:row')
    """
    if isinstance(text, ShardGrid):
        return text
    spelled = str(text).replace(" ", "").lower()
    if isinstance(text, bool) or len(spelled) > 40:
        spelled = ""
    plain, grid = _PLAIN.fullmatch(spelled), _GRID.fullmatch(spelled)
    if plain is not None:
        return ShardGrid(1, int(plain[1])) if plain[2] == "column" else ShardGrid(int(plain[1]), 1)
    if grid is not None:
        return ShardGrid(int(grid[1]), int(grid[2]))
    raise InvalidRequestError(
        f"a layout must be written as 8, 8:row, 8:column or 4x2, but got {text!r}", key="layout"
    )


def preview_reshard(
    view: CheckpointView,
    layout: str | int | ShardGrid,
    *,
    include: str | None = None,
    options: LoadOptions | None = None,
) -> ReshardPreview:
    """Returns what a load on other ranks would read; see `CheckpointView.reshard`."""
    target, options = parse_layout(layout), options or LoadOptions()
    table = view.checkpoint.table
    chosen = _chosen(view, include)
    itemsize = np.array([ITEMSIZE.get(name, 1) for name in table.dtypes] or [1], np.int64)
    tensors = np.flatnonzero(chosen & (table.kind != Kind.OBJECT))
    objects = np.flatnonzero((table.kind[table.tensor] == Kind.OBJECT) & chosen[table.tensor])
    objects_bytes = int(table.item_bytes[objects].sum())
    width = itemsize[np.maximum(table.dtype[tensors], 0)]
    place = _places(table)
    cost = read_cost(view.storage)
    ranks, lacking = [], set[int]()
    for rank in range(target.num_ranks):
        offset, size = _held_by(rank, target, table.shape[tensors], table.ndim[tensors])
        wanted = Wanted(tensors.astype(np.int32), offset, size, width)
        plan = plan_reads(table, wanted)
        lacking.update(tensors[row] for row, _ in plan.uncovered)
        geo = geometry(table, wanted, plan, place, options.verify)
        jobs, _ = make_jobs(geo, len(wanted), cost)
        costs = [_cost_of(geo, job, cost) for job in jobs]
        scratch = sorted((one[2] for one in costs), reverse=True)
        files = {*table.file[plan.chunk].tolist(), *table.file[objects].tolist()}
        ranks.append(
            RankRead(
                rank=rank,
                bytes_needed=plan.bytes_needed + objects_bytes,
                bytes_read=sum(one[0] for one in costs) + objects_bytes,
                num_ranges=sum(one[1] for one in costs) + len(objects),
                num_files=len(files),
                scratch_bytes=sum(scratch[: options.num_threads]),
            )
        )
    stored = int(np.maximum(table.payload_bytes, 0)[chosen[table.tensor]].sum())
    uncovered = tuple(table.names[row] for row in sorted(lacking))
    return ReshardPreview(target, tuple(ranks), stored, uncovered)


def _chosen(view: CheckpointView, include: str | None) -> BoolArray:
    names = view.checkpoint.table.names
    matches = (include is None or fnmatchcase(name, include) for name in names)
    chosen = np.fromiter(matches, bool, len(names))
    if include is not None and not chosen.any():
        raise InvalidRequestError(
            f"expected names that match {include!r} in {view.url}, found none of {len(names)}"
            + nearest(include, names),
            key="include",
        )
    return chosen


def _held_by(
    rank: int, layout: ShardGrid, shape: Int64Array, ndim: np.ndarray[Any, Any]
) -> tuple[Int64Array, Int64Array]:
    """Returns offset and size of the part of each tensor that a rank holds."""
    row, column = divmod(rank, layout.columns)
    offset, size = np.zeros_like(shape), shape.copy()
    for dim, part, parts in ((0, row, layout.rows), (1, column, layout.columns)):
        if parts > 1 and dim < shape.shape[1]:
            low, high = _cut(shape[:, dim], part, parts)
            offset[:, dim] = np.where(ndim > dim, low, 0)
            size[:, dim] = np.where(ndim > dim, high - low, shape[:, dim])
    # Why: an empty part needs no bytes, wherever it would begin.
    offset[size.min(axis=1, initial=1) == 0] = 0
    return offset, size


def _cut(length: Int64Array, part: Any, parts: Any) -> tuple[Int64Array, Int64Array]:
    """Returns start and end of a part, as `torch.chunk` and DTensor cut."""
    step = -(-length // parts)
    return np.minimum(part * step, length), np.minimum((part + 1) * step, length)


def _cost_of(geo: Geometry, job: Job, cost: ReadCost) -> tuple[int, int, int]:
    """Returns the bytes that a job reads, the number of ranges, and its temporary memory."""
    _, low, high = job_reads(geo, [job], cost)
    num_bytes, scratch = int((high - low).sum()), int(high.max() - low.min())
    if isinstance(job, DirectRead):
        # Only the blocks at the two edges go through scratch memory.
        edges = 2 * int(geo.block_bytes[job.pair])
        scratch = edges if num_bytes != job.high - job.low else 0
    return num_bytes, len(low), scratch


def _places(table: ChunkTable) -> Int64Array:
    """Returns the offset of each chunk's raw bytes; -1 if the whole item is read.

    A load locates the raw bytes in a long item of stock DCP by reading the head of the item. As
    nothing is read here, the start of the item stands for them; sizes are exact to about 1 KiB.
    """
    is_long = (table.payload_offset < 0) & (table.item_bytes > _WHOLE_ITEM_BYTES)
    is_raw = table.kind[table.tensor] == Kind.TENSOR
    return np.where(is_long & is_raw, table.item_offset, table.payload_offset)


_MOST_DRAWN_RANKS = 32


def _preview_chart(preview: ReshardPreview) -> Picture:
    """Returns bars of the bytes that each rank of a load would need and read."""
    rows = []
    for one in preview.ranks:
        needed, more = one.bytes_needed, max(one.bytes_read - one.bytes_needed, 0)
        title = f"needs {size_text(needed)}, reads {size_text(one.bytes_read)}"
        parts = [(needed, draw.rank_colour(0), title), (more, AMBER, title)]
        told = (
            f"{size_text(one.bytes_read)} in {count_text(one.num_ranges, 'range')} of "
            f"{count_text(one.num_files, 'file')}, at most {size_text(one.peak_bytes)} of memory"
        )
        rows.append(Bar(f"rank {one.rank}", parts, told))
    drawn, bottom = draw.bars(rows, 72, 0, most=_MOST_DRAWN_RANKS)
    meant = ((draw.rank_colour(0), "needed"), (AMBER, "gaps and whole blocks, read in addition"))
    told = (
        f"{count_text(len(preview.ranks), 'rank')} need {size_text(preview.bytes_needed)} and read "
        f"{size_text(preview.bytes_read)} (<b>{preview.amplification:.3f}</b> times), each with at "
        f"most {size_text(preview.peak_bytes)} of memory"
    )
    holes = count_text(len(preview.uncovered), "tensor")
    lacking = f"parts of {holes} are missing: a load would fail" if preview.uncovered else ""
    legend = draw.legend(72, bottom + 6, meant)
    drawing = draw.svg(WIDTH, bottom + 22, drawn, legend, label="Reads of a load")
    return draw.pictured(draw.heading(str(preview.layout), told), draw.aside(lacking), drawing)


CELLS = (48, 64)
"""Rows and columns of the raster that is drawn instead of too many boxes."""
MOST_BOXES = 400
"""Maximum number of boxes that are drawn one by one."""
MOST_LEGEND, MOST_BARS = 12, 24
MOST_PAIRS = 4_000_000

_LEFT, _TOP = 46, 20


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

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def ranks(self) -> list[int]:
        """The distinct ranks, ascending."""
        found: list[int] = np.unique(self.rank).tolist()
        return found


@dataclass(frozen=True, eq=False)
class FlatBoxes(RankBoxes):
    """Boxes in the two dimensions of a drawing, which are rows and columns.

    Attributes:
        dims: Dimensions of the tensor that are rows and columns; None for one of length 1.
        is_slice: Further dimensions are cut, too, and only their first parts are shown.
    """

    dims: tuple[int | None, int | None]
    is_slice: bool


def even_boxes(shape: Sequence[int], parts: Sequence[int]) -> RankBoxes:
    """Returns an evenly cut tensor, as `torch.chunk` and DTensor cut; ranks in row-major order.

    Args:
        shape: Shape of the tensor.
        parts: Number of parts of each dimension; 1 for the dimensions that follow.

    Raises:
        InvalidRequestError: There are more numbers than dimensions, or one is below 1.

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
    low, high = _cut(np.array(shape, np.int64), at, counts)
    return RankBoxes(tuple(shape), np.arange(len(at), dtype=np.int64), low, high - low)


def stored_boxes(table: ChunkTable, row: int) -> RankBoxes:
    """Returns the chunks of a stored tensor with the ranks that wrote their files.

    Args:
        table: Chunk table of the checkpoint.
        row: Index of the tensor in `table.names`.
    """
    chunks = np.flatnonzero(table.tensor == row)
    ndim = int(table.ndim[row])
    files, at = np.unique(table.file[chunks], return_inverse=True)
    ranks = [rank_of_file(table.files[file]) for file in files.tolist()]
    known = np.array([-1 if rank is None else rank for rank in ranks], np.int64)
    shape = tuple(table.shape[row, :ndim].tolist())
    rank = known[at.reshape(-1)]
    return RankBoxes(shape, rank, table.offset[chunks, :ndim], table.size[chunks, :ndim])


def flatten(boxes: RankBoxes, dims: tuple[int | None, int | None] | None = None) -> FlatBoxes:
    """Projects boxes onto two dimensions; of each further cut dimension, keeps the first part.

    Args:
        boxes: Boxes of any number of dimensions.
        dims: Dimensions that are rows and columns; by default the two with the most cuts, the lower
            one as rows.
    """
    count, ndim = len(boxes), len(boxes.shape)
    cuts = [len(np.unique(boxes.offset[:, dim])) for dim in range(ndim)]
    if dims is None:
        # Why by length next: if no dimension is cut, the long ones show most.
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
    kept = boxes.rank[keep], offset[keep], size[keep]
    return FlatBoxes((rows, columns), *kept, dims=dims, is_slice=bool(others))


def raster(flat: FlatBoxes, cells: tuple[int, int] = CELLS) -> Int64Array:
    """Returns the rank at the centre of each cell of a grid; -2 if no box is there.

    Args:
        flat: Boxes that do not overlap.
        cells: Rows and columns of the grid.

    Complexity:
        O(boxes) in numpy, and at most one step per cell.
    """
    found = np.full(cells, -2, np.int64)
    scale = np.array(cells) / np.maximum(flat.shape, 1)
    first = np.ceil(flat.offset * scale - 0.5).astype(np.int64)
    last = np.minimum(np.ceil((flat.offset + flat.size) * scale - 0.5).astype(np.int64), cells)
    # Why only these: a box that contains no centre is too small to be seen.
    for row in np.flatnonzero((first < last).all(axis=1)).tolist():
        (top, left), (below, right) = first[row].tolist(), last[row].tolist()
        found[top:below, left:right] = flat.rank[row]
    return found


def overlaps(before: RankBoxes, after: RankBoxes) -> Int64Array | None:
    """Returns the number of elements that each part of one layout shares with each of another.

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
    """Returns a picture of a tensor as a rectangle whose parts have the colours of their ranks.

    Args:
        boxes: The parts. Of more than two dimensions, the two with the most cuts are drawn.
        name: FQN.
        itemsize: Bytes of an element, for the size; 0 if unknown.
        dtype: Name of the dtype, for the title.
    """
    flat = flatten(boxes)
    width, height = _extent(flat, 380)
    label = f"Layout of a tensor of shape {boxes.shape} over {_ranks(boxes)}"
    parts = [_panel(flat, _LEFT, width, height), _legend(boxes, _TOP + height + 20)]
    drawing = draw.svg(WIDTH, _TOP + height + 34, *parts, label=label)
    return draw.pictured(*_heading(boxes, flat, name, itemsize, dtype), drawing)


def reshard(before: RankBoxes, after: RankBoxes, name: str = "", *, itemsize: int = 1) -> Picture:
    """Returns a picture of a tensor as it is stored and as other ranks load it.

    Args:
        before: Parts as stored, without overlaps. Their ranks determine the colours.
        after: Parts that the ranks of a load need.
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
    """Returns a picture of the parts of a tensor and the ranks that wrote them.

    Args:
        view: The checkpoint.
        name: FQN of a tensor.

    Raises:
        MissingKeyError: The checkpoint has no such name; the message lists similar ones.
        InvalidRequestError: The name is that of an object.
    """
    boxes, dtype = _boxes_of(view, name)
    return shard_layout(boxes, name, itemsize=ITEMSIZE.get(dtype, 0), dtype=dtype)


def picture_reshard(
    view: CheckpointView, name: str, layout: str | int | ShardGrid | Sequence[int]
) -> Picture:
    """Returns a picture of a tensor as it is stored and as the ranks of a load need it.

    Args:
        view: The checkpoint.
        name: FQN of a tensor.
        layout: Layout of the load: `6` for rows over 6 ranks, `4x2` and others as for
            `CheckpointView.reshard`; or the number of parts of each dimension.

    Raises:
        MissingKeyError: The checkpoint has no such name; the message lists similar ones.
        InvalidRequestError: The name is that of an object, or the layout does not fit the tensor.
    """
    boxes, dtype = _boxes_of(view, name)
    if isinstance(layout, str | int | ShardGrid):
        parsed = parse_layout(layout)
        layout = (parsed.rows, parsed.columns)[: len(boxes.shape)]
    after = even_boxes(boxes.shape, layout)
    return reshard(boxes, after, name, itemsize=ITEMSIZE.get(dtype, 1))


def _boxes_of(view: CheckpointView, name: str) -> tuple[RankBoxes, str]:
    """Returns the stored parts of a tensor, and its dtype."""
    info = view.tensors.get(name)
    if info is None:
        view[name]  # raises for an unknown name
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
        f"dimensions {flat.dims[0]} and {flat.dims[1]}; others are cut as well, and their first "
        f"parts are shown"
    )
    told = " · ".join(draw.safe(fact) for fact in facts if fact)
    return draw.heading(name, told), draw.aside(sliced if flat.is_slice else "")


def _ranks(boxes: RankBoxes) -> str:
    return count_text(len(boxes.ranks), "rank")


def _name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "a file"


def _extent(flat: FlatBoxes, most: float) -> tuple[float, float]:
    """Returns width and height of a drawing: proportions of the tensor, within limits."""
    if flat.dims[0] is None:
        return most, 44.0
    ratio = (max(flat.shape[0], 1) / max(flat.shape[1], 1)) ** 0.5
    return max(140.0, most / max(ratio, 1.0)), min(max(90.0, most * ratio * 0.7), most * 0.75)


def _rastered(flat: FlatBoxes) -> FlatBoxes:
    """Returns a box for each run of equal cells of the raster of some boxes."""
    cells = raster(flat)
    begins = np.ones(cells.shape, np.bool_)
    begins[:, 1:] = cells[:, 1:] != cells[:, :-1]
    place = np.flatnonzero(begins)
    offset = np.stack(np.divmod(place, CELLS[1]), axis=1)
    size = np.stack([np.ones(len(place), np.int64), np.diff(place, append=cells.size)], axis=1)
    shown = cells.reshape(-1)[place] > -2
    kept = cells.reshape(-1)[place][shown], offset[shown], size[shown]
    return FlatBoxes(CELLS, *kept, dims=flat.dims, is_slice=flat.is_slice)


def _patches(
    flat: FlatBoxes, left: float, width: float, height: float
) -> Iterator[tuple[int, tuple[float, float, float, float], str]]:
    """Yields rank, rectangle and title of each box of a drawing; of too many boxes a raster."""
    is_raster = len(flat) > MOST_BOXES
    shown = _rastered(flat) if is_raster else flat
    tall, wide = height / max(shown.shape[0], 1), width / max(shown.shape[1], 1)
    # Why larger cells: otherwise the page shows between them.
    more = 0.3 if is_raster else 0.0
    boxes = zip(shown.rank.tolist(), shown.offset.tolist(), shown.size.tolist(), strict=True)
    for rank, (y, x), (rows, columns) in boxes:
        if rows and columns:
            where = [] if flat.dims[0] is None else [f"{y}:{y + rows}"]
            where.append(f"{x}:{x + columns}")
            title = _name(rank) if is_raster else f"{_name(rank)} [{', '.join(where)}]"
            place = left + x * wide, _TOP + y * tall, columns * wide + more, rows * tall + more
            yield rank, place, title


def _panel(
    flat: FlatBoxes, x: float, width: float, height: float, wanted: FlatBoxes | None = None
) -> str:
    """Returns a tensor in the colours of its ranks, with outlines of the wanted parts."""
    is_raster = len(flat) > MOST_BOXES
    edge: dict[str, Any] = {} if is_raster else {"stroke": "currentColor", "stroke_width": 0.5}
    parts = []
    for rank, place, told in _patches(flat, x, width, height):
        parts.append(draw.rect(*place, draw.rank_colour(rank), told, **edge))
        if wanted is None and not is_raster:
            parts.append(_label(rank, *place))
    if wanted is not None and len(wanted) <= MOST_BOXES:
        look: dict[str, Any] = {"stroke": "currentColor", "stroke_width": 2.5}
        for rank, place, told in _patches(wanted, x, width, height):
            parts.append(draw.rect(*place, "none", f"wanted by {told}", **look))
            parts.append(_label(rank, *place))
    parts.append(draw.rect(x, _TOP, width, height, "none", stroke="currentColor", opacity=0.55))
    below = _TOP + height
    if flat.dims[1] is not None:
        parts.append(draw.note(x + width, below + 11, flat.shape[1], "end"))
    if flat.dims[0] is not None:
        parts.append(draw.note(x - 6, below, flat.shape[0], "end"))
        parts.append(draw.note(x - 6, _TOP + 9, 0, "end"))
    return "".join(parts)


def _label(rank: int, x: float, y: float, width: float, height: float) -> str:
    """Returns the rank in the middle of its part, if there is room for it."""
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
    """Returns bars of the bytes that each rank of a load takes from each rank that stored them."""
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
