"""Looks at processes: waits for what others do, and finds what a run leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tests.bench.processes import all_pids, born

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
