"""Read plans give exactly the bytes that numpy slicing gives, for any box and any layout."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume, event, given, settings, target
from hypothesis import strategies as st

from ray_dcp.core.dtypes import ITEMSIZE
from ray_dcp.core.values import ChunkTable, Kind
from ray_dcp.planning.coverage import check_coverage, holes, missing_volumes
from ray_dcp.planning.finish import finish_table
from ray_dcp.planning.global_plan import make_plan
from ray_dcp.planning.reads import (
    ReadPlan,
    Wanted,
    block_ranges,
    coalesce,
    pair_bytes,
    plan_reads,
    slabs,
)
from tests.plan_cases import (
    Case,
    box_bytes,
    cases,
    truth,
    write,
)


@st.composite
def a_box(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    offset = [draw(st.integers(0, length)) for length in shape]
    return offset, [draw(st.integers(0, n - low)) for n, low in zip(shape, offset, strict=True)]


def wanted_rows(table: ChunkTable, rows: list[tuple[int, list[int], list[int]]]) -> Wanted:
    width = table.offset.shape[1]
    offset = np.zeros((len(rows), width), np.int64)
    size = np.ones((len(rows), width), np.int64)
    for row, (_, low, count) in enumerate(rows):
        offset[row, : len(low)], size[row, : len(count)] = low, count
    tensor = np.array([index for index, _, _ in rows], np.int32)
    itemsize = [ITEMSIZE[table.dtypes[table.dtype[index]]] for index, _, _ in rows]
    return Wanted(tensor, offset, size, np.array(itemsize, np.int64))


def read(
    table: ChunkTable,
    files: dict[str, bytearray],
    wanted: Wanted,
    plan: ReadPlan,
    limit_bytes: int,
    max_gap_bytes: int,
) -> list[np.ndarray]:
    """Does what a reader does, slab by slab, seeing only the ranges that it was told to read."""
    targets = [
        np.zeros((*size.tolist(), itemsize), np.uint8)
        for size, itemsize in zip(wanted.size, wanted.itemsize.tolist(), strict=True)
    ]
    for pair in range(len(plan)):
        chunk, row = int(plan.chunk[pair]), int(plan.wanted[pair])
        itemsize = int(wanted.itemsize[row])
        start = int(table.payload_offset[chunk])
        length = int(table.payload_bytes[chunk])
        stored = files[table.files[table.file[chunk]]][start : start + length]
        box = (table.offset[chunk], table.size[chunk])
        parts = slabs(*box, plan.offset[pair], plan.size[pair], itemsize, limit_bytes)
        for slab in parts:
            assert slab.high - slab.low <= limit_bytes
            seen = np.full(length, 0xEE, np.uint8)
            block = int(table.block_bytes[chunk])
            for low, high in block_ranges(
                *box, slab.offset, slab.size, itemsize,
                block_bytes=block, payload_bytes=length, max_gap_bytes=max_gap_bytes,
            ).tolist():  # fmt: skip
                assert low % block == 0
                assert high % block == 0 or high == length
                seen[low:high] = np.frombuffer(stored, np.uint8)[low:high]
            source = seen.reshape(*box[1].tolist(), itemsize)
            taken = tuple(
                slice(o, o + s) for o, s in zip(slab.offset - box[0], slab.size, strict=True)
            )
            put = tuple(
                slice(o, o + s)
                for o, s in zip(slab.offset - wanted.offset[row], slab.size, strict=True)
            )
            targets[row][put] = source[taken]
    return [values.reshape(-1) for values in targets]


@settings(max_examples=40, deadline=None)
@given(case=cases(), data=st.data(), part_bytes=st.sampled_from([1, 1 << 30]))
def test_any_wanted_box_reads_as_numpy_slices_it(
    case: Case, data: st.DataObject, part_bytes: int
) -> None:
    columns = case.columns()
    plan = make_plan(columns, part_bytes=part_bytes, min_piece_bytes=1)
    files, receipts = write(case, columns, plan, "a1")
    table = finish_table(plan, "a1", receipts)
    plain = [tensor for tensor in case.tensors if tensor.kind == Kind.TENSOR]
    assume(plain)
    rows, expected = [], []
    for tensor in plain:
        for _ in range(data.draw(st.integers(1, 3))):
            offset, size = data.draw(a_box(tensor.shape))
            rows.append((table.names.index(tensor.fqn), offset, size))
            expected.append(box_bytes(truth(tensor), offset, size))
    wanted = wanted_rows(table, rows)
    reads = plan_reads(table, wanted)
    target(float(len(reads)), label="pairs")
    event(f"pairs: {min(len(reads) // 4 * 4, 16)}+")
    geometry = pair_bytes(table, wanted, reads)
    event(f"strided in the chunk: {not geometry.chunk_contiguous.all()}")
    event(f"strided in the target: {not geometry.target_contiguous.all()}")
    assert reads.uncovered == ()
    assert reads.bytes_needed == sum(len(values) for values in expected)
    assert geometry.num_bytes.sum() == reads.bytes_needed
    limit = data.draw(st.sampled_from([16, 40, 1 << 20]))
    got = read(table, files, wanted, reads, limit, data.draw(st.sampled_from([0, 9, 4096])))
    for found, right in zip(got, expected, strict=True):
        assert np.array_equal(found, right)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ndim=st.integers(1, 4), itemsize=st.sampled_from([1, 2, 16]))
def test_extents_slabs_and_ranges_hold_exactly_what_is_needed(
    data: st.DataObject, ndim: int, itemsize: int
) -> None:
    shape = [data.draw(st.integers(2, 6)) for _ in range(ndim)]
    low = [data.draw(st.integers(0, 1)) for _ in shape]
    size = [
        n - o - data.draw(st.integers(0, 1) if n > 2 else st.just(0))
        for n, o in zip(shape, low, strict=True)
    ]
    box = (np.full(ndim, 7, np.int64), np.array(shape, np.int64))
    inner = (np.array(low, np.int64) + 7, np.array(size, np.int64))
    length = int(np.prod(shape)) * itemsize
    number = np.arange(length).reshape(*shape, itemsize)
    needed = set(box_bytes(number, low, size).tolist())
    limit = itemsize * data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 40, 1000]))
    parts = slabs(*box, *inner, itemsize, limit)
    event(f"slabs: {min(len(parts), 4)}+")
    target(float(len(parts)), label="slabs")
    found: list[int] = []
    for slab in parts:
        own = box_bytes(number, (slab.offset - 7).tolist(), slab.size.tolist()).tolist()
        assert (slab.low, slab.high) == (min(own), max(own) + 1)
        found += own
    assert sorted(found) == sorted(needed)
    block = data.draw(st.sampled_from([0, 1, 4, 32]))
    gap = data.draw(st.sampled_from([0, 3, 40]))
    ranges = block_ranges(
        *box, *inner, itemsize, block_bytes=block, payload_bytes=length, max_gap_bytes=gap
    ).tolist()
    event(f"ranges: {min(len(ranges), 4)}+")
    step = block or 1
    blocks = sorted({byte // step for byte in needed})
    merged = [[b * step, min((b + 1) * step, length)] for b in blocks]
    right: list[list[int]] = []
    for start, stop in merged:
        if right and start - right[-1][1] <= gap:
            right[-1][1] = stop
        else:
            right.append([start, stop])
    assert ranges == right


@settings(max_examples=40, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 30))),
    gap=st.integers(0, 10),
    most=st.integers(1, 80),
)
def test_coalesced_reads_serve_every_range_and_stay_short(
    ranges: list[tuple[int, int, int]], gap: int, most: int
) -> None:
    ranges.sort()
    file, low, count = (
        np.array([row[i] for row in ranges], np.int64).reshape(-1) for i in range(3)
    )
    high = low + count
    bounds = coalesce(file, low, high, max_gap_bytes=gap, max_bytes=most).tolist()
    assert (bounds[0], bounds[-1]) == (0, len(ranges))
    for start, stop in itertools.pairwise(bounds):
        assert len(set(file[start:stop].tolist())) == 1
        if stop - start > 1:
            event("several ranges in one read")
            assert high[start:stop].max() - low[start] <= most
            reach = np.maximum.accumulate(high[start:stop])
            assert (low[start + 1 : stop] - reach[:-1] <= gap).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_coverage_of_any_boxes_is_what_counting_elements_says(
    data: st.DataObject, shape: list[int]
) -> None:
    found = [data.draw(a_box(tuple(shape))) for _ in range(data.draw(st.integers(0, 6)))]
    counts = np.zeros(shape, np.int64)
    for low, size in found:
        counts[tuple(slice(o, o + s) for o, s in zip(low, size, strict=True))] += 1
    offset = np.array([low for low, _ in found], np.int64).reshape(-1, len(shape))
    size = np.array([size for _, size in found], np.int64).reshape(-1, len(shape))
    whole = np.array([shape], np.int64)
    region = np.zeros(len(found), np.int64)
    coverage = check_coverage(region, offset, size, whole)
    missing = int((counts == 0).sum())
    event(f"missing: {missing > 0}, overlapping: {bool((counts > 1).any())}")
    assert coverage.outside == ()
    assert bool(coverage.overlaps) == bool((counts > 1).any())
    assert sum(gap[1] for gap in coverage.gaps) == missing
    full = (size > 0).all(axis=1)
    zero = np.zeros_like(whole)
    assert missing_volumes(region[full], offset[full], size[full], zero, whole)[0] == missing
    for low, lengths in holes(offset, size, zero[0], whole[0]):
        part = tuple(slice(o, o + s) for o, s in zip(low, lengths, strict=True))
        assert (counts[part] == 0).all()
        counts[part] = 9
    assert (counts != 0).all()
