"""Saves or loads with a user's planner on native storage: runs its hooks in DCP's order.

*Save*: the planner's items become columns like those of a native capture, and the values that it
resolves are checked against its own `WriteItem`s. A native checkpoint holds the tensors and objects
of the plans and their paths in the nested state dict, and nothing else: `metadata_problems` reports
any other content of the planner's metadata.

*Load*: the reads that it plans become wanted boxes of the chunk table. `PlannerSink` fills each box
through the planner's hooks: `resolve_tensor`, bytes, `commit_tensor`. Objects go through its
`load_bytes`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ray_dcp.core.values import ChunkTable, Kind, NamePath
from ray_dcp.errors import (
    CheckpointError,
    CoverageError,
    DamagedCheckpointError,
    InvalidRequestError,
    ShapeMismatchError,
    StateDictError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.planning.coverage import lacks_parts
from ray_dcp.torch_adapter.capture import Capture, Rows, alone
from ray_dcp.torch_adapter.collective import Group, Steps, call_user_code, reduce_scatter
from ray_dcp.torch_adapter.content_digests import bytes_digest, content_digest
from ray_dcp.torch_adapter.flatten import listed
from ray_dcp.torch_adapter.foreign import (
    allows_missing,
    create_plan,
    refuse_misread,
    set_up_save_planner,
)
from ray_dcp.torch_adapter.load_plan import cast_problem, plain_state_lost
from ray_dcp.torch_adapter.objects import (
    dump_object,
    is_simple,
    load_object,
    simple_digest,
    tensors_within,
)
from ray_dcp.torch_adapter.optimizer_state import (
    Cast,
    Stored,
    check_all_taken,
    with_group_identities,
)
from ray_dcp.torch_adapter.shards import why_part
from ray_dcp.torch_adapter.sink import Boxes, TensorSink, increment_version, target_problem
from ray_dcp.torch_adapter.state import (
    LoadTargets,
    group_identities_of,
    refuse_per_rank,
    stateful_to_load_targets,
    stateful_to_state_dict,
)
from ray_dcp.torch_adapter.targets import Targets, first_chunks
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    dtype_of,
    host_bytes,
    is_plain,
    no_target_reason,
    unsupported_reason,
)

E = TypeVar("E", bound=CheckpointError)


class _PlannerHooks:
    """A planner on one rank.

    An exception of a hook is raised as a `CheckpointError` that names the hook.
    """

    def __init__(self, planner: Any, rank: int) -> None:
        self.planner = planner
        self.name = type(planner).__name__
        self.rank = rank

    def run(self, hook: str, code: Callable[[], Any]) -> Any:
        """Returns the result of code that calls a hook."""
        return call_user_code(f"{self.name}.{hook}", code, rank=self.rank)

    def of_item(self, hook: str, fqn: str, *args: Any) -> Any:
        """Returns the result of a hook for one item."""
        return self.run(f"{hook} for {fqn!r}", lambda: getattr(self.planner, hook)(*args))

    def error(self, kind: type[E], what: str, fqn: str) -> E:
        """Returns an error about a value, to be raised on this rank."""
        return kind(what, rank=self.rank, key=fqn)

    def tensor_data(self, item: WriteItem) -> TensorWriteData:
        """Returns the `TensorWriteData` of an item of a tensor, which must describe a box.

        Raises:
            StateDictError: The item describes no box.
        """
        data, fqn = item.tensor_data, item.index.fqn
        if data is None or data.chunk is None:
            told = f"{self.name} planned {fqn!r} as {item.type.name} without tensor_data"
            raise self.error(StateDictError, told, fqn)
        offset, size, shape = map(tuple, (data.chunk.offsets, data.chunk.sizes, data.size))
        if not len(shape) == len(offset) == len(size):
            told = (
                f"{self.name} planned {fqn!r} with a chunk at {offset} of {size}, but the tensor "
                f"has {len(shape)} dimensions: {shape}"
            )
            raise self.error(StateDictError, told, fqn)
        return data

    def overrides(self, default: type, *names: str) -> bool:
        """Returns whether any of these hooks is not that of torch's default planner."""
        return any(
            getattr(type(self.planner), name, own) is not own or name in vars(self.planner)
            for name in names
            for own in [getattr(default, name, None)]
        )


# Saves


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
    hooks = _PlannerHooks(planner, group.rank)

    identities: dict[tuple[str, ...], list[str]] = {}

    def set_up() -> None:
        state = stateful_to_state_dict(state_dict) if stateful else dict(state_dict)
        if stateful and group.world_size > 1:
            identities.update(group_identities_of(state_dict, state))
        # Why only now: the state of a `Stateful` value may contain one.
        refuse_per_rank(state, f"the planner {hooks.name}")
        set_up_save_planner(planner, state, storage_meta, is_coordinator=group.is_coordinator)

    if not plans_globally(planner):
        hooks.run("set_up_planner", set_up)
        plan = hooks.run("create_local_plan", lambda: _whole_local_plan(planner))
        paths = _paths_of(plan.planner_data) or {}
        found = _Resolved(
            hooks, options, paths, is_shared=True, world_size=group.world_size
        ).capture(plan.items)
        return replace(found, columns=with_group_identities(found.columns, identities))

    def local_plan() -> SavePlan:
        set_up()
        return planner.create_local_plan()

    part = yield from reduce_scatter(group, "plan", local_plan, partial(_global_plan, hooks))
    new_plan, paths = part()
    plan = hooks.run("finish_plan", lambda: planner.finish_plan(new_plan))
    return _Resolved(hooks, options, paths, is_shared=False, world_size=group.world_size).capture(
        plan.items
    )


def plans_globally(planner: SavePlanner) -> bool:
    """Returns whether the planner decides between ranks.

    It does if it overrides `create_global_plan` or `finish_plan`, or takes replicas from the lowest
    rank. All ranks must agree on this, so it depends only on the planner's class and arguments.
    """
    if getattr(planner, "dedup_save_to_lowest_rank", False):
        return True
    return _PlannerHooks(planner, 0).overrides(DefaultSavePlanner, *_GLOBAL_HOOKS)


_GLOBAL_HOOKS = (
    "create_global_plan",
    "_create_global_plan",
    "_create_global_plan_with_caching",
    "_dedup_save_plans",
    "finish_plan",
    "_finish_plan_with_caching",
)


def _whole_local_plan(planner: Any) -> SavePlan:
    """Returns the local plan, never "as last time", which only saves DCP its gather."""
    asked = getattr(planner, "_enable_plan_caching", False)
    planner._enable_plan_caching = False
    try:
        plan: SavePlan = planner.create_local_plan()
    finally:
        planner._enable_plan_caching = asked
    return plan


def _global_plan(hooks: _PlannerHooks, plans: list[SavePlan]) -> Sequence[Any]:
    """Returns the new plan of each rank, with the paths of its items."""
    new_plans, metadata = hooks.planner.create_global_plan(plans)
    whole = new_plans
    if not all(plan.usable for plan in new_plans):
        whole = hooks.planner.global_plan
    problems = metadata_problems(whole, metadata)
    paths = _paths_of(metadata.planner_data)
    if paths is None:
        problems = [f"planner_data of type {type(metadata.planner_data).__name__}"]
    if paths is None or problems:
        raise InvalidRequestError(
            f"{hooks.name}.create_global_plan returned metadata that a native checkpoint can't "
            f"hold: {listed(problems, '; ')}. It holds the tensors and objects of the plans and "
            f"their place in the nested state dict; for more, pass as storage_writer a subclass of "
            f"FileSystemWriter, which saves as DCP does",
            rank=hooks.rank,
        )
    return [
        (new, {i.index.fqn: paths[i.index.fqn] for i in full.items if i.index.fqn in paths})
        for new, full in zip(new_plans, whole, strict=True)
    ]


def _paths_of(planner_data: Any) -> dict[str, NamePath] | None:
    """Returns the paths in the planner data of a plan or of metadata, by FQN.

    Returns None if the planner data is something else.
    """
    if planner_data is None:
        return {}
    if isinstance(planner_data, Mapping) and all(
        isinstance(path, (tuple, list)) and all(isinstance(key, (str, int)) for key in path)
        for path in planner_data.values()
    ):
        return {str(name): tuple(path) for name, path in planner_data.items()}
    return None


class _Resolved(Rows):
    """The resolved values, by row: columns, `source` and `deferred` of a capture.

    Args:
        hooks: The planner.
        options: `objects` decides about objects that a safe load refuses.
        paths: Path of each FQN in the nested state dict.
        is_shared: Whether ray_dcp has yet to choose among ranks with the same item.
        world_size: Number of ranks that save together.
    """

    def __init__(
        self,
        hooks: _PlannerHooks,
        options: SaveOptions,
        paths: Mapping[str, NamePath],
        *,
        is_shared: bool,
        world_size: int,
    ) -> None:
        super().__init__(digests=is_shared)
        self._world_size = world_size
        self._hooks = hooks
        self._options = options
        self._path_of = paths
        self._is_shared = is_shared
        self._numbers: dict[str, int] = {}
        self._items: list[WriteItem] = []
        self._kept_bytes = 0

    def capture(self, items: Sequence[WriteItem]) -> Capture:
        """Resolves and checks every item of the final plan."""
        for item in items:
            self._items.append(item)
            data = self._resolve(item)
            if isinstance(data, io.BytesIO):
                self._add_object(item, data.getvalue())
            else:
                self._add_tensor(item, data)
            fqn = item.index.fqn
            if fqn not in self._numbers:
                self._numbers[fqn] = self.add_name(fqn, self._path_of.get(fqn))
            self.name[-1] = self._numbers[fqn]
        return Capture(self.columns(), self, self.deferred, tuple(self.warnings))

    def _resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the result of `resolve_data` after checking it against the item."""
        data = self._hooks.of_item("resolve_data", item.index.fqn, item)
        if item.type is WriteItemType.BYTE_IO:
            wanted, fits = "an io.BytesIO", isinstance(data, io.BytesIO)
        else:
            planned = self._hooks.tensor_data(item)
            dtype, shape = planned.properties.dtype, tuple(planned.chunk.sizes)
            wanted = f"a tensor {dtype} of shape {shape}"
            fits = isinstance(data, torch.Tensor) and (data.dtype, tuple(data.shape)) == (
                dtype,
                shape,
            )
        if not fits:
            found = type(data).__name__
            if isinstance(data, torch.Tensor):
                found = f"{data.dtype} of shape {tuple(data.shape)}"
            raise self._hooks.error(
                StateDictError,
                f"{self._hooks.name}.resolve_data gave {found} for {item.index.fqn!r}, but its own "
                f"plan says {wanted}; change the WriteItem in create_local_plan too, or resolve "
                f"what was planned",
                item.index.fqn,
            )
        return data  # type: ignore[no-any-return]

    def __call__(self, row: int) -> memoryview:
        """Returns the bytes of a row; see `Capture.source`."""
        return host_bytes(self.tensor(row))

    def deferred(self, row: int) -> bytes:
        data = self.values[row]
        if isinstance(data, bytes):
            return data
        fqn = self._items[row].index.fqn
        return dump_object(alone(self.tensor(row), fqn), fqn=fqn)

    def tensor(self, row: int) -> Any:
        """Returns the tensor in a row, resolved again if it was not kept."""
        kept: Any = self.values[row]
        return self._resolve(self._items[row]) if kept is None else kept

    def _add_object(self, item: WriteItem, data: bytes) -> None:
        fqn = item.index.fqn
        planned = item.bytes_io_data
        if planned is not None and planned.nbytes != len(data):
            # Why no error: DCP takes the size as a hint, and planners estimate it.
            self.warnings.append(
                f"{self._hooks.name} planned {planned.nbytes} bytes for {fqn!r} and gave "
                f"{len(data)}"
            )
        value = bytes_digest(data)
        try:
            loaded = load_object(data, fqn=fqn)
        except DamagedCheckpointError as error:
            if self._options.objects == "refuse":
                raise self._hooks.error(
                    UnsupportedValueError,
                    f"what {self._hooks.name}.resolve_data gave for {fqn!r} would not load: "
                    f"{error.message}",
                    fqn,
                ) from error
            self.warnings.append(f"saved, but a safe load will refuse it: {error.message}")
        else:
            if is_simple(loaded):
                value = simple_digest(loaded)
            elif self._world_size > 1:
                for reason in filter(None, map(why_part, tensors_within(loaded))):
                    raise UnsupportedValueError(
                        f"{fqn!r} is or holds a tensor that {reason}", key=fqn
                    )
        self.add(Kind.OBJECT, data, None, (), False, value if self._is_shared else 0)

    def _add_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        planned = self._hooks.tensor_data(item)
        kind = Kind.TENSOR if is_plain(tensor) else Kind.OPAQUE
        if kind is Kind.TENSOR and (why := unsupported_reason(tensor)):
            raise self._hooks.error(
                UnsupportedValueError,
                f"what {self._hooks.name}.resolve_data gave for {item.index.fqn!r} {why}",
                item.index.fqn,
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


# Loads


class PlannerSink(TensorSink):
    """Rows whose targets a planner resolves, and commits once their bytes have arrived.

    Planners are written for DCP's reader, which has one thread: two hooks never run at a time.

    `casts` covers the targets resolved so far.

    Attributes:
        resolves_again: Whether the planner returns views of the state dict at every call.
    """

    def __init__(self, hooks: _PlannerHooks, options: LoadOptions) -> None:
        super().__init__()
        self._hooks = hooks
        self._options = options
        self._items: dict[int, ReadItem] = {}
        self.resolves_again = False

    def add_item(self, item: ReadItem, stored: torch.dtype) -> None:
        """Appends a row for a read item."""
        self._items[len(self)] = item
        self.add_late(partial(self._resolve, item, stored), stored)

    def put_many(self, rows: Sequence[int], *_: Any) -> list[int]:
        """Leaves every row to `buffer` and `done`, which call the planner."""
        return list(range(len(rows)))

    def region(self, row: int) -> torch.Tensor:
        """Returns the tensor whose bytes `buffer` returns.

        An unknown target is resolved once its bytes have arrived. Why not now: DCP resolves, copies
        and commits one item after another, so a planner may return the same memory for several
        items.
        """
        if isinstance(self.targets[row], torch.Tensor):
            return super().region(row)
        with self._lock:
            if row not in self._temporary:
                size = tuple(self._items[row].lengths)
                self._temporary[row] = torch.empty(size, dtype=self._stored[row], device="cpu")
            return self._temporary[row]

    def done(self, row: int) -> None:
        """Passes a filled row to the planner."""
        if isinstance(self.targets[row], torch.Tensor):
            super().done(row)
        with self._lock:
            item, target = self._items.pop(row), self._materialize(row)
            temporary = self._temporary.pop(row, None)
            if temporary is not None:
                self._put(row, temporary)
            elif self.direct[row]:
                increment_version([target])
            self._hooks.of_item("commit_tensor", item.dest_index.fqn, item, target)
            # Temporary tensors of the planner are no longer needed.
            self.targets[row] = None

    def afresh(self, row: int) -> torch.Tensor:
        """Returns the target of a row, resolved again if the planner returns views of the state."""
        if not self.resolves_again:
            return self.target(row)
        return self._resolve(self._items[row], self._stored[row])

    def finish(self) -> None:
        """Passes whole items, and boxes without elements, to the planner."""
        for row in list(self._items):
            self.done(row)

    def _resolve(self, item: ReadItem, stored: torch.dtype) -> torch.Tensor:
        fqn, size = item.dest_index.fqn, tuple(item.lengths)
        target: torch.Tensor = self._hooks.of_item("resolve_tensor", fqn, item)
        if (reason := no_target_reason(target)) is not None:
            raise self._hooks.error(UnsupportedValueError, f"{fqn!r} {reason}", fqn)
        if is_plain(target):
            target = target.detach()
        if tuple(target.shape) != size:
            raise self._hooks.error(
                ShapeMismatchError,
                f"{self._hooks.name} planned to read {size} elements of {fqn!r}, but resolves a "
                f"tensor of shape {tuple(target.shape)}; resolve what was planned",
                fqn,
            )
        if (reason := target_problem(target)) is not None:
            raise self._hooks.error(UnsupportedValueError, f"{fqn!r} {reason}", fqn)
        if target.dtype != stored:
            problem = cast_problem(stored, target.dtype, self._options)
            if problem is not None:
                raise self._hooks.error(ShapeMismatchError, f"{fqn!r} is {problem}", fqn)
            self.casts[fqn, dtype_name(stored), dtype_name(target.dtype)] = None
        return target


def targets_with_planner(
    group: Group,
    state_dict: MutableMapping[str, Any],
    planner: LoadPlanner,
    metadata: Metadata,
    table: ChunkTable,
    *,
    options: LoadOptions,
    stateful: bool = True,
) -> Steps[Targets]:
    """Runs a planner's hooks; returns the reads that it plans, with their targets.

    Plans are exchanged only if the planner overrides `create_global_plan`. Two threads never call
    the planner at once. If it overrides how tensors are resolved, each tensor is resolved, filled
    and committed before the next one, as in DCP.

    The planner decides whether keys may be missing (`allow_partial_load` of the default planners),
    not `options`. Objects are checked by the rules of `options.weights_only` before they are passed
    to the planner's `load_bytes`, since torch's `load_bytes` unpickles without restriction.

    Args:
        group: The ranks.
        state_dict: What to load into.
        planner: Any `LoadPlanner`.
        metadata: DCP's metadata of the checkpoint.
        table: The chunk table of the same checkpoint.
        options: Only `dtype`, `weights_only` and `strict` are used.
        stateful: Load into the state of top-level `Stateful` values.

    Raises:
        CheckpointError: A hook raised; `.failures` has its exception.
        MissingKeyError: The default planner misses a key.
        ShapeMismatchError: A target has another shape, or a narrower dtype.
        StateDictError: The planner reads something that the checkpoint does not have.
        CoverageError: The checkpoint lacks a part of a tensor that the planner reads.
    """
    loaded: LoadTargets | None = None
    hooks = _PlannerHooks(planner, group.rank)
    strict = False if allows_missing(planner) else options.strict

    def set_up() -> None:
        nonlocal loaded
        if stateful:
            loaded = stateful_to_load_targets(state_dict, Stored.of(metadata), strict=strict)
        values: Any = state_dict if loaded is None else loaded.values
        planner.set_up_planner(values, metadata, group.is_coordinator)
        refuse_misread(planner, no_target_reason)

    def create() -> LoadPlan:
        return create_plan(planner, state_dict, table.names if stateful else ())

    def local_plan() -> LoadPlan:
        set_up()
        return create()

    if hooks.overrides(DefaultLoadPlanner, "create_global_plan"):
        part = yield from reduce_scatter(group, "plan", local_plan, planner.create_global_plan)
        plan = hooks.run("finish_plan", lambda: planner.finish_plan(part()))
    else:
        hooks.run("set_up_planner", set_up)
        plan = hooks.run("create_local_plan", create)
        plan = hooks.run("finish_plan", lambda: planner.finish_plan(plan))
    decisive = set[str]()
    if loaded is not None and isinstance(planner, DefaultLoadPlanner):
        # Why not with other planners: only they know where they put what they load.
        decisive = decisive.union(*loaded.decisive.values())
    reads = PlannedReads(hooks, table, options, decisive)
    for item in plan.items:
        reads.add(item)
    reads.check_complete()
    if isinstance(planner, DefaultLoadPlanner):
        _use_own_keys(planner)

    late: list[Cast] = []

    def put_back() -> None:
        if isinstance(planner, DefaultLoadPlanner):
            _hand_over_objects(planner, plan)
        if loaded is not None:
            loaded.put_back(state_dict)
            late.extend(loaded.casts)

    check_groups = loaded.check_groups if loaded is not None and decisive else None
    targets = reads.targets(metadata, put_back, late, check_groups)
    if isinstance(planner, DefaultLoadPlanner):
        values = state_dict if loaded is None else loaded.values
        names = table.names
        index = {name: number for number, name in enumerate(names)}
        lost = plain_state_lost(state_dict, values, targets.unexpected, names, index)
        if group.world_size == 1:
            check_all_taken(lost, strict=strict, lost_state=lost)
        elif lost and strict is not False:
            targets.refuse(lost)
    return targets


class _Number(int):
    """A number that is a mapping key. Why a class: torch takes an `int` for a list index."""


def _use_own_keys(planner: DefaultLoadPlanner) -> None:
    """Makes `load_bytes` store objects under the keys that mappings have.

    DCP's paths have the text of each key: the value of a number key would be stored under its text.
    """
    known: dict[int, dict[str, Any]] = {}

    def own(path: tuple[Any, ...]) -> tuple[Any, ...]:
        here: Any = planner.original_state_dict
        keys = []
        for part in path:
            key = part
            if isinstance(here, Mapping) and part not in here:
                texts = known.setdefault(id(here), {})
                if not texts:
                    texts.update((str(key), key) for key in here)
                key = texts.get(part, part)
            keys.append(_Number(key) if type(key) is int and isinstance(here, Mapping) else key)
            try:
                here = here[key]
            except (LookupError, TypeError):
                return path
        return tuple(keys)

    planner.mappings = {fqn: own(path) for fqn, path in planner.mappings.items()}


def _hand_over_objects(planner: DefaultLoadPlanner, plan: LoadPlan) -> None:
    """Copies objects to the state dict that the planner has stored in its own copy of it.

    DCP's planner does so with `flatten_state_dict=False`, and loses them.
    """
    copy, state = planner.state_dict, planner.original_state_dict
    if planner.flatten_state_dict or copy is state:
        return
    keys = {str(key): key for key in state}
    for item in plan.items:
        fqn = item.dest_index.fqn
        if item.type is LoadItemType.BYTE_IO and fqn in copy and fqn in keys:
            state[keys[fqn]] = copy[fqn]


_ZIP = b"PK\x03\x04"
"""First bytes of everything that torch.save has written since torch 1.6."""


class _Items(NamedTuple):
    """Read items that are loaded together."""

    raw: PlannerSink
    opaque: PlannerSink
    raw_boxes: Boxes
    opaque_boxes: Boxes
    objects: list[tuple[int, Callable[[bytes], None]]]
    """Chunk of each object, and what receives its bytes."""


def _load_bytes(hooks: _PlannerHooks, item: ReadItem, weights_only: bool, data: bytes) -> None:
    """Passes the bytes of an object to the planner, checked if `weights_only`."""
    fqn = item.dest_index.fqn
    if weights_only:
        data = _checked_bytes(hooks, fqn, data)
    hooks.of_item("load_bytes", fqn, item, io.BytesIO(data))


def _checked_bytes(hooks: _PlannerHooks, fqn: str, data: bytes) -> bytes:
    """Returns bytes of an object that torch's planners can unpickle without harm.

    Raises:
        UnsafeCheckpointError: The planner reads bytes that can't be checked.
    """
    if data.startswith(_ZIP) or not hooks.overrides(DefaultLoadPlanner, "load_bytes"):
        # Why pickled again: torch's planners run the pickle without restriction. They get a
        # pickle that ray_dcp writes, of the object that a safe load has built.
        return dump_object(load_object(data, fqn=fqn), fqn=fqn)
    raise hooks.error(
        UnsafeCheckpointError,
        f"{fqn!r} does not hold bytes of torch.save, so they can't be checked before "
        f"{hooks.name}.load_bytes gets them; if you trust the checkpoint, load with "
        f"LoadOptions(weights_only=False)",
        fqn,
    )


class PlannedReads:
    """The read items of one planner, matched with the chunk table."""

    def __init__(
        self,
        hooks: _PlannerHooks,
        table: ChunkTable,
        options: LoadOptions,
        decisive: Collection[str],
    ) -> None:
        self._hooks = hooks
        self._planner = hooks.planner
        self._table = table
        self._options = options
        self._decisive = decisive
        # The default lookup returns views of the state dict, so an early lookup costs nothing and
        # finds a dtype that does not match before anything changes.
        self._looks_early = isinstance(self._planner, DefaultLoadPlanner) and not hooks.overrides(
            DefaultLoadPlanner, "resolve_tensor", "lookup_tensor", "transform_tensor"
        )
        self._rest, self._first = self._items(), self._items()
        self._index = {name: index for index, name in enumerate(table.names)}
        self._first_chunk = first_chunks(table)
        self._fqns: dict[str, None] = {}
        self._stored: set[int] = set()

    def _items(self) -> _Items:
        raw, opaque = (PlannerSink(self._hooks, self._options) for _ in range(2))
        raw.resolves_again = opaque.resolves_again = self._looks_early
        return _Items(raw, opaque, Boxes(raw), Boxes(opaque), [])

    def add(self, item: ReadItem) -> None:
        """Adds a read item.

        Raises:
            StateDictError: The checkpoint has no such item.
        """
        fqn = item.storage_index.fqn
        tensor = self._index.get(fqn)
        if tensor is None:
            raise self._error(item, f"{fqn!r}, which the checkpoint does not have")
        kind = self._table.kind[tensor]
        if (kind == Kind.OBJECT) != (item.type is LoadItemType.BYTE_IO):
            stored = "an object" if kind == Kind.OBJECT else "a tensor"
            raise self._error(item, f"{fqn!r} as {item.type.name}, but it is stored as {stored}")
        self._fqns[item.dest_index.fqn] = None
        self._stored.add(tensor)
        items = self._first if fqn in self._decisive else self._rest
        if kind == Kind.OBJECT:
            # Why not a method: the reads would then keep themselves, and the state, in a circle.
            take = partial(_load_bytes, self._hooks, item, self._options.weights_only)
            items.objects.append((int(self._first_chunk[tensor]), take))
            return
        offset, size = self._box(item, tensor)
        dtype = dtype_of(self._table.dtypes[self._table.dtype[tensor]], fqn=fqn)
        is_opaque = kind == Kind.OPAQUE
        sink = items.opaque if is_opaque else items.raw
        (items.opaque_boxes if is_opaque else items.raw_boxes).add(tensor, offset, size, dtype)
        sink.add_item(item, dtype)
        if self._looks_early:
            sink.target(len(sink) - 1)

    def check_complete(self) -> None:
        """Refuses checkpoints whose chunks don't cover the wanted tensors.

        DCP's planner omits elements that no chunk holds, and its load leaves them unchanged.
        """
        wanted = self._stored.union(self._index[n] for n in self._requested() if n in self._index)
        short = lacks_parts(self._table)
        lacking = [self._table.names[tensor] for tensor in sorted(wanted) if short[tensor]]
        if lacking:
            raise self._hooks.error(
                CoverageError,
                f"the checkpoint lacks parts of {listed([*map(repr, lacking)])}; load an earlier "
                f"one",
                lacking[0],
            )

    def targets(
        self,
        metadata: Metadata,
        put_back: Callable[[], None],
        late_cast: Sequence[Cast],
        check: Callable[[], object] | None,
    ) -> Targets:
        """Returns the targets of all read items.

        Args:
            metadata: DCP's metadata of the checkpoint, used to report what is missing.
            put_back: Called when all bytes are in place.
            late_cast: Filled by `put_back`.
            check: Called when all that is decisive is loaded; None if nothing is.
        """

        def of_items(items: _Items, then: Callable[[], object], **more: Any) -> Targets:
            def finish() -> None:
                items.raw.finish()
                items.opaque.finish()
                then()

            boxes = items.raw_boxes, items.opaque_boxes
            return Targets(
                self._table, self._options, *boxes, objects=items.objects, finish=finish, **more
            )

        return of_items(
            self._rest,
            put_back,
            decisive=None if check is None else of_items(self._first, check),
            loaded=tuple(self._fqns),
            missing=self._missing(metadata),
            unexpected=self._unexpected(),
            late_cast=late_cast,
        )

    def _box(self, item: ReadItem, tensor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ndim = int(self._table.ndim[tensor])
        start = item.storage_index.offset
        chunk = tuple(start) if start is not None else (0,) * ndim
        if not len(chunk) == len(item.storage_offsets) == len(item.lengths) == ndim:
            raise self._error(
                item,
                f"{item.storage_index.fqn!r} at {tuple(item.storage_offsets)} of "
                f"{tuple(item.lengths)} in the chunk at {chunk}, but it is stored with {ndim} "
                f"dimensions",
            )
        offset = tuple(c + o for c, o in zip(chunk, item.storage_offsets, strict=True))
        size = tuple(item.lengths)
        shape = tuple(int(n) for n in self._table.shape[tensor][:ndim])
        if any(
            o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)
        ):
            raise self._error(
                item,
                f"{item.storage_index.fqn!r} at {offset} of {size}, but it is stored with "
                f"shape {shape}",
            )
        return offset, size

    def _missing(self, metadata: Metadata) -> tuple[str, ...]:
        known = metadata.state_dict_metadata
        return tuple(n for n in self._requested() if n not in known and n not in self._fqns)

    def _requested(self) -> Iterable[str]:
        """Returns the names of the state dict, as far as the planner exposes them."""
        flat = getattr(self._planner, "state_dict", None)
        is_told = isinstance(self._planner, DefaultLoadPlanner) and isinstance(flat, dict)
        return flat if is_told else ()  # type: ignore[return-value]

    def _unexpected(self) -> tuple[str, ...]:
        names = tuple(n for i, n in enumerate(self._table.names) if i not in self._stored)
        if names and self._options.strict:
            raise self._hooks.error(
                StateDictError,
                f"the checkpoint has keys that {self._hooks.name} does not ask for: "
                f"{listed([*map(repr, names)])}; ask for them, or load with "
                f"LoadOptions(strict=False)",
                names[0],
            )
        return names

    def _error(self, item: ReadItem, what: str) -> StateDictError:
        told = f"{self._hooks.name} planned to read {what}"
        return self._hooks.error(StateDictError, told, item.dest_index.fqn)
