"""A plain training script, as torchrun starts it: it knows ray_dcp, and nothing of Ray.

Usage: torchrun … -m tests.support.programs.torchrun_script (save|load) <folder>
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.errors import InvalidRequestError
from ray_dcp.session.discovery import current_session
from tests.support.programs import models as programs
from tests.support.programs.dcp_examples_runner import exchanged


def main(action: str, folder: str) -> None:
    dist.init_process_group("gloo")
    session = current_session()
    programs.seed_all(11)
    programs.build("fsdp2", seed=0 if action == "save" else 1)
    if action == "save":
        programs.train(2)
        programs.save(f"{folder}/all")
        save_side_by_side(folder)
    else:
        programs.restore(f"{folder}/all")
    facts: dict[str, Any] = {
        "rank": dist.get_rank(),
        "digests": programs.digests(),
        "torchrun": os.getsid(0),
        "session": None,
    }
    if session is not None:
        facts.update(session=session.name, equal=exchanged(folder))
    facts["has_ray"] = "ray" in sys.modules
    # Why one write: torchrun mixes what its ranks print.
    sys.stdout.write(f"{json.dumps(facts)}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


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
