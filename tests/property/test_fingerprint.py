"""A fingerprint changes with whatever a plan depends on, on any one rank, and with nothing else.

A plan is made of the ranks' columns, without any content, and of a few options. So a fingerprint is
sound when it is equal only for equal columns under options that lead to the same plan.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp import SaveOptions
from ray_dcp.commit_protocol.commands import MakePlan, Planned
from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.commit_protocol.planning import PlanCache, Planning
from ray_dcp.core.columns import ColumnsBuilder, encode
from ray_dcp.core.values import Columns
from ray_dcp.planning.fingerprint import fingerprint, plan_key
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.merge import (
    contents_of,
    digests_of,
    find_disagreements,
    groups_of,
    without_contents,
)
from ray_dcp.runtime.tasks import perform
from ray_dcp.torch_adapter.capture import capture
from tests.support.arrays import ArrayCapture, sample_state
from tests.support.world import join_save

WORLD = 3
OPTIONS = {"part_bytes": 1 << 20}
DTYPES = ("float32", "bfloat16", "int64")


@st.composite
def items(draw):
    """One tensor or object of all ranks: how it is cut, and what each rank's content is."""
    kind = draw(st.sampled_from(["rows", "columns", "replicated", "plain", "object"]))
    shape = (3 * draw(st.integers(1, 4)), 3 * draw(st.integers(1, 4)))
    value = draw(st.integers(1, 3))
    values = draw(st.sampled_from([(value,) * WORLD, (value, value, value + 1)]))
    return kind, shape, draw(st.sampled_from(DTYPES)), values, draw(st.booleans())


def build(state, rank):
    builder = ColumnsBuilder()
    for name, (kind, shape, dtype, values, grad) in state.items():
        if kind == "object":
            builder.object(name, path=(name,), value=values[rank])
            continue
        offset, size = [0, 0], list(shape)
        if kind in ("rows", "columns"):
            dim = 0 if kind == "rows" else 1
            size[dim] //= WORLD
            offset[dim] = rank * size[dim]
        builder.tensor(
            name, dtype, shape, offset=offset, size=size, path=(name,), requires_grad=grad,
            splittable=kind == "replicated", value=values[rank] if kind == "plain" else 0,
        )  # fmt: skip
    return builder.build()


states = st.dictionaries(st.sampled_from("abcde"), items(), min_size=1)


@given(states, states)
@settings(max_examples=40)
def test_digests_tell_what_rows_would(state, other):
    """Whether a plan may be used again, and what differs, is what planning again would say."""
    new = {
        name: (*item[:3], other[name][3] if name in other else item[3], item[4])
        for name, item in state.items()
    }
    columns = [build(state, rank) for rank in range(WORLD)]
    plan = make_plan(columns, **OPTIONS)
    now = [build(new, rank) for rank in range(WORLD)]
    told = [digests_of(*groups_of(plan.groups, r), contents_of(now[r])) for r in range(WORLD)]
    found = find_disagreements(plan.groups, told)
    fresh = make_plan(now, **OPTIONS)
    before = {name for name, _ in plan.disagreements}
    if found is None:
        assert not {name for name, _ in fresh.disagreements} <= before
    else:
        assert dict(found) == dict(fresh.disagreements)
        assert {name for name, _ in found} <= before
    same = [digests_of(*groups_of(plan.groups, r), contents_of(columns[r])) for r in range(WORLD)]
    assert dict(find_disagreements(plan.groups, same)) == dict(plan.disagreements)


def test_too_few_or_too_many_digests_are_no_agreement():
    state = {"a": ("object", (3, 3), "float32", (1, 1, 1), False)}
    plan = make_plan([build(state, rank) for rank in range(WORLD)], **OPTIONS)
    assert find_disagreements(plan.groups, [bytes(8)] * 3) == ()
    for told in ([bytes(8)] * 2, [b"", bytes(8), bytes(16)], [bytes(7)] * 3, [bytes(8)] * 4):
        assert find_disagreements(plan.groups, told) is None


# --- each component -----------------------------------------------------------------------------


def held(content: int = 1, *, strided: bool = False) -> Columns:
    """What a rank captures of a shard, a plain tensor and an object."""
    found = torch.full((8, 4), content, dtype=torch.float32)
    found = found.t().contiguous().t() if strided else found
    return capture({"a": found, "b": found[:2], "c": content}, rank=1, world_size=WORLD).columns


def named(columns: Columns, **changed: Any) -> bytes:
    return fingerprint(columns, **{"world_size": WORLD, **OPTIONS, **changed})


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
    "value": lambda c: np.where(c.value, 0, 1).astype(np.uint64),
    "settled": lambda c: c.settled + np.int8(1),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Columns)])
def test_every_column_counts(name):
    columns = held()
    assert named(replace(columns, **{name: OTHER[name](columns)})) != named(columns)


def test_content_and_strides_change_no_fingerprint():
    columns, other = held(), held(7, strided=True)
    assert columns.value.tolist() != other.value.tolist()
    assert named(columns) == named(other)


def test_the_world_and_the_order_of_ranks_count():
    columns = held()
    assert len({named(columns, world_size=size) for size in (3, 4, 5)}) == 3
    assert plan_key([bytes(32), bytes([1] * 32)]) != plan_key([bytes([1] * 32), bytes(32)])


# --- each option --------------------------------------------------------------------------------


HINTS = get_type_hints(SaveOptions)


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


def other_value(hint: Any, default: Any) -> Any:
    if get_origin(hint) is Literal:
        return next(one for one in get_args(hint) if one != default)
    return not default if hint is bool else default + 1


def test_options_count_if_the_plan_depends_on_them_and_else_do_not():
    usual = planned_under(SaveOptions())
    count = {}
    for field in fields(SaveOptions):
        changes = {field.name: other_value(HINTS[field.name], field.default)}
        key, digest = planned_under(SaveOptions(**changes))
        # Never a wrong plan: what has one name is one plan.
        assert key != usual[0] or digest == usual[1], field.name
        count[field.name] = key != usual[0]
    assert {name for name, counts in count.items() if counts} == {
        "part_bytes", "dedup_save_to_lowest_rank",
    }  # fmt: skip
