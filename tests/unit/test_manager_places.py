"""A manager reaches its steps as it was told to reach the root: by a ready filesystem."""

from __future__ import annotations

import fsspec
import pytest
import torch
from obstore.store import MemoryStore
from pyarrow import fs as arrow

from ray_dcp.manager import CheckpointManager, LatestN
from ray_dcp.store.location import Location

pytestmark = pytest.mark.filterwarnings("ignore:.*only if there is none:UserWarning")


@pytest.fixture(params=["obstore", "fsspec", "pyarrow"])
def root(request, tmp_path):
    return {
        "obstore": lambda: Location("run", filesystem=MemoryStore()),
        "fsspec": lambda: Location("run", filesystem=fsspec.filesystem("dir", path=str(tmp_path))),
        "pyarrow": lambda: Location(
            "run", filesystem=arrow.SubTreeFileSystem(str(tmp_path), arrow.LocalFileSystem())
        ),
    }[request.param]()


def manager_of(root, **given):
    return CheckpointManager(root, 1, chkpt_on_preemption=False, **given)


def test_steps_are_saved_kept_and_restored_there(root):
    with manager_of(root, retention=LatestN(2)) as manager:
        for step in (1, 2, 3):
            manager.save_async(step, {"w": torch.full((3,), float(step))})
        manager.join()
        assert manager.all_steps() == [2, 3]
    state = {"w": torch.zeros(3)}
    report = CheckpointManager(root, read_only=True).restore("auto", state)
    assert (report.step, state["w"][0]) == (3, 3)
