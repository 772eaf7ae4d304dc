"""Plans and tables made by hand for the tests of `ray_dcp.io`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_dcp.core.checksums import block_bytes_for, block_checks
from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable, FilePlan, RankPlan
from ray_dcp.format.torch_items import torch_save_frame
from ray_dcp.io.writer import write_part
from ray_dcp.options import SaveOptions


@dataclass(frozen=True)
class Piece:
    """A contiguous part of an item: the whole item, or some of its first-dimension rows."""

    row: int
    dtype: str
    size: tuple[int, ...]
    start: int = 0


def pad(rows, width, fill):
    out = np.full((len(rows), width), fill, np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def file_plan(
    pieces,
    *,
    file=0,
    key="__0_0.{attempt}.distcp",
    deferred=(),
    block_bytes=None,
    large=64 << 10,
):
    """Lays pieces out as the planner does: large payloads on pages, others on 64 bytes."""
    dtypes = tuple(sorted({p.dtype for p in pieces})) or ("float32",)
    end = 0
    columns = {n: [] for n in ("item_offset", "item_bytes", "payload_offset", "payload_bytes")}
    for piece in pieces:
        num_bytes = int(np.prod(piece.size, dtype=np.int64)) * ITEMSIZE[piece.dtype]
        frame = torch_save_frame(piece.dtype, piece.size)
        before, after = len(frame.header), len(frame.footer)
        alignment = 4096 if num_bytes >= large else 64
        payload = end + before + -(end + before) % alignment
        columns["item_offset"].append(payload - before)
        columns["item_bytes"].append(before + num_bytes + after)
        columns["payload_offset"].append(payload)
        columns["payload_bytes"].append(num_bytes)
        end = payload + num_bytes + after
    width = max([len(p.size) for p in pieces], default=1) or 1
    lengths = columns["payload_bytes"]
    blocks = [block_bytes or block_bytes_for(n) for n in lengths]
    return FilePlan(
        file=file,
        key=key,
        num_bytes=end,
        dtypes=dtypes,
        row=np.array([p.row for p in pieces], np.int32),
        source_start=np.array([p.start for p in pieces], np.int64),
        dtype=np.array([dtypes.index(p.dtype) for p in pieces], np.int8),
        ndim=np.array([len(p.size) for p in pieces], np.int8),
        size=pad([p.size for p in pieces], width, 1),
        requires_grad=np.zeros(len(pieces), bool),
        block_bytes=np.array(blocks, np.int64),
        deferred=np.array(deferred, np.int32),
        **{name: np.array(values, np.int64) for name, values in columns.items()},
    )


def rank_plan(*files, rank=0):
    return RankPlan(rank=rank, files=tuple(files))


def no_deferred(row):
    raise AssertionError(f"row {row} of a plan without deferred items")


def write_file(storage, plan, attempt, *, source, deferred, sync=True):
    """Writes one file; returns its receipt."""
    options = SaveOptions(sync_files=sync)
    (receipt,) = write_part(
        storage, rank_plan(plan), attempt, source=source, deferred=deferred or no_deferred,
        options=options,
    )  # fmt: skip
    return receipt


@dataclass(frozen=True)
class Chunk:
    """A stored box: `(tensor, offset, size)` and the array of its content, row `row` of a save."""

    tensor: int
    offset: tuple[int, ...]
    data: np.ndarray


def table_of(names, dtypes, shapes, chunks, plan, receipt, *, key=None) -> ChunkTable:
    """Returns the table of one written file that holds `chunks` in the plan's order."""
    width = max([len(s) for s in shapes], default=1) or 1
    vocabulary = tuple(dict.fromkeys(dtypes))
    counts = -(-plan.payload_bytes // plan.block_bytes)
    checks = np.zeros(0, np.uint64)
    if receipt is not None:
        each = zip(chunks, plan.block_bytes.tolist(), strict=True)
        checks = np.concatenate([block_checks(raw(one.data), block) for one, block in each])
    return ChunkTable(
        names=tuple(names),
        paths=(None,) * len(names),
        dtypes=vocabulary,
        files=(key or receipt.key,),
        kind=np.zeros(len(names), np.int8),
        dtype=np.array([vocabulary.index(d) for d in dtypes], np.int8),
        ndim=np.array([len(s) for s in shapes], np.int8),
        shape=pad(shapes, width, 1),
        requires_grad=np.zeros(len(names), bool),
        tensor=np.array([c.tensor for c in chunks], np.int32),
        offset=pad([c.offset for c in chunks], width, 0),
        size=pad([c.data.shape for c in chunks], width, 1),
        file=np.zeros(len(chunks), np.int32),
        item_offset=plan.item_offset,
        item_bytes=plan.item_bytes,
        payload_offset=plan.payload_offset,
        payload_bytes=plan.payload_bytes,
        block_bytes=plan.block_bytes,
        check_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        checks=checks,
    )


def raw(array: np.ndarray) -> memoryview:
    """Returns the C-order bytes of an array."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


class Sink:
    """Keeps targets in memory, and notes which rows are done."""

    def __init__(self, lengths):
        self.buffers = [bytearray(b"\xa5" * n) for n in lengths]
        self.finished = []

    def buffer(self, row):
        return memoryview(self.buffers[row])

    def done(self, row):
        self.finished.append(row)
