"""How a rank reaches the staging memory of its node, and what comes as objects instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.stage.values import ArenaAddress

__all__ = ["Place", "as_window"]


@dataclass(frozen=True)
class Place:
    """How a node's staging memory is reached."""

    stager: str
    """Name of the stager, different for each process that ever was one."""
    pid: int
    arena: ArenaAddress | None
    """None where there is no shared memory."""
    store_window_bytes: int
    """Longest window that may come as an object of the store."""


def as_window(window: int, array: Any) -> memoryview:
    """Returns the bytes of a window that came as an object.

    Args:
        window: Which.
        array: What came.

    Raises:
        InternalError: It is no uint8 array of one dimension.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise InternalError(
            f"Expected window {window} to be a uint8 array of one dimension, but found "
            f"{type(array).__name__}. Please report this"
        )
    return memoryview(array)  # type: ignore[arg-type]
