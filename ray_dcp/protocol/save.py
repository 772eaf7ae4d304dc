"""The save machine: from the ranks' joins to one committed checkpoint, or to one error for all.

| phase | waits for | then |
|---|---|---|
| joining | `SaveJoin` of every rank | ask ranks for unknown rows, or read the records |
| gathering | `SaveJoin` of those, again | read the records |
| reading | `RecordsRead` | refuse, or plan |
| planning | `Planned` | `SaveGo` to every rank: *from here on the attempt may be committed* |
| writing | `SaveReceipt` of every rank | build table, manifest and `.metadata` |
| building | `CommitBuilt` | write the table |
| table | `Finished` | create the manifest |
| record | the vote | *committed*: publish `.metadata` |
| publishing | `Published` | delete what other attempts left, and their records |
| collecting | `Finished` | `SaveOutcome` to every rank: done |
| projecting | `Finished` | outcome sent; `.metadata` made `"later"`, the plan is kept: done |
| aborting | the vote | `Refused` to every rank: delete what was written |
| cleaning | `Finished` | failed |

After a crash between any two phases the place holds the previous checkpoint up to `record`, and
this one from there on. The ends are `done`, `failed` and `unknown`. The timer never stops a vote:
when it expires the ranks get what is known, and the machine goes on to learn the rest.

*Invariant*: only the coordinator that created an attempt commits it, and it never tries to after
it reported the save as failed.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ray_dcp.core.values import GlobalPlan
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    ParticipantError,
    PlanConflictError,
    SaveCancelledError,
)
from ray_dcp.protocol.commands import (
    Answer,
    BuildCommit,
    CollectReplaced,
    Command,
    CommitBuilt,
    Failed,
    Finished,
    Planned,
    Published,
    PublishMetadata,
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
from ray_dcp.protocol.error_aggregation import combine, identity, located, name_ranks
from ray_dcp.protocol.messages import (
    Fenceable,
    FileReceipt,
    FileReceipts,
    Refused,
    Reply,
    Request,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
)
from ray_dcp.protocol.operation import Commands, Operation
from ray_dcp.protocol.planning import PlanCache, Planning
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won

REPLACED_SINCE = (
    "The checkpoint was committed, but it does not stand any more: another save of the same "
    "checkpoint id, or a delete, came right after. Only one save at a time should have an id"
)
"""The warning of a save that was overtaken after its commit."""


def no_overwrite(committed: str, url: str) -> CheckpointExistsError:
    """Returns the error of a save that must not replace what stands.

    Args:
        committed: What stands, in words.
        url: Of the target.
    """
    return CheckpointExistsError(
        f"Checkpoint already exists, and SaveOptions.overwrite is False: found {committed}. Save "
        f"under another id, delete that one, or allow overwrite",
        checkpoint_id=url,
    )


def disagreeing_values(disagreements: str, url: str) -> PlanConflictError:
    """Returns the error of `SaveOptions(replicas="check")`.

    Args:
        disagreements: Which items differ between which ranks, in words.
        url: Of the target.
    """
    return PlanConflictError(
        f"{disagreements}. Make the ranks agree, or save with SaveOptions(replicas='warn') to "
        f"take the lowest rank's value",
        checkpoint_id=url,
    )


def lost_race(vote: Vote, lost: Lost) -> CheckpointExistsError:
    """Returns the error of an attempt that was overtaken.

    Args:
        vote: On the attempt.
        lost: Its decision.
    """
    if lost.is_delete:
        return CheckpointExistsError(
            f"Expected slot {lost.slot} to be free for attempt {vote.attempt}, but the checkpoint "
            f"id was deleted in it meanwhile. Save again",
            checkpoint_id=vote.target.url,
        )
    return CheckpointExistsError(
        f"Expected slot {lost.slot} to be free for attempt {vote.attempt}, but another save of "
        f"the same checkpoint id (attempt {lost.attempt}) was committed in it first. Only one "
        f"save at a time can have an id",
        checkpoint_id=vote.target.url,
    )


def replaced_since(attempt: str, lost: Lost, url: str, rank: int) -> CheckpointExistsError:
    """Returns the error of a rank that learns of the commit when it does not stand any more.

    Args:
        attempt: Of the rank.
        lost: What came after it.
        url: Of the target.
        rank: Which.
    """
    what = "deleted" if lost.is_delete else f"saved again (attempt {lost.attempt})"
    return CheckpointExistsError(
        f"Attempt {attempt} was committed, but this rank learned it late: the checkpoint id was "
        f"{what} in slot {lost.slot} since. Only one save at a time can have an id",
        checkpoint_id=url,
        rank=rank,
    )


def overtaken(cause: CheckpointError, vote: Vote) -> CheckpointError:
    """Returns the error of a save that failed, with a note when another one came before it.

    Args:
        cause: Why it failed; not changed.
        vote: That fenced it off.
    """
    if vote.met is None:
        return cause
    told = copy.copy(cause)
    what = "the id was deleted" if vote.met.is_delete else f"attempt {vote.met.attempt} committed"
    note = (
        f"While attempt {vote.attempt} ran, {what} in slot {vote.met.slot}, which removes files of "
        f"all other attempts. Only one save at a time can have an id"
    )
    told.__notes__ = [*getattr(cause, "__notes__", ()), note]
    return told


def fenced_off(vote: Vote, fenced: Fenced) -> SaveCancelledError:
    """Returns the error of an attempt that somebody else declared failed.

    Args:
        vote: On the attempt.
        fenced: Its decision.
    """
    return SaveCancelledError(
        f"Attempt {vote.attempt} was declared failed by somebody else before its commit: slot "
        f"{fenced.slot} holds an abort record for it",
        checkpoint_id=vote.target.url,
    )


def undecided(vote: Vote, cause: str) -> CommitUnknownError:
    """Returns the error of a vote that stays open.

    Args:
        vote: On the attempt.
        cause: What went wrong, in words; may be empty.
    """
    why = f" ({cause})" if cause else ""
    return CommitUnknownError(
        f"The storage did not say whether attempt {vote.attempt} was committed in slot "
        f"{vote.slot}{why}. Ask ray_dcp.outcome({vote.target.url!r}, {vote.attempt!r}) later",
        attempt=vote.attempt,
        checkpoint_id=vote.target.url,
    )


def other_attempt(receipt: Fenceable, attempt: str, epoch: int, url: str) -> CommitUnknownError:
    """Returns the error of a receipt for another attempt than the one that runs.

    Args:
        receipt: The stray one.
        attempt: That runs; empty when none does yet.
        epoch: Of this coordinator.
        url: Of the target.
    """
    return CommitUnknownError(
        f"Expected a receipt for attempt {attempt or '(none yet)'} of epoch {epoch}, but rank "
        f"{receipt.rank} sent one for attempt {receipt.attempt} of epoch {receipt.epoch}: the "
        f"coordinator was restarted in between, or this rank was replaced. It is ignored; the "
        f"storage tells what became of that attempt",
        attempt=receipt.attempt,
        checkpoint_id=url,
        rank=receipt.rank,
    )


def slow(phase: str, option: str, after_s: float, url: str) -> DeadlineError:
    """Returns the error of a task that took too long.

    Args:
        phase: In which.
        option: Of `SaveOptions`, to raise.
        after_s: Its value, in seconds.
        url: Of the target.
    """
    return DeadlineError(
        f"Expected {phase} to end within {after_s:g} s, but the storage or the coordinator was "
        f"slower. Raise SaveOptions.{option}, or look at the storage",
        checkpoint_id=url,
    )


def warning(what: str, failed: Failed) -> str:
    """Returns the warning that something after the commit failed.

    Args:
        what: In words, so that "it" is the checkpoint.
        failed: What happened.
    """
    error = failed.error
    return f"The checkpoint is committed, but {what}: {type(error).__name__}: {error}"


def both_gone(rank: int, num_files: int, reason: str) -> ParticipantError:
    """Returns the error for bytes whose stager and rank are lost.

    Args:
        rank: Whose bytes.
        num_files: Files of the rank without a receipt.
        reason: What became of the stager, in words.
    """
    return ParticipantError(
        f"Expected a stager to write the bytes of rank {rank}, but it was lost with {num_files} "
        f"files unwritten ({reason}), and so was the rank, which could have given them again. "
        f"Save again",
        rank=rank,
    )


REASON_LENGTH = 500

MOST_TOLD_BYTES = 64 << 10
"""Longest manifest that every rank is sent. Why: it names all files, so that with 10,000 ranks that
each get one, 10 GB would leave the coordinator."""

MOST_ROUNDS = 3
"""A plan of earlier may turn out not to hold by what ranks are asked first; then they are asked for
all that a new one needs: few ranks first, where their rows may tell those of the others."""


class JoinedSave(Operation):
    """A save until it has a plan.

    Args:
        first: The first join; hand it to `receive` as well.
    """

    def __init__(self, first: SaveJoin) -> None:
        super().__init__(first)
        self._target = first.target
        self._options = first.options
        self._planning = Planning(first.world_size, first.options, PlanCache(), first.target)
        self._seen = RecordsRead(0, None, None, ())
        self._error: CheckpointError | None = None
        self._warnings: list[str] = []
        self._rounds = 0
        self._stats: dict[int, bytes] = {}

    def use(self, shelf: PlanCache) -> None:
        """Takes what the coordinator knows from earlier saves. To be called first."""
        self._planning = Planning(self.world_size, self._options, shelf, self._target)

    @abstractmethod
    def _on_plan(self, planned: Planned) -> Commands:
        """Takes the plan."""

    @abstractmethod
    def _fail(self, error: CheckpointError) -> Commands:
        """Fails the save."""

    def _on_join(self, join: SaveJoin) -> Commands:
        self._planning.take(join)
        if join.stats:
            self._stats[join.rank] = join.stats
        if self.phase == "joining":
            self._admit(join)
            return self._joined()
        self._note(join, join.error)
        return self._gathered()

    def join_together(self, first: SaveJoin, joins: Sequence[SaveJoin]) -> Commands | None:
        """Takes joins that are alike but for rank, fingerprint and values.

        Args:
            first: Any of them.
            joins: All of them.

        Returns:
            What to do now; None where they have to be taken one by one, and nothing has changed.
        """
        ranks = [join.rank for join in joins]
        plain = (
            self.phase == "joining"
            and self._outcome is None
            and not self._differing
            and identity(first) == identity(self._first)
            and self._openings.keys().isdisjoint(ranks)
            and self._are_new(ranks)
        )
        if not plain:
            return None
        self._planning.take_all(joins)
        self._openings.update(zip(ranks, joins, strict=True))
        self._note_all(step_of(first), ranks)
        return self._joined()

    def _joined(self) -> Commands:
        if not self._roll.is_complete:
            return self._wait(self._options.plan_timeout_s)
        if self._roll.errors:
            return self._fail(combine(self._roll.errors, self._target.url))
        return self._ask_ranks()

    def _ask_ranks(self) -> Commands:
        asked = self._planning.ask()
        if not asked:
            return self._step("reading", ReadRecords(self._target), self._options.plan_timeout_s)
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            return self._fail(self._contradiction(f"answer of {name_ranks(asked)} without items"))
        self._call("gathering")
        for rank in range(self.world_size):
            if rank not in asked:
                self._roll.note(rank, None)
        answers = [self._ask(rank, reply) for rank, reply in asked.items()]
        return (*answers, *self._wait(self._options.plan_timeout_s))

    def _ask(self, rank: int, reply: Reply) -> Answer:
        step = step_of(self._planning.last_of(rank))
        del self._waiting[rank, step]
        self._given[rank, step] = reply
        return Answer(self.key, rank, step, reply)

    def _gathered(self) -> Commands:
        if not self._roll.is_complete:
            return self._wait(self._options.plan_timeout_s)
        if self._roll.errors:
            return self._fail(combine(self._roll.errors, self._target.url))
        return self._ask_ranks()

    def _read(self, seen: RecordsRead) -> Commands:
        if seen.committed is not None and not self._options.overwrite:
            return self._fail(no_overwrite(seen.committed, self._target.url))
        self._seen = seen
        self._warnings.extend(seen.warnings)
        plan = self._planning.plan()
        if isinstance(plan, Planned):
            return self._on_plan(plan)
        return self._step("planning", plan, self._options.plan_timeout_s)

    def _is_refused(self, planned: Planned) -> bool:
        """Whether the values of ranks differ, and may not; where they may, a warning says so."""
        if planned.disagreements and self._options.replicas != "check":
            self._warnings.append(f"{planned.disagreements}. The lowest rank's are saved")
            return False
        return bool(planned.disagreements)

    def _lacks(self, missing: RowsMissing) -> Commands:
        self._planning.lacks(missing.ranks)
        return self._ask_ranks()

    def _made(self, planned: Planned) -> Commands:
        self._planning.made(planned)
        return self._on_plan(planned)

    def _overdue_ranks(self, what: str, option: str) -> Commands:
        after_s: float = getattr(self._options, option)
        self._overdue(what, after_s, f"raise SaveOptions.{option}")
        return self._fail(combine(self._roll.errors, self._target.url))

    def _too_slow(self, option: str) -> Commands:
        after_s: float = getattr(self._options, option)
        return self._fail(slow(self.phase, option, after_s, self._target.url))


class SaveMachine(JoinedSave):
    """One save of all ranks of a session.

    Args:
        first: The first join; hand it to `receive` as well.
        epoch: Of the coordinator.
        new_attempt: Makes up an attempt id that no other save ever had.

    Attributes:
        is_cancelled: It fails, or failed, because of `cancel`.
    """

    def __init__(self, first: SaveJoin, *, epoch: int, new_attempt: Callable[[], str]) -> None:
        super().__init__(first)
        self._epoch = epoch
        self._epochs = {epoch}
        self._new_attempt = new_attempt
        self._plan: GlobalPlan | None = None
        self._attempt = ""
        self._receipts: list[FileReceipt | FileReceipts] = []
        self._built: CommitBuilt | None = None
        self._vote = Vote(first.target, "", 1)
        self._won: Won | None = None
        self._later: list[Task] = []
        self.is_cancelled = False

    def cancel(self, reason: str) -> Commands:
        """Fails the save, unless its commit has begun.

        Args:
            reason: Who wants it, for the error.

        Returns:
            What to do now; nothing when it is too late.
        """
        if self.over or self._error is not None or self._vote.at_stake:
            return ()
        self.is_cancelled = True
        return self._fail(
            SaveCancelledError(f"The save was cancelled: {reason}", checkpoint_id=self._target.url)
        )

    def receive(self, request: Request) -> Commands:
        """See `Operation.receive`; receipts of another attempt or epoch are refused first."""
        if isinstance(request, SaveReceipt):
            self._check_fence(request)
        return super().receive(request)

    def written_together(
        self, first: SaveReceipt, ranks: Sequence[int], files: FileReceipts
    ) -> Commands | None:
        """As `join_together`, for ranks that wrote `files` without an error, each its own."""
        plain = self.phase == "writing" and self._outcome is None
        plain &= first.attempt == self._attempt and first.epoch in self._epochs
        if not plain or not self._are_new(ranks):
            return None
        self._note_all(step_of(first), ranks)
        self._receipts.append(files)
        return self._received()

    def _on_request(self, request: Request) -> Commands:
        match self.phase, request:
            case (("joining" | "gathering"), SaveJoin()):
                return self._on_join(request)
            case "writing", SaveReceipt():
                self._note(request, request.error)
                self._receipts.extend(request.files)
                return self._received()
            case (("aborting" | "cleaning"), SaveReceipt()):
                # The save fails already; this rank is told when that is decided.
                self._note(request, request.error)
                return ()
        raise self._contradiction(f"{type(request).__name__} of rank {request.rank}")

    def _on_result(self, result: Result) -> Commands:
        match self.phase, result:
            case "reading", RecordsRead():
                return self._read(result)
            case "planning", Planned():
                return self._made(result)
            case "planning", RowsMissing():
                return self._lacks(result)
            case "building", CommitBuilt():
                self._built = result
                task = WriteTable(self._target, result.files)
                return self._step("table", task, self._options.commit_timeout_s)
            case "table", Finished() if self._built is not None:
                vote = self._vote.commit(self._built.record)
                return self._step("record", vote, self._options.commit_timeout_s)
            case (
                ("record" | "aborting"),
                (RecordCreated() | SlotTaken() | SlotFree() | Failed()),
            ):
                return self._advance(self._vote.tell(result))
            case "publishing", Published(superseded=True):
                # Why nothing is collected: the later save does it, and `.metadata` is its own.
                self._warnings.append(REPLACED_SINCE)
                return self._done()
            case "publishing", Published():
                return self._collect()
            case "publishing", Failed():
                # Why nothing is collected: the `.metadata` that still stands may name those files.
                what = ".metadata could not be published, so stock DCP does not see it"
                self._warnings.append(warning(what, result))
                return self._done()
            case "collecting", Finished():
                return self._done()
            case "collecting", Failed():
                what = "files that it replaced could not all be deleted (the next save does it)"
                self._warnings.append(warning(what, result))
                return self._done()
            case (("projecting" | "cleaning"), (Finished() | Failed())):
                return self._go_on()
            case _, Failed():
                return self._fail(located(result.error, self._target.url))
        raise self._contradiction(f"result {type(result).__name__}")

    def _on_expired(self) -> Commands:
        match self.phase:
            case "joining":
                return self._overdue_ranks("join the save", "plan_timeout_s")
            case "gathering":
                return self._overdue_ranks("say what it holds", "plan_timeout_s")
            case "writing":
                return self._overdue_ranks("write its part", "write_timeout_s")
            case "reading" | "planning":
                return self._too_slow("plan_timeout_s")
            case "building" | "table":
                return self._too_slow("commit_timeout_s")
            case "record" | "aborting":
                return tuple(self._conclude(self._undecided()))
            case "publishing" | "collecting":
                self._warnings.append(
                    f"The checkpoint is committed, but {self.phase} took longer than "
                    f"SaveOptions.commit_timeout_s={self._options.commit_timeout_s:g} s"
                )
                return tuple(self._conclude(self._success()))
            case "projecting":
                return tuple(self._finish())
        return ()

    def _on_lost(self, errors: Mapping[int, CheckpointError]) -> Commands:
        match self.phase:
            case "joining":
                self._roll.blame(errors)
                return self._joined()
            case "gathering":
                self._roll.blame(errors)
                return self._gathered()
            case "reading" | "planning":
                return self._fail(combine(errors, self._target.url))
            case "writing":
                # A rank whose receipt is here has done its share: its files are durable.
                self._roll.blame({r: e for r, e in errors.items() if r not in self._roll.came})
                return self._received()
        return ()

    # Planning

    def _on_plan(self, planned: Planned) -> Commands:
        if self._is_refused(planned):
            return self._fail(disagreeing_values(planned.disagreements, self._target.url))
        self._plan = planned.plan
        self._attempt = self._new_attempt()
        if any(verdict.attempt == self._attempt for verdict in self._seen.decided):
            # Why possible: whoever makes up attempts may tell them to others before.
            return self._fail(
                SaveCancelledError(
                    f"Attempt {self._attempt} was ended by another rank before this save "
                    "was planned"
                )
            )
        self._vote = self._new_vote()
        self._call("writing")
        go = partial(
            self._planning.go,
            planned=planned,
            attempt=self._attempt,
            epoch=self._epoch,
            warnings=planned.warnings,
            create_if_absent=self._seen.create_if_absent,
        )
        told = self._give(go, go(0) if self._planning.all_know(planned) else None)
        self._planning.clear()
        return (self._arm(self._options.write_timeout_s), *told)

    # Writing

    def _check_fence(self, receipt: Fenceable) -> None:
        if receipt.attempt != self._attempt or receipt.epoch not in self._epochs:
            raise other_attempt(receipt, self._attempt, self._epoch, self._target.url)
        if not 0 <= receipt.rank < self.world_size:
            raise self._contradiction(f"SaveReceipt of rank {receipt.rank}")

    def _received(self) -> Commands:
        if not self._roll.is_complete:
            return self._wait(self._options.write_timeout_s)
        if self._roll.errors:
            return self._fail(combine(self._roll.errors, self._target.url))
        if self._plan is None:
            raise self._contradiction("receipt without a plan")
        task = BuildCommit(
            self._target,
            self._attempt,
            self._epoch,
            self._plan,
            tuple(self._receipts),
            self._seen.last_slot,
            self._seen.foreign_metadata,
            self._seen.decided,
            self._options.stock_metadata is True,
            tuple(self._stats[rank] for rank in sorted(self._stats)),
        )
        return self._step("building", task, self._options.commit_timeout_s)

    # The vote

    def _new_vote(self) -> Vote:
        return Vote(
            self._target,
            self._attempt,
            self._seen.last_slot + 1,
            create_if_absent=self._seen.create_if_absent,
        )

    def _advance(self, step: VoteTask | Decision) -> Commands:
        match step:
            case Won():
                return self._publish(step)
            case Lost():
                self._error = lost_race(self._vote, step)
                return self._clean(self._error)
            case Fenced() if self.phase == "record":
                return self._clean(fenced_off(self._vote, step))
            case Fenced():
                return self._clean(overtaken(self._cause(), self._vote))
            case Open() if self.phase == "record" and self._seen.create_if_absent:
                return self._abort(step.error)
            case Open():
                return self._leave_open(step.error)
        return (self._perform(step),)

    def _publish(self, won: Won) -> Commands:
        self._won = won
        metadata = self._built.metadata if self._built else None
        task = PublishMetadata(self._target, won.slot, metadata)
        return self._step("publishing", task, self._options.commit_timeout_s)

    def _collect(self) -> Commands:
        if not self._seen.replaced:
            return self._done()
        task = CollectReplaced(self._target, self._seen.replaced)
        return self._step("collecting", task, self._options.commit_timeout_s)

    def _done(self) -> Commands:
        told = self._conclude(self._success())
        self._later = self._planning.later(REPLACED_SINCE not in self._warnings)
        return (*told, *self._go_on())

    def _go_on(self) -> Commands:
        """Does what is left to be done when all were told."""
        if not self._later:
            return tuple(self._finish())
        return self._step("projecting", self._later.pop(0), self._options.commit_timeout_s)

    def _success(self) -> Reply:
        if self._won is None:
            raise self._contradiction("success before the commit")
        record = self._won.record if len(self._won.record) <= MOST_TOLD_BYTES else b""
        return SaveOutcome(self._attempt, self._won.slot, record, tuple(self._warnings))

    # Failing

    def _fail(self, error: CheckpointError) -> Commands:
        if self._plan is None:
            return self._refuse_all(error)
        return self._abort(error)

    def _abort(self, error: CheckpointError) -> Commands:
        """Fences the attempt off before anybody is told that it failed."""
        self._error = error
        reason = f"{type(error).__name__}: {error.message}"[:REASON_LENGTH]
        task = self._vote.abort(reason, error.rank)
        return self._step("aborting", task, self._options.commit_timeout_s)

    def _leave_open(self, error: CheckpointError) -> Commands:
        """Ends a save whose abort record could not be created, or would be no obstacle."""
        self._error = self._error or error
        if self._vote.at_stake:
            return (*self._conclude(self._undecided()), *self._finish())
        # No manifest was ever tried, so none will come: this failure is final all the same.
        cause = self._cause()
        note = f"No abort record could be written for attempt {self._attempt}: {error}"
        cause.__notes__ = [*getattr(cause, "__notes__", ()), note]
        return self._clean(cause)

    def _clean(self, error: CheckpointError) -> Commands:
        """Tells the failure, then deletes what was written: the attempt can't commit any more."""
        answers = self._conclude(Refused(error))
        self._to("cleaning")
        return (*answers, self._perform(CollectReplaced(self._target, self._written_keys())))

    def _written_keys(self) -> tuple[str, ...]:
        files = self._plan.table.files if self._plan else ()
        keys = [key.replace("{attempt}", self._attempt) for key in files]
        return (*keys, *(key for key, _ in (self._built.files if self._built else ())))

    def _undecided(self) -> Refused:
        if not self._vote.at_stake:
            return Refused(self._cause())
        cause = "" if self._error is None else self._error.message
        return Refused(undecided(self._vote, cause))

    def _cause(self) -> CheckpointError:
        return self._error or InternalError("A save failed without an error. Please report this")

    def _finish(self) -> list[Command]:
        """Ends in the phase that says what the ranks were told."""
        match self._outcome:
            case SaveOutcome():
                return self._end("done")
            case Refused(error=CommitUnknownError()):
                return self._end("unknown")
        return self._end("failed")

    def _end(self, phase: str) -> list[Command]:
        self._plan = None
        self._built = None
        self._planning.clear()
        self._receipts.clear()
        self._stats.clear()
        return super()._end(phase)
