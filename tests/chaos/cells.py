"""The cells of the chaos matrix as values: what is hit, when, with what, and how soon that is told.

Pure: no Ray, no clock, no disk. The entries are in `matrix`, what happens in `scenes`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from ray_dcp.store.storage import TEMP_PREFIX

SIGNALS = ("SIGKILL", "SIGSTOP")
PARTICIPANTS = ("rank", "coordinator", "driver", "stager", "node")
PHASES = ("planning", "staging", "writing", "committing", "loading")


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
    details: dict[str, Any] = field(default_factory=dict, hash=False)
    """For the scene."""

    @property
    def name(self) -> str:
        words = f"{self.blow} {self.participant} {self.phase}"
        return f"{words} ({self.variant})" if self.variant else words

    @property
    def signal(self) -> int:
        return int(signal.Signals[self.blow])


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


def chosen(cells: Iterable[Cell], *patterns: str) -> list[Cell]:
    """Returns cells by name, those of one group together, else in their order.

    Args:
        cells: Of which to choose.
        *patterns: With `*`, or any part of a name; without any all cells.
    """
    wanted = [p if any(sign in p for sign in "*?[") else f"*{p}*" for p in patterns or "*"]
    found = [cell for cell in cells if any(fnmatch(cell.name, one) for one in wanted)]
    groups = list(dict.fromkeys(cell.group for cell in found))
    return sorted(found, key=lambda cell: groups.index(cell.group))


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
