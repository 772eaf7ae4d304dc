"""The staged save machine: asynchronous saves, written by stagers while the ranks train on.

It differs from `SaveMachine` in the phase "writing" alone. A rank's part is done when each of its
files has a receipt, whoever wrote it:

| event | then |
|---|---|
| `PartsHeld` | from now on the rank may die |
| `PartsWritten` | receipts; the last one of the last rank ends the phase |
| `SaveStaged` | the rank waits for the outcome, or to be asked for its bytes once more |
| a rank is lost | nothing, if a living stager holds its bytes |
| a stager is lost or lags | the rank hands its unwritten files to another: `TakeOver` |

The stager of a rank's node writes its bytes, unless another one takes over. `laggards` detects
stragglers: ranks whose bytes are written so slowly that another stager should help.

A coordinator that is made after this one died recovers the save from its `StagedPlan`, and accepts
messages of the epoch in which it was planned. It reads the storage first: where a record decides
the attempt already, the save is over.

Before it plans, and once all ranks have joined, the save waits in the phase "queued" until
`Coordination` admits it, which counts the asynchronous saves of a session that are in progress
(`SaveOptions.max_pending`).

*Invariant*: a file is what its first receipt says; a second writer of it writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from ray_dcp.core.values import GlobalPlan
from ray_dcp.errors import (
    CheckpointError,
    InternalError,
)
from ray_dcp.options import SaveOptions
from ray_dcp.planning.global_plan import pack_for_commit, unpack_for_commit
from ray_dcp.protocol.commands import (
    Answer,
    Command,
    Failed,
    OutcomeRead,
    Planned,
    ReadOutcome,
    RecordsRead,
    Result,
    step_of,
)
from ray_dcp.protocol.error_aggregation import combine, went_ahead
from ray_dcp.protocol.messages import (
    Ack,
    PartsHeld,
    PartsWritten,
    Refused,
    Request,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
    TakeOver,
)
from ray_dcp.protocol.operation import Commands
from ray_dcp.protocol.save import SaveMachine, both_gone, undecided
from ray_dcp.protocol.vote import Won


class QueuedSave(SaveMachine):
    """See `SaveMachine`; between its phases "joining" and "reading" is "queued"."""

    @property
    def is_queued(self) -> bool:
        """Every rank has joined, and nothing else has happened."""
        return self.phase == "queued"

    @property
    def is_under_way(self) -> bool:
        """It was let in and has not ended: it may hold a copy of the state."""
        return not self.over and self.phase not in ("joining", "queued", "projecting")

    @property
    def is_replaceable(self) -> bool:
        """Nothing of it is known to be written, and nothing of it can be committed."""
        begun = bool(self._receipts) or self._error is not None or self._outcome is not None
        phases = ("gathering", "reading", "planning", "writing")
        return self.phase in phases and not begun

    @property
    def options(self) -> SaveOptions:
        """How it is to be saved."""
        return self._options

    @property
    def url(self) -> str:
        """Where it is saved."""
        return self._target.url

    def let_in(self) -> Commands:
        """Takes that it may begin."""
        return super()._joined()

    def refuse(self, error: CheckpointError) -> Commands:
        """Takes that it may not begin.

        Args:
            error: Why, for all ranks.
        """
        return self._refuse_all(error)

    def _joined(self) -> Commands:
        if not self._roll.is_complete or self._roll.errors:
            return super()._joined()
        self._to("queued")
        return ()


class Holding:
    """What was told of who holds whose bytes; it may come in any order, and twice."""

    def __init__(self) -> None:
        self._homes: dict[int, PartsHeld] = {}
        self._helpers: dict[int, PartsHeld] = {}

    def note(self, held: PartsHeld) -> bool:
        """Takes that a stager holds a rank's bytes; returns whether that is new."""
        rank = held.rank
        same = self._helpers if held.helps else self._homes
        home, helper = self._homes.get(rank), self._helpers.get(rank)
        is_late = rank in same and held.incarnation <= same[rank].incarnation
        if is_late or (held.helps and home is not None and held.incarnation < home.incarnation):
            return False
        same[rank] = held
        if not held.helps and helper is not None and helper.incarnation < held.incarnation:
            del self._helpers[rank]
        return True

    def of(self, rank: int) -> PartsHeld | None:
        """Returns who is to write a rank's bytes; None where nobody is known."""
        return self._helpers.get(rank) or self._homes.get(rank)

    def is_helped(self, rank: int) -> bool:
        """Returns whether a helper holds a rank's bytes."""
        return rank in self._helpers

    def by(self, stager: str) -> list[int]:
        """Returns the ranks whose bytes a stager is to write."""
        return [rank for rank, held in self.all() if held.stager == stager]

    def all(self) -> Iterator[tuple[int, PartsHeld]]:
        """Yields each rank of which it is known, with who is to write its bytes."""
        for rank in {**self._homes, **self._helpers}:
            held = self.of(rank)
            if held is not None:
                yield rank, held

    def free(self, busy: frozenset[str]) -> tuple[str, ...]:
        """Returns the stagers that could help another.

        Args:
            busy: Stagers that have still to write.
        """
        return tuple(
            dict.fromkeys(held.stager for _, held in self.all() if held.stager not in busy)
        )

    def is_overtaken(self, rank: int, incarnation: int) -> bool:
        """Returns whether it does not matter what becomes of a rank's bytes with one stager."""
        held = self.of(rank)
        return held is not None and held.incarnation > incarnation

    def newest(self, rank: int) -> int:
        """Returns the highest incarnation that was told of; -1 for none."""
        found = (self._homes.get(rank), self._helpers.get(rank))
        return max((held.incarnation for held in found if held is not None), default=-1)

    def clear(self) -> None:
        """Forgets all."""
        self._homes.clear()
        self._helpers.clear()


LEAST_WAIT_S = 0.5
"""Nobody is helped before so many seconds of writing: a pace is not known earlier."""

HELP_COSTS_S = 1.0
"""Whoever would be done by itself in less than this is not helped: to hand a few hundred megabytes
to another node takes about as long."""

TIMES_SLOWER = 2.0
"""Whoever would take more than so many times as long as the others took is helped."""


@dataclass(frozen=True)
class Pace:
    """How far the writing of one rank's bytes is."""

    written_bytes: int
    total_bytes: int
    done_s: float | None = None
    """After how many seconds all of it was written; None while it is not."""


def laggards(paces: Mapping[int, Pace], elapsed_s: float) -> dict[int, str]:
    """Returns the ranks whose bytes another stager should write, each with what was seen.

    Only when at least half of the ranks are done is it known how long it should take.

    Args:
        paces: By rank.
        elapsed_s: Since writing began, in seconds.

    Example:
        >>> done = Pace(100, 100, done_s=4.0)
        >>> laggards({0: done, 1: Pace(10, 100), 2: done}, 5.0)
        {1: 'after 5.0 s 10 of 100 bytes were written, where others took 4.0 s for theirs'}
        >>> laggards({0: done, 1: Pace(90, 100), 2: done}, 5.0)
        {}
    """
    done = [pace.done_s for pace in paces.values() if pace.done_s is not None]
    if not done or 2 * len(done) < len(paces):
        return {}
    usual_s = median(done)
    if elapsed_s < max(LEAST_WAIT_S, usual_s):
        return {}
    found: dict[int, str] = {}
    for rank, pace in paces.items():
        if pace.done_s is not None or not pace.total_bytes:
            continue
        # At this pace it would end after elapsed * total / written.
        left_s = inf
        if pace.written_bytes:
            left_s = elapsed_s * (pace.total_bytes / pace.written_bytes - 1)
        if left_s > HELP_COSTS_S and elapsed_s + left_s > TIMES_SLOWER * usual_s:
            found[rank] = (
                f"after {elapsed_s:.1f} s {pace.written_bytes} of {pace.total_bytes} bytes were "
                f"written, where others took {usual_s:.1f} s for theirs"
            )
    return found


@dataclass(frozen=True, eq=False)
class StagedPlan:
    """What another coordinator needs to end a save that is planned, as a value.

    What was written so far is not in it: the stagers know that.
    """

    first: SaveJoin
    epoch: int
    """Of the coordinator that planned it."""
    attempt: str
    plan: GlobalPlan
    files: tuple[frozenset[int], ...]
    """`FilePlan.file` of each rank's part."""
    seen: RecordsRead
    warnings: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        """Has of the plan what its commit needs: stagers take it in every asynchronous save."""
        return {**vars(self), "plan": pack_for_commit(self.plan)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "plan": unpack_for_commit(state["plan"])})


class StagedSaveMachine(QueuedSave):
    """One asynchronous save of all ranks of a session.

    Args:
        first: The first join; hand it to `receive` as well.
        epoch: Of the coordinator.
        new_attempt: Makes up an attempt id that no other save ever had.
    """

    def __init__(self, first: SaveJoin, *, epoch: int, new_attempt: Callable[[], str]) -> None:
        super().__init__(first, epoch=epoch, new_attempt=new_attempt)
        self._join = first
        self._planned_in = epoch
        self._files: tuple[frozenset[int], ...] = ()
        self._left: dict[int, set[int]] = {}
        self._digests: dict[int, bytes] = {}
        self._holding = Holding()
        self._unheld: dict[int, tuple[str, bool]] = {}
        self._staged: dict[int, SaveStaged] = {}
        self._dead: dict[int, CheckpointError] = {}
        self._paces: dict[int, tuple[int, int]] = {}
        self._done_s: dict[int, float] = {}
        self._began_s: float | None = None
        self._helped: set[int] = set()

    def staged_plan(self) -> StagedPlan | None:
        """Returns what another coordinator needs to end this save.

        None before it is planned, and once it is over or fails.
        """
        if self._plan is None or self._error is not None:
            return None
        return StagedPlan(
            first=replace(self._join, columns=b"", contents=b"", values=b"", stats=b""),
            epoch=self._planned_in,
            attempt=self._attempt,
            plan=self._plan,
            files=self._files,
            seen=self._seen,
            warnings=tuple(self._warnings),
        )

    def resume(self, planned: StagedPlan) -> Commands:
        """Takes up a save where an earlier coordinator had planned it. To be called first.

        Args:
            planned: As `staged_plan` returned it there.

        Returns:
            What to do now: among others to look whether the earlier coordinator had ended it. Who
            holds and has written what is to be told again, as it was then.
        """
        # Why kept: what the ranks say is of the epoch in which they were told their parts.
        self._planned_in = planned.epoch
        self._epochs = {self._epoch, planned.epoch}
        self._attempt, self._plan, self._seen = planned.attempt, planned.plan, planned.seen
        self._vote = self._new_vote()
        self._warnings.extend(planned.warnings)
        self._plan_files(planned.files)
        self._call("writing")
        self._tell(f"resumed from epoch {planned.epoch}")
        for rank, own in enumerate(self._files):
            if not own:
                # Why: it has no bytes that somebody could hold, and may be dead by now.
                self._roll.note(rank, None)
        look = self._perform(ReadOutcome(self._target, self._attempt))
        return (self._arm(self._options.write_timeout_s), look)

    def receive(self, request: Request) -> Commands:
        """See `Operation.receive`; what is of another attempt or epoch is refused first."""
        if isinstance(request, SaveStaged | PartsHeld | PartsWritten):
            self._check_fence(request)
        return super().receive(request)

    def stager_lost(self, stager: str, reason: str) -> Commands:
        """Takes that a stager died or froze.

        Args:
            stager: `PartsHeld.stager`.
            reason: How it is known, for the error.

        Returns:
            What to do now: ranks that live are asked to hand their bytes to another stager;
            where the rank is dead as well, the save fails.
        """
        if self.phase != "writing":
            return ()
        self._tell(f"lost stager {stager}")
        return self._hand_over(self.held_by(stager), reason, lost=True)

    def lags(self, rank: int, reason: str) -> Commands:
        """Takes that a rank's stager is much slower than the others.

        Args:
            rank: Whose bytes it holds.
            reason: What was seen, for the report.

        Returns:
            What to do now; nothing when the rank is dead: its slow stager has the only copy.
        """
        is_bound = rank in self._dead or rank in self._unheld
        ready = self.phase == "writing" and not is_bound and self._is_waiting(rank)
        return self._hand_over([rank], reason, lost=False) if ready and self._left[rank] else ()

    def heard(self, paces: Mapping[int, tuple[int, int]], now_s: float) -> Commands:
        """Takes how far stagers are, and helps those that are much slower than the others.

        Args:
            paces: Bytes written and bytes in all, by rank.
            now_s: Seconds that never go back, of the coordinator's clock.
        """
        if self.phase != "writing":
            return ()
        if self._began_s is None:
            self._began_s = now_s
        self._paces.update(paces)
        elapsed_s = now_s - self._began_s
        for rank, left in self._left.items():
            if not left:
                self._done_s.setdefault(rank, elapsed_s)
        found = laggards(
            {
                rank: Pace(*self._paces.get(rank, (0, 0)), self._done_s.get(rank))
                for rank in self._left
            },
            elapsed_s,
        )
        commands: Commands = ()
        for rank, reason in found.items():
            helped = () if rank in self._helped else self.lags(rank, reason)
            self._helped |= {rank} if helped else set()
            commands += helped
        return commands

    @property
    def may_be_over(self) -> bool:
        """It was taken up, and the storage has not said yet whether it had ended before."""
        return isinstance(self._pending, ReadOutcome)

    @property
    def holders(self) -> frozenset[str]:
        """The stagers that hold bytes which nobody has written yet."""
        if self.phase != "writing":
            return frozenset()
        return frozenset(held.stager for rank, held in self._holding.all() if self._left[rank])

    def held_by(self, stager: str) -> list[int]:
        """Returns the ranks of which a stager holds bytes that nobody has written yet."""
        return [rank for rank in self._holding.by(stager) if self._left[rank]]

    # Events

    def _on_request(self, request: Request) -> Commands:
        match self.phase, request:
            case "writing", PartsHeld():
                return self._take_hold(request)
            case "writing", PartsWritten():
                return self._take_written(request)
            case "writing", SaveStaged():
                return self._take_staged(request)
            case "writing", SaveJoin():
                # It was resumed, and this rank had not got its part of the plan.
                self._roll.note(request.rank, went_ahead(self.key, request.rank))
                self._waiting[request.rank, step_of(request)] = None
                return self._received()
            case "writing", SaveReceipt():
                # A rank that found no stager has written its part itself.
                self._left[request.rank].clear()
            case (("aborting" | "cleaning"), (PartsHeld() | PartsWritten() | SaveStaged())):
                # The save fails already; who asks is told when that is decided.
                self._waiting[request.rank, step_of(request)] = None
                return ()
            case (
                ("building" | "table" | "record" | "publishing" | "collecting"),
                (PartsHeld() | PartsWritten()),
            ):
                return self._noted(request)
            case (("building" | "table" | "record" | "publishing" | "collecting"), SaveStaged()):
                self._waiting[request.rank, step_of(request)] = None
                return ()
        return super()._on_request(request)

    def _on_result(self, result: Result) -> Commands:
        match self.phase, result:
            case "writing", OutcomeRead():
                return self._take_outcome(result)
            case "writing", Failed():
                return ()  # nobody knows yet: the vote will find out
        return super()._on_result(result)

    def _take_outcome(self, found: OutcomeRead) -> Commands:
        """Ends a save that the earlier coordinator had committed, or declared failed."""
        if not found.slot:
            return ()
        if found.record:
            self._won = Won(found.slot, found.record)
        # Why "undecided" otherwise: each rank reads the reason for itself.
        reply = self._success() if self._won else self._undecided()
        return (*self._conclude(reply), *self._finish())

    def _on_plan(self, planned: Planned) -> Commands:
        self._plan_files(
            tuple(frozenset(file.file for file in part.files) for part in planned.parts)
        )
        return super()._on_plan(planned)

    def _plan_files(self, files: tuple[frozenset[int], ...]) -> None:
        self._files = files
        self._left = {rank: set(own) for rank, own in enumerate(files)}

    def _undecided(self) -> Refused:
        # Why: a coordinator that comes after this one may take it up, and commit it.
        return Refused(undecided(self._vote, "" if self._error is None else self._error.message))

    def _leave_open(self, error: CheckpointError) -> Commands:
        self._error = self._error or error
        return (*self._conclude(self._undecided()), *self._finish())

    def _on_lost(self, errors: Mapping[int, CheckpointError]) -> Commands:
        if self.phase == "queued":
            return self._refuse_all(combine(errors, self._target.url))
        if self.phase != "writing":
            return super()._on_lost(errors)
        needed: dict[int, CheckpointError] = {}
        for rank, error in errors.items():
            self._dead[rank] = error
            lost = self._has_lost(rank) and self._left[rank]
            if lost or self._holding.of(rank) is None:
                needed[rank] = error
            else:
                # Its stager has all its bytes, however slow it is.
                self._unheld.pop(rank, None)
        return super()._on_lost(needed)

    # Writing

    def _take_hold(self, held: PartsHeld) -> Commands:
        self._note_holder(held)
        return (*self._noted(held), *self._check_done(held.rank))

    def _note_holder(self, held: PartsHeld) -> None:
        rank = held.rank
        if not self._holding.note(held):
            return
        if self._holding.is_helped(rank) or not (held.helps and self._has_lost(rank)):
            self._unheld.pop(rank, None)

    def _take_written(self, written: PartsWritten) -> Commands:
        rank = written.rank
        if written.error is not None:
            if self._holding.is_overtaken(rank, written.incarnation):
                return self._noted(written)  # another stager has taken over
            self._roll.note(rank, written.error)
            return (*self._noted(written), *self._received())
        for receipt in written.files:
            if receipt.file in self._left[rank]:
                self._left[rank].discard(receipt.file)
                self._digests[receipt.file] = receipt.digest
                self._receipts.append(receipt)
            elif self._digests.get(receipt.file) != receipt.digest:
                error = InternalError(
                    f"Expected stager {written.stager} to write a file of rank {rank}, with the "
                    f"bytes that another stager wrote, but found other ones. Please report this",
                    key=receipt.key,
                    rank=rank,
                )
                self._roll.note(rank, error)
        return (*self._noted(written), *self._check_done(rank))

    def _take_staged(self, staged: SaveStaged) -> Commands:
        rank = staged.rank
        self._tell(f"{step_of(staged)} of rank {rank}{' (failed)' if staged.error else ''}")
        self._waiting[rank, step_of(staged)] = None
        self._dead.pop(rank, None)
        self._staged[rank] = staged
        if staged.held is not None:
            self._note_holder(staged.held)
        if staged.error is not None:
            self._roll.note(rank, staged.error)
            return self._received()
        if self._has_lost(rank) and self._left[rank]:
            return self._ask_again(rank)
        # Its bytes are written, or nobody could help a slow stager: that goes on alone.
        self._unheld.pop(rank, None)
        return self._check_done(rank)

    def _check_done(self, *ranks: int) -> Commands:
        """Goes on when nothing of some ranks is missing any more."""
        done = False
        for rank in ranks:
            known = rank in self._staged or self._holding.of(rank) is not None
            if not self._left[rank] and known and rank not in self._roll.came:
                self._tell(f"part of rank {rank} is written")
                self._roll.note(rank, None)
                done = True
        return self._received() if done or self._roll.errors else ()

    def _hand_over(self, ranks: list[int], reason: str, *, lost: bool) -> Commands:
        gone: dict[int, CheckpointError] = {}
        commands: Commands = ()
        for rank in ranks:
            if rank in self._dead:
                gone[rank] = both_gone(rank, len(self._left[rank]), reason)
                continue
            self._unheld[rank] = (reason, lost)
            commands += self._ask_again(rank)
        return commands + (super()._on_lost(gone) if gone else ())

    def _ask_again(self, rank: int) -> Commands:
        """Answers the rank's call: it is to find another stager."""
        if not self._is_waiting(rank):
            return ()
        staged = self._staged[rank]
        at = (rank, step_of(staged))
        reason, lost = self._unheld[rank]
        files = tuple(sorted(self._left[rank]))
        del self._waiting[at]
        helpers = () if lost else self._holding.free(self.holders)
        # Why of both: a rank that found no helper tells the number that a helper was to have.
        number = max(self._holding.newest(rank), staged.incarnation) + 1
        reply = self._given[at] = TakeOver(number, files, reason, lost, helpers)
        return (Answer(self.key, rank, at[1], reply),)

    def _is_waiting(self, rank: int) -> bool:
        """Returns whether a rank's call waits for what becomes of its bytes."""
        staged = self._staged.get(rank)
        return staged is not None and (rank, step_of(staged)) in self._waiting

    def _has_lost(self, rank: int) -> bool:
        """Returns whether a rank has to hand over as its stager is lost."""
        return self._unheld.get(rank, ("", False))[1]

    def _noted(self, request: Request) -> Commands:
        at = (request.rank, step_of(request))
        reply = self._given[at] = Ack()
        return (Answer(self.key, request.rank, at[1], reply),)

    def _end(self, phase: str) -> list[Command]:
        self._left.clear()
        self._digests.clear()
        self._holding.clear()
        self._unheld.clear()
        self._staged.clear()
        return super()._end(phase)
