"""`SaveHandle`: what `async_save` returns, a future of the committed checkpoint's metadata."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    InvalidRequestError,
    SaveCancelledError,
)

if TYPE_CHECKING:
    from ray_dcp.asynchronous import _Save

__all__ = ["SaveHandle", "SaveProgress", "SaveReport"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveProgress:
    """How far this rank's share of a save is."""

    phase: str
    """`"staging"`, `"writing"`, `"committed"` or `"failed"`."""
    bytes_written: int
    """Bytes of this rank's part files that are written, at most `bytes_total`."""
    bytes_total: int
    """Bytes that this rank writes; 0 until that is planned."""


@dataclass(frozen=True)
class SaveReport:
    """What one save did on this rank."""

    path: str
    """`"native"`, `"planner hooks"` or `"foreign storage"`: which promises hold."""
    staging: str
    """Where the bytes were kept while training went on: `"stager"` (they survive this process),
    `"process"` (they do not), or the class of the stager that was given."""
    attempt: str | None
    """Id of the attempt, for `ray_dcp.outcome`; None before planning."""
    plan: str | None = None
    """Where the plan is from: `"cold"`, made for this save; `"warm"`, that of an earlier save of
    this job. None before planning, and where a plug-in plans."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each phase took that has ended: `capture`, `plan` (until all ranks had joined and
    the plan was there), `stage` (the copy), `write` and `commit`. Where a stager writes, `write`
    lasts until the commit, and there is no `commit`."""
    bytes_staged: int = 0
    """Bytes that this rank copied."""
    bytes_written: int = 0
    """Bytes of this rank's part files, once they are known to be durable."""
    rank: int = 0
    """This rank."""
    takeovers: int = 0
    """How often another stager had to take this rank's bytes over."""
    waited_s: float | None = None
    """With `SaveOptions(staging="background")`: how long `SaveHandle.staged` and `before_step` held
    training up, in seconds. None where the call copied."""

    @property
    def stall_s(self) -> float:
        """How long training waited: `capture`, `plan`, and `stage` or `waited_s`, in seconds."""
        stage_s = self.seconds.get("stage", 0.0) if self.waited_s is None else self.waited_s
        return self.seconds.get("capture", 0.0) + self.seconds.get("plan", 0.0) + stage_s


class _StepHook:
    """Holds an optimizer's step up until the saves that were registered before it are staged.

    Why it stays: torch iterates over the hooks while it calls them, so that none may remove one,
    nor may the thread that stages.
    """

    def __init__(self) -> None:
        self.handles: list[SaveHandle] = []

    def __call__(self, *_: object) -> None:
        while self.handles:
            # Suppressed: whoever asks the handle is told why it failed.
            with suppress(CheckpointError):
                self.handles.pop().staged()


_step_hooks: WeakKeyDictionary[Any, _StepHook] = WeakKeyDictionary()
"""Of each optimizer."""


class SaveHandle(Future[Metadata], AsyncSaveResponse):
    """A save that goes on in the background.

    It is a `concurrent.futures.Future` of DCP's `Metadata`, done when every rank's bytes are
    durable and the checkpoint is committed, or when the save failed: with the same outcome on all
    ranks. It also has the two futures of DCP's `AsyncSaveResponse`. Made by
    `ray_dcp.async_save`, not by users.

    Args:
        checkpoint_id: Path or URL, for messages.

    Attributes:
        checkpoint_id: As given.
        staging_completion: Done when the state dict may change again.
        upload_completion: Done when this future is, with the same result.

    Example:
        >>> import tempfile, torch, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     handle = ray_dcp.async_save({"w": torch.ones(2)}, checkpoint_id=f"{root}/step-1")
        ...     handle.staged()  # from here on training may go on
        ...     sorted(handle.committed().state_dict_metadata)
        ['w']
    """

    def __init__(self, checkpoint_id: str) -> None:
        Future.__init__(self)
        self.checkpoint_id = checkpoint_id
        self.staging_completion: Future[None] = Future()
        self.upload_completion: Future[Any] = Future()
        self._source: _Save | None = None
        self._waited_s = 0.0
        self._looked_at = False
        self._cancelled = threading.Event()
        self.set_running_or_notify_cancel()

    def staged(self, timeout_s: float | None = None) -> None:
        """Returns when the state dict may change again: its bytes are copied.

        Args:
            timeout_s: How long to wait, in seconds; for ever if None.

        Raises:
            DeadlineError: It took longer.
            CheckpointError: Staging failed on this rank.
        """
        began_s = time.perf_counter()
        try:
            self._wait_for(self.staging_completion, timeout_s, "be staged")
        finally:
            self._waited_s += time.perf_counter() - began_s

    def before_step(self, *optimizers: Any) -> None:
        """Lets the next step of each optimizer wait until the state is staged.

        For `SaveOptions(staging="background")`: forward and backward go on beside the copies. A
        save that fails holds no step up; its handle tells the error.

        *Careful*: what changes before the step needs `staged()` before that: batch norm's running
        statistics, which the forward changes, or weights that anything but a step changes.

        Args:
            *optimizers: With `register_step_pre_hook`, as those of torch; each keeps one hook.

        Raises:
            InvalidRequestError: An optimizer has no such hooks.

        Example:
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
        """Returns the metadata when the checkpoint is committed; like `result` with our errors.

        Args:
            timeout_s: How long to wait, in seconds; for ever if None.

        Raises:
            DeadlineError: It took longer; the save goes on.
            CheckpointError: The save failed, on this rank or another.
        """
        self._looked_at = True
        metadata: Metadata = self._wait_for(self, timeout_s, "be committed")
        return metadata

    def result(self, timeout: float | None = None) -> Metadata:
        """See `concurrent.futures.Future.result`; raises what the save raised."""
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
        """Asks to fail the save on all ranks with `SaveCancelledError`.

        Returns:
            Whether it was still possible: False once its commit has begun. Either way this
            future tells how it ended.
        """
        if self.done() or self._source is None:
            return False
        return self._source.cancel()

    def cancelled(self) -> bool:
        """Returns whether the save ended because it was cancelled."""
        return self.done() and isinstance(super().exception(), SaveCancelledError)

    @property
    def progress(self) -> SaveProgress:
        """How far this rank's share is."""
        written, total = self._source.progress() if self._source else (0, 0)
        if self.done():
            failed = super().exception() is not None
            return SaveProgress(*(("failed", written) if failed else ("committed", total)), total)
        phase = "writing" if self.staging_completion.done() else "staging"
        return SaveProgress(phase, written, total)

    def report(self) -> SaveReport:
        """Returns what this rank did so far: phases, seconds and bytes."""
        if self._source is None:
            return SaveReport(path="", staging="", attempt=None)
        return self._source.report()

    # AsyncSaveResponse is a dataclass, equal by its fields; a future is only equal to itself.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = Future.__repr__

    # For `asynchronous`, which carries it out.

    def _run_by(self, source: _Save) -> None:
        self._source = source

    def _is_staged(self, error: BaseException | None = None) -> None:
        if self.staging_completion.done():
            return
        if error is None:
            self.staging_completion.set_result(None)
        else:
            self.staging_completion.set_exception(error)

    def _end(self, metadata: Metadata | None, error: BaseException | None) -> None:
        if error is None and metadata is not None:
            self._is_staged()
            # Why in this order: who has waited for the handle finds the other one done as well.
            self.upload_completion.set_result(metadata)
            self.set_result(metadata)
            return
        error = error or CheckpointError("the save ended without a result. Please report this")
        self._is_staged(error)
        self.upload_completion.set_exception(error)
        self.set_exception(error)

    def _wait_for(self, future: Future[Any], timeout_s: float | None, what: str) -> Any:
        try:
            return Future.result(future, timeout_s)
        except TimeoutError as exc:
            if future.done():
                raise
            raise DeadlineError(
                f"Expected the save to {what} within {timeout_s:g} s, but it was not. It goes "
                f"on: wait longer, or look at SaveHandle.progress",
                checkpoint_id=self.checkpoint_id,
            ) from exc

    def _tell_if_unseen(self) -> None:
        """Logs a failure that nobody has asked for."""
        if not self.done() or self._looked_at or self.upload_completion is None:
            return
        error = super().exception()
        if error is not None:
            self._looked_at = True
            logger.error(
                "The asynchronous save to %s failed, and nobody asked its handle: %s: %s",
                self.checkpoint_id,
                type(error).__name__,
                error,
            )

    def __del__(self) -> None:
        self._tell_if_unseen()
