"""`JobState`: the state machine of one rank's share of a save, while a node holds and writes it.

Pure: a state and an event give the next state. Three parts move on their own: the rank that hands
over, the writers, and what becomes of the share. Each only ever goes forward, so that events may
come twice and in any order; one that has no meaning in a state changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Event = Literal[
    "all_here", "rank_left", "writers_started", "writers_ended", "failed", "cancelled", "committed",
    "released",
]  # fmt: skip
"""What happens to a share: its last window came; its rank ended or gave up, and hands over nothing
more; its writers began, or ended; it can't be written, which is reported; nobody needs it any more,
so nothing is reported; its rank knows that the save was committed, or knows any other outcome."""


@dataclass(frozen=True)
class JobState:
    """The state of one share.

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
