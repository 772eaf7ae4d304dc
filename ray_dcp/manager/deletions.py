"""Deletions of steps by the writer of a root: one at a time, or in passes of a thread.

A deletion revokes the commit, then deletes the items, then the infos. A crash therefore leaves a
step whole or not at all, and the next writer finds the remaining files. `Remover` deletes in a
thread beside the saves, in passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.events import contained
from ray_dcp.format.manifest import DeleteRecord, Manifest, record_key
from ray_dcp.format.names import damage_key, note_key
from ray_dcp.format.recorded_metrics import metrics_of
from ray_dcp.format.step_info import StepInfo, info_slot
from ray_dcp.io.announced_deletions import Announced, check_announced
from ray_dcp.io.records import read_slots, used_slots
from ray_dcp.io.reserve import freeing
from ray_dcp.manager.background import Background
from ray_dcp.manager.catalogue import (
    Catalogue,
    Root,
    StepFound,
)
from ray_dcp.manager.reader_leases import Readers
from ray_dcp.manager.step_target import StepTarget
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.collect import collect
from ray_dcp.place.delete import delete
from ray_dcp.place.step_deletion import (
    living_reader,
)
from ray_dcp.place.step_items import items_in, number_of
from ray_dcp.store.storage import Entry, Storage

logger = logging.getLogger(__name__)

NotDeleted = Mapping[str, CheckpointError | None]
"""Folders that were not deleted, by name, with the error; None if the step is being read."""


class Remover:
    """Runs deletion passes in the background.

    A deletion that fails, or whose step is being read, is tried again by the next pass: after the
    next save, and when the manager is closed.

    Args:
        url: Path or URL of the root, for messages.
        remove: Runs one pass; returns what was not deleted.
    """

    def __init__(self, url: str, remove: Callable[[], NotDeleted]) -> None:
        self._url = url
        self._remove = remove
        self._background = Background("ray_dcp removal")
        self._is_asked = self._is_closed = False
        self._left: NotDeleted = {}

    def wake(self) -> None:
        """Requests a pass, unless one is waiting to run."""
        if not self._is_asked:
            self._is_asked = True
            self._background.add(self._remove_once)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until everything that can be deleted now is deleted.

        Args:
            timeout_s: Timeout, in seconds; None waits forever.

        Returns:
            False if the timeout expired.
        """
        if self._left:
            self.wake()
        return self._background.wait(timeout_s)

    def close(self, timeout_s: float = bounds.DELETION_END_S) -> None:
        """Ends after the current pass, for which it waits up to a timeout."""
        self._is_closed = True
        self._background.wait(timeout_s)

    def _remove_once(self) -> None:
        self._is_asked = False
        if self._is_closed:
            return
        before, self._left = self._left, {}
        with contained(f"Deleting steps of {self._url}"):
            try:
                self._left = self._remove()
            except (CheckpointExistsError, InvalidRequestError) as error:
                # Why not left: a process that lost the lease must not delete.
                logger.info("Nothing is removed from %s any more: %s", self._url, error)
            except CheckpointError as error:
                self._left = {"": error}
        for name, why in self._left.items():
            if why is not None and name not in before:
                logger.warning(
                    "%s of %s could not be deleted: %s. The next save tries again",
                    name or "What retention lets go",
                    self._url,
                    why,
                )


@dataclass(frozen=True)
class Going:
    """A step folder that may be deleted, in the state in which that was decided."""

    step: int
    name: str
    attempt: str | None
    """The committed attempt; "" if nothing is committed, None if that is unknown."""


@dataclass(frozen=True)
class Deletions:
    """Deletes steps of a root. Each deletion is announced, and omitted if the step is protected."""

    _root: Root
    _readers: Readers
    """Checks whether readers are alive."""
    _check: Callable[[], object]
    """Raises if this process has lost the writer lease."""
    _removed: Callable[[Going], object]
    """Called with each deleted folder."""

    def reader_of(self, shared: Storage, lease: str) -> str:
        """Returns the holder of a reader lease as text; "" if it has ended."""
        if not self._readers.is_live(shared, lease):
            return ""
        return living_reader(shared, lease) or "this process"

    def remove_all(
        self,
        chosen: Collection[Going],
        look: Callable[[], tuple[Collection[Going], Catalogue]],
        *,
        stops: bool = False,
    ) -> dict[str, CheckpointError | None]:
        """Deletes step folders.

        Earlier knowledge decides only which deletions are announced. The protections of a step are
        read after that, and only the attempt that was decided about is deleted.

        Args:
            chosen: The folders that may be deleted, as far as known.
            look: Scans the storage; returns the folders that may be deleted, and the catalogue. If
                it raises, nothing is deleted.
            stops: Whether the first folder that can't be deleted ends it.

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
        try:
            still, found = look()
        except CheckpointError:
            with suppress(CheckpointError):
                shared.delete([mark.key for _, mark in announced])
            raise
        for number, (one, mark) in enumerate(announced):
            if stops and left:
                shared.delete([mark.key for _, mark in announced[number:]])
                break
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
            notes.append(damage_key(going.step, going.attempt))
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
        for item in sorted(items_in(storage, keys))
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
    for item in sorted(items_in(storage, keys) - {*info.items.values()}):
        # Why only older ones: a later one belongs to a later save.
        if number_of(item) < place.number:
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


def is_not_read(_: Entry) -> bool:
    """Returns that a file which does not share the bytes of a damaged one is not known damaged."""
    return False


def going(found: StepFound) -> Going:
    """Returns a step as a folder that may be deleted."""
    return Going(found.step, found.name, found.attempt or None)
