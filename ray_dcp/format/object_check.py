"""Looks through the pickle of an object for calls that no object needs, before torch runs it.

`torch.load(weights_only=True)` lets a pickle call what is on its allow-list with any arguments.
That is enough to fill the memory (`list(range(10**9))`, `bytearray(1 << 40)`) and, with numpy's
dtypes, to read and write memory that is not theirs. So the pickle is run here first with
stand-ins: nothing is called. Who may be called at all remains torch's decision.
Source: torch/_weights_only_unpickler.py; Lib/pickletools.py.
"""

from __future__ import annotations

import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.object_rules import Call, Name, check_build, check_call, check_key, unsafe
from ray_dcp.format.stored_zip import stored_records

__all__ = ["check_object"]

_GLOBAL = re.compile(rb"(?=c([^\n]{1,128})\n([^\n]{1,128})\n)")
"""A GLOBAL opcode, or bytes that look like one; overlapping, so that none can hide another."""
_HARMLESS = frozenset([b"torch", b"torch._utils", b"torch.storage"])
"""Modules of tensors. What they allow torch's own functions check."""
_LEGACY_PICKLES = 5
"""Before torch 1.6: a magic number, a version, a dict, the object, names of storages."""
_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")
_FEW_TUPLES = 4096
_BYTES_A_BYTE = 16
_FREE_BYTES = 64 << 10


def check_object(data: bytes | memoryview) -> None:
    """Checks that an item asks for nothing that an object does not need.

    Args:
        data: One whole item of `torch.save`.

    Raises:
        UnsafeCheckpointError: It calls something in a way that no object needs; `key` is its name.
        DamagedCheckpointError: It is no uncompressed zip of `torch.save`.

    Complexity:
        O(length), about 1 us an opcode; nothing for pickles of plain values and tensors.
    """
    if bytes(data[:1]) == b"\x80":
        _check_pickles(bytes(data), _LEGACY_PICKLES)
        return
    for name, record in stored_records(data):
        # Why any case: torch finds records without regard to it.
        if ".pkl" in name.lower():
            _check_pickles(bytes(record), 1)


def _check_pickles(data: bytes, most: int) -> None:
    if _is_plain(data):
        return
    position = 0
    try:
        for _ in range(most):
            if data[position : position + 1] != b"\x80":
                return
            position = _Machine(data, position).run()
    except CheckpointError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, struct.error, AttributeError) as error:
        raise DamagedCheckpointError(
            f"expected the pickle of an object, found bytes that are none "
            f"({type(error).__name__}); load an earlier step"
        ) from error


def _is_plain(data: bytes) -> bool:
    """Whether a pickle is too simple to hold anything that is looked for."""
    # Why: a tuple in a tuple in … that is a key overflows the stack when it is hashed.
    if sum(map(data.count, _TUPLES)) > _FEW_TUPLES:
        return False
    return all(
        module in _HARMLESS or (module, name) == (b"collections", b"OrderedDict")
        for module, name in _GLOBAL.findall(data)
    )


class _Storage:
    """Stands for the raw bytes of a tensor."""


_FIXED = {0x4E: None, 0x89: False, 0x88: True, 0x29: ()}
_NUMBERS = {0x4A: ("<i", 4), 0x4B: ("<B", 1), 0x4D: ("<H", 2), 0x47: (">d", 8)}


class _Machine:
    """Runs the opcodes that torch's safe unpickler knows, with stand-ins."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        # Why: what is in the memo can be an argument again and again, and be copied each time.
        self._room = _BYTES_A_BYTE * len(data) + _FREE_BYTES

    def run(self) -> int:
        """Returns where the pickle ends."""
        while True:
            opcode = self._take(1)[0]
            if opcode == 0x2E:  # STOP
                return self._position
            if opcode in _NUMBERS:
                code, length = _NUMBERS[opcode]
                self._stack.append(struct.unpack(code, self._take(length))[0])
            elif opcode in _FIXED:
                self._stack.append(_FIXED[opcode])
            elif not (self._container(opcode) or self._reference(opcode)):
                self._other(opcode)

    def _container(self, opcode: int) -> bool:
        stack = self._stack
        match opcode:
            case 0x5D:  # EMPTY_LIST
                stack.append([])
            case 0x7D:  # EMPTY_DICT
                stack.append({})
            case 0x8F:  # EMPTY_SET
                stack.append(Call("builtins.set", ()))
            case 0x28:  # MARK
                self._below.append(stack)
                self._stack = []
            case 0x74:  # TUPLE
                items = self._above_mark()
                self._stack.append(tuple(items))
            case 0x85 | 0x86 | 0x87:  # TUPLE1, TUPLE2, TUPLE3
                count = opcode - 0x84
                stack[-count:] = [tuple(stack[-count:])]
            case 0x61:  # APPEND
                item = stack.pop()
                _append(stack[-1], [item])
            case 0x65:  # APPENDS
                items = self._above_mark()
                _append(self._stack[-1], items)
            case 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                self._set(stack[-1], [key, value])
            case 0x75:  # SETITEMS
                items = self._above_mark()
                self._set(self._stack[-1], items)
            case _:
                return False
        return True

    def _reference(self, opcode: int) -> bool:
        stack = self._stack
        match opcode:
            case 0x63:  # GLOBAL
                stack.append(Name(self._global()))
            case 0x52 | 0x81:  # REDUCE, NEWOBJ
                args = stack.pop()
                stack.append(self._call(stack.pop(), args))
            case 0x62:  # BUILD
                state = stack.pop()
                self._spend(state)
                check_build(stack[-1], state)
            case 0x51:  # BINPERSID
                stack[-1] = _Storage()
            case 0x71 | 0x72:  # BINPUT, LONG_BINPUT
                self._memo[self._index(opcode == 0x72)] = stack[-1]
            case 0x68 | 0x6A:  # BINGET, LONG_BINGET
                stack.append(self._memo[self._index(opcode == 0x6A)])
            case _:
                return False
        return True

    def _other(self, opcode: int) -> None:
        match opcode:
            case 0x58:  # BINUNICODE
                length = int.from_bytes(self._take(4), "little")
                self._stack.append(self._take(length).decode("utf-8", "surrogatepass"))
            case 0x55:  # SHORT_BINSTRING
                self._stack.append(self._take(self._take(1)[0]))
            case 0x8A:  # LONG1
                number = self._take(self._take(1)[0])
                self._stack.append(int.from_bytes(number, "little", signed=True))
            case 0x80:  # PROTO
                self._take(1)
            case _:
                raise unsafe(f"the opcode 0x{opcode:02x}", "pickle")

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise IndexError(end)
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _index(self, is_long: bool) -> int:
        return int.from_bytes(self._take(4 if is_long else 1), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._position)
        return self._take(end + 1 - self._position)[:-1].decode()

    def _global(self) -> str:
        """Returns a name as Python 3 has it: pickles of protocol 2 use those of Python 2."""
        module, name = self._line(), self._line()
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        return f"{module}.{name}"

    def _above_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _set(self, target: Any, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            if isinstance(target, dict):
                target[key] = value

    def _call(self, target: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise TypeError(type(args))
        for arg in args:
            self._spend(arg)
        # What is no name is nothing that torch would call.
        return check_call(target.text, args) if isinstance(target, Name) else Call("", args)

    def _spend(self, value: Any) -> None:
        if isinstance(value, (str, bytes, tuple, list, dict)):
            self._room -= len(value)
        if self._room < 0:
            raise unsafe("more copies of its values than fit its length", "pickle")


def _append(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target.extend(items)
        return
    # What is no list, torch's unpickler refuses; a set would hash them.
    for item in items:
        check_key(item)
