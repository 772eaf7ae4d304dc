"""An evaluator beside the training: it takes each new step of a run, and needs no GPU and no Ray.

python evaluator.py RUN SECONDS_WITHOUT_A_NEW_STEP
"""

import sys

import torch

import ray_dcp


def main(run: str, timeout_s: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    with ray_dcp.CheckpointManager(run, read_only=True) as manager:
        for step in manager.follow(timeout_s=timeout_s, poll_s=1.0):  # the step stays meanwhile
            manager.restore(step, {"model": model})
            with torch.no_grad():
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
