"""Runs tasks on a few threads: the first error stops the others and is raised.

Also runs one piece of work under a deadline: a thread that hangs in the kernel can't be ended,
but nobody has to wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from ray_dcp.core.processes import start_thread
from ray_dcp.errors import LimitError
from ray_dcp.store.storage import read_traits_of

T = TypeVar("T")

UNWIND_S = 1.0
"""How long work that was asked to stop is waited for, in seconds: it removes what it had begun."""


_THREAD_S = 1e-3
"""A thread more pays where it spares so many seconds of waiting."""


class Stop:
    """Tells tasks that another one has failed, so that going on is of no use."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._to_wake: list[threading.Event] = []

    @property
    def asked(self) -> bool:
        """Some task has failed."""
        return self._event.is_set()

    @property
    def error(self) -> BaseException | None:
        """What the first failed task raised."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Waits until some task has failed; tells whether one has."""
        return self._event.wait(timeout_s)

    def because(self, error: BaseException) -> None:
        """Records an error, unless one was there first."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._event.set()
            for event in self._to_wake:
                event.set()

    def wakes(self, event: threading.Event) -> None:
        """Has an event set when it is asked to stop; at once if it was."""
        with self._lock:
            self._to_wake.append(event)
            if self.asked:
                event.set()

    def forget(self, event: threading.Event) -> None:
        """Takes an event of `wakes` back."""
        with self._lock:
            self._to_wake.remove(event)


def run_tasks(
    tasks: Iterable[T], work: Callable[[T], None], num_threads: int, stop: Stop | None = None
) -> None:
    """Does `work(task)` for every task, each once, in any order, on up to `num_threads` threads.

    After an error no further task is begun; those under way are waited for. With one thread
    everything happens in the caller's own.

    Args:
        tasks: Taken one by one, under a lock.
        work: Must be safe to call from several threads.
        num_threads: Most threads, the caller's own included.
        stop: Set when a task fails; for tasks that want to end early then.

    Raises:
        BaseException: The first error of a task, as it was raised.
    """
    stop = stop or Stop()
    left = iter(tasks)
    lock = threading.Lock()

    def drain() -> None:
        try:
            while not stop.asked:
                try:
                    with lock:
                        task = next(left)
                except StopIteration:
                    return
                work(task)
        except BaseException as exc:  # noqa: BLE001 - raised below, in the caller's thread
            stop.because(exc)

    threads: list[threading.Thread] = []
    # Suppressed: there are no more threads, and fewer do it as well.
    with suppress(LimitError):
        for _ in range(num_threads - 1):
            threads.append(start_thread(drain, "ray_dcp work"))
    drain()
    for thread in threads:
        thread.join()
    if stop.error is not None:
        raise stop.error


def threads_for(storage: object, num_requests: int, most: int = 16) -> int:
    """Returns how many threads pay for small requests that do not depend on each other.

    Args:
        storage: That is asked.
        num_requests: How many requests there are.
        most: Threads.

    Examples:
        >>> threads_for(None, 40), threads_for(None, 400)
        (1, 8)
    """
    paid = int(num_requests * read_traits_of(storage).request_s / _THREAD_S)
    return max(1, min(paid, num_requests, most))


def at_once(*calls: Callable[[], Any]) -> tuple[Any, ...]:
    """Returns what calls return that wait for a storage at the same time.

    Raises:
        BaseException: The first error of a call; the others have ended by then.

    Examples:
        >>> at_once(lambda: 1, lambda: "a")
        (1, 'a')
    """
    found: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        found[index] = calls[index]()

    run_tasks(range(len(calls)), call, len(calls))
    return tuple(found)


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Begins work that may hang for ever, in a daemon thread of its own; returns its future.

    Args:
        work: What to do.
        name: Of the thread.

    Raises:
        LimitError: No thread can be started.

    Examples:
        >>> begin(lambda: 6 * 7, "sums").result()
        42
    """
    ended = Future[T]()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            ended.set_exception(error)

    start_thread(run, name)
    return ended


def run_within(
    work: Callable[[], T],
    within_s: float,
    stop: Stop,
    overdue: Callable[[], BaseException],
    unwind_s: float = UNWIND_S,
) -> T:
    """Returns what `work` returns; done in a thread of its own, which is given up if it hangs.

    Args:
        work: Should look at `stop` now and then, and end with an error when it is asked to.
        within_s: How long it may take, in seconds.
        stop: Ends the wait when it is asked to stop. Asked by this call when time is over, or when
            the caller's thread is interrupted.
        overdue: Makes the error when time is over.
        unwind_s: How long to wait, in seconds, for work that was asked to stop.

    Raises:
        BaseException: What `work` raised; `stop.error` when it was stopped; the one of `overdue`
            when time is over; `KeyboardInterrupt` when the caller's thread was interrupted. The
            thread may still be there then, and is a daemon.

    Examples:
        >>> run_within(lambda: 6 * 7, 10.0, Stop(), lambda: TimeoutError())
        42
    """
    wake, ended = threading.Event(), Future[T]()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            ended.set_exception(error)
        wake.set()

    thread = None
    stop.wakes(wake)
    try:
        thread = start_thread(run, "ray_dcp in time")
        wake.wait(within_s)
        if not ended.done() and not stop.asked:
            stop.because(overdue())
    except BaseException as error:
        stop.because(error)
        if thread is not None:
            thread.join(unwind_s)
        raise
    finally:
        stop.forget(wake)
    if not ended.done():
        thread.join(unwind_s)
    if not ended.done() or (ended.exception() is not None and stop.error is not None):
        raise stop.error or overdue()
    return ended.result()
