"""The metadata that a save returns is torch's, but is read only when somebody looks; its report."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

import ray_dcp

STATE = {"m": {"w": torch.ones(2, 3).bfloat16(), "s": torch.tensor(1)}, "x": [1, 2]}


@pytest.mark.parametrize("flatten", [True, False])
def test_a_save_returns_what_torch_reads(tmp_path: Path, flatten: bool) -> None:
    planner = ray_dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    made = ray_dcp.save(STATE, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert made == pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    if not flatten:
        assert made.planner_data is None
        return
    tensor = made.state_dict_metadata["m.w"]
    assert tensor.properties.dtype == torch.bfloat16
    assert tensor.chunks == [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))]
    assert made.state_dict_metadata["x"] == BytesStorageMetadata()
    assert made.planner_data == {"m.w": ("m", "w"), "m.s": ("m", "s"), "x": ("x",)}


def test_nothing_is_read_before_a_field_is_looked_at_and_then_once(tmp_path: Path) -> None:
    place, away = tmp_path / "c", tmp_path / "away"
    metadata = ray_dcp.save(STATE, checkpoint_id=place, no_dist=True)
    shutil.move(place, away)
    assert isinstance(metadata, Metadata)
    with pytest.raises(ray_dcp.CheckpointError):
        _ = metadata.storage_data
    shutil.move(away, place)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(metadata.storage_data)) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(place)
    assert all(one is metadata.storage_data for one in found)
    assert metadata.planner_data is not None


def test_it_equals_torchs_metadata_from_both_sides_and_pickles_as_one(tmp_path: Path) -> None:
    lazy = ray_dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    plain = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert lazy == plain
    assert plain == lazy
    assert lazy != dataclasses.replace(plain, version="2")
    assert lazy != 5
    data = pickle.dumps(ray_dcp.save(STATE, checkpoint_id=tmp_path / "b", no_dist=True))
    assert type(pickle.loads(data)) is Metadata
    assert b"ray_dcp" not in data


def test_the_report_is_frozen_in_one_line_with_the_names_of_load_state_dict_too() -> None:
    names = tuple(f"model.layers.{number}.weight" for number in range(500))
    report = ray_dcp.LoadReport(loaded=names, missing=("a",), unexpected=names, cast=(), step=7)
    assert (report.missing_keys, report.unexpected_keys) == (["a"], list(names))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loaded = ()  # type: ignore[misc]
    assert "500 loaded, 1 missing (a), 500 unexpected (model.layers.0.weight, " in repr(report)
    assert len(repr(report)) < 200
