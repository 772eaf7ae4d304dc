"""Checks of numbers that users pass."""

from __future__ import annotations

import math
from typing import TypeGuard

from ray_dcp.errors import InvalidRequestError

LONGEST_S = 10 * 365 * 24 * 3600
"""The longest wait that is accepted, in seconds."""


def check_whole(value: object, name: str, least: int = 0) -> int:
    """Returns a number after checking that it is an integer.

    Args:
        value: The argument that the user passed.
        name: Name of the argument; the part after its last dot is the error's key.
        least: Smallest value accepted.

    Raises:
        InvalidRequestError: The value is no integer, or too small.

    Examples:
        >>> check_whole(3, "EverySteps.interval", 1)
        3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(
            f"{name} must be a whole number from {least}, but is {value!r}",
            key=name.rpartition(".")[2],
        )
    return value


def check_above_0(value: object, name: str, *, or_0: bool = False) -> float:
    """Returns a number after checking that it is finite and above 0.

    Args:
        value: The argument that the user passed.
        name: See `check_whole`. A name that ends with `_s` means seconds, at most ten years. Why:
            Python's waits raise OverflowError beyond some hundreds of years.
        or_0: Accept 0 as well.

    Raises:
        InvalidRequestError: The value is not such a number.
    """
    if or_0 and _is_number(value) and value == 0:
        return 0.0
    most = LONGEST_S if name.endswith("_s") else math.inf
    if not _is_number(value) or not 0 < value <= most or value == math.inf:
        bound = f" and at most {LONGEST_S}, ten years" if name.endswith("_s") else ""
        raise InvalidRequestError(
            f"{name} must be {'0 or ' if or_0 else ''}a number above 0{bound}, but is {value!r}",
            key=name.rpartition(".")[2],
        )
    return float(value)


def check_wait(value: object, name: str) -> float | None:
    """Returns a timeout in seconds, or None for no timeout, after checking it.

    Args:
        value: The argument that the user passed. Values below 0 become 0, values above ten years
            become ten years.
        name: See `check_whole`.

    Raises:
        InvalidRequestError: The value is neither a number nor None.
    """
    if value is None:
        return None
    if not _is_number(value) or math.isnan(value):
        raise InvalidRequestError(
            f"{name} must be a number of seconds, or None to wait for ever, but is {value!r}",
            key=name.rpartition(".")[2],
        )
    return min(max(0.0, value), LONGEST_S)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
