"""What was captured comes back in place, for any layout, and what does not fit changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from ray_dcp import errors
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.planning.reads import plan_reads
from ray_dcp.torch_adapter.capture import Capture, capture
from ray_dcp.torch_adapter.load_plan import plan_targets
from ray_dcp.torch_adapter.objects import dump_object
from ray_dcp.torch_adapter.sink import TensorSink

from .adapter_support import as_rank, frozen, load, on_ranks, stored, table_of


def saved(state_dict: dict[str, Any], **flags: bool) -> Target:
    return stored(capture(state_dict, rank=0, world_size=1, **flags))


def test_everything_comes_back_in_place_and_tensors_keep_their_identity() -> None:
    def state(factor: float) -> dict[str, Any]:
        base = torch.arange(12.0).reshape(3, 4) * factor
        return {
            "w": base.clone(), "param": nn.Parameter(base.clone()), "transposed": base.clone().T,
            "strided": base.clone()[:, ::2], "half": base.bfloat16(), "scalar": base[2, 3].clone(),
            "complex": torch.complex(base, -base).conj(), "negative": torch.complex(base, base),
            "empty": torch.zeros(0, 3), "bool": base > 3 * factor,
            "fp8": base.to(torch.float8_e5m2),
            "nested": {"list": [{"x": base[0].clone()}, 5 * factor], 7: {"y": base[1].clone()}},
            "object": (1, factor), "numpy": np.arange(3) * factor,
        }  # fmt: skip

    def tensors(of: dict[str, Any]) -> dict[str, torch.Tensor]:
        values, _ = flatten_state_dict(of)
        return {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}

    source, target = state(1.0), state(0.0)
    source["negative"] = source["negative"].conj().imag
    target["negative"] = target["negative"].conj().imag
    before = tensors(target)
    versions = {key: value._version for key, value in before.items()}
    targets = load(saved(source), target)
    after = tensors(target)
    assert all(after[key] is value for key, value in before.items())
    for key, value in tensors(source).items():
        assert torch.equal(
            after[key].detach().resolve_conj().resolve_neg().to(torch.complex64),
            value.detach().resolve_conj().resolve_neg().to(torch.complex64),
        ), key
        assert value.numel() == 0 or after[key]._version > versions[key], key
    assert target["object"] == (1, 1.0)
    assert target["numpy"].tolist() == [0, 1, 2]
    assert target["nested"]["list"][1] == 5
    assert sorted(targets.loaded) == sorted(flatten_state_dict(source)[0])
    assert (targets.missing, targets.unexpected, targets.cast) == ((), (), ())


class Holder:
    """A Stateful that remembers what it was given."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((2,), value)
        self.step = int(value)
        self.given: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = dict(state_dict)
        self.step = state_dict["step"]


def test_a_stateful_at_the_top_is_loaded_in_place_and_given_its_state() -> None:
    holder = Holder(0.0)
    target = {"a": holder, "x": 0}
    load(saved({"a": Holder(3.0), "x": 1}), target)
    assert target["a"] is holder
    assert holder.given is not None
    assert holder.given["tensor"] is holder.tensor
    assert holder.tensor.tolist() == [3, 3]
    assert (holder.step, target["x"]) == (3, 1)


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


def test_a_tensor_for_a_value_that_is_none_is_an_error_and_an_object_for_a_tensor_replaces() -> (
    None
):
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


LAYOUTS = [
    ((4,), [Shard(0)]), ((4,), [Shard(1)]), ((4,), [Replicate()]), ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), [Shard(0), _StridedShard(0, split_factor=2)]),
]  # fmt: skip


@pytest.mark.parametrize("to", LAYOUTS, ids=str)
@pytest.mark.parametrize("of", LAYOUTS, ids=str)
def test_a_tensor_saved_in_one_layout_loads_in_any_other(of: Any, to: Any) -> None:
    full = torch.arange(63.0).reshape(9, 7)

    def distributed(value: torch.Tensor, layout: Any) -> DTensor:
        mesh = init_device_mesh("cpu", layout[0])
        return distribute_tensor(value, mesh, layout[1], src_data_rank=None)

    def captured(rank: int) -> Capture:
        return frozen(capture({"w": distributed(full, of)}, rank=rank, world_size=4))

    checkpoint = stored(*on_ranks(4, captured))

    def check(rank: int) -> None:
        target = {"w": distributed(torch.full_like(full, -1), to)}
        load(checkpoint, target)
        assert torch.equal(target["w"].to_local(), distributed(full, to).to_local())

    on_ranks(4, check)


def test_several_local_shards_are_filled_each() -> None:
    full = torch.arange(24.0).reshape(6, 4)
    checkpoint = saved({"w": full})
    for rank in range(2):
        with as_rank(rank, 2):
            locals_ = [torch.zeros(6, 1), torch.zeros(6, 1)]
            wrapper = LocalShardsWrapper(locals_, [(0, 2 * rank), (0, 2 * rank + 1)])
            mesh = init_device_mesh("cpu", (2,))
            tensor = DTensor.from_local(wrapper, mesh, [Shard(1)], run_check=False,
                                        shape=full.shape, stride=full.stride())  # fmt: skip
            load(checkpoint, {"w": tensor})
            assert torch.equal(torch.cat(locals_, 1), full[:, 2 * rank : 2 * rank + 2])


def test_holes_are_found_before_anything_is_touched() -> None:
    table = table_of(saved({"w": torch.ones(4), "v": torch.ones(2), "x": 5}))
    keep = np.array([table.names[t] != "x" for t in table.tensor])
    size = table.size.copy()
    size[table.tensor == table.names.index("w")] = [3]
    holed = replace(table, tensor=table.tensor[keep], offset=table.offset[keep], size=size[keep],
                    file=table.file[keep], payload_offset=table.payload_offset[keep],
                    item_offset=table.item_offset[keep])  # fmt: skip
    target = {"w": torch.zeros(4), "v": torch.zeros(2), "x": 0}
    targets = plan_targets(target, holed)
    with pytest.raises(errors.CoverageError) as caught:
        targets.check_coverage(plan_reads(holed, targets.wanted))
    assert "'w' (4 bytes)" in str(caught.value)
    assert "'x'" in str(caught.value)
    assert "'v'" not in str(caught.value)
    assert target["w"].tolist() == [0] * 4


class Marked(torch.Tensor):
    """A subclass that pickles as itself."""


def test_a_stored_tensor_subclass_is_copied_into_plain_and_sharded_targets() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    with torch.serialization.safe_globals([Marked]):
        checkpoint = saved({"w": full.as_subclass(Marked)})
        target = {"w": torch.zeros(4, 3, dtype=torch.float64)}
        targets = load(checkpoint, target)
        assert len(targets.wanted) == 0
        assert torch.equal(target["w"], full.double())
        marked = {"w": torch.zeros(4, 3).as_subclass(Marked)}
        load(checkpoint, marked)
        assert torch.equal(marked["w"].as_subclass(torch.Tensor), full)
        with as_rank(1, 2):
            mesh = init_device_mesh("cpu", (2,))
            part = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)], src_data_rank=None)
            load(checkpoint, {"w": part})
            assert torch.equal(part.to_local(), full[2:])
    with pytest.raises(errors.UnsafeCheckpointError, match="Marked"):
        load(checkpoint, target)
    load(checkpoint, target, weights_only=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_targets_are_filled() -> None:
    full = torch.arange(12.0).reshape(3, 4)
    target = {"w": torch.zeros(3, 4, device="cuda"), "t": torch.zeros(3, 4, device="cuda").T}
    load(saved({"w": full.cuda(), "t": full.T.cuda()}), target)
    assert torch.equal(target["w"].cpu(), full)
    assert torch.equal(target["t"].cpu(), full.T)


# Sinks fill many small rows at once

SOURCE = memoryview(bytearray(range(200)))


def numbers(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("start", "count"), [(197, 4), (-1, 4), (0, 3), (0, 5), (1 << 62, 4), (-(1 << 62), 4)]
)
def test_what_reaches_out_of_the_source_or_the_row_is_left(start: int, count: int) -> None:
    sink = TensorSink()
    row = torch.full((6,), 77, dtype=torch.uint8)[1:5]
    sink.add_direct([row])
    assert sink.put_many([0], SOURCE, [start], [count]) == [0]
    assert numbers(row) == [77] * 4


def test_a_tensor_whose_memory_was_taken_meanwhile_is_left() -> None:
    sink = TensorSink()
    freed, short, small = (torch.zeros(6, dtype=torch.uint8)[1:5] for _ in range(3))
    sink.add_direct([freed, short, small])
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(4)
    small.resize_(2)
    assert sink.put_many(range(3), SOURCE, [0] * 3, [4] * 3) == [0, 1, 2]


def test_whole_items_without_raw_bytes_go_into_the_buffers_of_all_rows_they_meet() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    table = table_of(saved({"w": full, "v": full.T.contiguous()}))
    target = {"w": torch.zeros(4, 3), "v": torch.zeros(3, 4, dtype=torch.float64)}
    targets = plan_targets(target, table)
    for chunk, tensor in enumerate((full, full.T)):
        targets.place_item(chunk, dump_object(tensor, fqn="w"))
    targets.finish()
    assert torch.equal(target["w"], full)
    assert torch.equal(target["v"], full.T.double())
    with pytest.raises(errors.DamagedCheckpointError, match=r"shape \(4, 3\)"):
        targets.place_item(0, dump_object(full.T, fqn="w"))
    with pytest.raises(errors.DamagedCheckpointError, match="shape"):
        targets.place_item(0, dump_object(5, fqn="w"))
