"""Ray on the loopback interface, so that nodes of one machine have addresses of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants


@contextmanager
def loopback_addresses() -> Iterator[None]:
    """Makes `ray.init` take 127.0.0.1 as it is, instead of this machine's outer address."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
