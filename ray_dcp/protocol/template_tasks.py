"""Tasks about plans that are kept beside the checkpoints, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dcp.plan.values import GlobalPlan
from ray_dcp.protocol.messages import Target

__all__ = ["KeepTemplate", "ReadTemplate", "TemplateRead"]


@dataclass(frozen=True)
class ReadTemplate:
    """Look for the plan of ranks with these fingerprints. Result: `TemplateRead`.

    Never `Failed` for what is wrong with a template.
    """

    place: Target
    """Folder of templates."""
    key: bytes
    """`ray_dcp.plan.fingerprint.plan_key` of the ranks."""
    world_size: int
    nodes: tuple[int, ...] = ()
    """Number of each rank's node, where those of a node may share files."""


@dataclass(frozen=True, eq=False)
class TemplateRead:
    """What was found."""

    plan: GlobalPlan | None
    """None where there is none, or none that may be used."""


@dataclass(frozen=True, eq=False)
class KeepTemplate:
    """Note that a plan was used, and write it where it is new. Result: `Finished`."""

    place: Target
    key: bytes
    plan: GlobalPlan
    is_there: bool
    """It was read from there."""
