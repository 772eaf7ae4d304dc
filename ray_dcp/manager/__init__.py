"""`CheckpointManager`, with the policies that decide when it saves and what it keeps."""

from __future__ import annotations

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
