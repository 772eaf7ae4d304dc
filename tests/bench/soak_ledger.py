"""What a soak was told of its saves, and what may therefore load: pure, without clock or disk.

Steps rise, each is saved once, and one save of a place follows the other; a place is a checkpoint
id. Only who was told nothing, or "unknown", may find either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

NOTHING = "nothing"
"""No checkpoint stands."""
TORN = "torn"
"""It loads, but values of several steps."""
DAMAGED = "damaged"
"""A checkpoint stands, but does not load."""

Seen = int | str
"""The step that loads, or one of the texts above."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with what was seen."""

    kind: str
    """`torn`, `lost` or `appeared`."""
    text: str


@dataclass
class _Place:
    told: dict[int, str] = field(default_factory=dict)
    """By step, in the order of the saves: `committed`, `failed`, `unknown` or `running`."""
    last: int = 0
    """The last step that is committed for sure; 0 when a delete, or nothing, came last."""
    open: set[int] = field(default_factory=set)
    """Steps that may stand instead; 0 for a delete of which nothing was told."""


class Ledger:
    """Takes what ranks were told, and judges what is seen."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._watched: list[tuple[str, set[int]]] = []
        self.told: Counter[str] = Counter()
        """How many saves were reported `committed`, `failed`, `unknown`."""

    def begin(self, place: str, step: int) -> None:
        """Takes that a save of a step begins; until `end` it may or may not stand."""
        entry = self._places.setdefault(place, _Place())
        entry.told[step] = "running"
        entry.open.add(step)
        self._tell(place)

    def end(self, place: str, step: int, reports: list[str]) -> str:
        """Takes what the ranks that lived were told; returns what counts.

        Args:
            place: Where.
            step: Which save.
            reports: `committed`, `failed` or `unknown` of each rank; empty when all died.
        """
        entry = self._places[place]
        told = next((kind for kind in ("committed", "failed") if kind in reports), "unknown")
        self.told[told] += 1
        entry.told[step] = told
        if told == "committed":
            # What was open before is overtaken: it can't be committed any more.
            entry.last, entry.open = step, set()
        elif told == "failed":
            entry.open.discard(step)
        self._tell(place)
        return told

    def disagree(self, reports: list[str]) -> bool:
        """Returns whether some ranks were told that it is committed, and some that it failed."""
        return {"committed", "failed"} <= set(reports)

    def begin_delete(self, place: str) -> None:
        """Takes that a delete begins."""
        self._places.setdefault(place, _Place()).open.add(0)
        self._tell(place)

    def end_delete(self, place: str, done: bool) -> None:
        """Takes how it ended; after an error it may have happened."""
        if done:
            entry = self._places[place]
            entry.last, entry.open = 0, set()
        self._tell(place)

    def watch(self, place: str) -> set[int]:
        """Returns what may stand, as a set that grows with all that may stand until `unwatch`."""
        watched = self.possible(place)
        self._watched.append((place, watched))
        return watched

    def unwatch(self, watched: set[int]) -> None:
        """Lets a set that `watch` returned be."""
        self._watched = [pair for pair in self._watched if pair[1] is not watched]

    def _tell(self, place: str) -> None:
        for watched_place, watched in self._watched:
            if watched_place == place:
                watched |= self.possible(place)

    def possible(self, place: str) -> set[int]:
        """Returns the steps that may stand at a place; 0 for none."""
        entry = self._places.get(place, _Place())
        return {entry.last} | entry.open

    def places(self) -> list[str]:
        """Returns the places that were ever saved to."""
        return list(self._places)

    def judge(self, place: str, seen: Seen, possible: set[int] | None = None) -> Verdict | None:
        """Returns what is wrong with what was seen, None when nothing is.

        Args:
            place: Where.
            seen: The step that loads, or why none does.
            possible: What might have stood while it was read; what may stand now by default.
        """
        quiet = possible is None
        possible = self.possible(place) if possible is None else possible
        entry = self._places.get(place, _Place())
        expected = f"{place}: expected step {' or '.join(map(str, sorted(possible)))}"
        if seen == TORN:
            return Verdict("torn", f"{place}: a mixture of steps loads")
        if seen == DAMAGED:
            return Verdict("lost", f"{expected}, but what stands does not load")
        step = 0 if seen == NOTHING else int(seen)
        if step in possible:
            if quiet:
                self._pin(entry, step)
            return None
        if entry.told.get(step) == "failed":
            return Verdict("appeared", f"{expected}, but {step} loads, which was told to fail")
        return Verdict("lost", f"{expected}, but {seen} loads")

    def judge_older(self, place: str, seen: Seen) -> Verdict | None:
        """Returns what is wrong with what stock DCP sees, which may be an earlier checkpoint."""
        if seen == TORN:
            return Verdict("torn", f"{place}: a mixture of steps loads")
        told = self._places.get(place, _Place()).told.get(seen) if isinstance(seen, int) else None
        if told == "failed":
            return Verdict("appeared", f"{place}: {seen} loads, which was told to fail")
        if told is None:
            return Verdict("lost", f"{place}: {seen} loads, which was never saved")
        return None

    def _pin(self, entry: _Place, step: int) -> None:
        """Remembers which of the open ones was decided: it can't be gone later."""
        if step != entry.last:
            entry.open = {later for later in entry.open if later > step}
            entry.last = step
