"""The save machine: from the ranks' joins to one committed checkpoint, or to one error for all.

| phase | waits for | then |
|---|---|---|
| joining | `SaveJoin` of every rank | ask ranks for unknown rows, or read what stands there |
| gathering | `SaveJoin` of those, again | look at what stands there |
| reading | `RecordsRead` | refuse, or plan |
| planning | `Planned` | `SaveGo` to every rank: *from here on the attempt may be committed* |
| writing | `SaveReceipt` of every rank | build table, manifest and `.metadata` |
| building | `CommitBuilt` | write the table |
| table | `Finished` | create the manifest |
| record | the vote | *committed*: publish `.metadata` |
| publishing | `Published` | delete what other attempts left, and their records |
| collecting | `Finished` | `SaveOutcome` to every rank: done |
| projecting | `Finished` | all were told; `.metadata` made `"later"`, the plan is kept: done |
| aborting | the vote | `Refused` to every rank: delete what was written |
| cleaning | `Finished` | failed |

What a crash between any two leaves: until `record` the previous checkpoint, from it on this one.
`done`, `failed` and `unknown` are the ends. The timer never stops a vote: when it runs out the
ranks are told what is known, and the machine goes on to learn the rest.

*Invariant*: only the coordinator that made up an attempt commits it, and it never tries to after
it said that the save failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ray_dcp.errors import CheckpointError, CommitUnknownError, InternalError, SaveCancelledError
from ray_dcp.plan.values import GlobalPlan
from ray_dcp.protocol.commands import (
    BuildCommit,
    CollectReplaced,
    Command,
    CommitBuilt,
    Failed,
    Finished,
    Planned,
    Published,
    PublishMetadata,
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
from ray_dcp.protocol.joined_save import MOST_TOLD_BYTES, REASON_LENGTH, JoinedSave
from ray_dcp.protocol.messages import (
    Fenceable,
    FileReceipt,
    Refused,
    Reply,
    Request,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
)
from ray_dcp.protocol.operation import Commands
from ray_dcp.protocol.receipts import FileReceipts
from ray_dcp.protocol.save_errors import (
    REPLACED_SINCE,
    disagreeing_values,
    fenced_off,
    lost_race,
    other_attempt,
    overtaken,
    undecided,
    warning,
)
from ray_dcp.protocol.verdict import combine, located
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won

__all__ = ["SaveMachine"]


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
                # Why nothing is collected: who came later does it, and `.metadata` is his.
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
            return self._fail(SaveCancelledError(
                f"Attempt {self._attempt} was ended by another rank before this save was planned"
            ))  # fmt: skip
        self._vote = self._new_vote()
        self._call("writing")
        go = partial(
            self._planning.go, planned=planned, attempt=self._attempt, epoch=self._epoch,
            warnings=planned.warnings, create_if_absent=self._seen.create_if_absent,
        )  # fmt: skip
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
        files = self._plan.files if self._plan else ()
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
