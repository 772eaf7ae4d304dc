"""torchtitan's checkpoint contract, kept by ray_dcp: python torchtitan_manager.py RUN STEPS.

In torchtitan's own trainer, one line of the config is enough:
`config.checkpoint = RayDcpCheckpointManager.Config(enable=True, interval=500)`. Here a loop stands
for the trainer and calls the manager as it does.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ray_dcp.integrations.torchtitan import RayDcpCheckpointManager


class Optimizers:
    """As torchtitan's container of optimizers: stateful, with keys by parameter name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.one = torch.optim.AdamW(model.parameters(), lr=0.05)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.one)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.one, state)


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Trainer:
    """A model, what trains it, and a manager; `train` resumes from the newest step."""

    def __init__(self, run: Path, *, seed: int = 1, sd_adapter: Any = None, **config: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(4, 1)
        self.optimizers = Optimizers(self.model)
        self.schedulers = torch.optim.lr_scheduler.StepLR(self.optimizers.one, 2)
        self.state = TrainState()
        settings = RayDcpCheckpointManager.Config(
            enable=True, interval=2, keep_latest_k=2, folder=run.name, **config
        )
        self.manager = settings.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=sd_adapter,
            base_folder=str(run.parent),
        )

    def train(self, steps: int, *, last: bool = False) -> int | None:
        """Returns the step that it resumed from, or None if there was none."""
        resumed = self.state.step if self.manager.load() else None
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
        y = x.sum(1, keepdim=True)
        for step in range(self.state.step + 1, steps + 1):
            self.state.step = step
            self.optimizers.one.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), y).backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.one.step()
            self.schedulers.step()
            self.manager.save(step, last_step=last and step == steps)
        self.manager.maybe_wait_for_saving()
        self.manager.close()
        return resumed


if __name__ == "__main__":
    print("resumed from step", Trainer(Path(sys.argv[1]).resolve()).train(int(sys.argv[2])))
