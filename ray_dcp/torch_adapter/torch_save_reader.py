"""Replaces torch's `BroadcastingTorchSaveReader` in a load: one rank reads a file for all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ray_dcp.errors import (
    MissingKeyError,
    ShapeMismatchError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.torch_adapter.flatten import flatten, flatten_top
from ray_dcp.torch_adapter.objects import load_torch_file
from ray_dcp.torch_adapter.sink import default_device


class TensorsOnlyError(UnsupportedValueError, RuntimeError):
    """The state dict has values that are no tensors. DCP raises a `RuntimeError` for it."""


class TorchSaveReader(BroadcastingTorchSaveReader):
    """Reads a file of `torch.save` by the plan of torch's `DynamicMetaLoadPlanner`.

    The file is mapped. If ranks with a process group load together, one rank sends whole tensors
    one after the other, each once, and every rank copies its part; so all ranks need the same keys.
    Otherwise every rank maps the file itself and reads only its part.

    Args:
        path: Path of the file.
        coordinator_rank: The rank that reads the file.

    Attributes:
        weights_only: Whether objects that are not on the allow-list are refused.
        num_ranks: Number of ranks that load together.
    """

    def __init__(self, path: str | os.PathLike[str], coordinator_rank: int) -> None:
        super().__init__(path, coordinator_rank)
        self.weights_only = True
        self.num_ranks = 1
        self._path = os.fspath(path)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the planned items.

        Raises:
            UnsupportedValueError: A value is no tensor; the error is a `RuntimeError` too.
            MissingKeyError: The file lacks a key.
            ShapeMismatchError: A tensor has another shape.
            CheckpointError: The file can't be read.
        """
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise TensorsOnlyError(
                    f"Non-tensor value identified at {item.storage_index.fqn}: "
                    f"BroadcastingTorchSaveReader loads tensors only",
                    key=item.storage_index.fqn,
                )
            wanted.setdefault(item.storage_index.fqn, []).append(item)
        sends = self.num_ranks > 1 and dist.is_available() and dist.is_initialized()
        names = sorted(_sizes(planner)) if sends else list(wanted)
        held, failed = None, None
        if not sends or dist.get_rank() == self.coordinator_rank:
            try:
                held = self._held(planner, names)
            except Exception as error:  # noqa: BLE001 - raised below, on every rank
                failed = error
        told: list[Any] = [failed or {n: (t.shape, t.dtype) for n, t in (held or {}).items()}]
        if sends:
            dist.broadcast_object_list(told, src=self.coordinator_rank)
        if isinstance(told[0], Exception):
            raise told[0]
        for name in names:
            shape, dtype = told[0][name]
            tensor = held[name] if held is not None else torch.empty(shape, dtype=dtype)
            if sends:
                tensor = tensor.to(default_device()).contiguous()
                if held is None:
                    tensor = torch.empty(shape, dtype=dtype, device=default_device())
                dist.broadcast(tensor, src=self.coordinator_rank)
            for item in wanted.get(name, []):
                _place(tensor, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _held(self, planner: LoadPlanner, names: list[str]) -> dict[str, torch.Tensor]:
        state = load_torch_file(self._path, weights_only=self.weights_only)
        if not isinstance(state, Mapping):
            raise StateDictError(
                f"expected a state dict in {self._path}, found {type(state).__name__}"
            )
        is_nested = getattr(planner, "flatten_state_dict", True)
        flat = flatten(state) if is_nested else flatten_top(state)
        values = dict(zip(flat.names, flat.values, strict=True))
        missing = [name for name in names if name not in values]
        if missing:
            raise MissingKeyError(
                f"Missing key in {self._path}: {', '.join(map(repr, missing[:8]))}", key=missing[0]
            )
        held = {name: values[name] for name in names}
        wrong = [name for name, value in held.items() if not isinstance(value, torch.Tensor)]
        if wrong:
            raise TensorsOnlyError(
                f"Non-tensor value identified at {wrong[0]} of {self._path}", key=wrong[0]
            )
        sizes = _sizes(planner)
        differ = [n for n, t in held.items() if n in sizes and tuple(t.shape) != sizes[n]]
        if differ:
            raise ShapeMismatchError(
                "Size mismatch between saved and current: "
                + "; ".join(
                    f"{n!r} is saved as {tuple(held[n].shape)} and wanted as {sizes[n]}"
                    for n in differ[:8]
                ),
                key=differ[0],
            )
        return held


def _sizes(planner: LoadPlanner) -> dict[str, tuple[int, ...]]:
    """Returns the global shapes that the planner wants, which are the same on all ranks."""
    metadata = getattr(planner, "metadata", None)
    entries = getattr(metadata, "state_dict_metadata", {})
    return {n: tuple(entry.size) for n, entry in entries.items() if hasattr(entry, "size")}


def _place(tensor: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    # Why: DynamicMetaLoadPlanner describes each rank's own shard as the stored tensor.
    origin = item.storage_index.offset or (0,) * tensor.dim()
    starts = [a + b for a, b in zip(origin, item.storage_offsets, strict=True)]
    for dim, (start, length) in enumerate(zip(starts, item.lengths, strict=True)):
        if start != 0 or length != tensor.size(dim):
            tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        raise ShapeMismatchError(
            f"Size mismatch between saved and current: {item.dest_index.fqn!r} is saved as "
            f"{tuple(tensor.shape)} and wanted as {tuple(target.shape)}",
            key=item.dest_index.fqn,
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)
