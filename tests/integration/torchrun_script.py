"""A plain training script, as torchrun starts it: it knows ray_dcp, and nothing of Ray.

Usage: torchrun … -m tests.integration.torchrun_script (save|load|die) <folder> <lease_s>
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.errors import InvalidRequestError
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.discovery import current_session
from ray_dcp.runtime.private_ray import joined
from tests import async_programs, programs
from tests.integration.dcp_examples_runner import exchanged
from tests.polling import eventually


def main(action: str, folder: str, lease_s: str) -> None:
    dist.init_process_group("gloo")
    # A script need not do this: it only shortens what is left at the end.
    session = current_session(lease_s=float(lease_s))
    if action == "die":
        save_and_die(folder)
    programs.seed_all(11)
    programs.build("fsdp2", seed=0 if action == "save" else 1)
    if action == "save":
        programs.train(2)
        programs.save(f"{folder}/all")
        save_side_by_side(folder)
    else:
        programs.restore(f"{folder}/all")
    facts: dict[str, Any] = {"rank": dist.get_rank(), "digests": programs.digests()}
    if session is None:
        facts["uses_ray"] = ray.is_initialized()
    else:
        facts.update(session=session.name, **own_ray(), equal=exchanged(folder))
    # Why one write: torchrun mixes what its ranks print.
    sys.stdout.write(f"{json.dumps(facts)}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def own_ray() -> dict[str, Any]:
    """Returns what is to be gone at the end."""
    return {"directory": joined().directory, "supervisor_pid": joined().supervisor_pid}


def save_and_die(folder: str) -> None:
    """Kills rank 0, which started Ray, as soon as its save is staged; and the others then."""
    handle = ray_dcp.async_save(
        async_programs.large_state(3),
        checkpoint_id=f"{folder}/staged",
        options=SaveOptions(part_bytes=16 << 20, num_threads=1),
    )
    handle.staged(180)
    dist.barrier()
    facts = Path(folder, "facts.json")
    if dist.get_rank() == 0:
        facts.write_text(json.dumps({"attempt": handle.report().attempt, **own_ray()}))
    eventually(facts.exists)
    os.kill(os.getpid(), signal.SIGKILL)


def save_side_by_side(folder: str) -> None:
    """Rank 0 saves as a group of its own, rank 1 without any; then both save together again."""
    rank = dist.get_rank()
    alone = dist.new_group([0])
    mine = {"w": torch.full((5,), rank), "note": f"rank {rank}"}
    found = {"w": torch.full((5,), -1), "note": ""}
    if rank == 0:
        ray_dcp.save(mine, checkpoint_id=f"{folder}/rank-0", process_group=alone)
        ray_dcp.load(found, checkpoint_id=f"{folder}/rank-0", process_group=alone)
    else:
        try:
            ray_dcp.save(mine, checkpoint_id=f"{folder}/nobody", process_group=alone)
        except InvalidRequestError as error:
            print(f"refused: {error}")
        ray_dcp.save(mine, checkpoint_id=f"{folder}/rank-1", no_dist=True)
        ray_dcp.load(found, checkpoint_id=f"{folder}/rank-1", no_dist=True)
    if not torch.equal(found["w"], mine["w"]) or found["note"] != mine["note"]:
        raise SystemExit(f"rank {rank} saved {mine}, but loaded {found}")
    ray_dcp.save({f"of {rank}": torch.tensor(rank)}, checkpoint_id=f"{folder}/both")


if __name__ == "__main__":
    main(*sys.argv[1:])
