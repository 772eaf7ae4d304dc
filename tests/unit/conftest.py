"""One checkpoint of ours and one of stock DCP, to be looked at and copied, not changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import checkpoints


@pytest.fixture(scope="session")
def saved_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("run") / "step-10")


@pytest.fixture(scope="session")
def stock_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_stock(tmp_path_factory.mktemp("stock") / "step-20")
