"""`save`, `load` and DCP's older forms of them: from a call of the user to the path it takes.

What is decided here is only which path, session and options; the work is in `runtime` and `seam`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.errors import InvalidRequestError
from ray_dcp.operations import CheckpointId, StateDict, run_load, run_save, session_for
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.seam.decision import FOREIGN
from ray_dcp.seam.paths import decide_load, decide_save
from ray_dcp.seam.report import LoadReport

__all__ = ["load", "load_state_dict", "save", "save_state_dict"]


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
    session = session_for(process_group, no_dist)
    return run_save(
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
    session = session_for(process_group, no_dist)
    if decision.path == FOREIGN:
        storage_writer.reset()
    return run_save(
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
    return run_load(
        decision, session_for(process_group, no_dist), state_dict, options, checkpoint_id
    )


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
    session = session_for(process_group, no_dist)
    if decision.path == FOREIGN:
        storage_reader.reset()
    return run_load(
        decision, session, state_dict, None, None,
        coordinator_rank=coordinator_rank, stateful=False,
    )  # fmt: skip


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
