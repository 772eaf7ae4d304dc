"""What an S3 store may refuse in the midst of a save or load, one after the other, by a proxy."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import ray_dcp
from ray_dcp.coordinator.tasks import perform
from ray_dcp.errors import CommitUnknownError, StorageError
from ray_dcp.format.names import CATALOGUE
from ray_dcp.manager import BestN, CheckpointManager, LatestN
from ray_dcp.manager.catalogue import FOLDER
from ray_dcp.store.location import Location
from ray_dcp.store.object_clients import make_store
from ray_dcp.store.object_storage import ObjectStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.retries import Retrying
from tests.support.arrays import state_of
from tests.support.servers.proxy import CUT, BadProxy, Refusal
from tests.support.servers.s3 import proxy_before, through, unfinished_uploads
from tests.support.world import run_ranks, save_ranks

PART = 5 << 20

# What the store answers, and what is told of it.
REFUSALS = {
    "throttling": (503, "SlowDown", r"retried \d+ times.*num_requests"),
    "an expired token": (400, "ExpiredToken", r"not retried.*credential_provider"),
    "clock skew": (403, "RequestTimeTooSkewed", r"not retried.*clock"),
    "a read-only store": (403, "AccessDenied", r"not retried.*right to do that"),
    "no space": (507, "InsufficientStorage", r"retried \d+ times.*free space"),
    "a cut connection": (CUT, "", r"retried \d+ times.*check the endpoint"),
    "a failure of its own": (500, "InternalError", r"retried \d+ times.*retry later"),
}


@pytest.fixture
def proxy(server):
    yield from proxy_before(server)


def far(proxy: BadProxy, place: Location, retry_timeout_s: int = 1) -> Location:
    return through(proxy, place, request_bytes=PART, retry_timeout_s=retry_timeout_s)


def is_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber=" in path


def is_data(method: str, path: str) -> bool:
    return method == "PUT" and ".distcp" in path


def is_table(method: str, path: str) -> bool:
    return method == "PUT" and "chunks." in path


def is_manifest(method: str, path: str) -> bool:
    return method == "PUT" and "manifest-" in path


def is_read(method: str, path: str) -> bool:
    return method == "GET" and ".distcp" in path


def old_stands_and_nothing_is_left(place: Location) -> None:
    found = {"w": torch.zeros(4)}
    ray_dcp.load(found, checkpoint_id=place, no_dist=True)
    assert found["w"].tolist() == [1, 1, 1, 1]
    ray_dcp.collect(place, abort_unfinished=True)
    storage = open_storage(place)
    assert unfinished_uploads(place) == []
    names = [re.sub(r"[0-9a-f]{16}", "ATTEMPT", entry.key) for entry in storage.list()]
    records = [name for name in names if name.startswith(("manifest-", "trace."))]
    assert [name for name in names if name not in records] == [
        ".metadata", "__0_0.ATTEMPT.distcp", "chunks.ATTEMPT.table"
    ]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_refused_in_the_midst_of_a_save_is_told_and_the_previous_one_stands(
    place, proxy, refusal
):
    status, code, told = REFUSALS[refusal]
    there = far(proxy, place)
    ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=there, no_dist=True)
    proxy.refusal = Refusal(status, code, is_part, after=1)
    new = {"w": torch.zeros(4 * PART // 4)}
    with pytest.raises(
        StorageError, match=rf"could not publish {place.url}/__0_0\..*{code}.*{told}"
    ) as raised:
        ray_dcp.save(new, checkpoint_id=there, no_dist=True)
    assert raised.value.key.startswith("__0_0.")
    assert raised.value.rank == 0
    assert proxy.refusal.refused >= 1
    proxy.refusal = None
    old_stands_and_nothing_is_left(place)


@pytest.mark.parametrize("refusal", ["throttling", "a cut connection"])
def test_what_passes_is_waited_for(place, proxy, refusal):
    status, code, _ = REFUSALS[refusal]
    there = far(proxy, place, 60)
    proxy.refusal = Refusal(status, code, is_part, after=1, times=3)
    new = {"w": torch.arange(4.0 * PART // 4)}
    ray_dcp.save(new, checkpoint_id=there, no_dist=True)
    assert proxy.refusal.refused == 3
    proxy.refusal = Refusal(status, code, is_read, times=2)
    found = {"w": torch.zeros(4 * PART // 4)}
    ray_dcp.load(found, checkpoint_id=there, no_dist=True)
    assert proxy.refusal.refused == 2
    assert torch.equal(found["w"], new["w"])


def test_a_commit_that_is_refused_is_told_as_unknown_and_can_be_ended(place, proxy):
    there = far(proxy, place)
    ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=there, no_dist=True)
    proxy.refusal = Refusal(403, "ExpiredToken", is_manifest)
    with pytest.raises(CommitUnknownError, match=r"manifest-00000002.*ExpiredToken") as raised:
        ray_dcp.save({"w": torch.zeros(4)}, checkpoint_id=there, no_dist=True)
    proxy.refusal = None
    attempt = re.search(r"attempt ([0-9a-f]{16})", str(raised.value))[1]
    assert ray_dcp.outcome(place, attempt) == "open"
    old_stands_and_nothing_is_left(place)
    assert ray_dcp.outcome(place, attempt) == "aborted"


def test_a_conflict_with_another_request_does_not_fail_a_save(place, proxy):
    there = far(proxy, place, 60)
    for hits in (is_data, is_manifest):
        proxy.refusal = Refusal(409, "ConditionalRequestConflict", hits, times=2)
        ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=there, no_dist=True)
        assert proxy.refusal.refused == 2


@pytest.mark.parametrize("hits", [is_data, is_part, is_table], ids=["file", "part", "table"])
def test_what_is_altered_on_its_way_is_not_committed(place, proxy, hits):
    there = far(proxy, place)
    ray_dcp.save({"w": torch.ones(4)}, checkpoint_id=there, no_dist=True)
    proxy.alters = hits
    new = {"w": torch.zeros(2 * PART if hits is is_part else 4)}
    with pytest.raises(StorageError, match=r"BadDigest.*the network altered.*https"):
        ray_dcp.save(new, checkpoint_id=there, no_dist=True)
    assert proxy.num_altered
    proxy.alters = lambda method, path: False
    old_stands_and_nothing_is_left(place)


class Time:
    """A clock that goes on by what is slept, and a hundredth of a second a look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        self.now_s += 0.01
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("status", "code", "most"), [(503, "SlowDown", 40), (403, "AccessDenied", 4)]
)
def test_a_save_has_one_budget_however_often_it_looks_again(
    place, proxy, caplog, status, code, most
):
    """Its vote tries again by itself, and so do its ranks when they are told of no outcome."""
    time, options = Time(), far(proxy, place).storage_options
    retrying = Retrying(20.0, clock=time.clock, sleep=time.sleep)
    store, ours = make_store("s3", "ckpt", options)
    root = place.url.removeprefix("s3://ckpt/")

    def opener(_):
        return ObjectStorage(store, root, options=ours, retrying=retrying)

    proxy.refusal = Refusal(status, code, is_manifest)
    ranks = save_ranks(state_of(1), 2, place.url, opener=opener)
    results = run_ranks(ranks, performer=partial(perform, opener=opener))
    assert {type(result.error) for result in results} == {CommitUnknownError}
    assert time.now_s < 30
    assert 0 < proxy.refusal.refused <= most
    told = [record for record in caplog.records if "SlowDown" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"] * (status == 503)


@pytest.mark.parametrize("times", [1, None])
@pytest.mark.parametrize("what", ["step-info-", "manifest-"])
def test_an_answer_that_a_byte_was_changed_in_deletes_no_step(place, proxy, what, times):
    """The best step of a run whose process died before it wrote the catalogue."""

    def manager_at(root):
        keeps = LatestN(1) | BestN(1, "loss")
        return CheckpointManager(root, 1, retention=keeps, chkpt_on_preemption=False)

    def alters(method, path):
        hits = method == "GET" and f"step-00000001/{what}" in path
        return hits and (times is None or proxy.num_altered < times)

    with manager_at(place) as manager:
        for step, loss in ((1, 0.1), (2, 0.9)):
            manager.save(step, {"w": torch.ones(3)}, metrics={"loss": loss})
    open_storage(place).delete([f"{FOLDER}/{CATALOGUE}"])
    proxy.alters_answer = alters
    with manager_at(far(proxy, place)) as manager:
        manager.save(3, {"w": torch.ones(3)}, metrics={"loss": 0.5})
        manager.join()
        assert proxy.num_altered >= (times or 2)
        assert manager.all_steps() == [1, 3]
