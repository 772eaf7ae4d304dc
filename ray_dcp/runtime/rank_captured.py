"""What a rank hands in for a save."""

from __future__ import annotations

from typing import Protocol

from ray_dcp.plan.values import Columns

__all__ = ["Captured"]


class Captured(Protocol):
    """What a rank holds; `ray_dcp.seam.capture.Capture` is one."""

    @property
    def columns(self) -> Columns:
        """One row an item."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know."""
        ...

    def source(self, row: int, /) -> memoryview:
        """Returns the C-order bytes of a fixed item."""
        ...

    def deferred(self, row: int, /) -> bytes:
        """Returns the serialised bytes of a deferred item."""
        ...
