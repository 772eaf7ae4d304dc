"""Plays the ranks of generators over `Exchange` against the real protocol, in one thread."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.commit_protocol.messages import Exchange, OpKey
from ray_dcp.torch_adapter.collective import Group
from tests.support.world import Fate, RankResult, run_ranks


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
