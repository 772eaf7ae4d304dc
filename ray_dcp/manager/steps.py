"""What the writer of a root does to its steps, one after the other: prepare, record, remove.

Runs on one rank, without torch and without threads; it knows no session. `manager` decides when;
the writer lease (`leases`) prevents that other processes do it at the same time.

Order of a save: info, then the commit of the checkpoint, which lies in the step's folder. Order of
a removal: the commit is revoked, then items, then what describes them. So a crash leaves a step
whole or not at all, and the next writer finds what else it leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.manifest import MAX_RECORD_BYTES, DeleteRecord, Manifest, record_key
from ray_dcp.format.names import TAGS, StepNames, check_tag, note_key, tag_key, tag_of
from ray_dcp.format.step_info import StepInfo, decode_info, encode_info, info_key, info_slot
from ray_dcp.io.records import Announced, read_slots, used_slots
from ray_dcp.manager.catalogue import Catalogue, Root, StepFound, look
from ray_dcp.manager.leases import Readers
from ray_dcp.manager.retention import RetentionPolicy, superfluous
from ray_dcp.runtime.garbage_collection import delete
from ray_dcp.runtime.tasks import new_attempt
from ray_dcp.store.storage import KeyMissingError, Storage

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


class Steps:
    """The steps of a root, as its writer sees them.

    Args:
        root: Where.
        names: Of step folders.
        order: Whether a step may be older than the newest.

    Attributes:
        catalogue: What was committed when it was last looked: it answers, and decides nothing.
        pending: Steps of which a save is under way.
        damaged: Steps that could not be loaded: they don't count, don't go, and may be saved again.
        leaving: Folders of which the removal is being decided.
        saved_last: The step that this process committed last: it stays.
    """

    def __init__(self, root: Root, names: StepNames, order: Order = "increasing") -> None:
        self.root = root
        self.names = names
        self.order = order
        self.catalogue = Catalogue()
        self.pending: set[int] = set()
        self.damaged: set[int] = set()
        self.leaving: frozenset[str] = frozenset()
        self.saved_last: int | None = None

    def look(self) -> Catalogue:
        """Returns what is committed, by a look at the storage. Changes nothing here.

        Raises:
            StorageError: It can't be read.
        """
        before = self.catalogue if self.catalogue.steps else None
        return look(self.root, self.names, before)

    @property
    def newest(self) -> int | None:
        """The newest step that is good or under way; None for none."""
        good = self.catalogue.steps.keys() - self.damaged
        return max({*good, *self.pending}, default=None)

    def check_step(self, step: int, *, replace: bool) -> None:
        """Checks that a step may be saved now.

        Args:
            step: Which.
            replace: It may take the place of one that is committed.

        Raises:
            InvalidRequestError: It is committed or under way already, or older than the newest.
        """
        if step in self.pending:
            raise InvalidRequestError(
                f"step {step} is being saved already; wait for it with join() before it is saved "
                f"again",
                step=step,
            )
        if step in self.damaged:
            return
        if step in self.catalogue.steps:
            if replace or self.order == "any":
                return
            name = self.names.name_of(step)
            raise InvalidRequestError(
                f"step {step} is committed already in {self.root.url}/{name}. Save the next step; "
                f"or give replace=True to save over it, atomically; or delete({step}) first",
                step=step,
            )
        newest = self.newest
        if self.order == "increasing" and newest is not None and step < newest:
            raise InvalidRequestError(
                f"step {step} is older than the newest one in {self.root.url}, {newest}; steps go "
                f"up. To go on from an earlier step, rewind({max(step - 1, 0)}) deletes those "
                f"after it; another run takes another root",
                step=step,
            )

    def place(self, step: int) -> StepTarget:
        """Returns where a step is saved.

        Raises:
            StorageError: The storage can't be listed.
        """
        name = self.names.name_of(step)
        storage = self.root.open(name)
        last = max(used_slots(storage), default=0)
        return StepTarget(step, name, last, _free_number(storage, last))

    def prepare(
        self, place: StepTarget, info: StepInfo, tags: Collection[str] = ()
    ) -> frozenset[str]:
        """Writes the info of a step, for the next commit in its folder.

        Tags that the step has stay, also when the commit replaces what had them: whoever gave them
        takes them away.

        Args:
            place: Of the step.
            info: Metrics, metadata and items.
            tags: That it gets.

        Returns:
            The tags that it did not have: they are taken away where there is no commit.

        Raises:
            StorageError: It could not be written.
        """
        self.root.open(place.name).write(info_key(place.last_slot), encode_info(info))
        had = self.tags_of(place.step) if place.last_slot else frozenset()
        for tag in sorted({*tags} - had):
            self.tag(place.step, tag)
        return frozenset(tags) - had

    def rewrite_info(self, found: StepFound, info: StepInfo) -> StepFound:
        """Writes the info of a committed step once more; returns the step with it.

        Raises:
            StorageError: It could not be written.
        """
        key = info_key(found.slot - 1)
        self.root.open(found.name).write(key, encode_info(info))
        return replace(found, created_s=info.created_s, info=info)

    def tags_of(self, step: int) -> frozenset[str]:
        """Returns the tags of a step, by a look at the storage.

        Raises:
            StorageError: It can't be listed.
        """
        keys = (entry.key for entry in self.root.shared.list(f"{TAGS}{step}."))
        return frozenset(tagged[1] for key in keys if (tagged := tag_of(key)) is not None)

    def note(self, found: StepFound) -> None:
        """Takes a step that was committed into the catalogue."""
        self.catalogue.add(found)
        self.damaged.discard(found.step)
        self.saved_last = found.step

    def tag(self, step: int, tag: str) -> None:
        """Gives a tag to a step.

        Raises:
            StorageError: It could not be written.
        """
        self.root.shared.write(tag_key(step, check_tag(tag)), b"")

    def untag(self, step: int, tag: str) -> None:
        """Takes a tag from a step; does nothing when it has none.

        Raises:
            StorageError: It could not be removed.
        """
        self.root.shared.delete([tag_key(step, check_tag(tag))])

    def superfluous(
        self, catalogue: Catalogue, policy: RetentionPolicy | None
    ) -> tuple[Going, ...]:
        """Returns the folders that may go: steps by the policy, and what was left by crashes.

        Only folders of steps older than the newest good one are named. Steps that could not be
        loaded neither count nor go: a read that failed is no proof of damage.

        Args:
            catalogue: What is committed.
            policy: What to keep; None for all steps.

        Raises:
            InvalidRequestError: The policy gives no usable answer.
        """
        if policy is None and not catalogue.leftovers:
            return ()
        facts = [one for one in catalogue.facts() if one.step not in self.damaged]
        if not facts:
            return ()
        newest = max(one.step for one in facts)
        protected = {*self.pending, newest if self.saved_last is None else self.saved_last}
        steps = (catalogue.steps[s] for s in superfluous(facts, policy, protected=protected))
        left = (
            Going(step, name, "")
            for name, step in catalogue.leftovers.items()
            if step < newest and step not in self.pending and step not in catalogue.steps
        )
        return (*map(going, steps), *left)

    def newer_than(self, step: int) -> list[Going]:
        """Returns the later steps, newest first.

        Raises:
            InvalidRequestError: One was not written by ray_dcp.
        """
        later = [found for number, found in self.catalogue.steps.items() if number > step]
        for found in later:
            self.check_deletable(found.step)
        return [going(found) for found in reversed(later)]

    def check_deletable(self, step: int) -> Going:
        """Returns a step after checking that it can be deleted.

        Raises:
            CheckpointNotFoundError: It is not committed.
            InvalidRequestError: It is being saved, or was not written by ray_dcp.
        """
        if step in self.pending:
            raise InvalidRequestError(
                f"step {step} is being saved; join() first, then delete it", step=step
            )
        found = self.catalogue.steps.get(step)
        if found is None:
            raise CheckpointNotFoundError(
                f"expected step {step} in {self.root.url}, found "
                f"{', '.join(map(str, list(self.catalogue.steps)[-8:])) or 'no step'}",
                step=step,
            )
        if not found.is_ours:
            raise InvalidRequestError(
                f"step {step} was written by another program into {found.name}; ray_dcp does not "
                f"delete it. Remove the directory yourself to delete it",
                step=step,
            )
        return going(found)

    def forget(self, going: Going) -> None:
        """Takes a step that was deleted out of the catalogue, unless it was saved again."""
        self.catalogue.leftovers.pop(going.name, None)
        known = self.catalogue.steps.get(going.step)
        if known is not None and (known.name, known.attempt) == (going.name, going.attempt):
            del self.catalogue.steps[going.step]
            self.damaged.discard(going.step)

    def remove_replaced_items(self, place: StepTarget) -> None:
        """Deletes the items of a step that its commit does not refer to any more.

        Raises:
            StorageError: Something is left.
        """
        found = self.catalogue.steps.get(place.step)
        if found is None or found.info is None:
            return
        storage = self.root.open(place.name)
        keys = [entry.key for entry in storage.list()]
        for item in sorted(_items_in(storage, keys) - {*found.info.items.values()}):
            # Why older ones alone: a later one belongs to a save that came after this one.
            if _begun_at(item) < place.number:
                remove_folder(self.root, f"{place.name}/{item}")


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
        removed: Callable[[Going], object] = lambda _: None,
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
        self._check()
        announced = [(one, self.announce(one)) for one in chosen]
        # Careful: all that protects a step is read here, by one listing, and none of it is known.
        still, found = look()
        for one, mark in announced:
            try:
                is_read = self.is_read(found.read_by.get(one.step, ()))
                if one not in still or is_read:
                    self.withdraw(mark)
                else:
                    self.remove(one, mark)
                if is_read:
                    left[one.name] = None
            except CheckpointError as error:
                left[one.name] = error
        return left

    def announce(self, going: Going) -> Announced:
        """Announces a deletion."""
        mark = Announced(going.step, new_attempt(), going.name)
        self._root.shared.write(mark.key, b"")
        return mark

    def withdraw(self, mark: Announced) -> None:
        """Takes an announcement back."""
        self._root.shared.delete([mark.key])

    def is_read(self, leases: Collection[str]) -> bool:
        """Tells whether one of these leases is held."""
        return any(self._readers.is_live(self._root.shared, key) for key in leases)

    def remove(self, going: Going, mark: Announced) -> None:
        """Removes a step whose deletion is announced.

        Raises:
            CheckpointExistsError: Something else is committed there by now, or it is protected.
            CheckpointError: It is not removed, or something is left.
        """
        try:
            remove_step(self._root, going, mark.attempt, self._check)
        except CheckpointExistsError:
            self.withdraw(mark)
            raise
        except CheckpointError:
            # Why: a delete record that is on its way may still arrive. Where that can't be ended
            # either, the announcement stays for whoever protects the step next.
            with suppress(CheckpointError):
                self._root.fence(f"a deletion of step {going.step} failed", going.step)
            raise
        self._removed(going)
        self._root.shared.delete([mark.key, note_key(going.step)])


def remove_step(root: Root, going: Going, attempt: str, check: Callable[[], object]) -> None:
    """Deletes what ray_dcp wrote into a step folder, all but the delete record.

    That record stays for good: without it, an attempt that has lain still since before could
    commit, or delete, what is saved there next.

    Args:
        root: Where.
        going: What was decided about; anything else is left alone.
        attempt: Under which the deletion is announced.
        check: Called right before the delete record is committed; raises what keeps the step.

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
    check()
    _delete(root, going.name, going.attempt, attempt)
    for item, seen in items.items():
        remove_folder(root, f"{going.name}/{item}", seen)
    storage.delete([key for key in keys if info_slot(key) is not None])


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


def _delete(root: Root, name: str, expected: str | None, attempt: str | None = None) -> None:
    target = root.below(name)
    try:
        report = delete(target, opener=root.opener, expected=expected, attempt=attempt)
    except CheckpointNotFoundError:
        return
    if report.warnings:
        raise StorageError(
            f"{target.url} is deleted, but its files are not: {'; '.join(report.warnings)}"
        )


def _standing_attempt(storage: Storage) -> str:
    decides = read_slots(storage, tolerant=True).decides
    is_commit = decides is not None and isinstance(decides.record, Manifest)
    return decides.record.attempt if decides is not None and is_commit else ""


def _free_number(storage: Storage, last_slot: int) -> int:
    """Returns a number for the folders of the next items: the first from `last_slot` on.

    Those of a committed step have a lower one, unless the step was copied: its items keep the
    names of their folders, and its records begin anew.

    Args:
        storage: Of the step's folder.
        last_slot: Highest slot in use there.
    """
    # Why not later infos: they are of saves that no record committed.
    slots = [info_slot(entry.key) for entry in storage.list("step-info-")] if last_slot else []
    earlier = (info_key(slot) for slot in slots if slot is not None and slot < last_slot)
    infos = _infos(storage, earlier)
    taken = {_begun_at(folder) for info in infos for folder in info.items.values()}
    number = last_slot
    while number in taken:
        number += 1
    return number


def _begun_at(item: str) -> int:
    """Returns the number in the name of an item's folder (`StepTarget.number`)."""
    return int(item.partition(".")[2] or 0)


def going(found: StepFound) -> Going:
    """Returns a step as it may go."""
    return Going(found.step, found.name, found.attempt if found.is_readable else None)


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
    for key in keys:
        # Suppressed: then an item is not removed, and `ray_dcp.collect` finds what a crash left.
        with suppress(KeyMissingError, DamagedCheckpointError):
            if info_slot(key) is not None:
                yield decode_info(storage.read(key, 0, MAX_RECORD_BYTES), key=key)
