"""The tasks of a load, and their results; `commands` says what tasks are, and names them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_dcp.plan.read_once import ReadNeeds, ReadShares
from ray_dcp.protocol.messages import Target

__all__ = ["CheckpointRead", "ReadCheckpoint", "ReadsShared", "ShareReads"]


@dataclass(frozen=True)
class ReadCheckpoint:
    """Find the checkpoint that a load is to read. Result: `CheckpointRead`.

    Where its `.metadata` is missing or older, it is published again, if that works.
    """

    target: Target


@dataclass(frozen=True)
class CheckpointRead:
    """Which checkpoint to load; see `ray_dcp.protocol.messages.LoadGo`."""

    kind: str
    slot: int
    record: bytes
    table: bytes = b""


@dataclass(frozen=True)
class ShareReads:
    """Decide which rank reads what several need. Pure, but long. Result: `ReadsShared`."""

    needs: Mapping[int, ReadNeeds]
    """Of the ranks that take part."""
    world_size: int


@dataclass(frozen=True, eq=False)
class ReadsShared:
    """Who reads what for whom."""

    shares: ReadShares
