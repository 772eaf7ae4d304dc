"""A view tells what is in a checkpoint, reads what is asked for, and what loads would read."""

from __future__ import annotations

import dataclasses
import pickle
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
    DamagedCheckpointError,
    InvalidRequestError,
    MissingKeyError,
    UnsafeCheckpointError,
)
from ray_dcp.io.reader import read_chunks
from ray_dcp.options import LoadOptions
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.resharding import Layout, parse_layout, preview_reshard
from ray_dcp.view.tensor_handle import select
from tests import checkpoints, numpy_ranks
from tests.counting_storage import counted_view

# --- Views ----------------------------------------------------------------------------------------


TENSORS = checkpoints.tensors()


@pytest.fixture(params=["ours", "stock"])
def view(request: pytest.FixtureRequest) -> CheckpointView:
    name = {"ours": "saved_checkpoint", "stock": "stock_checkpoint"}[request.param]
    return ray_dcp.open(request.getfixturevalue(name))


@pytest.fixture
def ours(saved_checkpoint: Path) -> CheckpointView:
    return ray_dcp.open(saved_checkpoint)


def as_torch(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))


def same(found: Any, expected: torch.Tensor) -> bool:
    found = as_torch(found)
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(as_bytes[0], as_bytes[1])
    )


def test_a_view_tells_every_tensor_and_object(view: CheckpointView):
    assert set(view.names) == {*TENSORS, "step", "note[x].text", "note[x].items"}
    assert set(view.objects) == {"step", "note[x].text", "note[x].items"}
    assert list(view) == list(view.names)
    assert len(view) == len(view.names)
    assert "model.weight" in view
    assert "model" not in view


def test_a_view_tells_shape_dtype_and_size(view: CheckpointView):
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
        found = view[name][index]
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_a_part_of_a_dtype_that_numpy_lacks_comes_back_in_torch(view: CheckpointView):
    assert same(view["model.half"][1:4, ::2], TENSORS["model.half"][1:4, ::2])
    assert same(view["model.half"][2, 3], TENSORS["model.half"][2, 3])


def test_a_handle_acts_like_an_array(ours: CheckpointView):
    handle = ours["model.weight"]
    expected = TENSORS["model.weight"].numpy()
    assert (handle.shape, handle.dtype, handle.ndim, len(handle)) == ((37, 11), "float32", 2, 37)
    assert np.array_equal(np.asarray(handle), expected)
    assert np.asarray(handle, dtype=np.float64).dtype == np.float64
    assert np.array_equal(np.stack(list(handle)), expected)
    assert repr(handle) == "TensorHandle('model.weight', shape=(37, 11), dtype='float32')"


def test_numpy_is_refused_where_it_lacks_the_dtype(ours: CheckpointView):
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


def test_a_view_and_its_handles_can_be_pickled(tmp_path: Path):
    # As for a worker of a DataLoader, or a task of Ray.
    ray_dcp.save({"a": torch.arange(9.0)}, checkpoint_id=tmp_path, no_dist=True)
    view = ray_dcp.open(tmp_path)
    again, handle = pickle.loads(pickle.dumps((view, view["a"])))
    assert again["a"][2:4].tolist() == handle[2:4].tolist() == [2.0, 3.0]


def test_objects_come_back(view: CheckpointView):
    assert view["step"] == 10
    assert view["note[x].text"] == "hello"
    assert view["note[x].items"] == [1, 2]


def test_a_name_that_is_not_there_is_refused_with_similar_ones(view: CheckpointView):
    with pytest.raises(MissingKeyError, match=r"did you mean 'model\.weight'") as caught:
        view["model.weigth"]
    assert caught.value.key == "model.weigth"


def test_damage_is_noticed_when_it_is_read_and_only_then(tmp_path: Path):
    view = ray_dcp.open(checkpoints.save(tmp_path / "c"))
    chunk = int(np.flatnonzero(view.table.tensor == view.names.index("model.large"))[0])
    last_byte = int(view.table.payload_offset[chunk] + view.table.payload_bytes[chunk]) - 1
    checkpoints.flip(checkpoints.data_file(tmp_path), last_byte)
    view = ray_dcp.open(tmp_path / "c")
    assert np.array_equal(view["model.large"][0], TENSORS["model.large"][0].numpy())
    with pytest.raises(DamagedCheckpointError, match=r"model\.large"):
        view["model.large"][-1]


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_any_part_of_a_tensor_of_many_chunks_comes_back(world_size: int, container: str):
    url = f"memory://view-{world_size}-{container}"
    state = numpy_ranks.state_of()
    numpy_ranks.save(state, world_size, url, options=ray_dcp.SaveOptions(container=container))
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
    numpy_ranks.save({"w": expected}, 3, "memory://view-gap")
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


# --- Indices --------------------------------------------------------------------------------------


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def one_index(length: int) -> st.SearchStrategy[Any]:
    bounds = st.none() | st.integers(-8, 8)
    steps = st.none() | st.integers(-3, 3).filter(bool)
    slices = st.builds(slice, bounds, bounds, steps)
    return slices | st.integers(-length, length - 1) if length else slices


@st.composite
def shapes_and_indices(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(SHAPES)
    num_front = draw(st.integers(0, len(shape)))
    num_back = draw(st.integers(0, len(shape) - num_front))
    index = [draw(one_index(length)) for length in shape[:num_front]]
    if num_back or draw(st.booleans()):
        back = shape[len(shape) - num_back :]
        index += [Ellipsis, *[draw(one_index(length)) for length in back]]
    return shape, index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


def through_box(array: np.ndarray, index: Any) -> tuple[np.ndarray, int]:
    """Returns what the box and the rest of an index give, and the volume of the box."""
    selection = select(index, array.shape)
    ends = [low + length for low, length in zip(selection.offset, selection.size, strict=True)]
    assert all(
        low >= 0 and high <= n
        for low, high, n in zip(selection.offset, ends, array.shape, strict=True)
    )
    box = array[tuple(map(slice, selection.offset, ends))]
    return np.asarray(box[selection.rest]), box.size


@given(shapes_and_indices())
def test_box_and_rest_select_what_numpy_selects(case: tuple[tuple[int, ...], Any]):
    shape, index = case
    array = np.arange(int(np.prod(shape))).reshape(shape)
    found, _ = through_box(array, index)
    expected = np.asarray(array[index])
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (10, "index 10 is out of bounds for dimension 0, which has length 10"),
        ((0, -9), "index -9 is out of bounds for dimension 1"),
        ((0, 0, 0), "at most 2 indices"),
        ((..., ...), "2 times '...'"),
        ([1, 2], "found list"),
        (np.array([1]), "found ndarray"),
        (True, "found bool"),
        (None, "found NoneType"),
        ("name", "found str"),
        (1.0, "found float"),
        (slice(0, 5, 0), "can't be sliced"),
        (slice("a", None), "can't be sliced"),
    ],
)
def test_any_other_index_is_refused(index: Any, message: str):
    with pytest.raises(InvalidRequestError) as caught:
        select(index, (10, 8))
    assert message in str(caught.value)


def test_a_dimension_of_length_1_can_be_reversed_in_every_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        url = f"memory://view-reversed/{dtype}"
        ray_dcp.save({"w": torch.arange(3, dtype=dtype).reshape(1, 3)}, checkpoint_id=url)
        handle = ray_dcp.open(url)["w"]
        assert handle[::-1, ::-1].tolist() == [[2, 1, 0]]
        assert handle[::-1].tolist() == [[0, 1, 2]]


# --- Reshard previews -----------------------------------------------------------------------------


def state() -> dict:
    return {
        "w": torch.randn(1000, 700),
        "wide": torch.randn(3, 50_000),
        "b": torch.randn(1001),
        "deep": torch.randn(16, 8, 4),
        "s": torch.ones(()),
        "empty": torch.zeros(0, 4),
    }


class Everywhere:
    """A sink of its own memory for each row."""

    def __init__(self, lengths):
        self.rows = [np.empty(n, np.uint8) for n in lengths]

    def buffer(self, row):
        return self.rows[row].data

    def done(self, row):
        """Takes note of nothing."""


@pytest.mark.parametrize("layout", ["1", "3", "8", "3:column", "2x2", "3x4"])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_the_preview_is_what_the_reader_then_reads(tmp_path: Path, layout: str, kind: str):
    path = tmp_path / "a"
    if kind == "ours":
        ray_dcp.save(state(), checkpoint_id=path, no_dist=True)
    else:
        checkpoints.save_stock(path, state())
    view, _ = counted_view(path)
    found = view.reshard(layout)
    assert len(found.ranks) == parse_layout(layout).num_ranks
    table = view.table
    for one in found.ranks[:: max(1, len(found.ranks) // 4)]:
        fresh, reads = counted_view(path)
        offset, size = boxes(table, found.layout, one.rank)
        wanted = Wanted(
            np.arange(table.num_tensors, dtype=np.int32), offset, size,
            np.full(table.num_tensors, 4, np.int64),
        )  # fmt: skip
        plan = plan_reads(table, wanted)
        lengths = (size.prod(axis=1) * 4).tolist()
        reads.bytes_read.clear()
        stats = read_chunks(
            fresh.storage, table, plan, wanted, Everywhere(lengths), options=LoadOptions()
        )
        assert one.bytes_needed == sum(lengths) == stats.bytes_needed
        # Why: where in a long item of stock DCP its bytes are, only the item itself tells.
        unknown = 0 if kind == "ours" else 1024
        assert abs(one.bytes_read - stats.bytes_read) <= unknown
        if kind == "ours":
            assert reads.payload_bytes == one.bytes_read


def boxes(table, layout: Layout, rank: int):
    """Returns what a rank holds, by torch's own way to cut."""
    row, column = divmod(rank, layout.columns)
    offset, size = np.zeros_like(table.shape), table.shape.copy()
    for tensor in range(table.num_tensors):
        for dim, part, parts in ((0, row, layout.rows), (1, column, layout.columns)):
            if dim >= table.ndim[tensor] or parts == 1:
                continue
            pieces = torch.arange(int(table.shape[tensor, dim])).chunk(parts)
            own = pieces[part] if part < len(pieces) else torch.zeros(0)
            size[tensor, dim] = len(own)
            offset[tensor, dim] = int(own[0]) if len(own) else 0
    return offset, size


def test_a_checkpoint_with_holes_says_what_a_load_would_miss(tmp_path: Path):
    from dataclasses import replace

    ray_dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    view = ray_dcp.open(tmp_path / "a")
    table = view.table
    size = table.size.copy()
    size[table.tensor == table.names.index("w"), 0] = 999
    holes = replace(view, checkpoint=replace(view.checkpoint, chunks=replace(table, size=size)))
    assert preview_reshard(holes, 2).uncovered == ("w",)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "8:diagonal", "0x2", "2x", "row=0", "-1", "row=2,rows=3", True, 10**9]
)
def test_what_is_no_layout_is_refused(text: object):
    with pytest.raises(InvalidRequestError, match="layout"):
        parse_layout(text)


def test_a_pattern_that_nothing_matches_offers_names(tmp_path: Path):
    ray_dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(InvalidRequestError, match="did you mean 'weight'"):
        ray_dcp.open(tmp_path / "a").reshard(2, include="wieght")
