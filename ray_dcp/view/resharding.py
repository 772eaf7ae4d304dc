"""What a load on other ranks would read, in numbers of each rank.

`preview_reshard` uses the planner and the jobs of a load. It reads only the chunk table. Bytes that
ranks would send to each other count for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.quantities import count_text, size_text
from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, Kind
from ray_dcp.errors import InvalidRequestError
from ray_dcp.io.read_jobs import DirectRead, Geometry, Job, ReadCost, geometry, job_reads, make_jobs
from ray_dcp.io.reader import WHOLE_ITEM_BYTES, read_cost
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.store.storage import Storage
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import AMBER, WIDTH, Bar, Picture
from ray_dcp.view.wording import nearest

MOST_RANKS = 100_000

_LAYOUT = re.compile(r"(\d{1,9})(?:x(\d{1,9})|:(row|column))?")


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
    found = _LAYOUT.fullmatch("" if isinstance(text, bool) else str(text).replace(" ", "").lower())
    if found is None:
        raise InvalidRequestError(
            f"a layout must be written as 8, 8:row, 8:column or 4x2, but got {text!r}", key="layout"
        )
    first, second = int(found[1]), int(found[2] or 1)
    return ShardGrid(1, first) if found[3] == "column" else ShardGrid(first, second)


def preview_reshard(
    storage: Storage,
    table: ChunkTable,
    layout: str | int | ShardGrid,
    *,
    include: str | None = None,
    options: LoadOptions | None = None,
) -> ReshardPreview:
    """Returns what a load on other ranks would read; see `CheckpointView.reshard`.

    Args:
        storage: Storage of the checkpoint.
        table: Its chunk table.
        layout: As for the method, like the other arguments.
        include: See there.
        options: See there.
    """
    target, options = parse_layout(layout), options or LoadOptions()
    chosen = _select(table.names, include, storage.url)
    itemsize = np.array([ITEMSIZE.get(name, 1) for name in table.dtypes] or [1], np.int64)
    tensors = np.flatnonzero(chosen & (table.kind != Kind.OBJECT))
    objects = np.flatnonzero((table.kind[table.tensor] == Kind.OBJECT) & chosen[table.tensor])
    objects_bytes = int(table.item_bytes[objects].sum())
    width = itemsize[np.maximum(table.dtype[tensors], 0)]
    place = _places(table)
    cost = read_cost(storage, table.files)
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


def _select(names: Sequence[str], include: str | None, url: str) -> BoolArray:
    matches = (include is None or fnmatchcase(name, include) for name in names)
    chosen = np.fromiter(matches, bool, len(names))
    if include is not None and not chosen.any():
        raise InvalidRequestError(
            f"expected names that match {include!r} in {url}, found none of {len(names)}"
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
            low, high = chunk_bounds(shape[:, dim], part, parts)
            offset[:, dim] = np.where(ndim > dim, low, 0)
            size[:, dim] = np.where(ndim > dim, high - low, shape[:, dim])
    # Why: an empty part needs no bytes, wherever it would begin.
    offset[size.min(axis=1, initial=1) == 0] = 0
    return offset, size


def chunk_bounds(length: Int64Array, part: Any, parts: Any) -> tuple[Int64Array, Int64Array]:
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
    is_long = (table.payload_offset < 0) & (table.item_bytes > WHOLE_ITEM_BYTES)
    is_raw = table.kind[table.tensor] == Kind.TENSOR
    return np.where(is_long & is_raw, table.item_offset, table.payload_offset)


_MOST_DRAWN_RANKS = 32


def _preview_chart(preview: ReshardPreview) -> Picture:
    """Returns bars of the bytes that each rank of a load would need and read."""
    rows = []
    for one in preview.ranks[:_MOST_DRAWN_RANKS]:
        needed, more = one.bytes_needed, max(one.bytes_read - one.bytes_needed, 0)
        title = f"needs {size_text(needed)}, reads {size_text(one.bytes_read)}"
        parts = [(needed, draw.rank_colour(0), title), (more, AMBER, title)]
        told = (
            f"{size_text(one.bytes_read)} in {count_text(one.num_ranges, 'range')} of "
            f"{count_text(one.num_files, 'file')}, at most {size_text(one.peak_bytes)} of memory"
        )
        rows.append(Bar(f"rank {one.rank}", parts, told))
    drawn, bottom = draw.bars(rows, 72, 0, len(preview.ranks) - len(rows))
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
