"""Read plans over tables as they come: overlapping, incomplete, stock, of other widths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.grouping import group_rows, running_max
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import InvalidRequestError
from ray_dcp.planning.coverage import _separable, problems
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.reads import Wanted, block_ranges, coalesce, pair_bytes, plan_reads, slabs


def table_of(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> ChunkTable:
    """Returns a table of one float32 tensor whose chunks are as given, fitting or not."""
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", shape)
    builder.object("o")
    table = make_plan([builder.build()]).table
    count = len(boxes)
    number = np.arange(count, dtype=np.int64)
    return replace(
        table,
        tensor=np.append(np.zeros(count, np.int32), np.int32(1)),
        offset=np.array([*(offset for offset, _ in boxes), (0,) * len(shape)], np.int64),
        size=np.array([*(size for _, size in boxes), (1,) * len(shape)], np.int64),
        file=np.zeros(count + 1, np.int32),
        **{
            name: np.append(number * 100, -1)
            for name in ("item_offset", "item_bytes", "payload_offset", "payload_bytes")
        },
        block_bytes=np.zeros(count + 1, np.int64),
        check_start=np.zeros(count + 2, np.int64),
    )


def want(offset: tuple[int, ...], size: tuple[int, ...]) -> Wanted:
    return Wanted(
        np.zeros(1, np.int32), np.array([offset], np.int64), np.array([size], np.int64),
        np.full(1, 4, np.int64),
    )  # fmt: skip


PINWHEEL = [
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
]


def test_a_pinwheel_that_no_straight_cut_divides_is_complete() -> None:
    table = table_of((3, 3), PINWHEEL)
    assert problems(table) == []
    plan = plan_reads(table, want((0, 0), (3, 3)))
    assert (plan.uncovered, len(plan), plan.bytes_needed) == ((), 5, 36)


def test_meshes_and_cuts_of_cuts_are_separated_by_straight_cuts_alone() -> None:
    mesh = [((r, c), (1, 2)) for r in range(30) for c in range(0, 40, 2)]
    uneven = [((0, 0), (2, 5)), ((2, 0), (1, 3)), ((2, 3), (1, 2))]
    boxes = np.array([*mesh, *uneven, *PINWHEEL], np.int64)
    region = np.repeat(np.arange(3), [len(mesh), len(uneven), len(PINWHEEL)])
    assert _separable(region, boxes[:, 0], boxes[:, 1], 3).tolist() == [True, True, False]


def test_a_hole_in_a_pinwheel_is_told() -> None:
    table = table_of((3, 3), PINWHEEL[:-1])
    assert problems(table) == ["'w': 1 of 9 elements are in no chunk, first [1:2, 1:2]"]
    assert plan_reads(table, want((0, 0), (3, 3))).uncovered == ((0, 4),)
    assert plan_reads(table, want((0, 0), (3, 1))).uncovered == ()


def test_chunks_that_overlap_are_read_but_do_not_hide_a_gap() -> None:
    table = table_of((4,), [((0,), (2,)), ((1,), (2,))])
    assert problems(table, overlaps=False) == ["'w': 1 of 4 elements are in no chunk, first [3:4]"]
    assert problems(table)[0] == "'w': chunks [0:2] and [1:3] overlap"
    plan = plan_reads(table, want((0,), (4,)))
    assert (len(plan), plan.uncovered) == (2, ((0, 4),))
    assert plan_reads(table, want((0,), (3,))).uncovered == ()


def test_chunks_out_of_bounds_and_missing_objects_are_told() -> None:
    table = table_of((4,), [((0,), (5,))])
    lost = replace(table, tensor=np.zeros(2, np.int32), size=np.array([[5], [0]], np.int64))
    assert problems(lost) == [
        "'w': chunk [0:5] reaches out of the tensor's shape (4,)",
        "'o': expected one stored copy of the object, found 0",
    ]


def test_what_reaches_out_of_the_tensor_is_uncovered() -> None:
    table = table_of((4,), [((0,), (4,))])
    assert plan_reads(table, want((2,), (5,))).uncovered == ((0, 12),)


def test_nothing_wanted_and_boxes_without_elements_need_nothing() -> None:
    table = table_of((4,), [((0,), (4,)), ((4,), (0,))])
    plan = plan_reads(table, want((4,), (0,)))
    assert (len(plan), plan.uncovered, plan.bytes_needed) == (0, (), 0)
    none = Wanted(
        np.zeros(0, np.int32), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64),
        np.zeros(0, np.int64),
    )  # fmt: skip
    plan = plan_reads(table, none)
    assert (len(plan), plan.uncovered, plan.bytes_needed) == (0, (), 0)


def test_pairs_are_in_the_order_of_the_file_also_without_known_payloads() -> None:
    table = table_of((4,), [((0,), (2,)), ((2,), (2,))])
    stock = replace(
        table,
        item_offset=np.array([700, 5, -1]),
        payload_offset=np.full(3, -1),
    )
    plan = plan_reads(stock, want((0,), (4,)))
    assert plan.chunk.tolist() == [1, 0]


def test_a_wanted_box_may_be_padded_wider_than_the_table() -> None:
    table = table_of((4,), [((0,), (2,)), ((2,), (2,))])
    wide = Wanted(
        np.zeros(1, np.int32), np.array([[1, 0, 0]]), np.array([[2, 1, 1]]), np.full(1, 4)
    )
    plan = plan_reads(table, wide)
    geometry = pair_bytes(table, wide, plan)
    assert geometry.chunk_low.tolist() == [4, 0]
    assert geometry.target_low.tolist() == [0, 4]


@pytest.mark.parametrize(
    "bad",
    [{"tensor": np.array([2], np.int32)}, {"offset": np.array([[-1]])}, {"size": np.array([[-1]])}],
)
def test_rows_that_ask_for_nothing_possible_are_refused(bad: dict[str, np.ndarray]) -> None:
    table = table_of((4,), [((0,), (4,))])
    with pytest.raises(InvalidRequestError, match="but 1 wanted rows are none; the first, row 0"):
        plan_reads(table, replace(want((0,), (4,)), **bad))


def test_a_slab_smaller_than_an_element_is_refused() -> None:
    zero, four = np.zeros(1, np.int64), np.full(1, 4, np.int64)
    with pytest.raises(InvalidRequestError, match="one element of 4 bytes, but the limit is 3"):
        slabs(zero, four, zero, four, 4, 3)


def test_a_column_of_a_large_chunk_is_read_in_few_ranges_without_walking_its_rows() -> None:
    rows, width = 1 << 20, 1 << 12
    box = (np.zeros(2, np.int64), np.array([rows, width]))
    column = (np.array([0, 8]), np.array([rows, 2]))
    found = block_ranges(
        *box, *column, 4, block_bytes=1 << 20, payload_bytes=rows * width * 4, max_gap_bytes=0
    )
    assert found.tolist() == [[0, rows * width * 4]]
    parts = slabs(*box, *column, 4, 64 << 20)
    assert len(parts) == rows * width * 4 // (64 << 20)


def test_huge_offsets_in_many_files_do_not_overflow() -> None:
    big = 1 << 61
    file = np.arange(8, dtype=np.int32)
    low = np.full(8, big)
    bounds = coalesce(file, low, low + 5, max_gap_bytes=10, max_bytes=100)
    assert bounds.tolist() == list(range(9))
    assert running_max(np.array([big, 3, 7]), np.array([0, 0, 9])).tolist() == [big, big, 7]


def test_rows_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_dcp.core.grouping._MIX", 0)
    first, group = group_rows([np.array([3, 4, 3, 5]), np.array([1, 1, 1, 1])])
    assert (first.tolist(), group.tolist()) == ([0, 1, 3], [0, 1, 0, 2])


def test_twenty_thousand_whole_tensors_are_one_read_each() -> None:
    builder = ColumnsBuilder()
    for index in range(20_000):
        builder.tensor(f"w{index}", "float32", (16, 16))
    table = make_plan([builder.build()]).table
    count = table.num_tensors
    wanted = Wanted(
        np.arange(count, dtype=np.int32), np.zeros((count, 2), np.int64), table.shape,
        np.full(count, 4, np.int64),
    )  # fmt: skip
    plan = plan_reads(table, wanted)
    assert (len(plan), plan.uncovered) == (count, ())
