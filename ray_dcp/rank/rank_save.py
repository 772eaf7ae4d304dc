"""The part of one rank in a save (join, write, report): generators that yield requests.

They depend on neither torch nor Ray: `Captured` is the rank's state, and `rank_load.drive` carries
the requests. A rank joins with a fingerprint of its items if that suffices, else with rows.
`PlanMemory` keeps the rank's parts of the last plans, so that the next save of the same items sends
no rows. A step that fails is reported to every rank, instead of only ending this process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ray_dcp.commit_protocol.error_aggregation import (
    exchanged,
    located,
    reply_error,
)
from ray_dcp.commit_protocol.messages import (
    Exchange,
    FileReceipt,
    OpKey,
    Phases,
    Refused,
    Reply,
    Request,
    SaveGo,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
    SaveStaged,
    SendItems,
    Target,
)
from ray_dcp.commit_protocol.plan_cache import PlanMemory, Remembered
from ray_dcp.commit_protocol.vote import Fenced, Lost, Won
from ray_dcp.core.checksums import block_bytes_for, num_blocks
from ray_dcp.core.columns import encode
from ray_dcp.core.phases import CAPTURE, COMMIT, PLAN, STAGED, WRITE
from ray_dcp.core.processes import Stop, run_within
from ray_dcp.core.values import Columns, RankPlan
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    InternalError,
    ParticipantError,
    RankDisagreementError,
)
from ray_dcp.events import contained
from ray_dcp.format.manifest import TIED, Manifest, decode_record
from ray_dcp.io.writer import Deferred, PieceSource, Source, part_key, write_part
from ray_dcp.options import SaveOptions
from ray_dcp.place.outcome import settle
from ray_dcp.place.stock_metadata import republish
from ray_dcp.place.visibility import check_visible
from ray_dcp.planning.fingerprint import fingerprint
from ray_dcp.planning.merge import contents_of, without_contents
from ray_dcp.rank.captured import Captured
from ray_dcp.rank.unchanged import RunHistory
from ray_dcp.session.call import Call
from ray_dcp.session.rank_progress import RankProgress, WatchedStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

T = TypeVar("T")


@contextmanager
def naming_checkpoint(checkpoint_id: str) -> Iterator[None]:
    """Adds the checkpoint id to errors of ray_dcp that do not name one.

    Args:
        checkpoint_id: Checkpoint of the operation.
    """
    try:
        yield
    except CheckpointError as error:
        placed = located(error, checkpoint_id)
        # Ranks that disagree may do so about the checkpoint; that error names all of theirs.
        if placed is error or isinstance(error, RankDisagreementError):
            raise
        try:
            raise placed from error.__cause__
        finally:
            # Why: the error has this frame in its traceback, and by it the state.
            del placed


def result_or_error(
    work: Callable[[], T], doing: str, rank: int
) -> tuple[T, None] | tuple[None, CheckpointError]:
    """Returns the result of a step, or its error, which the rank has to report.

    Args:
        work: The step.
        doing: Description of the step.
        rank: This rank.
    """
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - reported to every rank, which raises it
        return None, to_wire(error, doing, rank=rank)


def decided_on_rank_0(
    request: Exchange, decide: Callable[[], Any], doing: str
) -> Generator[Exchange, Reply, Any]:
    """Returns the decision of rank 0, on every rank.

    Args:
        request: The exchange of this rank, with an empty outbox.
        decide: Called on rank 0 only; returns a value that JSON can represent.
        doing: Description of the decision, for errors.

    Raises:
        CheckpointError: `decide` raised it, or a rank failed: the same error on every rank.
    """
    if request.rank == 0:
        data, error = result_or_error(lambda: json.dumps(decide()).encode(), doing, 0)
        outbox = {} if data is None else dict.fromkeys(range(request.world_size), data)
        request = replace(request, outbox=outbox, error=error)
    return json.loads((yield from exchanged(request))[0])


ROWS_AT_ONCE = 64
"""Up to this many ranks send their rows with the first join of a session, which saves a round trip.
With more, the coordinator asks one rank of each fingerprint, as most ranks hold the same items."""


logger = logging.getLogger(__name__)

Opener = Callable[[Target], Storage]


@dataclass(frozen=True)
class RankSave:
    """The part of one rank in a save."""

    key: OpKey
    """Key of the operation, before any renumbering."""
    _: KW_ONLY
    rank: int
    world_size: int
    target: Target
    """Location of the checkpoint."""
    options: SaveOptions
    staged: bool = False
    """Whether stagers write the bytes."""
    opener: Opener = open_storage
    """Opens the storage."""
    progress: RankProgress = field(default_factory=RankProgress)
    """Progress of this rank, and whether it has to stop."""
    memory: PlanMemory = field(default_factory=PlanMemory)
    """Plans of earlier saves of this rank's session; the plan of this save is added."""
    history: RunHistory = field(default_factory=RunHistory)
    """What this rank knows of earlier saves, for `SaveOptions(unchanged="link")`."""
    node: str = ""
    """Name of this rank's node; empty if unknown."""
    about: Mapping[str, Any] | None = None
    """`Manifest.about` of the checkpoint."""
    attempt: str = ""
    """Id for the attempt, the same on all ranks; the coordinator makes one if it is empty."""
    folder: Target | None = None
    """Folder of this rank alone, in a save whose folders Ray Train merges (`own_folders`); `target`
    is then that of rank 0."""

    @classmethod
    def of(
        cls,
        call: Call,
        target: Target,
        options: SaveOptions,
        *,
        staged: bool = False,
        folder: Target | None = None,
        attempt: str = "",
    ) -> RankSave:
        """Returns the part of a rank in the next operation of a user's call."""
        return cls(
            call.next_key(),
            rank=call.rank,
            world_size=call.world_size,
            target=target,
            options=options,
            staged=staged,
            progress=call.progress,
            memory=call.plans,
            history=call.history,
            node=call.node,
            folder=folder,
            attempt=attempt,
        )

    def run(self, capture: Callable[[], Captured]) -> Generator[Request, Reply, SaveOutcome]:
        """Saves, as a rank that writes its own files.

        Args:
            capture: Returns the captured state; called once, at the start.

        Returns:
            A generator that returns the outcome, with this rank's warnings too.

        Raises:
            CheckpointError: The save failed, on this rank or on another: the same error on all
                ranks.
            CommitUnknownError: Neither the coordinator nor the storage says whether it was
                committed.
        """
        go, captured = yield from self.join(capture)
        receipt = self.write(go, captured.source, captured.deferred)
        try:
            outcome = yield from self.outcome(go, receipt)
        except CheckpointError as error:
            if self.folder is not None and not isinstance(error, CommitUnknownError):
                with contained("The removal of this rank's files"):
                    self._open().delete([part_key(one, go.attempt) for one in go.plan.files])
            raise
        warnings = dict.fromkeys([*captured.warnings, *go.warnings, *outcome.warnings])
        return replace(outcome, warnings=tuple(warnings), differing=go.differing)

    def join(
        self, capture: Callable[[], Captured]
    ) -> Generator[Request, Reply, tuple[SaveGo, Captured]]:
        """Joins the save; returns the files that this rank writes, and the captured state.

        Args:
            capture: As for `run`. The captured state may be dropped once its bytes are staged.

        Raises:
            CheckpointError: The save failed, on this rank or on another: the same error on all
                ranks.
        """
        rank, options, progress, plans = self.rank, self.options, self.progress, self.memory
        progress.begin(self.key)
        progress.enter(CAPTURE)
        captured, error = result_or_error(capture, "capturing the state dict", rank)
        join = SaveJoin(
            self.key,
            rank,
            self.world_size,
            self.target,
            options,
            b"",
            error,
            self.staged,
            node=self.node,
            about=self.about,
            attempt=self.attempt,
        )
        known: Remembered | None = None
        if captured is not None:
            if captured.tied is not None:
                join = replace(join, about={**(self.about or {}), TIED: captured.tied})
            columns = captured.columns
            if options.unchanged == "link":
                columns = self.history.guess(self.target, columns, self.opener)
            first = partial(_first, join, columns, plans)
            described, error = result_or_error(first, "encoding the plan", rank)
            join, known = described or (replace(join, error=error), None)
        progress.enter(PLAN)
        join = replace(join, phases=self._phases(join))
        with naming_checkpoint(self.target.url):
            reply = yield join
            while isinstance(reply, SendItems) and captured is not None:
                again = partial(_join_with_rows, join, reply, columns)
                answer, error = result_or_error(again, "encoding the plan", rank)
                join = answer or replace(join, error=error, asked=join.asked + 1)
                reply = yield join
            if not isinstance(reply, SaveGo) or captured is None:
                raise reply_error(reply, rank)
            progress.attempt, progress.plan = reply.attempt, reply.origin
            progress.differing = reply.differing
            if reply.part is None and known is not None and reply.digest == known.digest:
                reply = replace(reply, part=known.plan)
        if reply.groups:
            plans.put(join.fingerprint, Remembered(reply.digest, reply.plan, *reply.groups))
        if options.unchanged == "link":
            # Suppressed: the step that takes the bytes of these items reports the error.
            with suppress(Exception):
                counts = _deferred_checks(reply.plan, captured)
                self.history.planned(self.target, reply, columns, counts, self.opener)
        return reply, captured

    def write(
        self,
        go: SaveGo,
        source: Source | None = None,
        deferred: Deferred | None = None,
        pieces: Callable[[int], PieceSource] | None = None,
    ) -> SaveReceipt:
        """Writes this rank's part of the plan; returns the receipt, which may report a failure.

        Args:
            go: The assignment of this rank.
            source: See `write_part`.
            deferred: See `write_part`.
            pieces: See `write_part`.
        """
        progress, rank, timeout_s = self.progress, self.rank, self.options.write_timeout_s

        def write() -> tuple[FileReceipt, ...]:
            storage = self._open()
            receipts = write_part(
                WatchedStorage(storage, progress),
                go.plan,
                go.attempt,
                source=source,
                deferred=deferred,
                pieces=pieces,
                options=self.options,
                published=self.history.published(go.attempt, self.opener),
            )
            if self.folder is not None:  # The coordinator can't look there.
                check_visible(storage, [(one.key, one.num_bytes) for one in receipts])
            return receipts

        overdue = partial(
            progress.overdue, "write its part", "SaveOptions.write_timeout_s", timeout_s, rank
        )
        progress.enter(WRITE, sum(file.num_bytes for file in go.plan.files))
        in_time = partial(run_within, write, timeout_s, progress.stop, overdue)
        files, error = result_or_error(in_time, "writing", rank)
        progress.count_files(files or ())
        receipt = SaveReceipt(self.key, rank, go.attempt, go.epoch, files or (), error)
        return (
            replace(receipt, staged_bytes=progress.bytes.get("stage", 0))
            if self.staged
            else receipt
        )

    def outcome(
        self,
        go: SaveGo,
        request: SaveReceipt | SaveStaged,
        written: Callable[[], Sequence[FileReceipt]] = tuple,
    ) -> Generator[Request, Reply, SaveOutcome]:
        """Returns the outcome of the save, from the coordinator or else from the storage.

        Args:
            go: The assignment of this rank.
            request: The last request of this rank.
            written: Returns the receipts of what a stager wrote, if it is known.

        Raises:
            CheckpointError: The save failed.
            CommitUnknownError: Neither the coordinator nor the storage says whether it was
                committed.
        """
        rank, progress = self.rank, self.progress
        # Why: the rank of a stager can't distinguish its writing from the commit.
        progress.enter(STAGED if isinstance(request, SaveStaged) else COMMIT)
        request = replace(request, phases=self._phases(request))
        try:
            if progress.abandoned is not None:
                raise progress.abandoned
            outcome = yield request
        except CheckpointError as unanswered:
            outcome = self._settle_on_storage(go, unanswered)
        # Why InternalError: a coordinator that contradicted itself may have committed, or still
        # may.
        if isinstance(outcome, Refused) and isinstance(
            outcome.error, CommitUnknownError | InternalError
        ):
            outcome = self._settle_on_storage(go, reply_error(outcome, rank))
        if not isinstance(outcome, SaveOutcome):
            raise reply_error(outcome, rank)
        files: Sequence[FileReceipt] = () if isinstance(request, SaveStaged) else request.files
        if isinstance(request, SaveStaged):
            with contained("The count of what a stager wrote"):
                files = () if self.options.unchanged == "write" else written()
                if len(files) == len(go.plan.files):
                    progress.count_files(files)
                else:
                    progress.count(_bytes_by_stager(go, outcome))
        if self.options.unchanged == "link":
            with contained("The look at what was committed"):
                self.history.committed(go.attempt, outcome, files, self.opener)
        progress.over = progress.is_good = True
        return outcome

    def _phases(self, request: SaveJoin | SaveReceipt | SaveStaged) -> Phases:
        """Returns the phases of this rank until now that are not somebody else's."""
        # A stager reports itself what it writes; one of the user's copied before this save began.
        others = ("write" if isinstance(request, SaveStaged) else "") if self.staged else "stage"
        return tuple(one for one in self.progress.spent if one[0] != others)

    def _open(self) -> Storage:
        """Opens the storage that this rank writes to."""
        return self.opener(self.folder or self.target)

    def _settle_on_storage(self, go: SaveGo, unanswered: CheckpointError) -> SaveOutcome:
        """Returns the outcome by the records on storage, when the coordinator does not answer."""
        unanswered = located(unanswered, self.target.url)
        if self.folder is not None and self.rank:
            # Why final: the records are in the folder of rank 0, which is gone, or does not report
            # without this rank.
            raise unanswered
        timeout_s = self.options.commit_timeout_s

        def overdue() -> CommitUnknownError:
            return self._unknown_outcome_error(
                go,
                f"the storage did not answer within SaveOptions.commit_timeout_s={timeout_s:g} s, "
                f"and no coordinator did ({unanswered.message})",
                "when the storage answers again",
            )

        look = partial(self._settle_attempt, go, unanswered)
        return run_within(look, timeout_s, Stop(), overdue, unwind_s=0.0)

    def _settle_attempt(self, go: SaveGo, unanswered: CheckpointError) -> SaveOutcome:
        target, rank = self.target, self.rank
        decision = settle(
            target,
            go.attempt,
            reason=f"rank {rank} has no answer: {type(unanswered).__name__}",
            rank=rank,
            opener=self.opener,
            create_if_absent=go.create_if_absent,
        )
        match decision:
            case Won():
                warning = f"The coordinator did not confirm the commit, but it stands: {unanswered}"
                # Why rank 0: one is enough, and each would decode the whole chunk table.
                if rank == 0:
                    with suppress(CheckpointError):
                        republish(self.opener(target), target.url)
                return SaveOutcome(go.attempt, decision.slot, decision.record, (warning,))
            case Lost():
                how = f"saved again (attempt {decision.attempt})"
                raise CheckpointExistsError(
                    f"Attempt {go.attempt} was committed, but this rank learned it late: the "
                    f"checkpoint id was {'deleted' if decision.is_delete else how} in slot "
                    f"{decision.slot} since. Only one save at a time can have an id",
                    checkpoint_id=target.url,
                    rank=rank,
                )
            case Fenced() if not isinstance(unanswered, CommitUnknownError):
                raise unanswered
            case Fenced():
                raise ParticipantError(
                    f"The save failed: attempt {go.attempt} was declared failed in slot "
                    f"{decision.slot} after no coordinator knew its outcome. Save again. "
                    f"({unanswered.message})",
                    checkpoint_id=target.url,
                    rank=rank,
                )
        if isinstance(unanswered, CommitUnknownError):
            raise unanswered
        raise self._unknown_outcome_error(go, unanswered.message, "later")

    def _unknown_outcome_error(self, go: SaveGo, why: str, when: str) -> CommitUnknownError:
        return CommitUnknownError(
            f"It is not known whether attempt {go.attempt} was committed: {why}. Ask "
            f"ray_dcp.outcome({self.target.url!r}, {go.attempt!r}) {when}",
            attempt=go.attempt,
            checkpoint_id=self.target.url,
            rank=self.rank,
        )


def _first(
    join: SaveJoin, columns: Columns, memory: PlanMemory
) -> tuple[SaveJoin, Remembered | None]:
    """Returns the first join, and the part of an earlier plan that it refers to."""
    options = join.options
    name = fingerprint(
        columns,
        world_size=join.world_size,
        part_bytes=options.part_bytes,
        to_lowest_rank=options.dedup_save_to_lowest_rank,
    )
    known = memory.get(name)
    if known is not None:
        values = known.values(contents_of(columns))
        return replace(join, fingerprint=name, known=known.digest, values=values), known
    few = join.world_size <= ROWS_AT_ONCE
    rows = encode(without_contents(columns)) if few else b""
    return replace(join, fingerprint=name, columns=rows, contents=contents_of(columns)), None


def _bytes_by_stager(go: SaveGo, outcome: SaveOutcome) -> int:
    """Returns the number of bytes that a stager wrote for a rank, which nobody reports to it."""
    record = decode_record(outcome.manifest) if outcome.manifest else None
    files = record.files if isinstance(record, Manifest) else None
    # Why the plan's, without objects and checksums: the manifest is so long that nobody gets it.
    written = [file if files is None else files[file.file] for file in go.plan.files]
    return sum(file.num_bytes for file in written)


def _deferred_checks(plan: RankPlan, captured: Captured) -> tuple[int, ...]:
    """Returns for each file the number of checksums of its deferred items."""
    return tuple(
        sum(num_blocks(length, block_bytes_for(length)) for length in lengths)
        for lengths in (
            [len(captured.deferred(row)) for row in file.deferred.tolist()] for file in plan.files
        )
    )


def _join_with_rows(join: SaveJoin, asked: SendItems, columns: Columns) -> SaveJoin:
    rows = encode(without_contents(columns)) if asked.rows else b""
    return replace(join, columns=rows, contents=contents_of(columns), asked=join.asked + 1)
