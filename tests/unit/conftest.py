"""One checkpoint of ours and one of stock DCP, to be looked at and copied, and a small disk."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import checkpoints


@pytest.fixture(scope="session")
def saved_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("run") / "step-10")


@pytest.fixture(scope="session")
def stock_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_stock(tmp_path_factory.mktemp("stock") / "step-20")


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of its own; skips where this user may not mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "tmpfs", str(directory)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting is not permitted here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)
