"""What a load on other ranks would read: by the planner and the cutting of jobs that loads use.

Nothing but the chunk table is looked at. Bytes that ranks would hand to each other count for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import BoolArray, ChunkTable, Int64Array, Kind
from ray_dcp.errors import InvalidRequestError
from ray_dcp.io.read_jobs import (
    Direct,
    Geometry,
    Job,
    ReadCost,
    Span,
    geometry,
    make_jobs,
    slab_reads,
)
from ray_dcp.io.reader import read_cost
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.view.naming import nearest

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView


MOST_RANKS = 100_000
_WHOLE_ITEM_BYTES = 1 << 20
"""Stock items up to this length are read whole."""

_PLAIN = re.compile(r"(\d+)(?::(row|column))?")
_GRID = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True)
class ShardGrid:
    """How tensors are laid out over ranks: rows over some, columns over others.

    A tensor of one dimension has rows alone and is the same on all ranks of a row; one without
    dimensions is the same on all ranks. Parts are those of `Shard(0)` and `Shard(1)` of a DTensor.
    """

    rows: int = 1
    """Parts of the first dimension."""
    columns: int = 1
    """Parts of the second dimension."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1 or self.num_ranks > MOST_RANKS:
            raise InvalidRequestError(
                f"a layout has 1 to {MOST_RANKS} ranks, but {self.rows} x {self.columns} was asked "
                f"for"
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
    """Of the rank's own parts, with the objects: what it holds when it is loaded."""
    bytes_read: int
    """Asked of the storage: whole checksum blocks, and small gaps."""
    num_ranges: int
    """Requests to the storage."""
    num_files: int
    scratch_bytes: int
    """Most temporary memory, beside the targets, of all reading threads together."""

    @property
    def peak_bytes(self) -> int:
        """Most host memory: targets and temporary memory."""
        return self.bytes_needed + self.scratch_bytes


@dataclass(frozen=True)
class ReshardPreview:
    """What a load of a checkpoint on other ranks would read; nothing was read for it.

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
    """Payload bytes of what was chosen, as stored once."""
    uncovered: tuple[str, ...] = ()
    """Tensors of which the checkpoint lacks a part: a load would fail."""

    @property
    def bytes_needed(self) -> int:
        """Over all ranks."""
        return sum(rank.bytes_needed for rank in self.ranks)

    @property
    def bytes_read(self) -> int:
        """Over all ranks."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def amplification(self) -> float:
        """Bytes read over bytes needed, of the whole job; 1.0 where nothing is needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def _repr_html_(self) -> str:
        from ray_dcp.view.pictures.tables import preview_chart

        return preview_chart(self).html

    @property
    def peak_bytes(self) -> int:
        """Most host memory of a rank."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)


def parse_layout(text: str | int | ShardGrid) -> ShardGrid:
    """Returns the layout that a text means.

    Args:
        text: `8` or `8:row`, `8:column`, or `4x2` (4 parts of rows, 2 of columns).

    Raises:
        InvalidRequestError: It means none.

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
        f"a layout is written as 8, 8:row, 8:column or 4x2, but got {text!r}",
        key="layout",
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
    for rank, offset, size in _boxes(table, tensors, target):
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
    chunks = chosen[table.tensor]
    return ReshardPreview(
        target,
        tuple(ranks),
        int(np.maximum(table.payload_bytes, 0)[chunks].sum()),
        tuple(table.names[row] for row in sorted(lacking)),
    )


def _chosen(view: CheckpointView, include: str | None) -> BoolArray:
    names = view.checkpoint.table.names
    chosen = np.fromiter(
        (include is None or fnmatchcase(n, include) for n in names), bool, len(names)
    )
    if include is not None and not chosen.any():
        raise InvalidRequestError(
            f"expected names that match {include!r} in {view.url}, found none of {len(names)}"
            + nearest(include, names),
            key="include",
        )
    return chosen


def _boxes(
    table: ChunkTable, tensors: Int64Array, layout: ShardGrid
) -> Iterator[tuple[int, Int64Array, Int64Array]]:
    """Yields rank, offsets and sizes of what it holds of each tensor."""
    shape, ndim = table.shape[tensors], table.ndim[tensors]
    for rank in range(layout.num_ranks):
        row, column = divmod(rank, layout.columns)
        offset, size = np.zeros_like(shape), shape.copy()
        for dim, part, parts in ((0, row, layout.rows), (1, column, layout.columns)):
            if parts > 1 and dim < shape.shape[1]:
                low, high = _part(shape[:, dim], part, parts)
                is_cut = ndim > dim
                offset[:, dim] = np.where(is_cut, low, 0)
                size[:, dim] = np.where(is_cut, high - low, shape[:, dim])
        # Why: a part without rows needs nothing, wherever it would begin.
        offset[size.min(axis=1, initial=1) == 0] = 0
        yield rank, offset, size


def _part(length: Int64Array, part: int, parts: int) -> tuple[Int64Array, Int64Array]:
    """Returns begin and end of a part, as `torch.chunk` cuts and a DTensor lays out."""
    step = -(-length // parts)
    return np.minimum(part * step, length), np.minimum((part + 1) * step, length)


def _cost_of(geo: Geometry, job: Job, cost: ReadCost) -> tuple[int, int, int]:
    """Returns how many bytes a job reads, in how many ranges, and its temporary memory."""
    if isinstance(job, Span):
        num_bytes = job.high - job.low
        return num_bytes, 1, num_bytes
    at = job.pair
    block, end = max(int(geo.block_bytes[at]), 1), int(geo.payload_bytes[at])
    if isinstance(job, Direct):
        num_bytes = min(-(-job.high // block) * block, end) - job.low // block * block
        return num_bytes, 1, 2 * block if num_bytes != job.high - job.low else 0
    found = slab_reads(geo, job, cost)
    num_bytes = int((found[:, 1] - found[:, 0]).sum())
    return num_bytes, len(found), int(found[-1, 1] - found[0, 0])


def _places(table: ChunkTable) -> Int64Array:
    """Returns where raw bytes start, as far as that decides how a load reads.

    Of a long stock item a load first reads where they are, and then only what it needs; that is
    not known here, so that its sizes are right to about 1 KiB.
    """
    is_long = (table.payload_offset < 0) & (table.item_bytes > _WHOLE_ITEM_BYTES)
    is_raw = table.kind[table.tensor] == Kind.TENSOR
    return np.where(is_long & is_raw, table.item_offset, table.payload_offset)
