"""Reads a pickle into plain values and stand-ins, without importing or calling what it names.

An interpreter for the opcodes of protocols 2 to 5 that data needs. Classes become `Instance`s,
names that the caller did not allow are refused. `metadata` gives the values their meaning;
`object_pickle` builds real objects with the same interpreter.

Why not `pickle.Unpickler` with a `find_class` of our own: its C code takes 64 GiB for a memo index
of 2**32 - 1, and overflows the C stack hashing a tuple nested a million deep.
Source: PEP 307, PEP 3154, PEP 574; Lib/pickletools.py.
"""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

MAX_PICKLE_BYTES = 1 << 30
"""Longest pickle; its values take at most about 100 times as much memory."""

_NEW_OBJECT = b"\x81\x94}\x94("
"""What follows EMPTY_TUPLE where an object with attributes begins: NEWOBJ, MEMOIZE, EMPTY_DICT,
MEMOIZE, MARK."""
_CALL = b"\x94R\x94"
"""What follows TUPLE1 in a call with one argument: MEMOIZE, REDUCE, MEMOIZE."""
_MAX_KEY_PARTS = 64
_LARGE_INT = 1 << 61
"""From here on Python's hash of an integer repeats, and equal hashes make a dict slow."""

Builder = Callable[[tuple[Any, ...]], Any]
"""Makes a value of the arguments with which the pickle would call something."""


class Global:
    """The name of a class, function or constant in a pickle."""

    __slots__ = ("build", "name")

    def __init__(self, name: str, build: Builder | None) -> None:
        self.name = name
        self.build = build


class Instance:
    """Stands for an object of a class that was allowed and is not made."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


def read_pickle(
    data: bytes, allowed: Callable[[str], Global | None], key_of: Mapping[str, Builder]
) -> Any:
    """Returns the value of a pickle: numbers, texts, bytes, lists, tuples, dicts, stand-ins.

    Sets become lists, and tuples that are keys of a dict their `repr`. Shared and cyclic
    references stay as they are: do not walk the value without a bound, and do not print, hash or
    compare parts that were not checked.

    Args:
        data: The pickle.
        allowed: Returns what a dotted name stands for, None to refuse it.
        key_of: By class name, what an instance is as a key of a dict.

    Raises:
        UnsafeCheckpointError: It names something that is not allowed; `key` is that name.
        DamagedCheckpointError: It is no pickle, or one with opcodes that plain data does not need.

    Complexity:
        O(length), about 0.15 us an opcode.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise damaged(f"at most {MAX_PICKLE_BYTES >> 20} MiB", f"{len(data)} bytes")
    return _MetadataMachine(data, allowed, key_of).load()


def damaged(expected: str, found: str) -> DamagedCheckpointError:
    """Returns the error for a pickle that is not as it must be."""
    return DamagedCheckpointError(
        f"Expected {expected}, found {found}; it is damaged, load an earlier step"
    )


class PickleMachine(ABC):
    """Runs the opcodes of a pickle; what a name, a call, a state or an item makes is a subclass's.

    Args:
        data: Bytes that hold the pickle.
        start: Where it starts in them.
    """

    def __init__(self, data: bytes | mmap.mmap, start: int = 0) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._pos = start

    @property
    def position(self) -> int:
        """Where the next opcode stands; after `load`, the end of the pickle."""
        return self._pos

    def load(self) -> Any:
        """Returns the value of the pickle.

        Raises:
            DamagedCheckpointError: It is no pickle, or one with opcodes that data does not need.
        """
        try:
            return self._run()
        except CheckpointError:
            raise
        except (IndexError, ValueError, TypeError, struct.error) as exc:
            # Values missing on the stack or in the memo, text that is no UTF-8, bytes that end.
            raise damaged("a pickle", f"bytes that are none ({type(exc).__name__})") from exc

    def _run(self) -> Any:
        """Returns the value on the stack at the STOP opcode.

        Why one long loop: a .metadata of 20,000 tensors has two million opcodes, and a call for
        each would triple the time. The commonest come first, the others are in `_other`; runs of
        opcodes that every pickler writes for an object are taken at once.
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
                if data[pos : pos + len(_NEW_OBJECT)] == _NEW_OBJECT:
                    made = self._new(pop(), ())
                    state: dict[Any, Any] = {}
                    push(made)
                    push(state)
                    memoize(made)
                    memoize(state)
                    marks.append(len(stack))
                    pos += len(_NEW_OBJECT)
                else:
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
                if data[pos] == 0x62:  # BUILD
                    state = pop()
                    stack[-1] = self._with_state(stack[-1], state)
                    pos += 1
            elif opcode == 0x86:  # TUPLE2
                last = pop()
                push((pop(), last))
                if data[pos] == 0x94:  # MEMOIZE
                    memoize(stack[-1])
                    pos += 1
            elif opcode == 0x85:  # TUPLE1
                args = (pop(),)
                if data[pos : pos + len(_CALL)] == _CALL:
                    memoize(args)
                    made = self._made(pop(), args)
                    push(made)
                    memoize(made)
                    pos += len(_CALL)
                else:
                    push(args)
            elif opcode == 0x52:  # REDUCE
                args = pop()
                push(self._made(pop(), args))
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
                self._other(opcode)
                pos = self._pos

    def _other(self, opcode: int) -> None:
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
            case _:
                stack.append(self._literal(opcode))

    def _literal(self, opcode: int) -> Any:
        match opcode:
            case 0x58:  # BINUNICODE
                return self._counted(4).decode("utf-8", "surrogatepass")
            case 0x8D:  # BINUNICODE8
                return self._counted(8).decode("utf-8", "surrogatepass")
            case 0x43:  # SHORT_BINBYTES
                return self._counted(1)
            case 0x42:  # BINBYTES
                return self._counted(4)
            case 0x8E | 0x96:  # BINBYTES8, BYTEARRAY8
                return self._counted(8)
            case 0x8A:  # LONG1
                return int.from_bytes(self._counted(1), "little", signed=True)
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

    def _counted(self, length: int) -> bytes:
        return self._take(int.from_bytes(self._take(length), "little"))

    def _line(self) -> str:
        end = self._data.find(b"\n", self._pos)
        if end < 0:
            raise damaged("the end of a name", "none")
        return self._take(end + 1 - self._pos)[:-1].decode()

    def _put(self, index: int) -> None:
        # Careful: an index is not to be believed; every pickler counts them up from 0.
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

    @abstractmethod
    def _find(self, module: Any, name: Any) -> Any:
        """Returns what a name stands for."""

    @abstractmethod
    def _made(self, target: Any, args: Any) -> Any:
        """Returns what a call makes."""

    def _new(self, target: Any, args: Any) -> Any:
        """Returns a new object of a class."""
        return self._made(target, args)

    @abstractmethod
    def _with_state(self, target: Any, state: Any) -> Any:
        """Returns an object that was given its state."""

    @abstractmethod
    def _set_items(self, target: Any, items: list[Any]) -> None:
        """Puts keys and values, one after the other, into a mapping."""


class _MetadataMachine(PickleMachine):
    """Makes stand-ins."""

    def __init__(
        self,
        data: bytes,
        allowed: Callable[[str], Global | None],
        key_of: Mapping[str, Builder],
    ) -> None:
        super().__init__(data)
        self._allowed = allowed
        self._key_of = key_of
        self._globals: dict[str, Global] = {}
        self._text_room = 64 * len(data) + (1 << 20)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise damaged("a dict and its items", "something else")
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                key = self._key(key)
            elif key in target:
                # Why: no pickler writes a key twice, and readers need not agree on which counts.
                raise damaged("each name once", "one twice")
            target[key] = items[index + 1]

    def _key(self, key: Any) -> Any:
        if isinstance(key, Instance) and key.name in self._key_of:
            return self._key_of[key.name]((key.state,))
        if key is None or isinstance(key, (float, bytes)) or _is_small(key):
            return key
        # Careful: hashing a tuple that is nested too deep would overflow the stack, one that is
        # long takes its time at every use, and of numbers many tuples have one hash.
        if (
            isinstance(key, tuple)
            and len(key) <= _MAX_KEY_PARTS
            and all(isinstance(part, str) or _is_small(part) for part in key)
        ):
            return repr(key)
        raise damaged("texts and numbers as keys", "other keys")

    def _made(self, target: Any, args: Any) -> Any:
        if type(target) is not Global or type(args) is not tuple:
            raise damaged("a class and its arguments", "something else")
        if target.build is None:
            return Instance(target.name, args)
        value = target.build(args)
        if type(value) is str:
            # Why: a long path is built anew by every call that refers to its parts in the memo.
            self._text_room -= len(value)
            if self._text_room < 0:
                raise damaged("paths that fit the length of the file", "longer ones")
        return value

    def _with_state(self, target: Any, state: Any) -> Any:
        if type(target) is Instance:
            target.state = state
        elif type(target) is not dict:
            # A dict stands for an OrderedDict or defaultdict, whose attributes nobody needs.
            raise damaged("an object to give a state to", "something else")
        return target

    def _find(self, module: Any, name: Any) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise damaged("the name of a class", "something else")
        dotted = f"{module}.{name}"
        found = self._globals.get(dotted) or self._allowed(dotted)
        if found is None:
            raise UnsafeCheckpointError(
                "Expected a .metadata of plain data and of DCP's own classes, found one that "
                "asks for something else; do not load this checkpoint unless you wrote it",
                key=ascii(dotted[:200])[1:-1],
            )
        self._globals[dotted] = found
        return found


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and -_LARGE_INT < value < _LARGE_INT
