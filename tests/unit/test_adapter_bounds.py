"""What a `.metadata` claims takes no memory before the bytes are seen: loads on every path."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

import ray_dcp
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ShapeMismatchError,
    UnsafeCheckpointError,
)
from ray_dcp.options import LoadOptions
from tests import checkpoints

HUGE = 1 << 50
MOST_BYTES = 64 << 20


class OwnPlanner(DefaultLoadPlanner):
    """Takes the path on which a planner's hooks run."""


def stock_with(path, change):
    """Saves with stock DCP, and rewrites what `.metadata` says of every item."""
    checkpoints.save_stock(path, {"w": torch.arange(3000.0), "o": {1, 2, 3}})
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def of_items(name, **fields):
    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                metadata.storage_data[index] = replace(info, **fields)

    return change


def of_shape(size, *chunks):
    def change(metadata):
        old = metadata.state_dict_metadata["w"]
        boxes = [ChunkStorageMetadata(torch.Size([a]), torch.Size([n])) for a, n in chunks]
        metadata.state_dict_metadata["w"] = TensorStorageMetadata(
            old.properties, torch.Size(size), boxes or old.chunks
        )

    return change


LIES = {
    "an object of a petabyte": (of_items("o", length=HUGE), DamagedCheckpointError),
    "an object behind the end": (of_items("o", offset=HUGE), DamagedCheckpointError),
    "a tensor item behind the end": (of_items("w", offset=HUGE), DamagedCheckpointError),
    "a negative length": (of_items("o", length=-1), DamagedCheckpointError),
    "a file elsewhere": (of_items("o", relative_path="../../o"), UnsafeCheckpointError),
    "a larger tensor": (of_shape([HUGE]), ShapeMismatchError),
    "a larger chunk": (of_shape([3000], (0, HUGE)), CheckpointError),
    "a chunk elsewhere": (of_shape([3000], (HUGE, 3000)), CheckpointError),
}


@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "hooks"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_sizes_is_refused_before_memory_is_taken(tmp_path, lie, planner):
    change, expected = LIES[lie]
    stock_with(tmp_path / "step-1", change)
    state = {"w": torch.zeros(3000), "o": None}
    tracemalloc.start()
    try:
        with pytest.raises(expected) as told:
            ray_dcp.load(
                state, checkpoint_id=tmp_path / "step-1", no_dist=True,
                planner=planner() if planner else None,
            )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert "MemoryError" not in str(told.value)
    assert state["w"].shape == (3000,)


@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "hooks"])
def test_the_length_of_a_tensor_item_is_not_needed_where_its_head_says_all(tmp_path, planner):
    stock_with(tmp_path / "step-1", of_items("w", length=HUGE))
    state = {"w": torch.zeros(3000)}
    tracemalloc.start()
    try:
        ray_dcp.load(
            state, checkpoint_id=tmp_path / "step-1", no_dist=True,
            planner=planner() if planner else None,
        )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert torch.equal(state["w"], torch.arange(3000.0))


class Unknown:
    """A class that is on nobody's list."""

    def __init__(self):
        self.x = 1


@pytest.mark.parametrize("planner", [None, OwnPlanner], ids=["native", "hooks"])
@pytest.mark.parametrize("stock", [False, True])
def test_objects_run_code_only_where_the_caller_asks_for_it(tmp_path, stock, planner):
    path = tmp_path / "step-1"
    if stock:
        checkpoints.save_stock(path, {"o": Unknown()})
    else:
        with pytest.warns(UserWarning, match="Unknown"):
            ray_dcp.save({"o": Unknown()}, checkpoint_id=path, no_dist=True)
    how = {"checkpoint_id": path, "no_dist": True}
    state = {"o": None}
    with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
        ray_dcp.load(state, planner=planner() if planner else None, **how)
    assert state == {"o": None}
    options = LoadOptions(weights_only=False)
    ray_dcp.load(state, planner=planner() if planner else None, options=options, **how)
    assert state["o"].x == 1
