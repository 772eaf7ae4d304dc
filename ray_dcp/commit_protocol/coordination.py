"""`Coordination`: all operations of a coordinator, one machine each; turns events into commands.

It also has the queue of asynchronous saves (`SaveOptions.max_pending`), passes reports of stagers
to the saves whose bytes they write, and keeps a bounded record of operations that have ended or
have not begun yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from ray_dcp.commit_protocol.commands import Answer, Result, Task, step_of
from ray_dcp.commit_protocol.error_aggregation import (
    Opening,
    call_of,
    unknown,
    went_ahead,
)
from ray_dcp.commit_protocol.liveness import (
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
from ray_dcp.commit_protocol.plan_cache import PlanCache, planned_chunks
from ray_dcp.commit_protocol.save import SaveMachine, StagedPlan
from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
    SaveSkippedError,
)

Machine = SaveMachine | LoadMachine | ExchangeMachine

EARLY = 1024
"""Most operations whose early events are kept until they begin."""

LAST = 1024
"""Most operations of a session that are remembered individually as ended; all earlier ones count
as ended."""


class Forgotten:
    """The keys of operations of a session that ended and whose machines were dropped.

    *Why* not only the highest key: keys are assigned before they are used, and an operation in the
    background may begin after many with higher keys have ended.
    """

    def __init__(self) -> None:
        self._before = (-1, 0)
        self._last: set[tuple[int, int]] = set()

    def __contains__(self, key: OpKey) -> bool:
        return (at := (key.seq, key.step)) <= self._before or at in self._last

    def add(self, key: OpKey) -> None:
        """Records that the machine of an ended operation was dropped."""
        self._last.add((key.seq, key.step))
        if len(self._last) > LAST:
            self._before = max(self._before, min(self._last))
            self._last = {at for at in self._last if at > self._before}


def trim(memory: OrderedDict[Any, Any], length: int) -> None:
    """Drops the oldest entries until there are no more than `length`."""
    while len(memory) > length:
        memory.popitem(last=False)


MEMORY = 16
"""Most ended operations that are kept, so that requests that arrive late or twice are answered;
their plans and receipts are dropped."""


class Coordination:
    """The state and the decisions of a coordinator, as a pure state machine.

    Every method accepts one event and returns the resulting commands, which must be executed in
    order (see `ray_dcp.commit_protocol.commands`). A method that raises has changed nothing.

    Args:
        epoch: Number of this incarnation of the coordinator; it increases with each restart.
        new_attempt: Returns a new attempt id, different from those of all other saves, of letters,
            digits and `-`: it becomes part of file names.
        clock: Returns the seconds in which this process could receive messages
            (`liveness.AwakeClock`). It measures silence; deadlines are up to the executor of `Arm`.

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
        # Events of operations that no rank has joined here yet; they apply when one does.
        self._gone: OrderedDict[OpKey, dict[int, CheckpointError]] = OrderedDict()
        self._cancelled: OrderedDict[OpKey, str] = OrderedDict()

    def receive(self, request: Request, *, silence_s: float | None = None) -> Commands:
        """Accepts a request of a rank.

        A request that arrives twice gets the same reply, as long as the operation is remembered.

        Args:
            request: The request.
            silence_s: Silence, in seconds, after which this rank counts as frozen; the rank sends
                heartbeats until the operation has ended. If None, it sends none, and only deadlines
                apply.

        Returns:
            The commands to execute.

        Raises:
            CheckpointError: Only this request is refused: answer *this call* with
                `Refused(error)`, and no other call of the same rank. A `CommitUnknownError` answers
                a receipt of an attempt that this coordinator does not know.
        """
        lost = self._lost.get(request.key.session, {})
        if not isinstance(request, PartsHeld | PartsWritten):  # these do not come from the rank
            call = call_of(request) if isinstance(request, Opening) else None
            self._liveness.requested(request.key, request.rank, silence_s, call)
        machine = self._find(request.key)
        seq = self._renumber(machine, request)
        if seq is not None:
            return (Answer(request.key, (request.rank,), step_of(request), Renumbered(seq)),)
        if machine is not None:
            opens = isinstance(request, Opening)
            if machine.awaits(request.rank) and not opens:
                return self._refuse_restarted(machine, request)
            return self._settle_finished(machine, machine.receive(request))
        machine = self._machine_for(request)
        machine.describe_rank = partial(self._liveness.describe, machine.key)
        commands = machine.receive(request)
        self._active[request.key] = machine
        return self._settle_finished(machine, commands + self._early_events(machine, lost))

    def resume(self, planned: StagedPlan) -> Commands:
        """Resumes a save that an earlier coordinator had planned. Must be called first."""
        machine = self._save(planned.first)
        machine.describe_rank = partial(self._liveness.describe, machine.key)
        self._active[machine.key] = machine
        commands = machine.resume(planned)
        return self._settle_finished(machine, commands + self._early_events(machine, {}))

    def _early_events(self, machine: Machine, lost: Mapping[int, CheckpointError]) -> Commands:
        """Applies the events that arrived before a machine existed: a cancel and lost ranks."""
        gone = self._gone.pop(machine.key, {})
        cancelled = self._cancelled.pop(machine.key, None)
        commands: Commands = ()
        if cancelled is not None and isinstance(machine, SaveMachine):
            commands = machine.cancel(cancelled)
        return commands + machine.lost({**lost, **gone})

    def heartbeat(self, beat: Heartbeat) -> tuple[str, ...]:
        """Records that a rank is alive, and its progress. See also `present`.

        Returns:
            Descriptions of waits that have lasted for `LONG_WAIT_S`, which the rank logs. Each wait
            is reported once, to the lowest rank that waits.
        """
        self._liveness.heartbeat(beat)
        at = (beat.session, beat.rank)
        return tuple(self._long_waits.pop(at)) if at in self._long_waits else ()

    def present(self, beat: Heartbeat) -> Commands:
        """Applies a heartbeat's reports on operations. Call it after saves have been resumed.

        If the rank awaits an operation that it never joined here, it joined at an earlier
        coordinator: the operation fails on all ranks.
        """
        commands: Commands = ()
        for left in beat.left:
            commands += self.withdraw(beat.rank, left)
        for key in beat.awaits:
            machine = self._active.get(key)
            if machine is None and not self._is_over(key):
                self._lose_early(key, beat.rank, went_ahead(key, beat.rank))
            elif machine is not None and machine.awaits(beat.rank):
                lost = machine.lost({beat.rank: went_ahead(key, beat.rank)})
                commands += self._settle_finished(machine, lost)
        return commands

    def ack(self, beat: Heartbeat, ack: HeartbeatAck) -> HeartbeatAck:
        """Returns the answer to a heartbeat, with the rank's operations that failed or are queued.

        Args:
            beat: The heartbeat.
            ack: The answer without operations, which identifies the coordinator.
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
        """Registers a rank, which lives, and its place for messages, as `"pid 12 on node-3"`."""
        self._lost.get(session, {}).pop(rank, None)
        self._liveness.place(session, rank, place)

    def check_silence(self) -> Commands:
        """Fails operations that need ranks which have been silent for too long.

        Call it about every second. A rank that sends again gets the outcome.
        """
        commands: Commands = ()
        for key, machine in list(self._active.items()):
            silent = self._liveness.silent(key)
            if silent:
                commands += self._settle_finished(machine, machine.lost(silent))
        self._note_long_waits()
        return commands

    def _note_long_waits(self) -> None:
        """Records a description of each long wait, for the lowest rank that waits."""
        now_s, before, self._waits = self._clock(), self._waits, {}
        for key, machine in self._active.items():
            since_s, is_noted = before.get((key, machine.phase), (now_s, False))
            long = now_s - since_s >= bounds.LONG_WAIT_S
            who = self._describe_wait(machine) if long and not is_noted else ""
            if who and machine.waiting_ranks:
                self._long_waits.setdefault((key.session, min(machine.waiting_ranks)), []).append(
                    f"Operation {key.seq} of session {key.session!r} ({machine.call}) has been "
                    f"{machine.phase} for {now_s - since_s:.0f} s: it waits {who}"
                )
            self._waits[key, machine.phase] = (since_s, is_noted or bool(who))
        sessions = {key.session for key in self._active}
        self._long_waits = {at: w for at, w in self._long_waits.items() if at[0] in sessions}

    def _describe_wait(self, machine: Machine) -> str:
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
            key: Key of the `Perform`.
            task: Task of the `Perform`.
            result: Result of the task; `Failed` if it failed.

        Raises:
            InternalError: The operation is unknown, or the result is of the wrong kind.
        """
        machine = self._find(key)
        if machine is None:
            if self._has_forgotten(key):
                return ()
            raise InternalError(
                f"Expected an operation that asked for {type(task).__name__}, but operation "
                f"{key.seq} of session {key.session!r} is not known. Please report this"
            )
        return self._settle_finished(machine, machine.performed(task, result))

    def expired(self, key: OpKey, phase: str) -> Commands:
        """Handles an expired timer; ignores one of an operation or phase that has ended.

        Args:
            key: Key of the `Arm`.
            phase: Phase of the `Arm`.
        """
        machine = self._active.get(key)
        return () if machine is None else self._settle_finished(machine, machine.expired(phase))

    def lost(self, session: str, ranks: Iterable[int], reason: str) -> Commands:
        """Marks ranks dead: fails current and later operations that need them.

        A rank that registers again, as it does with each call, counts as alive again (`place`).

        Args:
            session: Name of the session.
            ranks: The ranks.
            reason: How the death was detected, for the error message.
        """
        errors = {
            rank: ParticipantError(
                f"Expected rank {rank} to take part, but it was lost: {reason}. Restart rank "
                f"{rank} and call again",
                rank=rank,
            )
            for rank in ranks
        }
        self._lost.setdefault(session, {}).update(errors)
        trim(self._lost, SESSIONS)
        commands: Commands = ()
        for key, machine in list(self._active.items()):
            if key.session == session:
                commands += self._settle_finished(machine, machine.lost(errors))
        return commands

    def cancel(self, key: OpKey, reason: str) -> Commands:
        """Cancels a save, unless its commit has begun.

        A save that no rank has joined fails as soon as one joins.

        Args:
            key: Key of the save.
            reason: Who cancels it, for the error message.
        """
        if key not in self._active and not self._is_over(key):
            self._cancelled.setdefault(key, reason)
            trim(self._cancelled, EARLY)
        save = self._save_of(key)
        return () if save is None else self._settle_finished(save, save.cancel(reason))

    def is_cancelled(self, key: OpKey) -> bool:
        """Returns whether a save fails, or failed, because it was cancelled."""
        machine = self._find(key)
        if machine is None:
            return key in self._cancelled
        return isinstance(machine, SaveMachine) and machine.is_cancelled

    def withdraw(self, rank: int, left: Left) -> Commands:
        """Removes a rank from an operation before its end; the rank sends nothing more.

        A save fails, unless its commit has begun. Another operation fails if it needs the rank.

        Args:
            rank: The rank.
            left: The operation and the reason.
        """
        key = left.key
        error = ParticipantError(
            f"Expected rank {rank} to take part in operation {key.seq} of session {key.session!r} "
            f"until its end, but it left the call: {left.reason}. Look at its log, and call again "
            f"on every rank",
            rank=rank,
        )
        cancelled: Commands = ()
        if left.is_interrupt:
            cancelled = self.cancel(key, f"rank {rank} left it: {left.reason}")
        machine = self._active.get(key)
        if machine is None and not self._is_over(key):
            self._lose_early(key, rank, error)
        if machine is None or (left.is_interrupt and isinstance(machine, SaveMachine)):
            return cancelled
        if isinstance(machine, SaveMachine):
            return self._settle_finished(machine, machine.give_up(error))
        return self._settle_finished(machine, machine.lost({rank: error}))

    def outcome(self, key: OpKey) -> Reply | None:
        """Returns the final reply to every rank; None before it is known.

        For an unknown operation, which an earlier coordinator began, returns a `Refused`.
        """
        machine = self._find(key)
        if machine is not None:
            return machine.outcome
        return Refused(
            ParticipantError(
                f"Operation {key.seq} of session {key.session!r} is not known here: this "
                f"coordinator was restarted since it began. Call again"
            )
        )

    @property
    def active(self) -> tuple[OpKey, ...]:
        """Operations that have not ended, in the order in which they began."""
        return tuple(self._active)

    def _renumber(self, machine: Machine | None, request: Request) -> int | None:
        """Returns the new number of a call if its rank has missed earlier calls; None otherwise.

        It applies if the other ranks abandoned the operation that this rank begins. The rank is
        then either late with the same call, or never made that call and now makes the next one. It
        counts as late if its call is the same, unless it was late with the previous call as well.
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

    def _find(self, key: OpKey) -> Machine | None:
        return self._active.get(key) or self._finished.get(key)

    def _machine_for(self, request: Request) -> Machine:
        if self._has_forgotten(request.key):
            raise unknown(request, "it ended long ago")
        if isinstance(request, Opening) and not 0 <= request.rank < request.world_size:
            raise InvalidRequestError(
                f"Expected a rank from 0 to world size - 1, but found rank {request.rank} of "
                f"{request.world_size}. Give each rank its number in the group",
                rank=request.rank,
            )
        match request:
            case SaveJoin():
                return self._save(request)
            case LoadJoin():
                return LoadMachine(request)
            case Exchange():
                return ExchangeMachine(request)
        if not isinstance(request, PartsHeld | PartsWritten):
            self._lose_early(key := request.key, request.rank, went_ahead(key, request.rank))
        raise unknown(request, "this coordinator was restarted since")

    def _save(self, first: SaveJoin) -> SaveMachine:
        return SaveMachine(
            first, epoch=self.epoch, new_attempt=self._new_attempt, plans=self._plans
        )

    def _lose_early(self, key: OpKey, rank: int, error: CheckpointError) -> None:
        """Records that a rank will not join an operation that has not begun here."""
        self._gone.setdefault(key, {})[rank] = error
        trim(self._gone, EARLY)

    def _is_over(self, key: OpKey) -> bool:
        return key in self._finished or self._has_forgotten(key)

    def _has_forgotten(self, key: OpKey) -> bool:
        forgotten = self._forgotten.get(key.session)
        return forgotten is not None and key in forgotten

    def _refuse_restarted(self, machine: Machine, request: Request) -> Commands:
        """Fails an operation in which a rank took part with an earlier coordinator."""
        refused = Refused(unknown(request, "this coordinator was restarted since"))
        answer = Answer(request.key, (request.rank,), step_of(request), refused)
        lost = machine.lost({request.rank: went_ahead(request.key, request.rank)})
        return (answer, *self._settle_finished(machine, lost))

    def _settle_finished(self, machine: Machine, commands: Commands) -> Commands:
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
        """Begins or refuses the next save in the queue of a session, if there is room."""
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
            return self._settle_finished(first, first.give_up(error))
        if len(under_way) < most:
            return self._settle_finished(first, first.begin())
        if first.options.when_full == "skip":
            error = SaveSkippedError(
                f"The save was skipped, as {len(under_way)} are under way "
                f"(SaveOptions.max_pending={most}, when_full='skip')",
                checkpoint_id=first.url,
            )
            return self._settle_finished(first, first.give_up(error))
        return ()

    # The stagers of asynchronous saves

    def staged_plan(self, key: OpKey) -> StagedPlan | None:
        """Returns the state with which another coordinator can resume an asynchronous save.

        None if the save is not active or not planned.
        """
        save = self._save_of(key)
        return None if save is None else save.staged_plan()

    def stagers(self) -> dict[str, dict[OpKey, float]]:
        """Returns, for each stager with unwritten bytes, its saves and their heartbeat timeouts.

        The timeouts are in seconds.
        """
        found: dict[str, dict[OpKey, float]] = {}
        for save in self._saves:
            for stager in save.holders:
                found.setdefault(stager, {})[save.key] = save.options.heartbeat_timeout_s
        return found

    def held_by(self, stager: str) -> dict[OpKey, list[int]]:
        """Returns, for each save, the ranks whose bytes a stager has yet to write, for messages."""
        return {save.key: ranks for save in self._saves if (ranks := save.held_by(stager))}

    def stager_lost(self, stager: str, reason: str) -> Commands:
        """Marks a stager as lost: saves that need it fail.

        Args:
            stager: `PartsHeld.stager`.
            reason: How the loss was detected, for the error message.
        """
        commands: Commands = ()
        for save in self._saves:
            commands += self._settle_finished(save, save.stager_lost(stager, reason))
        return commands
