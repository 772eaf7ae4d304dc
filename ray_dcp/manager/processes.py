"""Which process holds something of a root, and whether it still lives.

On one machine the operating system tells. Of another machine only beats tell: a file that its
holder keeps changing. Clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Beating", "Holder", "Unchanged", "this_process"]


@dataclass(frozen=True)
class Holder:
    """A process, as it can be told from all others."""

    machine: str
    """Host, boot and process namespace."""
    pid: int
    started: str
    """When the process began, in the kernel's words: a pid is used again."""
    host: str = ""
    nonce: str = ""
    """Tells two holders of one process."""

    def encode(self, beat: int = 0) -> bytes:
        """Returns it as it is stored."""
        return json.dumps({**asdict(self), "beat": beat}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """Returns what is stored; None for anything else."""
        try:
            found = json.loads(data)
            return cls(
                str(found["machine"]), int(found["pid"]), str(found["started"]),
                str(found["host"]), str(found["nonce"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def is_same_process(self, other: Holder) -> bool:
        """Tells whether two holders are one process."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)

    def lives_here(self, here: Holder) -> bool | None:
        """Tells whether it lives, as this process sees it; None where another machine would know.

        Args:
            here: This process.
        """
        if self.machine != here.machine:
            return None
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


def this_process() -> Holder:
    """Returns this process, with a nonce of its own."""
    host = socket.gethostname()
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    return Holder(f"{host} {boot} {space}", pid, _started(pid), host, secrets.token_hex(6))


def _started(pid: int) -> str:
    """Returns when a process began; "" when there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Beating:
    """Does something again and again in a thread, until it is stopped.

    Args:
        beat: What; gets the number of the beat, from 1. Its errors are passed over: the next beat
            comes soon.
        every_s: How often, in seconds.
    """

    def __init__(self, beat: Callable[[int], object], every_s: float) -> None:
        self._beat = beat
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray_dcp beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it, and waits for a beat that is under way."""
        self._over.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        number = 0
        while not self._over.wait(self._every_s):
            number += 1
            with suppress(Exception):
                self._beat(number)


@dataclass
class Unchanged:
    """Tells for how long something has stayed as it is, by this process' own clock.

    Args:
        clock: Seconds that only go forward.
    """

    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def since_s(self, key: str, data: bytes) -> float:
        """Returns how long a key has had this content, in seconds; 0 when it is new.

        Args:
            key: Of what.
            data: Its content now.
        """
        now_s = self.clock()
        known = self._seen.get(key)
        if known is None or known[0] != data:
            self._seen[key] = (data, now_s)
            return 0.0
        return now_s - known[1]
