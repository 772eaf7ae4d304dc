"""Replicas under torchft in Ray Train: python ray_train_replicas.py STORAGE LAST_STEP [KILLED_AT].

Each worker is a replica. One that dies is replaced while the others train on, and gets its state
from one of them; they save together. With KILLED_AT a worker is killed after that step, once.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import ray_dcp

PATIENCE = timedelta(seconds=60)


class Replica:
    """What a replica trains, and how torchft gives its state to another one."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            min_replica_size=1,
            load_state_dict=self.load_state_dict,
            state_dict=self.state_dict,
            replica_id=f"replica-{rank}",
            rank=0,
            world_size=1,
            timeout=PATIENCE,
        )
        self.ddp = DistributedDataParallel(self.manager, self.model)
        self.optimizer = Optimizer(self.manager, self.inner)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def train_one_step(self, rank: int) -> float:
        """Makes one step; it counts, by `Manager.current_step`, if all replicas there made it."""
        seed = 1000 * self.manager.current_step() + rank
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        loss = (self.ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train_fn(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    replica = Replica(rank)
    # The manager's state is the number of the step: a run that begins anew goes on from there.
    state = {"model": replica.model, "optimizer": replica.inner, "torchft": replica.manager}
    with ray_dcp.train.checkpointer(save_interval=5) as checkpointer:
        checkpointer.restore(state)
        while (step := replica.manager.current_step()) < config["last_step"]:
            kill_once(config, rank, step)
            loss = replica.train_one_step(rank)
            checkpointer.save(replica.manager.current_step(), state, metrics={"loss": loss})
    replica.manager.shutdown()


def kill_once(config: dict[str, Any], rank: int, step: int) -> None:
    mark = Path(config["storage"], "killed")
    if rank == 1 and step == config["killed_at"] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(storage: str, last_step: int, killed_at: int = 0) -> None:
    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"last_step": last_step, "killed_at": killed_at, "storage": storage},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=ray.train.RunConfig(
            name="replicas",
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
