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


def test_chosen_steps_are_exported_as_export_does_while_retention_goes_on(tmp_path, heard):
    how: dict[str, Any] = {"include": ["model.*"], "dtype": "bf16", "strip_prefix": "model."}
    chosen = StepExport(path=tmp_path / "hf", policy=AtSteps(2, 4), **how)
    with manage(tmp_path, retention=LatestN(1), export=chosen) as manager:
        for step in range(1, 5):
            assert (manager.save if step < 3 else manager.save_async)(step, state(step))
    # The reader leases of the exports are gone, and so is what retention lets go.
    with manage(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [4]
    names = ["step-00000002", "step-00000004"]
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == names
    found = load_file(tmp_path / "hf" / names[0] / "model-00001-of-00001.safetensors")
    assert found["a"].equal(torch.full((40, 3), 2.1).bfloat16())
    ray_dcp.export(tmp_path / "run" / names[1], tmp_path / "alone", "hf", **how)
    assert files_of(tmp_path / "hf" / names[1]) == files_of(tmp_path / "alone")
    assert [(event.name, Path(event.checkpoint_id).name) for event in heard] == [
        ("export.exported", name) for name in names
    ]


def test_a_run_that_goes_on_exports_what_the_end_of_the_last_one_prevented(tmp_path):
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
    # A step that is saved again is exported again.
    with manage(tmp_path, export=export(), order="any") as manager:
        manager.save(4, state(40))
    assert load_file(file)["model.a"][0, 0] == torch.tensor(40.1)


def test_a_failed_export_leaves_the_run_alone_and_is_reported(tmp_path, heard, caplog, monkeypatch):
    def run(name: str, item: Item | None = None, **given: Any) -> events.Event:
        chosen = StepExport(**{"path": tmp_path / "hf", "policy": EverySteps(1), **given})
        caplog.clear()
        with manage(tmp_path / name, export=chosen, item=item) as manager:
            assert manager.save(1, state(1))
            manager.join()
            assert manager.latest_step() == 1
        (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert heard[-1].name == "export.failed"
        assert heard[-1].error in record.getMessage()
        return heard[-1]

    event = run("a", include=["nothing.*"])
    assert "InvalidRequestError: expected names that match 'nothing.*'" in event.error
    assert event.checkpoint_id == str(tmp_path / "a" / "run" / "step-00000001")
    assert list((tmp_path / "hf").iterdir()) == []
    # A process that hangs is ended. The timeout is that of the save too, which needs some time.
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(hanging))
    soon = Item(save_options=SaveOptions(write_timeout_s=3.0))
    assert "did not end within 3 s" in run("b", item=soon).error
    assert len(heard) == 2


@pytest.mark.parametrize(
    ("program", "told"),
    [("/bin/false", "ended with status 1"), ("/bin/nothing", "FileNotFoundError"), ("", "Error")],
)
def test_a_process_that_ends_at_once_leaves_the_run_alone(
    tmp_path, heard, monkeypatch, program, told
):
    monkeypatch.setattr("sys.executable", program)
    with manage(tmp_path, export=StepExport(path=tmp_path, policy=EverySteps(1))) as manager:
        assert manager.save(1, state(1))
        assert manager.save_async(2, state(2))
    assert [event.name for event in heard] == ["export.failed"] * 2
    assert told in heard[0].error
    # No reader lease is left.
    with manage(tmp_path) as manager:
        manager.delete(1)
        assert manager.all_steps() == [2]


def test_an_item_of_a_step_is_exported(tmp_path):
    items = {"model": Item(), "ema": Item()}
    chosen = StepExport(
        path=tmp_path / "out", policy=EverySteps(1), item="ema", format="torch", dtype="fp32"
    )
    with manage(tmp_path, items=items, export=chosen) as manager:
        manager.save(3, {"model": state(3), "ema": {"w": torch.ones(2).double()}})
    found = torch.load(tmp_path / "out" / "step-00000003.pt")
    assert found["w"].equal(torch.ones(2))
    with pytest.raises(ray_dcp.errors.InvalidRequestError, match="'ema', 'model', but is ''"):
        manage(tmp_path, items=items, export=StepExport(path="x", policy=EverySteps(1)))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": "s3://bucket/hf"}, "path must be a folder of this machine"),
        ({"path": 7}, "path must be a folder"),
        ({"policy": EveryMinutes(3)}, "must decide by the step alone"),
        ({"policy": 100}, "policy"),
        ({"format": "onnx"}, "format must be one of safetensors, hf"),
        ({"include": "model.*"}, "include must be a list"),
        ({"include": 7}, "include must be a list"),
        ({"strip_prefix": None}, "strip_prefix must be a text"),
        ({"item": 1}, "item must be a text"),
        ({"dtype": "int7"}, "dtype must be one of"),
        ({"dtype": ["bf16"]}, "dtype must be one of"),
    ],
)
def test_a_wrong_field_is_refused_when_it_is_made(given, told):
    with pytest.raises(ray_dcp.errors.InvalidRequestError, match=told):
        StepExport(**{"path": "hf", "policy": EverySteps(1), **given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"export": "hf"}, "export must be a StepExport"),
        (
            {"export": StepExport(path="x", policy=EverySteps(1)), "read_only": True},
            "read_only managers save nothing",
        ),
    ],
)
def test_a_manager_refuses_what_it_cannot_export(tmp_path, given, told):
    with pytest.raises(ray_dcp.errors.InvalidRequestError, match=told):
        manage(tmp_path, **given)
