"""What the ranks of the matrix do, and the driver that may be killed; importable on the ranks.

A save of step 2 over a standing step 1, or a load of step 1: whatever is hit when, every rank
that lives writes down what it was told and when.
Run as a program it is a driver of its own, whose ranks do the same.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import ray_dcp
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.session.discovery import current_session
from ray_dcp.session.names import NAMESPACE, coordinator_name
from tests.chaos.cells import Trap
from tests.chaos.judging import Told
from tests.chaos.traps import Blow, loopback_addresses, read_mark, set_trap, set_trap_in
from tests.support.attempts import sound_state
from tests.support.processes import eventually
from tests.support.staging import stagers_on

OUTCOME_S = 90.0
"""How long a rank waits for the outcome of an asynchronous save, in seconds."""

LARGE_BYTES = 16 << 20
"""What each rank holds alone, so that it writes and reads in several requests."""


def full_state(step: int, fill: bool = True) -> dict[str, Any]:
    """Returns `sound_state` and a large tensor that only this rank holds."""
    rank = dist.get_rank()
    value = float(step) if fill else -1.0
    return {**sound_state(step, fill), f"large{rank}": torch.full((LARGE_BYTES // 4,), value)}


def save_full(path: str, step: int, more: dict[str, Any] | None = None, **options: Any) -> None:
    state = full_state(step) | (more or {})
    ray_dcp.save(state, checkpoint_id=path, options=SaveOptions(**options))


def load_full(path: str, **options: Any) -> None:
    state = full_state(0, fill=False)
    ray_dcp.load(state, checkpoint_id=path, options=LoadOptions(**options))
    large = state[f"large{dist.get_rank()}"]
    assert torch.equal(large, torch.full_like(large, float(state["step"])))


class Slow:
    """A `Stateful` that gives its state only after the blow has fallen."""

    def __init__(self, marks: str) -> None:
        self.marks = Path(marks)

    def state_dict(self) -> dict[str, Any]:
        eventually(lambda: read_mark(self.marks), 30)
        return {"late": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def play(
    path: str,
    marks: str,
    phase: str,
    options: dict[str, float],
    *,
    slow: int | None = None,
    asynchronous: bool = False,
) -> None:
    """Saves step 2, or loads, and writes down what this rank was told.

    Args:
        path: Of the checkpoint.
        marks: Directory of what is written down.
        phase: `loading` loads, the others save.
        options: Of the save or load.
        slow: A rank that captures its state until the blow has fallen.
        asynchronous: Save in the background, and wait for the outcome.
    """
    error: Exception | None = None
    slowly = {"slow": Slow(marks)} if dist.get_rank() == slow else {}
    try:
        if phase == "loading":
            load_full(path, **options)
        elif asynchronous:
            state, how = full_state(2) | slowly, SaveOptions(**options)
            ray_dcp.async_save(state, checkpoint_id=path, options=how).result(OUTCOME_S)
        else:
            save_full(path, 2, slowly, **options)
    except Exception as raised:
        error = raised
    told = Told(time.monotonic(), error)
    file = Path(marks) / f"told-{dist.get_rank()}"
    file.with_suffix(".new").write_bytes(pickle.dumps(told))
    file.with_suffix(".new").rename(file)


def told(marks: Path) -> dict[int, Told]:
    """Returns what was told so far, by rank."""
    return {
        int(file.name.partition("-")[2]): pickle.loads(file.read_bytes())
        for file in marks.glob("told-*")
        if file.suffix != ".new"
    }


def session_facts() -> dict[str, Any]:
    """Returns the session's name, and what its coordinator says of itself."""
    session = current_session()
    return {"session": session.name, "actor": session.ray.actor, **session.coordinator_info()}


def stager_pid() -> int:
    """Returns the process of this node's stager, after making it if there is none."""
    return int(current_session().ray.staging().info()["pid"])


def connect(name: str) -> None:
    """Takes this rank's place in a session of this name."""
    ray_dcp.connect(name=name, rank=dist.get_rank(), world_size=dist.get_world_size())


def set_trap_on(rank: int, trap: Trap, blow: Blow) -> None:
    """Sets a trap on one rank."""
    if dist.get_rank() == rank:
        set_trap(trap, blow)


def spring_trap(ranks: Any, trap: Trap, blow: Blow, *, rank: int, actor: str) -> None:
    """Sets a trap where it belongs: on a rank of a group, or in an actor of this node."""
    if trap.on == "rank":
        ranks.run(set_trap_on, rank, trap, blow)
        return
    node_id = ray.get_runtime_context().get_node_id()
    if trap.on == "stager":
        # Why by its ranks: each job has one of its own.
        (handle,) = [
            one for one in stagers_on(node_id)
            if any(rank.startswith(f"{actor}:") for rank in ray.get(one.info.remote())["ranks"])
        ]  # fmt: skip
    else:
        handle = ray.get_actor(coordinator_name(actor), namespace=NAMESPACE)
    ray.get(handle.__ray_call__.remote(set_trap_in, trap, blow))


def drive(address: str, order: dict[str, Any]) -> None:
    """Does what `order` says with ranks of its own; it is the one that is hit."""
    with loopback_addresses():
        ray.init(address, log_to_driver=False, configure_logging=False, namespace="victim")
    path, marks, phase = order["path"], order["marks"], order["phase"]
    with ray_dcp.WorkerGroup(3, resources={"head": 1}) as ranks:
        ranks.run(save_full, path, 1)
        facts = ranks.run(session_facts)[0]
        before = os.listdir(path)
        blow = Blow(order["signal"], (os.getpid(),), path, marks)
        spring_trap(ranks, Trap(**order["trap"]), blow, rank=1, actor=facts["actor"])
        own = {"ranks": ranks.pids, "coordinator": facts["pid"], "actor": facts["actor"]}
        print(json.dumps({**own, "before": before}), flush=True)
        ranks.run(play, path, marks, phase, order["options"], **order["how"])


if __name__ == "__main__":
    drive(sys.argv[1], json.loads(sys.argv[2]))
