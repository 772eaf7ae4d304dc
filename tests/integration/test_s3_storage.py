"""A real S3 server: what `ObjectStorage` promises there, how many requests, every verb."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.errors import StorageError
from ray_dcp.manager import CheckpointManager
from ray_dcp.store import conditional_create
from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError, KeyMissingError
from ray_dcp.testing import StorageConformance
from tests.support import cli_story
from tests.support.servers.s3 import fresh_place, proxy_before, through, unfinished_uploads

PART = 5 << 20


@pytest.fixture
def proxy(server):
    yield from proxy_before(server)


def with_options(place: Location, **options: object) -> Location:
    return Location(place.url, {**place.storage_options, **options})


def random_bytes(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 255, count, np.uint8)


def write_and_commit(writer, count: int) -> None:
    writer.write(random_bytes(count).data)
    writer.commit()


class TestS3(StorageConformance):
    RACES = 1  # SeaweedFS has most of 16 wait for seconds

    @pytest.fixture
    def storage(self, place):
        return open_storage(place)


# uploads in parts


@pytest.mark.parametrize("extra", [1, 3 * PART, 4 * PART + 17])
def test_a_file_of_several_parts_is_whole(place, extra):
    storage = open_storage(with_options(place, request_bytes=PART, upload_bytes=2 * PART))
    data = random_bytes(PART + extra)
    writer = storage.open_writer("part")
    for start in range(0, len(data), 3_000_017):
        writer.write(data[start : start + 3_000_017].data)
        assert storage.list() == []
    writer.commit()
    target = bytearray(len(data))
    storage.read_into("part", 0, memoryview(target))
    assert target == data.tobytes()


def test_an_upload_that_is_given_up_leaves_nothing_behind(server, place):
    storage = open_storage(with_options(place, request_bytes=PART))
    writer = storage.open_writer("part")
    writer.write(random_bytes(3 * PART).data)
    writer.abort()
    dropped = storage.open_writer("dropped")
    dropped.write(random_bytes(3 * PART).data)
    del dropped
    assert storage.list() == []
    assert unfinished_uploads(place) == []


def test_a_long_file_is_not_published_over_another(server, place):
    storage = open_storage(with_options(place, request_bytes=PART))
    writer = storage.open_writer("part")
    writer.write(random_bytes(2 * PART).data)
    storage.write("part", b"first")
    with pytest.raises(KeyExistsError):
        writer.commit()
    assert storage.read("part") == b"first"
    assert unfinished_uploads(place) == []


# connections that are cut


def test_a_read_goes_on_where_its_connection_was_cut(place, proxy):
    data = random_bytes(6 << 20)
    open_storage(place).write("a", data.data)
    storage = open_storage(through(proxy, place))
    proxy.next_fault("truncate", times=3)
    target = bytearray(len(data))
    storage.read_into("a", 0, memoryview(target))
    assert target == data.tobytes()
    assert proxy.hits["truncate"] == 3


@pytest.mark.parametrize("fault", ["drop", "lost"])
def test_an_upload_survives_cut_connections(place, proxy, fault):
    storage = open_storage(through(proxy, place, request_bytes=PART))
    data = random_bytes(4 * PART + 5)
    writer = storage.open_writer("part")
    proxy.next_fault(fault, times=3)
    writer.write(data.data)
    writer.commit()
    assert proxy.hits[fault] == 3
    assert open_storage(place).read("part") == data.tobytes()


def test_a_create_whose_answer_was_lost_meets_itself(place, proxy):
    storage = open_storage(through(proxy, place))
    proxy.next_fault("lost")
    with pytest.raises(KeyExistsError):
        storage.write("slot", b"mine", create=True)
    assert proxy.hits["lost"] == 1
    assert storage.read("slot") == b"mine"


def test_a_store_that_is_gone_is_told_in_time_and_nothing_is_visible(server, place, proxy):
    storage = open_storage(through(proxy, place, request_bytes=PART, retry_timeout_s=1))
    writer = storage.open_writer("part")
    proxy.share, proxy.faults = 1.0, ("drop",)
    with pytest.raises(
        StorageError, match=rf"could not publish {place.url}/part: .*retr"
    ) as raised:
        write_and_commit(writer, 9 * PART)
    assert raised.value.key == "part"
    assert open_storage(place).list() == []
    with pytest.raises(StorageError, match=r"could not read .*check the endpoint and the network"):
        storage.read("part")


# bad input


def test_wrong_credentials_are_told_without_showing_them(place):
    storage = open_storage(with_options(place, secret_access_key="hush-hush-secret"))
    for call in (
        lambda: storage.write("a", b"1"),
        lambda: storage.read("a"),
        lambda: storage.list(),
        lambda: storage.delete(["a"]),
        lambda: storage.open_writer("a").commit(),
    ):
        with pytest.raises(StorageError, match=r"403.*check the") as raised:
            call()
        assert not isinstance(raised.value, KeyMissingError)
        assert "hush" not in f"{raised.value!r}{raised.value}"
    assert place.url in str(raised.value)


def test_credentials_of_the_environment_may_be_renewed_after_they_were_refused(place, monkeypatch):
    options = dict(place.storage_options)
    secret = options.pop("secret_access_key")
    by_environment = Location(place.url, options)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "an-older-secret")
    with pytest.raises(StorageError, match="403"):
        open_storage(by_environment).list()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert open_storage(by_environment).list() == []


def test_a_missing_bucket_is_told(place):
    storage = open_storage(Location("s3://nobody-made-it/run", place.storage_options))
    for call in (lambda: storage.write("a", b"1"), lambda: storage.list()):
        with pytest.raises(StorageError, match=r"NoSuchBucket.*create the bucket") as raised:
            call()
        assert not isinstance(raised.value, KeyMissingError)


def test_who_may_only_read_is_told_that_nothing_can_be_created_there(place):
    conditional_create._KNOWN.clear()
    storage = open_storage(with_options(place, skip_signature=True))
    with pytest.raises(StorageError, match=r"403 AccessDenied.*give these credentials the right"):
        _ = storage.traits
    assert open_storage(place).traits.create_if_absent


def test_a_listing_of_several_pages_is_whole(place):
    storage = open_storage(place)
    for number in range(2100):  # three pages of a listing
        storage.write(f"step-{number:05d}/.metadata", b"")
    assert len(storage.list()) == 2100
    assert len(storage.list("step-0001")) == 10


# memory


UPLOADS = """
import json
import resource
import sys
import threading

from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

url, options, num_files, file_bytes = json.loads(sys.argv[1])
storage = open_storage(Location(url, options))
data = memoryview(bytearray(4 << 20))
with_all_threads = threading.Barrier(num_files)
# Connections and threads are there before it is measured.
storage.write("warm", bytes(data))
before = peak_bytes()

def upload(number):
    writer = storage.open_writer(f"file-{number}")
    with_all_threads.wait()
    for _ in range(file_bytes // len(data)):
        writer.write(data)
    writer.commit()

threads = [threading.Thread(target=upload, args=(n,)) for n in range(num_files)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert [entry.num_bytes for entry in storage.list("file-")] == num_files * [file_bytes]
print(peak_bytes() - before)
"""
"""Uploads several files at a time, and prints by how many bytes the process grew at most."""


@pytest.mark.parametrize(("num_files", "num_requests", "length"), [(1, 32, 96), (6, 16, 32)])
def test_uploads_stay_within_their_budget_whatever_runs_at_a_time(
    place, num_files, num_requests, length
):
    options = {
        **place.storage_options,
        "request_bytes": PART, "upload_bytes": 16 << 20, "num_requests": num_requests,
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", UPLOADS,
         json.dumps([place.url, options, num_files, length << 20])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    most = (16 << 20) + num_files * PART  # each file has a part that it fills
    threads = (8 << 20) + num_files * (2 << 20)
    assert int(found.stdout) < most + threads


# requests


AWAY_S = 0.05


@pytest.fixture
def away(server, proxy):
    found = through(proxy, fresh_place(server))
    # The first save of a process tries what the store can do.
    ray_dcp.save(state(0), checkpoint_id=found / "first", no_dist=True)
    proxy.delay_s = AWAY_S
    proxy.forget()
    return found


def state(step: int) -> dict[str, object]:
    return {f"layers.{i}.weight": torch.full((16,), float(step)) for i in range(8)} | {"step": step}


def test_a_small_save_waits_for_few_requests(away, proxy):
    ray_dcp.save(state(1), checkpoint_id=away / "one", no_dist=True)
    told = "\n".join(proxy.seen)
    assert len(proxy.seen) <= 11, told
    assert proxy.depth <= 8, told
    assert proxy.seen[0].startswith("GET"), told


def test_a_small_load_waits_for_few_requests(away, proxy):
    ray_dcp.save(state(1), checkpoint_id=away / "one", no_dist=True)
    proxy.forget()
    found = state(0)
    ray_dcp.load(found, checkpoint_id=away / "one", no_dist=True)
    told = "\n".join(proxy.seen)
    assert found["step"] == 1
    assert len(proxy.seen) <= 5, told
    assert proxy.depth <= 3, told


def test_a_manager_that_begins_again_does_not_read_every_step(server, away, proxy):
    near = Location(away.url, {**away.storage_options, "endpoint": server.endpoint})
    with CheckpointManager(near / "run", 1, chkpt_on_preemption=False) as manager:
        for step in range(40):
            manager.save(step, state(step))
    proxy.forget()
    again = CheckpointManager(away / "run", 1, chkpt_on_preemption=False)
    again.save(40, state(40))
    assert len(proxy.seen) <= 30, "\n".join(proxy.seen)
    again.close()


# the command


def test_every_verb_prints_what_it_did(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    run = f"{server.location.url}/cli/run"
    cli_story.make_ours(run)
    names = [f"step-{step:08d}" for step in (100, 200)]
    todo = cli_story.commands(run, tmp_path, names, ours=True)
    found = cli_story.tell(todo, {run: "RUN", str(tmp_path): "WORK"})
    # What doctor says of buckets is the only difference from a run on a disk.
    told, of_bucket = re.subn(
        r"^note uploads the bucket needs a lifecycle rule .*\n", "", found, flags=re.M
    )
    assert of_bucket == 1
    cli_story.compare("ours", told, renew=False)
