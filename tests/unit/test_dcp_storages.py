"""Torch's storages in `ray_dcp.save` and `load`: taken at their word, without their holes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from obstore.store import MemoryStore
from safetensors.torch import load, load_file, save_file

import ray_dcp
from ray_dcp.errors import CoverageError, DamagedCheckpointError, InvalidRequestError
from ray_dcp.format.safetensors import ALL_CODES
from ray_dcp.io.consolidation import consolidate
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.tensors import dtype_of
from tests.thread_ranks import run_as_ranks

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
    {"fqn_to_index_mapping": {"w": 1, "scale": 2, "flags": 2, "empty": 1}, "thread_count": 2},
]


@pytest.mark.parametrize("loads", ["stock", "ours", "at an id"])
@pytest.mark.parametrize("how", WAYS)
def test_hugging_face_files_are_right_and_replaced_also_at_any_place_that_an_id_names(
    tmp_path: Path, loads: str, how: dict[str, Any]
):
    at_id: dict[str, Any] = {}
    if loads == "at an id":
        at_id = {"checkpoint_id": ray_dcp.Location("models/new", filesystem=MemoryStore())}
    path = "/nowhere" if at_id else str(tmp_path)
    for _ in range(2):
        writer = ray_dcp.HuggingFaceStorageWriter(path, **how)
        ray_dcp.save(state(), storage_writer=writer, **at_id)
    found = blank(state())
    reader = ray_dcp.HuggingFaceStorageReader(path)
    LOADS.get(loads, ray_dcp.load)(found, storage_reader=reader, **at_id)
    check(found, state())
    storage = open_storage(at_id.get("checkpoint_id", path))
    names = {entry.key for entry in storage.list() if "/" not in entry.key}
    if how.get("save_distributed") and not how.get("enable_consolidation"):
        assert names == {"shard-00001-model-00001-of-00001.safetensors"}
        return
    index = json.loads(storage.read("model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == 24 + 2 + 2
    assert index["weight_map"].keys() == state().keys()
    assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
    check({n: load(storage.read(file))[n] for n, file in index["weight_map"].items()}, state())


@pytest.mark.parametrize(
    "call",
    [
        lambda: ray_dcp.save({}, storage_writer=ray_dcp.HuggingFaceStorageWriter("s3://b/x")),
        lambda: ray_dcp.save({}, storage_writer=ray_dcp.FileSystemWriter("s3://b/x")),
        lambda: ray_dcp.load({}, storage_reader=ray_dcp.HuggingFaceStorageReader("s3://b/x")),
    ],
)
def test_a_url_for_a_storage_of_paths_is_refused_with_the_way_out(call: Callable[[], Any]):
    with pytest.raises(InvalidRequestError, match=r"s3://b/x; pass that as checkpoint_id"):
        call()


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


@pytest.mark.parametrize("dtype", sorted(ALL_CODES))
def test_consolidation_is_right_for_every_dtype(tmp_path: Path, dtype: str):
    raw = torch.randint(0, 2, (5, 3, dtype_of(dtype).itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype_of(dtype)).view(5, 3)
    sharded(tmp_path, tensor, 2)
    consolidate(tmp_path, tmp_path / "out", {"w": "a.safetensors"})
    found = load_file(tmp_path / "out" / "a.safetensors")["w"]
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
    file_of = {"scalar": "1", "flat": "2", "cube": "1", "none": "2"}
    consolidate(tmp_path, tmp_path / "out", file_of, num_threads=2)
    for name, file in file_of.items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], whole[name]), name


def test_a_shard_that_is_missing_is_noticed(tmp_path: Path):
    for with_shape in (False, True):
        root = tmp_path / str(with_shape)
        root.mkdir()
        sharded(root, torch.arange(12.0).view(6, 2), 3, with_shape=with_shape)
        (root / "shard-00002-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(CoverageError, match="'w'"):
            consolidate(root, root / "out", {"w": "a.safetensors"})
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


def test_two_shards_of_a_tensor_on_one_rank_both_stay(tmp_path: Path):
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    parts = [torch.ones(2, 4), torch.full((2, 3), 2.0)]
    value = LocalShardsWrapper(parts, [(0, 0), (0, 4)])
    writer = ray_dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    ray_dcp.save({"w": value}, storage_writer=writer, planner=stock.DefaultSavePlanner())
    found = {"w": torch.zeros(2, 7)}
    ray_dcp.load(found, storage_reader=ray_dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(found["w"], torch.cat(parts, 1))


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


HOW = [
    {},
    {"fqn_to_index_mapping": {"a": 1, "b": 2}},
    {"save_distributed": True},
    {"save_distributed": True, "fqn_to_index_mapping": {"a": 1, "b": 2}},
    {"save_distributed": True, "enable_consolidation": True},
    {
        "save_distributed": True,
        "enable_consolidation": True,
        "fqn_to_index_mapping": {"a": 2, "b": 1},
    },
]


@pytest.mark.parametrize("second", HOW)
@pytest.mark.parametrize("first", [HOW[1], HOW[2], HOW[4]])
def test_a_hugging_face_save_over_another_one_holds_no_value_of_it(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
):
    save_file({"mine": torch.ones(1)}, tmp_path / "adapter.safetensors")
    for value, how in ((1.0, first), (2.0, second)):
        ray_dcp.save(
            {name: torch.full((4,), value) for name in "ab"},
            storage_writer=ray_dcp.HuggingFaceStorageWriter(str(tmp_path), **how),
        )
    files = [tmp_path / "adapter.safetensors", *tmp_path.rglob("*model-*.safetensors")]
    if second.get("enable_consolidation"):
        found = {"a": torch.zeros(4), "b": torch.zeros(4)}
        ray_dcp.load(found, checkpoint_id=tmp_path)
        assert {value.tolist()[0] for value in found.values()} == {2.0}
        files = [file for file in files if file.parent == tmp_path]
    elif tmp_path.joinpath("sharded").exists():
        return  # the other one wrote elsewhere
    held = [value for file in files for value in load_file(file).items()]
    assert sorted(name for name, _ in held) == ["a", "b", "mine"]
    assert all(value[0] == (1 if name == "mine" else 2) for name, value in held)


def test_shards_of_ranks_that_are_gone_are_not_consolidated(tmp_path: Path):
    def save(rank: int, value: float, world_size: int) -> None:
        names = "ab"[rank::world_size]
        writer = ray_dcp.HuggingFaceStorageWriter(
            str(tmp_path), save_distributed=True, enable_consolidation=True
        )
        ray_dcp.save({name: torch.full((4,), value) for name in names}, storage_writer=writer)

    for value, world_size in ((1.0, 2), (2.0, 1)):
        results = run_as_ranks(partial(save, value=value, world_size=world_size), world_size)
        assert results == [None] * world_size
    found = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert {name: value[0].item() for name, value in found.items()} == {"a": 2.0, "b": 2.0}


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


@pytest.mark.parametrize(
    "save",
    [
        lambda state, path: ray_dcp.save(
            state, checkpoint_id=path, options=ray_dcp.SaveOptions(container="safetensors")
        ),
        lambda state, path: ray_dcp.save(
            state, storage_writer=ray_dcp.HuggingFaceStorageWriter(str(path))
        ),
    ],
)
def test_the_name_that_safetensors_reserves_is_refused(tmp_path: Path, save: Callable[..., Any]):
    with pytest.raises(ray_dcp.CheckpointError, match=r"'__metadata__'.*rename it") as caught:
        save({"__metadata__": torch.ones(2)}, tmp_path / "a")
    assert isinstance(caught.value, InvalidRequestError)


def test_a_tensor_that_no_file_has_is_not_consolidated(tmp_path: Path):
    sharded(tmp_path, torch.ones(2, 2), 1)
    with pytest.raises(InvalidRequestError, match="'other'"):
        consolidate(tmp_path, tmp_path / "out", {"w": "a", "other": "a"})


def test_a_mapping_that_lacks_a_name_is_told(tmp_path: Path):
    writer = ray_dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"w": 1})
    with pytest.raises(ray_dcp.CheckpointError, match="'scale'"):
        ray_dcp.save(state(), storage_writer=writer)
