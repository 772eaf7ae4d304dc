"""Planners that declare themselves pure are asked again only when something changed."""

import dataclasses
from collections import Counter, OrderedDict
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ray_dcp
from ray_dcp.errors import CheckpointError, InvalidRequestError, StateDictError
from ray_dcp.options import SaveOptions
from ray_dcp.seam import pure_planners
from ray_dcp.seam.planner_hooks import capture_with_planner
from ray_dcp.seam.pure_planners import is_declared_pure, settings_digest, structure_digest
from ray_dcp.seam.spmd import SPMDSavePlanner
from tests.unit.seam_ranks import keys, run
from tests.unit.seam_support import as_rank

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ran: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    ran.clear()
    monkeypatch.setattr(pure_planners, "_memory", pure_planners._Memory())
    monkeypatch.setattr(pure_planners, "_liars", type(pure_planners._liars)())


class _Noted(dcp.DefaultSavePlanner):
    """Notes which hooks run. Plans only what does not begin with what it skips."""

    def __init__(self, skipped: str = "-", **flags: Any) -> None:
        super().__init__(**flags)
        self.skipped = skipped

    def create_local_plan(self) -> SavePlan:
        ran["create_local_plan"] += 1
        plan = super().create_local_plan()
        items = [item for item in plan.items if not item.index.fqn.startswith(self.skipped)]
        return dataclasses.replace(plan, items=items)


class Undeclared(_Noted):
    pass


class Local(_Noted):
    def plan_settings(self) -> Any:
        return self.skipped


class Global(Local):
    def plan_settings(self) -> Any:
        return {"skipped": self.skipped}

    def create_global_plan(self, all_plans: Any) -> Any:
        ran["create_global_plan"] += 1
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        ran["finish_plan"] += 1
        return super().finish_plan(new_plan)


class Inheriting(Local):
    """Overrides a hook and does not say that the plan still follows from the settings."""

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()


def state(fill: float = 1.0, **changed: Any) -> dict[str, Any]:
    tensors = {"w": torch.full((4, 3), fill), "b": torch.full((2,), fill)}
    inner = {"x": torch.full((2,), fill)}
    return {**tensors, "lr": fill, "note": f"{fill}", "inner": inner, **changed}


def captures(planners: list[Any], states: list[Any]) -> list[Any]:
    return run(
        [
            capture_with_planner(
                keys(), states[rank], planner,
                rank=rank, world_size=len(planners), options=SaveOptions(),
            )
            for rank, planner in enumerate(planners)
        ]
    )  # fmt: skip


def saved(kind: type, fills: Any, world: int = 1, **settings: Any) -> list[list[Any]]:
    """Captures again and again, each time with new planners; returns what each capture holds."""
    found = []
    for fill in fills:
        states = [state(fill) for _ in range(world)]
        ends = captures([kind(**settings) for _ in range(world)], states)
        found.append([contents(end.get()) for end in ends])
    return found


def contents(captured: Any) -> dict[str, bytes]:
    columns = captured.columns
    return {
        columns.names[columns.name[row]]: bytes(
            captured.source(row) if columns.kind[row] == 0 else captured.deferred(row)
        )
        for row in range(len(columns))
    }


@pytest.mark.parametrize(("kind", "world"), [(Local, 1), (Local, 2), (Global, 1), (Global, 3)])
def test_hooks_run_when_something_changed_and_now_and_then(kind, world):
    fills = range(1, 18)
    pure = saved(kind, fills, world)
    # The 1st, 2nd, 4th, 8th and 16th time.
    assert ran["create_local_plan"] == 5 * world
    assert ran["create_global_plan"] == (5 if kind is Global else 0)
    assert ran["finish_plan"] == (5 * world if kind is Global else 0)
    # What is saved is what would have been.
    undeclared = type("Same", (kind,), {})
    assert pure == saved(undeclared, fills, world)
    assert ran["create_local_plan"] == (5 + 17) * world


@pytest.mark.parametrize("kind", [Undeclared, Inheriting])
def test_who_does_not_declare_it_himself_is_asked_each_time(kind):
    assert not is_declared_pure(kind())
    saved(kind, range(5))
    assert ran["create_local_plan"] == 5


def test_a_hook_that_was_replaced_in_the_object_is_asked_each_time():
    planner = Local()
    assert is_declared_pure(planner)
    planner.create_local_plan = lambda: Local.create_local_plan(planner)
    assert not is_declared_pure(planner)
    for fill in range(4):
        captures([planner], [state(fill)])[0].get()
    assert ran["create_local_plan"] == 4


CHANGES = {
    "dtype": lambda found: found | {"w": found["w"].double()},
    "shape": lambda found: found | {"w": found["w"][:3]},
    "stride": lambda found: found | {"w": found["w"].t().contiguous().t()},
    "grad": lambda found: found | {"w": found["w"].requires_grad_()},
    "more": lambda found: found | {"more": torch.ones(1)},
    "less": lambda found: {name: one for name, one in found.items() if name != "b"},
    "name": lambda found: {f"{name}_": one for name, one in found.items()},
    "order": lambda found: dict(reversed(found.items())),
    "kind of object": lambda found: found | {"lr": 1},
    "container": lambda found: found | {"lr": [torch.ones(1)]},
    "kind of container": lambda found: found | {"inner": OrderedDict(found["inner"])},
    "nesting": lambda found: {"inner": found},
    "parameter": lambda found: found | {"w": torch.nn.Parameter(found["w"])},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [Local, Global])
def test_a_change_on_one_rank_has_the_hooks_run_again(kind, change):
    for _ in range(4):
        captures([kind(), kind()], [state(), state()])
    before = Counter(ran)
    ends = captures([kind(), kind()], [state(), CHANGES[change](state())])
    [end.get() for end in ends]
    # Who decides alone is asked alone; who decides together needs the plans of all.
    asked = 2 if kind is Global else 1
    assert ran["create_local_plan"] - before["create_local_plan"] == asked


def test_the_content_of_nothing_counts():
    other = state(5.0, note="another, longer text", lr=-1.0)
    assert structure_digest(state()) == structure_digest(other)
    for change in CHANGES.values():
        assert structure_digest(state()) != structure_digest(change(state()))


def test_settings_and_flags_count():
    names = {
        settings_digest(planner)
        for planner in (
            Local(), Local("w"), Local(flatten_state_dict=False),
            Local(flatten_sharded_tensors=False), Local(dedup_save_to_lowest_rank=True), Global(),
        )
    }  # fmt: skip
    assert len(names) == 6
    saved(Local, range(3))
    before = ran["create_local_plan"]
    assert "w" not in saved(Local, [1], skipped="w")[0][0]
    assert ran["create_local_plan"] == before + 1


class Sized(int):
    def __repr__(self) -> str:
        return "a size"


class Sort(Enum):
    SAME = 1
    OTHER = 2

    def __repr__(self) -> str:
        return "a sort"


def test_settings_are_told_apart_by_value_and_type():
    values = [
        0, False, 0.0, "0", b"0", None, (), (0,), [0], [0, 0], [[0], 0], {"a": 0}, {"a": "0"}, {0},
        torch.float32, torch.int32, Sort.SAME, Sort.OTHER, Sized(1), Sized(2),
    ]  # fmt: skip
    planner = Local()
    names = set()
    for value in values:
        planner.skipped = value
        names.add(settings_digest(planner))
    assert len(names) == len(values)


@pytest.mark.parametrize("wrong", [object(), torch.ones(1), [lambda: 0], {"a": {1: object()}}])
@pytest.mark.parametrize("world", [1, 2])
def test_settings_that_are_no_plain_values_are_refused_on_all_ranks(wrong, world):
    class Odd(Global):
        def plan_settings(self) -> Any:
            return wrong

    for end in captures([Odd() for _ in range(world)], [state()] * world):
        assert isinstance(end.error, CheckpointError)
        assert "plan_settings must return" in str(end.error)


def test_an_error_in_plan_settings_is_the_planners():
    class Failing(Local):
        def plan_settings(self) -> Any:
            raise RuntimeError("no settings today")

    (end,) = captures([Failing()], [state()])
    assert isinstance(end.error, CheckpointError)
    assert "no settings today" in str(end.error)


class Lying(Local):
    """Skips something only in some saves, which depends on what it does not tell."""

    number = 0

    def plan_settings(self) -> Any:
        return None

    def create_local_plan(self) -> SavePlan:
        self.skipped = "w" if Lying.number % 2 else "-"
        Lying.number += 1
        return super().create_local_plan()


def test_a_planner_that_lies_is_found_out_and_asked_each_time():
    Lying.number = 0
    first = captures([Lying()], [state()])[0].get()
    second = captures([Lying()], [state()])[0].get()
    assert first.warnings == ()
    assert "Lying.plan_settings says" in second.warnings[0]
    # What is saved is what it wants now.
    assert [sorted(contents(one)) for one in (first, second)] == [
        ["b", "inner.x", "lr", "note", "w"], ["b", "inner.x", "lr", "note"],
    ]  # fmt: skip
    for _ in range(6):
        assert captures([Lying()], [state()])[0].get().warnings == ()
    assert ran["create_local_plan"] == 8


def test_what_no_longer_fits_its_plan_is_no_silent_lie():
    class Growing(Local):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            found = super().transform_object(write_item, object)
            return torch.cat([found, found]) if Growing.grows and found is not None else found

        def plan_settings(self) -> Any:
            return None

    Growing.grows = False
    tensors = {"w": torch.ones(3)}
    for _ in range(2):
        captures([Growing()], [tensors])[0].get()
    Growing.grows = True
    (end,) = captures([Growing()], [tensors])
    assert isinstance(end.error, StateDictError)


def test_placements_and_meshes_count():
    def placed(mesh, placements):
        local = torch.ones(2, 2)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
        )

    with as_rank(1, 4):
        rows = DeviceMesh("cpu", [[0, 1], [2, 3]])
        columns = DeviceMesh("cpu", [[0, 2], [1, 3]])
        one, other = (Shard(0), Shard(1)), (Shard(1), Shard(0))
        states = [{"w": placed(mesh, how)} for mesh in (rows, columns) for how in (one, other)]
        # All have the same shapes, globally and here.
        assert len({structure_digest(each) for each in states}) == 4
        assert structure_digest(states[0]) == structure_digest({"w": placed(rows, one) * 2})


def test_a_rank_that_started_anew_has_all_asked_again():
    for fill in range(4):
        captures([Global(), Global()], [state(float(fill)), state(float(fill))])
    known = pure_planners._memory._known
    for key in [key for key in known if key[0][1] == 1]:
        del known[key]
    before = ran["create_local_plan"]
    ends = captures([Global(), Global()], [state(9.0), state(9.0)])
    assert contents(ends[0].get()) | contents(ends[1].get()) == contents(capture_alone(9.0))
    assert ran["create_local_plan"] - before == 2 + 1


def capture_alone(fill):
    return captures([type("Same", (Local,), {})()], [state(fill)])[0].get()


class Mine(torch.Tensor):
    pass


class WritesItself:
    """Torch would ask it for its items; nobody else knows where they lie."""

    def __init__(self, name: str) -> None:
        setattr(self, name, lambda: None)


@pytest.mark.parametrize(
    "name", ["__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"]
)
def test_objects_that_stand_for_tensors_have_the_hooks_run_each_time(name):
    assert structure_digest({"w": WritesItself(name)}) == b""
    assert structure_digest({"w": WritesItself("other")}) != b""


class Computing(Local):
    """Knows what it skips only when it is set up: what the state says."""

    def plan_settings(self) -> Any:
        return self.skipped

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.skipped = "w" if float(state_dict["b"][0]) > 2 else "-"
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_settings_count_as_they_are_when_the_planner_is_set_up():
    planner = Computing()
    found = []
    # Without the change the third save would be one that runs no hooks.
    for fill in (1.0, 1.0, 3.0, 1.0):
        found.append("w" in contents(captures([planner], [state(fill)])[0].get()))
    assert found == [True, True, False, True]


def test_a_plan_that_was_offered_is_there_even_if_others_push_it_out(monkeypatch):
    saved(Global, range(2), world=2)
    offer, offers = pure_planners.PurePlans.offer, []

    def offered(pure: Any) -> Any:
        offers.append(offer(pure))
        if len(offers) == 2:
            pure_planners._memory._known.clear()
        return offers[-1]

    monkeypatch.setattr(pure_planners.PurePlans, "offer", offered)
    before = ran["create_local_plan"]
    assert all(one for one in saved(Global, [7], world=2)[0])
    assert ran["create_local_plan"] == before


def test_tensors_that_are_pinned_are_others(monkeypatch):
    plain = structure_digest(state())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert structure_digest(state()) != plain


def test_tensors_of_unknown_classes_have_the_hooks_run_each_time():
    odd = {"w": torch.ones(2).as_subclass(Mine)}
    assert structure_digest(odd) == b""
    for _ in range(4):
        captures([Local()], [odd])[0].get()
    assert ran["create_local_plan"] == 4
    for _ in range(4):
        [end.get() for end in captures([Global(), Global()], [odd, odd])]
    assert ran["create_local_plan"] == 4 + 8


def test_only_so_many_plans_are_kept(monkeypatch):
    monkeypatch.setattr(pure_planners, "MOST_PLANS", 1)
    saved(Local, range(3))
    saved(Local, [1], skipped="w")
    before = ran["create_local_plan"]
    saved(Local, [1])
    assert ran["create_local_plan"] == before + 1


def test_planners_of_ray_dcp_are_pure_and_torchs_own_run_no_hooks():
    assert is_declared_pure(SPMDSavePlanner())
    assert SPMDSavePlanner().plan_settings() == ()
    assert not is_declared_pure(dcp.DefaultSavePlanner())


def test_saves_by_a_pure_planner_load(tmp_path):
    for number in range(4):
        value = state(float(number))
        ray_dcp.save(value, checkpoint_id=tmp_path / f"step-{number}", planner=Local("note"))
        target = state(-1.0)
        del target["note"]
        ray_dcp.load(target, checkpoint_id=tmp_path / f"step-{number}")
        assert torch.equal(target["w"], value["w"])
        assert target["lr"] == number
    assert ran["create_local_plan"] == 3


def test_an_error_that_is_told_names_the_setting():
    planner = Local()
    planner.skipped = object()
    with pytest.raises(InvalidRequestError) as caught:
        settings_digest(planner)
    assert caught.value.key == "plan_settings"
