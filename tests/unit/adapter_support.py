"""Saves what ranks captured and loads it, without Ray; this process as one of several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.capture import Capture
from ray_dcp.torch_adapter.targets import Targets, plan_targets
from tests.inline_ranks import run_ranks
from tests.rank_saves import load_rank, save_rank

_numbers = itertools.count()


def box(columns, row):
    ndim = columns.ndim[row]
    return tuple(columns.offset[row, :ndim].tolist()), tuple(columns.size[row, :ndim].tolist())


def stored(*captures: Capture) -> Target:
    """Saves what each rank captured, and returns where."""
    target, world_size = Target(f"memory://adapter-{next(_numbers)}/c"), len(captures)
    ranks = [
        save_rank(
            OpKey("save", 0), rank=rank, world_size=world_size, target=target,
            options=SaveOptions(), capture=lambda captured=captured: captured,
        )
        for rank, captured in enumerate(captures)
    ]  # fmt: skip
    for result in run_ranks(ranks):
        result.get()
    return target


def table_of(target: Target) -> ChunkTable:
    """Returns what is stored."""
    return read_checkpoint(open_storage(target)).table


def load(
    target: Target,
    state: Any,
    rank: int = 0,
    world_size: int = 1,
    *,
    flags: dict[str, bool] | None = None,
    **options: Any,
) -> Targets:
    """Loads as one of several ranks, and returns what was planned."""
    works, chosen = [], LoadOptions(**options)

    def plan(checkpoint: Any) -> Targets:
        works.append(
            plan_targets(
                state, checkpoint.tensors, narrow=checkpoint.narrow, options=chosen, rank=rank,
                world_size=world_size, **(flags or {}),
            )
        )  # fmt: skip
        return works[0]

    steps = load_rank(
        OpKey("load", 0), rank=0, world_size=1, target=target, options=chosen, plan=plan
    )
    run_ranks([steps])[0].get()
    return works[0]


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
