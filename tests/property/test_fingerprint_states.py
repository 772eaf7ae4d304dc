"""What a change of a state dict on one rank does to its fingerprint: all of it, item by item.

A plan is made of the ranks' columns, without any content, and of a few options. So a fingerprint is
sound when it is equal only for equal columns under options that lead to the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ray_dcp.core.columns import encode
from ray_dcp.core.values import Columns, IntKey
from ray_dcp.options import SaveOptions
from ray_dcp.planning import fingerprint as fingerprint_module
from ray_dcp.planning.fingerprint import fingerprint, plan_key
from ray_dcp.planning.merge import without_contents
from ray_dcp.protocol.commands import MakePlan, Planned
from ray_dcp.protocol.messages import OpKey, Target
from ray_dcp.protocol.planning import PlanCache, Planning
from ray_dcp.runtime.tasks import perform
from ray_dcp.torch_adapter.capture import capture
from tests.crash.array_states import ArrayCapture, sample_state
from tests.rank_saves import join_save
from tests.unit.adapter_support import as_rank

WORLD = 4
OPTIONS = {"world_size": WORLD, "container": "torch_save", "part_bytes": 1 << 20}
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


class Wrapped(torch.Tensor):
    """Pickles as itself: a deferred item."""


@dataclass(frozen=True)
class Leaf:
    """One value of a state, as it is built on a rank."""

    kind: str
    shape: tuple[int, ...] = (8, 4)
    dtype: torch.dtype = torch.float32
    mesh: tuple[int, ...] = (WORLD,)
    placements: tuple[int | None, ...] = (0,)
    strided: bool = False
    grad: bool = False
    content: int = 1

    def build(self) -> Any:
        if self.kind == "object":
            return self.content
        if self.kind == "dtensor":
            mesh = init_device_mesh("cpu", self.mesh)
            placed = [Replicate() if dim is None else Shard(dim) for dim in self.placements]
            size, _ = compute_local_shape_and_global_offset(self.shape, mesh, placed)
            local = torch.full(size, self.content, dtype=self.dtype)
            return DTensor.from_local(
                local, mesh, placed, shape=torch.Size(self.shape),
                stride=torch.empty(self.shape, device="meta").stride(), run_check=False,
            )  # fmt: skip
        found = torch.full(self.shape, self.content, dtype=self.dtype)
        found = found.t().contiguous().t() if self.strided else found
        found = found.requires_grad_(self.grad and found.is_floating_point())
        return found.detach().as_subclass(Wrapped) if self.kind == "deferred" else found


leaves = st.builds(
    Leaf,
    kind=st.sampled_from(["dtensor", "plain", "object", "deferred"]),
    shape=st.sampled_from([(8, 4), (6, 4), (4, 8), (3, 5)]),
    dtype=st.sampled_from(DTYPES),
    mesh=st.just((WORLD,)),
    placements=st.sampled_from([(0,), (1,), (None,)]),
)
states = st.dictionaries(st.sampled_from(["a", "b", "c"]), leaves, min_size=1)


def captured(state: dict[str, Any], rank: int) -> Columns:
    with as_rank(rank, WORLD):
        built = {
            name: leaf.build()
            if isinstance(leaf, Leaf)
            else {k: v.build() for k, v in leaf.items()}
            for name, leaf in state.items()
        }
        return capture(built, rank=rank, world_size=WORLD).columns


def tensor_leaf(leaf: Leaf) -> bool:
    return leaf.kind in ("dtensor", "plain", "deferred")


def changed(leaf: Leaf, what: str) -> Any:
    """Returns what a leaf becomes; itself where that can't be changed of it."""
    match what:
        case "dtype" if tensor_leaf(leaf):
            return replace(leaf, dtype=DTYPES[(DTYPES.index(leaf.dtype) + 1) % len(DTYPES)])
        case "shape" if tensor_leaf(leaf):
            return replace(leaf, shape=(leaf.shape[0] + 4, leaf.shape[1]))
        case "placement" if leaf.kind == "dtensor":
            order = ((0,), (1,), (None,))
            return replace(leaf, placements=order[(order.index(leaf.placements) + 1) % 3])
        case "mesh" if leaf.kind == "dtensor":
            return replace(leaf, mesh=(2, 2), placements=(leaf.placements[0], None))
        case "fixed or deferred" if leaf.kind in ("plain", "deferred"):
            return replace(leaf, kind="plain" if leaf.kind == "deferred" else "deferred")
        case "replica class" if leaf.kind == "plain":
            return replace(leaf, kind="dtensor", placements=(None,))
        case "object or tensor":
            return replace(leaf, kind="object" if leaf.kind != "object" else "plain")
        case "object structure" if leaf.kind == "object":
            return {"x": leaf, "y": leaf}
        case "grad" if leaf.kind == "plain" and leaf.dtype.is_floating_point:
            return replace(leaf, grad=not leaf.grad)
    return leaf


KINDS = (
    "dtype", "shape", "placement", "mesh", "fixed or deferred", "replica class", "object or tensor",
    "object structure", "grad", "name", "order", "one more",
)  # fmt: skip


@pytest.mark.parametrize("what", KINDS)
@settings(max_examples=15, deadline=None)
@given(state=states, rank=st.integers(0, WORLD - 1), data=st.data())
def test_one_change_on_one_rank_changes_its_fingerprint(what, state, rank, data):
    name = data.draw(st.sampled_from(sorted(state)))
    if what == "name":
        other = {("z" if key == name else key): leaf for key, leaf in state.items()}
    elif what == "order":
        assume(len(state) > 1)
        other = dict(reversed(state.items()))
    elif what == "one more":
        other = {**state, "z": state[name]}
    else:
        fitting = [key for key in sorted(state) if changed(state[key], what) != state[key]]
        assume(fitting)
        other = {**state, fitting[0]: changed(state[fitting[0]], what)}
    before, after = captured(state, rank), captured(other, rank)
    event(what)
    one, two = fingerprint(before, **OPTIONS), fingerprint(after, **OPTIONS)
    same = encode(without_contents(before)) == encode(without_contents(after))
    assert (one == two) == same
    # A mesh, and a shard of which this rank holds nothing, count by what they lead to.
    if what not in ("mesh", "placement"):
        assert one != two


@settings(max_examples=25, deadline=None)
@given(state=states, rank=st.integers(0, WORLD - 1), content=st.integers(2, 100))
def test_content_and_strides_change_no_fingerprint(state, rank, content):
    other = {
        name: replace(leaf, content=content, strided=leaf.kind == "plain")
        for name, leaf in state.items()
    }
    before, after = captured(state, rank), captured(other, rank)
    assert fingerprint(before, **OPTIONS) == fingerprint(after, **OPTIONS)
    assert encode(without_contents(before)) == encode(without_contents(after))


def test_meshes_are_told_apart_by_the_roll():
    def roll(mesh, placements):
        leaf = Leaf("dtensor", mesh=mesh, placements=placements)
        return plan_key(
            [fingerprint(captured({"w": leaf}, rank), **OPTIONS) for rank in range(WORLD)]
        )

    kinds = [
        ((4,), (0,)), ((4,), (1,)), ((4,), (None,)), ((2, 2), (0, None)), ((2, 2), (None, 0)),
        ((2, 2), (0, 1)), ((2, 2), (1, 0)),
    ]  # fmt: skip
    assert len({roll(*kind) for kind in kinds}) == len(kinds)


# --- each component -----------------------------------------------------------------------------


def sample() -> Columns:
    columns = captured({"a": Leaf("dtensor"), "b": Leaf("plain"), "c": Leaf("object")}, 1)
    assert columns.value.tolist()[0] == 0
    assert columns.value.tolist()[2] > 0
    return columns


OTHER = {
    "names": lambda c: ("a", "b", "other"),
    "paths": lambda c: (("a",), ("b",), ("c", "d")),
    "dtypes": lambda c: ("float64",),
    "name": lambda c: c.name[::-1],
    "kind": lambda c: np.array([0, 2, 1], np.int8),
    "dtype": lambda c: np.array([0, -1, -1], np.int8),
    "ndim": lambda c: c.ndim + np.int8(1),
    "shape": lambda c: c.shape + 1,
    "offset": lambda c: c.offset + 1,
    "size": lambda c: c.size + 1,
    "requires_grad": lambda c: ~c.requires_grad,
    "splittable": lambda c: ~c.splittable,
    "value": lambda c: np.ones(3, np.uint64),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Columns)])
def test_every_column_counts(name):
    columns = sample()
    other = replace(columns, **{name: OTHER[name](columns)})
    assert fingerprint(other, **OPTIONS) != fingerprint(columns, **OPTIONS)


def test_of_a_digest_of_content_only_counts_that_there_is_one():
    columns = sample()
    other = replace(columns, value=columns.value * np.uint64(3))
    assert fingerprint(other, **OPTIONS) == fingerprint(columns, **OPTIONS)


@pytest.mark.parametrize("name", ["__version__", "_FORM"])
def test_library_and_form_count(name, monkeypatch):
    columns = sample()
    before = fingerprint(columns, **OPTIONS)
    monkeypatch.setattr(fingerprint_module, name, 77)
    assert fingerprint(columns, **OPTIONS) != before


def test_keys_that_are_numbers_count():
    columns = sample()
    names = {
        fingerprint(replace(columns, paths=(("a",), ("b",), ("c", key))), **OPTIONS)
        for key in ("7", 7, IntKey(7))
    }
    assert len(names) == 3


def test_the_order_of_ranks_counts():
    assert plan_key([bytes(32), bytes([1] * 32)]) != plan_key([bytes([1] * 32), bytes(32)])


# --- each option --------------------------------------------------------------------------------

ELSE: dict[str, Any] = {
    "container": "safetensors", "replicas": "check", "objects": "refuse", "nonfinite": "warn",
    "part_bytes": 4096, "num_threads": 3, "stock_metadata": "later", "max_pending": 2,
    "when_full": "skip", "keep_in_memory": 1,
    "plan_timeout_s": 7.0, "write_timeout_s": 7.0, "commit_timeout_s": 7.0,
    "heartbeat_timeout_s": 7.0,
}  # fmt: skip


def planned_under(options: SaveOptions, world_size: int = 3) -> tuple[bytes, bytes]:
    """Returns the name of the ranks' plan, by which it would be used again, and that plan's."""
    planning = Planning(world_size, options, PlanCache())
    joins = []
    for rank in range(world_size):
        held = partial(ArrayCapture, sample_state(1), rank, world_size)
        steps = join_save(
            OpKey("options", 0), rank=rank, world_size=world_size,
            target=Target("memory://run/step-1"), options=options, capture=held,
        )  # fmt: skip
        join = next(steps)
        rows = encode(without_contents(held().columns))
        joins.append(replace(join, columns=rows))
        planning.take(joins[-1])
    assert planning.ask() == {}
    task = planning.plan()
    assert isinstance(task, MakePlan)
    found = perform(task)
    assert isinstance(found, Planned)
    return planning._key, found.plan.digest


def other_value(name: str, default: Any) -> Any:
    return not default if isinstance(default, bool) and name not in ELSE else ELSE[name]


def test_options_count_if_the_plan_depends_on_them_and_else_do_not():
    usual = planned_under(SaveOptions())
    count = {}
    for field in fields(SaveOptions):
        changes = {field.name: other_value(field.name, field.default)}
        key, digest = planned_under(SaveOptions(**changes))
        # Never a wrong plan: what has one name is one plan.
        assert key != usual[0] or digest == usual[1], field.name
        count[field.name] = key != usual[0]
    assert {name for name, counts in count.items() if counts} == {
        "container", "part_bytes", "dedup_save_to_lowest_rank",
    }  # fmt: skip


def test_the_world_counts():
    columns = sample()
    names = {fingerprint(columns, **{**OPTIONS, "world_size": size}) for size in (3, 4, 5)}
    assert len(names) == 3
