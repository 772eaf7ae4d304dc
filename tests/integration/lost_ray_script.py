"""A plain training script whose Ray, that it never asked for, is lost while it saves.

Usage: torchrun … -m tests.integration.lost_ray_script <victim> <then> <folder> <lease_s> <limit_s>

Args:
    victim: What is killed in the middle of a save: gcs_server, raylet or supervisor.
    then: What comes after Ray's own limit: again (two more saves and a load), leave (the
        end), or raise (an uncaught exception). Or busy: nobody waits for anything after the kill,
        ranks and stager share no memory, and the next Ray is lost in a load.
    folder: Where it saves, and tells what became of it.
    lease_s: Of the Ray, in seconds.
    limit_s: After which Ray ends a driver without a control store, in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.errors import CheckpointError, LimitError
from ray_dcp.options import LoadOptions
from ray_dcp.runtime.private_ray import joined
from ray_dcp.runtime.session import current_session
from ray_dcp.stage.memory import MemoryAddress, StagingMemory
from ray_dcp.store.local import LocalStorage
from tests.polling import eventually, session_members


class Killer:
    """Part of the state. Rank 1's kills the victim once rank 0 is in the save as well, if asked to.

    Then it waits for rank 0's error, unless there is none to wait for. So the save can't end
    before: rank 0 waits for rank 1 in it.
    """

    def __init__(self, entered: Path) -> None:
        self.entered = entered
        self.victim = 0
        self.error: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        victim, self.victim = self.victim, 0
        if victim and dist.get_rank() == 0:
            self.entered.touch()
        elif victim:
            eventually(self.entered.exists)
            os.kill(victim, signal.SIGKILL)
            if self.error is not None and not eventually(self.error.exists):
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


def main(victim: str, then: str, folder: str, lease_s: str, limit_s: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if then == "busy":
        StagingMemory.open = unmappable
    current_session(lease_s=float(lease_s))
    first = joined()
    facts = {"supervisors": [first.supervisor_pid], "directories": [first.directory]}
    told = Path(folder, f"rank-{rank}.json")

    def tell() -> None:
        told.with_suffix(".new").write_text(json.dumps(facts))
        told.with_suffix(".new").rename(told)

    def attempt(what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except CheckpointError as error:
            facts[what] = f"{type(error).__name__}: {error}"

    # With so many names that Ray would send no message with a plan without its object store.
    names = {f"a long name of rank {rank}, number {n}": torch.tensor(n) for n in range(3000)}
    killer = Killer(Path(folder, "entered"))
    state = {"w": torch.arange(1 << 20), **names, f"killer of {rank}": killer}
    ray_dcp.save(state, checkpoint_id=f"{folder}/before")
    killer.victim = pid_of(victim)
    killer.error = None if then == "busy" else told.with_name("rank-0.json")
    lost = {**state, "new": torch.zeros(1)}  # a plan that nobody knows
    attempt("error", lambda: ray_dcp.save(lost, checkpoint_id=f"{folder}/lost"))
    tell()
    # Nothing happens meanwhile, as in a long stretch of training.
    eventually(lambda: False, within_s=3 * float(limit_s))
    if then in ("again", "busy"):
        saved = ray_dcp.async_save(state, checkpoint_id=f"{folder}/next")
        saved.result()
        facts["staging"] = saved.report().staging
        ray_dcp.save(state, checkpoint_id=f"{folder}/after")
        facts["supervisors"].append(joined().supervisor_pid)
        facts["directories"].append(joined().directory)
        found = {"w": torch.zeros(1 << 20, dtype=torch.int64), f"killer of {rank}": killer}
        if then == "busy":
            kill_at_large_read(pid_of(victim))
            dist.barrier()
        options = LoadOptions(share_reads=True)
        load = partial(ray_dcp.load, found, checkpoint_id=f"{folder}/after")
        attempt("load error", partial(load, options=options))
        if then == "busy":
            load(no_dist=True)
        facts["found"] = found["w"][::100_000].tolist()
    facts["lived"] = True
    tell()
    dist.barrier()
    dist.destroy_process_group()
    if then == "raise" and rank == 1:
        raise RuntimeError("an error of the training script's own")


if __name__ == "__main__":
    main(*sys.argv[1:])
