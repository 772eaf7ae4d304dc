"""A rank's columns arrive as they were sent, and impossible ones are refused."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import pyarrow
import pytest

from ray_dcp.core.columns import ColumnsBuilder, check, decode, encode
from ray_dcp.core.packing import pack_record, unpack_record
from ray_dcp.core.values import Columns, IntKey, Kind
from ray_dcp.errors import InternalError, InvalidRequestError, RankDisagreementError


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


def test_a_rank_that_holds_nothing_comes_back_from_bytes() -> None:
    got = decode(encode(ColumnsBuilder().build()))
    assert (len(got), got.shape.shape, got.names) == (0, (0, 1), ())


@pytest.mark.parametrize("data", [b"", b"rubbish", encode(some())[:-30], encode(some())[:100]])
def test_bytes_that_are_no_columns_are_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(InternalError, match="expected a rank's items"):
        decode(data)


def test_another_record_is_no_columns() -> None:
    with pytest.raises(InternalError):
        decode(pack_record({"form": 3}, []))


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
    broken = replace(some(), **change)
    assert len(check(broken)) >= 1
    with pytest.raises(InvalidRequestError, match=told):
        encode(broken)


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


def test_lengths_that_differ_name_the_item() -> None:
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", (3, 3), offset=(1,))
    with pytest.raises(InvalidRequestError, match="differ for 'w'"):
        builder.build()


def test_conflicts_arrive_where_they_are_told_with_those_of_other_ranks() -> None:
    builder = ColumnsBuilder()
    builder.tensor("outside", "float32", (3,), offset=(-1,), size=(2,))
    for _ in range(2):
        builder.tensor("twice", "float32", (3,))
        builder.object("object")
    columns = builder.build()
    arrived = decode(encode(columns))
    assert arrived.name.tolist() == columns.name.tolist()
    assert arrived.offset.tolist() == columns.offset.tolist()


def test_one_rank_may_hold_several_boxes_without_elements_at_one_place() -> None:
    builder = ColumnsBuilder()
    builder.tensor("w", "float32", (3,), offset=(3,), size=(0,))
    builder.tensor("w", "float32", (3,), offset=(3,), size=(0,))
    assert len(builder.build()) == 2


def test_a_text_that_unpacks_to_far_more_than_its_length_is_refused() -> None:
    text = json.dumps([{"a": 1}, []]).encode()
    for num_blanks, is_refused in ((0, False), (1 << 20, True)):
        long = text + b" " * num_blanks
        packed = pyarrow.Codec("zstd").compress(long, asbytes=True)
        tail = struct.pack("<QQQ", len(packed), len(long), len(packed) + 24)
        with pytest.raises(ValueError, match="can't hold") if is_refused else nullcontext():
            assert unpack_record(packed + tail) == ({"a": 1}, [])
