"""Builds arrays, dtypes, scalars and random generators of numpy for `object_pickle`.

numpy believes what the pickle of a dtype, of an array or of a generator says of its length, of its
fields' places and of what is a pointer; a lie makes it read and write memory that is not its own.
So each is made by numpy's checked public constructors, of values that were checked before.
Source: numpy/_core/src/multiarray/descriptor.c `arraydescr_setstate`, methods.c `array_setstate`;
numpy/random/_pickle.py, bit_generator.pyx.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from ray_dcp.format.object_pickle import Known, ObjectMachine, Unfinished, need

__all__ = ["NUMPY", "array_of"]

_CODE = re.compile(r"[|<>=]?[biufcmMOSUV][0-9]{0,9}")
_MAX_PARTS = 1 << 12
_PART_BYTES = 256
_MAX_DEPTH = 8
_MAX_NDIM = 64
_ALIGNED = 0x80
"""numpy's `NPY_ALIGNED_STRUCT`."""
_VERSIONS = (3, 4)
_GENERATOR_BYTES = 4096
_MAX_POOL_WORDS = 64
_MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": (1 << 32) - 1}
"""Largest values of a generator's state: a place behind its words is not checked by numpy."""


# Dtypes


def _dtype(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    code, *_more = args
    need(len(args) == 3 and type(code) is str and _CODE.fullmatch(code))
    return Unfinished(lambda state: _finished_dtype(machine, code, state))


def _finished_dtype(machine: ObjectMachine, code: str, state: Any) -> np.dtype[Any]:
    """Returns the dtype of a state; one that numpy itself would have pickled so."""
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
        made = _moment_of(code, state[8])
    else:
        made = np.dtype(code)
    if made.names is None and order in ("<", ">"):
        made = made.newbyteorder(order)
    # What it says of itself beyond that has to be what numpy says.
    (found, *_), told = made.__reduce__()[1:]
    need((code.lstrip("|<>="), order, length, alignment, flags) == (found, told[1], *told[5:8]))
    return made  # type: ignore[no-any-return]


def _count_parts(machine: ObjectMachine, level: list[np.dtype[Any]]) -> None:
    """Counts the dtypes in a dtype that are about to be put together: numpy walks through all."""
    total = 1
    for _ in range(_MAX_DEPTH):
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


def _moment_of(code: str, metadata: Any) -> Any:
    """Returns a date or a length of time; its unit is in `({}, (unit, number, 1, 1))`."""
    more, (unit, number, *rest) = metadata
    text = unit.decode() if type(unit) is bytes else unit
    need(not more and rest == [1, 1] and code[:1] in ("m", "M") and type(number) is int)
    need(type(text) is str and re.fullmatch("[a-zA-Z]{1,7}", text))
    return np.dtype(f"{code}[{number}{text}]" if text != "generic" else code)


# Arrays and scalars


def is_shape(value: Any) -> bool:
    """Whether a value is a tuple of lengths whose product can be counted."""
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
    """Returns an array of its own memory.

    Args:
        machine: What counts the memory.
        shape: Lengths of its dimensions.
        dtype: Of its elements.
        is_fortran: Whether the first dimension is the innermost one in `values`.
        values: Exactly its raw bytes; where the dtype has objects in it, a list of its elements.
    """
    need(is_shape(shape) and isinstance(dtype, np.dtype) and dtype.subdtype is None)
    count = prod(shape)
    order: Any = "F" if is_fortran else "C"
    machine.spend(count * max(dtype.itemsize, 1))
    if not dtype.hasobject:
        need(type(values) is bytes and len(values) == count * dtype.itemsize)
        whole: Any = np.ndarray(shape, dtype, buffer=values or b"\0", order=order)
        # Why native: so numpy itself unpickles arrays of numbers.
        native = dtype if dtype.names else dtype.newbyteorder("=")
        return whole.astype(native, order="K")  # type: ignore[no-any-return]
    need(type(values) is list and len(values) == count)
    flat: Any = np.empty(count, dtype)
    for index, value in enumerate(values):
        if dtype.kind == "O":
            flat[index] = value
        else:
            _set_record(machine, flat, index, value)
    made = flat.reshape(shape, order=order)
    machine.hold(made, values)
    return made  # type: ignore[no-any-return]


def _set_record(machine: ObjectMachine, column: Any, index: int, value: Any) -> None:
    """Sets one record with objects in it, without a conversion of them."""
    dtype = column.dtype
    need(type(value) is tuple and len(value) == len(dtype.names))
    for name, part in zip(dtype.names, value, strict=True):
        field = dtype.fields[name][0]
        if field.subdtype is not None:
            base, shape = field.subdtype
            need(type(part) is np.ndarray and part.dtype == base and part.shape == shape)
            need(base.kind == "O" or not base.hasobject)
            for element in part.flat if base.kind == "O" else ():
                _check_flat(machine, element)
            column[name][index, ...] = part
        elif field.kind == "O":
            _check_flat(machine, part)
            column[name][index] = part
        elif field.hasobject:
            _set_record(machine, column[name], index, part)
        else:
            need(type(part) in _PLAIN or isinstance(part, np.generic) or field.names)
            need(not field.names or type(part) in (tuple, np.void))
            column[name][index] = part


def _check_flat(machine: ObjectMachine, value: Any) -> None:
    """Checks that what is in a record holds nothing that is freed by recursion."""
    need(not machine.is_deep(value) and type(value) is not np.void, "a container in a record")


_PLAIN: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None),
    *(type(np.datetime64(0, unit).item()) for unit in ("D", "s")),
    type(np.timedelta64(0, "s").item()),
)  # fmt: skip


def _from_buffer(machine: ObjectMachine, args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Builds an array as protocol 5 has it."""
    values, dtype, shape, order, *axes = args
    need(type(values) in (bytes, bytearray) and order in ("C", "F") and axes in ([], [None]))
    return array_of(machine, shape, dtype, order == "F", bytes(values))


def _scalar(machine: ObjectMachine, args: tuple[Any, ...]) -> Any:
    dtype, value = args
    need(isinstance(dtype, np.dtype))
    if dtype.hasobject:
        need(type(value) is np.ndarray and value.dtype == dtype and value.shape == ())
        return value[()]
    return array_of(machine, (), dtype, False, value)[()]


# Random generators


def _seed_sequence(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    need(len(args) == 3 and args[0] is np.random.SeedSequence)

    def finish(state: Any) -> np.random.SeedSequence:
        # By the names of its fields: entropy, n_children_spawned, pool, pool_size, spawn_key.
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
        # Where a state is an argument, none follows.
        return finish(args[2])  # type: ignore[return-value]
    return Unfinished(finish)


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_natural(values: Any) -> bool:
    return type(values) in (list, tuple) and all(map(_is_natural, values))


_BIT_GENERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64,
    )
}  # fmt: skip


def _class_of(value: Any) -> Any:
    """Returns the class of a bit generator that a pickle names by text or as a class."""
    name = value if type(value) is str else next(
        (name for name, cls in _BIT_GENERATORS.items() if cls is value), ""
    )  # fmt: skip
    return _BIT_GENERATORS[name]


def _bit_generator(machine: ObjectMachine, args: tuple[Any, ...]) -> Unfinished:
    (named,) = args
    cls = _class_of(named)
    machine.spend(_GENERATOR_BYTES)
    return Unfinished(lambda state: _in_state(cls, state))


def _in_state(cls: Any, state: Any) -> Any:
    """Returns a bit generator in a state; with what it was seeded by, if that is told."""
    seed: Any = 0
    if type(state) is tuple:
        state, seed = state
        need(seed is None or type(seed) is np.random.SeedSequence)
    made = cls(0 if seed is None else seed)
    made.state = _checked_state(state, made.state)
    return made


def _checked_state(given: Any, like: Any) -> Any:
    """Returns a state if it has the parts that a generator's own state has, in their bounds."""
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
    # Its modules change their names from release to release.
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
"""Values of numpy."""
