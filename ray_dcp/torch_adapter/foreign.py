"""Saves or loads through a third-party storage plug-in, in DCP's call order.

The plug-in runs in the ranks; gathers and scatters go through ray_dcp's coordinator instead of
collectives of the training group. The plug-in's `finish` is the commit: this path has no fencing
and no checksums, and it does not survive the death of a rank. Futures that a plug-in returns are
awaited with a deadline.

`TorchSaveReader` is a plug-in too: it replaces torch's `BroadcastingTorchSaveReader`.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from ray_dcp import events
from ray_dcp.core import phases
from ray_dcp.core.processes import Stop, run_within
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    MissingKeyError,
    ParticipantError,
    ShapeMismatchError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.store.location import AnyPlace
from ray_dcp.torch_adapter.collective import Group, Sealed, Steps, all_reduce, reduce_scatter
from ray_dcp.torch_adapter.flatten import flatten, flatten_top, listed
from ray_dcp.torch_adapter.objects import load_torch_file
from ray_dcp.torch_adapter.optimizer_state import Stored
from ray_dcp.torch_adapter.shards import SEES_PARTS
from ray_dcp.torch_adapter.state import (
    LoadTargets,
    asked_names,
    refuse_per_rank,
    stateful_to_load_targets,
    stateful_to_state_dict,
)
from ray_dcp.torch_adapter.tensors import is_checkpointable, lost_memory_within


def allows_missing(planner: Any) -> bool:
    """Returns whether a planner leaves targets as they are that the checkpoint lacks."""
    return bool(getattr(planner, "allow_partial_load", False))


def create_plan(
    planner: LoadPlanner, state_dict: Mapping[str, Any], names: Sequence[str]
) -> LoadPlan:
    """Returns the planner's plan of a load; says what to do about names with those of wrappers.

    A planner of the user's own looks for the checkpoint's names. What it does not find may be there
    with parts of the names of wrappers, as `_orig_mod`, which only ray_dcp's own planning leaves
    out.

    Args:
        planner: The planner, which is set up.
        state_dict: The user's argument of `load`.
        names: Names in the checkpoint.

    Raises:
        MissingKeyError: The planner misses a key that the checkpoint has under such a name.
        Exception: Any other of the planner's.
    """

    def told(read: Collection[str]) -> str:
        unread = {name: row for row, name in enumerate(names) if name not in read}
        try:
            asked = asked_names(state_dict, unread)
        except StateDictError:  # Two names are equal without those of wrappers.
            return ""
        pairs = [(n, names[row]) for n, row in asked.items() if n != names[row]]
        if not pairs:
            return ""
        return (
            f"the checkpoint has names of wrappers of modules in its names, as {pairs[0][1]!r} for "
            f"{pairs[0][0]!r}, which {type(planner).__name__} does not leave out: load without a "
            f"planner of your own, or map the names in its set_up_planner"
        )

    try:
        plan = planner.create_local_plan()
    except RuntimeError as error:
        way_out = told(()) if "Missing key in checkpoint" in str(error) else ""
        if not way_out:
            raise
        raise MissingKeyError(f"{str(error).rstrip('.')}; {way_out}") from error
    if allows_missing(planner):
        way_out = told({item.storage_index.fqn for item in plan.items})
        if way_out:
            events.warn(f"Not loaded: {way_out}", stacklevel=2)
    return plan


def await_future(future: Any, timeout_s: float, *, doing: str, rank: int) -> Any:
    """Returns the value of a future of a storage plug-in.

    The future may be a `torch.futures.Future`, any object with its `wait()` and (optionally)
    `value()`, or a `concurrent.futures.Future`.

    Args:
        future: The result of `write_data` or `read_data`.
        timeout_s: Deadline in seconds.
        doing: Name of the method that returned the future, such as `"MyWriter.write_data"`, for
            messages.
        rank: This rank.

    Raises:
        DeadlineError: The future did not complete in time.
        InvalidRequestError: The object is no future.
        BaseException: The exception that the future failed with.

    Careful: the future is awaited in a daemon thread, which remains when the deadline passes.
    """
    if not hasattr(future, "wait") and not hasattr(future, "result"):
        raise InvalidRequestError(
            f"{doing} must return a torch.futures.Future, but returned "
            f"{type(future).__name__}; return one whose set_result was called if the work is "
            f"already done",
            rank=rank,
        )

    def get() -> Any:
        if not hasattr(future, "wait"):
            return future.result()
        waited = future.wait()
        return future.value() if hasattr(future, "value") else waited

    def overdue() -> DeadlineError:
        return DeadlineError(
            f"{doing} returned a future that did not complete within {timeout_s:g} s on rank "
            f"{rank}; raise the timeout, or find what the storage waits for",
            rank=rank,
        )

    return run_within(get, timeout_s, Stop(), overdue, unwind_s=0.0)


_log = logging.getLogger(__name__)


def foreign_save(
    group: Group,
    state_dict: Mapping[str, Any],
    writer: StorageWriter,
    planner: SavePlanner | None = None,
    *,
    checkpoint_id: AnyPlace | None = None,
    use_collectives: bool = True,
    stateful: bool = True,
    clock: phases.PhaseClock | None = None,
) -> Steps[Metadata]:
    """Saves through a third-party `StorageWriter`.

    The calls on writer and planner are those of `torch.distributed.checkpoint.save`, in its
    order, with its arguments.

    Args:
        group: The ranks. With one rank nothing is exchanged.
        state_dict: What to save.
        writer: The plug-in; `reset` is called only if `checkpoint_id` is given.
        planner: The planner; a `DefaultSavePlanner` by default.
        checkpoint_id: Where to save, in the plug-in's terms.
        use_collectives: False selects DCP's experimental mode in which every rank plans for itself
            and calls `finish`.
        stateful: Replace top-level `Stateful` values by their state, as `save` does and
            `save_state_dict` does not.
        clock: Clock of this save.

    Returns:
        The `Metadata` passed to `finish`: the same object on the coordinator rank, a copy on the
        others.

    Raises:
        CheckpointError: A rank failed; every rank raises the same error, with `.failures`.
        CommitUnknownError: The coordinator rank was lost after all ranks had written.

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `_save_state_dict`.
    """
    name = type(writer).__name__
    planner = DefaultSavePlanner() if planner is None else planner
    clock = clock or phases.PhaseClock()
    metadata: Metadata | None = None

    def local_plan() -> SavePlan:
        if checkpoint_id is not None:
            writer.reset(checkpoint_id)  # type: ignore[arg-type]
        state = stateful_to_state_dict(state_dict) if stateful else dict(state_dict)
        # Why only now: the state of a `Stateful` value may contain one.
        refuse_per_rank(state, f"the storage {name}")
        meta, is_coordinator = writer.storage_meta(), group.is_coordinator
        set_up_save_planner(planner, state, meta, is_coordinator=is_coordinator)
        how = {"rank": group.rank, "use_collectives": use_collectives}
        _call(writer.set_up_storage_writer, is_coordinator, **how)
        plan = planner.create_local_plan()
        refuse_lost_as_safetensors(writer, plan)
        plan = writer.prepare_local_plan(plan)
        clock.enter(phases.PLAN)
        return plan

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    def write(plan: SavePlan) -> Any:
        clock.enter(phases.PLUG_IN_WRITE)
        under_way = writer.write_data(planner.finish_plan(plan), planner)
        doing = f"{name}.write_data"
        written = await_future(under_way, group.timeout_s, doing=doing, rank=group.rank)
        clock.enter(phases.COMMIT)
        return written

    def finish(results: list[Any]) -> Sealed:
        if metadata is None:
            raise InternalError("the writer is to finish before a global plan was made")
        writer.finish(metadata=metadata, results=results)
        return Sealed(metadata, _dump_metadata(metadata))

    def open_outcome(error: ParticipantError) -> CommitUnknownError:
        return CommitUnknownError(
            f"{name} may have committed, or not: {error.message}; look at what its finish writes "
            f"last",
            checkpoint_id=group.checkpoint_id,
            rank=group.rank,
        )

    if use_collectives:
        plan = yield from reduce_scatter(group, "plan", local_plan, global_plan)
        committed = yield from all_reduce(
            group, "write", lambda: write(plan()), finish, lost=open_outcome
        )
        return _unpickle_committed(group, committed)

    def everything() -> Metadata:
        return finish([write(global_plan([local_plan()])[0])]).value  # type: ignore[no-any-return]

    own: list[Metadata] = []
    yield from all_reduce(group, "write", lambda: own.append(everything()), _do_nothing)
    return own[0]


def foreign_load(
    group: Group,
    state_dict: MutableMapping[str, Any],
    reader: StorageReader,
    planner: LoadPlanner | None = None,
    *,
    checkpoint_id: AnyPlace | None = None,
    stateful: bool = True,
    clock: phases.PhaseClock | None = None,
) -> Steps[None]:
    """Loads in place through a third-party `StorageReader`.

    The calls on reader and planner are those of `torch.distributed.checkpoint.load`, in its
    order, with its arguments. `Stateful` values receive their state only once every rank has read
    everything.

    Args:
        group: The ranks. With one rank nothing is exchanged.
        state_dict: What to load into.
        reader: The plug-in; `reset` is called only if `checkpoint_id` is given.
        planner: The planner; a `DefaultLoadPlanner` by default.
        checkpoint_id: What to load, in the plug-in's terms.
        stateful: Load into the state of top-level `Stateful` values, as `load` does and
            `load_state_dict` does not.
        clock: Clock of this load.

    Raises:
        CheckpointError: A rank failed; every rank raises the same error, with `.failures`. The
            state may be partially loaded.
        CheckpointNotFoundError: The reader found no metadata on any rank.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load` and `_load_state_dict`.
    """
    planner = DefaultLoadPlanner() if planner is None else planner
    clock = clock or phases.PhaseClock()
    loaded: LoadTargets | None = None

    def local_plan() -> LoadPlan:
        nonlocal loaded
        clock.enter(phases.PLAN_READS)
        if checkpoint_id is not None:
            reader.reset(checkpoint_id)  # type: ignore[arg-type]
        metadata, is_global = _read_metadata(group, reader)
        # Why not a copy: DCP's `load_state_dict` passes its own argument to the planner.
        state: Any = state_dict
        if stateful:
            strict = False if allows_missing(planner) else None
            loaded = stateful_to_load_targets(state_dict, Stored.of(metadata), strict=strict)
            state = loaded.values
        planner.set_up_planner(state, metadata, group.is_coordinator)
        refuse_misread(planner)
        how = {"rank": group.rank, "use_collectives": is_global}
        _call(reader.set_up_storage_reader, metadata, group.is_coordinator, **how)
        names = [*metadata.state_dict_metadata] if stateful else []
        plan = reader.prepare_local_plan(create_plan(planner, state_dict, names))
        clock.enter(phases.PLAN)
        return plan

    def global_plan(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read(plan: LoadPlan) -> None:
        clock.enter(phases.PLUG_IN_READ)
        under_way = reader.read_data(planner.finish_plan(plan), planner)
        doing = f"{type(reader).__name__}.read_data"
        await_future(under_way, group.timeout_s, doing=doing, rank=group.rank)
        clock.enter(phases.FINISH)

    def put_back() -> None:
        if loaded is not None:
            loaded.put_back(state_dict)

    plan = yield from reduce_scatter(group, "plan", local_plan, global_plan)
    yield from all_reduce(group, "read", lambda: read(plan()), _do_nothing)
    yield from all_reduce(group, "load_state_dict", put_back, _do_nothing)


def set_up_save_planner(
    planner: SavePlanner,
    state_dict: dict[str, Any],
    storage_meta: StorageMeta | None,
    *,
    is_coordinator: bool,
) -> None:
    """Calls `set_up_planner`, without `storage_meta` if the planner does not accept it.

    Args:
        planner: The planner.
        state_dict: What to save.
        storage_meta: Metadata of the writer.
        is_coordinator: Whether this rank plans for all ranks.

    Raises:
        UnsupportedValueError: See `refuse_misread`.

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `local_step`.
    """
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(
            state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator
        )
    else:
        warnings.warn(
            f"{type(planner).__name__}.set_up_planner has no storage_meta parameter; torch added "
            f"it to SavePlanner.set_up_planner, please add it too",
            stacklevel=2,
        )
        planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]
    refuse_misread(planner)


def refuse_misread(
    planner: SavePlanner | LoadPlanner,
    why: Callable[[torch.Tensor], str | None] = lambda _: None,
) -> None:
    """Raises if torch or a plug-in would read or write something else than a tensor's values.

    It would reach beyond the memory of a tensor; or, before torch 2.14, take a part of a tensor
    (`CheckpointableTensor`) for the whole.

    Args:
        planner: The planner after `set_up_planner`. The flat state dict of DCP's default planners
            is known.
        why: Returns another reason to refuse a tensor, or None.

    Raises:
        UnsupportedValueError: There are such tensors; the message names all of them.
    """
    flat = getattr(planner, "state_dict", None)
    if not isinstance(planner, (DefaultSavePlanner, DefaultLoadPlanner)):
        return
    wrong = []
    for name, value in flat.items() if isinstance(flat, Mapping) else ():
        if is_checkpointable(value) and not SEES_PARTS:
            wrong.append(f"{name!r} is a part of a tensor, which planners know since torch 2.14")
        parts = [value]
        if isinstance(value, ShardedTensor):
            parts = [shard.tensor for shard in value.local_shards()]
        for part in parts:
            if isinstance(part, torch.Tensor) and (reason := why(part) or lost_memory_within(part)):
                wrong.append(f"{name!r} {reason}")
    if wrong:
        raise UnsupportedValueError(
            f"{len(wrong)} value(s) of the state dict can't be saved or loaded: {'; '.join(wrong)}"
        )


def refuse_lost_as_safetensors(writer: StorageWriter, plan: SavePlan) -> None:
    """Raises if torch's `HuggingFaceStorageWriter` would lose a value without an error.

    It writes an object as a file that no reader accepts, and consolidates every tensor without
    dimensions to 0.

    Args:
        writer: Any storage writer.
        plan: Plan of this rank.

    Raises:
        UnsupportedValueError: There are such values; the message names all of them.
    """
    if not isinstance(writer, HuggingFaceStorageWriter):
        return
    lost = []
    for item in plan.items:
        if item.tensor_data is None:
            lost.append(f"{item.index.fqn!r} is no tensor")
        elif not item.tensor_data.size and writer.enable_consolidation:
            lost.append(f"{item.index.fqn!r} has no dimension, and would be consolidated as 0")
    if lost:
        raise UnsupportedValueError(
            f"HuggingFaceStorageWriter can't write {len(lost)} value(s): "
            f"{'; '.join(sorted(lost))}. Leave them out, or save without storage_writer "
            f"and use export"
        )


def _read_metadata(group: Group, reader: StorageReader) -> tuple[Metadata, bool]:
    """Returns the metadata, and whether it is shared by all ranks rather than this rank's own.

    Like DCP, it requests the rank's own metadata if there is no shared one.
    """
    reasons: list[Exception] = []
    tries = [({}, True), ({"rank": group.rank}, False)]
    for how, is_global in tries if _takes_kwargs(reader.read_metadata) else tries[:1]:
        try:
            metadata = reader.read_metadata(**how)
        except Exception as error:  # noqa: BLE001 - reported together
            reasons.append(error)
        else:
            if metadata:
                return metadata, is_global
    told = "; ".join(f"{type(e).__name__}: {e}" for e in reasons) or "it returned nothing"
    # Only a missing file means that there is no checkpoint; a timeout, for example, does not.
    is_missing = all(isinstance(error, FileNotFoundError) for error in reasons)
    made = CheckpointNotFoundError if is_missing else CheckpointError
    raise made(
        f"{type(reader).__name__}.read_metadata found no checkpoint: {told}",
        checkpoint_id=group.checkpoint_id,
        rank=group.rank,
    ) from (reasons[0] if reasons else None)


def _dump_metadata(metadata: Metadata) -> bytes:
    """Pickles the metadata, without additions of a plug-in that can't be pickled.

    The checkpoint is committed when this runs, so this must not fail.
    """
    try:
        return pickle.dumps(metadata)
    except Exception as error:  # noqa: BLE001 - whatever user classes raise in __reduce__
        _log.warning(
            "the Metadata of %s can't be pickled (%s); the other ranks get it without "
            "planner_data and storage_data",
            metadata.storage_meta,
            error,
        )
        return pickle.dumps(Metadata(metadata.state_dict_metadata, version=metadata.version))


def _unpickle_committed(group: Group, metadata: Callable[[], Any]) -> Metadata:
    try:
        value: Metadata = metadata()
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint is committed, but its Metadata can't be unpickled on this rank: "
            f"{type(error).__name__}: {error}",
            checkpoint_id=group.checkpoint_id,
            rank=group.rank,
        ) from error
    return value


def _takes_kwargs(function: Callable[..., Any]) -> bool:
    """Returns whether a parameter is *named* `kwargs`, the test that DCP uses."""
    return "kwargs" in inspect.signature(function).parameters


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    function(*args, **(kwargs if _takes_kwargs(function) else {}))


def _do_nothing(_: list[Any]) -> None:
    return None


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

        def sent(value: Any) -> Any:
            """Returns the value of the rank that reads the file; raises its exception."""
            values = [value]
            if sends:
                dist.broadcast_object_list(values, src=self.coordinator_rank)
            if isinstance(values[0], Exception):
                raise values[0]
            return values[0]

        held: Any = None
        if not sends or dist.get_rank() == self.coordinator_rank:
            try:
                held = self._read_tensors(planner, names)
            except Exception as error:  # noqa: BLE001 - raised below, on every rank
                held = error
        sent(held if isinstance(held, Exception) else None)
        for name in names:
            # Why a clone: a view is sent with its whole storage.
            tensor = sent(held and (held[name].clone() if sends else held[name]))
            for item in wanted.get(name, []):
                _place(tensor, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(self, planner: LoadPlanner, names: list[str]) -> dict[str, torch.Tensor]:
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
                f"Missing key in {self._path}: {listed([*map(repr, missing)])}", key=missing[0]
            )
        held = {name: values[name] for name in names}
        wrong = [name for name, value in held.items() if not isinstance(value, torch.Tensor)]
        if wrong:
            raise TensorsOnlyError(
                f"Non-tensor value identified at {wrong[0]} of {self._path}", key=wrong[0]
            )
        sizes = _sizes(planner)
        differ = [
            f"{n!r} is saved as {tuple(tensor.shape)} and wanted as {sizes[n]}"
            for n, tensor in held.items()
            if n in sizes and tuple(tensor.shape) != sizes[n]
        ]
        if differ:
            raise ShapeMismatchError(
                f"Size mismatch between saved and current: {listed(differ, '; ')}",
                key=differ[0].split("'")[1],
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
