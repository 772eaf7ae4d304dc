"""Any state over any ranks is planned so that each element is written once, evenly by all ranks.

Which states are valid, and what is stored once, is what torch's own planner says.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, event, example, given, settings, target
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ray_dcp import CoverageError, PlanConflictError
from ray_dcp.commit_protocol.messages import pack_receipts
from ray_dcp.core.checksums import block_checks
from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.values import Kind
from ray_dcp.planning.coverage import check_coverage, holes, missing_volumes
from ray_dcp.planning.global_plan import make_plan, pack_for_commit, unpack_for_commit
from ray_dcp.planning.share_out import MIN_WRITER_BYTES
from tests.support.format_cases import difference
from tests.support.plan_cases import (
    Case,
    Piece,
    Tensor,
    box_bytes,
    cases,
    finish_table,
    truth,
    write,
)


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


def torch_plans(case: Case) -> list[SavePlan]:
    items: list[list[WriteItem]] = [[] for _ in range(case.world_size)]
    for tensor in case.tensors:
        for piece in tensor.pieces:
            for rank in piece.ranks:
                items[rank].append(_write_item(tensor, piece))
    return [SavePlan(own) for own in items]


def _write_item(tensor: Tensor, piece: Piece) -> WriteItem:
    if tensor.kind == Kind.OBJECT:
        return WriteItem(MetadataIndex(tensor.fqn), WriteItemType.BYTE_IO)
    offset = torch.Size(piece.offset)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offset, torch.Size(piece.size)),
        properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
        size=torch.Size(tensor.shape),
    )
    return WriteItem(MetadataIndex(tensor.fqn, offset), WriteItemType.SHARD, tensor_data=data)


def known_by_offset(case: Case) -> Case:
    """Returns the case without the boxes that torch's index (FQN, offset) takes for another.

    In a valid state only boxes without elements share their offset with others.
    """
    tensors = []
    for tensor in case.tensors:
        kept: dict[tuple[int, ...], Piece] = {}
        for piece in sorted(tensor.pieces, key=lambda piece: -math.prod(piece.size)):
            kept.setdefault(piece.offset, piece)
        tensors.append(replace(tensor, pieces=tuple(kept.values())))
    return replace(case, tensors=tuple(tensors))


@settings(max_examples=30)
@given(case=cases())
def test_a_valid_state_has_the_same_chunks_in_the_same_tensors(case: Case) -> None:
    case = known_by_offset(case)
    plans, metadata = create_default_global_save_plan(dedup_save_plans(torch_plans(case)))
    assert _validate_global_plan(plans, metadata) == []
    table = make_plan(case.columns(), min_piece_bytes=1 << 40).table
    assert set(table.names) == set(metadata.state_dict_metadata)
    event(f"chunks: {min(table.num_chunks // 5 * 5, 20)}+")
    for index, fqn in enumerate(table.names):
        theirs = metadata.state_dict_metadata[fqn]
        rows = (table.tensor == index).nonzero()[0]
        if isinstance(theirs, BytesStorageMetadata):
            assert (table.kind[index], len(rows)) == (Kind.OBJECT, 1), fqn
            continue
        ndim = table.ndim[index]
        assert table.shape[index, :ndim].tolist() == list(theirs.size)
        ours = [
            (table.offset[row, :ndim].tolist(), table.size[row, :ndim].tolist()) for row in rows
        ]
        assert sorted(ours) == sorted((list(c.offsets), list(c.sizes)) for c in theirs.chunks)


@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_a_state_is_refused_when_torch_refuses_it(case: Case, data: st.DataObject) -> None:
    places = [
        (t, p) for t, tensor in enumerate(case.tensors)
        if tensor.kind != Kind.OBJECT and tensor.shape
        for p in range(len(tensor.pieces))
    ]  # fmt: skip
    assume(places)
    broken = case
    for t, p in data.draw(
        st.lists(st.sampled_from(places), min_size=1, max_size=2, unique_by=lambda place: place[0])
    ):
        broken = _broken(broken, t, p, data)
    broken = known_by_offset(broken)
    assume(all(tensor.pieces for tensor in broken.tensors))
    plans, metadata = create_default_global_save_plan(dedup_save_plans(torch_plans(broken)))
    if broken.world_size == 1:
        # Why: torch does not look for gaps when there is one plan.
        plans = plans * 2
    found = _validate_global_plan(plans, metadata)
    refused = [message for message in found if not _about_an_empty_overlap(message)]
    event(f"refused: {bool(refused)}")
    if not refused:
        make_plan(broken.columns())
        return
    with pytest.raises(PlanConflictError) as caught:
        make_plan(broken.columns())
    keys = {message.split()[0].removeprefix("key:") for message in refused}
    assert all(repr(key) in str(caught.value) for key in keys)
    only_gaps = all("invalid fill" in message for message in refused)
    assert isinstance(caught.value, CoverageError) == only_gaps


def _about_an_empty_overlap(message: str) -> bool:
    """Tells whether torch takes a box without elements, within another, for an overlap."""
    sizes = re.findall(r"sizes=torch\.Size\(\[([\d, ]*)\]\)", message)
    return "overlapping" in message and any("0" in size.split(", ") for size in sizes)


def _broken(case: Case, t: int, p: int, data: st.DataObject) -> Case:
    tensor = case.tensors[t]
    piece = tensor.pieces[p]
    pieces: tuple[Piece, ...] = ()
    match data.draw(st.sampled_from(["drop", "move", "grow", "shrink"])):
        case "drop":
            pieces = ()
        case "move":
            pieces = (replace(piece, offset=_changed(piece.offset, data, 1)),)
        case "grow":
            pieces = (replace(piece, size=_changed(piece.size, data, 1)),)
        case "shrink":
            pieces = (replace(piece, size=_changed(piece.size, data, -1)),)
    changed = replace(tensor, pieces=(*tensor.pieces[:p], *pieces, *tensor.pieces[p + 1 :]))
    return replace(case, tensors=(*case.tensors[:t], changed, *case.tensors[t + 1 :]))


def _changed(values: tuple[int, ...], data: st.DataObject, by: int) -> tuple[int, ...]:
    dim = data.draw(st.integers(0, len(values) - 1))
    return tuple(max(0, v + by) if i == dim else v for i, v in enumerate(values))


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
# A node whose file of a holder would lack half a MiB at the common level.
@example(([0, 1, 0], [1, 0, 70], {0, 1}), 100)
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
    # of theirs would come to 16 MiB at the level that these nodes reach together.
    for node in {nodes[rank] for rank in holders if written[rank]} - set(taking.tolist()):
        most = max(written[rank] for rank in holders if nodes[rank] == node)
        lacking = max(MIN_WRITER_BYTES - most, 0)
        level = on_nodes[[*taking, node]].mean()
        assert on_nodes[node] + lacking >= level - 2 * ROW_BYTES


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
