"""Traps in running processes: at a certain call the process is hit, or hits others.

Importable on ranks, coordinators and stagers. A blow leaves a mark that says when it fell and what
lay at the checkpoint's place then: what proves that it fell where it was meant to.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray._private import ray_constants

from tests.chaos.cells import Trap

_counts: dict[str, int] = {}


@dataclass(frozen=True)
class Blow:
    """A signal to some processes, and the mark that it leaves."""

    signal: int
    pids: tuple[int, ...]
    place: str
    """Path of the checkpoint."""
    marks: str
    """Directory of the mark, and of what the ranks were told."""

    def strike(self) -> None:
        """Leaves the mark and sends the signal, to this process last."""
        marks = Path(self.marks)
        told = sum(name.startswith("told-") for name in os.listdir(marks))
        mark = {"at_s": time.monotonic(), "names": os.listdir(self.place), "told": told}
        (marks / "mark.new").write_text(json.dumps(mark))
        (marks / "mark.new").rename(marks / "mark")
        own = os.getpid()
        for pid in sorted(self.pids, key=lambda pid: pid == own):
            try:
                os.kill(pid, self.signal)
            except ProcessLookupError:
                # A process of a node may have gone with the one before.
                continue


@dataclass(frozen=True)
class Mark:
    """What a blow left."""

    at_s: float
    """When it fell, on this machine's monotonic clock."""
    names: frozenset[str]
    """What lay at the place of the checkpoint."""
    told: int
    """How many ranks had been told their outcome."""


def read_mark(marks: Path) -> Mark | None:
    """Returns the mark; None when there was no blow yet."""
    try:
        found = json.loads((marks / "mark").read_text())
    except FileNotFoundError:
        return None
    return Mark(found["at_s"], frozenset(found["names"]), found["told"])


def set_trap(trap: Trap, blow: Blow) -> None:
    """Sets a trap in this process; it springs once."""

    def spring() -> None:
        setattr(holder, name, original)
        blow.strike()

    left = trap.call
    lock = threading.Lock()

    def trapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        with lock:
            left -= _concerns(trap, args)
            springs = left == 0 and _concerns(trap, args)
        if springs and not trap.after:
            spring()
        value = original(*args, **kwargs)
        if springs and trap.after:
            spring()
        return value

    holder, name, original = function_at(trap.where)
    setattr(holder, name, trapped)


def set_trap_in(actor: Any, trap: Trap, blow: Blow) -> None:
    """`set_trap` for Ray's `__ray_call__`, which runs it in the process of any actor."""
    set_trap(trap, blow)


def count_calls(where: str) -> None:
    """Counts the calls of a function in this process from now on."""
    holder, name, original = function_at(where)
    _counts[where] = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        _counts[where] += 1
        return original(*args, **kwargs)

    setattr(holder, name, counting)


def counted(where: str) -> int:
    """Returns how many calls there were since `count_calls`."""
    return _counts[where]


def function_at(where: str) -> tuple[Any, str, Callable[..., Any]]:
    """Returns what holds the function `"module:name"`, its name in it, and the function."""
    module, _, name = where.partition(":")
    holder = importlib.import_module(module)
    return holder, name, getattr(holder, name)


def _concerns(trap: Trap, args: Sequence[Any]) -> bool:
    return not trap.about or any(
        type(arg).__name__ == trap.about or (isinstance(arg, str) and trap.about in arg)
        for arg in args
    )


@contextmanager
def loopback_addresses() -> Iterator[None]:
    """Makes `ray.init` take 127.0.0.1 as it is, so that nodes here have addresses of their own."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
