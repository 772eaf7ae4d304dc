"""The chunk table on storage: a Parquet file with one row a chunk, for people and for reading.

Flat columns, so that DuckDB, polars or pandas show a checkpoint's inside without ray_dcp. Tensors
without any chunk follow as rows without file. Vocabularies and the format version are in the
file's own metadata. What is of one save alone is in its manifest (`table_places`). Of a table in
several groups a reader needs only a part (`table_groups`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from ray_dcp.errors import CheckpointError
from ray_dcp.format.table_check import check_table
from ray_dcp.format.table_columns import chunkless
from ray_dcp.format.table_groups import GroupedTable, encode_groups, extra_of
from ray_dcp.format.table_index import group_bounds
from ray_dcp.format.table_parquet import (
    FORMAT_VERSION,
    MAX_ROWS,
    MAX_TABLE_BYTES,
    SAYS_CORRUPT,
    WRITING,
    TableFile,
    no_table,
    own_metadata,
)
from ray_dcp.format.table_rows import rows_of, table_of_rows
from ray_dcp.format.table_structure import expanded, structure_from, structure_to
from ray_dcp.plan.structure import Structure
from ray_dcp.plan.values import ChunkTable

__all__ = [
    "FORMAT_VERSION", "MAX_TABLE_BYTES", "decode_few", "decode_table", "encode_table",
]  # fmt: skip

pa: Any = pyarrow
pq: Any = pyarrow.parquet

GROUP_ROWS = 1 << 16
"""Fewest rows of a group, but for the last: 0.04 s to decode, and 0.6 MB."""


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
    if structure is None:
        bounds = group_bounds(table, GROUP_ROWS)
        grouped = None if bounds is None else encode_groups(table, bounds)
        if grouped is not None:
            return grouped
    tensor = np.concatenate([table.tensor, chunkless(table)]).astype(np.int32)
    extra = extra_of(table)
    if structure is not None:
        extra["structure"] = structure_to(structure)
    arrow = rows_of(table, tensor).replace_schema_metadata(own_metadata(extra))
    sink = pa.BufferOutputStream()
    pq.write_table(arrow, sink, row_group_size=MAX_ROWS, **WRITING)
    return bytes(sink.getvalue())


def decode_table(data: bytes) -> ChunkTable:
    """Returns the chunk table that a Parquet file holds, after checking it.

    The caller compares the digest of `data` with the manifest first; what is checked here is that
    the table can be used: types, counts before anything is allocated, boxes inside their
    tensors, indices in range, checksums for every block.

    Raises:
        DamagedCheckpointError: The bytes are no chunk table, or one that contradicts itself.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: Its format has another version.

    Complexity:
        O(chunks + checksums); about 1 us a chunk.
    """
    table, structure = _decoded(data)
    if structure is not None:
        table = expanded(table, structure)
    check_table(table)
    return table


def decode_few(data: bytes) -> tuple[ChunkTable, Structure | None]:
    """Returns the rows that a Parquet file holds, and what tells those of the other ranks.

    Args:
        data: As for `decode_table`.

    Returns:
        With None for a structure the table is whole.

    Raises:
        CheckpointError: As `decode_table` does.
    """
    table, structure = _decoded(data)
    if structure is None:
        check_table(table)
    return table, structure


def _decoded(data: bytes) -> tuple[ChunkTable, Structure | None]:
    try:
        file = TableFile(data)
        if file.index:
            return GroupedTable(data, file).checked(), None
        table = table_of_rows(file.rows(), file.extra, file.max_values)
        if "structure" not in file.extra:
            return table, None
        check_table(table)
        return table, structure_from(file.extra["structure"], table)
    except CheckpointError:
        raise
    except SAYS_CORRUPT as exc:
        raise no_table(exc) from exc
