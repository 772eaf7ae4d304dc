"""`ObjectStorage` without a server: its budget, its probe, its retries, what its errors mean."""

from __future__ import annotations

import gc
import itertools
import logging
import socket
import threading

import fsspec
import obstore
import obstore.store
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from ray_dcp.errors import StorageError, StorageRefusedError
from ray_dcp.store import memory
from ray_dcp.store.create_probe import creates_if_absent_in, forget_probes
from ray_dcp.store.fsspec_storage import FsspecStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.object_storage import (
    ObjectStorage,
    UploadBudget,
    _Own,
    is_past_the_end,
    object_failure,
    worth_s,
)
from ray_dcp.store.object_stores import ObjectOptions, name_of_store
from ray_dcp.store.retry import Retrying
from ray_dcp.store.storage import KeyExistsError, KeyMissingError
from ray_dcp.store.storage_adapter import redacted
from tests.crash.crashes import check_crashes
from tests.crash.invariants import INVARIANTS, nothing_is_left

PUT = "Error performing PUT http://s/b/k?X-Amz-Signature=sig in 1ms"


# budget


def test_a_budget_lets_in_no_more_than_its_limit_and_each_files_own_share():
    budget, first, second = UploadBudget(100, 10), _Own(), _Own()
    budget.take(first, 95, lambda: False)
    budget.take(second, 10, lambda: False)  # its own share
    assert budget.highest_bytes == 105
    entered = threading.Event()

    def wait() -> None:
        budget.take(second, 1, lambda: False)
        entered.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not entered.wait(0.05)
    budget.give_back(first, 95)
    assert entered.wait(180)
    thread.join()
    assert second.num_bytes == 11


def test_a_file_that_was_given_up_takes_no_room_whoever_keeps_its_pieces():
    budget, own = UploadBudget(10, 0), _Own()
    budget.take(own, 10, lambda: False)
    budget.forget(own)
    budget.give_back(own, 10)  # twice is once
    other = _Own()
    budget.take(other, 10, lambda: False)
    assert (budget.highest_bytes, own.num_bytes) == (10, 0)


def test_who_waits_for_room_hears_that_its_upload_has_ended():
    budget, own, ended = UploadBudget(1, 1), _Own(), threading.Event()
    budget.take(own, 1, lambda: False)
    thread = threading.Thread(target=budget.take, args=(own, 1, ended.is_set), daemon=True)
    thread.start()
    ended.set()
    budget.wake()
    thread.join(180)
    assert not thread.is_alive()


def test_memory_of_an_upload_comes_back_to_the_budget():
    store = obstore.store.S3Store("b", access_key_id="k", secret_access_key="s")
    storage = ObjectStorage(store, options=ObjectOptions(upload_bytes=77 << 20))
    writer = storage.open_writer("part")
    writer.write(bytes(1000))
    assert writer._own.num_bytes == 1000
    own = writer._own
    writer.abort()
    del writer
    gc.collect()
    assert own.num_bytes == 0


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
    with pytest.raises(StorageError, match="could not publish s3://b/part"):
        write_and_commit(writer)
    assert len(calls) == 1


def write_and_commit(writer) -> None:
    writer.write(bytes(9 << 20))
    writer.commit()


# probe


class Server(MemoryStorage):
    """A storage with the ways in which a server may fail its conditions."""

    def __init__(self, *, ignores=False, lies=False, loses=0, races=False) -> None:
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
            if is_taken and not (self.ignores or (self.races and key.endswith("race"))):
                raise KeyExistsError("taken")

    def probe(self, name: str) -> bool:
        return creates_if_absent_in(name, self.create, self._value, self.delete)


@pytest.fixture
def hidden_keys(monkeypatch):
    monkeypatch.setattr(memory, "check_key", lambda key, **_: key)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server(), True),
        (Server(loses=1), True),
        (Server(loses=2), True),
        (Server(ignores=True), False),
        (Server(lies=True), False),
        (Server(races=True), False),
    ],
    ids=["conditional", "lost once", "lost twice", "ignores", "lies", "races"],
)
def test_a_server_is_tried_and_not_believed(hidden_keys, server, expected):
    name = f"probe-{id(server)}"
    assert server.probe(name) is expected
    assert server.list() == []
    server.create = None  # known from now on
    assert server.probe(name) is expected


def test_a_store_that_can_not_be_tried_is_an_error_and_is_asked_again_later(hidden_keys):
    forget_probes()

    def refused(*_: object) -> None:
        raise StorageError("may only be read")

    with pytest.raises(StorageError, match="may only be read"):
        creates_if_absent_in("read-only", refused, refused, refused)
    assert Server().probe("read-only")


# retries


def test_a_call_is_repeated_until_its_total_deadline():
    now = [0.0]
    tries: list[float] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def fail() -> None:
        tries.append(now[0])
        now[0] += 1.0
        raise ConnectionError("cut")

    retrying = Retrying(10.0, clock=lambda: now[0], sleep=sleep, random_share=lambda: 0.5)
    with pytest.raises(ConnectionError) as raised:
        retrying.call(fail, lambda error: 60.0)
    assert now[0] <= 11.0
    assert len(tries) >= 4
    assert raised.value.__notes__ == [f"retried {len(tries) - 1} times"]
    # Whoever asks again soon, as an outer loop does, has no second budget.
    with pytest.raises(ConnectionError) as once:
        retrying.call(fail, lambda error: 60.0)
    assert not hasattr(once.value, "__notes__")
    # Nor where calls of another kind succeed.
    assert retrying.call(lambda: 1, lambda error: 60.0, kind="read") == 1
    with pytest.raises(ConnectionError) as twice:
        retrying.call(fail, lambda error: 60.0)
    assert not hasattr(twice.value, "__notes__")
    now[0] += 10.0
    before = len(tries)
    with pytest.raises(ConnectionError):
        retrying.call(fail, lambda error: 3.0)
    assert 1 < len(tries) - before < 5


def test_a_store_that_answered_again_has_a_whole_budget_again():
    now, answers = [0.0], iter([])

    def ask() -> int:
        now[0] += 1.0
        answer = next(answers, None)
        if answer is None:
            raise ConnectionError("cut")
        return answer

    def sleep(seconds: float) -> None:
        now[0] += seconds

    retrying = Retrying(10.0, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(ConnectionError, match="cut"):
        retrying.call(ask, lambda error: 60.0)
    answers = iter([1])
    assert retrying.call(ask, lambda error: 60.0) == 1
    begun_s = now[0]
    with pytest.raises(ConnectionError, match="cut"):
        retrying.call(ask, lambda error: 60.0)
    assert now[0] - begun_s > 5.0


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


class CutStore:
    """Stands for `obstore.get`: its streams end with an error, but the last one."""

    def __init__(self, data: bytes, cuts: int) -> None:
        self.data, self.cuts, self.ranges = data, cuts, []

    def get(self, store, path, *, options):
        self.ranges.append(options["range"])
        start, stop = options["range"]
        outer = self

        class Found:
            def stream(self, min_chunk_size):
                yield outer.data[start : start + 3]
                if outer.cuts:
                    outer.cuts -= 1
                    raise GenericError("HTTP error: error decoding response body")
                yield outer.data[start + 3 : stop]

        return Found()


def test_a_read_goes_on_where_it_was_cut(monkeypatch):
    cut = CutStore(bytes(range(20)), cuts=2)
    monkeypatch.setattr(obstore, "get", cut.get)
    store = obstore.store.S3Store("b", access_key_id="k", secret_access_key="s")
    storage = ObjectStorage(store, retrying=Retrying(10, sleep=lambda _: None))
    target = bytearray(12)
    storage.read_into("a", 5, memoryview(target))
    assert target == cut.data[5:17]
    assert cut.ranges == [(5, 17), (8, 17), (11, 17)]


def test_two_servers_with_a_bucket_of_the_same_name_are_two_stores():
    options = {"access_key_id": "k", "secret_access_key": "s"}
    names = {
        name_of_store(obstore.store.S3Store("b", endpoint=endpoint, prefix=prefix, **options))
        for endpoint in ("http://one", "http://two")
        for prefix in ("x", "y/z")
    }
    assert len(names) == 2


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


def test_what_may_pass_is_told_from_what_will_not():
    assert worth_s(GenericError(f"{PUT} - HTTP error: error sending request")) > 1000
    assert worth_s(GenericError(f"{PUT} - status code: 503: no")) > 1000
    assert worth_s(GenericError(f"{PUT} - status code: 400: <Code>RequestTimeout</Code>")) > 1000
    assert worth_s(GenericError(f"{PUT} - HTTP error: error sending request: kind: Connect")) == 10
    assert worth_s(GenericError(f"{PUT} - status code: 403: timed out")) == 0
    assert worth_s(PermissionDeniedError("no")) == 0
    assert is_past_the_end(GenericError("status code: 416 Range Not Satisfiable"))
    assert not is_past_the_end(GenericError("status code: 403, request 41612"))


def test_credentials_are_kept_out_of_texts():
    options = {"secret": "abcdef", "client_kwargs": {"token": "tok-1"}, "region": "eu-1", "k": 7}
    assert redacted("abcdef and tok-1 in eu-1", options) == "… and … in eu-1"


# crashes


def test_an_interrupted_save_on_objects_leaves_the_previous_or_the_new_checkpoint():
    make = lambda: ObjectStorage(obstore.store.MemoryStore(), "run")  # noqa: E731
    reached = check_crashes("save.overwrite", storage=make, variants=["before", "lost"], every=5)
    assert {"new", "previous"} <= set(reached.stood)


@pytest.mark.parametrize("name", ["save.overwrite", "delete"])
def test_an_interrupted_operation_through_fsspec_leaves_the_previous_or_the_new(name, tmp_path):
    numbers = itertools.count()
    # Where nothing creates if absent, what a crash leaves is not told from what may yet commit.
    weaker = [invariant for invariant in INVARIANTS if invariant is not nothing_is_left]
    for filesystem, invariants, every in (("memory", INVARIANTS, 7), ("file", weaker, 11)):
        reached = check_crashes(
            name,
            storage=lambda filesystem=filesystem: FsspecStorage(
                fsspec.filesystem(filesystem), f"{tmp_path}/{next(numbers)}"
            ),
            invariants=invariants,
            variants=["before", "lost", "broken"],
            every=every,
        )
        assert sum(reached.points.values()) >= 4
