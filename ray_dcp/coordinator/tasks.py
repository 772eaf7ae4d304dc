"""Performs the tasks of the machines: thin code over `planning`, `format`, `store` and `io`.

It decides nothing, and raises nothing: an error becomes a `Failed` result.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from ray_dcp.commit_protocol.commands import (
    BuildCommit,
    CollectReplaced,
    CreateAbort,
    CreateRecord,
    Finished,
    MakePlan,
    PublishMetadata,
    ReadCheckpoint,
    ReadOutcome,
    ReadRecord,
    ReadRecords,
    Result,
    ShareReads,
    Task,
    WriteTable,
)
from ray_dcp.commit_protocol.messages import (
    LoadGo,
)
from ray_dcp.coordinator.commit import build_commit
from ray_dcp.coordinator.plan import plan_of
from ray_dcp.core.processes import at_once, collector_paused
from ray_dcp.errors import (
    CheckpointError,
)
from ray_dcp.io.checkpoint import find_checkpoint
from ray_dcp.place.standing import read_standing
from ray_dcp.place.stock_files import without_stock_files
from ray_dcp.place.stock_metadata import publish, republish
from ray_dcp.place.visibility import check_complete
from ray_dcp.place.voting import Opener, perform_on_records, result_of
from ray_dcp.planning.reads import Ranges, ReadShares, share_reads
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage


def perform(task: Task, opener: Opener = open_storage) -> Result:
    """Performs a task. Blocks as long as the storage does; never raises.

    Args:
        task: The task of a `Perform` command.
        opener: Opens the storage.

    Returns:
        The result that the task's docstring names, or `Failed`.
    """
    return result_of(task, partial(_perform, task, opener))


def _perform(task: Task, opener: Opener) -> Result:
    match task:
        case ShareReads():
            return _share_reads(task)
        case ReadRecords():
            return read_standing(opener(task.target))
        case MakePlan():
            with collector_paused():
                return plan_of(task)
        case BuildCommit():
            with collector_paused():
                return build_commit(task)
        case WriteTable():
            return _write_table(task, opener(task.target))
        case CreateRecord() | CreateAbort() | ReadRecord() | ReadOutcome():
            return perform_on_records(task, opener)
        case PublishMetadata():
            return publish(opener(task.target), task.slot, task.metadata, task.target.url)
        case CollectReplaced():
            storage = opener(task.target)
            storage.delete(without_stock_files(storage, task.keys))
            return Finished()
        case ReadCheckpoint():
            storage = opener(task.target)
            found = find_checkpoint(storage, checkpoint_id=task.target.url)
            if found.metadata_is_stale:
                # Why here: whoever committed it is gone, and no save may follow. Suppressed: a
                # load needs no `.metadata`, and may have no right to write.
                with suppress(CheckpointError):
                    republish(storage, task.target.url)
            return LoadGo(found.kind, found.slot, found.record, found.table)


def _write_table(task: WriteTable, storage: Storage) -> Finished:
    files = [(one.key, one.num_bytes) for one in task.receipts]
    url = task.target.url
    at_once(
        lambda: check_complete(storage, files, task.attempt, task.previous_slot, url),
        partial(storage.write, task.key, task.table),
    )
    return Finished()


def _share_reads(task: ShareReads) -> ReadShares:
    ranks, needs = range(task.world_size), task.needs
    return share_reads(
        {rank: Ranges.decode(each.ranges) for rank, each in needs.items()},
        world_size=task.world_size,
        nodes=[needs[rank].node if rank in needs else "" for rank in ranks],
        # Why one: all ranks read the same storage, with the same options.
        cost=needs[min(needs)].cost,
    )
