"""Plans: what ranks hold, what contradicts itself, who writes what where, what is read of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import pyarrow
import pytest

from ray_dcp import (
    CoverageError,
    InternalError,
    InvalidRequestError,
    RankDisagreementError,
    UnsupportedValueError,
)
from ray_dcp.commit_protocol.messages import FileReceipt, FileReceipts, join_receipts
from ray_dcp.core.columns import ColumnsBuilder, decode, encode, pack_record, unpack_record
from ray_dcp.core.values import Columns, GlobalPlan, IntKey, Kind, group_rows
from ray_dcp.planning.coverage import check_coverage
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.planning.reads import Wanted, plan_reads
from ray_dcp.torch_adapter.capture import capture
from tests.support.format_cases import table_of
from tests.support.plan_cases import ALL, CONFLICTS, Boxes, Case, Piece, Tensor, finish_table, write
from tests.support.world import run_ranks, save_ranks

# --- What a rank holds, as columns ----------------------------------------------------------------


def some() -> Columns:
    builder = ColumnsBuilder()
    builder.tensor(
        "model.w", "bfloat16", (4, 6), offset=(2, 0), size=(2, 6), path=("model", "w"),
        requires_grad=True, splittable=True,
    )  # fmt: skip
    builder.tensor("model.w", "bfloat16", (4, 6), offset=(0, 0), size=(2, 6))
    builder.tensor("scale", "float32", (), value=2**64 - 1)
    builder.tensor("sub", "uint8", (3,), opaque=True)
    builder.object("list.0.näme\ud800", path=("list", 0, IntKey(7), "näme\ud800"), value=7)
    return builder.build()


def test_columns_come_back_from_bytes_equal_in_every_field() -> None:
    sent = some()
    got = decode(encode(sent))
    for field in fields(Columns):
        mine, theirs = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            assert np.array_equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name
    assert got.paths == (("model", "w"), None, None, ("list", 0, "7", "näme\ud800"))
    assert [*map(type, got.paths[3])] == [str, int, IntKey, str]
    assert got.kind.tolist() == [Kind.TENSOR] * 3 + [Kind.OPAQUE, Kind.OBJECT]


@pytest.mark.parametrize("data", [b"", b"rubbish", encode(some())[:-30], encode(some())[:100]])
def test_bytes_that_are_no_columns_are_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(InternalError, match="expected a rank's items"):
        decode(data)


def test_another_version_is_told_as_such() -> None:
    fields, frames = unpack_record(encode(some()))
    with pytest.raises(RankDisagreementError, match="found form 9: run the same version"):
        decode(pack_record({**fields, "form": 9}, list(map(bytes, frames))))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": np.array([9, 0, 1, 2, 3], np.int32)}, "name from 0 to 3, found 9"),
        ({"kind": np.array([0, 0, 0, 3, 1], np.int8)}, "kind from 0 to 2, found 3"),
        ({"dtype": np.array([0, 0, 5, 2, -1], np.int8)}, "dtype of a tensor"),
        ({"dtype": np.array([0, 0, 1, 2, 0], np.int8)}, "dtype of an object"),
        ({"ndim": np.array([2, 2, 3, 1, 0], np.int8)}, "ndim from 0 to 2, found 3"),
        ({"ndim": np.array([2, 2, 0, 1, 1], np.int8)}, "ndim of an object"),
        ({"ndim": np.array([1, 2, 0, 1, 0], np.int8)}, "'model.w' is not padded"),
        ({"value": np.zeros(4, np.uint64)}, r"column 'value' of shape \(5,\), found \(4,\)"),
        ({"size": np.ones((5, 3), np.int64)}, "column 'size'"),
        ({"paths": ()}, "4 names have 0 paths"),
        ({"names": ("a", "a", "b", "c")}, "holds a name twice"),
    ],
)
def test_impossible_columns_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        encode(replace(some(), **change))


def test_all_impossible_items_are_told_at_once() -> None:
    builder = ColumnsBuilder()
    builder.tensor("huge", "float32", (1 << 40, 1 << 40))
    builder.tensor("negative", "float32", (3,), size=(-1,))
    builder.tensor("far", "float32", (3,), offset=(1 << 61,))
    builder.tensor("before", "float32", (3,), offset=(-1 << 61,))
    with pytest.raises(InvalidRequestError) as caught:
        builder.build()
    for told in ("'huge' is be", "'negative' has a neg", "'far' is be", "'before' is beyond 2**62"):
        assert told in str(caught.value)


# --- Ranks whose items make no checkpoint ---------------------------------------------------------


def captured(state, rank, world_size):
    return capture(state, rank=rank, world_size=world_size)


HOW = {
    "save": {},
    "async": {"staged": True},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("conflict", [*CONFLICTS.values(), ALL], ids=[*CONFLICTS, "all"])
def test_every_rank_is_told_all_conflicts_by_name_and_rank(tmp_path, conflict, how):
    states = [conflict.state(rank) for rank in range(3)]
    url = str(tmp_path / "c")
    results = run_ranks(save_ranks({}, 3, url, states=states, capture=captured, **how))
    assert {type(result.error) for result in results} == {conflict.kind}
    assert len({str(result.error) for result in results}) == 1
    for line in conflict.told:
        assert line in str(results[0].error)
    assert not (tmp_path / "c").exists()


# --- Receipts that fit the plan -------------------------------------------------------------------


def planned() -> tuple[GlobalPlan, dict[int, FileReceipt]]:
    shards = (Piece((0,), (9000,), (0,)), Piece((9000,), (9000,), (1,)))
    case = Case(
        2,
        (
            Tensor("w", Kind.TENSOR, "uint8", (18000,), False, shards),
            Tensor("o", Kind.OBJECT, "", (), False, (Piece((), (), (1,)),)),
            Tensor("p", Kind.OBJECT, "", (), False, (Piece((), (), (1,)),)),
        ),
    )
    columns = case.columns()
    plan = make_plan(columns)
    return plan, write(case, columns, plan, "a1")[1]


def joined(receipts: dict[int, FileReceipt]) -> FileReceipts:
    return join_receipts([*receipts.values()])


def _deferred(receipt: FileReceipt, **changes: int) -> FileReceipt:
    first = replace(receipt.deferred[0], **changes)
    return replace(receipt, deferred=(first, *receipt.deferred[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, key="__1_0.a2.distcp"),
        lambda r: replace(r, num_bytes=r.num_bytes + 1),
        lambda r: replace(r, deferred=r.deferred[::-1]),
        lambda r: replace(r, deferred=r.deferred[:1]),
        lambda r: _deferred(r, item_offset=5),
        lambda r: _deferred(r, item_bytes=-1),
        lambda r: _deferred(r, block_bytes=0),
    ],
)
def test_a_receipt_that_does_not_fit_is_named(
    change: Callable[[FileReceipt], FileReceipt],
) -> None:
    plan, receipts = planned()
    receipts[1] = change(receipts[1])
    with pytest.raises(InternalError) as caught:
        finish_table(plan, "a1", joined(receipts))
    assert "__1_0.a1.distcp of rank 1" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_missing_and_unplanned_files_are_told_together() -> None:
    plan, receipts = planned()
    with pytest.raises(InternalError) as caught:
        finish_table(plan, "a1", join_receipts([replace(receipts[0], file=7)]))
    for told in ("file 7 is not planned", "__0_0.a1.distcp of rank 0", "__1_0.a1.distcp of rank 1"):
        assert told in str(caught.value)


# --- The plan of all ranks ------------------------------------------------------------------------


MIB = 1 << 20


def on_ranks(world_size: int, fill: Callable[[ColumnsBuilder, int], object]) -> list[Columns]:
    builders = [ColumnsBuilder() for _ in range(world_size)]
    for rank, builder in enumerate(builders):
        fill(builder, rank)
    return [builder.build() for builder in builders]


def replicated(world_size: int, shape: tuple[int, ...], splittable: bool = True) -> list[Columns]:
    return on_ranks(world_size, lambda b, _: b.tensor("w", "float32", shape, splittable=splittable))


def test_a_large_replicated_tensor_is_cut_over_its_holders_along_its_first_long_dimension() -> None:
    plan = make_plan(replicated(4, (1, 10, 1 << 16)))
    assert plan.table.size[:, 1].tolist() == [3, 2, 3, 2]
    assert plan.table.offset[:, 1].tolist() == [0, 3, 5, 8]
    assert plan.source_rank.tolist() == [0, 1, 2, 3]
    assert (plan.source_start // (4 << 16)).tolist() == [0, 3, 5, 8]


@pytest.mark.parametrize(("shape", "chunks"), [((100,), 1), ((1 << 14,), 1), ((1 << 15,), 2)])
def test_pieces_are_not_cut_below_64_kib(shape: tuple[int, ...], chunks: int) -> None:
    assert make_plan(replicated(8, shape)).table.num_chunks == chunks


def test_small_payloads_come_first_and_large_ones_start_on_pages() -> None:
    def fill(builder: ColumnsBuilder, rank: int) -> None:
        builder.tensor("large", "uint8", (65536,))
        builder.tensor("small", "uint8", (65535,))
        builder.object("object")
        builder.tensor("scalar", "float32", ())

    table = make_plan(on_ranks(1, fill)).table
    assert [table.names[t] for t in table.tensor] == ["small", "scalar", "large", "object"]
    assert table.payload_offset[2] % 4096 == 0
    assert (table.payload_offset[:2] % 64 == 0).all()
    last = (table.item_offset[3], table.item_bytes[3], table.payload_offset[3])
    assert (*last, table.payload_bytes[3], table.block_bytes[3]) == (-1, -1, -1, -1, 0)
    assert table.files == ("__0_0.{attempt}.distcp",)


def test_a_large_share_is_written_as_several_near_equal_files() -> None:
    def fill(builder: ColumnsBuilder, rank: int) -> None:
        for index in range(10):
            builder.tensor(f"w{index}", "uint8", (MIB,))

    plan = make_plan(on_ranks(1, fill), part_bytes=4 * MIB)
    assert plan.table.files == tuple(f"__0_{part}.{{attempt}}.distcp" for part in range(3))
    assert np.bincount(plan.table.file).tolist() == [3, 4, 3]
    assert [len(file.row) for file in rank_plan(plan, 0).files] == [3, 4, 3]


def test_boxes_without_elements_are_kept_once_and_never_beside_others_at_their_place() -> None:
    def fill(builder: ColumnsBuilder, rank: int) -> None:
        offset, size = [((0,), (3,)), ((3,), (0,)), ((3,), (0,)), ((0,), (0,))][rank]
        builder.tensor("w", "float32", (3,), offset=offset, size=size)

    plan = make_plan(on_ranks(4, fill))
    boxes = zip(plan.table.offset.tolist(), plan.table.size.tolist(), strict=True)
    assert sorted(boxes) == [([0], [3]), ([3], [0])]
    assert plan.file_rank.tolist() == [0, 1]


def test_an_unknown_dtype_names_the_tensor_unless_it_is_opaque() -> None:
    columns = on_ranks(2, lambda b, _: b.tensor("w", "qint8", (4,)))
    with pytest.raises(UnsupportedValueError, match="'w' of qint8 on rank 0"):
        make_plan(columns)
    opaque = on_ranks(2, lambda b, _: b.tensor("w", "qint8", (4,), opaque=True))
    assert make_plan(opaque).table.payload_offset.tolist() == [-1]


def test_no_ranks_are_refused_and_no_items_are_a_plan_without_files() -> None:
    plan = make_plan([ColumnsBuilder().build()] * 2)
    assert (plan.table.num_chunks, plan.table.files) == (0, ())
    assert finish_table(plan, "a", join_receipts([])).num_chunks == 0
    assert rank_plan(plan, 1).files == ()


def test_the_lowest_holder_writes_everything_when_asked_to():
    def columns() -> Columns:
        builder = ColumnsBuilder()
        builder.tensor("w", "float32", (4096, 1024), splittable=True)
        builder.tensor("b", "float32", (7,))
        builder.object("step")
        return builder.build()

    shared = make_plan([columns() for _ in range(4)])
    assert set(shared.source_rank.tolist()) != {0}
    lowest = make_plan([columns() for _ in range(4)], to_lowest_rank=True)
    assert set(lowest.source_rank.tolist()) == {0}
    assert lowest.table.num_chunks == 3


# --- Read plans -----------------------------------------------------------------------------------


PINWHEEL = [
    ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("boxes", "outside", "overlaps", "gaps", "wanted"),
    [
        # Complete, though no straight cut divides it.
        (PINWHEEL, (), (), [], [((0, 0), (3, 3), 5, 0)]),
        (PINWHEEL[:-1], (), (), [(1, [1, 1])], [((0, 0), (3, 3), 4, 1), ((0, 0), (3, 1), 2, 0)]),
        # What overlaps is read, and hides no gap.
        ([((0, 0), (2, 3)), ((1, 0), (1, 3))], (), ((0, 1),), [(3, [2, 0])],
         [((0, 0), (3, 3), 2, 3), ((0, 0), (2, 3), 2, 0)]),
        ([((0, 0), (3, 4))], (0,), (), [], []),
    ],
    ids=["pinwheel", "hole", "overlap", "out of bounds"],
)  # fmt: skip
def test_what_boxes_of_a_tensor_of_3_by_3_lack_is_told(boxes, outside, overlaps, gaps, wanted):
    table = table_of([("w", None, Kind.TENSOR, "float32", (3, 3), False, [(*b, 0) for b in boxes])])
    region = np.zeros(len(boxes), np.int64)
    found = check_coverage(region, table.offset, table.size, table.shape)
    assert (found.outside, found.overlaps) == (outside, overlaps)
    assert [(missing, offset.tolist()) for _, missing, offset, _ in found.gaps] == gaps
    for offset, size, pairs, missing in wanted:
        one = (np.zeros(1, np.int32), np.array([offset]), np.array([size]), np.full(1, 4))
        plan = plan_reads(table, Wanted(*one))
        assert (len(plan), plan.uncovered) == (pairs, ((0, 4 * missing),) * bool(missing))
        assert plan.bytes_needed == 4 * size[0] * size[1]


def test_rows_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_dcp.core.values._MIX", 0)
    first, group = group_rows([np.array([3, 4, 3, 5]), np.array([1, 1, 1, 1])])
    assert (first.tolist(), group.tolist()) == ([0, 1, 3], [0, 1, 0, 2])


def test_a_text_that_unpacks_to_far_more_than_its_length_is_refused() -> None:
    text = json.dumps([{"a": 1}, []]).encode()
    for num_blanks, is_refused in ((0, False), (1 << 20, True)):
        long = text + b" " * num_blanks
        packed = pyarrow.Codec("zstd").compress(long, asbytes=True)
        tail = struct.pack("<QQQ", len(packed), len(long), len(packed) + 24)
        with pytest.raises(ValueError, match="can't hold") if is_refused else nullcontext():
            assert unpack_record(packed + tail) == ({"a": 1}, [])


@pytest.mark.parametrize("rank", range(3))
def test_a_gap_alone_stays_a_coverage_error(tmp_path, rank):
    states = [{"w": Boxes(*([(3 * r, min(3 * r + 3, 8))] * (r != rank)))} for r in range(3)]
    results = run_ranks(save_ranks({}, 3, str(tmp_path), states=states, capture=captured))
    others = np.delete(np.arange(3), rank)
    assert {type(result.error) for result in results} == {CoverageError}
    assert f"the rest is on ranks {others[0]}, {others[1]}" in str(results[0].error)
