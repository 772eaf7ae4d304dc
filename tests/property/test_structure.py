"""What follows from the rows of few ranks is what the rows of all would say, bit for bit."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format import table as table_format
from ray_dcp.format.table import (
    decode_few,
    decode_table,
    encode_table,
    expanded,
    structure_from,
    structure_to,
)
from ray_dcp.planning import structural
from ray_dcp.planning import structure as plan_structure
from ray_dcp.planning.finish import _shape_of
from ray_dcp.planning.global_plan import MIN_WRITER_BYTES, make_plan, rank_plan
from ray_dcp.planning.reads import Wanted
from ray_dcp.planning.regular import probes
from ray_dcp.planning.structural import StructuralPlan
from ray_dcp.planning.structure import (
    MOST_RANKS,
    Mesh,
    Structure,
    expand,
    is_expandable,
    ranks_around,
)
from ray_dcp.protocol.commands import Planned, RowsMissing
from ray_dcp.runtime.tasks import perform
from tests.unit.test_regular import held_by, task_of

SPLITTABLE = 3 << 10


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(structural, "MANY_ROWS", 0)
    monkeypatch.setattr(structural, "LEAST_RANKS_A_CLASS", 1)


def same(one, other, *, skipped=()):
    for name in vars(one):
        if name in skipped:
            continue
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
            assert mine.dtype == theirs.dtype, name
        elif hasattr(mine, "__dataclass_fields__"):
            same(mine, theirs)
        elif isinstance(mine, tuple) and mine and hasattr(mine[0], "__dataclass_fields__"):
            assert len(mine) == len(theirs), name
            for a, b in zip(mine, theirs, strict=True):
                same(a, b)
        else:
            assert mine == theirs, name


def check_plan(plan, columns, part_bytes=1 << 20, nodes=None, min_writer_bytes=MIN_WRITER_BYTES):
    """Checks a plan against that of the rows; returns how many rows it did without."""
    how = {"part_bytes": part_bytes, "min_writer_bytes": min_writer_bytes, "nodes": nodes}
    by_rows = make_plan(columns, **how)
    assert isinstance(plan, StructuralPlan)
    assert "_expanded" not in vars(plan)
    assert (plan.num_chunks, plan.num_tensors) == (by_rows.num_chunks, by_rows.num_tensors)
    assert (plan.files, plan.fixed_bytes) == (by_rows.files, by_rows.fixed_bytes)
    for rank in range(plan.world_size):
        same(rank_plan(plan, rank), rank_plan(by_rows, rank))
    mine, theirs = _shape_of(plan)._asdict(), _shape_of(by_rows)._asdict()
    for name, value in mine.items():
        assert np.array_equal(value, theirs[name]) if name != "deferred" else value == theirs[name]
    data = encode_table(plan.few.table, plan.structure)
    assert "_expanded" not in vars(plan)
    same(by_rows, pickle.loads(pickle.dumps(plan)), skipped=("digest",))
    same(by_rows.table, decode_table(data))
    return by_rows.num_chunks - plan.few.num_chunks


@st.composite
def layouts(draw):
    """A mesh, and for each tensor a dimension for each of the mesh's, or none for all."""
    mesh = draw(st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        ndim = draw(st.integers(1, 3))
        axes = st.lists(st.integers(0, ndim - 1), min_size=len(mesh), max_size=len(mesh))
        placements = draw(st.one_of(axes, st.just([None] * len(mesh))))
        shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
        for length, axis in zip(mesh, placements, strict=True):
            if axis is not None:
                shape[axis] *= length
        if placements.count(0) == 1:
            # The last ranks may have less, or nothing.
            shape[0] = draw(st.integers(1, shape[0]))
        tensors.append((tuple(shape), placements))
    return mesh, tensors


@settings(max_examples=45, deadline=None)
@given(layouts(), st.booleans(), st.sampled_from([1, 2, 4]))
def test_the_plan_is_that_of_the_rows(layout, objects, a_node):
    mesh, tensors = layout
    world_size = int(np.prod(mesh))
    columns = [held_by(rank, mesh, tensors, objects) for rank in range(world_size)]
    nodes = tuple(rank // a_node for rank in range(world_size))
    task = replace(task_of(columns, set(probes(world_size))), nodes=nodes)
    planned = perform(task)
    if isinstance(planned, RowsMissing):
        assert any(0 in own.size for own in columns) or any(s[0] % mesh[0] for s, _ in tensors)
        return
    how = {"min_writer_bytes": MIN_WRITER_BYTES, "nodes": nodes}
    by_rows = make_plan(columns, part_bytes=1 << 20, **how)
    event(type(planned.plan).__name__)
    # Where every rank has something everywhere, or the mesh is a line, no row is needed.
    if len(mesh) == 1 or not any((own.size == 0).any() for own in columns):
        assert isinstance(planned.plan, StructuralPlan)
    if isinstance(planned.plan, StructuralPlan):
        check_plan(planned.plan, columns, nodes=nodes)
        # Who sent all rows has the same plan, under the same name.
        again = perform(replace(task_of(columns, set(range(world_size))), nodes=nodes))
        assert again.plan.digest == planned.plan.digest
    else:
        assert planned.plan.digest == by_rows.digest


def like_fsdp(world_size, *, rows=8, step=8, scalars=3, uneven=False, large=False):
    """Slabs of `rows` rows, `step` apart."""
    columns = []
    for rank in range(world_size):
        builder = ColumnsBuilder()
        for index in range(6):
            high, length = rows, step * (world_size - 1) + rows - (3 if uneven else 0)
            low = rank * step
            builder.tensor(
                f"w{index}", "float32", (length, 5), offset=(low, 0),
                size=(min(high, length - low), 5),
            )  # fmt: skip
        for index in range(scalars):
            builder.tensor(f"step{index}", "float32", (), value=7 + index)
        if large:
            builder.tensor("large", "float32", (256, 1024), value=5, splittable=True)
        builder.object("groups", value=3)
        columns.append(builder.build())
    return columns


@pytest.mark.parametrize(("uneven", "scalars"), [(False, 3), (True, 3), (True, 40)])
def test_a_state_with_scalars_objects_and_large_replicas(uneven, scalars):
    columns = like_fsdp(64, uneven=uneven, scalars=scalars, large=scalars > 3)
    planned = perform(task_of(columns, set(probes(64))))
    saved = check_plan(planned.plan, columns)
    assert planned.plan.groups.rank.size == 64 * (scalars + 1 + (scalars > 3))
    # What all hold goes to few ranks, each of which is a class.
    assert len(planned.plan.structure.leaders) <= (1 + uneven + 4 if scalars == 3 else 64)
    assert saved > (64 * 6 / 2 if scalars == 3 else 0)


@pytest.mark.parametrize("change", ["value", "fingerprint", "gap", "short", "overlap", "empty"])
def test_other_layouts_are_left_to_the_rows(change):
    columns = like_fsdp(64)
    sent = set(probes(64))
    if change == "value":
        value = columns[9].value.copy()
        value[-1] = 99
        columns[9] = replace(columns[9], value=value)
    elif change in ("gap", "overlap"):
        columns = like_fsdp(64, step=9 if change == "gap" else 7)
    elif change == "short":
        # Nobody holds the end of the tensors.
        columns = [replace(own, shape=own.shape + (own.shape > 1)) for own in columns]
        change = "gap"
    elif change == "fingerprint":
        columns[9] = replace(columns[9], requires_grad=~columns[9].requires_grad)
    else:
        mesh = [((7, 3), [0, 1]), ((64, 3), [0, 0])]
        columns = [held_by(rank, (8, 8), mesh) for rank in range(64)]
    found = perform(task_of(columns, sent))
    if change in ("gap", "overlap"):
        assert change in str(found.error).replace("no rank holds", "gap")
        assert isinstance(found.error, CheckpointError)
    elif isinstance(found, RowsMissing):
        assert found.ranks == (9,)
    else:
        assert isinstance(found, Planned)
        assert not isinstance(found.plan, StructuralPlan)


def read(table, value):
    """Reads a structure, and makes all chunks, or those of a load."""
    structure = structure_from(value, table)
    whole = expanded(table, structure)
    ranks = ranks_around(table, structure, [everything(whole)], range(whole.num_tensors))
    np.testing.assert_array_equal(ranks, np.unique(expand(table, structure).rank))
    return whole


def everything(table):
    """Wants each tensor whole."""
    tensors = np.flatnonzero(table.kind == Kind.TENSOR)
    shape = table.shape[tensors]
    return Wanted(tensors.astype(np.int32), np.zeros_like(shape), shape, np.full(len(tensors), 4))


def planned_structure(*, stages=False):
    columns = like_fsdp(64, uneven=True)
    if stages:
        own = [replace(one, names=tuple(f"x.{name}" for name in one.names)) for one in columns]
        columns = [one for pair in zip(columns, own, strict=True) for one in pair]
    count = len(columns)
    plan = perform(task_of(columns, set(range(count)))).plan
    assert len(plan.structure.meshes) == 1 + stages
    return plan.few.table, plan.structure


@pytest.fixture(scope="module", params=[False, True])
def structure_of(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structural, "MANY_ROWS", 0)
        patch.setattr(structural, "LEAST_RANKS_A_CLASS", 1)
        return planned_structure(stages=request.param)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_structure_that_does_not_fit_is_damage_and_nothing_worse(structure_of, data):
    table, structure = structure_of
    value = json.loads(json.dumps(structure_to(structure)))
    same(read(table, value), read(table, structure_to(structure)))
    name = data.draw(st.sampled_from(sorted(value)))
    at, inner = value, name
    while isinstance(at[inner], list | dict) and at[inner] and data.draw(st.integers(0, 9)):
        at = at[inner]
        keys = sorted(at) if isinstance(at, dict) else range(len(at))
        inner = data.draw(st.sampled_from(keys))
    wrong = st.sampled_from(
        [-1, 0, 1, 2, 63, 64, 1 << 40, 1 << 62, 1 << 70, 0.5, True, None, [], [1]]
    )
    at[inner] = data.draw(wrong)
    try:
        found = read(table, value)
        table_format.check_table(found)
    except DamagedCheckpointError:
        return
    assert found.num_chunks <= 128 * table.num_chunks


def test_a_short_file_can_not_claim_a_large_table():
    table, structure = planned_structure()
    value = structure_to(structure)
    for ranks in (MOST_RANKS, MOST_RANKS + 1):
        value |= {"lengths": [ranks], "kind": [*value["kind"][:-1], [value["kind"][-1][0], 1]]}
        value["kind"][0][1] += ranks - sum(count for _, count in value["kind"])
        with pytest.raises(DamagedCheckpointError):
            read(table, value)
    with pytest.raises(DamagedCheckpointError, match="fields"):
        read(table, [])
    with pytest.raises(DamagedCheckpointError, match="no checksums"):
        read(replace(table, checks=np.ones(1, np.uint64)), structure_to(structure))


def one_of_many(world_size, *, tensors, width=2, files=1, dimensions=1, own=0):
    """The rows of rank 0, and a structure by which every rank has as many."""
    names = [f"w{number}" for number in range(tensors)]
    paths = [None] * tensors
    for number in range(own):
        names[number] = f"{'x' * 1000}{number}.rank-*-of-{world_size}"
        paths[number] = ("x" * 1000, f"rank-*-of-{world_size}")
    zeros, each = np.zeros(tensors, np.int64), np.arange(tensors)
    table = ChunkTable(
        names=tuple(names),
        paths=tuple(paths),
        dtypes=("float32",),
        files=tuple(f"__0_{number}.distcp" for number in range(files)),
        kind=np.full(tensors, int(Kind.TENSOR), np.int8),
        dtype=zeros.astype(np.int8),
        ndim=np.full(tensors, width, np.int8),
        shape=np.ones((tensors, width), np.int64),
        requires_grad=zeros.astype(bool),
        tensor=each.astype(np.int32),
        offset=np.zeros((tensors, width), np.int64),
        size=np.ones((tensors, width), np.int64),
        file=np.sort(each % files).astype(np.int32),
        item_offset=each * 64,
        item_bytes=zeros + 4,
        payload_offset=each * 64,
        payload_bytes=zeros + 4,
        block_bytes=zeros + 64,
        check_start=np.zeros(tensors + 1, np.int64),
        checks=np.zeros(0, np.uint64),
    )
    steps = np.zeros((dimensions, tensors, width), np.int64)
    lengths = (world_size, *[1] * (dimensions - 1))
    mesh = Mesh((1,) * dimensions, lengths, each, steps[0], steps)
    zero = np.zeros(1, np.int64)
    kind, file_kind = np.zeros(world_size, np.int32), np.zeros(files, np.int32)
    return table, Structure(
        (mesh,), zero.astype(np.int32), zero, kind, file_kind, np.arange(own)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (1_000, {"tensors": 200}),
        (1_000, {"tensors": 200, "width": 0}),
        (1_000, {"tensors": 400, "width": 8}),
        (50_000, {"tensors": 1, "width": 1}),
        (20_000, {"tensors": 1, "width": 100, "dimensions": 30}),
        (2_000, {"tensors": 20, "files": 20}),
        (1_000, {"tensors": 10, "own": 9}),
    ],
)
def test_what_is_made_of_a_table_is_not_more_than_is_allowed(world_size, how, monkeypatch):
    """All columns, files and names together, and what is needed to make and check them."""
    table, structure = one_of_many(world_size, **how)
    data = encode_table(table, structure)
    decode_few(data)  # what is made once, whatever the table
    tracemalloc.start()
    try:
        decode_table(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak > 2_000_000, "more than what any table takes"
    monkeypatch.setattr(plan_structure, "MOST_BYTES", peak)
    with pytest.raises(DamagedCheckpointError, match="bytes in memory"):
        decode_table(data)


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (1_000_000, {"tensors": 20}),
        (1_000_000, {"tensors": 1, "width": 100, "dimensions": 20}),
        (100_000, {"tensors": 30, "own": 30}),
    ],
)
def test_a_file_of_some_kilobytes_is_refused_before_anything_is_made(world_size, how):
    data = encode_table(*one_of_many(world_size, **how))
    assert len(data) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match="bytes in memory"):
            decode_table(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000


def test_ten_thousand_ranks_with_a_thousand_tensors_each_are_not_too_many():
    for width in (1, 2, 3, 4):
        assert is_expandable(*one_of_many(10_240, tensors=1_000, width=width, dimensions=3))


def test_meshes_and_own_names_have_to_fit_their_table():
    table, structure = planned_structure(stages=True)
    value = structure_to(structure)
    same(read(table, value), read(table, structure_to(structure)))
    meshes = [{**mesh, "lengths": [32]} for mesh in value["meshes"]]
    for change, told in (
        ({"meshes": meshes}, "a mesh of 64 ranks"),
        ({"part": [0] * len(value["part"])}, "a mesh of 128 ranks"),
        ({"part": value["part"][1:]}, "a mesh for each class"),
        ({"own": [0]}, "by their names"),
        ({"own": [len(table.names)]}, "by their names"),
        ({"more": 1}, "fields of a structure"),
    ):
        with pytest.raises(DamagedCheckpointError, match=told):
            read(table, value | change)
