"""Whether the metadata that a planner of the user's made can be told by a native checkpoint.

A native checkpoint tells the tensors and objects of the plans and their place in the nested state
dict, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

__all__ = ["is_path", "metadata_problems"]


def is_path(path: Any) -> bool:
    """Whether this is a place in a nested state dict: mapping keys and list indices."""
    return isinstance(path, (tuple, list)) and all(isinstance(key, (str, int)) for key in path)


def metadata_problems(plans: Sequence[SavePlan], metadata: Metadata) -> list[str]:
    """Returns where metadata says something else than the plans that it came with."""
    problems = [
        f"an attribute {name!r} of its own"
        for name in sorted(set(vars(metadata)) - {field.name for field in fields(Metadata)})
    ]
    if metadata.storage_data is not None:
        problems.append("storage_data")
    planned: dict[str, set[Any]] = {}
    for plan in plans:
        for item in plan.items:
            planned.setdefault(item.index.fqn, set()).add(_item_facts(item))
    told = {name: _stored_facts(stored) for name, stored in metadata.state_dict_metadata.items()}
    for name in sorted(planned.keys() | told.keys()):
        if name not in told:
            problems.append(f"nothing about {name!r}, which is planned")
        elif name not in planned:
            problems.append(f"{name!r}, which no rank has planned")
        elif planned[name] != told[name]:
            problems.append(f"{name!r} with another shape, dtype or chunks than planned")
    return problems


def _item_facts(item: WriteItem) -> Any:
    data = item.tensor_data
    if data is None:
        return None
    chunk = data.chunk
    box = (tuple(chunk.offsets), tuple(chunk.sizes))
    return tuple(data.size), data.properties.dtype, box


def _stored_facts(stored: TensorStorageMetadata | BytesStorageMetadata) -> set[Any]:
    if not isinstance(stored, TensorStorageMetadata):
        return {None}
    size, dtype = tuple(stored.size), stored.properties.dtype
    return {(size, dtype, (tuple(c.offsets), tuple(c.sizes))) for c in stored.chunks}
