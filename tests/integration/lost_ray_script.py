"""A plain training script whose Ray, that it never asked for, is lost again and again.

Usage: RANK=… -m tests.integration.lost_ray_script <folder> <lease_s> <limit_s>

Args:
    folder: Where it saves, and tells what became of it.
    lease_s: Of each Ray, in seconds.
    limit_s: After which Ray ends a driver without a control store, in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.errors import CheckpointError, LimitError
from ray_dcp.options import LoadOptions
from ray_dcp.runtime.discovery import current_session
from ray_dcp.runtime.private_ray import joined
from ray_dcp.stage.memory import MemoryAddress, StagingMemory
from ray_dcp.store.local import LocalStorage
from tests.polling import eventually, session_members


class Killer:
    """Part of the state. Rank 1's kills the victim once rank 0 is in the save as well, if asked to.

    Then it waits for rank 0's error, unless there is none to wait for. So the save can't end
    before: rank 0 waits for rank 1 in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.victim = ""
        self.waits = False

    def state_dict(self) -> dict[str, Any]:
        victim, self.victim = self.victim, ""
        if victim and dist.get_rank() == 0:
            (self.folder / f"entered {victim}").touch()
        elif victim:
            pid = pid_of(victim)
            eventually((self.folder / f"entered {victim}").exists)
            os.kill(pid, signal.SIGKILL)
            if self.waits and not eventually((self.folder / f"told {victim}").exists):
                raise SystemExit("rank 0 still waits")
        return {"n": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def pid_of(victim: str) -> int:
    supervisor_pid = joined().supervisor_pid
    if victim == "supervisor":
        return supervisor_pid
    tree = session_members(supervisor_pid)
    (found,) = (pid for pid in tree if Path(f"/proc/{pid}/comm").read_text().strip() == victim)
    return found


def kill_at_large_read(victim: int) -> None:
    """Kills a process once this one has read of a tensor, before it hands that on."""
    read_into = LocalStorage.read_into

    def killing(storage: LocalStorage, key: str, start: int, target: memoryview) -> None:
        read_into(storage, key, start, target)
        if len(target) >= 1 << 20:
            LocalStorage.read_into = read_into
            with suppress(ProcessLookupError):  # another rank was first
                os.kill(victim, signal.SIGKILL)

    LocalStorage.read_into = killing


def unmappable(address: MemoryAddress) -> NoReturn:
    raise LimitError("this process may not map it")


class Script:
    """What a rank does, and what it tells: by name what was raised, or what was found."""

    def __init__(self, folder: str, lease_s: str, limit_s: str) -> None:
        self.folder, self.limit_s = Path(folder), float(limit_s)
        self.rank = dist.get_rank()
        # With so many names that Ray would send no message with a plan without its object store.
        names = {
            f"a long name of rank {self.rank}, number {n}": torch.tensor(n) for n in range(3000)
        }
        self.killer = Killer(self.folder)
        self.state = {"w": torch.arange(1 << 20), **names, f"killer of {self.rank}": self.killer}
        self.facts: dict[str, Any] = {"supervisors": [], "directories": []}
        current_session(lease_s=float(lease_s))

    def save(self, name: str) -> None:
        ray_dcp.save(self.state, checkpoint_id=self.folder / name)
        self.note_ray()

    def note_ray(self) -> None:
        """Notes which Ray it is in, if that is another one than before."""
        own = joined()
        if own.supervisor_pid not in self.facts["supervisors"]:
            self.facts["supervisors"].append(own.supervisor_pid)
            self.facts["directories"].append(own.directory)

    def attempt(self, what: str, call: Callable[[], object]) -> None:
        own = joined()
        try:
            call()
        except CheckpointError as error:
            self.facts[what] = f"{type(error).__name__}: {error}"
        else:
            # This rank had all its answers before. A call made before the loss is known would fail.
            eventually(lambda: own.is_lost)

    def lose_in_save(self, victim: str, *, busy: bool = False) -> None:
        """Loses its Ray in a save.

        Args:
            victim: What is killed.
            busy: Wait for nothing after that; else the training goes on for a while.
        """
        self.killer.victim, self.killer.waits = victim, not busy
        lost = {**self.state, victim: torch.zeros(1)}  # a plan that nobody knows
        self.attempt(victim, lambda: ray_dcp.save(lost, checkpoint_id=self.folder / victim))
        if self.rank == 0:
            (self.folder / f"told {victim}").touch()
        if not busy:
            # Nothing happens meanwhile, as in a long stretch of training.
            eventually(lambda: False, within_s=3 * self.limit_s)

    def save_on(self, name: str) -> None:
        """Saves in the background, and then once more."""
        saved = ray_dcp.async_save(self.state, checkpoint_id=self.folder / f"next {name}")
        saved.result()
        self.facts[f"staging {name}"] = saved.report().staging
        self.save(f"after {name}")

    def load(self, name: str, **how: Any) -> None:
        key = f"killer of {self.rank}"
        found = {"w": torch.zeros(1 << 20, dtype=torch.int64), key: self.killer}
        ray_dcp.load(found, checkpoint_id=self.folder / f"after {name}", **how)
        self.facts[f"found {name}"] = found["w"][::100_000].tolist()

    def run(self) -> None:
        shared = LoadOptions(share_reads=True)
        self.save("before")
        self.lose_in_save("gcs_server")
        self.save_on("gcs_server")
        self.load("gcs_server", options=shared)
        # From here on ranks and stager share no memory.
        StagingMemory.open = unmappable
        self.lose_in_save("raylet", busy=True)
        self.save_on("raylet")
        kill_at_large_read(pid_of("raylet"))
        dist.barrier()
        self.attempt("load", lambda: self.load("raylet", options=shared))
        self.load("raylet", no_dist=True)
        self.save("last")
        self.lose_in_save("supervisor")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    script = Script(*sys.argv[1:])
    script.run()
    Path(sys.argv[1], f"rank-{script.rank}.json").write_text(json.dumps(script.facts))
    dist.barrier()
    dist.destroy_process_group()
    if script.rank == 1:
        raise RuntimeError("an error of the training script's own")
