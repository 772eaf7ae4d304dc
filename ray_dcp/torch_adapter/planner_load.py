"""Loads with a planner of the user's from native storage: its hooks run here, in DCP's order.

What it plans to read becomes wanted boxes of the chunk table. `Boxes`, the `TargetSink` of such a
load, fills each in the planner's terms: `resolve_tensor`, bytes, `commit_tensor`. Objects go
through its `load_bytes`.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ray_dcp.core.values import ChunkTable, Int64Array, Kind, intersect, volume
from ray_dcp.errors import (
    CoverageError,
    DamagedCheckpointError,
    InternalError,
    ShapeMismatchError,
    StateDictError,
    UnsafeCheckpointError,
)
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import ReadPlan, Wanted
from ray_dcp.protocol.messages import OpKey
from ray_dcp.torch_adapter.collective import Group, Steps, call_user_code, reduce_scatter, reserve
from ray_dcp.torch_adapter.objects import dump_object, load_object
from ray_dcp.torch_adapter.state import LoadTargets, Stored, stateful_to_load_targets
from ray_dcp.torch_adapter.targets import Targets
from ray_dcp.torch_adapter.tensors import (
    dtype_name,
    dtype_of,
    is_plain,
    loses_nothing,
    writable_bytes,
)

Offsets = tuple[int, ...]


class BoxItem:
    """One `ReadItem` of a tensor: a box of the stored tensor, and its target once resolved.

    Args:
        item: As planned.
        tensor: Index into the chunk table's `names`.
        offset: Where the box starts in the stored tensor.
        size: Its lengths.
        dtype: As stored.
    """

    def __init__(
        self, item: ReadItem, tensor: int, offset: Offsets, size: Offsets, dtype: torch.dtype
    ) -> None:
        self.item = item
        self.tensor = tensor
        self.offset = offset
        self.size = size
        self.dtype = dtype
        self.target: torch.Tensor | None = None
        self.filling: torch.Tensor | None = None
        """What the bytes go into: the target itself, or a temporary of the stored dtype."""
        self.late: list[tuple[Offsets, torch.Tensor]] = []
        """Pieces that only `copy_` can bring into the target, by their start in the box."""
        self.missing = torch.Size(size).numel()
        """Elements that `place` has not brought; `done` does not count."""
        self.is_committed = False

    @property
    def fqn(self) -> str:
        """What the caller calls it."""
        return self.item.dest_index.fqn

    def resolve(self, boxes: Boxes) -> torch.Tensor:
        """Returns the target, asking the planner the first time."""
        if self.target is None:
            self.target = boxes.target_of(self)
        return self.target

    def common(self, origin: Offsets, size: Offsets) -> tuple[Offsets, Offsets] | None:
        """Returns offset and size of what a chunk has in common with the box, if anything."""
        low = tuple(map(max, self.offset, origin))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.size, origin, size, strict=True)
        )
        lengths = tuple(h - l_ for l_, h in zip(low, high, strict=True))
        return (low, lengths) if all(n > 0 for n in lengths) else None


class Boxes:
    """All boxes of one load, as the sink that the reader fills.

    Attributes:
        rows: The boxes of raw bytes, by wanted row.
        others: Boxes that are brought by `place` alone.
    """

    def __init__(self, planner: LoadPlanner, options: LoadOptions, rank: int) -> None:
        self.rows: Sequence[BoxItem] = ()
        self.others: Sequence[BoxItem] = ()
        self._planner = planner
        self._name = type(planner).__name__
        self._options = options
        self._rank = rank
        # Planners are written for DCP's reader, which has one thread.
        self._lock = threading.RLock()

    def call(self, hook: str, code: Callable[[], Any]) -> Any:
        """Runs a hook of the planner; no two at a time."""
        with self._lock:
            return call_user_code(f"{self._name}.{hook}", code, rank=self._rank)

    def buffer(self, row: int) -> memoryview:
        """Returns the bytes to fill for a wanted row; see `TargetSink`."""
        with self._lock:
            return writable_bytes(self._filling(self.rows[row]))

    def done(self, row: int) -> None:
        """Hands a filled row to the planner; see `TargetSink`."""
        box = self.rows[row]
        if not box.late:
            self._commit(box)

    def place(
        self, box: BoxItem, piece: torch.Tensor, origin: Offsets, low: Offsets, size: Offsets
    ) -> None:
        """Brings a part of a box from a loaded tensor.

        Args:
            box: The box.
            piece: What was loaded.
            origin: Where the piece starts in the stored tensor.
            low: Where the part starts in the stored tensor.
            size: Its lengths.
        """
        part = _narrow(piece, tuple(a - o for a, o in zip(low, origin, strict=True)), size)
        start = tuple(a - o for a, o in zip(low, box.offset, strict=True))
        with self._lock:
            # Why later: a copy of the temporary into the target would undo it.
            box.late.append((start, part))
            box.missing -= part.numel()
            if box.missing <= 0:
                self._commit(box)

    def finish(self) -> None:
        """Commits what is left: boxes of no elements, and those brought in both ways.

        Raises:
            InternalError: A box was never filled.
        """
        for box in (*self.rows, *self.others):
            if box.is_committed and not box.late:
                continue
            if 0 not in box.size and not box.late:
                raise InternalError(f"{box.fqn!r} was never read", rank=self._rank, key=box.fqn)
            self._commit(box)

    def casts(self) -> tuple[tuple[str, str, str], ...]:
        """Returns `(FQN, stored dtype, target dtype)` of the boxes resolved so far."""
        found = {
            (box.fqn, dtype_name(box.dtype), dtype_name(box.target.dtype)): None
            for box in (*self.rows, *self.others)
            if box.target is not None and box.target.dtype != box.dtype
        }
        return tuple(found)

    def target_of(self, box: BoxItem) -> torch.Tensor:
        """Asks the planner for the tensor to fill, and checks it."""
        target = self.call(
            f"resolve_tensor for {box.fqn!r}",
            lambda: self._planner.resolve_tensor(box.item).detach(),
        )
        if tuple(target.shape) != box.size:
            raise ShapeMismatchError(
                f"{self._name} planned to read {box.size} elements of {box.fqn!r}, but "
                f"resolves a tensor of shape {tuple(target.shape)}",
                rank=self._rank,
                key=box.fqn,
            )
        self._check_dtype(box, target.dtype)
        resolved: torch.Tensor = target
        return resolved

    def _check_dtype(self, box: BoxItem, dtype: torch.dtype) -> None:
        policy = self._options.dtype
        if policy == "cast" or dtype == box.dtype:
            return
        if policy == "widen" and loses_nothing(box.dtype, dtype):
            return
        raise ShapeMismatchError(
            f"{box.fqn!r} is stored as {box.dtype}, but its target is {dtype}, which "
            f"{'may lose values' if policy == 'widen' else 'is another dtype'}; make the target "
            f"{box.dtype}, or load with LoadOptions(dtype='cast')",
            rank=self._rank,
            key=box.fqn,
        )

    def _filling(self, box: BoxItem) -> torch.Tensor:
        if box.filling is None:
            target = box.resolve(self)
            is_direct = (
                target.dtype == box.dtype
                and is_plain(target)
                and target.is_cpu
                and target.is_contiguous()
                and not (target.is_conj() or target.is_neg())
            )
            box.filling = target if is_direct else torch.empty(box.size, dtype=box.dtype)
        return box.filling

    def _commit(self, box: BoxItem) -> None:
        with self._lock:
            target = box.resolve(self)
            if box.filling is not None and box.filling is not target:
                target.copy_(box.filling)
            for start, part in box.late:
                _narrow(target, start, tuple(part.shape)).copy_(part)
            box.late.clear()
            box.is_committed = True
            self.call(
                f"commit_tensor for {box.fqn!r}",
                lambda: self._planner.commit_tensor(box.item, target),
            )
            # Temporaries, ours and the planner's, are not needed any more.
            box.filling = None
            box.target = None


def _narrow(tensor: torch.Tensor, start: Offsets, size: Offsets) -> torch.Tensor:
    """Returns a part as a view; a whole dimension is left alone, as subclasses may refuse it."""
    for dim, (low, length) in enumerate(zip(start, size, strict=True)):
        if low != 0 or length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, low, length)
    return tensor


def targets_with_planner(
    next_key: Callable[[], OpKey],
    state_dict: MutableMapping[str, Any],
    planner: LoadPlanner,
    metadata: Metadata,
    table: ChunkTable,
    *,
    rank: int,
    world_size: int,
    options: LoadOptions,
    coordinator_rank: int = 0,
    checkpoint_id: str | None = None,
    stateful: bool = True,
) -> Steps[Targets]:
    """Runs a planner's hooks and returns what it wants read, and where to.

    Plans are exchanged only if `create_global_plan` is the planner's own. The planner is never
    called by two threads at once, but it may be asked to resolve a tensor before another was
    committed.

    Whether keys may be missing is for the planner to say (`allow_partial_load` of the default
    ones), not for `options`. Objects are checked by the rules of `options.weights_only` before
    the planner's `load_bytes` gets them, since torch's own unpickles without restriction.

    Args:
        next_key: Names the next operation of the session (`Session.next_key`). Called now, not
            when the generator runs, and equally often on all ranks.
        state_dict: What to load into.
        planner: Any `LoadPlanner`.
        metadata: The checkpoint as DCP tells it.
        table: The same checkpoint as ray_dcp tells it.
        rank: This rank.
        world_size: Number of ranks.
        options: `dtype`, `weights_only`, `strict` and `plan_timeout_s`.
        coordinator_rank: The rank that plans for all.
        checkpoint_id: For messages.
        stateful: Load into the state of top-level `Stateful` values.

    Raises:
        CheckpointError: A hook raised; `.failures` has what it raised.
        MissingKeyError: The default planning misses a key.
        ShapeMismatchError: A target has another shape, or a narrower dtype.
        StateDictError: The planner wants what the checkpoint does not have.
        CoverageError: The checkpoint lacks a part of a tensor that the planner wants.
    """
    is_global = _is_own(planner, "create_global_plan")
    group = Group(
        reserve(next_key, num_steps=int(is_global), world_size=world_size),
        rank,
        world_size,
        options.plan_timeout_s,
        "load",
        checkpoint_id,
        coordinator_rank,
    )
    return _steps(group, state_dict, planner, metadata, table, options, stateful=stateful)


def _steps(
    group: Group,
    state_dict: MutableMapping[str, Any],
    planner: LoadPlanner,
    metadata: Metadata,
    table: ChunkTable,
    options: LoadOptions,
    *,
    stateful: bool,
) -> Steps[Targets]:
    name = type(planner).__name__
    loaded: LoadTargets | None = None

    def guard(hook: str, code: Callable[[], Any]) -> Any:
        return call_user_code(f"{name}.{hook}", code, rank=group.rank)

    def set_up() -> None:
        nonlocal loaded
        if stateful:
            loaded = stateful_to_load_targets(state_dict, Stored.of(metadata))
        state = state_dict if loaded is None else loaded.values
        planner.set_up_planner(state, metadata, group.is_coordinator)  # type: ignore[arg-type]

    def local_plan() -> LoadPlan:
        set_up()
        return planner.create_local_plan()

    if _is_own(planner, "create_global_plan"):
        part = yield from reduce_scatter(group, "plan", local_plan, planner.create_global_plan)
        plan = guard("finish_plan", lambda: planner.finish_plan(part()))
    else:
        guard("set_up_planner", set_up)
        plan = guard("create_local_plan", planner.create_local_plan)
        plan = guard("finish_plan", lambda: planner.finish_plan(plan))
    reads = PlannedReads(planner, table, options, group.rank)
    for item in plan.items:
        reads.add(item)
    reads.check_complete()

    def finish() -> None:
        reads.boxes.finish()
        if loaded is not None:
            loaded.put_back(state_dict)

    return reads.targets(metadata, finish)


def _is_own(planner: LoadPlanner, *names: str) -> bool:
    """Whether any of these hooks is not that of `DefaultLoadPlanner`."""
    return any(
        getattr(type(planner), name, None) is not getattr(DefaultLoadPlanner, name)
        or name in vars(planner)
        for name in names
    )


_ZIP = b"PK\x03\x04"
"""How everything begins that torch.save has written since torch 1.6."""


class PlannedReads:
    """The read items of one planner, told against the chunk table."""

    def __init__(
        self, planner: LoadPlanner, table: ChunkTable, options: LoadOptions, rank: int
    ) -> None:
        self.planner = planner
        self.name = type(planner).__name__
        self.table = table
        self.options = options
        self.rank = rank
        self.boxes = Boxes(planner, options, rank)
        # The default lookup gives views of the state dict, so looking early costs nothing and
        # finds a dtype that does not fit before anything is touched.
        self._looks_early = isinstance(planner, DefaultLoadPlanner) and not _is_own(
            planner, "resolve_tensor", "lookup_tensor", "transform_tensor"
        )
        self._index = {name: index for index, name in enumerate(table.names)}
        self._chunks = _chunks_by_tensor(table)
        self._wanted: list[BoxItem] = []
        self._objects: list[tuple[int, Callable[[bytes], None]]] = []
        self._opaque: list[BoxItem] = []
        self._fqns: dict[str, None] = {}
        self._stored: set[int] = set()

    def add(self, item: ReadItem) -> None:
        """Notes what an item wants.

        Raises:
            StateDictError: The checkpoint has nothing like it.
        """
        fqn = item.storage_index.fqn
        tensor = self._index.get(fqn)
        if tensor is None:
            raise self._wrong(item, f"{fqn!r}, which the checkpoint does not have")
        is_object = self.table.kind[tensor] == Kind.OBJECT
        if is_object != (item.type is LoadItemType.BYTE_IO):
            stored = "an object" if is_object else "a tensor"
            raise self._wrong(item, f"{fqn!r} as {item.type.name}, but it is stored as {stored}")
        self._fqns[item.dest_index.fqn] = None
        self._stored.add(tensor)
        if is_object:
            if not len(self._chunks[tensor]):
                self.check_complete()
            self._objects.append((int(self._chunks[tensor][0]), self._taker(item)))
            return
        box = self._box(item, tensor)
        if self._looks_early:
            box.resolve(self.boxes)
        if self.table.kind[tensor] == Kind.OPAQUE:
            self._opaque.append(box)
        else:
            self._wanted.append(box)

    def check_complete(self) -> None:
        """Refuses checkpoints whose chunks can't fill the tensors that are wanted.

        DCP's planning leaves out what no chunk holds, and its load leaves it as it was.
        """
        have = np.zeros(self.table.num_tensors, dtype=np.int64)
        np.add.at(have, self.table.tensor, volume(self.table.size))
        short = have < volume(self.table.shape)
        lacking = [self.table.names[tensor] for tensor in sorted(self._stored) if short[tensor]]
        if lacking:
            raise CoverageError(
                f"the checkpoint lacks parts of {', '.join(map(repr, lacking[:8]))}"
                f"{' and more' if len(lacking) > 8 else ''}; load an earlier one",
                rank=self.rank,
                key=lacking[0],
            )

    def targets(self, metadata: Metadata, finish: Callable[[], None]) -> Targets:
        """Returns where everything goes.

        Args:
            metadata: The checkpoint as DCP tells it, to say what is missing.
            finish: Called when all bytes are in place.
        """
        rows, opaque = self._wanted, self._opaque
        wanted = Wanted(
            tensor=np.array([box.tensor for box in rows], dtype=np.int32),
            offset=self._padded([box.offset for box in rows], 0),
            size=self._padded([box.size for box in rows], 1),
            itemsize=np.array([box.dtype.itemsize for box in rows], dtype=np.int64),
        )
        self.boxes.rows, self.boxes.others = rows, opaque
        place = _Place(self.table, self._chunks, self.boxes, self.options)
        objects = list(self._objects)
        for chunk in sorted({c for box in opaque for c in place.chunks_of(box)}):
            objects.append((chunk, lambda data, chunk=chunk: place(chunk, data)))  # type: ignore[misc]
        return Targets(
            wanted=wanted,
            sink=self.boxes,
            objects=tuple(objects),
            place_item=place,
            finish=finish,
            check_coverage=self._check_coverage,
            names=tuple(box.fqn for box in rows),
            loaded=tuple(self._fqns),
            missing=self._missing(metadata),
            unexpected=self._unexpected(),
            cast=self.boxes.casts(),
        )

    def _box(self, item: ReadItem, tensor: int) -> BoxItem:
        ndim = int(self.table.ndim[tensor])
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
        shape = tuple(int(n) for n in self.table.shape[tensor][:ndim])
        if any(
            o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)
        ):
            raise self._wrong(
                item,
                f"{item.storage_index.fqn!r} at {offset} of {size}, but it is stored with "
                f"shape {shape}",
            )
        dtype = dtype_of(self.table.dtypes[self.table.dtype[tensor]], fqn=item.storage_index.fqn)
        return BoxItem(item, tensor, offset, size, dtype)

    def _taker(self, item: ReadItem) -> Callable[[bytes], None]:
        fqn = item.dest_index.fqn

        def take(data: bytes) -> None:
            if self.options.weights_only:
                data = self._checked(fqn, data)
            self.boxes.call(
                f"load_bytes for {fqn!r}",
                lambda: self.planner.load_bytes(item, io.BytesIO(data)),
            )

        return take

    def _checked(self, fqn: str, data: bytes) -> bytes:
        if data.startswith(_ZIP) or not _is_own(self.planner, "load_bytes"):
            # Why anew: torch's planners run the pickle without restriction. Of the object that
            # was built from it they get a pickle that nobody else wrote.
            return dump_object(load_object(data, fqn=fqn), fqn=fqn)
        raise UnsafeCheckpointError(
            f"{fqn!r} does not hold bytes of torch.save, so they can't be checked before "
            f"{self.name}.load_bytes gets them; if you trust the checkpoint, load with "
            f"LoadOptions(weights_only=False)",
            rank=self.rank,
            key=fqn,
        )

    def _check_coverage(self, read_plan: ReadPlan) -> None:
        if read_plan.uncovered:
            told = "; ".join(
                f"{self._wanted[row].fqn!r} lacks {missing} bytes"
                for row, missing in read_plan.uncovered[:8]
            )
            raise CoverageError(
                f"the checkpoint does not fill what {self.name} wants to read: {told}",
                rank=self.rank,
            )

    def _missing(self, metadata: Metadata) -> tuple[str, ...]:
        flat = getattr(self.planner, "state_dict", None)
        if not isinstance(self.planner, DefaultLoadPlanner) or not isinstance(flat, dict):
            return ()
        return tuple(name for name in flat if name not in metadata.state_dict_metadata)

    def _unexpected(self) -> tuple[str, ...]:
        names = tuple(n for i, n in enumerate(self.table.names) if i not in self._stored)
        if names and self.options.strict:
            raise StateDictError(
                f"the checkpoint has keys that {self.name} does not ask for: "
                f"{', '.join(map(repr, names[:8]))}{' and more' if len(names) > 8 else ''}; ask "
                f"for them, or load with LoadOptions(strict=False)",
                rank=self.rank,
                key=names[0],
            )
        return names

    def _wrong(self, item: ReadItem, what: str) -> StateDictError:
        return StateDictError(
            f"{self.name} planned to read {what}", rank=self.rank, key=item.dest_index.fqn
        )

    def _padded(self, boxes: Sequence[tuple[int, ...]], fill: int) -> Int64Array:
        width = self.table.shape.shape[1]
        rows = [(*box, *[fill] * (width - len(box))) for box in boxes]
        return np.array(rows, dtype=np.int64).reshape(len(rows), width)


class _Place:
    """Puts a tensor that only `torch.load` understands into the boxes that it meets."""

    def __init__(
        self,
        table: ChunkTable,
        chunks: Sequence[Int64Array],
        boxes: Boxes,
        options: LoadOptions,
    ) -> None:
        self._table = table
        self._chunks = chunks
        self._boxes = boxes
        self._options = options
        self._by_tensor: dict[int, list[BoxItem]] = {}
        for box in (*boxes.rows, *boxes.others):
            self._by_tensor.setdefault(box.tensor, []).append(box)

    def __call__(self, chunk: int, data: bytes) -> None:
        tensor, ndim = self._tensor(chunk)
        name = self._table.names[tensor]
        piece = load_object(data, fqn=name, weights_only=self._options.weights_only)
        size = tuple(int(n) for n in self._table.size[chunk][:ndim])
        if tuple(getattr(piece, "shape", ())) != size or not hasattr(piece, "narrow"):
            raise DamagedCheckpointError(
                f"the chunk of {name!r} should be a tensor of shape {size}, but is "
                f"{type(piece).__name__} of shape {tuple(getattr(piece, 'shape', ()))}",
                key=name,
            )
        origin = tuple(int(n) for n in self._table.offset[chunk][:ndim])
        for box in self._by_tensor.get(tensor, ()):
            common = box.common(origin, size)
            if common is not None:
                self._boxes.place(box, piece, origin, *common)

    def chunks_of(self, box: BoxItem) -> list[int]:
        """Returns the chunks that meet a box."""
        chunks, table = self._chunks[box.tensor], self._table
        width = table.shape.shape[1]
        offset = np.array([*box.offset, *[0] * (width - len(box.offset))], dtype=np.int64)
        size = np.array([*box.size, *[1] * (width - len(box.size))], dtype=np.int64)
        _, _, nonempty = intersect(table.offset[chunks], table.size[chunks], offset, size)
        return [int(chunk) for chunk in chunks[nonempty]]

    def _tensor(self, chunk: int) -> tuple[int, int]:
        tensor = int(self._table.tensor[chunk])
        return tensor, int(self._table.ndim[tensor])


def _chunks_by_tensor(table: ChunkTable) -> list[Int64Array]:
    """Returns the chunks of each tensor."""
    order = np.argsort(table.tensor, kind="stable").astype(np.int64)
    bounds = np.searchsorted(table.tensor[order], np.arange(table.num_tensors + 1))
    return [order[low:high] for low, high in pairwise(bounds)]
