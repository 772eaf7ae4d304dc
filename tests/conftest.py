"""For all tests: the environment that they begin with, whatever the shell around them has."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest

from tests.support.programs.forks import Programs

# Why: a shell makes those that it starts in the background ignore SIGINT, and so Ctrl-C would do
# nothing in tests of Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Why: what is imported is compiled once, by the first of the many processes that import it; else
# each of them spends 3 s more on torch and Ray.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before ray is imported anywhere: 2.60 otherwise writes a token to the home directory, and its
# memory monitor kills our actors when somebody else fills the machine.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Why: Ray gives a worker a minute to start, and a busy machine may need it for the imports alone.
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
# Why: Ray's workers give way to every other process (15), so those of a test to the tests beside.
os.environ.setdefault("RAY_worker_niceness", "0")

# Why: `ray.init()` joins the cluster that RAY_ADDRESS names, or the newest whose address lies in
# this directory. Tests join none that they did not start; its sockets need a short path.
os.environ.pop("RAY_ADDRESS", None)
# Why: what commands print is compared.
for name in ("NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(name, None)
DIRECTORY = tempfile.mkdtemp(prefix="rt", dir="/tmp")
os.environ["RAY_TMPDIR"] = DIRECTORY

# Why: a disk makes every save durable, which is half of the time of most tests, and more beside
# others that write. `test_store_local` has the disk.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Why: how long an example takes says what else the machine does, and a hang is ended by `timeout`.
# Every run tries the same examples; `--hypothesis-profile=explore` tries new ones each time.
hypothesis.settings.register_profile(
    "same", hypothesis.settings.default, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile(
    "explore", hypothesis.settings.default, deadline=None, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("same")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(DIRECTORY, ignore_errors=True)


FIRST = ("unit", "property")
"""Folders whose tests start no cluster: what they find is known within minutes."""
LONGEST = (
    "test_train", "test_job_steps", "test_accelerate", "test_verl",
    "test_socket_ranks", "test_matrix", "test_async_bad_input", "test_heartbeats",
    "test_cluster_configs", "test_two_jobs", "test_torchrun", "test_async_saves",
    "test_s3_refusals", "test_frameworks", "test_reshard", "test_s3_storage",
    "test_runtime_stager", "test_memory_tier_nodes", "test_runtime_coordinator",
    "test_s3_saves", "test_metrics", "test_runtime_workers", "test_beside_jobs",
    "test_s3_bad_network", "test_full_memory", "test_memory_tier", "test_lightning",
    "test_repeated_saves", "test_azure_storage", "test_alone_in_ray", "test_bad_input_ranks",
    "test_full_disk", "test_manager_ranks", "test_gatherers",
)  # fmt: skip
"""Files of the other folders that take longest: they come first of these, so that several
processes end at about the same time. In front are those that mostly wait: meanwhile the others
have the cores."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}

    def turn(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return -1 if folder in FIRST else place.get(item.path.stem, len(LONGEST))

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    # Else each collection of garbage looks through torch, Ray and all tests, 0.2 s of CPU.
    gc.freeze()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Programs of their own, which start at once."""
    with closing(Programs()) as programs:
        yield programs


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Makes all that tests share anew after one that failed: so it fails no other."""
    if item.stash.get(_FAILED, False):
        item.session._setupstate.teardown_exact(None)
