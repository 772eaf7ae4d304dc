"""Draws the screens of the README and of the pages: `python docs/make_images.py`.

Run by hand where a screen of the command line changed; the images are committed. The picture
`architecture.svg` is drawn by hand.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.manager import EverySteps

IMAGES = Path(__file__).parent / "images"


def draw_screen(name: str, commands: list[list[str]], run: str) -> None:
    """Draws what commands print on a terminal of 80 columns."""
    console = Console(record=True, width=80, file=io.StringIO())
    for arguments in commands:
        shown = " ".join(word.replace(run, "run") for word in arguments)
        console.print(Text(f"$ ray-dcp {shown}", style="bold"))
        done = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
        console.print(Text(done.output.replace(run, "run")))
    console.save_svg(str(IMAGES / f"{name}.svg"), title="ray-dcp")


def save_run(run: str) -> None:
    """Saves a few steps of a small model with metrics."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    with ray_dcp.CheckpointManager(run, save_policy=EverySteps(100)) as manager:
        for step in range(100, 501, 100):
            with torch.no_grad():
                model[0].weight += 0.01
            state = {"model": model, "lr": 3e-4, "step": step}
            manager.save(step, state, metrics={"loss": round(2.0 - step / 400, 3)})
        manager.tag(300, "before-lr-drop")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        run = f"{root}/run"
        save_run(run)
        draw_screen("ls", [["ls", run], ["diff", f"{run}@300", f"{run}@500"]], run)
