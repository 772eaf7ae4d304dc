"""Replicated bytes are shared out so that nodes, and the ranks of each, write equally much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.planning.global_plan import MIN_WRITER_BYTES, make_plan

MIB = 1 << 20
ROW_BYTES = MIB


def shared(world_size, rows, nodes, own_rows=None, holders=None):
    """Returns the plan of a tensor that all (or some) hold, beside what some hold alone."""
    columns = []
    own_rows = own_rows or [0] * world_size
    for rank in range(world_size):
        builder = ColumnsBuilder()
        if rank == 0 or holders is None or rank in holders:
            builder.tensor("shared", "uint8", (rows, ROW_BYTES), splittable=True)
        if own_rows[rank]:
            builder.tensor(f"own.{rank}", "uint8", (own_rows[rank], ROW_BYTES))
        columns.append(builder.build())
    return make_plan(columns, nodes=nodes, min_writer_bytes=MIN_WRITER_BYTES)


def check_whole(plan, rows):
    """Each row of the shared tensor is in one piece."""
    table = plan.table
    own = np.flatnonzero(table.tensor == table.names.index("shared"))
    own = own[np.argsort(table.offset[own, 0])]
    starts, sizes = table.offset[own, 0], table.size[own, 0]
    np.testing.assert_array_equal(starts, np.append(0, np.cumsum(sizes))[:-1])
    assert sizes.sum() == rows


def written_by(plan):
    return np.bincount(plan.source_rank, plan.table.payload_bytes, plan.world_size).astype(int)


@given(
    world_size=st.integers(1, 48),
    a_node=st.integers(1, 9),
    rows=st.integers(1, 3000),
)
@settings(max_examples=60)
def test_what_all_hold_is_written_by_equals_of_16_mib_or_more(world_size, a_node, rows):
    nodes = [rank // a_node for rank in range(world_size)]
    plan = shared(world_size, rows, nodes)
    check_whole(plan, rows)
    written = written_by(plan)
    writers = written[written > 0]
    event(f"{len(writers) == world_size=}")
    # A cut is at a whole row: off by half of one at most, at both ends.
    assert writers.min() >= min(16 * MIB, rows * ROW_BYTES) - ROW_BYTES - 64 * 1024
    on_nodes = np.bincount(nodes, written)
    busy = on_nodes[on_nodes > 0]
    assert busy.max() - busy.min() <= 2 * ROW_BYTES
    if world_size % a_node == 0 and rows >= 200 * world_size:
        assert writers.max() / writers.mean() <= 1.05
    assert len(busy) == min(max(rows // 16, 1), len(on_nodes))


@st.composite
def jobs(draw, most_nodes, most_ranks, most_bytes):
    """Returns (the node of each rank, what each writes of its own, who holds what all share)."""
    nodes = draw(st.lists(st.integers(0, most_nodes), min_size=1, max_size=most_ranks))
    size = len(nodes)
    own = draw(st.lists(st.integers(0, most_bytes), min_size=size, max_size=size))
    return nodes, own, draw(st.sets(st.integers(0, size - 1), min_size=1))


@given(job=jobs(5, 24, 300), rows=st.integers(100, 2000))
# Nodes whose ranks are not adjacent.
@example(
    ([3, 1, 4, 1, 1, 4, 0, 1, 2, 3, 5, 5, 0, 2], [0] * 5 + [1] + [0] * 8, {*range(14)} - {3, 9}),
    315,
)
# A node of which a rank that can't share writes a little.
@example(([0, 0, 2, 3, 4, 0, 0, 1, 0], [0] * 8 + [7], {0, 1, 2, 3, 4, 7}), 100)
@settings(max_examples=60)
def test_what_ranks_write_of_their_own_counts(job, rows):
    nodes, own, holders = job
    holders = {0, *holders}
    plan = shared(len(nodes), rows, nodes, own, holders)
    check_whole(plan, rows)
    written = written_by(plan)
    given_bytes = written - np.array(own) * ROW_BYTES
    takers = np.flatnonzero(given_bytes)
    assert set(takers.tolist()) <= holders
    assert written[takers].min() >= 15 * MIB - 64 * 1024
    on_nodes = np.bincount(nodes, written)
    taking = np.unique(np.array(nodes)[takers])
    assert np.ptp(on_nodes[taking]) <= 2 * ROW_BYTES
    # Nobody is given a byte while another node with holders that write is much lower, if a file
    # of theirs would come to 16 MiB at that level.
    for node in {nodes[rank] for rank in holders if written[rank]} - set(taking.tolist()):
        most = max(written[rank] for rank in holders if nodes[rank] == node)
        lacking = max(MIN_WRITER_BYTES - most, 0)
        assert on_nodes[node] + lacking >= on_nodes[taking].min() - 2 * ROW_BYTES


@pytest.mark.parametrize("own", [False, True])
def test_a_small_state_of_2_000_ranks_is_written_by_few_on_different_nodes(own):
    # What each rank writes anyway is little: that does not make all share in the rest.
    columns = [_with_own(rank if own else None) for rank in range(2_000)]
    nodes = [rank // 8 for rank in range(2_000)]
    plan = make_plan(columns, nodes=nodes, min_writer_bytes=MIN_WRITER_BYTES)
    written = written_by(plan)
    assert np.sort(written)[-5:].tolist() == [8 * own, *[16 * MIB + 8 * own] * 4]
    assert len({nodes[rank] for rank in np.argsort(written)[-4:]}) == 4
    assert len(plan.table.files) == (2_000 if own else 4)


def _with_own(rank):
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", (4096, 4096), splittable=True)
    if rank is not None:
        builder.tensor(f"own.{rank}", "int64", ())
    return builder.build()
