"""A real Ray for test modules, as small and as quiet as it can be."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.s3_server import server_on_memory_disk

# Before ray is imported anywhere: 2.60 otherwise writes a token to the home directory, and its
# memory monitor kills our actors when somebody else fills the machine.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

THIRD_PARTY_WARNINGS = (
    # Stock DCP says so when it is used in one process, which tests of our files do on purpose.
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning",
)


DAEMONS = {"num_cpus": 8, "object_store_memory": 256 << 20, "include_dashboard": False}

LONGEST = (
    "test_train", "test_reshard", "test_async_saves", "test_cluster_configs", "test_bench_soak",
    "test_torchrun", "test_runtime_own_ray", "test_shared_reads", "test_memory_tier",
    "test_runtime_workers", "test_s3_cluster", "test_heartbeats", "test_async_bad_input",
    "test_dcp_examples", "test_full_disk", "test_bench_async", "test_gatherers",
    "test_manager_ranks", "test_bad_input_ranks", "test_no_collectives", "test_newest_ranks",
)  # fmt: skip
"""Files that take longest come first: several processes then end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [index for index, item in enumerate(items) if item.path.parent == here]
    rank = {name: number for number, name in enumerate(LONGEST)}
    ordered = sorted((items[i] for i in own), key=lambda item: rank.get(item.path.stem, len(rank)))
    for index, item in zip(own, ordered, strict=True):
        items[index] = item


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def server():
    """A real S3 server; one for all modules, as it takes seconds to start and to stop."""
    yield from server_on_memory_disk()


@pytest.fixture(scope="session")
def ray_address():
    """Ray's daemons, which many modules share: to start them takes longer than most of these."""
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
    (Path(directory) / "ray").mkdir()
    # Why: Ray writes the address of the newest cluster there, and everybody reads it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        head = {**DAEMONS, "temp_dir": f"{directory}/ray"}
        cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_session(ray_address):
    """A driver on this machine for one module; every actor that it leaves is ended."""
    import ray

    ray.init(ray_address, log_to_driver=False, configure_logging=False, namespace="tests")
    yield ray.get_runtime_context().gcs_address
    # Also those that live on by themselves, and what they have in memory.
    for actor in ray.util.list_named_actors(all_namespaces=True):
        # Suppressed: it has ended meanwhile.
        with suppress(ValueError):
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
    ray.shutdown()


@pytest.fixture(scope="module")
def own_ray_session():
    """A Ray for one module, with its environment; everything it leaves is removed."""
    import ray

    directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
    ray.init(
        **DAEMONS,
        log_to_driver=False,
        configure_logging=False,
        namespace="tests",
        _temp_dir=directory,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
