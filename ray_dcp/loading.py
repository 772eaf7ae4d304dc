"""`load`, on every path: native, planner hooks or foreign storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ray_dcp.commit_protocol.messages import Reply, Request, Target
from ray_dcp.core.damage import DAMAGE
from ray_dcp.core.phases import AWAIT_STAGED
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    MissingKeyError,
)
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.job.part import check_loadable
from ray_dcp.options import LoadOptions
from ray_dcp.rank.rank_load import (
    LoadResult,
    RankLoad,
    StepRange,
    drive,
    load_newest_rank,
    with_time_to_join,
)
from ray_dcp.saving import (
    CheckpointId,
    StateDict,
    check_options,
    second_argument,
    session_for,
    target_of,
    text_of,
)
from ray_dcp.session.call import Call
from ray_dcp.session.own_folders import session_of_copies
from ray_dcp.session.session import Session
from ray_dcp.stage.memory_tier import NodeMemory
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.collective import Group
from ray_dcp.torch_adapter.committed_metadata import metadata_of
from ray_dcp.torch_adapter.dispatch import FOREIGN, HOOKS, NATIVE, Route, decide_load
from ray_dcp.torch_adapter.flatten import below
from ray_dcp.torch_adapter.foreign import TorchSaveReader, foreign_load
from ray_dcp.torch_adapter.load_plan import plan_targets
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.torch_adapter.planner_hooks import targets_with_planner
from ray_dcp.torch_adapter.state import refuse_per_rank
from ray_dcp.torch_adapter.targets import Targets
from ray_dcp.view.progress import Meter, ShowProgress, reporting
from ray_dcp.view.run_listing import ListedRun

LoadSteps = Generator[Request, Reply, LoadReport]


def load(
    state_dict: StateDict,
    *positional: StorageReader,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: LoadOptions | None = None,
    progress: ShowProgress = False,
) -> LoadReport:
    """Loads a checkpoint into a state dict, in place, resharding as needed.

    All ranks of the group must call this function. Tensors are filled in place (meta tensors are
    materialised); other values are replaced in the dict; top-level `Stateful` values load their
    state. No value changes before every rank has planned its reads. Bytes that are read are
    verified against their checksums.

    Args:
        state_dict: The targets. Its tensors define which part of each saved tensor this rank loads.
        *positional: DCP's deprecated form, with the storage reader as second argument. Warns.
        checkpoint_id: Path or URL of a checkpoint of ray_dcp, of stock DCP, or of a folder of
            safetensors files.
        storage_reader: ray_dcp carries out a `FileSystemReader`, `FsspecReader` or
            `HuggingFaceStorageReader` natively, with the arguments that it was made with. It calls
            any other reader, subclasses of these included, as DCP does.
        planner: ray_dcp carries out a default planner natively, and calls the hooks of any other.
        process_group: The ranks that load together; the default group if None.
        no_dist: Load as a single process, regardless of the process group.
        options: See `LoadOptions`.
        progress: As for `save`.

    Returns:
        Which keys were loaded, missing, unexpected and cast.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; the message names what is there instead.
        MissingKeyError: The checkpoint lacks keys; the message has their number and five of them.
        StateDictError: The checkpoint has state of a module or optimizer that no target takes.
        ShapeMismatchError: Shapes or dtypes do not match; the message names all of them.
        DamagedCheckpointError: Stored bytes differ from those that were committed.
        ParticipantError: A rank or the coordinator died or was too late.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/step-1")
        ...     state = {"w": torch.zeros(2)}
        ...     ray_dcp.load(state, checkpoint_id=f"{root}/step-1").loaded
        ...     state["w"]
        ('w',)
        tensor([1., 1.])
    """
    # Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    reader = second_argument("storage_reader", positional, storage_reader)
    check_options(options, LoadOptions)
    with OperationLog(
        "load", checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner
    ) as log:
        check_loadable(checkpoint_id)
        route = decide_load(planner, reader, checkpoint_id)
        session: Session = session_for(process_group, no_dist, options)
        run = partial(run_load, log=log, progress=progress)
        try:
            return run(route, session, state_dict, options, checkpoint_id)
        except CheckpointNotFoundError:
            copies = None
            if route.target is not None:
                chosen = route.apply(options or LoadOptions())
                copies = session_of_copies(session, route.target, chosen)
            if copies is None:
                raise
        return run(route, copies, state_dict, options, checkpoint_id)


def load_state_dict(
    state_dict: StateDict,
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """Loads like `load`, but does not load the state of `Stateful` values. Deprecated in DCP.

    Args:
        state_dict: As for `load`.
        storage_reader: As for `load`; its `reset` is called.
        process_group: As for `load`.
        coordinator_rank: The rank on which a third-party planner or storage decides.
        no_dist: As for `load`.
        planner: As for `load`.

    Raises:
        CheckpointError: As `load` does.
    """
    # Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load_state_dict`.
    warnings.warn("load_state_dict is deprecated: use ray_dcp.load", FutureWarning, stacklevel=2)
    with OperationLog("load_state_dict", storage_reader=storage_reader, planner=planner) as log:
        route = decide_load(planner, storage_reader, None)
        session = session_for(process_group, no_dist)
        if route.path == FOREIGN:
            storage_reader.reset()
        how: dict[str, Any] = {"coordinator_rank": coordinator_rank, "stateful": False, "log": log}
        return run_load(route, session, state_dict, None, None, **how)


def run_load(
    route: Route,
    session: Session,
    state_dict: StateDict,
    options: LoadOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
    overwritten: set[str] | None = None,
    log: OperationLog | None = None,
    progress: ShowProgress = False,
) -> LoadReport:
    """Runs this rank's part of a load and returns its report.

    Args:
        route: The path of the load, with its planner, storage and options.
        session: Session of this rank.
        state_dict: As given to `load`; filled in place.
        options: As given to `load`; those of `route` are added.
        checkpoint_id: As given to `load`; foreign storages are reset to it.
        coordinator_rank: Where a third-party planner or storage decides.
        stateful: Load into the state of top-level `Stateful` values.
        overwritten: FQNs that loads which failed before may have changed; this one must load
            them all. Its own are added when it fails.
        log: Receives the phases.
        progress: As given to `load`.

    Raises:
        CheckpointError: As `load` does.
    """
    options = route.apply(options or LoadOptions())
    url = route.target.url if route.target is not None else checkpoint_id
    with _loading(session, options, url, route.path, log, progress) as (call, _):
        if route.target is not None:
            _await_staged(session, route.target.url, call, options)
        steps = _load_steps(
            route,
            session,
            call,
            state_dict,
            options,
            checkpoint_id,
            coordinator_rank=coordinator_rank,
            stateful=stateful,
            overwritten=set() if overwritten is None else overwritten,
        )
        report = drive(steps, call.ask)
    return replace(report, seconds=dict(call.progress.seconds))


@contextmanager
def _loading(
    session: Session,
    options: LoadOptions,
    url: CheckpointId | None,
    path: str,
    log: OperationLog | None,
    progress: ShowProgress,
) -> Iterator[tuple[Call, Meter]]:
    """Reports a load and shows its progress, from its begin to its end."""
    call = Call(session, options.heartbeat_timeout_s)
    ranks = session.rank, session.world_size
    with (
        call.reported("load", url, path, log),
        call,
        reporting(progress, "loading", text_of(url) or "", ranks) as meter,
        meter.following(call.progress.look),
    ):
        yield call, meter


def run_load_newest(
    session: Session,
    state_dict: StateDict,
    options: LoadOptions,
    run: Target,
    planner: LoadPlanner | None,
    steps: StepRange,
    log: OperationLog | None = None,
    progress: ShowProgress = False,
    choose: Callable[[ListedRun], ListedRun] | None = None,
) -> LoadReport:
    """Runs this rank's part of `load_newest` and returns its report.

    Args:
        session: Session of this rank.
        state_dict: As given to `load_newest`; filled in place.
        options: As given to `load_newest`.
        run: Directory of the run, with an absolute path or URL.
        planner: As given to `load_newest`.
        steps: The steps that may be loaded.
        log: Receives the phases.
        progress: As given to `load_newest`.
        choose: See `load_newest_rank`.

    Raises:
        CheckpointError: As `load_newest` does.
    """
    overwritten: set[str] = set()

    def load(checkpoint_id: str, is_late: bool) -> LoadSteps:
        route = decide_load(planner, None, replace(run, url=checkpoint_id))
        chosen = route.apply(options)
        meter.begin(checkpoint_id)
        return _load_steps(
            route,
            session,
            call,
            state_dict,
            with_time_to_join(chosen) if is_late else chosen,
            checkpoint_id,
            overwritten=overwritten,
        )

    with _loading(session, options, run.url, NATIVE, log, progress) as (call, meter):
        _await_staged(session, run.url, call, options)
        found = drive(
            load_newest_rank(
                call.next_key(),
                rank=session.rank,
                world_size=session.world_size,
                run=run,
                steps=steps,
                timeout_s=options.plan_timeout_s,
                load=load,
                choose=choose,
            ),
            call.ask,
        )
    seconds = dict(call.progress.seconds)
    return replace(found.value, step=found.step, skipped=found.skipped, seconds=seconds)


def _load_steps(
    route: Route,
    session: Session,
    call: Call,
    state_dict: StateDict,
    options: LoadOptions,
    checkpoint_id: CheckpointId | None,
    *,
    overwritten: set[str],
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> LoadSteps:
    """Runs this rank's part of one load: yields its requests and returns the report.

    Args:
        route: As for `run_load`.
        session: Session of this rank.
        call: The call of which this load is a part.
        state_dict: As for `run_load`.
        options: Options, with those of `route` applied.
        checkpoint_id: As for `run_load`.
        coordinator_rank: As for `run_load`.
        stateful: As for `run_load`.
        overwritten: As for `run_load`.
    """
    rank, world_size = call.rank, call.world_size
    if route.path != NATIVE:
        _check_simple(route, state_dict, options)
    if route.path == FOREIGN:
        if isinstance(route.storage, TorchSaveReader):
            route.storage.weights_only = options.weights_only
            route.storage.num_ranks = world_size
        place = text_of(checkpoint_id)
        yield from foreign_load(
            Group(call, options.read_timeout_s, "load", place, coordinator_rank),
            state_dict,
            route.storage,
            route.planner or DefaultLoadPlanner(allow_partial_load=options.strict is False),
            checkpoint_id=checkpoint_id,
            stateful=stateful,
            clock=call.progress,
        )
        return LoadReport(
            loaded=(),
            missing=(),
            unexpected=(),
            cast=(),
            path=FOREIGN,
            checkpoint_id=None if checkpoint_id is None else str(checkpoint_id),
        )
    target = target_of(route)
    works: list[Any] = []
    group = None
    if route.path == HOOKS:
        # Why now: a group names its operations when it is created. A rank that fails before its
        # planner is called must use as many names as the others.
        group = Group(call, options.plan_timeout_s, "load", target.url, coordinator_rank)

    def plan(checkpoint: Checkpoint) -> Generator[Request, Reply, Targets]:
        if group is not None:
            work = yield from targets_with_planner(
                group,
                state_dict,
                route.planner,
                metadata_of(
                    checkpoint.table,
                    attempt=checkpoint.attempt,
                    # Why: this planner loads every name, including those of empty mappings.
                    empty_mappings=isinstance(route.planner, _EmptyStateDictLoadPlanner),
                ),
                checkpoint.table,
                options=options,
                stateful=stateful,
            )
        else:
            work = plan_targets(
                state_dict,
                checkpoint.tensors,
                narrow=checkpoint.narrow,
                options=options,
                flatten_state_dict=route.flags.flatten_state_dict,
                flatten_sharded_tensors=route.flags.flatten_sharded_tensors,
                stateful=stateful,
                rank=session.own_values[0],
                world_size=session.own_values[1],
            )
        _check_replaces(work.loaded, overwritten)
        works.append(work)
        return work

    try:
        result: LoadResult = yield from RankLoad(
            key=call.next_key(),
            rank=rank,
            world_size=world_size,
            target=target,
            options=options.without_choices(),
            plan=plan,
            progress=call.progress,
            kept=NodeMemory(session.namespace).storage,
            peers=None if session.ray is None else session.ray.peers(),
        ).run()
    except CheckpointError as error:
        if isinstance(error, DamagedCheckpointError):
            # Why: a save of this process could link to files of this checkpoint.
            DAMAGE.add(open_storage(target).url)
        overwritten.update(
            name for work in works for name in work.loaded if not below(name, work.whole)
        )
        raise
    work = works[-1]
    return LoadReport(
        loaded=work.loaded,
        missing=work.missing,
        unexpected=work.unexpected,
        cast=work.all_casts(),
        resized=work.resized,
        **vars(result.total),
        path=route.path,
        checkpoint_id=target.url,
    )


def _await_staged(session: Session, url: str, call: Call, options: LoadOptions) -> None:
    """Waits for staged asynchronous saves of this checkpoint to be committed."""
    if options.from_memory:
        call.progress.enter(AWAIT_STAGED)
        stop = call.progress.stop
        NodeMemory(session.namespace).await_staged(url, options.plan_timeout_s, stop)


def _check_simple(route: Route, state_dict: StateDict, options: LoadOptions) -> None:
    """Raises if options are set that a plug-in, which decides what goes where, would ignore."""
    chosen = options.choices
    if route.path == FOREIGN and options.strict:
        chosen = (*chosen, "strict=True")
    if chosen:
        raise InvalidRequestError(
            f"LoadOptions with {', '.join(chosen)} need the default planner and a storage of "
            f"ray_dcp's, but this load goes another way: {route.reason}",
            key=chosen[0].partition("=")[0],
        )
    refuse_per_rank(state_dict, route.path)


def _check_replaces(loaded: Iterable[str], overwritten: set[str]) -> None:
    """Raises `MissingKeyError` if this load does not replace values that a failed one changed."""
    left = sorted(overwritten.difference(loaded)) if overwritten else []
    if left:
        raise MissingKeyError(
            f"a newer checkpoint failed after it may have overwritten values that this one lacks, "
            f"so that strict=False can't leave them as they were: "
            f"{', '.join(map(repr, left))}. Make the state dict anew and load the older checkpoint "
            f"into it",
            key=left[0],
        )
