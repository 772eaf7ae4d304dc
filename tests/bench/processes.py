"""What processes cost, as the kernel counts it: CPU seconds and memory, by process id."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU seconds that processes have used so far; of those that have ended, none."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
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


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


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
