"""Torch's storages in `ray_dcp.save` and `load`: taken at their word, without their holes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from obstore.store import MemoryStore
from safetensors.torch import save, save_file

import ray_dcp
from ray_dcp.errors import (
    CoverageError,
    DamagedCheckpointError,
    InvalidRequestError,
    UnsupportedValueError,
)
from ray_dcp.store.opening import open_storage

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

SAVES: dict[str, Callable[..., Any]] = {"stock": stock.save, "ours": ray_dcp.save}
LOADS: dict[str, Callable[..., Any]] = {"stock": stock.load, "ours": ray_dcp.load}


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(6.0).view(3, 2).T,
        "scale": torch.tensor(2.5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }


def blank(whole: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in whole.items()
    }


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value


WRITERS = [ray_dcp.FileSystemWriter, ray_dcp.FsspecWriter]
READERS = [ray_dcp.FileSystemReader, ray_dcp.FsspecReader]


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_what_either_saves_the_other_loads(
    tmp_path: Path, saves: str, loads: str, writer: Any, reader: Any
):
    whole = {**state(), "n": {"list": [1, 2]}}
    SAVES[saves](whole, storage_writer=writer(str(tmp_path), thread_count=3))
    found = {**blank(whole), "n": {"list": []}}
    LOADS[loads](found, storage_reader=reader(str(tmp_path)))
    check(found, whole)


# --- Hugging Face -------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    {"save_distributed": True},
    {"save_distributed": True, "enable_consolidation": True, "thread_count_consolidation": 2},
    {"fqn_to_index_mapping": {"w": 1, "flags": 2}, "thread_count": 2},
]


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("how", WAYS)
def test_torchs_hugging_face_writer_writes_what_it_writes_for_dcp(
    tmp_path: Path, loads: str, how: dict[str, Any]
):
    # Why none of no dimension, and none that is not contiguous: torch's writer has holes there.
    whole = {"w": torch.arange(6.0).view(3, 2), "flags": torch.ones(2, dtype=torch.bfloat16)}
    for saves in SAVES:
        writer = ray_dcp.HuggingFaceStorageWriter(str(tmp_path / saves), **how)
        SAVES[saves](whole, storage_writer=writer)
    files = [
        {str(file.relative_to(tmp_path / saves)) for file in (tmp_path / saves).rglob("*.*")}
        for saves in SAVES
    ]
    assert files[0] == files[1]
    found = blank(whole)
    LOADS[loads](found, storage_reader=ray_dcp.HuggingFaceStorageReader(str(tmp_path / "ours")))
    check(found, whole)


@pytest.mark.parametrize("loads", ["ours", "at an id"])
def test_safetensors_files_are_read_at_any_place_that_an_id_names(tmp_path: Path, loads: str):
    at_id: dict[str, Any] = {}
    path = str(tmp_path)
    if loads == "at an id":
        at_id = {"checkpoint_id": ray_dcp.Location("models/new", filesystem=MemoryStore())}
        path = "/nowhere"
    open_storage(at_id.get("checkpoint_id", path)).write(
        "model.safetensors", save({name: value.contiguous() for name, value in state().items()})
    )
    found = blank(state())
    reader = ray_dcp.HuggingFaceStorageReader(path)
    ray_dcp.load(found, storage_reader=reader, **at_id)
    check(found, state())


@pytest.mark.parametrize(
    "call",
    [
        lambda: ray_dcp.save({}, storage_writer=ray_dcp.FileSystemWriter("s3://b/x")),
        lambda: ray_dcp.load({}, storage_reader=ray_dcp.HuggingFaceStorageReader("s3://b/x")),
    ],
)
def test_a_url_for_a_storage_of_paths_is_refused_with_the_way_out(call: Callable[[], Any]):
    with pytest.raises(InvalidRequestError, match=r"s3://b/x; pass that as checkpoint_id"):
        call()


@pytest.mark.parametrize("how", [{"path": "s3://b/x"}, {"path": "x", "id": "s3://b/x"}])
def test_a_url_for_the_hugging_face_writer_is_refused_with_the_way_out(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    writer = ray_dcp.HuggingFaceStorageWriter(how["path"])
    with pytest.raises(InvalidRequestError, match=r"URL s3://b/x; save as it is.*export"):
        ray_dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=how.get("id"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("consolidates", [False, True])
def test_what_the_hugging_face_writer_would_lose_is_refused_before_a_file_is_made(
    tmp_path: Path, consolidates: bool
):
    values = {"step": torch.tensor(3.0), "note": "text", "w": torch.ones(2)}
    writer = ray_dcp.HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=consolidates
    )
    told = "'note' is no tensor" + "; 'step' has no dimension, .* as 0" * consolidates
    with pytest.raises(UnsupportedValueError, match=rf"{told}\. Leave them out.*export"):
        ray_dcp.save(values, storage_writer=writer)
    assert not list(tmp_path.rglob("*.*"))
    if not consolidates:
        del values["note"]
        ray_dcp.save(values, storage_writer=writer)
        found = {"step": torch.zeros(()), "w": torch.zeros(2)}
        ray_dcp.load(found, storage_reader=ray_dcp.HuggingFaceStorageReader(str(tmp_path)))
        assert found["step"] == 3.0


def test_a_subclass_of_the_hugging_face_writer_does_its_own_work(tmp_path: Path):
    class Own(ray_dcp.HuggingFaceStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            Path(self.path, "mine").touch()

    ray_dcp.save({"w": torch.ones(2)}, storage_writer=Own(str(tmp_path)))
    assert (tmp_path / "mine").exists()
    patched = ray_dcp.HuggingFaceStorageWriter(str(tmp_path / "b"))
    patched.finish = lambda metadata, results: None  # type: ignore[method-assign]
    ray_dcp.save({"w": torch.ones(2)}, storage_writer=patched)
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()


def sharded(path: Path, tensor: torch.Tensor, num: int, *, with_shape: bool = False) -> None:
    """Writes row shards as DCP does."""
    for rank, part in enumerate(tensor.tensor_split(num)):
        offset = [sum(len(p) for p in tensor.tensor_split(num)[:rank]), *[0] * (tensor.ndim - 1)]
        info: dict[str, Any] = {"w": {"saved_offsets": offset}}
        if with_shape:
            info["w"]["global_shape"] = list(tensor.shape)
        save_file(
            {"w": part.contiguous()},
            path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
        )


def test_a_shard_that_is_missing_is_noticed(tmp_path: Path):
    for with_shape in (False, True):
        root = tmp_path / str(with_shape)
        root.mkdir()
        sharded(root, torch.arange(12.0).view(6, 2), 3, with_shape=with_shape)
        (root / "shard-00002-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(CoverageError):
            ray_dcp.load({"w": torch.zeros(6, 2)}, checkpoint_id=root)
    # Of the last one only what early versions of ray_dcp wrote says that it was there.
    sharded(root, torch.arange(12.0).view(6, 2), 3, with_shape=True)
    (root / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CoverageError):
        ray_dcp.load({"w": torch.zeros(6, 2)}, checkpoint_id=root)


def test_quantised_tensors_are_read_by_torchs_reader(tmp_path: Path):
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 3.0)
    save_file(
        {"w.weight": weight, "w.weight_scale_inv": scale},
        tmp_path / "model-00001-of-00001.safetensors",
    )
    index = dict.fromkeys(("w.weight", "w.weight_scale_inv"), "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = {"w.weight": torch.zeros(4, 4)}
    reader = ray_dcp.QuantizedHuggingFaceStorageReader(str(tmp_path), block_size=4)
    ray_dcp.load(found, storage_reader=reader)
    assert torch.equal(found["w.weight"], weight.float() * 3)


@pytest.mark.parametrize("value", [torch.ones(()), torch.ones(4), torch.ones(3, 4)])
def test_of_two_files_that_hold_one_tensor_the_index_decides_or_nobody(
    tmp_path: Path, value: torch.Tensor
):
    save_file({"w": value}, tmp_path / "model.safetensors")
    save_file({"w": value + 1}, tmp_path / "old.safetensors")
    told = r"(?s)'w'.*model\.safetensors.*old\.safetensors.*move the file away"
    with pytest.raises(DamagedCheckpointError, match=told):
        ray_dcp.load({"w": torch.zeros_like(value)}, checkpoint_id=tmp_path)
    assert not ray_dcp.verify(tmp_path).ok
    for file, expected in (("model", value), ("old", value + 1)):
        index = {"weight_map": {"w": f"{file}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        found = {"w": torch.zeros_like(value)}
        ray_dcp.load(found, checkpoint_id=tmp_path)
        assert torch.equal(found["w"], expected)
        assert ray_dcp.verify(tmp_path).ok
