"""Checkpoints of Ray Train runs: `checkpointer` for the workers, `SaveBeforeResize` for the run.

Names are imported on first use, because `SaveBeforeResize` needs `ray[train]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.integrations.train.callback import SaveBeforeResize as SaveBeforeResize
    from ray_dcp.integrations.train.checkpointer import Checkpointer as Checkpointer
    from ray_dcp.integrations.train.checkpointer import checkpointer as checkpointer

_HOMES = {
    "Checkpointer": "ray_dcp.integrations.train.checkpointer",
    "SaveBeforeResize": "ray_dcp.integrations.train.callback",
    "checkpointer": "ray_dcp.integrations.train.checkpointer",
}

__all__ = ["Checkpointer", "SaveBeforeResize", "checkpointer"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_dcp.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
