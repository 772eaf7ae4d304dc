"""PyTorch Lightning with checkpoints of ray_dcp: python lightning_trainer.py RUN EPOCHS."""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch

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
    found = sorted(run.glob("epoch=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    newest = found[-1] if found else None
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=newest)
    return model


if __name__ == "__main__":
    fit(Path(sys.argv[1]), int(sys.argv[2]))
