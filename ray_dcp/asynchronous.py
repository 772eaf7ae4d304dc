"""`async_save`: stages in the caller's thread, then continues in a thread of its own.

It returns a `SaveHandle`, a future of the committed checkpoint's metadata.

The caller waits for the capture, one exchange with the coordinator and, unless it passed
`SaveOptions(staging="background")`, one copy of the bytes. The rest runs in a thread of this
process. If a stager holds the bytes, the save continues even when this process dies.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter

from ray_dcp import events
from ray_dcp.commit_protocol.messages import Left, OpKey, SaveOutcome
from ray_dcp.core import bounds
from ray_dcp.core.phases import STAGE, STAGED
from ray_dcp.core.processes import OwnProcess, start_thread
from ray_dcp.core.quantities import seconds_text, size_text
from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    SaveCancelledError,
)
from ray_dcp.events import contained
from ray_dcp.job.part import PartSave
from ray_dcp.options import SaveOptions, check_wait
from ray_dcp.rank.rank_load import drive
from ray_dcp.rank.rank_save import RankSave
from ray_dcp.saving import (
    CheckpointId,
    StateDict,
    after,
    await_unused,
    capture_of,
    check_options,
    mark_used,
    part_save,
    plug_ins_of,
    run_save,
    session_for,
    target_of,
)
from ray_dcp.session.call import Call
from ray_dcp.session.connection import Disconnected, shut_down_meanwhile, until_disconnected
from ray_dcp.session.discovery import session_in_ray
from ray_dcp.session.session import Session
from ray_dcp.stage.staging_backend import Finish, StagingBackend, staging_backend_of
from ray_dcp.torch_adapter.committed_metadata import CommittedMetadata
from ray_dcp.torch_adapter.dispatch import FOREIGN, HOOKS, Route, decide_save
from ray_dcp.torch_adapter.operation_log import OperationLog
from ray_dcp.torch_adapter.shards import fields_of, for_stager, give_fields
from ray_dcp.torch_adapter.state import stateful_to_state_dict

T = TypeVar("T")

logger = logging.getLogger(__name__)


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType | None = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Saves a state dict from all ranks in the background; returns when its bytes are copied.

    All ranks of the group call it with the same arguments. When it returns the state may change:
    each rank's bytes are staged. In a job with Ray they are held by a stager of the node, and from
    then on the save survives the death of its ranks and of the driver; a process without Ray holds
    them itself, and the save ends with it. The checkpoint exists when the handle reports it, and
    not before.

    A failed save does not stop training: the handle raises its error, the same on every rank. With
    `SaveOptions(staging="background")` the call returns before the bytes are copied, and the state
    may change only when `SaveHandle.staged()` has returned.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`. A third-party writer that is an `AsyncStager` also stages,
            as in DCP.
        planner: As for `save`; its hooks run before this returns.
        process_group: As for `save`.
        async_checkpointer_type: Accepted for compatibility with DCP. The stager's process writes
            where there is one, a thread of this process otherwise.
        async_stager: Stages the state instead of ray_dcp, by DCP's protocol. This process then
            saves what it returns: such a save does not survive the process. The call waits for a
            save in progress that uses the same stager, as stagers reuse their copy, or the same
            planner or third-party storage.
        no_dist: As for `save`.
        use_collectives: As for `save`.
        options: See `SaveOptions`; `max_pending` and `when_full` apply to asynchronous saves.

    Returns:
        A future of DCP's `Metadata`, which is also an `AsyncSaveResponse`; see `SaveHandle`.

    Raises:
        InvalidRequestError: The call is wrong.
        ParticipantError: The session can't be created.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     weight = torch.ones(2, 3)
        ...     handle = ray_dcp.async_save({"w": weight}, checkpoint_id=f"{root}/step-1")
        ...     _ = weight.zero_()  # training goes on
        ...     metadata = handle.result()
        ...     ray_dcp.open(f"{root}/step-1")["w"][0].tolist()
        [1.0, 1.0, 1.0]
    """
    # Source: `torch/distributed/checkpoint/state_dict_saver.py`, `async_save`.
    check_options(options, SaveOptions)
    if async_stager is not None and not isinstance(async_stager, AsyncStager):
        raise InvalidRequestError(
            f"Expected async_stager to be an AsyncStager with stage, synchronize_staging, close "
            f"and should_synchronize_after_execute, but found {type(async_stager).__name__}",
            key="async_stager",
        )
    with OperationLog(
        "async_save", checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner
    ) as log:
        route = decide_save(planner, storage_writer, checkpoint_id)
        session = session_for(process_group, no_dist, options, saves=True)
        handle = run_async_save(
            route,
            session,
            state_dict,
            options,
            checkpoint_id,
            stager=async_stager,
            use_collectives=use_collectives,
            log=log,
        )
        log.uploading(handle)
        return handle


@dataclass(frozen=True, repr=False)
class SaveProgress:
    """Progress of this rank's part of a save."""

    phase: str
    """`"staging"`, `"writing"`, `"committed"` or `"failed"`."""
    bytes_written: int
    """Bytes of this rank's part files written so far; at most `bytes_total`."""
    bytes_total: int
    """Bytes that this rank writes in all; 0 until the save is planned."""
    waits_for: str = ""
    """What it waits for while it stages: saves that take the room of this node; else empty."""

    def __repr__(self) -> str:
        told = self.phase
        if self.bytes_total:
            told += f", {size_text(self.bytes_written)} of {size_text(self.bytes_total)}"
        if self.waits_for:
            told += f", waits for {self.waits_for}"
        return f"SaveProgress({told})"


@dataclass(frozen=True, repr=False)
class SaveReport:
    """What one save did on this rank."""

    path: str
    """`"native"`, `"planner hooks"` or `"foreign storage"`: determines which guarantees hold."""
    staging: str
    """Where the bytes were while training went on: `"object_store"`, Ray's, held by the node's
    stager (they survive this process); `"process"` (they do not); or the class of the stager that
    was given."""
    attempt: str | None
    """Id of the attempt, for `ray_dcp.outcome`; None before planning."""
    plan: str | None = None
    """Origin of the plan: `"cold"` if it was made for this save, `"warm"` if an earlier save of
    this job made it. None before planning, and where a plug-in plans."""
    differing: tuple[str, ...] = ()
    """Names whose values differ between the ranks that hold them: the lowest rank's are saved, and
    those of all others are lost. Of more than 1000 the first. Equal on all ranks; see
    `SaveOptions.replicas`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase that has ended: `capture`, `plan` (until all ranks had joined and the
    plan was made), `stage` (the copy), `write` and `commit`. Where a stager writes, `write` lasts
    until the commit, and there is no `commit`. If the save failed, it failed in the last phase."""
    bytes_staged: int = 0
    """Bytes that this rank copied."""
    bytes_written: int = 0
    """Bytes of this rank's part files that are known to be durable, without those that were not
    written."""
    bytes_linked: int = 0
    """Bytes of its part files that are a second name of an earlier step's file, with
    `SaveOptions(unchanged="link")`."""
    bytes_copied: int = 0
    """Bytes of its part files that the object store copied from an earlier step."""
    rank: int = 0
    """This rank."""
    waited_s: float | None = None
    """If a thread copies, as with `SaveOptions(staging="background")`: how long
    `SaveHandle.staged` and `before_step` blocked training, in seconds. None if the call copied."""
    stall_s: float = 0.0
    """How long training waited, in seconds: for those of `capture`, `plan` and `stage` that ran in
    the call, plus `waited_s`."""

    def __repr__(self) -> str:
        how = ("staged", "written", "linked", "copied")
        moved = [(one, getattr(self, f"bytes_{one}")) for one in how]
        told = [
            f"rank {self.rank}",
            *(one for one in (self.path, self.staging) if one),
            *([f"{self.plan} plan"] if self.plan else []),
            *([f"{len(self.differing)} differing"] if self.differing else []),
            *(f"{size_text(count)} {one}" for one, count in moved if count),
            f"stall {seconds_text(self.stall_s)}",
        ]
        phases = [f"{name} {seconds_text(took)}" for name, took in self.seconds.items()]
        return f"SaveReport({', '.join(told)}; {', '.join(phases) or 'no phase has ended'})"


class _StepHook:
    """Blocks an optimizer's step until the saves that were registered before it are staged.

    *Why* it is never removed: torch iterates over the hooks while it calls them, so that neither a
    hook nor the thread that stages may remove one.
    """

    def __init__(self) -> None:
        self.handles: list[SaveHandle] = []

    def __call__(self, *_: object) -> None:
        while self.handles:
            # Suppressed: the handle reports the error of the save. A user's stager may raise
            # anything.
            with suppress(Exception):
                self.handles.pop().staged()


_step_hooks: WeakKeyDictionary[Any, _StepHook] = WeakKeyDictionary()
"""The hook of each optimizer."""


class SaveFuture(Future[T]):
    """A future that only its save completes; callers can't cancel it.

    Callbacks run when all futures of the save are done, so that a callback may wait for another
    future of the same save. Exceptions that they raise are logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process = OwnProcess()
        self._is_over = False
        self._registering = threading.Lock()
        self._registered: list[Callable[[Any], object]] | None = []
        self._awaiting: set[SimpleQueue[None]] = set()
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Returns False: waiters can't cancel a save."""
        return False

    def result(self, timeout: float | None = None) -> T:
        """See `concurrent.futures.Future.result`; raises the error of the save."""
        self._check_process()
        return super().result(self._await(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future.exception`."""
        self._check_process()
        return super().exception(self._await(timeout))

    def _await(self, timeout_s: float | None) -> float:
        """Waits for the outcome, or for the timeout; returns how much longer to wait, 0.

        *Why* not as `Future` waits: Ctrl-C in the middle of it may leave the lock of the future
        held for good, and the save would wait for that lock when it ends.
        """
        ended: SimpleQueue[None] = SimpleQueue()
        with self._registering:
            self._awaiting.add(ended)
        try:
            if not self.done():
                ended.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except Empty:
            pass  # `Future` raises the error of the timeout.
        finally:
            with self._registering:
                self._awaiting.discard(ended)
        return 0.0

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """See `concurrent.futures.Future.add_done_callback`."""
        with self._registering:
            if self._registered is not None:
                self._registered.append(fn)
                return
        super().add_done_callback(fn)

    def _check_process(self) -> None:
        if not self._is_over:
            self._process.check(
                "a save's future", "Wait there, or ask ray_dcp.outcome() how the save has ended"
            )

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        """Sets the outcome, unless it is set; runs no callbacks."""
        # Suppressed: a caller has set the outcome of the future, which does not change the save.
        with suppress(InvalidStateError):
            if error is None:
                self.set_result(result)  # type: ignore[arg-type]
            else:
                self.set_exception(error)
        self._is_over = True
        with self._registering:
            awaiting = [*self._awaiting]
        for ended in awaiting:
            ended.put(None)

    def _announce(self) -> None:
        """Runs the callbacks, once."""
        with self._registering:
            callbacks, self._registered = self._registered or [], None
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:
                with contained("The log of a callback"):
                    logger.exception("A callback of %r failed", self)


class SaveHandle(SaveFuture[Metadata], AsyncSaveResponse):
    """A save that runs in the background.

    A `concurrent.futures.Future` of DCP's `Metadata`. It is done when the checkpoint is committed
    and every rank's bytes are durable, or when the save has failed; the outcome is the same on all
    ranks. It also has the two futures of DCP's `AsyncSaveResponse`. Users don't create handles:
    `ray_dcp.async_save` returns them.

    Args:
        checkpoint_id: Path or URL, for messages.
        save: The save on this rank.

    Attributes:
        checkpoint_id: Path or URL.
        staging_completion: Done when the state dict may change again.
        upload_completion: Done when this future is, with the same result.

    Examples:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     handle = ray_dcp.async_save({"w": torch.ones(2)}, checkpoint_id=f"{root}/step-1")
        ...     handle.staged()  # from here on training may go on
        ...     sorted(handle.committed().state_dict_metadata)
        ['w']
    """

    def __init__(self, checkpoint_id: str, save: _Save) -> None:
        SaveFuture.__init__(self)
        self.checkpoint_id = checkpoint_id
        self.staging_completion: SaveFuture[None] = SaveFuture()
        self.upload_completion: SaveFuture[Any] = SaveFuture()
        self._save = save
        self._looked_at = False

    def staged(self, timeout_s: float | None = None) -> None:
        """Waits until the state dict may change again, because its bytes are copied.

        Args:
            timeout_s: How long to wait, in seconds; without a limit if None.

        Raises:
            DeadlineError: The timeout expired.
            CheckpointError: Staging failed on this rank.
        """
        began_s, is_staged = time.perf_counter(), self.staging_completion.done()
        try:
            self._wait_for(self.staging_completion, timeout_s, "be staged")
        finally:
            if not is_staged:
                self._save.progress.waited_s += time.perf_counter() - began_s

    def before_step(self, *optimizers: Any) -> None:
        """Makes the next step of each optimizer wait until the state is staged.

        Use it with `SaveOptions(staging="background")`: forward and backward then overlap with the
        copies. A failed save blocks no step; its handle reports the error.

        *Careful*: state that changes before the step, such as the running statistics of batch norm
        in the forward or weights that other code changes, needs a call of `staged()` before that.

        Args:
            *optimizers: Optimizers with `register_step_pre_hook`, as torch's have. Each of them
                keeps one hook.

        Raises:
            InvalidRequestError: An optimizer has no `register_step_pre_hook`.

        Examples:
            >>> import tempfile, torch, ray_dcp
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = torch.optim.SGD([weight], lr=1.0)
            >>> options = ray_dcp.SaveOptions(staging="background")
            >>> with tempfile.TemporaryDirectory() as root:
            ...     place = f"{root}/step-1"
            ...     handle = ray_dcp.async_save({"w": weight}, checkpoint_id=place, options=options)
            ...     handle.before_step(optimizer)
            ...     weight.sum().backward()
            ...     optimizer.step()
            ...     _ = handle.committed()
            ...     ray_dcp.open(place)["w"][:].tolist()
            [1.0, 1.0]
        """
        for optimizer in optimizers:
            register = getattr(optimizer, "register_step_pre_hook", None)
            if register is None:
                raise InvalidRequestError(
                    f"expected optimizers with register_step_pre_hook, as those of torch have, "
                    f"found {type(optimizer).__name__}; call staged() before its step",
                    key="optimizers",
                )
            if optimizer not in _step_hooks:
                _step_hooks[optimizer] = _StepHook()
                register(_step_hooks[optimizer])
            _step_hooks[optimizer].handles.append(self)

    def committed(self, timeout_s: float | None = None) -> Metadata:
        """Waits until the checkpoint is committed and returns its metadata.

        Like `result`, except that it raises only errors of ray_dcp.

        Args:
            timeout_s: How long to wait, in seconds; without a limit if None.

        Raises:
            DeadlineError: The timeout expired; the save continues.
            CheckpointError: The save failed, on this rank or another.
        """
        self._looked_at = True
        metadata: Metadata = self._wait_for(self, timeout_s, "be committed")
        return metadata

    def result(self, timeout: float | None = None) -> Metadata:
        """See `concurrent.futures.Future.result`; raises the error of the save."""
        self._looked_at = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future.exception`."""
        self._looked_at = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Metadata]], Any]) -> None:
        """See `concurrent.futures.Future.add_done_callback`."""
        self._looked_at = True
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Requests that the save fail on all ranks with `SaveCancelledError`.

        Returns:
            False if the commit has begun, which can't be cancelled. In either case, this future
            reports how the save ended.
        """
        return self._process.is_this and not self.done() and self._save.cancel()

    def cancelled(self) -> bool:
        """Returns whether the save has ended by being cancelled."""
        return self.done() and isinstance(Future.exception(self), SaveCancelledError)

    @property
    def progress(self) -> SaveProgress:
        """Progress of this rank's part of the save."""
        written, total = self._save.moved()
        if self.done():
            failed = Future.exception(self) is not None
            return SaveProgress(*(("failed", written) if failed else ("committed", total)), total)
        phase = "writing" if self.staging_completion.done() else "staging"
        return SaveProgress(phase, written, total, self._save.progress.awaited)

    def report(self) -> SaveReport:
        """Returns the phases, seconds and bytes of this rank so far."""
        return self._save.report()

    # Why: AsyncSaveResponse is a dataclass that compares fields; a future equals only itself.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        progress = self.progress
        error = Future.exception(self) if self.done() else None
        told = f"{progress.phase}{'' if error is None else f': {type(error).__name__}'}"
        if progress.bytes_total and not self.done():
            told += f", {size_text(progress.bytes_written)} of {size_text(progress.bytes_total)}"
        return f"<SaveHandle {self.checkpoint_id!r}: {told}>"

    # Called by the rest of this module, which runs the save.

    def _is_staged(self, error: BaseException | None = None) -> None:
        staged = self.staging_completion
        staged._settle(None, error)
        with staged._registering:
            # Why: with no callback registered so far, a later one runs as soon as it is added.
            staged._registered = staged._registered or None
        if staged._registered:
            # Why a thread: the save continues, and a callback may be slow or wait for its end.
            # Suppressed: if no thread can be started, the callbacks run when the save ends.
            with suppress(LimitError):
                start_thread(staged._announce, "ray_dcp staged")

    def _complete(self, metadata: Metadata | None, error: BaseException | None) -> None:
        if error is None and metadata is None:
            error = CheckpointError("the save ended without a result. Please report this")
        # Why in this order: once the handle is done, the other two futures are done as well.
        self.staging_completion._settle(None, error)
        self.upload_completion._settle(metadata, error)
        self._settle(metadata, error)
        for future in (self.staging_completion, self.upload_completion, self):
            future._announce()

    def _wait_for(self, future: SaveFuture[Any], timeout_s: float | None, what: str) -> Any:
        timeout_s = check_wait(timeout_s, "timeout_s")
        self._check_process()
        try:
            return Future.result(future, future._await(timeout_s))
        except TimeoutError as exc:
            if future.done():
                raise
            raise DeadlineError(
                f"Expected the save to {what} within {timeout_s:g} s, but it was not. It goes "
                f"on: wait longer, or look at SaveHandle.progress",
                checkpoint_id=self.checkpoint_id,
            ) from exc

    def _log_if_unseen(self) -> None:
        """Logs the error of the save if no caller has retrieved it."""
        if not self._is_over or self._looked_at:
            return
        error = Future.exception(self)
        if error is not None:
            self._looked_at = True
            logger.error(
                "The asynchronous save to %s failed, and nobody asked its handle: %s: %s",
                self.checkpoint_id,
                type(error).__name__,
                error,
            )

    def __del__(self) -> None:
        self._log_if_unseen()


def run_async_save(
    route: Route,
    session: Session,
    state_dict: Mapping[str, Any],
    options: SaveOptions | None,
    checkpoint_id: CheckpointId | None,
    *,
    stager: AsyncStager | None = None,
    use_collectives: bool = True,
    log: OperationLog | None = None,
) -> SaveHandle:
    """Stages this rank's state and returns the handle of the save, which continues.

    Args:
        route: The path of the save, with its planner, storage and options.
        session: Session of this rank.
        state_dict: As given to `async_save`.
        options: As given to `async_save`; those of `route` are added.
        checkpoint_id: As given to `async_save`.
        stager: As given to `async_save`.
        use_collectives: Passed to foreign storages.
        log: Receives the phases.

    Raises:
        CheckpointError: The session can't be used. The handle reports later errors.
        Exception: A user's stager raised it.
    """
    options = route.apply(options or SaveOptions())
    if route.path == HOOKS:
        # Why: otherwise the planner's code would run in another thread.
        options = replace(options, staging="call")
    name = route.target.url if route.target is not None else str(checkpoint_id)
    own = None
    if stager is None and route.path == FOREIGN:
        if isinstance(route.storage, AsyncStager):
            stager = route.storage
        else:
            stager = own = DefaultStager(StagingOptions(False, False, False, False))
    if stager is None:
        if session.world_size == 1 and session.ray is None:
            # Why here: only what goes on beside the training has to outlive this process.
            session = session_in_ray(_drain_session, _is_used) or session
        part = part_save(checkpoint_id, route, session)
        native = _NativeSave(name, route, session, options, log, part)
        handle = SaveHandle(name, native)
        native.begin(handle, state_dict)
        return handle
    part = part_save(checkpoint_id, route, session)
    staged = _StagedByUser(name, route, session, options, log, part)
    handle = SaveHandle(name, staged)
    staged.begin(
        handle, stager, state_dict, checkpoint_id, use_collectives=use_collectives, own=own
    )
    return handle


class _Save:
    """One save on this rank: its state, which the handle queries, and its thread.

    *Invariant*: the handle has the save, and the save has no handle. What runs the save gets the
    handle as an argument, so that both are freed when the caller drops it, without a collector.
    """

    _backend: StagingBackend | None = None
    """Stages the bytes; None where the user's stager does."""
    _in_background = False

    def __init__(
        self,
        checkpoint_id: str,
        route: Route,
        session: Session,
        options: SaveOptions,
        log: OperationLog | None,
        part: PartSave | None = None,
    ) -> None:
        self._route = route
        self._part = part
        self._session = session
        self._options = options
        # Why now: all ranks must name their calls in the order in which the user makes them.
        self._name = session.next_key()
        self._call = Call(session, options.heartbeat_timeout_s, self._name)
        self._call.report("async_save", checkpoint_id, route.path, log)
        self.progress = self._call.progress
        self._staging = ""

    def cancel(self) -> bool:
        """Asks the coordinator to fail the save; returns False if its commit has begun."""
        # Why not on a foreign storage: it has no way to stop a save.
        if self._route.path == FOREIGN:
            return False
        return self._session.cancel(self._key, "SaveHandle.cancel was called")

    @property
    def _key(self) -> OpKey:
        return self.progress.key or self._name

    def moved(self) -> tuple[int, int]:
        """Returns the bytes that this rank has written, and those that it writes in all."""
        return (0, 0) if self._backend is None else self._backend.progress()

    def report(self) -> SaveReport:
        """Returns the report of the save so far."""
        progress = self.progress
        return SaveReport(
            path=self._route.path,
            # Why not cached: the kind of staging is known only once the bytes are staged.
            staging=self._staging if self._backend is None else self._backend.kind,
            rank=self._session.rank,
            attempt=progress.attempt,
            plan=progress.plan,
            differing=progress.differing,
            seconds=dict(progress.seconds),
            bytes_staged=progress.bytes.get("stage", 0),
            bytes_written=progress.bytes.get("write", 0),
            bytes_linked=progress.reused_bytes.get("linked", 0),
            bytes_copied=progress.reused_bytes.get("copied", 0),
            waited_s=progress.waited_s if self._in_background else None,
            stall_s=progress.held_s,
        )

    def _complete(
        self, handle: SaveHandle, metadata: Metadata | None, error: BaseException | None
    ) -> None:
        """Completes the handle, after updating the metrics and emitting the end event."""
        try:
            self._call.end(error)
        finally:  # also when a listener of events raises SystemExit
            if self._part is not None:
                self._part.ended(error)
            handle._complete(metadata, error)

    def _go_on(self, handle: SaveHandle, finish: Callable[[], Metadata]) -> bool:
        """Runs the rest of the save in a new thread, which then completes the handle.

        Args:
            handle: Handle of the save.
            finish: The rest of the save.

        Returns:
            Whether the thread was started; if not, the save has failed.
        """
        begun = threading.Lock()

        def run() -> None:
            metadata, error = None, None
            if not begun.acquire(blocking=False):
                return  # the call was interrupted, and has ended the save
            try:
                metadata = finish()
            except BaseException as exc:  # noqa: BLE001 - the handle raises it
                error = exc
            _running.pop(self, None)
            # Suppressed: a listener may raise SystemExit, and this thread ends here anyway.
            with suppress(BaseException):
                self._complete(handle, metadata, error)

        _running[self] = handle
        _drain_at_exit()
        try:
            start_thread(run, f"ray_dcp save {handle.checkpoint_id}")
        except LimitError as error:
            _running.pop(self, None)
            self._session.leave(Left(self._key, error.message), bounds.LEAVING_S)
            self._complete(handle, None, error)
            return False
        except BaseException as error:
            # Why: interrupted before the thread began, nobody would end this save.
            if begun.acquire(blocking=False):
                _running.pop(self, None)
                # The caller got this error; it has no handle to ask for another one.
                handle._looked_at = True
                self._complete(handle, None, error)
            raise
        return True

    def drain(self, handle: SaveHandle) -> None:
        """Waits until the save has ended; logs an error if it has not within its deadlines."""
        timeout_s = self._options.write_timeout_s + self._options.commit_timeout_s
        handle.upload_completion._await(timeout_s)
        if not handle.done():
            logger.error(
                "The asynchronous save to %s has not ended after %g s and is left; ask "
                "ray_dcp.outcome(%r, %r) what became of it",
                handle.checkpoint_id,
                timeout_s,
                handle.checkpoint_id,
                self.progress.attempt,
            )
        handle._log_if_unseen()


class _NativeSave(_Save):
    """A save whose bytes ray_dcp stages."""

    def begin(self, handle: SaveHandle, state_dict: Mapping[str, Any]) -> None:
        """Plans the save; stages its bytes in the caller's thread if `staging="call"`."""
        self._in_background = self._options.staging == "background"
        with ExitStack() as stack:
            call = stack.enter_context(self._call)
            try:
                stages = [self._plan(handle, call, state_dict)]
                if not self._in_background:
                    finish = stages.pop()()
                # The rank sends heartbeats until the save has ended.
                rest = ExitStack()
                rest.push(call)

                def finish_all() -> Metadata:
                    with rest:
                        # Why popped: the function references the state, which may be freed once
                        # staged.
                        return stages.pop()()() if stages else finish()

                if self._go_on(handle, finish_all):
                    stack.pop_all()
                elif self._backend is not None:
                    self._backend.release(committed=False)
            except CheckpointError as error:
                call.leave(error)
                self._complete(handle, None, error)
            except BaseException as error:
                # The caller got this error; it has no handle to ask for another one.
                handle._looked_at = True
                if self._part is not None:
                    self._part.ended(error)
                self._call.end(error)
                raise

    def _plan(
        self, handle: SaveHandle, call: Call, state_dict: Mapping[str, Any]
    ) -> Callable[[], Callable[[], Metadata]]:
        """Joins the save with the state as it is now; returns the function that stages it.

        That function in turn returns the one that waits for the commit.
        """
        target, options, progress = target_of(self._route), self._options, self.progress
        await_unused(plug_ins_of(self._route), options, call.rank)
        capture = capture_of(self._route, call, state_dict, options)
        if self._part is not None:
            capture = after(self._part.begin, capture)

        backend = self._backend = staging_backend_of(self._session.ray)
        save = RankSave.of(call, target, options, staged=True)
        go, captured = drive(save.join(capture), call.ask)
        noted = (*captured.warnings, *go.warnings)
        if self._in_background:
            # Suppressed: staging raises it again, and then reports it to the other ranks.
            with suppress(Exception):
                for file in go.plan.files:
                    for row in file.deferred.tolist():
                        captured.deferred(row)
            progress.release(progress.enter(STAGE))

        def report_part() -> None:
            # Why before the handle: who is told that it is staged may end this process.
            if self._part is not None:
                self._part.staged(go.attempt, outlives=backend.kind == "object_store")

        def stage() -> Callable[[], Metadata]:
            progress.enter(STAGE)
            error, rest = backend.stage(save, go, captured, report_part)
            progress.count(backend.num_bytes)
            progress.release(progress.enter(STAGED))
            handle._is_staged(error)
            return partial(finish, rest)

        def finish(rest: Finish) -> Metadata:
            committed = False
            try:
                ray = self._session.ray
                connected = until_disconnected(call.ask, ray.connection if ray else None)
                outcome: SaveOutcome = drive(rest, connected)
                committed = True
            except Disconnected as error:
                failed = shut_down_meanwhile(target.url, go.attempt, call.rank)
                raise failed from error.__cause__
            finally:
                backend.release(committed=committed)
            if call.rank == 0:
                for warning in dict.fromkeys([*noted, *outcome.warnings]):
                    events.warn(warning, stacklevel=2)
            self._route.committed(outcome.attempt)
            return CommittedMetadata.of(target, replace(outcome, differing=go.differing))

        return stage


class _StagedByUser(_Save):
    """A save whose state an `AsyncStager` of DCP's protocol stages, on any path."""

    def begin(
        self,
        handle: SaveHandle,
        stager: AsyncStager,
        state_dict: Mapping[str, Any],
        checkpoint_id: CheckpointId | None,
        *,
        use_collectives: bool,
        own: DefaultStager | None,
    ) -> None:
        """Stages the state as DCP does, in the caller's thread or the stager's.

        Args:
            handle: Handle of the save.
            stager: The user's stager, or DCP's default.
            state_dict: The values to save.
            checkpoint_id: As given to `async_save`.
            use_collectives: As given to `async_save`.
            own: The stager, if this save has to close it at its end.
        """
        self._staging = type(stager).__name__
        self.progress.enter(STAGE)
        plug_ins = (stager, *plug_ins_of(self._route))
        try:
            await_unused(plug_ins, self._options, self._session.rank)
            state = for_stager(stateful_to_state_dict(state_dict))
            fields, staged = fields_of(state), stager.stage(state)
            del state
        except BaseException as error:
            # Why: the heartbeats of this call have not begun, and the other ranks would wait.
            self._call.leave(error)
            self._call.end(error)
            if own is not None:
                own.close()
            raise
        mark_used(plug_ins, handle.upload_completion)
        self._in_background = isinstance(staged, Future)
        if isinstance(staged, Future):
            staged.add_done_callback(lambda done: handle._is_staged(done.exception()))

        def finish() -> Metadata:
            try:
                copied = staged.result() if isinstance(staged, Future) else staged
                give_fields(fields, copied)
                return run_save(
                    self._route,
                    self._session,
                    copied,
                    self._options,
                    checkpoint_id,
                    stateful=False,
                    use_collectives=use_collectives,
                    call=self._call,
                    part=self._part,
                )
            finally:
                if own is not None:
                    own.close()

        if not self._go_on(handle, finish) and own is not None:
            own.close()
        if not isinstance(staged, Future):
            if stager.should_synchronize_after_execute:
                stager.synchronize_staging()
            handle._is_staged()
        self.progress.release()


# --- the end of the process ---------------------------------------------------------------------

_running: dict[_Save, SaveHandle] = {}
# Why: a forked child lacks the threads that end these saves, and would wait for them at its exit.
os.register_at_fork(after_in_child=_running.clear)


def _drain_at_exit() -> None:
    # Why with each save: handlers run in reverse order of registration, and this one has to run
    # before Ray's, which `import ray` registers and which closes the connection.
    atexit.unregister(_drain)
    atexit.register(_drain)


def _drain() -> None:
    """Waits for the saves in progress, for as long as their own deadlines allow."""
    for save, handle in list(_running.items()):
        save.drain(handle)


def _is_used(session: Session) -> bool:
    """Returns whether a session has saves that have not ended."""
    return any(save._session is session for save in list(_running))


def _drain_session(session: Session) -> None:
    """Waits for the saves of a session, before the Ray ends that stages them."""
    for save, handle in list(_running.items()):
        if save._session is session:
            save.drain(handle)
