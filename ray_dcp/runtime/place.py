"""How a rank reaches the staging memory of its node, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dcp.stage.values import ArenaAddress

__all__ = ["Place"]


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
