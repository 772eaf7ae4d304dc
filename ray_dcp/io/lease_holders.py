"""Holders of leases: processes of which one can find out whether they live.

On the same machine, the operating system knows whether a holder is alive. On another machine, a
holder is alive if it keeps changing a file. Clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from ray_dcp.core.json_text import to_json
from ray_dcp.core.processes import pid_namespace, start_thread
from ray_dcp.store.storage import Storage, read_if_there

BEATS = 3
"""Number of renewals within the time without one after which a holder counts as dead."""


@dataclass(frozen=True)
class LeaseHolder:
    """The identity of a process that holds a lease."""

    machine: str
    """Host, boot and process namespace."""
    pid: int
    started: str
    """Start time of the process as the kernel shows it, because process ids are reused."""
    host: str = ""
    nonce: str = ""
    """Distinguishes two holders in one process. Holders with the same nonce replace each other
    without a liveness check, as the worker groups of one Ray Train run do."""
    root: str = ""
    """Path or URL of the run as this process names it. A copy of a run contains a copy of its
    lease, which this reveals."""

    def encode(self, beat: int = 0, **more: float | str) -> bytes:
        """Returns the stored form, with additional values."""
        return to_json({**asdict(self), "beat": beat, **more}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> LeaseHolder | None:
        """Returns the holder in a stored lease; None if it can't be decoded."""
        try:
            found = json.loads(data)
            return cls(
                str(found["machine"]),
                int(found["pid"]),
                str(found["started"]),
                str(found["host"]),
                str(found["nonce"]),
                str(found.get("root", "")),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def is_same_process(self, other: LeaseHolder) -> bool:
        """Returns whether two holders are the same process."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)

    def lives_here(self, here: LeaseHolder) -> bool | None:
        """Returns whether the process is alive; None if it runs on another machine.

        Args:
            here: This process.
        """
        if self.machine != here.machine:
            return None
        started = _started(self.pid)
        return _exists(self.pid) if started is None else started == self.started

    def __str__(self) -> str:
        return f"process {self.pid or '?'} on {self.host or 'an unknown host'}"


def this_process() -> LeaseHolder:
    """Returns the identity of this process, with a new nonce."""
    host, pid = socket.gethostname(), os.getpid()
    machine = f"{host} {pid_namespace().replace('/', ' ')}"
    return LeaseHolder(machine, pid, _started(pid) or "", host, secrets.token_hex(6))


def _started(pid: int) -> str | None:
    """Returns the start time of a process; "" if it has ended, None if /proc does not show it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    """Returns whether a process exists, even if /proc hides those of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


UNREADABLE = LeaseHolder("", 0, "")
"""The holder of a lease that can't be decoded. Such a lease counts as held."""


def read_holder(storage: Storage, key: str) -> tuple[bytes, LeaseHolder | None]:
    """Returns a lease as stored, and its holder; None if there is no such lease."""
    data = b""
    for _ in range(2):  # A transmission error is not damage.
        found = read_if_there(storage, key)
        if found is None:
            return b"", None
        data, holder = found, LeaseHolder.decode(found)
        if holder is not None:
            return data, holder
    return data, UNREADABLE


def renewed(beat: Callable[[int], bool], every_s: float) -> Callable[[], None]:
    """Renews a lease periodically in a thread.

    Args:
        beat: Renews the lease; receives the number of the renewal, from 1. Returns False if the
            lease is gone, which ends the renewals. Errors are ignored, as the next renewal follows
            soon.
        every_s: Interval, in seconds.

    Returns:
        A function that stops the renewals, and waits for one in progress.

    Raises:
        LimitError: The thread can't be started.
    """
    over = threading.Event()

    def run() -> None:
        for number in count(1):
            if over.wait(every_s):
                return
            with suppress(Exception):
                if not beat(number):
                    return

    def stop() -> None:
        over.set()
        thread.join(every_s)

    thread = start_thread(run, "ray_dcp beat")
    return stop
