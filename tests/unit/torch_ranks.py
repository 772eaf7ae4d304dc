"""Saves and loads torch state dicts on several ranks, in one thread without Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.torch_adapter.capture import capture
from ray_dcp.torch_adapter.targets import Targets, plan_targets
from tests.inline_ranks import run_ranks
from tests.rank_saves import load_rank, save_rank

Path = str | os.PathLike[str]


def save_on_ranks(
    states: Sequence[dict[str, Any]], path: Path, options: SaveOptions | None = None
) -> None:
    """Saves one state for each rank."""
    options, world_size = options or SaveOptions(), len(states)
    ranks = [
        save_rank(
            OpKey("save", 0), rank=rank, world_size=world_size, target=Target(os.fspath(path)),
            options=options,
            capture=partial(capture, state, rank=rank, world_size=world_size, options=options),
        )
        for rank, state in enumerate(states)
    ]  # fmt: skip
    for result in run_ranks(ranks):
        result.get()


def load_on_ranks(
    states: Sequence[dict[str, Any]], path: Path, options: LoadOptions | None = None
) -> list[Targets]:
    """Loads into one state for each rank; returns what each loaded."""
    options, world_size = options or LoadOptions(), len(states)
    works: list[Any] = [None] * world_size

    def planner(rank: int, state: dict[str, Any]) -> Any:
        def plan(checkpoint: Any) -> Targets:
            works[rank] = plan_targets(
                state, checkpoint.tensors, narrow=checkpoint.narrow, options=options, rank=rank,
                world_size=world_size,
            )  # fmt: skip
            return works[rank]

        return plan

    ranks = [
        load_rank(
            OpKey("load", 0), rank=rank, world_size=world_size, target=Target(os.fspath(path)),
            options=options.without_choices(), plan=planner(rank, state),
        )
        for rank, state in enumerate(states)
    ]  # fmt: skip
    for result in run_ranks(ranks):
        result.get()
    return works
