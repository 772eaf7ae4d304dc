"""`CheckpointManager`, with the policies that decide when it saves and what it keeps.

The names are imported on first use: commands take leases, for which they need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.manager.collective_actions import RestoreReport, SavedStep
    from ray_dcp.manager.manager import CheckpointManager
    from ray_dcp.manager.policies import (
        AllOf,
        AnyOf,
        AtSteps,
        BestN,
        EveryMinutes,
        EveryOptimal,
        EverySteps,
        KeepAllOf,
        KeepAnyOf,
        KeepEveryHours,
        KeepEverySteps,
        KeepNot,
        LatestN,
        Not,
        OnPreemption,
        RetentionPolicy,
        SaveFacts,
        SavePolicy,
        StepFacts,
    )
    from ray_dcp.manager.settings import Item
    from ray_dcp.manager.step_export import StepExport

__all__ = [
    "AllOf",
    "AnyOf",
    "AtSteps",
    "BestN",
    "CheckpointManager",
    "EveryMinutes",
    "EveryOptimal",
    "EverySteps",
    "Item",
    "KeepAllOf",
    "KeepAnyOf",
    "KeepEveryHours",
    "KeepEverySteps",
    "KeepNot",
    "LatestN",
    "Not",
    "OnPreemption",
    "RestoreReport",
    "RetentionPolicy",
    "SaveFacts",
    "SavePolicy",
    "SavedStep",
    "StepExport",
    "StepFacts",
]

_HOMES = {
    "CheckpointManager": "manager",
    "Item": "settings",
    "RestoreReport": "collective_actions",
    "SavedStep": "collective_actions",
    "StepExport": "step_export",
}
"""Module of each name; the others are policies."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ray_dcp.manager' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'policies')}"), name)
    globals()[name] = value
    return value
