import dataclasses
import tracemalloc

import numpy as np
import pytest

from ray_dcp import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.core import packing
from ray_dcp.core.values import IntKey, Kind
from ray_dcp.format import table as tb
from ray_dcp.format.table import check_table
from tests.support import big_views
from tests.support.format_cases import difference, forged, many_table, mixed_table, table_of


def planned():
    """A table as planned: a deferred chunk without place."""
    table = mixed_table()
    place = table.item_offset.copy()
    place[5] = -1
    return dataclasses.replace(
        table,
        item_offset=place,
        payload_offset=np.where(place < 0, -1, table.payload_offset),
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


def test_a_number_as_a_key_in_a_path_is_not_its_text_nor_an_index():
    table = changed(mixed_table(), paths=(("m", IntKey(7), "7", 7), *mixed_table().paths[1:]))
    (path, *_) = tb.decode_table(tb.encode_table(table)).paths
    assert (path, [*map(type, path)]) == (("m", "7", "7", 7), [str, IntKey, str, int])


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
    "box beyond its tensor": lambda t: changed(t, offset=at(t.offset, (4, 0), 4)),
    "box before its tensor": lambda t: changed(t, offset=at(t.offset, (4, 0), -1)),
    "negative box": lambda t: changed(t, size=at(t.size, (0, 0), -3)),
    "overflowing box": lambda t: changed(t, offset=at(t.offset, (4, 0), 2**63 - 1)),
    "padding used": lambda t: changed(t, size=at(t.size, (1, 0), 2)),
    "a place in padding": lambda _: changed(wide(), offset=np.array([[0, 1, 0]])),
    # Why opaque: else the length of its raw bytes would give it away.
    "a size in padding": lambda _: changed(
        wide(), kind=np.array([Kind.OPAQUE], np.int8), size=np.array([[3, 0, 1]])
    ),
    "negative shape": lambda t: changed(t, shape=at(t.shape, (0, 0), -6)),
    "huge shape": lambda t: changed(t, shape=at(t.shape, (5, slice(None)), 1 << 40)),
    "payload of another length": lambda t: changed(
        t, payload_bytes=at(t.payload_bytes, 0, 52), item_bytes=at(t.item_bytes, 0, 9999)
    ),
    "payload outside its item": lambda t: changed(t, payload_offset=at(t.payload_offset, 5, 0)),
    "payload before its item": lambda t: changed(t, item_offset=at(t.item_offset, 0, 500)),
    "item beyond 2**63": lambda t: changed(t, item_offset=at(t.item_offset, 0, 2**63 - 8)),
    "negative length": lambda t: changed(t, item_bytes=at(t.item_bytes, 0, -5)),
    "unknown kind": lambda t: changed(t, kind=at(t.kind, 0, 3)),
    "unknown dtype": lambda t: changed(t, dtypes=("float99", *t.dtypes[1:])),
    "dtype out of range": lambda t: changed(t, dtype=at(t.dtype, 0, 9)),
    "tensor without dtype": lambda t: changed(t, dtype=at(t.dtype, 0, -1)),
    "ndim too large": lambda t: changed(t, ndim=at(t.ndim, 0, 6)),
    "negative block": lambda t: changed(t, block_bytes=at(t.block_bytes, 0, -1)),
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


def test_rows_in_another_order_than_their_files_are_not_written():
    table = many_table(6)
    turned = changed(table, file=table.file[::-1].copy())
    check_table(turned)
    with pytest.raises(DamagedCheckpointError, match="in the order of their files"):
        tb.encode_table(turned)


def test_a_file_outside_the_checkpoint_is_unsafe():
    with pytest.raises(UnsafeCheckpointError):
        check_table(changed(mixed_table(), files=("../x", "y")))


def number(part, column, row, value):
    """An edit of one number of a stored table."""

    def edit(stored):
        getattr(stored, part)[column][row] = value

    return edit


def field(**values):
    return lambda stored: stored.fields.update(values)


def row_number(column, value):
    return lambda stored: stored.groups[0][column].__setitem__(0, value)


MOST = (1 << 63) - 1
PATHS = [list(path) if path else None for path in mixed_table().paths]

STORED_WRONG = {
    "no version": lambda stored: stored.fields.pop("version"),
    "version of nonsense": field(version="1"),
    "names of nonsense": field(names=[1] * 8),
    "names that are no list": field(names="m.w"),
    "no names": lambda stored: stored.fields.pop("names"),
    "a path of nonsense": field(paths=[{}, *PATHS[1:]]),
    "a truth value in a path": field(paths=[[True], *PATHS[1:]]),
    "a number of nonsense in a path": field(paths=[[1 << 64], *PATHS[1:]]),
    "a key that is no number": field(keys=[[0, 0]]),
    "a key that is nowhere": field(keys=[[0, 9]]),
    "files of nonsense": field(files=[1, 2]),
    "a file more": field(files=["a", "b", "c"]),
    "no dtypes": field(dtypes=None),
    "too many dtypes": field(dtypes=[str(n) for n in range(500)]),
    "width too small": field(width=1),
    "width of nonsense": field(width=1 << 40),
    "more boxes": field(boxes=1 << 40),
    "digests of nonsense": field(digests="x"),
    "half a digest": field(digests="00" * 17),
    "other digests": field(digests="00" * 32),
    "a kind beyond a byte": number("about", 0, 0, 300),
    "a truth value of two": number("about", 3, 0, 2),
    "rows of another tensor": row_number(0, 9),
    "a row beyond 32 bits": row_number(0, 1 << 40),
    "fewer rows of a file": number("runs", 0, 0, 3),
    "rows less than none": number("runs", 0, 0, -1),
    "rows without end": number("runs", 0, 0, MOST),
    "a group of more rows": number("index", 0, -1, 9),
    "a group that begins later": number("index", 0, 0, 1),
    "more deferred rows": number("index", 1, -1, 1),
    "more checksums": number("index", 2, -1, 99),
    "a group beyond the file": number("index", 3, -1, MOST),
    "an end before the start": number("index", 3, 0, MOST),
    "a box of another group": number("boxes", 0, 0, 1),
    "a box of another tensor": number("boxes", 1, 0, 99),
    "a box of less": number("boxes", 7, 0, 1),
    "a box before its tensor": number("boxes", 2, 0, -1),
}


@pytest.mark.parametrize("name", STORED_WRONG)
def test_a_stored_table_that_contradicts_itself_is_damage(name):
    data = tb.encode_table(mixed_table())
    assert forged(data, lambda stored: None) == data
    with pytest.raises(DamagedCheckpointError, match="load an earlier step"):
        tb.decode_table(forged(data, STORED_WRONG[name]))


def test_a_newer_version_says_to_upgrade_and_is_not_called_damaged():
    data = forged(tb.encode_table(mixed_table()), field(version=tb.FORMAT_VERSION + 1))
    with pytest.raises(CheckpointError, match="upgrade ray_dcp") as caught:
        tb.decode_table(data)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_table_beyond_the_longest_is_refused_before_it_is_read(monkeypatch):
    data = tb.encode_table(many_table(30))
    monkeypatch.setattr(tb, "MAX_TABLE_BYTES", len(data))
    tb.decode_table(data)
    monkeypatch.setattr(tb, "MAX_TABLE_BYTES", len(data) - 1)
    with pytest.raises(DamagedCheckpointError, match="at most"):
        tb.decode_table(data)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" * 100, b"\x00" * 1000, b"\xff" * 1000])
def test_what_is_no_table_is_damage(data):
    with pytest.raises(DamagedCheckpointError, match="load an earlier step"):
        tb.decode_table(data)


def test_memory_stays_within_a_multiple_of_the_length():
    """Of a table that packs as well as one can: all of its rows are alike."""
    table = big_views.table(2, 4000, "0" * 16, files=1)
    data = tb.encode_table(table)
    assert len(data) < 2 * table.num_chunks
    tracemalloc.start()
    try:
        tb.decode_table(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * packing.MOST_RATIO * len(data)
