"""`CheckpointManager(export=...)`: steps become other formats in the background of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ray_dcp
from ray_dcp import events
from ray_dcp.manager import (
    AtSteps,
    CheckpointManager,
    EveryMinutes,
    EverySteps,
    Item,
    LatestN,
    StepExport,
    step_export,
)
from ray_dcp.options import SaveOptions


def state(step: int) -> dict[str, Any]:
    return {
        "model.a": torch.full((40, 3), step + 0.1), "model.n": torch.arange(5) + step,
        "optimizer.a": torch.ones(4), "step": step,
    }  # fmt: skip


def manage(path: Path, **given: Any) -> CheckpointManager:
    return CheckpointManager(path / "run", chkpt_on_preemption=False, **given)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def heard():
    found: list[events.Event] = []
    unsubscribe = events.subscribe(
        lambda event: found.append(event) if event.name.startswith("export.") else None
    )
    yield found
    unsubscribe()


@pytest.fixture
def at_once(monkeypatch):
    """Exports do not wait for all that runs beside this test."""
    monkeypatch.setattr(step_export, "_NICE", 0)


def test_a_chosen_step_is_exported_with_the_options_of_export_while_retention_goes_on(
    tmp_path, heard, at_once
):
    # An earlier export of the step is replaced.
    (tmp_path / "hf" / "step-00000002").mkdir(parents=True)
    (tmp_path / "hf" / "step-00000002" / "old.safetensors").touch()
    items = {"model": Item(), "data": Item()}
    how: dict[str, Any] = {"include": ["model.*"], "dtype": "bf16", "strip_prefix": "model."}
    chosen = StepExport(path=tmp_path / "hf", policy=AtSteps(2), item="model", **how)
    with manage(tmp_path, items=items, retention=LatestN(1), export=chosen) as manager:
        for step in range(1, 4):
            manager.save_async(step, {"model": state(step), "data": {"at": step}})
    # The reader lease of the export is gone, and so is what retention lets go.
    with manage(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [3]
    (made,) = (tmp_path / "hf").iterdir()
    assert made.name == "step-00000002"
    assert not (made / "old.safetensors").exists()
    found = load_file(made / "model-00001-of-00001.safetensors")
    assert found["a"].equal(torch.full((40, 3), 2.1).bfloat16())
    assert found.keys() == {"a", "n"}
    assert [(event.name, Path(event.checkpoint_id).parent.name) for event in heard] == [
        ("export.exported", "step-00000002")
    ]


def test_a_run_that_goes_on_exports_what_the_end_of_the_last_one_prevented(tmp_path, at_once):
    def export(**given: Any) -> StepExport:
        return StepExport(path=tmp_path / "hf", policy=EverySteps(2), format="safetensors", **given)

    with manage(tmp_path) as manager:
        for step in (2, 4):
            manager.save(step, state(step))
    # As an export leaves it whose process was killed.
    (tmp_path / "hf" / ".ray-dcp-export" / "half").mkdir(parents=True)
    with manage(tmp_path, export=export(include=["model.*"])) as manager:
        manager.save(5, state(5))
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["step-00000004.safetensors"]
    file = tmp_path / "hf" / "step-00000004.safetensors"
    made = file.stat()
    with manage(tmp_path, export=export(), order="any") as manager:
        manager.save(5, state(5))
    assert file.stat() == made
    assert load_file(file).keys() == {"model.a", "model.n"}


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("exec sleep 600", "did not end within 3 s"),
        ("echo out of memory >&2; exit 1", "out of memory"),
        ('echo "$2" >&2; exit 1', "os.nice(10)"),
        ("exit 1", "ended with status 1"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_failed_export_leaves_the_run_alone_and_is_reported(
    tmp_path, heard, caplog, monkeypatch, program, told
):
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    # The timeout is that of the save too, which needs some time.
    item = Item(save_options=SaveOptions(write_timeout_s=3.0))
    chosen = StepExport(path=tmp_path, policy=EverySteps(1))
    with manage(tmp_path, item=item, export=chosen) as manager:
        assert manager.save(1, state(1))
    assert [event.name for event in heard] == ["export.failed"]
    assert told in heard[0].error
    assert heard[0].checkpoint_id == str(tmp_path / "run" / "step-00000001")
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert heard[0].error in record.getMessage()
    with manage(tmp_path) as manager:  # No reader lease is left.
        manager.delete(1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": "s3://bucket/hf"}, "path must be a folder of this machine"),
        ({"path": 7}, "path must be a folder"), ({"policy": 100}, "policy"),
        ({"policy": EveryMinutes(3)}, "must decide by the step alone"),
        ({"format": "onnx"}, "format must be one of safetensors, hf"),
        ({"include": "model.*"}, "must be a list"), ({"include": 7}, "must be a list"),
        ({"strip_prefix": None}, "must be a text"), ({"item": 1}, "must be a text"),
        ({"dtype": "int7"}, "must be one of"), ({"dtype": ["bf16"]}, "must be one of"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_when_it_is_made(given, told):
    with pytest.raises(ray_dcp.errors.InvalidRequestError, match=told):
        StepExport(**{"path": "hf", "policy": EverySteps(1), **given})


def test_a_manager_refuses_what_it_cannot_export(tmp_path):
    chosen = StepExport(path="x", policy=EverySteps(1))
    for given, told in (
        ({"export": "hf"}, "export must be a StepExport"),
        ({"export": chosen, "read_only": True}, "read_only managers save nothing"),
        ({"export": chosen, "items": {"ema": Item()}}, "'ema', but is ''"),
    ):
        with pytest.raises(ray_dcp.errors.InvalidRequestError, match=told):
            manage(tmp_path, **given)
