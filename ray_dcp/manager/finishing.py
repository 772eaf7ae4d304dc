"""Follows asynchronous saves to their end, in the order in which they were begun, in one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray_dcp.errors import CheckpointError

__all__ = ["Finisher", "UnderWay"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnderWay:
    """A step whose bytes are staged."""

    step: int
    handles: Sequence[Future[Any]]
    """Of all its items."""
    commit: Callable[[], object]
    """Makes the step of its items, when all are committed."""
    ended: Callable[[CheckpointError | None], object]
    """Takes in how it has ended."""


class Finisher:
    """Waits for what is under way.

    Args:
        on_failure: Called with step and error of each save that fails, in the thread.
    """

    def __init__(self, on_failure: Callable[[int, CheckpointError], object] | None = None) -> None:
        self._on_failure = on_failure
        self._waiting: deque[UnderWay] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failed: list[tuple[int, CheckpointError]] = []
        self._closed = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are under way, in order."""
        with self._changed:
            return tuple(one.step for one in self._waiting)

    def add(self, under_way: UnderWay) -> None:
        """Follows a save."""
        with self._changed:
            self._waiting.append(under_way)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ray_dcp manager", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is under way; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def failures(self) -> list[tuple[int, CheckpointError]]:
        """Returns the saves that failed since it was last called, with why."""
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    def close(self) -> None:
        """Ends the thread when nothing is under way any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                one = self._waiting[0]
            error = self._finish(one)
            with self._changed:
                if error is not None:
                    self._failed.append((one.step, error))
                self._waiting.popleft()
                self._changed.notify_all()

    def _finish(self, one: UnderWay) -> CheckpointError | None:
        error = _told([handle.exception() for handle in one.handles], one.step)
        try:
            if error is None:
                one.commit()
        except Exception as failed:  # noqa: BLE001 - told by join
            error = _told([failed], one.step)
        try:
            one.ended(error)
            if error is not None and self._on_failure is not None:
                self._on_failure(one.step, error)
        except Exception:
            logger.exception("After the end of the save of step %d", one.step)
        return error


def _told(errors: Sequence[BaseException | None], step: int) -> CheckpointError | None:
    """Returns the first error, as one of ours."""
    for error in errors:
        if isinstance(error, CheckpointError):
            error.step = step if error.step is None else error.step
            return error
        if error is not None:
            told = CheckpointError(
                f"the save of step {step} failed: {type(error).__name__}: {error}", step=step
            )
            told.__cause__ = error
            return told
    return None
