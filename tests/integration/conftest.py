"""A real Ray for a test module, as small and as quiet as it can be."""

from __future__ import annotations

import os
import shutil
import tempfile
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


LONGEST = (
    "test_train", "test_reshard", "test_async_saves", "test_cluster_configs", "test_bench_soak",
    "test_torchrun", "test_runtime_own_ray", "test_shared_reads", "test_memory_tier",
    "test_runtime_workers", "test_s3_cluster", "test_heartbeats", "test_async_bad_input",
    "test_dcp_examples", "test_full_disk", "test_bench_async", "test_gatherers", "test_peer_copy",
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


@pytest.fixture(scope="module")
def ray_session():
    """Ray on this machine for one module; everything it leaves is removed."""
    import ray

    directory = tempfile.mkdtemp(prefix="rd", dir="/tmp")
    ray.init(
        num_cpus=8,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        namespace="tests",
        _temp_dir=directory,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
