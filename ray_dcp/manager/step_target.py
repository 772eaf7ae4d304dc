"""`StepTarget`: the place to which a step is saved, with the folders of its items."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ray_dcp.errors import (
    DamagedCheckpointError,
)
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.records import read_info
from ray_dcp.manager.settings import ITEM
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.store.storage import Storage

_ITEM_FOLDER = re.compile(rf"(?P<item>{ITEM.pattern})(?:\.[1-9][0-9]{{0,17}})?")
"""See `StepTarget.folder_of`."""


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
    taken = {number_of(folder) for folder in folders if _ITEM_FOLDER.fullmatch(folder)}
    number = last_slot
    while number in taken:
        number += 1
    return number


def items_in(storage: Storage, keys: Iterable[str]) -> set[str]:
    """Returns the folders of a step's items, which the step's infos name.

    Any other folder belongs to the user, whatever it contains.

    Args:
        storage: Storage of the step's folder.
        keys: Keys of all files in it.
    """
    keys, names = list(keys), set[str]()
    for slot in map(info_slot, keys):
        # Suppressed: the items are not removed then, and `ray_dcp.collect` finds their leftovers.
        with suppress(DamagedCheckpointError):
            info = None if slot is None else read_info(storage, "", slot)
            names |= {*(info.items if info else ())}
    return {
        folder
        for folder, slash, _ in (key.partition("/") for key in keys)
        if slash and (found := _ITEM_FOLDER.fullmatch(folder)) and found["item"] in names
    }


def number_of(item: str) -> int:
    """Returns the number in an item's folder name (`StepTarget.number`)."""
    return int(item.partition(".")[2] or 0)
