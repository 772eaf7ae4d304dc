"""`save`, `async_save`, `load`, `load_newest` and DCP's deprecated forms of them.

This module only chooses the path, session and options of a call. `operations`, `asynchronous` and
`loading` carry it out, with `runtime` and `torch_adapter`.
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
    """Saves a state dict from all ranks in the background; returns when its bytes are copied.

    All ranks of the group call it with the same arguments. When it returns the state may change:
    each rank's bytes are staged. In a job with Ray they are held by a stager of the node, and from
    then on the save survives the death of its ranks and of the driver; a process without Ray holds
    them itself, and the save ends with it. The checkpoint exists when the handle reports it, and
    not before.

    A failed save does not stop training: the handle raises its error, the same on every rank. With
    `SaveOptions(staging="background")` the call returns before the bytes are copied, and the state
    may change only when `SaveHandle.staged()` has returned.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`. A third-party writer that is an `AsyncStager` also stages,
            as in DCP.
        planner: As for `save`; its hooks run before this returns.
        process_group: As for `save`.
        async_checkpointer_type: Accepted for compatibility with DCP. The stager's process writes
            where there is one, a thread of this process otherwise.
        async_stager: Stages the state instead of ray_dcp, by DCP's protocol. This process then
            saves what it returns: such a save does not survive the process.
        no_dist: As for `save`.
        use_collectives: As for `save`.
        options: See `SaveOptions`; `max_pending` and `when_full` apply to asynchronous saves.

    Returns:
        A future of DCP's `Metadata`, which is also an `AsyncSaveResponse`; see `SaveHandle`.

    Raises:
        InvalidRequestError: The call is wrong.
        ParticipantError: The session can't be created.

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
    """Loads the newest undamaged checkpoint of a run, in place, as `load` does.

    All ranks of the group must call this function. A run is a directory of step folders, such as
    `step-1000` or `epoch=2-step=500`: the number at the end of a folder's name is its step, and the
    highest step is the newest. Folders without a number, and folders inside step folders, are
    ignored.

    The newest committed checkpoint is tried first. If any rank finds it damaged (a file is missing
    or truncated, a checksum does not match, a record can't be read), all ranks load the next older
    one into the same targets. A warning names each damaged checkpoint, and the report lists every
    step that was skipped.

    Errors for which an older checkpoint is no remedy are raised at once: a state dict that does not
    match, objects that `LoadOptions.weights_only` refuses, a storage failure, a dead rank or a
    missed deadline.

    Args:
        state_dict: The targets, as for `load`. A damaged checkpoint may overwrite some of them
            before an older one is loaded. If the older one lacks such a value, the load fails even
            with `LoadOptions(strict=False)`, as the value can't be left unchanged.
        run: Path, URL, `Location` or filesystem of the directory.
        at_most: Load this step or an older one, for example to go back before a loss spike.
        newer_than: Load only steps above this one, for example to wait for the next checkpoint.
        planner: As for `load`. It is set up again for each checkpoint that is tried.
        process_group: As for `load`.
        no_dist: As for `load`.
        options: As for `load`. With `verify="never"`, damage inside files is not detected.

    Returns:
        As `load`, with `checkpoint_id`, `step` and `skipped`.

    Raises:
        CheckpointNotFoundError: No step is committed; the message names what is there instead.
        DamagedCheckpointError: Every committed step is damaged. The state dict may hold parts of
            those that were tried.
        MissingKeyError: As for `load`; or an older step lacks a value that a damaged one
            overwrote.
        CheckpointError: As `load` does, with a note on each step that was skipped before.

    Complexity:
        One listing of all files of the run by one rank, and one load for each step that is tried.

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
