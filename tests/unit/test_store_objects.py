"""`ObjectStorage` without a server: its budget, its probe, its retries, what its errors mean."""

from __future__ import annotations

import gc
import itertools
import threading

import fsspec
import numpy as np
import obstore
import obstore.store
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from ray_dcp.errors import StorageError
from ray_dcp.store.create_probe import creates_if_absent_in, forget_probes
from ray_dcp.store.fsspec_storage import FsspecStorage
from ray_dcp.store.hashed_keys import HashedKeys
from ray_dcp.store.object_errors import is_cut, is_past_the_end, object_failure
from ray_dcp.store.object_options import ObjectOptions
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.store.object_stores import name_of_store
from ray_dcp.store.object_writer import UploadBudget, _Own, _Pieces
from ray_dcp.store.retrying import Retrying, pauses
from ray_dcp.store.secrets_kept import redacted
from ray_dcp.store.storage import KeyExistsError, KeyMissingError
from ray_dcp.testing import INVARIANTS, check_crashes
from ray_dcp.testing.invariants import nothing_is_left

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


def test_pieces_come_in_order_and_end_or_fail():
    pieces = _Pieces()
    arrays = [np.full(3, n, np.uint8) for n in range(3)]
    for array in arrays:
        pieces.add(array)
    pieces.end(None)
    assert [piece[0] for piece in pieces] == [0, 1, 2]
    failing = _Pieces()
    failing.add(arrays[0])
    failing.end(ValueError("stop"))
    with pytest.raises(ValueError, match="stop"):
        next(failing)


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


class Server:
    """Keys to bytes, with the ways in which a server may fail its conditions."""

    def __init__(self, *, ignores=False, lies=False, loses=0) -> None:
        self.values: dict[str, bytes] = {}
        self.ignores, self.lies, self.loses = ignores, lies, loses
        self.lock = threading.Lock()

    def put(self, name: str, data: bytes) -> bool:
        with self.lock:
            is_taken = name in self.values
            if not is_taken or self.ignores or self.lies:
                self.values[name] = data
            if not is_taken and self.loses:
                self.loses -= 1
                return False  # asked again, and met itself
            return not is_taken or self.ignores

    def _delete(self, name: str) -> None:
        self.values.pop(name, None)

    def probe(self, name: str) -> bool:
        return creates_if_absent_in(name, self.put, self.values.get, self._delete)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server(), True),
        (Server(loses=1), True),
        (Server(loses=2), True),
        (Server(ignores=True), False),
        (Server(lies=True), False),
    ],
    ids=["conditional", "lost once", "lost twice", "ignores", "lies"],
)
def test_a_server_is_tried_and_not_believed(server, expected):
    name = f"probe-{id(server)}"
    assert server.probe(name) is expected
    assert server.values == {}
    server.put = None  # known from now on
    assert server.probe(name) is expected


def test_a_race_that_several_win_is_seen():
    values: dict[str, bytes] = {}

    def put(name: str, data: bytes) -> bool:
        free = name not in values or name.endswith("race")
        values.setdefault(name, data)
        return free

    assert not creates_if_absent_in("racy", put, values.get, lambda name: values.pop(name, None))


def test_a_store_that_may_only_be_read_is_asked_again_later():
    forget_probes()

    def refused(*_: object) -> bool:
        raise StorageError("no") from PermissionDeniedError("no")

    server = Server()
    refusing = [refused, lambda _: None, lambda _: None]
    assert not creates_if_absent_in("read-only", *refusing)
    assert server.probe("read-only")

    def gone(*_: object) -> bool:
        raise StorageError("gone")

    with pytest.raises(StorageError, match="gone"):
        creates_if_absent_in("gone", gone, gone, gone)
    assert server.probe("gone")


# hashed prefixes


def test_only_what_lies_under_its_own_hash_is_a_key():
    keys = HashedKeys("run", 16)
    paths = [f"{number:02x}/run/a" for number in range(16)]
    assert [keys.key(path) for path in paths].count("a") == 1
    assert keys.key(keys.path("a")) == "a"
    assert keys.key("run/a") is None
    assert keys.key("00/other/a") is None


def test_hashed_keys_lie_in_many_prefixes_and_are_listed_together():
    store = obstore.store.MemoryStore()
    storage = ObjectStorage(store, "run", options=ObjectOptions(hashed_prefixes=8))
    for number in range(40):
        storage.write(f"step-{number}/a", b"1")
    found = [item["path"] for chunk in obstore.list(store) for item in chunk]
    assert len({path[:2] for path in found}) >= 6
    assert len(storage.list()) == 40
    assert len(storage.list("step-1")) == 11


# retries


def test_pauses_grow_with_jitter_and_have_a_limit():
    found = list(itertools.islice(pauses(lambda: 0.0), 12))
    assert found == sorted(found)
    assert found[0] == 0.05
    assert found[-1] == 5.0


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
        retrying.call(fail, lambda error: True)
    assert now[0] <= 11.0
    assert len(tries) >= 4
    assert raised.value.__notes__ == [f"tried {len(tries)} times"]
    with pytest.raises(ConnectionError) as once:
        retrying.call(fail, lambda error: False)
    assert not hasattr(once.value, "__notes__")


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
                           "<Message>none</Message>"), StorageError, "create the bucket"),
        (AlreadyExistsError("x"), KeyExistsError, "exists already"),
        (GenericError(f"{PUT}, after 3 retries - status code: 503: <Code>SlowDown</Code>"),
         StorageError, "503 SlowDown .*retried 3 times.*throttles"),
        (GenericError(f"{PUT} - status code: 400: <Code>ExpiredToken</Code>"), StorageError,
         "not retried.*credential_provider"),
        (GenericError(f"{PUT} - status code: 403: <Code>RequestTimeTooSkewed</Code>"),
         StorageError, "set this machine's clock"),
        (GenericError(f"{PUT} - status code: 507: full"), StorageError, "free space"),
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


def test_cut_connections_are_told_from_answers():
    assert is_cut(GenericError(f"{PUT} - HTTP error: error sending request"))
    assert not is_cut(GenericError(f"{PUT} - status code: 403: timed out"))
    assert not is_cut(PermissionDeniedError("no"))
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
