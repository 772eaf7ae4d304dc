"""A real Ray for test modules, as small and as quiet as it can be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ray_dcp.errors import CheckpointError
from tests.support import xla_env
from tests.support.daemons import Daemons, driven
from tests.support.processes import lives
from tests.support.servers.s3 import fresh_place, server_on_memory_disk

if TYPE_CHECKING:
    from ray_dcp.store.location import Location
    from ray_dcp.worker_group import WorkerGroup
    from tests.support.servers.s3 import DevStore

THIRD_PARTY_WARNINGS = (
    # Stock DCP says so when it is used in one process, which tests of our files do on purpose.
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning",
)


OF_TORCH_XLA = "test_exchange_torch29.py"
collect_ignore = [] if xla_env.chosen().exists() else [OF_TORCH_XLA]


def pytest_report_header() -> str | None:
    if not collect_ignore:
        return None
    return (
        f"left out: {OF_TORCH_XLA}, as there is no environment of torch_xla at "
        f"{xla_env.chosen()} (make it with `python -m tests.support.xla_env`, or set "
        f"{xla_env.PYTHON_VARIABLE})"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def sound_group(request: pytest.FixtureRequest) -> None:
    """Hands a test `ranks` that live."""
    if "ranks" in request.fixturenames:
        mend(request.getfixturevalue("ranks"))


def mend(group: WorkerGroup) -> None:
    """Replaces the ranks of a group if one of them died, or does not answer in time."""
    options = group.options
    group.options = replace(options, run_timeout_s=60.0, release_s=60.0)
    try:
        group.run(os.getpid)
    except CheckpointError:
        group.resize(group.world_size)
    finally:
        group.options = options


@pytest.fixture(scope="session")
def servers() -> Iterator[DevStore]:
    yield from server_on_memory_disk()


@pytest.fixture(scope="module")
def server(servers: DevStore) -> DevStore:
    """A real S3 server; one for all modules, as it takes seconds to start and to stop."""
    if not lives(servers.pid):
        servers.stop()
        servers.start()
    return servers


@pytest.fixture
def place(server: DevStore) -> Location:
    """A place of its own on the S3 server."""
    return fresh_place(server)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stays until the run ends: actors outlive a test, and look for its files."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that play ranks."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def ray_daemons() -> Iterator[Daemons]:
    with closing(Daemons()) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def ray_session(ray_daemons: Daemons) -> Iterator[str]:
    """A driver on this machine for one module.

    Its Ray is shared by the modules of this process: to start one takes longer than most of them.
    """
    yield from driven(ray_daemons)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, ray_session: str) -> Iterator[WorkerGroup]:
    """As many ranks as the `NUM_RANKS` of the module."""
    # Why here: the process that hands out the tests reads this file too, and needs no Ray.
    from ray_dcp.worker_group import WorkerGroup

    with WorkerGroup(request.module.NUM_RANKS, run_timeout_s=400, release_s=60) as group:
        yield group


@pytest.fixture(scope="module")
def own_ray_session() -> Iterator[str]:
    """A Ray for one module, with its environment; everything it leaves is removed."""
    with closing(Daemons()) as daemons:
        yield from driven(daemons)
