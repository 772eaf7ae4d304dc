"""Any state over any ranks is planned so that every element is written once, where it is said.

Which states are valid, and what is stored once, is what torch's own planner says.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings, target
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
from ray_dcp.core.values import Kind
from ray_dcp.planning.coverage import check_coverage, holes, missing_volumes
from ray_dcp.planning.global_plan import make_plan, pack_for_commit, unpack_for_commit
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
