"""`save`, and what the calls of `save`, `async_save` and `load` have in common; `warm_up`.

A call chooses the path, session and options (`decide_save`, `session_for`); `run_save` carries out
a save on its path: native, planner hooks or foreign storage. `asynchronous` runs the saves that do
not wait, `loading` the loads.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from ray_dcp import events
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import NEWEST_TORCH, OLDEST_TORCH, __version__
from ray_dcp.core.phases import CAPTURE
from ray_dcp.errors import CheckpointError, DeadlineError, InvalidRequestError
from ray_dcp.job.part import PartSave
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.rank.rank_load import drive
from ray_dcp.rank.rank_save import RankSave
from ray_dcp.session.call import Call
from ray_dcp.session.discovery import check_alone, current_session
from ray_dcp.session.inline_transport import session_alone
from ray_dcp.session.own_folders import OwnFolder, own_folder
from ray_dcp.session.session import Session
from ray_dcp.stage.stager_options import StagerOptions
from ray_dcp.stage.staging_backend import warm_process
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target
from ray_dcp.torch_adapter.capture import Capture, capture, check_nonfinite, checked_finite
from ray_dcp.torch_adapter.collective import Group, RankCall
from ray_dcp.torch_adapter.committed_metadata import CommittedMetadata
from ray_dcp.torch_adapter.dispatch import FOREIGN, HOOKS, Route, decide_save
from ray_dcp.torch_adapter.foreign import foreign_save
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.torch_adapter.planner_hooks import capture_with_planner
from ray_dcp.torch_adapter.shards import is_sharded, sharded
from ray_dcp.torch_adapter.state import check_mapping, stateful_to_state_dict
from ray_dcp.view.progress import ShowProgress, reporting

__all__ = ["save", "save_state_dict", "warm_up"]

logger = logging.getLogger(__name__)

StateDict = MutableMapping[str, Any]
CheckpointId = AnyPlace


def save(
    state_dict: StateDict,
    *positional: StorageWriter,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
    progress: ShowProgress = False,
) -> Metadata:
    """Saves a state dict from all ranks and returns when the checkpoint is committed.

    All ranks of the group must call this function with the same arguments. When it returns, the
    checkpoint is complete and every byte is durable. When it raises, every rank raises the same
    error, and a checkpoint that existed under this id still does (only after `CommitUnknownError`
    may the new one have replaced it).

    Args:
        state_dict: Values by name. Top-level `Stateful` values are replaced by their
            `state_dict()`, modules and optimizers by their state under the names of parameters
            (`get_state_dict`). It must not change until the call returns.
        *positional: DCP's deprecated form, with the storage writer as second argument. Warns.
        checkpoint_id: Path or URL of the checkpoint, a `Location` with options for it, or a
            filesystem object. Relative paths refer to this rank's working directory.
        storage_writer: ray_dcp carries out a `FileSystemWriter` or `FsspecWriter` natively, with
            the arguments that it was made with. It calls any other writer, subclasses of these
            included, as DCP does, and then gives none of its own guarantees.
        planner: ray_dcp carries out a default planner natively, and calls the hooks of any other.
        process_group: The ranks that save together; the default group if None.
        no_dist: Save as a single process, regardless of the process group.
        use_collectives: Accepted for compatibility with DCP. Once its session exists, ray_dcp
            uses no collectives of the group.
        options: See `SaveOptions`.
        progress: Whether rank 0 draws a bar; or a function that receives a `Progress` of this rank
            about ten times a second.

    Returns:
        DCP's `Metadata` of the committed checkpoint, read from the chunk table on first access.

    Raises:
        InvalidRequestError: The call or the state dict is wrong.
        CheckpointExistsError: A checkpoint exists here and `overwrite` is False, or another save
            committed under this id first.
        StorageError: The storage failed.
        ParticipantError: A rank or the coordinator died or was too late; the message names it.
        CommitUnknownError: It is unknown whether the checkpoint was committed.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     metadata = ray_dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=f"{root}/step-1")
        ...     metadata.state_dict_metadata["w"].size
        torch.Size([2, 3])
    """
    # Source: `torch/distributed/checkpoint/state_dict_saver.py`, `save`.
    writer = second_argument("storage_writer", positional, storage_writer)
    check_options(options, SaveOptions)
    with OperationLog(
        "save", checkpoint_id=checkpoint_id, storage_writer=writer, planner=planner
    ) as log:
        route = decide_save(planner, writer, checkpoint_id)
        options = options or SaveOptions()
        session: Session = session_for(process_group, no_dist, options, saves=True)
        part = part_save(checkpoint_id, route, session)
        folder = None
        if route.path != FOREIGN:
            folder = own_folder(session, target_of(route), route.apply(options))
        return run_save(
            route,
            session if folder is None else folder.session,
            state_dict,
            options,
            checkpoint_id,
            use_collectives=use_collectives,
            log=log,
            progress=progress,
            folder=folder,
            part=part,
        )


def save_state_dict(
    state_dict: StateDict,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Saves like `save`, but does not replace `Stateful` values by their state. Deprecated in DCP.

    Args:
        state_dict: Values by name.
        storage_writer: As for `save`; its `reset` is called.
        process_group: As for `save`.
        coordinator_rank: The rank on which a third-party planner or storage decides.
        no_dist: As for `save`.
        planner: As for `save`.

    Raises:
        CheckpointError: As `save` does.
    """
    # Source: `torch/distributed/checkpoint/state_dict_saver.py`, `save_state_dict`.
    warnings.warn("save_state_dict is deprecated: use ray_dcp.save", FutureWarning, stacklevel=2)
    with OperationLog("save_state_dict", storage_writer=storage_writer, planner=planner) as log:
        route = decide_save(planner, storage_writer, None)
        session = session_for(process_group, no_dist, saves=True)
        if route.path == FOREIGN:
            storage_writer.reset()
        how: dict[str, Any] = {"coordinator_rank": coordinator_rank, "stateful": False, "log": log}
        return run_save(route, session, state_dict, None, None, **how)


def run_save(
    route: Route,
    session: Session,
    state_dict: Mapping[str, Any],
    options: SaveOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
    use_collectives: bool = True,
    log: OperationLog | None = None,
    call: Call | None = None,
    progress: ShowProgress = False,
    folder: OwnFolder | None = None,
    attempt: str = "",
    part: PartSave | None = None,
) -> Metadata:
    """Runs this rank's part of a save and returns the metadata of the committed checkpoint.

    Args:
        route: The path of the save, with its planner, storage and options.
        session: Session of this rank.
        state_dict: As given to `save`.
        options: As given to `save`; those of `route` are added.
        checkpoint_id: As given to `save`; foreign storages are reset to it.
        coordinator_rank: The rank on which a third-party planner or storage decides.
        stateful: Replace top-level `Stateful` values by their state.
        use_collectives: Passed to foreign storages.
        log: Receives the phases.
        call: The call of which the save is a part, if the caller ends it; by default, this
            function begins and ends one.
        progress: As given to `save`.
        folder: Folder of this rank, if Ray Train merges those of all ranks; with its session.
        attempt: As for `RankSave`; foreign storages have none.
        part: The part of a job's step that is saved, if it is one.

    Raises:
        CheckpointError: As `save` does.
    """
    options = route.apply(options or SaveOptions())
    if folder is not None:
        # Why: in a new folder nothing can be unchanged.
        options = replace(options, unchanged="write")
    url = route.target.url if route.target else checkpoint_id
    is_in_background = call is not None
    with ExitStack() as stack:
        if part is not None and not is_in_background:
            stack.push(lambda _, error, __: part.ended(error))
        if call is None:
            call = Call(session, options.heartbeat_timeout_s)
            stack.enter_context(call.reported("save", url, route.path, log))
        call.progress.enter(CAPTURE)
        stack.enter_context(call)
        if not is_in_background:
            await_unused(plug_ins_of(route), options, session.rank)
        # Why inside: a rank that gives a wrong `progress` has to tell the others that it leaves.
        ranks = session.rank, session.world_size
        shown = reporting(progress, "saving", text_of(url) or "", ranks)
        meter = stack.enter_context(shown)
        stack.enter_context(meter.following(call.progress.look))
        if route.path == FOREIGN:
            check_nonfinite(options, FOREIGN)
            steps = foreign_save(
                Group(call, options.write_timeout_s, "save", text_of(url), coordinator_rank),
                state_dict,
                route.storage,
                route.planner,
                checkpoint_id=checkpoint_id,
                use_collectives=use_collectives,
                stateful=stateful,
                clock=call.progress,
            )
            metadata: Metadata = drive(steps, call.ask)
            return metadata
        target = target_of(route)
        take = capture_of(
            route,
            call,
            state_dict,
            options,
            coordinator_rank=coordinator_rank,
            stateful=stateful,
        )
        own = None
        if folder is not None:
            target, own, take = folder.first, folder.own, after(folder.begin, take)
        if part is not None:
            take = after(part.begin, take)
        save = RankSave.of(call, target, options, folder=own, attempt=attempt)
        outcome = drive(save.run(take), call.ask)
        if part is not None:
            part.staged(outcome.attempt, outlives=True, is_durable=True)
    if session.rank == 0:
        for warning in outcome.warnings:
            events.warn(warning, stacklevel=3)
    route.committed(outcome.attempt)
    return CommittedMetadata.of(target, outcome)


def after(begin: Callable[[], None], take: Callable[[], Capture]) -> Callable[[], Capture]:
    """Returns a capture that begins with another step, whose error is reported to all ranks."""

    def both() -> Capture:
        begin()
        return take()

    return both


def part_save(
    checkpoint_id: CheckpointId | None, route: Route, session: Session
) -> PartSave | None:
    """Returns the line to a job's coordinator of a rank that saves a part; None for other saves.

    Raises:
        InvalidRequestError: The part can't be saved, or a third-party storage would write it.
    """
    part = PartSave.of(checkpoint_id, session.rank, session.world_size)
    if part is not None and route.path == FOREIGN:
        raise InvalidRequestError(
            "a part of a job's step is written by ray_dcp, whose record commits it, but was given "
            "a third-party storage_writer; leave that out",
            key="storage_writer",
        )
    return part


# --- plug-ins in use ------------------------------------------------------------------------------

_used: dict[Future[Any], tuple[Any, ...]] = {}
"""The plug-ins that saves in the background use until a future of theirs is done."""
os.register_at_fork(after_in_child=_used.clear)


def plug_ins_of(route: Route) -> tuple[Any, ...]:
    """Returns the planner and storage of the user that are called while a save runs."""
    found = (route.planner, route.storage if route.path == FOREIGN else None)
    return tuple(one for one in found if one is not None)


def mark_used(plug_ins: tuple[Any, ...], until: Future[Any]) -> None:
    """Registers that a save in the background uses plug-ins until a future of its is done."""
    _used[until] = plug_ins
    until.add_done_callback(lambda _: _used.pop(until, None))


def await_unused(plug_ins: tuple[Any, ...], options: SaveOptions, rank: int) -> None:
    """Waits until no save in the background uses one of the plug-ins any more.

    Why: plug-ins hold the state of one save. A writer that is reset for the next save would send
    the files of the one before there, and a stager has one copy of the state. *Careful*: all ranks
    wait in the order of their calls, so this belongs into the caller's thread.

    Raises:
        DeadlineError: A save has not ended in the time that a save may take.
    """
    waiting = {
        future: other
        for future, used in list(_used.items())
        for other in used
        if any(one is other for one in plug_ins)
    }
    timeout_s = options.plan_timeout_s + options.write_timeout_s + options.commit_timeout_s
    until_s = time.monotonic() + timeout_s
    for future, other in waiting.items():
        try:
            future.exception(until_s - time.monotonic())
        except TimeoutError:
            raise DeadlineError(
                f"Expected the save in the background that uses the same {type(other).__name__} "
                f"to end within {timeout_s:g} s, but it has not; give each save a planner, "
                f"storage and stager of its own",
                rank=rank,
            ) from None


def text_of(checkpoint_id: CheckpointId | None) -> str | None:
    """Returns the URL of a checkpoint without credentials, for messages."""
    return None if checkpoint_id is None else as_target(checkpoint_id).url


def capture_of(
    route: Route,
    call: RankCall,
    state_dict: Mapping[str, Any],
    options: SaveOptions,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> Callable[[], Capture]:
    """Returns a function that captures the state of this rank, natively or with planner hooks.

    The hooks of a planner run now; the returned function raises their error.

    Args:
        route: The path, native or planner hooks, and the planner.
        call: The call of which the save is a part.
        state_dict: As given to `save`.
        options: Options of the save.
        coordinator_rank: The rank on which a third-party planner decides.
        stateful: Replace top-level `Stateful` values by their state.

    Raises:
        InvalidRequestError: `route` has no target.
    """
    take: Callable[[], Capture] = partial(
        capture,
        state_dict,
        rank=call.rank,
        world_size=call.world_size,
        options=options,
        flatten_state_dict=route.flags.flatten_state_dict,
        flatten_sharded_tensors=route.flags.flatten_sharded_tensors,
        stateful=stateful,
    )
    if route.path == HOOKS:
        url = target_of(route).url
        steps = capture_with_planner(
            Group(call, options.plan_timeout_s, "save", url, coordinator_rank),
            state_dict,
            route.planner,
            options=options,
            stateful=stateful,
            storage_meta=StorageMeta(checkpoint_id=url),
        )
        captured: Future[Capture] = Future()
        try:
            captured.set_result(drive(steps, call.ask))
        except CheckpointError as error:
            # Why not raised here: this rank must join the save to report its planner's error.
            captured.set_exception(error)
        take = captured.result
    return lambda: checked_finite(take(), options, call.rank)


def session_for(
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    options: SaveOptions | LoadOptions | None = None,
    *,
    saves: bool = False,
) -> Session:
    """Returns the session of this rank, or an inline session for a single process.

    Args:
        process_group: As given to `save` or `load`.
        no_dist: As given to `save` or `load`.
        options: As given to `save` or `load`; their `plan_timeout_s` bounds the first call.
        saves: Whether the process saves.

    Raises:
        CheckpointError: The session can't be created; see `current_session` and `check_alone`.
    """
    timeout_s = (options or SaveOptions).plan_timeout_s
    found = current_session(process_group, no_dist, timeout_s)
    if found is None and not no_dist:
        check_alone(saves=saves)
    session: Session = found or session_alone()
    if session.rank == 0:
        _note_untried(torch.__version__)
    return session


@cache
def _note_untried(version: str) -> None:
    """Logs, once per version, that torch is newer than the newest tested version.

    Args:
        version: Version of torch.
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if numbers > [int(number) for number in NEWEST_TORCH.split(".")]:
        logger.warning(
            "torch %s was not tried with ray_dcp %s, only %s to %s; upgrade ray_dcp when there is "
            "one that was",
            version,
            __version__,
            OLDEST_TORCH,
            NEWEST_TORCH,
        )


def target_of(route: Route) -> Target:
    """Returns the target of a save or load.

    Raises:
        InvalidRequestError: Only a plug-in knows the target.
    """
    if route.target is None:
        raise InvalidRequestError(f"no path to save to or load from ({route.reason})")
    return route.target


def check_options(options: object, kind: type[SaveOptions | LoadOptions]) -> None:
    """Raises `InvalidRequestError` for options that are not of their kind."""
    if options is not None and not isinstance(options, kind):
        raise InvalidRequestError(
            f"expected options=ray_dcp.{kind.__name__}(…), found a {type(options).__name__}: give "
            f"each option by name there",
            key="options",
        )


def second_argument(name: str, positional: tuple[Any, ...], keyword: Any) -> Any:
    """Returns the storage plug-in, which older versions of DCP took as second argument."""
    if not positional:
        return keyword
    if isinstance(positional[0], (str, os.PathLike)):
        raise InvalidRequestError(
            f"expected the state dict and keyword arguments, found {positional[0]!r} as second "
            f"argument; a path is given as checkpoint_id={os.fspath(positional[0])!r}"
        )
    if len(positional) > 1 or keyword is not None:
        raise InvalidRequestError(
            f"expected the state dict and keyword arguments, found {len(positional)} more "
            f"positional arguments; pass {name}=… and the others by name"
        )
    warnings.warn(f"The argument order changed: pass {name} by name", FutureWarning, stacklevel=3)
    return positional[0]


def warm_up(
    state_dict: StateDict,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: SaveOptions | None = None,
    stager: StagerOptions | None = None,
    progress: ShowProgress = False,
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
        progress: As for `save`; it ends when the future is done.

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
    session = session_for(process_group, no_dist)
    state = stateful_to_state_dict(dict(state_dict), as_if_stepped=True)
    # Why not in the background: a child forked during an import would wait forever for its lock,
    # as it lacks the thread that imports.
    for module in ("ray_dcp.asynchronous", "ray_dcp.loading"):
        importlib.import_module(module)
    num_bytes = share_bytes(state, session.world_size)
    with ExitStack() as stack:
        shown = reporting(progress, "warming up", "memory", (session.rank, session.world_size))
        meter = stack.enter_context(shown)
        meter.expect(num_bytes)
        warmed = warm_staging(session, state, options or SaveOptions(), stager, meter.add)
        shown_until_then = stack.pop_all()
    warmed.add_done_callback(lambda _: shown_until_then.close())
    return warmed


def warm_staging(
    session: Session,
    state: Mapping[str, Any],
    options: SaveOptions,
    stager: StagerOptions | None = None,
    touched: Callable[[int], object] = lambda _: None,
) -> Future[None]:
    """Prepares, in the background, the memory in which a rank's bytes of a state are staged.

    It is at the stager of the rank's node; without Ray, in this process.

    Args:
        session: Session of the rank.
        state: The nested values.
        options: Only `keep_in_memory` is used.
        stager: As for `warm_up`.
        touched: Called with the bytes of each window that was touched.

    Raises:
        ParticipantError: The stager does not start or does not answer.
    """
    num_bytes = share_bytes(state, session.world_size)
    if session.ray is None:
        return warm_process(num_bytes)
    # One more than are kept: the checkpoint that is being written.
    return session.ray.staging(stager).warm((1 + options.keep_in_memory) * num_bytes, touched)


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
    num_bytes: float = sum(part.nbytes for part in sharded(value, "", saving=False).tensors)
    if isinstance(value, DTensor):
        sizes = zip(value.device_mesh.shape, value.placements, strict=True)
        num_bytes /= math.prod(size for size, placed in sizes if placed.is_replicate())
    return num_bytes
