"""Of chunks that follow from the rows of few ranks, a load makes those that it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.core.values import Kind
from ray_dcp.format.table import decode_few, encode_table, expanded
from ray_dcp.planning import structural
from ray_dcp.planning import structure as structure_part
from ray_dcp.planning.reads import Wanted
from ray_dcp.planning.structural import StructuralPlan
from ray_dcp.planning.structure import expand, ranks_around
from ray_dcp.protocol.commands import Planned
from tests.property.test_stages import LAYOUTS, Stage, Tensor, held, jobs, planned_of
from tests.unit.test_table_groups import same_reads


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(structural, "MANY_ROWS", 0)
    monkeypatch.setattr(structural, "LEAST_RANKS_A_CLASS", 0)


def wanted_by(columns, table):
    """What a rank wants that holds these columns: boxes, and numbers of objects."""
    number = {name: row for row, name in enumerate(table.names)}
    names = [columns.names[name] for name in columns.name.tolist()]
    rows = np.array([number[name] for name in names], np.int32)
    width = table.shape.shape[1]
    is_box = columns.kind == Kind.TENSOR
    offset, size = np.zeros((len(rows), width), np.int64), np.ones((len(rows), width), np.int64)
    offset[:, : columns.offset.shape[1]] = columns.offset
    size[:, : columns.size.shape[1]] = columns.size
    count = int(is_box.sum())
    boxes = Wanted(rows[is_box], offset[is_box], size[is_box], np.full(count, 4))
    return boxes, rows[~is_box].tolist()


def check(few, structure, wanted, objects):
    """Checks what is made for a load against all chunks; returns of how many ranks."""
    whole = expand(few, structure).table
    ranks = ranks_around(few, structure, [wanted], objects)
    part = expand(few, structure, ranks).table
    assert (part.names, part.files) == (whole.names, whole.files)
    same_reads(part, whole, wanted)
    for number in objects:
        mine, theirs = part.tensor == number, whole.tensor == number
        np.testing.assert_array_equal(part.file[mine], whole.file[theirs])
        assert theirs.any()
    # Of each file all chunks or none, in the order in which all have them.
    assert np.isin(whole.file, part.file).sum() == part.num_chunks
    return len(ranks)


@settings(max_examples=40, deadline=None)
@given(jobs(), st.data())
def test_what_is_made_is_all_that_meets_what_is_wanted(stages, data):
    columns = held(stages)
    planned, _ = planned_of(columns)
    if not isinstance(planned, Planned) or not isinstance(planned.plan, StructuralPlan):
        event("by rows")
        return
    few, structure = decode_few(encode_table(planned.plan.few.table, planned.plan.structure))
    whole = expand(few, structure).table
    event("structural")
    who = data.draw(st.integers(0, len(columns) - 1))
    wanted, objects = wanted_by(columns[who], whole)
    check(few, structure, wanted, objects)
    # Any boxes, with one more dimension than the tensors have, and of the objects some.
    rows = data.draw(
        st.lists(st.sampled_from(np.flatnonzero(whole.kind == Kind.TENSOR).tolist()), max_size=4)
    ) if (whole.kind == Kind.TENSOR).any() else []  # fmt: skip
    width = whole.shape.shape[1]
    offset, size = np.zeros((len(rows), width + 1), np.int64), np.ones((len(rows), width + 1), int)
    for at, row in enumerate(rows):
        for dim, length in enumerate(whole.shape[row].tolist()):
            offset[at, dim] = data.draw(st.integers(0, max(0, length - 1)))
            size[at, dim] = data.draw(st.integers(0, length - int(offset[at, dim])))
    some = data.draw(st.lists(st.sampled_from(objects), max_size=2)) if objects else []
    check(
        few, structure, Wanted(np.array(rows, np.int32), offset, size, np.full(len(rows), 4)), some
    )


def test_boxes_are_looked_at_some_at_a_time(monkeypatch):
    # Of three tensors that lie differently each rank wants one alone.
    tensors = [Tensor(f"t{i}", (8 * (i + 1), 2), [0]) for i in range(3)]
    columns = held([Stage(range(8), (8,), tensors)])
    plan = planned_of(columns)[0].plan
    few, structure = decode_few(encode_table(plan.few.table, plan.structure))
    rows = np.arange(3, dtype=np.int32)
    offset = np.array([[0, 0], [3 * 2, 0], [5 * 3, 0]])
    wanted = Wanted(rows, offset, np.array([[1, 2], [2, 2], [3, 2]]), np.full(3, 4))
    assert ranks_around(few, structure, [wanted], []).tolist() == [0, 3, 5]
    monkeypatch.setattr(structure_part, "_MOST_PAIRS", 1)
    assert ranks_around(few, structure, [wanted], []).tolist() == [0, 3, 5]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_who_has_the_same_layout_needs_few_ranks(layout):
    columns = held(LAYOUTS[layout])
    plan = planned_of(columns)[0].plan
    few, structure = decode_few(encode_table(plan.few.table, plan.structure))
    whole = expand(few, structure).table
    for who in (0, 17, 63):
        wanted, objects = wanted_by(columns[who], whole)
        sharded = (whole.shape[wanted.tensor] != wanted.size).any(axis=1)
        own = Wanted(
            wanted.tensor[sharded], wanted.offset[sharded], wanted.size[sharded],
            wanted.itemsize[sharded],
        )  # fmt: skip
        if len(own):
            # Those that hold copies of a slab, at most.
            assert check(few, structure, own, []) <= 16
        assert check(few, structure, wanted, objects) <= len(columns)


def test_of_too_many_classes_and_tensors_all_ranks_are_made(monkeypatch):
    columns = held(LAYOUTS["pipeline of HSDP"])
    plan = planned_of(columns)[0].plan
    few, structure = decode_few(encode_table(plan.few.table, plan.structure))
    wanted, objects = wanted_by(columns[0], expand(few, structure).table)
    assert check(few, structure, wanted, objects) < len(columns)
    marks = len(structure.leaders) * few.num_tensors
    monkeypatch.setattr(structure_part, "_MOST_MARKS", marks - 1)
    assert check(few, structure, wanted, objects) == len(columns)


def test_tensors_may_have_no_dimension_at_all():
    scalars = [Tensor("a", (), [None]), Tensor("b", (), [None])]
    plan = planned_of(held([Stage(range(8), (8,), scalars, [("o", 1)])]))[0].plan
    table, structure = plan.few.table, plan.structure
    (mesh,) = structure.meshes
    table = replace(
        table, shape=table.shape[:, :0], offset=table.offset[:, :0], size=table.size[:, :0]
    )
    mesh = replace(mesh, offset=mesh.offset[:, :0], steps=mesh.steps[:, :, :0])
    few, structure = decode_few(encode_table(table, replace(structure, meshes=(mesh,))))
    none = np.zeros((2, 0), np.int64)
    wanted = Wanted(np.array([0, 1], np.int32), none, none, np.full(2, 4))
    assert check(few, structure, wanted, [2]) <= 2


def test_without_ranks_it_tells_of_all_tensors():
    columns = held(LAYOUTS["pipeline of HSDP"])
    plan = planned_of(columns)[0].plan
    few, structure = decode_few(encode_table(plan.few.table, plan.structure))
    none = expanded(few, structure, np.zeros(0, dtype=np.int64))
    assert (none.num_chunks, none.num_tensors) == (0, plan.num_tensors)
