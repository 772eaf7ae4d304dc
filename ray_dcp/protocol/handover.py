"""`Handover`: which units of a load have been read, who still needs them, and whom to tell.

A pure state machine, kept by whoever all ranks of a load can ask. It knows no bytes, only handles:
what another rank finds them by. Everything may come twice, and in any order: an actor that does
several things at a time does not begin them in the order in which they were asked of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_dcp.protocol.messages import OpKey

__all__ = ["Decline", "Enter", "Handover", "Leave", "Listen", "News", "Offer", "Use", "Word"]


@dataclass(frozen=True)
class Enter:
    """I take part; these units are mine to read or to get."""

    key: OpKey
    rank: int
    units: tuple[int, ...]
    readers: tuple[int, ...]
    """Of each unit, the rank that reads it."""


@dataclass(frozen=True, eq=False)
class Offer:
    """I have read this unit."""

    key: OpKey
    rank: int
    unit: int
    ranks: int
    """How many ranks need it, the reader among them."""
    handle: Any


@dataclass(frozen=True)
class Decline:
    """I will not read these units; let everybody read for himself."""

    key: OpKey
    rank: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """I need these units no more."""

    key: OpKey
    rank: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Leave:
    """I need nothing more, and offer nothing more."""

    key: OpKey
    rank: int
    offered: tuple[int, ...] = ()
    """What I have offered. Why said again: this may be heard before the offers are."""


@dataclass(frozen=True)
class Listen:
    """What is new for me?"""

    key: OpKey
    rank: int
    seen: int
    """How many news I have had."""
    wait_s: float
    """How long to wait for some, in seconds."""


Word = Enter | Offer | Decline | Use | Leave | Listen


@dataclass(frozen=True, eq=False)
class News:
    """What one rank should know of a unit.

    `there`: it was read, and can be had by its handle. `gone`: it will not be read for others.
    `free`: nobody needs it any more.
    """

    what: Literal["there", "gone", "free"]
    unit: int
    handle: Any = None


@dataclass
class _Unit:
    reader: int | None = None
    ranks: int | None = None
    state: Literal["open", "there", "gone", "free"] = "open"
    handle: Any = None
    wanted_by: set[int] = field(default_factory=set)
    used_by: set[int] = field(default_factory=set)


class Handover:
    """The units of one load.

    Example:
        >>> key, handover = OpKey("run", 3), Handover()
        >>> for rank in range(2):
        ...     handover.take(Enter(key, rank, (7,), (0,)))
        >>> handover.take(Offer(key, 0, 7, ranks=2, handle="here"))
        >>> [(new.what, new.unit, new.handle) for new in handover.news(1, seen=0)]
        [('there', 7, 'here')]
        >>> handover.take(Use(key, 1, (7,)))
        >>> handover.take(Leave(key, 0, offered=(7,)))
        >>> [new.what for new in handover.news(0, seen=0)]
        ['free']
    """

    def __init__(self) -> None:
        self._units: dict[int, _Unit] = {}
        self._of_rank: dict[int, set[int]] = {}
        self._news: dict[int, list[int]] = {}
        self._left: dict[int, frozenset[int]] = {}

    @property
    def num_there(self) -> int:
        """How many units are held for somebody now."""
        return sum(unit.state == "there" for unit in self._units.values())

    def take(self, word: Word) -> None:
        """Takes what a rank says; `Listen` says nothing."""
        match word:
            case Enter():
                self._enter(word)
            case Offer():
                self._offer(word)
            case Decline():
                self._decline(word.rank, word.units)
            case Use():
                self._use(word.rank, word.units)
            case Leave():
                self._leave(word)

    def news(self, rank: int, seen: int) -> Sequence[News]:
        """Returns what a rank does not know yet.

        Args:
            rank: Who.
            seen: How many news it has had.
        """
        return [self._new(number) for number in self._news.get(rank, [])[seen:]]

    def _new(self, number: int) -> News:
        # Why not kept with the news: a handle keeps bytes alive.
        unit = self._units[number]
        return News(unit.state if unit.state != "open" else "gone", number, unit.handle)

    def _enter(self, word: Enter) -> None:
        mine = self._of_rank.setdefault(word.rank, set())
        for number, reader in zip(word.units, word.readers, strict=True):
            if number in mine:
                continue
            mine.add(number)
            unit = self._units.setdefault(number, _Unit())
            unit.reader = reader
            if word.rank != reader:
                unit.wanted_by.add(word.rank)
                if unit.state != "open":
                    self._tell([word.rank], number)
        if word.rank in self._left:
            self._end(word.rank)

    def _offer(self, word: Offer) -> None:
        unit = self._units.setdefault(word.unit, _Unit())
        if unit.state != "open" or unit.reader not in (None, word.rank):
            return
        unit.reader = word.rank
        unit.state, unit.handle, unit.ranks = "there", word.handle, word.ranks
        self._tell(unit.wanted_by - unit.used_by, word.unit)
        self._free_if_used(word.unit, unit)

    def _decline(self, rank: int, units: Iterable[int]) -> None:
        for number in units:
            unit = self._units.setdefault(number, _Unit())
            if unit.state == "open" and unit.reader in (None, rank):
                unit.reader, unit.state = rank, "gone"
                self._tell(unit.wanted_by - unit.used_by, number)

    def _use(self, rank: int, units: Iterable[int]) -> None:
        for number in units:
            unit = self._units.setdefault(number, _Unit())
            unit.used_by.add(rank)
            self._free_if_used(number, unit)

    def _leave(self, word: Leave) -> None:
        self._left[word.rank] = frozenset(word.offered)
        self._end(word.rank)

    def _end(self, rank: int) -> None:
        mine, offered = self._of_rank.get(rank, set()), self._left[rank]
        own = [n for n in sorted(mine - offered) if self._units[n].reader == rank]
        self._decline(rank, own)
        self._use(rank, sorted(mine))

    def _free_if_used(self, number: int, unit: _Unit) -> None:
        if unit.state == "there" and unit.ranks is not None and len(unit.used_by) >= unit.ranks:
            unit.state, unit.handle = "free", None
            self._tell([] if unit.reader is None else [unit.reader], number)

    def _tell(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            self._news.setdefault(rank, []).append(number)
