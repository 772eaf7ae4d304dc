"""Writes pickles opcode by opcode, so that classes can be named without being imported.

Protocol 4, which every Python since 3.4 reads. What a checkpoint's `.metadata` holds is said in
`metadata_out`.
Source: PEP 307, PEP 3154; Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.values import Int64Array

__all__ = [
    "MEMOIZE_AND_POP",
    "Opcodes",
    "PickleWriter",
    "pickled_int",
    "pickled_ints",
    "pickled_text",
    "pickled_tuple",
    "rows",
    "side_by_side",
    "uneven_rows",
    "with_length",
]

Opcodes = npt.NDArray[np.uint8]
"""uint8[n, w]: w bytes of opcodes for each of n rows."""

MEMOIZE_AND_POP = b"\x940"
"""After the opcodes of a value: the reader keeps it in its memo and forgets it on its stack."""
_INT4 = struct.Struct("<Bi")
_SMALL = 1 << 31


class PickleWriter:
    """Collects the opcodes of one pickle, and what its reader will have in its memo.

    Values that come often are *remembered* first: the reader makes them once and a row refers to
    them by five bytes. The reader then shares one object, so only for values that can't change.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_remembered = 0
        self._texts: dict[str, int] = {}
        self._names: dict[tuple[str, str], int] = {}
        self.add = self._parts.append
        """Appends opcodes."""

    def remember(self, opcodes: bytes, count: int = 1) -> int:
        """Returns the memo index of a value, or of the first of several, after writing it.

        Args:
            opcodes: Push one value; for several, with `MEMOIZE_AND_POP` between them.
            count: How many values.
        """
        index = self._num_remembered
        self._num_remembered += count
        self._parts.append(opcodes + MEMOIZE_AND_POP)
        return index

    def text_indices(self, values: Sequence[str]) -> list[int]:
        """Returns the memo index of each text; every distinct one is remembered once."""
        texts = self._texts
        new = [value for value in dict.fromkeys(values) if value not in texts]
        if new:
            first = self.remember(MEMOIZE_AND_POP.join(map(pickled_text, new)), count=len(new))
            texts.update(zip(new, range(first, first + len(new)), strict=True))
        return [texts[value] for value in values]

    def text(self, value: str) -> bytes:
        """Returns the opcodes that push a text, remembered once."""
        return _reference(self.text_indices((value,))[0])

    def name(self, module: str, qualname: str) -> bytes:
        """Returns the opcodes that push a class or function, remembered once."""
        index = self._names.get((module, qualname))
        if index is None:
            opcodes = self.text(module) + self.text(qualname) + b"\x93"
            index = self._names[module, qualname] = self.remember(opcodes)
        return _reference(index)

    def references(self, indices: Sequence[int] | Int64Array) -> Opcodes:
        """Returns the opcodes that push a remembered value each.

        Args:
            indices: int[n], memo indices.

        Returns:
            uint8[n, 5].
        """
        return _column(b"j", np.asarray(indices, dtype=np.int64).astype("<u4"))

    def finish(self) -> bytes:
        """Returns the pickle of the value on the stack."""
        num_bytes = sum(map(len, self._parts)) + 1
        return b"".join((b"\x80\x04\x95", struct.pack("<Q", num_bytes), *self._parts, b"."))


def with_length(data: bytes) -> bytes:
    """Returns a pickle of `PickleWriter` that was changed since, with its length as it is now."""
    return data[:3] + struct.pack("<Q", len(data) - 11) + data[11:]


def rows(num_rows: int, *pieces: bytes | Opcodes) -> bytes:
    """Returns the opcodes of many rows that are made alike.

    Args:
        num_rows: n.
        pieces: What a row consists of: bytes for all rows, or uint8[n, w].

    Returns:
        n * sum(w) bytes.
    """
    return side_by_side(num_rows, *pieces).tobytes() if num_rows else b""


def side_by_side(num_rows: int, *pieces: bytes | Opcodes) -> Opcodes:
    """Returns the opcodes of `rows` as an array: uint8[n, sum(w)]."""
    parts = [
        np.broadcast_to(np.frombuffer(piece, dtype=np.uint8), (num_rows, len(piece)))
        if isinstance(piece, bytes)
        else piece
        for piece in pieces
    ]
    return np.concatenate(parts, axis=1)


def uneven_rows(
    counts: Int64Array, heads: Opcodes, parts: Opcodes, tails: Opcodes
) -> tuple[bytes, Int64Array]:
    """Returns the opcodes of rows of different length: a head, some parts and a tail each.

    Args:
        counts: int64[n], how many of the parts belong to each row.
        heads: uint8[n, h].
        parts: uint8[sum(counts), p], those of the first row first.
        tails: uint8[n, t].

    Returns:
        The opcodes, and where each row starts in them and the last one ends: int64[n + 1].
    """
    head, part, tail = heads.shape[1], parts.shape[1], tails.shape[1]
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(head + counts * part + tail, out=starts[1:])
    if len(counts) and int(counts.min()) == int(counts.max()):
        middle = parts.reshape(len(counts), -1)
        return np.concatenate([heads, middle, tails], axis=1).tobytes(), starts
    result = np.empty(int(starts[-1]), dtype=np.uint8)
    first = np.cumsum(counts) - counts
    place = starts[:-1] + head - first * part
    _put(result, starts[:-1], heads)
    _put(result, np.repeat(place, counts) + np.arange(len(parts)) * part, parts)
    _put(result, starts[1:] - tail, tails)
    return result.tobytes(), starts


def _put(into: npt.NDArray[np.uint8], starts: Int64Array, pieces: Opcodes) -> None:
    for column in range(pieces.shape[1]):
        into[starts + column] = pieces[:, column]


def pickled_ints(values: Int64Array) -> Opcodes:
    """Returns the opcodes that push a number each.

    Args:
        values: int64[n].

    Returns:
        uint8[n, 5], or uint8[n, 10] when one of them needs more than 32 bits.
    """
    if not len(values) or (int(values.min()) >= -_SMALL and int(values.max()) < _SMALL):
        return _column(b"J", values.astype("<i4"))
    return _column(b"\x8a\x08", values.astype("<i8"))


def pickled_int(value: int) -> bytes:
    """Returns the opcodes that push a number.

    Raises:
        InvalidRequestError: It does not fit into 64 bits.
    """
    if 0 <= value < 0x100:
        return b"K" + value.to_bytes(1, "little")
    if -_SMALL <= value < _SMALL:
        return _INT4.pack(0x4A, value)
    if not -(1 << 63) <= value < 1 << 63:
        raise InvalidRequestError("Expected a number of 64 bits, found a longer one")
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def pickled_tuple(values: Sequence[bytes]) -> bytes:
    """Returns the opcodes that push a tuple, from those of its values."""
    body = b"".join(values)
    if len(values) > 3:
        return b"(" + body + b"t"
    return body + (b")", b"\x85", b"\x86", b"\x87")[len(values)]


def _reference(index: int) -> bytes:
    return b"j" + index.to_bytes(4, "little")


def _column(opcode: bytes, values: npt.NDArray[np.generic]) -> Opcodes:
    numbers = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize)
    head = np.frombuffer(opcode, dtype=np.uint8)
    return np.concatenate([np.broadcast_to(head, (len(values), len(head))), numbers], axis=1)


_SHORT_TEXT = [b"\x8c" + bytes((length,)) for length in range(256)]


def pickled_text(value: str) -> bytes:
    """Returns the opcodes that push a text."""
    # Why surrogatepass: what Python's own pickle does with text that is no valid Unicode.
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return _SHORT_TEXT[len(data)] + data
    return b"X" + struct.pack("<I", len(data)) + data
