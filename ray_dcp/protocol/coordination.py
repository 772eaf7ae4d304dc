"""`Coordination`: all operations of a coordinator, a machine each. Events in, commands out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.protocol.commands import Answer, Result, Task, step_of
from ray_dcp.protocol.exchange import ExchangeMachine
from ray_dcp.protocol.load import LoadMachine
from ray_dcp.protocol.messages import (
    Exchange,
    LoadDone,
    LoadJoin,
    LoadReady,
    OpKey,
    Refused,
    Request,
    SaveJoin,
    SaveReceipt,
)
from ray_dcp.protocol.operation import Commands
from ray_dcp.protocol.save import SaveMachine
from ray_dcp.protocol.verdict import Opening, lost_rank

__all__ = ["Coordination"]

MEMORY = 16
"""Finished operations that are remembered, so that a request that comes late or twice is
answered; their plans and receipts are not kept."""

SESSIONS = 1024
"""Sessions of which it is remembered how far they were and which ranks they lost; operations of
which it is remembered that ranks began them with an earlier coordinator."""

GAPS = 1024
"""Operations of a session that may end, and be forgotten, before one with a lower number begins."""

Machine = SaveMachine | LoadMachine | ExchangeMachine


class Coordination:
    """What a coordinator knows and decides, as a pure state machine.

    Every method takes one event and returns the commands that it leads to, to be carried out in
    order (`ray_dcp.protocol.commands` says how). A method that raises has changed nothing.

    Args:
        epoch: Number of this coordinator's life: higher after each restart.
        new_attempt: Makes up an attempt id that no other save ever had, of letters, digits
            and `-`: it becomes part of file names.

    Example:
        >>> from ray_dcp.options import LoadOptions
        >>> from ray_dcp.protocol.messages import Target
        >>> coordination = Coordination(epoch=1, new_attempt=lambda: "a1")
        >>> join = LoadJoin(OpKey("run", 0), 0, 1, Target("memory://x"), LoadOptions())
        >>> [type(command).__name__ for command in coordination.receive(join)]
        ['Arm', 'Perform']
    """

    def __init__(self, *, epoch: int, new_attempt: Callable[[], str]) -> None:
        self.epoch = epoch
        self._new_attempt = new_attempt
        self._active: dict[OpKey, Machine] = {}
        self._finished: OrderedDict[OpKey, Machine] = OrderedDict()
        self._forgotten: OrderedDict[str, _Forgotten] = OrderedDict()
        self._lost: OrderedDict[str, dict[int, ParticipantError]] = OrderedDict()
        self._ahead: OrderedDict[OpKey, dict[int, ParticipantError]] = OrderedDict()

    def receive(self, request: Request) -> Commands:
        """Takes what a rank says.

        The same request again gets the same answer, as long as the operation is remembered.

        Args:
            request: As it came.

        Returns:
            What to do now.

        Raises:
            CheckpointError: This request alone is refused: answer *this call* with
                `Refused(error)`, no other of the same rank. A `CommitUnknownError` is for a
                receipt of an attempt that this coordinator does not know.
        """
        lost = self._lost.get(request.key.session, {})
        lost.pop(request.rank, None)
        machine = self._active.get(request.key) or self._finished.get(request.key)
        if machine is not None and machine.is_ahead(request):
            return self._pass_by(machine, request)
        if machine is not None:
            return self._after(machine, machine.receive(request))
        machine = self._begin(request)
        commands = machine.receive(request)
        self._active[request.key] = machine
        lost = {**lost, **self._ahead.pop(request.key, {})}
        if lost:
            commands += machine.lost(lost)
        return self._after(machine, commands)

    def performed(self, key: OpKey, task: Task, result: Result) -> Commands:
        """Takes what came of a task.

        Args:
            key: Of the `Perform`.
            task: Of the `Perform`.
            result: A failure is a `Failed`.

        Raises:
            InternalError: The task was never asked for, or its result came before.
        """
        machine = self._active.get(key) or self._finished.get(key)
        if machine is None:
            if self._has_forgotten(key):
                return ()
            raise InternalError(
                f"Expected an operation that asked for {type(task).__name__}, but operation "
                f"{key.seq} of session {key.session!r} is not known. Please report this"
            )
        return self._after(machine, machine.performed(task, result))

    def expired(self, key: OpKey, phase: str) -> Commands:
        """Takes that a timer ran out; one of an operation or phase that is over does nothing.

        Args:
            key: Of the `Arm`.
            phase: Of the `Arm`.
        """
        machine = self._active.get(key)
        return () if machine is None else self._after(machine, machine.expired(phase))

    def lost(self, session: str, ranks: Iterable[int], reason: str) -> Commands:
        """Takes that ranks died: fails what needs them now, and what will need them.

        A rank that speaks again is alive.

        Args:
            session: Whose ranks.
            ranks: Which.
            reason: How it is known, for the error.
        """
        errors = {rank: lost_rank(rank, reason) for rank in ranks}
        self._lost.setdefault(session, {}).update(errors)
        _trim(self._lost, SESSIONS)
        commands: Commands = ()
        for key, machine in list(self._active.items()):
            if key.session == session:
                commands += self._after(machine, machine.lost(errors))
        return commands

    def cancel(self, key: OpKey, reason: str) -> Commands:
        """Takes the wish to cancel a save; too late when its commit has begun.

        Args:
            key: Which save.
            reason: Who wants it, for the error.
        """
        machine = self._active.get(key)
        if not isinstance(machine, SaveMachine):
            return ()
        return self._after(machine, machine.cancel(reason))

    @property
    def active(self) -> tuple[OpKey, ...]:
        """Operations that are not over, in the order in which they began."""
        return tuple(self._active)

    def _begin(self, request: Request) -> Machine:
        if self._has_forgotten(request.key):
            raise _unknown(request, "it ended long ago")
        match request:
            case SaveJoin():
                _check_world(request)
                return SaveMachine(request, epoch=self.epoch, new_attempt=self._new_attempt)
            case LoadJoin():
                _check_world(request)
                return LoadMachine(request)
            case Exchange():
                _check_world(request)
                return ExchangeMachine(request)
            case SaveReceipt() | LoadReady() | LoadDone():
                self._ahead.setdefault(request.key, {})[request.rank] = _went_ahead(request)
                _trim(self._ahead, SESSIONS)
                raise _unknown(request, "this coordinator was restarted since")

    def _has_forgotten(self, key: OpKey) -> bool:
        forgotten = self._forgotten.get(key.session)
        return forgotten is not None and key.seq in forgotten

    def _pass_by(self, machine: Machine, request: Request) -> Commands:
        """Fails an operation of which one rank has done a part with an earlier coordinator."""
        refused = Refused(_unknown(request, "this coordinator was restarted since"))
        answer = Answer(request.key, request.rank, step_of(request), refused)
        lost = machine.lost({request.rank: _went_ahead(request)})
        return (answer, *self._after(machine, lost))

    def _after(self, machine: Machine, commands: Commands) -> Commands:
        if machine.over and self._active.pop(machine.key, None) is not None:
            self._finished[machine.key] = machine
            while len(self._finished) > MEMORY:
                key, _ = self._finished.popitem(last=False)
                self._forgotten.setdefault(key.session, _Forgotten()).add(key.seq)
                _trim(self._forgotten, SESSIONS)
        return commands


class _Forgotten:
    """Operations of a session that ended and are not remembered.

    Why not just the highest: keys are named before they are used, and an operation that goes on
    in the background may come after many that were named later.
    """

    def __init__(self) -> None:
        self._below = 0
        self._others: set[int] = set()

    def __contains__(self, seq: int) -> bool:
        return seq < self._below or seq in self._others

    def add(self, seq: int) -> None:
        self._others.add(seq)
        if len(self._others) > GAPS:
            self._below = max(self._below, min(self._others))
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1


def _trim(memory: OrderedDict[Any, Any], length: int) -> None:
    while len(memory) > length:
        memory.popitem(last=False)


def _check_world(request: Opening) -> None:
    if request.world_size < 1 or not 0 <= request.rank < request.world_size:
        raise InvalidRequestError(
            f"Expected a rank from 0 to world size - 1, but found rank {request.rank} of "
            f"{request.world_size}. Give each rank its number in the group",
            rank=request.rank,
        )


def _went_ahead(request: Request) -> ParticipantError:
    return ParticipantError(
        f"The coordinator was restarted during operation {request.key.seq} of session "
        f"{request.key.session!r}: rank {request.rank} had begun it before, and will not join "
        f"again. Call again",
        rank=request.rank,
    )


def _unknown(request: Request, why: str) -> CheckpointError:
    message = (
        f"Operation {request.key.seq} of session {request.key.session!r}, to which rank "
        f"{request.rank} sent {type(request).__name__}, is not known here: {why}"
    )
    if isinstance(request, SaveReceipt):
        return CommitUnknownError(
            f"{message}. The storage tells whether attempt {request.attempt} was committed: ask "
            f"ray_dcp.outcome(path, {request.attempt!r})",
            attempt=request.attempt,
            rank=request.rank,
        )
    return ParticipantError(f"{message}. Call again", rank=request.rank)
