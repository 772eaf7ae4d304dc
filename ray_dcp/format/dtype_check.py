"""Whether the dtype that a pickle describes is one that numpy itself would have pickled.

numpy believes what the pickle of a dtype says of its length, of its fields' places and of
whether its elements are pointers to objects. A lie makes it read and write memory that is not
the array's. So the dtype is made anew by numpy's own checked constructor, and compared.
Source: numpy/_core/src/multiarray/descriptor.c `arraydescr_setstate`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

__all__ = ["check_dtype"]

_CODE = re.compile(r"[|<>=]?[biufcmMOSUV][0-9]{0,9}")
_MAX_DEPTH = 8
_MAX_FIELDS = 1 << 12
_ALIGNED = 0x80
"""numpy's `NPY_ALIGNED_STRUCT`."""
_VERSIONS = (3, 4)


def check_dtype(call: Any) -> bool:
    """Tells whether a dtype is as numpy makes it.

    Args:
        call: Stands for `numpy.dtype(*args)` that was given a `state`; of the same kind are the
            dtypes in it.
    """
    try:
        return _made(call, 0) is not None
    except (TypeError, ValueError, OverflowError, KeyError):
        return False


def _made(call: Any, depth: int) -> Any:
    """Returns the dtype, None when the pickle says something else than numpy would."""
    code = call.args[0]
    if call.name != "numpy.dtype" or depth > _MAX_DEPTH or not _CODE.fullmatch(code):
        return None
    call.is_used = depth > 0
    if call.state is None:
        return np.dtype(code)
    if not isinstance(call.state, tuple) or not 8 <= len(call.state) <= 9:
        return None
    version, order, part, names, fields, length, alignment, flags = call.state[:8]
    if (names is None) != (fields is None) or (part is not None and names is not None):
        return None
    made: Any
    if part is not None:
        made = _array_of(part, depth)
    elif names is not None:
        made = _record_of(names, fields, length, flags, depth)
    elif len(call.state) == 9:
        made = _moment_of(code, call.state[8])
    else:
        made = np.dtype(code)
    if made is None or version not in _VERSIONS or not isinstance(order, str):
        return None
    made = made.newbyteorder(order) if order in ("<", ">") else made
    args, state = made.__reduce__()[1:]
    same = (code.lstrip("|<>="), order, length, alignment, flags)
    return made if same == (args[0], state[1], *state[5:8]) else None


def _array_of(part: Any, depth: int) -> Any:
    call, shape = part
    made = _made(call, depth + 1)
    return None if made is None else np.dtype((made, shape))


def _record_of(names: Any, fields: Any, length: Any, flags: Any, depth: int) -> Any:
    is_told = isinstance(names, tuple) and isinstance(fields, dict) and isinstance(flags, int)
    # Careful: what is no text need not be hashable.
    if not is_told or len(names) > _MAX_FIELDS or not all(isinstance(n, str) for n in names):
        return None
    if set(names) != fields.keys():
        return None
    formats, offsets = [], []
    for name in names:
        call, offset = fields[name]
        made = _made(call, depth + 1)
        if made is None:
            return None
        formats.append(made)
        offsets.append(offset)
    described: Any = {"names": list(names), "formats": formats, "offsets": offsets}
    return np.dtype(described | {"itemsize": length}, align=bool(flags & _ALIGNED))


def _moment_of(code: str, metadata: Any) -> Any:
    """Returns a date or a length of time; its unit is in `({}, (unit, number, 1, 1))`."""
    more, (unit, number, *rest) = metadata
    text = unit.decode() if isinstance(unit, bytes) else unit
    if more or rest != [1, 1] or code[:1] not in ("m", "M"):
        return None
    return np.dtype(f"{code}[{int(number)}{text}]" if text != "generic" else code)
