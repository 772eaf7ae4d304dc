"""The Hugging Face Trainer with a manager of ray_dcp: python hf_trainer.py RUN STEPS."""

import sys
from pathlib import Path

import torch
import transformers

from ray_dcp import CheckpointManager
from ray_dcp.integrations.hf import RayDcpCallback
from ray_dcp.manager import BestN, LatestN


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def fit(run: Path, max_steps: int, **callback):
    """Trains from the newest step in `run`, or from the start; returns the Trainer and the run."""
    torch.manual_seed(1)
    x = torch.randn(16, 4)
    items = [{"x": one, "labels": one.sum().reshape(1)} for one in x]
    arguments = transformers.TrainingArguments(
        output_dir=str(run / "trainer"),
        max_steps=max_steps,
        save_strategy="no",  # the manager says when
        eval_strategy="steps",
        eval_steps=1,
        per_device_train_batch_size=16,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    keep = LatestN(2) | BestN(1, "eval_loss")
    with CheckpointManager(run, 2, retention=keep, chkpt_on_preemption=False) as manager:
        resumed = RayDcpCallback(manager, **callback)
        trainer = transformers.Trainer(
            model=Model(),
            args=arguments,
            train_dataset=items,
            eval_dataset=items,
            callbacks=[resumed],
        )
        trainer.train()
        return trainer, resumed, manager.all_steps()


if __name__ == "__main__":
    fit(Path(sys.argv[1]), int(sys.argv[2]))
