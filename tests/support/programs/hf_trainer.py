"""A Hugging Face Trainer whose run can be stopped at a step, for comparisons of what is logged.

Run as `python -m tests.support.programs.hf_trainer FOLDER STOP` on each rank: trains undisturbed in
`FOLDER/whole`, and in `FOLDER/run` until a SIGKILL at step `STOP`; without `STOP`, goes on there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from ray_dcp import CheckpointManager
from ray_dcp.integrations.hf import RayDcpCallback
from ray_dcp.manager import BestN, LatestN


class Noisy(torch.nn.Module):
    """Its training draws random numbers, and its evaluation loss goes up and down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


class StopAtStep(transformers.TrainerCallback):
    """Ends training at the end of a step: by an error, or with the process."""

    def __init__(self, step: int, *, kills: bool) -> None:
        self.step, self.kills = step, kills

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise InterruptedError


class OutOfMemoryAtStep(transformers.TrainerCallback):
    """Fails as a full memory does, as long as batches have 4 samples.

    `TrainingArguments(auto_find_batch_size=True)` begins the loop again with smaller batches.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        if state.global_step == self.step and loader.total_batch_size == 4:
            raise RuntimeError("CUDA out of memory.")


def made(
    folder: Path,
    manager: CheckpointManager,
    *others: transformers.TrainerCallback,
    callback: RayDcpCallback | None = None,
    **arguments: Any,
) -> transformers.Trainer:
    """Returns a Trainer on 40 samples in batches of 4, as a fresh process makes it.

    One process stops early at step 12: the best evaluation is that of step 6.
    """
    transformers.set_seed(7)
    x = torch.randn(40, 4)
    items = [{"x": one, "labels": one.sum().reshape(1)} for one in x]
    given = {
        "max_steps": 24,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "use_cpu": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "report_to": [],
        "disable_tqdm": True,
        **arguments,
    }
    return transformers.Trainer(
        model=Noisy(),
        args=transformers.TrainingArguments(output_dir=str(folder / "trainer"), **given),
        train_dataset=items,
        eval_dataset=items[:12],
        callbacks=[
            RayDcpCallback(manager) if callback is None else callback,
            transformers.EarlyStoppingCallback(early_stopping_patience=3),
            *others,
        ],
    )


def kept(**more: Any) -> dict[str, Any]:
    """Returns arguments of a manager that keeps the best step and two of the newest."""
    retention = LatestN(2) | BestN(1, "eval_loss")
    return {"retention": retention, "chkpt_on_preemption": False, **more}


def numbers_of(trainer: transformers.Trainer) -> dict[str, Any]:
    """Returns all that a Trainer has logged, and its best step, without timings."""
    timed = ("_runtime", "_per_second")
    log = [
        {name: value for name, value in one.items() if not name.endswith(timed)}
        for one in trainer.state.log_history
    ]
    state = trainer.state
    return {
        "log": log,
        "best": (state.best_metric, state.best_global_step),
        "step": state.global_step,
        "epoch": state.epoch,
        "flos": state.total_flos,
        "weights": [one.tolist() for one in trainer.model.parameters()],
    }


def main(folder: Path, stop: int | None) -> None:
    """Trains on each rank."""

    def fit(name: str, *others: transformers.TrainerCallback) -> None:
        with CheckpointManager(folder / name, 2, **kept()) as manager:
            trainer = made(folder / name, manager, *others)
            trainer.train()
            (folder / f"{name}-{trainer.args.process_index}.json").write_text(
                json.dumps(numbers_of(trainer))
            )

    if stop is not None:
        fit("whole")
        fit("run", StopAtStep(stop, kills=True))
    fit("run")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
