"""Checkpoints of Ray Train runs: `checkpointer` for the workers, `SaveBeforeResize` for the run.

Names are imported on first use, because `SaveBeforeResize` needs `ray[train]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.integrations.checkpointer import Checkpointer as Checkpointer
    from ray_dcp.integrations.checkpointer import checkpointer as checkpointer
    from ray_dcp.integrations.save_requests import SaveBeforeResize as SaveBeforeResize

_HOMES = {
    "Checkpointer": "checkpointer",
    "SaveBeforeResize": "save_requests",
    "checkpointer": "checkpointer",
}

__all__ = ["Checkpointer", "SaveBeforeResize", "checkpointer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ray_dcp.train' has no attribute {name!r}")
    home = importlib.import_module(f"ray_dcp.integrations.{_HOMES[name]}")
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
