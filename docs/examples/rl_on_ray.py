"""Reinforcement learning, saved by one commit: python rl_on_ray.py RUN LAST_STEP RANKS.

Sharded ranks train a tiny policy, an actor a critic; rollouts sample, a buffer keeps what they
bring, and the driver counts prompts. One record commits all of them. Whatever is killed: a second
call, on any number of ranks, goes on from the last step, and trains on each prompt once.
"""

import sys
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ray_dcp
from ray_dcp.data import Frontier
from ray_dcp.worker_group import this_rank

PARTS = ("policy", "critic", "buffer", "cursor")
NUM_PROMPTS, BATCH = 400, 4


def make_policy() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = torch.zeros(NUM_PROMPTS, dtype=torch.int64)  # how often, by prompt
    return {"model": model, "optimizer": optimizer, "trained": trained}


def train(batch: list[tuple[int, torch.Tensor]]) -> None:
    state = this_rank().state
    loss = state["model"](torch.stack([x for _, x in batch])).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["trained"][[prompt for prompt, _ in batch]] += 1


def save_policy(part: ray_dcp.Part) -> None:
    ray_dcp.async_save(this_rank().state, checkpoint_id=part).staged()


@ray.remote(num_cpus=0)
class Critic:
    def __init__(self) -> None:
        self.state = {"value": torch.nn.Linear(8, 1)}

    def train(self, batch: list[tuple[int, torch.Tensor]]) -> None:
        with torch.no_grad():
            self.state["value"].bias += len(batch)

    def save(self, part: ray_dcp.Part) -> None:
        ray_dcp.async_save(self.state, checkpoint_id=part).staged()

    def load(self, part: ray_dcp.Part) -> None:
        ray_dcp.load(self.state, checkpoint_id=part)


@ray.remote(num_cpus=0)
def roll_out(prompt: int) -> tuple[int, torch.Tensor]:
    return prompt, torch.full((8,), prompt / NUM_PROMPTS)


@ray.remote(num_cpus=0)
class Buffer:
    def __init__(self) -> None:
        self.samples: dict[str, torch.Tensor] = {}  # no step was trained on them yet

    def exchange(self, *samples: tuple[int, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Takes samples, and returns older ones to train on."""
        self.samples |= {str(prompt): x for prompt, x in samples}
        return [(int(name), self.samples.pop(name)) for name in [*self.samples][: BATCH - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": dict(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = dict(state["samples"])


def main(run: str, last_step: int, num_ranks: int = 2, on_step: Any = lambda *_: None) -> int:
    """Trains to a step; returns the step that it went on from."""
    critic, buffer, cursor, first = Critic.remote(), Buffer.remote(), Frontier(max_open=64), 0
    checkpoints = ray_dcp.JobCheckpoints(run, PARTS, max_to_keep=2)
    with ray_dcp.WorkerGroup(num_ranks) as policy, checkpoints:
        policy.keep(make_policy)
        if last := checkpoints.latest():
            with last:
                first = last.step
                policy.load(last.part("policy"), make_policy)
                ray.get(critic.load.remote(last.part("critic")))
                ray.get(buffer.load_state_dict.remote(last.ref("buffer")))
                cursor.load_state_dict(last.value("cursor"))
        going: dict[ray.ObjectRef, int] = {}
        for number in range(first + 1, last_step + 1):
            for prompt in cursor.take(BATCH + 2 - len(going)):
                going[roll_out.remote(prompt)] = prompt
            ready, _ = ray.wait([*going], num_returns=BATCH)  # the others go on meanwhile
            batch = ray.get(buffer.exchange.remote(*ready))
            cursor.done([going.pop(one) for one in ready])
            policy.run(train, batch)
            ray.get(critic.train.remote(batch))
            with checkpoints.step(number, metadata={"ranks": num_ranks}) as step:
                step.put("buffer", buffer.state_dict.remote())
                step.put("cursor", cursor.state_dict())
                saved = critic.save.remote(step.part("critic"))
                policy.run(save_policy, step.part("policy"))
                ray.get(saved)
                on_step(step, policy, critic, buffer)
        step.result()
    return first


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
