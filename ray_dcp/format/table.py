"""The chunk table on storage: a Parquet file with one row a chunk, for people and for reading.

Flat columns, so that DuckDB, polars or pandas show a checkpoint's inside without ray_dcp. Tensors
without any chunk follow as rows without file. Vocabularies and the format version are in the
file's own metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.checksums import DIGEST_BYTES
from ray_dcp.format.parquet_footer import read_footer
from ray_dcp.format.table_check import check_table
from ray_dcp.format.table_columns import (
    ArrowArray,
    chunkless,
    damaged,
    digests_of,
    int_column,
    padded,
    paths_of,
    paths_to_arrow,
    ragged,
)
from ray_dcp.format.table_structure import expanded, is_one_mesh, structure_to
from ray_dcp.plan.arrow_arrays import from_bytes, from_numpy, from_texts, texts, to_numpy
from ray_dcp.plan.structure import Structure
from ray_dcp.plan.values import ChunkTable, Int64Array, Kind

__all__ = ["FORMAT_VERSION", "decode_table", "encode_table"]

pa: Any = pyarrow
pc: Any = pyarrow.compute
pq: Any = pyarrow.parquet

FORMAT_VERSION = 3
"""Newest that can be read. From 2 on the rows of a table may be those of few ranks, from 3 on those
of several meshes."""
MAX_TABLE_BYTES = 8 << 30
MAX_ROWS = 1 << 26
MAX_VALUES = 1 << 29
VALUES_A_BYTE = 16
FREE_VALUES = 1 << 24
"""A table holds at most this many values, and `VALUES_A_BYTE` for each of its bytes. Equal values
are stored as one: so many block checksums are those of 16 TiB of zeros."""

_FREE_TEXT_BYTES = 64 << 20

_VERSION_KEY = b"ray_dcp.format_version"
_EXTRA_KEY = b"ray_dcp.table"
_KINDS = {Kind.TENSOR: "tensor", Kind.OBJECT: "object", Kind.OPAQUE: "opaque"}
_TEXT = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
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
_TEXTS = tuple(field.name for field in _SCHEMA if field.type == _TEXT)
_READ_SCHEMA = _SCHEMA.set(
    _SCHEMA.get_field_index("path"), pa.field("path", pa.list_(pa.field("element", _TEXT)))
)
_PER_TENSOR = ("fqn", "kind", "dtype", "shape", "path", "path_is_index", "requires_grad")
_PLACES = ("item_offset", "item_bytes", "payload_offset", "payload_bytes", "block_bytes")


_ARROW_SAYS_CORRUPT = (
    pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError,
)  # fmt: skip


def encode_table(table: ChunkTable, structure: Structure | None = None) -> bytes:
    """Returns the Parquet file of a chunk table; `decode_table` gives back an equal one.

    Args:
        table: All of it, or with `structure` its leaders' rows, without checksums.
        structure: What tells the rest of it.

    Raises:
        DamagedCheckpointError: The table contradicts itself, and would not be read back.

    Complexity:
        O(chunks + checksums); about 1 us a chunk.
    """
    check_table(table)
    tensor = np.concatenate([table.tensor, chunkless(table)]).astype(np.int32)
    rows = _tensor_columns(table, tensor) | _chunk_columns(table, tensor)
    extra = {
        "dtypes": table.dtypes,
        "files": table.files,
        "num_chunks": table.num_chunks,
        "num_tensors": table.num_tensors,
        "width": int(table.shape.shape[1]),
    }
    if structure is not None:
        extra["structure"] = structure_to(structure)
    version = 1 if structure is None else 2 if is_one_mesh(structure) else FORMAT_VERSION
    metadata = {_VERSION_KEY: str(version), _EXTRA_KEY: json.dumps(extra)}
    schema = _SCHEMA.with_metadata(metadata)
    arrow = pa.Table.from_arrays([rows[field.name] for field in schema], schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(
        arrow, sink, compression="zstd", row_group_size=MAX_ROWS, store_schema=True,
        use_dictionary=list(_TEXTS),
        write_statistics=["fqn"], write_page_checksum=True,
    )  # fmt: skip
    return bytes(sink.getvalue())


def decode_table(data: bytes) -> ChunkTable:
    """Returns the chunk table that a Parquet file holds, after checking it.

    The caller compares the digest of `data` with the manifest first; what is checked here is that
    the table can be used: types, counts before anything is allocated, boxes inside their
    tensors, indices in range, checksums for every block.

    Raises:
        DamagedCheckpointError: The bytes are no chunk table, or one that contradicts itself.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: A newer ray_dcp wrote it.

    Complexity:
        O(chunks + checksums); about 1 us a chunk.
    """
    if len(data) > MAX_TABLE_BYTES:
        raise damaged(f"a table of at most {MAX_TABLE_BYTES >> 30} GiB", f"{len(data)} bytes")
    try:
        arrow, extra = _read(data)
        table = _table_of(arrow, extra, _max_values(data))
        if "structure" in extra:
            check_table(table)
            table = expanded(table, extra["structure"])
    except CheckpointError:
        raise
    except _ARROW_SAYS_CORRUPT as exc:
        raise DamagedCheckpointError(
            f"Expected a chunk table in Parquet: {str(exc)[:500]}; load an earlier step"
        ) from exc
    check_table(table)
    return table


def _text_column(indices: Any, words: Sequence[str], null: Any = None) -> ArrowArray:
    return pa.DictionaryArray.from_arrays(from_numpy(indices, null=null), from_texts(words))


def _tensor_columns(table: ChunkTable, tensor: npt.NDArray[np.int32]) -> dict[str, ArrowArray]:
    rows = from_numpy(tensor)
    paths, is_index = paths_to_arrow(table.paths)
    kinds = [_KINDS[Kind(kind)] for kind in range(len(_KINDS))]
    dtype = table.dtype[tensor]
    return {
        "fqn": _text_column(tensor, table.names),
        "kind": _text_column(table.kind[tensor].astype(np.int32), kinds),
        "dtype": _text_column(dtype.astype(np.int32), table.dtypes, dtype < 0),
        "shape": ragged(table.shape[tensor], table.ndim[tensor]),
        "path": paths.take(rows),
        "path_is_index": is_index.take(rows),
        "requires_grad": from_numpy(table.requires_grad[tensor]),
        "tensor_index": rows,
    }


def _chunk_columns(table: ChunkTable, tensor: npt.NDArray[np.int32]) -> dict[str, ArrowArray]:
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
        "file": _text_column(file, table.files, null),
        "file_index": from_numpy(file, null=null),
        "digest": from_bytes(digests_of(table) + [None] * more, DIGEST_BYTES),
        "checks": pa.LargeListArray.from_arrays(
            from_numpy(starts.astype(np.int64)), from_numpy(table.checks)
        ),
    }


def _read(data: bytes) -> tuple[Any, Mapping[str, Any]]:
    _check_claims(data)
    # Why as dictionaries: of a text that a file holds once, a million copies would be made.
    texts = [*_TEXTS, "path.list.element"]
    file = pq.ParquetFile(
        pa.BufferReader(data), read_dictionary=texts, page_checksum_verification=True,
        thrift_string_size_limit=MAX_VALUES, thrift_container_size_limit=1 << 20,
    )  # fmt: skip
    metadata = file.schema_arrow.metadata or {}
    _check_version(metadata)
    if not file.schema_arrow.equals(_READ_SCHEMA):
        raise damaged("the columns of a chunk table", "other columns")
    extra = json.loads(metadata.get(_EXTRA_KEY, b"null"))
    if not isinstance(extra, dict):
        raise damaged("vocabularies in the table's metadata", "none")
    arrow = file.read(use_threads=False)
    arrow.validate(full=True)
    arrow = arrow.combine_chunks()
    _check_texts(arrow, _FREE_TEXT_BYTES + VALUES_A_BYTE * len(data))
    return arrow.cast(_SCHEMA), extra


def _check_texts(arrow: Any, most_bytes: int) -> None:
    """Checks how long names and paths are together, before each is made."""
    for name in (*_TEXTS, "path"):
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
    if int(version) > FORMAT_VERSION:
        raise CheckpointError(
            f"Expected a chunk table of format version {FORMAT_VERSION} or older, found version "
            f"{int(version)}: a newer ray_dcp wrote this checkpoint; upgrade ray_dcp to load it"
        )


def _check_claims(data: bytes) -> None:
    """Why: a run-length or zstd bomb says in the footer how large it will get."""
    footer = read_footer(data)
    if footer.num_rows > MAX_ROWS or footer.num_row_groups > 1:
        raise damaged(
            f"at most {MAX_ROWS} rows in one group",
            f"{footer.num_rows} rows in {footer.num_row_groups}",
        )
    total = sum(column.num_values for column in footer.columns)
    if total > _max_values(data):
        raise damaged(f"values that fit {len(data)} bytes", f"{total} values")
    for column in footer.columns:
        if column.num_values > MAX_VALUES or column.num_bytes > MAX_TABLE_BYTES:
            raise damaged(
                f"at most {MAX_VALUES} values and {MAX_TABLE_BYTES >> 30} GiB a column",
                f"{column.num_values} values in {column.num_bytes} bytes",
            )


def _max_values(data: bytes) -> int:
    return FREE_VALUES + VALUES_A_BYTE * len(data)


def _table_of(arrow: Any, extra: Mapping[str, Any], max_values: int) -> ChunkTable:
    columns = {
        name: arrow.column(name).combine_chunks() if arrow.num_rows else _empty(name)
        for name in _SCHEMA.names
    }
    num_chunks, num_tensors, width = (
        _count(extra, name, most)
        for name, most in (
            ("num_chunks", arrow.num_rows), ("num_tensors", arrow.num_rows), ("width", 127)
        )
    )  # fmt: skip
    if width * arrow.num_rows > max_values:
        raise damaged("a width that fits its rows", str(width))
    files, dtypes = _words(extra, "files"), _words(extra, "dtypes")
    tensor = int_column(columns["tensor_index"], np.int32)
    firsts = _first_rows(tensor, num_tensors)
    chunks = {name: column.slice(0, num_chunks) for name, column in columns.items()}
    tensors = {name: columns[name].take(from_numpy(firsts)) for name in _PER_TENSOR}
    _check_repeats(columns, tensors, tensor)
    ndim, shape = padded(tensors["shape"], width, 1)
    checks, check_start = _checks(chunks["checks"])
    dtype = tensors["dtype"].cast(pa.string())
    _check_files(chunks, files)
    return ChunkTable(
        names=tuple(texts(tensors["fqn"].cast(pa.string()))),
        paths=paths_of(tensors["path"], tensors["path_is_index"]),
        dtypes=dtypes,
        files=files,
        kind=_codes(tensors["kind"], list(_KINDS.values())),
        dtype=_codes(dtype, dtypes),
        ndim=ndim,
        shape=shape,
        requires_grad=to_numpy(tensors["requires_grad"]).copy(),
        tensor=tensor[:num_chunks],
        offset=_boxes(chunks["offsets"], ndim[tensor[:num_chunks]], width, 0),
        size=_boxes(chunks["sizes"], ndim[tensor[:num_chunks]], width, 1),
        file=int_column(chunks["file_index"], np.int32),
        check_start=check_start,
        checks=checks,
        **{name: int_column(chunks[name], np.int64) for name in _PLACES},
    )


def _empty(name: str) -> ArrowArray:
    return pa.nulls(0, _SCHEMA.field(name).type)


def _count(extra: Mapping[str, Any], name: str, most: int) -> int:
    value = extra.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise damaged(f"0 to {most} as {name}", repr(value)[:100])
    return value


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
        if not column.take(from_numpy(tensor)).equals(columns[name]):
            raise damaged(f"one {name} in all rows of a tensor", "several")
    for name in ("fqn", "requires_grad"):
        if tensors[name].null_count:
            raise damaged(f"a value as {name} in every row", "missing ones")


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
