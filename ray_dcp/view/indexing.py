"""From a numpy-style basic index to the box of a tensor that has to be read.

Integers, slices of any step, `...`; no masks and no index arrays, which would read scattered
elements. Pure arithmetic.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from ray_dcp.errors import InvalidRequestError

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """The smallest box around what an index selects, and what is left to do with it."""

    offset: tuple[int, ...]
    """Where the box starts, one entry a dimension."""
    size: tuple[int, ...]
    """Lengths of the box."""
    rest: tuple[int | slice, ...]
    """Index to apply to the array of the box: steps, and 0 where an integer drops a dimension."""


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Returns the box that an index needs of a tensor.

    Args:
        index: What stands between the brackets.
        shape: Global shape of the tensor.

    Raises:
        InvalidRequestError: Too many indices, one out of bounds, or of another kind.

    Example:
        >>> select((slice(2, 8, 3), 1), (10, 4))
        Selection(offset=(2, 1), size=(4, 1), rest=(slice(None, None, 3), 0))
    """
    parts = _complete(index if isinstance(index, tuple) else (index,), shape)
    chosen = [_one(*pair, axis) for axis, pair in enumerate(zip(parts, shape, strict=True))]
    return Selection(
        tuple(start for start, _, _ in chosen),
        tuple(length for _, length, _ in chosen),
        tuple(rest for _, _, rest in chosen),
    )


def _complete(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any]:
    """Returns one entry a dimension, `...` spelled out."""
    where = [i for i, part in enumerate(index) if part is Ellipsis]
    given = len(index) - len(where)
    if len(where) > 1 or given > len(shape):
        raise InvalidRequestError(
            f"expected at most {len(shape)} indices and one '...' for a tensor of shape "
            f"{shape}, but found {given} indices and {len(where)} times '...'"
        )
    at = where[0] if where else given
    missing = [slice(None)] * (len(shape) - given)
    return [*index[:at], *missing, *index[at + len(where) :]]


def _one(part: Any, length: int, axis: int) -> tuple[int, int, int | slice]:
    """Returns start, length and remaining index of one dimension."""
    if isinstance(part, slice):
        try:
            steps = range(*part.indices(length))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"dimension {axis} can't be sliced by {part}: {error}"
            ) from None
        if not steps:
            return 0, 0, slice(None)
        low, high = min(steps[0], steps[-1]), max(steps[0], steps[-1])
        step = slice(None) if steps.step == 1 else slice(None, None, steps.step)
        return low, high - low + 1, step
    at = _integer(part, axis)
    if not -length <= at < length:
        raise InvalidRequestError(
            f"index {at} is out of bounds for dimension {axis}, which has length {length}"
        )
    return at % length, 1, 0


def _integer(part: SupportsIndex, axis: int) -> int:
    if not isinstance(part, bool):
        try:
            return operator.index(part)
        except TypeError:
            pass
    raise InvalidRequestError(
        f"expected an integer, a slice or '...' for dimension {axis}, but found "
        f"{type(part).__name__}; read a slice and index the array that it gives"
    )
