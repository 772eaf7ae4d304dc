"""Python objects to bytes and back: `torch.save` format, loaded only under an allow-list.

The allow-list is torch's own, the user's (`torch.serialization.add_safe_globals`), and what state
dicts really hold: numpy arrays, scalars and random generators, value types of the standard library.
Loading runs nothing else from a checkpoint unless `weights_only=False` is asked for.
"""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import random
import threading
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import serialization

from ray_dcp.errors import DamagedCheckpointError, UnsafeCheckpointError, UnsupportedValueError
from ray_dcp.format.object_check import check_object
from ray_dcp.format.stream_transforms import check_plain
from ray_dcp.seam.replica_digests import bytes_digest

__all__ = [
    "dump_object",
    "is_simple",
    "load_object",
    "load_problem",
    "simple_digest",
]

_SCALARS = frozenset({type(None), bool, float, str, bytes, complex})
_CONTAINERS = frozenset({list, tuple, set, frozenset})
_LONGEST_INT = 1 << 2000
"""torch's unpickler reads integers of at most 255 bytes."""
_MAX_DEPTH = 50

_LOCK = threading.RLock()


def dump_object(value: Any, *, fqn: str) -> bytes:
    """Returns what `torch.save` makes of a value; stock DCP reads it.

    Deques and default dicts are written in a form that a safe load can read.

    Raises:
        UnsupportedValueError: It can't be pickled; the message names the FQN and its class.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=_PICKLE)
    except Exception as error:  # user classes raise what they like
        raise UnsupportedValueError(
            f"{fqn!r} holds a {_class_name(value)}, which can't be pickled "
            f"({type(error).__name__}: {error}); take it out of the state dict, or store what it "
            "is made of (tensors, numbers, strings, lists)",
            key=fqn,
        ) from error
    return buffer.getvalue()


def load_object(
    data: bytes | memoryview,
    *,
    fqn: str,
    weights_only: bool = True,
) -> Any:
    """Returns the object that `torch.save` wrote, ours or stock DCP's.

    Tensors inside go to the device that they were saved from, or to the CPU where there is no
    accelerator.

    Args:
        data: One whole `torch.save` item.
        fqn: Whose it is, for messages.
        weights_only: Refuse whatever is not on the allow-list. False runs code from the data.

    Raises:
        UnsafeCheckpointError: It asks for a class or function that is not on the allow-list, or
            for one in a way that no object needs.
        DamagedCheckpointError: It is no `torch.save` item.
    """
    try:
        check_plain(data)
        if weights_only:
            check_object(data)
    except DamagedCheckpointError as error:
        error.message = f"the object {fqn!r} of the checkpoint can't be read: {error.message}"
        error.key = fqn
        raise
    try:
        if not weights_only:
            return _torch_load(data, weights_only=False)
        with allowed():
            return _torch_load(data, weights_only=True)
    except pickle.UnpicklingError as error:
        refused = _unsafe_globals(data)
        raise UnsafeCheckpointError(
            f"the object {fqn!r} of the checkpoint is refused by a safe load: "
            f"{_reason(error, refused)}; if you trust the checkpoint, "
            f"{_way_out(refused)}load with LoadOptions(weights_only=False)",
            key=fqn,
        ) from error
    except Exception as error:  # damaged bytes raise anything
        raise DamagedCheckpointError(
            f"the object {fqn!r} of the checkpoint can't be read: expected bytes of torch.save, "
            f"found {type(error).__name__}: {error}; load an earlier checkpoint",
            key=fqn,
        ) from error


def load_problem(value: Any, data: bytes, *, fqn: str) -> str | None:
    """Returns what a safe load would have against an object, with the line that allows it.

    Args:
        value: The object.
        data: `dump_object(value)`.
        fqn: Its name.

    Returns:
        A sentence, or None if the object loads.
    """
    try:
        load_object(data, fqn=fqn)
    except UnsafeCheckpointError as error:
        refused = _unsafe_globals(data)
        why = error.message if error.__cause__ is None else _reason(error.__cause__, refused)
        return (
            f"{fqn!r} holds a {_class_name(value)} that a safe load refuses: {why}; "
            f"{_way_out(refused)}load with LoadOptions(weights_only=False)"
        )
    except DamagedCheckpointError as error:
        return (
            f"{fqn!r} holds a {_class_name(value)} that does not come back from its own pickle: "
            f"{error.__cause__}"
        )
    return None


def is_simple(value: Any, depth: int = 0) -> bool:
    """Whether a value is made of nothing but numbers, strings, None, lists, tuples, sets and dicts.

    Such a value always loads, and `repr` tells it from every other.
    """
    cls = type(value)
    if cls in _SCALARS:
        return True
    if cls is int:
        return bool(-_LONGEST_INT < value < _LONGEST_INT)
    if depth >= _MAX_DEPTH:
        return False
    if cls in _CONTAINERS:
        return set(map(type, value)) <= _SCALARS or all(is_simple(v, depth + 1) for v in value)
    if cls is dict:
        return all(is_simple(k, depth + 1) and is_simple(v, depth + 1) for k, v in value.items())
    return False


def simple_digest(value: Any) -> int:
    """Returns 64 bits that stand for a simple value, never 0, the same in every process.

    Why not of its pickle: that depends on which equal strings are one object, and on the order
    of sets, which is another in each process.
    """
    text = repr(value)
    if "set(" in text or "{" in text:
        text = _text(value)
    return bytes_digest(text.encode())


def _text(value: Any) -> str:
    cls = type(value)
    if cls in (set, frozenset):
        return f"{cls.__name__}({', '.join(sorted(map(_text, value)))})"
    if cls in _CONTAINERS:
        return f"{cls.__name__}({', '.join(map(_text, value))})"
    if cls is dict:
        return f"dict({', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())})"
    return repr(value)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _torch_load(data: bytes | memoryview, *, weights_only: bool) -> Any:
    where = None if torch.accelerator.is_available() else "cpu"
    return torch.load(io.BytesIO(data), map_location=where, weights_only=weights_only)


def _unsafe_globals(data: bytes | memoryview) -> list[str]:
    with allowed():
        try:
            return sorted(serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
        except Exception:  # noqa: BLE001 - only to word a message
            return []


def _reason(error: BaseException | None, refused: list[str]) -> str:
    if refused:
        return f"{', '.join(refused)} {'is' if len(refused) == 1 else 'are'} not on the allow-list"
    told = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return told.strip().partition("\n")[0]


def _way_out(refused: list[str]) -> str:
    if not refused:
        return "store what it is made of, or "
    return f"add torch.serialization.add_safe_globals([{', '.join(refused)}]) before loading, or "


def _reduce_deque(value: collections.deque[Any]) -> tuple[Any, ...]:
    return (collections.deque, (list(value), value.maxlen))


def _reduce_defaultdict(value: collections.defaultdict[Any, Any]) -> tuple[Any, ...]:
    return (collections.defaultdict, (value.default_factory, dict(value)))


_REDUCERS: Any = collections.ChainMap(
    {collections.deque: _reduce_deque, collections.defaultdict: _reduce_defaultdict},
    copyreg.dispatch_table,
)


class _Pickler(pickle.Pickler):
    # Why: torch's safe unpickler fills only lists and dicts piecemeal; these two go in whole.
    dispatch_table = _REDUCERS


_PICKLE = types.ModuleType("pickle")
_PICKLE.Pickler = _Pickler  # type: ignore[attr-defined]


@contextmanager
def allowed() -> Iterator[None]:
    """Adds our allow-list to torch's for a moment; what the user added stays as it was.

    The list of torch is one per process, hence the lock.
    """
    with _LOCK:
        there = set(serialization.get_safe_globals())
        with serialization.safe_globals([one for one in _allow_list() if one not in there]):
            yield


@cache
def _allow_list() -> list[Any]:
    named = [
        (entry, f"{module}.{name}")
        for modules, entries in (_numpy_functions(), _paths())
        for module in modules
        for name, entry in entries.items()
    ]
    return [*_BUILTINS, *_STDLIB, *_numpy_classes(), *named, torch.Generator]


_BUILTINS: list[Any] = [
    *((cls, f"builtins.{cls.__name__}") for cls in (
        bool, bytes, dict, float, frozenset, int, list, object, range, set, slice, str, tuple,
    )),
    (Ellipsis, "builtins.Ellipsis"),
    (NotImplemented, "builtins.NotImplemented"),
]  # fmt: skip


def _fraction(*parts: Any) -> fractions.Fraction:
    """Builds a fraction as it pickles itself; `Fraction("1e999999999")` would fill the memory."""
    if any(isinstance(part, str) and "e" in part.lower() for part in parts):
        raise pickle.UnpicklingError("a fraction in exponent notation")
    return fractions.Fraction(*parts)


_STDLIB: list[Any] = [
    argparse.Namespace, types.SimpleNamespace,
    collections.defaultdict, collections.deque,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    decimal.Decimal, (_fraction, "fractions.Fraction"), io.BytesIO, random.Random, uuid.UUID,
]  # fmt: skip


def _paths() -> tuple[tuple[str, ...], dict[str, Any]]:
    # Python 3.13 pickles paths under pathlib._local. A path of the other system becomes a pure one.
    pure = {cls.__name__: cls for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath)}
    here = type(pathlib.Path())
    other = pathlib.PurePosixPath if here is pathlib.WindowsPath else pathlib.PureWindowsPath
    posix, windows = (other, here) if here is pathlib.WindowsPath else (here, other)
    return ("pathlib", "pathlib._local"), {**pure, "PosixPath": posix, "WindowsPath": windows}


def _numpy_classes() -> list[Any]:
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    generators = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox)
    others = (np.random.SFC64, np.random.SeedSequence, np.random.Generator, np.random.RandomState)
    return [np.ndarray, np.dtype, *dtypes, *generators, *others]


def _numpy_functions() -> tuple[tuple[str, ...], dict[str, Any]]:
    rebuild, scalar = np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    state = np.random.PCG64(0).__reduce__()[0]
    return (
        "numpy.core.multiarray", "numpy._core.multiarray", "numpy.random._pickle",
        "numpy.random.bit_generator",
    ), {
        "_reconstruct": rebuild,
        "scalar": scalar,
        "__bit_generator_ctor": state,
        "__generator_ctor": np.random.default_rng(0).__reduce__()[0],
        "__randomstate_ctor": np.random.RandomState(0).__reduce__()[0],
        "__pyx_unpickle_SeedSequence": np.random.SeedSequence(0).__reduce__()[0],
    }  # fmt: skip
