"""Random states are saved and loaded by ray_dcp and stock DCP, and are what they were.

Whatever stock DCP does with a state, what ray_dcp loads must be what was saved, by whichever of
both; and stock DCP must load of ours all that it loads of its own. `RAY_DCP_THOROUGH` tries more
seeds, `RAY_DCP_SEED` others.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.serialization import safe_globals

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.torch_adapter.capture import capture
from tests.support.own_planners import OwnLookup, OwnSave
from tests.support.random_states import (
    MESHES,
    SAFE_GLOBALS,
    Maker,
    SharedMaker,
    differences,
    of_rank,
    plainly,
)
from tests.unit.adapter_support import as_rank, frozen, load, on_ranks, save_captures

FIRST_SEED = int(os.environ.get("RAY_DCP_SEED", "0"))
IS_THOROUGH = bool(os.environ.get("RAY_DCP_THOROUGH"))
STATES = range(FIRST_SEED, FIRST_SEED + (600 if IS_THOROUGH else 30))
SHARED_STATES = range(FIRST_SEED, FIRST_SEED + (300 if IS_THOROUGH else 12))

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    # Modules and optimizers as objects.
    pytest.mark.filterwarnings("ignore:saved, but a safe load:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*a safe load refuses:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def allowed() -> Iterator[None]:
    with safe_globals(SAFE_GLOBALS):
        yield


class Way:
    """How one state goes to the disk and back.

    Args:
        flat: Whether nested containers are walked.
        code: Whether objects may run code.
    """

    def __init__(self, *, flat: bool, code: bool) -> None:
        self.flat = flat
        self.options = ray_dcp.LoadOptions(weights_only=not code)

    def save(self, how: str, state: dict[str, Any], path: Path) -> None:
        planner = OwnSave if "hooks" in how else ray_dcp.DefaultSavePlanner
        told = {"checkpoint_id": path, "no_dist": True}
        if how == "async":
            made = planner(flatten_state_dict=self.flat)
            ray_dcp.async_save(state, **told, planner=made).result()
            return
        library = stock if how == "stock" else ray_dcp
        library.save(state, **told, planner=planner(flatten_state_dict=self.flat))

    def load(self, how: str, state: dict[str, Any], path: Path) -> dict[str, Any]:
        planner = OwnLookup if "hooks" in how else ray_dcp.DefaultLoadPlanner
        told = {"checkpoint_id": path, "no_dist": True}
        made = planner(flatten_state_dict=self.flat)
        if how == "stock":
            stock.load(state, **told, planner=made)
        else:
            ray_dcp.load(state, **told, planner=made, options=self.options)
        return state


WRITERS = ("ours", "hooks", "async", "stock")


@pytest.mark.parametrize("seed", STATES)
def test_a_random_state_is_what_it_was_whoever_saves_and_loads_it(seed: int, tmp_path: Path):
    maker = Maker(seed, pickled=seed % 3 == 2)
    state = maker.state()
    way = Way(flat=seed % 7 != 3, code=maker.pickled)
    before = copy.deepcopy(state)
    of_stock = None
    wrong = []
    for writer in reversed(WRITERS):
        path = tmp_path / writer
        way.save(writer, state, path)
        wrong += [f"{writer} changed {line}" for line in differences(state, before)]
        kept = kept_by_stock(state) if not way.flat and writer in ("hooks", "stock") else state
        for reader in ("ours", "hooks"):
            into = way.load(reader, blank(maker, state, way), path)
            wrong += [f"{writer} to {reader}: {line}" for line in differences(into, kept)]
        found = read_by_stock(way, blank(maker, state, way, is_odd=False), path, state)
        if of_stock is None:
            of_stock = found
        elif of_stock is not REFUSED:
            new = REFUSED if found is REFUSED else sorted(set(found) - set(of_stock))
            wrong += [f"{writer} to stock: {line}" for line in new]
    assert not wrong, "\n" + "\n".join(wrong)


REFUSED = ["refused"]


def kept_by_stock(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what torch's planner saves without flattening: a copy of its own making.

    Keys are texts in it, and what has no values is left out.
    """
    made = _flatten_sharded_tensors(state)
    return {key: made.get(key, value) for key, value in state.items()}


def blank(maker: Maker, state: Any, way: Way, *, is_odd: bool = True) -> Any:
    if way.flat:
        return maker.blank(state, is_odd=is_odd)
    made = _flatten_sharded_tensors(state)
    into = {
        key: maker.blank(value, is_odd=is_odd) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }
    return into | {key: copy.deepcopy(state[key]) for key in state if key not in made}


def read_by_stock(way: Way, into: Any, path: Path, state: Any) -> list[str]:
    """Returns what is not as it was when stock DCP loads."""
    try:
        return differences(way.load("stock", into, path), state)
    except (Exception, stock.CheckpointException) as error:
        if os.environ.get("RAY_DCP_SEED"):
            print(path.name, str(error)[-600:])
        return REFUSED


# Conversions


@pytest.mark.parametrize("seed", STATES)
def test_conversions_give_what_was_saved(seed: int, tmp_path: Path):
    maker = Maker(seed, pickled=seed % 3 == 2)
    state = maker.state()
    options = ray_dcp.LoadOptions(weights_only=not maker.pickled)
    for writer in ("ours", "stock"):
        way = Way(flat=True, code=maker.pickled)
        path, file = tmp_path / writer, tmp_path / f"{writer}.pt"
        way.save(writer, state, path)
        kept = plainly(state, as_text=writer == "stock")
        if writer == "stock":
            kept = without_empty(kept)
        ray_dcp.copy(path, tmp_path / f"copied {writer}")
        ray_dcp.dcp_to_torch_save(path, file, options=options)
        ray_dcp.torch_save_to_dcp(
            file, tmp_path / f"back {writer}", weights_only=options.weights_only
        )
        found = {
            "read": ray_dcp.read_state_dict(path, options=options),
            "copied": ray_dcp.read_state_dict(tmp_path / f"copied {writer}", options=options),
            "torch.save": torch.load(file, weights_only=False),
            "back": ray_dcp.read_state_dict(tmp_path / f"back {writer}", options=options),
        }
        wrong = [f"{how}: {line}" for how, one in found.items() for line in differences(one, kept)]
        assert not wrong, f"\n{writer}\n" + "\n".join(wrong)


def without_empty(value: Any) -> Any:
    """Returns a state without mappings that have no entries, which stock DCP leaves out."""
    if isinstance(value, dict):
        kept = {key: without_empty(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one is not NOTHING} or NOTHING
    return value


NOTHING: Any = object()


# Ranks


WORLD_SIZES = sorted({math.prod(mesh) for mesh in MESHES})


@pytest.mark.parametrize("seed", SHARED_STATES)
def test_what_ranks_share_out_is_what_it_was_on_any_other_ranks(seed: int, tmp_path: Path):
    maker = SharedMaker(seed)
    state = maker.whole()
    sizes = [maker.random.choice(WORLD_SIZES) for _ in range(2)]
    saved, wanted = (maker.cuts(state, size) for size in sizes)
    wrong, own = [], [Maker(1000 * seed + rank).value(1) for rank in range(sizes[0])]
    of_stock: Any = None
    for writer, save in {"stock": save_by_stock, "ours": save_by_ours}.items():
        path = tmp_path / writer
        is_ours = writer == "ours"

        def part(rank: int, is_ours: bool = is_ours) -> dict[str, Any]:
            mine = {"own": ray_dcp.PerRank(own[rank])} if is_ours else {}
            return of_rank(state, saved, filled=True) | mine

        save(part, sizes[0], path)
        for reader, read in {"stock": load_by_stock, "ours": load_by_ours}.items():

            def loaded(
                rank: int, read: Any = read, path: Path = path, *, own: Any = own
            ) -> list[str]:
                into = of_rank(state, wanted, filled=False)
                expected = of_rank(state, wanted, filled=True)
                if own is not None:
                    into["own"] = ray_dcp.PerRank(None, resized="wrap")
                    expected["own"] = ray_dcp.PerRank(own[rank % len(own)])
                read(into, path, rank, sizes[1])
                lines = differences(into, expected)
                return [f"rank {rank}: {line}" for line in lines]

            mine = own if is_ours and reader == "ours" else None

            found = [
                line for lines in on_ranks(sizes[1], partial(loaded, own=mine)) for line in lines
            ]
            if reader == "stock":
                of_stock = found if of_stock is None else of_stock
                found = sorted(set(found) - set(of_stock))
            wrong += [f"{writer} to {reader}: {line}" for line in found]
    assert not wrong, f"\n{sizes} {saved} {wanted}\n" + "\n".join(wrong)


Build = Callable[[int], dict[str, Any]]


def save_by_ours(build: Build, world_size: int, path: Path) -> None:
    captures = on_ranks(
        world_size, lambda rank: frozen(capture(build(rank), rank=rank, world_size=world_size))
    )
    save_captures(path, captures)


def load_by_ours(into: dict[str, Any], path: Path, rank: int, world_size: int) -> None:
    load(Target(str(path)), into, rank, world_size)


def save_by_stock(build: Build, world_size: int, path: Path) -> None:
    """Does what the ranks of a stock save do, one after the other."""
    ranks = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            planner = stock.DefaultSavePlanner()
            writer = stock.FileSystemWriter(path, thread_count=1 + world_size % 2)
            planner.set_up_planner(build(rank), writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            ranks.append((planner, writer, writer.prepare_local_plan(planner.create_local_plan())))
    plans, metadata = ranks[0][0].create_global_plan([plan for *_, plan in ranks])
    plans = ranks[0][1].prepare_global_plan(plans)
    written = []
    for rank, ((planner, writer, _), plan) in enumerate(zip(ranks, plans, strict=True)):
        with as_rank(rank, world_size):
            written.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    ranks[0][1].finish(metadata, written)


def load_by_stock(into: dict[str, Any], path: Path, rank: int, world_size: int) -> None:
    """Does what a rank of a stock load does."""
    planner, reader = stock.DefaultLoadPlanner(), stock.FileSystemReader(path)
    metadata = reader.read_metadata()
    planner.set_up_planner(into, metadata, rank == 0)
    reader.set_up_storage_reader(metadata, rank == 0)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
