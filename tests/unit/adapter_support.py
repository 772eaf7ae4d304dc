"""A save and a load in miniature: captures to a chunk table and payloads, and those into targets.

Written for these tests from the definitions in `core.values`, without the planner and the reader
of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.planning.reads import plan_reads
from ray_dcp.torch_adapter.capture import Capture
from ray_dcp.torch_adapter.targets import Targets


def box(columns, row):
    ndim = columns.ndim[row]
    return tuple(columns.offset[row, :ndim].tolist()), tuple(columns.size[row, :ndim].tolist())


def stored(*captures: Capture) -> tuple[ChunkTable, list[bytes]]:
    """Every item of every capture, an item that several ranks have once; and their bytes."""
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    tensors: list[tuple] = []
    chunks: dict[tuple, tuple] = {}
    for capture in captures:
        columns = capture.columns
        for row in range(len(columns)):
            fqn = columns.names[columns.name[row]]
            ndim = int(columns.ndim[row])
            if fqn not in names:
                names[fqn] = len(names)
                code = -1
                if columns.dtype[row] >= 0:
                    code = dtypes.setdefault(columns.dtypes[columns.dtype[row]], len(dtypes))
                tensors.append((
                    columns.paths[columns.name[row]], columns.kind[row], code, ndim,
                    tuple(columns.shape[row, :ndim].tolist()), columns.requires_grad[row],
                ))  # fmt: skip
            fixed = columns.kind[row] == Kind.TENSOR
            key = (names[fqn], *box(columns, row))
            if key not in chunks:
                data = capture.source(row) if fixed else capture.deferred(row)
                chunks[key] = (*key, bytes(data))
    rows = sorted(chunks.values(), key=lambda chunk: chunk[0])
    width = max(1, *(tensor[3] for tensor in tensors))

    def pad(shape, fill):
        return tuple(shape) + (fill,) * (width - len(shape))

    lengths = np.array([len(chunk[3]) for chunk in rows], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    num = len(rows)
    return ChunkTable(
        names=tuple(names),
        paths=tuple(tensor[0] for tensor in tensors),
        dtypes=tuple(dtypes),
        files=("__0_0.distcp",),
        kind=np.array([tensor[1] for tensor in tensors], np.int8),
        dtype=np.array([tensor[2] for tensor in tensors], np.int8),
        ndim=np.array([tensor[3] for tensor in tensors], np.int8),
        shape=np.array([pad(tensor[4], 1) for tensor in tensors], np.int64),
        requires_grad=np.array([tensor[5] for tensor in tensors], np.bool_),
        tensor=np.array([chunk[0] for chunk in rows], np.int32),
        offset=np.array([pad(chunk[1], 0) for chunk in rows], np.int64).reshape(num, width),
        size=np.array([pad(chunk[2], 1) for chunk in rows], np.int64).reshape(num, width),
        file=np.zeros(num, np.int32),
        item_offset=starts,
        item_bytes=lengths,
        payload_offset=starts,
        payload_bytes=lengths,
        block_bytes=np.zeros(num, np.int64),
        check_start=np.zeros(num + 1, np.int64),
        checks=np.zeros(0, np.uint64),
    ), [chunk[3] for chunk in rows]  # fmt: skip


def fill(table: ChunkTable, payloads: Sequence[bytes], targets: Targets) -> None:
    """Does what a load does after planning, up to `finish`."""
    wanted = targets.wanted
    plan = plan_reads(table, wanted)
    targets.check_coverage(plan)
    touched = {}
    for pair in range(len(plan)):
        chunk, row = int(plan.chunk[pair]), int(plan.wanted[pair])
        item = np.dtype((np.void, int(wanted.itemsize[row])))
        ndim = table.ndim[wanted.tensor[row]]
        source = np.frombuffer(payloads[chunk], item).reshape(table.size[chunk, :ndim])
        into = touched.get(row)
        if into is None:
            into = np.frombuffer(targets.sink.buffer(row), item)
            touched[row] = into = into.reshape(wanted.size[row, :ndim])
        low, size = plan.offset[pair, :ndim], plan.size[pair, :ndim]
        at = low - wanted.offset[row, :ndim]
        out_of = low - table.offset[chunk, :ndim]
        into[_slices(at, size)] = source[_slices(out_of, size)]
    for row in touched:
        targets.sink.done(row)
    for chunk, take in targets.objects:
        take(payloads[chunk])
    targets.finish()


def _slices(start, size):
    return tuple(slice(int(a), int(a + n)) for a, n in zip(start, size, strict=True))


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a torch process group that never communicates."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Why: sharding propagation keeps the mesh of the rank before, which equals the next one's.
        _clear_sharding_prop_cache()


def on_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs work as every rank, one after another."""
    results = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            results.append(work(rank))
    return results


def frozen(capture: Capture) -> Capture:
    """A capture that is independent of the process group it was made in."""
    columns = capture.columns
    tensors = {
        row: bytes(capture.source(row))
        for row in range(len(columns))
        if columns.kind[row] == Kind.TENSOR
    }
    return Capture(
        columns, lambda row: memoryview(tensors[row]), capture.deferred, capture.warnings
    )
