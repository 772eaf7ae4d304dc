"""Messages of a rank to a stager about staged bytes, as frozen values.

Unpickling them needs neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ray_dcp.commit_protocol.messages import OpKey, PartsWritten, Phases, Target
from ray_dcp.core.values import RankPlan
from ray_dcp.options import SaveOptions
from ray_dcp.store.storage import PublishedFile


@dataclass(frozen=True)
class StageKey:
    """One rank's share of one attempt."""

    save: OpKey
    rank: int
    attempt: str
    epoch: int = 1
    """Epoch of the coordinator that planned the save."""

    @classmethod
    def of(cls, report: PartsWritten) -> StageKey:
        """Returns the share that a report is of."""
        return cls(report.key, report.rank, report.attempt, report.epoch)


@dataclass(frozen=True)
class StagedWindow:
    """Names a window of staged bytes."""

    share: StageKey
    number: int


@dataclass(frozen=True)
class Holder:
    """A save whose windows have room that another save waits for."""

    session: str
    url: str
    num_bytes: int
    quiet_s: float
    """How long ago its bytes last reached the storage, in seconds."""

    def __str__(self) -> str:
        return (
            f"{self.num_bytes} bytes of the save to {self.url} of session {self.session}, which "
            f"last moved {self.quiet_s:.0f} s ago"
        )


@dataclass(frozen=True)
class Grant:
    """The number of windows of a job that have room; more may follow."""

    num_windows: int
    missing_bytes: int = 0
    """By how much the budget of the node is smaller than what its ranks stage of this save, in
    bytes; told once."""
    holders: tuple[Holder, ...] = ()
    """Who has the room, where none came in time."""


@dataclass(frozen=True)
class Unknown:
    """Answer of a stager that does not know the job, or is another one than was meant."""

    what: Literal["job", "stager"]


@dataclass(frozen=True)
class StageOrder:
    """Rank → stager: announces bytes that follow in windows, and that the stager writes."""

    key: StageKey
    process: str
    """Names the rank's process: what dies."""
    plan: RankPlan
    """What to write."""
    deferred_bytes: tuple[tuple[int, ...], ...]
    """For each file the lengths of its deferred items."""
    target: Target
    options: SaveOptions
    window_bytes: int
    """Length of a window."""
    published: Mapping[bytes, tuple[PublishedFile, ...]] = field(default_factory=dict)
    """See `ray_dcp.io.writer.write_pieces`."""
    phases: Phases = ()
    """Those of the rank so far, for the trace; the last one goes on until the stager has all."""


@dataclass(frozen=True)
class InFlight:
    """A save that a stager works for, and whose outcome it does not know."""

    target: Target
    attempt: str
    is_written: bool
    """The stager has written its part: only the commit is awaited."""
    file: str | None
    """Key of a file that the stager has written; None if its part has none, or is not written."""


@dataclass(frozen=True)
class StageProgress:
    """Progress of a stager with one share."""

    key: StageKey
    num_bytes: int
    """Bytes to write, without frames."""
    written_bytes: int
    is_sealed: bool
    """The stager holds all bytes: the rank may go on."""
    reports: tuple[PartsWritten, ...]
    """One of each file so far, whether or not it could be delivered."""
