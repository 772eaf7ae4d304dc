"""`Call`: one call of the user on one rank, with its progress, its heartbeats and its events.

While a `Call` lasts, the rank sends heartbeats. A rank that leaves it by an error before the end
(Ctrl-C, a coordinator out of reach) fails the call on every rank, so that the others do not wait. A
call that reports emits an event at the end of each phase, and its outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ray_dcp import events
from ray_dcp.commit_protocol.messages import (
    Left,
    LoadJoin,
    OpKey,
    Renumbered,
    Reply,
    Request,
    SaveJoin,
)
from ray_dcp.coordinator.metrics import count
from ray_dcp.core import bounds
from ray_dcp.core.wire_error import message_of
from ray_dcp.errors import CheckpointError
from ray_dcp.events import Event, contained, outcome_of
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.session.call_bound import longest_s
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.session.session import Session

if TYPE_CHECKING:
    from ray_dcp.torch_adapter.operation_log import OperationLog


class Call:
    """One call of the user on one rank.

    Args:
        session: The session of this rank.
        timeout_s: `heartbeat_timeout_s` of the call, in seconds.
        key: Key of the call, if the session returned it before.

    Attributes:
        progress: Progress of the call.
        rank: This rank.
        world_size: Number of ranks of the session.
        own_values: See `Session`.
        node: Name of this rank's node; empty for a process that is alone.
        plans: Plans of this rank's earlier saves.
        history: What this rank knows of the runs that it saved to.

    Examples:
        >>> from ray_dcp.session.inline_transport import inline_session
        >>> with Call(inline_session("doc"), 60.0) as call:
        ...     call.next_key(), call.next_key()
        (OpKey(session='doc', seq=0, step=0), OpKey(session='doc', seq=0, step=1))
    """

    _options: SaveOptions | LoadOptions = SaveOptions()
    """Of the operation that began last, whose deadlines bound how long an answer may take."""

    def __init__(
        self,
        session: Session,
        timeout_s: float,
        key: OpKey | None = None,
    ) -> None:
        self.progress = RankProgress()
        self.rank, self.world_size = session.rank, session.world_size
        self.own_values = session.own_values
        self.node, self.plans, self.history = session.node, session.plans, session.history
        self._named, self._num_steps = key, 0
        self._seq: int | None = None
        self._session = session
        self._timeout_s = timeout_s
        self._report: _Reported | None = None

    def next_key(self) -> OpKey:
        """Returns the key of the next operation."""
        named = self._named = self._named or self._session.next_key()
        if self._seq is None:
            self._seq = named.seq + self._session.skipped_calls
        key = replace(named, seq=self._seq, step=self._num_steps)
        self._num_steps += 1
        self.progress.names(key)
        return key

    def ask(self, request: Request) -> Reply:
        """Returns the coordinator's reply.

        Args:
            request: As for the session; sent with the current number of this call.

        Raises:
            CheckpointError: As the session raises it.
        """
        if isinstance(request, SaveJoin | LoadJoin):
            self._options = request.options
        timeout_s = longest_s(request, self._options)
        while True:
            seq = request.key.seq if self._seq is None else self._seq
            sent = replace(request, key=replace(request.key, seq=seq))
            reply = self._session.call(sent, silence_s=self._timeout_s, timeout_s=timeout_s)
            if not isinstance(reply, Renumbered):
                return reply
            self._seq = reply.seq
            self.progress.renumber(reply.seq)
            missed = reply.seq - (self._named or request.key).seq
            self._session.skipped_calls = max(self._session.skipped_calls, missed)

    def __enter__(self) -> Call:
        # Why now: a call that fails before its first operation counts as well.
        self._named = self._named or self._session.next_key()
        try:
            self._session.begin_call(self.progress, self._timeout_s)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.leave(error)
        except BaseException:
            # Why again: a second Ctrl-C may come before the session has the report.
            self.leave(error or KeyboardInterrupt(), 0.0)
            raise
        finally:
            self._session.end_call(self.progress)

    def leave(self, error: BaseException, wait_s: float = bounds.LEAVING_S) -> None:
        """Reports that this rank leaves the call by an error, unless it has its outcome.

        Args:
            error: The error.
            wait_s: How long an interrupted rank waits until the report has arrived, in seconds.
        """
        if self.progress.over:
            return
        is_interrupt = not isinstance(error, Exception)
        text = "" if is_interrupt else f": {message_of(error)}"
        reason = f"{type(error).__name__} on rank {self.rank}{text}"
        # Suppressed: the session was closed meanwhile.
        with suppress(CheckpointError):
            # Why the first otherwise: a call that fails before it begins one leaves that.
            key = self.progress.key or replace(self.next_key(), step=0)
            # Why only then: the process may be about to end. Who fails otherwise lives on.
            self._session.leave(
                Left(key, reason, is_interrupt=is_interrupt),
                0.0 if isinstance(error, CheckpointError) else wait_s,
            )

    # Events

    def report(
        self, mode: str, place: object, path: str = "native", log: OperationLog | None = None
    ) -> None:
        """Begins to emit the events of a save or load, as its phases end.

        Args:
            mode: `"save"`, `"async_save"` or `"load"`.
            place: Path or URL, if known.
            path: The path of the operation; see `SaveReport.path`.
            log: Receives the steps.
        """
        self._report = _Reported(mode, None if place is None else str(place), path)
        self.progress.on_phase = self._emit
        if log is not None:
            self.progress.on_step = log.enter

    def end(self, error: BaseException | None = None) -> None:
        """Ends the last phase and emits the outcome, once.

        Args:
            error: The exception that the operation raised, or None.
        """
        progress = self.progress
        if progress.is_good and not isinstance(error, CheckpointError):
            error = None
        took_s = progress.end(error)
        if took_s is None or self._report is None:
            return
        is_load = self._report.kind == "load"
        self._emit(
            outcome_of(error, "loaded" if is_load else "committed"),
            took_s,
            progress.bytes.get("read" if is_load else "write", 0),
            error=None if error is None else f"{type(error).__name__}: {error}",
            stall_s=None if is_load else progress.held_s,
            staged_bytes=progress.bytes.get("stage", 0),
            memory_bytes=progress.memory_bytes,
        )

    @contextmanager
    def reported(
        self, mode: str, place: object, path: str = "native", log: OperationLog | None = None
    ) -> Iterator[Call]:
        """Emits the events of a save or load that is made within the context; see `report`."""
        self.report(mode, place, path, log)
        try:
            yield self
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def _emit(self, outcome: str, seconds: float, num_bytes: int, **more: object) -> None:
        report = self._report
        if report is None:
            return
        with contained("An event"):
            event = Event(
                name=f"{report.kind}.{outcome}",
                checkpoint_id=report.checkpoint_id,
                rank=self.rank,
                world_size=self.world_size,
                mode=report.mode,
                path=report.path,
                attempt=self.progress.attempt,
                plan=self.progress.plan,
                seconds=seconds,
                num_bytes=num_bytes,
                **more,  # type: ignore[arg-type]
            )
            events.emit(event)
            count(event)


@dataclass(frozen=True)
class _Reported:
    """What all events of a call say."""

    mode: str
    checkpoint_id: str | None
    path: str

    @property
    def kind(self) -> str:
        """The first word of the events' names."""
        return "load" if self.mode == "load" else "save"
