"""Announced deletions: whoever protects a step can end them before they are committed.

Who deletes a step announces it under the attempt of its delete record, then reads what protects
the step, then commits that record. Who tags or reads the step, removes another one or takes over
the right to write does that first and then *fences* the announced deletions: an abort record takes
the attempt, so that it can't be committed any more. One of the two sees the other, whatever the
order, and however long one of them lies still in between.

An announcement is an empty file whose name tells all. One that was left by a crash ends the same
way, so nobody has to know whether its process lives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from ray_dcp.errors import StorageError
from ray_dcp.format.manifest import AbortRecord, encode_record, record_key
from ray_dcp.store.storage import KeyExistsError, Storage
from ray_dcp.transfer.slots import read_slots

__all__ = ["Announced", "announced", "fence"]

_PREFIX = "deleting/"
_KEY = re.compile(
    r"deleting/(?P<step>\d{1,18})\.(?P<attempt>[0-9a-f]{16})\.(?P<name>(?!\.\.?$)[^/]+)"
)
_MOST_TRIES = 20


class Announced(NamedTuple):
    """A deletion that is announced."""

    step: int
    attempt: str
    """Of its delete record."""
    name: str
    """Folder of the step."""

    @property
    def key(self) -> str:
        """Returns where it is announced, in the shared folder of the run.

        Example:
            >>> Announced(5, "0123456789abcdef", "step-5").key
            'deleting/5.0123456789abcdef.step-5'
        """
        return f"{_PREFIX}{self.step}.{self.attempt}.{self.name}"


def announced(shared: Storage, step: int | None = None) -> list[Announced]:
    """Returns the deletions that are announced.

    Args:
        shared: What managers share.
        step: Of which step; of all if None.

    Raises:
        StorageError: It can't be listed.
    """
    prefix = _PREFIX if step is None else f"{_PREFIX}{step}."
    found = (_KEY.fullmatch(entry.key) for entry in shared.list(prefix))
    return [Announced(int(one["step"]), one["attempt"], one["name"]) for one in found if one]


def fence(
    shared: Storage,
    open_folder: Callable[[str], Storage],
    reason: str,
    step: int | None = None,
) -> None:
    """Ends the deletions that are announced: none of them is committed after this returns.

    Call it after the change that they must not miss.

    Args:
        shared: What managers share.
        open_folder: Opens a step folder of the run.
        reason: Goes into the abort record.
        step: Of which step; of all if None.

    Raises:
        StorageError: The storage failed; some may still be committed.
    """
    for one in announced(shared, step):
        _abort(open_folder(one.name), one.attempt, reason)
        shared.delete([one.key])


def _abort(storage: Storage, attempt: str, reason: str) -> None:
    record = encode_record(AbortRecord(attempt=attempt, reason=reason, rank=None))
    for _ in range(_MOST_TRIES):
        slots = read_slots(storage, tolerant=True)
        if any(one.attempt == attempt for one in slots.records.values()):
            return
        # Why only looked at: there, an abort could replace the record of somebody else.
        if not storage.traits.create_if_absent:
            return
        try:
            storage.write(record_key(slots.last_slot + 1), record, create=True)
        except KeyExistsError:
            continue
    raise StorageError(
        f"The records in {storage.url} changed {_MOST_TRIES} times while a deletion was to be "
        f"ended there. Who saves or deletes there all the time? Try again when that is over"
    )
