"""Any state over any ranks is planned so that every element is written once, where it is said."""

from __future__ import annotations

import numpy as np
from hypothesis import event, given, settings, target
from hypothesis import strategies as st

from ray_dcp.commit_protocol.messages import pack_receipts
from ray_dcp.core.checksums import block_checks
from ray_dcp.core.values import Kind
from ray_dcp.planning.coverage import check_coverage, holes, missing_volumes
from ray_dcp.planning.global_plan import make_plan, pack_for_commit, unpack_for_commit
from tests.support.format_cases import difference
from tests.support.plan_cases import Case, box_bytes, cases, finish_table, truth, write

# --- Plans ----------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    case=cases(),
    part_bytes=st.sampled_from([1, 3000, 1 << 30]),
    min_piece_bytes=st.sampled_from([1, 16, 1 << 16]),
    data=st.data(),
)
def test_every_element_is_written_once_and_where_the_table_says(
    case: Case,
    part_bytes: int,
    min_piece_bytes: int,
    data: st.DataObject,
) -> None:
    columns = case.columns()
    nodes = [data.draw(st.integers(0, 2)) for _ in columns]
    plan = make_plan(columns, part_bytes=part_bytes, min_piece_bytes=min_piece_bytes, nodes=nodes)
    files, receipts = write(case, columns, plan, "a1")
    table = finish_table(plan, "a1", pack_receipts(receipts.values()))
    sent = unpack_for_commit(pack_for_commit(plan))
    assert difference(finish_table(sent, "a1", pack_receipts(receipts.values())), table) == []
    assert (sent.digest, sent.fixed_bytes) == (plan.digest, plan.fixed_bytes)

    target(float(table.num_chunks), label="chunks")
    event(f"world {plan.world_size}")
    event(f"cut: {bool((plan.source_start > 0).any())}")
    event(f"several parts of a rank: {len(set(plan.file_rank.tolist())) < len(plan.file_rank)}")
    event(f"disagreements: {bool(plan.disagreements)}")

    assert set(files) == set(table.files)
    known = {tensor.fqn: tensor for tensor in case.tensors}
    counts = {t.fqn: np.zeros(t.shape, np.int64) for t in case.tensors if t.kind != Kind.OBJECT}
    ends: dict[str, list[np.ndarray]] = {}
    for chunk in range(table.num_chunks):
        fqn = table.names[table.tensor[chunk]]
        kind = table.kind[table.tensor[chunk]]
        low = table.payload_offset[chunk]
        found = files[table.files[table.file[chunk]]][low : low + table.payload_bytes[chunk]]
        checks = block_checks(found, int(table.block_bytes[chunk]))
        ends.setdefault(table.files[table.file[chunk]], []).append(checks)
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


@settings(max_examples=40)
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


# --- Coverage -------------------------------------------------------------------------------------


@st.composite
def a_box(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    offset = [draw(st.integers(0, length)) for length in shape]
    return offset, [draw(st.integers(0, n - low)) for n, low in zip(shape, offset, strict=True)]


@settings(max_examples=40)
@given(data=st.data(), shape=st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_coverage_of_any_boxes_is_what_counting_elements_says(
    data: st.DataObject, shape: list[int]
) -> None:
    found = [data.draw(a_box(tuple(shape))) for _ in range(data.draw(st.integers(0, 6)))]
    counts = np.zeros(shape, np.int64)
    for low, size in found:
        counts[tuple(slice(o, o + s) for o, s in zip(low, size, strict=True))] += 1
    offset = np.array([low for low, _ in found], np.int64).reshape(-1, len(shape))
    size = np.array([size for _, size in found], np.int64).reshape(-1, len(shape))
    whole = np.array([shape], np.int64)
    region = np.zeros(len(found), np.int64)
    coverage = check_coverage(region, offset, size, whole)
    missing = int((counts == 0).sum())
    event(f"missing: {missing > 0}, overlapping: {bool((counts > 1).any())}")
    assert coverage.outside == ()
    assert bool(coverage.overlaps) == bool((counts > 1).any())
    assert sum(gap[1] for gap in coverage.gaps) == missing
    full = (size > 0).all(axis=1)
    zero = np.zeros_like(whole)
    assert missing_volumes(region[full], offset[full], size[full], zero, whole)[0] == missing
    for low, lengths in holes(offset, size, zero[0], whole[0]):
        part = tuple(slice(o, o + s) for o, s in zip(low, lengths, strict=True))
        assert (counts[part] == 0).all()
        counts[part] = 9
    assert (counts != 0).all()
