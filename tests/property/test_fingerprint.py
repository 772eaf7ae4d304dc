"""Fingerprints change with whatever a plan depends on, and few rows lead to the plan of all.

A plan is made of the ranks' columns, without any content, and of a few options. So a fingerprint is
sound when it is equal only for equal columns under options that lead to the same plan.
"""

from __future__ import annotations

import zlib
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp import SaveOptions
from ray_dcp.commit_protocol.commands import Failed, MakePlan, Planned, RowsMissing
from ray_dcp.commit_protocol.messages import OpKey, Target
from ray_dcp.commit_protocol.plan_cache import PlanCache, Planning
from ray_dcp.coordinator import plan as coordinator_plan
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core.columns import ColumnsBuilder, encode
from ray_dcp.core.values import Columns
from ray_dcp.errors import CheckpointError
from ray_dcp.planning.fingerprint import alike, fingerprint, plan_key, probes
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.merge import (
    contents_of,
    digests_of,
    find_disagreements,
    groups_of,
    without_contents,
)
from ray_dcp.planning.share_out import MIN_WRITER_BYTES, node_numbers
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


# --- rows of few ranks ----------------------------------------------------------------------------


NAMED = {"part_bytes": 1 << 20}


def task_of(columns, sent):
    """The planning of a job of which some ranks sent their rows, and all others fingerprints."""
    names = tuple(fingerprint(own, world_size=len(columns), **NAMED) for own in columns)
    rows = tuple(
        encode(without_contents(own)) if rank in sent else b"" for rank, own in enumerate(columns)
    )
    contents = tuple(map(contents_of, columns))
    return MakePlan(rows, 1 << 20, False, contents, names)


class Tensor:
    """A tensor that lies on a mesh: for each dimension of that, which of its own is cut."""

    def __init__(
        self, name, shape, placements, value=0, dtype="float32", inner_first=False, compared=False
    ):
        """`inner_first`: it is cut along the mesh's last dimension first.

        `compared`: each box has a value of its own.
        """
        self.name, self.shape, self.placements = name, shape, placements
        self.value, self.dtype, self.inner_first = value, dtype, inner_first
        self.compared = compared

    def value_of(self, offset, size):
        """The digest of the content of a box."""
        return zlib.crc32(repr((self.name, offset, size)).encode()) if self.compared else self.value

    def box(self, mesh, place):
        """Where the box at a place of a mesh is; the mesh's last dimension varies fastest."""
        at = np.unravel_index(place, mesh)
        offset, size = [0] * len(self.shape), list(self.shape)
        dims = list(zip(at, mesh, self.placements, strict=True))
        for index, length, axis in reversed(dims) if self.inner_first else dims:
            if axis is not None:
                step = -(-size[axis] // length)
                begin = min(int(index) * step, size[axis])
                offset[axis] += begin
                size[axis] = min(step, size[axis] - begin)
        return offset, size


class Stage:
    """Ranks, their mesh, and what they hold beside objects."""

    def __init__(self, ranks, mesh, tensors, objects=(), own=()):
        """`own`: where among the others there is an object of each rank's own."""
        self.ranks, self.mesh, self.tensors, self.objects = ranks, mesh, tensors, objects
        self.own = own


def held_by(stages):
    """What each rank holds."""
    columns = {}
    world_size = sum(len(stage.ranks) for stage in stages)
    for stage in stages:
        for place, rank in enumerate(stage.ranks):
            builder = ColumnsBuilder()
            for index, tensor in enumerate(stage.tensors):
                if index in stage.own:
                    own = f"rank-{rank}-of-{world_size}"
                    builder.object(f"own{index}.{own}", path=(f"own{index}", own))
                offset, size = tensor.box(stage.mesh, place)
                builder.tensor(
                    tensor.name, tensor.dtype, tensor.shape, offset=offset, size=size,
                    value=tensor.value_of(offset, size), splittable=None in tensor.placements,
                )  # fmt: skip
            for name, value in stage.objects:
                builder.object(name, value=value)
            columns[rank] = builder.build()
    return [columns[rank] for rank in sorted(columns)]


@st.composite
def tensors(draw, mesh, name):
    """A tensor on a mesh: slabs, replicas along some dimensions, scalars that all hold."""
    if draw(st.integers(0, 4)) == 0:
        return Tensor(name, (), [None] * len(mesh), value=draw(st.integers(1, 3)))
    ndim = draw(st.integers(1, 3))
    placements = [draw(st.sampled_from([None, *range(ndim)])) for _ in mesh]
    # Several MiB where it pays to cut replicas.
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    shape[-1] *= draw(st.sampled_from([1, 1, 64 << 10]))
    for length, axis in zip(mesh, placements, strict=True):
        if axis is not None:
            shape[axis] *= length
    axis = draw(st.integers(0, ndim - 1))
    if placements.count(axis) == 1 or draw(st.integers(0, 3)) == 0:
        shape[axis] = max(1, shape[axis] - draw(st.integers(0, 3)))
    return Tensor(
        name,
        tuple(shape),
        placements,
        inner_first=draw(st.booleans()),
        compared=draw(st.booleans()),
    )


@st.composite
def jobs(draw):
    """Stages of a pipeline; ranks one after another, or in turn."""
    count = draw(st.integers(1, 4))
    meshes = [
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)) for _ in range(count)
    ]
    in_turn = draw(st.booleans())
    if in_turn:
        meshes = [meshes[0]] * count
    sizes = [int(np.prod(mesh)) for mesh in meshes]
    starts = np.cumsum([0, *sizes]).tolist()
    objects = [("step", 7)] if draw(st.booleans()) else []
    tied = draw(tensors(meshes[0], "tied")) if draw(st.booleans()) else None
    stages = []
    for index, mesh in enumerate(meshes):
        ranks = range(starts[index], starts[index + 1])
        if in_turn:
            ranks = range(index, sizes[0] * count, count)
        own = [draw(tensors(mesh, f"{index}.{n}")) for n in range(draw(st.integers(1, 4)))]
        if tied is not None and index in (0, count - 1):
            shared = replaced(tied, mesh) if len(mesh) != len(tied.placements) else tied
            own.insert(draw(st.integers(0, len(own))), shared)
        places = draw(st.sets(st.integers(0, 2), max_size=2))
        stages.append(Stage(ranks, mesh, own, [*objects, (f"{index}.state", 3)], places))
    return stages


def replaced(tensor, mesh):
    placements = [None] * len(mesh)
    return Tensor(tensor.name, tensor.shape, placements, tensor.value, compared=tensor.compared)


def asked_of(columns):
    """The ranks that are asked for their rows first."""
    names = task_of(columns, set()).fingerprints
    some = [ranks[[*probes(len(ranks))]].tolist() for ranks in alike(names)]
    return set(probes(len(columns))).union(*some)


def outcome(columns, nodes=(), min_writer_bytes=MIN_WRITER_BYTES):
    """What the rows of all lead to: a plan, or the text of an error."""
    how = {"part_bytes": 1 << 20, "min_writer_bytes": min_writer_bytes}
    try:
        return make_plan(columns, **how, nodes=nodes)
    except CheckpointError as error:
        return error


def planned_of(columns, nodes=()):
    """What few rows lead to, and whether more were asked for."""
    found = perform(replace(task_of(columns, asked_of(columns)), nodes=nodes))
    if isinstance(found, RowsMissing):
        assert set(found.ranks).isdisjoint(asked_of(columns))
        sent = {*asked_of(columns), *found.ranks}
        return perform(replace(task_of(columns, sent), nodes=nodes)), True
    return found, False


def check(found, by_rows):
    """Checks that few rows led to what the rows of all lead to."""
    if isinstance(found, Failed):
        assert (type(found.error), str(found.error)) == (type(by_rows), str(by_rows))
        return
    assert isinstance(found, Planned)
    assert found.plan.digest == by_rows.digest
    assert found.plan.disagreements == by_rows.disagreements


@settings(max_examples=50)
@given(
    jobs(),
    st.lists(st.integers(0, 3), min_size=64, max_size=64),
    st.sampled_from([0, 1 << 10, MIN_WRITER_BYTES]),
)
def test_any_job_has_the_plan_of_its_rows(stages, places, least_bytes):
    columns = held_by(stages)
    nodes = node_numbers([f"node {place}" for place in (places * len(columns))[: len(columns)]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_plan, "MIN_WRITER_BYTES", least_bytes)
        found, asked = planned_of(columns, nodes)
    event(f"asked: {asked}")
    check(found, outcome(columns, nodes, least_bytes))


@settings(max_examples=40)
@given(jobs(), st.data())
def test_contents_that_differ_lead_to_the_plan_of_the_rows(stages, data):
    columns = held_by(stages)
    rank = data.draw(st.integers(0, len(columns) - 1))
    valued = np.flatnonzero(columns[rank].value).tolist()
    if valued:
        value = columns[rank].value.copy()
        value[data.draw(st.sampled_from(valued))] ^= np.uint64(1)
        columns[rank] = replace(columns[rank], value=value)
    found, _ = planned_of(columns)
    event(f"differs: {bool(valued)}")
    check(found, outcome(columns))


def fsdp(name, shape, mesh, axis=0):
    """Cut along the last dimension of a mesh, copied along the others."""
    return Tensor(name, shape, [*[None] * (len(mesh) - 1), axis], compared=len(mesh) > 1)


def hsdp_stage(ranks, mesh, name, objects=(), rows=64):
    return Stage(
        ranks, mesh,
        [
            *(fsdp(f"{name}.{n}", (rows, 3 + n), mesh) for n in range(6)),
            fsdp(f"{name}.large", (rows << 5, 128), mesh),
            fsdp(f"{name}.norm", (3,), mesh),
            Tensor(f"{name}.scalar", (), [None] * len(mesh), value=4),
        ],
        objects,
    )  # fmt: skip


def pipeline(objects=(("step", 7),)):
    """Two stages of 4 times 8 ranks, and a third of 16; HSDP in each."""
    return [
        hsdp_stage(range(32), (4, 8), "a", objects),
        hsdp_stage(range(32, 64), (4, 8), "b", objects),
        hsdp_stage(range(64, 80), (2, 8), "c", objects),
    ]


def with_own(stages):
    """Each rank has two objects of its own."""
    for stage in stages:
        stage.own = {0, 2}
    return stages


LAYOUTS = {
    "HSDP": [hsdp_stage(range(64), (8, 8), "a", [("step", 7)])],
    "pipeline of HSDP": pipeline(),
    "objects of each rank": with_own(pipeline()),
    "FSDP and TP, norms copied": [
        Stage(
            range(64), (16, 4),
            [Tensor("w", (64, 64), [0, 1]), Tensor("v", (64, 64), [0, 0]),
             Tensor("norm", (64,), [0, None]), Tensor("short", (5,), [0, None]),
             Tensor("turned", (61, 3), [0, 0], inner_first=True)],
        )
    ],
    "three dimensions and experts": [
        Stage(
            range(index * 64, index * 64 + 64), (4, 4, 4),
            [Tensor(f"{index}.w", (64, 64), [None, 0, 1]),
             Tensor(f"{index}.experts", (16, 8), [1, 0, 0]),
             Tensor("tied", (64, 8), [None, 0, 0])],
            [("step", 7), (f"{index}.rng", 9)],
        )
        for index in range(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts_of_large_jobs_need_few_rows(layout):
    columns = held_by(LAYOUTS[layout])
    found, asked = planned_of(columns)
    assert not asked
    check(found, outcome(columns))
    assert len(asked_of(columns)) < len(columns) / 1.5
    again = perform(task_of(columns, set(range(len(columns)))))
    assert again.plan.digest == found.plan.digest


def changed(columns, rank, **arrays):
    found = [*columns]
    found[rank] = replace(found[rank], **arrays)
    return found


@pytest.mark.parametrize("change", ["overlap", "gap", "dtype", "shape", "two at once"])
def test_what_contradicts_itself_is_told_as_by_the_rows(change):
    stages = pipeline()
    if change in ("dtype", "two at once"):
        stages[0].tensors.append(Tensor("x", (4,), [None] * 2, dtype="float32"))
        stages[1].tensors.append(Tensor("x", (4,), [None] * 2, dtype="float64"))
    if change in ("shape", "two at once"):
        stages[1].tensors.append(Tensor("y", (4,), [None] * 2))
        stages[2].tensors.append(Tensor("y", (5,), [None] * 2))
    columns = held_by(stages)
    if change in ("overlap", "gap"):
        # A stage whose slabs lie other than the length of a slab apart.
        step = -1 if change == "overlap" else 1
        for rank in range(32, 64):
            offset = columns[rank].offset.copy()
            offset[0, 0] += step * (rank % 8)
            shape = columns[rank].shape.copy()
            shape[0, 0] += step * 7
            columns = changed(columns, rank, offset=offset, shape=shape)
    found, _ = planned_of(columns)
    assert isinstance(found, Failed)
    check(found, outcome(columns))
