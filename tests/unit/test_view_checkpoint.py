"""A view tells what is in a checkpoint, and reads what is asked for."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.errors import (
    CoverageError,
    InvalidRequestError,
    MissingKeyError,
    UnsafeCheckpointError,
)
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.resharding import ShardGrid, parse_layout, preview_reshard
from tests.support import checkpoints, world
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


def test_a_whole_tensor_comes_back(view: CheckpointView):
    for name, expected in TENSORS.items():
        assert same(view[name][...], expected)


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
    row = view["model.large"][17, 100:2:-2]
    assert np.array_equal(row, TENSORS["model.large"].numpy()[17, 100:2:-2])
    block_bytes = int(view.checkpoint.table.block_bytes.max())
    checks = sum(file.num_bytes for file in view.files) // 50
    assert row.nbytes <= counting.payload_bytes <= 800 + 2 * block_bytes + checks


def test_objects_come_back_and_a_name_that_is_not_there_is_refused(view: CheckpointView):
    assert [view[name] for name in ("step", "note[x].text", "note[x].items")] == [
        10,
        "hello",
        [1, 2],
    ]
    with pytest.raises(MissingKeyError, match=r"did you mean 'model\.weight'") as caught:
        view["model.weigth"]
    assert caught.value.key == "model.weigth"


ARRAYS = {
    name: np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    for name, shape in {"a": (6, 5), "b": (5,), "c": (3, 4, 2), "d": (0, 3), "e": ()}.items()
}


@pytest.fixture(scope="module")
def in_parts() -> CheckpointView:
    world.save(ARRAYS, 3, "memory://view-parts")
    view = ray_dcp.open("memory://view-parts")
    assert (view.world_size, view.tensors["a"].num_chunks) == (3, 3)
    assert (view.layouts["a"], view.small_values) == ("rows/3", {})
    # As for a worker of a DataLoader, or a task of Ray.
    view, _ = pickle.loads(pickle.dumps((view, view["a"])))
    return view


def one_index(length: int) -> st.SearchStrategy[Any]:
    bounds = st.none() | st.integers(-8, 8)
    steps = st.none() | st.integers(-3, 3).filter(bool)
    slices = st.builds(slice, bounds, bounds, steps)
    return slices | st.integers(-length, length - 1) if length else slices


@st.composite
def names_and_indices(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from(sorted(ARRAYS)))
    shape = ARRAYS[name].shape
    num_front = draw(st.integers(0, len(shape)))
    num_back = draw(st.integers(0, len(shape) - num_front))
    index = [draw(one_index(length)) for length in shape[:num_front]]
    if num_back or draw(st.booleans()):
        back = shape[len(shape) - num_back :]
        index += [Ellipsis, *[draw(one_index(length)) for length in back]]
    return name, index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


@given(names_and_indices())
def test_an_index_gives_what_it_gives_in_numpy(in_parts: CheckpointView, case: tuple[str, Any]):
    name, index = case
    found, expected = in_parts[name][index], np.asarray(ARRAYS[name][index])
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)


def test_any_other_index_is_refused(in_parts: CheckpointView):
    for index, message in (
        (10, "index 10 is out of bounds for dimension 0, which has length 6"),
        ((0, -9), "index -9 is out of bounds for dimension 1"),
        ((0, 0, 0), "at most 2 indices"), ((..., ...), "2 times '...'"), ([1, 2], "found list"),
        (np.array([1]), "found ndarray"), (True, "found bool"), (None, "found NoneType"),
        ("name", "found str"), (slice(0, 5, 0), "can't be sliced"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError) as caught:
            in_parts["a"][index]
        assert message in str(caught.value)


def test_a_dimension_of_length_1_can_be_reversed_in_torch():
    state = {"w": torch.arange(3, dtype=torch.bfloat16).reshape(1, 3)}
    ray_dcp.save(state, checkpoint_id="memory://view-reversed")
    handle = ray_dcp.open("memory://view-reversed")["w"]
    assert handle[::-1, ::-1].tolist() == [[2, 1, 0]]


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


# --- resharding -----------------------------------------------------------------------------------


def state() -> dict:
    return {
        "w": torch.randn(1000, 700),
        "wide": torch.randn(3, 50_000),
        "b": torch.randn(1001),
        "deep": torch.randn(16, 8, 4),
        "s": torch.ones(()),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("layout", ["3", "8:column", "3x4"])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_the_preview_is_what_the_reader_then_reads(tmp_path: Path, layout: str, kind: str):
    if kind == "ours":
        ray_dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        checkpoints.save_stock(tmp_path / "a", state())
    view, reads = counted_view(tmp_path / "a")
    view.reshard(layout)
    assert kind == "stock" or reads.payload_bytes == 0
    view.checkpoint.know_checks()
    for name, info in view.tensors.items():
        found = view.reshard(layout, include=name)
        for one in found.ranks[::3]:
            reads.bytes_read.clear()
            part = view[name][held(info.shape, found.layout, one.rank)]
            assert one.bytes_needed == part.nbytes
            # Why: where in a long item of stock DCP its bytes are, only the item itself tells.
            heads = 0 if kind == "ours" else 5120
            assert abs(one.bytes_read - reads.payload_bytes) <= heads


def held(shape: tuple[int, ...], layout: ShardGrid, rank: int) -> tuple[slice, ...]:
    """Returns what a rank holds, by torch's own way to cut."""
    found = []
    cuts = zip(divmod(rank, layout.columns), (layout.rows, layout.columns), strict=True)
    for length, (part, parts) in zip(shape, cuts, strict=False):
        pieces = torch.arange(length).chunk(parts)
        own = pieces[part].tolist() if part < len(pieces) else []
        found.append(slice(own[0], own[-1] + 1) if own else slice(0, 0))
    return tuple(found)


def test_rows_cost_about_what_they_need_and_memory_holds_the_targets(tmp_path: Path):
    ray_dcp.save(state() | {"o": "object"}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = ray_dcp.open(tmp_path / "a").reshard(4)
    assert 1.0 <= found.amplification < 1.5
    assert all(one.peak_bytes >= one.bytes_needed for one in found.ranks)
    assert found.peak_bytes == max(one.peak_bytes for one in found.ranks)
    only = ray_dcp.open(tmp_path / "a").reshard(4, include="w*")
    assert only.stored_bytes == (1000 * 700 + 150_000) * 4
    assert only.bytes_needed == only.stored_bytes
    with pytest.raises(InvalidRequestError, match="did you mean 'wide'"):
        ray_dcp.open(tmp_path / "a").reshard(2, include="wdie")


def test_a_checkpoint_with_holes_says_what_a_load_would_miss(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    view = ray_dcp.open(tmp_path / "a")
    table = view.table
    size = table.size.copy()
    size[table.tensor == table.names.index("w"), 0] = 999
    holes = replace(view, checkpoint=replace(view.checkpoint, chunks=replace(table, size=size)))
    assert preview_reshard(holes.storage, holes.checkpoint.table, 2).uncovered == ("w",)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "8:diagonal", "0x2", "2x", "row=0", "-1", "row=2,rows=3", True, 10**9]
)
def test_what_is_no_layout_is_refused(text: object):
    with pytest.raises(InvalidRequestError, match="layout"):
        parse_layout(text)
