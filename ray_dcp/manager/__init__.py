"""`CheckpointManager`, with the policies that decide when it saves and what it keeps.

The names are imported on first use: commands take leases, for which they need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_dcp.manager.collective_actions import RestoreReport, SavedStep
    from ray_dcp.manager.manager import CheckpointManager
    from ray_dcp.manager.retention import (
        BestN,
        KeepAllOf,
        KeepAnyOf,
        KeepEveryHours,
        KeepEverySteps,
        KeepNot,
        LatestN,
        RetentionPolicy,
        StepFacts,
        Trust,
        TrustRule,
    )
    from ray_dcp.manager.save_policies import (
        AllOf,
        AnyOf,
        AtSteps,
        BeforeEnd,
        EveryMinutes,
        EveryOptimal,
        EverySteps,
        Not,
        OnPreemption,
        SaveFacts,
        SavePolicy,
    )
    from ray_dcp.manager.settings import Item
    from ray_dcp.manager.step_export import StepExport

__all__ = [
    "AllOf",
    "AnyOf",
    "AtSteps",
    "BeforeEnd",
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
    "Trust",
    "TrustRule",
]

_HOMES = {
    "BestN": "retention",
    "CheckpointManager": "manager",
    "Item": "settings",
    "KeepAllOf": "retention",
    "KeepAnyOf": "retention",
    "KeepEveryHours": "retention",
    "KeepEverySteps": "retention",
    "KeepNot": "retention",
    "LatestN": "retention",
    "RestoreReport": "collective_actions",
    "RetentionPolicy": "retention",
    "SavedStep": "collective_actions",
    "StepExport": "step_export",
    "StepFacts": "retention",
    "Trust": "retention",
    "TrustRule": "retention",
}
"""Module of each name; the others are policies that decide when to save."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ray_dcp.manager' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'save_policies')}"), name)
    globals()[name] = value
    return value
