"""The catalogue of a root: which steps are committed, by what is on storage.

One listing has the highest slot of every step folder. What an earlier look found in a folder holds
as long as that slot stays the same, so its records are not read again.

`Root` has the names of a managed root: one folder per step, and `.manager` for what is shared.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.processes import collector_paused
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import MAX_RECORD_BYTES, DeleteRecord, Manifest, slot_of
from ray_dcp.format.names import CATALOGUE, READING, SHARED_FOLDER, StepNames, tags_in
from ray_dcp.format.step_info import (
    CatalogueRow,
    decode_catalogue,
    encode_catalogue,
    info_slot,
)
from ray_dcp.io.records import fence, highest_record, info_below, read_slots
from ray_dcp.manager.retention import StepFacts
from ray_dcp.store.location import url_below
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage, read_if_there
from ray_dcp.view.run_listing import PART_NAME, folders_in, look_into

FOLDER = SHARED_FOLDER
Opener = Callable[[Target], Storage]


@dataclass(frozen=True)
class Root:
    """A directory of step folders, and how to reach it."""

    target: Target
    """Absolute."""
    opener: Opener = open_storage
    """Opens the storage of a target."""

    @property
    def url(self) -> str:
        """Path or URL."""
        return self.target.url

    def below(self, name: str) -> Target:
        """Returns the target of a folder of the root."""
        # Why replaced: with the options, or the ready filesystem, of the root.
        return replace(self.target, url=url_below(self.url, name))

    def open(self, name: str) -> Storage:
        """Returns the storage of a folder of the root."""
        return self.opener(self.below(name))

    @property
    def storage(self) -> Storage:
        """The storage of the root itself."""
        return self.opener(self.target)

    @property
    def shared(self) -> Storage:
        """The storage of what managers share."""
        return self.open(FOLDER)

    def fence(self, reason: str, step: int | None) -> str:
        """Ends the deletions that are announced, of one step or of all; see `io.records.fence`.

        Raises:
            StorageError: The storage failed; some may still be committed.
        """
        return fence(self.shared, self.open, reason, step)


_OURS = re.compile(r"__\d+_\d+\..+\.distcp")
_LEASE = re.compile(rf"{READING}(\d{{1,18}})\..+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFound(CatalogueRow):
    """A step that is committed, with what its folder holds."""

    step: int = field(kw_only=True)
    is_ours: bool = True
    """A save of ray_dcp; False: stock DCP's, which is read and never deleted."""
    is_known: bool = True
    """False: its newest record, or what was told of it, can't be read: retention decides nothing
    about it."""

    def facts(self, tags: frozenset[str]) -> StepFacts:
        """Returns what a retention policy may look at."""
        return replace(self._facts, tags=tags) if tags else self._facts

    # Why kept: retention looks at all steps after each save, and there may be 10,000.
    @cached_property
    def _facts(self) -> StepFacts:
        metrics = {} if self.info is None else self.info.metrics
        return StepFacts(step=self.step, created_s=self.created_s, metrics=metrics)


@dataclass(frozen=True)
class _Folder:
    """A folder in which something of ours lies; nothing is committed but by its records."""

    step: int
    name: str
    last: int = 0
    """Highest slot in use; 0: no record has to be read."""
    infos: Sequence[int | None] = ()
    """Slots of its infos."""
    is_told: bool = False
    """An earlier look could not read it either, and said so."""


@dataclass
class Catalogue:
    """What one look at a root has found."""

    steps: dict[int, StepFound] = field(default_factory=dict)
    """Committed ones, ascending."""
    folders: dict[str, StepFound] = field(default_factory=dict)
    """The same by the names of their folders, with those that are left aside: a step may be in two
    folders."""
    tags: dict[int, frozenset[str]] = field(default_factory=dict)
    leftovers: dict[str, int] = field(default_factory=dict)
    """Step folders of ours, by name, where nothing is committed and files are left."""
    read_by: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the leases on a step, in the shared folder."""
    num_read: int = 0
    """Of how many folders records had to be read."""

    def facts(self, *, known: bool = True) -> list[StepFacts]:
        """Returns the facts of the steps that retention decides about; or of those it can't."""
        return [
            found.facts(self.tags.get(step, frozenset()))
            for step, found in self.steps.items()
            if found.is_ours and found.is_known is known
        ]

    def add(self, found: StepFound) -> None:
        """Adds a step that was committed."""
        self.steps = dict(sorted({**self.steps, found.step: found}.items()))
        self.folders[found.name] = found
        self.leftovers.pop(found.name, None)


def look(root: Root, names: StepNames, before: Catalogue | None = None) -> Catalogue:
    """Returns what is committed in a root.

    Args:
        root: Where.
        names: Which folders are steps.
        before: An earlier look; what has not changed since is not read again.

    Returns:
        Empty where nothing is.

    Raises:
        StorageError: The storage can't be listed or read.

    Complexity:
        One listing; one or two small reads for each step that neither `before` nor the catalogue
        file knows.
    """
    known = _published(root, names) if before is None else before.folders
    found = look_at_folders(root, names.step_of, known)
    for one in found.folders.values():
        found.steps[one.step] = _preferred(found.steps.get(one.step), one, names)
    found.steps = dict(sorted(found.steps.items()))
    return found


def write_catalogue(root: Root, catalogue: Catalogue) -> None:
    """Writes the catalogue file, so that the next process need not read every step's records.

    Only the writer of a root does. Nothing depends on it: a row is used as long as the folder that
    it lists has the same records.

    Raises:
        StorageError: It could not be written.
    """
    rows = [one for one in catalogue.steps.values() if one.is_ours and one.is_known]
    root.shared.write(CATALOGUE, encode_catalogue(rows))


def _published(root: Root, names: StepNames) -> dict[str, StepFound]:
    """Returns what the catalogue file has about folders; nothing where it can't be read."""
    try:
        data = read_if_there(root.shared, CATALOGUE, MAX_RECORD_BYTES)
        rows = [] if data is None else decode_catalogue(data)
    except DamagedCheckpointError as error:
        logger.info("The catalogue of %s is not used: %s", root.url, error)
        return {}
    return {
        row.name: StepFound(**vars(row), step=step)
        for row in rows
        if (step := names.step_of(row.name)) is not None
    }


# Why: all that a long run makes here stays, and to look for garbage in it takes half the time.
@collector_paused()
def look_at_folders(
    root: Root, step_of: Callable[[str], int | None], known: Mapping[str, StepFound]
) -> Catalogue:
    """Returns what is in the step folders of a root, whether or not two are of one step.

    Args:
        root: Where.
        step_of: Gives the step of a folder; None for one that is none.
        known: From an earlier look, by name.

    Returns:
        A catalogue without `steps`.

    Raises:
        StorageError: The storage can't be listed or read.
    """
    storage = root.storage
    folders = folders_in(storage)
    folders.pop("", None)
    shared = folders.pop(FOLDER, [])
    found = Catalogue(tags=tags_in(shared))
    for key in shared:
        lease = _LEASE.fullmatch(key)
        if lease is not None:
            is_read = int(lease[1])
            found.read_by[is_read] = (*found.read_by.get(is_read, ()), key)
    numbered = ((step_of(name), name) for name in sorted(folders))
    looked = [
        _look_into(step, name, folders[name], known) for step, name in numbered if step is not None
    ]
    found.num_read = _read_all(looked, root, storage)
    for one in looked:
        if isinstance(one, StepFound):
            found.folders[one.name] = one
        elif one is not None:
            found.leftovers[one.name] = one.step
    return found


def look_at_step(root: Root, name: str, step: int) -> StepFound | None:
    """Returns what is committed in one step folder; None when nothing is.

    Args:
        root: Where.
        name: Of the folder.
        step: Its number.

    Raises:
        StorageError: The storage can't be listed or read.
    """
    keys = [entry.key for entry in root.open(name).list()]
    looked = [_look_into(step, name, keys, {})]
    _read_all(looked, root, root.storage)
    return looked[0] if isinstance(looked[0], StepFound) else None


def _look_into(
    step: int, name: str, keys: Iterable[str], known: Mapping[str, StepFound]
) -> StepFound | _Folder | None:
    """Returns a folder's entry, by the names in it and what is known of it."""
    # Why so plainly: this runs 10,000 times when a long run is opened.
    last, infos, tables, is_ours, is_stock = 0, [], [], False, False
    for key in keys:
        if key.startswith("manifest-"):
            last = max(last, slot_of(key) or 0)
        elif key.startswith("step-info-"):
            infos.append(info_slot(key))
        elif key.endswith(".distcp"):
            is_ours = is_ours or _OURS.fullmatch(key.rpartition("/")[2]) is not None
        elif key.endswith(".safetensors"):
            is_ours = is_ours or PART_NAME.fullmatch(key.rpartition("/")[2]) is not None
        elif key.startswith("chunks."):
            tables.append(key)
        elif key == ".metadata":
            is_stock = True
    found = known.get(name)
    # Why the attempt: a folder that was removed and is saved to again begins at slot 1 again.
    if (
        found is not None
        and found.is_known
        and found.attempt
        and found.last_slot == last
        and any(found.attempt in table for table in tables)
    ):
        return found
    # Why only then: a commit has a chunk table, so that of a folder of nothing but records, as a
    # deletion leaves it, none has to be read.
    if last and (is_ours or is_stock or infos or tables):
        return _Folder(step, name, last, infos, found is not None and not found.is_known)
    if is_stock and not is_ours:
        return StepFound(name, step=step, is_ours=False)
    return _Folder(step, name) if is_ours or infos else None


def _read_all(looked: list[StepFound | _Folder | None], root: Root, storage: Storage) -> int:
    """Puts what is committed in folders in their place; returns of how many records were read."""

    def read(index: int) -> None:
        folder = looked[index]
        if isinstance(folder, _Folder):
            looked[index] = _read(folder, root, storage)

    unread = [n for n, one in enumerate(looked) if isinstance(one, _Folder) and one.last]
    look_into(storage, unread, read)
    return len(unread)


def _read(folder: _Folder, root: Root, storage: Storage) -> StepFound | _Folder:
    step, name, last = folder.step, folder.name, folder.last
    level = logging.INFO if folder.is_told else logging.WARNING
    stays = "so that the step stays and does not count for retention"
    try:
        slot, record = _standing(storage, root, name, last)
    except StorageError:
        raise
    except CheckpointError as error:
        logger.log(
            level, "What is committed in %s/%s is not known, %s: %s", root.url, name, stays, error
        )
        return StepFound(name, last, step=step, is_known=False)
    if not isinstance(record, Manifest):
        return folder
    info = None
    try:
        info = info_below(storage, name, folder.infos, slot)
        # Why: an info that was listed and is gone is of a step that is being replaced or removed.
        is_known = info is not None or not any(
            one is not None and one < slot for one in folder.infos
        )
    except DamagedCheckpointError as error:
        logger.log(level, "Metrics in %s/%s can't be read, %s: %s", root.url, name, stays, error)
        is_known = False
    created_s = record.created_s if info is None else info.created_s
    return StepFound(
        name, last, slot, record.attempt, created_s, info, step=step, is_known=is_known
    )


def _preferred(known: StepFound | None, other: StepFound, names: StepNames) -> StepFound:
    """Returns the one of two folders of one step that is named as the manager names it."""
    if known is None:
        return other
    chosen = known if known.name == names.name_of(known.step) else other
    left = other if chosen is known else known
    logger.warning(
        "%s and %s are both step %d: %s is left alone",
        chosen.name,
        left.name,
        known.step,
        left.name,
    )
    return chosen


def _standing(
    storage: Storage, root: Root, name: str, last: int
) -> tuple[int, Manifest | DeleteRecord | None]:
    """Returns what decides in a folder: nearly always the record in the highest slot."""
    record = highest_record(storage, name, last)
    if record is not None:
        return last, record
    decides = read_slots(root.open(name)).decides
    return (0, None) if decides is None else (decides.slot, decides.record)
