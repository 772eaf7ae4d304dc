"""A capture describes what torch's own planner describes, and gives the bytes of exactly that."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ray_dcp
from ray_dcp import errors
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.values import Columns, Kind
from ray_dcp.errors import DamagedCheckpointError, StateDictError, UnsupportedValueError
from ray_dcp.options import SaveOptions
from ray_dcp.saving import share_bytes
from ray_dcp.torch_adapter.capture import Capture, capture
from ray_dcp.torch_adapter.flatten import flatten
from ray_dcp.torch_adapter.load_plan import plan_targets
from ray_dcp.torch_adapter.objects import dump_object
from ray_dcp.torch_adapter.sink import TensorSink
from ray_dcp.transform.conversion import nested as nested_by_path
from tests.support.adapter import as_rank, box, frozen, load, on_ranks, stored, table_of

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


def test_rows_from_several_places_are_several_boxes() -> None:
    """What is left of FSDP over TP where TP is gathered; torch tells of the first place alone."""
    full = torch.arange(16.0).reshape(8, 2)
    own = [full[[0, 1, 4, 5]], full[[2, 3, 6, 7]]]

    def strided(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=2)],
            run_check=False, shape=full.shape, stride=full.stride(),
        )  # fmt: skip

    captures = on_ranks(
        2, lambda rank: frozen(capture({"w": strided(own[rank])}, rank=rank, world_size=2))
    )
    assert [box(one.columns, 1) for one in captures] == [((4, 0), (2, 2)), ((6, 0), (2, 2))]
    check_restores({"w": full}, captures)
    for rank in range(2):
        with as_rank(rank, 2):
            target = torch.zeros(4, 2)
            load(stored(*captures), {"w": strided(target)})
            assert torch.equal(target, own[rank])


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
    """Rows 2 r and 2 r + 1 on rank r of 2; `nested`: as a ShardedTensor of one ShardedTensor."""

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
    own = [LocalShard(full[2 * r : 2 * r + 2].clone(), shards[r]) for r in range(2) if r == rank]
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata(own, outer)
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


class _OfFSDP1(torch.nn.Module):
    """A module whose state is a tensor as FSDP1 gives it."""

    def __init__(self, tensor: ShardedTensor) -> None:
        super().__init__()
        self.state = {"w": tensor}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> None:
        self.state = dict(state)


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_a_rank_that_has_no_rows_of_a_sharded_tensor_loads_its_module() -> None:
    full = torch.arange(12.0).reshape(4, 3)

    def on_rank(rank: int) -> Capture:
        state = {"m": {"w": sharded_tensor(full, rank)}}
        return frozen(capture(state, rank=rank, world_size=2))

    saved = on_ranks(2, on_rank)
    for rank in range(3):
        with as_rank(rank, 3):
            module = _OfFSDP1(sharded_tensor(torch.zeros_like(full), rank))
            load(stored(*saved), {"m": module})
            shards = module.state["w"].local_shards()
            assert len(shards) == (rank < 2)
            assert all(torch.equal(one.tensor, full[2 * rank : 2 * rank + 2]) for one in shards)


def test_everything_that_cannot_be_saved_is_told_at_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(2).to_sparse()
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        wrong = DTensor.from_local(
            torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1)
        )
        state = {
            "fine": torch.ones(1), "a": {"meta": torch.empty(2, device="meta")}, "sparse": sparse,
            "hook": lambda: 1, "partial": partial, "wrong": wrong, "quantised": quantised,
        }  # fmt: skip
        with pytest.raises(UnsupportedValueError) as caught:
            of(state)
    message = str(caught.value)
    assert message.startswith("6 value(s)")
    for words in (
        "'a.meta'", "meta device", "'sparse'", "to_dense", "'quantised'", "dequantize", "'hook'",
        "'partial'", "Partial", "'wrong'", "(2, 2)", "full_tensor",
    ):  # fmt: skip
        assert words in message
    assert "'fine'" not in message


def test_a_part_of_a_sharded_tensor_is_not_saved_within_an_object() -> None:
    """Of an object, one rank's value is kept: the parts of the other ranks would be lost."""

    def on_rank(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)], run_check=False)
        copy = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        parts = sharded_tensor(torch.zeros(4, 2), rank)
        known: Any = torch.zeros(2)
        known.global_shape, known.global_offsets = (4,), ((2 * rank,),)
        known.local_offsets, known.local_sizes = ((0,),), ((2,),)
        held = {"shard": (shard, 1), "parts": (parts,), "known": ({"a": known},), "copy": (copy,)}
        with pytest.raises(UnsupportedValueError) as caught:
            of({**held, "own": ray_dcp.PerRank(shard)}, world_size=2)
        assert of({"copy": (copy,)}, world_size=2).columns.names == ("copy",)
        assert len(of({"a": (shard,)}).columns) == 1  # a rank that saves for itself
        nested = {"a": {"b": shard}}
        with pytest.raises(UnsupportedValueError, match="'a' is or holds"):
            capture(nested, rank=rank, world_size=2, flatten_state_dict=False)
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert message.startswith("3 value(s)")
        for words in ("'shard'", "'parts'", "'known'", "DTensor", "ShardedTensor", "PerRank"):
            assert words in message


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


def test_several_local_shards_of_one_rank_are_several_rows_and_are_filled_each() -> None:
    full = torch.arange(24.0).reshape(6, 4)

    def in_two(rank: int, whole: torch.Tensor) -> tuple[list[torch.Tensor], DTensor]:
        pieces = [whole[:, 2 * rank + n : 2 * rank + n + 1].clone() for n in range(2)]
        local = LocalShardsWrapper(pieces, [(0, 2 * rank), (0, 2 * rank + 1)])
        mesh = init_device_mesh("cpu", (2,))
        return pieces, DTensor.from_local(
            local, mesh, [Shard(1)], run_check=False, shape=full.shape, stride=full.stride()
        )

    def on_rank(rank: int) -> Capture:
        _, tensor = in_two(rank, full)
        captured = capture({"w": tensor}, rank=rank, world_size=2)
        assert rows(captured.columns) == torch_rows({"w": tensor})
        assert len(captured.columns) == 2
        assert captured.columns.names == ("w",)
        return frozen(captured)

    captures = on_ranks(2, on_rank)
    check_restores({"w": full}, captures)
    for rank in range(2):
        with as_rank(rank, 2):
            pieces, tensor = in_two(rank, torch.zeros_like(full))
            load(stored(*captures), {"w": tensor})
            assert torch.equal(torch.cat(pieces, 1), full[:, 2 * rank : 2 * rank + 2])


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_a_sharded_tensor_in_a_sharded_tensor_is_one_box_at_the_sum_of_the_offsets() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    for rank in range(2):
        with as_rank(rank, 2):
            tensor = sharded_tensor(full, rank, nested=True)
            columns = capture({"w": tensor}, rank=rank, world_size=2).columns
            assert [box(columns, 0)] == [((3 * rank, 0), (1, 3))]


def test_a_rank_stages_about_its_share_of_what_others_hold_too() -> None:
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        value = distribute_tensor(
            torch.zeros(8, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None
        )
        assert share_bytes({"w": value, "more": [torch.zeros(4), 1]}, 4) == 64 / 2 + 16 / 4


def saved(state_dict: dict[str, Any], **flags: bool) -> Target:
    return stored(capture(state_dict, rank=0, world_size=1, **flags))


def test_all_missing_keys_are_told_with_the_similar_ones() -> None:
    checkpoint = saved({"model.layer.weight": torch.ones(2), "z": 1})
    target = {"layer": {"weight": torch.zeros(2)}, "q": {"b": 1}, "z": 0}
    with pytest.raises(
        errors.MissingKeyError, match="Missing key in checkpoint state_dict"
    ) as caught:
        load(checkpoint, target)
    message = str(caught.value)
    for words in ("'layer.weight'", "'q.b'", "'model.layer.weight'", "strict=False"):
        assert words in message
    assert target["z"] == 0
    with pytest.raises(RuntimeError, match="Missing key"):
        load(checkpoint, target)
    targets = load(checkpoint, target, strict=False)
    assert targets.missing == ("layer.weight", "q.b")
    assert targets.unexpected == ("model.layer.weight",)
    assert (targets.loaded, target["z"]) == (("z",), 1)


def test_all_mismatches_of_shape_and_dtype_are_told_and_nothing_is_touched() -> None:
    checkpoint = saved({
        "shape": torch.ones(2, 3), "narrow": torch.ones(2), "int": torch.ones(2).long(),
        "fine": torch.ones(2), "object": 5,
    })  # fmt: skip
    target = {
        "shape": torch.zeros(3, 2), "narrow": torch.zeros(2).half(), "int": torch.zeros(2),
        "fine": torch.zeros(2), "object": 0,
    }  # fmt: skip
    before = copy.deepcopy(target)
    with pytest.raises(
        errors.ShapeMismatchError, match=r"Size mismatch between saved.*3 value\(s\)"
    ) as e:
        load(checkpoint, target)
    for words in ("(2, 3) and wanted as (3, 2)", "float32 and wanted as float16", "int64 and"):
        assert words in str(e.value)
    for key, value in before.items():
        assert torch.equal(torch.as_tensor(target[key]), torch.as_tensor(value))


def test_a_tensor_for_another_value_is_an_error_and_an_object_replaces_a_tensor() -> None:
    with pytest.raises(errors.StateDictError, match=r"'step' \(int\)"):
        load(saved({"step": torch.tensor(3)}), {"step": 0})
    target = {"step": torch.tensor(0)}
    load(saved({"step": 3}), target)
    assert target == {"step": 3}


def test_targets_that_cannot_be_written_are_refused() -> None:
    checkpoint = saved({"w": torch.ones(2, 3), "t": 1})
    with pytest.raises(errors.UnsupportedValueError, match="'w' is expanded"):
        load(checkpoint, {"w": torch.zeros(3).expand(2, 3)})
    with pytest.raises(errors.UnsupportedValueError, match="to_dense"):
        load(checkpoint, {"w": torch.zeros(2, 3).to_sparse()})


def test_meta_tensors_get_memory_and_are_replaced_where_they_sit() -> None:
    meta = torch.device("meta")
    inner = {
        "w": torch.empty(2, 3, device=meta),
        5: [torch.empty(3, device=meta, dtype=torch.half)],
    }
    target = {"a": inner, "empty": torch.empty(0, 2, device=meta)}
    source = {"a": {"w": torch.ones(2, 3), 5: [torch.ones(3).half()]}, "empty": torch.empty(0, 2)}
    load(saved(source), target)
    assert target["a"] is inner
    assert inner["w"].tolist() == [[1] * 3] * 2
    assert inner[5][0].dtype == torch.half
    assert inner[5][0].tolist() == [1, 1, 1]
    assert target["empty"].device.type == "cpu"


def test_a_meta_dtensor_becomes_a_dtensor_with_memory() -> None:
    full = torch.arange(10.0).reshape(5, 2)
    checkpoint = saved({"w": full})
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            real = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            meta = DTensor.from_local(
                torch.empty_like(real.to_local(), device="meta"), mesh, [Shard(0)],
                run_check=False, shape=full.shape, stride=full.stride(),
            )  # fmt: skip
            target = {"w": meta}
            load(checkpoint, target)
            assert isinstance(target["w"], DTensor)
            assert target["w"].shape == full.shape
            assert target["w"].placements == (Shard(0),)
            assert torch.equal(target["w"].to_local(), real.to_local())


class Marked(torch.Tensor):
    """A subclass that pickles as itself."""


def test_a_stored_tensor_of_a_class_that_nobody_allowed_needs_trust() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    checkpoint = saved({"w": full.as_subclass(Marked)})
    target = {"w": torch.zeros(4, 3, dtype=torch.float64)}
    with pytest.raises(errors.UnsafeCheckpointError, match="Marked"):
        load(checkpoint, target)
    load(checkpoint, target, weights_only=False)
    assert torch.equal(target["w"], full.double())


# Sinks fill many small rows at once

SOURCE = memoryview(bytearray(range(200)))


def test_what_reaches_out_of_the_source_or_the_row_is_left() -> None:
    places = [(197, 4), (-1, 4), (0, 3), (0, 5), (1 << 62, 4), (-(1 << 62), 4)]
    rows = [
        torch.full((6,), 77, dtype=torch.uint8)[1:5] for _ in (*places, "freed", "short", "small")
    ]
    sink = TensorSink()
    sink.add_direct(rows)
    rows[-3].untyped_storage().resize_(0)
    rows[-2].untyped_storage().resize_(4)
    rows[-1].resize_(2)
    starts, counts = zip(*places, *[(0, 4)] * 3, strict=True)
    assert sink.put_many(range(9), SOURCE, starts, counts) == [*range(9)]
    assert all(row.tolist() == [77] * 4 for row in rows[:-3])


def test_an_item_that_is_no_tensor_of_its_chunk_is_damage() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    targets = plan_targets({"w": torch.zeros(4, 3)}, table_of(saved({"w": full})))
    with pytest.raises(errors.DamagedCheckpointError, match=r"shape \(4, 3\)"):
        targets.place_item(0, dump_object(full.T, fqn="w"))
    with pytest.raises(errors.DamagedCheckpointError, match="shape"):
        targets.place_item(0, dump_object(5, fqn="w"))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_each_rank_of_a_target_with_more_rows_gets_the_stored_ones(rows: int) -> None:
    full = torch.arange(2.0 * rows).reshape(rows, 2)
    checkpoint = saved({"w": full})
    for rank, low in enumerate((0, 3)):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            target = distribute_tensor(
                torch.full((5, 2), -1.0), mesh, [Shard(0)], src_data_rank=None
            )
            load(checkpoint, {"w": target}, resize={"w": 0})
            local, own = target.to_local(), full[low : low + 3]
            assert torch.equal(local[: len(own)], own)
            assert (local[len(own) :] == -1).all()


TENSOR = torch.ones(2)

leaves = st.sampled_from([TENSOR, torch.nn.Parameter(TENSOR), 1, "x", None, (1, TENSOR), b"b"])
keys = st.sampled_from(["a", "b", 0, 1, "0"])
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=2).map(MappingProxyType),
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(state_dict=st.dictionaries(keys, nested, max_size=4), before_2_4=st.booleans())
def test_names_paths_and_values_are_those_of_dcp(state_dict: dict, before_2_4: bool) -> None:
    try:
        _version._derived_version = "2_3" if before_2_4 else None
        values, paths = flatten_state_dict(state_dict)
    except ValueError:  # two values with one name
        with pytest.raises(StateDictError, match="duplicated flatten key"):
            flatten(state_dict, before_2_4=before_2_4)
        return
    finally:
        _version._derived_version = None
    flat = flatten(state_dict, before_2_4=before_2_4)
    assert before_2_4 or all(flat.values[flat.names.index(name)] == {} for name in flat.empty)
    flat = flat.only([row for row, name in enumerate(flat.names) if name not in flat.empty])
    assert flat.names == list(values)
    assert flat.paths == list(paths.values())
    assert all(a is b for a, b in zip(flat.values, values.values(), strict=True))
    for parent, key, value in zip(flat.parents, flat.keys, flat.values, strict=True):
        assert parent[key] is value


LOOP: list[Any] = []
LOOP.append(LOOP)
SELF: dict[str, Any] = {"a": {}}
SELF["a"]["b"] = SELF


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            {"a": {"b": 1}, "a.b": 2, "c": {"d": 1}, "c.d": 3},
            r"'a\.b', 'c\.d' would name two values",
        ),
        (SELF, "does it contain itself"),
        ({"loop": LOOP}, "does it contain itself"),
        ({"fine": 1, "\ud83d\ude00": TENSOR}, "half of a surrogate pair"),
        ({"fine": 1, "a\ude00": TENSOR}, "half of a surrogate pair"),
    ],
)
def test_names_that_no_checkpoint_can_hold_are_told_before_anything_is_saved(
    state: dict, told: str, tmp_path: Path
) -> None:
    with pytest.raises(StateDictError, match=told):
        ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("state", "told"),
    [({3: 1, "3": 2}, "flatten key: '3'"), ({"\ud83d": 1}, "half of a surrogate pair")],
)
def test_without_flattening_names_must_be_unique_texts_too(state, told, tmp_path: Path) -> None:
    planner = ray_dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(StateDictError, match=told):
        ray_dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner)


@pytest.mark.parametrize(
    "paths",
    [
        {"x": ("a", -1)},
        {"x": ("a", 1 << 21)},
        {"x": (0,)},
        {"x": ("a", 0), "y": ("a", "b")},
    ],
)
def test_paths_that_contradict_themselves_or_ask_for_the_impossible_are_refused(paths: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="can't be a place"):
        nested_by_path(dict.fromkeys(paths.values(), 1))
