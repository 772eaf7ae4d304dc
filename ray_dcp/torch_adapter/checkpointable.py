"""Plain tensors whose attributes describe the parts of a global tensor that they hold.

DCP calls them `CheckpointableTensor`, and reads their attributes (`FIELDS`) since torch 2.14.
ray_dcp supports them for every class and every torch. `for_planner` shows them to planners of an
older torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from operator import index
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ray_dcp.errors import UnsupportedValueError

Box = tuple[tuple[int, ...], tuple[int, ...]]

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Shape of the global tensor; offset of each part in it and in the local tensor, and its
lengths."""


def is_checkpointable(value: Any) -> bool:
    """Returns whether a value is a tensor with all of `FIELDS`.

    Complexity: 15 ns for a tensor without them.
    """
    return (
        hasattr(value, "global_shape")
        and isinstance(value, torch.Tensor)
        and all(hasattr(value, name) for name in FIELDS)
    )


def copy_fields(of: Any, to: Any) -> None:
    """Copies the attributes of one tensor to another, so that it holds the same parts."""
    for name in FIELDS:
        setattr(to, name, getattr(of, name))


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


def global_shape(tensor: Any) -> tuple[int, ...]:
    """Returns the shape of the global tensor."""
    return tuple(tensor.global_shape)


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
        raise _contradiction(fqn, told) from error
    if len(set(map(len, fields))) != 1:
        raise _contradiction(
            fqn, f"expected one entry a part in each, found {[*map(len, fields)]} of them"
        )
    found = []
    for offset, start, size in zip(*fields, strict=True):
        if not (_is_inside(offset, size, whole) and _is_inside(start, size, local)):
            raise _contradiction(
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


def _contradiction(fqn: str, what: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"the attributes {', '.join(FIELDS)} of {fqn!r} don't fit: {what}; correct them, or "
        f"delete {FIELDS[0]} to save it as an ordinary tensor",
        key=fqn,
    )


class Shards(torch.Tensor):
    """Presents the parts of a tensor by the methods that planners of every torch call."""

    def size(self, dim: int | None = None) -> Any:
        """Returns the global shape, which planners compare with the stored one."""
        whole = torch.Size(global_shape(self))
        return whole if dim is None else whole[dim]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        tensor: Any = self
        plain = self.detach().as_subclass(torch.Tensor)
        properties = TensorProperties.create_from_tensor(plain)
        properties.requires_grad = self.requires_grad
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(global_shape(tensor))),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for (offset, size), _ in self._parts()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        held, offset = self._parts(), tuple(index.offset or ())
        numbers = [number for number, ((at, _), _) in enumerate(held) if at == offset]
        if not numbers:
            raise ValueError(f"{index.fqn!r} has no part at {index.offset} on this rank")
        # Why not only the first: a part without elements begins where the next one does.
        return held[index.index if index.index in numbers else numbers[0]][1]

    def _parts(self) -> tuple[tuple[Box, torch.Tensor], ...]:
        plain = self.detach().as_subclass(torch.Tensor)
        copy_fields(self, plain)
        return parts(plain, "tensor")


_SEES_THEM = hasattr(checkpoint, "CheckpointableTensor")
"""Whether this torch's planners read `FIELDS` themselves."""


def for_planner(state: Any) -> Any:
    """Returns a state dict in which this torch's planners find the parts that tensors hold.

    Containers with such a tensor below them are copied. Tensors share memory with those of the
    state, so that a load into one is a load into the other; `take_back` does the rest.

    Args:
        state: Nested dicts and lists. As in DCP, values in a tuple are part of an object.
    """
    return state if _SEES_THEM else _shown(state)


def _shown(value: Any) -> Any:
    if is_checkpointable(value):
        if hasattr(value, "__create_chunk_list__"):
            return value
        if value.is_meta:
            raise UnsupportedValueError(
                f"a part of a tensor of {global_shape(value)} is on the meta device: this torch's "
                "planners can't give it memory, so give it some before loading"
            )
        shown = value.detach().as_subclass(Shards).requires_grad_(value.requires_grad)
        copy_fields(value, shown)
        return shown
    if isinstance(value, dict):
        items: Mapping[Any, Any] = value
        made = {key: _shown(item) for key, item in items.items()}
        if all(made[key] is items[key] for key in made):
            return value
        copied = value.copy()
        copied.update(made)
        return copied
    if type(value) is list:
        shown = [_shown(item) for item in value]
        same = all(new is old for new, old in zip(shown, value, strict=True))
        return value if same else shown
    return value


def take_back(state: Any, shown: Any) -> None:
    """Copies values that a planner replaced in its state dict to the original state dict.

    Args:
        state: The argument of `for_planner`.
        shown: The result of `for_planner`.
    """
    if shown is state:
        return
    for key in shown if isinstance(shown, dict) else range(len(shown)):
        value = shown[key]
        old = state.get(key) if isinstance(state, dict) else state[key]
        if type(value) is type(old) and isinstance(value, (dict, list)):
            take_back(old, value)
        elif value is not old and not isinstance(value, Shards):
            state[key] = value
