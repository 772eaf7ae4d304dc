"""The save machine: turns the joins of all ranks into a committed checkpoint, or one error for all.

| phase | waits for | then |
|---|---|---|
| joining | `SaveJoin` of every rank | ask ranks for unknown rows, or read the records |
| queued | `begin`; only asynchronous saves | as joining |
| gathering | a second `SaveJoin` of the ranks that were asked | read the records |
| reading | `RecordsRead` | refuse, or plan |
| planning | `Planned` | `SaveGo` to every rank: *from here on the attempt may be committed* |
| writing | receipts of every rank's files | build table, manifest and `.metadata` |
| building | `CommitBuilt` | write the table, check that the data files are visible |
| table | `Finished` | create the manifest |
| record | the vote | *committed*: run the follow-up tasks |
| aborting | the vote | *failed*: `Refused` to every rank, run the follow-up tasks |

The follow-up tasks run one after another. After a commit: `publishing` (`.metadata`), `collecting`
(files of other attempts), then `SaveOutcome` to every rank. After a failure: `collecting` (the
files of this attempt).

*Who writes.* In a synchronous save each rank writes its own files and sends a `SaveReceipt`. In an
asynchronous save the stager of the rank's node writes them, and a rank's part is done when each of
its files has a receipt:

| event while writing | then |
|---|---|
| `PartsHeld` | from now on the rank may die |
| `PartsWritten` | receipts; the last one of the last rank ends the phase |
| `SaveStaged` | the rank waits for the outcome |
| a rank is lost | nothing, if a stager holds its bytes, or it has none to write |
| a stager is lost | the save fails, if bytes that it holds are not written |

A coordinator that replaces a dead one resumes an asynchronous save from its `StagedPlan`, and
accepts messages of the epoch in which the save was planned. It reads the storage first: if a record
already decides the attempt, the save is over.

After a crash before the end of `record` the place holds the previous checkpoint; after that, it
holds this one. The final phases are `done`, `failed` and `unknown`. The timer never stops a vote:
when it expires, the ranks get the outcome as far as it is known, and the vote continues.

*Invariant*: only the coordinator that created or resumed an attempt commits it, and it never tries
to commit after it has reported the save as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray_dcp.commit_protocol.commands import (
    Answer,
    BuildCommit,
    CollectReplaced,
    Command,
    CommitBuilt,
    Failed,
    Finished,
    OutcomeRead,
    Planned,
    Published,
    PublishMetadata,
    ReadOutcome,
    ReadRecords,
    RecordCreated,
    RecordsRead,
    Result,
    RowsMissing,
    SlotFree,
    SlotTaken,
    Task,
    WriteTable,
    step_of,
)
from ray_dcp.commit_protocol.error_aggregation import (
    fenced_off,
    located,
    lost_race,
    lost_stager,
    name_ranks,
    overtaken,
    stagers_late,
    undecided,
    went_ahead,
)
from ray_dcp.commit_protocol.messages import (
    Ack,
    Fenceable,
    FileReceipt,
    PartsHeld,
    PartsWritten,
    Refused,
    Reply,
    Request,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
    SaveStaged,
)
from ray_dcp.commit_protocol.operation import Commands, Operation
from ray_dcp.commit_protocol.plan_cache import WAYS_OUT, PlanCache, Planning, differences
from ray_dcp.commit_protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won
from ray_dcp.core.values import GlobalPlan
from ray_dcp.core.wire_error import add_note
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    PlanConflictError,
    SaveCancelledError,
)
from ray_dcp.planning.global_plan import pack_for_commit, unpack_for_commit

REPLACED_SINCE = (
    "The checkpoint was committed, but it does not stand any more: another save of the same "
    "checkpoint id, or a delete, came right after. Only one save at a time should have an id"
)
"""Warning of a save whose checkpoint was replaced or deleted right after its commit."""

REASON_LENGTH = 500

MOST_SENT_BYTES = 64 << 10
"""Longest manifest that is sent to every rank, in bytes. *Why*: a manifest names all files, so that
the coordinator of 10,000 ranks would send 10 GB."""

MOST_ROUNDS = 3
"""Most times that ranks are asked for items. *Why* 3: the first answers may show that a cached plan
does not apply; then a few ranks are asked for their rows; then all others whose rows do not follow
from those."""

FOLLOW_UPS: dict[type[Task], str] = {
    PublishMetadata: "publishing",
    CollectReplaced: "collecting",
}
"""The phase of each follow-up task."""

NOT_DONE = {
    "publishing": ".metadata could not be published, so stock DCP does not see it",
    "collecting": "files that it replaced could not all be deleted (the next save does it)",
}
"""Warning for each phase whose follow-up task fails after a commit."""


@dataclass(frozen=True, eq=False)
class StagedPlan:
    """The state of a planned save that another coordinator needs to resume it.

    It does not include which files are written: stagers report that again.
    """

    first: SaveJoin
    epoch: int
    """Epoch of the coordinator that planned the save."""
    attempt: str
    plan: GlobalPlan
    files: tuple[frozenset[int], ...]
    """`FilePlan.file` of all files of each rank's part."""
    seen: RecordsRead
    warnings: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the fields of the plan that the commit needs.

        *Why*: every asynchronous save sends it to the stagers.
        """
        return {**vars(self), "plan": pack_for_commit(self.plan)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "plan": unpack_for_commit(state["plan"])})


class SaveMachine(Operation):
    """One save of all ranks of a session.

    Args:
        first: The first join; it must also be passed to `receive`.
        epoch: Epoch of the coordinator.
        new_attempt: Returns a new attempt id, different from those of all other saves.
        plans: Plans of earlier saves.

    Attributes:
        options: Options of the save.
        is_cancelled: Whether the save fails, or failed, because of `cancel`.
    """

    ranks_do: Mapping[str, tuple[str, str]] = {
        "joining": ("join the save", "plan_timeout_s"),
        "gathering": ("say what it holds", "plan_timeout_s"),
        "writing": ("write its part", "write_timeout_s"),
    }
    last_barrier = "writing"

    def __init__(
        self,
        first: SaveJoin,
        *,
        epoch: int,
        new_attempt: Callable[[], str],
        plans: PlanCache[Planned] | None = None,
    ) -> None:
        super().__init__(first)
        self.options = first.options
        self.is_cancelled = False
        self._join = replace(first, columns=b"", contents=b"", values=b"")
        self._target = first.target
        self._epoch = self._planned_in = epoch
        self._new_attempt = new_attempt
        self._planning = Planning(first.world_size, first.options, plans or PlanCache())
        self._rounds = 0
        self._seen = RecordsRead(0, None, None, ())
        self._plan: GlobalPlan | None = None
        self._attempt = ""
        self._receipts: list[FileReceipt] = []
        self._built: CommitBuilt | None = None
        self._vote = Vote(first.target, "", 1)
        self._won: Won | None = None
        self._error: CheckpointError | None = None
        self._warnings: list[str] = []
        self._to_do: list[Task] = []
        # Only for asynchronous saves, whose bytes stagers write.
        self._files: tuple[frozenset[int], ...] = ()
        self._left: dict[int, set[int]] = {}
        self._holders: dict[int, set[str]] = {}
        self._staged: set[int] = set()
        self._outlived: set[int] = set()
        """Ranks that were lost while a stager held their bytes."""

    # Queries

    @property
    def is_staged(self) -> bool:
        """Whether stagers write the bytes, as in an asynchronous save."""
        return self._join.staged

    @property
    def is_queued(self) -> bool:
        """Whether every rank has joined and the save waits for `begin`."""
        return self.phase == "queued"

    @property
    def is_under_way(self) -> bool:
        """Whether the save has begun without an outcome yet: it may hold a copy of the state.

        A save whose ranks have an outcome does not block others, even if its vote is still open.
        """
        return self._outcome is None and self.phase not in ("joining", "queued")

    @property
    def may_be_over(self) -> bool:
        """Whether the save was resumed, and storage is not yet read for whether it had ended."""
        return isinstance(self._pending, ReadOutcome)

    @property
    def holders(self) -> frozenset[str]:
        """The stagers that hold bytes which are not written yet."""
        if self.phase != "writing":
            return frozenset()
        held = (stagers for rank, stagers in self._holders.items() if self._left[rank])
        return frozenset().union(*held)

    def held_by(self, stager: str) -> list[int]:
        """Returns the ranks of which a stager holds bytes that are not written yet."""
        return [rank for rank, held in self._holders.items() if stager in held and self._left[rank]]

    def staged_plan(self) -> StagedPlan | None:
        """Returns the state with which another coordinator can resume this save.

        None before planning, once the save has ended or fails, and if it is synchronous.
        """
        if not self.is_staged or self._plan is None or self._error is not None:
            return None
        return StagedPlan(
            first=self._join,
            epoch=self._planned_in,
            attempt=self._attempt,
            plan=self._plan,
            files=self._files,
            seen=self._seen,
            warnings=tuple(self._warnings),
        )

    # Events

    def receive(self, request: Request) -> Commands:
        """See `Operation.receive`; refuses messages of another attempt or epoch first."""
        if isinstance(request, Fenceable):
            epochs = (self._epoch, self._planned_in)
            if request.attempt != self._attempt or request.epoch not in epochs:
                raise CommitUnknownError(
                    f"Expected a receipt for attempt {self._attempt or '(none yet)'} of epoch "
                    f"{self._epoch}, but rank {request.rank} sent one for attempt "
                    f"{request.attempt} of epoch {request.epoch}: the coordinator was restarted in "
                    f"between, or this rank was replaced. It is ignored; the storage tells what "
                    f"became of that attempt",
                    attempt=request.attempt,
                    checkpoint_id=self._target.url,
                    rank=request.rank,
                )
            if not 0 <= request.rank < self.world_size:
                raise self._unexpected(f"{type(request).__name__} of rank {request.rank}")
        return super().receive(request)

    def cancel(self, reason: str) -> Commands:
        """Fails the save with `SaveCancelledError`, unless its commit has begun.

        Args:
            reason: Who cancels it, for the error message.

        Returns:
            The commands; empty if it is too late.
        """
        error = SaveCancelledError(
            f"The save was cancelled: {reason}", checkpoint_id=self._target.url
        )
        self.is_cancelled |= self._may_fail
        return self.give_up(error)

    def give_up(self, error: CheckpointError) -> Commands:
        """Fails the save, unless its commit has begun.

        Args:
            error: The error for all ranks.

        Returns:
            The commands; empty if it is too late.
        """
        return self._fail(error) if self._may_fail else ()

    @property
    def _may_fail(self) -> bool:
        """Whether the save has no outcome yet and its commit has not begun."""
        return not self.over and self._error is None and not self._vote.at_stake

    def _on_request(self, request: Request) -> Commands:
        match self.phase, request:
            case (("joining" | "gathering"), SaveJoin()):
                return self._take_join(request)
            case "writing", SaveReceipt():
                # Also from a rank of an asynchronous save that found no stager.
                self._left.get(request.rank, set()).clear()
                self._record_request(request, request.error)
                self._receipts.extend(request.files)
                return self._check_barrier()
            case "writing", SaveJoin() if self._planned_in != self._epoch:
                # The save was resumed, and this rank had not received its part of the plan.
                self._record_request(request, went_ahead(self.key, request.rank))
                return self._check_barrier()
            case "writing", PartsHeld() if self.is_staged:
                self._holders.setdefault(request.rank, set()).add(request.stager)
                return (*self._acknowledge(request), *self._check_done(request.rank))
            case "writing", PartsWritten() if self.is_staged:
                return self._take_written(request)
            case "writing", SaveStaged() if self.is_staged:
                return self._take_staged(request)
            case _, SaveJoin():
                pass
            case (
                ("building" | "table" | "record" | "publishing" | "collecting"),
                (PartsHeld() | PartsWritten()),
            ):
                return self._acknowledge(request)
            case _ if self._plan is not None and self.phase != "writing":
                # The save is being decided; this rank waits for the outcome.
                self._waiting[request.rank, step_of(request)] = None
                return ()
        raise self._unexpected(f"{type(request).__name__} of rank {request.rank}")

    def _on_result(self, result: Result) -> Commands:
        match self.phase, result:
            case "reading", RecordsRead():
                return self._make_plan(result)
            case "planning", Planned():
                self._planning.made(result)
                return self._begin_writing(result)
            case "planning", RowsMissing():
                self._planning.lacks(result.ranks)
                return self.begin()
            case "writing", OutcomeRead():
                return self._take_outcome(result)
            case "writing", Failed():
                return ()  # unknown whether the save had ended: the vote will find out
            case "building", CommitBuilt():
                self._built = result
                receipts, seen = tuple(self._receipts), self._seen.last_slot
                key, table = result.table_key, result.table
                task = WriteTable(self._target, key, table, receipts, self._attempt, seen)
                return self._step("table", task, self.options.commit_timeout_s)
            case "table", Finished() if self._built is not None:
                vote = self._vote.commit(self._built.record)
                return self._step("record", vote, self.options.commit_timeout_s)
            case (
                ("record" | "aborting"),
                (RecordCreated() | SlotTaken() | SlotFree() | Failed()),
            ):
                return self._advance(self._vote.advance(result))
            case (("publishing" | "collecting"), (Published() | Finished() | Failed())):
                return self._done_with(result)
            case _, Failed():
                return self._fail(located(result.error, self._target.url))
        raise self._unexpected(f"result {type(result).__name__}")

    def _on_expired(self) -> Commands:
        match self.phase:
            case "reading" | "planning":
                return self._fail(self._too_slow("plan_timeout_s"))
            case "building" | "table":
                return self._fail(self._too_slow("commit_timeout_s"))
            case "record" | "aborting":
                return tuple(self._conclude(self._undecided_reply()))
            case "publishing" | "collecting" if self._won is not None:
                self._warnings.append(
                    f"The checkpoint is committed, but {self.phase} took longer than "
                    f"SaveOptions.commit_timeout_s={self.options.commit_timeout_s:g} s"
                )
                return tuple(self._conclude(self._success_reply()))
        return tuple(self._finish())

    def _on_lost(self, errors: Mapping[int, CheckpointError]) -> Commands:
        if self._plan is None:
            return super()._on_lost(errors)
        if self.phase != "writing":
            return ()
        self._outlived |= errors.keys() & self._holders.keys()
        if self.is_staged:
            # Why: a rank without files has returned, or will, without any stager that could tell.
            self._barrier.arrived.update(rank for rank in errors if not self._files[rank])
        # Why not the others: stagers hold their bytes, and write them however slow they are.
        return super()._on_lost({r: e for r, e in errors.items() if r not in self._holders})

    def _overdue_errors(
        self, missing: Sequence[int], what: str, after_s: float, way_out: str
    ) -> Mapping[int, CheckpointError]:
        # Why separate: these ranks have done their part; a stager or its storage is late.
        held = {r: " and ".join(sorted(self._holders[r])) for r in missing if r in self._holders}
        late = [rank for rank in missing if rank not in held]
        found = dict(super()._overdue_errors(late, what, after_s, way_out)) if late else {}
        slow = stagers_late(self._target.url, held, self._left, after_s, way_out) if held else None
        return {**found, **dict.fromkeys(held, slow)} if slow else found

    # Joining and planning

    def _take_join(self, join: SaveJoin) -> Commands:
        self._planning.take(join)
        if self.phase == "joining":
            self._admit(join)
        else:
            self._record_request(join, join.error)
        return self._check_barrier()

    def _all_arrived(self) -> Commands:
        if self.phase == "joining":
            self._join = replace(self._join, about=self._agreed())
        match self.phase:
            case "joining" if self.is_staged:
                self._enter("queued")
                return ()
            case "writing":
                return self._build()
        return self.begin()

    def _agreed(self) -> dict[str, Any] | None:
        """Returns the topics on which all ranks that have them agree, if they say anything."""
        topics: dict[str, list[Any]] = {}
        for join in self._openings.values():
            about = join.about if isinstance(join, SaveJoin) else None
            for topic, value in (about or {}).items():
                topics.setdefault(topic, []).append(value)
        return {
            topic: first
            for topic, (first, *others) in topics.items()
            if first and all(other == first for other in others)
        } or None

    def begin(self) -> Commands:
        """Asks ranks for missing rows; if none are missing, reads the records.

        Called for an asynchronous save when it is the next in the queue of its session.
        """
        asked = self._planning.ask()
        if not asked:
            return self._step("reading", ReadRecords(self._target), self.options.plan_timeout_s)
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            return self._fail(self._unexpected(f"answer of {name_ranks(asked)} without items"))
        self._call("gathering")
        self._barrier.arrived.update(rank for rank in range(self.world_size) if rank not in asked)
        answers = []
        for rank, reply in asked.items():
            step = step_of(self._planning.last_of(rank))
            del self._waiting[rank, step]
            self._replies[rank, step] = reply
            answers.append(Answer(self.key, (rank,), step, reply))
        return (*answers, *self._wait(self.options.plan_timeout_s))

    def _make_plan(self, seen: RecordsRead) -> Commands:
        if seen.committed is not None and not self.options.overwrite:
            return self._fail(
                CheckpointExistsError(
                    f"Checkpoint already exists, and SaveOptions.overwrite is False: found "
                    f"{seen.committed}. Save under another id, delete that one, or allow overwrite",
                    checkpoint_id=self._target.url,
                )
            )
        self._seen = seen
        self._warnings.extend(seen.warnings)
        plan = self._planning.plan()
        if isinstance(plan, Planned):
            return self._begin_writing(plan)
        return self._step("planning", plan, self.options.plan_timeout_s)

    def _begin_writing(self, planned: Planned) -> Commands:
        if planned.disagreements and self.options.replicas == "check":
            return self._fail(
                PlanConflictError(
                    f"{differences(planned.disagreements)}. {WAYS_OUT}; or save with "
                    f"SaveOptions(replicas='warn') to take the lowest rank's value",
                    checkpoint_id=self._target.url,
                )
            )
        if planned.disagreements:
            self._warnings.append(
                f"{differences(planned.disagreements)}. The lowest rank's are saved, and a load "
                f"gives them to all ranks: what the others hold is lost. {WAYS_OUT}"
            )
        self._attempt = self._join.attempt or self._new_attempt()
        if any(verdict.attempt == self._attempt for verdict in self._seen.decided):
            # Why possible: the creator of attempt ids may publish them before the save is planned.
            return self._fail(
                SaveCancelledError(
                    f"Attempt {self._attempt} was ended by another rank before this save "
                    "was planned"
                )
            )
        self._plan = planned.plan
        if self.is_staged:
            self._expect(tuple(frozenset(f.file for f in part.files) for part in planned.parts))
        self._vote = self._new_vote()
        self._call("writing")
        go = partial(
            self._planning.go,
            planned=planned,
            attempt=self._attempt,
            epoch=self._epoch,
            create_if_absent=self._seen.create_if_absent,
        )
        alike = self._planning.all_know(planned)
        answers = self._reply_alike(go(0)) if alike else self._reply_each(go)
        self._planning.clear()
        return (self._arm(self.options.write_timeout_s), *answers)

    def _too_slow(self, option: str) -> DeadlineError:
        after_s: float = getattr(self.options, option)
        return DeadlineError(
            f"Expected {self.phase} to end within {after_s:g} s, but the storage or the "
            f"coordinator was slower. Raise SaveOptions.{option}, or look at the storage",
            checkpoint_id=self._target.url,
        )

    # Writing by stagers

    def _expect(self, files: tuple[frozenset[int], ...]) -> None:
        self._files = files
        self._left = {rank: set(own) for rank, own in enumerate(files)}

    def _take_written(self, written: PartsWritten) -> Commands:
        rank = written.rank
        if written.error is not None:
            self._barrier.note(rank, written.error)
            return (*self._acknowledge(written), *self._check_barrier())
        for receipt in written.files:
            if receipt.file in self._left[rank]:
                self._left[rank].discard(receipt.file)
                self._receipts.append(receipt)
        return (*self._acknowledge(written), *self._check_done(rank))

    def _take_staged(self, staged: SaveStaged) -> Commands:
        rank = staged.rank
        self._log(f"{step_of(staged)} of rank {rank}{' (failed)' if staged.error else ''}")
        self._waiting[rank, step_of(staged)] = None
        self._staged.add(rank)
        if staged.stager:
            self._holders.setdefault(rank, set()).add(staged.stager)
        if staged.error is not None:
            self._barrier.note(rank, staged.error)
            return self._check_barrier()
        return self._check_done(rank)

    def _check_done(self, rank: int) -> Commands:
        """Marks a rank as arrived when its files are written and its holder is known."""
        known = rank in self._staged or rank in self._holders
        done = not self._left[rank] and known and rank not in self._barrier.arrived
        if done:
            self._log(f"part of rank {rank} is written")
            self._barrier.note(rank, None)
        return self._check_barrier() if done or self._barrier.errors else ()

    def stager_lost(self, stager: str, reason: str) -> Commands:
        """Marks a stager that died or froze as lost, with the bytes that it had not written.

        Args:
            stager: `PartsHeld.stager`.
            reason: How the loss was detected, for the error message.
        """
        ranks = self.held_by(stager) if self.phase == "writing" else []
        for rank in ranks:
            self._holders[rank].discard(stager)
        # Why possible: a rank turns to another stager while the first may still be reported.
        ranks = [rank for rank in ranks if not self._holders[rank]]
        for rank in [*ranks]:
            # Why: it may have died before the rank had its answer. A rank that lives and is not
            # staged has its bytes still, and stages them at another one.
            if rank not in self._staged and rank not in self._outlived:
                ranks.remove(rank)
                del self._holders[rank]
        if not ranks:
            return ()
        self._log(f"lost stager {stager}")
        num_files = sum(len(self._left[rank]) for rank in ranks)
        error = lost_stager(stager, ranks, num_files, reason)
        return super()._on_lost(dict.fromkeys(ranks, error))

    def _acknowledge(self, request: Request) -> Commands:
        step = step_of(request)
        reply = self._replies[request.rank, step] = Ack()
        return (Answer(self.key, (request.rank,), step, reply),)

    # Resuming on another coordinator

    def resume(self, planned: StagedPlan) -> Commands:
        """Resumes a save that an earlier coordinator had planned. Must be called first.

        Stagers have to report again what they hold and have written.

        Args:
            planned: Result of `staged_plan` there.

        Returns:
            The commands, among them to read whether the earlier coordinator had ended the save.
        """
        # Why kept: messages of ranks have the epoch in which they received their parts.
        self._planned_in = planned.epoch
        self._attempt, self._plan, self._seen = planned.attempt, planned.plan, planned.seen
        self._vote = self._new_vote()
        self._warnings.extend(planned.warnings)
        self._expect(planned.files)
        self._call("writing")
        self._log(f"resumed from epoch {planned.epoch}")
        # Why: ranks without files have no bytes that a stager could hold, and may be dead by now.
        self._barrier.arrived.update(rank for rank, own in enumerate(self._files) if not own)
        look = self._perform(ReadOutcome(self._target, self._attempt))
        return (self._arm(self.options.write_timeout_s), look)

    def _take_outcome(self, found: OutcomeRead) -> Commands:
        """Ends a save that the earlier coordinator had committed or fenced off."""
        if not found.slot:
            return ()
        if found.record:
            self._won = Won(found.slot, found.record)
        # Why "undecided" otherwise: each rank reads the outcome and its reason from storage.
        reply = self._success_reply() if self._won else self._undecided_reply()
        return (*self._conclude(reply), *self._finish())

    # The commit

    def _build(self) -> Commands:
        if self._plan is None:
            raise self._unexpected("receipt without a plan")
        task = BuildCommit(
            self._target,
            self._attempt,
            self._epoch,
            self._plan,
            tuple(self._receipts),
            self._seen.last_slot,
            self._seen.foreign_metadata,
            self._seen.decided,
            self.options.stock_metadata,
            self._join.about,
        )
        return self._step("building", task, self.options.commit_timeout_s)

    def _new_vote(self) -> Vote:
        create_if_absent, slot = self._seen.create_if_absent, self._seen.last_slot + 1
        return Vote(self._target, self._attempt, slot, create_if_absent=create_if_absent)

    def _advance(self, step: VoteTask | Decision) -> Commands:
        match step:
            case Won():
                return self._enter_committed(step)
            case Lost():
                self._error = lost_race(self._vote, step)
                return self._failed(self._error)
            case Fenced():
                own = self._error  # None: another process fenced the attempt off
                vote = self._vote
                return self._failed(overtaken(own, vote) if own else fenced_off(vote, step))
            case Open() if self.phase == "record" and self._seen.create_if_absent:
                return self._abort(step.error)
            case Open():
                return self._leave_open(step.error)
        return (self._perform(step),)

    def _enter_committed(self, won: Won) -> Commands:
        self._won = won
        metadata = self._built.metadata if self._built else None
        self._to_do = [PublishMetadata(self._target, won.slot, metadata)]
        if self._seen.replaced:
            self._to_do.append(CollectReplaced(self._target, self._seen.replaced))
        return self._follow()

    def _success_reply(self) -> Reply:
        if self._won is None:
            raise self._unexpected("success before the commit")
        record = self._won.record if len(self._won.record) <= MOST_SENT_BYTES else b""
        return SaveOutcome(self._attempt, self._won.slot, record, tuple(self._warnings))

    # The failure

    def _fail(self, error: CheckpointError) -> Commands:
        return super()._fail(error) if self._plan is None else self._abort(error)

    def _abort(self, error: CheckpointError) -> Commands:
        """Fences the attempt off; the failure is reported only after that."""
        self._error = error
        reason = f"{type(error).__name__}: {error.message}"[:REASON_LENGTH]
        task = self._vote.abort(reason, error.rank)
        return self._step("aborting", task, self.options.commit_timeout_s)

    def _leave_open(self, error: CheckpointError) -> Commands:
        """Ends a save whose abort record could not be created, or would not stop its manifest."""
        self._error = self._error or error
        if self._may_yet_be_committed:
            return (*self._conclude(self._undecided_reply()), *self._finish())
        # No manifest was ever tried, so none can appear: the failure is final without a record.
        note = f"No abort record could be written for attempt {self._attempt}: {error}"
        add_note(self._error, note)
        return self._failed(self._error)

    def _failed(self, error: CheckpointError) -> Commands:
        """Reports the failure and deletes the files: the attempt can no longer be committed."""
        files = self._plan.table.files if self._plan else ()
        keys = [key.replace("{attempt}", self._attempt) for key in files]
        keys += [self._built.table_key] if self._built else []
        self._to_do = [CollectReplaced(self._target, tuple(keys))]
        return (*self._conclude(Refused(error)), *self._follow())

    @property
    def _may_yet_be_committed(self) -> bool:
        """Whether a manifest was tried, or another coordinator may resume and commit the save."""
        return self._vote.at_stake or self.is_staged

    def _undecided_reply(self) -> Refused:
        """Returns the outcome that ranks get while the vote is open."""
        if self._error is not None and not self._may_yet_be_committed:
            return Refused(self._error)
        return Refused(undecided(self._vote, self._error.message if self._error else ""))

    # Follow-up tasks

    def _follow(self) -> Commands:
        """Begins the next follow-up task; after the last one, reports a commit to the ranks."""
        if not self._to_do:
            told = self._conclude(self._success_reply()) if self._won is not None else []
            return (*told, *self._finish())
        task = self._to_do.pop(0)
        return self._step(FOLLOW_UPS[type(task)], task, self.options.commit_timeout_s)

    def _done_with(self, result: Published | Finished | Failed) -> Commands:
        """Handles the result of a follow-up task; its failure only adds a warning to a commit."""
        match self.phase, result:
            case "publishing", Published(superseded=True):
                # Why nothing is collected: the later save does it, and owns `.metadata`.
                self._warnings.append(REPLACED_SINCE)
                self._to_do = []
            case _, Failed(error) if self._won is not None:
                why = f"{NOT_DONE[self.phase]}: {type(error).__name__}: {error}"
                self._warnings.append(f"The checkpoint is committed, but {why}")
                # Why nothing is collected then: the current `.metadata` may name those files.
                self._to_do = []
        return self._follow()

    def _finish(self) -> list[Command]:
        """Ends in the final phase of the outcome."""
        match self._outcome:
            case SaveOutcome():
                return self._end("done")
            case Refused(error=CommitUnknownError()):
                return self._end("unknown")
        return self._end("failed")

    def _end(self, phase: str) -> list[Command]:
        self._plan = self._built = None
        self._files = ()
        self._planning.clear()
        self._receipts.clear()
        self._left.clear()
        self._holders.clear()
        self._staged.clear()
        self._outlived.clear()
        return super()._end(phase)
