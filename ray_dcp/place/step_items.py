"""The folders of a step's items in the folder of the step, as its infos name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.records import read_info
from ray_dcp.store.storage import Storage

ITEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of items."""

_FOLDER = re.compile(rf"(?P<item>{ITEM.pattern})(?:\.[1-9][0-9]{{0,17}})?")
"""See `StepTarget.folder_of`."""


def is_item_folder(name: str) -> bool:
    """Returns whether a folder may be that of an item, by its name."""
    return _FOLDER.fullmatch(name) is not None


def number_of(item: str) -> int:
    """Returns the number in an item's folder name (`StepTarget.number`)."""
    return int(item.partition(".")[2] or 0)


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
        if slash and (found := _FOLDER.fullmatch(folder)) and found["item"] in names
    }
