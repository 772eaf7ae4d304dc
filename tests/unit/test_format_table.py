import dataclasses
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_dcp.core.checksums import digest
from ray_dcp.core.values import Kind
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.format import table as tb
from ray_dcp.format import table_file as parquet
from ray_dcp.format.table_check import check_table
from ray_dcp.format.table_file import read_footer
from tests import big_views
from tests.format_cases import difference, many_table, mixed_table, table_of


def planned():
    """A table as planned: no checksums, a deferred chunk without place."""
    table = mixed_table()
    place = table.item_offset.copy()
    place[3] = -1
    return dataclasses.replace(
        table,
        item_offset=place,
        payload_offset=np.where(place < 0, -1, table.payload_offset),
        checks=table.checks[:0],
        check_start=np.zeros_like(table.check_start),
    )


def wide():
    """Padded to more columns than any tensor has, unused vocabulary."""
    table = table_of([("w", None, Kind.TENSOR, "int8", (3,), False, [((0,), (3,), 0)])])
    return dataclasses.replace(
        table,
        dtypes=("float32", "int8", "bool"),
        dtype=np.array([1], dtype=np.int8),
        files=("unused", *table.files),
        file=np.array([1], dtype=np.int32),
        shape=np.array([[3, 1, 1]]),
        offset=np.array([[0, 0, 0]]),
        size=np.array([[3, 1, 1]]),
    )


TABLES = {
    "mixed": mixed_table,
    "empty": lambda: table_of([], files=()),
    "objects only": lambda: table_of(
        [("o", ("o",), Kind.OBJECT, None, (), False, [((), (), 0)])]
    ),
    "no checksums": lambda: table_of(
        [("w", ("w",), Kind.TENSOR, "bool", (2, 2), False, [((0, 0), (2, 2), 0)])], checks=False
    ),
    "planned": planned,
    "wide": wide,
    "many": lambda: many_table(300),
    "odd names": lambda: table_of(
        [(name, (name, -3, 0, "0", ""), Kind.TENSOR, "int8", (1,), False, [((0,), (1,), 0)])
         for name in ("", "a.b", "ü\u4e2d\n", "x" * 5000, "[0]", "\x00")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_back_with_equal_values_types_and_order(name):
    table = TABLES[name]()
    data = tb.encode_table(table)
    assert difference(tb.decode_table(data), table) == []
    assert tb.encode_table(table) == data


def test_other_tools_see_flat_columns_with_one_row_a_chunk():
    table = mixed_table()
    rows = pq.read_table(io.BytesIO(tb.encode_table(table))).to_pylist()
    assert len(rows) == table.num_chunks + 1
    second = rows[1]
    assert second["fqn"] == "m.w"
    assert second["shape"] == [6, 4]
    assert second["offsets"] == [3, 0]
    assert second["sizes"] == [3, 4]
    assert second["file"] == "__1_0.a1.distcp"
    assert second["kind"] == "tensor"
    assert second["requires_grad"] is True
    assert second["checks"] == [int(table.checks[1])]
    assert second["digest"] == digest(table.checks[1:2])
    lr = next(row for row in rows if row["fqn"] == "o.0.lr")
    assert (lr["path"], lr["path_is_index"]) == (["o", "0", "lr"], [False, True, False])
    assert (lr["kind"], lr["dtype"]) == ("object", None)
    assert next(row for row in rows if row["fqn"] == "nowhere")["file"] is None


def changed(table, **arrays):
    return dataclasses.replace(table, **arrays)


def at(array, index, value):
    array = array.copy()
    array[index] = value
    return array


WRONG = {
    "tensor index too large": lambda t: changed(t, tensor=at(t.tensor, 0, t.num_tensors)),
    "tensor index negative": lambda t: changed(t, tensor=at(t.tensor, 0, -1)),
    "file index too large": lambda t: changed(t, file=at(t.file, 0, 2)),
    "file index negative": lambda t: changed(t, file=at(t.file, 0, -1)),
    "box beyond its tensor": lambda t: changed(t, offset=at(t.offset, (1, 0), 4)),
    "box before its tensor": lambda t: changed(t, offset=at(t.offset, (1, 0), -1)),
    "negative box": lambda t: changed(t, size=at(t.size, (0, 0), -3)),
    "overflowing box": lambda t: changed(t, offset=at(t.offset, (1, 0), 2**63 - 1)),
    "padding used": lambda t: changed(t, size=at(t.size, (2, 0), 2)),
    "negative shape": lambda t: changed(t, shape=at(t.shape, (0, 0), -6)),
    "huge shape": lambda t: changed(t, shape=at(t.shape, (5, slice(None)), 1 << 40)),
    "payload of another length": lambda t: changed(
        t, payload_bytes=at(t.payload_bytes, 0, 52), item_bytes=at(t.item_bytes, 0, 9999)
    ),
    "payload outside its item": lambda t: changed(t, payload_offset=at(t.payload_offset, 3, 0)),
    "payload before its item": lambda t: changed(t, item_offset=at(t.item_offset, 0, 500)),
    "item beyond 2**63": lambda t: changed(t, item_offset=at(t.item_offset, 0, 2**63 - 8)),
    "negative length": lambda t: changed(t, item_bytes=at(t.item_bytes, 0, -5)),
    "unknown kind": lambda t: changed(t, kind=at(t.kind, 0, 3)),
    "unknown dtype": lambda t: changed(t, dtypes=("float99", *t.dtypes[1:])),
    "dtype out of range": lambda t: changed(t, dtype=at(t.dtype, 0, 9)),
    "tensor without dtype": lambda t: changed(t, dtype=at(t.dtype, 0, -1)),
    "ndim too large": lambda t: changed(t, ndim=at(t.ndim, 0, 6)),
    "missing checksum": lambda t: changed(
        t, checks=t.checks[:-1], check_start=at(t.check_start, -1, len(t.checks) - 1)
    ),
    "checksum of another chunk": lambda t: changed(t, check_start=at(t.check_start, 1, 0)),
    "checksums not counted": lambda t: changed(t, checks=t.checks[:-1]),
    "negative block": lambda t: changed(t, block_bytes=at(t.block_bytes, 0, -1)),
    "other block": lambda t: changed(t, block_bytes=at(t.block_bytes, 0, 1)),
    "one name twice": lambda t: changed(t, names=(t.names[1], *t.names[1:])),
    "one file twice": lambda t: changed(t, files=(t.files[0],) * 2),
    "columns of different length": lambda t: changed(t, file=t.file[:-1]),
    "missing path": lambda t: changed(t, paths=t.paths[:-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_table_that_contradicts_itself_is_neither_written_nor_believed(name):
    check_table(mixed_table())
    with pytest.raises(DamagedCheckpointError):
        check_table(WRONG[name](mixed_table()))
    with pytest.raises(DamagedCheckpointError):
        tb.encode_table(WRONG[name](mixed_table()))


def test_a_file_outside_the_checkpoint_is_unsafe():
    with pytest.raises(UnsafeCheckpointError):
        check_table(changed(mixed_table(), files=("../x", "y")))


def rewritten(edit=lambda rows: rows, metadata=None, schema=None, extra=None):
    """The mixed table's Parquet file with other columns or metadata."""
    table = pq.read_table(io.BytesIO(tb.encode_table(mixed_table())))
    found = dict(table.schema.metadata)
    if extra:
        found[parquet._EXTRA_KEY] = json.dumps(
            json.loads(found[parquet._EXTRA_KEY]) | extra
        ).encode()
    found.update(metadata or {})
    table = edit(table)
    table = table.cast(schema or table.schema).replace_schema_metadata(found)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def column_set(name, values):
    def edit(table):
        index = table.schema.get_field_index(name)
        array = pa.array(values(table.column(name).to_pylist()), type=table.schema.field(name).type)
        return table.set_column(index, table.schema.field(name), array)

    return edit


def test_the_file_that_the_next_test_damages_is_a_good_one():
    assert difference(tb.decode_table(rewritten()), mixed_table()) == []


STORED_WRONG = {
    "a column less": {"edit": lambda t: t.drop_columns(["digest"])},
    "a row less": {"edit": lambda t: t.slice(0, 3)},
    "no row": {"edit": lambda t: t.slice(0, 0)},
    "rows of another tensor": {"edit": column_set("tensor_index", lambda v: [9, *v[1:]])},
    "negative tensor": {"edit": column_set("tensor_index", lambda v: [-1, *v[1:]])},
    "another file's name": {"edit": column_set("file", lambda v: [v[2], v[0], *v[2:]])},
    "unknown file index": {"edit": column_set("file_index", lambda v: [7, *v[1:]])},
    "missing offset": {"edit": column_set("item_offset", lambda v: [None, *v[1:]])},
    "missing shape": {"edit": column_set("shape", lambda v: [None, *v[1:]])},
    "missing number in a shape": {"edit": column_set("shape", lambda v: [[None, 1], *v[1:]])},
    "too many dimensions": {"edit": column_set("sizes", lambda v: [[1] * 9, *v[1:]])},
    "other dimensions": {"edit": column_set("sizes", lambda v: [[3], *v[1:]])},
    "missing checks": {"edit": column_set("checks", lambda v: [None, *v[1:]])},
    "fewer checks": {"edit": column_set("checks", lambda v: [[], *v[1:]])},
    "a check missing": {"edit": column_set("checks", lambda v: [[None], *v[1:]])},
    "no number as index": {
        "edit": column_set("path", lambda v: [*v[:3], ["o", "x", "lr"], *v[4:]])
    },
    "shorter path_is_index": {"edit": column_set("path_is_index", lambda v: [[], *v[1:]])},
    "unknown kind": {"edit": column_set("kind", lambda v: ["code", *v[1:]])},
    "missing kind": {"edit": column_set("kind", lambda v: [None, *v[1:]])},
    "missing name": {"edit": column_set("fqn", lambda v: [None, None, *v[2:]])},
    "another name in a later row": {"edit": column_set("fqn", lambda v: [v[0], "z", *v[2:]])},
    "missing requires_grad": {"edit": column_set("requires_grad", lambda v: [None, *v[1:]])},
    "width too small": {"extra": {"width": 1}},
    "width of nonsense": {"extra": {"width": 1 << 40}},
    "more chunks than rows": {"extra": {"num_chunks": 1 << 40}},
    "more tensors than rows": {"extra": {"num_tensors": 1 << 40}},
    "fewer tensors": {"extra": {"num_tensors": 7}},
    "files of nonsense": {"extra": {"files": [1, 2]}},
    "no dtypes": {"extra": {"dtypes": None}},
    "too many dtypes": {"extra": {"dtypes": [str(n) for n in range(500)]}},
    "no vocabularies": {"metadata": {parquet._EXTRA_KEY: b"[]"}},
    "vocabularies of nonsense": {"metadata": {parquet._EXTRA_KEY: b"["}},
    "deep vocabularies": {"metadata": {parquet._EXTRA_KEY: b"[" * 200_000}},
    "no version": {"metadata": {parquet._VERSION_KEY: b""}},
    "version of nonsense": {"metadata": {parquet._VERSION_KEY: b"9" * 5000}},
}


@pytest.mark.parametrize("name", STORED_WRONG)
def test_a_stored_table_that_contradicts_itself_is_damage(name):
    data = rewritten(**STORED_WRONG[name])
    with pytest.raises(DamagedCheckpointError):
        tb.decode_table(data)


def test_a_newer_version_says_to_upgrade_and_is_not_called_damaged():
    newer = str(parquet.FORMAT_VERSION + 1).encode()
    with pytest.raises(CheckpointError, match="upgrade ray_dcp") as caught:
        tb.decode_table(rewritten(metadata={parquet._VERSION_KEY: newer}))
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize("limit", ["MAX_ROWS", "FREE_VALUES", "MAX_TABLE_BYTES"])
def test_a_table_that_claims_too_much_is_refused_before_it_is_read(limit, monkeypatch):
    data = tb.encode_table(many_table(300))
    values = sum(column.num_values for column in read_footer(data).columns)
    monkeypatch.setattr(parquet, "VALUES_A_BYTE", 1 << 10 if limit != "FREE_VALUES" else 0)
    most = {"MAX_ROWS": 300, "FREE_VALUES": values, "MAX_TABLE_BYTES": len(data)}
    claimed = most[limit]
    monkeypatch.setattr(parquet, limit, claimed)
    tb.decode_table(data)
    monkeypatch.setattr(parquet, limit, claimed - 1)
    with pytest.raises(DamagedCheckpointError, match=r"at most|that fit"):
        tb.decode_table(data)


def test_several_row_groups_are_refused():
    table = pq.read_table(io.BytesIO(tb.encode_table(many_table(30))))
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=10)
    with pytest.raises(DamagedCheckpointError, match="an index of several groups"):
        tb.decode_table(sink.getvalue())


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" * 100, b"\x00" * 1000])
def test_what_is_no_parquet_file_is_damage(data):
    with pytest.raises(DamagedCheckpointError, match="load an earlier step"):
        tb.decode_table(data)


def test_what_pads_a_box_is_not_taken_for_a_place():
    """Of a planned table, too: a stored one has no padding."""
    table = big_views.table(2, 2, "0" * 16, files=1)
    wide = dataclasses.replace(
        table,
        shape=np.pad(table.shape, ((0, 0), (0, 1)), constant_values=1),
        offset=np.pad(table.offset, ((0, 0), (0, 1))),
        size=np.pad(table.size, ((0, 0), (0, 1)), constant_values=1),
    )
    check_table(wide)
    for name, value in (("offset", 1), ("size", 0)):
        column = getattr(wide, name).copy()
        column[2, 2] = value
        with pytest.raises(DamagedCheckpointError, match="a box inside its tensor for chunk 2"):
            check_table(dataclasses.replace(wide, **{name: column}))
