"""A view tells what is in a checkpoint, what changed since another, and whether it is whole.

`show` of a path that one was given says as well how to load it: three lines that run as they are.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ray_dcp
from ray_dcp import errors
from ray_dcp.cli.main import main
from ray_dcp.core.dtypes import READABLE, as_numbers, raw_dtype
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.io.checkpoint import Checkpoint, read_checkpoint
from ray_dcp.manager import Item
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.difference import diff_tables, new_bytes
from ray_dcp.view.resharding import ShardGrid, parse_layout, preview_reshard
from ray_dcp.view.verify import verify_opened
from tests.support import arrays, checkpoints, cli_story, world
from tests.support.storages import Counting, Fault, FaultyStorage, counted_view, interpose

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
    with pytest.raises(
        errors.InvalidRequestError, match=r"numpy has no dtype bfloat16.*handle\[\.\.\.\]"
    ):
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
    with pytest.raises(errors.MissingKeyError, match=r"did you mean 'model\.weight'") as caught:
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
        with pytest.raises(errors.InvalidRequestError) as caught:
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
    with pytest.raises(errors.CoverageError, match=r"'w'.*but 16 bytes") as caught:
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
    with pytest.raises(errors.UnsafeCheckpointError, match=r"Tagged.*add_safe_globals"):
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
    with pytest.raises(errors.InvalidRequestError, match="did you mean 'wide'"):
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
    with pytest.raises(errors.InvalidRequestError, match="layout"):
        parse_layout(text)


# --- verify -------------------------------------------------------------------------------------


@pytest.fixture
def copied(saved_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_checkpoint, tmp_path / "copy")


@pytest.mark.parametrize("world_size", [1, 5])
def test_an_undamaged_checkpoint_is_ok_and_every_byte_of_its_files_was_compared(world_size: int):
    url = f"memory://verify-{world_size}"
    world.save(arrays.state_of(), world_size, url)
    report = ray_dcp.verify(url)
    assert (report.ok, report.problems, report.notes) == (True, (), ())
    assert report.checked_bytes == ray_dcp.open(url).num_bytes


def test_damage_is_told_by_file_tensor_and_block(copied: Path):
    file, first, last = checkpoints.payload_of(copied, "model.large")
    checkpoints.flip(file, last)
    (problem,) = ray_dcp.verify(copied).problems
    assert (problem.file, problem.fqn) == (file.name, "model.large")
    block_bytes = problem.stop - problem.start
    assert first < problem.start <= last < problem.stop == last + 1
    assert block_bytes <= 16 << 10
    assert str(problem) == (
        f"{file.name} bytes [{problem.start}, {problem.stop}) of 'model.large': "
        "1 block(s) do not match their checksums"
    )


def test_blocks_that_lie_together_are_one_problem_and_others_are_not(copied: Path):
    file, first, last = checkpoints.payload_of(copied, "model.large")
    block = int(ray_dcp.open(copied).table.block_bytes.max())
    for offset in (first, first + block, first + 5 * block, last):
        checkpoints.flip(file, offset)
    problems = ray_dcp.verify(copied).problems
    found = [(p.start - first, p.what.split()[0]) for p in problems]
    assert (found[:2], len(found)) == ([(0, "2"), (5 * block, "1")], 3)


def test_a_missing_file_is_told_with_what_was_in_it(copied: Path):
    file = checkpoints.data_file(copied)
    num_bytes = file.stat().st_size
    file.unlink()
    (problem,) = ray_dcp.verify(copied).problems
    assert (problem.file, problem.start, problem.stop) == (file.name, 0, num_bytes)
    assert "missing" in problem.what
    assert "10 in all" in problem.what


def test_another_metadata_is_a_note_because_the_checkpoint_is_whole(tmp_path: Path):
    path = checkpoints.save(tmp_path / "c")
    earlier = (path / ".metadata").read_bytes()
    checkpoints.save(path)
    assert ray_dcp.verify(path).notes == ()
    data = (path / ".metadata").read_bytes()
    place = (decode_metadata(data).checkpoint_id or "").encode()
    for found, told in (
        (earlier, ".metadata is that of an earlier save, which stock DCP reads"),
        (data.replace(place, place[:-1] + b"?"), ".metadata was made at another place, "),
    ):
        (path / ".metadata").write_bytes(found)
        report = ray_dcp.verify(path)
        assert report.ok
        assert [note[: len(told)] for note in report.notes] == [told]


def test_a_tensor_larger_than_what_is_read_at_once_is_checked_to_its_end(tmp_path: Path):
    values = torch.arange(5 << 20, dtype=torch.int32)
    ray_dcp.save({"w": values}, checkpoint_id=tmp_path, no_dist=True)
    report = ray_dcp.verify(tmp_path)
    assert report.problems == ()
    assert report.checked_bytes == ray_dcp.open(tmp_path).num_bytes
    file, first, last = checkpoints.payload_of(tmp_path, "w")
    offset = first + (18 << 20)
    checkpoints.flip(file, offset)
    (problem,) = ray_dcp.verify(tmp_path).problems
    assert problem.start <= offset < problem.stop <= last + 1
    assert problem.stop - problem.start <= 1 << 20


def test_a_file_that_can_not_be_read_is_told_and_the_others_are_checked(saved_checkpoint: Path):
    inner = open_storage(saved_checkpoint)
    checkpoint = read_checkpoint(inner, checkpoint_id=inner.url)
    error = errors.StorageError("input/output error")
    fault = Fault(operation="read", key="*.distcp", error=error, times=2)
    storage = FaultyStorage(inner, [fault])
    report = verify_opened(storage, checkpoint)
    storage.assert_hit()
    assert (report.ok, report.problems) == (False, ())
    (unread,) = report.unread
    assert "unreadable: input/output error" in unread.what


def test_an_item_that_can_not_be_listed_hides_no_damage_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    items = {"first": Item(), "second": Item()}
    with ray_dcp.CheckpointManager(tmp_path, 1, items=items) as manager:
        manager.save(5, {name: {"w": torch.ones(300)} for name in items})
    file = checkpoints.data_file(tmp_path / "step-00000005" / "first")
    checkpoints.flip(file, file.stat().st_size // 2)
    refused = errors.StorageError("input/output error")
    interpose(monkeypatch, LocalStorage, "list", "*/second/*", refused, times=None)
    report = ray_dcp.verify(tmp_path / "step-00000005")
    assert [one.file for one in report.problems] == [f"first/{file.name}"]
    assert [(one.file, one.what) for one in report.unread] == [("second", "input/output error")]


@pytest.mark.parametrize("effect", ["before", "flip"])
def test_what_fails_or_is_altered_once_on_its_way_is_read_again(
    saved_checkpoint: Path, effect: str
):
    inner = open_storage(saved_checkpoint)
    checkpoint = read_checkpoint(inner, checkpoint_id=inner.url)
    storage = FaultyStorage(inner, [Fault(operation="read", key="*.distcp", effect=effect)])
    report = verify_opened(storage, checkpoint)
    storage.assert_hit()
    assert report.ok
    assert ["was not at the first read" in note for note in report.notes] == [True]


def test_a_stock_checkpoint_is_verified_by_its_crcs_and_what_has_none_is_noted(
    stock_checkpoint: Path, tmp_path: Path
):
    report = ray_dcp.verify(stock_checkpoint)
    assert report.problems == ()
    payload = sum(tensor.nbytes for tensor in checkpoints.tensors().values())
    assert payload < report.checked_bytes <= ray_dcp.open(stock_checkpoint).num_bytes
    config = torch.utils.serialization.config
    before, config.save.compute_crc32 = config.save.compute_crc32, False
    try:
        checkpoints.save_stock(tmp_path)
    finally:
        config.save.compute_crc32 = before
    report = ray_dcp.verify(tmp_path)
    assert report.ok
    assert any("without CRC32" in note for note in report.notes)


# --- diff ---------------------------------------------------------------------------------------


def save(path: Path, state: dict, **options) -> Path:
    ray_dcp.save(state, checkpoint_id=path, no_dist=True, options=ray_dcp.SaveOptions(**options))
    return path


def base() -> dict:
    return {
        "same": torch.arange(1000.0),
        "some": torch.zeros(300, 1000),
        "half": torch.ones(8, dtype=torch.bfloat16),
        "shape": torch.ones(4),
        "dtype": torch.ones(4),
        "gone": torch.ones(2),
        "object": {"lr": 0.1},
        "equal_object": "text",
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(5),
    }


def changed() -> dict:
    state = base()
    state["some"][7, 3] = 2.0
    state["half"] = state["half"] * 3
    state["shape"] = torch.ones(2, 2)
    state["dtype"] = torch.ones(4, dtype=torch.float64)
    del state["gone"]
    state["new"] = torch.ones(3)
    state["object"] = {"lr": 0.2}
    return state


EXPECTED = {
    "same": "unchanged", "some": "changed", "half": "changed", "shape": "reshaped",
    "dtype": "retyped", "gone": "removed", "object.lr": "changed", "equal_object": "unchanged",
    "empty": "unchanged", "scalar": "unchanged", "new": "added",
}  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return save(tmp_path / "a", base()), save(tmp_path / "b", changed())


def changes(diff) -> dict[str, str]:
    return {one.name: one.change for one in diff.tensors}


def test_hashes_tell_every_change_and_no_payload_is_read(pair: tuple[Path, Path]):
    (a, reads_a), (b, reads_b) = map(counted_view, pair)
    diff = a.diff(b)
    assert changes(diff) == EXPECTED
    checksums = [8 * len(view.checkpoint.table.checks) for view in (a, b)]
    assert [reads_a.payload_bytes, reads_b.payload_bytes] == checksums
    assert diff.bytes_read == 0
    assert diff.notes == ()
    assert not diff.is_empty
    assert a.diff(a).is_empty
    with pytest.raises(
        errors.InvalidRequestError, match=r"as ray_dcp.open.* returns it, but got 'b'"
    ):
        a.diff("b")


def test_values_are_read_only_of_what_changed(pair: tuple[Path, Path]):
    (a, reads), (b, _) = map(counted_view, pair)
    found = {one.name: one for one in a.diff(b).values()}
    assert set(found) == {"some", "half", "dtype"}
    assert reads.payload_bytes < 300 * 1000 * 4 + 5000
    some, half, dtype = found["some"], found["half"], found["dtype"]
    assert (some.norm, some.max_abs, some.num_changed) == (2.0, 2.0, 1)
    assert some.relative == float("inf")
    assert (half.max_abs, half.num_changed, half.relative) == (2.0, 8, pytest.approx(2.0))
    assert (dtype.norm, dtype.num_changed) == (0.0, 0)


def test_a_last_block_counts_with_its_own_length(tmp_path: Path):
    """Blocks of 1 KiB, of which the last has 4 bytes."""
    a = save(tmp_path / "a", {"w": torch.zeros(257)})
    b = save(tmp_path / "b", {"w": torch.cat([torch.zeros(256), torch.ones(1)])})
    diff = ray_dcp.open(a).diff(ray_dcp.open(b))
    assert [(one.change, one.changed_bytes) for one in diff.tensors] == [("changed", 4)]


def test_nan_and_infinities_do_not_hide_by_how_much_the_rest_changed(tmp_path: Path):
    nan, inf = float("nan"), float("inf")
    a = save(tmp_path / "a", {"w": torch.tensor([nan, 1.0, inf, 3.0])})
    b = save(tmp_path / "b", {"w": torch.tensor([nan, 2.0, 1.0, nan])})
    (one,) = ray_dcp.open(a).diff(ray_dcp.open(b)).values()
    assert (one.norm, one.max_abs, one.num_changed, one.num_nonfinite) == (1.0, 1.0, 3, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_beyond_the_precision_of_floats_are_counted_each(tmp_path: Path, dtype: Any):
    for name, last in (("a", [5, 2**62 + 1, 7]), ("b", [5, 2**62, 7])):
        save(tmp_path / name, {"id": torch.tensor(last).to(dtype)})
    (told,) = ray_dcp.open(tmp_path / "a").diff(ray_dcp.open(tmp_path / "b")).values()
    assert (told.num_changed, told.max_abs, told.norm) == (1, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("soem", errors.MissingKeyError, "did you mean 'some'"),
        ("new", errors.InvalidRequestError, "not a tensor of both"),
        ("shape", errors.InvalidRequestError, "shape"),
    ],
)
def test_wrong_names_and_tensors_without_common_numbers_are_refused(pair, name, error, told):
    a, b = map(ray_dcp.open, pair)
    with pytest.raises(error, match=told):
        list(a.diff(b).values([name]))


def test_tensors_that_were_cut_otherwise_are_read_and_the_diff_says_so(tmp_path: Path):
    whole = np.arange(6000.0, dtype=np.float32).reshape(60, 100)
    other = whole.copy()
    other[59, 99] = -1.0
    rest = {"rep.e": np.ones(3)}
    world.save({"w": whole, **rest}, 2, str(tmp_path / "a"))
    world.save({"w": whole, **rest}, 3, str(tmp_path / "b"))
    world.save({"w": other, **rest}, 3, str(tmp_path / "c"))
    (a, _), (b, reads), (c, _) = (counted_view(tmp_path / name) for name in "abc")
    same = a.diff(b)
    assert changes(same) == {"w": "unchanged", "rep.e": "unchanged"}
    assert reads.payload_bytes >= 24_000
    assert same.bytes_read == 2 * 24_000
    assert "cut into other chunks" in same.notes[0]
    assert [one.was_read for one in same.tensors] == [True, False]
    assert changes(a.diff(c))["w"] == "changed"
    assert changes(b.diff(c))["w"] == "changed"
    unread = a.diff(c, read=False)
    assert (changes(unread)["w"], unread.bytes_read) == ("undecided", 0)
    assert "nothing was read" in unread.notes[0]


def test_stock_checkpoints_have_no_hashes_and_are_read(tmp_path: Path):
    a = ray_dcp.open(checkpoints.save_stock(tmp_path / "a", base()))
    b = ray_dcp.open(checkpoints.save_stock(tmp_path / "b", changed()))
    diff = a.diff(b)
    assert changes(diff) == EXPECTED
    assert diff.bytes_read > 0
    assert "no hashes" in diff.notes[0]
    ours = ray_dcp.open(save(tmp_path / "c", base()))
    assert set(changes(ours.diff(a)).values()) == {"unchanged"}


def test_half_a_million_chunks_are_compared_without_one_read(tmp_path: Path):
    """The tables are given: to write and read two of this length takes ten times as long."""
    views = []
    for name, changed in (("a", 0), ("b", 500)):
        table = checkpoints.large_table(2000, 250, name * 16, changed=changed, files=256)
        storage = Counting(str(tmp_path))
        checkpoint = Checkpoint("native", str(tmp_path), 1, b"", table)
        views.append((CheckpointView(storage, checkpoint), storage))
    (a, reads_a), (b, reads_b) = views
    diff = a.diff(b)
    assert diff.counts == {"unchanged": 1500, "changed": 500}
    assert diff.changed_bytes == 500 * 250 * checkpoints.ROW_BYTES
    assert (diff.bytes_read, reads_a.ranges, reads_b.ranges) == (0, 0, 0)


@given(st.integers(0, 12), st.integers(1, 6), st.integers(0, 12), st.booleans())
def test_tables_differ_exactly_where_checksums_do(tensors, parts, changed, other_parts):
    first = checkpoints.large_table(tensors, parts, "a" * 16, files=parts)
    more = parts + 1 if other_parts else parts
    second = checkpoints.large_table(tensors, more, "b" * 16, changed=changed, files=1)
    found = diff_tables(first, second)
    size = parts * checkpoints.ROW_BYTES
    for at, one in enumerate(found):
        expected = ("changed", size) if at < changed else ("unchanged", 0)
        assert (one.change, one.changed_bytes) == (("reshaped", 0) if other_parts else expected)
    if not other_parts and tensors:
        swapped = replace(second, offset=second.offset[:, ::-1])
        other_boxes = parts > 1
        assert {one.change for one in diff_tables(second, swapped)} == {
            "undecided" if other_boxes else "unchanged"
        }
        assert (new_bytes(second, swapped) is None) == other_boxes
        assert new_bytes(first, second) == min(changed, tensors) * size


@pytest.mark.parametrize("dtype", sorted(READABLE))
def test_numbers_are_those_of_torch(dtype: str):
    width = raw_dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, 256 * 16, np.uint8)
    if width == 1:
        raw = np.arange(256, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    tensor = torch.from_numpy(raw.copy()).view(getattr(torch, dtype))
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    expected = tensor.to(wide).numpy()
    found = as_numbers(raw.view(raw_dtype(dtype)), dtype)
    np.testing.assert_array_equal(found, expected)


# --- `show` of any path ---------------------------------------------------------------------------


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def shown(path: object, code: int = 0) -> str:
    found = CliRunner().invoke(main, ["show", str(path)], env={"COLUMNS": None})
    assert found.exit_code == code, found.output
    return found.output


def run_code(text: str, **given: Any) -> dict[str, Any]:
    """Runs the lines that `show` printed, with the objects that they name."""
    lines = [line.strip() for line in text.partition("\nto load")[2].splitlines()[1:]]
    assert len(lines) == 3
    names = dict(given)
    exec("\n".join(lines), names)
    return names


def ours(root: Path) -> Path:
    state = {"model": model_of(7), "step": 5, "note": "x" * 80, "rate": float("inf")}
    ray_dcp.save(state, checkpoint_id=root / "given")
    return root / "given"


def flat(root: Path) -> Path:
    ray_dcp.save(model_of(7).state_dict(), checkpoint_id=root / "given")
    return root / "given"


def stock(root: Path) -> Path:
    return checkpoints.save_stock(root / "given", {"model": model_of(7).state_dict(), "step": 5})


def hub(root: Path) -> Path:
    (root / "given").mkdir()
    save_file(model_of(7).state_dict(), root / "given" / "model.safetensors")
    config = {"architectures": ["Tiny"], "transformers_version": "4.46.0"}
    (root / "given" / "config.json").write_text(json.dumps(config))
    return root / "given"


def tensors(root: Path) -> Path:
    ray_dcp.save({"model": model_of(7), "w": torch.ones(2, 3)}, checkpoint_id=root / "given")
    return root / "given"


def run(root: Path) -> Path:
    for step in (9, 10):
        ray_dcp.save({"model": model_of(step - 3)}, checkpoint_id=root / "given" / f"step-{step}")
    return root / "given"


def runs(root: Path) -> Path:
    run(root / "given" / "a")
    return root / "given"


def managed(root: Path) -> Path:
    with ray_dcp.CheckpointManager(root / "given", 1) as manager:
        manager.save(1, {"model": model_of(7)}, metrics={"loss": 0.5})
        manager.join()
    return root / "given"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (ours, "a checkpoint of ray_dcp, saved by 1 rank"),
        (flat, "a checkpoint of ray_dcp, saved by 1 rank"),
        (stock, "a checkpoint of torch.distributed.checkpoint, saved by 1 rank"),
        (hub, "a Hugging Face model Tiny in safetensors, written by transformers 4.46.0"),
        (tensors, "a checkpoint of ray_dcp"),
        (run, "a run of 2 checkpoints"),
        (runs, "a run of 2 checkpoints"),
        (managed, "a run of 1 checkpoint, "),
    ],
)
def test_the_lines_that_load_it_run_as_they_are(
    make: Callable[[Path], Path], what: str, tmp_path: Path
):
    text = shown(make(tmp_path))
    assert what in text.splitlines()[0]
    assert "none missing or too short" in text or "committed" in text
    assert len(text.splitlines()) <= 24
    model = model_of(0)
    run_code(text, model=model)
    assert all((parameter == 7).all() for parameter in model.parameters())


def test_a_step_of_items_names_them_and_loads_one(tmp_path: Path):
    from ray_dcp.manager import Item

    with ray_dcp.CheckpointManager(tmp_path, items={"a": Item(), "b": Item()}) as manager:
        manager.save(3, {name: {"model": model_of(7)} for name in "ab"})
        manager.join()
    text = shown(tmp_path / "step-00000003")
    assert "a step of the items a, b" in text
    model = model_of(0)
    run_code(text, model=model)
    assert (model.weight == 7).all()


def test_what_is_not_whole_is_said_with_how(tmp_path: Path):
    run = tmp_path / "run"
    cli_story.make_ours(run)
    checkpoints.data_file(run / "step-00000200").unlink()
    text = shown(run)
    assert "1 committed, 1 damaged, 1 in flight" in text
    assert "newest that is whole: step-00000100" in text
    assert "step-00000200: damaged: " in text
    text = shown(run / "step-00000200", 1)
    assert "damaged: " in text
    assert "to load" not in text


@pytest.mark.parametrize("place", ["data file", "metadata", "pickle", "folder of pickles"])
def test_what_is_no_checkpoint_is_told_with_the_way_out(place: str, tmp_path: Path):
    found = stock(tmp_path)
    torch.save({}, tmp_path / "w.pt")
    path, hint = {
        "data file": (checkpoints.data_file(found), f"of the checkpoint in {found}: give that"),
        "metadata": (found / ".metadata", f"of the checkpoint in {found}: give that"),
        "pickle": (tmp_path / "w.pt", "convert it with ray-dcp import"),
        "folder of pickles": (tmp_path / "p", f"ray-dcp import {tmp_path}/p/model.bin TARGET"),
    }[place]
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model.bin").touch()
    assert hint in shown(path, 2)


def test_what_a_value_refers_to_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "elsewhere.py").write_text("class Value: pass")
    monkeypatch.syspath_prepend(tmp_path)
    value = importlib.import_module("elsewhere").Value()
    checkpoints.save_stock(tmp_path / "c", {"w": torch.ones(1), "value": value, "step": 5})
    monkeypatch.delitem(sys.modules, "elsewhere")
    assert "5" in shown(tmp_path / "c")
    assert "elsewhere" not in sys.modules
