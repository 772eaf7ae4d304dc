"""Places and their storages: URLs, conformance, object stores without a server, fault scripts."""

from __future__ import annotations

import ast
import errno
import itertools
import logging
import pickle
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import obstore
import obstore.store
import pytest
import torch
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import LocalStore, MemoryStore
from pyarrow import fs as arrow

import ray_dcp
from ray_dcp import errors
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.store import memory as store_memory
from ray_dcp.store.conditional_create import creates_if_absent_in
from ray_dcp.store.filesystems import FsspecStorage
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import Location, url_below
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.object_clients import make_store
from ray_dcp.store.object_errors import object_failure
from ray_dcp.store.object_options import ObjectOptions
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.store.opening import absolute_target, as_target, open_storage, place_below
from ray_dcp.store.retries import Retrying
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, PublishedFile, place_of
from ray_dcp.testing import StorageConformance
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import CALLS
from tests.crash.invariants import INVARIANTS, nothing_is_left
from tests.crash.registry import NEW, Place
from tests.support.storages import CrashError, Fault, FaultyStorage, Script, race_often
from tests.support.world import load_state

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
        with pytest.raises(errors.InvalidRequestError, match="storage_options") as raised:
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
    with pytest.raises(errors.InvalidRequestError, match=message) as caught:
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
    with pytest.raises(errors.InvalidRequestError, match=r"pip install 'ray-dcp\[s3\]'"):
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


# --- `ObjectStorage` without a server -----------------------------------------------------------


PUT = "Error performing PUT http://s/b/k?X-Amz-Signature=sig in 1ms"


# budget


def test_an_upload_is_never_begun_again_with_what_is_left(monkeypatch):
    store = obstore.store.S3Store("b", access_key_id="k", secret_access_key="s")
    storage = ObjectStorage(store, options=ObjectOptions(request_bytes=5 << 20))
    calls = []

    def put(store, path, pieces, **_):
        calls.append(len(next(pieces)))
        raise GenericError("HTTP error: error sending request")

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(obstore, "head", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    writer = storage.open_writer("part")
    with pytest.raises(errors.StorageError, match="could not publish s3://b/part"):  # noqa: PT012
        writer.write(bytes(9 << 20))
        writer.commit()
    assert len(calls) == 1


def test_an_object_that_is_replaced_while_it_is_copied_is_not_reused(monkeypatch):
    store, copy = obstore.store.MemoryStore(), obstore.copy
    old, new = ObjectStorage(store, "old"), ObjectStorage(store, "new")
    old.write("a", b"data and end")
    source = PublishedFile(old.url, "a", 12, "")
    assert new.reuse("copied", source, b"end", sync=True) == "copied"

    def copied_and_replaced(*how):
        copy(*how)
        old.write("a", b"DATA and end")

    monkeypatch.setattr(obstore, "copy", copied_and_replaced)
    assert new.reuse("other", source, b"end", sync=True) is None
    assert [entry.key for entry in new.list()] == ["copied"]


# probe


class Server(MemoryStorage):
    """A storage with the ways in which a server may fail its conditions."""

    def __init__(self, *, ignores=False, lies=False, loses=0, races=0) -> None:
        super().__init__(f"probe-{id(self)}")
        self.ignores, self.lies, self.loses, self.races = ignores, lies, loses, races
        self.lock = threading.Lock()

    def create(self, key: str, data: bytes) -> None:
        with self.lock:
            is_taken = any(entry.key == key for entry in self.list())
            if not is_taken or self.ignores or self.lies:
                self._put(key, data, False)
            if not is_taken and self.loses:
                self.loses -= 1
                raise KeyExistsError("asked again, and met itself")
            if is_taken and self.races and key.endswith("race"):
                self.races -= 1
            elif is_taken and not self.ignores:
                raise KeyExistsError("taken")

    def probe(self, name: str) -> bool:
        return creates_if_absent_in(name, self.create, self._value, self.delete)


@pytest.fixture
def hidden_keys(monkeypatch):
    monkeypatch.setattr(store_memory, "check_key", lambda key, **_: key)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server(), True),
        (Server(loses=1), True),
        (Server(loses=2), True),
        (Server(ignores=True), False),
        (Server(lies=True), False),
        (Server(races=1), False),
        (Server(races=3), False),
    ],
    ids=["conditional", "lost once", "lost twice", "ignores", "lies", "two win", "all win"],
)
def test_a_server_is_tried_and_not_believed(hidden_keys, server, expected):
    name = f"probe-{id(server)}"
    assert server.probe(name) is expected
    assert server.list() == []
    server.create = None  # known from now on
    assert server.probe(name) is expected


# retries


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_endpoint_where_nobody_is_fails_within_seconds_and_says_so_before(caplog, host):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    store = obstore.store.S3Store(
        "b", endpoint=f"http://{host}:{port}", access_key_id="k", secret_access_key="s",
        client_options={"allow_http": True},
    )  # fmt: skip
    retrying = Retrying(180.0, clock=lambda: now[0], sleep=sleep, random_share=lambda: 0.5)
    storage = ObjectStorage(store, "run", retrying=retrying)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(errors.StorageError, match=r"retried \d times.*check the endpoint"),
    ):
        storage.list()
    assert 5.0 < now[0] <= 10.0
    (warning,) = caplog.records
    assert "could not list s3://b/run: " in warning.getMessage()
    slept.clear()
    with pytest.raises(errors.StorageError, match="not retried"):
        storage.list("a/")
    assert slept == []


# errors


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FileNotFoundError("Object at location k not found: status code: 404 Not Found: "
                           "<Error><Code>NoSuchKey</Code>"), KeyMissingError, "no such key"),
        (FileNotFoundError("status code: 404 Not Found: <Error><Code>NoSuchBucket</Code>"
                           "<Message>none</Message>"), errors.StorageRefusedError,
         "create the bucket"),
        (AlreadyExistsError("x"), KeyExistsError, "exists already"),
        (GenericError(f"{PUT}, after 3 retries - status code: 503: <Code>SlowDown</Code>"),
         errors.StorageError, "503 SlowDown .*retried 3 times.*throttles"),
        (GenericError(f"{PUT} - status code: 400: <Code>ExpiredToken</Code>"),
         errors.StorageRefusedError, "not retried.*credential_provider"),
        (GenericError(f"{PUT} - status code: 403: <Code>RequestTimeTooSkewed</Code>"),
         errors.StorageRefusedError, "set this machine's clock"),
        (GenericError(f"{PUT} - status code: 507: full"), errors.StorageRefusedError, "free space"),
        (GenericError(f"{PUT}, after 2 retries - HTTP error: error sending request"),
         errors.StorageError, "retried 2 times.*check the endpoint and the network"),
    ],
)  # fmt: skip
def test_an_error_says_what_failed_whether_it_was_retried_and_the_way_out(error, kind, message):
    failure = object_failure(error, "write", "k", "s3://b/k")
    assert type(failure) is kind
    assert failure.key == "k"
    assert "could not write s3://b/k" in failure.message
    with pytest.raises(kind, match=message):
        raise failure
    assert "X-Amz-Signature" not in failure.message


# crashes


def test_an_interrupted_save_on_objects_leaves_the_previous_or_the_new_checkpoint():
    make = lambda: ObjectStorage(obstore.store.MemoryStore(), "run")  # noqa: E731
    reached = check_crashes("save.overwrite", storage=make, variants=["before", "lost"], every=5)
    assert {"new", "previous"} <= set(reached.stood)


class LooksFirst(MemoryFileSystem):
    """Memory in which who creates a file waits, after its last look, for another that looks."""

    meeting: ClassVar[threading.Barrier]

    def exists(self, path: str, **how: Any) -> bool:
        found = super().exists(path, **how)
        # Suppressed: the other one may not look yet.
        with suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.2)
        return found


def test_two_threads_that_create_a_file_in_memory_have_one_winner():
    LooksFirst.meeting = threading.Barrier(1)
    storage = FsspecStorage(LooksFirst(), f"/{uuid.uuid4().hex}")
    assert storage.traits.create_if_absent
    LooksFirst.meeting = threading.Barrier(2)
    won: list[bytes] = []

    def create(value: bytes) -> None:
        with suppress(KeyExistsError):
            storage.write("slot", value, create=True)
            won.append(value)

    threads = [threading.Thread(target=create, args=(value,)) for value in (b"a", b"b")]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert won == [storage.read("slot")]


class Unlisted(MemoryFileSystem):
    """A filesystem with fsspec's own `find`, as most have, that fails to list one folder."""

    cachable = False
    find = AbstractFileSystem.find
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    folder = "none"
    failure: Exception = OSError(errno.EIO, "the server does not answer")

    def ls(self, path, detail=True, **more):
        if path.endswith(self.folder):
            raise self.failure
        return super().ls(path, detail, **more)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_folder_that_fsspec_can_not_list_is_not_taken_for_an_empty_one(is_wrapped: bool):
    filesystem = Unlisted()
    wrapped = AsyncFileSystemWrapper(filesystem, asynchronous=False) if is_wrapped else filesystem
    place = Location(f"/run-{is_wrapped}", filesystem=wrapped)
    with ray_dcp.CheckpointManager(place, 1, max_to_keep=1) as manager:
        manager.save(1, {"w": torch.ones(2)}, tags=["kept"])
        filesystem.folder = "/tags"
        with pytest.raises(errors.StorageError, match="the server does not answer"):
            manager.save(2, {"w": torch.ones(2)})
        filesystem.folder = "none"
        manager.save(3, {"w": torch.ones(2)})
        manager.join()
        assert manager.all_steps() == [1, 3]
    for folder in (place.url, f"{place.url}/step-00000003"):
        filesystem.folder = folder
        with pytest.raises(errors.StorageError, match="the server does not answer"):
            ray_dcp.load_newest({"w": torch.zeros(2)}, place)


def test_an_asynchronous_wrapper_of_the_local_filesystem_is_the_local_filesystem(tmp_path: Path):
    wrapped = AsyncFileSystemWrapper(LocalFileSystem(), asynchronous=False)
    place = Location(f"{tmp_path}/a", filesystem=wrapped)
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=place)
    assert open_storage(place).traits == LocalStorage(f"{tmp_path}").traits
    assert open_storage(place).traits.durable


def test_an_fsspec_without_an_asynchronous_wrapper_is_enough(tmp_path: Path):
    code = f"""
import sys
sys.modules["fsspec.implementations.asyn_wrapper"] = None  # fsspec has it since 2024.12.
import fsspec, ray_dcp, torch
from ray_dcp import Location
place = Location({str(tmp_path / "a")!r}, filesystem=fsspec.filesystem("file"))
ray_dcp.save({{"w": torch.ones(2)}}, checkpoint_id=place)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
    assert ray_dcp.open(tmp_path / "a").names == ("w",)


class GoneError(OSError):
    """An error of a class of its own for a missing path, as smbclient's."""


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("gone"),
        NotADirectoryError("a file by now"),
        GoneError(errno.ENOENT, "gone"),
    ],
)
def test_a_folder_that_is_removed_while_it_is_listed_hides_no_other(failure):
    filesystem = Unlisted()
    storage = FsspecStorage(filesystem, "/listed")
    for key in ("a/x", "b/y", "c"):
        storage.write(key, b"1")
    filesystem.folder, filesystem.failure = "/b", failure
    assert [entry.key for entry in storage.list()] == ["a/x", "c"]


class ListsItself(Unlisted):
    """A filesystem that lists a folder in itself, as some servers do."""

    def ls(self, path, detail=True, **more):
        return [{"name": f"{path}/", "size": 0, "type": "directory"}, *super().ls(path, detail)]


def test_a_folder_that_is_listed_in_itself_is_looked_at_once():
    storage = FsspecStorage(ListsItself(), "/itself")
    for key in ("a/x", "c"):
        storage.write(key, b"1")
    assert sorted(entry.key for entry in storage.list()) == ["a/x", "c"]


def test_an_interrupted_save_through_fsspec_leaves_the_previous_or_the_new(tmp_path):
    numbers = itertools.count()
    # Where nothing creates if absent, what a crash leaves is not told from what may yet commit.
    weaker = [invariant for invariant in INVARIANTS if invariant is not nothing_is_left]
    for filesystem, invariants, every in (("memory", INVARIANTS, 15), ("file", weaker, 22)):
        reached = check_crashes(
            "save.overwrite",
            storage=lambda filesystem=filesystem: FsspecStorage(
                fsspec.filesystem(filesystem), f"{tmp_path}/{next(numbers)}"
            ),
            invariants=invariants,
            variants=["before", "lost", "broken"],
            every=every,
        )
        assert sum(reached.points.values()) >= 4


# --- fault scripts --------------------------------------------------------------------------------


@pytest.fixture
def memory(request):
    storage = MemoryStorage(f"faults/{request.node.name.partition('[')[0]}")
    yield storage
    storage.delete([entry.key for entry in storage.list()])


def test_a_fault_that_is_never_hit_fails_the_test(memory):
    faults = [Fault(operation="read", key="a*"), Fault(operation="write", key="b", nth=2)]
    told = r"read of 'a\*' \(call 1\), write of 'b' \(call 2\)"
    with pytest.raises(errors.InternalError, match=told), Script(faults) as script:
        script.wrap(memory).write("b", b"1")
    with pytest.raises(ZeroDivisionError), Script(faults):
        raise ZeroDivisionError  # what the test itself meets is not hidden by that


def test_a_bit_that_flips_on_the_way_to_the_storage_is_found_when_it_is_read(memory):
    with Script([Fault(operation="writer.write", effect="flip")]) as script:
        Place(script.wrap(memory)).save(NEW, 1)
    with pytest.raises(errors.DamagedCheckpointError):
        load_state(memory, NEW)


@pytest.mark.parametrize("effect", ["before", "after", "torn"])
def test_the_dead_ask_for_nothing_and_clean_nothing_up(tmp_path, effect):
    inner = LocalStorage(tmp_path)
    with Script([Fault(operation="writer.write", effect=effect, stops=True)]) as script:
        storage = script.wrap(inner)
        writer = storage.open_writer("a")
        with pytest.raises(CrashError, match=r"died at writer.write of 'a'"):
            writer.write(bytes(5 << 20))
        writer.abort()
        del writer
        for ask in (storage.list, lambda: storage.read("a"), lambda: storage.open_writer("b")):
            with pytest.raises(CrashError, match="dead"):
                ask()
    # What a crash leaves: the file without its name.
    (left,) = inner.unpublished()
    assert left.key.endswith("-a")
    assert left.num_bytes == {"before": 0, "after": 4 << 20, "torn": 0}[effect]
    assert len(script.calls) == 2


def test_every_function_of_os_that_changes_files_in_a_storage_is_interrupted():
    harmless = {
        "PathLike", "close", "fsencode", "fspath", "fstat", "getpid", "lstat", "major", "minor",
        "environ", "path", "posix_fadvise", "pread", "preadv", "register_at_fork", "scandir",
        "stat", "stat_result", "strerror",
    }  # fmt: skip
    used = {
        node.attr
        for file in (Path(ray_dcp.__file__).parent / "store").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and not node.attr.startswith(("O_", "POSIX_FADV", "RWF"))
    }
    assert used - harmless <= set(CALLS)
    assert {"link", "rename", "unlink", "fsync"} <= used


def test_a_place_has_one_name_however_it_is_spelled_and_another_one_on_another_server():
    key = {"account_key": "aGk="}
    azure = [
        place_of(open_storage(Location(url, {**key, **more})))
        for url, more in (
            ("az://c@a.dfs.core.windows.net/run", {}),
            ("abfss://c@a.dfs.core.windows.net/run/", {}),
            ("az://c/run", {"account_name": "a"}),
            ("az://c/run", {"account_name": "b"}),
        )
    ]
    assert len(set(azure[:3])) == 1
    assert azure[3] not in azure[:3]
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    amazon = [
        place_of(open_storage(Location(url, {**keys, "endpoint": endpoint})))
        for url, endpoint in (
            ("s3://b/run", "http://one:1"), ("s3a://b/run/", "http://one:1"),
            ("s3://b/run", "http://two:1"),
        )
    ]  # fmt: skip
    assert amazon[0] == amazon[1] != amazon[2]
    assert place_of(open_storage("file:///x/run/")) == place_of(open_storage("/x/y/../run"))
