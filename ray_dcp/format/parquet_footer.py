"""How many values the columns of a Parquet file claim to have, told before any is decoded.

Reads just the file's footer (Thrift's compact protocol). Why not Arrow's own
`row_group(i).column(j)`: on a damaged footer it ends the process (`std::terminate` on a wrong
histogram, seen with pyarrow 26), while reading the file as a whole raises.
Source: https://github.com/apache/parquet-format (parquet.thrift), Thrift's compact protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.table_columns import damaged

__all__ = ["ColumnClaim", "FooterClaim", "page_bytes", "read_footer"]

_MAGIC = b"PAR1"
_MAX_DEPTH = 16
_MAX_VARINT_BYTES = 10
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTS = (4, 5, 6)
_UNCOMPRESSED, _COMPRESSED = 2, 3
"""Fields of a page's header."""


@dataclass(frozen=True)
class ColumnClaim:
    """What the footer says of one column of one row group."""

    num_values: int
    num_bytes: int
    """Uncompressed."""
    start: int
    """First byte of its pages."""
    stored_bytes: int
    """Of its pages, as they lie in the file."""


@dataclass(frozen=True)
class FooterClaim:
    """What the footer says of a file. It may be a lie: compare it with what can be afforded."""

    num_rows: int
    num_row_groups: int
    columns: tuple[ColumnClaim, ...]
    """Of all row groups, one after the other."""

    def of_group(self, group: int) -> tuple[ColumnClaim, ...]:
        """Returns those of a row group, where all have as many."""
        count = len(self.columns) // max(1, self.num_row_groups)
        return self.columns[group * count : (group + 1) * count]


def read_footer(data: bytes) -> FooterClaim:
    """Returns what the footer of a Parquet file claims.

    Raises:
        DamagedCheckpointError: It is no Parquet file, or its footer can't be read.

    Complexity:
        O(length of the footer), about 1 us a value.
    """
    length = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC or length > len(data) - 12:
        raise damaged("a Parquet file", f"{len(data)} other bytes")
    try:
        fields = _Compact(data, len(data) - 8 - length, len(data) - 8).struct(0)
        groups = fields[4]
        return FooterClaim(
            num_rows=_count(fields[3]),
            num_row_groups=len(groups),
            columns=tuple(_claim(column[3]) for group in groups for column in group[1]),
        )
    except (LookupError, TypeError) as exc:
        raise damaged("a Parquet footer", f"other bytes ({type(exc).__name__})") from exc


def page_bytes(data: Any, column: ColumnClaim) -> int:
    """Returns how many bytes the pages of a column unpack to, as their own headers say.

    Why these: room is made by them, whatever the footer says of the column as a whole.

    Args:
        data: The file, with these pages.
        column: Of its footer.

    Raises:
        DamagedCheckpointError: They are no pages.
    """
    if column.start == 0:
        return 0  # of an empty column; a file begins with its magic, which is no page's header
    end, total = column.start + column.stored_bytes, 0
    if end > len(data):
        raise damaged(f"pages in {len(data)} bytes", "others")
    position = column.start
    while position < end:
        reader = _Compact(data, position, end)
        header = reader.struct(0)
        total += _count(header.get(_UNCOMPRESSED))
        position = reader.position + _count(header.get(_COMPRESSED))
    return total


def _claim(fields: dict[int, Any]) -> ColumnClaim:
    start, dictionary = _count(fields[9]), fields.get(11) or 0
    if 0 < _count(dictionary) < start:
        start = dictionary
    return ColumnClaim(_count(fields[5]), _count(fields[6]), start, _count(fields[7]))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise damaged("a number of 0 or more in the footer", "something else")
    return value


class _Compact:
    """Reads values of Thrift's compact protocol: structs become dicts by field number."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self._data = data
        self._pos = start
        self._end = end

    @property
    def position(self) -> int:
        """Where the next value stands."""
        return self._pos

    def struct(self, depth: int) -> dict[int, Any]:
        """Returns the struct that begins here."""
        if depth > _MAX_DEPTH:
            raise damaged(f"a footer nested at most {_MAX_DEPTH} deep", "a deeper one")
        fields: dict[int, Any] = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            kind, step = head & 15, head >> 4
            number = number + step if step else self._zigzag()
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _INTS:
            return self._zigzag()
        if kind == _BINARY:
            return self._skip(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth + 1)
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._skip(8)
        raise self._unreadable()

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        length = head >> 4 if head >> 4 != 15 else self._varint()
        # Every element takes a byte or more: a longer list is a lie.
        if length > self._end - self._pos or depth > _MAX_DEPTH:
            raise self._unreadable()
        return [self._value(head & 15, depth) for _ in range(length)]

    def _byte(self) -> int:
        if self._pos >= self._end:
            raise self._unreadable()
        self._pos += 1
        return self._data[self._pos - 1]

    def _skip(self, length: int) -> None:
        if length > self._end - self._pos:
            raise self._unreadable()
        self._pos += length

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise self._unreadable()

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _unreadable(self) -> DamagedCheckpointError:
        return damaged("a Parquet footer", "other bytes")
