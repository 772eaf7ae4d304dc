"""Saves what ranks captured and loads it, without Ray, with planners and storages of a user's."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_dcp.commit_protocol.messages import Exchange, OpKey, Target
from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.capture import Capture, capture
from ray_dcp.torch_adapter.collective import Group
from ray_dcp.torch_adapter.load_plan import plan_targets
from ray_dcp.torch_adapter.targets import Targets
from tests.support.world import Fate, RankResult, load_rank, run_ranks, save_rank

_numbers = itertools.count()


def box(columns, row):
    ndim = columns.ndim[row]
    return tuple(columns.offset[row, :ndim].tolist()), tuple(columns.size[row, :ndim].tolist())


def stored(*captures: Capture) -> Target:
    """Saves what each rank captured, and returns where."""
    return save_captures(f"memory://adapter-{next(_numbers)}/c", captures)


def save_captures(path: object, captures: Sequence[Capture]) -> Target:
    """Saves what each rank captured; returns where."""
    target = Target(str(path))
    _save(target, [lambda one=one: one for one in captures], SaveOptions())
    return target


def save_on_ranks(
    states: Sequence[dict[str, Any]], path: object, options: SaveOptions | None = None
) -> None:
    """Saves one state for each rank."""
    how = {"world_size": len(states), "options": options or SaveOptions()}
    made = [partial(capture, state, rank=rank, **how) for rank, state in enumerate(states)]
    _save(Target(str(path)), made, how["options"])


def _save(target: Target, made: Sequence[Callable[[], Capture]], options: SaveOptions) -> None:
    ranks = [
        save_rank(
            OpKey("save", 0), rank=rank, world_size=len(made), target=target, options=options,
            capture=one,
        )
        for rank, one in enumerate(made)
    ]  # fmt: skip
    for result in run_ranks(ranks):
        result.get()


def load_on_ranks(
    states: Sequence[dict[str, Any]], path: object, options: LoadOptions | None = None
) -> list[Targets]:
    """Loads into one state for each rank; returns what each loaded."""
    options, world_size = options or LoadOptions(), len(states)
    works: list[Any] = [None] * world_size

    def plan(checkpoint: Any, rank: int) -> Targets:
        works[rank] = plan_targets(
            states[rank], checkpoint.tensors, narrow=checkpoint.narrow, options=options, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        return works[rank]

    ranks = [
        load_rank(
            OpKey("load", 0), rank=rank, world_size=world_size, target=Target(str(path)),
            options=options.without_choices(), plan=partial(plan, rank=rank),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    for result in run_ranks(ranks):
        result.get()
    return works


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


def frozen(captured: Capture) -> Capture:
    """A capture that is independent of the process group it was made in."""
    columns = captured.columns
    tensors = {
        row: bytes(captured.source(row))
        for row in range(len(columns))
        if columns.kind[row] == Kind.TENSOR
    }
    return Capture(
        columns, lambda row: memoryview(tensors[row]), captured.deferred, captured.warnings
    )


def keys(session: str = "test") -> Callable[[], OpKey]:
    """Returns what names the operations of one rank."""
    seq = itertools.count()
    return lambda: OpKey(session, next(seq))


@dataclass(frozen=True)
class OneOf:
    """A session of one of several ranks."""

    rank: int = 0
    world_size: int = 1
    next_key: Callable[[], OpKey] = field(default_factory=keys)
    call: Any = None


def group(
    rank: int = 0, world_size: int = 1, *, timeout_s: float = 60.0, coordinator_rank: int = 0
) -> Group:
    """Returns a rank's view of all."""
    return Group(OneOf(rank, world_size), timeout_s, "test", None, coordinator_rank)


def run(
    ranks: Sequence[Generator[Any, Any, Any]],
    *,
    dies: Callable[[Exchange], bool] = lambda _: False,
    seen: list[Exchange] | None = None,
) -> list[RankResult[Any]]:
    """Runs every rank to its end; a rank that `dies` at a request never goes on.

    Messages are pickled on the way, as between processes.
    """

    def fate(request: Any) -> Fate:
        assert isinstance(request, Exchange)
        if seen is not None:
            seen.append(request)
        return "slow" if dies(request) else "live"

    return run_ranks(list(map(_pickled, ranks)), fate=fate, catches=BaseException)


def _pickled(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    try:
        request = next(steps)
        while True:
            reply = pickle.loads(pickle.dumps((yield pickle.loads(pickle.dumps(request)))))
            request = steps.send(reply)
    except StopIteration as end:
        return end.value


class OwnSave(DefaultSavePlanner):
    """Finds objects by a hook of its own."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index)


class OwnLoad(DefaultLoadPlanner):
    """Leaves all hooks to DCP's."""


class OwnLookup(DefaultLoadPlanner):
    """Finds tensors by a hook of its own, so that each is asked for when its bytes are there."""

    def lookup_tensor(self, index: Any) -> Any:
        return super().lookup_tensor(index)


class OwnResolve(DefaultLoadPlanner):
    """Resolves tensors itself, so that each is resolved when its bytes are there."""

    def resolve_tensor(self, read_item: Any) -> Any:
        return super().resolve_tensor(read_item)


class OwnWriter(FileSystemWriter):
    """A storage that is not torch's own."""


class OwnReader(FileSystemReader):
    """A storage that is not torch's own."""
