"""PyTorch Lightning with checkpoints of ray_dcp: python lightning_trainer.py RUN EPOCHS."""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

import ray_dcp
from ray_dcp.integrations.lightning import RayDcpCheckpointIO


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def newest(run: Path) -> Path | None:
    """The newest epoch that is committed, or a file that Lightning saved itself."""
    try:  # A save that was cut off leaves a folder without a checkpoint.
        steps = ray_dcp.open_run(run).steps
    except ray_dcp.CheckpointNotFoundError:
        steps = ()
    committed = {step.name for step in steps if step.state == "committed"}
    found = [one for one in run.glob("epoch=*.ckpt") if one.is_file() or one.name in committed]
    return max(found, key=lambda path: int(path.stem[6:]), default=None)


def fit(run: Path, epochs: int, *, in_background: bool = True) -> Regression:
    """Trains from the newest epoch in `run`, or from the start; keeps the last two."""
    pl.seed_everything(1, verbose=False)
    x = torch.randn(32, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    keep = pl.callbacks.ModelCheckpoint(
        dirpath=run, filename="{epoch}", save_top_k=2, monitor="epoch", mode="max"
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        plugins=[RayDcpCheckpointIO(in_background=in_background)],
        callbacks=[keep],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=newest(run))
    return model


if __name__ == "__main__":
    fit(Path(sys.argv[1]), int(sys.argv[2]))
