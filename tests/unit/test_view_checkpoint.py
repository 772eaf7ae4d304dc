"""A view tells what is in a checkpoint, and reads what is asked for."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ray_dcp
from ray_dcp.errors import (
    CoverageError,
    InvalidRequestError,
    MissingKeyError,
    UnsafeCheckpointError,
)
from ray_dcp.view.checkpoint_view import CheckpointView
from tests.support import arrays, checkpoints, world
from tests.support.storages import counted_view

TENSORS = checkpoints.tensors()


@pytest.fixture(params=["ours", "stock"])
def view(request: pytest.FixtureRequest) -> CheckpointView:
    name = {"ours": "saved_checkpoint", "stock": "stock_checkpoint"}[request.param]
    return ray_dcp.open(request.getfixturevalue(name))


def same(found: Any, expected: torch.Tensor) -> bool:
    found = torch.as_tensor(np.asarray(found) if not isinstance(found, torch.Tensor) else found)
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(as_bytes[0], as_bytes[1])
    )


def test_a_view_tells_every_tensor_and_object_with_shape_dtype_and_size(view: CheckpointView):
    assert set(view.names) == {*TENSORS, "step", "note[x].text", "note[x].items"}
    assert set(view.objects) == {"step", "note[x].text", "note[x].items"}
    assert list(view) == list(view.names)
    assert len(view) == len(view.names)
    assert "model.weight" in view
    assert "model" not in view
    assert set(view.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        info = view.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert info.dtype == str(tensor.dtype).removeprefix("torch.")
        assert info.num_bytes == tensor.nbytes
        assert info.num_chunks == 1
        assert info.path == tuple(name.split("."))


@pytest.mark.parametrize("name", TENSORS)
def test_a_whole_tensor_comes_back(view: CheckpointView, name: str):
    assert same(view[name][...], TENSORS[name])


@pytest.mark.parametrize(
    "index",
    [
        np.s_[3], np.s_[2:9], np.s_[:, 4], np.s_[5:30:7, ::-1], np.s_[-1, -1], np.s_[9:2],
        np.s_[..., 2:4], np.s_[30:2:-9],
    ],
)  # fmt: skip
def test_a_part_of_a_tensor_comes_back(view: CheckpointView, index: Any):
    for name in ("model.weight", "model.large"):
        expected = TENSORS[name].numpy()[index]
        # Pickled as for a worker of a DataLoader, or a task of Ray.
        again, handle = pickle.loads(pickle.dumps((view, view[name])))
        for found in (again[name][index], handle[index]):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


def test_a_part_of_a_dtype_that_numpy_lacks_comes_back_in_torch(view: CheckpointView):
    assert same(view["model.half"][1:4, ::2], TENSORS["model.half"][1:4, ::2])
    assert same(view["model.half"][2, 3], TENSORS["model.half"][2, 3])


def test_a_handle_acts_like_an_array(saved_checkpoint: Path):
    ours = ray_dcp.open(saved_checkpoint)
    handle = ours["model.weight"]
    expected = TENSORS["model.weight"].numpy()
    assert (handle.shape, handle.dtype, handle.ndim, len(handle)) == ((37, 11), "float32", 2, 37)
    assert np.array_equal(np.asarray(handle), expected)
    assert np.asarray(handle, dtype=np.float64).dtype == np.float64
    assert np.array_equal(np.stack(list(handle)), expected)
    assert repr(handle) == "TensorHandle('model.weight', shape=(37, 11), dtype='float32')"
    with pytest.raises(InvalidRequestError, match=r"numpy has no dtype bfloat16.*handle\[\.\.\.\]"):
        np.asarray(ours["model.half"])


def test_opening_a_view_reads_no_tensor_and_a_row_reads_its_blocks_only(saved_checkpoint: Path):
    view, counting = counted_view(saved_checkpoint)
    assert view.tensors
    assert counting.payload_bytes == 0
    row = view["model.large"][17]
    assert np.array_equal(row, TENSORS["model.large"][17].numpy())
    block_bytes = int(view.checkpoint.table.block_bytes.max())
    checks = sum(file.num_bytes for file in view.files) // 50
    assert row.nbytes <= counting.payload_bytes <= row.nbytes + 2 * block_bytes + checks


def test_objects_come_back_and_a_name_that_is_not_there_is_refused(view: CheckpointView):
    assert [view[name] for name in ("step", "note[x].text", "note[x].items")] == [
        10,
        "hello",
        [1, 2],
    ]
    with pytest.raises(MissingKeyError, match=r"did you mean 'model\.weight'") as caught:
        view["model.weigth"]
    assert caught.value.key == "model.weigth"


@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_any_part_of_a_tensor_of_many_chunks_comes_back(world_size: int):
    url = f"memory://view-{world_size}"
    state = arrays.state_of()
    world.save(state, world_size, url)
    view = ray_dcp.open(url)
    assert view.world_size == world_size
    assert view.tensors["big"].num_chunks == world_size
    random = np.random.default_rng(world_size)
    for name, expected in state.items():
        if isinstance(expected, np.ndarray):
            assert np.array_equal(view[name][...], expected)
            for _ in range(20):
                bounds = [sorted(random.integers(0, n + 1, 2)) for n in expected.shape]
                index = tuple(slice(a, b, random.integers(1, 4)) for a, b in bounds)
                assert np.array_equal(view[name][index], expected[index])


CHUNK_COLUMNS = (
    "tensor", "offset", "size", "file", "item_offset", "item_bytes", "payload_offset",
    "payload_bytes", "block_bytes", "check_start",
)  # fmt: skip


def test_elements_that_are_in_no_chunk_are_refused_and_the_others_come_back():
    expected = np.arange(30.0).reshape(15, 2)
    world.save({"w": expected}, 3, "memory://view-gap")
    view = ray_dcp.open("memory://view-gap")
    without_last = {name: getattr(view.table, name)[:-1] for name in CHUNK_COLUMNS}
    table = dataclasses.replace(view.table, **without_last)
    checkpoint = dataclasses.replace(view.checkpoint, chunks=table)
    handle = CheckpointView(view.storage, checkpoint)["w"]
    assert np.array_equal(handle[2:10], expected[2:10])
    with pytest.raises(CoverageError, match=r"'w'.*but 16 bytes") as caught:
        handle[8:11]
    assert caught.value.key == "w"


class Tagged(torch.Tensor):
    """A tensor subclass that pickles as itself."""


def test_a_tensor_subclass_in_a_stock_checkpoint_comes_back(tmp_path: Path):
    tagged = torch.arange(6.0).reshape(2, 3).as_subclass(Tagged)
    with torch.serialization.safe_globals([Tagged]):
        checkpoints.save_stock(tmp_path, {"w": tagged})
        found = ray_dcp.open(tmp_path)["w"][1]
    assert type(found) is Tagged
    assert found.tolist() == [3, 4, 5]
    with pytest.raises(UnsafeCheckpointError, match=r"Tagged.*add_safe_globals"):
        ray_dcp.open(tmp_path)["w"][1]
