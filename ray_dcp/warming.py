"""`warm_up`: prepares memory and processes for asynchronous saves, before the first one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ray_dcp.operations import StateDict, session_for
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.staging_backend import warm_process
from ray_dcp.stage.values import StagerOptions
from ray_dcp.torch_adapter.shards import Layouts, is_sharded, sharded
from ray_dcp.torch_adapter.state import check_mapping, stateful_to_state_dict

__all__ = ["share_bytes", "warm_staging", "warm_up"]

_MODULES = ("ray_dcp.asynchronous", "ray_dcp.entrypoints", "ray_dcp.loading")
"""The modules that the first save or load would import."""


def warm_up(
    state_dict: StateDict,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: SaveOptions | None = None,
    stager: StagerOptions | None = None,
) -> Future[None]:
    """Prepares, in the background, for asynchronous saves of a state of this size.

    The first asynchronous save of a process is slow: it starts its session and the node's stager,
    and touches new memory for the first time, which takes longer than the copy itself. Call this
    function once before training begins, on all ranks.

    Args:
        state_dict: As for `async_save`; only its sizes are used.
        process_group: As for `async_save`.
        no_dist: As for `async_save`.
        options: As for `async_save`; `keep_in_memory` counts.
        stager: How the nodes stage: their budget of memory. Those of the rank that is first on a
            node count.

    Returns:
        A future that is done when everything is prepared. Waiting for it is optional.

    Raises:
        InvalidRequestError: `state_dict` is not a mapping.
        ParticipantError: The session can't be created.

    Examples:
        >>> import torch, ray_dcp
        >>> ray_dcp.warm_up({"w": torch.ones(2, 3)}).result()
    """
    check_mapping(state_dict)
    session: Any = session_for(process_group, no_dist)
    state = stateful_to_state_dict(dict(state_dict), as_if_stepped=True)
    # Why not in the background: a child forked during an import would wait forever for its lock,
    # as it lacks the thread that imports.
    for module in _MODULES:
        importlib.import_module(module)
    if session.stages_itself:
        return warm_process(share_bytes(state, session.world_size))
    options = options or SaveOptions()
    return warm_staging(session, state, options, stager)


def warm_staging(
    session: Any,
    state: Mapping[str, Any],
    options: SaveOptions,
    stager: StagerOptions | None = None,
) -> Future[None]:
    """Prepares, in the background, a rank's memory at its node's stager for a state.

    Args:
        session: Session of the rank.
        state: The nested values.
        options: Only `keep_in_memory` is used.
        stager: As for `warm_up`.

    Raises:
        ParticipantError: The stager does not start or does not answer.
    """
    # One more than are kept: the checkpoint that is being written.
    num_bytes = (1 + options.keep_in_memory) * share_bytes(state, session.world_size)
    warmed: Future[None] = session.staging(stager).warm(num_bytes)
    return warmed


def share_bytes(state: Any, world_size: int) -> int:
    """Returns about how many bytes of a state one rank will stage.

    A rank stages all of its shards, and an equal share of what all ranks hold.

    Args:
        state: The nested values.
        world_size: Number of ranks.

    Examples:
        >>> share_bytes({"w": torch.ones(8), "more": [torch.ones(4), 3]}, world_size=2)
        24
    """
    return sum(math.ceil(_bytes(value, world_size)) for value in _tensors(state))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)


def _bytes(value: torch.Tensor, world_size: int) -> float:
    if not is_sharded(value):
        return value.nbytes / world_size
    num_bytes: float = sum(
        part.nbytes for part in sharded(value, "", Layouts(), saving=False).tensors
    )
    if isinstance(value, DTensor):
        sizes = zip(value.device_mesh.shape, value.placements, strict=True)
        num_bytes /= math.prod(size for size, placed in sizes if placed.is_replicate())
    return num_bytes
