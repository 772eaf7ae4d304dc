"""`save`, `load`, `load_newest` and DCP's older forms: from a user's call to the path it takes.

This module decides only which path, session and options a call takes; the work is in `operations`,
`loading`, `runtime` and `torch_adapter`.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.asynchronous import SaveHandle, run_async_save
from ray_dcp.core import reporting
from ray_dcp.errors import InvalidRequestError
from ray_dcp.loading import run_load, run_load_newest
from ray_dcp.operations import CheckpointId, StateDict, run_save, session_for
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.rank_load import StepRange
from ray_dcp.store.opening import absolute_target
from ray_dcp.torch_adapter.dispatch import FOREIGN, check_plug_in, decide_load, decide_save
from ray_dcp.torch_adapter.load_report import LoadReport
from ray_dcp.torch_adapter.operation_log import OperationLog

__all__ = ["async_save", "load", "load_newest", "load_state_dict", "save", "save_state_dict"]


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
        state_dict: Values by name. Top-level `Stateful` values are replaced by their
            `state_dict()`, modules and optimizers by their state under the names of parameters
            (`get_state_dict`). It must not change until the call returns.
        *positional: DCP's older form: the storage writer as second argument. Warns.
        checkpoint_id: Path or URL of the checkpoint, a `Location` with options for it, or a ready
            filesystem. Relative paths are taken from this rank's working directory.
        storage_writer: A `FileSystemWriter` or `FsspecWriter` is taken at its word and done
            natively; any other writer, also a subclass of these, is called as DCP calls it, without
            ray_dcp's guarantees.
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
        CommitUnknownError: It is not known whether the commit happened.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     metadata = ray_dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=f"{root}/step-1")
        ...     metadata.state_dict_metadata["w"].size
        torch.Size([2, 3])

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `save`.
    """
    writer = _second_argument("storage_writer", positional, storage_writer)
    check_options(options, SaveOptions)
    with OperationLog(
        "save", checkpoint_id=checkpoint_id, storage_writer=writer, planner=planner
    ) as log:
        decision = decide_save(planner, writer, checkpoint_id)
        session = session_for(process_group, no_dist)
        return run_save(
            decision,
            session,
            state_dict,
            options,
            checkpoint_id,
            use_collectives=use_collectives,
            log=log,
        )


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType | None = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Saves a state dict over all ranks in the background, and returns once its bytes are copied.

    All ranks of the group call it with the same arguments. When it returns the state may change:
    each rank's bytes are staged. In a job with Ray they are held by a stager of the node, and from
    then on the save survives the death of its ranks and of the driver; a process without Ray holds
    them itself, and the save ends with it. The checkpoint exists when the handle reports it, and
    not before.

    The handle reports what goes wrong with the save, the same on every rank; a failed save
    does not stop training. Without `async_stager` the handle is staged when it is returned, unless
    `SaveOptions(staging="background")` asks to copy beside training: then the state may change when
    `SaveHandle.staged()` has returned.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`. One that is an `AsyncStager` and not taken at its word
            stages as well, as in DCP.
        planner: As for `save`; its hooks run before this returns.
        process_group: As for `save`.
        async_checkpointer_type: Accepted for DCP's sake: the writer is always another process
            where there is one, and a thread where there is none.
        async_stager: Stages instead of ray_dcp, by DCP's protocol. What it returns is then saved
            from this process: such a save does not survive it.
        no_dist: As for `save`.
        use_collectives: As for `save`.
        options: See `SaveOptions`; `max_pending` and `when_full` are for asynchronous saves.

    Returns:
        A future of DCP's `Metadata`, and an `AsyncSaveResponse`; see `SaveHandle`.

    Raises:
        InvalidRequestError: The call is wrong.
        ParticipantError: No session can be made.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     weight = torch.ones(2, 3)
        ...     handle = ray_dcp.async_save({"w": weight}, checkpoint_id=f"{root}/step-1")
        ...     _ = weight.zero_()  # training goes on
        ...     metadata = handle.result()
        ...     ray_dcp.open(f"{root}/step-1")["w"][0].tolist()
        [1.0, 1.0, 1.0]

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `async_save`.
    """
    check_options(options, SaveOptions)
    if async_stager is not None and not isinstance(async_stager, AsyncStager):
        raise InvalidRequestError(
            f"Expected async_stager to be an AsyncStager with stage, synchronize_staging, close "
            f"and should_synchronize_after_execute, but found {type(async_stager).__name__}",
            key="async_stager",
        )
    with OperationLog(
        "async_save", checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner
    ) as log:
        decision = decide_save(planner, storage_writer, checkpoint_id)
        session = session_for(process_group, no_dist)
        handle = run_async_save(
            decision,
            session,
            state_dict,
            options,
            checkpoint_id,
            stager=async_stager,
            use_collectives=use_collectives,
            log=log,
        )
        log.uploading(handle)
        return handle


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
    with OperationLog("save_state_dict", storage_writer=storage_writer, planner=planner) as log:
        decision = decide_save(planner, storage_writer, None)
        session = session_for(process_group, no_dist)
        if decision.path == FOREIGN:
            storage_writer.reset()
        how: dict[str, Any] = {"coordinator_rank": coordinator_rank, "stateful": False, "log": log}
        return run_save(decision, session, state_dict, None, None, **how)


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
        state_dict: What to fill. Its tensors define which part of each this rank wants.
        *positional: DCP's older form: the storage reader as second argument. Warns.
        checkpoint_id: Path or URL of a checkpoint of ray_dcp, of stock DCP, or of a folder of
            safetensors files.
        storage_reader: A `FileSystemReader`, `FsspecReader` or `HuggingFaceStorageReader` is taken
            at its word and done natively; any other reader, also a subclass of these, is called as
            DCP calls it.
        planner: A default planner is done natively; of any other the hooks are called.
        process_group: The ranks that load together; the default group if None.
        no_dist: Load as a single process, whatever the process group.
        options: See `LoadOptions`.

    Returns:
        What was loaded, missing, unexpected and cast.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; the message names what is there.
        MissingKeyError: The checkpoint lacks keys; it has their number, and five of them.
        StateDictError: It holds state of a module or optimizer that nobody takes.
        ShapeMismatchError: Shapes or dtypes do not fit; all are named.
        DamagedCheckpointError: Stored bytes are not what was committed.
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

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    """
    reader = _second_argument("storage_reader", positional, storage_reader)
    check_options(options, LoadOptions)
    with OperationLog(
        "load", checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner
    ) as log:
        decision = decide_load(planner, reader, checkpoint_id)
        session = session_for(process_group, no_dist)
        return run_load(decision, session, state_dict, options, checkpoint_id, log=log)


def load_newest(
    state_dict: StateDict,
    run: CheckpointId,
    *,
    at_most: int | None = None,
    newer_than: int | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads the newest checkpoint of a run that can be loaded, in place, as `load` does.

    All ranks of the group call it. A run is a directory of step folders, as `step-1000` and
    `epoch=2-step=500`: the number at the end of a folder's name is its step, and the highest is
    the newest. Folders without a number, and those inside of step folders, are not looked at.

    The newest committed one is tried first. When it is damaged (a file is missing or cut off, a
    checksum does not match, a record can't be read), the next older one is loaded into the same
    targets instead, on all ranks the same: one rank that fails is enough. A warning names each
    damaged one, and the report names every step that was passed over.

    An older checkpoint does not help against a state dict that does not fit, objects that
    `LoadOptions.weights_only` refuses, a storage that fails, a rank that died or a deadline:
    these are raised at once.

    Args:
        state_dict: What to fill, as for `load`. A damaged checkpoint may have been read in part
            before an older one overwrites it; values that the older one lacks can't be left as
            they are then (`LoadOptions(strict=False)`), which is an error.
        run: Path, URL, `Location` or filesystem of the directory.
        at_most: Load this step or an older one: to go back to before a bad stretch of training.
        newer_than: Load no step up to this one: for who waits for the next.
        planner: As for `load`. It is set up again for each checkpoint that is tried.
        process_group: As for `load`.
        no_dist: As for `load`.
        options: As for `load`. With `verify="never"` damage inside of files is not seen.

    Returns:
        As `load`, with `checkpoint_id`, `step` and `skipped`.

    Raises:
        CheckpointNotFoundError: No step is committed: there is nothing to resume from. The
            message says what is there.
        DamagedCheckpointError: Every committed step is damaged. The state dict may hold parts of
            what was tried.
        MissingKeyError: As for `load`; or an older step lacks what a damaged one overwrote.
        CheckpointError: As `load` does, with a note on each step that was skipped before.

    Complexity:
        One listing of all files of the run by one rank, and one load for each step tried.

    Examples:
        >>> import pathlib, tempfile, torch, ray_dcp, warnings
        >>> with tempfile.TemporaryDirectory() as run:
        ...     for step in (9, 10):
        ...         state = {"w": torch.full((1000,), step)}
        ...         _ = ray_dcp.save(state, checkpoint_id=f"{run}/step-{step}")
        ...     (data,) = pathlib.Path(run, "step-10").glob("*.distcp")
        ...     data.unlink()
        ...     with warnings.catch_warnings(record=True) as told:
        ...         warnings.simplefilter("always")
        ...         report = ray_dcp.load_newest(state, run)
        >>> report.step, state["w"][0].item(), len(report.damaged), len(told)
        (9, 9, 1, 1)
    """
    check_plug_in(planner, "planner", LoadPlanner, SavePlanner)
    check_options(options, LoadOptions)
    with OperationLog("load_newest", checkpoint_id=run, planner=planner) as log:
        report = run_load_newest(
            session := session_for(process_group, no_dist),
            state_dict,
            options or LoadOptions(),
            absolute_target(run),
            planner,
            StepRange(at_most=at_most, newer_than=newer_than),
            log,
        )
    if session.rank == 0:
        for path, error in report.damaged:
            reporting.warn(
                f"Loaded {report.checkpoint_id} instead of the newer {path}, which is damaged: "
                f"{error}. Look at it with `ray-dcp verify {path}`",
                stacklevel=2,
            )
    return report


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
    with OperationLog("load_state_dict", storage_reader=storage_reader, planner=planner) as log:
        decision = decide_load(planner, storage_reader, None)
        session = session_for(process_group, no_dist)
        if decision.path == FOREIGN:
            storage_reader.reset()
        how: dict[str, Any] = {"coordinator_rank": coordinator_rank, "stateful": False, "log": log}
        return run_load(decision, session, state_dict, None, None, **how)


def check_options(options: object, kind: type[SaveOptions | LoadOptions]) -> None:
    """Raises `InvalidRequestError` for options that are not of their kind."""
    if options is not None and not isinstance(options, kind):
        raise InvalidRequestError(
            f"expected options=ray_dcp.{kind.__name__}(…), found a {type(options).__name__}: give "
            f"each option by name there",
            key="options",
        )


def _second_argument(name: str, positional: tuple[Any, ...], keyword: Any) -> Any:
    """Returns the storage, which DCP once took as second positional argument."""
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
