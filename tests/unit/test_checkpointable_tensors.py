"""Tensors that say which parts of a global tensor they hold: `CheckpointableTensor` of DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import ray_dcp
from ray_dcp import errors
from tests.support.own_planners import OwnLoad, OwnSave, OwnWriter

from .adapter_support import load_on_ranks, save_on_ranks

FULL = torch.arange(24.0).reshape(6, 4)

Part = tuple[tuple[int, ...], tuple[int, ...]]


def marked(tensor: torch.Tensor, whole: Any, parts: list[Any], starts: list[Any]) -> torch.Tensor:
    """Gives a tensor the attributes of the protocol."""
    tensor.global_shape = tuple(whole)
    tensor.global_offsets = tuple(offset for offset, _ in parts)
    tensor.local_sizes = tuple(size for _, size in parts)
    tensor.local_offsets = tuple(starts)
    return tensor


def holding(parts: list[Part], full: torch.Tensor = FULL, pad: int = 1, **how: Any) -> torch.Tensor:
    """Returns parts of a matrix, row by row in one padded tensor."""
    rows = sum(size[0] for _, size in parts) + pad
    local = torch.full((rows, full.shape[1] + pad), -1.0, **how)
    starts, row = [], 0
    for (low, left), (count, width) in parts:
        if not local.is_meta:
            local[row : row + count, :width] = full[low : low + count, left : left + width]
        starts.append((row, 0))
        row += count
    return marked(local, full.shape, parts, starts)


def rows(low: int, count: int) -> Part:
    return (low, 0), (count, 4)


def empty(parts: list[Part], **how: Any) -> torch.Tensor:
    return holding(parts, torch.full((6, 4), -1.0), **how)


def check_holds(tensor: Any, full: torch.Tensor = FULL) -> None:
    """Checks every part and that the padding is as it was."""
    rest = tensor.detach().clone().as_subclass(torch.Tensor)
    for (low, left), (row, col), (count, width) in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        part = rest[row : row + count, col : col + width]
        assert torch.equal(part, full[low : low + count, left : left + width])
        part.fill_(-1.0)
    assert torch.equal(rest, torch.full_like(rest, -1.0))


BY_TWO = [[rows(0, 2), rows(5, 1)], [rows(2, 3)]]
BY_THREE = [[((0, 0), (6, 1))], [((0, 1), (3, 3))], [((3, 1), (3, 3))]]


@pytest.mark.parametrize("to", [BY_TWO, BY_THREE, [[rows(0, 6)]]])
def test_parts_of_several_ranks_are_one_tensor_and_load_into_any_others(
    tmp_path: Path, to: list[list[Part]]
) -> None:
    save_on_ranks([{"w": holding(parts), "n": 3} for parts in BY_TWO], tmp_path)
    assert ray_dcp.open(tmp_path)["w"].shape == (6, 4)
    whole = {"w": torch.zeros(6, 4)}
    ray_dcp.load(whole, checkpoint_id=tmp_path)
    assert torch.equal(whole["w"], FULL)
    states = [{"w": empty(parts), "n": 0} for parts in to]
    tensors = [state["w"] for state in states]
    load_on_ranks(states, tmp_path)
    for state, tensor in zip(states, tensors, strict=True):
        assert state["w"] is tensor
        check_holds(tensor)


def test_replicas_of_parts_are_stored_once(tmp_path: Path) -> None:
    save_on_ranks([{"w": holding(parts)} for parts in (*BY_TWO, *BY_TWO)], tmp_path)
    states = [{"w": empty(parts)} for parts in BY_THREE]
    load_on_ranks(states, tmp_path)
    for state in states:
        check_holds(state["w"])
    assert ray_dcp.open(tmp_path).verify().ok


def test_a_parameter_with_parts_keeps_what_it_is(tmp_path: Path) -> None:
    save_on_ranks([{"w": holding(BY_TWO[0])}, {"w": holding(BY_TWO[1])}], tmp_path)
    plain = empty([rows(1, 4)])
    param = torch.nn.Parameter(plain.clone())
    marked(param, (6, 4), [rows(1, 4)], [(0, 0)])
    ray_dcp.load({"w": param}, checkpoint_id=tmp_path)
    check_holds(param)
    assert param.requires_grad


def test_a_meta_target_gets_memory_and_keeps_its_parts(tmp_path: Path) -> None:
    save_on_ranks([{"w": holding(parts)} for parts in BY_TWO], tmp_path)
    state: dict[str, Any] = {"w": empty([rows(1, 4)], pad=0, device="meta")}
    ray_dcp.load(state, checkpoint_id=tmp_path)
    assert not state["w"].is_meta
    check_holds(state["w"])
    parameter = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    state = {"w": marked(parameter, (6, 4), [rows(1, 4)], [(0, 0)])}
    ray_dcp.load(state, checkpoint_id=tmp_path)
    assert type(state["w"]) is torch.nn.Parameter
    check_holds(state["w"])


def test_a_scalar_and_a_rank_without_parts(tmp_path: Path) -> None:
    scalar = marked(torch.tensor(7.0), (), [((), ())], [()])
    states = [{"w": empty([]), "s": scalar}, {"w": holding([rows(0, 6)]), "s": scalar}]
    save_on_ranks(states, tmp_path)
    found = ray_dcp.read_state_dict(tmp_path)
    assert torch.equal(found["w"], FULL)
    assert found["s"].item() == 7


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"global_offsets": ((0, 0),)}, "one entry a part"),
        ({"local_sizes": ((2, 4), (1, 9))}, "lies outside"),
        ({"local_offsets": ((0, 0), (-1, 0))}, "lies outside"),
        ({"global_shape": (6,)}, "lies outside"),
        ({"global_offsets": ((0, 0), (6, 0))}, "lies outside"),
        ({"global_offsets": (0, 0)}, "tuple of whole numbers"),
        ({"local_sizes": ((2, 4), (1, 0.5))}, "tuple of whole numbers"),
        ({"global_shape": 24}, "tuple of whole numbers"),
    ],
)
def test_attributes_that_contradict_each_other_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    tensor = holding(BY_TWO[0])
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(errors.UnsupportedValueError, match=f"'w'.*{told}"):
        ray_dcp.save({"w": tensor}, checkpoint_id=tmp_path / "a")
    ray_dcp.save({"w": FULL}, checkpoint_id=tmp_path / "b")
    with pytest.raises(errors.UnsupportedValueError, match=f"'w'.*{told}"):
        ray_dcp.load({"w": tensor}, checkpoint_id=tmp_path / "b")


def test_a_part_that_is_held_by_nobody_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(errors.CoverageError, match="'w'"):
        ray_dcp.save({"w": holding([rows(0, 4)])}, checkpoint_id=tmp_path)


def test_the_wrong_global_shape_is_a_size_mismatch(tmp_path: Path) -> None:
    ray_dcp.save({"w": FULL}, checkpoint_id=tmp_path)
    tensor = marked(torch.zeros(6, 4), (12, 4), [rows(0, 6)], [(0, 0)])
    with pytest.raises(errors.ShapeMismatchError, match=r"\(12, 4\)"):
        ray_dcp.load({"w": tensor}, checkpoint_id=tmp_path)
    assert not tensor.any()


def test_one_attribute_alone_makes_no_part_of_a_tensor(tmp_path: Path) -> None:
    tensor = FULL.clone()
    tensor.global_shape = (99,)
    ray_dcp.save({"w": tensor}, checkpoint_id=tmp_path)
    target = torch.zeros(6, 4)
    target.global_shape = (99,)
    ray_dcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, FULL)


def test_a_tuple_stays_the_object_that_it_is(tmp_path: Path) -> None:
    state = {"w": holding([rows(0, 6)]), "pair": (holding(BY_TWO[0]), 1)}
    ray_dcp.save(state, checkpoint_id=tmp_path)
    target: dict[str, Any] = {"w": empty([rows(0, 6)]), "pair": (empty(BY_TWO[0]), 0)}
    ray_dcp.load(target, checkpoint_id=tmp_path)
    check_holds(target["w"])
    assert type(target["pair"][0]) is torch.Tensor
    assert torch.equal(target["pair"][0], state["pair"][0])
    assert target["pair"][1] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.skipif(hasattr(stock, "CheckpointableTensor"), reason="planners know them since 2.14")
def test_planners_and_storages_that_would_take_a_part_for_the_whole_are_not_given_one(
    tmp_path: Path,
) -> None:
    ray_dcp.save({"w": FULL}, checkpoint_id=tmp_path / "c")
    state = {"w": holding([rows(0, 2), rows(2, 4)])}
    before = state["w"].clone()

    for act in (
        lambda: ray_dcp.save(state, checkpoint_id=tmp_path / "a", planner=OwnSave()),
        lambda: ray_dcp.save(state, storage_writer=OwnWriter(tmp_path / "b"), no_dist=True),
        lambda: ray_dcp.load(state, checkpoint_id=tmp_path / "c", planner=OwnLoad()),
    ):
        with pytest.raises(errors.UnsupportedValueError, match=r"'w' is a part.*2\.14"):
            act()
    assert torch.equal(state["w"], before)
    assert not (tmp_path / "a").exists()


def test_a_part_of_a_parameter_is_stored_as_one(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(FULL.clone())
    state = {"w": marked(parameter, (6, 4), [rows(0, 6)], [(0, 0)]), "v": holding([rows(0, 6)])}
    ray_dcp.save(state, checkpoint_id=tmp_path)
    stored = stock.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    found = {name: item.properties.requires_grad for name, item in stored.items()}
    assert found == {"w": True, "v": False}


@pytest.mark.parametrize("stager", [None, BlockingAsyncStager])
def test_what_is_staged_keeps_its_parts(tmp_path: Path, stager: Any) -> None:
    state = {"m": [{"w": holding([rows(0, 2), rows(2, 4)])}], "note": "a"}
    ray_dcp.async_save(state, checkpoint_id=tmp_path, async_stager=stager and stager()).result()
    assert torch.equal(ray_dcp.read_state_dict(tmp_path)["m"][0]["w"], FULL)


if hasattr(stock, "CheckpointableTensor"):  # from torch 2.14 on

    def with_hooks_saved(state: Any, **how: Any) -> None:
        ray_dcp.save(state, planner=OwnSave(), **how)

    def with_hooks_loaded(state: Any, **how: Any) -> None:
        ray_dcp.load(state, planner=OwnLoad(), **how)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    @pytest.mark.parametrize("saver", [stock.save, ray_dcp.save, with_hooks_saved])
    @pytest.mark.parametrize("loader", [stock.load, ray_dcp.load, with_hooks_loaded])
    def test_files_are_exchanged_with_stock(tmp_path: Path, saver: Any, loader: Any) -> None:
        parts = [rows(0, 2), rows(5, 1), rows(2, 3)]
        saver({"w": holding(parts)}, checkpoint_id=tmp_path, no_dist=True)
        for target in (torch.zeros(6, 4), empty([rows(1, 3)]), empty(BY_THREE[1])):
            loader({"w": target}, checkpoint_id=tmp_path, no_dist=True)
            if hasattr(target, "global_shape"):
                check_holds(target)
            else:
                assert torch.equal(target, FULL)
