"""DCP's storages of ray_dcp's own: in stock save and load, in ours, and without stock's holes."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from obstore.store import MemoryStore
from safetensors.torch import load, load_file, save_file
from torch.distributed.checkpoint import _fsspec_filesystem as stock_fsspec
from torch.distributed.checkpoint._extension import ExtensionRegistry, ZStandard

import ray_dcp
from ray_dcp.dcp._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from ray_dcp.errors import CoverageError, DamagedCheckpointError, InvalidRequestError
from ray_dcp.format.safetensors_frame import ALL_CODES
from ray_dcp.seam.tensors import dtype_of
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


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("writer", [ray_dcp.FileSystemWriter, ray_dcp.FsspecWriter])
@pytest.mark.parametrize("reader", [ray_dcp.FileSystemReader, ray_dcp.FsspecReader])
def test_ours_work_on_both_sides(tmp_path: Path, saves: str, loads: str, writer: Any, reader: Any):
    whole = {**state(), "n": {"list": [1, 2]}}
    SAVES[saves](whole, storage_writer=writer(str(tmp_path), thread_count=3))
    found = {**blank(whole), "n": {"list": []}}
    LOADS[loads](found, storage_reader=reader(str(tmp_path)))
    check(found, whole)


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("writer", [stock.FileSystemWriter, stock_fsspec.FsspecWriter])
@pytest.mark.parametrize("reader", [stock.FileSystemReader, stock_fsspec.FsspecReader])
def test_stock_ones_work_in_ours(tmp_path: Path, saves: str, loads: str, writer: Any, reader: Any):
    SAVES[saves](state(), storage_writer=writer(str(tmp_path)))
    found = blank(state())
    LOADS[loads](found, storage_reader=reader(str(tmp_path)))
    check(found, state())


PAIRS = [
    (ray_dcp.FileSystemWriter, stock.FileSystemWriter),
    (ray_dcp.FileSystemReader, stock.FileSystemReader),
    (ray_dcp.FsspecWriter, stock_fsspec.FsspecWriter),
    (ray_dcp.FsspecReader, stock_fsspec.FsspecReader),
    (ray_dcp.HuggingFaceStorageWriter, stock.HuggingFaceStorageWriter),
    (ray_dcp.HuggingFaceStorageReader, stock.HuggingFaceStorageReader),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_ours_are_stock_classes_with_stock_arguments(ours: type, theirs: type):
    assert issubclass(ours, theirs)

    def parameters(cls: type) -> list[tuple[str, Any]]:
        found = inspect.signature(cls).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    assert parameters(ours) == parameters(theirs)


# --- holes of the writer ------------------------------------------------------------------------


class Failing(stock.DefaultSavePlanner):
    """Can't resolve one value."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "w5":
            raise OSError("no space left")
        return super().resolve_data(write_item)


def test_an_error_of_a_writer_thread_fails_the_save(tmp_path: Path):
    many = {f"w{i}": torch.ones(3) for i in range(8)}
    writer = ray_dcp.FileSystemWriter(tmp_path / "c", thread_count=4)
    with pytest.raises(stock.CheckpointException, match="no space left"):
        stock.save(many, storage_writer=writer, planner=Failing())
    assert not (tmp_path / "c" / ".metadata").exists()


def test_what_was_not_written_is_not_published(tmp_path: Path):
    class Forgets(ray_dcp.FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [results[0][1:]])

    with pytest.raises(stock.CheckpointException, match="were not written") as caught:
        stock.save(state(), storage_writer=Forgets(tmp_path / "c"))
    assert isinstance(caught.value.failures[0][0], CoverageError)
    assert not (tmp_path / "c" / ".metadata").exists()


def test_metadata_is_whole_before_it_is_synced_and_replaces_the_old_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stock.save(state(), storage_writer=ray_dcp.FileSystemWriter(tmp_path / "c"))
    seen: list[int] = []
    sync, remove = os.fsync, os.remove

    def watched(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".metadata.tmp"):
            seen.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    def refused(path: Any, **kwargs: Any) -> None:
        assert not str(path).endswith(".metadata")
        remove(path, **kwargs)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "remove", refused)
    monkeypatch.setattr(os, "unlink", refused)
    metadata = stock.save(state(), storage_writer=ray_dcp.FileSystemWriter(tmp_path / "c"))
    assert seen == [(tmp_path / "c" / ".metadata").stat().st_size]
    assert type(metadata.storage_meta.checkpoint_id) is str
    assert b"PosixPath" not in (tmp_path / "c" / ".metadata").read_bytes()


def test_options_of_an_fsspec_filesystem_survive_another_id(tmp_path: Path):
    for storage in (ray_dcp.FsspecWriter, ray_dcp.FsspecReader):
        one = storage(f"file://{tmp_path}/a", auto_mkdir=True)
        one.reset(f"file://{tmp_path}/b")
        assert one.fs.fs.auto_mkdir is True
        assert one.path == f"file://{tmp_path}/b"


def test_a_broken_file_is_removed_after_it_was_closed():
    writer = ray_dcp.FsspecWriter("memory://broken-file")
    writer.fs.mkdir("memory://broken-file")

    def torn() -> None:
        with writer.fs.create_stream("memory://broken-file/x", "wb") as stream:
            stream.write(b"half")
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        torn()
    assert not writer.fs.exists("memory://broken-file/x")


def test_a_url_that_is_no_directory_goes_both_ways(tmp_path: Path):
    url = "memory://both-ways"
    for saves in SAVES.values():
        saves(state(), storage_writer=ray_dcp.FsspecWriter(url))
        for loads in LOADS.values():
            found = blank(state())
            loads(found, storage_reader=ray_dcp.FsspecReader(url))
            check(found, state())


@pytest.mark.parametrize("thread_count", [0, "2"])
def test_a_thread_count_that_can_not_be_is_refused(tmp_path: Path, thread_count: Any):
    with pytest.raises((InvalidRequestError, stock.CheckpointException)) as caught:
        ray_dcp.save(
            state(), storage_writer=ray_dcp.FileSystemWriter(tmp_path, thread_count=thread_count)
        )
    assert "thread_count" in str(caught.value)


# --- what is read -------------------------------------------------------------------------------


def test_a_flipped_bit_is_seen_by_stock_load_with_our_reader(tmp_path: Path):
    ray_dcp.save(state(), checkpoint_id=tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[raw.index(torch.arange(6.0).view(3, 2).T.contiguous().numpy().tobytes()) + 9] ^= 4
    data.write_bytes(raw)
    stock.load(blank(state()), storage_reader=stock.FileSystemReader(tmp_path))
    with pytest.raises(stock.CheckpointException) as caught:
        stock.load(blank(state()), storage_reader=ray_dcp.FileSystemReader(tmp_path))
    assert isinstance(caught.value.failures[0][0], DamagedCheckpointError)


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/should-not-be-made-by-metadata",))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metadata_that_runs_code_does_not(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(stock.CheckpointException):
        stock.load(blank(state()), storage_reader=ray_dcp.FileSystemReader(tmp_path))
    assert not Path("/tmp/should-not-be-made-by-metadata").exists()


@pytest.mark.parametrize("loads", LOADS)
def test_stream_transforms_are_written_and_read(tmp_path: Path, loads: str):
    whole = {**state(), "n": 5}
    for saves in SAVES.values():
        writer = ray_dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()])
        saves(whole, storage_writer=writer)
        for registry in (None, ExtensionRegistry()):
            found = blank(whole)
            LOADS[loads](found, storage_reader=ray_dcp.FileSystemReader(tmp_path, registry))
            check(found, whole)


# --- Hugging Face -------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    {"save_distributed": True},
    {"save_distributed": True, "enable_consolidation": True, "thread_count_consolidation": 2},
    {"fqn_to_index_mapping": {"w": 1, "scale": 2, "flags": 2, "empty": 1}, "thread_count": 2},
]


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("how", WAYS)
def test_hugging_face_files_are_right(tmp_path: Path, saves: str, loads: str, how: dict[str, Any]):
    SAVES[saves](state(), storage_writer=ray_dcp.HuggingFaceStorageWriter(str(tmp_path), **how))
    for reader in (ray_dcp.HuggingFaceStorageReader, stock.HuggingFaceStorageReader):
        found = blank(state())
        LOADS[loads](found, storage_reader=reader(str(tmp_path)))
        check(found, state())
    if how.get("save_distributed") and not how.get("enable_consolidation"):
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 2 + 2
    assert index["weight_map"].keys() == state().keys()
    found = {n: load_file(tmp_path / file)[n] for n, file in index["weight_map"].items()}
    check(found, state())
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("how", WAYS)
def test_hugging_face_files_go_to_any_place_and_are_replaced_there(how: dict[str, Any]):
    place = ray_dcp.Location("models/new", filesystem=MemoryStore())
    for _ in range(2):
        writer = ray_dcp.HuggingFaceStorageWriter(place, **how)
        ray_dcp.save(state(), storage_writer=writer, no_dist=True)
    found = blank(state())
    ray_dcp.load(found, storage_reader=ray_dcp.HuggingFaceStorageReader(place), no_dist=True)
    check(found, state())
    storage = open_storage(place)
    names = {entry.key for entry in storage.list() if "/" not in entry.key}
    if how.get("save_distributed") and not how.get("enable_consolidation"):
        assert names == {"shard-00001-model-00001-of-00001.safetensors"}
        return
    index = json.loads(storage.read("model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == 24 + 2 + 2
    assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
    found = {n: load(storage.read(file))[n] for n, file in index["weight_map"].items()}
    check(found, state())


def test_hugging_face_storages_take_urls_and_another_id_of_the_same_kind():
    for index in (1, 2):
        save = {"w": torch.full((2, 3), float(index))}
        writer = ray_dcp.HuggingFaceStorageWriter("memory://hf-urls/first")
        ray_dcp.save(
            save, storage_writer=writer, checkpoint_id=f"memory://hf-urls/{index}", no_dist=True
        )
    reader = ray_dcp.HuggingFaceStorageReader("memory://hf-urls/1")
    for index in (1, 2):
        found = {"w": torch.zeros(2, 3)}
        ray_dcp.load(
            found, storage_reader=reader, checkpoint_id=f"memory://hf-urls/{index}", no_dist=True
        )
        assert found["w"][0, 0] == index
    assert open_storage("memory://hf-urls/first").list() == []


def test_shards_are_consolidated_from_one_place_to_another(tmp_path: Path):
    tensor = torch.arange(35.0).reshape(7, 5).to(torch.float8_e5m2)
    sharded(tmp_path, tensor, 3)
    there = ray_dcp.Location("models", filesystem=MemoryStore())
    consolidate_safetensors_files(tmp_path, there)
    found = load(open_storage(there).read("model-00001-of-00001.safetensors"))["w"]
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    (tmp_path / "back").mkdir()
    consolidate_safetensors_files_on_every_rank(there, str(tmp_path / "back"), {"w": 1})
    again = load_file(tmp_path / "back" / "model-00001-of-00001.safetensors")["w"]
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


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


@pytest.mark.parametrize("dtype", sorted(ALL_CODES))
def test_consolidation_is_right_for_every_dtype(tmp_path: Path, dtype: str):
    raw = torch.randint(0, 2, (5, 3, dtype_of(dtype).itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype_of(dtype)).view(5, 3)
    sharded(tmp_path, tensor, 2)
    consolidate_safetensors_files(str(tmp_path), str(tmp_path / "out"), {"w": 1})
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")["w"]
    assert found.dtype == tensor.dtype
    assert torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_consolidation_is_right_for_every_number_of_dimensions_and_cut(tmp_path: Path):
    whole = {
        "scalar": torch.tensor(7.5),
        "flat": torch.arange(7),
        "cube": torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5),
        "none": torch.zeros(3, 0),
    }
    parts: list[dict[str, tuple[torch.Tensor, list[int]]]] = [
        {"scalar": (whole["scalar"], []), "flat": (whole["flat"][:3], [0]),
         "cube": (whole["cube"][:, :2, 1:], [0, 0, 1, 0]), "none": (whole["none"], [0, 0])},
        {"flat": (whole["flat"][3:], [3]), "cube": (whole["cube"][:, 2:, 1:], [0, 2, 1, 0])},
        {"cube": (whole["cube"][:, :, :1], [0, 0, 0, 0])},
    ]  # fmt: skip
    for rank, part in enumerate(parts):
        info = {name: {"saved_offsets": offset} for name, (_, offset) in part.items()}
        save_file(
            {name: tensor.contiguous() for name, (tensor, _) in part.items()},
            tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info)},
        )
    mapping = {"scalar": 1, "flat": 2, "cube": 1, "none": 2}
    consolidate_safetensors_files(str(tmp_path), str(tmp_path / "a"), mapping, num_threads=2)
    consolidate_safetensors_files_on_every_rank(str(tmp_path), str(tmp_path / "b"), mapping)
    for out in ("a", "b"):
        index = json.loads((tmp_path / out / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            assert torch.equal(load_file(tmp_path / out / file)[name], whole[name]), name


def test_a_shard_that_is_missing_is_noticed(tmp_path: Path):
    for with_shape in (False, True):
        root = tmp_path / str(with_shape)
        root.mkdir()
        sharded(root, torch.arange(12.0).view(6, 2), 3, with_shape=with_shape)
        (root / "shard-00002-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(CoverageError, match="'w'"):
            consolidate_safetensors_files(str(root), str(root / "out"), {"w": 1})
        assert not (root / "out").exists()
    sharded(root, torch.arange(12.0).view(6, 2), 3, with_shape=True)
    (root / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CoverageError):
        ray_dcp.load({"w": torch.zeros(6, 2)}, checkpoint_id=root)


def test_what_safetensors_can_not_hold_is_refused_before_a_file_is_made(tmp_path: Path):
    for value in (3, torch.zeros(2, dtype=torch.complex128)):
        with pytest.raises(ray_dcp.CheckpointError, match="'x'"):
            ray_dcp.save(
                {"w": torch.ones(1), "x": value},
                storage_writer=ray_dcp.HuggingFaceStorageWriter(str(tmp_path)),
            )
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mapping", [{}, {"w": 0}, {"w": 1, "other": 1}])
def test_a_mapping_that_can_not_be_is_refused(tmp_path: Path, mapping: dict[str, int]):
    sharded(tmp_path, torch.ones(2, 2), 1)
    with pytest.raises(InvalidRequestError):
        consolidate_safetensors_files(str(tmp_path), str(tmp_path / "out"), mapping)


def test_a_mapping_that_lacks_a_name_is_told(tmp_path: Path):
    writer = ray_dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"w": 1})
    with pytest.raises(ray_dcp.CheckpointError, match="'scale'"):
        ray_dcp.save(state(), storage_writer=writer)


def test_two_shards_of_a_tensor_on_one_rank_both_stay(tmp_path: Path):
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    parts = [torch.ones(2, 4), torch.full((2, 3), 2.0)]
    value = LocalShardsWrapper(parts, [(0, 0), (0, 4)])
    writer = ray_dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    ray_dcp.save({"w": value}, storage_writer=writer, planner=stock.DefaultSavePlanner())
    found = {"w": torch.zeros(2, 7)}
    ray_dcp.load(found, storage_reader=ray_dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(found["w"], torch.cat(parts, 1))


def test_quantised_tensors_are_read_through_ours(tmp_path: Path):
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


# --- saving again -------------------------------------------------------------------------------


class FullError(OSError):
    pass


@pytest.mark.parametrize("writer", [ray_dcp.FileSystemWriter, ray_dcp.FsspecWriter])
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_save_again_by_stock_dcp_leaves_the_old_one_whole_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: type
):
    def save(number: float) -> None:
        stock.save(
            {"w": torch.full((64, 64), number), "b": torch.full((3,), number)},
            storage_writer=writer(str(tmp_path), thread_count=2), no_dist=True,
        )  # fmt: skip

    def loaded() -> set[float]:
        found = {"w": torch.zeros(64, 64), "b": torch.zeros(3)}
        stock.load(found, storage_reader=stock.FileSystemReader(str(tmp_path)), no_dist=True)
        return {*found["w"].flatten().tolist(), *found["b"].tolist()}

    save(1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "__0_0.distcp").write_bytes(b"somebody else's")
    with monkeypatch.context() as patch:
        patch.setattr(pickle, "dumps", lambda *_: (_ for _ in ()).throw(FullError("no space")))
        with pytest.raises((FullError, stock.CheckpointException)):
            save(2.0)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert loaded() == {1.0}
    save(3.0)
    assert loaded() == {3.0}
    assert not [name for name in before if name != ".metadata" and (tmp_path / name).exists()]
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"somebody else's"
