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

`SharedUnit` is the state of what one rank has read for the others that need it. It holds no bytes,
only the handle with which they fetch them. Messages may arrive twice and in any order, because an
actor with concurrent calls does not start them in the order in which they were sent:

    open --Give--> there --every other rank has sent Take or Skip--> gone
      |                                                                ^
      +--Decline-------------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Mapping
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
from ray_dcp.core import bounds
from ray_dcp.errors import DeadlineError
from ray_dcp.planning.reads import ReadNeeds, ReadShares, may_pay

MOST_SENT_BYTES = 64 << 20
"""Most bytes of chunk tables that are sent, to all ranks together. *Why* send: a rank that reads
the table itself pays a request. *Why* a limit: with many ranks, most need a small part of it."""


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
                within_s = min(bounds.SHARE_PLAN_S, options.plan_timeout_s, options.read_timeout_s)
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


@dataclass(frozen=True, eq=False)
class Give:
    """Reader → coordinator: it has read a unit. Reply: as soon as all others have it.

    Until then the unit counts in what the reader may have in the object store.
    """

    key: OpKey
    unit: int
    takers: int
    """Number of other ranks that need the unit."""
    handle: Any


@dataclass(frozen=True)
class Decline:
    """Reader → coordinator: it will not read these units for others; each reads for itself."""

    key: OpKey
    units: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """Rank → coordinator: it needs a unit.

    Reply: the unit's handle; empty if it was declined; None if it did not come within `wait_s`.
    """

    key: OpKey
    rank: int
    unit: int
    wait_s: float


@dataclass(frozen=True)
class Skip:
    """Rank → coordinator: it does not need these units of others any more."""

    key: OpKey
    rank: int
    units: tuple[int, ...]


ReadMessage = Give | Decline | Take | Skip


@dataclass
class SharedUnit:
    """What one rank has read for others, on its way to them.

    Examples:
        Two ranks need a unit besides its reader; one of them takes it before the other skips it.

        >>> unit = SharedUnit()
        >>> unit.give("here", takers=2)
        >>> unit.take(1), unit.state
        ('here', 'there')
        >>> unit.skip(2)
        >>> unit.state, unit.is_taken, unit.handle
        ('gone', True, None)
    """

    state: Literal["open", "there", "gone"] = "open"
    handle: Any = None
    takers: int | None = None
    taken_by: set[int] = field(default_factory=set)

    @property
    def is_taken(self) -> bool:
        """Whether every rank that needs the unit has taken or skipped it."""
        return self.takers is not None and len(self.taken_by) >= self.takers

    def give(self, handle: Any, takers: int) -> None:
        """Records that the unit was read; see `Give`."""
        if self.state == "open":
            self.state, self.handle, self.takers = "there", handle, takers
            self._end_if_taken()

    def withdraw(self) -> None:
        """Records that the unit is handed to nobody, or to nobody else."""
        self.state, self.handle = "gone", None

    def take(self, rank: int) -> Any:
        """Returns the handle for a rank that needs the unit; None if it is gone."""
        handle = self.handle
        self.skip(rank)
        return handle

    def skip(self, rank: int) -> None:
        """Records that a rank needs the unit no longer."""
        self.taken_by.add(rank)
        self._end_if_taken()

    def _end_if_taken(self) -> None:
        # Why not kept for a `Take` that arrives twice: a handle keeps the bytes alive.
        if self.state == "there" and self.is_taken:
            self.withdraw()
