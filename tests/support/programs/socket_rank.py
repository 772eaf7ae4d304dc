"""A plain training script of several ranks, some of which die; it knows nothing of Ray.

Usage: RANK=… WORLD_SIZE=… python -m tests.support.programs.socket_rank <what> <folder>
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ray_dcp
from ray_dcp.commit_protocol.commands import CreateRecord
from ray_dcp.coordinator import loop
from ray_dcp.options import SaveOptions
from ray_dcp.rank import rank_save
from ray_dcp.session import discovery
from ray_dcp.session.discovery import current_session
from ray_dcp.session.job_store import job_store
from tests.support.processes import eventually

HEARTBEAT_S = 3.0
"""`heartbeat_timeout_s` of the saves."""


def whole() -> torch.Tensor:
    return torch.arange(48.0).reshape(12, 4)


def children_of(task: Path) -> str:
    """Returns the processes that a thread of this process has started."""
    try:
        return (task / "children").read_text()
    except FileNotFoundError:  # the thread has ended since
        return ""


def reshard(folder: str) -> dict[str, Any]:
    """Saves what is sharded in one way, in the background, and loads it in another."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(whole(), mesh, [Shard(0)]), "step": 3}
    first_s = time.monotonic()
    ray_dcp.save(state, checkpoint_id=f"{folder}/sync")
    saved_s = time.monotonic()
    handle = ray_dcp.async_save(state, checkpoint_id=f"{folder}/async")
    handle.staged(180)
    state["w"].to_local().zero_()
    handle.committed(180)
    found = {"w": distribute_tensor(torch.zeros(12, 4), mesh, [Shard(1)]), "step": 0}
    ray_dcp.load(found, checkpoint_id=f"{folder}/async")
    same = torch.equal(found["w"].full_tensor(), whole()) and found["step"] == 3
    tasks = Path("/proc/self/task").iterdir()
    session = current_session()
    key = f"ray_dcp/socket/{session.name if session else ''}/address"
    return {
        "key_is_stored": job_store().check([key]),
        "same": same,
        "staging": handle.report().staging,
        "first_call_s": saved_s - first_s,
        "children": [int(child) for task in tasks for child in children_of(task).split()],
        "has_ray": "ray" in sys.modules and sys.modules["ray"].is_initialized(),
    }


MEETINGS = {"comes": "await_group", "invites": "_make", "joins": "_join_session"}
"""Before which call of its first save a rank dies."""


MEETING_S = 4.0
"""`plan_timeout_s` of saves in which the session is made."""


def struck(what: str, folder: str, is_victim: bool) -> dict[str, Any]:
    """Saves twice, while a rank is struck; tells how that ended, and how long after the blow."""
    blow = Path(folder, "blow")

    def strike(kind: signal.Signals) -> Callable[..., None]:
        def now(*_: Any, **__: Any) -> None:
            # Why written elsewhere first: others look for it.
            note = Path(folder, "note")
            note.write_text(str(time.time()))
            note.rename(blow)
            os.kill(os.getpid(), kind)

        return now

    when, mode = what.split()
    if is_victim:
        if when == "before":
            strike(signal.SIGKILL)()
        elif when in MEETINGS:
            setattr(discovery, MEETINGS[when], strike(signal.SIGKILL))
        elif when == "freezes":
            rank_save.write_part = strike(signal.SIGSTOP)
        elif when == "committed":
            perform = loop.perform

            def perform_and_die(task: Any) -> Any:
                result = perform(task)
                if isinstance(task, CreateRecord):
                    strike(signal.SIGKILL)()
                return result

            loop.perform = perform_and_die
        else:
            rank_save.write_part = strike(signal.SIGKILL)
    facts: dict[str, Any] = {}
    state = {f"own {dist.get_rank()}": torch.ones(10)}
    # Why once: a frozen rank that never joined is only missing at the deadline of planning.
    # Of meetings one: each save waits for a store that has ended.
    once = when == "freezes" or when in {*MEETINGS} - {"comes"}
    for place in ("second",) if once else ("second", "third"):
        try:
            bounds = {"plan_timeout_s": MEETING_S} if when in MEETINGS else {}
            options = SaveOptions(heartbeat_timeout_s=HEARTBEAT_S, **bounds)
            if mode == "async":
                saving = ray_dcp.async_save(
                    state, checkpoint_id=f"{folder}/{place}", options=options
                )
                saving.committed(300)
            else:
                ray_dcp.save(state, checkpoint_id=f"{folder}/{place}", options=options)
            facts[place] = ["", None, "saved"]
        except ray_dcp.CheckpointError as error:
            facts[place] = [type(error).__name__, error.rank, error.message]
        if "after_s" not in facts:
            eventually(blow.exists)
            facts["after_s"] = time.time() - float(blow.read_text())
    return facts


class BrokenStager(BlockingAsyncStager):
    """A stager of the user, which ends with an error on rank 1."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def stage(self, state_dict: Any) -> Any:
        if dist.get_rank() == 1:
            raise self._error
        return super().stage(state_dict)


def broken_stager(folder: str) -> dict[str, Any]:
    """Saves by stagers that fail on one rank, and tells how that ended."""
    facts: dict[str, Any] = {}
    for error in (OSError("no pinned memory"), KeyboardInterrupt()):
        place, began_s = type(error).__name__, time.monotonic()
        try:
            saving = ray_dcp.async_save(
                {"w": torch.ones(3)}, checkpoint_id=f"{folder}/{place}",
                async_stager=BrokenStager(error),
            )  # fmt: skip
            saving.committed(300)
        except ray_dcp.CheckpointError as found:
            facts[place] = [type(found).__name__, found.rank, found.message]
        except (OSError, KeyboardInterrupt) as found:
            facts[place] = [type(found).__name__, None, str(found)]
        facts["after_s"] = max(facts.get("after_s", 0.0), time.monotonic() - began_s)
    ray_dcp.save({"w": torch.ones(3)}, checkpoint_id=f"{folder}/next")
    return facts


def said(call: Callable[[], object]) -> list[Any]:
    """Returns kind, rank and message of the error of a call; "" for one that succeeds."""
    try:
        call()
    except ray_dcp.CheckpointError as error:
        return [type(error).__name__, error.rank, error.message]
    return ["", None, ""]


def first_call_of_rank_0(folder: str) -> dict[str, Any]:
    """Rank 0 alone calls save, as behind `if rank == 0`; then all do what they are told."""
    state, began_s = {"w": torch.ones(3)}, time.monotonic()
    facts: dict[str, Any] = {}
    if dist.get_rank() == 0:
        options = SaveOptions(plan_timeout_s=1.0)
        place = f"{folder}/alone"
        facts["alone"] = said(lambda: ray_dcp.save(state, checkpoint_id=place, options=options))
        facts["after_s"] = time.monotonic() - began_s
        Path(folder, "told").touch()
        ray_dcp.save(state, checkpoint_id=place, no_dist=True)
    eventually(Path(folder, "told").exists)
    facts["all"] = said(lambda: ray_dcp.save(state, checkpoint_id=f"{folder}/all"))
    return facts


def first_calls_of_threads(folder: str) -> dict[str, Any]:
    """Each of three groups makes its first save in a thread of its own."""
    groups = [dist.new_group() for _ in range(3)]
    begin = threading.Barrier(len(groups))

    def save(number: int) -> list[Any]:
        begin.wait(60)
        place = f"{folder}/{number}"
        state = {"w": torch.full((3,), float(number))}
        return said(lambda: ray_dcp.save(state, checkpoint_id=place, process_group=groups[number]))

    with ThreadPoolExecutor(len(groups)) as pool:
        return {"saves": list(pool.map(save, range(len(groups))))}


def without_a_group(folder: str) -> None:
    """Saves in a process of torchrun whose script forgot `init_process_group`."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        state = {"w": torch.full((3,), float(os.environ["RANK"]))}
        facts = {"save": said(lambda: ray_dcp.save(state, checkpoint_id=f"{folder}/step"))}
        own = f"{folder}/own-{os.environ['RANK']}"
        facts["own"] = said(lambda: ray_dcp.save(state, checkpoint_id=own, no_dist=True))
        facts["load"] = said(lambda: ray_dcp.load(state, checkpoint_id=own))
        facts["warned"] = [str(one.message) for one in warned]
    print(json.dumps({"rank": int(os.environ["RANK"]), **facts}), flush=True)


def main(what: str, folder: str) -> None:
    if what == "without_a_group":
        without_a_group(folder)
        return
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    victim = ""
    if what == "reshard":
        facts = reshard(folder)
    elif what == "broken_stager":
        facts = broken_stager(folder)
    elif what == "first_call_of_rank_0":
        facts = first_call_of_rank_0(folder)
    elif what == "first_calls_of_threads":
        facts = first_calls_of_threads(folder)
    else:
        victim, _, what = what.partition(" ")
        if what.partition(" ")[0] not in MEETINGS:
            ray_dcp.save({"first": torch.ones(3)}, checkpoint_id=f"{folder}/first")
        if rank == int(victim):
            # A worker of a data loader may outlive its parent, with all that it inherited.
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            worker.start()
            Path(folder, f"worker-{rank}").write_text(str(worker.pid))
        dist.barrier()
        facts = struck(what, folder, rank == int(victim))
    print(json.dumps({"rank": rank, **facts}), flush=True)
    # Why wait: who ends first would be one more that died, rank 0 the coordinator as well, and
    # would close connections of the group that others still read.
    Path(folder, f"done-{rank}").touch()
    waited_for = [Path(folder, f"done-{one}") for one in range(dist.get_world_size())]
    eventually(lambda: all(one.exists() for one in waited_for if one.name != f"done-{victim}"))
    if victim:
        os._exit(0)  # the process group would wait for the dead
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
