"""The rows of a chunk table on storage, as Arrow's columns and as numpy's.

A row is a chunk, with all that is known of its tensor; rows without file tell of tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from ray_dcp.format.checksums import DIGEST_BYTES
from ray_dcp.format.table_columns import (
    ArrowArray,
    damaged,
    digests_of,
    int_column,
    padded,
    paths_of,
    paths_to_arrow,
    ragged,
)
from ray_dcp.plan.arrow_arrays import from_bytes, from_numpy, from_texts, texts, to_numpy
from ray_dcp.plan.values import ChunkTable, Int64Array, Kind

__all__ = [
    "READ_SCHEMA",
    "SCHEMA",
    "TEXTS",
    "TensorRows",
    "chunks_of_rows",
    "count_of",
    "rows_of",
    "table_of_rows",
    "tensors_of_rows",
    "with_rows",
]

ArrowTable = Any
"""Typed loosely, since Arrow's stubs differ from release to release."""

pa: Any = pyarrow
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
