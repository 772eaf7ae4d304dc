"""`Captured`: the captured state of a rank, as saves and staging use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ray_dcp.core.values import Columns


class Captured(Protocol):
    """The captured state of a rank, as in `ray_dcp.torch_adapter.capture.Capture`."""

    @property
    def columns(self) -> Columns:
        """One row for each item."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user."""
        ...

    @property
    def tied(self) -> Sequence[Sequence[str]] | None:
        """Groups of names whose tensors are one memory; None if the rank holds no tensors."""
        ...

    def source(self, row: int, /) -> memoryview:
        """Returns the C-order bytes of a fixed item."""
        ...

    def deferred(self, row: int, /) -> bytes:
        """Returns the serialised bytes of a deferred item."""
        ...
