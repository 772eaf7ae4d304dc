"""`save`, `load` and DCP's older forms of them: from a call of the user to the path it takes.

What is decided here is only which path, session and options; the work is in `runtime` and `seam`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, MutableMapping
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

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
from ray_dcp.seam.paths import decide_load, decide_save
from ray_dcp.seam.planner_hooks import capture_with_planner
from ray_dcp.seam.planner_load import targets_with_planner
from ray_dcp.seam.report import LoadReport
from ray_dcp.seam.targets import plan_targets
from ray_dcp.transfer.opening import Checkpoint

__all__ = ["load", "load_state_dict", "save", "save_state_dict"]

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
) -> Metadata:
    """Saves a state dict over all ranks and returns once it is committed.

    All ranks of the group call it with the same arguments. When it returns, every byte is durable
    and the checkpoint is complete; when it raises, the same error is raised on every rank and the
    checkpoint that stood under this id before still stands (only `CommitUnknownError` leaves that
    open).

    Args:
        state_dict: Values by name. Top-level `Stateful` values (modules, optimizers) are replaced
            by their `state_dict()`. It must not change until the call returns.
        *positional: DCP's older form: the storage writer as second argument. Warns.
        checkpoint_id: Path or URL of the checkpoint. Relative paths are taken from this rank's
            working directory.
        storage_writer: A `FileSystemWriter` or `FsspecWriter` is taken at its word and done
            natively; any other writer is called as DCP calls it, without ray_dcp's guarantees.
        planner: A default planner is done natively; of any other the hooks are called.
        process_group: The ranks that save together; the default group if None.
        no_dist: Save as a single process, whatever the process group.
        use_collectives: Accepted for DCP's sake. No save of ray_dcp uses collectives of the
            group once its session is made.
        options: See `SaveOptions`.

    Returns:
        DCP's `Metadata` of the committed checkpoint, read from the chunk table when first looked
        at.

    Raises:
        InvalidRequestError: The call or the state dict is wrong.
        CheckpointExistsError: A checkpoint stands here and `overwrite` is False, or another save
            won the race for this id.
        StorageError: The storage failed.
        ParticipantError: A rank or the coordinator died or was too late; it is named.
        CommitUnknownError: Nobody could say whether the commit happened.

    Example:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     metadata = ray_dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=f"{root}/step-1")
        ...     metadata.state_dict_metadata["w"].size
        torch.Size([2, 3])

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `save`.
    """
    writer = _second_argument("storage_writer", positional, storage_writer)
    decision = decide_save(planner, writer, checkpoint_id)
    session = _session(process_group, no_dist)
    return _save(
        decision, session, state_dict, options, checkpoint_id, use_collectives=use_collectives
    )


def save_state_dict(
    state_dict: StateDict,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Saves like `save`, in DCP's older form: `Stateful` values are not asked for their state.

    Args:
        state_dict: Values by name.
        storage_writer: As for `save`; its `reset` is called.
        process_group: As for `save`.
        coordinator_rank: The rank on which a third-party planner or storage decides.
        no_dist: As for `save`.
        planner: As for `save`.

    Raises:
        CheckpointError: As `save` does.

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `save_state_dict`.
    """
    warnings.warn("save_state_dict is deprecated: use ray_dcp.save", FutureWarning, stacklevel=2)
    decision = decide_save(planner, storage_writer, None)
    session = _session(process_group, no_dist)
    if decision.path == FOREIGN:
        storage_writer.reset()
    return _save(
        decision, session, state_dict, None, None,
        coordinator_rank=coordinator_rank, stateful=False,
    )  # fmt: skip


def load(
    state_dict: StateDict,
    *positional: StorageReader,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads a checkpoint into a state dict, in place, resharding as needed.

    All ranks of the group call it. Tensors are filled where they are (meta tensors are
    materialised); other values are replaced in the dict; top-level `Stateful` values get their
    loaded state. Nothing is touched before every rank has planned its reads, and what is read is
    verified against its checksums.

    Args:
        state_dict: What to fill. Its tensors say which part of each this rank wants.
        *positional: DCP's older form: the storage reader as second argument. Warns.
        checkpoint_id: Path or URL of a checkpoint of ray_dcp, of stock DCP, or of a folder of
            safetensors files.
        storage_reader: A `FileSystemReader` or `FsspecReader` is taken at its word and done
            natively; any other reader is called as DCP calls it.
        planner: A default planner is done natively; of any other the hooks are called.
        process_group: The ranks that load together; the default group if None.
        no_dist: Load as a single process, whatever the process group.
        options: See `LoadOptions`.

    Returns:
        What was loaded, missing, unexpected and cast.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; the message says what is there.
        MissingKeyError: The checkpoint lacks keys; all are named.
        ShapeMismatchError: Shapes or dtypes do not fit; all are named.
        DamagedCheckpointError: Stored bytes are not what was committed.
        ParticipantError: A rank or the coordinator died or was too late.

    Example:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/step-1")
        ...     state = {"w": torch.zeros(2)}
        ...     ray_dcp.load(state, checkpoint_id=f"{root}/step-1").loaded
        ...     state["w"]
        ('w',)
        tensor([1., 1.])

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    """
    reader = _second_argument("storage_reader", positional, storage_reader)
    decision = decide_load(planner, reader, checkpoint_id)
    return _load(decision, _session(process_group, no_dist), state_dict, options, checkpoint_id)


def load_state_dict(
    state_dict: StateDict,
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """Loads like `load`, in DCP's older form: `Stateful` values are not given their state.

    Args:
        state_dict: As for `load`.
        storage_reader: As for `load`; its `reset` is called.
        process_group: As for `load`.
        coordinator_rank: The rank on which a third-party planner or storage decides.
        no_dist: As for `load`.
        planner: As for `load`.

    Raises:
        CheckpointError: As `load` does.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load_state_dict`.
    """
    warnings.warn("load_state_dict is deprecated: use ray_dcp.load", FutureWarning, stacklevel=2)
    decision = decide_load(planner, storage_reader, None)
    session = _session(process_group, no_dist)
    if decision.path == FOREIGN:
        storage_reader.reset()
    return _load(
        decision, session, state_dict, None, None,
        coordinator_rank=coordinator_rank, stateful=False,
    )  # fmt: skip


def _save(
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


def _load(
    decision: Decision,
    session: RankSession,
    state_dict: StateDict,
    options: LoadOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    coordinator_rank: int = 0,
    stateful: bool = True,
) -> LoadReport:
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


def _session(process_group: dist.ProcessGroup | None, no_dist: bool) -> RankSession:
    session = current_session(process_group, no_dist)
    return InlineSession() if session is None else session


def _target(decision: Decision) -> Target:
    if decision.target is None:
        raise InvalidRequestError(f"no path to save to or load from ({decision.reason})")
    return decision.target


def _second_argument(name: str, positional: tuple[Any, ...], keyword: Any) -> Any:
    """Returns the storage, which DCP once took as second positional argument."""
    if not positional:
        return keyword
    if len(positional) > 1 or keyword is not None:
        raise InvalidRequestError(
            f"expected the state dict and keyword arguments, found {len(positional)} more "
            f"positional arguments; pass {name}=… and the others by name"
        )
    warnings.warn(f"The argument order changed: pass {name} by name", FutureWarning, stacklevel=3)
    return positional[0]
