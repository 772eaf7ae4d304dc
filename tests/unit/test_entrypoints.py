"""`save` and `load` as a single process calls them: arguments, warnings, reports, older forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from tests.support import checkpoints


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((3, 2), float(value)), "step": int(value)}


def test_every_public_name_is_there():
    assert [name for name in ray_dcp.__all__ if not hasattr(ray_dcp, name)] == []


def test_a_load_reports_what_it_did(tmp_path: Path):
    ray_dcp.save({**state(), "extra": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    report = ray_dcp.load(
        {"w": torch.zeros(3, 2, dtype=torch.float64), "step": 0, "lost": torch.zeros(1)},
        checkpoint_id=tmp_path / "c",
        options=ray_dcp.LoadOptions(strict=False),
    )
    assert (report.loaded, report.missing, report.unexpected) == (
        ("step", "w"), ("lost",), ("extra",),
    )  # fmt: skip
    assert report.cast == (("w", "float32", "float64"),)
    assert report.path == "native"
    assert report.bytes_read >= report.bytes_needed > 0


def test_the_storage_as_second_argument_works_and_warns(tmp_path: Path):
    with pytest.warns(FutureWarning, match="pass storage_writer by name"):
        ray_dcp.save(state(), ray_dcp.FileSystemWriter(tmp_path / "c"))
    found = state(0)
    with pytest.warns(FutureWarning, match="pass storage_reader by name"):
        ray_dcp.load(found, ray_dcp.FileSystemReader(tmp_path / "c"))
    assert found["step"] == 1
    with pytest.raises(ray_dcp.InvalidRequestError, match="more positional arguments"):
        ray_dcp.load(found, ray_dcp.FileSystemReader(tmp_path), ray_dcp.FileSystemReader(tmp_path))


def test_the_older_functions_work_and_do_not_ask_stateful_values(tmp_path: Path):
    saved, found = state(), state(0)
    with pytest.warns(FutureWarning, match="use ray_dcp.save"):
        ray_dcp.save_state_dict(saved, ray_dcp.FileSystemWriter(tmp_path / "c"))
    with pytest.warns(FutureWarning, match="use ray_dcp.load"):
        report = ray_dcp.load_state_dict(found, ray_dcp.FileSystemReader(tmp_path / "c"))
    assert torch.equal(found["w"], saved["w"])
    assert sorted(report.loaded) == ["step", "w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_use_collectives_false_is_a_checkpoint_like_any_other(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c", use_collectives=False)
    found = state(0)
    stock.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["step"] == 1


def test_the_outcome_of_a_save_is_told_by_its_attempt(tmp_path: Path):
    metadata = ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert ray_dcp.outcome(tmp_path / "c", metadata.attempt) == "committed"
    assert ray_dcp.outcome(tmp_path / "c", "0123456789abcdef") == "open"
    with pytest.raises(ray_dcp.InvalidRequestError, match="attempt"):
        ray_dcp.outcome(tmp_path / "c", "")


def test_keys_of_several_types_are_saved_and_loaded(tmp_path: Path):
    def state(value: float) -> dict[Any, Any]:
        return {7: torch.full((3,), value), "w": torch.full((2,), value), None: {"at": value}}

    ray_dcp.save(state(1.0), checkpoint_id=tmp_path / "ours", no_dist=True)
    with pytest.warns(UserWarning, match="single process"):
        stock.save(state(1.0), checkpoint_id=tmp_path / "stock", no_dist=True)
    for place in (tmp_path / "ours", tmp_path / "stock"):
        found = state(0.0)
        ray_dcp.load(found, checkpoint_id=place, no_dist=True)
        assert (found[7].tolist(), found["w"].tolist()) == ([1.0] * 3, [1.0] * 2)
        assert found[None] == {"at": 1.0}


# --- What is printed ------------------------------------------------------------------------------


MIB = 1 << 20


def large() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3 * MIB // 8)}  # 1.5 MiB


def path_of(text: str) -> str:
    return text.partition("'")[2].partition("'")[0] or "no path"


def test_the_reports_of_a_run_are_rounded_and_have_units(tmp_path: Path):
    handle = ray_dcp.async_save(large(), checkpoint_id=tmp_path / "run" / "step-1")
    handle.committed()
    path = str(tmp_path / "run" / "step-1")
    told = {
        "SaveReport": handle.report(),
        "SaveProgress": handle.progress,
        "LoadReport": ray_dcp.load(large(), checkpoint_id=path),
        "VerifyReport": ray_dcp.verify(path),
        "CheckpointView": ray_dcp.open(path),
        "ReshardPreview": ray_dcp.open_checkpoint(path).reshard(2),
        "AverageReport": ray_dcp.average([path, path], tmp_path / "mean"),
        "CollectReport": ray_dcp.collect(path, dry_run=True),
    }
    with ray_dcp.CheckpointManager(tmp_path / "managed", 1) as manager:
        manager.save(7, large())
        manager.join()
        told["RestoreReport"] = manager.restore("auto", large())
    for kind, report in told.items():
        text = repr(report)
        assert text.startswith(f"{kind}(")
        assert str(report) == text
        assert not re.search(r"\d{4,}|\d\.\d{3,}", text.replace(path_of(text), ""))
        assert ("1.5 MiB" in text) == (kind != "CollectReport")
    assert re.fullmatch(
        r"SaveReport\(rank 0, native, process, cold plan, 1\.5 MiB staged, 1\.5 MiB written, stall "
        r"\S+ m?s; capture \S+ m?s, plan \S+ m?s, stage \S+ m?s, write \S+ m?s, commit \S+ m?s\)",
        repr(told["SaveReport"]),
    )
    assert repr(told["SaveProgress"]) == "SaveProgress(committed, 1.5 MiB of 1.5 MiB)"
    assert repr(told["VerifyReport"]) == "VerifyReport(ok, 1.5 MiB checked)"
    assert "step 7, " in repr(told["RestoreReport"])


def test_a_report_of_damage_names_the_damage(tmp_path: Path):
    ray_dcp.save(large(), checkpoint_id=tmp_path)
    file = checkpoints.data_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    text = repr(ray_dcp.verify(tmp_path))
    assert text.startswith(f"VerifyReport(damaged: {file.name} bytes [")
    assert "ok" not in text


@pytest.mark.parametrize("fails", [False, True])
def test_a_handle_names_its_checkpoint_and_how_far_it_is(fails: bool, tmp_path: Path):
    place = tmp_path / "step-1"
    if fails:
        place.write_text("a file where the checkpoint should be")
    handle = ray_dcp.async_save(large(), checkpoint_id=place)
    assert repr(handle).startswith(f"<SaveHandle {str(place)!r}: ")
    error = handle.exception()
    ended = "committed" if error is None else f"failed: {type(error).__name__}"
    assert repr(handle) == f"<SaveHandle {str(place)!r}: {ended}>"
    assert (error is not None) == fails
