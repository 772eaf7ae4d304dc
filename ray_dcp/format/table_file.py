"""The Parquet file of a chunk table: rows as columns of Arrow, and limits of what it may claim.

A row is a chunk, with all that is known of its tensor; rows without file describe tensors alone. In
memory a row's numbers are a padded numpy array, in Arrow lists of different lengths.

*Trust*: a file of a few bytes may claim any number of values. `TableFile` compares what the footer
and the pages claim with what a file of that length may hold, before a value is decoded.
`read_footer` reads the footer by itself (Thrift's compact protocol). Why not Arrow's own
`row_group(i).column(j)`: on a damaged footer it ends the process (`std::terminate` on a wrong
histogram, seen with pyarrow 26), while reading the file as a whole raises.
Source: https://github.com/apache/parquet-format (parquet.thrift), Thrift's compact protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from ray_dcp.core.checksums import DIGEST_BYTES, digest_many
from ray_dcp.core.columns import (
    ArrowArray,
    from_bytes,
    from_numpy,
    from_texts,
    is_missing,
    texts,
    to_numpy,
)
from ray_dcp.core.values import BoolArray, ChunkTable, Int8Array, Int64Array, IntKey, Kind, NamePath
from ray_dcp.errors import CheckpointError, DamagedCheckpointError

_MAX_INDEX_CHARS = 20

pa: Any = pyarrow


def damaged(expected: str, found: str) -> DamagedCheckpointError:
    """Returns the error for a chunk table that is not as it must be."""
    return DamagedCheckpointError(
        f"Expected {expected} in the chunk table, found {found}; it is damaged, load an "
        "earlier step"
    )


def ragged(
    rows: Int64Array, ndim: npt.NDArray[np.integer[Any]], null: BoolArray | None = None
) -> ArrowArray:
    """Returns the first `ndim` numbers of each row as a list.

    Args:
        rows: int64[n, D].
        ndim: int[n].
        null: bool[n], rows that have no list at all.
    """
    used = np.arange(rows.shape[1]) < np.asarray(ndim)[:, None]
    starts = np.concatenate([[0], np.cumsum(ndim, dtype=np.int64)])
    if starts[-1] >= 1 << 31:
        raise damaged("fewer than 2**31 dimensions over all chunks", str(starts[-1]))
    return pa.ListArray.from_arrays(
        from_numpy(starts.astype(np.int32)),
        from_numpy(rows[used].astype(np.int64, copy=False)),
        mask=None if null is None else from_numpy(null),
    )


def padded(column: ArrowArray, width: int, blank: int) -> tuple[Int8Array, Int64Array]:
    """Returns the lengths of lists, and the lists padded to rows of one width.

    Args:
        column: Lists of numbers.
        width: Length of the rows, at most 127.
        blank: What to pad with.

    Returns:
        int8[n] and int64[n, width].

    Raises:
        DamagedCheckpointError: A list is longer than `width`, or it or a number is missing.
    """
    values = column.flatten()
    if column.null_count or values.null_count:
        raise damaged("numbers in every list", "missing ones")
    lengths = to_numpy(column.value_lengths())
    if len(lengths) and int(lengths.max()) > width:
        raise damaged(f"at most {width} dimensions", str(int(lengths.max())))
    if len(lengths) and int(lengths.min()) == width:
        # Why: nothing to pad, as in most checkpoints, and a tenth of the time.
        rows = to_numpy(values).reshape(len(lengths), width).astype(np.int64, copy=False)
    else:
        rows = np.full((len(lengths), width), blank, dtype=np.int64)
        rows[np.arange(width) < lengths[:, None]] = to_numpy(values)
    return lengths.astype(np.int8), rows


def int_column(column: ArrowArray, dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    """Returns a column of numbers as an array, Arrow's own memory where it can.

    Raises:
        DamagedCheckpointError: A number is missing.
    """
    if column.null_count:
        raise damaged("a number in every row", "missing ones")
    return to_numpy(column).astype(dtype, copy=False)


def paths_to_arrow(paths: Sequence[NamePath | None]) -> tuple[ArrowArray, ArrowArray]:
    """Returns paths as lists of texts, and which of their components are list indices.

    Of a component that is the number of a mapping's key that is missing.

    Args:
        paths: Of str and int; None stays a missing list.
    """
    missing = np.array([path is None for path in paths], dtype=bool)
    parts: list[Any] = list(chain.from_iterable(path for path in paths if path is not None))
    kinds = list(map(type, parts))
    is_index = np.array([kind is int for kind in kinds], dtype=bool)
    words = list(map(str, parts)) if is_index.any() else parts
    is_key = np.array([kind is IntKey for kind in kinds]) if IntKey in kinds else None
    lengths = [0 if path is None else len(path) for path in paths]
    starts = from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = from_numpy(missing) if missing.any() else None
    return (
        pa.ListArray.from_arrays(starts, from_texts(words), mask=mask),
        pa.ListArray.from_arrays(starts, from_numpy(is_index, null=is_key), mask=mask),
    )


def paths_of(words: ArrowArray, is_index: ArrowArray) -> tuple[NamePath | None, ...]:
    """Returns the paths that `paths_to_arrow` wrote.

    Raises:
        DamagedCheckpointError: The two columns do not fit each other, or an index is no number.
    """
    if not (words.is_valid().equals(is_index.is_valid()) and _lengths(words) == _lengths(is_index)):
        raise damaged("path_is_index for every component of path", "something else")
    parts, marks = words.flatten(), is_index.flatten()
    if parts.null_count:
        raise damaged("a text for every component of path", "none")
    components: list[Any] = texts(parts)
    for position in np.flatnonzero(to_numpy(marks, blank=False)).tolist():
        components[position] = _index(str(components[position]))
    if marks.null_count:
        for position in np.flatnonzero(is_missing(marks)).tolist():
            components[position] = IntKey(_index(str(components[position])))
    found: list[NamePath | None] = []
    start = 0
    for length in _lengths(words):
        if length is None:
            found.append(None)
            continue
        found.append(tuple(components[start : start + length]))
        start += length
    return tuple(found)


def chunkless(table: ChunkTable) -> Int64Array:
    """Returns the tensors that have no chunk."""
    counts = np.bincount(table.tensor, minlength=table.num_tensors)
    return np.flatnonzero(counts == 0)


def digests_of(table: ChunkTable) -> list[bytes | None]:
    """Returns the digest of each chunk's block checksums; None where it has none."""
    if not len(table.checks):
        return [None] * table.num_chunks
    digests = digest_many(table.checks, table.check_start)
    if (table.block_bytes > 0).all():
        return [*digests]
    return [
        found if block_bytes > 0 else None
        for found, block_bytes in zip(digests, table.block_bytes.tolist(), strict=True)
    ]


def _lengths(column: ArrowArray) -> list[int | None]:
    lengths: list[int | None] = column.value_lengths().to_pylist()
    return lengths


def _index(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isdecimal() or len(text) > _MAX_INDEX_CHARS or str(int(text)) != text:
        raise damaged("a list index in path", repr(text[:50]))
    return int(text)


ArrowTable = Any
"""Typed loosely, since Arrow's stubs differ from release to release."""
pc: Any = pyarrow.compute

_KINDS = {Kind.TENSOR: "tensor", Kind.OBJECT: "object", Kind.OPAQUE: "opaque"}
_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("fqn", _TEXT),
        ("kind", _TEXT),
        ("dtype", _TEXT),
        ("shape", pa.list_(pa.int64())),
        ("path", pa.list_(pa.string())),
        ("path_is_index", pa.list_(pa.bool_())),
        ("requires_grad", pa.bool_()),
        ("offsets", pa.list_(pa.int64())),
        ("sizes", pa.list_(pa.int64())),
        ("file", _TEXT),
        ("item_offset", pa.int64()),
        ("item_bytes", pa.int64()),
        ("payload_offset", pa.int64()),
        ("payload_bytes", pa.int64()),
        ("block_bytes", pa.int64()),
        ("digest", pa.binary(DIGEST_BYTES)),
        ("checks", pa.large_list(pa.uint64())),
        ("tensor_index", pa.int32()),
        ("file_index", pa.int32()),
    ]
)
TEXTS = tuple(field.name for field in SCHEMA if field.type == _TEXT)
READ_SCHEMA = SCHEMA.set(
    SCHEMA.get_field_index("path"), pa.field("path", pa.list_(pa.field("element", _TEXT)))
)
_PER_TENSOR = ("fqn", "kind", "dtype", "shape", "path", "path_is_index", "requires_grad")
_PLACES = ("item_offset", "item_bytes", "payload_offset", "payload_bytes", "block_bytes")


@dataclass(frozen=True, eq=False)
class TensorRows:
    """What the rows of all tensors say."""

    table: ChunkTable
    """Without chunks."""
    columns: Mapping[str, ArrowArray]
    """As on storage, a row for each tensor."""


def rows_of(table: ChunkTable, tensor: npt.NDArray[np.int32], *, part: bool = False) -> ArrowTable:
    """Returns the rows of all chunks, and after them rows that tell of tensors alone.

    Args:
        table: Of the chunks.
        tensor: int32[n], that of each row; those of the chunks first.
        part: Of a part of a larger table: name only the tensors and files that it has.
    """
    columns = _tensor_columns(table, tensor, part) | _chunk_columns(table, tensor, part)
    return pa.Table.from_arrays([columns[field.name] for field in SCHEMA], schema=SCHEMA)


def table_of_rows(arrow: ArrowTable, extra: Mapping[str, Any], max_values: int) -> ChunkTable:
    """Returns a whole chunk table.

    Args:
        arrow: All rows, read by `READ_SCHEMA` and cast to `SCHEMA`.
        extra: Vocabularies and counts.
        max_values: Most numbers that may be made of it.

    Raises:
        DamagedCheckpointError: They do not fit.
    """
    num_chunks = count_of(extra, "num_chunks", arrow.num_rows)
    num_tensors = count_of(extra, "num_tensors", arrow.num_rows)
    columns = _columns(arrow)
    tensor = int_column(columns["tensor_index"], np.int32)
    firsts = from_numpy(_first_rows(tensor, num_tensors))
    heads = {name: columns[name].take(firsts) for name in _PER_TENSOR}
    tensors = _tensors(heads, extra, arrow.num_rows, max_values)
    return _chunks(tensors, columns, tensor, num_chunks)


def tensors_of_rows(arrow: ArrowTable, extra: Mapping[str, Any], max_values: int) -> TensorRows:
    """Returns what the rows of all tensors say, one for each, in their order.

    Args:
        arrow: As for `table_of_rows`.
        extra: As there.
        max_values: As there.

    Raises:
        DamagedCheckpointError: They do not fit.
    """
    columns = _columns(arrow)
    count = count_of(extra, "num_tensors", arrow.num_rows)
    tensor = int_column(columns["tensor_index"], np.int32)
    if not np.array_equal(tensor, np.arange(count)):
        raise damaged(f"a row for each of {count} tensors", "other tensor_index values")
    heads = {name: columns[name] for name in _PER_TENSOR}
    return _tensors(heads, extra, arrow.num_rows, max_values)


def chunks_of_rows(arrow: ArrowTable, tensors: TensorRows) -> ChunkTable:
    """Returns a table with these chunks alone, of all tensors.

    Args:
        arrow: As for `table_of_rows`; each row is a chunk.
        tensors: Of `tensors_of_rows`.

    Raises:
        DamagedCheckpointError: They do not fit.
    """
    columns = _columns(arrow)
    tensor = int_column(columns["tensor_index"], np.int32)
    if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < tensors.table.num_tensors:
        raise damaged(f"indices of {tensors.table.num_tensors} tensors", "others")
    return _chunks(tensors, columns, tensor, arrow.num_rows)


def count_of(extra: Mapping[str, Any], name: str, most: int) -> int:
    """Returns a count that the table's own metadata has.

    Raises:
        DamagedCheckpointError: It is none from 0 to `most`.
    """
    value = extra.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise damaged(f"0 to {most} as {name}", repr(value)[:100])
    return value


def with_rows(table: ChunkTable, column: Callable[[str], Any]) -> ChunkTable:
    """Returns a table with other chunks.

    Args:
        table: Of the same tensors and files.
        column: Returns a column of the chunks by its name, or their `checks`.
    """
    tensor = column("tensor")
    places: Any = {name: column(name) for name in _PLACES}
    return replace(
        table,
        tensor=tensor,
        offset=column("offset"),
        size=column("size"),
        file=column("file"),
        check_start=column("check_start"),
        checks=column("checks"),
        **places,
    )


# --- to Arrow -----------------------------------------------------------------------------------


def _text_column(
    indices: Any, words: Sequence[str], null: Any = None, *, part: bool = False
) -> ArrowArray:
    if part:
        # Why: Parquet would write a vocabulary whole that has only a few words of use here.
        used, indices = np.unique(indices, return_inverse=True)
        indices, words = indices.astype(np.int32), [words[index] for index in used.tolist()]
    return pa.DictionaryArray.from_arrays(from_numpy(indices, null=null), from_texts(words))


def _tensor_columns(
    table: ChunkTable, tensor: npt.NDArray[np.int32], part: bool
) -> dict[str, ArrowArray]:
    rows = from_numpy(tensor)
    places, own_paths = rows, table.paths
    if part:
        # Why: there may be many parts, and a million tensors of which each has a few.
        used, place = np.unique(tensor, return_inverse=True)
        own_paths = tuple(map(table.paths.__getitem__, used.tolist()))
        places = from_numpy(place.astype(np.int32))
    paths, is_index = paths_to_arrow(own_paths)
    kinds = [_KINDS[Kind(kind)] for kind in range(len(_KINDS))]
    dtype = table.dtype[tensor]
    return {
        "fqn": _text_column(tensor, table.names, part=part),
        "kind": _text_column(table.kind[tensor].astype(np.int32), kinds),
        "dtype": _text_column(dtype.astype(np.int32), table.dtypes, dtype < 0),
        "shape": ragged(table.shape[tensor], table.ndim[tensor]),
        "path": paths.take(places),
        "path_is_index": is_index.take(places),
        "requires_grad": from_numpy(table.requires_grad[tensor]),
        "tensor_index": rows,
    }


def _chunk_columns(
    table: ChunkTable, tensor: npt.NDArray[np.int32], part: bool
) -> dict[str, ArrowArray]:
    more = len(tensor) - table.num_chunks
    null = np.arange(len(tensor)) >= table.num_chunks
    fill = np.zeros(more, dtype=np.int64)
    file = np.concatenate([table.file, fill]).astype(np.int32)
    ndim = np.where(null, 0, table.ndim[tensor])
    blank = np.zeros((more, table.offset.shape[1]), dtype=np.int64)
    starts = np.concatenate([table.check_start, fill + len(table.checks)])
    columns = {
        name: from_numpy(np.concatenate([getattr(table, name), fill]), null=null)
        for name in _PLACES
    }
    return columns | {
        "offsets": ragged(np.concatenate([table.offset, blank]), ndim, null),
        "sizes": ragged(np.concatenate([table.size, blank]), ndim, null),
        "file": _text_column(file, table.files, null, part=part),
        "file_index": from_numpy(file, null=null),
        "digest": from_bytes(digests_of(table) + [None] * more, DIGEST_BYTES),
        "checks": pa.LargeListArray.from_arrays(
            from_numpy(starts.astype(np.int64)), from_numpy(table.checks)
        ),
    }


# --- from Arrow ---------------------------------------------------------------------------------


def _columns(arrow: ArrowTable) -> dict[str, ArrowArray]:
    return {
        name: arrow.column(name).combine_chunks() if arrow.num_rows else _empty(name)
        for name in SCHEMA.names
    }


def _tensors(
    heads: Mapping[str, ArrowArray], extra: Mapping[str, Any], num_rows: int, max_values: int
) -> TensorRows:
    width = count_of(extra, "width", 127)
    if width * num_rows > max_values:
        raise damaged("a width that fits its rows", str(width))
    for name in ("fqn", "requires_grad"):
        if heads[name].null_count:
            raise damaged(f"a value as {name} in every row", "missing ones")
    dtypes = _words(extra, "dtypes")
    ndim, shape = padded(heads["shape"], width, 1)
    nothing = np.zeros(0, dtype=np.int64)
    table = ChunkTable(
        names=tuple(texts(heads["fqn"].cast(pa.string()))),
        paths=paths_of(heads["path"], heads["path_is_index"]),
        dtypes=dtypes,
        files=_words(extra, "files"),
        kind=_codes(heads["kind"], list(_KINDS.values())),
        dtype=_codes(heads["dtype"].cast(pa.string()), dtypes),
        ndim=ndim,
        shape=shape,
        requires_grad=to_numpy(heads["requires_grad"]).copy(),
        tensor=nothing.astype(np.int32),
        offset=np.zeros((0, width), dtype=np.int64),
        size=np.zeros((0, width), dtype=np.int64),
        file=nothing.astype(np.int32),
        check_start=np.zeros(1, dtype=np.int64),
        checks=np.zeros(0, dtype=np.uint64),
        **dict.fromkeys(_PLACES, nothing),
    )
    return TensorRows(table, heads)


def _chunks(
    tensors: TensorRows,
    columns: Mapping[str, ArrowArray],
    tensor: npt.NDArray[np.int32],
    num_chunks: int,
) -> ChunkTable:
    table = tensors.table
    _check_repeats(columns, tensors.columns, tensor)
    chunks = {name: column.slice(0, num_chunks) for name, column in columns.items()}
    _check_files(chunks, table.files)
    checks, check_start = _checks(chunks["checks"])
    ndim, width = table.ndim[tensor[:num_chunks]], table.shape.shape[1]
    places: Any = {name: int_column(chunks[name], np.int64) for name in _PLACES}
    return replace(
        table,
        tensor=tensor[:num_chunks],
        offset=_boxes(chunks["offsets"], ndim, width, 0),
        size=_boxes(chunks["sizes"], ndim, width, 1),
        file=int_column(chunks["file_index"], np.int32),
        check_start=check_start,
        checks=checks,
        **places,
    )


def _empty(name: str) -> ArrowArray:
    return pa.nulls(0, SCHEMA.field(name).type)


def _words(extra: Mapping[str, Any], name: str) -> tuple[str, ...]:
    words = extra.get(name)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise damaged(f"a list of texts as {name}", "something else")
    return tuple(words)


def _first_rows(tensor: npt.NDArray[np.int32], num_tensors: int) -> Int64Array:
    found, firsts = np.unique(tensor, return_index=True)
    if not np.array_equal(found, np.arange(num_tensors)):
        raise damaged(f"rows for each of {num_tensors} tensors", "other tensor_index values")
    return firsts.astype(np.int64)


def _check_repeats(
    columns: Mapping[str, ArrowArray],
    tensors: Mapping[str, ArrowArray],
    tensor: npt.NDArray[np.int32],
) -> None:
    """A tensor's columns are the same in each of its rows; where not, none is to be believed."""
    for name, column in tensors.items():
        if not _equal(column.take(from_numpy(tensor)), columns[name]):
            raise damaged(f"one {name} in all rows of a tensor", "several")


def _equal(one: ArrowArray, other: ArrowArray) -> bool:
    if one.type == _TEXT and not one.dictionary.equals(other.dictionary):
        one, other = one.cast(pa.string()), other.cast(pa.string())
    return bool(one.equals(other))


def _codes(column: ArrowArray, words: Sequence[str]) -> npt.NDArray[np.int8]:
    if len(words) > 127:
        raise damaged("at most 127 dtypes", str(len(words)))
    found = column.cast(pa.string())
    codes = pc.index_in(found, value_set=from_texts(words))
    if codes.null_count != found.null_count:
        raise damaged(f"one of {', '.join(words)}"[:500], "another kind or dtype")
    return to_numpy(codes, blank=-1).astype(np.int8)


def _boxes(column: ArrowArray, ndim: npt.NDArray[np.int8], width: int, blank: int) -> Int64Array:
    found, boxes = padded(column, width, blank)
    if not np.array_equal(found, ndim):
        raise damaged("chunks of their tensor's dimensions", "others")
    return boxes


def _checks(column: ArrowArray) -> tuple[npt.NDArray[np.uint64], Int64Array]:
    if column.null_count:
        raise damaged("a list of checksums in every row", "none")
    values = column.flatten()
    if values.null_count:
        raise damaged("checksums", "an empty value")
    starts = np.concatenate([[0], np.cumsum(to_numpy(column.value_lengths()), dtype=np.int64)])
    return to_numpy(values).astype(np.uint64, copy=False), starts.astype(np.int64)


def _check_files(chunks: Mapping[str, ArrowArray], files: Sequence[str]) -> None:
    """The file's name in a row is for people, its index decides: they must agree."""
    index = int_column(chunks["file_index"], np.int32)
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(files):
        raise damaged(f"indices of {len(files)} files", "others")
    names = chunks["file"]
    codes = to_numpy(pc.index_in(names.dictionary, value_set=from_texts(files)), blank=-1)
    # Why -1 twice: a name that is missing, or none of these, is no index.
    if not np.array_equal(np.append(codes, -1)[to_numpy(names.indices, blank=-1)], index):
        raise damaged("the file that file_index names", "another file")


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


pq: Any = pyarrow.parquet

FORMAT_VERSION = 1
"""The one that is written and read."""
MAX_TABLE_BYTES = 8 << 30
MAX_ROWS = 1 << 26
MAX_VALUES = 1 << 29
_VALUE_BYTES = 8
VALUES_A_BYTE = 16
FREE_VALUES = 1 << 24
"""A table holds at most this many values, and `VALUES_A_BYTE` for each of its bytes. Equal values
are stored as one: so many block checksums are those of 16 TiB of zeros."""

_OFTEN_EQUAL = (
    "shape.list.element", "sizes.list.element", "block_bytes", "payload_bytes", "item_bytes",
)  # fmt: skip
"""Numbers of which a table has few different ones: as a vocabulary they take a fifth less."""

WRITING: dict[str, Any] = {
    "compression": "zstd", "store_schema": True, "use_dictionary": [*TEXTS, *_OFTEN_EQUAL],
    "write_statistics": ["fqn"], "write_page_checksum": True,
}  # fmt: skip
"""As `pyarrow.parquet` is told to write."""

SAYS_CORRUPT = (
    pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError,
)  # fmt: skip
"""What Arrow and Python raise on bytes that are no chunk table."""

INDEX_KEY = b"ray_dcp.index"

_FREE_TEXT_BYTES = 64 << 20
_VERSION_KEY = b"ray_dcp.format_version"
_EXTRA_KEY = b"ray_dcp.table"


def own_metadata(extra: Mapping[str, Any]) -> dict[bytes, bytes]:
    """Returns what the file says of itself.

    Args:
        extra: Vocabularies and counts.
    """
    return {_VERSION_KEY: str(FORMAT_VERSION).encode(), _EXTRA_KEY: json.dumps(extra).encode()}


def no_table(exc: BaseException) -> DamagedCheckpointError:
    """Returns the error for bytes of which `SAYS_CORRUPT` was raised."""
    return DamagedCheckpointError(
        f"Expected a chunk table in Parquet: {str(exc)[:500]}; load an earlier step"
    )


def most_values(num_bytes: int) -> int:
    """Returns how many values a file of so many bytes may hold."""
    return FREE_VALUES + VALUES_A_BYTE * num_bytes


class TableFile:
    """A chunk table's Parquet file, whose claims are checked before anything is made of them.

    Args:
        data: Its bytes. Those of groups that are not read may be any.

    Attributes:
        extra: Vocabularies and counts.
        index: What `table.decode_index` reads; empty where rows are in one group.
        num_groups: Groups of rows.

    Raises:
        DamagedCheckpointError: It claims more than it can hold, or has other columns.
        CheckpointError: Its format has another version.
        SAYS_CORRUPT: It is no Parquet file.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._num_bytes = len(data)
        self._footer = _check_claims(data)
        # Why as dictionaries: of a text that a file holds once, a million copies would be made.
        self._file = pq.ParquetFile(
            pa.BufferReader(data),
            read_dictionary=[*TEXTS, "path.list.element"],
            page_checksum_verification=True,
            thrift_string_size_limit=MAX_VALUES,
            thrift_container_size_limit=1 << 20,
        )
        # Of the file, and of its schema: what is known only at the end of writing is not in that.
        metadata = {
            **(self._file.metadata.metadata or {}), **(self._file.schema_arrow.metadata or {}),
        }  # fmt: skip
        _check_version(metadata)
        if not self._file.schema_arrow.equals(READ_SCHEMA):
            raise damaged("the columns of a chunk table", "other columns")
        extra = json.loads(metadata.get(_EXTRA_KEY, b"null"))
        if not isinstance(extra, dict):
            raise damaged("vocabularies in the table's metadata", "none")
        self.extra: Mapping[str, Any] = extra
        self.index: bytes = metadata.get(INDEX_KEY, b"")
        self.num_groups: int = self._file.num_row_groups
        if bool(self.index) != (self.num_groups > 1):
            raise damaged("an index of several groups", f"{self.num_groups} groups")

    @property
    def max_values(self) -> int:
        """How many values may be made of it."""
        return most_values(self._num_bytes)

    def rows(self, group: int | None = None, there: int | None = None) -> ArrowTable:
        """Returns the rows of a group, or all rows.

        Args:
            group: None: all rows.
            there: Of how many bytes the group may be made; by default those of the file.

        Raises:
            DamagedCheckpointError: Their texts are too long.
            SAYS_CORRUPT: They are none.
        """
        # Why: how long the whole file is may be a lie where only parts of it were read.
        num_bytes = self._num_bytes if there is None else there
        columns = self._footer.columns if group is None else self._footer.of_group(group)
        _check_values(columns, num_bytes)
        _check_bytes(sum(page_bytes(self._data, column) for column in columns), num_bytes)
        if group is None:
            arrow = self._file.read(use_threads=False)
        else:
            arrow = self._file.read_row_group(group, use_threads=False)
        arrow.validate(full=True)
        arrow = arrow.combine_chunks()
        _check_texts(arrow, _FREE_TEXT_BYTES + VALUES_A_BYTE * self._num_bytes)
        return arrow.cast(SCHEMA)


def _check_texts(arrow: Any, most_bytes: int) -> None:
    """Checks how long names and paths are together, before each is made."""
    for name in (*TEXTS, "path"):
        for chunk in arrow.column(name).chunks:
            words = chunk.flatten() if name == "path" else chunk
            lengths = to_numpy(pc.binary_length(words.dictionary), blank=0)
            total = int(lengths[to_numpy(words.indices.drop_null())].sum(dtype=np.int64))
            if total > most_bytes:
                raise damaged(f"texts of at most {most_bytes} bytes as {name}", f"{total} bytes")


def _check_version(metadata: Mapping[bytes, bytes]) -> None:
    version = metadata.get(_VERSION_KEY, b"")
    if not version.isdigit() or len(version) > 9:
        raise damaged("a format version in the table's metadata", "none")
    if int(version) != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected a chunk table of format version {FORMAT_VERSION}, found version "
            f"{int(version)}: another ray_dcp wrote this checkpoint; upgrade ray_dcp to load it"
        )


def _check_claims(data: Any) -> FooterClaim:
    """Why: a run-length or zstd bomb says in the footer how large it will get."""
    if len(data) > MAX_TABLE_BYTES:
        raise damaged(f"a table of at most {MAX_TABLE_BYTES >> 30} GiB", f"{len(data)} bytes")
    footer = read_footer(data)
    if footer.num_rows > MAX_ROWS:
        raise damaged(f"at most {MAX_ROWS} rows", f"{footer.num_rows}")
    _check_values(footer.columns, len(data))
    _check_bytes(sum(column.num_bytes for column in footer.columns), len(data))
    return footer


def _check_values(columns: Sequence[ColumnClaim], num_bytes: int) -> None:
    total = sum(column.num_values for column in columns)
    if total > most_values(num_bytes):
        raise damaged(f"values that fit {num_bytes} bytes", f"{total} values")


def _check_bytes(total: int, num_bytes: int) -> None:
    if total > _VALUE_BYTES * most_values(num_bytes):
        raise damaged(f"pages that fit {num_bytes} bytes", f"{total} bytes in them")
