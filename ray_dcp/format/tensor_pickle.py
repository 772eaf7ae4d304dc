"""What tensor a `data.pkl` of `torch.save` describes, told without unpickling it.

An interpreter for the few pickle opcodes with which torch writes a plain tensor: nothing is
imported, called or built but tuples of numbers. Where the record lies is `torch_items`' part.
Source: torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3`; PEP 307 (pickle protocol 2).
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.format.dtypes import DTYPE_OF_STORAGE, ITEMSIZE

__all__ = ["NotPlainTensor", "StoredView", "read_tensor_pickle"]

_MAX_NDIM = 64


class NotPlainTensor(CheckpointError):
    """The item is no plain tensor in torch's layout; `torch.load(weights_only=True)` may read it.

    A tensor subclass, a sparse, quantised, nested or conjugated tensor, a compressed zip. `key`
    is the pickle global that said so, if one did.
    """


@dataclass(frozen=True, slots=True)
class StoredView:
    """A strided view of a storage that lies in a record of its own."""

    dtype: str
    key: str
    """Name of the storage: its record is `data/<key>`."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    offset: int
    """First element of the view."""
    storage_bytes: int


def read_tensor_pickle(
    data: bytes, start: int, need: Callable[[int], None]
) -> tuple[StoredView, int]:
    """Returns the tensor that a pickle describes, and where the pickle ends.

    Args:
        data: Bytes that hold the pickle.
        start: Where it starts in them.
        need: Called with an end before the bytes up to it are taken; raises when `data` does not
            reach so far.

    Raises:
        NotPlainTensor: It describes something else.
        UnsafeCheckpointError: It asks for something that no tensor needs; `key` names it.
        DamagedCheckpointError: It is no pickle, or describes a tensor outside its storage.

    Complexity:
        O(length of the pickle).
    """
    machine = _Machine(data, start, need)
    value = machine.run()
    if not isinstance(value, StoredView):
        raise NotPlainTensor("The item holds an object that is no tensor")
    return value, machine.pos


def _damaged(expected: str, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Expected {expected}, found {found}; the item is damaged, load an earlier step"
    )


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None
    """None for an untyped storage."""
    key: str
    count: int
    """Elements, or bytes of an untyped storage."""


class _Hooks:
    """Stands for the empty OrderedDict of backward hooks."""


_MARK = object()
_ORDERED_DICT = "collections.OrderedDict"
_UNTYPED = "torch.storage.UntypedStorage"
_REBUILDS = frozenset(
    f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")
)
_KNOWN_OPCODES = frozenset(opcode.code.encode("latin-1") for opcode in pickletools.opcodes)
_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_INTS = {b"K": (1, False), b"M": (2, False), b"J": (4, True)}


class _Machine:
    """Runs the few pickle opcodes that torch uses for a plain tensor."""

    def __init__(self, data: bytes, start: int, need: Callable[[int], None]) -> None:
        self._data = data
        self._need = need
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.pos = start

    def run(self) -> Any:
        """Returns the value at the STOP opcode."""
        while True:
            opcode = self._take(1)
            if opcode == b".":
                return self._pop()
            if opcode in _INTS:
                length, signed = _INTS[opcode]
                self._stack.append(int.from_bytes(self._take(length), "little", signed=signed))
            elif opcode in _TUPLES:
                self._tuple(_TUPLES[opcode])
            elif opcode in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode])
            else:
                self._other(opcode)

    def _other(self, opcode: bytes) -> None:
        match opcode:
            case b"q" | b"r":
                index = int.from_bytes(self._take(1 if opcode == b"q" else 4), "little")
                self._memo[index] = self._peek()
            case b"h" | b"j":
                index = int.from_bytes(self._take(1 if opcode == b"h" else 4), "little")
                if index not in self._memo:
                    raise _damaged("a memoised value", "none")
                self._stack.append(self._memo[index])
            case b"(":
                self._stack.append(_MARK)
            case b"t":
                self._tuple(self._above_mark())
            case b"X":
                length = int.from_bytes(self._take(4), "little")
                self._stack.append(self._take(length).decode("utf-8", "replace"))
            case b"\x8a":
                self._stack.append(
                    int.from_bytes(self._take(self._take(1)[0]), "little", signed=True)
                )
            case b"c":
                self._global()
            case b"Q":
                self._stack.append(_storage(self._pop()))
            case b"R":
                args = self._pop()
                self._stack.append(_rebuilt(self._pop(), args))
            case b"\x80":
                if self._take(1) > b"\x02":
                    raise NotPlainTensor("The item's pickle has another protocol than torch's")
            case _ if opcode in _KNOWN_OPCODES:
                raise NotPlainTensor(f"The item's pickle uses {opcode!r}, which no tensor needs")
            case _:
                raise _damaged("a pickle opcode", repr(opcode))

    def _take(self, length: int) -> bytes:
        end = self.pos + length
        self._need(end)
        data = self._data[self.pos : end]
        self.pos = end
        return data

    def _line(self) -> str:
        end = self._data.find(b"\n", self.pos)
        if end < 0:
            self._need(len(self._data) + 1)
        return self._take(end + 1 - self.pos)[:-1].decode("utf-8", "replace")

    def _pop(self) -> Any:
        value = self._peek()
        self._stack.pop()
        return value

    def _peek(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise _damaged("a value on the pickle's stack", "none")
        return self._stack[-1]

    def _above_mark(self) -> int:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                del self._stack[index]
                return len(self._stack) - index
        raise _damaged("a mark on the pickle's stack", "none")

    def _tuple(self, length: int) -> None:
        start = len(self._stack) - length
        values = tuple(self._stack[start:]) if start >= 0 else (_MARK,)
        if _MARK in values:
            raise _damaged(f"{length} values on the pickle's stack", "fewer")
        self._stack[start:] = [values]

    def _global(self) -> None:
        name = f"{self._line()}.{self._line()}"
        _check_global(name)
        self._stack.append(_Global(name))


def _check_global(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if name in _REBUILDS or name in (_ORDERED_DICT, _UNTYPED):
        return
    if module == "torch" and (attribute in DTYPE_OF_STORAGE or attribute in ITEMSIZE):
        return
    top = module.partition(".")[0]
    if top == "torch" and attribute.startswith("_rebuild"):
        raise NotPlainTensor("The item is a tensor of a kind that only torch.load knows", key=name)
    if top == "torch" or top == "__builtin__" or top in sys.stdlib_module_names or not top:
        raise UnsafeCheckpointError(
            "Expected an item that rebuilds a tensor, found a pickle that asks for something "
            "else; do not load this checkpoint unless you wrote it",
            key=name,
        )
    raise NotPlainTensor("The item is an object of a class that torch does not know", key=name)


def _storage(value: Any) -> _Storage:
    match value:
        case ("storage", _Global(name), str(key), str(), int(count)) if count >= 0:
            dtype = DTYPE_OF_STORAGE.get(name.rpartition(".")[2])
            if dtype is None and name != _UNTYPED:
                raise _damaged("a storage class", name)
            return _Storage(dtype, key, count)
    raise NotPlainTensor("The item's pickle refers to something that is no storage")


def _rebuilt(function: Any, args: Any) -> Any:
    match function, args:
        case _Global("collections.OrderedDict"), ():
            return _Hooks()
        case _Global("torch._utils._rebuild_parameter"), (StoredView() as view, _, _Hooks()):
            return view
        case _Global("torch._utils._rebuild_tensor"), (_Storage() as storage, offset, size, stride):
            return _view(storage, storage.dtype, offset, size, stride)
        case (
            _Global("torch._utils._rebuild_tensor_v2"),
            (_Storage() as storage, offset, size, stride, _, _Hooks()),
        ):
            return _view(storage, storage.dtype, offset, size, stride)
        case (
            _Global("torch._utils._rebuild_tensor_v3"),
            (_Storage() as storage, offset, size, stride, _, _Hooks(), _Global(dtype)),
        ):
            return _view(storage, dtype.removeprefix("torch."), offset, size, stride)
    # For example a seventh argument of _rebuild_tensor_v2: the conjugate or negative bit is set.
    raise NotPlainTensor("The item's pickle calls a rebuild in a way that no plain tensor needs")


def _view(storage: _Storage, dtype: str | None, offset: Any, size: Any, stride: Any) -> StoredView:
    if dtype is None or dtype not in ITEMSIZE:
        raise NotPlainTensor(f"The item has the dtype {dtype}, which has no raw bytes of its own")
    storage_bytes = storage.count * (ITEMSIZE[storage.dtype] if storage.dtype else 1)
    if not (_is_length(offset) and _is_shape(size) and _is_shape(stride)):
        # Careful: these may be anything, also tuples too deep or too large to print.
        raise _damaged("an offset, a size and a stride", "other values")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=False))
    too_far = 0 not in size and (last + 1) * ITEMSIZE[dtype] > storage_bytes
    if len(size) != len(stride) or too_far or prod(size) >= 1 << 63:
        raise _damaged(
            f"a tensor inside its storage of {storage_bytes} bytes",
            f"dtype {dtype}, offset {offset}, size {size}, stride {stride}",
        )
    return StoredView(dtype, storage.key, size, stride, offset, storage_bytes)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= _MAX_NDIM and all(map(_is_length, value))


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63
