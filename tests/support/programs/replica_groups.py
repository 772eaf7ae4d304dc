"""Ray Train workers that are replicas of each other, as under `TorchftConfig` but without torchft.

Ray Train replaces a worker that fails while the others go on. Who has begun waits for nobody; tests
arrange by notes in a folder who is where.
"""

from __future__ import annotations

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.worker_group import ReplicaGroup

import ray_dcp
from tests.support.processes import eventually
from tests.support.programs.train import note, notes

STEPS = 6
KILLED_AT = 2
"""Step in whose save a worker is killed, once."""
KILLED = 1
"""Its rank."""


class _Backend(_TorchBackend):
    """Makes a process group for each replica, as torchft's backend does."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        start = super().on_start
        replaced = isinstance(worker_group, ReplicaGroup)
        groups = [worker_group] if replaced else worker_group.get_replica_groups()
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda group: start(group, backend_config), groups):
                pass


class ReplicaConfig(TorchConfig):
    """Gives each worker a process group of its own, and has Ray Train replace it alone."""

    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


class KilledOnce:
    """A value in whose capture its process ends."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def train(config: dict[str, str]) -> None:
    """Saves each step; the replica that is left saves one alone, and then waits for the other."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    state: dict[str, Any] = {
        "w": torch.zeros(1000),
        "own": ray_dcp.PerRank(-1, resized="keep"),
    }
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with ray_dcp.train.checkpointer(save_interval=1) as ckpt:
            done = ckpt.restore(state)
            note(str(folder), rank, began=done)
            for step in range(0 if done is None else done + 1, STEPS):
                state["w"] += 1
                state["own"].value = 100 * step + rank
                is_killed = rank == KILLED and done is None and step == KILLED_AT
                lost = {"lost": KilledOnce()} if is_killed else {}
                assert ckpt.save(step, {**state, **lost}, metrics={"w": float(state["w"][0])})
                assert not ckpt.save(step, state), "a step that is made again"
                if done is None and step == KILLED_AT + 1:
                    assert eventually(lambda: len([*notes(folder, "began")]) == 3)
            again = {"w": torch.zeros(1000), "own": ray_dcp.PerRank(-1, resized="keep")}
            assert ckpt.restore(again) == STEPS - 1
            note(str(folder), rank, own=again["own"].value, w=again["w"].unique().tolist())
    texts = [text for one in warned if "is not saved" in (text := str(one.message))]
    note(str(folder), rank, lost=texts)
