"""`StepTarget`: the place to which a step is saved, with the folders of its items."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.step_items import is_item_folder, number_of
from ray_dcp.store.storage import Storage


@dataclass(frozen=True)
class StepTarget:
    """The place to which a step is saved."""

    step: int
    name: str
    """Name of the folder."""
    last_slot: int
    """Highest slot in use in the folder."""
    number: int
    """Number in the folder names of the items; no committed item has it."""
    created_s: float
    """Time of the save by the clock of rank 0, in seconds since the epoch."""
    attempt: str = field(default_factory=new_attempt)
    """Attempt that commits the step, if it consists of named items."""

    def folder_of(self, item: str) -> str:
        """Returns the folder of an item in the step's folder; no commit refers to that folder."""
        return f"{item}.{self.number}" if self.number else item


def free_number(storage: Storage, last_slot: int) -> int:
    """Returns a number for the item folders of the next save, at least `last_slot`.

    The items of a committed step have lower numbers, unless the step was copied: then its items
    keep their folders, while its records start anew. Numbers of existing folders are therefore
    skipped.

    Args:
        storage: Storage of the step's folder.
        last_slot: Highest slot in use in the folder.
    """
    folders = {entry.key.partition("/")[0] for entry in storage.list()} if last_slot else set()
    taken = {number_of(folder) for folder in folders if is_item_folder(folder)}
    number = last_slot
    while number in taken:
        number += 1
    return number
