"""Runs a save or a load on the path that was decided for it: native, planner hooks or foreign.

Public signatures and what they promise are in `entrypoints`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, MutableMapping
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import OpKey, Reply, Request, Target
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank import LoadResult, LoadWork, drive, load_rank, save_rank
from ray_dcp.runtime.session import current_session
from ray_dcp.seam.capture import Capture, capture
from ray_dcp.seam.decision import FOREIGN, HOOKS, Decision
from ray_dcp.seam.foreign import foreign_load, foreign_save
from ray_dcp.seam.lazy_metadata import CommittedMetadata, metadata_of
from ray_dcp.seam.planner_hooks import capture_with_planner
from ray_dcp.seam.planner_load import targets_with_planner
from ray_dcp.seam.report import LoadReport
from ray_dcp.seam.targets import plan_targets
from ray_dcp.transfer.opening import Checkpoint

__all__ = ["CheckpointId", "RankSession", "StateDict", "run_load", "run_save", "session_for"]

PLANNER_KEYS = 8
"""Operations that a load planner of the user's may need to plan with all ranks."""

StateDict = MutableMapping[str, Any]
CheckpointId = str | os.PathLike[str]


class RankSession(Protocol):
    """What an entrypoint needs of a session."""

    @property
    def rank(self) -> int:
        """Rank in the session."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks of the session."""
        ...

    def next_key(self) -> OpKey:
        """Returns the key of the next operation."""
        ...

    def call(self, request: Request) -> Reply:
        """Returns the coordinator's reply."""
        ...


def run_save(
    decision: Decision,
    session: RankSession,
    state_dict: StateDict,
    options: SaveOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
    use_collectives: bool = True,
) -> Metadata:
    """Saves on this rank and returns the metadata of the committed checkpoint.

    Args:
        decision: Which path, with what planner, storage and options.
        session: Of this rank.
        state_dict: As given to `save`.
        options: As given to `save`; the decision's are added.
        checkpoint_id: As given to `save`; foreign storages are reset to it.
        coordinator_rank: Where a third-party planner or storage decides.
        stateful: Replace top-level `Stateful` values by their state.
        use_collectives: For foreign storages.

    Raises:
        CheckpointError: As `save` does.
    """
    options = decision.apply(options or SaveOptions())
    rank, world_size = session.rank, session.world_size
    if decision.path == FOREIGN:
        steps = foreign_save(
            session.next_key, state_dict, decision.storage, decision.planner,
            rank=rank, world_size=world_size, checkpoint_id=checkpoint_id,
            timeout_s=options.write_timeout_s, coordinator_rank=coordinator_rank,
            use_collectives=use_collectives, stateful=stateful,
        )  # fmt: skip
        return drive(steps, session.call)
    target = _target(decision)
    take: Callable[[], Capture]
    if decision.path == HOOKS:
        take = _planned_by_user(
            decision, session, state_dict, options, target,
            coordinator_rank=coordinator_rank, stateful=stateful,
        )  # fmt: skip
    else:

        def take() -> Capture:
            return capture(
                state_dict, rank=rank, world_size=world_size, options=options,
                flatten_state_dict=decision.flags.flatten_state_dict,
                flatten_sharded_tensors=decision.flags.flatten_sharded_tensors,
                stateful=stateful,
            )  # fmt: skip

    outcome = drive(
        save_rank(
            session.next_key(), rank=rank, world_size=world_size, target=target,
            options=options, capture=take,
        ),
        session.call,
    )  # fmt: skip
    if rank == 0:
        for warning in outcome.warnings:
            warnings.warn(warning, UserWarning, stacklevel=3)
    return CommittedMetadata.of(target, outcome)


def _planned_by_user(
    decision: Decision,
    session: RankSession,
    state_dict: StateDict,
    options: SaveOptions,
    target: Target,
    *,
    coordinator_rank: int,
    stateful: bool,
) -> Callable[[], Capture]:
    """Runs a user's planner now; returns what gives its capture, or raises its error.

    Why later: this rank must join the save to tell the others that its planner failed.
    """
    steps = capture_with_planner(
        session.next_key, state_dict, decision.planner,
        rank=session.rank, world_size=session.world_size, options=options,
        coordinator_rank=coordinator_rank, checkpoint_id=target.url, stateful=stateful,
    )  # fmt: skip
    try:
        planned = drive(steps, session.call)
    except CheckpointError as failed:
        error = failed

        def fail() -> Capture:
            raise error

        return fail
    return lambda: planned


def run_load(
    decision: Decision,
    session: RankSession,
    state_dict: StateDict,
    options: LoadOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> LoadReport:
    """Loads on this rank and reports.

    Args:
        decision: Which path, with what planner, storage and options.
        session: Of this rank.
        state_dict: As given to `load`; filled in place.
        options: As given to `load`; the decision's are added.
        checkpoint_id: As given to `load`; foreign storages are reset to it.
        coordinator_rank: Where a third-party planner or storage decides.
        stateful: Load into the state of top-level `Stateful` values.

    Raises:
        CheckpointError: As `load` does.
    """
    options = decision.apply(options or LoadOptions())
    rank, world_size = session.rank, session.world_size
    if decision.path == FOREIGN:
        steps = foreign_load(
            session.next_key, state_dict, decision.storage, decision.planner,
            rank=rank, world_size=world_size, checkpoint_id=checkpoint_id,
            timeout_s=options.read_timeout_s, coordinator_rank=coordinator_rank,
            stateful=stateful,
        )  # fmt: skip
        drive(steps, session.call)
        return LoadReport(loaded=(), missing=(), unexpected=(), cast=(), path=FOREIGN)
    target = _target(decision)
    works: list[Any] = []
    # Why taken now: a rank that fails before its planner is called must not fall out of step.
    num_keys = PLANNER_KEYS if decision.path == HOOKS else 0
    planner_keys = iter([session.next_key() for _ in range(num_keys)])

    def plan(checkpoint: Checkpoint) -> Generator[Request, Reply, LoadWork]:
        if decision.path == HOOKS:
            work = yield from targets_with_planner(
                planner_keys.__next__, state_dict, decision.planner, metadata_of(checkpoint),
                checkpoint.table, rank=rank, world_size=world_size, options=options,
                coordinator_rank=coordinator_rank, checkpoint_id=target.url, stateful=stateful,
            )  # fmt: skip
        else:
            work = plan_targets(
                state_dict, checkpoint.table, options=options,
                flatten_state_dict=decision.flags.flatten_state_dict,
                flatten_sharded_tensors=decision.flags.flatten_sharded_tensors,
                stateful=stateful,
            )  # fmt: skip
        works.append(work)
        return work

    result: LoadResult = drive(
        load_rank(
            session.next_key(), rank=rank, world_size=world_size, target=target,
            options=options, plan=plan,
        ),
        session.call,
    )  # fmt: skip
    work = works[-1]
    return LoadReport(
        loaded=work.loaded,
        missing=work.missing,
        unexpected=work.unexpected,
        cast=work.cast,
        bytes_needed=result.outcome.bytes_needed,
        bytes_read=result.outcome.bytes_read,
        path=decision.path,
    )


def session_for(process_group: dist.ProcessGroup | None, no_dist: bool) -> RankSession:
    """Returns the session of this rank, or one of its own for a process that is alone.

    Args:
        process_group: As given to `save` or `load`.
        no_dist: As given there.

    Raises:
        CheckpointError: No session can be made; see `current_session`.
    """
    session = current_session(process_group, no_dist)
    return InlineSession() if session is None else session


def _target(decision: Decision) -> Target:
    if decision.target is None:
        raise InvalidRequestError(f"no path to save to or load from ({decision.reason})")
    return decision.target
