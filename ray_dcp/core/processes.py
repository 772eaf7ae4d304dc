"""State that belongs to one process: a forked child copies all memory, but none of the threads.

A forked child resets what threads share: each module with such state registers a reset beside it
(`os.register_at_fork`). Locks are created anew, as a thread that the child lacks may have held
them. State that only a thread of the parent could finish is dropped; threads, clients and idle
memory are not inherited. `tests/unit/test_forks.py` has the list of these modules, and finds what
is missing in it. Ids of attempts, files and leases come from the operating system at each use.

Objects of the user (sessions, handles, managers) remain the parent's: `OwnProcess` refuses their
use in a child.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
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
