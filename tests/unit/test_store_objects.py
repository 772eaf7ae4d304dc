"""`ObjectStorage` without a server: its budget, its probe, its retries, what its errors mean."""

from __future__ import annotations

import itertools
import logging
import socket
import threading

import fsspec
import obstore
import obstore.store
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError

from ray_dcp.errors import StorageError, StorageRefusedError
from ray_dcp.store import storage as store_module
from ray_dcp.store.filesystems import FsspecStorage
from ray_dcp.store.object_storage import ObjectStorage, object_failure
from ray_dcp.store.object_stores import ObjectOptions
from ray_dcp.store.remote import Retrying, creates_if_absent_in
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, MemoryStorage, PublishedFile
from tests.crash.crashes import check_crashes
from tests.crash.invariants import INVARIANTS, nothing_is_left

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
    with pytest.raises(StorageError, match="could not publish s3://b/part"):  # noqa: PT012
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
    monkeypatch.setattr(store_module, "check_key", lambda key, **_: key)


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
        pytest.raises(StorageError, match=r"retried \d times.*check the endpoint"),
    ):
        storage.list()
    assert 5.0 < now[0] <= 10.0
    (warning,) = caplog.records
    assert "could not list s3://b/run: " in warning.getMessage()
    slept.clear()
    with pytest.raises(StorageError, match="not retried"):
        storage.list("a/")
    assert slept == []


# errors


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FileNotFoundError("Object at location k not found: status code: 404 Not Found: "
                           "<Error><Code>NoSuchKey</Code>"), KeyMissingError, "no such key"),
        (FileNotFoundError("status code: 404 Not Found: <Error><Code>NoSuchBucket</Code>"
                           "<Message>none</Message>"), StorageRefusedError, "create the bucket"),
        (AlreadyExistsError("x"), KeyExistsError, "exists already"),
        (GenericError(f"{PUT}, after 3 retries - status code: 503: <Code>SlowDown</Code>"),
         StorageError, "503 SlowDown .*retried 3 times.*throttles"),
        (GenericError(f"{PUT} - status code: 400: <Code>ExpiredToken</Code>"), StorageRefusedError,
         "not retried.*credential_provider"),
        (GenericError(f"{PUT} - status code: 403: <Code>RequestTimeTooSkewed</Code>"),
         StorageRefusedError, "set this machine's clock"),
        (GenericError(f"{PUT} - status code: 507: full"), StorageRefusedError, "free space"),
        (GenericError(f"{PUT}, after 2 retries - HTTP error: error sending request"), StorageError,
         "retried 2 times.*check the endpoint and the network"),
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
