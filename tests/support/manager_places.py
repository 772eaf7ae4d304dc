"""Roots of a manager on any storage, in one thread: for enumerations of crashes, and for faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from unittest import mock

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core import processes
from ray_dcp.errors import LimitError
from ray_dcp.io.lease_holders import this_process
from ray_dcp.manager import background, reader_leases, writer_lease
from ray_dcp.manager.catalogue import Root, look
from ray_dcp.manager.root_writer import Writer
from ray_dcp.manager.save_policies import EverySteps
from ray_dcp.manager.settings import Settings, retention_of
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import Entry, PartWriter, Storage, StorageTraits
from tests.crash.invariants import standing_state
from tests.crash.registry import Place

HERE = this_process()


def settings(**given):
    """Returns settings that save each step, from `max_to_keep` and the fields of `Settings`."""
    kept = retention_of(given.pop("max_to_keep", 0), given.pop("retention", None))
    return Settings(policy=EverySteps(1), kept=kept, **given)


class Below:
    """A storage of what lies below a folder of another one."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder

    @property
    def url(self) -> str:
        return f"{self._storage.url}/{self._folder.rstrip('/')}"

    @property
    def traits(self) -> StorageTraits:
        return self._storage.traits

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        return self._storage.read(self._folder + key, start, num_bytes)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        self._storage.read_into(self._folder + key, start, target)

    def write(self, key: str, data, *, create: bool = False) -> None:
        self._storage.write(self._folder + key, data, create=create)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        return self._storage.open_writer(self._folder + key, sync=sync)

    def delete(self, keys: Iterable[str]) -> None:
        self._storage.delete([self._folder + key for key in keys])

    def list(self, prefix: str = "") -> list[Entry]:
        found = self._storage.list(self._folder + prefix)
        return [Entry(entry.key[len(self._folder) :], entry.num_bytes) for entry in found]


def opener_of(storage: Storage):
    """Returns what opens folders of a storage by their targets."""

    def open_below(target: Target) -> Storage:
        below = target.url[len(storage.url) :].strip("/")
        if not below:
            return storage
        if isinstance(storage, LocalStorage):
            return LocalStorage(target.url)
        return Below(storage, f"{below}/")

    return open_below


def root_of(storage: Storage) -> Root:
    return Root(Target(storage.url), opener_of(storage))


def writer_of(storage: Storage, **given) -> Writer:
    """Returns a writer of a root that is a storage."""
    return Writer(root_of(storage), settings(**given), holder=HERE)


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Lets managers find no threads to start, so that all is done where it is asked for.

    Calls that are made at once are made in order, too: a thread of their own would be no actor's,
    and what it does would neither wait for its turn nor be judged.
    """

    def refuse(*_: object) -> NoReturn:
        raise LimitError("no thread for this test")

    def refuse_helpers(work: Callable[[], object], name: str) -> threading.Thread:
        return refuse() if name == processes.HELPER else start_thread(work, name)

    start_thread = processes.start_thread
    with (
        mock.patch.object(background, "start_thread", refuse),
        mock.patch.object(processes, "start_thread", refuse_helpers),
        mock.patch.object(reader_leases, "renewed", return_value=lambda: None),
        mock.patch.object(writer_lease, "renewed", return_value=lambda: None),
    ):
        yield


def save_step(writer: Writer, storage: Storage, step: int, state, **telling) -> str:
    """Saves a step as a manager does, by two ranks in this thread; returns the attempt."""
    place = writer.begin(step, **telling)
    committed: bool | None = False
    try:
        attempt = Place(writer.root.open(place.name)).save(state, 2)
        committed = True
    finally:
        # A process that died does nothing more: what it asks of its storage fails.
        writer.finish(place, committed)
    writer.remover.drain()
    return attempt


def newest_state(storage: Storage, states):
    """Returns the state of the newest step, by the catalogue."""
    root = root_of(storage)
    found = look(root, settings().names)
    if not found.steps:
        return None
    newest = list(found.steps.values())[-1]
    return standing_state(root.open(newest.name), states)


def folders_of(storage: Storage) -> set[str]:
    """Returns the folders in which more is left than the record that says what stands."""
    keys = (entry.key.partition("/") for entry in storage.list())
    return {name for name, _, rest in keys if not rest.startswith("manifest-")}
