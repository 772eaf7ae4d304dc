"""What killed processes leave in a bucket: parts of uploads, which no listing of keys shows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import ray_dcp
from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage
from tests.s3_server import CuttingProxy, fresh_place

DEAD = "0123456789abcdef"


@pytest.fixture
def place(server):
    return fresh_place(server)


DEAD_FILE = f"__0_0.{DEAD}.distcp"


def killed_in_uploads(*begun: tuple[Location, str]) -> None:
    """Has a process begin uploads, and kills it."""
    told = [
        [place.url, {**place.storage_options, "request_bytes": 5 << 20}, key]
        for place, key in begun
    ]
    program = [sys.executable, "-m", "tests.integration.killed_uploader"]
    with subprocess.Popen(
        [*program, json.dumps(told)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "begun\n"
        process.kill()


def save(place: Location, number: float) -> None:
    ray_dcp.save({"w": torch.full((4,), number)}, checkpoint_id=place, no_dist=True)


def unpublished(place: Location) -> list[str]:
    return [entry.key.rpartition("-")[2] for entry in open_storage(place).unpublished()]


def test_collect_aborts_uploads_of_attempts_that_can_not_commit_any_more(place):
    save(place, 1.0)
    killed_in_uploads((place, DEAD_FILE))
    before = ray_dcp.collect(place)
    assert [kept.reason for kept in before.kept] == [f"attempt {DEAD} may still be committed"]
    assert unpublished(place) == [DEAD_FILE]
    told = ray_dcp.collect(place, abort_unfinished=True, dry_run=True)
    assert len(told.deleted) == 1
    assert len(unpublished(place)) == 1
    report = ray_dcp.collect(place, abort_unfinished=True)
    assert report.fenced == (DEAD,)
    assert report.warnings == ()
    assert report.deleted == told.deleted
    assert unpublished(place) == []
    assert ray_dcp.load({"w": torch.zeros(4)}, checkpoint_id=place, no_dist=True).missing == ()


def test_the_next_save_aborts_them_and_touches_no_upload_of_others(place):
    # also not one of another checkpoint, whose name only begins so
    near = Location(f"{place.url}-2", place.storage_options)
    killed_in_uploads((place, DEAD_FILE), (place, "notes.bin"), (near, DEAD_FILE))
    assert len(unpublished(place)) == 2
    save(place, 2.0)
    assert unpublished(place) == ["notes.bin"]
    assert unpublished(near) == [DEAD_FILE]


def test_spread_keys_are_found(place):
    there = Location(place.url, {**place.storage_options, "hashed_prefixes": 4})
    killed_in_uploads((there, DEAD_FILE))
    save(there, 2.0)
    assert unpublished(there) == []


def test_where_they_can_not_be_listed_a_save_goes_on_and_collect_says_what_to_do(
    server, place, monkeypatch
):
    options = dict(place.storage_options)
    secret = options.pop("secret_access_key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    # Of the environment: the key id belongs to it.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("access_key_id"))
    by_environment = Location(place.url, options)
    save(by_environment, 1.0)
    killed_in_uploads((place, DEAD_FILE))
    assert len(unpublished(by_environment)) == 1

    from obstore.store import S3Store

    def given():
        return {"access_key_id": server.access_key_id, "secret_access_key": secret,
                "token": None, "expires_at": None}  # fmt: skip

    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    renewed = S3Store(
        "ckpt", config={"endpoint": server.endpoint, "region": "us-east-1"},
        client_options={"allow_http": True}, credential_provider=given,
    )  # fmt: skip
    below = Location(place.url.removeprefix("s3://ckpt/"), filesystem=renewed)
    assert len(unpublished(below)) == 1

    proxy = CuttingProxy(int(server.endpoint.rpartition(":")[2]))
    endpoint = f"http://127.0.0.1:{proxy.port}"
    storage = open_storage(Location(place.url, {**place.storage_options, "endpoint": endpoint}))
    assert len(storage.unpublished()) == 1
    assert storage.unseen is None
    proxy.close()
    assert storage.unpublished() == ()
    assert "lifecycle rule AbortIncompleteMultipartUpload" in storage.unseen
    assert secret not in storage.unseen
