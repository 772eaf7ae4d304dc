"""What the coordinator of a job does on storage: creates a step's record, or deletes its parts.

Without Ray, and in threads of the coordinator; a crash at any point leaves a step whole or not at
all, and the next writer of the run deletes the rest (`Writer.remove_leftovers`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Fenced, Lost, Open, Won
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InternalError,
)
from ray_dcp.format.job_parts import KEY, PartRecord, decode_parts, encode_parts
from ray_dcp.io.records import read_slots
from ray_dcp.manager.catalogue import Root, StepFound
from ray_dcp.manager.deletions import remove_folder
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.step_commit import commit_step
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.place.collect import collect
from ray_dcp.place.outcome import settle
from ray_dcp.view.checkpoint_view import read_view
from ray_dcp.view.wording import few

logger = logging.getLogger(__name__)


def folders_of(found: StepFound) -> dict[str, str]:
    """Returns the folder of each part of a step below the run; empty for a step without parts."""
    items = {} if found.info is None else found.info.items
    return {name: f"{found.name}/{folder}" for name, folder in items.items()}


def _folder_of(place: StepTarget, part: str) -> str:
    return f"{place.name}/{place.folder_of(part)}"


def reason_of(target: Target, attempt: str) -> str:
    """Returns why an attempt was aborted, as its record says."""
    with suppress(CheckpointError):
        root = Root(target)
        for record in read_slots(root.storage, tolerant=True).records.values():
            if record.attempt == attempt:
                return str(getattr(record, "reason", "")) or "its record does not say why"
    return "its record is gone"


def create_record(
    writer: Writer, place: StepTarget, records: Mapping[str, PartRecord]
) -> CheckpointError | None:
    """Creates the record of a step; returns why there is none, or why that is unknown."""
    folders = {name: place.folder_of(name) for name in records}
    try:
        writer.take_lease()  # Checks that it is held.
        commit_step(writer.root, place, folders, {KEY: encode_parts(records)})
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, the record may exist
        failed = to_wire(error, "creating the step's record", kind=InternalError)
        failed.step = place.step if failed.step is None else failed.step
    ended = settle(writer.root.below(place.name), place.attempt, reason=failed.message, rank=None)
    match ended:
        case Won() | Lost():
            return None
        case Fenced():
            return failed
        case Open(why):
            return CommitUnknownError(
                f"the commit of step {place.step} failed, and the storage did not say whether it "
                f"happened: {failed}; {why}. Ask ray_dcp.outcome later",
                attempt=place.attempt,
                step=place.step,
            )


def remove_parts(
    writer: Writer, place: StepTarget, attempts: Mapping[str, str], error: CheckpointError
) -> None:
    """Ends the saves of a step's parts, and deletes what they wrote."""
    root = writer.root
    try:
        # Careful: who lost the run must not delete what the other one saves.
        writer.take_lease()
        # Why: parts that are late are written to folders that no later step of this number uses.
        settle(root.below(place.name), place.attempt, reason=error.message, rank=None)
        for part, attempt in attempts.items():
            target = root.below(_folder_of(place, part))
            if attempt:
                settle(target, attempt, reason=error.message, rank=None)
            with suppress(CheckpointNotFoundError):
                collect(target, abort_unfinished=True)
            remove_folder(root, _folder_of(place, part))
    except Exception as failed:  # noqa: BLE001 - the step is given up, whatever stays
        logger.warning(
            "Parts of step %d, which was given up, stay in %s until retention or the next job "
            "deletes them: %s",
            place.step,
            root.url,
            failed,
        )


def part_source(writer: Writer, part: str, step: int) -> tuple[StepFound, PartRecord | None]:
    """Returns the last committed step that has a part, and what its record says of the part.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    catalogue = writer.look()
    for found in reversed(catalogue.oldest_first("increasing")):
        if found.step in catalogue.damaged or part not in folders_of(found):
            continue
        return found, read_parts(writer.root, found).get(part)
    marked = few([str(one) for one in sorted(catalogue.damaged)])
    but = f", whole: steps {marked} are marked as damaged" if marked else ""
    raise CheckpointNotFoundError(
        f"expected a committed step with the part {part!r} in {writer.root.url}, of which step "
        f"{step} could keep it, but there is none{but}; save the part",
        checkpoint_id=writer.root.url,
        step=step,
        key=part,
    )


def read_parts(root: Root, found: StepFound) -> dict[str, PartRecord]:
    """Returns what the record of a committed step says of its parts; empty if it is no job's step.

    Raises:
        DamagedCheckpointError: The record can't be read.
        StorageError: The storage failed.
    """
    view = read_view(root.below(found.name))
    return decode_parts(view[KEY]) if KEY in view else {}
