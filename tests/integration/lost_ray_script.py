"""A plain training script whose Ray, that it never asked for, is lost while it saves.

Usage: torchrun … -m tests.integration.lost_ray_script <victim> <then> <folder> <lease_s> <limit_s>

Args:
    victim: What is killed in the middle of a save: gcs_server, raylet or supervisor.
    then: What comes after Ray's own limit: again (two more saves and a load), leave (the
        end), or raise (an uncaught exception).
    folder: Where it saves, and tells what became of it.
    lease_s: Of the Ray, in seconds.
    limit_s: After which Ray ends a driver without a control store, in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.errors import CheckpointError
from ray_dcp.runtime.private_ray import joined
from ray_dcp.runtime.session import current_session
from tests.polling import eventually, session_members


class Killer:
    """Part of rank 1's state: asked for it, it kills the victim and waits for rank 0's error.

    So the save can't end before: rank 0 waits for rank 1 in it.
    """

    def __init__(self, pid: int, error: Path) -> None:
        self._pid = pid
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        os.kill(self._pid, signal.SIGKILL)
        if not eventually(self._error.exists):
            raise SystemExit("rank 0 still waits")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def pid_of(victim: str, supervisor_pid: int) -> int:
    if victim == "supervisor":
        return supervisor_pid
    tree = session_members(supervisor_pid)
    (found,) = (pid for pid in tree if Path(f"/proc/{pid}/comm").read_text().strip() == victim)
    return found


def main(victim: str, then: str, folder: str, lease_s: str, limit_s: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    current_session(lease_s=float(lease_s))
    first = joined()
    facts = {"supervisors": [first.supervisor_pid], "directories": [first.directory]}
    told = Path(folder, f"rank-{rank}.json")

    def tell() -> None:
        told.with_suffix(".new").write_text(json.dumps(facts))
        told.with_suffix(".new").rename(told)

    state = {"w": torch.arange(7), f"of {rank}": torch.tensor(rank)}
    ray_dcp.save(state, checkpoint_id=f"{folder}/before")
    whole = dict(state)
    if rank == 1:
        whole["killer"] = Killer(
            pid_of(victim, first.supervisor_pid), told.with_name("rank-0.json")
        )
    try:
        ray_dcp.save(whole, checkpoint_id=f"{folder}/lost")
    except CheckpointError as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    tell()
    # Nothing happens meanwhile, as in a long stretch of training.
    eventually(lambda: False, within_s=3 * float(limit_s))
    if then == "again":
        for name in ("next", "after"):
            ray_dcp.save(state, checkpoint_id=f"{folder}/{name}")
        found = {"w": torch.zeros(7, dtype=torch.int64)}
        ray_dcp.load(found, checkpoint_id=f"{folder}/after")
        facts["found"] = found["w"].tolist()
        facts["supervisors"].append(joined().supervisor_pid)
        facts["directories"].append(joined().directory)
    facts["lived"] = True
    tell()
    dist.barrier()
    dist.destroy_process_group()
    if then == "raise" and rank == 1:
        raise RuntimeError("an error of the training script's own")


if __name__ == "__main__":
    main(*sys.argv[1:])
