"""A rank's `Columns`: built row by row, checked, encoded for the coordinator; and Arrow's arrays.

`planning.merge` decides what the columns of all ranks mean together.

*Why* arrays of Arrow are made and read here: `pyarrow.array`, `pyarrow.scalar` and
`Array.to_numpy` import pandas wherever it is installed, to check for its types. That takes a
quarter of a second, in every rank's first save and in every command that opens a chunk table.
These functions read Arrow's memory and hand it over as it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from ray_dcp.core.values import Columns, Int64Array, IntKey, Kind, NamePath
from ray_dcp.errors import InternalError, InvalidRequestError, RankDisagreementError

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
        found = _unpacked_bits(column.buffers()[1], start, stop)
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


def _unpacked_bits(buffer: Any, start: int, stop: int) -> _BoolArray:
    packed = np.frombuffer(buffer, np.uint8)[start // 8 : (stop + 7) // 8]
    first = start % 8
    bits = np.unpackbits(packed, bitorder="little")[first : first + stop - start]
    return bits.view(np.bool_)


_VERSION = b"2"
_FLAT = {
    "name": np.int32,
    "kind": np.int8,
    "dtype": np.int8,
    "ndim": np.int8,
    "requires_grad": np.bool_,
    "splittable": np.bool_,
    "value": np.uint64,
}
_BOXES = ("shape", "offset", "size")
# Why no threads: they cost more than the few kilobytes of a rank, 1 ms and more a message.
_READING = pa.ipc.IpcReadOptions(use_threads=False)
_WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_MAX_BYTES = float(1 << 62)
_MAX_VOCABULARY_BYTES = 1 << 30
_MAX_NDIM = 64
"""numpy's own limit."""

_T = TypeVar("_T", bound=np.generic)


class ColumnsBuilder:
    """Collects items and makes `Columns` of them.

    Example:
        >>> builder = ColumnsBuilder()
        >>> builder.tensor("w", "float32", (4, 2), offset=(2, 0), size=(2, 2))
        0
        >>> builder.object("step")
        1
        >>> columns = builder.build()
        >>> len(columns), columns.names, columns.offset.tolist()
        (2, ('w', 'step'), [[2, 0], [0, 0]])
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._paths: list[NamePath | None] = []
        self._dtypes: dict[str, int] = {}
        self._flat: list[tuple[int, int, int, bool, bool, int]] = []
        self._boxes: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = []

    def tensor(
        self,
        fqn: str,
        dtype: str,
        shape: Sequence[int],
        *,
        offset: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        path: NamePath | None = None,
        opaque: bool = False,
        requires_grad: bool = False,
        splittable: bool = False,
        value: int = 0,
    ) -> int:
        """Adds a box of a tensor.

        Args:
            fqn: Name of the tensor.
            dtype: torch's name of its dtype, without prefix.
            shape: Its global shape.
            offset: Where the box starts; zeros by default.
            size: Lengths of the box; `shape` by default.
            path: Where it sits in the nested state dict. The first one told for an FQN counts.
            opaque: Whether only `torch.load` understands its bytes (`Kind.OPAQUE`).
            requires_grad: As the tensor says.
            splittable: Whether the holders of the same box may share it out.
            value: Digest of its content, 0 for none.

        Returns:
            The row.
        """
        kind = Kind.OPAQUE if opaque else Kind.TENSOR
        start = (0,) * len(shape) if offset is None else offset
        lengths = shape if size is None else size
        code = self._dtypes.setdefault(dtype, len(self._dtypes))
        self._boxes.append((shape, start, lengths))
        self._flat.append((self._name(fqn, path), kind, code, requires_grad, splittable, value))
        return len(self._flat) - 1

    def object(self, fqn: str, *, path: NamePath | None = None, value: int = 0) -> int:
        """Adds an object.

        Args:
            fqn: Its name.
            path: Where it sits in the nested state dict.
            value: Digest of its content, 0 for none.

        Returns:
            The row.
        """
        self._boxes.append(((), (), ()))
        self._flat.append((self._name(fqn, path), Kind.OBJECT, -1, False, False, value))
        return len(self._flat) - 1

    def build(self) -> Columns:
        """Returns the columns.

        Raises:
            InvalidRequestError: An item is not possible; all such items are told.
        """
        uneven = [
            self._flat[row][0]
            for row, boxes in enumerate(self._boxes)
            if not len(boxes[0]) == len(boxes[1]) == len(boxes[2])
        ]
        if uneven:
            names = list(self._names)
            raise InvalidRequestError(
                "expected shape, offset and size of one length, but they differ for "
                + ", ".join(repr(names[name]) for name in uneven)
            )
        flat = list(zip(*self._flat, strict=True)) or [()] * 6
        name, kind, dtype, grad, splittable, value = flat
        ndim = np.array([len(boxes[0]) for boxes in self._boxes], dtype=np.int64)
        shape, offset, size = self._padded(ndim)
        columns = Columns(
            names=tuple(self._names),
            paths=tuple(self._paths),
            dtypes=tuple(self._dtypes),
            name=np.array(name, dtype=np.int32),
            kind=np.array(kind, dtype=np.int8),
            dtype=np.array(dtype, dtype=np.int8),
            ndim=ndim.astype(np.int8),
            shape=shape,
            offset=offset,
            size=size,
            requires_grad=np.array(grad, dtype=np.bool_),
            splittable=np.array(splittable, dtype=np.bool_),
            value=np.array(value, dtype=np.uint64),
        )
        wrong = check(columns)
        if wrong:
            raise InvalidRequestError("the items can't be saved: " + "; ".join(wrong))
        return columns

    def _name(self, fqn: str, path: NamePath | None) -> int:
        known = self._names.get(fqn)
        if known is None:
            known = self._names[fqn] = len(self._paths)
            self._paths.append(path)
        return known

    def _padded(self, ndim: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        width = max(1, int(ndim.max(initial=0)))
        shape = np.ones((len(ndim), width), dtype=np.int64)
        offset, size = np.zeros_like(shape), np.ones_like(shape)
        for dims in np.unique(ndim[ndim > 0]).tolist():
            rows = np.flatnonzero(ndim == dims)
            boxes = np.array([self._boxes[row] for row in rows], dtype=np.int64)
            shape[rows, :dims] = boxes[:, 0]
            offset[rows, :dims] = boxes[:, 1]
            size[rows, :dims] = boxes[:, 2]
        return shape, offset, size


def check(columns: Columns) -> list[str]:
    """Returns what is wrong with one rank's columns, one sentence each; empty when nothing is.

    Boxes out of bounds, and items that are listed twice, are told with all ranks' conflicts, by
    `make_plan`.
    """
    wrong = _check_lengths(columns)
    if wrong:
        return wrong
    if len(set(columns.names)) != len(columns.names):
        wrong.append("the vocabulary of names holds a name twice")
    wrong += _check_codes(columns)
    if wrong:
        return wrong
    return _check_boxes(columns)


def encode(columns: Columns) -> bytes:
    """Returns the columns as an Arrow IPC stream, compressed.

    Raises:
        InvalidRequestError: The columns are not possible; see `check`.
    """
    wrong = check(columns)
    if wrong:
        raise InvalidRequestError("these columns can't be sent: " + "; ".join(wrong))
    arrays = {key: from_numpy(getattr(columns, key)) for key in _FLAT}
    for key in _BOXES:
        box = getattr(columns, key)
        for dim in range(box.shape[1]):
            arrays[f"{key}_{dim}"] = from_numpy(box[:, dim])
    vocabulary = (columns.names, columns.paths, columns.dtypes)
    metadata = {b"ray_dcp.columns": _VERSION, b"vocabulary": _packed(vocabulary)}
    batch = pa.RecordBatch.from_pydict(arrays, metadata=metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_WRITING) as stream:
        stream.write_batch(batch)
    result: bytes = sink.getvalue().to_pybytes()
    return result


def decode(data: bytes) -> Columns:
    """Returns the columns that `encode` made these bytes of.

    Raises:
        RankDisagreementError: Another version of ray_dcp made them.
        InternalError: They are no columns.
    """
    try:
        with pa.ipc.open_stream(data, options=_READING) as stream:
            metadata = stream.schema.metadata or {}
            version = metadata.get(b"ray_dcp.columns")
            table = stream.read_all()
        packed = metadata.get(b"vocabulary", b"")
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise InternalError(
            f"expected a rank's items, but found bytes that are none: {error}"
        ) from error
    if version is not None and version != _VERSION:
        raise RankDisagreementError(
            f"expected items in form {_VERSION.decode()}, but found form "
            f"{version.decode(errors='replace')}: run the same version of ray_dcp on all ranks"
        )
    try:
        columns = _from_table(table, _unpacked(packed))
        wrong = check(columns)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InternalError(
            f"expected a rank's items, but a column is missing: {error!r}"
        ) from error
    except (zlib.error, pa.ArrowException) as error:
        raise InternalError(
            f"expected a rank's items, but a column is missing: {error!r}"
        ) from error
    if wrong:
        raise InternalError("a rank's items arrived broken: " + "; ".join(wrong))
    return columns


_Vocabulary = tuple[tuple[str, ...], tuple["NamePath | None", ...], tuple[str, ...]]


def _packed(vocabulary: _Vocabulary) -> bytes:
    words = (*vocabulary, int_keys(vocabulary[1]))
    return zlib.compress(json.dumps(words).encode(), 1)


@lru_cache(maxsize=64)
def _unpacked(packed: bytes) -> _Vocabulary:
    """Why cached: most ranks name the same things; they share one tuple then."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(packed, _MAX_VOCABULARY_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"names and paths are longer than {_MAX_VOCABULARY_BYTES} bytes")
    names, paths, dtypes, keys = json.loads(data)
    for row, place in keys:
        paths[row][place] = IntKey(paths[row][place])
    return (
        tuple(map(str, names)),
        tuple(None if path is None else tuple(path) for path in paths),
        tuple(map(str, dtypes)),
    )


def _from_table(table: pa.Table, vocabulary: _Vocabulary) -> Columns:
    width = sum(1 for key in table.column_names if key.startswith("shape_"))
    boxes: dict[str, Any] = {}
    for key in _BOXES:
        box = boxes[key] = np.empty((len(table), width), dtype=np.int64)
        for dim in range(width):
            box[:, dim] = _numpy(table, f"{key}_{dim}", np.int64)
    flat: dict[str, Any] = {key: _numpy(table, key, dtype) for key, dtype in _FLAT.items()}
    return Columns(
        names=vocabulary[0],
        paths=vocabulary[1],
        dtypes=vocabulary[2],
        **flat,
        **boxes,
    )


def int_keys(paths: Sequence[NamePath | None]) -> list[tuple[int, int]]:
    """Returns where in the paths numbers are keys: JSON knows them as texts alone."""
    # Why the first look: it is done in C, and most state dicts have none.
    if IntKey not in set(map(type, chain.from_iterable(path for path in paths if path))):
        return []
    return [
        (row, place)
        for row, path in enumerate(paths)
        for place, part in enumerate(path or ())
        if type(part) is IntKey
    ]


def _numpy(table: pa.Table, key: str, dtype: type[_T]) -> npt.NDArray[_T]:
    result: npt.NDArray[_T] = to_numpy(table.column(key)).astype(dtype, casting="safe", copy=False)
    return result


def _check_lengths(columns: Columns) -> list[str]:
    count = len(columns.name)
    wrong = []
    if len(columns.paths) != len(columns.names):
        wrong.append(f"{len(columns.names)} names have {len(columns.paths)} paths")
    for key in _FLAT:
        shape = getattr(columns, key).shape
        if shape != (count,):
            wrong.append(f"expected column {key!r} of shape {(count,)}, found {shape}")
    width = columns.shape.shape[-1] if columns.shape.ndim == 2 else -1
    for key in _BOXES:
        shape = getattr(columns, key).shape
        if shape != (count, width) or not 1 <= width <= _MAX_NDIM:
            wrong.append(
                f"expected column {key!r} of shape {(count, 'D')}, D up to 64, found {shape}"
            )
    return wrong


def _check_codes(columns: Columns) -> list[str]:
    wrong = []
    is_object = columns.kind == Kind.OBJECT
    width = columns.shape.shape[1]
    bounds = (
        ("name", columns.name, 0, len(columns.names) - 1),
        ("kind", columns.kind, 0, max(Kind)),
        ("ndim", columns.ndim, 0, width),
        ("dtype of a tensor", columns.dtype[~is_object], 0, len(columns.dtypes) - 1),
        ("dtype of an object", columns.dtype[is_object], -1, -1),
        ("ndim of an object", columns.ndim[is_object], 0, 0),
    )
    for what, codes, low, high in bounds:
        bad = codes[(codes < low) | (codes > high)]
        if len(bad):
            wrong.append(f"expected {what} from {low} to {high}, found {int(bad[0])}")
    return wrong


def _check_boxes(columns: Columns) -> list[str]:
    padding = np.arange(columns.shape.shape[1]) >= columns.ndim[:, None]
    filled = (columns.shape == 1) & (columns.offset == 0) & (columns.size == 1)
    negative = (columns.shape < 0) | (columns.size < 0)
    # Why 16: no dtype is longer, and a product that overflows must not look small.
    spans = np.maximum(np.maximum(columns.shape, columns.size), 1).astype(np.float64)
    huge = np.prod(spans, axis=1) * 16 > _MAX_BYTES
    far = (columns.offset >= 1 << 61) | (columns.offset <= -(1 << 61))
    return (
        _told(columns, np.any(padding & ~filled, axis=1), "is not padded with offset 0 and size 1")
        + _told(columns, np.any(negative, axis=1), "has a negative shape or size")
        + _told(columns, huge | np.any(far, axis=1), "is beyond 2**62 bytes")
    )


def _told(columns: Columns, bad: Any, what: str) -> list[str]:
    return [f"{columns.names[columns.name[row]]!r} {what}" for row in np.flatnonzero(bad)]
