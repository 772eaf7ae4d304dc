"""Checks of numbers that users give."""

from __future__ import annotations

import math

from ray_dcp.errors import InvalidRequestError


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


def check_above_0(value: object, name: str) -> float:
    """Returns a number after checking that it is finite and above 0.

    Args:
        value: As given.
        name: As for `check_whole`.

    Raises:
        InvalidRequestError: It is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(str(value)) < math.inf:
        raise InvalidRequestError(
            f"{name} must be a number above 0, but is {value!r}", key=name.rpartition(".")[2]
        )
    return float(str(value))
