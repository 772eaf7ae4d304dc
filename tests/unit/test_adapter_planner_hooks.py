"""Planners of the user's on native storage: hooks run as in DCP, what they give is checked."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

import ray_dcp
from ray_dcp import errors
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.torch_adapter import planner_hooks
from ray_dcp.torch_adapter.foreign import foreign_save
from tests.support.adapter import OwnLookup, group, run
from tests.support.threads import run_as_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "w": torch.arange(12.0).reshape(4, 3) * fill,
        "t": (torch.arange(6.0).reshape(2, 3) * fill).t(),
        "nested": {"b": torch.full((2,), fill, dtype=torch.bfloat16), "name": f"x{fill}"},
        "scalar": torch.tensor(int(fill)),
        "lr": fill,
    }


def zeros() -> dict[str, Any]:
    return state(0.0)


# --- save planners ------------------------------------------------------------------------------


class Transform(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        if write_item.type is WriteItemType.BYTE_IO:
            return super().transform_object(write_item, {"was": object})
        return super().transform_object(write_item, object * 2)


class Lookup(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return found + 1 if isinstance(found, torch.Tensor) else found


class RenamedItems(dcp.DefaultSavePlanner):
    """Renames in the plan, and looks up by the old name."""

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        items = [
            dataclasses.replace(i, index=dataclasses.replace(i.index, fqn=f"new_{i.index.fqn}"))
            for i in plan.items
        ]
        return dataclasses.replace(plan, items=items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(dataclasses.replace(index, fqn=index.fqn[4:]))


class Balancing(dcp.DefaultSavePlanner):
    """DCP's own example of central decisions: deals the items of rank 0 to all ranks."""

    def create_global_plan(self, all_plans: Any) -> Any:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        dealt = [
            [item for item in items if item is not None]
            for items in zip(*zip_longest(*iters), strict=True)
        ]
        plans = [dataclasses.replace(p, items=i) for p, i in zip(all_plans, dealt, strict=True)]
        return super().create_global_plan(plans)


class Finishing(dcp.DefaultSavePlanner):
    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        return dataclasses.replace(super().finish_plan(new_plan), items=new_plan.items[::-1])


SAVE_PLANNERS = [Transform, Lookup, RenamedItems, Balancing, Finishing]


URL = "memory://planner-hooks"


def save_alone(planner: Any, state_dict: Any = None, **options: Any) -> dict[str, Any]:
    """Saves as one process; returns what is found then."""
    values = state() if state_dict is None else state_dict
    options = SaveOptions(**options)
    ray_dcp.save(values, checkpoint_id=URL, planner=planner, no_dist=True, options=options)
    return ray_dcp.read_state_dict(URL)


def save(path: Path, planners: list[Any], states: list[Any]) -> None:
    """Saves with a planner on each rank."""

    def work(rank: int) -> None:
        ray_dcp.save(states[rank], checkpoint_id=path, planner=planners[rank])

    all_of(run_as_ranks(work, len(planners)))


def load(path: Path, state_dict: Any, *planners: Any, others: Any = (), **options: Any) -> Any:
    """Loads with a planner on each rank; returns the report of rank 0."""

    def work(rank: int) -> Any:
        how = {"planner": planners[rank], "options": LoadOptions(**options)}
        return ray_dcp.load([state_dict, *others][rank], checkpoint_id=path, **how)

    return all_of(run_as_ranks(work, len(planners)))[0]


def all_of(ended: list[Any]) -> list[Any]:
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return ended


def test_lowest_rank_wins_where_the_planner_wants_it(tmp_path):
    planners = [Transform(dedup_save_to_lowest_rank=True) for _ in range(3)]
    save(tmp_path / "c", planners, [state()] * 3)
    assert [path.name[:5] for path in (tmp_path / "c").glob("*.distcp")] == ["__0_0"]
    save(tmp_path / "alone", [Transform()], [state()])
    assert everything(tmp_path / "c") == everything(tmp_path / "alone")


@pytest.mark.parametrize("planner", [Lookup, Finishing])
def test_objects_with_a_part_of_a_sharded_tensor_are_refused(planner, tmp_path):
    def part(rank: int) -> dict[str, Any]:
        tensor: Any = torch.ones(2)
        tensor.global_shape, tensor.global_offsets = (4,), ((2 * rank,),)
        tensor.local_offsets, tensor.local_sizes = ((0,),), ((2,),)
        return {"held": (tensor, 1)}

    with pytest.raises(errors.UnsupportedValueError, match=r"'held'.*is sharded"):
        save(tmp_path / "c", [planner(), planner()], [part(0), part(1)])
    assert isinstance(save_alone(planner(), part(0))["held"], tuple)


class Shards(dcp.DefaultSavePlanner):
    """Plans `s` as this rank's rows."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def create_local_plan(self) -> dcp.SavePlan:
        return dcp.SavePlan(
            [
                dcp.WriteItem(
                    MetadataIndex("s", (2 * self.rank, 0)),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size((2 * self.rank, 0)), torch.Size((2, 3))),
                        TensorProperties(torch.float32, requires_grad=True),
                        torch.Size((2 * self.world_size, 3)),
                    ),
                )
            ],
            planner_data=self.mappings,
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict["s"]


def test_hooks_run_in_every_save(tmp_path):
    wanted = ["a"]

    class Choosing(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> dcp.SavePlan:
            plan = super().create_local_plan()
            items = [item for item in plan.items if item.index.fqn in wanted]
            return dataclasses.replace(plan, items=items)

    for number, name in enumerate("aaab"):
        wanted[:] = [name]
        both = {"a": torch.ones(2), "b": torch.ones(3)}
        path = tmp_path / f"step-{number}"
        ray_dcp.save(both, checkpoint_id=path, planner=Choosing(), no_dist=True)
        assert list(ray_dcp.read_state_dict(path)) == [name]


def test_what_is_not_kept_is_resolved_again(monkeypatch):
    monkeypatch.setattr(planner_hooks, "KEPT_BYTES", 0)
    asked: list[str] = []

    class Asked(Transform):
        def resolve_data(self, write_item: Any) -> Any:
            asked.append(write_item.index.fqn)
            return super().resolve_data(write_item)

    assert save_alone(Asked(), {"a": torch.ones(3)})["a"].tolist() == [2.0, 2.0, 2.0]
    assert asked == ["a", "a"]


# --- planners that do not say the truth ---------------------------------------------------------


WEIGHT = torch.ones(4, 3)


class Gives(dcp.DefaultSavePlanner):
    """Resolves something else than it plans."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        return self.change(super().transform_object(write_item, object))


class NoTensorData(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        items = [dataclasses.replace(i, tensor_data=None) for i in plan.items]
        return dataclasses.replace(plan, items=items)


class OtherRank(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            item.tensor_data.chunk.offsets = torch.Size((0,))
        return plan


@pytest.mark.parametrize(
    ("planner_class", "value", "message"),
    [
        (lambda: Gives(torch.flatten), WEIGHT, r"Gives.resolve_data gave torch.float32 of shape "
                                               r"\(12,\) for 'w'.*float32 of shape \(4, 3\)"),
        (lambda: Gives(torch.Tensor.double), WEIGHT, r"gave torch.float64 .* for 'w'"),
        (lambda: Gives(lambda _: b""), WEIGHT, r"gave bytes for 'w'"),
        (lambda: Gives(lambda _: b""), 3, r"gave bytes for 'w'.*io.BytesIO"),
        (NoTensorData, WEIGHT, r"NoTensorData planned 'w' as TENSOR without tensor_data"),
        (OtherRank, WEIGHT, r"OtherRank planned 'w' with a chunk at \(0,\).* 2 dimensions"),
    ],
)  # fmt: skip
def test_a_planner_that_resolves_something_else_is_named_with_the_fqn(
    planner_class, value, message
):
    with pytest.raises(errors.StateDictError, match=message) as raised:
        save_alone(planner_class(), {"w": value})
    assert raised.value.key == "w"
    assert raised.value.rank == 0


class JsonSave(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return object


@pytest.mark.filterwarnings("ignore:.*storage_meta")
@pytest.mark.parametrize("hook", ["set_up_planner", "create_local_plan", "resolve_data"])
def test_an_error_of_a_hook_names_planner_hook_and_cause(hook):
    error = ZeroDivisionError("oops")

    class Broken(dcp.DefaultSavePlanner):
        pass

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    setattr(Broken, hook, fail)
    with pytest.raises(errors.CheckpointError, match=rf"Broken.{hook}.*oops") as raised:
        save_alone(Broken(), {"a": 1})
    assert raised.value.failures[0][0] is error


class Changing(dcp.DefaultSavePlanner):
    """Changes what it says of all ranks."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        self.change(metadata)
        return plans, metadata


@pytest.mark.parametrize(
    ("change", "what"),
    [
        # The first is DCP's own example of saving additional metadata.
        (lambda m: setattr(m, "planner_data", ["per-rank-data"]), "planner_data of type list"),
        (lambda m: setattr(m, "mcore_data", {}), "an attribute 'mcore_data'"),
        (
            lambda m: m.state_dict_metadata.update(ghost=BytesStorageMetadata()),
            "'ghost', which no rank has planned",
        ),
        (lambda m: m.state_dict_metadata.pop("w"), "nothing about 'w'"),
        (
            lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size((12,))),
            "'w' with another shape",
        ),
    ],
)
def test_metadata_that_a_native_checkpoint_cannot_hold_is_refused_with_the_way_out(change, what):
    with pytest.raises(errors.InvalidRequestError, match=r"subclass of FileSystemWriter") as raised:
        save_alone(Changing(change))
    assert what in str(raised.value)


# --- load planners ------------------------------------------------------------------------------


class LoadLookup(dcp.DefaultLoadPlanner):
    """Loads into clones, and only `commit_tensor` brings them home."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return super().lookup_tensor(index).clone()

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        home = super().lookup_tensor(read_item.dest_index)
        for dim, (low, n) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            home = home.narrow(dim, low, n)
        home.copy_(tensor)


class LoadTransform(dcp.DefaultLoadPlanner):
    """Loads into a temporary of another dtype and layout, and doubles it on commit."""

    def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
        self.home = super().transform_tensor(read_item, tensor)
        return torch.empty(tuple(self.home.shape)[::-1], dtype=torch.float64).permute(
            tuple(range(self.home.dim()))[::-1]
        )

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float64
        home = self.lookup_tensor(read_item.dest_index)
        super().transform_tensor(read_item, home).copy_(tensor * 2)


class LoadBytes(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        assert value.tell() == 0
        super().load_bytes(read_item, value)
        self.loaded = [*getattr(self, "loaded", []), read_item.dest_index.fqn]


class LoadGlobal(dcp.DefaultLoadPlanner):
    """Rank 0 takes the objects from every plan but its own."""

    def create_global_plan(self, global_plan: Any) -> Any:
        for plan in global_plan[1:]:
            plan.items = [i for i in plan.items if i.type is dcp.planner.LoadItemType.TENSOR]
        return super().create_global_plan(global_plan)


LOAD_PLANNERS = [LoadLookup, LoadTransform, LoadBytes, LoadGlobal]


@pytest.fixture
def checkpoint(tmp_path):
    dcp.save(state(3.0), checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def flat(state_dict: Any) -> dict[str, Any]:
    found, _ = torch.distributed.checkpoint._nested_dict.flatten_state_dict(state_dict)
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def everything(path: Path) -> dict[str, Any]:
    """Returns all that stock DCP finds in a checkpoint."""
    found: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        found, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return flat(found)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("planner_class", SAVE_PLANNERS)
def test_stock_dcp_loads_what_a_planner_made_of_a_save(planner_class, world_size, tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "stock", planner=planner_class(), no_dist=True)
    planners = [planner_class() for _ in range(world_size)]
    save(tmp_path / "ours", planners, [state()] * world_size)
    assert everything(tmp_path / "ours") == everything(tmp_path / "stock")


@pytest.mark.parametrize("saved_by", ["stock", "ours"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("planner_class", LOAD_PLANNERS)
def test_a_load_planner_loads_what_it_makes_stock_dcp_load(
    planner_class, world_size, saved_by, tmp_path
):
    if saved_by == "stock":
        dcp.save(state(3.0), checkpoint_id=tmp_path, planner=Lookup(), no_dist=True)
    else:
        save(tmp_path, [Lookup(), Lookup()], [state(3.0), state(3.0)])
    by_stock, by_us = zeros(), [zeros() for _ in range(world_size)]
    dcp.load(by_stock, checkpoint_id=tmp_path, planner=planner_class(), no_dist=True)
    home = by_us[0]["w"]
    dtype = "cast" if planner_class is LoadTransform else "widen"
    planners = [planner_class() for _ in range(world_size)]
    targets = load(tmp_path, by_us[0], *planners, others=by_us[1:], dtype=dtype)
    assert flat(by_us[0]) == flat(by_stock)
    assert flat(by_us[0]) != flat(zeros())
    assert by_us[0]["w"] is home
    assert set(targets.loaded) == set(flat(by_us[0]))
    assert targets.missing == targets.unexpected == ()
    if world_size == 2:
        assert by_us[1]["lr"] == (0.0 if planner_class is LoadGlobal else by_stock["lr"])
        assert torch.equal(by_us[1]["w"], by_stock["w"])


@pytest.mark.parametrize("writer", [dcp, ray_dcp], ids=["stock", "ours"])
def test_objects_come_under_keys_that_are_no_texts(writer, tmp_path):
    def layers(fill: int) -> dict[str, Any]:
        return {
            "layers": {
                0: {"lr": fill, 7: "x" * fill}, -1: fill, "a": [{3: fill}, torch.ones(1)],
                True: fill, 2.5: fill, "w": torch.full((2,), fill),
            }
        }  # fmt: skip

    writer.save(layers(3), checkpoint_id=tmp_path, no_dist=True)
    found = layers(0)
    ray_dcp.load(found, checkpoint_id=tmp_path, no_dist=True, planner=OwnLookup())
    assert found["layers"].pop("w").tolist() == [3, 3]
    assert str(found) == str({"layers": {k: v for k, v in layers(3)["layers"].items() if k != "w"}})


@pytest.mark.parametrize("key", ["config", 5])
def test_objects_come_back_without_flattening_too(key, tmp_path):
    state = {"w": torch.ones(2), key: {"lr": 0.5}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    ray_dcp.save(state, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    found = {"w": torch.zeros(2), key: None}
    planner = OwnLookup(flatten_state_dict=False)
    ray_dcp.load(found, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    assert found[key] == {"lr": 0.5}
    assert found["w"].tolist() == [1, 1]
    assert list(found) == ["w", key]


def test_no_two_hooks_of_a_load_planner_run_at_a_time(tmp_path):
    many = {f"w{i}": torch.full((1 << 12,), float(i)) for i in range(40)}
    dcp.save(many, checkpoint_id=tmp_path, no_dist=True)
    inside: list[int] = []

    class Careful(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return self._alone(super().resolve_tensor, read_item)

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            self._alone(super().commit_tensor, read_item, tensor)

        def _alone(self, hook: Any, *args: Any) -> Any:
            assert inside == []
            inside.append(1)
            os.sched_yield()
            inside.clear()
            return hook(*args)

    into = {name: torch.zeros_like(value) for name, value in many.items()}
    load(tmp_path, into, Careful(), num_threads=8)
    assert all(torch.equal(into[name], value) for name, value in many.items())


class Middle(dcp.DefaultLoadPlanner):
    """Wants rows 1 to 5 of the six, as one destination."""

    def create_local_plan(self) -> dcp.LoadPlan:
        box = ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((4, 3)))
        return dcp.LoadPlan(
            dcp.planner_helpers.create_read_items_for_chunk_list(
                "s", self.metadata.state_dict_metadata["s"], [box]
            )
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict["s"]


class Subclassed(torch.Tensor):
    pass


class TwoBoxes:
    """A target of two boxes of another dtype, by DCP's protocol."""

    dtype = torch.float64

    def __init__(self) -> None:
        self.halves = [torch.zeros(3, 3, dtype=torch.float64) for _ in range(2)]

    def size(self) -> torch.Size:
        return torch.Size((6, 3))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((o, 0)), torch.Size((3, 3))) for o in (0, 3)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.halves[index.index or 0]


@pytest.mark.parametrize(
    ("saved_by", "subclassed"),
    [("stock", ()), ("stock", (0,)), ("stock", (0, 1, 2)), ("ours", ()), ("ours", (0, 1, 2))],
)
def test_shards_load_as_one_tensor_plain_ones_and_those_that_pickle(saved_by, subclassed, tmp_path):
    shards = [torch.full((2, 3), float(rank)) for rank in range(3)]
    parts = [s.as_subclass(Subclassed) if i in subclassed else s for i, s in enumerate(shards)]
    states = [{"s": part} for part in parts]
    if saved_by == "ours":
        save(tmp_path, [Shards(rank, 3) for rank in range(3)], states)
    else:
        steps = [
            foreign_save(
                group(rank, 3), states[rank], dcp.FileSystemWriter(tmp_path), Shards(rank, 3)
            )
            for rank in range(3)
        ]
        assert all(end.error is None for end in run(steps))
    with torch.serialization.safe_globals([Subclassed]):
        whole, middle, native = torch.zeros(6, 3), torch.zeros(4, 3), torch.zeros(6, 3)
        load(tmp_path, {"s": whole}, LoadLookup())
        load(tmp_path, {"s": middle}, Middle())
        ray_dcp.load({"s": native}, checkpoint_id=tmp_path, no_dist=True)
        ray_dcp.load({"s": (two := TwoBoxes())}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(torch.cat(two.halves), native.double())
    assert whole[:, 0].tolist() == native[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert middle[:, 0].tolist() == [0.0, 1.0, 1.0, 2.0]


# --- what a load planner may not do -------------------------------------------------------------


def test_a_missing_key_is_told_as_such_before_anything_is_touched(checkpoint):
    target = {**zeros(), "more": torch.zeros(1)}
    with pytest.raises(errors.MissingKeyError, match="more") as raised:
        load(checkpoint, target, LoadBytes())
    assert isinstance(raised.value.failures[0][0], RuntimeError)
    assert not target["w"].any()
    targets = load(checkpoint, target, LoadBytes(allow_partial_load=True))
    assert targets.missing == ("more",)


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        (lambda: {"w": torch.zeros(3, 4)}, {}, errors.ShapeMismatchError, "w"),
        (
            lambda: {"w": torch.zeros(4, 3)},
            {"strict": True},
            errors.StateDictError,
            "does not ask for",
        ),
        (
            lambda: {"w": torch.zeros(4, 3).half()},
            {},
            errors.ShapeMismatchError,
            r"'w' is saved as float32 and wanted as float16",
        ),
        (
            lambda: {"lr": 0, "t": torch.zeros(3, 2).double()},
            {"dtype": "error"},
            errors.ShapeMismatchError,
            "'t'",
        ),
    ],
)
@pytest.mark.parametrize("planner_class", [LoadBytes, LoadLookup])
def test_the_rules_of_every_load_hold_with_a_planner(
    planner_class, target, options, error, message, checkpoint
):
    with pytest.raises(error, match=message):
        load(checkpoint, target(), planner_class(), **options)


def test_what_a_planner_loads_is_cast_and_reported_as_in_every_load(checkpoint):
    target = {"nested": {"b": torch.zeros(2)}}
    targets = load(checkpoint, target, LoadBytes())
    assert targets.cast == (("nested.b", "bfloat16", "float32"),)
    assert target["nested"]["b"].tolist() == [3.0, 3.0]
    assert set(targets.unexpected) == {"w", "t", "nested.name", "scalar", "lr"}
    narrow = {"w": torch.zeros(4, 3, dtype=torch.float16)}
    load(checkpoint, narrow, LoadLookup(), dtype="cast")
    assert narrow["w"].tolist() == state(3.0)["w"].tolist()


def test_a_target_of_another_shape_than_planned_is_refused(checkpoint):
    class Wrong(dcp.DefaultLoadPlanner):
        def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.reshape(-1)

    with pytest.raises(
        errors.ShapeMismatchError, match=r"Wrong planned to read \(4, 3\).*'w'.*\(12,\)"
    ):
        load(checkpoint, {"w": torch.zeros(4, 3)}, Wrong())


class Wild(dcp.DefaultLoadPlanner):
    """Changes the first read item."""

    def __init__(self, **change: Any) -> None:
        super().__init__()
        self.change = change

    def create_local_plan(self) -> dcp.LoadPlan:
        plan = super().create_local_plan()
        return dcp.LoadPlan([dataclasses.replace(plan.items[0], **self.change)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage_index": MetadataIndex("ghost", (0, 0))}, "'ghost', which the checkpoint"),
        ({"storage_index": MetadataIndex("lr")}, "'lr' as TENSOR, but it is stored as an object"),
        ({"storage_offsets": torch.Size((3, 0))}, r"\(3, 0\) of \(4, 3\).*shape \(4, 3\)"),
        ({"lengths": torch.Size((4,))}, "stored with 2 dimensions"),
    ],
)
def test_a_read_item_outside_of_the_checkpoint_names_planner_and_fqn(change, message, checkpoint):
    with pytest.raises(errors.StateDictError, match=rf"Wild planned to read .*{message}"):
        load(checkpoint, {"w": torch.zeros(4, 3)}, Wild(**change))


def test_a_checkpoint_with_a_chunk_lost_is_not_loaded_in_part(checkpoint):
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks.clear()
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "w"}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(errors.CoverageError, match="lacks parts of 'w'"):
        load(checkpoint, zeros(), LoadBytes())
    target = zeros()
    with pytest.raises(errors.CoverageError, match=r"'w' \(48 bytes\); nothing was changed"):
        ray_dcp.load(target, checkpoint_id=checkpoint, no_dist=True)
    assert not target["t"].any()


class JsonLoad(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = json.loads(value.getvalue())


def test_bytes_of_a_planners_own_format_need_the_users_trust(tmp_path):
    with pytest.raises(errors.UnsupportedValueError, match="'o'"):
        save_alone(JsonSave(), {"o": 3}, objects="refuse")
    with pytest.warns(UserWarning, match="a safe load will refuse it: .*'o'"):
        save(tmp_path, [JsonSave()], [{"o": [1, 2]}])
    target = {"o": 0}
    with pytest.raises(errors.UnsafeCheckpointError, match=r"JsonLoad\.load_bytes"):
        load(tmp_path, target, JsonLoad())
    with pytest.raises(errors.DamagedCheckpointError) as raised:
        load(tmp_path, target, LoadLookup())
    assert not isinstance(raised.value, errors.UnsafeCheckpointError)
    ray_dcp.load(
        target, checkpoint_id=tmp_path, no_dist=True, planner=JsonLoad(),
        options=LoadOptions(weights_only=False),
    )  # fmt: skip
    assert target["o"] == [1, 2]
