"""FSDP2 by Accelerate: each start goes on from the newest checkpoint, on any number of ranks.

torchrun --standalone --nproc-per-node=2 accelerate_fsdp2.py PROJECT LAST_STEP
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration

import ray_dcp
from ray_dcp.integrations.accelerate import load_state, save_state


class Progress:
    """An object of the program's own, registered with the accelerator."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(project: str, last_step: int) -> None:
    if on_cpu := not torch.accelerator.is_available():
        # For a trial: without a device, Accelerate itself would make DDP of the plug-in.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    names = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=on_cpu,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        project_config=names,
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    try:
        load_state(accelerator)
    except ray_dcp.CheckpointNotFoundError:
        accelerator.print("begins")
    handle = None
    while progress.step < last_step:
        progress.step += 1
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(progress.step))
        x = x.to(accelerator.device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if progress.step % 5 == 0:
            handle = save_state(accelerator)  # training goes on while it is written
    if handle is not None:
        handle.result()
    shard = next(model.parameters()).to_local().shape
    accelerator.print(f"step {progress.step}, loss {loss.item():.4f}, rank 0 has {[*shard]}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
