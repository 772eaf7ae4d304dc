"""`ObjectStorage` on a real S3 server."""

from __future__ import annotations

import pytest

from ray_dcp.store.opening import open_storage
from ray_dcp.testing.storage_conformance import StorageConformance
from tests.s3_server import fresh_place, server_on_memory_disk


@pytest.fixture(scope="module")
def server():
    yield from server_on_memory_disk()


@pytest.fixture
def place(server):
    return fresh_place(server)


class TestS3(StorageConformance):
    RACES = 1  # SeaweedFS has most of 16 wait for seconds

    @pytest.fixture
    def storage(self, place):
        return open_storage(place)
