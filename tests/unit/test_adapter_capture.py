"""A capture describes what torch's own planner describes, and gives the bytes of exactly that."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ray_dcp.core.columns import decode, encode
from ray_dcp.core.values import Columns, Kind
from ray_dcp.errors import StateDictError, UnsupportedValueError
from ray_dcp.options import SaveOptions
from ray_dcp.saving import share_bytes
from ray_dcp.torch_adapter.capture import Capture, capture
from ray_dcp.torch_adapter.objects import load_object

from .adapter_support import as_rank, box, frozen, load, on_ranks, stored

WORLD = 4


def of(state_dict: dict[str, Any], world_size: int = 1, **options: Any) -> Capture:
    return capture(state_dict, rank=0, world_size=world_size, options=SaveOptions(**options))


def rows(columns: Columns) -> set[tuple[Any, ...]]:
    found = set()
    for row in range(len(columns)):
        fqn = columns.names[columns.name[row]]
        if columns.kind[row] == Kind.OBJECT:
            found.add((fqn, "object"))
            continue
        shape = tuple(columns.shape[row, : columns.ndim[row]].tolist())
        found.add((
            fqn, "tensor", columns.dtypes[columns.dtype[row]], shape, *box(columns, row),
            bool(columns.requires_grad[row]),
        ))  # fmt: skip
    return found


def torch_rows(state_dict: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The items of torch's planner in the form of `rows`."""
    found: set[tuple[Any, ...]] = set()
    for item in create_default_local_save_plan(flatten_state_dict(state_dict)[0], False).items:
        if item.type == WriteItemType.BYTE_IO:
            found.add((item.index.fqn, "object"))
            continue
        data = item.tensor_data
        found.add((
            item.index.fqn, "tensor", str(data.properties.dtype)[6:], tuple(data.size),
            tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.requires_grad,
        ))  # fmt: skip
    return found


class Model(nn.Module):
    """Uneven in every dimension, with a buffer, a scalar and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.tied = self.down


def whole() -> Model:
    torch.manual_seed(0)
    return Model()


def fsdp() -> nn.Module:
    return fully_shard(whole(), mesh=init_device_mesh("cpu", (WORLD,)))


def hsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(whole(), mesh=mesh)


def tp(mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (WORLD,))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(whole(), mesh, styles, src_data_rank=None)


def fsdp_tp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(tp(mesh["tp"]), mesh=mesh["dp"])


LAYOUTS = {"fsdp2": fsdp, "hsdp": hsdp, "tp": tp, "fsdp2 + tp": fsdp_tp}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_models_are_described_as_torch_describes_them(layout: str) -> None:
    def on_rank(rank: int) -> Capture:
        model = LAYOUTS[layout]()
        state = {"model": model, "groups": [{"lr": 0.1}]}
        captured = capture(state, rank=rank, world_size=WORLD)
        assert rows(captured.columns) == torch_rows({**state, "model": model.state_dict()})
        return frozen(captured)

    captures = on_ranks(WORLD, on_rank)
    full = whole().state_dict()
    target = {"model": {k: torch.zeros_like(v) for k, v in full.items()}, "groups": [{"lr": 0.0}]}
    load(stored(*captures), target)
    assert target["groups"] == [{"lr": 0.1}]
    for key, value in full.items():
        assert torch.equal(target["model"][key], value), key


PLACEMENTS = [
    ((4,), [Shard(0)]), ((4,), [Shard(1)]), ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Replicate()]),
    ((2, 2), [Replicate(), Replicate()]), ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]  # fmt: skip


@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (3, 2), (1, 9), (0, 4)], ids=str)
def test_every_placement_of_a_dtensor_is_described_as_torch_describes_it(
    mesh_shape: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]
) -> None:
    full = torch.arange(float(np.prod(shape))).reshape(shape)

    def on_rank(rank: int) -> Capture:
        mesh = init_device_mesh("cpu", mesh_shape)
        state = {"w": distribute_tensor(full, mesh, placements, src_data_rank=None)}
        captured = capture(state, rank=rank, world_size=WORLD)
        assert rows(captured.columns) == torch_rows(state)
        replicated = any(isinstance(placement, Replicate) for placement in placements)
        assert captured.columns.splittable.tolist() == [replicated]
        return frozen(captured)

    check_restores({"w": full}, on_ranks(WORLD, on_rank))


def check_restores(full: dict[str, torch.Tensor], captures: list[Capture]) -> None:
    target = {key: torch.full_like(value, -1) for key, value in full.items()}
    load(stored(*captures), target)
    for key, value in full.items():
        assert torch.equal(target[key], value), key


def test_a_rank_outside_the_mesh_of_a_tensor_contributes_nothing() -> None:
    full = torch.arange(6.0)

    def on_rank(rank: int) -> Capture:
        mesh = DeviceMesh("cpu", [1, 3])
        if rank in (1, 3):
            tensor = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        else:
            tensor = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False,
                                        shape=full.shape, stride=(1,))  # fmt: skip
        captured = capture({"w": tensor, "x": 1}, rank=rank, world_size=WORLD)
        assert rows(captured.columns) == torch_rows({"w": tensor, "x": 1})
        assert ("w" in captured.columns.names) == (rank in (1, 3))
        return frozen(captured)

    check_restores({"w": full}, on_ranks(WORLD, on_rank))


def sharded_tensor(full: torch.Tensor, rank: int, nested: bool = False) -> ShardedTensor:
    """Rows 2 r and 2 r + 1 on rank r; `nested`: as a ShardedTensor of one ShardedTensor."""

    def metadata(offset: int, of: int, sizes: list[int]) -> ShardMetadata:
        return ShardMetadata([offset, 0], sizes, placement=f"rank:{of}/cpu")

    width = full.shape[1]
    shards = [metadata(2 * r, r, [2, width]) for r in range(2)]
    local: Any = full[2 * rank : 2 * rank + 2].clone()
    properties = TensorProperties(dtype=full.dtype)
    if nested:
        inner = ShardedTensorMetadata(
            [metadata(r, r, [1, width]) for r in range(2)], torch.Size([2, width]), properties
        )
        local = ShardedTensor._init_from_local_shards_and_global_metadata(
            [LocalShard(full[2 * rank + rank : 2 * rank + rank + 1].clone(),
                        inner.shards_metadata[rank])], inner)  # fmt: skip
    outer = ShardedTensorMetadata(shards, full.shape, properties)
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(full[2 * rank : 2 * rank + 2].clone(), shards[rank])], outer
    )
    if nested:
        tensor.local_shards()[0].tensor = local
    return tensor


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_sharded_tensors_are_described_as_torch_describes_them() -> None:
    full = torch.arange(12.0).reshape(4, 3)

    def on_rank(rank: int) -> Capture:
        state = {"w": sharded_tensor(full, rank)}
        captured = capture(state, rank=rank, world_size=2)
        assert rows(captured.columns) == torch_rows(state)
        return frozen(captured)

    check_restores({"w": full}, on_ranks(2, on_rank))


def test_values_of_every_kind_are_rows_of_torchs_plan_with_dcp_paths() -> None:
    base = torch.arange(6.0)
    state = {
        "a": {"w": base, "tied": base, 3: torch.tensor(2), "empty": torch.zeros(0, 3)},
        "half": torch.ones(2, 3).bfloat16().T,
        "param": nn.Parameter(base),
        "list": [1, {"x": base}],
        "plain list": [1, 2],
        "tuple": (1, base),
        "none": None,
    }
    captured = of({**state, "nothing": {}})
    assert rows(captured.columns) == {*torch_rows(state), ("nothing", "object")}
    values, paths = flatten_state_dict(state)
    values["nothing"], paths["nothing"] = {}, ("nothing",)
    assert dict(zip(captured.columns.names, captured.columns.paths, strict=True)) == paths
    for row, name in enumerate(captured.columns.names):
        if captured.columns.kind[row] == Kind.OBJECT:
            data = captured.deferred(row)
            assert captured.deferred(row) is data
            assert repr(load_object(data, fqn=name)) == repr(values[name])
        else:
            expected = values[name].detach().contiguous().view(-1)
            data = np.frombuffer(captured.source(row), np.uint8)
            assert data.tobytes() == bytes(expected.clone().untyped_storage())
    assert rows(decode(encode(captured.columns))) == rows(captured.columns)


def test_everything_that_cannot_be_saved_is_told_at_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(2).to_sparse()
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        wrong = DTensor.from_local(
            torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1)
        )
        state = {
            "fine": torch.ones(1), "a": {"meta": torch.empty(2, device="meta")}, "sparse": sparse,
            "hook": lambda: 1, "partial": partial, "wrong": wrong,
        }  # fmt: skip
        with pytest.raises(UnsupportedValueError) as caught:
            of(state)
    message = str(caught.value)
    assert message.startswith("5 value(s)")
    for words in (
        "'a.meta'", "'sparse'", "'hook'", "'partial'", "Partial", "'wrong'", "(2, 2)", "full_tensor"
    ):  # fmt: skip
        assert words in message
    assert "'fine'" not in message


def test_a_local_part_of_another_dtype_than_declared_is_refused() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        state = {}
        for name, placement in (("replica", Replicate()), ("shard", Shard(0))):
            state[name] = DTensor.from_local(
                torch.ones(8, dtype=torch.bfloat16), mesh, [placement], run_check=False
            )
        assert of(state).columns.dtypes == ("bfloat16",)
        for tensor in state.values():
            tensor._local_tensor = torch.ones(8)  # as code does that casts under a DTensor
        with pytest.raises(UnsupportedValueError, match="rank 0") as caught:
            of(state)
    message = str(caught.value)
    for words in ("2 value(s)", "'replica'", "'shard'", "torch.bfloat16", "torch.float32", ".to("):
        assert words in message


class Refused:
    """On no allow-list."""


def test_objects_that_a_safe_load_refuses_are_warned_of_or_refused() -> None:
    state = {"cfg": Refused(), "fine": np.arange(3)}
    (warning,) = of(state).warnings
    assert f"add_safe_globals([{Refused.__module__}.Refused])" in warning
    with pytest.raises(UnsupportedValueError, match=r"objects='refuse'.*'cfg'"):
        of(state, objects="refuse")


def test_something_else_than_a_state_dict_is_refused() -> None:
    with pytest.raises(StateDictError, match="'model': model"):
        of(nn.Linear(1, 1))  # type: ignore[arg-type]
    empty = of({}).columns
    assert len(empty) == 0
    assert empty.shape.shape == (0, 1)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize(("mesh", "length"), [((2, 2), 1), ((2, 2), 3), ((3, 2), 5), ((2, 4), 6)])
def test_fsdp_with_tp_leaves_ranks_without_elements(style, mesh, length):
    world = mesh[0] * mesh[1]
    columns, features = (4, length) if style is ColwiseParallel else (length, 3)

    def linear() -> nn.Linear:
        torch.manual_seed(1)
        return nn.Linear(columns, features, bias=False)

    def sharded(model: nn.Linear) -> nn.Module:
        both = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], style(), src_data_rank=None)
        return fully_shard(model, mesh=both["dp"])

    def on_rank(rank: int) -> Capture:
        return frozen(capture({"m": sharded(linear())}, rank=rank, world_size=world))

    checkpoint = stored(*on_ranks(world, on_rank))
    whole = {"m": {"weight": torch.zeros(features, columns)}}
    load(checkpoint, whole)
    assert torch.equal(whole["m"]["weight"], linear().weight)

    def loads(rank: int) -> bool:
        model = sharded(linear())
        with torch.no_grad():
            model.weight.zero_()
        load(checkpoint, {"m": model}, rank, world)
        local = sharded(linear()).weight.to_local()
        return torch.equal(model.weight.to_local(), local)

    assert all(on_ranks(world, loads))


def test_several_local_shards_of_one_rank_are_several_rows() -> None:
    full = torch.arange(24.0).reshape(6, 4)

    def on_rank(rank: int) -> Capture:
        mesh = init_device_mesh("cpu", (2,))
        pieces = [full[:, 2 * rank : 2 * rank + 1], full[:, 2 * rank + 1 : 2 * rank + 2]]
        local = LocalShardsWrapper(
            [piece.clone() for piece in pieces], [(0, 2 * rank), (0, 2 * rank + 1)]
        )
        tensor = DTensor.from_local(
            local, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=full.stride()
        )
        captured = capture({"w": tensor}, rank=rank, world_size=2)
        assert rows(captured.columns) == torch_rows({"w": tensor})
        assert len(captured.columns) == 2
        assert captured.columns.names == ("w",)
        return frozen(captured)

    check_restores({"w": full}, on_ranks(2, on_rank))


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_a_sharded_tensor_in_a_sharded_tensor_is_one_box_at_the_sum_of_the_offsets() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    for rank in range(2):
        with as_rank(rank, 2):
            tensor = sharded_tensor(full, rank, nested=True)
            columns = capture({"w": tensor}, rank=rank, world_size=2).columns
            assert [box(columns, 0)] == [((3 * rank, 0), (1, 3))]
            with pytest.raises(UnsupportedValueError, match="flatten_sharded_tensors"):
                capture({"w": tensor}, rank=rank, world_size=2, flatten_sharded_tensors=False)


def test_a_rank_stages_about_its_share_of_what_others_hold_too() -> None:
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        value = distribute_tensor(
            torch.zeros(8, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None
        )
        assert share_bytes({"w": value, "more": [torch.zeros(4), 1]}, 4) == 64 / 2 + 16 / 4
