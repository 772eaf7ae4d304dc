"""`Operation`: the base class of all machines, with the barrier of a step; and `ExchangeMachine`.

An operation is one call of all ranks. It tracks which ranks have arrived, which wait for a reply,
and the replies that were sent, so that a request that arrives twice gets the same reply. It decides
nothing about saving or loading.

`ExchangeMachine` is the simplest machine: every rank sends bytes to others and receives theirs. The
paths that run user code of DCP's interfaces in the ranks build all communication on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ray_dcp.commit_protocol.commands import (
    Answer,
    Arm,
    Command,
    Disarm,
    Perform,
    Result,
    Task,
    step_of,
)
from ray_dcp.commit_protocol.error_aggregation import (
    Opening,
    combine,
    deadline,
    describe,
    disagreement,
    identity,
    name_known,
    name_ranks,
)
from ray_dcp.commit_protocol.messages import Exchange, Exchanged, Refused, Reply, Request, SaveJoin
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
    RankDisagreementError,
)


class Barrier:
    """One barrier: the ranks that have arrived, failed or are missing.

    Args:
        world_size: Ranks `0` to `world_size - 1` have to arrive.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.arrived: set[int] = set()
        self.errors: dict[int, CheckpointError] = {}

    def note(self, rank: int, error: CheckpointError | None) -> None:
        """Records that a rank has arrived, with its error if it has one."""
        self.arrived.add(rank)
        if error is not None:
            self.errors.setdefault(rank, error)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has arrived or failed.

        Complexity: O(1) unless ranks have failed.
        """
        # Why this is not enough: a rank may be in both sets.
        if len(self.arrived) + len(self.errors) < self.world_size:
            return False
        return len(self.arrived) >= self.world_size or not self.missing

    def blame(self, errors: Mapping[int, CheckpointError]) -> None:
        """Records the errors of ranks that have not reported any themselves; keeps earlier ones."""
        for rank, error in errors.items():
            self.errors.setdefault(rank, error)

    @property
    def missing(self) -> list[int]:
        """Ranks that have neither arrived nor failed, ascending."""
        known = self.arrived | self.errors.keys()
        return [rank for rank in range(self.world_size) if rank not in known]


def two_calls(request: Opening, what: str) -> RankDisagreementError:
    """Returns the error of a rank that made two different calls as one operation.

    Args:
        request: The second call.
        what: How it differs from the first.
    """
    return RankDisagreementError(
        f"Expected one call of rank {request.rank} as operation {request.key.seq} of session "
        f"{request.key.session!r}, but a second one came with {what}. Two processes act as rank "
        f"{request.rank}, or it called from two threads at once",
        rank=request.rank,
    )


def compact(opening: Opening) -> Opening:
    """Returns the part of a request that is kept to recognise it when it arrives twice."""
    if isinstance(opening, SaveJoin) and (opening.columns or opening.contents):
        return replace(opening, columns=b"", contents=b"")
    return opening


def content(opening: Opening) -> tuple[object, ...]:
    """Returns a value that is equal if and only if the same call arrives twice."""
    # Why not ==: an error equals only itself, and arrives as another object by pickling.
    skipped, error = {"error"}, opening.error
    if isinstance(opening, SaveJoin) and opening.fingerprint:
        # Why: a rank that answers `SendItems` joins again, or fails in it: the call is the same.
        skipped |= {"columns", "contents", "known", "values", "asked"}
        error = None
    rest = [value for name, value in vars(opening).items() if name not in skipped]
    return (*rest, None if error is None else (type(error), error.message))


HISTORY_LENGTH = 64

Commands = tuple[Command, ...]


class Operation(ABC):
    """One operation: its ranks, their pending calls, the replies sent, its only timer and task.

    Subclasses handle accepted events in `_on_request`, `_on_result`, `_on_expired` and
    `_all_arrived`. An event that is refused raises before anything has changed.

    Args:
        first: The request that begins the operation; it must also be passed to `receive`.

    Attributes:
        key: Identifies the operation.
        url: URL of the checkpoint; None for an exchange.
        phase: Current phase, for messages and timers.
        over: Whether the operation has ended; late requests are still answered.
        describe_rank: Returns a description of a missing rank.
        ranks_do: For each phase that waits for ranks, what they have to do and the option that is
            the deadline.
        last_barrier: The last phase in which ranks arrive: a rank that dies after it arrived there
            has done its part.
    """

    ranks_do: Mapping[str, tuple[str, str]] = {}
    last_barrier = "joining"

    def __init__(self, first: Opening) -> None:
        self.key = first.key
        self.url = None if isinstance(first, Exchange) else first.target.url
        self.world_size = first.world_size
        self.phase = "joining"
        self.over = False
        self.describe_rank: Callable[[int], str] = lambda _: ""
        self._first = compact(first)
        self._openings: dict[int, Opening] = {}
        self._differing: dict[int, Opening] = {}
        self._lost: set[int] = set()
        self._absent: frozenset[int] = frozenset()
        self._waiting: dict[tuple[int, str], None] = {}
        self._replies: dict[tuple[int, str], Reply] = {}
        self._outcome: Reply | None = None
        self._barrier = Barrier(first.world_size)
        self._grace = False
        self._armed: str | None = None
        self._pending: Task | None = None
        self._history: deque[str] = deque(maxlen=HISTORY_LENGTH)

    @property
    def outcome(self) -> Reply | None:
        """The final reply to all ranks; None before it is known."""
        return self._outcome

    @property
    def call(self) -> str:
        """Description of the ranks' call."""
        return describe(self._first)

    @property
    def waiting_ranks(self) -> set[int]:
        """Ranks that wait for a reply."""
        return {rank for rank, _ in self._waiting}

    def awaited(self) -> str:
        """Returns a description of the missing ranks in a phase that moves no bytes, or ""."""
        idle = self._awaited_step() is not None and self.phase not in ("writing", "reading")
        missing = self._barrier.missing if idle else []
        return f"for {name_known(missing, self.describe_rank)}" if missing else ""

    # Events

    def receive(self, request: Request) -> Commands:
        """Accepts a request of a rank.

        A request that arrives twice gets the same reply. Once the operation has an outcome, every
        later request gets the outcome as its reply.

        Args:
            request: Any request with this key.

        Returns:
            The commands to execute.

        Raises:
            RankDisagreementError: The operation has begun, and this request is a different call.
            CheckpointError: The request is refused; nothing has changed.
        """
        if isinstance(request, Opening):
            error = self._find_objection(request)
            if error is not None and not self._have_disagreed():
                if self.phase != "joining":
                    raise error
                return self._record_difference(request, error)
        at = (request.rank, step_of(request))
        reply = self._replies.get(at) or self._outcome
        if reply is not None:
            return (Answer(self.key, (request.rank,), at[1], reply),)
        if at in self._waiting:
            return ()
        return self._on_request(request)

    def awaits(self, rank: int) -> bool:
        """Returns whether a rank has not joined yet."""
        return self.phase == "joining" and rank not in self._barrier.arrived

    def failed_without(self, request: Request) -> bool:
        """Returns whether the operation had failed when the rank of an opening first arrived."""
        opening = isinstance(request, Opening)
        return opening and self.over and request.rank in self._absent

    def is_same_call(self, request: Opening) -> bool:
        """Returns whether a call may be that of the other ranks, which may differ themselves."""
        return self._have_disagreed() or identity(request) == identity(self._first)

    def performed(self, task: Task, result: Result) -> Commands:
        """Accepts the result of the pending task; drops that of any other one.

        Raises:
            InternalError: The result is of the wrong kind.
        """
        if self._pending is None or (task is not self._pending and task != self._pending):
            return ()
        awaited, self._pending = self._pending, None
        self._log(type(result).__name__)
        try:
            return self._on_result(result)
        except InternalError:
            self._pending = awaited
            raise

    def expired(self, phase: str) -> Commands:
        """Handles the expired timer of a phase; ignores that of an earlier phase."""
        if self.over or phase != self.phase:
            return ()
        self._log("expired")
        awaited = self._awaited_step()
        if awaited is None:
            return self._on_expired()
        missing = self._barrier.missing
        if missing and not self._grace:  # with grace, it only waited for other ranks' errors
            self._barrier.blame(self._overdue_errors(missing, *awaited))
        return self._fail(combine(self._barrier.errors, self.url))

    def _overdue_errors(
        self, missing: Sequence[int], what: str, after_s: float, way_out: str
    ) -> Mapping[int, CheckpointError]:
        """Returns the errors of ranks that missed a deadline; see `_awaited_step`."""
        return deadline(self.key, missing, what, after_s, way_out, self.describe_rank)

    def needs(self, rank: int) -> bool:
        """Returns whether the loss of a rank would affect the operation."""
        concerns = 0 <= rank < self.world_size and rank not in self._lost
        return concerns and not self.over and self._outcome is None

    def lost(self, errors: Mapping[int, CheckpointError]) -> Commands:
        """Marks ranks as lost, with their errors, because they died, froze or left.

        A lost rank that sends again gets the outcome like the others, but does not count as
        arrived.
        """
        errors = {rank: error for rank, error in errors.items() if self.needs(rank)}
        if not errors:
            return ()
        self._lost.update(errors)
        self._log(f"lost {sorted(errors)}")
        return self._on_lost(errors)

    @abstractmethod
    def _on_request(self, request: Request) -> Commands:
        """Handles a request that did not arrive before."""

    @abstractmethod
    def _on_result(self, result: Result) -> Commands:
        """Handles the result of the pending task."""

    @abstractmethod
    def _on_expired(self) -> Commands:
        """Handles the expired timer of a phase that waits for a task."""

    @abstractmethod
    def _all_arrived(self) -> Commands:
        """Handles the arrival of every rank in this phase, without errors."""

    def _on_lost(self, errors: Mapping[int, CheckpointError]) -> Commands:
        """Handles the loss of ranks while there is no outcome."""
        if self._awaited_step() is None:
            return self._fail(combine(errors, self.url))
        if self.phase == self.last_barrier:
            errors = {rank: e for rank, e in errors.items() if rank not in self._barrier.arrived}
        self._barrier.blame(errors)
        return self._check_barrier()

    def _fail(self, error: CheckpointError) -> Commands:
        """Fails the operation at once; overridden where a commit may be at stake."""
        if self._differing and isinstance(error, RankDisagreementError):
            error = disagreement(self.key, {**self._openings, **self._differing})
        return (*self._conclude(Refused(error)), *self._end("failed"))

    # Requests

    def _find_objection(self, request: Opening) -> RankDisagreementError | None:
        differing = self._differing.get(request.rank)
        if differing is not None and content(differing) == content(compact(request)):
            return None
        if identity(request) != identity(self._first):
            openings = {self._first.rank: self._first, **self._openings, **self._differing}
            if request.rank in openings:
                return two_calls(request, "another call")
            return disagreement(self.key, {**openings, request.rank: request})
        if not 0 <= request.rank < self.world_size:
            return RankDisagreementError(
                f"Expected a rank from 0 to {self.world_size - 1} in a world of "
                f"{self.world_size}, but found {request.rank}. Give each rank its number in the "
                f"group",
                rank=request.rank,
            )
        known = self._openings.get(request.rank)
        if known is not None and content(known) != content(compact(request)):
            return two_calls(request, "other content")
        return None

    def _record_difference(self, request: Opening, error: RankDisagreementError) -> Commands:
        """Records a call that differs from the others'; waits `ERRORS_S` for more that differ."""
        self._log(f"{step_of(request)} of rank {request.rank} (differs)")
        self._waiting[request.rank, step_of(request)] = None
        if error.rank is not None:  # a single rank is at fault
            return self._fail(error)
        self._differing[request.rank] = compact(request)
        self._barrier.note(request.rank, error)
        return self._fail(error) if self._barrier.is_complete else self._wait(bounds.ERRORS_S)

    def _have_disagreed(self) -> bool:
        """Returns whether the outcome is that the ranks' calls differ; late ranks get that too."""
        outcome = self._outcome
        return isinstance(outcome, Refused) and isinstance(outcome.error, RankDisagreementError)

    def _admit(self, request: Opening) -> None:
        self._openings[request.rank] = compact(request)
        self._record_request(request, request.error)

    def _record_request(self, request: Request, error: CheckpointError | None) -> None:
        self._log(f"{step_of(request)} of rank {request.rank}{' (failed)' if error else ''}")
        self._waiting[request.rank, step_of(request)] = None
        self._barrier.note(request.rank, error)

    # Replies

    def _reply_each(self, reply_to: Callable[[int], Reply]) -> list[Command]:
        """Answers all pending calls, each with a reply for its rank."""
        answers: list[Command] = []
        for rank, step in self._waiting:
            reply = self._replies[rank, step] = reply_to(rank)
            answers.append(Answer(self.key, (rank,), step, reply))
        self._waiting.clear()
        return answers

    def _reply_alike(self, reply: Reply) -> list[Command]:
        """Answers all pending calls with the same reply, with one command for each step."""
        self._replies.update(dict.fromkeys(self._waiting, reply))
        by_step: dict[str, list[int]] = {}
        for rank, step in self._waiting:
            by_step.setdefault(step, []).append(rank)
        self._waiting.clear()
        return [Answer(self.key, tuple(ranks), step, reply) for step, ranks in by_step.items()]

    def _conclude(self, reply: Reply) -> list[Command]:
        """Sets the outcome, unless it is set, and answers all pending calls with it."""
        if self._outcome is not None:
            return []
        self._outcome = reply
        return self._reply_alike(reply)

    # Phases, timer and task

    def _enter(self, phase: str) -> None:
        self._log(f"→ {phase}")
        self.phase = phase

    def _call(self, phase: str) -> None:
        """Begins a phase in which every rank has to arrive once."""
        self._enter(phase)
        self._barrier = Barrier(self.world_size)
        self._grace = False

    def _end(self, phase: str) -> list[Command]:
        if self.phase == "joining":
            self._absent = frozenset(range(self.world_size)) - self._barrier.arrived
        self._pending = None
        self._enter(phase)
        self.over = True
        self._replies.clear()
        self._openings.clear()
        self._differing.clear()
        return [Disarm(self.key)]

    def _arm(self, after_s: float) -> Arm:
        self._armed = self.phase
        return Arm(self.key, self.phase, after_s)

    def _awaited_step(self) -> tuple[str, float, str] | None:
        """Returns what every rank has to do now, the deadline in seconds, and the way out.

        None in a phase that waits for no rank.
        """
        if self.phase not in self.ranks_do or isinstance(self._first, Exchange):
            return None
        (what, option), options = self.ranks_do[self.phase], self._first.options
        after_s: float = getattr(options, option)
        return what, after_s, f"raise {type(options).__name__}.{option}"

    def _check_barrier(self) -> Commands:
        """Continues or fails if every rank has arrived or failed; waits otherwise."""
        if not self._barrier.is_complete:
            awaited = self._awaited_step()
            return () if awaited is None else self._wait(awaited[1])
        if self._barrier.errors:
            return self._fail(combine(self._barrier.errors, self.url))
        return self._all_arrived()

    def _wait(self, after_s: float) -> Commands:
        """Arms the timer for missing ranks: the deadline or, after an error, a grace period."""
        if self._barrier.errors and not self._grace:
            self._grace = True
            lost = all(
                isinstance(error, ParticipantError) for error in self._barrier.errors.values()
            )
            return (self._arm(bounds.LOST_ERRORS_S if lost else bounds.ERRORS_S),)
        return () if self._armed == self.phase else (self._arm(after_s),)

    def _perform(self, task: Task) -> Perform:
        self._log(f"perform {type(task).__name__}")
        self._pending = task
        return Perform(self.key, task)

    def _step(self, phase: str, task: Task, after_s: float) -> Commands:
        """Begins a phase that waits for one task."""
        self._enter(phase)
        return self._arm(after_s), self._perform(task)

    # History

    def _log(self, what: str) -> None:
        self._history.append(what)

    def _unexpected(self, event: str) -> InternalError:
        return InternalError(
            f"Expected no {event} while operation {self.key.seq} of session "
            f"{self.key.session!r} is {self.phase!r}; so far: {'; '.join(self._history)}. "
            f"Please report this"
        )


class ExchangeMachine(Operation):
    """One exchange between all ranks of a session.

    Args:
        first: The first request; it must also be passed to `receive`.
    """

    def __init__(self, first: Exchange) -> None:
        super().__init__(first)
        self._tag, self._timeout_s = first.tag, first.timeout_s
        self._outboxes: dict[int, Mapping[int, bytes]] = {}

    def _on_request(self, request: Request) -> Commands:
        if self.phase != "joining" or not isinstance(request, Exchange):
            raise self._unexpected(f"{type(request).__name__} of rank {request.rank}")
        self._admit(request)
        self._outboxes[request.rank] = request.outbox
        strangers = [rank for rank in request.outbox if not 0 <= rank < self.world_size]
        if strangers:
            error = InvalidRequestError(
                f"Expected receivers from 0 to {self.world_size - 1}, but rank {request.rank} "
                f"has bytes for {name_ranks(strangers)}",
                rank=request.rank,
            )
            self._barrier.blame({request.rank: error})
        return self._check_barrier()

    def _on_result(self, result: Result) -> Commands:
        raise self._unexpected(f"result {type(result).__name__}")

    def _on_expired(self) -> Commands:
        raise self._unexpected("deadline")

    def _awaited_step(self) -> tuple[str, float, str]:
        return f"come to exchange {self._tag!r}", self._timeout_s, "raise the timeout"

    def _all_arrived(self) -> Commands:
        boxes = self._outboxes
        answers = self._reply_each(
            lambda rank: Exchanged(
                {sender: boxes[sender][rank] for sender in sorted(boxes) if rank in boxes[sender]}
            )
        )
        given = dict(self._replies)
        ended = self._end("done")
        # Why kept: replies differ by rank, so that no single outcome could answer a request that
        # arrives twice.
        self._replies = given
        return (*answers, *ended)

    def _end(self, phase: str) -> list[Command]:
        self._outboxes = {}
        return super()._end(phase)
