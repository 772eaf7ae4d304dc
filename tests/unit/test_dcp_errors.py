"""Each error that DCP documents arises where DCP raises it, as that class and as ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import ray_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


CASES: dict[str, tuple[Callable[[Any, Path], Any], type[Exception]]] = {
    "a key that is missing": (
        lambda dcp, path: dcp.load({"lost": torch.zeros(1)}, checkpoint_id=path),
        RuntimeError,
    ),
    "another shape": (
        lambda dcp, path: dcp.load({"w": torch.zeros(3)}, checkpoint_id=path),
        ValueError,
    ),
    "a checkpoint that must stay": (
        lambda dcp, path: dcp.save(
            {"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(path, overwrite=False)
        ),
        RuntimeError,
    ),
    "nowhere to save to": (lambda dcp, path: dcp.save({"w": torch.ones(2)}), RuntimeError),
    "nothing to load from": (lambda dcp, path: dcp.load({"w": torch.ones(2)}), RuntimeError),
    "two values of one name": (
        lambda dcp, path: dcp.save({"a": {"b": 1}, "a.b": 2}, checkpoint_id=path),
        ValueError,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_is_dcps_and_ours(tmp_path: Path, case: str):
    act, expected = CASES[case]
    for number, dcp in enumerate((stock, ray_dcp)):
        path = tmp_path / str(number)
        stock.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
        with pytest.raises((stock.CheckpointException, Exception)) as caught:
            act(dcp, path)
        errors = [caught.value]
        if isinstance(caught.value, stock.CheckpointException):
            errors += [each for each, _ in caught.value.failures.values()]
        assert any(isinstance(each, expected) for each in errors), errors
    assert isinstance(caught.value, expected)
    assert isinstance(caught.value, ray_dcp.CheckpointError)
    assert isinstance(caught.value, stock.CheckpointException)
