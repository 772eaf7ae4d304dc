"""Announced deletions, which a process that protects a step can abort before they are committed.

    deletes the step                        protects the step (tag, reader, writer lease)
    1. announce, under an attempt id        1. write the protection
    2. read all protections                 2. fence: abort all announced attempts
    3. commit the delete record

At least one of the two sees the other, in whatever order and with whatever delays the steps happen.
The abort record occupies the attempt, so that its delete record can't be committed any more.

A storage without conditional creation allows no such abort record. There, `fence` removes the
announcement, and the deleting process checks it immediately before step 3. A deletion between that
check and its record can't be stopped; `fence` reports this.

An announcement is an empty file whose name contains all its data. The announcement of a crashed
process is aborted in the same way, so that no liveness check is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ray_dcp.errors import (
    CheckpointExistsError,
    StorageError,
)
from ray_dcp.format.manifest import (
    AbortRecord,
    encode_record,
    record_key,
)
from ray_dcp.io.records import MOST_TRIES, read_slots
from ray_dcp.io.reserve import freeing
from ray_dcp.store.storage import KeyExistsError, Storage, read_if_there

_PREFIX = "deleting/"
_KEY = re.compile(
    r"deleting/(?P<step>\d{1,18})\.(?P<attempt>[0-9a-f]{16})\.(?P<name>(?!\.\.?$)[^/]+)"
)


class Announced(NamedTuple):
    """An announced deletion."""

    step: int
    attempt: str
    """Attempt id of its delete record."""
    name: str
    """Folder of the step."""

    @property
    def key(self) -> str:
        """Key of the announcement in the shared folder of the run.

        Examples:
            >>> Announced(5, "0123456789abcdef", "step-5").key
            'deleting/5.0123456789abcdef.step-5'
        """
        return f"{_PREFIX}{self.step}.{self.attempt}.{self.name}"


def announced(shared: Storage, step: int | None = None) -> list[Announced]:
    """Returns the announced deletions.

    Args:
        shared: Shared storage of the run's managers.
        step: Only those of this step; of all steps if None.

    Raises:
        StorageError: The storage can't be listed.
    """
    prefix = _PREFIX if step is None else f"{_PREFIX}{step}."
    found = (_KEY.fullmatch(entry.key) for entry in shared.list(prefix))
    return [Announced(int(one["step"]), one["attempt"], one["name"]) for one in found if one]


def ended(url: str) -> CheckpointExistsError:
    """Returns the error of a deletion that another process aborted."""
    return CheckpointExistsError(
        "Expected to delete the checkpoint, but its deletion was aborted by a tag, a reader, or "
        "another process that writes to its run",
        checkpoint_id=url,
    )


def check_announced(shared: Storage, mark: Announced) -> None:
    """Checks that the announcement of a deletion still exists.

    Raises:
        CheckpointExistsError: Another process removed it.
        StorageError: The storage can't be read.
    """
    if read_if_there(shared, mark.key) is None:
        raise ended(mark.name)


def fence(
    shared: Storage,
    open_folder: Callable[[str], Storage],
    reason: str,
    step: int | None = None,
) -> str:
    """Aborts the announced deletions: none of them can be committed after this returns.

    Must be called after the protection has been written.

    Args:
        shared: Shared storage of the run's managers.
        open_folder: Opens a step folder of the run.
        reason: Reason, stored in the abort record.
        step: Only deletions of this step; of all steps if None.

    Returns:
        A message about deletions that may still be committed, because the storage has no
        conditional creation; "" if there are none.

    Raises:
        StorageError: The storage failed; some deletions may still be committed.
    """
    marks = announced(shared, step)
    unsure = [
        one
        for one in marks
        if not freeing(shared, partial(_abort, open_folder(one.name), one.attempt, reason))
    ]
    shared.delete([one.key for one in marks])
    if not unsure:
        return ""
    return (
        f"{', '.join(sorted({one.name for one in unsure}))} of {shared.url.rpartition('/')[0]} was "
        f"about to be deleted, and the deletion was called off. But this storage can't create a "
        f"file only if there is none: a deletion whose record is being written now still happens. "
        f"Look whether the step still exists"
    )


def _abort(storage: Storage, attempt: str, reason: str) -> bool:
    """Aborts a deletion by a record; returns whether its outcome is now decided."""
    record = encode_record(AbortRecord(attempt=attempt, reason=reason, rank=None))
    for _ in range(MOST_TRIES):
        slots = read_slots(storage, tolerant=True)
        if any(one.attempt == attempt for one in slots.records.values()):
            return True
        # Why: an empty folder has nothing to delete. Another program, such as one that makes
        # copies, may have written a file of this name.
        if not slots.used and not storage.list():
            return True
        # Why no record: without conditional creation, it could replace another process's record.
        if not storage.traits.create_if_absent:
            return False
        with suppress(KeyExistsError):
            storage.write(record_key(slots.last_slot + 1), record, create=True)
    raise StorageError(
        f"The records in {storage.url} changed {MOST_TRIES} times while a deletion was to be "
        f"ended there. Who saves or deletes there all the time? Try again when that is over"
    )
