"""Sinks fill many small rows at once; boxes keep the order in which they were added."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ray_dcp.torch_adapter.sink import Boxes, TensorSink

SOURCE = memoryview(bytearray(range(200)))


def numbers(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().view(-1).view(torch.uint8).tolist()


def test_rows_in_place_are_filled_and_only_they() -> None:
    sink = TensorSink()
    plain, parameter = torch.zeros(4, dtype=torch.uint8), torch.nn.Parameter(torch.zeros(2, 3))
    transposed, other = torch.zeros(2, 3).t(), torch.zeros(4, dtype=torch.int64)
    sink.add_direct([plain, parameter])
    assert not sink.add(transposed, torch.float32)
    assert not sink.add(other, torch.int32)
    left = sink.put_many([1, 2, 0, 3], SOURCE, [8, 40, 196, 70], [24, 24, 4, 16])
    assert left == [1, 3]
    assert numbers(plain) == [196, 197, 198, 199]
    assert numbers(parameter) == [*range(8, 32)]
    assert not any(transposed.reshape(-1))
    assert not any(other)


@pytest.mark.parametrize(
    ("start", "count"), [(197, 4), (-1, 4), (0, 3), (0, 5), (1 << 62, 4), (-(1 << 62), 4)]
)
def test_what_reaches_out_of_the_source_or_the_row_is_left(start: int, count: int) -> None:
    sink = TensorSink()
    row = torch.full((6,), 77, dtype=torch.uint8)[1:5]
    sink.add_direct([row])
    assert sink.put_many([0], SOURCE, [start], [count]) == [0]
    assert numbers(row) == [77] * 4


def test_a_tensor_whose_memory_was_taken_meanwhile_is_left() -> None:
    sink = TensorSink()
    emptied, shrunk = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    sink.add_direct([emptied, shrunk])
    emptied.untyped_storage().resize_(0)
    shrunk.resize_(2)
    assert sink.put_many([0, 1], SOURCE, [0, 0], [4, 4]) == [0, 1]


def add_direct(boxes: Boxes, *rows: tuple[int, torch.Tensor]) -> None:
    width = max(tensor.dim() for _, tensor in rows)
    boxes.add_direct(
        np.array([number for number, _ in rows]),
        [tensor for _, tensor in rows],
        np.array([[*t.shape, *[1] * (width - t.dim())] for _, t in rows]),
        np.array([tensor.itemsize for _, tensor in rows]),
    )


def test_rows_of_boxes_and_sink_are_the_same_whatever_order_they_came_in() -> None:
    boxes = Boxes({5: 2, 6: 8})
    one, two, three = torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(0, 4)
    four = torch.zeros(1, dtype=torch.int16)
    boxes.add(5, (1, 2), (3, 4))
    boxes.sink.add(torch.zeros(3, 4, dtype=torch.int16), torch.int16)
    add_direct(boxes, (9, one), (8, two), (7, three))
    boxes.add(6, (), ())
    boxes.sink.add(torch.zeros((), dtype=torch.int64), torch.int64)
    add_direct(boxes, (4, four))
    wanted = boxes.wanted()
    assert wanted.tensor.tolist() == [5, 9, 8, 6, 4]
    assert wanted.offset.tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert wanted.size.tolist() == [[3, 4, 1], [3, 1, 1], [2, 2, 2], [1, 1, 1], [1, 1, 1]]
    assert wanted.itemsize.tolist() == [2, 4, 4, 8, 2]
    assert [sink_row.nbytes for sink_row in map(boxes.sink.buffer, range(5))] == [24, 12, 32, 8, 2]


def test_nothing_wanted_has_a_column_of_each_kind() -> None:
    wanted = Boxes({}).wanted()
    assert len(wanted) == 0
    assert wanted.offset.shape == wanted.size.shape == (0, 1)
