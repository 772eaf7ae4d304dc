"""Places and deletes the steps of a root.

Runs on one rank, without torch, threads or sessions. `root_writer` decides when to delete; the
writer lease (`leases`) keeps other processes from deleting at the same time.

A save writes the info of the step, then commits its checkpoint. A deletion revokes the commit, then
deletes the items, then the infos. A crash therefore leaves a step whole or not at all, and the next
writer finds the remaining files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.manifest import DeleteRecord, Manifest, record_key
from ray_dcp.format.names import note_key
from ray_dcp.format.step_info import StepInfo, info_slot, metrics_of
from ray_dcp.io.records import (
    Announced,
    check_announced,
    freeing,
    read_info,
    read_slots,
    used_slots,
)
from ray_dcp.manager.catalogue import Catalogue, Root, StepFound
from ray_dcp.manager.leases import Readers
from ray_dcp.runtime.garbage_collection import collect, delete
from ray_dcp.runtime.tasks import new_attempt
from ray_dcp.store.storage import Storage

Order = Literal["increasing", "any"]

_ITEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ITEM_FOLDER = re.compile(rf"(?P<item>{_ITEM.pattern})(?:\.[1-9][0-9]{{0,17}})?")
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
    attempt: str = field(default_factory=new_attempt)
    """Attempt that commits the step, if it consists of named items."""

    def folder_of(self, item: str) -> str:
        """Returns the folder of an item in the step's folder; no commit refers to that folder."""
        return f"{item}.{self.number}" if self.number else item


@dataclass(frozen=True)
class Going:
    """A step folder that may be deleted, in the state in which that was decided."""

    step: int
    name: str
    attempt: str | None
    """The committed attempt; "" if nothing is committed, None if that is unknown."""


class Deletions:
    """Deletes steps of a root. Each deletion is announced, and omitted if the step is protected.

    Args:
        root: The root.
        readers: Checks whether readers are alive.
        check: Raises if this process has lost the writer lease.
        removed: Called with each deleted folder.
    """

    def __init__(
        self,
        root: Root,
        readers: Readers,
        check: Callable[[], object],
        removed: Callable[[Going], object],
    ) -> None:
        self._root = root
        self._readers = readers
        self._check = check
        self._removed = removed

    def remove_all(
        self, chosen: Collection[Going], look: Callable[[], tuple[Collection[Going], Catalogue]]
    ) -> dict[str, CheckpointError | None]:
        """Deletes step folders.

        Earlier knowledge decides only which deletions are announced. The protections of a step are
        read after that, and only the attempt that was decided about is deleted.

        Args:
            chosen: The folders that may be deleted, as far as known.
            look: Scans the storage; returns the folders that may be deleted, and the catalogue.

        Returns:
            Folders that were not deleted, by name, with the error; None if the step is being read.

        Raises:
            CheckpointExistsError: Another process has taken the writer lease.
            StorageError: The storage failed.
        """
        left: dict[str, CheckpointError | None] = {}
        shared = self._root.shared
        self._check()
        announced = [(one, Announced(one.step, new_attempt(), one.name)) for one in chosen]
        for _, mark in announced:
            freeing(shared, partial(shared.write, mark.key, b""))
        # Careful: all protections are read here; none may be remembered from before.
        still, found = look()
        for one, mark in announced:
            try:
                leases = found.read_by.get(one.step, ())
                is_read = any(self._readers.is_live(shared, key) for key in leases)
                if one in still and not is_read:
                    self._remove(one, mark)
                else:
                    shared.delete([mark.key])
                if is_read:
                    left[one.name] = None
            except CheckpointError as error:
                left[one.name] = error
        return left

    def _confirm(self, mark: Announced) -> None:
        self._check()
        check_announced(self._root.shared, mark)

    def _remove(self, going: Going, mark: Announced) -> None:
        """Deletes a step whose deletion is announced.

        Raises:
            CheckpointExistsError: Something else is committed in the folder, or the step is
                protected.
            CheckpointError: The step is not deleted, or files remain.
        """
        try:
            freeing(
                self._root.shared,
                lambda: remove_step(self._root, going, mark.attempt, lambda: self._confirm(mark)),
            )
        except CheckpointExistsError:
            self._root.shared.delete([mark.key])
            raise
        except CheckpointError:
            # Why: the delete record may still arrive. If the deletion can't be aborted now, the
            # announcement stays, so that the next protection of the step aborts it.
            with suppress(CheckpointError):
                self._root.fence(f"a deletion of step {going.step} failed", going.step)
            raise
        self._removed(going)
        shared = self._root.shared
        # Why only then: the note belongs to a committed step, which may be in another folder.
        notes = [note_key(going.step)] if going.attempt else []
        if going.attempt:
            notes += [e.key for e in shared.list(metrics_of(going.step, going.attempt))]
        shared.delete([mark.key, *notes])


def remove_step(root: Root, going: Going, attempt: str, confirm: Callable[[], object]) -> None:
    """Deletes everything that ray_dcp wrote into a step folder, except the delete record.

    The delete record stays forever: without it, an attempt that was paused since before the
    deletion could commit, or delete what is saved there later.

    Args:
        root: The root.
        going: The folder in the state that was decided about; any other state is left alone.
        attempt: Attempt under which the deletion is announced.
        confirm: Called immediately before the delete record is created; raises if the step is
            protected.

    Raises:
        CheckpointExistsError: Something else is committed in the folder, or the deletion was
            aborted.
        StorageError: Files remain; the step is deleted or unchanged.
    """
    storage = root.open(going.name)
    keys = [entry.key for entry in storage.list()]
    # Careful: read before the record is created. Later saves of the step use other folders.
    items = {
        item: _standing_attempt(root.open(f"{going.name}/{item}"))
        for item in sorted(_items_in(storage, keys))
    }
    _delete(root, going.name, going.attempt, attempt=attempt, confirm=confirm)
    for item, seen in items.items():
        remove_folder(root, f"{going.name}/{item}", seen)
    storage.delete([key for key in keys if info_slot(key) is not None])


def remove_replaced_items(root: Root, place: StepTarget, info: StepInfo) -> None:
    """Deletes the items of a step to which its commit no longer refers.

    Args:
        root: The root.
        place: The place to which the step was saved.
        info: Info of the committed step.

    Raises:
        StorageError: Files remain.
    """
    storage = root.open(place.name)
    keys = [entry.key for entry in storage.list()]
    for item in sorted(_items_in(storage, keys) - {*info.items.values()}):
        # Why only older ones: a later one belongs to a later save.
        if _begun_at(item) < place.number:
            remove_folder(root, f"{place.name}/{item}")


def remove_failed(root: Root, place: StepTarget, items: Iterable[str]) -> None:
    """Deletes the files of a failed save as far as possible. The step is not committed.

    Args:
        root: The root.
        place: The place to which the step should have been saved.
        items: Names of its items; empty for a step of one state.
    """
    for item in items:
        with suppress(CheckpointError):
            remove_folder(root, f"{place.name}/{place.folder_of(item)}")
    with suppress(CheckpointError):
        collect(root.below(place.name), abort_unfinished=True, opener=root.opener)


def remove_folder(root: Root, name: str, expected: str | None = None) -> None:
    """Deletes a checkpoint with its records. Nothing is ever saved to that folder again.

    Args:
        root: The root.
        name: Name of the folder.
        expected: See `ray_dcp.delete`.

    Raises:
        StorageError: Files remain.
    """
    _delete(root, name, expected)
    storage = root.open(name)
    decides = read_slots(storage, tolerant=True).decides
    if decides is not None and isinstance(decides.record, DeleteRecord):
        slots = [slot for slot in used_slots(storage) if slot <= decides.slot]
        # Why through the root: its storage removes a folder that becomes empty.
        root.storage.delete([f"{name}/{record_key(slot)}" for slot in slots])


def _delete(root: Root, name: str, expected: str | None, **announced: Any) -> None:
    target = root.below(name)
    try:
        report = delete(target, opener=root.opener, expected=expected, **announced)
    except CheckpointNotFoundError:
        return
    if report.warnings:
        raise StorageError(
            f"{target.url} is deleted, but its files are not: {'; '.join(report.warnings)}"
        )


def _standing_attempt(storage: Storage) -> str | None:
    """Returns the committed attempt; "" if there is none, None if that can't be read."""
    slots = read_slots(storage, tolerant=True)
    if slots.unreadable:
        return None
    decides = slots.decides
    is_commit = decides is not None and isinstance(decides.record, Manifest)
    return decides.record.attempt if decides is not None and is_commit else ""


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
    taken = {_begun_at(folder) for folder in folders if _ITEM_FOLDER.fullmatch(folder)}
    number = last_slot
    while number in taken:
        number += 1
    return number


def _begun_at(item: str) -> int:
    """Returns the number in an item's folder name (`StepTarget.number`)."""
    return int(item.partition(".")[2] or 0)


def going(found: StepFound) -> Going:
    """Returns a step as a folder that may be deleted."""
    return Going(found.step, found.name, found.attempt or None)


def check_item_name(name: object) -> str:
    """Returns the name of an item after checking that it can name a folder.

    Raises:
        InvalidRequestError: The name is invalid.
    """
    if not isinstance(name, str) or _ITEM.fullmatch(name) is None:
        raise InvalidRequestError(
            f"the name of an item must be 1 to 64 letters, digits, '_' or '-', as 'model', but is "
            f"{name!r}",
            key="items",
        )
    return name


def _items_in(storage: Storage, keys: Iterable[str]) -> set[str]:
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
