"""An evaluator beside the training: each step of a run is evaluated once, by a task of Ray.

python evaluator.py RUN SECONDS_WITHOUT_A_NEW_STEP

The loss becomes a metric of the step, so that `BestN(3, "eval_loss", later=True)` keeps by it. This
program may be killed at any moment and started again: a step without its loss is evaluated again.
"""

import sys

import ray
import torch

import ray_dcp


@ray.remote
def evaluate(path: str) -> float:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    ray_dcp.load({"model": model}, checkpoint_id=path, no_dist=True)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (model(x) - x.sum(1, keepdim=True)).square().mean().item()


def main(run: str, timeout_s: float) -> None:
    ray.init(log_to_driver=False)
    for step in ray_dcp.follow(run, metric="eval_loss", timeout_s=timeout_s, poll_s=1.0):
        loss = ray.get(evaluate.remote(step.checkpoint_id))  # the step is not deleted meanwhile
        step.record({"eval_loss": loss})
        print(f"step {step.step}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
