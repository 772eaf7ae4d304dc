"""What a plan must be for given states, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from ray_dcp.core.columns import ColumnsBuilder
from ray_dcp.core.values import Columns, GlobalPlan, Kind
from ray_dcp.errors import (
    CoverageError,
    InvalidRequestError,
    UnsupportedValueError,
)
from ray_dcp.planning.finish import finish_table
from ray_dcp.planning.global_plan import make_plan, rank_plan
from tests.plan_cases import Case, Piece, Tensor, truth, write

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


def bytes_by_rank(plan: GlobalPlan) -> np.ndarray:
    own = np.bincount(plan.source_rank, plan.table.payload_bytes, plan.world_size)
    return own.astype(np.int64)


@pytest.mark.parametrize("world_size", [256, 3000])
def test_replicated_tensors_with_few_rows_each_are_balanced_together(world_size: int) -> None:
    # Cut one by one, a rank would get one or two of the 4096 rows of each: 1.5 times the mean.
    columns = on_ranks(1, lambda b, _: layers(b, 40))
    plan = make_plan(columns * world_size)
    written = bytes_by_rank(plan)
    assert written.max() / written.mean() < 1.01
    assert plan.table.num_chunks < 80 + world_size


def layers(builder: ColumnsBuilder, count: int) -> None:
    for index in range(count):
        builder.tensor(f"w{index}", "float32", (4096, 4096), splittable=True)
        builder.tensor(f"b{index}", "float32", (4096,))


def test_what_may_not_be_split_is_whole() -> None:
    assert make_plan(replicated(4, (4, MIB), splittable=False)).table.num_chunks == 1


def test_one_holder_that_may_not_split_keeps_the_tensor_whole() -> None:
    columns = on_ranks(2, lambda b, rank: b.tensor("w", "float32", (4, MIB), splittable=rank == 0))
    assert make_plan(columns).table.num_chunks == 1


def test_a_holder_that_took_no_digest_does_not_disagree() -> None:
    columns = on_ranks(3, lambda b, rank: b.object("o", value=5 if rank == 1 else 0))
    assert make_plan(columns).disagreements == ()


def test_replicated_scalars_are_shared_out_in_runs() -> None:
    def fill(builder: ColumnsBuilder, rank: int) -> None:
        for index in range(40):
            builder.tensor(f"step{index}", "int64", ())

    plan = make_plan(on_ranks(4, fill))
    ranks = plan.source_rank[np.argsort(plan.table.tensor)]
    assert ranks.tolist() == sorted(ranks.tolist())
    assert np.bincount(ranks).tolist() == [10, 10, 10, 10]


def test_content_that_differs_is_taken_from_the_lowest_rank_and_named() -> None:
    columns = on_ranks(
        3, lambda b, rank: (b.object("rng", value=rank + 5), b.tensor("n", "int64", (), value=9))
    )
    plan = make_plan(columns)
    assert plan.disagreements == (("rng", (1, 2)),)
    row = plan.table.names.index("rng")
    assert plan.source_rank[plan.table.tensor == row].tolist() == [0]


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


def state() -> Case:
    def whole(fqn: str, dtype: str, shape: tuple[int, ...], kind: Kind = Kind.TENSOR) -> Tensor:
        return Tensor(fqn, kind, dtype, shape, False, (Piece((0,) * len(shape), shape, (0,)),))

    halves = (Piece((0, 0), (2, 3), (0,)), Piece((2, 0), (2, 3), (0,)))
    return Case(
        1,
        (
            whole("a", "uint8", (3,)),
            Tensor("b", Kind.TENSOR, "float32", (4, 3), False, halves),
            whole("c", "float64", (5,)),
            whole("d", "complex64", (2, 2)),
            whole("e", "int64", ()),
            whole("o", "", (), Kind.OBJECT),
        ),
    )


def test_safetensors_files_are_read_by_the_library_and_the_rest_goes_to_a_companion() -> None:
    case = state()
    columns = case.columns()
    plan = make_plan(columns, container="safetensors")
    files, receipts = write(case, columns, plan, "a1")
    names = ["a1/rank-00000-part-00000.safetensors", "a1/rank-00000-part-00001.safetensors"]
    assert list(files) == [*names, "__0_0.a1.distcp"]
    first, second = (load_safetensors(bytes(files[name])) for name in names)
    known = {tensor.fqn: truth(tensor) for tensor in case.tensors if tensor.dtype}
    assert sorted(first) == ["a", "b", "c", "e"]
    assert list(second) == ["b"]
    joined = {**first, "b": np.concatenate([first["b"], second["b"]])}
    for fqn, array in joined.items():
        assert array.tobytes() == known[fqn].tobytes(), fqn
    table = finish_table(plan, "a1", receipts)
    companion = table.file == table.files.index("__0_0.a1.distcp")
    assert [table.names[t] for t in table.tensor[companion]] == ["d", "o"]


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"container": "zip"}, "'torch_save' or 'safetensors', found 'zip'"),
        ({"part_bytes": 0}, "part_bytes of at least 1"),
        ({"min_piece_bytes": 0}, "min_piece_bytes of at least 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        make_plan(replicated(1, (1,)), **arguments)


def test_no_ranks_are_refused_and_no_items_are_a_plan_without_files() -> None:
    with pytest.raises(InvalidRequestError, match="at least one rank"):
        make_plan([])
    plan = make_plan([ColumnsBuilder().build()] * 2)
    assert (plan.table.num_chunks, plan.table.files) == (0, ())
    assert finish_table(plan, "a", {}).num_chunks == 0
    assert rank_plan(plan, 1).files == ()
    with pytest.raises(InvalidRequestError, match="a rank from 0 to 1, found 2"):
        rank_plan(plan, 2)


def test_the_digest_names_the_plan() -> None:
    digests = {
        make_plan(replicated(2, (4, MIB))).digest,
        make_plan(replicated(3, (4, MIB))).digest,
        make_plan(replicated(2, (4, MIB)), min_piece_bytes=64 * MIB).digest,
        make_plan(replicated(2, (4, MIB)), container="safetensors").digest,
    }
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)


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


def test_a_gap_alone_is_a_coverage_error_also_on_one_rank() -> None:
    columns = on_ranks(1, lambda b, _: b.tensor("w", "float32", (4,), offset=(1,), size=(2,)))
    with pytest.raises(
        CoverageError, match=r"2 of 4 elements, first \[0:1\]; the rest is on rank 0"
    ):
        make_plan(columns)
