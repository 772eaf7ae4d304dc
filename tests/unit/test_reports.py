"""What a person sees of a result that is printed: rounded, in units, and which checkpoint."""

from __future__ import annotations

import gc
import logging
import re
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

import ray_dcp
from tests.support import checkpoints

MIB = 1 << 20


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3 * MIB // 8)}  # 1.5 MiB


def path_of(text: str) -> str:
    return text.partition("'")[2].partition("'")[0] or "no path"


def test_the_reports_of_a_run_are_rounded_and_have_units(tmp_path: Path):
    handle = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "run" / "step-1")
    handle.committed()
    path = str(tmp_path / "run" / "step-1")
    told = {
        "SaveReport": handle.report(),
        "SaveProgress": handle.progress,
        "LoadReport": ray_dcp.load(state(), checkpoint_id=path),
        "VerifyReport": ray_dcp.verify(path),
        "CheckpointView": ray_dcp.open(path),
        "ReshardPreview": ray_dcp.open_checkpoint(path).reshard(2),
        "AverageReport": ray_dcp.average([path, path], tmp_path / "mean"),
        "CollectReport": ray_dcp.collect(path, dry_run=True),
    }
    with ray_dcp.CheckpointManager(tmp_path / "managed", 1) as manager:
        manager.save(7, state())
        manager.join()
        told["RestoreReport"] = manager.restore("auto", state())
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
    ray_dcp.save(state(), checkpoint_id=tmp_path)
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
    handle = ray_dcp.async_save(state(), checkpoint_id=place)
    assert repr(handle).startswith(f"<SaveHandle {str(place)!r}: ")
    error = handle.exception()
    ended = "committed" if error is None else f"failed: {type(error).__name__}"
    assert repr(handle) == f"<SaveHandle {str(place)!r}: {ended}>"
    assert (error is not None) == fails


def test_to_print_a_handle_of_a_failed_save_does_not_hide_its_error(
    tmp_path: Path,
):
    place = tmp_path / "step-1"
    place.write_text("a file")
    handle = ray_dcp.async_save(state(), checkpoint_id=place)
    wait([handle.upload_completion])
    records: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = records.append
    logging.getLogger("ray_dcp").addHandler(listener)
    try:
        assert "failed" in repr(handle)
        del handle
        gc.collect()
    finally:
        logging.getLogger("ray_dcp").removeHandler(listener)
    assert ["nobody asked its handle" in one.getMessage() for one in records] == [True]
