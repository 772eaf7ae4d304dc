"""The commit of a step of several items: a small checkpoint in the step's folder names them.

Each item is a checkpoint of its own in a folder below the step's, and no step by itself. The small
checkpoint is saved last, by one process: its record is the commit of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ray_dcp.commit_protocol.commands import Failed, ReadRecords, RecordsRead, Result, Task
from ray_dcp.coordinator.tasks import perform
from ray_dcp.errors import CheckpointError, CheckpointExistsError
from ray_dcp.io.records import read_slots
from ray_dcp.manager.catalogue import Root
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.options import SaveOptions
from ray_dcp.saving import run_save
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.dispatch import decide_save


def commit_step(
    root: Root, place: StepTarget, folders: Mapping[str, str], more: Mapping[str, Any] = {}
) -> None:
    """Commits a step whose items are durable.

    Args:
        root: The run.
        place: The place of the step; the commit has its attempt.
        folders: Folder of each item, below the step's.
        more: More values for the small checkpoint.

    Raises:
        CheckpointError: As `ray_dcp.save`; the step may be committed nevertheless, which
            `place.outcome.settle` decides.
    """
    target = root.below(place.name)
    run_save(
        decide_save(None, None, target),
        inline_session("step", performer=partial(_perform_after, place)),
        {"step": place.step, "items": dict(folders), **more},
        SaveOptions(),
        target,
        attempt=place.attempt,
    )


def _perform_after(place: StepTarget, task: Task) -> Result:
    """Performs a task of the save that commits a step, unless another writer removed its items.

    Why by records: a writer that took over the lease deletes items without a committed step, as
    leftovers of a crash. It commits a delete record first. Either that record is read here, or it
    occupies the slot that this save needs.
    """
    found = perform(task)
    is_as_before = isinstance(found, RecordsRead) and found.last_slot == place.last_slot
    if is_as_before or not isinstance(task, ReadRecords) or isinstance(found, Failed):
        return found
    try:
        decides = read_slots(open_storage(task.target)).decides
    except CheckpointError as error:
        return Failed(error)
    if decides is None or decides.slot <= place.last_slot:
        return found  # Only abort records, of aborted deletions.
    return Failed(
        CheckpointExistsError(
            f"Expected nothing to be committed or deleted in the folder of step {place.step} while "
            f"it was being saved, but another process took over the run and removed what this one "
            f"had saved of it. The step is not committed; only one job at a time may write here",
            step=place.step,
        )
    )
