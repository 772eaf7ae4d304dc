"""One checkpoint of ours and one of stock DCP, to be looked at and copied, and a small disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkpoints, disks


@pytest.fixture(scope="session")
def saved_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("run") / "step-10")


@pytest.fixture(scope="session")
def stock_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_stock(tmp_path_factory.mktemp("stock") / "step-20")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of its own; skips where this user may not mount one."""
    with disks.small_disk(tmp_path / "disk") as disk:
        if not isinstance(disk, disks.Tmpfs):
            pytest.skip("mounting is not permitted here")
        yield disk.path
