"""Rollouts that end in any order, in a job that may be killed: python frontier.py RUN LAST_STEP.

An actor hands out prompts by number; workers sample from them, and each step trains on whichever
four are finished first. One worker is killed on the way. Started again with a later LAST_STEP, the
job goes on with exactly the prompts that were not trained on.
"""

import sys
import time

import ray
import torch

from ray_dcp.data import Frontier
from ray_dcp.manager import CheckpointManager, LatestN

WORKERS, BATCH, PROMPTS = 3, 4, 100


@ray.remote(num_cpus=0, max_restarts=-1)
class Rollout:
    def sample(self, prompt: int) -> torch.Tensor:
        time.sleep(0.01 * (prompt % 3))  # some take longer than others
        return torch.full((8,), float(prompt))


def main(run: str, last_step: int) -> list[int]:
    """Trains to a step; returns the prompts that all steps together were trained on."""
    model, seen = torch.nn.Linear(8, 1), torch.zeros(PROMPTS, dtype=torch.bool)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    prompts = ray.remote(Frontier).options(num_cpus=0).remote(max_open=16, stop=PROMPTS)
    workers = [Rollout.remote() for _ in range(WORKERS)]
    with CheckpointManager(run, retention=LatestN(2), no_dist=True) as manager:
        first = manager.latest_step() or 0
        if first:
            state = {"prompts": ray.get(prompts.state_dict.remote())}
            state |= {"model": model, "optimizer": optimizer, "seen": seen}
            manager.restore("auto", state)
            ray.get(prompts.load_state_dict.remote(state["prompts"]))
        going: dict[ray.ObjectRef, tuple[int, int]] = {}
        for step in range(first + 1, last_step + 1):
            batch: dict[int, torch.Tensor] = {}
            while len(batch) < BATCH:
                for worker in {*range(WORKERS)} - {at for at, _ in going.values()}:
                    for prompt in ray.get(prompts.take.remote(1)):
                        going[workers[worker].sample.remote(prompt)] = worker, prompt
                (ready,), _ = ray.wait(list(going))
                _, prompt = going.pop(ready)
                try:
                    batch[prompt] = ray.get(ready)
                except ray.exceptions.ActorError:
                    ray.get(prompts.give_back.remote(prompt))  # another worker gets it
            ray.get(prompts.done.remote(list(batch)))  # refuses what is not ours any more
            assert not seen[list(batch)].any()
            seen[list(batch)] = True
            loss = model(torch.stack(list(batch.values()))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                ray.kill(workers[0], no_restart=False)
            state = {"prompts": ray.get(prompts.state_dict.remote())}
            state |= {"model": model, "optimizer": optimizer, "seen": seen}
            manager.save(step, state)
            print(f"step {step}: prompts {sorted(batch)}", flush=True)
    return seen.nonzero().flatten().tolist()


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    main(sys.argv[1], int(sys.argv[2]))
