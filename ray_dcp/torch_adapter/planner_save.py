"""Saves to native storage with a user's planner: runs its hooks in DCP's order.

The planner's items become columns like those of a native capture, and the values that it resolves
are checked against its own `WriteItem`s. A native checkpoint holds the tensors and objects of the
plans and their paths in the nested state dict, and nothing else: `metadata_problems` reports any
other content of the planner's metadata. `planner_load` does the loads.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ray_dcp.core.values import Kind, NamePath
from ray_dcp.errors import (
    DamagedCheckpointError,
    InvalidRequestError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.options import SaveOptions
from ray_dcp.torch_adapter.capture import Capture, Rows, alone
from ray_dcp.torch_adapter.checkpointable import for_planner
from ray_dcp.torch_adapter.collective import Group, Steps, call_user_code, reduce_scatter
from ray_dcp.torch_adapter.foreign import set_up_save_planner
from ray_dcp.torch_adapter.objects import dump_object, is_simple, load_object, simple_digest
from ray_dcp.torch_adapter.per_rank import refuse_per_rank
from ray_dcp.torch_adapter.replica_digests import bytes_digest, content_digest
from ray_dcp.torch_adapter.state import stateful_to_state_dict
from ray_dcp.torch_adapter.tensors import host_bytes, is_plain, unsupported_reason


def is_path(path: Any) -> bool:
    """Returns whether a value is a path in a nested state dict: mapping keys and list indices."""
    return isinstance(path, (tuple, list)) and all(isinstance(key, (str, int)) for key in path)


def metadata_problems(plans: Sequence[SavePlan], metadata: Metadata) -> list[str]:
    """Returns where a planner's metadata differs from the plans that it belongs to."""
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


def tensor_data_of(item: WriteItem, planner: str, rank: int) -> TensorWriteData:
    """Returns the `TensorWriteData` of an item, which must describe a box.

    Args:
        item: Write item of a tensor.
        planner: Class name of the planner, for the error.
        rank: Rank of this process, for the error.

    Raises:
        StateDictError: The item describes no box.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        raise StateDictError(
            f"{planner} planned {item.index.fqn!r} as {item.type.name} without tensor_data",
            rank=rank,
            key=item.index.fqn,
        )
    if not len(data.size) == len(data.chunk.offsets) == len(data.chunk.sizes):
        raise StateDictError(
            f"{planner} planned {item.index.fqn!r} with a chunk at "
            f"{tuple(data.chunk.offsets)} of {tuple(data.chunk.sizes)}, but the tensor has "
            f"{len(data.size)} dimensions: {tuple(data.size)}",
            rank=rank,
            key=item.index.fqn,
        )
    return data


KEPT_BYTES = 256 << 20
"""Most bytes of resolved values that are kept from capture to write. Others are resolved again,
which DCP's contract allows: `resolve_data` is idempotent."""


def capture_with_planner(
    group: Group,
    state_dict: Mapping[str, Any],
    planner: SavePlanner,
    *,
    options: SaveOptions,
    storage_meta: StorageMeta | None = None,
    stateful: bool = True,
) -> Steps[Capture]:
    """Runs a planner's hooks and captures what it plans to save.

    `set_up_planner` and `create_local_plan` run on every rank. Plans are exchanged only if the
    planner overrides global planning (`plans_globally`): then `create_global_plan` runs on the
    coordinator rank and `finish_plan` on all. Otherwise ray_dcp's plan assigns replicas to ranks.
    `resolve_data` runs to check each item, and again when its bytes are read, once `KEPT_BYTES` are
    kept.

    Args:
        group: The ranks.
        state_dict: What to save.
        planner: Any `SavePlanner`.
        options: `objects` decides about objects that a safe load refuses.
        storage_meta: Passed to planners that accept it.
        stateful: Replace top-level `Stateful` values by their state.

    Raises:
        CheckpointError: A hook raised; `.failures` has its exception. Every rank raises the same
            error if plans are exchanged, otherwise this rank does.
        InvalidRequestError: The planner resolves something else than it planned, or a native
            checkpoint can't represent its metadata, or the state dict has a `PerRank`.
    """
    hooks = _Hooks(planner, group, options)

    def set_up() -> None:
        state = stateful_to_state_dict(state_dict) if stateful else dict(state_dict)
        # Why only now: the state of a `Stateful` value may contain one.
        refuse_per_rank(state, f"the planner {type(planner).__name__}")
        state = for_planner(state)
        set_up_save_planner(planner, state, storage_meta, is_coordinator=group.is_coordinator)

    if not plans_globally(planner):
        hooks.guard("set_up_planner", set_up)
        plan = hooks.guard("create_local_plan", hooks.whole_local_plan)
        return hooks.capture(plan.items, hooks.paths_of(plan.planner_data), is_shared=True)

    def local_plan() -> SavePlan:
        set_up()
        return planner.create_local_plan()

    part = yield from reduce_scatter(group, "plan", local_plan, hooks.global_plan)
    new_plan, paths = part()
    plan = hooks.guard("finish_plan", lambda: planner.finish_plan(new_plan))
    return hooks.capture(plan.items, paths, is_shared=False)


def plans_globally(planner: SavePlanner) -> bool:
    """Returns whether the planner decides between ranks.

    It does if it overrides `create_global_plan` or `finish_plan`, or takes replicas from the lowest
    rank. All ranks must agree on this, so it depends only on the planner's class and arguments.
    """
    if getattr(planner, "dedup_save_to_lowest_rank", False):
        return True
    return any(_is_own(planner, name) for name in _GLOBAL_HOOKS)


_GLOBAL_HOOKS = (
    "create_global_plan",
    "_create_global_plan",
    "_create_global_plan_with_caching",
    "_dedup_save_plans",
    "finish_plan",
    "_finish_plan_with_caching",
)


def _is_own(planner: SavePlanner, name: str) -> bool:
    default = getattr(DefaultSavePlanner, name, None)
    return getattr(type(planner), name, default) is not default or name in vars(planner)


class _Hooks:
    """A planner on one rank during one save."""

    def __init__(self, planner: SavePlanner, group: Group, options: SaveOptions) -> None:
        self.planner = planner
        self.name = type(planner).__name__
        self.group = group
        self.options = options

    def guard(self, hook: str, code: Any) -> Any:
        """Returns the result of `code`; converts the planner's exceptions to `CheckpointError`."""
        return call_user_code(f"{self.name}.{hook}", code, rank=self.group.rank)

    def whole_local_plan(self) -> SavePlan:
        """Returns the local plan, never "as last time", which only saves DCP its gather."""
        planner: Any = self.planner
        asked = getattr(planner, "_enable_plan_caching", False)
        planner._enable_plan_caching = False
        try:
            plan: SavePlan = planner.create_local_plan()
        finally:
            planner._enable_plan_caching = asked
        return plan

    def global_plan(self, plans: list[SavePlan]) -> Sequence[Any]:
        new_plans, metadata = self.planner.create_global_plan(plans)
        whole = new_plans
        if not all(plan.usable for plan in new_plans):
            whole = self.planner.global_plan  # type: ignore[attr-defined]
        paths = self.paths_of(metadata.planner_data, is_final=True)
        problems = metadata_problems(whole, metadata)
        if problems:
            raise self.untellable("; ".join(problems[:8]))
        return [
            (new, {i.index.fqn: paths[i.index.fqn] for i in full.items if i.index.fqn in paths})
            for new, full in zip(new_plans, whole, strict=True)
        ]

    def paths_of(self, planner_data: Any, *, is_final: bool = False) -> dict[str, NamePath]:
        """Returns the paths in the planner data of a plan or of metadata, by FQN."""
        if planner_data is None:
            return {}
        if isinstance(planner_data, Mapping) and all(map(is_path, planner_data.values())):
            return {str(name): tuple(path) for name, path in planner_data.items()}
        if is_final:
            raise self.untellable(f"planner_data of type {type(planner_data).__name__}")
        return {}

    def untellable(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self.name}.create_global_plan returned metadata that a native checkpoint can't "
            f"hold: {what}. It holds the tensors and objects of the plans and their place in the "
            f"nested state dict; for more, pass as storage_writer a subclass of "
            f"FileSystemWriter, which saves as DCP does",
            rank=self.group.rank,
        )

    def capture(
        self, items: Sequence[WriteItem], paths: Mapping[str, NamePath], *, is_shared: bool
    ) -> Capture:
        """Resolves and checks every item.

        Args:
            items: The final plan.
            paths: Path of each FQN in the nested state dict.
            is_shared: Whether ray_dcp has yet to choose among ranks with the same item.
        """
        resolved = _Resolved(self, paths, is_shared=is_shared)
        for item in items:
            resolved.add_item(item)
        return Capture(
            resolved.columns(), resolved.source, resolved.deferred, tuple(resolved.warnings)
        )

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the result of `resolve_data` after checking it against the item."""
        fqn = item.index.fqn
        data = self.guard(f"resolve_data for {fqn!r}", lambda: self.planner.resolve_data(item))
        if item.type is WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise self.lie(item, "an io.BytesIO", type(data).__name__)
            return data
        planned = tensor_data_of(item, self.name, self.group.rank)
        wanted = f"a tensor {planned.properties.dtype} of shape {tuple(planned.chunk.sizes)}"
        if not isinstance(data, torch.Tensor):
            raise self.lie(item, wanted, type(data).__name__)
        if tuple(data.shape) != tuple(planned.chunk.sizes) or (
            data.dtype != planned.properties.dtype
        ):
            raise self.lie(item, wanted, f"{data.dtype} of shape {tuple(data.shape)}")
        return data

    def lie(self, item: WriteItem, planned: str, found: str) -> StateDictError:
        return StateDictError(
            f"{self.name}.resolve_data gave {found} for {item.index.fqn!r}, but its own plan "
            f"says {planned}; change the WriteItem in create_local_plan too, or resolve what was "
            f"planned",
            rank=self.group.rank,
            key=item.index.fqn,
        )


class _Resolved(Rows):
    """The resolved values, by row: columns, `source` and `deferred` of a capture."""

    def __init__(self, hooks: _Hooks, paths: Mapping[str, NamePath], *, is_shared: bool) -> None:
        super().__init__(digests=is_shared)
        self.hooks = hooks
        self._path_of = paths
        self._is_shared = is_shared
        self._numbers: dict[str, int] = {}
        self._items: list[WriteItem] = []
        self._kept_bytes = 0

    def add_item(self, item: WriteItem) -> None:
        """Resolves and checks an item, and adds its row."""
        self._items.append(item)
        data = self.hooks.resolve(item)
        if isinstance(data, io.BytesIO):
            self._add_object(item, data.getvalue())
        else:
            self._add_tensor(item, data)
        fqn = item.index.fqn
        if fqn not in self._numbers:
            self._numbers[fqn] = self.add_name(fqn, self._path_of.get(fqn))
        self.name[-1] = self._numbers[fqn]

    def source(self, row: int) -> memoryview:
        return host_bytes(self._tensor(row))

    def deferred(self, row: int) -> bytes:
        data = self.values[row]
        if isinstance(data, bytes):
            return data
        fqn = self._items[row].index.fqn
        return dump_object(alone(self._tensor(row), fqn), fqn=fqn)

    def _tensor(self, row: int) -> torch.Tensor:
        if self.values[row] is not None:
            kept: torch.Tensor = self.values[row]
            return kept
        tensor = self.hooks.resolve(self._items[row])
        if isinstance(tensor, io.BytesIO):
            raise self.hooks.lie(self._items[row], "a tensor", "io.BytesIO")
        return tensor

    def _add_object(self, item: WriteItem, data: bytes) -> None:
        fqn = item.index.fqn
        planned = item.bytes_io_data
        if planned is not None and planned.nbytes != len(data):
            # Why no error: DCP takes the size as a hint, and planners estimate it.
            self.warnings.append(
                f"{self.hooks.name} planned {planned.nbytes} bytes for {fqn!r} and gave {len(data)}"
            )
        value = bytes_digest(data)
        try:
            loaded = load_object(data, fqn=fqn)
        except DamagedCheckpointError as error:
            if self.hooks.options.objects == "refuse":
                raise UnsupportedValueError(
                    f"what {self.hooks.name}.resolve_data gave for {fqn!r} would not load: "
                    f"{error.message}",
                    rank=self.hooks.group.rank,
                    key=fqn,
                ) from error
            self.warnings.append(f"saved, but a safe load will refuse it: {error.message}")
        else:
            if is_simple(loaded):
                value = simple_digest(loaded)
        self.add(Kind.OBJECT, data, None, (), False, value if self._is_shared else 0)

    def _add_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        planned = tensor_data_of(item, self.hooks.name, self.hooks.group.rank)
        kind = Kind.TENSOR if is_plain(tensor) else Kind.OPAQUE
        if kind is Kind.TENSOR and (why := unsupported_reason(tensor)):
            raise UnsupportedValueError(
                f"what {self.hooks.name}.resolve_data gave for {item.index.fqn!r} {why}",
                rank=self.hooks.group.rank,
                key=item.index.fqn,
            )
        self._kept_bytes += tensor.nbytes
        kept = tensor if self._kept_bytes <= KEPT_BYTES else None
        if kept is None:
            self._kept_bytes -= tensor.nbytes
        properties, row = planned.properties, len(self.values)
        is_compared = self._is_shared and kind is Kind.TENSOR
        # Why of shards too: only the plans of all ranks show which of them are replicas.
        digest = content_digest(tensor) if is_compared else 0
        shape, size = tuple(planned.size), tuple(planned.chunk.sizes)
        self.add(kind, kept, properties.dtype, shape, properties.requires_grad, digest)
        is_replica = item.type is WriteItemType.TENSOR
        if not (is_replica and is_compared and size == shape):
            self.boxes[row] = (tuple(planned.chunk.offsets), size)
        if is_compared and not is_replica:
            self.replicated.add(row)
