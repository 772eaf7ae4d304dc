"""With which arguments an object's pickle may call what is on the allow-list.

One rule a name; names without a rule are torch's or the user's, who added them. What dtypes may
say of themselves is in `dtype_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray_dcp.errors import UnsafeCheckpointError
from ray_dcp.format.dtype_check import check_dtype

__all__ = ["Call", "Name", "check_build", "check_call", "check_key", "unsafe"]

_MAX_KEY_PARTS = 1 << 12
_MAX_KEY_DEPTH = 16
_MT19937_WORDS, _PHILOX_WORDS = 624, 4
_ENCODINGS = frozenset(["latin1", "latin-1", "utf-8", "utf8", "ascii"])


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that the pickle names."""

    text: str


@dataclass(slots=True, eq=False)
class Call:
    """Stands for what a call gives."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    is_used: bool = False
    """It is part of another value, so that its state may not change any more."""


def unsafe(what: str, name: str) -> UnsafeCheckpointError:
    """Returns the error for a pickle that asks for what no object needs."""
    return UnsafeCheckpointError(
        f"expected the pickle of an object, found one that asks for {what}, which no object that "
        f"was saved needs; do not load this checkpoint unless you wrote it, and then with "
        f"LoadOptions(weights_only=False)",
        key=name,
    )


def check_call(name: str, args: tuple[Any, ...]) -> Any:
    """Returns what stands for the value of a call.

    Raises:
        UnsafeCheckpointError: No object needs it; `key` is the name.
    """
    if name.startswith("numpy.dtypes.") or name == "numpy.ndarray":
        raise unsafe(f"{name} itself", name)
    rule = _RULES.get(name.rpartition(".")[2] if name.startswith("numpy.") else name)
    if rule is not None and not rule(args):
        raise unsafe(f"{name} with other arguments than it is saved with", name)
    if name == "_codecs.encode":
        return args[0].encode(args[1])
    _use(args)
    return Call(name, args)


def check_build(target: Any, state: Any) -> None:
    """Checks the state that a value is given.

    Raises:
        UnsafeCheckpointError: No object needs it; `key` is the name of the value's class.
    """
    if not isinstance(target, Call):
        return
    name = target.name
    if name == "numpy.dtype":
        if target.is_used or target.state is not None:
            raise unsafe("a dtype that changes", name)
        target.state = state
        if not check_dtype(target):
            raise unsafe("a dtype that contradicts itself", name)
    elif name.startswith("numpy.") and name.endswith("._reconstruct"):
        if not _is_array_state(state):
            raise unsafe("an array that contradicts itself", name)
    elif name.startswith("numpy.random.") and not _is_generator_state(state, 0):
        raise unsafe("a random state outside of its generator", name)
    _use(state if isinstance(state, tuple) else (state,))


def check_key(key: Any, depth: int = 0) -> None:
    """Checks that a key of a dict or an element of a set can be hashed.

    Why: a tuple in a tuple in … a million deep overflows the stack of the process.

    Raises:
        UnsafeCheckpointError: It is nested too deep, or too long.
    """
    if isinstance(key, tuple):
        if depth > _MAX_KEY_DEPTH or len(key) > _MAX_KEY_PARTS:
            raise unsafe("keys nested deeper or longer than can be hashed", "pickle")
        for part in key:
            check_key(part, depth + 1)


def _use(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, Call):
            value.is_used = True


def _all(*kinds: type) -> Callable[[tuple[Any, ...]], bool]:
    return lambda args: all(isinstance(arg, kinds) for arg in args)


def _sequence(args: tuple[Any, ...]) -> bool:
    """Nothing, or values that are there already: nothing that makes them when asked."""
    return not args or (len(args) == 1 and isinstance(args[0], (list, tuple, str, bytes)))


def _set(args: tuple[Any, ...]) -> bool:
    if args and isinstance(args[0], (list, tuple)):
        for item in args[0]:
            check_key(item)
    return _sequence(args)


def _mapping(args: tuple[Any, ...]) -> bool:
    if args and isinstance(args[0], list):
        for item in args[0]:
            if not isinstance(item, (list, tuple)) or len(item) != 2:
                return False
            check_key(item[0])
    return not args or (len(args) == 1 and isinstance(args[0], (list, dict)))


def _deque(args: tuple[Any, ...]) -> bool:
    return _sequence(args[:1]) and _all(int, type(None))(args[1:])


def _default_dict(args: tuple[Any, ...]) -> bool:
    return _all(Name, type(None))(args[:1]) and _mapping(args[1:])


def _text(args: tuple[Any, ...]) -> bool:
    return not args or (isinstance(args[0], (str, bytes)) and all(map(_is_encoding, args[1:])))


def _encoded(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[0], str) and _is_encoding(args[1])


def _is_encoding(value: Any) -> bool:
    # Careful: anything else need not be hashable.
    return isinstance(value, str) and value in _ENCODINGS


def _bytes(args: tuple[Any, ...]) -> bool:
    return _text(args) or (len(args) == 1 and isinstance(args[0], list))


def _dtype(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and isinstance(args[0], str) and _all(bool, int)(args[1:])


def _reconstruct(args: tuple[Any, ...]) -> bool:
    return args[:2] == (Name("numpy.ndarray"), (0,)) and args[2:] in ((b"b",), ("b",))


def _scalar(args: tuple[Any, ...]) -> bool:
    return 1 <= len(args) <= 2 and isinstance(args[0], Call) and args[0].name == "numpy.dtype"


_NUMBER = _all(int, float, str, bytes)
_RULES: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    "_codecs.encode": _encoded,
    "builtins.bool": _NUMBER,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.complex": _NUMBER,
    "builtins.dict": _mapping,
    "builtins.float": _NUMBER,
    "builtins.frozenset": _set,
    "builtins.int": _NUMBER,
    "builtins.list": _sequence,
    "builtins.object": lambda args: not args,
    "builtins.range": _all(int),
    "builtins.set": _set,
    "builtins.slice": _all(int, type(None)),
    "builtins.str": _text,
    "builtins.tuple": _sequence,
    "collections.Counter": _mapping,
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _default_dict,
    "collections.deque": _deque,
    "torch.Size": _sequence,
    # Of numpy, by the last part: its modules change their names from release to release.
    "_reconstruct": _reconstruct,
    "dtype": _dtype,
    "scalar": _scalar,
}


def _is_array_state(state: Any) -> bool:
    """`(version, shape, dtype, is_fortran, bytes or list of objects)`."""
    if not isinstance(state, tuple) or len(state) != 5:
        return False
    _, shape, dtype, _, values = state
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        return False
    is_dtype = isinstance(dtype, Call) and dtype.name == "numpy.dtype"
    return is_dtype and isinstance(values, (bytes, list))


def _is_generator_state(state: Any, depth: int) -> bool:
    """No place of the state lies behind the words of the generator: it is not checked there."""
    if depth > _MAX_KEY_DEPTH:
        return False
    if isinstance(state, dict):
        for name, most in (("pos", _MT19937_WORDS), ("buffer_pos", _PHILOX_WORDS)):
            if name in state and not (type(state[name]) is int and 0 <= state[name] <= most):
                return False
        return all(_is_generator_state(value, depth + 1) for value in state.values())
    if isinstance(state, (tuple, list)):
        if len(state) > 2 and state[0] == "MT19937":
            place = state[2]
            if not (type(place) is int and 0 <= place <= _MT19937_WORDS):
                return False
        return all(
            _is_generator_state(value, depth + 1)
            for value in state
            if isinstance(value, (dict, tuple, list))
        )
    return True
