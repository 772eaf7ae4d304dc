"""Runs a save on its path: native, planner hooks or foreign storage.

`loading` runs loads. `entrypoints` has the public signatures and documents their guarantees.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ray_dcp.commit_protocol.messages import Left, OpKey, Target
from ray_dcp.core import reporting
from ray_dcp.core.phases import CAPTURE
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.discovery import current_session
from ray_dcp.runtime.inline import session_alone
from ray_dcp.runtime.metrics import Account
from ray_dcp.runtime.rank_load import drive
from ray_dcp.runtime.rank_progress import Activity
from ray_dcp.runtime.rank_save import RankSave
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target
from ray_dcp.torch_adapter.capture import Capture, capture, check_nonfinite, checking_finite
from ray_dcp.torch_adapter.collective import Group, RankCalls
from ray_dcp.torch_adapter.dispatch import FOREIGN, HOOKS, Route
from ray_dcp.torch_adapter.foreign import foreign_save
from ray_dcp.torch_adapter.lazy_metadata import CommittedMetadata
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.torch_adapter.planner_save import capture_with_planner
from ray_dcp.version import NEWEST_TORCH, OLDEST_TORCH, __version__

logger = logging.getLogger(__name__)

StateDict = MutableMapping[str, Any]
CheckpointId = AnyPlace


class RankSession(RankCalls, Protocol):
    """The interface of a session that entry points use."""

    def activity(self, timeout_s: float, key: OpKey | None = None) -> Activity:
        """Returns the object through which one call of the user accesses the session."""
        ...

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Fails a save on all ranks; returns False if its commit has begun."""
        ...

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Reports that this rank leaves an operation before its end."""
        ...


def run_save(
    decision: Route,
    session: RankSession,
    state_dict: Mapping[str, Any],
    options: SaveOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
    use_collectives: bool = True,
    log: OperationLog | None = None,
    account: Account | None = None,
) -> Metadata:
    """Runs this rank's part of a save and returns the metadata of the committed checkpoint.

    Args:
        decision: The path of the save, with its planner, storage and options.
        session: Session of this rank.
        state_dict: As given to `save`.
        options: As given to `save`; those of `decision` are added.
        checkpoint_id: As given to `save`; foreign storages are reset to it.
        coordinator_rank: The rank on which a third-party planner or storage decides.
        stateful: Replace top-level `Stateful` values by their state.
        use_collectives: Passed to foreign storages.
        log: Receives the phases.
        account: Account of the save if the caller emits the end event; by default, this function
            emits it.

    Raises:
        CheckpointError: As `save` does.
    """
    options = decision.apply(options or SaveOptions())
    url = decision.target.url if decision.target else checkpoint_id
    with ExitStack() as stack:
        if account is None:
            activity = session.activity(options.heartbeat_timeout_s)
            account = stack.enter_context(Account("save", url, activity, decision.path, log))
        account.activity.progress.enter(CAPTURE)
        activity = stack.enter_context(account.activity)
        if decision.path == FOREIGN:
            check_nonfinite(options, FOREIGN)
            steps = foreign_save(
                Group(activity, options.write_timeout_s, "save", text_of(url), coordinator_rank),
                state_dict,
                decision.storage,
                decision.planner,
                checkpoint_id=checkpoint_id,
                use_collectives=use_collectives,
                stateful=stateful,
                clock=activity.progress,
            )
            metadata: Metadata = drive(steps, activity.call)
            return metadata
        target = target_of(decision)
        take = capture_of(
            decision,
            activity,
            state_dict,
            options,
            coordinator_rank=coordinator_rank,
            stateful=stateful,
        )
        save = RankSave.of(activity, target, options)
        outcome = drive(save.run(take), activity.call)
    if session.rank == 0:
        for warning in outcome.warnings:
            reporting.warn(warning, stacklevel=3)
    decision.committed(outcome.attempt)
    return CommittedMetadata.of(target, outcome)


def text_of(checkpoint_id: CheckpointId | None) -> str | None:
    """Returns the URL of a checkpoint without credentials, for messages."""
    return None if checkpoint_id is None else as_target(checkpoint_id).url


def capture_of(
    decision: Route,
    session: RankCalls,
    state_dict: Mapping[str, Any],
    options: SaveOptions,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> Callable[[], Capture]:
    """Returns a function that captures the state of this rank, natively or with planner hooks.

    The hooks of a planner run now; the returned function raises their error.

    Args:
        decision: The path, native or planner hooks, and the planner.
        session: Session of this rank.
        state_dict: As given to `save`.
        options: Options of the save.
        coordinator_rank: The rank on which a third-party planner decides.
        stateful: Replace top-level `Stateful` values by their state.

    Raises:
        InvalidRequestError: `decision` has no target.
    """
    take: Callable[[], Capture] = partial(
        capture,
        state_dict,
        rank=session.rank,
        world_size=session.world_size,
        options=options,
        flatten_state_dict=decision.flags.flatten_state_dict,
        flatten_sharded_tensors=decision.flags.flatten_sharded_tensors,
        stateful=stateful,
    )
    if decision.path == HOOKS:
        url = target_of(decision).url
        steps = capture_with_planner(
            Group(session, options.plan_timeout_s, "save", url, coordinator_rank),
            state_dict,
            decision.planner,
            options=options,
            stateful=stateful,
            storage_meta=StorageMeta(checkpoint_id=url),
        )
        captured: Future[Capture] = Future()
        try:
            captured.set_result(drive(steps, session.call))
        except CheckpointError as error:
            # Why not raised here: this rank must join the save to report its planner's error.
            captured.set_exception(error)
        take = captured.result
    return checking_finite(take, options, session.rank)


def session_for(process_group: dist.ProcessGroup | None, no_dist: bool) -> RankSession:
    """Returns the session of this rank, or an inline session for a single process.

    Args:
        process_group: As given to `save` or `load`.
        no_dist: As given to `save` or `load`.

    Raises:
        CheckpointError: The session can't be created; see `current_session`.
    """
    session: RankSession = current_session(process_group, no_dist) or session_alone()
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


def target_of(decision: Route) -> Target:
    """Returns the target of a save or load.

    Raises:
        InvalidRequestError: Only a plug-in knows the target.
    """
    if decision.target is None:
        raise InvalidRequestError(f"no path to save to or load from ({decision.reason})")
    return decision.target
