"""Work of a manager beside the training: `Background` runs it, `Finisher` waits for saves.

`in_time` bounds the time of work in the storage that the training waits for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ray_dcp.core.processes import begin, start_thread, wait_all, wait_any
from ray_dcp.errors import CheckpointError, LimitError, StorageError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def in_time(timeout_s: float, what: str, work: Callable[[], T]) -> T:
    """Returns the result of work that may hang in the storage; abandons it after a timeout.

    Args:
        timeout_s: Timeout, in seconds.
        what: Description of the work, for the error.
        work: Runs in a thread.

    Raises:
        StorageError: The timeout expired.
    """
    done = begin(work, "ray_dcp manager decides")
    wait_any([done], timeout_s)
    if not done.done():
        raise StorageError(
            f"expected the storage to answer within {timeout_s:g} s, but {what} still waits for "
            f"it, and is left to itself. Look after the storage, or raise plan_timeout_s"
        )
    try:
        return done.result()
    finally:
        # Why: an error has this frame in its traceback, and would keep all callers' locals alive.
        del done


class Background:
    """Runs pieces of work in order, in a thread that lives while there are any.

    If no thread can be started, the caller of `add` runs the work.

    Args:
        name: Name of the thread.

    Examples:
        >>> work = Background("sums")
        >>> work.add(lambda: 6 * 7).result(), work.wait()
        (42, True)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._is_running = False

    def add(self, work: Callable[[], T]) -> Future[T]:
        """Adds a piece of work, and returns its future."""
        ended = Future[T]()
        with self._changed:
            self._waiting.append((work, ended))
            if self._is_running:
                return ended
            self._is_running = True
            with suppress(LimitError):
                start_thread(self._run, self._name)
                return ended
        self._run()
        return ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all work is done; returns False if the timeout expired."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                work, ended = self._waiting.popleft()
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)
                if not isinstance(error, Exception):
                    # The caller of `add` is interrupted; the rest is done by the next call.
                    self._is_running = False
                    raise


@dataclass(frozen=True)
class Ended:
    """The outcome of an asynchronous save."""

    step: int
    error: CheckpointError | None = None
    """Why the step is not committed, the same on all ranks; None if it is committed."""
    created_s: float | None = None
    """Time of the save by the clock of rank 0, the same on all ranks; None if it did not begin."""


class Finisher:
    """Waits for asynchronous saves, one after the other.

    Args:
        on_end: Called in a thread with the outcome of each save.
    """

    def __init__(self, on_end: Callable[[Ended], object] = lambda ended: None) -> None:
        self._on_end = on_end
        self._saves: deque[tuple[int, Future[Ended]]] = deque()
        self._background = Background("ray_dcp manager")

    def add(self, step: int, created_s: float, finish: Callable[[], object]) -> None:
        """Adds a save whose bytes are staged.

        Args:
            step: The step.
            created_s: See `Ended`.
            finish: Waits for the end of the save; raises the reason why the step is not committed.
        """
        ended = self._background.add(partial(self._finish, Ended(step, None, created_s), finish))
        self._saves.append((step, ended))

    def wait_for(self, step: int) -> None:
        """Waits until no save of a step is in progress."""
        wait_all([ended for one, ended in [*self._saves] if one == step])

    def ended(self, leave: int = 0) -> list[Ended]:
        """Waits for the oldest saves, and returns their outcomes in the order of the calls.

        The result depends only on the calls, so that it is the same on all ranks:

            saves, oldest first   1  2  3  4  5        (1 was returned before)
            ended(leave=2)           2  3

        Args:
            leave: Number of the newest saves that are not waited for, and left to a later call.
        """
        count = max(0, len(self._saves) - leave)
        # Why first: an interrupt of the wait must not lose an outcome.
        wait_all([ended for _, ended in [*self._saves][:count]])
        return [self._saves.popleft()[1].result() for _ in range(count)]

    def _finish(self, ended: Ended, finish: Callable[[], object]) -> Ended:
        step = ended.step
        try:
            finish()
        except CheckpointError as error:
            error.step = step if error.step is None else error.step
            ended = Ended(step, error)
        except Exception as error:  # noqa: BLE001 - `ended` returns it
            failed = CheckpointError(
                f"the save of step {step} failed: {type(error).__name__}: {error}", step=step
            )
            failed.__cause__ = error
            ended = Ended(step, failed)
        try:
            self._on_end(ended)
        except Exception:
            logger.exception("After the end of the save of step %d", step)
        return ended
