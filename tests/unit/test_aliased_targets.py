"""Loads into names of one memory: values that agree are loaded, and others are an error.

Never is a sound checkpoint called damaged, or an older one taken, because two names of the state
dict are one memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp
from ray_dcp import LoadOptions, errors
from tests.support.adapter import OwnLoad, as_rank, load_on_ranks, save_on_ranks


def load(state: Any, path: Any, **how: Any) -> Any:
    return ray_dcp.load(state, checkpoint_id=path, no_dist=True, **how)


def saved(path: Any, state: Any) -> None:
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)


WAYS: dict[str, Callable[..., Any]] = {
    "native": lambda **_: {},
    "planner": lambda **_: {"planner": OwnLoad()},
    "unverified": lambda **_: {"options": LoadOptions(verify="never")},
}


def test_tied_weights_come_back_from_the_one_name_that_the_hub_has_for_them(tmp_path: Any) -> None:
    words = torch.randn(64, 8)
    save_file({"embed.weight": words}, tmp_path / "model.safetensors")
    for make in (torch.zeros, cut):
        one = make(64, 8)
        state = {"embed.weight": one, "lm_head.weight": one.detach()}
        report = load(state, tmp_path)
        assert (report.loaded, report.missing) == (("embed.weight", "lm_head.weight"), ())
        assert torch.equal(getattr(one, "_local_tensor", one), words)
    # Only what is the same memory, as a whole and in the same order.
    square = torch.zeros(64, 8)
    for other in (torch.zeros(64, 8), square[:, :4], square.view(8, 64), square[:0]):
        with pytest.raises(errors.MissingKeyError, match="lm_head"):
            load({"embed.weight": square, "lm_head.weight": other}, tmp_path)
    assert not square.any()
    save_file({"empty": torch.zeros(0)}, tmp_path / "model.safetensors")
    with pytest.raises(errors.MissingKeyError, match="another"):
        load({"empty": torch.zeros(0), "another": torch.zeros(0)}, tmp_path)
    empty = torch.zeros(0)
    assert load({"empty": empty, "another": empty.detach()}, tmp_path).missing == ()


def replaced(how: str) -> tuple[torch.Tensor, LoadOptions]:
    """Returns a target that a load replaces by a new tensor, and the load's options."""
    if how == "meta":
        return torch.zeros(4, 8, device="meta"), LoadOptions()
    make = cut if how == "sharded" else torch.zeros
    return make(4, 8).double(), LoadOptions(dtype="keep")


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize("how", ["meta", "kept dtype", "sharded"])
def test_new_tensors_of_names_that_were_one_tensor_are_one(
    how: str, names: Any, tmp_path: Any
) -> None:
    words = torch.randn(4, 8)
    saved(tmp_path, dict.fromkeys(names, words))
    one, options = replaced(how)
    state = {"a": one, "b": one}
    assert load(state, tmp_path, options=options).missing == ()
    assert state["a"] is state["b"]
    assert torch.equal(getattr(state["a"], "_local_tensor", state["a"]), words)
    state = {"a": one.detach(), "b": torch.nn.Parameter(one)}
    assert load(state, tmp_path, options=options).missing == ()
    assert isinstance(state["b"], torch.nn.Parameter)
    first, second = (getattr(each, "_local_tensor", each) for each in state.values())
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, words)


@pytest.mark.parametrize("how", ["meta", "kept dtype"])
def test_new_tensors_whose_values_differ_are_two(how: str, tmp_path: Any) -> None:
    saved(tmp_path, {"a": torch.zeros(4, 8), "b": -torch.zeros(4, 8)})
    one, options = replaced(how)
    state = {"a": one, "b": one}
    load(state, tmp_path, options=options)
    assert [bool(each.signbit().all()) for each in state.values()] == [False, True]


def test_new_tensors_of_kept_dtypes_that_differ_are_two(tmp_path: Any) -> None:
    """Zeros have the same bytes in all dtypes."""
    saved(tmp_path, {"a": torch.zeros(4, 8).half(), "b": torch.zeros(4, 8).bfloat16()})
    one, options = replaced("kept dtype")
    state = {"a": one, "b": one}
    load(state, tmp_path, options=options)
    assert [each.dtype for each in state.values()] == [torch.float16, torch.bfloat16]


def cut(*shape: int) -> DTensor:
    """Returns zeros as a sharded tensor, on the one rank that there is."""
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        return DTensor.from_local(torch.zeros(shape), mesh, [Shard(0)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [16, 1 << 20])
def test_different_values_for_one_memory_are_an_error_that_names_both(
    size: int, way: str, tmp_path: Any
) -> None:
    saved(tmp_path / "c", {"a": torch.zeros(size), "b": torch.ones(size), "c": torch.ones(4)})
    one = torch.full((size,), 7.0)
    state = {"a": one, "b": one, "c": torch.full((4,), 7.0)}
    with pytest.raises(errors.StateDictError, match=r"share memory.*'a' and 'b'\. Nothing was"):
        load(state, tmp_path / "c", **WAYS[way]())
    assert one.unique().tolist() == [7.0]
    assert state["c"].tolist() == [7.0] * 4


def test_no_older_step_is_taken_for_it(tmp_path: Any) -> None:
    for step in (1, 2):
        saved(tmp_path / f"step-{step}", {"a": torch.zeros(1 << 18), "b": torch.ones(1 << 18)})
    one = torch.zeros(1 << 18)
    with pytest.raises(errors.StateDictError, match="share memory"):
        ray_dcp.load_newest({"a": one, "b": one}, tmp_path, no_dist=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [5, 1 << 20])
def test_equal_values_for_one_memory_are_loaded(size: int, way: str, tmp_path: Any) -> None:
    value = torch.randn(size)
    saved(tmp_path / "c", {"a": value, "b": value, "c": value.clone()})
    one = torch.zeros(size)
    for state in ({"a": one, "b": one, "c": one}, {"a": one, "c": torch.nn.Parameter(one)}):
        one.zero_()
        load(state, tmp_path / "c", **WAYS[way]())
        assert torch.equal(one, value)


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "whole": base,
        "row": base[1],
        "transposed": base.T,
        "column": base[:, 2],
        "part": base[1:3, 1:],
        "bits": base.view(torch.int32),
        "flat": base.view(-1)[3:9],
        "negative": torch._neg_view(base),
    }


NAMES = sorted(views(torch.zeros(4, 4)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "whole"])
def test_views_of_one_memory_are_compared_where_they_overlap(
    name: str, way: str, tmp_path: Any
) -> None:
    value = torch.arange(16.0).reshape(4, 4)
    state = {key: view.clone() for key, view in views(value).items()}
    saved(tmp_path / "good", state)
    bad = {**state, name: state[name] + 1}
    saved(tmp_path / "bad", bad)
    base = torch.zeros(4, 4)
    for pair in ([name, "whole"], ["whole", name]):
        target = {key: views(base)[key] for key in pair}
        base.zero_()
        load(target, tmp_path / "good", **WAYS[way]())
        assert torch.equal(base, value)
        base.zero_()
        with pytest.raises(errors.StateDictError, match=" and ".join(map(repr, sorted(pair)))):
            load(target, tmp_path / "bad", **WAYS[way]())
        assert not base.any()


@pytest.mark.parametrize("way", WAYS)
def test_views_whose_own_elements_share_memory_are_compared_with_themselves(
    way: str, tmp_path: Any
) -> None:
    def windows(base: torch.Tensor) -> torch.Tensor:
        return base.unfold(0, 3, 1)

    value = torch.arange(8.0)
    saved(tmp_path / "good", {"w": windows(value)})
    saved(tmp_path / "bad", {"w": torch.arange(18.0).reshape(6, 3)})
    base = torch.zeros(8)
    load({"w": windows(base)}, tmp_path / "good", **WAYS[way]())
    assert torch.equal(base, value)
    with pytest.raises(errors.StateDictError, match=r"share memory.*elements of 'w'\. Nothing was"):
        load({"w": windows(base)}, tmp_path / "bad", **WAYS[way]())
    assert torch.equal(base, value)


def test_views_that_lie_between_each_other_take_any_values(tmp_path: Any) -> None:
    value = torch.randn(8, 6)
    state = {f"c{n}": value[:, n] for n in range(6)}
    saved(tmp_path / "c", state)
    base = torch.zeros(8, 6)
    load({f"c{n}": base[:, n] for n in range(6)}, tmp_path / "c")
    assert torch.equal(base, value)


def test_values_are_compared_as_they_are_cast(tmp_path: Any) -> None:
    value = torch.tensor([1.0, 2.0, 3.0])
    saved(tmp_path / "c", {"a": value, "b": value.bfloat16(), "d": value + 1})
    one = torch.zeros(3, dtype=torch.float64)
    load({"a": one, "b": one}, tmp_path / "c")
    assert one.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(errors.StateDictError, match="'a' and 'd'"):
        load({"a": one, "d": one}, tmp_path / "c")


def test_bits_are_compared_not_numbers(tmp_path: Any) -> None:
    nan = torch.full((4,), torch.nan)
    saved(tmp_path / "c", {"a": nan, "b": nan.clone(), "z": torch.zeros(4), "m": -torch.zeros(4)})
    one = torch.zeros(4)
    load({"a": one, "b": one[:]}, tmp_path / "c")
    assert one.isnan().all()
    with pytest.raises(errors.StateDictError, match="'m' and 'z'"):
        load({"z": one, "m": one}, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("equal", [True, False])
def test_checkpoints_of_stock_are_compared_by_their_values(equal: bool, tmp_path: Any) -> None:
    value = torch.randn(1 << 18)
    dcp.save({"a": value, "b": value + (not equal)}, checkpoint_id=tmp_path / "c", no_dist=True)
    one = torch.zeros(1 << 18)
    if equal:
        load({"a": one, "b": one}, tmp_path / "c")
        assert torch.equal(one, value)
        return
    with pytest.raises(errors.StateDictError, match="'a' and 'b'"):
        load({"a": one, "b": one}, tmp_path / "c")
    assert not one.any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("by", ["ray_dcp", "stock"])
def test_subclasses_that_are_one_object_are_compared_by_their_items(
    by: str, equal: bool, tmp_path: Any
) -> None:
    half = torch.full((4,), 3.0)
    first, second = TwoTensor(half, half), TwoTensor(half + (not equal), half + (not equal))
    with torch.serialization.safe_globals([TwoTensor]):
        how = {"checkpoint_id": tmp_path / "c", "no_dist": True}
        (ray_dcp.save if by == "ray_dcp" else dcp.save)({"a": first, "b": second}, **how)
        one = TwoTensor(torch.zeros(4), torch.zeros(4))
        if equal:
            load({"a": one, "b": one}, tmp_path / "c")
            assert one.a.tolist() == one.b.tolist() == [3.0] * 4
            return
        with pytest.raises(errors.StateDictError, match="'a' and 'b'"):
            load({"a": one, "b": one}, tmp_path / "c")
        assert not one.a.any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shared", ["another's", "a plain tensor's", "one object's"])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("by", ["ray_dcp", "stock"])
def test_parts_of_subclasses_that_share_memory_are_compared(
    by: str, equal: bool, shared: str, tmp_path: Any
) -> None:
    one, two, three = (torch.full((4,), float(number)) for number in range(1, 4))
    other = two + (not equal)
    memory = [torch.zeros(4) for _ in range(3)]
    both = TwoTensor(*memory[:2])
    stored, target = {
        "another's": (
            {"a": TwoTensor(one, two), "b": TwoTensor(other, three)},
            {"a": both, "b": TwoTensor(*memory[1:])},
        ),
        "a plain tensor's": (
            {"a": TwoTensor(one, two), "b": other},
            {"a": both, "b": memory[1]},
        ),
        "one object's": (
            {"a": TwoTensor(one, two), "b": TwoTensor(one, other)},
            {"a": both, "b": both},
        ),
    }[shared]
    with torch.serialization.safe_globals([TwoTensor]):
        how = {"checkpoint_id": tmp_path / "c", "no_dist": True}
        (ray_dcp.save if by == "ray_dcp" else dcp.save)(stored, **how)
        if not equal:
            with pytest.raises(errors.StateDictError, match="'a' and 'b'"):
                load(target, tmp_path / "c")
            assert not any(memory.any() for memory in memory)
            return
        load(target, tmp_path / "c")
    for name, value in stored.items():
        found = target[name]
        if isinstance(value, TwoTensor):
            assert torch.equal(found.a, value.a)
            assert torch.equal(found.b, value.b)
        else:
            assert torch.equal(found, value)


def test_sharded_and_plain_names_of_one_memory_are_compared(tmp_path: Any) -> None:
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        flat = torch.arange(12.0)
        parts = {
            "x": DTensor.from_local(flat[:4], mesh, [Shard(0)]),
            "y": DTensor.from_local(flat[4:].view(2, 4), mesh, [Replicate()]),
        }
        saved(tmp_path / "c", {**parts, "flat": flat, "off": flat + 1})
        other = torch.zeros(12)
        target = {
            "x": DTensor.from_local(other[:4], mesh, [Shard(0)]),
            "y": DTensor.from_local(other[4:].view(2, 4), mesh, [Replicate()]),
        }
        load(target, tmp_path / "c")
        assert torch.equal(other, flat)
        load({**target, "flat": other}, tmp_path / "c")
        with pytest.raises(errors.StateDictError, match="'off'"):
            load({**target, "off": other}, tmp_path / "c")


def test_values_that_ranks_cut_differently_are_read_and_compared(tmp_path: Any) -> None:
    value = torch.randn(1 << 21)
    states = [{"a": value, "b": value.clone()}, {"a": value}]
    save_on_ranks(states, tmp_path / "c")
    one = torch.zeros(1 << 21)
    load_on_ranks([{"a": one, "b": one}], tmp_path / "c")
    assert torch.equal(one, value)


def test_parts_are_compared_by_what_they_hold_and_not_by_whole_chunks(tmp_path: Any) -> None:
    value = torch.arange(8.0)
    other = torch.cat([value[:4], -value[4:]])
    saved(tmp_path / "c", {"a": value, "b": other})

    def part(memory: torch.Tensor, start: int) -> Any:
        made: Any = memory.view(4)
        made.global_shape, made.global_offsets = (8,), ((start,),)
        made.local_offsets, made.local_sizes = ((0,),), ((4,),)
        return made

    one = torch.zeros(4)
    load({"a": part(one, 0), "b": part(one, 0)}, tmp_path / "c")
    assert torch.equal(one, value[:4])
    with pytest.raises(errors.StateDictError, match="'a' and 'b'"):
        load({"a": part(one, 4), "b": part(one, 4)}, tmp_path / "c")
    assert torch.equal(one, value[:4])


@pytest.mark.parametrize(
    "view", [torch.conj, lambda one: one.conj().imag, torch._neg_view], ids=["conj", "imag", "neg"]
)
@pytest.mark.parametrize("way", WAYS)
def test_conjugate_and_negative_views_are_compared_by_what_they_show(
    view: Callable[[torch.Tensor], torch.Tensor], way: str, tmp_path: Any
) -> None:
    value = torch.complex(torch.arange(4.0), torch.arange(4.0) + 9)
    shown = view(value).resolve_conj().resolve_neg().clone()
    saved(tmp_path / "c", {"a": value, "b": shown, "off": shown + 1})
    one = torch.zeros(4, dtype=torch.complex64)
    load({"a": one, "b": view(one)}, tmp_path / "c", **WAYS[way]())
    assert torch.equal(one, value)
    with pytest.raises(errors.StateDictError, match="'a' and 'off'"):
        load({"a": one, "off": view(one)}, tmp_path / "c", **WAYS[way]())
    assert torch.equal(one, value)


def test_one_rank_whose_targets_disagree_fails_the_load_on_all(tmp_path: Any) -> None:
    state = {"a": torch.zeros(8), "b": torch.ones(8)}
    save_on_ranks([state], tmp_path / "c")
    one, loose = torch.full((8,), 7.0), {"a": torch.full((8,), 7.0), "b": torch.full((8,), 7.0)}
    with pytest.raises(errors.CheckpointError, match="share memory"):
        load_on_ranks([loose, {"a": one, "b": one}], tmp_path / "c")
    assert [*loose["a"].tolist(), *one.tolist()] == [7.0] * 16


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_copy_is_still_damage(tmp_path: Any) -> None:
    dcp.save({"a": torch.ones(9), "b": torch.ones(9)}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = next((tmp_path / "c").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    one = torch.zeros(9)
    with pytest.raises(errors.DamagedCheckpointError):
        load({"a": one, "b": one}, tmp_path / "c")


class Scratch(DefaultLoadPlanner):
    """Resolves every tensor to the same memory, and takes it when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(1 << 12)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.memory[: read_item.lengths[0]]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(tensor)


def test_a_planner_may_resolve_all_to_the_same_memory(tmp_path: Any) -> None:
    state = {f"t{n}": torch.full((1 << 12,), float(n)) for n in range(64)}
    saved(tmp_path / "c", state)
    target = {name: torch.zeros(1 << 12) for name in state}
    load(target, tmp_path / "c", planner=Scratch())
    assert all(torch.equal(target[name], state[name]) for name in state)


# Which targets share memory
