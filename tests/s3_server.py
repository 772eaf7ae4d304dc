"""A real S3 server for tests: one SeaweedFS a test session, an empty place a test."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from functools import cache

from ray_dcp.store.location import Location
from ray_dcp.testing.dev_store import DevStore

__all__ = ["fresh_place", "server_on_memory_disk"]


def server_on_memory_disk() -> Iterator[DevStore]:
    """Yields a server that keeps its data in memory, so that no test waits for a disk."""
    directory = f"/dev/shm/ray_dcp-s3-{uuid.uuid4().hex}"
    try:
        with DevStore(directory, volume_mb=64) as server:
            yield server
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@cache
def _session() -> str:
    return uuid.uuid4().hex[:8]


def fresh_place(server: DevStore) -> Location:
    """Returns a place that no other test uses."""
    return server.location / f"{_session()}/{uuid.uuid4().hex}"
