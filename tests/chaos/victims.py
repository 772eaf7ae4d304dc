"""What ranks and drivers do that are about to be killed; importable on the ranks.

A save of step 2 over a standing step 1: whatever is killed when, one of the two must load whole.
Run as a program it is a driver whose ranks save until it is killed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.naming import NAMESPACE, coordinator_name
from ray_dcp.runtime.session import current_session
from tests.attempts import Attempt, attempt, save_sound, sound_state

LARGE_BYTES = 96 << 20
"""What one rank writes where something must happen in the middle of it."""


class Trap:
    """A `Stateful` that does something to its process when it is asked for its state."""

    def __init__(self, spring: Callable[[], Any]) -> None:
        self.spring = spring

    def state_dict(self) -> dict[str, Any]:
        self.spring()
        return {"sprung": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class DeadlyToPickle:
    """Kills its process when it is pickled."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return (int, ())


def large(rank: int) -> dict[str, Any]:
    """Returns a tensor that only this rank holds, and writes."""
    return {f"large{rank}": torch.ones(LARGE_BYTES // 4)}


def save_with(path: str, victim: int, more: Callable[[], dict[str, Any]], **options: Any) -> None:
    """Saves step 2 after adding something to the state of one rank."""
    state = sound_state(2)
    if dist.get_rank() == victim:
        state.update(more())
    ray_dcp.save(state, checkpoint_id=path, options=SaveOptions(**options))


def try_save_with(path: str, *arguments: Any, **options: Any) -> Attempt:
    """Returns what came of `save_with`, after leaving a mark beside the checkpoint."""
    came = attempt(lambda: save_with(path, *arguments, **options))
    Path(f"{path}.told-{dist.get_rank()}").touch()
    return came


def deadly_to_pickle() -> dict[str, Any]:
    return {"x": DeadlyToPickle()}


def too_large_to_survive() -> dict[str, Any]:
    """Makes the kernel end this process in the middle of its file, after 1 MiB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    return large(dist.get_rank())


def frozen_when_asked() -> dict[str, Any]:
    return {"x": Trap(lambda: os.kill(os.getpid(), signal.SIGSTOP))}


def frozen_when_writing(path: str) -> dict[str, Any]:
    """Freezes this process as soon as its file of step 2 is begun."""
    rank = dist.get_rank()
    before = set(os.listdir(path))

    def watch() -> None:
        if appears(Path(path), f"*__{rank}_*", before, within_s=30):
            os.kill(os.getpid(), signal.SIGSTOP)

    threading.Thread(target=watch, daemon=True).start()
    return large(rank)


def appears(path: Path, pattern: str, before: set[str], *, within_s: float) -> bool:
    """Returns, at once, when there is a new file of such a name; False when there is none.

    A name that a pattern without leading `*` matches is published, others may be begun only.
    """
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if matching(set(os.listdir(path)) - before, pattern):
            return True
        threading.Event().wait(0.0005)
    return False


def coordinator_killed_when_asked() -> dict[str, Any]:
    session = current_session()
    pid = session.coordinator_info()["pid"]
    return {"x": Trap(lambda: os.kill(pid, signal.SIGKILL))}


def session_facts() -> dict[str, Any]:
    """Returns the session's name, and what its coordinator says of itself."""
    session = current_session()
    return {"session": session.name, **session.coordinator_info()}


def coordinator_lives(session: str) -> bool:
    """Returns whether there is an actor for the session's coordinator."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {"name": coordinator_name(session), "namespace": NAMESPACE} in actors


def drive(address: str, path: str) -> None:
    """Saves step 1, tells it, and saves a large step 2 in a loop."""
    ray.init(address, log_to_driver=False, configure_logging=False, namespace="victim")
    with ray_dcp.WorkerGroup(2) as ranks:
        ranks.run(save_sound, path, 1)
        print(ranks.run(session_facts)[0]["session"], flush=True)
        while True:
            ranks.run(save_with, path, 1, lambda: large(1))


if __name__ == "__main__":
    drive(*sys.argv[1:])
