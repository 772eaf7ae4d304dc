"""Python objects to bytes and back: `torch.save` format, loaded only under an allow-list.

The allow-list is what state dicts really hold (tensors, numpy arrays, scalars and random
generators, values of the standard library), and what `torch.serialization.add_safe_globals` added.
Loading calls nothing else that a checkpoint names unless `weights_only=False` is asked for.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from ray_dcp.errors import DamagedCheckpointError, UnsafeCheckpointError, UnsupportedValueError
from ray_dcp.format.stream_transforms import check_plain
from ray_dcp.seam.replica_digests import bytes_digest
from ray_dcp.seam.torch_values import read_torch_save

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


def dump_object(value: Any, *, fqn: str) -> bytes:
    """Returns what `torch.save` makes of a value; stock DCP reads it.

    Raises:
        UnsupportedValueError: It can't be pickled; the message names the FQN and its class.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
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
            return read_torch_save(data)
        where = None if torch.accelerator.is_available() else "cpu"
        return torch.load(io.BytesIO(data), map_location=where, weights_only=False)
    except DamagedCheckpointError as error:
        is_refused = isinstance(error, UnsafeCheckpointError)
        told = "is refused by a safe load" if is_refused else "can't be read"
        error.message = f"the object {fqn!r} of the checkpoint {told}: {error.message}"
        error.key = fqn
        raise
    except Exception as error:  # classes of the user raise what they like
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
        read_torch_save(data)
    except UnsafeCheckpointError as error:
        return f"{fqn!r} holds a {_class_name(value)} that a safe load refuses: {error.message}"
    except Exception as error:  # noqa: BLE001 - classes of the user raise what they like
        return (
            f"{fqn!r} holds a {_class_name(value)} that does not come back from its own pickle: "
            f"{error}"
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
