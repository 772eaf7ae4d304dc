"""What belongs to one process: a fork has copies of everything, but none of the threads.

A child that is forked begins anew with what threads share: each module that has such a thing
registers how (`os.register_at_fork`), beside it. Locks are made again, as a thread that is not
there may have held them; what only a thread of the parent could end is forgotten; threads, clients
and idle memory are not taken over. `tests/unit/test_forks.py` has the list, and finds what is
missing there. Ids of attempts, files and leases come from the system at each use.

What is given to users (sessions, handles, managers) stays the parent's: `OwnProcess` refuses
its use in a child.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ray_dcp.errors import InvalidRequestError, LimitError


class OwnProcess:
    """Remembers the process in which it was made.

    Examples:
        >>> OwnProcess().is_this
        True
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether that is this process, and not a child that was forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str, instead: str) -> None:
        """Raises `InvalidRequestError` in a child that was forked from it.

        Args:
            what: Is used, in words.
            instead: What the child may do.
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
    """A lock of a module, which is a new one in a child that is forked.

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
    """Returns a daemon thread that does some work.

    Args:
        work: What to do.
        name: Of the thread.

    Raises:
        LimitError: No thread can be started.
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
