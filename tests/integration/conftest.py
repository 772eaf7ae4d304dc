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
from tests.support import verl_env, xla_env
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


# What is left out where it is not installed, by the file of its tests.
ENVIRONMENTS = {
    "test_exchange_torch29.py": ("torch_xla", xla_env, xla_env.PYTHON_VARIABLE),
    "test_verl_itself.py": ("verl", verl_env, verl_env.HOME_VARIABLE),
}
collect_ignore = [
    name for name, (_, module, _) in ENVIRONMENTS.items() if not module.chosen().exists()
]


def pytest_report_header() -> list[str]:
    return [
        f"left out: {name}, as there is no environment of {package} at {module.chosen()} (make it "
        f"with `python -m {module.__name__}`, or set {variable})"
        for name, (package, module, variable) in ENVIRONMENTS.items()
        if name in collect_ignore
    ]


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
