"""What the writer of a root does to its steps, one after the other: prepare, note, remove.

Runs on one rank, without torch and without threads; it knows no session. When something is done
is decided in `manager`; that others don't do it at the same time is the business of `writing`.

Order of a save: info, then the commit of the checkpoint, which lies in the step's folder. Order of
a removal: the commit is taken back, then items, then what tells about them. So a crash leaves a
step whole or not at all, and what else it leaves is found by the next writer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ray_dcp.errors import CheckpointNotFoundError, InvalidRequestError, StorageError
from ray_dcp.format.manifest import Manifest, record_key, slot_of
from ray_dcp.format.step_info import StepInfo, encode_info, info_key, info_slot
from ray_dcp.format.step_names import StepNames
from ray_dcp.manager.catalogue import Catalogue, look, look_at_step
from ray_dcp.manager.places import TAGS, Root, check_tag, note_key, tag_key
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.retention import RetentionPolicy, superfluous
from ray_dcp.runtime.deleting import delete
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.slots import read_slots, used_slots

__all__ = ["Order", "Place", "Steps", "check_item_name"]

Opener = Callable[[Target], Storage]
Order = Literal["increasing", "any"]

_ITEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Place:
    """Where a step is saved."""

    step: int
    name: str
    """Of its folder."""
    last_slot: int
    """Highest slot in use there."""

    def folder_of(self, item: str) -> str:
        """Returns the folder of an item, below the step's; never one that a commit refers to."""
        return f"{item}.{self.last_slot}" if self.last_slot else item


class Steps:
    """The steps of a root, as its writer sees them.

    Args:
        root: Where.
        names: Of step folders.
        opener: What opens storages.
        order: Whether a step may be older than the newest.

    Attributes:
        catalogue: What is committed; `refresh` looks again.
        pending: Steps of which a save is under way.
        damaged: Steps that could not be loaded: they don't count, and may be saved again.
        doomed: Folders that are being removed.
    """

    def __init__(
        self, root: Root, names: StepNames, opener: Opener, order: Order = "increasing"
    ) -> None:
        self.root = root
        self.names = names
        self.opener = opener
        self.order = order
        self.catalogue = Catalogue()
        self.pending: set[int] = set()
        self.damaged: set[int] = set()
        self.doomed: set[str] = set()

    def refresh(self) -> Catalogue:
        """Looks at the storage; returns what is committed.

        Raises:
            StorageError: It can't be read.
        """
        before = self.catalogue if self.catalogue.steps else None
        self.catalogue = look(self.root, self.names, self.opener, before)
        for name in self.doomed:
            self.doom(name)
        return self.catalogue

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
        name = self.names.name_of(step)
        if name in self.doomed:
            raise InvalidRequestError(
                f"step {step} is being deleted, and somebody still reads it; save it again when "
                f"that is over",
                step=step,
            )
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

    def place(self, step: int) -> Place:
        """Returns where a step is saved.

        Raises:
            StorageError: The storage can't be listed.
        """
        name = self.names.name_of(step)
        slots = used_slots(self.opener(self.root.below(name)))
        return Place(step, name, slots[-1] if slots else 0)

    def prepare(self, place: Place, info: StepInfo, tags: Collection[str] = ()) -> None:
        """Writes what is told about a step, for the commit that comes next to its folder.

        Args:
            place: Of the step.
            info: What is told.
            tags: That it gets; it loses those that it has.

        Raises:
            StorageError: It could not be written.
        """
        self.opener(self.root.below(place.name)).write(
            info_key(place.last_slot), encode_info(info)
        )  # fmt: skip
        had = self.catalogue.tags.get(place.step, frozenset())
        for tag in sorted({*tags} - had):
            self.tag(place.step, tag)
        for tag in sorted(had - {*tags}):
            self.untag(place.step, tag)

    def note(self, place: Place) -> bool:
        """Takes a step that was committed into the catalogue.

        Returns:
            Whether it is committed.

        Raises:
            StorageError: The storage can't be read.
        """
        found = look_at_step(self.root, place.name, place.step, self.opener)
        if found is None:
            return False
        self.catalogue.add(found)
        self.damaged.discard(place.step)
        return True

    def tag(self, step: int, tag: str) -> None:
        """Gives a tag to a step: retention then keeps it.

        Raises:
            StorageError: It could not be written.
        """
        self.opener(self.root.shared).write(tag_key(step, check_tag(tag)), b"")
        had = self.catalogue.tags.get(step, frozenset())
        self.catalogue.tags[step] = had | {tag}

    def untag(self, step: int, tag: str) -> None:
        """Takes a tag from a step; does nothing when it has none.

        Raises:
            StorageError: It could not be removed.
        """
        self.opener(self.root.shared).delete([tag_key(step, check_tag(tag))])
        self.catalogue.tags[step] = self.catalogue.tags.get(step, frozenset()) - {tag}

    def superfluous(
        self, policy: RetentionPolicy | None, protected: Collection[int] = ()
    ) -> tuple[str, ...]:
        """Returns the folders that may go: steps by the policy, and what was left by crashes.

        Only folders of steps older than the newest good one are named.

        Args:
            policy: What to keep; None for all steps.
            protected: Steps that stay whatever it says.

        Raises:
            InvalidRequestError: The policy gives no usable answer.
        """
        # What can't be read is neither counted nor deleted.
        if policy is None and not self.catalogue.leftovers:
            return ()
        facts = [one for one in self.catalogue.facts() if one.step not in self.damaged]
        if not facts:
            return ()
        newest = max(one.step for one in facts)
        going = superfluous(facts, policy, protected={*protected, *self.pending})
        if policy is not None:
            bad = {s for s in self.damaged if s < newest and not self.catalogue.tags.get(s)}
            going += tuple(sorted((bad & self._deletable()) - self.pending - {*protected}))
        left = [
            name
            for name, step in self.catalogue.leftovers.items()
            if step < newest and step not in self.pending and step not in self.catalogue.steps
        ]
        return (*(self.catalogue.steps[step].name for step in going), *left)

    def newer_than(self, step: int) -> list[str]:
        """Returns the folders of later steps, newest first.

        Raises:
            InvalidRequestError: One was not written by ray_dcp.
        """
        later = [found for number, found in self.catalogue.steps.items() if number > step]
        for found in later:
            self.check_deletable(found.step)
        return [found.name for found in reversed(later)]

    def check_deletable(self, step: int) -> str:
        """Returns the folder of a step after checking that it can be deleted.

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
                f"delete it. Remove the directory if you want it gone",
                step=step,
            )
        return found.name

    def remove(self, name: str, *, purge: bool = True) -> None:
        """Deletes what ray_dcp wrote into a step folder. May be repeated.

        Args:
            name: Of the folder.
            purge: Also the record that says so: the folder is gone. An attempt to save that step
                which has lain still all the time could then commit it; without, it can't.

        Raises:
            StorageError: Something is left; the step is gone all the same, or was not touched.
        """
        self._take_back(name)
        storage = self.opener(self.root.below(name))
        keys = [entry.key for entry in storage.list()]
        for item in _items_among(keys):
            self._take_back(f"{name}/{item}")
            self._purge(f"{name}/{item}")
        storage.delete([key for key in keys if info_slot(key) is not None])
        if purge:
            self._purge(name)
        step = self.names.step_of(name)
        shared = self.opener(self.root.shared)
        told = [entry.key for entry in shared.list(f"{TAGS}{step}.")]
        shared.delete(told if step is None else [*told, note_key(step)])

    def doom(self, name: str) -> None:
        """Notes that a folder is going to be removed: it counts no more.

        Args:
            name: Of the folder.
        """
        step = self.names.step_of(name)
        self.doomed.add(name)
        if step is None:
            return
        known = self.catalogue.steps.get(step)
        if known is not None and known.name == name:
            del self.catalogue.steps[step]
            self.damaged.discard(step)
            self.catalogue.tags.pop(step, None)
        self.catalogue.leftovers.pop(name, None)

    def remove_replaced_items(self, place: Place) -> None:
        """Deletes the items of a step that its commit does not refer to any more.

        Raises:
            StorageError: Something is left.
        """
        found = self.catalogue.steps.get(place.step)
        if found is None or found.row.info is None:
            return
        storage = self.opener(self.root.below(place.name))
        keys = [entry.key for entry in storage.list()]
        for item in sorted(_items_among(keys) - {*found.row.info.items.values()}):
            self._take_back(f"{place.name}/{item}")
            self._purge(f"{place.name}/{item}")

    def _deletable(self) -> set[int]:
        return {s for s, found in self.catalogue.steps.items() if found.is_ours}

    def _take_back(self, name: str) -> None:
        try:
            report = delete(self.root.below(name), opener=self.opener)
        except CheckpointNotFoundError:
            return
        if report.warnings:
            raise StorageError(
                f"{self.root.url}/{name} is deleted, but its files are not: "
                f"{'; '.join(report.warnings)}"
            )

    def _purge(self, name: str) -> None:
        """Removes the records of a folder of which nothing stands, the one that says so last."""
        storage = self.opener(self.root.below(name))
        found = read_slots(storage, tolerant=True)
        if found.decides is not None and isinstance(found.decides.record, Manifest):
            return  # saved again since
        slots = sorted(slot for e in storage.list("manifest-") if (slot := slot_of(e.key)))
        # Why from the root: a folder that becomes empty is removed by the storage it lies in.
        whole = self.opener(self.root.target)
        for slot in slots:
            whole.delete([f"{name}/{record_key(slot)}"])


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


def _items_among(keys: Iterable[str]) -> set[str]:
    """Returns the sub-folders in which records of saves lie."""
    found = set()
    for key in keys:
        folder, _, rest = key.partition("/")
        if rest and (slot_of(rest) is not None or rest.endswith(".distcp")):
            found.add(folder)
    return found
