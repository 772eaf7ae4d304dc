"""`ObjectStorage` on Azurite."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import itertools
import urllib.request
import uuid

import pytest

from ray_dcp.errors import StorageError
from ray_dcp.store.location import Location
from ray_dcp.store.opening import open_storage
from ray_dcp.testing import StorageConformance
from tests.crash.crashes import check_crashes
from tests.support.servers.azurite import PORT, azurite
from tests.support.storages import race_often

# The account and key that every emulator of Azure has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    with azurite(tmp_path_factory.mktemp("azurite")):
        yield make_container()


def make_container() -> Location:
    """Returns a new container of the emulator that runs."""
    name = f"c{uuid.uuid4().hex}"
    _make_container(name)
    return Location(f"az://{name}", {"use_emulator": True})


def _make_container(name: str) -> None:
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06"
    what = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = f"PUT{chr(10) * 12}{headers}\n{what}".encode()
    signed = hmac.new(base64.b64decode(KEY), text, hashlib.sha256).digest()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
            "Content-Length": "0",
        },
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201


class TestAzure(StorageConformance):
    @pytest.fixture
    def storage(self, container):
        return open_storage(container / uuid.uuid4().hex)


def test_an_interrupted_save_leaves_the_previous_or_the_new_checkpoint(container):
    numbers = itertools.count()
    reached = check_crashes(
        "save.overwrite",
        storage=lambda: open_storage(container / f"crash-{next(numbers)}"),
        variants=["before", "lost"],
        every=4,
    )
    assert {"new", "previous"} <= set(reached.stood)


def test_16_committers_race_50_times_and_one_wins_each_time(container):
    race_often(lambda name: container / f"race-{name}", 16, 50)


def test_a_missing_container_is_told(container):
    storage = open_storage(Location("az://nobody-made-it/run", container.storage_options))
    with pytest.raises(StorageError, match=r"404 ContainerNotFound.*create the container"):
        storage.write("a", b"1")
