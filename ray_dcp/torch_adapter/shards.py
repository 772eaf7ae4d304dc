"""The boxes of a global tensor that a rank holds, each with its local tensor.

As in DCP, these classes are sharded: `DTensor`, `ShardedTensor`, any tensor with DCP's protocol
(`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`), and any tensor whose
attributes describe its parts (`CheckpointableTensor`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from operator import index, is_
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import is_lazy

from ray_dcp.core.values import Int64Array
from ray_dcp.errors import UnsupportedValueError
from ray_dcp.torch_adapter.objects import is_simple, tensors_within
from ray_dcp.torch_adapter.subclass_copy import with_attributes
from ray_dcp.torch_adapter.tensors import (
    FIELDS,
    is_checkpointable,
    is_plain,
    lost_memory_within,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in the global tensor."""

Span = tuple[int, int]
"""Start and length."""


@dataclass(frozen=True)
class Sharded:
    """What this rank holds of one global tensor.

    Attributes:
        shape: Shape of the global tensor.
        dtype: Dtype of its elements.
        requires_grad: The local part's `requires_grad`.
        boxes: The boxes; none if the rank is not in the tensor's mesh.
        tensors: The local tensor of each box, of the box's size. Views, not copies.
        replicated: Whether other ranks hold the same boxes as declared replicas (`Replicate`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    boxes: tuple[Box, ...]
    tensors: tuple[torch.Tensor, ...]
    replicated: bool = False


def is_sharded(value: Any) -> bool:
    """Returns whether `sharded` supports the value."""
    return (
        isinstance(value, (DTensor, ShardedTensor))
        or hasattr(value, "__create_chunk_list__")
        or is_checkpointable(value)
    )


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Returns whether what this rank has of a tensor is on the meta device.

    Why not `is_meta`: a `ShardedTensor` without shards of this rank raises there.
    """
    if isinstance(tensor, ShardedTensor):
        return any(shard.tensor.is_meta for shard in tensor.local_shards())
    return tensor.is_meta


def why_part(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor must not be saved within an object, or None if this rank has all of it.

    Of an object, a checkpoint keeps the value of one rank.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        is_part = any(
            not isinstance(placement, Replicate) and mesh.size(dim) > 1
            for dim, placement in enumerate(tensor.placements)
        )
    elif isinstance(tensor, ShardedTensor):
        is_part = len(tensor.metadata().shards_metadata) > len(tensor.local_shards())
    else:
        whole = getattr(tensor, "global_shape", ()) if is_checkpointable(tensor) else tensor.shape
        is_part = tuple(tensor.shape) != tuple(whole)
    if not is_part:
        return None
    return (
        f"is sharded ({type(tensor).__qualname__}), so that this object has only a part of it: "
        "put the tensor into dicts and lists alone, which are saved entry by entry (not into a "
        "tuple, an object, or with flatten_state_dict=False), or save full_tensor() or PerRank"
    )


def sharded(value: Any, fqn: str, layouts: Layouts | None = None, *, saving: bool) -> Sharded:
    """Returns what this rank holds of a sharded tensor.

    Args:
        value: A value for which `is_sharded` holds.
        fqn: Name of the tensor, for messages and for DCP's protocol.
        layouts: The layouts that are known; new ones are added.
        saving: Call `__create_write_items__` rather than `__create_chunk_list__`.

    Raises:
        UnsupportedValueError: The tensor has a `Partial` placement, a local tensor does not fit its
            box, or the protocol returned no boxes.
    """
    if isinstance(value, DTensor):
        return _from_dtensor(value, fqn, {} if layouts is None else layouts, saving)
    if isinstance(value, ShardedTensor):
        return _from_sharded_tensor(value, fqn)
    if hasattr(value, "__create_chunk_list__"):
        return _from_protocol(value, fqn, saving)
    return _from_parts(value, fqn)


@dataclass(frozen=True)
class Layout:
    """The place of a rank's local tensor in the global one.

    Attributes:
        local_size: Shape that the local tensor must have.
        boxes: Boxes that it covers; several if a strided shard has rows from several places.
        starts: Where each box begins in the local tensor.
        replicated: Whether other ranks hold the same boxes as declared replicas.
    """

    local_size: tuple[int, ...]
    boxes: tuple[Box, ...]
    starts: tuple[tuple[int, ...], ...]
    replicated: bool


Layouts = dict[tuple[Any, Any, Any], Layout]
"""The known layouts by mesh, placements and global shape, for one save or load."""


def chunk_spans(length: int, cuts: Sequence[tuple[int, int, int]]) -> list[Span]:
    """Returns the spans of a dimension that a rank holds after several cuts.

    A `_StridedShard` of 8 elements with 2 pieces and split factor 2:

        part     |--- 0 ---|--- 1 ---|
        piece    | 0  | 1  | 0  | 1  |
        element   0 1  2 3  4 5  6 7     piece 0 has the spans (0, 2) and (4, 2)

    Args:
        length: Length of the whole dimension.
        cuts: Left to right, `(number of pieces, index of the piece, split factor)`. The factor is 1
            for a plain `Shard`; a `_StridedShard` first cuts into that many parts, and then each
            part into pieces.

    Returns:
        Spans in local order, adjacent ones merged, none empty.

    Source: `torch/distributed/tensor/placement_types.py`, `_StridedShard._split_tensor`.

    Examples:
        >>> chunk_spans(8, [(2, 1, 1)]), chunk_spans(8, [(2, 0, 2)])
        ([(4, 4)], [(0, 2), (4, 2)])
    """
    held = np.arange(length)
    for pieces, number, factor in cuts:
        held = np.concatenate(
            [_chunk(_chunk(held, factor, part), pieces, number) for part in range(factor)]
        )
    runs = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
    return [(int(run[0]), len(run)) for run in runs if len(run)]


def _chunk(held: Int64Array, pieces: int, number: int) -> Int64Array:
    """Returns a piece by the rule of `torch.chunk`: all have the same length but the last."""
    full = -(-len(held) // pieces)
    return held[full * number : full * (number + 1)]


def _layout(mesh: Any, placements: Sequence[Any], shape: torch.Size) -> Layout:
    if mesh.get_coordinate() is None:
        return Layout((), (), (), replicated=False)
    replicated = any(
        isinstance(placement, Replicate) and mesh.size(dim) > 1
        for dim, placement in enumerate(placements)
    )
    size, offset = map(tuple, compute_local_shape_and_global_offset(shape, mesh, placements))
    if 0 in size or not any(isinstance(placement, _StridedShard) for placement in placements):
        return Layout(size, ((offset, size),), ((0,) * len(shape),), replicated)
    # Why: torch returns only the place of the first element; a strided shard's rows may be
    # elsewhere.
    coordinate = mesh.get_coordinate()
    spans, starts = [], []
    for dim, length in enumerate(shape):
        cuts = [
            (mesh.size(mesh_dim), coordinate[mesh_dim], getattr(placement, "split_factor", 1))
            for mesh_dim, placement in enumerate(placements)
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
        ]
        spans.append(chunk_spans(length, cuts))
        counts = [count for _, count in spans[-1]]
        starts.append(list(itertools.accumulate(counts[:-1], initial=0)))
    corners = list(itertools.product(*spans))
    boxes = tuple((tuple(s for s, _ in corner), tuple(c for _, c in corner)) for corner in corners)
    local_size = tuple(sum(count for _, count in dim_spans) for dim_spans in spans)
    return Layout(local_size, boxes, tuple(itertools.product(*starts)), replicated)


def _from_dtensor(tensor: DTensor, fqn: str, layouts: Layouts, saving: bool) -> Sharded:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UnsupportedValueError(
            f"{fqn!r} is a DTensor with Partial placement ({tensor.placements}), which is a sum "
            "that was not made yet; call .redistribute() to Replicate or Shard first",
            key=fqn,
        )
    key = tensor.device_mesh, tensor.placements, tensor.shape
    layout = layouts.get(key)
    if layout is None:
        layout = layouts[key] = _layout(*key)
    shape, dtype, requires_grad = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    if not layout.boxes:
        return Sharded(shape, dtype, requires_grad, (), ())
    local: Any = tensor._local_tensor
    if hasattr(local, "__create_chunk_list__"):
        return _from_protocol(tensor, fqn, saving)
    if not is_plain(local):
        local = with_attributes(tensor.to_local(), local)
    if local.numel() == 0 and 0 in layout.local_size:
        # Why: an empty shard of FSDP2 has no rows, while its placements describe rows without
        # columns.
        local = local.reshape(layout.local_size)
    _check_fit(local, layout.local_size, fqn)
    pieces = _pieces(local, layout)
    return Sharded(shape, dtype, requires_grad, layout.boxes, pieces, layout.replicated)


def _pieces(local: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    if len(layout.boxes) == 1:
        return (local,)
    pieces = []
    for start, (_, size) in zip(layout.starts, layout.boxes, strict=True):
        piece = local
        for dim, (low, count) in enumerate(zip(start, size, strict=True)):
            piece = piece.narrow(dim, low, count)
        pieces.append(with_attributes(piece, local))
    return tuple(pieces)


def _check_fit(local: Any, size: tuple[int, ...], fqn: str) -> None:
    if tuple(local.shape) != size:
        raise UnsupportedValueError(
            f"the local tensor of {fqn!r} has shape {tuple(local.shape)}, but its mesh and "
            f"placements say {size}: it was padded, made by DTensor.from_local without the global "
            f"shape, or cut by FSDP2 with TP in a dimension that the mesh does not divide. Shard "
            f"another dimension, or save full_tensor()",
            key=fqn,
        )


def _from_sharded_tensor(tensor: ShardedTensor, fqn: str) -> Sharded:
    boxes, tensors = [], []
    shards = tensor.local_shards()
    for shard in shards:
        offset, local = tuple(shard.metadata.shard_offsets), shard.tensor
        size = tuple(shard.metadata.shard_sizes)
        if isinstance(local, ShardedTensor):
            # 2-D FSDP1.
            if len(shards) != 1 or len(local.local_shards()) != 1:
                raise UnsupportedValueError(
                    f"{fqn!r} is a ShardedTensor of ShardedTensors; only one local shard in one "
                    "local shard can be saved",
                    key=fqn,
                )
            inner = local.local_shards()[0]
            offset = tuple(a + b for a, b in zip(offset, inner.metadata.shard_offsets, strict=True))
            size, local = tuple(inner.metadata.shard_sizes), inner.tensor
        _check_fit(local, size, fqn)
        boxes.append((offset, size))
        tensors.append(local)
    metadata = tensor.metadata()
    properties = metadata.tensor_properties
    return Sharded(
        tuple(metadata.size),
        properties.dtype,
        properties.requires_grad,
        tuple(boxes),
        tuple(tensors),
    )


def _from_protocol(value: Any, fqn: str, saving: bool) -> Sharded:
    chunks, indices, shape = [], [], tuple(value.size())
    requires_grad = bool(getattr(value, "requires_grad", False))
    if saving:
        for item in value.__create_write_items__(fqn, value):
            if item.tensor_data is None or item.index.fqn != fqn:
                raise UnsupportedValueError(
                    f"{fqn!r} ({type(value).__qualname__}) describes itself as {item.index.fqn!r} "
                    f"of type {item.type.name}; only boxes of the tensor itself can be saved "
                    "without a planner of your own",
                    key=fqn,
                )
            chunks.append(item.tensor_data.chunk)
            indices.append(item.index)
            shape = tuple(item.tensor_data.size)
            requires_grad = bool(item.tensor_data.properties.requires_grad)
    else:
        chunks = list(value.__create_chunk_list__())
        indices = [MetadataIndex(fqn, chunk.offsets, i) for i, chunk in enumerate(chunks)]
    boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
    tensors = tuple(value.__get_tensor_shard__(index) for index in indices)
    for tensor, (_, size) in zip(tensors, boxes, strict=True):
        if 0 not in size:
            _check_fit(tensor, size, fqn)
    dtype = tensors[0].dtype if tensors else value.dtype
    return Sharded(shape, dtype, requires_grad, boxes, tensors)


def _from_parts(tensor: Any, fqn: str) -> Sharded:
    held = parts(tensor, fqn)
    return Sharded(
        tuple(tensor.global_shape),
        tensor.dtype,
        tensor.requires_grad,
        tuple(box for box, _ in held),
        tuple(with_attributes(part, tensor) for _, part in held),
        # Why: ranks may hold the same part, such as replicas of experts, and nothing declares it.
        replicated=True,
    )


# Tensors whose attributes describe the parts of a global tensor that they hold

SEES_PARTS = hasattr(checkpoint, "CheckpointableTensor")
"""Whether the planners of this torch (2.14 or later) read `FIELDS` themselves."""


def copy_fields(of: Any, to: Any) -> None:
    """Copies the attributes of one tensor to another, so that it holds the same parts."""
    for name in FIELDS:
        setattr(to, name, getattr(of, name))


def for_stager(state: Any) -> Any:
    """Returns a nested state dict with copies of conjugate and negative views, also in objects.

    Why: torch's stagers copy the memory of a tensor without asking what it shows.

    Args:
        state: Not changed; returned itself if it has no such views.

    Raises:
        UnsupportedValueError: Tensors reach beyond their memory, which stagers would read.
    """
    problems: list[str] = []
    made = _resolved(state, "", problems)
    if problems:
        raise UnsupportedValueError(
            f"{len(problems)} value(s) of the state dict can't be staged: {'; '.join(problems)}"
        )
    return made


def _resolved(value: Any, name: str, problems: list[str]) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_lazy(value) and (reason := lost_memory_within(value)) is not None:
            problems.append(f"{name!r} {reason}")
            return value
        return _shown(value)
    if not isinstance(value, (Mapping, list, tuple)):
        held = [] if is_simple(value) else tensors_within(value)
        shown = [_resolved(tensor, name, problems) for tensor in held]
        # Why a memo: the object is copied with these tensors instead of copies of its own.
        memo = {id(old): new for old, new in zip(held, shown, strict=True)}
        is_same = all(map(is_, held, shown))
        return value if is_same else deepcopy(value, memo)
    made: Any = value
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, old in items:
        new = _resolved(old, f"{name}.{key}" if name else str(key), problems)
        if new is not old:
            made = copy(value) if made is value and not isinstance(value, tuple) else made
            made = list(made) if isinstance(made, tuple) else made
            made[key] = new
    if isinstance(value, tuple) and made is not value:
        made = type(value)._make(made) if hasattr(value, "_make") else tuple(made)
    return made


def as_sharded_like(local: torch.Tensor, whole: DTensor) -> DTensor:
    """Returns a tensor as this rank's part of one that is sharded like another."""
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy of what it shows if its memory holds something else."""
    if isinstance(tensor, DTensor):
        local: Any = tensor._local_tensor
        shown = _shown(local)
        if shown is local:
            return tensor
        return as_sharded_like(shown, tensor)
    if not tensor.is_conj() and not tensor.is_neg():
        return tensor
    shown = tensor.detach().resolve_conj().resolve_neg()
    return shown.requires_grad_(tensor.requires_grad)


def fields_of(state: Any) -> Any:
    """Returns the parts held by the tensors of a nested state dict, for `give_fields`."""
    if is_checkpointable(state):
        return tuple(state.shape), {name: getattr(state, name) for name in FIELDS}
    if isinstance(state, Mapping):
        found = {key: fields for key, value in state.items() if (fields := fields_of(value))}
    elif isinstance(state, (list, tuple)):
        found = {key: fields for key, value in enumerate(state) if (fields := fields_of(value))}
    else:
        return None
    return found


def give_fields(fields: Any, copied: Any) -> None:
    """Sets the parts of the tensors in a copy of a state dict to those of the original.

    Why: some of torch's stagers copy only the elements, and a part would be saved as the whole.
    """
    if isinstance(fields, tuple):
        shape, own = fields
        if isinstance(copied, torch.Tensor) and tuple(copied.shape) == shape:
            vars(copied).update(own)
        return
    for key, one in (fields or {}).items():
        with suppress(LookupError, TypeError):  # a user's stager may omit values
            give_fields(one, copied[key])


def parts(tensor: Any, fqn: str) -> tuple[tuple[Box, torch.Tensor], ...]:
    """Returns each box of the global tensor that a tensor holds, with a view of the local part.

    Args:
        tensor: A tensor for which `is_checkpointable` holds.
        fqn: Name of the tensor, for messages.

    Raises:
        UnsupportedValueError: The attributes contradict each other, or the tensor.

    Source: `torch/distributed/checkpoint/protocol.py`, `_validate_checkpointable_tensor_metadata`.
    """
    local = tuple(tensor.shape)
    try:
        whole = tuple(map(index, tensor.global_shape))
        fields = [[tuple(map(index, one)) for one in getattr(tensor, name)] for name in FIELDS[1:]]
    except TypeError as error:
        told = f"expected a tuple of whole numbers as shape and for each part ({error})"
        raise _misfit_error(fqn, told) from error
    if len(set(map(len, fields))) != 1:
        raise _misfit_error(
            fqn, f"expected one entry a part in each, found {[*map(len, fields)]} of them"
        )
    found = []
    for offset, start, size in zip(*fields, strict=True):
        if not (_is_inside(offset, size, whole) and _is_inside(start, size, local)):
            raise _misfit_error(
                fqn,
                f"the part at {offset} of {size} lies outside of the global shape {whole}, or at "
                f"{start} outside of the local shape {local}",
            )
        part = tensor
        for dim, (low, length) in enumerate(zip(start, size, strict=True)):
            if length != part.shape[dim]:
                part = part.detach().narrow(dim, low, length)
        found.append(((offset, size), part))
    return tuple(found)


def _is_inside(offset: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(offset) == len(size) == len(shape) and all(
        low >= 0 and length >= 0 and low + length <= whole
        for low, length, whole in zip(offset, size, shape, strict=True)
    )


def _misfit_error(fqn: str, what: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"the attributes {', '.join(FIELDS)} of {fqn!r} don't fit: {what}; correct them, or "
        f"delete {FIELDS[0]} to save it as an ordinary tensor",
        key=fqn,
    )
