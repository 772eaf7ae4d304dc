"""Loads from native storage with a user's planner: runs its hooks in DCP's order.

The reads that it plans become wanted boxes of the chunk table. `PlannerSink` fills each box through
the planner's hooks: `resolve_tensor`, bytes, `commit_tensor`. Objects go through its `load_bytes`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.errors import (
    CoverageError,
    ShapeMismatchError,
    StateDictError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from ray_dcp.options import LoadOptions
from ray_dcp.planning.coverage import lacks_parts
from ray_dcp.torch_adapter.checkpointable import for_planner, take_back
from ray_dcp.torch_adapter.collective import Group, Steps, call_user_code, reduce_scatter
from ray_dcp.torch_adapter.foreign import refuse_lost_memory
from ray_dcp.torch_adapter.objects import dump_object, load_object
from ray_dcp.torch_adapter.optimizer_state import Cast, Stored
from ray_dcp.torch_adapter.sink import (
    Boxes,
    TensorSink,
    increment_version,
    target_problem,
)
from ray_dcp.torch_adapter.state import LoadTargets, stateful_to_load_targets
from ray_dcp.torch_adapter.targets import ItemPlacer, Targets, cast_problem, first_chunks
from ray_dcp.torch_adapter.tensors import dtype_name, dtype_of, is_plain, no_target_reason


class _Calls:
    """Calls hooks of a planner; converts exceptions to a `CheckpointError` that names the hook."""

    def __init__(self, planner: LoadPlanner, rank: int) -> None:
        self.planner = planner
        self.name = type(planner).__name__
        self.rank = rank

    def __call__(self, hook: str, code: Callable[[], Any]) -> Any:
        return call_user_code(f"{self.name}.{hook}", code, rank=self.rank)


class PlannerSink(TensorSink):
    """Rows whose targets a planner resolves, and commits once their bytes have arrived.

    Planners are written for DCP's reader, which has one thread: two hooks never run at a time.

    `casts` covers the targets resolved so far.

    Attributes:
        resolves_again: Whether the planner returns views of the state dict at every call.
    """

    def __init__(self, call: _Calls, options: LoadOptions) -> None:
        super().__init__()
        self._call = call
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
        if isinstance(self._tensors[row], torch.Tensor):
            return super().region(row)
        with self._lock:
            if row not in self._temporary:
                size = tuple(self._items[row].lengths)
                self._temporary[row] = torch.empty(size, dtype=self._stored[row])
            return self._temporary[row]

    def done(self, row: int) -> None:
        """Passes a filled row to the planner."""
        if isinstance(self._tensors[row], torch.Tensor):
            super().done(row)
        with self._lock:
            item, target = self._items.pop(row), self._made(row)
            temporary = self._temporary.pop(row, None)
            if temporary is not None:
                self._put(row, temporary)
            elif self._direct[row]:
                increment_version([target])
            self._call(
                f"commit_tensor for {item.dest_index.fqn!r}",
                lambda: self._call.planner.commit_tensor(item, target),
            )
            # Temporary tensors of the planner are no longer needed.
            self._tensors[row] = None

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
        target: torch.Tensor = self._call(
            f"resolve_tensor for {fqn!r}", lambda: self._call.planner.resolve_tensor(item)
        )
        if (reason := no_target_reason(target)) is not None:
            raise UnsupportedValueError(f"{fqn!r} {reason}", rank=self._call.rank, key=fqn)
        if is_plain(target):
            target = target.detach()
        if tuple(target.shape) != size:
            raise ShapeMismatchError(
                f"{self._call.name} planned to read {size} elements of {fqn!r}, but resolves a "
                f"tensor of shape {tuple(target.shape)}; resolve what was planned",
                rank=self._call.rank,
                key=fqn,
            )
        if (reason := target_problem(target)) is not None:
            raise UnsupportedValueError(f"{fqn!r} {reason}", rank=self._call.rank, key=fqn)
        if target.dtype != stored:
            problem = cast_problem(stored, target.dtype, self._options)
            if problem is not None:
                raise ShapeMismatchError(f"{fqn!r} is {problem}", rank=self._call.rank, key=fqn)
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
    shown: Any = None
    call = _Calls(planner, group.rank)

    def set_up() -> None:
        nonlocal loaded, shown
        if stateful:
            loaded = stateful_to_load_targets(state_dict, Stored.of(metadata))
        shown = for_planner(state_dict if loaded is None else loaded.values)
        planner.set_up_planner(shown, metadata, group.is_coordinator)
        _refuse_targets(planner, group.rank)
        refuse_lost_memory(planner)

    def local_plan() -> LoadPlan:
        set_up()
        return planner.create_local_plan()

    if _is_own(planner, "create_global_plan"):
        part = yield from reduce_scatter(group, "plan", local_plan, planner.create_global_plan)
        plan = call("finish_plan", lambda: planner.finish_plan(part()))
    else:
        call("set_up_planner", set_up)
        plan = call("create_local_plan", planner.create_local_plan)
        plan = call("finish_plan", lambda: planner.finish_plan(plan))
    reads = PlannedReads(call, table, options)
    for item in plan.items:
        reads.add(item)
    reads.check_complete()
    if isinstance(planner, DefaultLoadPlanner):
        _use_own_keys(planner)

    late: list[Cast] = []

    def put_back() -> None:
        if isinstance(planner, DefaultLoadPlanner):
            _hand_over_objects(planner, plan)
        take_back(state_dict if loaded is None else loaded.values, shown)
        if loaded is not None:
            loaded.put_back(state_dict)
            late.extend(loaded.casts)

    return replace(reads.targets(metadata, put_back), late_cast=late)


def _refuse_targets(planner: LoadPlanner, rank: int) -> None:
    """Raises if no planner can fill a tensor. Why: torch's own error would not name the tensor."""
    flat = getattr(planner, "state_dict", None)
    problems = [
        f"{name!r} {reason}"
        for name, value in (flat.items() if isinstance(flat, dict) else ())
        if isinstance(value, torch.Tensor) and (reason := no_target_reason(value)) is not None
    ]
    if problems:
        raise UnsupportedValueError(
            f"{len(problems)} value(s) of the state dict can't be loaded into: "
            + "; ".join(problems),
            rank=rank,
        )


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


def _is_own(planner: LoadPlanner, *names: str) -> bool:
    """Returns whether any of these hooks is not that of `DefaultLoadPlanner`."""
    return any(
        getattr(type(planner), name, None) is not getattr(DefaultLoadPlanner, name)
        or name in vars(planner)
        for name in names
    )


_ZIP = b"PK\x03\x04"
"""First bytes of everything that torch.save has written since torch 1.6."""


class PlannedReads:
    """The read items of one planner, matched with the chunk table."""

    def __init__(self, call: _Calls, table: ChunkTable, options: LoadOptions) -> None:
        self._call = call
        self._planner = call.planner
        self._table = table
        self._options = options
        self._itemsizes: dict[int, int] = {}
        self._raw, self._opaque = PlannerSink(call, options), PlannerSink(call, options)
        self._raw_boxes = Boxes(self._itemsizes, self._raw)
        self._opaque_boxes = Boxes(self._itemsizes, self._opaque)
        # The default lookup returns views of the state dict, so an early lookup costs nothing and
        # finds a dtype that does not match before anything changes.
        self._looks_early = isinstance(self._planner, DefaultLoadPlanner) and not _is_own(
            self._planner, "resolve_tensor", "lookup_tensor", "transform_tensor"
        )
        self._raw.resolves_again = self._opaque.resolves_again = self._looks_early
        self._index = {name: index for index, name in enumerate(table.names)}
        self._first_chunk = first_chunks(table)
        self._objects: list[tuple[int, Callable[[bytes], None]]] = []
        self._fqns: dict[str, None] = {}
        self._stored: set[int] = set()

    def add(self, item: ReadItem) -> None:
        """Adds a read item.

        Raises:
            StateDictError: The checkpoint has no such item.
        """
        fqn = item.storage_index.fqn
        tensor = self._index.get(fqn)
        if tensor is None:
            raise self._wrong(item, f"{fqn!r}, which the checkpoint does not have")
        kind = self._table.kind[tensor]
        if (kind == Kind.OBJECT) != (item.type is LoadItemType.BYTE_IO):
            stored = "an object" if kind == Kind.OBJECT else "a tensor"
            raise self._wrong(item, f"{fqn!r} as {item.type.name}, but it is stored as {stored}")
        self._fqns[item.dest_index.fqn] = None
        self._stored.add(tensor)
        if kind == Kind.OBJECT:
            self._objects.append((tensor, self._taker(item)))
            return
        offset, size = self._box(item, tensor)
        dtype = dtype_of(self._table.dtypes[self._table.dtype[tensor]], fqn=fqn)
        self._itemsizes[tensor] = dtype.itemsize
        is_opaque = kind == Kind.OPAQUE
        sink = self._opaque if is_opaque else self._raw
        (self._opaque_boxes if is_opaque else self._raw_boxes).add(tensor, offset, size)
        sink.add_item(item, dtype)
        if self._looks_early:
            sink.target(len(sink) - 1)

    def check_complete(self) -> None:
        """Refuses checkpoints whose chunks don't cover the wanted tensors.

        DCP's planner omits elements that no chunk holds, and its load leaves them unchanged.
        """
        wanted = self._stored.union(self._index[n] for n in self._asked() if n in self._index)
        short = lacks_parts(self._table)
        lacking = [self._table.names[tensor] for tensor in sorted(wanted) if short[tensor]]
        if lacking:
            raise CoverageError(
                f"the checkpoint lacks parts of {', '.join(map(repr, lacking[:8]))}"
                f"{' and more' if len(lacking) > 8 else ''}; load an earlier one",
                rank=self._call.rank,
                key=lacking[0],
            )

    def targets(self, metadata: Metadata, put_back: Callable[[], None]) -> Targets:
        """Returns the targets of all read items.

        Args:
            metadata: DCP's metadata of the checkpoint, used to report what is missing.
            put_back: Called when all bytes are in place.
        """
        items = ItemPlacer(self._table, self._options, self._raw_boxes, self._opaque_boxes)

        def finish() -> None:
            self._raw.finish()
            self._opaque.finish()
            put_back()

        return items.targets(
            objects=[(int(self._first_chunk[n]), take) for n, take in self._objects],
            finish=finish,
            loaded=tuple(self._fqns),
            missing=self._missing(metadata),
            unexpected=self._unexpected(),
            cast=(),  # Why: `rounded` has the casts of the sinks.
        )

    def _box(self, item: ReadItem, tensor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ndim = int(self._table.ndim[tensor])
        start = item.storage_index.offset
        chunk = tuple(start) if start is not None else (0,) * ndim
        if not len(chunk) == len(item.storage_offsets) == len(item.lengths) == ndim:
            raise self._wrong(
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
            raise self._wrong(
                item,
                f"{item.storage_index.fqn!r} at {offset} of {size}, but it is stored with "
                f"shape {shape}",
            )
        return offset, size

    def _taker(self, item: ReadItem) -> Callable[[bytes], None]:
        fqn = item.dest_index.fqn

        def take(data: bytes) -> None:
            if self._options.weights_only:
                data = self._checked(fqn, data)
            self._call(
                f"load_bytes for {fqn!r}",
                lambda: self._planner.load_bytes(item, io.BytesIO(data)),
            )

        return take

    def _checked(self, fqn: str, data: bytes) -> bytes:
        if data.startswith(_ZIP) or not _is_own(self._planner, "load_bytes"):
            # Why pickled again: torch's planners run the pickle without restriction. They get a
            # pickle that ray_dcp writes, of the object that a safe load has built.
            return dump_object(load_object(data, fqn=fqn), fqn=fqn)
        raise UnsafeCheckpointError(
            f"{fqn!r} does not hold bytes of torch.save, so they can't be checked before "
            f"{self._call.name}.load_bytes gets them; if you trust the checkpoint, load with "
            f"LoadOptions(weights_only=False)",
            rank=self._call.rank,
            key=fqn,
        )

    def _missing(self, metadata: Metadata) -> tuple[str, ...]:
        known = metadata.state_dict_metadata
        return tuple(n for n in self._asked() if n not in known and n not in self._fqns)

    def _asked(self) -> Iterable[str]:
        """Returns the names of the state dict, as far as the planner exposes them."""
        flat = getattr(self._planner, "state_dict", None)
        is_told = isinstance(self._planner, DefaultLoadPlanner) and isinstance(flat, dict)
        return flat if is_told else ()  # type: ignore[return-value]

    def _unexpected(self) -> tuple[str, ...]:
        names = tuple(n for i, n in enumerate(self._table.names) if i not in self._stored)
        if names and self._options.strict:
            raise StateDictError(
                f"the checkpoint has keys that {self._call.name} does not ask for: "
                f"{', '.join(map(repr, names[:8]))}{' and more' if len(names) > 8 else ''}; ask "
                f"for them, or load with LoadOptions(strict=False)",
                rank=self._call.rank,
                key=names[0],
            )
        return names

    def _wrong(self, item: ReadItem, what: str) -> StateDictError:
        return StateDictError(
            f"{self._call.name} planned to read {what}",
            rank=self._call.rank,
            key=item.dest_index.fqn,
        )
