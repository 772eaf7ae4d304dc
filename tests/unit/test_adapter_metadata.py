"""A committed metadata is torch's, but is read only when somebody looks."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)

import ray_dcp
from ray_dcp.core.values import ChunkTable
from ray_dcp.errors import StorageError
from ray_dcp.torch_adapter.capture import capture
from ray_dcp.torch_adapter.results import CommittedMetadata, LoadReport, metadata_of

from .adapter_support import stored, table_of

STATE = {"m": {"w": torch.ones(2, 3).bfloat16(), "s": torch.tensor(1)}, "x": [1, 2]}


@cache
def table() -> ChunkTable:
    return table_of(stored(capture(STATE, rank=0, world_size=1)))


class Loads:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Metadata:
        self.calls += 1
        return metadata_of(table(), checkpoint_id="/c")


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


def test_nothing_is_read_before_a_field_is_looked_at_and_then_once() -> None:
    loads = Loads()
    metadata = CommittedMetadata.lazy(loads, attempt="a1", slot=3)
    assert isinstance(metadata, Metadata)
    assert (metadata.attempt, metadata.slot) == ("a1", 3)
    assert loads.calls == 0
    threads = [threading.Thread(target=lambda: metadata.version) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metadata.version == "1.0.0"
    assert metadata.planner_data is not None
    assert loads.calls == 1


def test_it_equals_torchs_metadata_from_both_sides_and_pickles_as_one() -> None:
    lazy, plain = CommittedMetadata.lazy(Loads()), Loads()()
    assert lazy == plain
    assert plain == lazy
    assert lazy != dataclasses.replace(plain, version="2")
    assert lazy != 5
    data = pickle.dumps(CommittedMetadata.lazy(Loads()))
    assert type(pickle.loads(data)) is Metadata
    assert pickle.loads(data) == plain
    assert b"ray_dcp" not in data


def test_a_failed_read_is_told_and_tried_again() -> None:
    answers: list[Any] = [StorageError("gone"), Loads()()]

    def load() -> Metadata:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    metadata = CommittedMetadata.lazy(load)
    with pytest.raises(StorageError, match="gone"):
        _ = metadata.storage_data
    assert metadata.storage_data


def test_the_report_has_the_names_of_load_state_dict_too() -> None:
    report = LoadReport(loaded=("w",), missing=("a",), unexpected=("b",), cast=())
    assert (report.missing_keys, report.unexpected_keys) == (["a"], ["b"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loaded = ()  # type: ignore[misc]


def test_the_report_of_a_large_model_is_one_line() -> None:
    names = tuple(f"model.layers.{number}.weight" for number in range(500))
    told = repr(LoadReport(loaded=names, missing=("a",), unexpected=names, cast=(), step=7))
    assert "500 loaded, 1 missing (a), 500 unexpected (model.layers.0.weight, " in told
    assert len(told) < 200
