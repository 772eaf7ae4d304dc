"""What must hold of checkpoints, told by what the ranks were told: a dict that is right by itself.

The model knows no slots but those that ranks were told, no records and no files. A value is the
number of the save that brought it; each is saved once, so that one that comes back is seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    InternalError,
)
from ray_dcp.protocol.messages import OpKey, SaveOutcome


@dataclass(eq=False)
class Change:
    """Something that may change what stands at a place: a save, or a delete."""

    value: int | None
    """What stands when it succeeds; None for a delete."""
    started: int
    """The step at which it began."""
    key: OpKey | None = None
    overwrite: bool = True
    reports: dict[int, Any] = field(default_factory=dict)
    """What each rank was told that ended."""
    planned: int | None = None
    """The step at which its ranks were told to write: later commits are in its way."""
    stood: bool = False
    """Its value was seen."""
    settled: bool = False
    """Nothing is left that could still commit it."""

    @property
    def status(self) -> str:
        """`committed`, `failed` or `open`, as the ranks were told."""
        kinds = {kind_of(report) for report in self.reports.values()}
        return next((kind for kind in ("committed", "failed") if kind in kinds), "open")

    @property
    def slot(self) -> int:
        """The highest slot that was told; 0 when none was."""
        told = (r for r in self.reports.values() if isinstance(r, SaveOutcome))
        return max((outcome.slot for outcome in told), default=0)

    @property
    def attempts(self) -> set[str]:
        """Attempts of which the ranks were told that they are committed."""
        return {r.attempt for r in self.reports.values() if isinstance(r, SaveOutcome)}


def kind_of(report: Any) -> str:
    """Returns what one rank was told: `committed`, `failed`, `unknown` or `late`."""
    if not isinstance(report, CheckpointError):
        return "committed"
    if isinstance(report, CommitUnknownError):
        return "unknown"
    if isinstance(report, CheckpointExistsError) and "learned it late" in report.message:
        return "late"  # it was committed, and is replaced or deleted by now
    return "failed"


class Place:
    """One checkpoint id."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stands: int | None = None
        """The value that was seen to stand last."""
        self.changes: list[Change] = []
        self.over: set[int] = set()
        """Values that stood and were replaced, or never will stand."""
        self.were_told: dict[str, str] = {}
        """What `outcome` said of an attempt."""
        self.stood: set[int] = set()
        """Values that were seen, or whose ranks were told that they are committed."""
        self.slots: dict[int | None, int] = {}
        """Where the values were committed, as their ranks were told."""
        self.stock_saw = "None"
        """What stock DCP saw last."""
        self.unquiet = False
        """Something died or went wrong since the last quiet change."""

    def begin(self, change: Change) -> Change:
        self.changes.append(change)
        return change

    def allowed(self, moved: list[Change], resumed: list[Change]) -> set[int | None]:
        """Returns what may stand after those changes moved that could, and nothing else.

        Args:
            moved: All of them.
            resumed: Those that began earlier: what they did may be seen already, and replaced.
        """
        committed = [change for change in moved if change.status == "committed"]
        for change in committed:
            self.slots.setdefault(change.value, change.slot)
        # What was committed earlier and is told only now may be replaced by what stands already.
        standing = self.slots.get(self.stands, 0)
        top = max((change.slot for change in committed), default=0)
        last = {c.value for c in committed if c.value is None or c.slot == top}
        last -= self.over
        if committed and all(change in resumed for change in committed):
            if None in last or standing == 0:
                last |= {self.stands}
            elif top < standing:
                last = set()
        still_open = {change.value for change in moved if change.status == "open"}
        return (last or {self.stands}) | (still_open - self.over)

    def check_told(self, change: Change) -> None:
        """Checks what the ranks of one change were told against each other and the past."""
        errors = [e for e in change.reports.values() if isinstance(e, CheckpointError)]
        for error in errors:
            assert not isinstance(error, InternalError), error
        kinds = {kind_of(report) for report in change.reports.values()}
        assert not {"committed", "failed"} <= kinds, f"ranks were told both: {change.reports}"
        assert not (change.stood and "failed" in kinds), f"it stood: {change.reports}"
        assert len(change.attempts) <= 1, change.attempts

    def see(self, found: int | None, moved: list[Change], resumed: list[Change]) -> None:
        """Checks what was seen to stand, and holds it against all that comes later."""
        allowed = self.allowed(moved, resumed)
        assert found in allowed, (
            f"expected one of {allowed} at {self.url}, found {found}; "
            f"{[(c.value, c.status, c.reports) for c in moved]}"
        )
        if found != self.stands and self.stands is not None:
            self.over.add(self.stands)
        self.stands = found
        told = [change.value for change in moved if change.status == "committed"]
        self.stood |= {value for value in (found, *told) if value is not None}
        for change in self.changes:
            if change.value == found and found is not None:
                change.stood = True
            elif change.status != "open" or change.settled:
                self._close(change)
        self.changes = [c for c in self.changes if not c.settled or c.stood]

    def _close(self, change: Change) -> None:
        if change.value is not None:
            self.over.add(change.value)

    def overtaken(self, by: Change) -> None:
        """Closes the changes that were planned before a quiet one began that is committed."""
        for change in self.changes:
            if change is not by and change.planned is not None and change.planned < by.started:
                self._close(change)

    def check_outcome(self, attempt: str, told: str, change: Change | None) -> None:
        """Checks what `outcome` says of an attempt."""
        before = self.were_told.get(attempt)
        assert {before, told} != {"committed", "aborted"}, (attempt, before, told)
        if change is not None and attempt in change.attempts:
            assert told == "committed", change.reports
        if change is not None and change.status == "failed":
            assert told != "committed", change.reports
        if told != "open":
            self.were_told[attempt] = told


def tally(changes: list[Change], count: Counter[str]) -> None:
    """Counts what the ranks were told."""
    for change in changes:
        count[f"{'save' if change.value is not None else 'delete'} {change.status}"] += 1
        kinds = {kind_of(report) for report in change.reports.values()}
        count["told unknown"] += "unknown" in kinds
        count["told late"] += "late" in kinds
        if any(isinstance(r, CheckpointExistsError) for r in change.reports.values()):
            count["told exists"] += 1
