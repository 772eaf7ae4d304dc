"""Lets the calling thread step behind the training: for the processors, and for the disk."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress
from typing import Literal

__all__ = ["step_behind"]

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ioprio_set."""
_IO_PRIORITY = {"low": (2 << 13) | 7, "idle": 3 << 13}
"""Best effort, last of eight; only while nobody else wants the disk."""


def step_behind(nice: int, io_priority: Literal["normal", "low", "idle"]) -> None:
    """Lowers the priority of the calling thread, as far as the system lets it.

    Args:
        nice: 0 to 19; more is further behind.
        io_priority: For the disk; counts where its I/O scheduler knows priorities.
    """
    # Suppressed: without it training is slowed a little, which is no reason to fail a save.
    with suppress(OSError, AttributeError):
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            # Careful: on Linux this is the priority of a thread, although it says process.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    number, value = _IOPRIO_SET.get(platform.machine()), _IO_PRIORITY.get(io_priority)
    if number is not None and value is not None and platform.system() == "Linux":
        ctypes.CDLL(None).syscall(number, 1, 0, value)
