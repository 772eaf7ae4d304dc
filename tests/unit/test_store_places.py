"""What names a place, which storage serves it, and what each storage that ships promises."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path

import fsspec
import obstore.store
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from obstore.store import LocalStore, MemoryStore
from pyarrow import fs as arrow

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.filesystems import FsspecStorage
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import Location, url_below
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.store.object_stores import ObjectOptions, make_store
from ray_dcp.store.opening import absolute_target, as_target, open_storage, place_below
from ray_dcp.store.storage import MemoryStorage
from ray_dcp.testing import StorageConformance
from tests.support.storages import FaultyStorage, race_often

SECRET = "hush-hush-secret"
S3 = {"access_key_id": "k", "secret_access_key": SECRET, "endpoint": "http://127.0.0.1:9"}


def s3_store(**more: object) -> obstore.store.S3Store:
    return obstore.store.S3Store("bucket", access_key_id="k", secret_access_key=SECRET, **more)


@pytest.mark.parametrize(
    ("place", "kind", "url"),
    [
        ("s3://bucket/run/step-1/", ObjectStorage, "s3://bucket/run/step-1"),
        ("S3A://bucket/run", ObjectStorage, "s3://bucket/run"),
        ("gs://bucket/run", ObjectStorage, "gs://bucket/run"),
        (Location("az://c/run", {"account_name": "a"}), ObjectStorage, "az://c/run"),
        ("abfss://c@acc.dfs.core.windows.net/run", ObjectStorage, "az://c/run"),
        ("memory://run", MemoryStorage, "memory://run"),
        ("/run", LocalStorage, "/run"),
        (Path("/run"), LocalStorage, "/run"),
        ("file:///x/../y", LocalStorage, "/y"),
        ("FILE:///a%20b", LocalStorage, "/a%20b"),
        ("memory:///a/", MemoryStorage, "memory://a"),
        (Target("/x/y/"), LocalStorage, "/x/y"),
        ("simplecache::memory://run", FsspecStorage, "memory:///run"),
        (fsspec.filesystem("memory"), FsspecStorage, "memory://"),
        (Location("run", filesystem=fsspec.filesystem("memory")), FsspecStorage, "memory://run"),
        (DirFileSystem("/a", fsspec.filesystem("memory")), FsspecStorage, "memory://a"),
        (Location("b", filesystem=DirFileSystem("/a", fsspec.filesystem("memory"))),
         FsspecStorage, "memory://a/b"),
        (Location("/run", filesystem=fsspec.filesystem("file")), LocalStorage, "/run"),
        (Location("/run", filesystem=arrow.LocalFileSystem()), LocalStorage, "/run"),
        (arrow.SubTreeFileSystem("/run", arrow.LocalFileSystem()), LocalStorage, "/run"),
        (Location("run", filesystem=arrow._MockFileSystem()), FsspecStorage, "mock://run"),
        (Location("run", filesystem=arrow.PyFileSystem(
            arrow.FSSpecHandler(fsspec.filesystem("memory")))), FsspecStorage, "memory://run"),
    ],
)  # fmt: skip
def test_a_place_is_served_by_its_storage(place, kind, url):
    storage = open_storage(place)
    assert (type(storage), storage.url) == (kind, url)
    again = open_storage(absolute_target(place))
    assert (type(again), again.url) == (kind, url)
    below = open_storage(place_below(place, "x/y"))
    assert (type(below), below.url) == (kind, url_below(url, "x/y"))


def test_steps_are_listed_and_loaded_with_the_options_of_their_run(tmp_path):
    run = Location("run", filesystem=obstore.store.MemoryStore())
    for step in (1, 2):
        ray_dcp.save({"w": torch.full((2,), step)}, checkpoint_id=run / f"step-{step}")
    state = {"w": torch.zeros(2, dtype=torch.int64)}
    assert ray_dcp.load_newest(state, run).step == 2
    assert state["w"].tolist() == [2, 2]


def test_targets_and_locations_travel_with_what_they_need_and_show_nothing():
    place = Location("s3://bucket/run", S3)
    target = as_target(place)
    for thing in (place, place / "step-1", target, open_storage(place)):
        assert SECRET not in repr(thing)
    copy = pickle.loads(pickle.dumps(target))
    assert copy == target
    assert open_storage(copy).url == "s3://bucket/run"
    assert pickle.loads(pickle.dumps(open_storage(place))).url == "s3://bucket/run"
    ready = pickle.loads(pickle.dumps(as_target(Location("x", filesystem=s3_store()))))
    assert open_storage(ready).url == "s3://bucket/x"


@pytest.mark.parametrize(
    "url",
    [f"s3://key:{SECRET}@bucket/run", f"s3://bucket/run?secret={SECRET}",
     f"az://c/run?sv=1&sig={SECRET}", f"zip://a::s3://key:{SECRET}@bucket/run.zip",
     f"simplecache::zip://a::ftp://key:{SECRET}@host/run.zip"],
)  # fmt: skip
def test_a_url_with_credentials_is_refused_without_showing_them(url):
    for call in (open_storage, ray_dcp.open, Location, lambda u: open_storage(Target(u))):
        with pytest.raises(InvalidRequestError, match="storage_options") as raised:
            call(url)
        assert SECRET not in str(raised.value)


def test_options_of_the_http_client_are_taken_among_those_of_the_place():
    def provider():
        return {"access_key_id": "k", "secret_access_key": SECRET, "expires_at": None}

    given = {"endpoint": "http://127.0.0.1:9", "proxy_url": "http://127.0.0.1:8"}
    more = {"client_options": {"timeout": "9 s"}, "credential_provider": provider}
    store, _ = make_store("s3", "client-options", {**given, **more})
    assert store.client_options["proxy_url"] == "http://127.0.0.1:8"
    assert store.client_options["timeout"] == "9 s"
    assert store.credential_provider is provider
    assert "proxy_url" not in store.config


def with_options(scheme="s3", **options):
    return Location(f"{scheme}://bucket/run", options)


NO_ENDPOINTS = ("127.0.0.1:9000", "not a url", "http://", "http://[bad", "http://host:port",
                "ftp://host", "http://a b", "http://127.0.0.1:99999", "https:///x")  # fmt: skip


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Path("s3://bucket/run"), "pathlib makes one slash of the two"),
        ("s3://", "no bucket"),
        ("", "a path or URL"),
        (7, "but got int"),
        (b"x", "but got bytes"),
        ("a\0b", "expected a path or URL"),
        ("~/run", r"a folder '~' in the current directory; give os\.path\.expanduser"),
        ("file:run", r"a folder 'file:run' in .*; give file:///path"),
        ("nosuch://x", "install the package that registers it"),
        ("hdfs-x::nosuch://x", "nothing here can reach"),
        ("file://host/x", "absolute path"),
        (Target("/x", {"token": SECRET}), "takes no storage_options, but got token"),
        ("memory://../x", "component"),
        (with_options(bogus=SECRET), "bogus"),
        (with_options(request_bytes=1000), "at least 5 MiB"),
        (with_options(upload_bytes="many"), "upload_bytes must be a number"),
        (with_options(key="a", access_key_id="b"), "access_key_id is given twice"),
        (with_options(unsigned_payload="perhaps"), "not understood"),
        *((with_options(scheme, endpoint=url), "endpoint must be a URL such as https://")
          for url in NO_ENDPOINTS for scheme in ("s3", "az")),
    ],
)  # fmt: skip
def test_what_is_no_place_is_told(place, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        open_storage(place)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "environment", "is_hashed"),
    [
        ({"endpoint": "http://host"}, "", True),
        ({"endpoint": "https://host"}, "http://host", False),
        ({}, "", False),
        ({}, "http://host", True),
        ({"endpoint": "http://host", "checksum_algorithm": "CRC64NVME"}, "", False),
    ],
)
def test_bodies_are_hashed_for_the_server_where_nothing_else_protects_them(
    monkeypatch, given, environment, is_hashed
):
    if environment:
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment)
    config = make_store("s3", f"hashed-{is_hashed}-{environment[:5]}", given)[0].config
    assert (config["unsigned_payload"] == "false") == is_hashed
    assert ("checksum_algorithm" in config) == (is_hashed or "checksum_algorithm" in given)


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'ray-dcp\[s3\]'"):
        open_storage(Location("s3://never-opened-before/run", {"region": "x"}))


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
