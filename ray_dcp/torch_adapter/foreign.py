"""Saves and loads through third-party storage plug-ins, in DCP's call order.

The plug-in runs in the ranks; gathers and scatters go through the coordinator of ray_dcp instead of
collectives of the training group. The plug-in's `finish` is the commit: there is no fencing, no
checksum and no survival of a rank's death here. Futures that a plug-in returns are awaited with a
deadline.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.protocol.messages import OpKey
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target
from ray_dcp.torch_adapter.collective import (
    Group,
    Sealed,
    Steps,
    all_reduce,
    reduce_scatter,
    reserve,
)
from ray_dcp.torch_adapter.per_rank import refuse_per_rank
from ray_dcp.torch_adapter.state import (
    LoadTargets,
    Stored,
    stateful_to_load_targets,
    stateful_to_state_dict,
)


def await_future(future: Any, timeout_s: float, *, doing: str, rank: int) -> Any:
    """Returns the value of a future of a storage plug-in.

    Accepts a `torch.futures.Future`, anything with its `wait()` and (optionally) `value()`, and
    a `concurrent.futures.Future`.

    Args:
        future: What `write_data` or `read_data` returned.
        timeout_s: Deadline in seconds.
        doing: What made the future, such as `"MyWriter.write_data"`, for messages.
        rank: This rank.

    Raises:
        DeadlineError: The future did not complete in time.
        InvalidRequestError: It is no future.
        BaseException: Whatever the future failed with.

    Careful: a future that has neither `add_done_callback` nor `result` is waited for in a
    daemon thread, which stays behind when the deadline passes.
    """
    if not hasattr(future, "wait") and not hasattr(future, "result"):
        raise InvalidRequestError(
            f"{doing} must return a torch.futures.Future, but returned "
            f"{type(future).__name__}; return one whose set_result was called if the work is "
            f"already done",
            rank=rank,
        )
    completed = threading.Event()
    if hasattr(future, "add_done_callback"):
        future.add_done_callback(lambda _: completed.set())
        get = _getter(future)
    else:
        get = _in_thread(_getter(future), completed)
    if not completed.wait(timeout_s):
        raise DeadlineError(
            f"{doing} returned a future that did not complete within {timeout_s:g} s on rank "
            f"{rank}; raise the timeout, or find what the storage waits for",
            rank=rank,
        )
    return get()


def _getter(future: Any) -> Callable[[], Any]:
    def get() -> Any:
        if not hasattr(future, "wait"):
            return future.result()
        waited = future.wait()
        return future.value() if hasattr(future, "value") else waited

    return get


def _in_thread(get: Callable[[], Any], completed: threading.Event) -> Callable[[], Any]:
    values: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(get())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            errors.append(error)
        completed.set()

    threading.Thread(target=run, name="ray_dcp-await", daemon=True).start()

    def outcome() -> Any:
        if errors:
            raise errors[0]
        return values[0]

    return outcome


CheckpointId = AnyPlace

_log = logging.getLogger(__name__)


def foreign_save(
    next_key: Callable[[], OpKey],
    state_dict: Mapping[str, Any],
    storage_writer: StorageWriter,
    planner: SavePlanner | None = None,
    *,
    rank: int,
    world_size: int,
    checkpoint_id: CheckpointId | None = None,
    timeout_s: float,
    coordinator_rank: int = 0,
    use_collectives: bool = True,
    stateful: bool = True,
) -> Steps[Metadata]:
    """Saves with a `StorageWriter` that ray_dcp knows nothing about.

    The calls on writer and planner are those of `torch.distributed.checkpoint.save`, in its
    order, with its arguments.

    Args:
        next_key: Names the next operation of the session (`Session.next_key`). Called now, not
            when the generator runs, and equally often on all ranks.
        state_dict: What to save.
        storage_writer: The plug-in; `reset` is called only if `checkpoint_id` is given.
        planner: A `DefaultSavePlanner` unless given.
        rank: This rank.
        world_size: Number of ranks. With 1, nothing is exchanged.
        checkpoint_id: Where to save, in the plug-in's terms.
        timeout_s: Deadline of each step, in seconds.
        coordinator_rank: The rank that plans and calls `finish`.
        use_collectives: False is DCP's experimental mode in which every rank plans for itself
            and calls `finish`.
        stateful: Replace top-level `Stateful` values by their state, as `save` does and
            `save_state_dict` does not.

    Returns:
        The `Metadata` that `finish` was given: on the coordinator rank that very object, on the
        others a copy.

    Raises:
        CheckpointError: Something failed on some rank; the same error on every rank, with
            `.failures`.
        CommitUnknownError: The coordinator rank was lost after all had written.

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `_save_state_dict`.
    """
    refuse_per_rank(state_dict, f"the storage {type(storage_writer).__name__}")
    group = Group(
        reserve(next_key, num_steps=2, world_size=world_size),
        rank,
        world_size,
        timeout_s,
        "save",
        _text(checkpoint_id),
        coordinator_rank,
    )
    chosen = DefaultSavePlanner() if planner is None else planner
    save = _Save(group, storage_writer, chosen, use_collectives)

    def local_plan() -> SavePlan:
        if checkpoint_id is not None:
            storage_writer.reset(checkpoint_id)  # type: ignore[arg-type]
        state = stateful_to_state_dict(state_dict) if stateful else dict(state_dict)
        return save.local_step(state)

    return save.together(local_plan) if use_collectives else save.alone(local_plan)


def foreign_load(
    next_key: Callable[[], OpKey],
    state_dict: MutableMapping[str, Any],
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
    *,
    rank: int,
    world_size: int,
    checkpoint_id: CheckpointId | None = None,
    timeout_s: float,
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> Steps[None]:
    """Loads with a `StorageReader` that ray_dcp knows nothing about, in place.

    The calls on reader and planner are those of `torch.distributed.checkpoint.load`, in its
    order, with its arguments. No `Stateful` value is given its state before every rank has read
    everything.

    Args:
        next_key: Names the next operation of the session (`Session.next_key`). Called now, not
            when the generator runs, and equally often on all ranks.
        state_dict: What to load into.
        storage_reader: The plug-in; `reset` is called only if `checkpoint_id` is given.
        planner: A `DefaultLoadPlanner` unless given.
        rank: This rank.
        world_size: Number of ranks. With 1, nothing is exchanged.
        checkpoint_id: What to load, in the plug-in's terms.
        timeout_s: Deadline of each step, in seconds.
        coordinator_rank: The rank that plans for all.
        stateful: Load into the state of top-level `Stateful` values, as `load` does and
            `load_state_dict` does not.

    Raises:
        CheckpointError: Something failed on some rank; the same error on every rank, with
            `.failures`. The state may be loaded in part.
        CheckpointNotFoundError: The reader found no metadata on any rank.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load` and `_load_state_dict`.
    """
    group = Group(
        reserve(next_key, num_steps=3, world_size=world_size),
        rank,
        world_size,
        timeout_s,
        "load",
        _text(checkpoint_id),
        coordinator_rank,
    )
    load = _Load(group, storage_reader, DefaultLoadPlanner() if planner is None else planner)
    loaded: LoadTargets | None = None

    def state_for(metadata: Metadata) -> MutableMapping[str, Any]:
        nonlocal loaded
        if not stateful:
            # Why not a copy: `load_state_dict` of DCP hands its own argument to the planner.
            return state_dict
        loaded = stateful_to_load_targets(state_dict, Stored.of(metadata))
        return loaded.values

    def local_plan() -> LoadPlan:
        if checkpoint_id is not None:
            storage_reader.reset(checkpoint_id)  # type: ignore[arg-type]
        return load.local_step(state_for)

    def put_loaded_back() -> None:
        if loaded is not None:
            loaded.put_back(state_dict)

    return load.together(local_plan, put_loaded_back)


def set_up_save_planner(
    planner: SavePlanner,
    state_dict: dict[str, Any],
    storage_meta: StorageMeta | None,
    *,
    is_coordinator: bool,
) -> None:
    """Calls `set_up_planner`, without `storage_meta` where the planner is older than it.

    Args:
        planner: The planner.
        state_dict: What to save.
        storage_meta: What the writer says of itself.
        is_coordinator: Whether this rank plans for all.

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `local_step`.
    """
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(
            state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator
        )
        return
    warnings.warn(
        f"{type(planner).__name__}.set_up_planner has no storage_meta parameter; torch added it "
        f"to SavePlanner.set_up_planner, please add it too",
        stacklevel=2,
    )
    planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]


class _Save:
    """One save on one rank: the steps of DCP as methods."""

    def __init__(
        self, group: Group, writer: StorageWriter, planner: SavePlanner, use_collectives: bool
    ) -> None:
        self.group = group
        self.writer = writer
        self.planner = planner
        self.use_collectives = use_collectives
        self.metadata: Metadata | None = None

    def local_step(self, state: dict[str, Any]) -> SavePlan:
        meta = self.writer.storage_meta()
        is_coordinator = self.group.is_coordinator
        set_up_save_planner(self.planner, state, meta, is_coordinator=is_coordinator)
        if _takes_kwargs(self.writer.set_up_storage_writer):
            self.writer.set_up_storage_writer(
                is_coordinator, rank=self.group.rank, use_collectives=self.use_collectives
            )
        else:
            self.writer.set_up_storage_writer(is_coordinator)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def global_step(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self.metadata = self.planner.create_global_plan(plans)
        return self.writer.prepare_global_plan(plans)

    def write(self, central: SavePlan) -> Any:
        final = self.planner.finish_plan(central)
        return await_future(
            self.writer.write_data(final, self.planner),
            self.group.timeout_s,
            doing=f"{type(self.writer).__name__}.write_data",
            rank=self.group.rank,
        )

    def finish(self, results: list[Any]) -> Sealed:
        if self.metadata is None:
            raise InternalError("the writer is to finish before a global plan was made")
        self.writer.finish(metadata=self.metadata, results=results)
        return Sealed(self.metadata, _dump_metadata(self.metadata))

    def together(self, local_plan: Callable[[], SavePlan]) -> Steps[Metadata]:
        """One plan and one `finish` for all ranks."""
        group = self.group
        plan = yield from reduce_scatter(group, "plan", local_plan, self.global_step)
        metadata = yield from all_reduce(
            group, "write", lambda: self.write(plan()), self.finish, lost=self.open_outcome
        )
        return _committed(group, metadata)

    def alone(self, local_plan: Callable[[], SavePlan]) -> Steps[Metadata]:
        """DCP's `use_collectives=False`: all steps on each rank, then one barrier."""

        def everything() -> None:
            central = self.global_step([local_plan()])[0]
            self.finish([self.write(central)])

        yield from all_reduce(self.group, "write", everything, _nothing)
        if self.metadata is None:
            raise InternalError("no metadata was made, and no rank failed")
        return self.metadata

    def open_outcome(self, error: ParticipantError) -> CommitUnknownError:
        """Returns what to raise when the coordinator rank never told how `finish` went."""
        return CommitUnknownError(
            f"{type(self.writer).__name__} may have committed, or not: {error.message}; look at "
            f"what its finish writes last",
            checkpoint_id=self.group.checkpoint_id,
            rank=self.group.rank,
        )


class _Load:
    """One load on one rank: the steps of DCP as methods."""

    def __init__(self, group: Group, reader: StorageReader, planner: LoadPlanner) -> None:
        self.group = group
        self.reader = reader
        self.planner = planner

    def local_step(self, state_for: Callable[[Metadata], MutableMapping[str, Any]]) -> LoadPlan:
        metadata, is_global = self._read_metadata()
        state = state_for(metadata)
        is_coordinator = self.group.is_coordinator
        self.planner.set_up_planner(state, metadata, is_coordinator)  # type: ignore[arg-type]
        if _takes_kwargs(self.reader.set_up_storage_reader):
            self.reader.set_up_storage_reader(
                metadata, is_coordinator, rank=self.group.rank, use_collectives=is_global
            )
        else:
            self.reader.set_up_storage_reader(metadata, is_coordinator)
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def global_step(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self.reader.prepare_global_plan(self.planner.create_global_plan(plans))

    def read(self, central: LoadPlan) -> None:
        final = self.planner.finish_plan(central)
        await_future(
            self.reader.read_data(final, self.planner),
            self.group.timeout_s,
            doing=f"{type(self.reader).__name__}.read_data",
            rank=self.group.rank,
        )

    def together(
        self, local_plan: Callable[[], LoadPlan], put_loaded_back: Callable[[], None]
    ) -> Steps[None]:
        """One plan for all ranks; nothing is put back before all have read."""
        group = self.group
        plan = yield from reduce_scatter(group, "plan", local_plan, self.global_step)
        yield from all_reduce(group, "read", lambda: self.read(plan()), _nothing)
        yield from all_reduce(group, "load_state_dict", put_loaded_back, _nothing)

    def _read_metadata(self) -> tuple[Metadata, bool]:
        """Returns the metadata, and whether it is that of all ranks and not this rank's own."""
        reasons: list[Exception] = []
        try:
            metadata = self.reader.read_metadata()
        except Exception as error:  # noqa: BLE001 - DCP too tries the rank's own metadata then
            reasons.append(error)
        else:
            if metadata:
                return metadata, True
        if _takes_kwargs(self.reader.read_metadata):
            try:
                metadata = self.reader.read_metadata(rank=self.group.rank)
            except Exception as error:  # noqa: BLE001 - told together with the first
                reasons.append(error)
            else:
                if metadata:
                    return metadata, False
        raise self._no_metadata(reasons)

    def _no_metadata(self, reasons: list[Exception]) -> CheckpointError:
        told = "; ".join(f"{type(e).__name__}: {e}" for e in reasons) or "it returned nothing"
        # Only a missing file says that there is no checkpoint; a timeout, say, does not.
        is_missing = all(isinstance(error, FileNotFoundError) for error in reasons)
        made = CheckpointNotFoundError if is_missing else CheckpointError
        error = made(
            f"{type(self.reader).__name__}.read_metadata found no checkpoint: {told}",
            checkpoint_id=self.group.checkpoint_id,
            rank=self.group.rank,
        )
        error.__cause__ = reasons[0] if reasons else None
        return error


def _dump_metadata(metadata: Metadata) -> bytes:
    """Returns the metadata pickled, without what a plug-in put in that can't be.

    The checkpoint is committed when this runs, so it must not fail.
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


def _committed(group: Group, metadata: Callable[[], Any]) -> Metadata:
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
    """Whether a parameter is *named* `kwargs`: the test that DCP makes."""
    return "kwargs" in inspect.signature(function).parameters


def _nothing(_: list[Any]) -> None:
    return None


def _text(checkpoint_id: CheckpointId | None) -> str | None:
    return None if checkpoint_id is None else as_target(checkpoint_id).url
