"""The Parquet file of a chunk table: how it is written, and what is believed of it when read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.parquet_footer import ColumnClaim, FooterClaim, page_bytes, read_footer
from ray_dcp.format.table_columns import damaged
from ray_dcp.format.table_rows import READ_SCHEMA, SCHEMA, TEXTS, ArrowTable
from ray_dcp.plan.arrow_arrays import to_numpy

__all__ = [
    "FORMAT_VERSION",
    "INDEX_KEY",
    "MAX_ROWS",
    "MAX_TABLE_BYTES",
    "SAYS_CORRUPT",
    "WRITING",
    "TableFile",
    "most_values",
    "no_table",
    "own_metadata",
]

pa: Any = pyarrow
pc: Any = pyarrow.compute
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
        index: What `table_index` reads; empty where rows are in one group.
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
            pa.BufferReader(data), read_dictionary=[*TEXTS, "path.list.element"],
            page_checksum_verification=True, thrift_string_size_limit=MAX_VALUES,
            thrift_container_size_limit=1 << 20,
        )  # fmt: skip
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
