"""The steps of a root: where they are saved, and how they are deleted.

Runs on one rank, without torch and without threads; it knows no session. `root_writer` decides
when; the writer lease (`leases`) prevents that other processes do it at the same time.

Order of a save: info, then the commit of the checkpoint, which lies in the step's folder. Order of
a removal: the commit is revoked, then items, then what describes them. So a crash leaves a step
whole or not at all, and the next writer finds what else it leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
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
from ray_dcp.format.step_info import StepInfo, info_slot
from ray_dcp.io.records import Announced, check_announced, read_info, read_slots, used_slots
from ray_dcp.io.reserve import freeing
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
    """Where a step is saved."""

    step: int
    name: str
    """Of its folder."""
    last_slot: int
    """Highest slot in use there."""
    number: int
    """In the names of its items' folders; that of no item that is committed."""
    attempt: str = field(default_factory=new_attempt)
    """That makes the step, where it consists of items."""

    def folder_of(self, item: str) -> str:
        """Returns the folder of an item, below the step's; never one that a commit refers to."""
        return f"{item}.{self.number}" if self.number else item


@dataclass(frozen=True)
class Going:
    """A step folder that may go, as it was decided about."""

    step: int
    name: str
    attempt: str | None
    """That is committed there; "" where crashes left files, None where that is not known."""


class Deletions:
    """Deletes steps of a root: each is announced, then deleted unless something protects it.

    Args:
        root: Where.
        readers: Tells whether who reads a step still does.
        check: Raises when this process has lost the writer lease.
        removed: Called with what was deleted.
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
        """Removes what may go.

        What is known decides only which removals are announced. What protects a step is read after
        that, and what is deleted is the attempt that was decided about or nothing.

        Args:
            chosen: What may go as far as is known.
            look: Looks at the storage anew, and returns what may go and what is there.

        Returns:
            Folders that could not be removed now, by name, with why; None: somebody reads it.

        Raises:
            CheckpointExistsError: Another process has the writer lease.
            StorageError: The storage failed.
        """
        left: dict[str, CheckpointError | None] = {}
        shared = self._root.shared
        self._check()
        announced = [(one, Announced(one.step, new_attempt(), one.name)) for one in chosen]
        for _, mark in announced:
            freeing(shared, partial(shared.write, mark.key, b""))
        # Careful: all that protects a step is read here, and none of it is known.
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
        """Removes a step whose deletion is announced.

        Raises:
            CheckpointExistsError: Something else is committed there by now, or it is protected.
            CheckpointError: It is not removed, or something is left.
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
            # Why: a delete record that is on its way may still arrive. Where that can't be ended
            # either, the announcement stays for whoever protects the step next.
            with suppress(CheckpointError):
                self._root.fence(f"a deletion of step {going.step} failed", going.step)
            raise
        self._removed(going)
        self._root.shared.delete([mark.key, note_key(going.step)])


def remove_step(root: Root, going: Going, attempt: str, confirm: Callable[[], object]) -> None:
    """Deletes what ray_dcp wrote into a step folder, all but the delete record.

    That record stays for good: without it, an attempt that has lain still since before could
    commit, or delete, what is saved there next.

    Args:
        root: Where.
        going: What was decided about; anything else is left alone.
        attempt: Under which the deletion is announced.
        confirm: Called right before the delete record is created; raises what keeps the step.

    Raises:
        CheckpointExistsError: Something else is committed there by now, or the deletion was ended.
        StorageError: Files remain; the step is deleted all the same, or was not touched.
    """
    storage = root.open(going.name)
    keys = [entry.key for entry in storage.list()]
    # Careful: looked at before the record. Whoever saves the step after it uses other folders.
    items = {
        item: _standing_attempt(root.open(f"{going.name}/{item}"))
        for item in sorted(_items_in(storage, keys))
    }
    _delete(root, going.name, going.attempt, attempt=attempt, confirm=confirm)
    for item, seen in items.items():
        remove_folder(root, f"{going.name}/{item}", seen)
    storage.delete([key for key in keys if info_slot(key) is not None])


def remove_replaced_items(root: Root, place: StepTarget, info: StepInfo) -> None:
    """Deletes the items of a step that its commit does not refer to any more.

    Args:
        root: What the step lies in.
        place: Where it was saved.
        info: Of what is committed there.

    Raises:
        StorageError: Something is left.
    """
    storage = root.open(place.name)
    keys = [entry.key for entry in storage.list()]
    for item in sorted(_items_in(storage, keys) - {*info.items.values()}):
        # Why older ones alone: a later one belongs to a save that came after this one.
        if _begun_at(item) < place.number:
            remove_folder(root, f"{place.name}/{item}")


def remove_failed(root: Root, place: StepTarget, items: Iterable[str]) -> None:
    """Deletes what a save left that failed, as far as that works: the step is not committed.

    Args:
        root: What the step lies in.
        place: Where it was to be saved.
        items: Names of its items; none for a step of one state.
    """
    for item in items:
        with suppress(CheckpointError):
            remove_folder(root, f"{place.name}/{place.folder_of(item)}")
    with suppress(CheckpointError):
        collect(root.below(place.name), abort_unfinished=True, opener=root.opener)


def remove_folder(root: Root, name: str, expected: str | None = None) -> None:
    """Deletes a checkpoint with its records, for good: nothing is saved to that folder again.

    Args:
        root: What the folder lies in.
        name: Of the folder.
        expected: See `ray_dcp.delete`.

    Raises:
        StorageError: Something is left.
    """
    _delete(root, name, expected)
    remove_records(root, name)


def remove_records(root: Root, name: str) -> None:
    """Removes the records of a checkpoint that was deleted, where nothing is saved any more.

    Args:
        root: What the folder lies in.
        name: Of the folder.

    Raises:
        StorageError: Something is left.
    """
    storage = root.open(name)
    decides = read_slots(storage, tolerant=True).decides
    if decides is not None and isinstance(decides.record, DeleteRecord):
        slots = [slot for slot in used_slots(storage) if slot <= decides.slot]
        # Why from above: a folder that becomes empty is removed by the storage it lies in.
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
    """Returns what is committed; "" for nothing, None where that can't be read."""
    slots = read_slots(storage, tolerant=True)
    if slots.unreadable:
        return None
    decides = slots.decides
    is_commit = decides is not None and isinstance(decides.record, Manifest)
    return decides.record.attempt if decides is not None and is_commit else ""


def free_number(storage: Storage, last_slot: int) -> int:
    """Returns a number for the folders of the next items: the first from `last_slot` on.

    Those of a committed step have a lower one, unless the step was copied: its items keep the
    names of their folders, and its records begin anew. So none is taken that a folder has.

    Args:
        storage: Of the step's folder.
        last_slot: Highest slot in use there.
    """
    folders = {entry.key.partition("/")[0] for entry in storage.list()} if last_slot else set()
    taken = {_begun_at(folder) for folder in folders if _ITEM_FOLDER.fullmatch(folder)}
    number = last_slot
    while number in taken:
        number += 1
    return number


def _begun_at(item: str) -> int:
    """Returns the number in the name of an item's folder (`StepTarget.number`)."""
    return int(item.partition(".")[2] or 0)


def going(found: StepFound) -> Going:
    """Returns a step as it may go."""
    return Going(found.step, found.name, found.attempt or None)


def check_item_name(name: object) -> str:
    """Returns the name of an item after checking that it can be a folder.

    Raises:
        InvalidRequestError: It can't.
    """
    if not isinstance(name, str) or _ITEM.fullmatch(name) is None:
        raise InvalidRequestError(
            f"the name of an item must be 1 to 64 letters, digits, '_' or '-', as 'model', but is "
            f"{name!r}",
            key="items",
        )
    return name


def _items_in(storage: Storage, keys: Iterable[str]) -> set[str]:
    """Returns the folders of a step's items: those of the names in the step's infos.

    Any other folder belongs to the user, whatever it contains.

    Args:
        storage: Of the step's folder.
        keys: All that is there.
    """
    keys = list(keys)
    names = {name for info in _infos(storage, keys) for name in info.items}
    return {
        folder
        for folder, slash, _ in (key.partition("/") for key in keys)
        if slash and (found := _ITEM_FOLDER.fullmatch(folder)) and found["item"] in names
    }


def _infos(storage: Storage, keys: Iterable[str]) -> Iterator[StepInfo]:
    """Yields the infos among the keys of a step's folder."""
    for slot in map(info_slot, keys):
        # Suppressed: then an item is not removed, and `ray_dcp.collect` finds what a crash left.
        with suppress(DamagedCheckpointError):
            info = None if slot is None else read_info(storage, "", slot)
            if info is not None:
                yield info
