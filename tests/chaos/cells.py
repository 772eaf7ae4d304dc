"""The cells of the chaos matrix as values: what is hit, when, with what, and how soon that is told.

Pure: no Ray, no clock, no disk. The entries are in `matrix`, what happens in `scenes`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import product
from typing import Any

SIGNALS = ("SIGKILL", "SIGSTOP")
PARTICIPANTS = ("rank", "coordinator", "driver", "stager", "node")
PHASES = ("planning", "staging", "writing", "committing", "loading")

TEMP_PREFIX = ".tmp-"


@dataclass(frozen=True)
class Trap:
    """A place in the code of a process at which the blow falls: exact, unlike any timer."""

    on: str
    """In whose process it is set: `rank`, `coordinator` or `stager`."""
    where: str
    """`module:attribute` of a function, as its caller looks it up."""
    call: int = 1
    """At which call, from 1."""
    about: str = ""
    """Only calls count with an argument of this type, or with this in a string argument."""
    after: bool = False
    """Not before the call is made, but after it has returned."""


@dataclass(frozen=True)
class Cell:
    """One thing that happens to a running save or load, and what must come of it."""

    blow: str
    """`SIGKILL`, `SIGSTOP`, or what else goes wrong."""
    participant: str
    phase: str
    scene: Callable[[Any, Cell], Result]
    """Plays it in an arena."""
    ceiling_s: float
    """How soon after the blow every rank that lives must have its outcome, in seconds."""
    trap: Trap | None = None
    variant: str = ""
    """Tells cells of the same blow, participant and phase apart."""
    group: str = "head"
    """Which ranks play it; cells of the same group share them."""
    in_ci: bool = False
    details: dict[str, Any] = field(default_factory=dict, hash=False)
    """For the scene."""

    @property
    def name(self) -> str:
        words = f"{self.blow} {self.participant} {self.phase}"
        return f"{words} ({self.variant})" if self.variant else words

    @property
    def place(self) -> tuple[str, str, str]:
        return self.blow, self.participant, self.phase

    @property
    def signal(self) -> int:
        return int(signal.Signals[self.blow])


@dataclass(frozen=True)
class Closed:
    """A cell that can't be played yet, or has no meaning, and why."""

    blow: str
    participant: str
    phase: str
    reason: str

    @property
    def name(self) -> str:
        return f"{self.blow} {self.participant} {self.phase}"

    @property
    def place(self) -> tuple[str, str, str]:
        return self.blow, self.participant, self.phase


@dataclass(frozen=True)
class Result:
    """What came of a cell."""

    hit: bool
    """The blow was seen to fall in its phase."""
    seconds: float | None
    """From the blow to the last rank that was told its outcome; None when nobody was."""
    outcome: str
    """What the ranks were told, in a word."""
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.hit and not self.problems


class Matrix:
    """All cells: `register_cell` opens one, `close_cells` says why some are not played."""

    def __init__(self) -> None:
        self._cells: dict[str, Cell] = {}
        self._closed: dict[tuple[str, str, str], Closed] = {}

    def register_cell(self, cell: Cell) -> None:
        """Adds a cell; one that was closed is open from now on.

        Raises:
            ValueError: There is a cell of this name.
        """
        if cell.name in self._cells:
            raise ValueError(f"there are two cells {cell.name!r}; give one a variant")
        self._closed.pop(cell.place, None)
        self._cells[cell.name] = cell

    def close_cells(
        self, blows: Sequence[str], participants: Sequence[str], phases: Sequence[str], reason: str
    ) -> None:
        """Says why cells are not played; those that are registered stay open."""
        open_places = {cell.place for cell in self._cells.values()}
        for place in product(blows, participants, phases):
            if place not in open_places:
                self._closed[place] = Closed(*place, reason)

    def cells(self, *patterns: str, ci: bool = False) -> list[Cell]:
        """Returns cells by name, those of one group together, in the order of registration.

        Args:
            *patterns: With `*`, or any part of a name; without any all cells.
            ci: Only those that are played each time.
        """
        wanted = [p if any(sign in p for sign in "*?[") else f"*{p}*" for p in patterns or "*"]
        chosen = [
            cell
            for cell in self._cells.values()
            if any(fnmatch(cell.name, one) for one in wanted) and (cell.in_ci or not ci)
        ]
        groups = list(dict.fromkeys(cell.group for cell in chosen))
        return sorted(chosen, key=lambda cell: groups.index(cell.group))

    def closed(self) -> Iterator[Closed]:
        yield from self._closed.values()

    def missing(self) -> list[tuple[str, str, str]]:
        """Returns the places of the matrix that are neither open nor closed."""
        known = {cell.place for cell in self._cells.values()} | self._closed.keys()
        return [place for place in product(SIGNALS, PARTICIPANTS, PHASES) if place not in known]


def is_in_phase(phase: str, before: set[str], at_blow: set[str]) -> bool:
    """Returns whether the files that lay there when the blow fell are those of a phase.

    Args:
        phase: One of `PHASES`.
        before: Names when the operation began.
        at_blow: Names when the blow fell.
    """
    new = at_blow - before
    parts = {name for name in new if "__" in name}
    begun = {name for name in parts if name.startswith(TEMP_PREFIX)}
    deciding = {name for name in new if "chunks." in name or "manifest-" in name}
    match phase:
        case "planning" | "loading":
            return not new
        case "staging":
            return not deciding
        case "writing":
            return bool(begun) and not deciding
        case "committing":
            return bool(parts) and not begun
    raise ValueError(f"expected one of {PHASES}, found {phase!r}")
