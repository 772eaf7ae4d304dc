"""A real Ray for test modules, as small and as quiet as it can be."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ray_dcp.errors import CheckpointError
from tests.support import xla_env
from tests.support.processes import end_all, lives, marked
from tests.support.programs import forked_workers
from tests.support.servers.s3 import fresh_place, server_on_memory_disk

if TYPE_CHECKING:
    from ray_dcp.runtime.worker_group import WorkerGroup
    from ray_dcp.store.location import Location
    from tests.support.servers.s3 import DevStore

THIRD_PARTY_WARNINGS = (
    # Stock DCP says so when it is used in one process, which tests of our files do on purpose.
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning",
)


NODE = {
    "num_cpus": 8, "object_store_memory": 256 << 20, "include_dashboard": False,
    "include_log_monitor": False, "no_monitor": True,
    "setup_worker_path": forked_workers.__file__,
}  # fmt: skip
"""A node of Ray with nothing that tests do not need, and workers that start soon."""

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
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that play ranks."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Daemons:
    """Ray's daemons, in a directory of their own; none before they are asked for.

    Args:
        node: What their node has other than `NODE`.
    """

    def __init__(self, **node: Any) -> None:
        self._node = {**NODE, **node}
        self.directory = ""
        self.cluster: Any = None

    def address(self) -> str:
        """Returns where they are, after starting them again if one of them has ended."""
        if self.cluster is not None and not self.cluster.head_node.remaining_processes_alive():
            self.close()
        while self.cluster is None:
            self._start()
        return self.cluster.address

    def _start(self) -> None:
        """Starts them; does nothing where the machine is so busy that Ray gives up after 30 s."""
        from ray.cluster_utils import Cluster

        self.directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
        (Path(self.directory) / "ray").mkdir()
        with self._named_here():
            head = {**self._node, "temp_dir": f"{self.directory}/ray"}
            try:
                self.cluster = Cluster(initialize_head=True, head_node_args=head)
            except Exception as error:
                mark = f"RAY_TMPDIR={self.directory}"
                end_all(marked(mark), mark)
                shutil.rmtree(self.directory, ignore_errors=True)
                if "timed out during startup" not in str(error):
                    raise

    def close(self) -> None:
        """Ends them, and removes all that they have on disk."""
        if self.cluster is not None:
            with self._named_here():
                self.cluster.shutdown()
            self.cluster = None
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def _named_here(self) -> Iterator[None]:
        """Why: Ray writes the address of the newest cluster there, and everybody reads it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", self.directory)
            yield


@pytest.fixture(scope="session")
def ray_daemons() -> Iterator[Daemons]:
    with closing(Daemons()) as daemons:
        yield daemons


def driven(daemons: Daemons) -> Iterator[str]:
    """Makes this process a driver of daemons; yields their address, and ends every actor then."""
    import ray

    address = daemons.address()
    ray.init(address, log_to_driver=False, configure_logging=False, namespace="tests")
    yield ray.get_runtime_context().gcs_address
    # Also those that live on by themselves, and what they have in memory.
    for actor in ray.util.list_named_actors(all_namespaces=True):
        # Suppressed: it has ended meanwhile.
        with suppress(ValueError):
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
    ray.shutdown()


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
    from ray_dcp.runtime.worker_group import WorkerGroup

    with WorkerGroup(request.module.NUM_RANKS, run_timeout_s=400, release_s=60) as group:
        yield group


@pytest.fixture(scope="module")
def own_ray_session() -> Iterator[str]:
    """A Ray for one module, with its environment; everything it leaves is removed."""
    with closing(Daemons()) as daemons:
        yield from driven(daemons)
