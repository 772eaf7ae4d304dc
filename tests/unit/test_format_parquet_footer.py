import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.table import encode_table
from ray_dcp.format.table_file import ColumnClaim, page_bytes, read_footer
from tests.format_cases import many_table, mixed_table


@pytest.mark.parametrize("rows", [0, 1, 5, 3000])
def test_the_footer_claims_what_arrow_reads_from_it(rows):
    data = encode_table(many_table(rows)) if rows else encode_table(mixed_table())
    found = read_footer(data)
    arrow = pq.ParquetFile(io.BytesIO(data)).metadata
    assert (found.num_rows, found.num_row_groups) == (arrow.num_rows, arrow.num_row_groups)
    group = arrow.row_group(0)
    assert list(found.columns) == [
        ColumnClaim(
            column.num_values,
            column.total_uncompressed_size,
            column.dictionary_page_offset or column.data_page_offset,
            column.total_compressed_size,
        )
        for column in map(group.column, range(group.num_columns))
    ]
    for column in found.columns:
        # Arrow counts the headers of the pages, too.
        assert 0 < column.num_bytes - page_bytes(data, column) < 400


def test_files_of_several_groups_and_other_types_are_told_too():
    source = pa.table({"a": [1.5, None, 2.5], "b": [[True], [], None], "c": [b"x", b"y", b"z"]})
    sink = io.BytesIO()
    pq.write_table(source, sink, row_group_size=2, sorting_columns=[pq.SortingColumn(0)])
    found = read_footer(sink.getvalue())
    assert (found.num_rows, found.num_row_groups, len(found.columns)) == (3, 2, 6)
    assert [column.num_values for column in found.columns] == [2, 2, 2, 1, 1, 1]


def test_what_pages_unpack_to_is_told_by_their_own_headers():
    page = b"\x15\x00\x15\x80\x80\x80\x80\x08\x15\x02\x00x"
    data = b"PAR1" + page * 3
    assert page_bytes(data, ColumnClaim(1, 1, 4, len(page) * 3)) == 3 << 30
    for start, length in ((4, len(page) * 3 + 1), (5, 4), (len(data), 1), (1 << 60, 1)):
        with pytest.raises(DamagedCheckpointError):
            page_bytes(data, ColumnClaim(1, 1, start, length))


def footer(body):
    return b"PAR1" + body + len(body).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PAR1", b"PAR1PAR1", footer(b""), footer(b"\x00"), footer(b"\x1c" * 10_000),
        footer(b"\x19" * 10_000), footer(b"\x16" + b"\xff" * 20), footer(b"\x19\xfc" + b"\xff" * 8),
        footer(b"\x18\xff\xff\xff\xff\x7fx"), footer(b"\x1f\x00"), footer(b"\x1b\x00\x00"),
        footer(b"\x36\x01\x19\x0c\x00"), footer(b"\x35\x02\x18\x01x\x00"),
        footer(b"\x36\x02\x19\x1c\x16\x02\x00\x00"), b"PAR1\xff\xff\xff\xffPAR1",
    ],
)  # fmt: skip
def test_bytes_that_are_no_footer_are_damage(data):
    with pytest.raises(DamagedCheckpointError):
        read_footer(data)


def test_a_footer_cut_or_changed_anywhere_never_raises_anything_else():
    data = encode_table(mixed_table())
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    seen = 0
    for at in range(start, len(data)):
        for wrong in (data[: start // 2] + data[at:], data[:at] + b"\xff" + data[at + 1 :]):
            try:
                read_footer(wrong)
            except DamagedCheckpointError:
                seen += 1
    assert seen > 100
