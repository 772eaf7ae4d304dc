"""Pickles, opcode by opcode: nothing that they name is imported or called.

**Reading** (`PickleMachine`) interprets the opcodes of protocols 2 to 5 that data needs. Subclasses
define the meaning of names, calls and states: `metadata` makes stand-ins, `torch_items` finds the
one tensor of an item, `object_pickle` builds real objects.

**Writing** (`PickleWriter`) uses protocol 4, which every Python since 3.4 reads. Classes are named
without being imported, and the opcodes of many rows are made at once.

Why not `pickle.Unpickler` with its own `find_class`: its C code allocates 64 GiB for a memo index
of 2**32 - 1, and overflows the C stack hashing a tuple nested a million deep.
Source: PEP 307, PEP 3154, PEP 574; Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.values import Int64Array
from ray_dcp.errors import CheckpointError
from ray_dcp.format import damaged

MAX_PICKLE_BYTES = 1 << 30
"""Longest pickle accepted; its values take at most about 100 times as much memory."""

Builder = Callable[[tuple[Any, ...]], Any]
"""Makes a value from the arguments with which the pickle would call something."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class, function or constant in a pickle."""

    name: str
    build: Builder | None = None
    """Makes the result of a call; None if the global can't be called."""


class PickleMachine(ABC):
    """Runs the opcodes of a pickle; subclasses define what names, calls, states and items make.

    Args:
        data: Bytes that begin with the pickle.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._pos = 0

    @property
    def position(self) -> int:
        """Position of the next opcode; after `load`, the end of the pickle."""
        return self._pos

    def load(self) -> Any:
        """Returns the value of the pickle.

        Raises:
            DamagedCheckpointError: The data is no pickle, or has opcodes that data does not need.
        """
        try:
            return self._run()
        except CheckpointError:
            raise
        except (IndexError, ValueError, TypeError, struct.error) as exc:
            # Values missing on the stack or in the memo, text that is not UTF-8, truncated bytes.
            raise damaged("a pickle", f"bytes that are none ({type(exc).__name__})") from exc

    def _run(self) -> Any:
        """Returns the value on the stack at the STOP opcode.

        Why one long loop: a .metadata of 20,000 tensors has two million opcodes, and a call for
        each would triple the time. The most frequent opcodes come first, the others are in
        `_other_opcode`.
        """
        data, stack, marks, memo = self._data, self._stack, self._marks, self._memo
        push, pop, memoize, from_bytes = stack.append, stack.pop, memo.append, int.from_bytes
        pos = self._pos
        while True:
            opcode = data[pos]
            pos += 1
            if opcode == 0x94:  # MEMOIZE
                memoize(stack[-1])
            elif opcode == 0x6A:  # LONG_BINGET
                push(memo[from_bytes(data[pos : pos + 4], "little")])
                pos += 4
            elif opcode == 0x68:  # BINGET
                push(memo[data[pos]])
                pos += 1
            elif opcode == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
            elif opcode == 0x29:  # EMPTY_TUPLE
                push(())
            elif opcode == 0x7D:  # EMPTY_DICT
                push({})
            elif opcode == 0x81:  # NEWOBJ
                args = pop()
                push(self._new(pop(), args))
            elif opcode == 0x62:  # BUILD
                state = pop()
                stack[-1] = self._with_state(stack[-1], state)
            elif opcode == 0x75:  # SETITEMS
                start = marks.pop()
                items = stack[start:]
                del stack[start:]
                self._set_items(stack[-1], items)
            elif opcode == 0x86:  # TUPLE2
                last = pop()
                push((pop(), last))
            elif opcode == 0x85:  # TUPLE1
                push((pop(),))
            elif opcode == 0x52:  # REDUCE
                args = pop()
                push(self._construct(pop(), args))
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                end = pos + 1 + data[pos]
                push(data[pos + 1 : end].decode("utf-8", "surrogatepass"))
                pos = end
            elif opcode == 0x4A:  # BININT
                push(from_bytes(data[pos : pos + 4], "little", signed=True))
                pos += 4
            elif opcode == 0x4D:  # BININT2
                push(from_bytes(data[pos : pos + 2], "little"))
                pos += 2
            elif opcode == 0x89:  # NEWFALSE
                push(False)
            elif opcode == 0x30:  # POP
                if marks and marks[-1] == len(stack):
                    marks.pop()
                else:
                    pop()
            elif opcode == 0x2E:  # STOP
                self._pos = pos
                return pop()
            else:
                self._pos = pos
                self._other_opcode(opcode)
                pos = self._pos

    def _other_opcode(self, opcode: int) -> None:
        stack = self._stack
        match opcode:
            case 0x5D | 0x8F:  # EMPTY_LIST, EMPTY_SET
                stack.append([])
            case 0x61:  # APPEND
                self._extend(-1)
            case 0x65 | 0x90:  # APPENDS, ADDITEMS
                self._extend(self._marks.pop())
            case 0x74:  # TUPLE
                start = self._marks.pop()
                stack[start:] = [tuple(stack[start:])]
            case 0x91:  # FROZENSET
                start = self._marks.pop()
                stack[start:] = [stack[start:]]
            case 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            case 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                self._set_items(stack[-1], [key, value])
            case 0x4E:  # NONE
                stack.append(None)
            case 0x88:  # NEWTRUE
                stack.append(True)
            case 0x63:  # GLOBAL
                module, name = self._line(), self._line()
                stack.append(self._find(module, name))
            case 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                stack.append(self._find(module, name))
            case 0x71:  # BINPUT
                self._put(self._take(1)[0])
            case 0x72:  # LONG_BINPUT
                self._put(int.from_bytes(self._take(4), "little"))
            case 0x80:  # PROTO
                if self._take(1)[0] > 5:
                    raise damaged("a pickle of protocol 5 or less", "a later one")
            case 0x95:  # FRAME
                self._take(8)
            case 0x31:  # POP_MARK
                del stack[self._marks.pop() :]
            case 0x51:  # BINPERSID
                stack[-1] = self._item(stack[-1])
            case _:
                stack.append(self._literal(opcode))

    def _literal(self, opcode: int) -> Any:
        match opcode:
            case 0x58:  # BINUNICODE
                return self._take_counted(4).decode("utf-8", "surrogatepass")
            case 0x8D:  # BINUNICODE8
                return self._take_counted(8).decode("utf-8", "surrogatepass")
            case 0x43:  # SHORT_BINBYTES
                return self._take_counted(1)
            case 0x42:  # BINBYTES
                return self._take_counted(4)
            case 0x8E | 0x96:  # BINBYTES8, BYTEARRAY8
                return self._take_counted(8)
            case 0x8A:  # LONG1
                return int.from_bytes(self._take_counted(1), "little", signed=True)
            case 0x47:  # BINFLOAT
                return struct.unpack(">d", self._take(8))[0]
        raise damaged("opcodes that data needs", f"the opcode 0x{opcode:02x}")

    def _take(self, length: int) -> bytes:
        end = self._pos + length
        if end > len(self._data):
            raise damaged("more bytes", "the end")
        taken = self._data[self._pos : end]
        self._pos = end
        return taken

    def _take_counted(self, length: int) -> bytes:
        return self._take(int.from_bytes(self._take(length), "little"))

    def _line(self) -> str:
        end = self._data.find(b"\n", self._pos)
        if end < 0:
            raise damaged("the end of a name", "none")
        return self._take(end + 1 - self._pos)[:-1].decode()

    def _put(self, index: int) -> None:
        # Careful: don't trust an index; every pickler counts them up from 0.
        if index > len(self._memo):
            raise damaged("memo indices in order", str(index))
        self._memo[index : index + 1] = [self._stack[-1]]

    def _extend(self, start: int) -> None:
        stack = self._stack
        values = stack[start:]
        del stack[start:]
        if type(stack[-1]) is not list:
            raise damaged("a list to append to", "something else")
        stack[-1].extend(values)

    def _item(self, pid: Any) -> Any:
        """Returns the value of a persistent id."""
        raise damaged("a pickle that is whole", "one that refers to something outside")

    @abstractmethod
    def _find(self, module: Any, name: Any) -> Any:
        """Returns the value of a name."""

    @abstractmethod
    def _construct(self, target: Any, args: Any) -> Any:
        """Returns the result of a call."""

    def _new(self, target: Any, args: Any) -> Any:
        """Returns a new object of a class."""
        return self._construct(target, args)

    @abstractmethod
    def _with_state(self, target: Any, state: Any) -> Any:
        """Sets an object's state, and returns the object."""

    @abstractmethod
    def _set_items(self, target: Any, items: list[Any]) -> None:
        """Sets items of a mapping, given as alternating keys and values."""


Opcodes = npt.NDArray[np.uint8]
"""uint8[n, w]: w bytes of opcodes for each of n rows."""

MEMOIZE_AND_POP = b"\x940"
"""Opcodes after those of a value: the reader stores it in its memo and pops it off its stack."""
_SMALL = 1 << 31


class PickleWriter:
    """Collects the opcodes of one pickle, and tracks the memo of its reader.

    Values that occur often are *remembered* first: the reader makes them once, and a row refers to
    them by five bytes. The reader shares one object then, so only immutable values are remembered.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_remembered = 0
        self._texts: dict[str, int] = {}
        self._names: dict[tuple[str, str], int] = {}
        self.add = self._parts.append
        """Appends opcodes."""

    def remember(self, opcodes: bytes, count: int = 1) -> int:
        """Writes one or several values, and returns the memo index of the first.

        Args:
            opcodes: Opcodes that push one value each, with `MEMOIZE_AND_POP` between values.
            count: Number of values.
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
        index = self._texts.get(value)
        if index is None:
            index = self._texts[value] = self.remember(pickled_text(value))
        return _reference(index)

    def name(self, module: str, qualname: str) -> bytes:
        """Returns the opcodes that push a class or function, remembered once."""
        index = self._names.get((module, qualname))
        if index is None:
            opcodes = self.text(module) + self.text(qualname) + b"\x93"
            index = self._names[module, qualname] = self.remember(opcodes)
        return _reference(index)

    def references(self, indices: Sequence[int] | Int64Array) -> Opcodes:
        """Returns the opcodes that each push a remembered value.

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


def rows(num_rows: int, *pieces: bytes | Opcodes) -> bytes:
    """Returns the opcodes of many rows of the same form.

    Args:
        num_rows: Number of rows, n.
        pieces: Parts of a row, in order: bytes shared by all rows, or uint8[n, w].

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
    """Returns the opcodes of rows of different lengths: each a head, several parts and a tail.

    Args:
        counts: int64[n], number of parts of each row.
        heads: uint8[n, h], the head of each row.
        parts: uint8[sum(counts), p], the parts of all rows, row by row.
        tails: uint8[n, t], the tail of each row.

    Returns:
        The opcodes, and where each row starts in them and the last one ends: int64[n + 1].
    """
    head, part, tail = heads.shape[1], parts.shape[1], tails.shape[1]
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(head + counts * part + tail, out=starts[1:])
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
    """Returns the opcodes that each push a number.

    Args:
        values: int64[n].

    Returns:
        uint8[n, 5], or uint8[n, 10] if a number needs more than 32 bits.
    """
    if not len(values) or (int(values.min()) >= -_SMALL and int(values.max()) < _SMALL):
        return _column(b"J", values.astype("<i4"))
    return _column(b"\x8a\x08", values.astype("<i8"))


def pickled_int(value: int) -> bytes:
    """Returns the shortest opcodes that push a number, which Python's pickler writes too."""
    if 0 <= value < 0x100:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 0x10000:
        return b"M" + value.to_bytes(2, "little")
    if -_SMALL <= value < _SMALL:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((length,)) + value.to_bytes(length, "little", signed=True)


def pickled_tuple(values: Sequence[bytes]) -> bytes:
    """Returns the opcodes that push a tuple, given those of its values."""
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
    # Why surrogatepass: Python's own pickle encodes text that is no valid Unicode this way.
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return _SHORT_TEXT[len(data)] + data
    return b"X" + struct.pack("<I", len(data)) + data
