"""The storages that ship with ray_dcp keep the protocol's promises; one of 16 committers wins."""

from __future__ import annotations

import uuid

import fsspec
import pytest
from obstore.store import LocalStore, MemoryStore
from pyarrow import fs as arrow

from ray_dcp.store.filesystems import FsspecStorage
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import Location
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.store.object_stores import ObjectOptions
from ray_dcp.store.storage import MemoryStorage
from ray_dcp.testing import StorageConformance
from tests.support.storages import FaultyStorage, race_often

# --- Conformance ----------------------------------------------------------------------------------


class TestLocal(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "not" / "yet" / "there")


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self):
        storage = MemoryStorage(uuid.uuid4().hex)
        yield storage
        storage.delete(entry.key for entry in storage.list())


class TestFaultyWithoutScript(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path):
        return FaultyStorage(LocalStorage(tmp_path / "root"))


class TestObjects(StorageConformance):
    @pytest.fixture
    def storage(self):
        options = ObjectOptions(request_bytes=5 << 20)  # of which long files have several
        return ObjectStorage(MemoryStore(), "run/step-1", options=options)


class TestFsspecInMemory(StorageConformance):
    @pytest.fixture
    def storage(self):
        return FsspecStorage(fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}/step-1")


class TestFsspecThatRenames(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(fsspec.filesystem("file"), str(tmp_path / "step-1"))


class TestArrow(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(arrow.LocalFileSystem(), str(tmp_path / "step-1"))


# --- Races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "memory", "obstore in memory", "obstore on a disk"])
def test_16_committers_race_20_times_and_one_wins_each_time(kind, tmp_path):
    store = LocalStore(str(tmp_path)) if kind.endswith("disk") else MemoryStore()
    places = {"local": str(tmp_path), "memory": f"memory://races-{id(store)}"}
    place = Location(places[kind]) if kind in places else Location("races", filesystem=store)
    race_often(place.__truediv__, 16, 20)
