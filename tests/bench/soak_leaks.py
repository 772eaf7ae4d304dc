"""Looks for what a soak leaves behind: files, actors, processes, shared memory, memory.

Every detector takes what it looks at as an argument, so that a test can show it something bad.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray_dcp.format.manifest import record_key
from ray_dcp.io.checkpoint import METADATA_KEY, newest_record
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import TEMP_PREFIX
from tests.bench.processes import all_pids, born
from tests.polling import lives

SHARED_MEMORY = Path("/dev/shm")


# Files


def leaked_files(checkpoint: Path) -> list[str]:
    """Returns the files at a checkpoint that what stands there does not name.

    Temporary files are not among them, see `leaked_temp_files`. What decides that nothing stands
    (the record of a delete) is no leak.
    """
    storage = LocalStorage(checkpoint)
    keys = {entry.key for entry in storage.list()}
    committed = newest_record(storage)
    named: set[str] = set()
    if committed is not None:
        manifest = committed.manifest
        named = {entry.key for entry in manifest.files} | {manifest.table.key}
        named.add(record_key(committed.slot))
        if manifest.metadata is not None:
            named.add(METADATA_KEY)
    else:
        records = sorted(key for key in keys if key.startswith("manifest-"))
        named = set(records[-1:])
    return sorted(keys - named)


def leaked_temp_files(root: Path) -> list[str]:
    """Returns the temporary files of writers anywhere below a folder."""
    found = (path for path in root.rglob(f"{TEMP_PREFIX}*") if path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in found)


# Processes


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


# Shared memory


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


# Memory


def resident_bytes(pid: int) -> int | None:
    """Returns the private resident memory of a process, None when it is gone.

    Shared pages (of Ray's object store, of libraries) are not counted.
    """
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, IndexError):
        return None
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Growth:
    """How the memory of one process grew after its warm-up."""

    name: str
    seconds: float
    grown_bytes: int
    """By the fitted line, over that time."""
    bytes_per_min: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bytes_per_min / 1e6:+.2f} MB/min over {self.seconds:.0f} s "
            f"({self.grown_bytes / 1e6:+.1f} MB)"
        )


@dataclass
class MemoryLog:
    """Samples of the resident memory of processes, by process."""

    warm_up_s: float
    """What is not looked at after a process is first seen, in seconds."""
    least_s: float
    """Processes that live shorter than this after it are not judged, in seconds."""
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Name of the process → seconds and bytes."""

    def take(
        self,
        now_s: float,
        pids: Mapping[str, int],
        resident: Callable[[int], int | None] = resident_bytes,
    ) -> None:
        """Takes a sample of each process.

        Args:
            now_s: By any steady clock.
            pids: By role.
            resident: What measures.
        """
        for role, pid in pids.items():
            found = resident(pid)
            if found is not None:
                self.samples.setdefault(f"{role} {pid}", []).append((now_s, found))

    def growths(self) -> list[Growth]:
        """Returns how each process that lived long enough grew, the fastest first."""
        found = []
        for name, samples in self.samples.items():
            warm = [sample for sample in samples if sample[0] >= samples[0][0] + self.warm_up_s]
            seconds = warm[-1][0] - warm[0][0] if warm else 0.0
            if len(warm) < 5 or seconds < self.least_s:
                continue
            per_s = _slope(warm)
            found.append(Growth(name, seconds, round(per_s * seconds), per_s * 60))
        return sorted(found, key=lambda growth: -growth.bytes_per_min)

    def leaks(self, per_min: float, at_least: int) -> list[Growth]:
        """Returns the processes that grew faster than a rate and by more than an amount.

        Args:
            per_min: Bytes a minute.
            at_least: Bytes: noise of the allocator is not a leak.
        """
        return [
            growth
            for growth in self.growths()
            if growth.bytes_per_min > per_min and growth.grown_bytes > at_least
        ]


def _slope(samples: list[tuple[float, int]]) -> float:
    """Returns the slope of the least-squares line."""
    mean_t = sum(t for t, _ in samples) / len(samples)
    mean_b = sum(b for _, b in samples) / len(samples)
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return sum((t - mean_t) * (b - mean_b) for t, b in samples) / spread
