"""The load machine: all ranks read the same checkpoint, once every rank has planned its reads.

| phase | waits for | then |
|---|---|---|
| joining | `LoadJoin` of every rank | find the checkpoint |
| opening | `LoadGo`, from the storage | `LoadGo` to every rank |
| planning | `LoadReady` of every rank: its reads are planned, no target changed | share reads |
| sharing | `ReadShares`; skipped if no two ranks would share any | `LoadProceed` |
| reading | `LoadDone` of every rank | `LoadOutcome`: done |

An error in any phase is reported to every rank. Up to `planning`, no target has changed by then.
`LoadReady` has the names of the checkpoint that a rank does not load, `LoadProceed` those that no
rank loads.

`SharedReads` is the state of the shared reads of a load: which units have been read, which ranks
still need them, and which ranks to notify. It holds no bytes, only the handles with which other
ranks fetch them. Messages may arrive twice and in any order, because an actor with concurrent calls
does not start them in the order in which they were sent:

    open --Offer--> there --every rank has sent Use or Leave--> free
      |
      +--Decline, or Leave of the reader--> gone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ray_dcp.commit_protocol.commands import (
    Failed,
    ReadCheckpoint,
    Result,
    ShareReads,
)
from ray_dcp.commit_protocol.error_aggregation import located
from ray_dcp.commit_protocol.messages import (
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    ReadCounts,
    Request,
    Untaken,
)
from ray_dcp.commit_protocol.operation import Commands, Operation
from ray_dcp.errors import DeadlineError
from ray_dcp.planning.reads import ReadNeeds, ReadShares, may_pay

MOST_SENT_BYTES = 64 << 20
"""Most bytes of chunk tables that are sent, to all ranks together. *Why* send: a rank that reads
the table itself pays a request. *Why* a limit: with many ranks, most need a small part of it."""

SHARE_S = 60.0
"""Deadline for planning shared reads, in seconds; after that every rank reads for itself."""


class LoadMachine(Operation):
    """One load of all ranks of a session.

    Args:
        first: The first join; it must also be passed to `receive`.
    """

    ranks_do: Mapping[str, tuple[str, str]] = {
        "joining": ("join the load", "plan_timeout_s"),
        "planning": ("plan its reads", "plan_timeout_s"),
        "reading": ("read its share", "read_timeout_s"),
    }
    last_barrier = "reading"

    def __init__(self, first: LoadJoin) -> None:
        super().__init__(first)
        self._target = first.target
        self._options = first.options
        self._done: list[ReadCounts] = []
        self._needs: dict[int, ReadNeeds] = {}
        self._untaken: dict[int, Untaken] = {}

    def _on_request(self, request: Request) -> Commands:
        match self.phase, request:
            case "joining", LoadJoin():
                self._admit(request)
            case "planning", LoadReady() if 0 <= request.rank < self.world_size:
                self._record_request(request, request.error)
                if request.needs is not None:
                    self._needs[request.rank] = request.needs
                if request.untaken is not None:
                    self._untaken[request.rank] = request.untaken
            case "reading", LoadDone() if 0 <= request.rank < self.world_size:
                self._record_request(request, request.error)
                self._done.append(request.counts)
            case _:
                raise self._unexpected(f"{type(request).__name__} of rank {request.rank}")
        return self._check_barrier()

    def _on_result(self, result: Result) -> Commands:
        match self.phase, result:
            case "opening", LoadGo():
                is_sent = len(result.table) * self.world_size <= MOST_SENT_BYTES
                go = result if is_sent else replace(result, table=b"")
                self._call("planning")
                return (self._arm(self._options.plan_timeout_s), *self._reply_alike(go))
            case "opening", Failed():
                return self._fail(located(result.error, self._target.url))
            case "sharing", ReadShares():
                return self._proceed(result if len(result) else None)
            case "sharing", Failed():
                # Why not fail: shared reads only reduce the load on the storage.
                return self._proceed(None)
        raise self._unexpected(f"result {type(result).__name__}")

    def _on_expired(self) -> Commands:
        if self.phase == "sharing":
            return self._proceed(None)
        return self._fail(
            DeadlineError(
                f"Expected the storage to show the checkpoint within "
                f"{self._options.plan_timeout_s:g} s, but it was slower. Raise "
                f"LoadOptions.plan_timeout_s, or look at the storage",
                checkpoint_id=self.url,
            )
        )

    def _all_arrived(self) -> Commands:
        match self.phase:
            case "joining":
                task = ReadCheckpoint(self._target)
                return self._step("opening", task, self._options.plan_timeout_s)
            case "planning":
                # Why only if every rank sent it: a rank that loads every name sends none.
                if len(self._untaken) == self.world_size:
                    untaken = Untaken.of_all(list(self._untaken.values()))
                    if untaken is not None:
                        return self._proceed(None, untaken)
                if not may_pay(self._needs.values()):
                    return self._proceed(None)
                sharing = ShareReads(dict(self._needs), self.world_size)
                options = self._options
                within_s = min(SHARE_S, options.plan_timeout_s, options.read_timeout_s)
                return self._step("sharing", sharing, within_s)
        outcome = LoadOutcome(ReadCounts.total(self._done))
        return (*self._conclude(outcome), *self._end("done"))

    def _proceed(self, shares: ReadShares | None, untaken: Untaken | None = None) -> Commands:
        self._needs.clear()
        self._untaken.clear()
        self._pending = None
        self._call("reading")

        def proceed(rank: int) -> LoadProceed:
            part = None if shares is None else shares.of_rank(rank)
            return LoadProceed(part if part is not None and len(part) else None)

        alike = LoadProceed(untaken=untaken)
        answers = self._reply_alike(alike) if shares is None else self._reply_each(proceed)
        return (self._arm(self._options.read_timeout_s), *answers)


@dataclass(frozen=True)
class Enter:
    """A rank joins the shared reads, with the units that it reads or receives."""

    key: OpKey
    rank: int
    units: tuple[int, ...]
    readers: tuple[int, ...]
    """For each unit, the rank that reads it."""


@dataclass(frozen=True, eq=False)
class Offer:
    """A rank has read a unit."""

    key: OpKey
    rank: int
    unit: int
    ranks: int
    """Number of ranks that need the unit, including the reader."""
    handle: Any


@dataclass(frozen=True)
class Decline:
    """A rank will not read its units for others; each of them has to read for itself."""

    key: OpKey
    rank: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """A rank no longer needs these units."""

    key: OpKey
    rank: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Leave:
    """A rank needs no more units, and offers no more."""

    key: OpKey
    rank: int
    offered: tuple[int, ...] = ()
    """The units that the rank has offered. *Why* repeated: this may arrive before the offers."""


@dataclass(frozen=True)
class Listen:
    """A rank asks for updates."""

    key: OpKey
    rank: int
    seen: int
    """Number of updates that the rank has received."""
    wait_s: float
    """How long to wait for an update, in seconds."""


ReadMessage = Enter | Offer | Decline | Use | Leave | Listen


@dataclass(frozen=True, eq=False)
class UnitUpdate:
    """The state of a unit, as sent to one rank.

    `there`: it was read and can be fetched with its handle. `gone`: it will not be read for others.
    `free`: no rank needs it any more.
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


class SharedReads:
    """The units of the shared reads of one load.

    Examples:
        >>> key, reads = OpKey("run", 3), SharedReads()
        >>> for rank in range(2):
        ...     reads.take(Enter(key, rank, (7,), (0,)))
        >>> reads.take(Offer(key, 0, 7, ranks=2, handle="here"))
        >>> [(new.what, new.unit, new.handle) for new in reads.updates(1, seen=0)]
        [('there', 7, 'here')]
        >>> reads.take(Use(key, 1, (7,)))
        >>> reads.take(Leave(key, 0, offered=(7,)))
        >>> [new.what for new in reads.updates(0, seen=0)]
        ['free']
    """

    def __init__(self) -> None:
        self._units: dict[int, _Unit] = {}
        self._of_rank: dict[int, set[int]] = {}
        self._updates: dict[int, list[int]] = {}
        self._left: dict[int, frozenset[int]] = {}

    @property
    def num_there(self) -> int:
        """Number of units whose bytes are currently held for other ranks."""
        return sum(unit.state == "there" for unit in self._units.values())

    def take(self, message: ReadMessage) -> None:
        """Applies a rank's message; `Listen` changes nothing."""
        match message:
            case Enter():
                self._enter(message)
            case Offer():
                self._record_offer(message)
            case Decline():
                self._decline(message.rank, message.units)
            case Use():
                self._record_use(message.rank, message.units)
            case Leave():
                self._leave(message)

    def updates(self, rank: int, seen: int) -> Sequence[UnitUpdate]:
        """Returns the updates that a rank has not received yet.

        Args:
            rank: The rank.
            seen: Number of updates that it has received.
        """
        return [self._new(number) for number in self._updates.get(rank, [])[seen:]]

    def _new(self, number: int) -> UnitUpdate:
        # Why not stored with the update: a handle keeps the bytes alive.
        unit = self._units[number]
        return UnitUpdate(unit.state if unit.state != "open" else "gone", number, unit.handle)

    def _enter(self, message: Enter) -> None:
        mine = self._of_rank.setdefault(message.rank, set())
        for number, reader in zip(message.units, message.readers, strict=True):
            if number in mine:
                continue
            mine.add(number)
            unit = self._units.setdefault(number, _Unit())
            unit.reader = reader
            if message.rank != reader:
                unit.wanted_by.add(message.rank)
                if unit.state != "open":
                    self._notify([message.rank], number)
        if message.rank in self._left:
            self._end(message.rank)

    def _record_offer(self, message: Offer) -> None:
        unit = self._units.setdefault(message.unit, _Unit())
        if unit.state != "open" or unit.reader not in (None, message.rank):
            return
        unit.reader = message.rank
        unit.state, unit.handle, unit.ranks = "there", message.handle, message.ranks
        self._notify(unit.wanted_by - unit.used_by, message.unit)
        self._free_if_used(message.unit, unit)

    def _decline(self, rank: int, units: Iterable[int]) -> None:
        for number in units:
            unit = self._units.setdefault(number, _Unit())
            if unit.state == "open" and unit.reader in (None, rank):
                unit.reader, unit.state = rank, "gone"
                self._notify(unit.wanted_by - unit.used_by, number)

    def _record_use(self, rank: int, units: Iterable[int]) -> None:
        for number in units:
            unit = self._units.setdefault(number, _Unit())
            unit.used_by.add(rank)
            self._free_if_used(number, unit)

    def _leave(self, message: Leave) -> None:
        self._left[message.rank] = frozenset(message.offered)
        self._end(message.rank)

    def _end(self, rank: int) -> None:
        mine, offered = self._of_rank.get(rank, set()), self._left[rank]
        own = [n for n in sorted(mine - offered) if self._units[n].reader == rank]
        self._decline(rank, own)
        self._record_use(rank, sorted(mine))

    def _free_if_used(self, number: int, unit: _Unit) -> None:
        if unit.state == "there" and unit.ranks is not None and len(unit.used_by) >= unit.ranks:
            unit.state, unit.handle = "free", None
            self._notify([] if unit.reader is None else [unit.reader], number)

    def _notify(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            self._updates.setdefault(rank, []).append(number)
