"""Exchange of safetensors files with DCP's Hugging Face classes and the `safetensors` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
from ray_dcp.errors import MissingKeyError, ShapeMismatchError
from ray_dcp.format.safetensors import ALL_CODES
from tests.support.exchange_cases import DTYPES, bits, blank, blanks, differences, layouts, raw

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",  # stock DCP's word for no_dist
    "ignore:ComplexHalf support is experimental:UserWarning",  # torch's word for complex32
    "ignore:TypedStorage is deprecated:UserWarning",  # stock DCP of torch 2.9, on every save
)

KNOWN = ("bfloat16", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
"""Dtypes that DCP's reader knows in safetensors files; it takes others for the default dtype."""


def saved_by_library(name: str) -> bool:
    """Whether the safetensors library can write any tensor of a dtype (of float4, not all)."""
    try:
        return bool(safetensors.torch.save({"x": bits(getattr(torch, name))}))
    except (
        KeyError, NotImplementedError, RuntimeError, ValueError, safetensors.SafetensorError,
    ):  # fmt: skip
        return False


SAVED = [name for name in DTYPES if saved_by_library(name)]


def export(path: Path, state: dict[str, Any], **options: Any) -> Path:
    """Saves a state; returns the folder of the safetensors files that are made of it."""
    ray_dcp.save(state, checkpoint_id=path / "a", no_dist=True)
    ray_dcp.dcp_to_safetensors(path / "a", path / "hf", **options)
    return path / "hf"


def load(path: Path, into: dict[str, Any], **options: Any) -> dict[str, Any]:
    chosen = ray_dcp.LoadOptions(**options)
    ray_dcp.load(into, checkpoint_id=path, no_dist=True, options=chosen)
    return into


def load_stock(folder: Path, into: dict[str, Any], **options: Any) -> dict[str, Any]:
    reader = stock.HuggingFaceStorageReader(str(folder), **options)
    stock.load(into, storage_reader=reader, no_dist=True)
    return into


def load_package(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors that the safetensors library finds in files that hold whole ones."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = safetensors.torch.load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


# Ours


@pytest.mark.parametrize("name", KNOWN)
def test_dcps_reader_and_the_safetensors_library_read_ours(tmp_path, name):
    state = layouts(getattr(torch, name))
    folder = export(tmp_path, state)
    assert differences(load_stock(folder, blanks(state)), state) == []
    assert differences(load_package(folder), state) == []
    assert differences(load(folder, blanks(state)), state) == []


@pytest.mark.parametrize("name", sorted(ALL_CODES))
def test_the_safetensors_library_reads_every_dtype_of_ours(tmp_path, name):
    state = {"matrix": bits(getattr(torch, name), 5, 7), "scalar": bits(getattr(torch, name))}
    assert differences(load_package(export(tmp_path, state)), state) == []


# Files of others


def test_the_safetensors_library_knows_all_that_is_put_into_its_files():
    assert {*KNOWN, "bool", "float8_e4m3fn", "complex64", "uint64"} <= set(SAVED)


@pytest.mark.parametrize("name", SAVED)
def test_files_of_the_safetensors_library_are_read(tmp_path, name):
    dtype = getattr(torch, name)
    state = {"matrix": bits(dtype, 5, 7), "scalar": bits(dtype), "empty": bits(dtype, 0, 3)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    assert differences(load(tmp_path, blanks(state)), state) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 2},
        {"fqn_to_index_mapping": {"a.w": 1, "b": 2, "empty": 2, "scalar": 1}},
        {"save_distributed": True},
    ],
)
def test_what_dcps_hugging_face_writer_saved_is_read(tmp_path, options):
    state = {
        "a": {"w": bits(torch.float32, 6, 5)},
        "b": bits(torch.bfloat16, 4, 3),
        "empty": bits(torch.float16, 0, 2),
        "scalar": bits(torch.int64),
    }
    writer = stock.HuggingFaceStorageWriter(str(tmp_path), **options)
    stock.save(state, storage_writer=writer, no_dist=True)
    assert differences(load(tmp_path, blanks(state)), state) == []


def test_plain_files_follow_the_rules_of_every_load(tmp_path):
    state = {"w": bits(torch.bfloat16, 2, 3)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(MissingKeyError, match="'v'"):
        load(tmp_path, {"v": torch.zeros(2, 3)})
    with pytest.raises(ShapeMismatchError, match="'w'"):
        load(tmp_path, {"w": torch.zeros(3, 2)})
    widened = load(tmp_path, {"w": torch.zeros(2, 3)})["w"]
    assert raw(widened) == raw(state["w"].float())
    untouched = {"v": torch.ones(1), "w": blank(state["w"])}
    assert load(tmp_path, untouched, strict=False)["v"].item() == 1
