"""The catalogue of a root: which steps are committed, read from the storage and never remembered.

One listing has the highest slot of every step folder. What is known of a folder holds as long as
that slot stays the same, so the file `catalogue.json` only saves reads; a reader that finds it old,
damaged or missing reads the records themselves.

`Root` has the names of a managed root: one folder per step, and `.manager` for what is shared.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, StorageError
from ray_dcp.format.manifest import (
    MAX_RECORD_BYTES,
    AbortRecord,
    DeleteRecord,
    Manifest,
    decode_record,
    record_key,
    slot_of,
)
from ray_dcp.format.names import (
    CATALOGUE,
    SHARED_FOLDER,
    StepNames,
    tag_of,
)
from ray_dcp.format.step_info import (
    CatalogueRow,
    StepInfo,
    decode_catalogue,
    decode_info,
    encode_catalogue,
    info_key,
    info_slot,
)
from ray_dcp.io.records import read_slots
from ray_dcp.manager.retention import StepFacts
from ray_dcp.protocol.messages import Target
from ray_dcp.store.location import url_below
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.view.listing import PART_NAME

FOLDER = SHARED_FOLDER
READING = "reading/"


@dataclass(frozen=True)
class Root:
    """A directory of step folders."""

    target: Target
    """Absolute."""

    @property
    def url(self) -> str:
        """Path or URL."""
        return self.target.url

    def below(self, name: str) -> Target:
        """Returns the target of a folder of the root."""
        # Why replaced: with the options, or the ready filesystem, of the root.
        return replace(self.target, url=url_below(self.url, name))

    @property
    def shared(self) -> Target:
        """The target of what managers share."""
        return self.below(FOLDER)


Opener = Callable[[Target], Storage]

_OURS = re.compile(r"__\d+_\d+\..+\.distcp")
LEFTOVER: Final = "leftover"
"""In a folder is something of ours, and nothing is committed."""
_LEASE = re.compile(rf"{READING}(\d{{1,18}})\..+")
_READ_THREADS = 32
_FEW = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFound:
    """A step that is committed."""

    step: int
    name: str
    """Of its folder."""
    row: CatalogueRow
    is_ours: bool = True
    """A save of ray_dcp; False: stock DCP's, which is read and never deleted."""
    is_readable: bool = True
    """False: its newest record can't be read, so that nobody knows what stands."""

    def facts(self, tags: frozenset[str]) -> StepFacts:
        """Returns what a retention policy may look at."""
        return replace(self._facts, tags=tags) if tags else self._facts

    # Why kept: retention looks at all steps after each save, and there may be 10,000.
    @cached_property
    def _facts(self) -> StepFacts:
        metrics = {} if self.row.info is None else self.row.info.metrics
        return StepFacts(step=self.step, created_s=self.row.created_s, metrics=metrics)


@dataclass(frozen=True)
class _Unread:
    """A folder whose records have to be read."""

    step: int
    name: str
    last: int
    """Highest slot in use."""
    infos: Sequence[int | None]
    """Slots of its infos."""
    is_bare: bool
    """Nothing but records is in it."""


@dataclass
class Catalogue:
    """What one look at a root has found."""

    steps: dict[int, StepFound] = field(default_factory=dict)
    """Committed ones, ascending."""
    tags: dict[int, frozenset[str]] = field(default_factory=dict)
    leftovers: dict[str, int] = field(default_factory=dict)
    """Step folders of ours, by name, where nothing is committed and files are left."""
    deleted: dict[str, CatalogueRow] = field(default_factory=dict)
    """Step folders, by name, of which nothing is left but the record that says so."""
    read_by: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Keys of the leases on a step, in the shared folder."""
    num_read: int = 0
    """Of how many folders records had to be read."""

    def facts(self) -> list[StepFacts]:
        """Returns the facts of all steps that retention decides about."""
        return [
            found.facts(self.tags.get(step, frozenset()))
            for step, found in self.steps.items()
            if found.is_ours and found.is_readable
        ]

    def add(self, found: StepFound) -> None:
        """Adds a step that was committed."""
        self.steps = dict(sorted({**self.steps, found.step: found}.items()))
        self.leftovers.pop(found.name, None)


def look(
    root: Root, names: StepNames, opener: Opener, before: Catalogue | None = None
) -> Catalogue:
    """Returns what is committed in a root.

    Args:
        root: Where.
        names: Which folders are steps.
        opener: What opens storages.
        before: An earlier look; what has not changed since is not read again.

    Returns:
        Empty where nothing is.

    Raises:
        StorageError: The storage can't be listed or read.

    Complexity:
        One listing; one or two small reads for each step that neither `before` nor the catalogue
        file know.
    """
    # Why: all that a long run makes here stays, and to look for garbage in it takes half the time.
    with _without_collection():
        return _look(root, names, opener, before)


def _look(root: Root, names: StepNames, opener: Opener, before: Catalogue | None) -> Catalogue:
    storage = opener(root.target)
    folders: dict[str, list[str]] = {}
    for entry in storage.list():
        name, slash, rest = entry.key.partition("/")
        if slash:
            folders.setdefault(name, []).append(rest)
    found = Catalogue()
    shared = folders.pop(FOLDER, [])
    tags: dict[int, set[str]] = {}
    for key in shared:
        tagged = tag_of(key)
        if tagged is not None:
            tags.setdefault(tagged[0], set()).add(tagged[1])
        lease = _LEASE.fullmatch(key)
        if lease is not None:
            step = int(lease[1])
            found.read_by[step] = (*found.read_by.get(step, ()), key)
    found.tags = {step: frozenset(names) for step, names in tags.items()}
    known = _known(storage, before, CATALOGUE in shared)
    numbered = ((names.step_of(name), name, keys) for name, keys in sorted(folders.items()))
    looked = [
        (step, name, _look_into(step, name, keys, known))
        for step, name, keys in numbered
        if step is not None
    ]
    unread = [one for _, _, one in looked if isinstance(one, _Unread)]
    found.num_read = len(unread)
    read = iter(_read_all(unread, root, opener, storage))
    for step, name, seen in looked:
        one = next(read) if isinstance(seen, _Unread) else seen
        if isinstance(one, StepFound):
            found.steps[step] = _preferred(found.steps.get(step), one, names)
        elif isinstance(one, CatalogueRow):
            found.deleted[name] = one
        elif one is LEFTOVER:
            found.leftovers[name] = step
    found.steps = dict(sorted(found.steps.items()))
    return found


def look_at_step(root: Root, name: str, step: int, opener: Opener) -> StepFound | None:
    """Returns what is committed in one step folder; None when nothing is.

    Args:
        root: Where.
        name: Of the folder.
        step: Its number.
        opener: What opens storages.

    Raises:
        StorageError: The storage can't be listed or read.
    """
    keys = [entry.key for entry in opener(root.below(name)).list()]
    seen = _look_into(step, name, keys, {})
    if isinstance(seen, _Unread):
        (seen,) = _read_all([seen], root, opener, opener(root.target))
    return seen if isinstance(seen, StepFound) else None


def publish(root: Root, catalogue: Catalogue, opener: Opener) -> None:
    """Writes the catalogue file. Only the writer of a root does.

    Raises:
        StorageError: It could not be written; nothing depends on it.
    """
    rows = [f.row for f in catalogue.steps.values() if f.is_ours and f.is_readable]
    rows += catalogue.deleted.values()
    opener(root.shared).write(CATALOGUE, encode_catalogue(rows))


@contextmanager
def _without_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _known(
    storage: Storage, before: Catalogue | None, is_published: bool
) -> Mapping[str, CatalogueRow]:
    if before is not None:
        return {found.name: found.row for found in before.steps.values()} | before.deleted
    if not is_published:
        return {}
    try:
        data = storage.read(f"{FOLDER}/{CATALOGUE}", 0, MAX_RECORD_BYTES)
        return {row.name: row for row in decode_catalogue(data)}
    except KeyMissingError:
        return {}
    except DamagedCheckpointError as error:
        logger.info("%s/%s/%s is not used: %s", storage.url, FOLDER, CATALOGUE, error)
        return {}


def _look_into(
    step: int, name: str, keys: Iterable[str], known: Mapping[str, CatalogueRow]
) -> StepFound | _Unread | CatalogueRow | Literal["leftover"] | None:
    """Returns what the names in a folder and what is known of it tell."""
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
    row = known.get(name)
    # Why the attempt: a folder that was removed and is saved to again begins at slot 1 again.
    if (
        row is not None
        and row.slot
        and row.last_slot == last
        and any(row.attempt in t for t in tables)
    ):
        return StepFound(step, name, row)
    is_bare = not (is_ours or is_stock or infos or tables)
    if row is not None and not row.slot and row.last_slot == last and is_bare:
        return row
    if last:
        return _Unread(step, name, last, infos, is_bare)
    if is_stock and not is_ours:
        return StepFound(step, name, CatalogueRow(name, 0, 0, "", 0.0, None), is_ours=False)
    return LEFTOVER if is_ours or infos else None


def _read_all(
    folders: Sequence[_Unread], root: Root, opener: Opener, storage: Storage
) -> Iterator[StepFound | CatalogueRow | Literal["leftover"]]:
    """Yields what the records of folders say, in their order."""

    def read(folder: _Unread) -> StepFound | CatalogueRow | Literal["leftover"]:
        return _read(folder, root, opener, storage)

    # Why only there: a file is read in less time than a thread takes over, a request is waited for.
    if len(folders) < _FEW or not hasattr(storage, "request_bytes"):
        yield from map(read, folders)
        return
    with ThreadPoolExecutor(_READ_THREADS) as threads:
        yield from threads.map(read, folders)


def _read(
    folder: _Unread, root: Root, opener: Opener, storage: Storage
) -> StepFound | CatalogueRow | Literal["leftover"]:
    name, last = folder.name, folder.last
    try:
        slot, record = _standing(storage, name, last, lambda: opener(root.below(name)))
    except StorageError:
        raise
    except CheckpointError as error:
        logger.warning("What stands in %s/%s can't be told: %s", root.url, name, error)
        row = CatalogueRow(name, last, 0, "", 0.0, None)
        return StepFound(folder.step, name, row, is_readable=False)
    if not isinstance(record, Manifest):
        if record is None or not folder.is_bare:
            return LEFTOVER
        return CatalogueRow(name, last, 0, record.attempt, record.created_s, None)
    info = _info_below(storage, name, slot, folder.infos)
    created_s = record.created_s if info is None else info.created_s
    row = CatalogueRow(name, last, slot, record.attempt, created_s, info)
    return StepFound(folder.step, name, row)


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
    storage: Storage, name: str, last: int, open_folder: Callable[[], Storage]
) -> tuple[int, Manifest | DeleteRecord | None]:
    """Returns what decides in a folder: nearly always the record in the highest slot."""
    with suppress(KeyMissingError, DamagedCheckpointError):
        data = storage.read(f"{name}/{record_key(last)}", 0, MAX_RECORD_BYTES + 1)
        record = decode_record(data, key=record_key(last))
        if not isinstance(record, AbortRecord) and record.previous_slot < last:
            return last, record
    decides = read_slots(open_folder()).decides
    return (0, None) if decides is None else (decides.slot, decides.record)


def _info_below(
    storage: Storage, name: str, slot: int, infos: Iterable[int | None]
) -> StepInfo | None:
    """Returns the info that belongs to the manifest in a slot: the highest one written below it."""
    below = [number for number in infos if number is not None and number < slot]
    if not below:
        return None
    key = info_key(max(below))
    try:
        return decode_info(storage.read(f"{name}/{key}", 0, MAX_RECORD_BYTES), key=key)
    except KeyMissingError:
        return None
    except DamagedCheckpointError as error:
        logger.warning("Metrics and metadata in %s/%s can't be read: %s", storage.url, name, error)
        return None
