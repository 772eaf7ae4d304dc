"""Which states are valid, and what is stored once, is what torch's own planner says."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, event, given, settings
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
from ray_dcp.core.values import Kind
from ray_dcp.planning.global_plan import make_plan
from tests.support.plan_cases import Case, Piece, Tensor, cases


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
