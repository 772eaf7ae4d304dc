"""Planners of the user's on native storage, from capture to commit and back, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import Target
from ray_dcp.runtime.rank_load import load_rank
from ray_dcp.runtime.rank_save import save_rank
from ray_dcp.torch_adapter.lazy_metadata import metadata_of
from ray_dcp.torch_adapter.planner_load import targets_with_planner
from ray_dcp.torch_adapter.planner_save import capture_with_planner
from tests.inline_ranks import run_ranks
from tests.unit.seam_ranks import keys
from tests.unit.test_adapter_planner_hooks import (
    LOAD_PLANNERS,
    Balancing,
    Finishing,
    Half,
    LoadRenamed,
    LoadTransform,
    Lookup,
    RenamedItems,
    RenamedState,
    Shards,
    Transform,
    flat,
    state,
    zeros,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, planners: list[Any], states: list[Any]) -> None:
    def rank_part(rank: int) -> Any:
        next_key, world_size = keys(), len(planners)
        options = SaveOptions(sync_files=False)
        captured = yield from capture_with_planner(
            next_key, states[rank], planners[rank],
            rank=rank, world_size=world_size, options=options,
        )  # fmt: skip
        return (
            yield from save_rank(
                next_key(), rank=rank, world_size=world_size, target=Target(str(path)),
                options=options, capture=lambda: captured,
            )
        )  # fmt: skip

    for result in run_ranks([rank_part(rank) for rank in range(len(planners))]):
        result.get()


def load(path: Path, planners: list[Any], states: list[Any], options: LoadOptions) -> None:
    def rank_part(rank: int) -> Any:
        next_key, world_size = keys(), len(planners)

        def plan(checkpoint: Any) -> Any:
            return targets_with_planner(
                next_key, states[rank], planners[rank], metadata_of(checkpoint),
                checkpoint.table, rank=rank, world_size=world_size, options=options,
            )  # fmt: skip

        return (
            yield from load_rank(
                next_key(), rank=rank, world_size=world_size, target=Target(str(path)),
                options=options, plan=plan,
            )
        )  # fmt: skip

    for result in run_ranks([rank_part(rank) for rank in range(len(planners))]):
        result.get()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "planner_class", [Transform, Lookup, RenamedItems, RenamedState, Half, Balancing, Finishing]
)
def test_stock_dcp_loads_what_a_planner_made_of_a_save(planner_class, world_size, tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "stock", planner=planner_class(), no_dist=True)
    save(
        tmp_path / "ours",
        [planner_class() for _ in range(world_size)],
        [state() for _ in range(world_size)],
    )
    assert everything(tmp_path / "ours") == everything(tmp_path / "stock")


def everything(path: Path) -> dict[str, Any]:
    """Returns all that stock DCP finds in a checkpoint."""
    found: dict[str, Any] = {}
    planner = dcp.default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(
        found, dcp.FileSystemReader(path), planner=planner, no_dist=True
    )
    return flat(found)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("planner_class", [*LOAD_PLANNERS, LoadRenamed])
def test_a_load_planner_gets_from_ours_what_it_gets_from_stock(planner_class, world_size, tmp_path):
    saver = RenamedItems if planner_class is LoadRenamed else Transform
    by_stock, by_us = zeros(), [zeros() for _ in range(world_size)]
    save(tmp_path, [saver(), saver()], [state(3.0), state(3.0)])
    dcp.load(by_stock, checkpoint_id=tmp_path, planner=planner_class(), no_dist=True)
    options = LoadOptions(dtype="cast" if planner_class is LoadTransform else "widen")
    load(tmp_path, [planner_class() for _ in range(world_size)], by_us, options)
    assert flat(by_us[0]) == flat(by_stock)
    assert flat(by_us[0]) != flat(zeros())


def test_shards_of_three_ranks_load_as_one_tensor(tmp_path):
    save(
        tmp_path,
        [Shards(rank, 3) for rank in range(3)],
        [{"s": torch.full((2, 3), float(rank))} for rank in range(3)],
    )
    target = {"s": torch.zeros(6, 3)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["s"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
