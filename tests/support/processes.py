"""Looks at processes: waits for them, counts what they cost, and finds what a run leaves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


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
    return _stat(pid)[:1] not in ([], ["Z"])


def session_members(session: int) -> list[int]:
    """Returns the processes of a POSIX session, without zombies."""
    members = ((pid, _stat(pid)) for pid in all_pids())
    return [pid for pid, it in members if it and int(it[3]) == session and it[0] != "Z"]


def open_below(folder: Path) -> list[str]:
    """Returns the open files below a folder, and the folder itself where it is open.

    Why not a count of all descriptors: threads that other tests left may open some meanwhile.
    """
    return [path for path in _open_files() if f"{path}/".startswith(f"{folder}/")]


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def marked(mark: str) -> dict[int, str]:
    """Returns the living processes whose environment holds a variable, by pid, with their command.

    Processes inherit their environment, so this finds all that a process started, whoever is
    their parent by now. The caller itself is left out.

    Args:
        mark: `NAME=value`, with a value that nobody else has.
    """
    found = {}
    for pid in all_pids():
        if pid != os.getpid() and is_marked(pid, mark) and lives(pid):
            # Suppressed: it has just ended.
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def end_all(pids: Iterable[int], mark: str, within_s: float = 10.0) -> list[int]:
    """Kills processes that bear a mark, and waits until they are gone; returns which.

    *Careful*: other jobs run on this machine. A pid is only killed when it is seen here, once
    more, that it bears the mark and that it began after this process.

    Args:
        pids: Which.
        mark: As for `marked`.
        within_s: How long to wait, in seconds.

    Raises:
        ValueError: The mark is so short that others may bear it.
    """
    if len(mark.partition("=")[2]) < 8:
        raise ValueError(f"expected NAME=value with at least 8 characters of value, found {mark!r}")
    oldest = born(os.getpid())
    ended = [pid for pid in pids if pid > 1 and born(pid) > oldest and is_marked(pid, mark)]
    for pid in ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + within_s
    while any(lives(pid) for pid in ended) and time.monotonic() < end_s:
        time.sleep(0.05)
    return ended


def is_marked(pid: int, mark: str) -> bool:
    """Returns whether the environment of a process holds a variable, `NAME=value`."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def shared_memory(directory: Path = SHARED_MEMORY) -> set[str]:
    """Returns the names of the shared-memory files that there are."""
    return {entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)}


def leaked_shared_memory(before: set[str], directory: Path = SHARED_MEMORY) -> list[str]:
    """Returns the shared-memory files that were not there before and that nobody uses now.

    Those that a living process holds belong to another job on this machine.
    """
    new = shared_memory(directory) - before
    return sorted(new - _held(directory)) if new else []


def _held(directory: Path) -> set[str]:
    """Returns the names in a folder that some living process has open or mapped."""
    held = set()
    for pid in all_pids():
        for kind in ("fd", "map_files"):
            folder = Path(f"/proc/{pid}/{kind}")
            # Suppressed: the process, or just this descriptor, is gone by now.
            with suppress(OSError):
                for name in os.listdir(folder):
                    with suppress(OSError):
                        target = Path(os.readlink(folder / name))
                        held |= {target.name} if target.parent == directory else set()
    return held


# --- What processes cost ---------------------------------------------------------------------


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
