"""What changed from one checkpoint to another: by hashes where they decide, else by reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.core.dtypes import READABLE, as_numbers, raw_dtype
from ray_dcp.errors import InvalidRequestError, MissingKeyError
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.difference import diff_tables, new_bytes
from tests.support import big_views, checkpoints, world
from tests.support.storages import Counting, counted_view


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
        ("soem", MissingKeyError, "did you mean 'some'"),
        ("new", InvalidRequestError, "not a tensor of both"),
        ("shape", InvalidRequestError, "shape"),
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
        table = big_views.table(2000, 250, name * 16, changed=changed, files=256)
        storage = Counting(str(tmp_path))
        checkpoint = Checkpoint("native", str(tmp_path), 1, b"", table)
        views.append((CheckpointView(storage, checkpoint), storage))
    (a, reads_a), (b, reads_b) = views
    diff = a.diff(b)
    assert diff.counts == {"unchanged": 1500, "changed": 500}
    assert diff.changed_bytes == 500 * 250 * big_views.ROW_BYTES
    assert (diff.bytes_read, reads_a.ranges, reads_b.ranges) == (0, 0, 0)


@given(st.integers(0, 12), st.integers(1, 6), st.integers(0, 12), st.booleans())
def test_tables_differ_exactly_where_checksums_do(tensors, parts, changed, other_parts):
    first = big_views.table(tensors, parts, "a" * 16, files=parts)
    more = parts + 1 if other_parts else parts
    second = big_views.table(tensors, more, "b" * 16, changed=changed, files=1)
    found = diff_tables(first, second)
    size = parts * big_views.ROW_BYTES
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
