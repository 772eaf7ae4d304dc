"""`Job`: one rank's share of one save, while a node holds or writes it."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ray_dcp.commit_protocol.messages import PartsWritten, Phases
from ray_dcp.errors import CheckpointError
from ray_dcp.io.writer import part_key
from ray_dcp.stage.orders import (
    Grant,
    InFlight,
    StageOrder,
    StageProgress,
    Unknown,
)
from ray_dcp.stage.tier_files import TierFile, kept_file
from ray_dcp.stage.window_bytes import WindowBytes
from ray_dcp.stage.windows import StagingLayout

Event = Literal[
    "all_here", "rank_left", "writers_started", "writers_ended", "failed", "cancelled", "committed",
    "released",
]  # fmt: skip
"""What happens to a share: its last window came; its rank ended or gave up, and hands over nothing
more; its writers began, or ended; it can't be written, which is reported; nobody needs it any more,
so nothing is reported; its rank knows that the save was committed, or knows any other outcome."""


@dataclass(frozen=True)
class JobState:
    """The state of one rank's share of a save: a state and an event give the next one.

    Three parts move on their own: the rank that hands over, the writers, and what becomes of the
    share. Each only ever goes forward, so that events may come twice and in any order; one that has
    no meaning in a state changes nothing.

    Examples:
        >>> state = JobState()
        >>> for event in ("writers_started", "all_here", "writers_ended"):
        ...     state = state.after(event)
        >>> state.is_at_rest, state.after("all_here") == state
        (True, True)
    """

    rank: Literal["filling", "handed_over", "left"] = "filling"
    """`"handed_over"`: all windows are here, so that the rank may go on, or die; `"left"`: it
    hands over nothing more, and something is missing."""
    writers: Literal["idle", "working", "ended"] = "idle"
    fate: Literal["open", "failed", "cancelled", "committed", "released"] = "open"

    def after(self, event: Event) -> JobState:
        """Returns the state after an event."""
        match event:
            case "all_here" if self.rank == "filling":
                return replace(self, rank="handed_over")
            case "rank_left" if self.rank == "filling":
                return replace(self, rank="left")
            case "writers_started" if self.writers == "idle":
                return replace(self, writers="working")
            case "writers_ended":
                return replace(self, writers="ended")
            case "failed" if self.fate == "open" and self.writers != "ended":
                return replace(self, fate="failed")
            case "committed" if self.fate == "open":
                return replace(self, fate="committed")
            case "cancelled" if self.fate in ("open", "failed"):
                # Why: nobody reads what a writer that begins now would report.
                writers = "ended" if self.writers == "idle" else self.writers
                return replace(self, fate="cancelled", writers=writers)
            case "released":
                return replace(self, fate="released")
        return self

    @property
    def is_at_rest(self) -> bool:
        """Whether nobody fills or reads its windows any more: their memory may go."""
        return self.rank != "filling" and self.writers == "ended"

    @property
    def is_needed(self) -> bool:
        """Whether it has bytes for a save that its rank may not have any more."""
        held = self.rank == "handed_over" and self.writers != "ended"
        return held and self.fate in ("open", "committed")

    @property
    def is_reported(self) -> bool:
        """Whether the save may still need the reports of its files."""
        return self.fate in ("open", "failed")

    @property
    def is_of_use(self) -> bool:
        """Whether its save may be committed, or is."""
        return self.fate in ("open", "committed")

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody asks for it again, once it is at rest: its outcome is known."""
        return self.fate in ("committed", "released")


@dataclass(eq=False)
class Job:
    """What a `WriteQueue` knows of one `StageKey`. Guarded by its lock."""

    order: StageOrder
    layout: StagingLayout
    reporter: Any
    """Who gets the reports; the queue only passes it on."""
    changed: threading.Condition
    hold_s: float
    """How long a writer that holds windows waits for room for the next one, in seconds: longer than
    it takes until the memory of windows that were let go is free; 0 once it was in vain."""
    state: JobState = field(default_factory=JobState)
    num_granted: int = 0
    """How many of its windows have had room."""
    windows: dict[int, WindowBytes] = field(default_factory=dict)
    """Bytes of the windows that are here, or were."""
    reports: dict[int, PartsWritten] = field(default_factory=dict)
    """By position in `plan.files`."""
    written_bytes: int = 0
    moved_s: float = field(default_factory=lambda: time.monotonic())
    """When bytes last reached the storage, or the job began; by the monotonic clock."""
    begun_s: float = field(default_factory=lambda: time.monotonic())
    """When the rank began to hand its bytes over; by the monotonic clock."""
    error: CheckpointError | None = None
    """Why it ends early."""
    failed_s: float = 0.0
    """When that happened; by the monotonic clock."""
    wants_more: list[tuple[int, Future[Grant | Unknown]]] = field(default_factory=list)
    wants_seal: list[Future[bool | Unknown]] = field(default_factory=list)

    def to(self, event: Event) -> None:
        """Changes to the state after an event."""
        self.state = self.state.after(event)

    @property
    def files(self) -> range:
        """Positions in `plan.files` of those to write."""
        return range(len(self.order.plan.files))

    @property
    def is_complete(self) -> bool:
        """Whether all its windows have arrived."""
        return len(self.windows) == self.layout.num_windows

    def phases(self) -> Phases:
        """Returns the phases of the rank, whose bytes are all here now."""
        spent = dict(self.order.phases)
        spent["stage"] = spent.get("stage", 0.0) + time.monotonic() - self.begun_s
        return tuple(spent.items())

    def in_flight(self) -> InFlight:
        """Returns what a load needs to know of this job while its outcome is open."""
        attempt, is_written = self.order.key.attempt, self.state.writers == "ended"
        written = self.order.plan.files[:1] if is_written else ()
        file = next((part_key(plan, attempt) for plan in written), None)
        return InFlight(self.order.target, attempt, is_written, file)

    @property
    def is_written(self) -> bool:
        """Whether there is a receipt for each of its files."""
        told = self.reports
        return len(told) == len(self.files) and all(one.files for one in told.values())

    @property
    def run(self) -> str:
        """The folder of the checkpoints that it belongs to."""
        return self.order.target.url.rstrip("/").rpartition("/")[0]

    def kept_files(self) -> tuple[TierFile, ...]:
        """Returns where the bytes of each file lie, by the keys of the attempt."""
        key = self.order.key
        return tuple(
            kept_file(part_key(self.order.plan.files[file], key.attempt), self.layout, file, key)
            for file in self.files
        )

    def failure(self) -> CheckpointError | None:
        """Returns a copy of the error that ends it early, to be raised in another thread."""
        return None if self.error is None else copy.copy(self.error)

    def progress(self) -> StageProgress:
        """Returns the progress of the job."""
        return StageProgress(
            self.order.key,
            self.layout.total_bytes,
            self.written_bytes,
            self.state.rank == "handed_over",
            tuple(self.reports.values()),
        )
