"""Runs one target for a while, and keeps what it finds."""

from __future__ import annotations

import collections
import random
import resource
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ray_dcp.errors import CheckpointError, InternalError
from tests.fuzz.targets import TARGETS, Target, spoiled

CASE_S = 30
"""How much CPU a case may take, in seconds."""
ROOM_BYTES = 8 << 30
_MOST_SEEDS = 400


class TooSlow(BaseException):
    """One case took more than `CASE_S`."""


@dataclass
class Found:
    """What came of a run."""

    cases: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """Errors of ours by class."""
    wrong: dict[str, bytes] = field(default_factory=dict)
    """Anything else, by where it was raised; and a file that raises it."""


def run(name: str, seconds: float, seed: int, *, cases: int = 1 << 60, log: str = "") -> Found:
    """Returns what came of spoiled files of one target.

    Files that are still taken, or refused in a way that was not seen before, are spoiled further.

    Args:
        name: Of the target.
        seconds: How long.
        seed: For the same files again.
        cases: Most files.
        log: A file that holds each case while it is read, for those that end the process.
    """
    target, source, found = TARGETS[name], random.Random(f"{name} {seed}"), Found()
    seeds = target.seeds()
    end_s = time.monotonic() + seconds
    while found.cases < cases and time.monotonic() < end_s:
        good = source.choice(seeds)
        try:
            data = target.spoil(good, source)
        except Exception:
            data = spoiled(good, source)
        found.cases += 1
        if log:
            Path(log).write_bytes(data)
        if _case(target, data, found) and len(data) < 1 << 20:
            # Why at random: the oldest are the good files, and stay for long.
            place = source.randrange(len(seeds) + 1)
            seeds[place : place + (len(seeds) > _MOST_SEEDS)] = [data]
    return found


def _case(target: Target, data: bytes, found: Found) -> bool:
    """Reads one file; tells whether it was refused in no way that is known."""
    signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, CASE_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(data)
        found.refused["nothing"] += 1
        return True
    except InternalError as error:
        _note(error, data, found)
    except CheckpointError as error:
        if not _is_printable(error):
            _note(error, data, found)
            return False
        kind = f"{type(error).__name__}: {error.message[:90]}"
        found.refused[kind] += 1
        return found.refused[kind] == 1
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _note(error, data, found)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return False


def _is_printable(error: CheckpointError) -> bool:
    try:
        str(error).encode()
    except UnicodeEncodeError:
        return False
    return True


def _note(error: BaseException, data: bytes, found: Found) -> None:
    # A rank tells its peers of any exception as a CheckpointError; where it came from, a frame.
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if "/ray_dcp/" in f.filename), frames[-1])
    line = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
    found.wrong.setdefault(ascii(line[:300]), data)


def _too_slow(signum: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {CASE_S} s of CPU")


def limit_memory() -> None:
    """Gives this process `ROOM_BYTES` more than it has."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            room = int(line.split()[1]) * 1024 + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
