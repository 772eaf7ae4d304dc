"""Any state over any ranks is planned so that every element is written once, where it is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings, target
from hypothesis import strategies as st

from ray_dcp.core.checksums import block_checks
from ray_dcp.core.columns import decode, encode
from ray_dcp.core.values import Kind
from ray_dcp.format.safetensors import parse_header
from ray_dcp.planning.coverage import problems
from ray_dcp.planning.finish import finish_table
from ray_dcp.planning.global_plan import make_plan, pack_for_commit, unpack_for_commit
from ray_dcp.planning.layout import LARGE_ALIGNMENT, LARGE_BYTES, SMALL_ALIGNMENT
from tests.format_cases import difference
from tests.plan_cases import Case, box_bytes, cases, truth, write

CONTAINERS = ("torch_save", "safetensors")


@settings(max_examples=40, deadline=None)
@given(
    case=cases(),
    container=st.sampled_from(CONTAINERS),
    part_bytes=st.sampled_from([1, 3000, 1 << 30]),
    min_piece_bytes=st.sampled_from([1, 16, 1 << 16]),
    data=st.data(),
)
def test_every_element_is_written_once_and_where_the_table_says(
    case: Case,
    container: str,
    part_bytes: int,
    min_piece_bytes: int,
    data: st.DataObject,
) -> None:
    columns = case.columns()
    nodes = [data.draw(st.integers(0, 2)) for _ in columns]
    plan = make_plan(
        columns, container=container, part_bytes=part_bytes, min_piece_bytes=min_piece_bytes,
        nodes=nodes,
    )  # fmt: skip
    files, receipts = write(case, columns, plan, "a1")
    table = finish_table(plan, "a1", receipts)
    sent = unpack_for_commit(pack_for_commit(plan))
    assert difference(finish_table(sent, "a1", receipts), table) == []
    assert (sent.digest, sent.fixed_bytes) == (plan.digest, plan.fixed_bytes)

    target(float(table.num_chunks), label="chunks")
    event(f"world {plan.world_size}")
    event(f"cut: {bool((plan.source_start > 0).any())}")
    event(f"several parts of a rank: {len(set(plan.file_rank.tolist())) < len(plan.file_rank)}")
    event(f"disagreements: {bool(plan.disagreements)}")

    assert set(files) == set(table.files)
    assert problems(table) == []
    known = {tensor.fqn: tensor for tensor in case.tensors}
    counts = {t.fqn: np.zeros(t.shape, np.int64) for t in case.tensors if t.kind != Kind.OBJECT}
    ends: dict[str, list[np.ndarray]] = {}
    for chunk in range(table.num_chunks):
        fqn = table.names[table.tensor[chunk]]
        kind = table.kind[table.tensor[chunk]]
        low = table.payload_offset[chunk]
        found = files[table.files[table.file[chunk]]][low : low + table.payload_bytes[chunk]]
        checks = table.checks[table.check_start[chunk] : table.check_start[chunk + 1]]
        expected = block_checks(found, int(table.block_bytes[chunk]))
        if plan.checks_at_end:
            ends.setdefault(table.files[table.file[chunk]], []).append(expected)
        else:
            assert np.array_equal(expected, checks)
        ndim = table.ndim[table.tensor[chunk]]
        offset, size = table.offset[chunk, :ndim].tolist(), table.size[chunk, :ndim].tolist()
        if kind != Kind.OBJECT:
            counts[fqn][tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
        if kind == Kind.TENSOR:
            assert bytes(found) == box_bytes(truth(known[fqn]), offset, size).tobytes()
        else:
            assert bytes(found) == f"deferred {fqn}".encode() * 3
    assert all((count == 1).all() for count in counts.values())
    for key, own in ends.items():
        assert files[key].endswith(np.concatenate(own).astype("<u8").tobytes())


@settings(max_examples=40, deadline=None)
@given(
    case=cases(), container=st.sampled_from(CONTAINERS), part_bytes=st.sampled_from([1, 1 << 30])
)
def test_files_keep_order_alignment_and_names(case: Case, container: str, part_bytes: int) -> None:
    plan = make_plan(case.columns(), container=container, part_bytes=part_bytes, min_piece_bytes=1)
    table = plan.table
    fixed = table.payload_offset >= 0
    framed = np.array([key.endswith(".distcp") for key in table.files])[table.file]
    large = table.payload_bytes >= LARGE_BYTES
    aligned = np.where(large, LARGE_ALIGNMENT, SMALL_ALIGNMENT)
    assert (table.payload_offset % aligned == 0)[fixed & framed].all()
    assert (np.diff(table.file) >= 0).all()
    same = np.diff(table.file) == 0
    later = (table.payload_offset[1:] >= table.payload_offset[:-1]) | ~fixed[1:]
    assert later[same].all()
    assert len(set(table.files)) == len(table.files)
    assert all(key.count("{attempt}") == 1 for key in table.files)
    assert (plan.source_rank == plan.file_rank[table.file]).all()
    assert sorted(set(table.file.tolist())) == list(range(len(table.files)))
    for file, head in enumerate(plan.file_headers):
        if not head:
            continue
        own = table.file == file
        entries = parse_header(head).entries
        assert len(head) % 4096 == 0
        assert len({entry.name for entry in entries}) == own.sum()
        assert [entry.begin + len(head) for entry in entries] == table.payload_offset[own].tolist()


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_the_same_columns_give_the_same_plan_after_a_trip_as_bytes(case: Case) -> None:
    columns = case.columns()
    again = [decode(encode(own)) for own in columns]
    plan, other = make_plan(columns), make_plan(again)
    assert plan.digest == other.digest
    assert plan.disagreements == other.disagreements
    assert plan.table.paths == other.table.paths


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_what_differs_between_ranks_is_whole_and_from_the_lowest(case: Case) -> None:
    plan = make_plan(case.columns(), min_piece_bytes=1)
    told = dict(plan.disagreements)
    for tensor in case.tensors:
        index = plan.table.names.index(tensor.fqn)
        for piece in tensor.pieces:
            if len(set(piece.values)) < 2:
                continue
            ndim = len(piece.offset)
            rows = np.flatnonzero(plan.table.tensor == index)
            rows = rows[(plan.table.offset[rows, :ndim] == piece.offset).all(axis=1)]
            rows = rows[(plan.table.size[rows, :ndim] == piece.size).all(axis=1)]
            if 0 in piece.size and len(rows) == 0:
                continue  # A box without elements that another one stands for.
            event("a box with different content")
            assert plan.source_rank[rows].tolist() == [piece.ranks[0]]
            assert tensor.fqn in told


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    world_size=st.integers(1, 8),
    extra=st.integers(0, 60),
)
def test_replicated_bytes_are_balanced_over_their_holders(
    weights: list[int], world_size: int, extra: int
) -> None:
    from ray_dcp.core.columns import ColumnsBuilder

    builders = [ColumnsBuilder() for _ in range(world_size)]
    if extra:
        builders[0].tensor("alone", "float32", (extra, 1024))
    for builder in builders:
        for index, weight in enumerate(weights):
            builder.tensor(f"w{index}", "float32", (weight, 1024))
    plan = make_plan([builder.build() for builder in builders])
    load = np.zeros(world_size, np.int64)
    np.add.at(load, plan.source_rank, plan.table.payload_bytes + 1024)
    own = extra * 4096 + 1024 if extra else 0
    total = int(load.sum())
    fair = max(own, -(-total // world_size))
    # Each cut of the line is off by at most half a piece.
    assert load.max() - fair <= max(weights) * 4096 + 1024
    target(-float(load.max() - fair), label="balance")


@pytest.mark.parametrize("container", CONTAINERS)
def test_ranks_without_anything_have_no_file(container: str) -> None:
    from ray_dcp.core.columns import ColumnsBuilder

    some = ColumnsBuilder()
    some.tensor("w", "float32", (3,))
    plan = make_plan([ColumnsBuilder().build(), some.build()], container=container)
    assert plan.file_rank.tolist() == [1]
