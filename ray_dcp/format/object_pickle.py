"""Builds the objects of a pickle by its own functions; nothing that the pickle names is called.

For every global that state dicts hold, a `Known` has the value of the name and the function that
builds an object from checked arguments. Globals that the user allowed by
`torch.serialization.add_safe_globals` are called as torch calls them; any other name is refused.
This module builds values of Python, its standard library and numpy; `torch_adapter.objects` adds
those of torch.

*Why numpy's values are built from scratch*: numpy trusts the pickle of a dtype, an array or a
random generator about its length, the places of its fields, and which bytes are pointers; a forged
pickle makes it read and write memory of others. So numpy's checked public constructors make each
value, from checked arguments.

Source: torch/_weights_only_unpickler.py; PEP 307, PEP 3154; numpy/_core/src/multiarray/descriptor.c
`arraydescr_setstate`, methods.c `array_setstate`; numpy/random/_pickle.py, bit_generator.pyx.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickletools
import random
import re
import sys
import types
import uuid
import weakref
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import EnumMeta
from math import prod
from typing import Any

import numpy as np

from ray_dcp.core.processes import collector_paused
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.format.safe_pickle import PickleMachine

_BYTES_A_BYTE = 96
"""Most bytes of memory for each byte of a pickle. An empty deque takes 760 bytes, from 9."""
_FREE_BYTES = 1 << 20
_CALL_BYTES = 64
_UNFINISHED_BYTES = 512
_DEPTH_BYTES = 256
_SET_BYTES = sys.getsizeof(set())
_MAX_KEY_DEPTH = 16
_MAX_DEPTH = 1000
_MERSENNE_WORDS = 624
_NEVER = frozenset(["sys", "os", "posix", "nt"])
"""Modules of which torch refuses every name, whatever the user allowed."""
_ENCODINGS = frozenset(["latin1", "latin-1", "utf-8", "utf8", "ascii"])
_WAY_OUT = (
    "store what it is made of, or, if you wrote this checkpoint, load with "
    "LoadOptions(weights_only=False)"
)

Build = Callable[["ObjectMachine", tuple[Any, ...]], Any]


@dataclass(frozen=True, slots=True)
class Known:
    """A global that pickles may name."""

    value: Any = None
    """The value of the name itself; None for a function that pickles only call."""
    build: Build | None = None
    """Builds a value from the arguments of a call; None if the global is not called."""


class Table:
    """Globals by name, and the functions that build their values."""

    def __init__(self, *known: Mapping[str, Known]) -> None:
        self.values: dict[str, Any] = {}
        self._builds: dict[int, tuple[str, Build]] = {}
        for name, one in (item for table in known for item in table.items()):
            value = one.build if one.value is None else one.value
            self.values[name] = value
            if one.build is not None:
                self._builds[id(value)] = name, one.build

    def build_of(self, value: Any) -> tuple[str, Build] | None:
        """Returns name and builder of what a pickle calls, by identity: it need not be hashable."""
        return self._builds.get(id(value))


class Unfinished:
    """Stands for a value that can't be built before its state is known."""

    __slots__ = ("__weakref__", "finish", "name", "place")

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish
        self.name = ""
        self.place = -1


class Unneeded(ValueError):
    """The arguments of a call are not those that are saved."""


def need(condition: Any, what: str = "") -> None:
    """Checks the arguments of a builder.

    Raises:
        Unneeded: The arguments are wrong; the machine adds the name of the global.
    """
    if not condition:
        raise Unneeded(what)


@dataclass(slots=True, eq=False)
class _Depth:
    """The nesting depth of a container, which it keeps alive so that its id stays unique."""

    container: Any
    levels: int = 0
    is_held: bool = False


class ObjectMachine(PickleMachine):
    """Builds the object that a pickle describes.

    Memory is bounded by the length of the pickle: every object that is made of existing values, and
    that a pickle could make again and again, is counted.

    Args:
        data: Bytes that begin with the pickle.
        table: Globals that it may name.
        added: Globals that the user allowed, by dotted name.
        item_of: Returns the value of a persistent id.
    """

    def __init__(
        self,
        data: bytes,
        table: Table,
        added: Mapping[str, Any],
        item_of: Callable[[Any], Any],
    ) -> None:
        super().__init__(data)
        self.table = table
        self._added = added
        self._item_of = item_of
        self._room = _BYTES_A_BYTE * len(data) + _FREE_BYTES
        self._unfinished: weakref.WeakSet[Unfinished] = weakref.WeakSet()
        self._depths: dict[int, _Depth] = {}

    def load(self) -> Any:
        """Returns the object.

        Raises:
            UnsafeCheckpointError: The pickle names a global that is not allowed, or calls one in a
                way in which no object is saved; `key` is its name.
            DamagedCheckpointError: The data is no pickle.
        """
        with collector_paused():
            value = super().load()
        self._stack.clear()
        self._memo.clear()
        self._depths.clear()
        if self._unfinished or type(value) is Unfinished:
            raise _unsafe_error("a value before it is complete", "pickle")
        return value

    def spend(self, num_bytes: int) -> None:
        """Counts memory that is about to be allocated.

        Raises:
            UnsafeCheckpointError: The sum exceeds the bound for the length of the pickle.
        """
        self._room -= num_bytes
        if self._room < 0:
            raise _unsafe_error("more memory than fits its length", "pickle")

    def hold(self, target: Any, values: Iterable[Any]) -> None:
        """Checks the nesting depth of default dicts, deques and arrays of objects.

        Why: Python frees these recursively, without the bound that it has for other containers.

        Args:
            target: The container that gets the values.
            values: The values.
        """
        own = self._depth_of(target)
        # Why only now: an empty container was never counted in another one.
        inner = [self._depth_of(value) for value in values if self.is_deep(value)]
        own.levels = max(own.levels, 1 + max((one.levels for one in inner), default=0))
        # A container that is held can't take values any more: its holder would get deeper.
        if own.levels > _MAX_DEPTH or (inner and own.is_held):
            raise _unsafe_error("containers too deep in each other", "pickle")
        for one in inner:
            one.is_held = True

    def _depth_of(self, container: Any) -> _Depth:
        found = self._depths.get(id(container))
        if found is None:
            self.spend(_DEPTH_BYTES)
            found = self._depths[id(container)] = _Depth(container)
        return found

    def is_deep(self, value: Any) -> bool:
        """Returns whether `hold` counts a value."""
        return id(value) in self._depths or type(value) is collections.deque

    def is_added(self, value: Any) -> bool:
        """Returns whether the user allowed a class or function."""
        return any(value is one for one in self._added.values())

    def check_key(self, key: Any) -> None:
        """Checks that a dict key or an element of a set can be hashed.

        Why: hashing a tuple nested a million deep overflows the stack of the process.
        """
        level = [key]
        for _ in range(_MAX_KEY_DEPTH):
            inner = [one for one in level if isinstance(one, tuple)]
            # Careful: spend first. The memo may repeat a long tuple in each place of another one.
            self.spend(8 * sum(map(len, inner)))
            level = [part for one in inner for part in one]
            if not level:
                return
        raise _unsafe_error("keys nested deeper than can be hashed", "pickle")

    def _other_opcode(self, opcode: int) -> None:
        stack = self._stack
        match opcode:
            case 0x8F:  # EMPTY_SET
                self.spend(_SET_BYTES)
                stack.append(set())
            case 0x90:  # ADDITEMS
                items = self._above_mark()
                need(type(stack[-1]) is set)
                stack[-1].update(map(self._hashable, items))
            case 0x91:  # FROZENSET
                items = self._above_mark()
                self.spend(_SET_BYTES)
                stack.append(frozenset(map(self._hashable, items)))
            case 0x55:  # SHORT_BINSTRING
                stack.append(self._take(self._take(1)[0]).decode())
            case _:
                super()._other_opcode(opcode)

    def _item(self, pid: Any) -> Any:
        return self._built("a storage", lambda: self._item_of(pid))

    def _literal(self, opcode: int) -> Any:
        if opcode == 0x96:  # BYTEARRAY8
            return bytearray(self._take_counted(8))
        if opcode not in b"\x58\x8d\x43\x42\x8e\x8a\x47":
            raise _unsafe_error(f"the opcode 0x{opcode:02x}", "pickle")
        return super()._literal(opcode)

    def _above_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _hashable(self, item: Any) -> Any:
        self.check_key(item)
        return item

    def _extend(self, start: int) -> None:
        values = self._stack[start:]
        del self._stack[start:]
        target = self._stack[-1]
        if type(target) not in (list, collections.deque):
            raise _unsafe_error("something else than a list to append to", "pickle")
        if type(target) is collections.deque:
            self.hold(target, values)
        target.extend(values)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) not in _MAPPINGS or len(items) % 2:
            raise _unsafe_error("something else than a dict to fill", "pickle")
        if type(target) is collections.defaultdict:
            self.hold(target, items[1::2])
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                self.check_key(key)
            target[key] = items[index + 1]

    def _find(self, module: Any, name: Any) -> Any:
        dotted = _dotted(module, name)
        if dotted in self.table.values:
            return self.table.values[dotted]
        if dotted in self._added and str(module).partition(".")[0] not in _NEVER:
            return self._added[dotted]
        found = sorted({dotted} | self._refused_names())
        told = ascii(", ".join(found))[1:-1]
        raise UnsafeCheckpointError(
            f"{told} {'is' if len(found) == 1 else 'are'} not on the allow-list; if you trust the "
            f"checkpoint, add torch.serialization.add_safe_globals([{told}]) before loading, or "
            f"load with LoadOptions(weights_only=False)",
            key=ascii(dotted)[1:-1],
        )

    def _refused_names(self) -> set[str]:
        """Returns the other names in the rest of the pickle that are not allowed, for messages."""
        found: set[str] = set()
        stream = io.BytesIO(self._data[self._pos : self._pos + _FREE_BYTES])
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "GLOBAL" and len(found) < 8:
                    dotted = _dotted(*str(argument).split(" ", 1))
                    if dotted not in self.table.values and dotted not in self._added:
                        found.add(dotted)
        except Exception:  # noqa: BLE001 - only to word a message; bytes that are none raise anything
            return found
        return found

    def _construct(self, target: Any, args: Any) -> Any:
        return self._checked_call(target, args, lambda: target(*args))

    def _new(self, target: Any, args: Any) -> Any:
        return self._checked_call(target, args, lambda: target.__new__(target, *args))

    def _checked_call(self, target: Any, args: Any, call: Callable[[], Any]) -> Any:
        if not isinstance(args, tuple):
            raise _unsafe_error("arguments that are no tuple", "pickle")
        # Why the arguments count: the memo may repeat them, and each call walks them.
        self.spend(_CALL_BYTES + sum(map(_walked_bytes, args)))
        known = self.table.build_of(target)
        if known is None:
            if not self.is_added(target):
                raise _unsafe_error("a call of something that is not called", "pickle")
            return _call_allowed(target, call)
        value = self._built(known[0], lambda: known[1](self, args))
        self.spend(sys.getsizeof(value))
        if type(value) is Unfinished:
            self.spend(_UNFINISHED_BYTES)
            value.name, value.place = known[0], len(self._memo)
            self._unfinished.add(value)
        return value

    def _built(self, name: str, build: Callable[[], Any]) -> Any:
        try:
            return build()
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            told = f" ({error})" if isinstance(error, Unneeded) and str(error) else ""
            what = f"{name} with other arguments than it is saved with{told}"
            raise _unsafe_error(what, name) from error

    def _with_state(self, target: Any, state: Any) -> Any:
        self.spend(_walked_bytes(state))
        if type(target) is Unfinished:
            made = self._built(target.name, lambda: target.finish(state))
            self.spend(sys.getsizeof(made))
            # A reference other than the memo keeps an unfinished value, see `load`.
            if target.place < len(self._memo) and self._memo[target.place] is target:
                self._memo[target.place] = made
            return made
        if type(target) in _WITH_ATTRIBUTES:
            self._built(type(target).__name__, lambda: set_attributes(target, state))
        elif self.is_added(type(target)):
            _call_allowed(type(target), lambda: _set_added(target, state))
        else:
            raise _unsafe_error("a state for a value that has none", "pickle")
        return target


def _walked_bytes(value: Any) -> int:
    """Returns how many bytes a builder may have to walk through."""
    return 8 * len(value) if isinstance(value, (str, bytes, bytearray, *_CONTAINERS)) else 0


def set_attributes(target: Any, state: Any) -> None:
    """Sets attributes, none of which may shadow an attribute of the class.

    Raises:
        Unneeded: `state` is no dict of attributes, or names an attribute of the class.
    """
    need(type(state) is dict)
    need(all(type(name) is str and not hasattr(type(target), name) for name in state))
    target.__dict__.update(state)


def _call_allowed(target: Any, call: Callable[[], Any]) -> Any:
    """Calls a function that the user allowed."""
    try:
        return call()
    except Exception as error:
        name = getattr(target, "__qualname__", "a function of the user")
        raise DamagedCheckpointError(
            f"expected arguments that {name} takes, found {type(error).__name__}: {error}"
        ) from error


def _set_added(target: Any, state: Any) -> None:
    """Sets the state of an object of a class that the user allowed, as torch and pickle do."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        target.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _unsafe_error(what: str, name: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"expected the pickle of an object, found one that asks for {what}, which no object that "
        f"was saved needs; {_WAY_OUT}",
        key=name,
    )


def _dotted(module: Any, name: Any) -> str:
    """Returns the dotted name in Python 3: pickles of protocol 2 have the names of Python 2."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise _unsafe_error("a name that is no text", "pickle")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"[:256]


# How values of Python are built


def _made_of(cls: Any, kinds: tuple[type, ...], most: int, least: int = 0) -> Build:
    """Returns a builder that calls a class with `least` to `most` arguments of certain types."""

    def build(_: ObjectMachine, args: tuple[Any, ...]) -> Any:
        need(least <= len(args) <= most and all(type(arg) in kinds for arg in args))
        return cls(*args)

    return build


def _member(_: ObjectMachine, args: tuple[Any, ...]) -> Any:
    """Returns an enumeration's member by name, as Python 3.11.0 to 3.11.3 pickles it."""
    cls, name = args
    # Careful: an attribute of anything else could be anything. The class was checked when it was
    # named.
    need(isinstance(cls, EnumMeta) and type(name) is str)
    return cls.__members__[name]


def _set_of(cls: Any) -> Build:
    def build(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
        need(len(args) <= 1 and all(type(arg) in (list, tuple, set) for arg in args))
        return cls(map(machine._hashable, args[0])) if args else cls()

    return build


def _pairs(machine: ObjectMachine, args: tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    """Returns keys and values of the one argument from which mappings are built."""
    need(len(args) <= 1)
    if not args:
        return ()
    if isinstance(args[0], dict):
        return args[0].items()
    need(type(args[0]) is list)
    need(all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in args[0]))
    return [(machine._hashable(key), value) for key, value in args[0]]


def _mapping_of(cls: Any) -> Build:
    def build(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
        return cls(dict(_pairs(machine, args)))

    return build


def _default_dict(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    factory = args[0] if args else None
    is_class = isinstance(factory, type) and machine.table.build_of(factory) is not None
    need(factory is None or is_class or machine.is_added(factory))
    made = collections.defaultdict(factory, dict(_pairs(machine, args[1:])))
    machine.hold(made, made.values())
    return made


def _build_deque(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    need(len(args) <= 2 and all(isinstance(arg, (list, tuple)) for arg in args[:1]))
    need(all(arg is None or type(arg) is int for arg in args[1:]))
    made: collections.deque[Any] = collections.deque(*args)
    if made:
        machine.hold(made, made)
    return made


def _encoded(_: ObjectMachine, args: tuple[Any, ...]) -> bytes:
    text, encoding = args
    # Careful: an encoding that is no text may be unhashable.
    need(type(text) is str and isinstance(encoding, str) and encoding in _ENCODINGS)
    return bytes(text, encoding)


def _bytes_of(cls: Any) -> Build:
    def build(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
        if len(args) == 2:
            return cls(_encoded(machine, args))
        need(len(args) <= 1 and all(type(arg) in (bytes, list) for arg in args))
        return cls(*args)

    return build


def _time_builder(cls: Any, num_bytes: int) -> Build:
    """Returns a builder of dates or times from the packed bytes of their pickled form."""

    def build(_: ObjectMachine, args: tuple[Any, ...]) -> Any:
        raw, *zone = args
        need(type(raw) is bytes and len(raw) == num_bytes)
        need(len(zone) <= 1 and all(type(one) is datetime.timezone for one in zone))
        # Careful: from bytes, a month is checked and nothing else. `replace` checks each field.
        return cls(raw, *zone).replace()

    return build


def _timezone(_: ObjectMachine, args: tuple[Any, ...]) -> datetime.timezone:
    offset, *name = args
    need(type(offset) is datetime.timedelta and all(type(one) is str for one in name))
    return datetime.timezone(offset, *name)


def _fraction(_: ObjectMachine, args: tuple[Any, ...]) -> fractions.Fraction:
    """Builds a fraction from its pickled form; `Fraction("1e999999999")` would fill the memory."""
    if len(args) == 1:
        need(re.fullmatch(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?", args[0]), "no exponent notation")
        return fractions.Fraction(args[0])
    numerator, denominator = args
    need(type(numerator) is type(denominator) is int)
    return fractions.Fraction(numerator, denominator)


def _stream(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    def finish(state: Any) -> io.BytesIO:
        content, position, attributes = state
        need(type(content) is bytes and type(position) is int and 0 <= position <= len(content))
        need(not attributes)
        made = io.BytesIO(content)
        made.seek(position)
        return made

    need(not args)
    return Unfinished(finish)


def _uuid(_: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    def finish(state: Any) -> uuid.UUID:
        safety = uuid.SafeUUID(state.get("is_safe", uuid.SafeUUID.unknown.value))
        need(state.keys() <= {"int", "is_safe"} and type(state["int"]) is int)
        return uuid.UUID(int=state["int"], is_safe=safety)

    need(not args)
    return Unfinished(finish)


def _random(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    def finish(state: Any) -> random.Random:
        version, words, gauss = state
        need(version == 3 and type(words) is tuple and len(words) == _MERSENNE_WORDS + 1)
        need(all(type(word) is int and 0 <= word < 1 << 32 for word in words))
        need(words[-1] <= _MERSENNE_WORDS and (gauss is None or type(gauss) is float))
        made = random.Random(0)  # noqa: S311 - it is given a state
        made.setstate((version, words, gauss))
        return made

    need(not args)
    machine.spend(8 * _MERSENNE_WORDS)
    return Unfinished(finish)


def _paths() -> dict[str, Known]:
    # Python 3.13 pickles paths under pathlib._local. A path of another system becomes a pure path.
    here = type(pathlib.Path())
    classes: dict[str, Any] = {
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
        "PosixPath": pathlib.PurePosixPath,
        "WindowsPath": pathlib.PureWindowsPath,
        here.__name__: here,
    }
    return {
        f"{module}.{name}": Known(cls, _made_of(cls, (str,), sys.maxsize))
        for module in ("pathlib", "pathlib._local")
        for name, cls in classes.items()
    }


_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_NUMBERS = (bool, int, float)
_BOUNDS = (int, bool, type(None))
_WITH_ATTRIBUTES = (collections.OrderedDict, argparse.Namespace, types.SimpleNamespace)

PYTHON: dict[str, Known] = {
    "_codecs.encode": Known(None, _encoded),
    "argparse.Namespace": Known(argparse.Namespace, _made_of(argparse.Namespace, (), 0)),
    "builtins.Ellipsis": Known(Ellipsis),
    "builtins.NotImplemented": Known(NotImplemented),
    "builtins.bool": Known(bool, _made_of(bool, _NUMBERS, 2)),
    "builtins.bytearray": Known(bytearray, _bytes_of(bytearray)),
    "builtins.bytes": Known(bytes, _bytes_of(bytes)),
    "builtins.complex": Known(complex, _made_of(complex, _NUMBERS, 2)),
    "builtins.dict": Known(dict, _mapping_of(dict)),
    "builtins.float": Known(float, _made_of(float, _NUMBERS, 2)),
    "builtins.frozenset": Known(frozenset, _set_of(frozenset)),
    "builtins.getattr": Known(None, _member),
    "builtins.int": Known(int, _made_of(int, _NUMBERS, 2)),
    "builtins.list": Known(list, _made_of(list, (list, tuple), 1)),
    "builtins.object": Known(object, _made_of(object, (), 0)),
    "builtins.range": Known(range, _made_of(range, _BOUNDS, 3, 1)),
    "builtins.set": Known(set, _set_of(set)),
    "builtins.slice": Known(slice, _made_of(slice, _BOUNDS, 3, 1)),
    "builtins.str": Known(str, _made_of(str, (str,), 1)),
    "builtins.tuple": Known(tuple, _made_of(tuple, (list, tuple), 1)),
    "collections.Counter": Known(collections.Counter, _mapping_of(collections.Counter)),
    "collections.OrderedDict": Known(collections.OrderedDict, _mapping_of(collections.OrderedDict)),
    "collections.defaultdict": Known(collections.defaultdict, _default_dict),
    "collections.deque": Known(collections.deque, _build_deque),
    "datetime.date": Known(datetime.date, _time_builder(datetime.date, 4)),
    "datetime.datetime": Known(datetime.datetime, _time_builder(datetime.datetime, 10)),
    "datetime.time": Known(datetime.time, _time_builder(datetime.time, 6)),
    "datetime.timedelta": Known(datetime.timedelta, _made_of(datetime.timedelta, _BOUNDS, 3, 1)),
    "datetime.timezone": Known(datetime.timezone, _timezone),
    "decimal.Decimal": Known(decimal.Decimal, _made_of(decimal.Decimal, (str,), 1, 1)),
    "fractions.Fraction": Known(fractions.Fraction, _fraction),
    "io.BytesIO": Known(io.BytesIO, _stream),
    "_io.BytesIO": Known(io.BytesIO, _stream),
    "random.Random": Known(random.Random, _random),
    "types.SimpleNamespace": Known(types.SimpleNamespace, _made_of(types.SimpleNamespace, (), 0)),
    "uuid.UUID": Known(uuid.UUID, _uuid),
    **_paths(),
}
"""Globals of Python and its standard library."""


_CODE = re.compile(r"[|<>=]?[biufcmMOSUV][0-9]{0,9}")
_MAX_PARTS = 1 << 12
_PART_BYTES = 256
_MOST_NESTED = 8
_MAX_NDIM = 64
_ALIGNED = 0x80
"""numpy's `NPY_ALIGNED_STRUCT`."""
_VERSIONS = (3, 4)
_GENERATOR_BYTES = 4096
_MAX_POOL_WORDS = 64
_MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": (1 << 32) - 1}
"""Largest values of a generator's state: numpy does not check a position beyond its words."""


# Dtypes


def _dtype(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    code, *_more = args
    need(len(args) == 3 and type(code) is str and _CODE.fullmatch(code))
    return Unfinished(lambda state: _finished_dtype(machine, code, state))


def _finished_dtype(machine: ObjectMachine, code: str, state: Any) -> np.dtype[Any]:
    """Returns the dtype of a state, which must be one that numpy itself would have pickled."""
    need(type(state) is tuple and 8 <= len(state) <= 9 and state[0] in _VERSIONS)
    _, order, part, names, fields, length, alignment, flags = state[:8]
    need(type(order) is str and (names is None) == (fields is None))
    need(all(type(number) is int for number in (length, alignment, flags)))
    made: Any
    if part is not None:
        base, shape = part
        need(isinstance(base, np.dtype) and names is None and is_shape(shape) and shape)
        _count_parts(machine, [base])
        made = np.dtype((base, shape))
    elif names is not None:
        made = _record_of(machine, names, fields, length, flags)
    elif len(state) == 9:
        made = _time_dtype(code, state[8])
    else:
        made = np.dtype(code)
    if made.names is None and order in ("<", ">"):
        made = made.newbyteorder(order)
    # The rest of the state must equal the state that numpy pickles for this dtype.
    (found, *_), told = made.__reduce__()[1:]
    need((code.lstrip("|<>="), order, length, alignment, flags) == (found, told[1], *told[5:8]))
    return made  # type: ignore[no-any-return]


def _count_parts(machine: ObjectMachine, level: list[np.dtype[Any]]) -> None:
    """Counts the dtypes inside a dtype about to be built: numpy walks through all of them."""
    total = 1
    for _ in range(_MOST_NESTED):
        total += len(level)
        if not level or total > _MAX_PARTS:
            break
        inner = [list((one.fields or {}).values()) for one in level if one.fields]
        bases = [one.subdtype[0] for one in level if one.subdtype is not None]
        need(sum(map(len, inner)) <= _MAX_PARTS)
        level = [field[0] for fields in inner for field in fields] + bases
    need(not level, "dtypes in dtypes too deep")
    machine.spend(_PART_BYTES * total)


def _record_of(machine: ObjectMachine, names: Any, fields: Any, length: int, flags: int) -> Any:
    need(type(names) is tuple and type(fields) is dict and len(names) <= _MAX_PARTS)
    need(all(type(name) is str for name in names) and set(names) == fields.keys())
    places = [fields[name] for name in names]
    need(all(type(place) is tuple and len(place) == 2 for place in places))
    need(all(isinstance(base, np.dtype) and type(offset) is int for base, offset in places))
    _count_parts(machine, [base for base, _ in places])
    described: Any = {
        "names": list(names),
        "formats": [base for base, _ in places],
        "offsets": [offset for _, offset in places],
        "itemsize": length,
    }
    return np.dtype(described, align=bool(flags & _ALIGNED))


def _time_dtype(code: str, metadata: Any) -> Any:
    """Returns the dtype of a date or duration; `({}, (unit, number, 1, 1))` has its unit."""
    more, (unit, number, *rest) = metadata
    text = unit.decode() if type(unit) is bytes else unit
    need(not more and rest == [1, 1] and code[:1] in ("m", "M") and type(number) is int)
    need(type(text) is str and re.fullmatch("[a-zA-Z]{1,7}", text))
    return np.dtype(f"{code}[{number}{text}]" if text != "generic" else code)


# Arrays and scalars


def is_shape(value: Any) -> bool:
    """Returns whether a value is a tuple of lengths whose product fits into an integer."""
    return (
        isinstance(value, tuple)
        and len(value) <= _MAX_NDIM
        and all(type(length) is int and 0 <= length < 1 << 62 for length in value)
        and prod(length or 1 for length in value) < 1 << 62
    )


def _reconstruct(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    cls, start, kind = args
    need(cls is np.ndarray and start == (0,) and kind in (b"b", "b"))

    def finish(state: Any) -> np.ndarray[Any, Any]:
        _, shape, dtype, is_fortran, values = state
        need(type(is_fortran) in (bool, int))
        return array_of(machine, shape, dtype, bool(is_fortran), values)

    return Unfinished(finish)


def array_of(
    machine: ObjectMachine, shape: Any, dtype: Any, is_fortran: bool, values: Any
) -> np.ndarray[Any, Any]:
    """Returns an array that owns its memory.

    Args:
        machine: The machine that counts the memory.
        shape: Lengths of the array's dimensions.
        dtype: Dtype of its elements.
        is_fortran: Whether the first dimension is the innermost one in `values`.
        values: Exactly its raw bytes; for an array of objects, a list of its elements.
    """
    need(is_shape(shape) and isinstance(dtype, np.dtype) and dtype.subdtype is None)
    count = prod(shape)
    order: Any = "F" if is_fortran else "C"
    machine.spend(count * max(dtype.itemsize, 1))
    if not dtype.hasobject:
        need(type(values) is bytes and len(values) == count * dtype.itemsize)
        whole: Any = np.ndarray(shape, dtype, buffer=values or b"\0", order=order)
        # Why native: numpy itself unpickles arrays of numbers in native byte order.
        native = dtype if dtype.names else dtype.newbyteorder("=")
        return whole.astype(native, order="K")  # type: ignore[no-any-return]
    need(dtype.kind == "O", "objects in records")
    need(type(values) is list and len(values) == count)
    flat: Any = np.empty(count, dtype)
    for index, value in enumerate(values):
        flat[index] = value
    made = flat.reshape(shape, order=order)
    machine.hold(made, values)
    return made  # type: ignore[no-any-return]


def _from_buffer(machine: ObjectMachine, args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Builds an array from its pickled form of protocol 5."""
    values, dtype, shape, order, *axes = args
    need(type(values) in (bytes, bytearray) and order in ("C", "F") and axes in ([], [None]))
    return array_of(machine, shape, dtype, order == "F", bytes(values))


def _scalar(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    dtype, value = args
    need(isinstance(dtype, np.dtype))
    return array_of(machine, (), dtype, False, value)[()]


# Random generators


def _seed_sequence(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    need(len(args) == 3 and args[0] is np.random.SeedSequence)

    def finish(state: Any) -> np.random.SeedSequence:
        # In the order of its fields: entropy, n_children_spawned, pool, pool_size, spawn_key.
        entropy, num_children, _, pool_words, spawn_key = state[:5]
        for numbers in (entropy, spawn_key):
            machine.spend(64 * len(numbers) if type(numbers) in (list, tuple) else 0)
        need(_is_natural(entropy) or _are_natural(entropy))
        need(_is_natural(num_children) and _are_natural(spawn_key))
        need(_is_natural(pool_words) and pool_words <= _MAX_POOL_WORDS)
        return np.random.SeedSequence(
            entropy, spawn_key=spawn_key, pool_size=pool_words, n_children_spawned=num_children
        )

    if args[2] is not None:
        # A state that is an argument is not followed by another one.
        return finish(args[2])  # type: ignore[return-value]
    return Unfinished(finish)


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_natural(values: Any) -> bool:
    return type(values) in (list, tuple) and all(map(_is_natural, values))


_BIT_GENERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}


def _class_of(value: Any) -> Any:
    """Returns the class of a bit generator that a pickle names by text or as a class."""
    return next(cls for name, cls in _BIT_GENERATORS.items() if value is cls or value == name)


def _bit_generator(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    (named,) = args
    cls = _class_of(named)
    machine.spend(_GENERATOR_BYTES)
    return Unfinished(lambda state: _in_state(cls, state))


def _in_state(cls: Any, state: Any) -> Any:
    """Returns a bit generator in a state, with its seed sequence if the state has one."""
    seed: Any = 0
    if type(state) is tuple:
        state, seed = state
        need(seed is None or type(seed) is np.random.SeedSequence)
    made = cls(0 if seed is None else seed)
    made.state = _checked_state(state, made.state)
    return made


def _checked_state(given: Any, like: Any) -> Any:
    """Returns a state after checking that its parts are those of `like`, within their bounds."""
    need(type(given) is dict and given.keys() == like.keys())
    for name, there in like.items():
        value = given[name]
        if type(there) is dict:
            _checked_state(value, there)
        elif type(there) is np.ndarray:
            need(type(value) is np.ndarray and value.dtype == there.dtype)
            need(value.shape == there.shape)
        elif type(there) is str:
            need(value == there)
        elif type(there) is float:
            need(type(value) is float)
        else:
            need(_is_natural(value) and value <= _MOST.get(name, (1 << 128) - 1))
    return given


def _generator(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    named, *_ctor = args
    need(1 <= len(args) <= 2)
    machine.spend(_GENERATOR_BYTES)
    if type(named) in _BIT_GENERATORS.values():
        return np.random.Generator(named)
    cls = _class_of(named)
    return Unfinished(lambda state: np.random.Generator(_in_state(cls, state)))


def _random_state(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    named, *_ctor = args
    need(1 <= len(args) <= 2)
    is_made = type(named) in _BIT_GENERATORS.values()
    cls = type(named) if is_made else _class_of(named)
    machine.spend(_GENERATOR_BYTES)

    def finish(state: Any) -> np.random.RandomState:
        made = np.random.RandomState(named if is_made else cls(0))
        made.set_state(_checked_state(state, made.get_state(legacy=False)))
        return made

    return Unfinished(finish)


def _functions() -> dict[str, Known]:
    # numpy renames its modules from release to release.
    places: dict[str, Any] = {
        "core.multiarray": {"_reconstruct": _reconstruct, "scalar": _scalar},
        "core.numeric": {"_frombuffer": _from_buffer},
        "random._pickle": {
            "__bit_generator_ctor": _bit_generator,
            "__generator_ctor": _generator,
            "__randomstate_ctor": _random_state,
        },
        "random.bit_generator": {"__pyx_unpickle_SeedSequence": _seed_sequence},
    }
    places["_core.multiarray"] = places["core.multiarray"]
    places["_core.numeric"] = places["core.numeric"]
    places["random._bit_generator"] = places["random.bit_generator"]
    return {
        f"numpy.{module}.{name}": Known(None, build)
        for module, builds in places.items()
        for name, build in builds.items()
    }


def _classes() -> dict[str, Known]:
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    numbers = {np.dtype(code).type for code in np.typecodes["All"]}
    others = (np.random.SeedSequence, np.random.Generator, np.random.RandomState, np.ndarray)
    named = {*dtypes, *numbers, *_BIT_GENERATORS.values(), *others}
    return {f"{cls.__module__}.{cls.__qualname__}": Known(cls) for cls in named}


NUMPY: dict[str, Known] = {**_functions(), **_classes(), "numpy.dtype": Known(np.dtype, _dtype)}
"""Globals of numpy."""
