"""Trains by Lightning with everything that its checkpoints hold, and writes down what it logs.

    python -m tests.support.programs.lightning_fit RUN EPOCHS LOG [STEP]

STEP is where the process kills itself, as a machine that is lost. Ranks, as torchrun starts them,
train together by DDP, and the last one kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers.logger import Logger

from ray_dcp.integrations.lightning import RayDcpCheckpointIO


class Written(Logger):
    """Writes each call of a trainer as a line: the step, and its numbers."""

    name = version = "written"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self._path.open("a") as file:
            print(json.dumps([step, metrics]), file=file)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """See `Logger`."""


class Model(pl.LightningModule):
    def __init__(self, width: int = 3, kill_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        # Careful: a bias before a batch norm has a gradient of rounding errors alone, of which Adam
        # makes whole steps.
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width, bias=False),
            torch.nn.BatchNorm1d(width),
            torch.nn.Linear(width, 1),
        )
        self.kill_at = kill_at
        self.seen: dict[Any, Any] = {}

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        if self.kill_at == self.global_step:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.seen[self.current_epoch] = (loss.detach(), self.global_step)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A structure without names: numbers as keys, and tensors in tuples.
        checkpoint["seen"] = dict(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = dict(checkpoint["seen"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


def newest(run: Path) -> Path | None:
    """Returns the newest checkpoint of a run."""
    found = sorted(run.glob("epoch=*"), key=lambda path: int(path.stem.partition("=")[2]))
    return found[-1] if found else None


def fit(
    run: Path, epochs: int, log: Path, *, kill_at: int | None = None, io: Any = None
) -> tuple[pl.Trainer, Model]:
    """Trains from the newest epoch in `run`, or from the start."""
    pl.seed_everything(1, verbose=False)
    x = torch.randn(24, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = Model(kill_at=kill_at)
    best = ModelCheckpoint(
        dirpath=run, filename="{epoch}", monitor="val_loss", save_top_k=-1, save_last=False
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        plugins=[RayDcpCheckpointIO() if io is None else io],
        callbacks=[best, EarlyStopping("val_loss", patience=2, min_delta=10.0)],
        logger=Written(log),
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    # Why: the last bit of a sum depends on their number.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer.fit(model, loader, loader, ckpt_path=newest(run))
    finally:
        torch.set_num_threads(num_threads)
    return trainer, model


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run, epochs, log, *rest = sys.argv[1:]
    if "RANK" in os.environ:
        os.environ.update(LOCAL_RANK=os.environ["RANK"], TORCHELASTIC_RUN_ID="none")
    is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    trainer, model = fit(
        Path(run), int(epochs), Path(log), kill_at=int(rest[0]) if rest and is_last else None
    )
    torch.save(model.state_dict(), f"{log}.{trainer.global_rank}")
