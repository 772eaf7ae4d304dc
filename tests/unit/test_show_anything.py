"""`show` of a path that one was given says what it is, who wrote it, whether it is whole, and how
to load it: three lines that run as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import ray_dcp
from ray_dcp.cli.main import main
from tests.support import checkpoints, cli_story


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def shown(path: object, code: int = 0) -> str:
    found = CliRunner().invoke(main, ["show", str(path)], env={"COLUMNS": None})
    assert found.exit_code == code, found.output
    return found.output


def run_code(text: str, **given: Any) -> dict[str, Any]:
    """Runs the lines that `show` printed, with the objects that they name."""
    lines = [line.strip() for line in text.partition("\nto load")[2].splitlines()[1:]]
    assert len(lines) == 3
    names = dict(given)
    exec("\n".join(lines), names)
    return names


def ours(root: Path) -> Path:
    state = {"model": model_of(7), "step": 5, "note": "x" * 80, "rate": float("inf")}
    ray_dcp.save(state, checkpoint_id=root / "given")
    return root / "given"


def flat(root: Path) -> Path:
    ray_dcp.save(model_of(7).state_dict(), checkpoint_id=root / "given")
    return root / "given"


def stock(root: Path) -> Path:
    return checkpoints.save_stock(root / "given", {"model": model_of(7).state_dict(), "step": 5})


def hub(root: Path) -> Path:
    (root / "given").mkdir()
    save_file(model_of(7).state_dict(), root / "given" / "model.safetensors")
    config = {"architectures": ["Tiny"], "transformers_version": "4.46.0"}
    (root / "given" / "config.json").write_text(json.dumps(config))
    return root / "given"


def tensors(root: Path) -> Path:
    ray_dcp.save({"model": model_of(7), "w": torch.ones(2, 3)}, checkpoint_id=root / "given")
    return root / "given"


def run(root: Path) -> Path:
    for step in (9, 10):
        ray_dcp.save({"model": model_of(step - 3)}, checkpoint_id=root / "given" / f"step-{step}")
    return root / "given"


def runs(root: Path) -> Path:
    run(root / "given" / "a")
    return root / "given"


def managed(root: Path) -> Path:
    with ray_dcp.CheckpointManager(root / "given", 1) as manager:
        manager.save(1, {"model": model_of(7)}, metrics={"loss": 0.5})
        manager.join()
    return root / "given"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (ours, "a checkpoint of ray_dcp, saved by 1 rank"),
        (flat, "a checkpoint of ray_dcp, saved by 1 rank"),
        (stock, "a checkpoint of torch.distributed.checkpoint, saved by 1 rank"),
        (hub, "a Hugging Face model Tiny in safetensors, written by transformers 4.46.0"),
        (tensors, "a checkpoint of ray_dcp"),
        (run, "a run of 2 checkpoints"),
        (runs, "a run of 2 checkpoints"),
        (managed, "a run of 1 checkpoint, "),
    ],
)
def test_the_lines_that_load_it_run_as_they_are(
    make: Callable[[Path], Path], what: str, tmp_path: Path
):
    text = shown(make(tmp_path))
    assert what in text.splitlines()[0]
    assert "none missing or too short" in text or "committed" in text
    assert len(text.splitlines()) <= 24
    model = model_of(0)
    run_code(text, model=model)
    assert all((parameter == 7).all() for parameter in model.parameters())


def test_a_step_of_items_names_them_and_loads_one(tmp_path: Path):
    from ray_dcp.manager import Item

    with ray_dcp.CheckpointManager(tmp_path, items={"a": Item(), "b": Item()}) as manager:
        manager.save(3, {name: {"model": model_of(7)} for name in "ab"})
        manager.join()
    text = shown(tmp_path / "step-00000003")
    assert "a step of the items a, b" in text
    model = model_of(0)
    run_code(text, model=model)
    assert (model.weight == 7).all()


def test_what_is_not_whole_is_said_with_how(tmp_path: Path):
    run = tmp_path / "run"
    cli_story.make_ours(run)
    checkpoints.data_file(run / "step-00000200").unlink()
    text = shown(run)
    assert "1 committed, 1 damaged, 1 in flight" in text
    assert "newest that is whole: step-00000100" in text
    assert "step-00000200: damaged: " in text
    text = shown(run / "step-00000200", 1)
    assert "damaged: " in text
    assert "to load" not in text


@pytest.mark.parametrize("place", ["data file", "metadata", "pickle", "folder of pickles"])
def test_what_is_no_checkpoint_is_told_with_the_way_out(place: str, tmp_path: Path):
    found = stock(tmp_path)
    torch.save({}, tmp_path / "w.pt")
    path, hint = {
        "data file": (checkpoints.data_file(found), f"of the checkpoint in {found}: give that"),
        "metadata": (found / ".metadata", f"of the checkpoint in {found}: give that"),
        "pickle": (tmp_path / "w.pt", "convert it with ray-dcp import"),
        "folder of pickles": (tmp_path / "p", f"ray-dcp import {tmp_path}/p/model.bin TARGET"),
    }[place]
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model.bin").touch()
    assert hint in shown(path, 2)
