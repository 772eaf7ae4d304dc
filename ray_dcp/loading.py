"""Runs a load on its path, and the load of the newest step of a run.

`operations` runs saves. `entrypoints` has the public signatures and documents their guarantees.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import LoadPlanner

from ray_dcp.commit_protocol.messages import Reply, Request, Target
from ray_dcp.core.phases import AWAIT_STAGED
from ray_dcp.errors import CheckpointError, InvalidRequestError, MissingKeyError
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.operations import (
    CheckpointId,
    RankSession,
    StateDict,
    target_of,
    text_of,
)
from ray_dcp.options import LoadOptions
from ray_dcp.runtime.memory_tier import NodeMemory, memory_of
from ray_dcp.runtime.metrics import Account
from ray_dcp.runtime.rank_load import (
    LoadResult,
    LoadWork,
    Peers,
    RankLoad,
    StepRange,
    drive,
    load_newest_rank,
    with_time_to_join,
)
from ray_dcp.runtime.rank_progress import Activity
from ray_dcp.torch_adapter.collective import Group
from ray_dcp.torch_adapter.dispatch import FOREIGN, HOOKS, NATIVE, Route, decide_load
from ray_dcp.torch_adapter.flatten import below
from ray_dcp.torch_adapter.foreign import foreign_load
from ray_dcp.torch_adapter.lazy_metadata import metadata_of
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.torch_adapter.per_rank import refuse_per_rank
from ray_dcp.torch_adapter.planner_load import targets_with_planner
from ray_dcp.torch_adapter.targets import plan_targets
from ray_dcp.torch_adapter.torch_save_reader import TorchSaveReader

LoadSteps = Generator[Request, Reply, LoadReport]


def run_load(
    decision: Route,
    session: RankSession,
    state_dict: StateDict,
    options: LoadOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
    overwritten: set[str] | None = None,
    log: OperationLog | None = None,
) -> LoadReport:
    """Runs this rank's part of a load and returns its report.

    Args:
        decision: The path of the load, with its planner, storage and options.
        session: Session of this rank.
        state_dict: As given to `load`; filled in place.
        options: As given to `load`; those of `decision` are added.
        checkpoint_id: As given to `load`; foreign storages are reset to it.
        coordinator_rank: Where a third-party planner or storage decides.
        stateful: Load into the state of top-level `Stateful` values.
        overwritten: FQNs that loads which failed before may have changed; this one must load
            them all. Its own are added when it fails.
        log: Gets the phases.

    Raises:
        CheckpointError: As `load` does.
    """
    options = decision.apply(options or LoadOptions())
    url = decision.target.url if decision.target is not None else checkpoint_id
    memory = memory_of(session)
    activity = session.activity(options.heartbeat_timeout_s)
    with Account("load", url, activity, decision.path, log), activity:
        if decision.target is not None:
            _await_staged(memory, decision.target.url, activity, options)
        steps = _load_steps(
            decision,
            activity,
            state_dict,
            options,
            checkpoint_id,
            coordinator_rank=coordinator_rank,
            stateful=stateful,
            overwritten=set() if overwritten is None else overwritten,
            peers=_peers_of(session),
            memory=memory,
        )
        report = drive(steps, activity.call)
    return replace(report, seconds=dict(activity.progress.seconds))


def run_load_newest(
    session: RankSession,
    state_dict: StateDict,
    options: LoadOptions,
    run: Target,
    planner: LoadPlanner | None,
    steps: StepRange,
    log: OperationLog | None = None,
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

    Raises:
        CheckpointError: As `load_newest` does.
    """
    overwritten: set[str] = set()
    memory = memory_of(session)

    def load(checkpoint_id: str, is_late: bool) -> LoadSteps:
        decision = decide_load(planner, None, replace(run, url=checkpoint_id))
        chosen = decision.apply(options)
        return _load_steps(
            decision,
            activity,
            state_dict,
            with_time_to_join(chosen) if is_late else chosen,
            checkpoint_id,
            overwritten=overwritten,
            peers=_peers_of(session),
            memory=memory,
        )

    activity = session.activity(options.heartbeat_timeout_s)
    with Account("load", run.url, activity, NATIVE, log), activity:
        _await_staged(memory, run.url, activity, options)
        found = drive(
            load_newest_rank(
                activity.next_key(),
                rank=session.rank,
                world_size=session.world_size,
                run=run,
                steps=steps,
                timeout_s=options.plan_timeout_s,
                load=load,
            ),
            activity.call,
        )
    seconds = dict(activity.progress.seconds)
    return replace(found.value, step=found.step, skipped=found.skipped, seconds=seconds)


def _load_steps(
    decision: Route,
    session: Activity,
    state_dict: StateDict,
    options: LoadOptions,
    checkpoint_id: CheckpointId | None,
    *,
    peers: Peers,
    memory: NodeMemory,
    overwritten: set[str],
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> LoadSteps:
    """Runs this rank's part of one load: yields its requests and returns the report.

    Args:
        decision: As for `run_load`.
        session: As for `run_load`.
        state_dict: As for `run_load`.
        options: Options, with those of `decision` applied.
        checkpoint_id: As for `run_load`.
        peers: Exchange of shared reads with other ranks.
        memory: Checkpoints that the nodes keep in memory.
        coordinator_rank: As for `run_load`.
        stateful: As there.
        overwritten: As there.
    """
    rank, world_size = session.rank, session.world_size
    if decision.path != NATIVE:
        _check_simple(decision, state_dict, options)
    if decision.path == FOREIGN:
        if isinstance(decision.storage, TorchSaveReader):
            decision.storage.weights_only = options.weights_only
            decision.storage.num_ranks = world_size
        place = text_of(checkpoint_id)
        yield from foreign_load(
            Group(session, options.read_timeout_s, "load", place, coordinator_rank),
            state_dict,
            decision.storage,
            decision.planner or DefaultLoadPlanner(allow_partial_load=options.strict is False),
            checkpoint_id=checkpoint_id,
            stateful=stateful,
            clock=session.progress,
        )
        return LoadReport(
            loaded=(),
            missing=(),
            unexpected=(),
            cast=(),
            path=FOREIGN,
            checkpoint_id=None if checkpoint_id is None else str(checkpoint_id),
        )
    target = target_of(decision)
    works: list[Any] = []
    group = None
    if decision.path == HOOKS:
        # Why now: a group names its operations when it is created. A rank that fails before its
        # planner is called must use as many names as the others.
        group = Group(session, options.plan_timeout_s, "load", target.url, coordinator_rank)

    def plan(checkpoint: Checkpoint) -> Generator[Request, Reply, LoadWork]:
        if group is not None:
            work = yield from targets_with_planner(
                group,
                state_dict,
                decision.planner,
                metadata_of(
                    checkpoint.table,
                    attempt=checkpoint.attempt,
                    # Why: this planner loads every name, including those of empty mappings.
                    empty_mappings=isinstance(decision.planner, _EmptyStateDictLoadPlanner),
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
                flatten_state_dict=decision.flags.flatten_state_dict,
                flatten_sharded_tensors=decision.flags.flatten_sharded_tensors,
                stateful=stateful,
                rank=rank,
                world_size=world_size,
            )
        _check_replaces(work.loaded, overwritten)
        works.append(work)
        return work

    try:
        result: LoadResult = yield from RankLoad(
            key=session.next_key(),
            rank=rank,
            world_size=world_size,
            target=target,
            options=options.without_choices(),
            plan=plan,
            progress=session.progress,
            kept=memory.storage,
            peers=peers,
        ).run()
    except CheckpointError:
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
        path=decision.path,
        checkpoint_id=target.url,
    )


def _peers_of(session: object) -> Peers:
    """Returns the peers of this rank for shared reads; none for a single process.

    Args:
        session: Session of this rank.

    Raises:
        ParticipantError: This process has shut down the Ray of the session.
    """
    connection = getattr(session, "connection", None)
    if connection is not None:
        # Why first: a call of Ray in a process that is not connected starts another cluster.
        connection.check()
    coordinator = getattr(session, "coordinator", None)
    if coordinator is None:
        return Peers()
    from ray_dcp.runtime.shared_reads import RayPeers

    return RayPeers(coordinator)


def _await_staged(memory: NodeMemory, url: str, session: Activity, options: LoadOptions) -> None:
    """Waits for staged asynchronous saves of this checkpoint to be committed."""
    if options.from_memory:
        session.progress.enter(AWAIT_STAGED)
        memory.await_staged(url, options.plan_timeout_s, session.progress.stop)


def _check_simple(decision: Route, state_dict: StateDict, options: LoadOptions) -> None:
    """Raises if options are set that a plug-in, which decides what goes where, would ignore."""
    chosen = options.choices
    if decision.path == FOREIGN and options.strict:
        chosen = (*chosen, "strict=True")
    if chosen:
        raise InvalidRequestError(
            f"LoadOptions with {', '.join(chosen)} need the default planner and a storage of "
            f"ray_dcp's, but this load goes another way: {decision.reason}",
            key=chosen[0].partition("=")[0],
        )
    refuse_per_rank(state_dict, decision.path)


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
