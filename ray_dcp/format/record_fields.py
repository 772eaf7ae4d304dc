"""Reads single fields of a record in JSON, and says what is wrong with one.

Which record has which fields is in `manifest`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.keys import check_attempt

__all__ = [
    "attempt",
    "damaged",
    "flag",
    "hex_digits",
    "integer",
    "integers",
    "items",
    "seconds",
    "short",
    "text",
]

T = TypeVar("T")
Reader = Callable[[Any, str], T]

_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def integer(value: Any, name: str) -> int:
    """Returns a number of 0 or more that fits 64 bits."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise damaged(f"a number of 0 or more as {name}", short(value))
    return value


def text(value: Any, name: str) -> str:
    """Returns a text."""
    if not isinstance(value, str):
        raise damaged(f"a text as {name}", short(value))
    if not value.isascii() and _SURROGATE.search(value):
        # Why: JSON can spell half of a surrogate pair, which no terminal and no log takes.
        raise damaged(f"a text in Unicode as {name}", ascii(value)[:200])
    return value


def flag(value: Any, name: str) -> bool:
    """Returns a truth value."""
    if not isinstance(value, bool):
        raise damaged(f"true or false as {name}", short(value))
    return value


def seconds(value: Any, name: str) -> float:
    """Returns a finite number of seconds."""
    if type(value) is not float or not math.isfinite(value):
        raise damaged(f"seconds as {name}", short(value))
    return value


def hex_digits(value: Any, name: str) -> str:
    """Returns the hex digits of 1 to 64 bytes."""
    if _HEX.fullmatch(text(value, name)) is None:
        raise damaged(f"hex digits as {name}", short(value))
    return str(value)


def attempt(value: Any, name: str) -> str:
    """Returns the id of an attempt."""
    return check_attempt(text(value, name))


def items(value: Any, name: str, read: Reader[T]) -> tuple[T, ...]:
    """Returns a list, each item read by itself."""
    if not isinstance(value, (list, tuple)):
        raise damaged(f"a list as {name}", short(value))
    return tuple(read(item, name) for item in value)


def integers(value: Any, name: str) -> tuple[int, ...]:
    """Returns a list of numbers of 0 or more that fit 64 bits."""
    usual = isinstance(value, list) and set(map(type, value)) == {int}
    # Why: looked at one by one they take ten times as long, and a manifest may have 10,000.
    if usual and min(value) >= 0 and max(value) < 1 << 63:
        return tuple(value)
    return items(value, name, integer)


def short(value: Any) -> str:
    """Returns a value as it may stand in a message."""
    return repr(value)[:200]


def damaged(expected: str, found: str) -> DamagedCheckpointError:
    """Returns the error of a record that is not what was written."""
    return DamagedCheckpointError(
        f"Expected {expected} in the record, found {found}; it is damaged, load an earlier step"
    )
