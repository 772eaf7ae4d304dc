"""`Coordination`: all operations of a coordinator, one machine each. Events in, commands out.

It also has the queue of asynchronous saves that `SaveOptions.max_pending` bounds, passes reports of
stagers to the saves that they write, and keeps a bounded record of operations that have ended or
that have not begun yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from ray_dcp.commit_protocol.aggregation import BatchedJoins, BatchedReceipts, MessageBatch
from ray_dcp.commit_protocol.commands import Answer, Result, Task, step_of
from ray_dcp.commit_protocol.error_aggregation import (
    Opening,
    call_of,
    check_world,
    left_early,
    lost_rank,
    unknown,
    unknown_operation,
    went_ahead,
)
from ray_dcp.commit_protocol.liveness import (
    LONG_WAIT_S,
    SESSIONS,
    Heartbeat,
    HeartbeatAck,
    Liveness,
)
from ray_dcp.commit_protocol.load import LoadMachine
from ray_dcp.commit_protocol.messages import (
    Exchange,
    Left,
    LoadJoin,
    OpKey,
    PartsHeld,
    PartsWritten,
    Refused,
    Renumbered,
    Reply,
    Request,
    SaveJoin,
)
from ray_dcp.commit_protocol.operation import Commands, ExchangeMachine
from ray_dcp.commit_protocol.planning import PlanCache, planned_chunks
from ray_dcp.commit_protocol.save import SaveMachine, StagedPlan
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    InternalError,
    ParticipantError,
    SaveSkippedError,
)

Machine = SaveMachine | LoadMachine | ExchangeMachine

EARLY = 1024
"""Operations of which something is known before they begin."""

LAST = 1024
"""Operations of a session that are known to have ended one by one; all before them have."""


class Forgotten:
    """Operations of a session that ended and are not remembered.

    Why not just the highest: keys are named before they are used, and an operation that goes on
    in the background may come after many that were named later.
    """

    def __init__(self) -> None:
        self._before = (-1, 0)
        self._last: set[tuple[int, int]] = set()

    def __contains__(self, key: OpKey) -> bool:
        return (at := (key.seq, key.step)) <= self._before or at in self._last

    def add(self, key: OpKey) -> None:
        """Notes that an operation ended and is not remembered."""
        self._last.add((key.seq, key.step))
        if len(self._last) > LAST:
            self._before = max(self._before, min(self._last))
            self._last = {at for at in self._last if at > self._before}


class Early:
    """What came before the first rank has joined an operation here: it counts when one does."""

    def __init__(self) -> None:
        self._gone: OrderedDict[OpKey, dict[int, CheckpointError]] = OrderedDict()
        self._cancelled: OrderedDict[OpKey, str] = OrderedDict()

    def lose(self, key: OpKey, rank: int, error: CheckpointError) -> None:
        """Notes that a rank will not join an operation."""
        self._gone.setdefault(key, {})[rank] = error
        trim(self._gone, EARLY)

    def cancel(self, key: OpKey, reason: str) -> None:
        """Notes that an operation is cancelled, if it is a save."""
        self._cancelled.setdefault(key, reason)
        trim(self._cancelled, EARLY)

    def is_cancelled(self, key: OpKey) -> bool:
        """Returns whether it was cancelled."""
        return key in self._cancelled

    def take(self, key: OpKey) -> tuple[dict[int, CheckpointError], str | None]:
        """Returns, and forgets, which ranks will not join, and why it is cancelled if it is."""
        return self._gone.pop(key, {}), self._cancelled.pop(key, None)


def trim(memory: OrderedDict[Any, Any], length: int) -> None:
    """Drops the oldest entries until there are no more than `length`."""
    while len(memory) > length:
        memory.popitem(last=False)


MEMORY = 16
"""Finished operations that are remembered, so that a request that comes late or twice is
answered; their plans and receipts are not kept."""


class Coordination:
    """What a coordinator knows and decides, as a pure state machine.

    Every method takes one event and returns the commands that it leads to, to be carried out in
    order (see `ray_dcp.commit_protocol.commands`). A method that raises has changed nothing.

    Args:
        epoch: Number of this coordinator's life: higher after each restart.
        new_attempt: Makes up an attempt id that no other save ever had, of letters, digits
            and `-`: it becomes part of file names.
        clock: Seconds in which this process could listen (`liveness.AwakeClock`): by it silence is
            measured. Deadlines are the business of whoever carries out `Arm`.

    Examples:
        >>> from ray_dcp.options import LoadOptions
        >>> from ray_dcp.commit_protocol.messages import Target
        >>> coordination = Coordination(epoch=1, new_attempt=lambda: "a1")
        >>> join = LoadJoin(OpKey("run", 0), 0, 1, Target("memory://x"), LoadOptions())
        >>> [type(command).__name__ for command in coordination.receive(join)]
        ['Arm', 'Perform']
    """

    def __init__(
        self,
        *,
        epoch: int,
        new_attempt: Callable[[], str],
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.epoch = epoch
        self._clock, self._liveness = clock, Liveness(clock)
        self._new_attempt = new_attempt
        self._plans = PlanCache(planned_chunks)
        self._waits: dict[tuple[OpKey, str], tuple[float, bool]] = {}
        self._long_waits: dict[tuple[str, int], list[str]] = {}
        self._active: dict[OpKey, Machine] = {}
        self._finished: OrderedDict[OpKey, Machine] = OrderedDict()
        self._forgotten: OrderedDict[str, Forgotten] = OrderedDict()
        self._lost: OrderedDict[str, dict[int, ParticipantError]] = OrderedDict()
        self._late: OrderedDict[str, dict[int, int]] = OrderedDict()
        self._early = Early()

    def receive(self, request: Request, *, silence_s: float | None = None) -> Commands:
        """Accepts a request of a rank.

        The same request again gets the same answer, as long as the operation is remembered.

        Args:
            request: As it came.
            silence_s: Silence after which this rank counts as frozen, in seconds: it sends
                heartbeats until the operation is over. None: it sends none; only deadlines apply.

        Returns:
            What to do now.

        Raises:
            CheckpointError: This request alone is refused: answer *this call* with
                `Refused(error)`, no other of the same rank. A `CommitUnknownError` is for a
                receipt of an attempt that this coordinator does not know.
        """
        lost = self._lost.get(request.key.session, {})
        if not isinstance(request, PartsHeld | PartsWritten):  # these do not come from the rank
            lost.pop(request.rank, None)
            call = call_of(request) if isinstance(request, Opening) else None
            self._liveness.take_requests(request.key, (request.rank,), silence_s, call)
        machine = self._known(request.key)
        seq = self._renumbered(machine, request)
        if seq is not None:
            return (Answer(request.key, (request.rank,), step_of(request), Renumbered(seq)),)
        if machine is not None:
            opens = isinstance(request, Opening)
            if machine.awaits(request.rank) and not opens:
                return self._refuse_restarted(machine, request)
            return self._after(machine, machine.receive(request))
        machine = self._machine_for(request)
        machine.describe_rank = partial(self._liveness.describe, machine.key)
        commands = machine.receive(request)
        self._active[request.key] = machine
        return self._after(machine, commands + self._early_events(machine, lost))

    def receive_batch(
        self, message: MessageBatch, *, silence_s: float | None = None
    ) -> tuple[Commands, dict[int, Refused]]:
        """Accepts the requests of several ranks in one message, as `receive` does one by one.

        Args:
            message: As it came.
            silence_s: As for `receive`, of each of these ranks.

        Returns:
            What to do now, and which ranks are refused: by this call alone.
        """
        machine = self._active.get(message.key)
        content, plain = message.content, not self._lost.get(message.key.session)
        if plain and isinstance(machine, SaveMachine) and isinstance(content, BatchedReceipts):
            written = machine.receive_receipts(content.first, content.ranks, content.files)
            if written is not None:
                self._liveness.take_requests(message.key, content.ranks, silence_s)
                return self._after(machine, written), {}
        if not plain or not isinstance(content, BatchedJoins):
            return self._one_by_one(message.requests(), silence_s)
        joins = content.requests()
        first, joins = (joins[:1], joins[1:]) if machine is None else ([], joins)
        begun, refused = self._one_by_one(first, silence_s)
        machine = self._active.get(message.key)
        if joins and isinstance(machine, SaveMachine):
            joined = machine.receive_joins(joins)
            if joined is not None:
                ranks = [join.rank for join in joins]
                self._liveness.take_requests(message.key, ranks, silence_s, call_of(joins[0]))
                return (*begun, *self._after(machine, joined)), refused
        commands, more = self._one_by_one(joins, silence_s)
        return (*begun, *commands), {**refused, **more}

    def _one_by_one(
        self, requests: Sequence[Request], silence_s: float | None
    ) -> tuple[Commands, dict[int, Refused]]:
        commands: Commands = ()
        refused = {}
        for request in requests:
            try:
                commands += self.receive(request, silence_s=silence_s)
            except CheckpointError as error:
                refused[request.rank] = Refused(error)
        return commands, refused

    def resume(self, planned: StagedPlan) -> Commands:
        """Takes up a save that an earlier coordinator had planned; to be called before all else."""
        machine = self._save(planned.first)
        machine.describe_rank = partial(self._liveness.describe, machine.key)
        self._active[machine.key] = machine
        commands = machine.resume(planned)
        return self._after(machine, commands + self._early_events(machine, {}))

    def _early_events(self, machine: Machine, lost: Mapping[int, CheckpointError]) -> Commands:
        """Applies what came before a machine was there: a cancel, and ranks that will not join."""
        gone, cancelled = self._early.take(machine.key)
        commands: Commands = ()
        if cancelled is not None and isinstance(machine, SaveMachine):
            commands = machine.cancel(cancelled)
        return commands + machine.lost({**lost, **gone})

    def heartbeat(self, beat: Heartbeat) -> tuple[str, ...]:
        """Accepts a heartbeat: its rank is alive, and this is its progress. See also `present`.

        Returns:
            For whom operations have waited for `LONG_WAIT_S`, in words: each wait once, to the
            lowest rank that waits.
        """
        self._liveness.heartbeat(beat)
        at = (beat.session, beat.rank)
        return tuple(self._long_waits.pop(at)) if at in self._long_waits else ()

    def present(self, beat: Heartbeat) -> Commands:
        """Applies what a heartbeat says of operations. To be called after all were resumed.

        An operation that the rank awaits, and never joined here, it joined at a coordinator that
        is gone: it fails for all.
        """
        commands: Commands = ()
        for left in beat.left:
            commands += self.withdraw(beat.rank, left)
        for key in beat.awaits:
            machine = self._active.get(key)
            if machine is None and not self._is_over(key):
                self._early.lose(key, beat.rank, went_ahead(key, beat.rank))
            elif machine is not None and machine.awaits(beat.rank):
                lost = machine.lost({beat.rank: went_ahead(key, beat.rank)})
                commands += self._after(machine, lost)
        return commands

    def ack(self, beat: Heartbeat, ack: HeartbeatAck) -> HeartbeatAck:
        """Returns the answer to a heartbeat: which operations of its rank failed, or are queued.

        Args:
            beat: To be answered.
            ack: Who answers.
        """
        queued = tuple(
            machine.key.seq
            for machine in self._staged_saves(beat.session)
            if machine.is_queued and any(doing.covers(machine.key) for doing in beat.doings)
        )
        failed = {
            key: outcome for key in beat.awaits if isinstance(outcome := self.outcome(key), Refused)
        }
        return replace(ack, failed=failed, queued=queued)

    def place(self, session: str, rank: int, place: str) -> None:
        """Registers where a rank is, for messages: `"pid 12 on node-3"`."""
        self._lost.get(session, {}).pop(rank, None)
        self._liveness.place(session, rank, place)

    def check_silence(self) -> Commands:
        """Checks which ranks were silent for too long, and fails what needs them.

        To be called about every second. A rank that sends again gets the outcome.
        """
        commands: Commands = ()
        for key, machine in list(self._active.items()):
            silent = self._liveness.silent(key)
            if silent:
                commands += self._after(machine, machine.lost(silent))
        self._note_long_waits()
        return commands

    def _note_long_waits(self) -> None:
        """Notes for whom operations wait for long, for the lowest rank that waits in each."""
        now_s, before, self._waits = self._clock(), self._waits, {}
        for key, machine in self._active.items():
            since_s, is_noted = before.get((key, machine.phase), (now_s, False))
            long = now_s - since_s >= LONG_WAIT_S
            who = self._awaited(machine) if long and not is_noted else ""
            if who and machine.waiting_ranks:
                self._long_waits.setdefault((key.session, min(machine.waiting_ranks)), []).append(
                    f"Operation {key.seq} of session {key.session!r} ({machine.call}) has been "
                    f"{machine.phase} for {now_s - since_s:.0f} s: it waits {who}"
                )
            self._waits[key, machine.phase] = (since_s, is_noted or bool(who))
        sessions = {key.session for key in self._active}
        self._long_waits = {at: w for at, w in self._long_waits.items() if at[0] in sessions}

    def _awaited(self, machine: Machine) -> str:
        if not isinstance(machine, SaveMachine) or not machine.is_queued:
            return machine.awaited()
        others = [
            f"operation {other.key.seq} ({other.call}), which is {other.phase}"
            for other in self._staged_saves(machine.key.session)
            if other.is_under_way
        ]
        return f"for {'; '.join(others)} (SaveOptions.max_pending={machine.options.max_pending})"

    def performed(self, key: OpKey, task: Task, result: Result) -> Commands:
        """Accepts the result of a task.

        Args:
            key: Of the `Perform`.
            task: Of the `Perform`.
            result: A failure is a `Failed`.

        Raises:
            InternalError: The task was never asked for, or its result came before.
        """
        machine = self._known(key)
        if machine is None:
            if self._has_forgotten(key):
                return ()
            raise InternalError(
                f"Expected an operation that asked for {type(task).__name__}, but operation "
                f"{key.seq} of session {key.session!r} is not known. Please report this"
            )
        return self._after(machine, machine.performed(task, result))

    def expired(self, key: OpKey, phase: str) -> Commands:
        """Handles an expired timer; one of an operation or phase that is over is ignored.

        Args:
            key: Of the `Arm`.
            phase: Of the `Arm`.
        """
        machine = self._active.get(key)
        return () if machine is None else self._after(machine, machine.expired(phase))

    def lost(self, session: str, ranks: Iterable[int], reason: str) -> Commands:
        """Marks ranks dead: fails the operations that need them, and those that will.

        A rank that sends again is alive.

        Args:
            session: Whose ranks.
            ranks: Which.
            reason: How it is known, for the error.
        """
        errors = {rank: lost_rank(rank, reason) for rank in ranks}
        self._lost.setdefault(session, {}).update(errors)
        trim(self._lost, SESSIONS)
        commands: Commands = ()
        for key, machine in list(self._active.items()):
            if key.session == session:
                commands += self._after(machine, machine.lost(errors))
        return commands

    def cancel(self, key: OpKey, reason: str) -> Commands:
        """Cancels a save, unless its commit has begun.

        One that nobody has joined yet fails as soon as somebody does.

        Args:
            key: Which save.
            reason: Who wants it, for the error.
        """
        if key not in self._active and not self._is_over(key):
            self._early.cancel(key, reason)
        save = self._save_of(key)
        return () if save is None else self._after(save, save.cancel(reason))

    def is_cancelled(self, key: OpKey) -> bool:
        """Returns whether a save fails, or failed, because it was cancelled."""
        machine = self._known(key)
        if machine is None:
            return self._early.is_cancelled(key)
        return isinstance(machine, SaveMachine) and machine.is_cancelled

    def withdraw(self, rank: int, left: Left) -> Commands:
        """Removes a rank from an operation before its end: it sends nothing more.

        A save fails, as nothing is lost by that; of another operation, only what needs this rank.

        Args:
            rank: Who.
            left: Which operation, and why.
        """
        key, error = left.key, left_early(rank, left)
        cancelled: Commands = ()
        if left.is_interrupt:
            cancelled = self.cancel(key, f"rank {rank} left it: {left.reason}")
        machine = self._active.get(key)
        if machine is None and not self._is_over(key):
            self._early.lose(key, rank, error)
        if machine is None or (left.is_interrupt and isinstance(machine, SaveMachine)):
            return cancelled
        if isinstance(machine, SaveMachine):
            return self._after(machine, machine.give_up(error))
        return self._after(machine, machine.lost({rank: error}))

    def outcome(self, key: OpKey) -> Reply | None:
        """Returns the final reply to every rank, once that is known; None before.

        A refusal for an operation that is not known: it began with an earlier coordinator.
        """
        machine = self._known(key)
        return Refused(unknown_operation(key)) if machine is None else machine.outcome

    @property
    def active(self) -> tuple[OpKey, ...]:
        """Operations that are not over, in the order in which they began."""
        return tuple(self._active)

    def _renumbered(self, machine: Machine | None, request: Request) -> int | None:
        """Returns the number of a call whose rank missed earlier ones; None where it has its own.

        The others abandoned the operation that this rank begins. Is it late with the same call, or
        was that another one, which it never made? One that calls something else is not late, nor
        one that comes too late twice in a row: it makes what the others call next.
        """
        key, rank = request.key, request.rank
        if key.step or not isinstance(request, Opening):
            return None
        if machine is None and not self._has_forgotten(key):
            return None
        if machine is not None:
            if not machine.failed_without(request):
                return None
            late = self._late.setdefault(key.session, {})
            trim(self._late, SESSIONS)
            if machine.is_same_call(request) and late.get(rank) != key.seq - 1:
                late[rank] = key.seq
                return None
        begun = (seq for seq in count(key.seq + 1) if not self._is_over(replace(key, seq=seq)))
        return next(begun)

    def _known(self, key: OpKey) -> Machine | None:
        return self._active.get(key) or self._finished.get(key)

    def _machine_for(self, request: Request) -> Machine:
        if self._has_forgotten(request.key):
            raise unknown(request, "it ended long ago")
        if isinstance(request, Opening):
            check_world(request)
        match request:
            case SaveJoin():
                return self._save(request)
            case LoadJoin():
                return LoadMachine(request)
            case Exchange():
                return ExchangeMachine(request)
        if not isinstance(request, PartsHeld | PartsWritten):
            self._early.lose(key := request.key, request.rank, went_ahead(key, request.rank))
        raise unknown(request, "this coordinator was restarted since")

    def _save(self, first: SaveJoin) -> SaveMachine:
        return SaveMachine(
            first, epoch=self.epoch, new_attempt=self._new_attempt, plans=self._plans
        )

    def _is_over(self, key: OpKey) -> bool:
        return key in self._finished or self._has_forgotten(key)

    def _has_forgotten(self, key: OpKey) -> bool:
        forgotten = self._forgotten.get(key.session)
        return forgotten is not None and key in forgotten

    def _refuse_restarted(self, machine: Machine, request: Request) -> Commands:
        """Fails an operation of which one rank has done a part with an earlier coordinator."""
        refused = Refused(unknown(request, "this coordinator was restarted since"))
        answer = Answer(request.key, (request.rank,), step_of(request), refused)
        lost = machine.lost({request.rank: went_ahead(request.key, request.rank)})
        return (answer, *self._after(machine, lost))

    def _after(self, machine: Machine, commands: Commands) -> Commands:
        if machine.over and self._active.pop(machine.key, None) is not None:
            self._finished[machine.key] = machine
            self._liveness.ended(machine.key)
            while len(self._finished) > MEMORY:
                key, _ = self._finished.popitem(last=False)
                self._forgotten.setdefault(key.session, Forgotten()).add(key)
                trim(self._forgotten, SESSIONS)
        if isinstance(machine, SaveMachine) and machine.is_staged:
            commands += self._admit_next(machine.key.session)
        return commands

    # The queue of asynchronous saves

    @property
    def _saves(self) -> list[SaveMachine]:
        return [one for one in self._active.values() if isinstance(one, SaveMachine)]

    def _save_of(self, key: OpKey) -> SaveMachine | None:
        machine = self._active.get(key)
        return machine if isinstance(machine, SaveMachine) else None

    def _staged_saves(self, session: str) -> list[SaveMachine]:
        """Returns the asynchronous saves of a session that have not ended, oldest first."""
        return [one for one in self._saves if one.is_staged and one.key.session == session]

    def _admit_next(self, session: str) -> Commands:
        """Moves the queue of a session on by one save, which begins or is refused."""
        saves = self._staged_saves(session)
        under_way = [save for save in saves if save.is_under_way]
        first = next((save for save in saves if save.is_queued), None)
        if first is None or any(save.may_be_over for save in under_way):
            return ()
        most = first.options.max_pending
        same = [save for save in under_way if save.url == first.url]
        if same and most > 1:
            error: CheckpointError = CheckpointExistsError(
                f"Expected one save at a time of an id, but operation {same[0].key.seq} of this "
                f"session is saving to {first.url}. Wait for its handle, or save under another id",
                checkpoint_id=first.url,
            )
            return self._after(first, first.give_up(error))
        if len(under_way) < most:
            return self._after(first, first.begin())
        if first.options.when_full == "skip":
            error = SaveSkippedError(
                f"The save was skipped, as {len(under_way)} are under way "
                f"(SaveOptions.max_pending={most}, when_full='skip')",
                checkpoint_id=first.url,
            )
            return self._after(first, first.give_up(error))
        return ()

    # The stagers of asynchronous saves

    def staged_plan(self, key: OpKey) -> StagedPlan | None:
        """Returns what another coordinator needs to end an asynchronous save that is planned."""
        save = self._save_of(key)
        return None if save is None else save.staged_plan()

    def stagers(self) -> dict[str, dict[OpKey, float]]:
        """Returns the stagers whose bytes are awaited: for each save the timeout, in seconds."""
        found: dict[str, dict[OpKey, float]] = {}
        for save in self._saves:
            for stager in save.holders:
                found.setdefault(stager, {})[save.key] = save.options.heartbeat_timeout_s
        return found

    def held_by(self, stager: str) -> dict[OpKey, list[int]]:
        """Returns the ranks whose bytes a stager is to write, of each save, for messages."""
        return {save.key: ranks for save in self._saves if (ranks := save.held_by(stager))}

    def stager_lost(self, stager: str, reason: str) -> Commands:
        """Marks a stager lost: saves that need it fail.

        Args:
            stager: `PartsHeld.stager`.
            reason: How it is known, for the error.
        """
        commands: Commands = ()
        for save in self._saves:
            commands += self._after(save, save.stager_lost(stager, reason))
        return commands
