"""Targets of another shape than what is saved: what both have is loaded, the rest is left."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

from ray_dcp.errors import UnsupportedValueError
from ray_dcp.options import LoadOptions, dims_of

__all__ = ["Resizing"]


class Resizing:
    """What `LoadOptions.resize` allows, and what is left to fill.

    Args:
        options: `resize` counts.

    Attributes:
        done: `(FQN, stored shape, target shape)` of what differs and may.
    """

    def __init__(self, options: LoadOptions) -> None:
        self.done: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._rules = {pattern: dims_of(dims) for pattern, dims in options.resize.items()}

    def allows(self, fqn: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether two shapes may differ; notes it."""
        ndim = len(stored)
        if not self._rules or ndim != len(shape):
            return False
        free = {
            dim % ndim
            for pattern, dims in self._rules.items()
            if fnmatchcase(fqn, pattern)
            for dim in dims
            if -ndim <= dim < ndim
        }
        if any(
            a != b and dim not in free for dim, (a, b) in enumerate(zip(stored, shape, strict=True))
        ):
            return False
        self.done.append((fqn, stored, shape))
        return True

    def refuse_new(self, fqn: str) -> None:
        """Raises where a target that was just allowed to differ is to be made anew.

        Raises:
            UnsupportedValueError: So it is.
        """
        if self.done and self.done[-1][0] == fqn:
            raise UnsupportedValueError(
                f"{fqn!r} is of another shape than is saved, and has no memory (meta device) or "
                f"another dtype: give it memory of the saved dtype before loading"
            )

    def part(
        self,
        tensor: torch.Tensor,
        offset: tuple[int, ...],
        size: tuple[int, ...],
        stored: tuple[int, ...],
    ) -> torch.Tensor | None:
        """Returns the part of a target's box that is stored, None when nothing of it is.

        Args:
            tensor: Holds the box.
            offset: Where the box starts in the whole target.
            size: Its lengths.
            stored: The shape that is saved, of as many dimensions.
        """
        if 0 in size:
            return None
        if len(stored) != len(size):
            return tensor  # A mismatch, which is told with all others.
        end = tuple(max(0, min(n, s - o)) for o, n, s in zip(offset, size, stored, strict=True))
        if end == tuple(size):
            return tensor
        part = tensor.detach()
        for dim, length in enumerate(end):
            if length < size[dim]:
                part = part.narrow(dim, 0, length)
        return None if 0 in end else part
