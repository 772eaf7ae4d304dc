"""A basic index and its box give what numpy gives, and everything else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.tensor_handle import select

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
    ("index", "volume"),
    [
        (slice(2, 5), 3 * 8),
        ((slice(None), 3), 10),
        ((-1, slice(1, 4, 2)), 3),
        ((np.int64(3), np.uint8(1)), 1),
        (slice(8, 2, -3), 4 * 8),
        (slice(5, 5), 0),
        ((), 80),
        (..., 80),
    ],
)
def test_the_box_is_no_larger_than_it_must_be(index: Any, volume: int):
    array = np.arange(80).reshape(10, 8)
    assert through_box(array, index)[1] == volume


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
