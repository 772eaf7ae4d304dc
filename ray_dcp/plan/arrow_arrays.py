"""Between numpy or Python's texts and Arrow's arrays, without pandas.

`pyarrow.array`, `pyarrow.scalar` and `Array.to_numpy` import pandas wherever it is installed, to
tell whether they were given something of its: a quarter of a second, which every rank would spend
in its first save and every command that opens a chunk table. Arrow's memory is read and handed over
as it is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

__all__ = [
    "ArrowArray",
    "from_bytes",
    "from_numpy",
    "from_texts",
    "is_missing",
    "texts",
    "to_numpy",
]

ArrowArray = Any
"""An Arrow array; typed loosely, since Arrow's stubs differ from release to release."""

pa: Any = pyarrow
pc: Any = pyarrow.compute

_BoolArray = npt.NDArray[np.bool_]

_MOST_JOINED_BYTES = 1 << 30
_MOST_TEXT_BYTES = (1 << 31) - 1
_SEPARATOR = "\0"


def from_numpy(values: npt.NDArray[Any], *, null: _BoolArray | None = None) -> ArrowArray:
    """Returns numbers or truth values as an Arrow array of the same type, without a copy if it can.

    Args:
        values: Of one dimension; it must not change while the array lives.
        null: bool[n], which have no value; none if None.

    Example:
        >>> import numpy as np
        >>> from_numpy(np.array([1, 2], np.int32), null=np.array([False, True])).to_pylist()
        [1, None]
    """
    type_ = pa.from_numpy_dtype(values.dtype)
    data = _bits(values) if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(type_, len(values), [_validity(null), pa.py_buffer(data)])


def from_texts(words: Sequence[str], *, null: _BoolArray | None = None) -> ArrowArray:
    """Returns texts as an Arrow array.

    Args:
        words: What is missing is an empty text.
        null: bool[n], which are missing; none if None.

    Raises:
        ValueError: They are longer than 2 GiB together, or one can't be written as UTF-8.
    """
    joined = "".join(words)
    lengths: Any = map(len, words)
    if not joined.isascii():
        lengths = (len(word.encode()) for word in words)
    offsets = np.zeros(len(words) + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, len(words)), out=offsets[1:])
    if offsets[-1] > _MOST_TEXT_BYTES:
        raise ValueError(f"expected texts of at most 2 GiB, found {offsets[-1]} bytes")
    buffers = [
        _validity(null),
        pa.py_buffer(offsets.astype(np.int32)),
        pa.py_buffer(joined.encode()),
    ]
    return pa.Array.from_buffers(pa.string(), len(words), buffers)


def from_bytes(values: Sequence[bytes | None], width: int) -> ArrowArray:
    """Returns byte strings of one length as an Arrow array.

    Args:
        values: None where one is missing.
        width: Length of each.

    Raises:
        ValueError: One has another length.
    """
    null = np.array([value is None for value in values], np.bool_)
    data = b"".join(bytes(width) if value is None else value for value in values)
    if len(data) != width * len(values):
        raise ValueError(f"expected {width} bytes each, found {len(data)} for {len(values)}")
    buffers = [_validity(null), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(width), len(values), buffers)


def to_numpy(column: ArrowArray, *, blank: Any = None) -> npt.NDArray[Any]:
    """Returns numbers or truth values as a numpy array, not to be written to.

    Args:
        column: An Arrow array, also a chunked one.
        blank: Stands for what is missing.

    Raises:
        ValueError: A value is missing and there is no `blank`, or it holds something else.
    """
    column = _whole(column)
    is_bool = pa.types.is_boolean(column.type)
    if not (is_bool or pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"expected numbers, found {column.type}")
    if column.null_count and blank is None:
        raise ValueError(f"expected a number in every row, found {column.null_count} missing")
    start, stop = column.offset, column.offset + len(column)
    if not len(column):
        found = np.zeros(0, column.type.to_pandas_dtype())
    elif is_bool:
        found = _unpacked(column.buffers()[1], start, stop)
    else:
        dtype = np.dtype(column.type.to_pandas_dtype())
        found = np.frombuffer(column.buffers()[1], dtype, stop - start, start * dtype.itemsize)
    if column.null_count:
        found = np.where(is_missing(column), found.dtype.type(blank), found)
    return found


def is_missing(column: ArrowArray) -> _BoolArray:
    """Returns which values of an Arrow array are missing.

    Args:
        column: Of any type, also a chunked one.
    """
    return ~to_numpy(column.is_valid())


def texts(column: ArrowArray) -> list[str]:
    """Returns a column of texts, of which none is missing, as Python's own.

    Raises:
        ValueError: One is missing, or the bytes are no UTF-8.

    Complexity:
        About 0.1 us each.
    """
    column = _whole(column)
    if column.null_count:
        raise ValueError(f"expected a text in every row, found {column.null_count} missing")
    if not len(column):
        return []
    buffers = column.buffers()
    ends = np.frombuffer(buffers[1], np.int32, len(column) + 1, 4 * column.offset).tolist()
    if ends[-1] - ends[0] + len(column) <= _MOST_JOINED_BYTES:
        # Why joined to be split again: both are done in C, and take a quarter of the time.
        row = pa.ListArray.from_arrays(from_numpy(np.array([0, len(column)], np.int32)), column)
        joined = pc.binary_join(row, from_texts([_SEPARATOR])).buffers()[2].to_pybytes()
        found: list[str] = joined.decode().split(_SEPARATOR)
        if len(found) == len(column):
            return found
    data = memoryview(buffers[2] or b"")
    return [bytes(data[start:end]).decode() for start, end in pairwise(ends)]


def _whole(column: ArrowArray) -> ArrowArray:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _validity(null: _BoolArray | None) -> Any:
    if null is None or not null.any():
        return None
    return pa.py_buffer(_bits(~null))


def _bits(values: _BoolArray) -> npt.NDArray[np.uint8]:
    return np.packbits(values, bitorder="little")


def _unpacked(buffer: Any, start: int, stop: int) -> _BoolArray:
    packed = np.frombuffer(buffer, np.uint8)[start // 8 : (stop + 7) // 8]
    first = start % 8
    bits = np.unpackbits(packed, bitorder="little")[first : first + stop - start]
    return bits.view(np.bool_)
