"""FSDP2 under torchrun: each start goes on from the newest checkpoint, on any number of ranks.

torchrun --standalone --nproc-per-node=2 fsdp2_torchrun.py RUN LAST_STEP
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ray_dcp


def main(run: str, last_step: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with ray_dcp.CheckpointManager(run, save_interval=5, max_to_keep=2) as manager:
        done = 0
        if manager.latest_step() is not None:
            done = manager.restore("auto", state).step
        for step in range(done + 1, last_step + 1):
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.save_async(step, state, metrics={"loss": loss.item()})
    if dist.get_rank() == 0:
        print(f"steps {done + 1} to {last_step}, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
