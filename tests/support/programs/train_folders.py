"""A Ray Train worker that saves as Ray's FSDP2 examples do, with the import of DCP changed.

Each worker saves to a temporary folder of its own and reports it; Ray Train merges the folders.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import ray_dcp as dcp
from ray_dcp.errors import CheckpointError, CheckpointNotFoundError
from tests.support.programs.train import made, note, train_one_step

STEPS = 5
KILLED_AT = 2
"""Step in whose save a worker is killed, once."""


class AppState(Stateful):
    def __init__(self, state: dict[str, Any], step: int = -1) -> None:
        self.model, self.optimizer = state["model"], state["optimizer"]
        self.scheduler, self.step = state["scheduler"], step

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        scheduler = self.scheduler.state_dict()
        return {"model": model, "optim": optim, "scheduler": scheduler, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.step = state_dict["step"]


class KilledOnce(AppState):
    """Its process ends while the other ranks save."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def load_checkpoint(state: dict[str, Any], checkpoint: ray.train.Checkpoint) -> int:
    with checkpoint.as_directory() as folder:
        app = AppState(state)
        dcp.load(state_dict={"app": app}, checkpoint_id=folder)
    return app.step


def save_and_report(app: AppState, metrics: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state_dict={"app": app}, checkpoint_id=folder)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def train(config: dict[str, str]) -> None:
    folder, rank, world_size = config["folder"], dist.get_rank(), dist.get_world_size()
    state = made("fsdp2")
    begun = -1
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        begun = load_checkpoint(state, checkpoint)
    else:
        refuse_wrong_folders(folder, rank)
    note(folder, rank, begun=begun)
    for step in range(begun + 1, STEPS):
        loss = train_one_step(state, step, rank, world_size)
        note(folder, rank, step=step, loss=loss, world_size=world_size)
        is_killed = step == KILLED_AT and begun < 0 and rank == 1
        if step == KILLED_AT:  # Returns when Ray Train has registered all reports.
            committed = ray.train.CheckpointConsistencyMode.COMMITTED
            ray.train.get_all_reported_checkpoints(consistency_mode=committed)
        app = (KilledOnce if is_killed else AppState)(state, step)
        save_and_report(app, {"loss": loss, "step": step})
    load_copies(folder, rank, state)


def load_copies(folder: str, rank: int, state: dict[str, Any]) -> None:
    """Loads from a path at which each worker has a copy, but the coordinator finds nothing."""
    own = Path(folder, f"copy-{rank}")
    committed = ray.train.CheckpointConsistencyMode.COMMITTED
    reported = ray.train.get_all_reported_checkpoints(consistency_mode=committed)
    shutil.copytree(reported[-1].checkpoint.path, own / "checkpoint")
    os.chdir(own)
    app = AppState(state)
    dcp.load({"app": app}, checkpoint_id="/proc/self/cwd/checkpoint")
    note(folder, rank, copied=app.step)
    try:
        dcp.load({"app": app}, checkpoint_id="/proc/self/cwd/nothing")
    except CheckpointNotFoundError as error:
        note(folder, rank, missing=str(error))


def refuse_wrong_folders(folder: str, rank: int) -> None:
    """Saves where Ray Train could not merge the folders into one checkpoint."""
    own = Path(folder, f"own-{rank}")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=own)
    left = sorted(one.name for one in own.iterdir())
    for again in (dcp.save, lambda *state, **to: dcp.async_save(*state, **to).result()):
        try:
            again({"w": torch.ones(2)}, checkpoint_id=own)
        except CheckpointError as error:
            note(folder, rank, refused=str(error))
    assert sorted(one.name for one in own.iterdir()) == left
