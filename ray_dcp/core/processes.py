"""State that belongs to one process: a forked child copies all memory, but none of the threads.

A forked child resets what threads share: each module with such state registers a reset beside it
(`os.register_at_fork`). Locks are created anew, as a thread that the child lacks may have held
them. State that only a thread of the parent could finish is dropped; threads, clients and idle
memory are not inherited. `tests/unit/test_forks.py` has the list of these modules, and finds what
is missing in it. Ids of attempts, files and leases come from the operating system at each use.

Objects of the user (sessions, handles, managers) remain the parent's: `OwnProcess` refuses their
use in a child.

Tasks run on several threads; the first error stops all of them and is raised. `run_within` runs a
function under a deadline: a thread that hangs in the kernel can't be ended, but the caller need not
wait for it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ray_dcp.core import bounds
from ray_dcp.errors import InvalidRequestError, LimitError


class OwnProcess:
    """Identifies the process in which it was created.

    Examples:
        >>> OwnProcess().is_this
        True
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether the caller runs in that process, and not in a child forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str, instead: str) -> None:
        """Raises `InvalidRequestError` in a child forked from that process.

        Args:
            what: Name of the object that is used, for the message.
            instead: What the child should do, for the message.
        """
        if not self.is_this:
            raise InvalidRequestError(
                f"Expected {what} to be used by process {self._pid}, which made it, but this is "
                f"process {os.getpid()}, forked from that one: its threads are not here. {instead}"
            )


def pid_namespace() -> str:
    """Returns what is equal where process ids name the same processes; empty if that is unknown."""
    return _namespace("pid")


def network_namespace() -> str:
    """Returns what is equal for processes that share a loopback interface; empty if unknown.

    *Why* not the name of the host: containers and cloned machines often have equal ones.
    """
    return _namespace("net")


def _namespace(kind: str) -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()}/{os.readlink(f'/proc/self/ns/{kind}')}"
    return ""


class ProcessLock:
    """A module's lock, replaced by a new one in a forked child.

    Examples:
        >>> with ProcessLock():
        ...     pass
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Starts a daemon thread, and returns it.

    Args:
        work: Function to call in the thread.
        name: Name of the thread.

    Raises:
        LimitError: The thread can't be started.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise LimitError(
            f"Expected to start a thread ({name}), but the system refused: {error}. Raise the "
            f"limit of threads (ulimit -u, pids.max of the container), or use fewer"
        ) from error
    return thread


_collector_lock = ProcessLock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector for the time of the block.

    Why: a table of 20,000 tensors is a few hundred thousand objects, none of them garbage. The
    search for cycles among them, and among all objects of the training program, takes a third of a
    save or load. Use it for steps that compute, not for steps that wait.

    Blocks may be nested, and used by several threads at once: the last one to leave restores the
    state that the first one found.
    """
    global _pauses, _was_enabled
    with _collector_lock:
        _pauses += 1
        if _pauses == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _collector_lock:
            _pauses = max(_pauses - 1, 0)
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _end_pauses() -> None:
    """Resets the module in a forked child, in which no thread has paused the collector."""
    global _pauses
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_end_pauses)


T = TypeVar("T")


class Stop:
    """Signals to tasks that another task has failed and that they should end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.failed: Future[None] = Future()
        """Ends with the error of the first task that fails."""

    @property
    def asked(self) -> bool:
        """Whether a task has failed."""
        return self.failed.done()

    @property
    def error(self) -> BaseException | None:
        """The error of the first failed task; None if none has failed."""
        return self.failed.exception() if self.asked else None

    def wait(self, timeout_s: float) -> bool:
        """Waits until a task has failed or the timeout passes; returns whether one has failed."""
        wait([self.failed], timeout_s)
        return self.asked

    def because(self, error: BaseException) -> None:
        """Requests a stop, and records the error unless there is an earlier one."""
        with self._lock:
            if not self.asked:
                self.failed.set_exception(error)


HELPER = "ray_dcp work"
"""Name of the threads that do a share of several tasks."""


def run_tasks(
    tasks: Iterable[T], work: Callable[[T], object], num_threads: int, stop: Stop | None = None
) -> None:
    """Calls `work(task)` once for every task, in any order, on up to `num_threads` threads.

    After an error, no further task is started, and running tasks are waited for. With one thread,
    all tasks run in the caller's thread.

    Args:
        tasks: The tasks; consumed one by one, under a lock.
        work: Function to call; must be thread-safe.
        num_threads: Maximum number of threads, including the caller's.
        stop: Signalled when a task fails, for tasks that can end early.

    Raises:
        BaseException: The first error of a task.
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
            threads.append(start_thread(drain, HELPER))
    drain()
    for thread in threads:
        thread.join()
    if stop.error is not None:
        raise stop.error


def at_once(*calls: Callable[[], Any]) -> tuple[Any, ...]:
    """Makes several calls concurrently, and returns their results in order.

    Raises:
        BaseException: The first error of a call. All calls have ended by then.

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
    """Starts a function that may hang in a daemon thread of its own, and returns its future.

    Args:
        work: Function to call in the thread.
        name: Name of the thread.

    Raises:
        LimitError: The thread can't be started.

    Examples:
        >>> begin(lambda: 6 * 7, "sums").result()
        42
    """
    ended = _running()
    start_thread(partial(_complete, [(ended, work)]), name)
    return ended


def _running() -> Future[Any]:
    """Returns the future of a function that a thread will call.

    It can't be cancelled. *Why*: a loop that ends cancels what it awaits, and the thread would have
    no place for its result, and say so by a traceback.
    """
    future = Future[Any]()
    future.set_running_or_notify_cancel()
    return future


def _complete(handed: list[tuple[Future[Any], Callable[[], object]]]) -> None:
    """Calls the function that it takes from a list, and completes its future."""
    future, work = handed.pop()
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        future.set_exception(error)
    finally:
        # Why: an error has this frame in its traceback. Its future, which has the error, would keep
        # both, and the locals of all callers, until a collector comes.
        del future, work


IDLE_S = 1.0
"""How long a `TaskThread` waits for its next function before it ends, in seconds."""


class TaskThread:
    """Calls functions one after the other in one daemon thread, which ends when it is idle.

    *Careful*: behind a function that hangs, no other one begins.

    Args:
        name: Name of the thread.

    Examples:
        >>> thread = TaskThread("sums")
        >>> [thread.begin(partial(pow, 2, n)).result() for n in range(3)]
        [1, 2, 4]
        >>> thread.end()
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._tasks: SimpleQueue[Any] | None = None
        """Of the thread; None while there is none."""

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Has a function called in the thread, and returns its future.

        Raises:
            LimitError: The thread can't be started.
        """
        ended = _running()
        with self._lock:
            tasks = self._tasks
            if tasks is None:
                tasks = SimpleQueue()
                start_thread(partial(self._run, tasks), self._name)
                self._tasks = tasks
            tasks.put((ended, work))
        return ended

    def end(self) -> None:
        """Ends the thread behind the functions that it has."""
        with self._lock:
            if self._tasks is not None:
                self._tasks.put(None)
                self._tasks = None

    def _run(self, tasks: SimpleQueue[Any]) -> None:
        while True:
            try:
                handed = [tasks.get(timeout=IDLE_S)]
            except Empty:
                with self._lock:
                    if not tasks.empty():
                        continue
                    if self._tasks is tasks:
                        self._tasks = None
                    return
            if handed == [None]:
                return
            _complete(handed)


def wait_any(waited: Iterable[Future[Any]], timeout_s: float | None = None) -> None:
    """Waits until one of the futures is done, or the timeout passes.

    Why not `concurrent.futures.wait`: Ctrl-C in the middle of it may leave the lock of a future
    held for good, and the thread that completes the future would wait for that lock.

    Args:
        waited: The futures.
        timeout_s: The timeout, in seconds; None for no timeout.

    Examples:
        >>> wait_any([begin(lambda: 6 * 7, "sums"), Future()], 10.0)
    """
    ended: SimpleQueue[None] = SimpleQueue()
    for future in waited:
        # Why not the future: it keeps the queue, and its result would not be freed without gc.
        future.add_done_callback(lambda _: ended.put(None))
    # Suppressed: the caller looks which of them are done.
    with suppress(Empty):
        ended.get(timeout=None if timeout_s is None else max(0.0, timeout_s))


def wait_all(waited: Iterable[Future[Any]]) -> None:
    """Waits until all of the futures are done; see `wait_any`.

    Examples:
        >>> wait_all([begin(lambda: 6 * 7, "sums"), begin(lambda: 0, "nothing")])
    """
    for future in waited:
        wait_any([future])


def run_within(
    work: Callable[[], T],
    within_s: float,
    stop: Stop,
    overdue: Callable[[], BaseException],
    unwind_s: float = bounds.UNWIND_S,
) -> T:
    """Calls `work` in a thread of its own under a deadline, and returns its result.

    A thread that does not end in time is abandoned; it is a daemon.

    Args:
        work: Function to call. It should check `stop` regularly and raise on a stop request.
        within_s: Deadline, in seconds.
        stop: A stop request ends the wait. This call requests a stop at the deadline, and if the
            caller's thread is interrupted.
        overdue: Returns the error to raise at the deadline.
        unwind_s: How long to wait for `work` after a stop request, in seconds.

    Raises:
        BaseException: The error of `work`; `stop.error` after a stop request; the error of
            `overdue` at the deadline; `KeyboardInterrupt` if the caller's thread is interrupted.

    Examples:
        >>> run_within(lambda: 6 * 7, 10.0, Stop(), lambda: TimeoutError())
        42
    """
    ended: Future[T] | None = None
    try:
        ended = begin(work, "ray_dcp in time")
        wait_any([ended, stop.failed], within_s)
        if not ended.done() and not stop.asked:
            stop.because(overdue())
    except BaseException as error:
        stop.because(error)
        if ended is not None:
            wait_any([ended], unwind_s)
        raise
    wait_any([ended], unwind_s)
    if not ended.done() or (ended.exception() is not None and stop.error is not None):
        raise stop.error or overdue()
    return ended.result()
