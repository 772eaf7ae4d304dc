"""Random states are saved and loaded by ray_dcp and stock DCP, and are what they were.

Whatever stock DCP does with a state, what ray_dcp loads must be what was saved, by whichever of
both; and stock DCP must load of ours all that it loads of its own. `RAY_DCP_THOROUGH` tries more
seeds, `RAY_DCP_SEED` others.

Everything in a state follows from one seed. `Maker.state` makes a state of one process,
`Maker.shared` one that several ranks share out; `blank` makes what to load into.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.serialization import safe_globals
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.torch_adapter.capture import capture
from tests.support.adapter import OwnLookup, OwnSave, as_rank, frozen, load, on_ranks, save_captures
from tests.support.comparing import differences
from tests.support.exchange_cases import blank, objects

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "bfloat16", "bool", "complex128", "complex32", "complex64", "float16", "float32",
        "float4_e2m1fn_x2", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "float8_e8m0fnu", "int16", "int32", "int64", "int8", "uint16", "uint32",
        "uint64", "uint8",
    )
)  # fmt: skip
"""All that are saved."""

_FLOATS = tuple(d for d in DTYPES if d.is_floating_point and d.itemsize > 1)
_NEGATED = (torch.float32, torch.float64)
"""Dtypes that torch negates bit by bit: of narrower ones it changes some NaNs, or not."""


@dataclasses.dataclass
class Settings:
    """What a user keeps beside the tensors."""

    name: str
    rates: tuple[float, ...]
    scale: torch.Tensor


Point = collections.namedtuple("Point", ["x", "where"])

SAFE_GLOBALS: list[Any] = [Settings, Point, TwoTensor]
"""Classes that a safe load has to be told of."""

_OBJECTS = sorted(objects().items())


class Maker:
    """Makes states.

    Args:
        seed: All follows from it.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._number = 0

    def state(self) -> dict[str, Any]:
        """Returns a state dict."""
        state = {f"top{n}": self.value(0) for n in range(self.random.randint(1, 6))}
        state["always"] = self.tensor()
        return state

    def value(self, depth: int) -> Any:
        """Returns a value of any kind."""
        makers: list[Callable[[], Any]] = [
            self.tensor, self.tensor, self.tensor, self.pair, self.object, self.array,
            lambda: self.mapping(depth), lambda: self.list(depth), lambda: self.tuple(depth),
            self.stochastic, self.record,
        ]  # fmt: skip
        if depth >= 3:
            makers = makers[:6]
        return self.random.choice(makers)()

    def mapping(self, depth: int) -> Any:
        """Returns a mapping, also one without entries."""
        cls = self.random.choice([dict, dict, collections.OrderedDict, defaults])
        made = cls()
        for _ in range(self.random.randint(0, 4)):
            made[self.key()] = self.value(depth + 1)
        return made

    def key(self) -> Any:
        """Returns a key that no other is equal to as text."""
        self._number += 1
        n = self._number
        return self.random.choice([f"k{n}", f"k{n}", n, -n, f"a.b{n}", f"ü {n}", f"{n}x", f".{n}"])

    def list(self, depth: int) -> list[Any]:
        """Returns a list, also an empty one."""
        return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]

    def tuple(self, depth: int) -> tuple[Any, ...]:
        """Returns a tuple: one value, whatever is in it."""
        return tuple(self.value(depth + 2) for _ in range(self.random.randint(0, 3)))

    def object(self) -> Any:
        """Returns a value of Python's or torch's."""
        name, value = self.random.choice(_OBJECTS)
        return f"{name} {self.random.random()}" if isinstance(value, str) else value

    def array(self) -> Any:
        """Returns a value of numpy."""
        dtype = self.random.choice(["f4", "f8", "i2", "u8", "?", "c8", "M8[s]", "S3", "U2"])
        shape = self.shape()
        data = np.frombuffer(
            bytes(self.random.choices(range(1, 100), k=int(np.prod(shape)) * 8)), "u8"
        )
        made = (data % 1000).astype(dtype).reshape(shape)
        if made.ndim > 1 and self.random.random() < 0.3:
            made = np.asfortranarray(made)
        return made[()] if made.ndim == 0 and self.random.random() < 0.5 else made

    def stochastic(self) -> Any:
        """Returns the state of something that rounds by chance."""
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        torch.rand(self.random.randint(0, 5), generator=generator)
        return {
            "rng": generator.get_state(),
            "generator": generator,
            "remainder": self.bits(torch.int16, self.shape()),
            "seed": self.random.randrange(1 << 62),
        }

    def record(self) -> Any:
        """Returns an object of a class of the user's."""
        if self.random.random() < 0.5:
            return Point(self.random.random(), ("here", None))
        return Settings("s", (0.5, self.random.random()), self.plain())

    def shape(self, min_dim: int = 0) -> tuple[int, ...]:
        """Returns a shape; one in six has no elements."""
        shape = [self.random.randint(1, 5) for _ in range(self.random.randint(min_dim, 4))]
        if shape and self.random.random() < 1 / 6:
            shape[self.random.randrange(len(shape))] = 0
        return tuple(shape)

    def bits(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a contiguous tensor of random bits, NaNs and all."""
        count = int(np.prod(shape)) * dtype.itemsize
        data = torch.tensor(list(self.random.randbytes(count)), dtype=torch.uint8)
        return (data % 2 if dtype == torch.bool else data).view(dtype).reshape(shape)

    def plain(self) -> torch.Tensor:
        """Returns a contiguous tensor."""
        return self.bits(self.random.choice(DTYPES), self.shape())

    def tensor(self) -> torch.Tensor:
        """Returns a tensor of any memory layout."""
        made = self.laid_out(self.plain())
        if self.random.random() < 0.15 and made.dtype in _FLOATS:
            return nn.Parameter(made, requires_grad=self.random.random() < 0.7)
        return made

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same dtype in another layout: as it is, or another view."""
        ways = [
            lambda: tensor,
            lambda: tensor.unsqueeze(0).expand(self.random.randint(1, 3), *tensor.shape),
        ]
        if tensor.dim():
            order = self.random.sample(range(tensor.dim()), tensor.dim())
            ways.append(lambda: tensor.permute(order))
        if tensor.dim() and tensor.shape[0] > 1:
            ways += [lambda: tensor[1:], lambda: tensor[::2], lambda: tensor[-1]]
        # Why twice: few dtypes have such views.
        if tensor.is_complex():
            ways += [tensor.conj] * 2
        if tensor.dtype in _NEGATED:
            ways += [lambda: torch._neg_view(tensor)] * 2
        return self.random.choice(ways)()

    def pair(self) -> Any:
        """Returns a tensor subclass of two halves, which differ."""
        dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        shape = self.shape()
        made = TwoTensor(self.bits(dtype, shape), self.bits(dtype, shape))
        if dtype.is_floating_point and self.random.random() < 0.4:
            return nn.Parameter(made, requires_grad=False)
        return made

    # What to load into

    def blank(self, value: Any, *, is_odd: bool = True) -> Any:
        """Returns a state to load into.

        Args:
            value: The state that is saved.
            is_odd: Whether tensors may have another layout than the contiguous one.
        """
        if isinstance(value, TwoTensor):
            made = TwoTensor(blank(value.a), blank(value.b))
            is_parameter = isinstance(value, nn.Parameter)
            return nn.Parameter(made, requires_grad=False) if is_parameter else made
        if isinstance(value, torch.Tensor):
            return self._target(value) if is_odd else blank(value)
        if isinstance(value, Mapping):
            made = type(value)() if type(value) is not collections.defaultdict else defaults()
            for key, one in value.items():
                made[key] = self.blank(one, is_odd=is_odd)
            return made
        if type(value) is list and _is_walked(value):
            return [self.blank(one, is_odd=is_odd) for one in value]
        return None

    def _target(self, value: torch.Tensor) -> torch.Tensor:
        zeros = blank(value)
        how = self.random.randrange(7)
        if how == 0 and zeros.dim() > 1:
            return blank(value.transpose(0, -1)).transpose(0, -1)
        if how == 1 and zeros.dim():
            return blank(torch.empty(*value.shape, 2, dtype=value.dtype))[..., 1]
        if how == 2 and zeros.is_complex() and zeros.dtype != torch.complex32:
            return zeros.conj()
        if how == 3 and zeros.dtype in _NEGATED:
            return torch._neg_view(zeros)
        if how == 4 and zeros.dtype in _FLOATS:
            return nn.Parameter(zeros)
        return zeros


def defaults() -> Any:
    """Returns a mapping with a default."""
    return collections.defaultdict(int)


def _is_walked(values: Any) -> bool:
    return any(
        isinstance(one, (torch.Tensor, Mapping)) or (isinstance(one, list) and _is_walked(one))
        for one in values
    )


def plainly(value: Any, *, as_text: bool = False) -> Any:
    """Returns a state as conversions give it: its mappings are dicts.

    Args:
        value: The state.
        as_text: Whether numbers as keys of mappings are texts, as stock DCP keeps them.
    """
    if isinstance(value, Mapping) and (value or as_text):
        return {
            key if not as_text else str(key): plainly(one, as_text=as_text)
            for key, one in value.items()
        }
    if type(value) is list and _is_walked(value):
        return [plainly(one, as_text=as_text) for one in value]
    return value


# What ranks share out


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor that ranks share out.

    Attributes:
        parts: Its elements; of a subclass, both halves.
    """

    parts: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts[0].shape)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How ranks share a tensor out.

    Attributes:
        mesh: Its lengths.
        placements: One for each dimension of the mesh.
        only: The dimension of the mesh that alone knows of the tensor; the other ranks hold the
            same parts.
        is_odd: Whether the local part is not contiguous.
    """

    mesh: tuple[int, ...]
    placements: tuple[Any, ...]
    only: int | None = None
    is_odd: bool = False


class SharedMaker(Maker):
    """Makes states that ranks share out: whole ones, and how they are cut."""

    def whole(self) -> dict[str, Any]:
        """Returns a state of whole tensors and of values that all ranks have."""
        state: dict[str, Any] = {"model": {}, "plain": self.plain(), "object": self.object()}
        for number in range(self.random.randint(1, 4)):
            state["model"][f"w{number}"] = self.shared()
        if self.random.random() < 0.5:
            state["pair"] = self.pair()
        return state

    def shared(self) -> Whole:
        """Returns a tensor to share out; now and then a subclass of two halves."""
        shape = tuple(self.random.choice([0, 1, 2, 3, 4, 5, 7, 8]) for _ in self.shape(1)[:3])
        if self.random.random() < 0.25:
            dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int64])
            return Whole((self.bits(dtype, shape), self.bits(dtype, shape)))
        return Whole((self.bits(self.random.choice(DTYPES), shape),))

    def cuts(self, state: dict[str, Any], world_size: int) -> dict[str, Cut]:
        """Returns how so many ranks share out each tensor."""
        return {name: self.cut(one, world_size) for name, one in state["model"].items()}

    def cut(self, whole: Whole, world_size: int) -> Cut:
        """Returns how so many ranks share out a tensor."""
        meshes = [m for m in MESHES if int(np.prod(m)) == world_size] or [(world_size,)]
        mesh, ndim = self.random.choice(meshes), len(whole.shape)
        is_odd = self.random.random() < 0.25
        if len(mesh) == 2 and self.random.random() < 0.3:
            # As FSDP over tensor parallelism cuts: the second dimension first.
            dim = self.random.randrange(ndim)
            return Cut(mesh, (_StridedShard(dim, split_factor=mesh[1]), Shard(dim)), None, is_odd)
        placements = tuple(
            Replicate() if self.random.random() < 0.3 else Shard(self.random.randrange(ndim))
            for _ in mesh
        )
        if len(mesh) == 2 and self.random.random() < 0.3:
            return Cut(mesh, placements[:1], self.random.randrange(2), is_odd)
        return Cut(mesh, placements, None, is_odd)


MESHES = (
    (1,), (2,), (3,), (4,), (2, 2), (5,), (6,), (2, 3), (3, 2), (8,), (2, 4), (4, 2), (2, 2, 2),
)  # fmt: skip
"""Lengths of meshes."""


def of_rank(state: dict[str, Any], cuts: dict[str, Cut], *, filled: bool) -> dict[str, Any]:
    """Returns a rank's part of a state, in the process group of that rank.

    Args:
        state: Of `SharedMaker.whole`.
        cuts: Of `SharedMaker.cuts`.
        filled: Whether the values are in it; else it is to load into.
    """
    parts = {n: _part(w, cuts[n], filled=filled) for n, w in state["model"].items()}
    if filled:
        return {**state, "model": parts}
    own = {key: parts if key == "model" else value for key, value in state.items()}
    into = Maker(0).blank({**own, "model": None}, is_odd=False)
    return {**into, "model": parts}


def _part(whole: Whole, cut: Cut, *, filled: bool) -> DTensor:
    names = tuple(f"dim{n}" for n in range(len(cut.mesh)))
    mesh = init_device_mesh("cpu", cut.mesh, mesh_dim_names=names)
    if cut.only is not None:
        mesh = mesh[names[cut.only]]
    count = int(np.prod(whole.shape))
    places = torch.arange(count).reshape(whole.shape)
    local = distribute_tensor(places, mesh, cut.placements, src_data_rank=None).to_local()
    halves = []
    for half in whole.parts:
        data = half.reshape(-1).view(torch.uint8).reshape(count, -1) if count else half
        chosen = data[local.reshape(-1)] if count else data
        made = chosen.reshape(-1).view(half.dtype).reshape(local.shape) if count else (
            torch.empty(local.shape, dtype=half.dtype)
        )  # fmt: skip
        made = made.clone() if filled or not count else blank(made)
        if cut.is_odd and made.dim() > 1 and len(whole.parts) == 1:
            odd = blank(made.transpose(0, -1)).transpose(0, -1)
            made = odd.copy_(made) if made.dtype.itemsize > 1 else made
        halves.append(made)
    value = TwoTensor(*halves) if len(halves) > 1 else halves[0]
    return DTensor.from_local(
        value, mesh, cut.placements, run_check=False, shape=torch.Size(whole.shape),
        stride=places.stride(),
    )  # fmt: skip


FIRST_SEED = int(os.environ.get("RAY_DCP_SEED", "0"))
IS_THOROUGH = bool(os.environ.get("RAY_DCP_THOROUGH"))
STATES = range(FIRST_SEED, FIRST_SEED + (600 if IS_THOROUGH else 22))
SHARED_STATES = range(FIRST_SEED, FIRST_SEED + (300 if IS_THOROUGH else 12))

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def allowed() -> Iterator[None]:
    with safe_globals(SAFE_GLOBALS):
        yield


class Way:
    """How one state goes to the disk and back.

    Args:
        flat: Whether nested containers are walked.
    """

    def __init__(self, *, flat: bool) -> None:
        self.flat = flat

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
            ray_dcp.load(state, **told, planner=made)
        return state


WRITERS = ("ours", "hooks", "async", "stock")


@pytest.mark.parametrize("seed", STATES)
def test_a_random_state_is_what_it_was_whoever_saves_and_loads_it(seed: int, tmp_path: Path):
    maker = Maker(seed)
    state = maker.state()
    way = Way(flat=seed % 7 != 3)
    before = copy.deepcopy(state)
    of_stock = None
    wrong = []
    for writer in reversed(WRITERS):
        path = tmp_path / writer
        way.save(writer, state, path)
        wrong += [f"{writer} changed {line}" for line in differences(state, before)]
        kept = kept_by_stock(state) if not way.flat and writer in ("hooks", "stock") else state
        for reader in ("ours", "hooks"):
            into = way.load(reader, target_of(maker, state, way), path)
            wrong += [f"{writer} to {reader}: {line}" for line in differences(into, kept)]
        found = read_by_stock(way, target_of(maker, state, way, is_odd=False), path, state)
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


def target_of(maker: Maker, state: Any, way: Way, *, is_odd: bool = True) -> Any:
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
    maker = Maker(seed)
    state = maker.state()
    for writer in ("ours", "stock"):
        way = Way(flat=True)
        path, file = tmp_path / writer, tmp_path / f"{writer}.pt"
        way.save(writer, state, path)
        kept = plainly(state, as_text=writer == "stock")
        if writer == "stock":
            kept = without_empty(kept)
        ray_dcp.copy(path, tmp_path / f"copied {writer}")
        ray_dcp.dcp_to_torch_save(path, file)
        ray_dcp.torch_save_to_dcp(file, tmp_path / f"back {writer}")
        found = {
            "read": ray_dcp.read_state_dict(path),
            "copied": ray_dcp.read_state_dict(tmp_path / f"copied {writer}"),
            "torch.save": torch.load(file, weights_only=False),
            "back": ray_dcp.read_state_dict(tmp_path / f"back {writer}"),
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
