"""What ranks and readers of a soak do; importable by both.

A state carries its step in every element, so that a mixture of two steps is seen value by value.
What a rank is told goes to a file, as its answer is lost when another rank is killed.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ray_dcp
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError, CommitUnknownError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.session import current_session
from tests.bench.soak_ledger import DAMAGED, NOTHING, TORN, Seen

WIDTH = 64
ROWS = 3001

HOARD: list[bytearray] = []
"""What `--sabotage` leaks on a rank."""


def state_of(step: int, *, sharded: bool = True, torn: bool = False) -> dict[str, Any]:
    """Returns a state of about 2 MB whose every element is its step.

    Args:
        step: The step.
        sharded: Cut the large tensors over the ranks; else they are whole, for one process.
        torn: Half of one tensor is of the step before, as no save may ever leave it.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return _share(tensor) if sharded else tensor

    weight = torch.full((ROWS, WIDTH), step, dtype=torch.int64)
    if torn:
        weight[: ROWS // 2] = step - 1
    return {
        "model": {"weight": cut(weight), "bias": torch.full((WIDTH,), float(step))},
        "optimizer": {"moment": cut(torch.full((ROWS // 3, WIDTH), float(step)))},
        "rng": torch.full((5000,), step % 251, dtype=torch.uint8),
        "step": step,
        "note": {"text": f"step {step}"},
    }


def _share(whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows, without a collective: another rank may be dead."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(len(whole)).chunk(mesh.size())
    rank = dist.get_rank()
    mine = whole[rows[rank]] if rank < len(rows) else whole[:0]
    return DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def step_in(state: dict[str, Any]) -> Seen:
    """Returns the one step that all elements of a loaded state tell, or that it is torn."""
    step = state["step"]
    parts = {
        **{f"model.{name}": value for name, value in state["model"].items()},
        "optimizer.moment": state["optimizer"]["moment"],
    }
    for value in parts.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        if not bool((local == step).all()):
            return TORN
    if not bool((state["rng"] == step % 251).all()) or state["note"] != {"text": f"step {step}"}:
        return TORN
    return step


# Savers: each returns when the outcome of its save is known on this rank. Give `save_reported`
# another one to soak another way of saving.


def save_now(state: dict[str, Any], path: str, options: SaveOptions) -> None:
    """Saves, and returns when it is committed."""
    ray_dcp.save(state, checkpoint_id=path, options=options)


def save_beside(state: dict[str, Any], path: str, options: SaveOptions) -> None:
    """Saves in the background, changes the state meanwhile, and waits for the outcome."""
    handle = ray_dcp.async_save(state, checkpoint_id=path, options=options)
    for tensor in (*state["model"].values(), *state["optimizer"].values()):
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-7)
    handle.result()


SAVERS: dict[str, Callable[[dict[str, Any], str, SaveOptions], None]] = {
    "sync": save_now,
    "async": save_beside,
}


def save_reported(
    saver: str, path: str, step: int, reports: str, options: dict[str, Any], sabotage: str = ""
) -> str:
    """Saves a step on this rank, and notes what it was told in a file of its own.

    Args:
        saver: One of `SAVERS`.
        path: Where to.
        step: The step.
        reports: Folder for what ranks are told.
        options: Of `SaveOptions`.
        sabotage: What to do wrong on purpose: `torn`, `appeared` or `memory`.
    """
    if sabotage == "memory":
        HOARD.append(bytearray(os.urandom(1 << 16) * 256))
    state = state_of(step, torn=sabotage == "torn")
    detail = ""
    try:
        SAVERS[saver](state, path, SaveOptions(**options))
        told = "committed"
    except CommitUnknownError as error:
        told, detail = "unknown", str(error)
    except CheckpointError as error:
        told, detail = "failed", f"{type(error).__name__}: {error}"
    if sabotage == "appeared":
        told = "failed"
    line = json.dumps({"step": step, "told": told, "detail": detail[:500]})
    with Path(reports, f"{os.getpid()}.jsonl").open("a") as file:
        file.write(line + "\n")
    return told


def load_reported(path: str, options: dict[str, Any]) -> Seen:
    """Returns which step loads on this rank, of the share that it has at this world size."""
    return _seen(path, lambda state: ray_dcp.load(
        state, checkpoint_id=path, options=LoadOptions(**options)), sharded=True)  # fmt: skip


def coordinator_pid() -> int | None:
    """Returns the process of this rank's coordinator; None for a rank that is alone."""
    session = current_session()
    return None if session is None else session.coordinator_info()["pid"]


# The reader: a process of its own that is no rank.


def read_alone(how: str, path: str) -> Seen:
    """Returns which step a process sees that is no rank.

    Args:
        how: `load`, `stock` (DCP's own load) or `verify`.
        path: Where.
    """
    if how == "verify":
        try:
            report = ray_dcp.verify(path)
        except CheckpointNotFoundError:
            return NOTHING
        return "whole" if report.ok else DAMAGED
    if how == "stock":
        if not Path(path, ".metadata").exists():
            return NOTHING
        return _seen(path, lambda state: stock.load(state, checkpoint_id=path, no_dist=True))
    return _seen(path, lambda state: ray_dcp.load(state, checkpoint_id=path, no_dist=True))


def _seen(path: str, load: Callable[[dict[str, Any]], Any], *, sharded: bool = False) -> Seen:
    state = state_of(-1, sharded=sharded)
    try:
        load(state)
    except CheckpointNotFoundError:
        return NOTHING
    except (Exception, CheckpointException) as error:
        # Why all: stock DCP raises whatever its storage does.
        print(f"{path} does not load: {type(error).__name__}: {error}"[:2000], file=sys.stderr)
        return DAMAGED
    return step_in(state)


def serve() -> None:
    """Answers one JSON line for each on standard input, until that ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        seen = read_alone(asked["how"], asked["path"])
        print(json.dumps({"seen": seen}), flush=True)


if __name__ == "__main__":
    serve()
