"""Runs tasks on a few threads: the first error stops the others and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["Stop", "run_tasks"]

T = TypeVar("T")


class Stop:
    """Tells tasks that another one has failed, so that going on is of no use."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

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
                with lock:
                    task = next(left, _NONE)
                if isinstance(task, _None):
                    return
                work(task)
        except BaseException as exc:  # noqa: BLE001 - raised below, in the caller's thread
            stop.because(exc)

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    drain()
    for thread in threads:
        thread.join()
    if stop.error is not None:
        raise stop.error


class _None:
    """Stands for the end of the tasks."""


_NONE = _None()
