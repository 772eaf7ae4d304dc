"""Checks of numbers that users give."""

from __future__ import annotations

import math
from typing import TypeGuard

from ray_dcp.errors import InvalidRequestError

LONGEST_S = 10 * 365 * 24 * 3600
"""The longest that anything may be waited for, in seconds."""


def check_whole(value: object, name: str, least: int = 0) -> int:
    """Returns a number after checking that it is a whole one.

    Args:
        value: As given.
        name: Of the argument; what follows its last dot is the error's key.
        least: That it may be.

    Raises:
        InvalidRequestError: It is none, or too small.

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
        value: As given.
        name: As for `check_whole`. One that ends with `_s` is of seconds, ten years at most:
            Python's waits raise OverflowError beyond some hundreds of years.
        or_0: It may be 0 as well.

    Raises:
        InvalidRequestError: It is not.
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
    """Returns how long to wait, in seconds, or None for ever, after checking that it is a number.

    Args:
        value: As given; what is below 0 counts as 0, and what is above ten years as that.
        name: As for `check_whole`.

    Raises:
        InvalidRequestError: It is neither a number nor None.
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
