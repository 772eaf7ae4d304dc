"""A committed metadata is torch's, but is read only when somebody looks."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ray_dcp.errors import StorageError
from ray_dcp.format.metadata import encode_metadata
from ray_dcp.torch_adapter.capture import capture
from ray_dcp.torch_adapter.lazy_metadata import CommittedMetadata, metadata_of_table
from ray_dcp.torch_adapter.load_report import LoadReport

from .adapter_support import stored

REPOSITORY = Path(__file__).parents[2]


def table() -> Any:
    state = {"m": {"w": torch.ones(2, 3).bfloat16(), "s": torch.tensor(1)}, "x": [1, 2]}
    return stored(capture(state, rank=0, world_size=1))[0]


class Loads:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Metadata:
        self.calls += 1
        return metadata_of_table(table(), checkpoint_id="/c")


def test_the_fields_are_those_that_torch_would_have_written() -> None:
    metadata = metadata_of_table(table(), checkpoint_id="/c")
    assert list(metadata.state_dict_metadata) == ["m.w", "m.s", "x"]
    tensor = metadata.state_dict_metadata["m.w"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.properties.dtype == torch.bfloat16
    assert tensor.size == torch.Size([2, 3])
    assert tensor.chunks == [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))]
    scalar = metadata.state_dict_metadata["m.s"]
    assert scalar.chunks == [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    assert metadata.state_dict_metadata["x"] == BytesStorageMetadata()
    assert metadata.planner_data == {"m.w": ("m", "w"), "m.s": ("m", "s"), "x": ("x",)}
    place = metadata.storage_data[MetadataIndex("m.w", torch.Size([0, 0]))]
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 0, 12)
    assert MetadataIndex("x") in metadata.storage_data
    assert metadata.storage_meta.checkpoint_id == "/c"


def test_it_is_what_the_stored_metadata_unpickles_to() -> None:
    written = pickle.loads(encode_metadata(table(), checkpoint_id="/c", attempt="a1"))
    built = metadata_of_table(table(), checkpoint_id="/c")
    for field in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(written, field) == getattr(built, field), field


def test_an_unflattened_checkpoint_has_no_planner_data() -> None:
    captured = capture({"w": torch.ones(1)}, rank=0, world_size=1, flatten_state_dict=False)
    assert metadata_of_table(stored(captured)[0]).planner_data is None


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


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Metadata)])
def test_every_field_can_be_the_first(field: str) -> None:
    expected = getattr(Loads()(), field)
    assert getattr(CommittedMetadata.lazy(Loads()), field) == expected
    assert expected is not None


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
    program = (
        "import pickle, sys; m = pickle.loads(sys.stdin.buffer.read()); "
        "assert not any(name.startswith('ray_dcp') for name in sys.modules); print(m.version)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True,
                          cwd=REPOSITORY, check=True)  # fmt: skip
    assert done.stdout.strip() == b"1.0.0"


def test_fields_can_be_replaced_and_set() -> None:
    metadata = dataclasses.replace(CommittedMetadata.lazy(Loads()), version="2")
    assert metadata.version == "2"
    assert list(metadata.state_dict_metadata) == ["m.w", "m.s", "x"]
    lazy = CommittedMetadata.lazy(Loads())
    lazy.version = "3"
    assert lazy.planner_data is not None
    assert lazy.version == "3"
    assert "m.w" in repr(lazy)


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


def test_chunks_of_a_table_become_chunks_of_their_tensor_in_order() -> None:
    one = table()
    twice = dataclasses.replace(
        one,
        **{
            name: np.concatenate([getattr(one, name), getattr(one, name)[:1]])
            for name in ("tensor", "offset", "size", "file", "item_offset", "item_bytes")
        },
    )
    metadata = metadata_of_table(twice)
    assert len(metadata.state_dict_metadata["m.w"].chunks) == 2
