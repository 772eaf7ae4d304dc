"""Waiting for what other processes do: bounded, and without a fixed sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 180.0
"""How long something that will happen may take before it counts as a hang, in seconds.

Far more than any of it takes, also on a machine that is slow, or has much else to do.
"""


def eventually(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Returns whether a condition came true in time.

    Args:
        condition: Asked again and again.
        within_s: In seconds; given only where it must *not* come true.
    """
    end_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        threading.Event().wait(0.05)
    return True


def lives(pid: int) -> bool:
    """Returns whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def session_members(session: int) -> list[int]:
    """Returns the processes of a POSIX session, without zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members
