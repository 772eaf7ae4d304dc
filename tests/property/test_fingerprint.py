"""A fingerprint changes with whatever a plan depends on, on any one rank, and with nothing else."""

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_dcp.core.columns import ColumnsBuilder, decode, encode
from ray_dcp.core.values import IntKey
from ray_dcp.planning.fingerprint import fingerprint, plan_key
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.merge import (
    contents_of,
    digests_of,
    find_disagreements,
    groups_of,
    with_contents,
    without_contents,
)

WORLD = 3
OPTIONS = {"container": "torch_save", "part_bytes": 1 << 20, "to_lowest_rank": False}
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


def named(columns, **changed):
    return fingerprint(columns, **{"world_size": WORLD, **OPTIONS, **changed})


def plan_of(columns):
    return make_plan(columns, **OPTIONS)


FIELDS = ("kind", "shape", "dtype", "grad", "name", "order", "path", "more")


@given(states, st.integers(0, WORLD - 1), st.sampled_from(FIELDS), st.data())
@settings(max_examples=40, deadline=None)
def test_a_change_on_one_rank_changes_its_name_and_no_other(state, rank, field, data):
    name = data.draw(st.sampled_from(sorted(state)))
    kind, shape, dtype, values, grad = state[name]
    other = dict(state)
    if field == "kind":
        kinds = [k for k in ("rows", "columns", "replicated", "plain", "object") if k != kind]
        other[name] = (data.draw(st.sampled_from(kinds)), shape, dtype, values, grad)
    elif field == "name":
        other = {("z" if key == name else key): item for key, item in state.items()}
    elif field == "order":
        assume(len(state) > 1)
        other = dict(reversed(state.items()))
    elif field == "more":
        other["z"] = state[name]
    elif field == "path":
        columns = [build(state, r) for r in range(WORLD)]
        paths = ((*columns[rank].paths[0], "deeper"), *columns[rank].paths[1:])
        assert named(replace(columns[rank], paths=paths)) != named(columns[rank])
        return
    else:
        assume(kind != "object")
        shape = (shape[0] + 3, shape[1]) if field == "shape" else shape
        dtype = DTYPES[(DTYPES.index(dtype) + 1) % 3] if field == "dtype" else dtype
        other[name] = (kind, shape, dtype, values, grad != (field == "grad"))
    before = [named(build(state, r)) for r in range(WORLD)]
    after = [named(build(other if r == rank else state, r)) for r in range(WORLD)]
    assert [a != b for a, b in zip(before, after, strict=True)] == [r == rank for r in range(WORLD)]
    assert plan_key(before, ()) != plan_key(after, ())


@given(states, st.lists(st.integers(4, 9), min_size=5 * WORLD, max_size=5 * WORLD))
@settings(max_examples=40, deadline=None)
def test_content_changes_no_name_and_no_layout(state, contents):
    changed = {
        name: (kind, shape, dtype, tuple(contents[row * WORLD : (row + 1) * WORLD]), grad)
        for row, (name, (kind, shape, dtype, _, grad)) in enumerate(state.items())
    }
    for rank in range(WORLD):
        one, two = build(state, rank), build(changed, rank)
        assert named(one) == named(two) == named(without_contents(two))
        again = with_contents(without_contents(two), contents_of(two), rank)
        assert again.value.tolist() == two.value.tolist()


@given(states, states)
@settings(max_examples=40, deadline=None)
def test_digests_tell_what_rows_would(state, other):
    """Whether a plan may be used again, and what differs, is what planning again would say."""
    new = {
        name: (*item[:3], other[name][3] if name in other else item[3], item[4])
        for name, item in state.items()
    }
    columns = [build(state, rank) for rank in range(WORLD)]
    plan = plan_of(columns)
    now = [build(new, rank) for rank in range(WORLD)]
    told = [digests_of(*groups_of(plan.groups, r), contents_of(now[r])) for r in range(WORLD)]
    found = find_disagreements(plan.groups, told)
    fresh = plan_of(now)
    before = {name for name, _ in plan.disagreements}
    if found is None:
        assert not {name for name, _ in fresh.disagreements} <= before
    else:
        assert dict(found) == dict(fresh.disagreements)
        assert {name for name, _ in found} <= before
    same = [digests_of(*groups_of(plan.groups, r), contents_of(columns[r])) for r in range(WORLD)]
    assert dict(find_disagreements(plan.groups, same)) == dict(plan.disagreements)


def test_every_option_and_the_version_count(monkeypatch):
    columns = build({"a": ("rows", (3, 3), "float32", (1, 1, 1), False)}, 0)
    name = partial(named, columns)
    names = {
        name(), name(world_size=4), name(container="safetensors"), name(part_bytes=5),
        name(to_lowest_rank=True),
    }  # fmt: skip
    monkeypatch.setattr("ray_dcp.planning.fingerprint.__version__", "0.0.0")
    names.add(name())
    names.add(named(replace(columns, value=np.ones(1, np.uint64))))
    assert len(names) == 7


def test_too_few_or_too_many_digests_are_no_agreement():
    state = {"a": ("object", (3, 3), "float32", (1, 1, 1), False)}
    plan = plan_of([build(state, rank) for rank in range(WORLD)])
    assert find_disagreements(plan.groups, [bytes(8)] * 3) == ()
    for told in ([bytes(8)] * 2, [b"", bytes(8), bytes(16)], [bytes(7)] * 3, [bytes(8)] * 4):
        assert find_disagreements(plan.groups, told) is None


def test_a_number_as_a_key_is_not_its_text():
    columns = build({"a": ("object", (3, 3), "float32", (1, 1, 1), False)}, 0)
    names = {named(replace(columns, paths=(("a", key),))) for key in ("7", IntKey(7), 7)}
    assert len(names) == 3
    again = decode(encode(replace(columns, paths=(("a", IntKey(7)),))))
    assert type(again.paths[0][1]) is IntKey
    assert type(decode(encode(replace(columns, paths=(("a", "7"),)))).paths[0][1]) is str
