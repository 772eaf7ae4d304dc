"""A fingerprint changes with whatever a plan depends on, on any one rank, and with nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.planning.fingerprint import fingerprint
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.merge import (
    contents_of,
    digests_of,
    find_disagreements,
    groups_of,
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


def test_too_few_or_too_many_digests_are_no_agreement():
    state = {"a": ("object", (3, 3), "float32", (1, 1, 1), False)}
    plan = plan_of([build(state, rank) for rank in range(WORLD)])
    assert find_disagreements(plan.groups, [bytes(8)] * 3) == ()
    for told in ([bytes(8)] * 2, [b"", bytes(8), bytes(16)], [bytes(7)] * 3, [bytes(8)] * 4):
        assert find_disagreements(plan.groups, told) is None
