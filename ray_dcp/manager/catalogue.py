"""The catalogue of a root: which steps are committed, according to the storage.

`look` scans the storage: one listing shows the highest record slot of every step folder. Records of
a folder are read again only if that slot has changed since an earlier scan.

`Root` is a directory of step folders. Its folder `.manager` holds what all managers share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.processes import collector_paused
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import Manifest, slot_of
from ray_dcp.format.names import CATALOGUE, SHARED_FOLDER, StepNames
from ray_dcp.format.step_info import CatalogueRow, encode_catalogue, info_slot
from ray_dcp.io.announced_deletions import fence
from ray_dcp.io.records import highest_record, info_below, read_slots
from ray_dcp.manager.retention import Order, StepFacts, Trust, age_in
from ray_dcp.store.location import url_below
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.view.run_listing import OUR_FILE, folders_in, look_into
from ray_dcp.view.shared_files import SharedFiles, read_catalogue_rows

FOLDER = SHARED_FOLDER
Opener = Callable[[Target], Storage]


@dataclass(frozen=True)
class Root:
    """A directory of step folders, and how to access it."""

    target: Target
    """Absolute path or URL, with options."""
    opener: Opener = open_storage
    """Opens the storage of a target."""

    @property
    def url(self) -> str:
        """Path or URL."""
        return self.target.url

    def below(self, name: str) -> Target:
        """Returns the target of a folder of the root, with the root's options or filesystem."""
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
        """The storage of the folder that all managers share."""
        return self.open(FOLDER)

    def fence(self, reason: str, step: int | None) -> str:
        """Aborts the announced deletions of one step, or of all steps; see `io.records.fence`.

        Raises:
            StorageError: The storage failed; some deletions may still be committed.
        """
        return fence(self.shared, self.open, reason, step)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFound(CatalogueRow):
    """A committed step, with what its folder holds."""

    step: int = field(kw_only=True)
    is_ours: bool = True
    """Whether ray_dcp saved it. Checkpoints of stock DCP are read and never deleted."""
    is_known: bool = True
    """False if its newest record or its info can't be read, so that retention must not decide about
    it."""

    def facts(self, tags: frozenset[str], recorded: Mapping[str, float]) -> StepFacts:
        """Returns the facts by which a retention policy decides."""
        facts = replace(self._step_facts, tags=tags) if tags else self._step_facts
        return replace(facts, metrics={**facts.metrics, **recorded}) if recorded else facts

    # Why cached: retention evaluates all steps after each save, and there may be 10,000.
    @cached_property
    def _step_facts(self) -> StepFacts:
        metrics = {} if self.info is None else self.info.metrics
        return StepFacts(
            step=self.step, created_s=self.created_s, metrics=metrics, order_s=self.order_s
        )


@dataclass(frozen=True)
class _Folder:
    """A step folder with files of ray_dcp; only its records show whether a step is committed."""

    step: int
    name: str
    last: int = 0
    """Highest slot in use; 0 if no record has to be read."""
    infos: Sequence[int | None] = ()
    """Slots of its infos."""
    was_warned: bool = False
    """Whether an earlier scan could not read it, and logged that."""


@dataclass
class Catalogue:
    """The result of one scan of a root."""

    steps: dict[int, StepFound] = field(default_factory=dict)
    """Committed steps, ascending."""
    folders: dict[str, StepFound] = field(default_factory=dict)
    """Committed steps by folder name. If a step has two folders, `steps` has one of them."""
    tags: Mapping[int, frozenset[str]] = field(default_factory=dict)
    recorded: Mapping[tuple[int, str], Mapping[str, float]] = field(default_factory=dict)
    """Metrics that were recorded after the save, by step and attempt."""
    leftovers: dict[str, int] = field(default_factory=dict)
    """Step numbers of folders, by name, in which ray_dcp left files but committed nothing."""
    read_by: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the reader leases on each step, in the shared folder."""
    marks: frozenset[tuple[int, str]] = frozenset()
    """Step and attempt of each damage mark."""
    num_read: int = 0
    """Number of folders whose records were read."""

    def oldest_first(self, order: Order) -> list[StepFound]:
        """Returns the committed steps, oldest first; see `age_in`."""
        return sorted(self.steps.values(), key=age_in(order))

    def facts(self, *, known: bool = True) -> list[StepFacts]:
        """Returns the facts of the steps about which retention decides; or must not decide."""
        return [
            found.facts(self.tags.get(step, frozenset()), self.recorded_of(found))
            for step, found in self.steps.items()
            if found.is_ours and found.is_known is known
        ]

    @property
    def damaged(self) -> set[int]:
        """Committed steps that a process has marked as damaged."""
        return {
            step
            for step, attempt in self.marks
            if step in self.steps and self.steps[step].attempt == attempt
        }

    def recorded_of(self, found: StepFound) -> Mapping[str, float]:
        """Returns the metrics of a step that were recorded after its save."""
        return self.recorded.get((found.step, found.attempt), {})

    def metrics_of(self, found: StepFound) -> Mapping[str, float]:
        """Returns all metrics of a step."""
        return found.facts(frozenset(), self.recorded_of(found)).metrics

    def trusted(self, trust: Trust, order: Order) -> list[StepFound]:
        """Returns the trusted steps, oldest first.

        Raises:
            CheckpointError: The function of `trust` raised an error.
        """
        return [one for one in self.oldest_first(order) if self.is_trusted(one, trust)]

    def is_trusted(self, found: StepFound, trust: Trust) -> bool:
        """Returns whether a step is trusted.

        Raises:
            CheckpointError: The function of `trust` raised an error.
        """
        # Why: a function can't know that the metrics of a step could not be read.
        if not trust.name and not found.is_known:
            return False
        tags = self.tags.get(found.step, frozenset())
        return bool(trust.verdict(found.facts(tags, self.recorded_of(found))))

    def add(self, found: StepFound) -> None:
        """Adds a step that was committed."""
        self.steps = dict(sorted({**self.steps, found.step: found}.items()))
        self.folders[found.name] = found
        self.leftovers.pop(found.name, None)


# Why paused: a scan creates only objects that stay, and the garbage collector would take half of
# its time.
@collector_paused()
def look(root: Root, names: StepNames, before: Catalogue | None = None) -> Catalogue:
    """Scans a root, and returns what is committed; an empty catalogue if there is no root.

    Args:
        root: The directory.
        names: Which folders are steps.
        before: Result of an earlier scan; unchanged folders are not read again.

    Raises:
        StorageError: The storage can't be listed or read.

    Complexity:
        One listing; one or two small reads for each step that is neither in `before` nor in the
        catalogue file.
    """
    storage = root.storage
    folders = folders_in(storage)
    folders.pop("", None)
    keys = folders.pop(FOLDER, [])
    known = before.folders if before is not None else _read_known(root, names, keys)
    shared = SharedFiles.of(keys)
    found = Catalogue(
        tags=shared.tags, recorded=shared.recorded, marks=shared.marks, read_by=shared.read_by
    )
    numbered = ((names.step_of(name), name) for name in sorted(folders))
    looked = [
        _look_into(step, name, folders[name], known) for step, name in numbered if step is not None
    ]
    found.num_read = _read_all(looked, root, storage)
    for one in looked:
        if isinstance(one, StepFound):
            found.folders[one.name] = one
            found.steps[one.step] = _preferred(found.steps.get(one.step), one, names)
        elif one is not None:
            found.leftovers[one.name] = one.step
    found.steps = dict(sorted(found.steps.items()))
    return found


def look_at_step(root: Root, name: str, step: int) -> StepFound | None:
    """Scans one step folder; returns the committed step, or None if nothing is committed.

    Args:
        root: The directory.
        name: Name of the folder.
        step: Number of the step.

    Raises:
        StorageError: The storage can't be listed or read.
    """
    keys = [entry.key for entry in root.open(name).list()]
    looked = [_look_into(step, name, keys, {})]
    _read_all(looked, root, root.storage)
    return looked[0] if isinstance(looked[0], StepFound) else None


def write_catalogue(root: Root, catalogue: Catalogue) -> None:
    """Writes the catalogue file, which saves the next process from reading every step's records.

    Only the writer of a root calls it. The file is a cache: a row is used only if the folder's
    records are those that it was made from.

    Raises:
        StorageError: The file could not be written.
    """
    rows = [one for one in catalogue.steps.values() if one.is_ours and one.is_known]
    root.shared.write(CATALOGUE, encode_catalogue(rows))


def _read_known(root: Root, names: StepNames, keys: Collection[str]) -> dict[str, StepFound]:
    """Returns the steps in the catalogue file, by folder."""
    rows = read_catalogue_rows(root.shared, "", keys)
    return {
        name: StepFound(**vars(row), step=step)
        for name, row in rows.items()
        if (step := names.step_of(name)) is not None
    }


def _look_into(
    step: int, name: str, keys: Iterable[str], known: Mapping[str, StepFound]
) -> StepFound | _Folder | None:
    """Returns the entry of a folder, by the names of its files and by an earlier scan."""
    # Why so plain: this runs 10,000 times when a long run is opened.
    last, infos, tables, is_ours, is_stock = 0, [], [], False, False
    for key in keys:
        if key.startswith("manifest-"):
            last = max(last, slot_of(key) or 0)
        elif key.startswith("step-info-"):
            infos.append(info_slot(key))
        elif key.endswith(".distcp"):
            is_ours = is_ours or OUR_FILE.fullmatch(key.rpartition("/")[2]) is not None
        elif key.startswith("chunks."):
            tables.append(key)
        elif key == ".metadata":
            is_stock = True
    found = known.get(name)
    # Why the attempt: in a folder that was removed and saved to again, slots begin at 1 again.
    if (
        found is not None
        and found.is_known
        and found.attempt
        and found.last_slot == last
        and any(found.attempt in table for table in tables)
    ):
        return found
    # Why only then: a commit has a chunk table. A folder that holds nothing but records, as a
    # deletion leaves it, needs no read.
    if last and (is_ours or is_stock or infos or tables):
        return _Folder(step, name, last, infos, found is not None and not found.is_known)
    if is_stock and not is_ours:
        return StepFound(name, step=step, is_ours=False)
    return _Folder(step, name) if is_ours or infos else None


def _read_all(looked: list[StepFound | _Folder | None], root: Root, storage: Storage) -> int:
    """Replaces folders by the committed steps in them; returns the number of folders read."""

    def read(index: int) -> None:
        folder = looked[index]
        if isinstance(folder, _Folder):
            looked[index] = _read(folder, root, storage)

    unread = [n for n, one in enumerate(looked) if isinstance(one, _Folder) and one.last]
    look_into(storage, unread, read)
    return len(unread)


def _read(folder: _Folder, root: Root, storage: Storage) -> StepFound | _Folder:
    """Returns the committed step of a folder, or the folder itself if nothing is committed."""
    step, name, last = folder.step, folder.name, folder.last
    level = logging.INFO if folder.was_warned else logging.WARNING
    stays = "so that the step stays and does not count for retention"
    try:
        record = highest_record(storage, name, last)
        if record is not None:
            slot = last
        else:
            decides = read_slots(root.open(name)).decides
            slot, record = (0, None) if decides is None else (decides.slot, decides.record)
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
        # Why: if an info that was listed is gone, the step is being replaced or removed.
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
    """Returns one of two folders of a step: the one named as new steps are, else the later name."""
    if known is None:
        return other
    chosen = known if known.name == names.name_of(known.step) else other
    left = other if chosen is known else known
    logger.info("%s and %s are both step %d", chosen.name, left.name, known.step)
    return chosen
