"""A rehearsal leaves a process that has imported what a save needs, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ray_dcp.errors import StorageError
from ray_dcp.runtime import inline
from ray_dcp.store.memory import MemoryStorage


def test_nothing_stays_in_memory_and_it_can_be_repeated():
    for _ in range(2):
        inline.rehearse()
    assert [e.key for e in MemoryStorage("").list() if "rehearsal" in e.key] == []


def test_a_save_after_it_imports_nothing_and_torch_is_not_needed():
    script = """
import sys
from ray_dcp.runtime.inline import rehearse
rehearse()
assert "torch" not in sys.modules
known = set(sys.modules)
rehearse()
print(sorted(set(sys.modules) - known))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_one_that_fails_is_told_in_the_log_and_leaves_nothing(caplog):
    def capture():
        raise StorageError("the disk is on fire")

    thread = inline.begin_rehearsal(capture)
    thread.join(180)
    assert not thread.is_alive()
    assert "the disk is on fire" in caplog.text
    assert [e.key for e in MemoryStorage("").list() if "rehearsal" in e.key] == []


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level("WARNING", logger="ray_dcp")
