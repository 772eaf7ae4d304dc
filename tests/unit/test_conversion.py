"""Checkpoints into other formats and back: right, whole, streaming, and refusing what is wrong."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file
from torch.distributed.checkpoint import format_utils as stock_utils

import ray_dcp
from ray_dcp.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidRequestError,
    MissingKeyError,
    ShapeMismatchError,
    StateDictError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from tests.support.programs.forks import Programs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).view(3, 2), "half": torch.ones(3).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}, 1: {}}, "groups": [{"lr": 0.1}]},
        "pair": (1, torch.full((2,), 5)),
        "empty": torch.zeros(0, 3),
        "step": 3,
    }


SAVERS: dict[str, Callable[..., Any]] = {
    "ours": lambda it, path: ray_dcp.save(it, checkpoint_id=path),
    "stock": lambda it, path: stock.save(it, checkpoint_id=path, no_dist=True),
}


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


def test_a_reader_of_the_users_is_read_too(tmp_path: Path):
    class Reader(stock.FileSystemReader):
        pass

    stock.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    found = ray_dcp.read_state_dict(storage_reader=Reader(tmp_path / "c"), include=["model.w"])
    assert same(found, {"model": {"w": state()["model"]["w"]}})


# --- torch.save files ---------------------------------------------------------------------------


def test_numbers_as_keys_survive_both_ways(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "d")
    for name in ("c", "d"):
        found = ray_dcp.read_state_dict(tmp_path / name)
        assert same(found["optimizer"], state()["optimizer"])
    assert set(torch.load(tmp_path / "a.pt")["optimizer"]["state"]) == {0, 1}


def test_objects_that_look_at_their_tensors_when_they_are_built(tmp_path: Path):
    state = {"w": torch.ones(3), "rng": torch.Generator().manual_seed(3), "in": [(torch.ones(2),)]}
    expected = state["rng"].get_state()
    ray_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=False)
    assert torch.equal(found["rng"].get_state(), expected)
    assert found["in"][0][0].tolist() == [1.0, 1.0]
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "d")
    assert torch.equal(ray_dcp.read_state_dict(tmp_path / "d")["rng"].get_state(), expected)


def test_a_part_under_other_names_and_of_another_dtype(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    how: dict[str, Any] = {
        "include": ["model.*", "optimizer.state.0.*", "step"],
        "key_map": [(r"^model\.", "net.")],
        "dtype": torch.float64,
    }
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt", **how)
    found = torch.load(tmp_path / "a.pt")
    assert found["net"]["w"].dtype == found["net"]["half"].dtype == torch.float64
    assert torch.equal(found["net"]["w"], state()["model"]["w"].double())
    assert found["optimizer"]["state"][0]["step"].item() == 7
    assert set(found) == {"net", "optimizer", "step"}
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    torch.save(state(), tmp_path / "all.pt")
    ray_dcp.torch_save_to_dcp(tmp_path / "all.pt", tmp_path / "d", **how)
    again = ray_dcp.read_state_dict(tmp_path / "d")
    assert again["net"]["half"].dtype == torch.float64
    assert again["step"] == 3


def test_a_large_checkpoint_takes_little_memory(tmp_path: Path, programs: Programs):
    program = """
import sys, torch, ray_dcp
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
root = sys.argv[1]
ray_dcp.dcp_to_torch_save(f"{root}/small", f"{root}/small.pt")
before = anonymous()
ray_dcp.dcp_to_torch_save(f"{root}/c", f"{root}/c.pt")
ray_dcp.dcp_to_safetensors(f"{root}/c", f"{root}/hf", file_bytes=1 << 25)
ray_dcp.torch_save_to_dcp(f"{root}/c.pt", f"{root}/d")
print(anonymous() - before)
"""
    parts = {str(i): torch.full((2 << 20,), float(i)) for i in range(12)}  # 96 MiB
    ray_dcp.save(parts, checkpoint_id=tmp_path / "c")
    ray_dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "small")
    (ran,) = programs.run("-c", program, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 32 << 20
    for name in ("c.pt",):
        found = torch.load(tmp_path / name, mmap=True)
        assert all(torch.equal(found[key], value) for key, value in parts.items())
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    last = ray_dcp.read_state_dict(tmp_path / "d", include=["11"])
    assert torch.equal(last["11"], parts["11"])


def test_a_conversion_that_fails_leaves_no_file_and_the_old_one(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    (tmp_path / "a.pt").write_bytes(b"old")
    (data,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[raw.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    data.write_bytes(raw)
    with pytest.raises(DamagedCheckpointError, match=r"model\.w"):
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "c"]


def test_a_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *at, n=name, f=real: (calls.append(n), f(*at))[1])
    ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    assert calls == ["fsync", "rename", "fsync"]


class Bomb:
    def __reduce__(self) -> Any:
        return (list, (range(10**6),))


def test_files_that_are_no_state_dicts_are_refused(tmp_path: Path):
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": Bomb()}, tmp_path / "evil.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"w": torch.ones(1000)}, tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 700)
    for name, error in {
        "list.pt": StateDictError,
        "evil.pt": UnsafeCheckpointError,
        "text.pt": DamagedCheckpointError,
        "cut.pt": DamagedCheckpointError,
        "none.pt": CheckpointNotFoundError,
        ".": InvalidRequestError,
    }.items():
        with pytest.raises(error):
            ray_dcp.torch_save_to_dcp(tmp_path / name, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_file_from_before_torch_1_6_is_read_where_it_is_trusted(tmp_path: Path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeCheckpointError, match=r"before version 1\.6.*weights_only=False"):
        ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    ray_dcp.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c", weights_only=False)
    assert same(ray_dcp.read_state_dict(tmp_path / "c"), {"w": torch.ones(3)})


@pytest.mark.parametrize(
    "how",
    [{"include": ["nothing.*"]}, {"key_map": {"model.w": "model.half"}}, {"key_map": [("[", "")]}],
)
def test_a_choice_that_can_not_be_is_refused(tmp_path: Path, how: dict[str, Any]):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    with pytest.raises(InvalidRequestError):
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt", **how)
    assert not (tmp_path / "a.pt").exists()
    with pytest.raises(InvalidRequestError, match="directory that exists"):
        ray_dcp.dcp_to_torch_save(tmp_path / "c", tmp_path / "no" / "a.pt")


# --- safetensors --------------------------------------------------------------------------------


def test_safetensors_files_have_an_index_and_split_by_size(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    tensors = {"include": ["model.*", "optimizer.state.0.step", "empty"]}
    ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf", file_bytes=20, **tensors)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 6 + 4
    found = {}
    for name, file in index["weight_map"].items():
        found[name] = load_file(tmp_path / "hf" / file)[name]
    assert torch.equal(found["model.w"], state()["model"]["w"])
    assert found["model.half"].dtype == torch.bfloat16
    assert found["optimizer.state.0.step"].shape == ()
    assert found["optimizer.state.0.step"].item() == 7
    assert found["empty"].shape == (0, 3)
    assert same(
        ray_dcp.read_state_dict(tmp_path / "hf", include=["empty"]), {"empty": found["empty"]}
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [({"pair": (1, 2)}, "'pair'"), ({"__metadata__": torch.ones(2)}, "rename it")],
)
def test_what_safetensors_can_not_hold_is_named(tmp_path: Path, value: Any, told: str):
    ray_dcp.save({"w": torch.ones(1), **value}, checkpoint_id=tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=rf"'{next(iter(value))}'.*{told}|{told}"):
        ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf")
    assert not list(tmp_path.glob("hf/*"))


def test_files_of_an_earlier_conversion_or_save_are_not_left_beside_the_new_ones(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "adapter.safetensors").write_bytes(b"mine")
    for value, file_bytes in ((1.0, 8), (2.0, 1 << 20)):
        ray_dcp.save({name: torch.full((4,), value) for name in "ab"}, checkpoint_id=tmp_path / "c")
        ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf", file_bytes=file_bytes)
        (tmp_path / "hf" / "shard-00001-model-00001-of-00001.safetensors").touch()
    ray_dcp.dcp_to_safetensors(tmp_path / "c", tmp_path / "hf")
    assert sorted(file.name for file in (tmp_path / "hf").iterdir()) == [
        "adapter.safetensors", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    found = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert {name: value[0].item() for name, value in found.items()} == {"a": 2.0, "b": 2.0}


def test_paths_without_a_folder_are_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id="c")
    ray_dcp.dcp_to_torch_save("c", "w.pt")
    ray_dcp.torch_save_to_dcp("w.pt", "again")
    ray_dcp.dcp_to_safetensors("again", "hf")
    assert load_file("hf/model-00001-of-00001.safetensors")["w"].tolist() == [1.0, 1.0]
    assert not list(tmp_path.glob("*.tmp"))


# --- the reader ---------------------------------------------------------------------------------


def test_the_reader_of_torch_save_files_works_alone(tmp_path: Path):
    torch.save({"m": OrderedDict(w=torch.arange(6.0).view(3, 2))}, tmp_path / "a.pt")
    found = {"m": {"w": torch.zeros(3, 2)}}
    ray_dcp.load(
        found,
        storage_reader=stock_utils.BroadcastingTorchSaveReader(),
        planner=stock_utils.DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "a.pt",
    )
    assert torch.equal(found["m"]["w"], torch.arange(6.0).view(3, 2))


def test_the_reader_of_torch_save_files_runs_no_code_unless_told_to(tmp_path: Path):
    torch.save({"w": torch.ones(2), "a": Bomb()}, tmp_path / "a.pt")
    found = {"w": torch.zeros(2)}
    how: dict[str, Any] = {
        "storage_reader": stock_utils.BroadcastingTorchSaveReader(tmp_path / "a.pt"),
        "planner": stock_utils.DynamicMetaLoadPlanner(),
    }
    with pytest.raises(UnsafeCheckpointError):
        ray_dcp.load(found, **how)
    ray_dcp.load(found, **how, options=ray_dcp.LoadOptions(weights_only=False))
    assert found["w"].tolist() == [1, 1]


def test_the_reader_of_torch_save_files_needs_one(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match=r"a file of torch\.save, found None"):
        ray_dcp.load({}, storage_reader=stock_utils.BroadcastingTorchSaveReader())


@pytest.mark.parametrize(
    ("wanted", "error", "also"),
    [
        ({"x": torch.zeros(1)}, MissingKeyError, RuntimeError),
        ({"w": torch.zeros(3)}, ShapeMismatchError, ValueError),
        ({"n": torch.zeros(1)}, UnsupportedValueError, RuntimeError),
    ],
)
def test_the_reader_refuses_what_does_not_fit(tmp_path: Path, wanted: Any, error: Any, also: Any):
    torch.save({"w": torch.ones(2), "n": 3}, tmp_path / "a.pt")
    with pytest.raises(ray_dcp.CheckpointError) as caught:
        ray_dcp.load(
            wanted,
            storage_reader=stock_utils.BroadcastingTorchSaveReader(tmp_path / "a.pt"),
            planner=stock_utils.DynamicMetaLoadPlanner(),
        )
    failures = [caught.value, *(each for each, _ in caught.value.failures.values())]
    assert any(isinstance(each, error) and isinstance(each, also) for each in failures)
