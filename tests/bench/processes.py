"""What processes cost, as the kernel counts it: CPU seconds and memory, by process id."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU seconds that processes have used so far; of those that have ended, none."""
    ticks = sum(int(ticks) for pid in pids for ticks in _stat(pid)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(pids: Iterable[int]) -> int:
    """Returns how much memory processes hold together; what they share counts once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def children() -> dict[int, list[int]]:
    """Returns the children of every process of this machine."""
    found: dict[int, list[int]] = {}
    for pid in all_pids():
        parent = _stat(pid)[1:2]
        if parent:
            found.setdefault(int(parent[0]), []).append(pid)
    return found


def all_pids() -> list[int]:
    """Returns the processes of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def born(pid: int) -> int:
    """Returns when a process began, in ticks since the machine did; -1 when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else -1


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have."""
    known, found = children(), [pid]
    for each in found:
        found += known.get(each, [])
    return found[1:]


def _stat(pid: int) -> list[str]:
    """Returns what the kernel says of a process, from its state on; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Peak:
    """The most memory that processes held while it looked."""

    def __init__(self) -> None:
        self.num_bytes = 0


@contextmanager
def watched_memory(pids: Iterable[int], every_s: float = 0.02) -> Iterator[Peak]:
    """Looks at the memory of processes over and over."""
    peak, end, watched = Peak(), threading.Event(), list(pids)

    def look() -> None:
        while True:
            peak.num_bytes = max(peak.num_bytes, memory_bytes(watched))
            if end.wait(every_s):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        end.set()
        thread.join()
