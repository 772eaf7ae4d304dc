"""Torch's storages in `ray_dcp.save` and `load`: taken at their word, without their holes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint as stock
from obstore.store import MemoryStore
from safetensors.torch import save, save_file
from torch.distributed.checkpoint import _extension, filesystem
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import ray_dcp
from ray_dcp import errors
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.fsspec_filesystem import FsspecReader, FsspecWriter
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.dispatch import (
    MissingTargetError,
    PlannerFlags,
    decide_load,
    decide_save,
)
from tests.support.adapter import OwnLoad, OwnReader, OwnSave, OwnWriter

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
    with pytest.raises(errors.InvalidRequestError, match=r"s3://b/x; pass that as checkpoint_id"):
        call()


@pytest.mark.parametrize("how", [{"path": "s3://b/x"}, {"path": "x", "id": "s3://b/x"}])
def test_a_url_for_the_hugging_face_writer_is_refused_with_the_way_out(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    writer = ray_dcp.HuggingFaceStorageWriter(how["path"])
    with pytest.raises(errors.InvalidRequestError, match=r"URL s3://b/x; save as it is.*export"):
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
    with pytest.raises(errors.UnsupportedValueError, match=rf"{told}\. Leave them out.*export"):
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


def sharded(path: Path, tensor: torch.Tensor, num: int) -> None:
    """Writes row shards as DCP does."""
    for rank, part in enumerate(tensor.tensor_split(num)):
        offset = [sum(len(p) for p in tensor.tensor_split(num)[:rank]), *[0] * (tensor.ndim - 1)]
        info = {"w": {"saved_offsets": offset}}
        save_file(
            {"w": part.contiguous()},
            path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
        )


def test_a_shard_that_is_missing_is_noticed(tmp_path: Path):
    sharded(tmp_path, torch.arange(12.0).view(6, 2), 3)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(errors.CoverageError):
        ray_dcp.load({"w": torch.zeros(6, 2)}, checkpoint_id=tmp_path)


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
    with pytest.raises(errors.DamagedCheckpointError, match=told):
        ray_dcp.load({"w": torch.zeros_like(value)}, checkpoint_id=tmp_path)
    assert not ray_dcp.verify(tmp_path).ok
    for file, expected in (("model", value), ("old", value + 1)):
        index = {"weight_map": {"w": f"{file}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        found = {"w": torch.zeros_like(value)}
        ray_dcp.load(found, checkpoint_id=tmp_path)
        assert torch.equal(found["w"], expected)
        assert ray_dcp.verify(tmp_path).ok


def test_torchs_own_storage_is_native_at_its_path(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path)
    assert decide_save(None, writer).target == Target(str(tmp_path))
    assert decide_save(None, writer, tmp_path / "two").target == Target(str(tmp_path / "two"))
    assert writer.path == tmp_path
    assert decide_load(None, dcp.FileSystemReader(tmp_path)).target == Target(str(tmp_path))
    for url in (str(tmp_path), f"file://{tmp_path}"):
        assert decide_save(None, FsspecWriter(url)).path == "native"
        assert decide_load(None, FsspecReader(url)).target == Target(str(tmp_path))


def test_arguments_of_the_writer_become_options(tmp_path):
    writer = dcp.FileSystemWriter(
        tmp_path,
        single_file_per_rank=False,
        sync_files=False,
        thread_count=7,
        per_thread_copy_ahead=1,
        cache_staged_state_dict=True,
        overwrite=False,
    )
    decision = decide_save(None, writer)
    assert decision.apply(SaveOptions()) == SaveOptions(
        sync_files=False, num_threads=7, overwrite=False
    )


def test_safetensors_are_refused_with_the_way_out_before_a_file_is_made(tmp_path):
    how = {"serialization_format": filesystem.SerializationFormat.SAFETENSORS}
    writer = dcp.FileSystemWriter(tmp_path / "a", **how)
    told = r"but has SAFETENSORS.*ray_dcp\.export\(path, target, 'hf'\)"
    with pytest.raises(errors.InvalidRequestError, match=told):
        ray_dcp.save({}, storage_writer=writer)
    assert not (tmp_path / "a").exists()


def test_what_the_caller_set_stands_against_the_writer(tmp_path):
    options = SaveOptions(overwrite=False, num_threads=9, sync_files=False)
    assert decide_save(None, dcp.FileSystemWriter(tmp_path)).apply(options) == options
    decision = decide_save(None, dcp.FileSystemWriter(tmp_path, thread_count=7))
    assert decision.apply(SaveOptions(num_threads=3)).num_threads == 3


@pytest.mark.parametrize("thread_count", [0, -1, 1.5, "many"])
def test_a_thread_count_that_is_none_is_named(tmp_path, thread_count):
    writer = dcp.FileSystemWriter(tmp_path, thread_count=thread_count)
    with pytest.raises(errors.InvalidRequestError, match="thread_count"):
        decide_save(None, writer)


def test_flags_of_the_default_planners_are_mapped(tmp_path):
    saving = decide_save(
        dcp.DefaultSavePlanner(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            dedup_save_to_lowest_rank=True,
            enable_plan_caching=True,
        ),
        checkpoint_id=tmp_path,
    )
    assert saving.path == "native"
    assert saving.flags == PlannerFlags(flatten_state_dict=False, flatten_sharded_tensors=False)
    assert saving.apply(SaveOptions()).dedup_save_to_lowest_rank
    loading = decide_load(
        dcp.DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=True),
        checkpoint_id=tmp_path,
    )
    assert loading.flags == PlannerFlags(flatten_state_dict=False)
    assert loading.apply(LoadOptions()).strict is False
    assert loading.apply(LoadOptions(strict=True)).strict is True


def patched(made, **methods):
    """Something of torch's with methods of the user's."""
    for name, method in methods.items():
        setattr(made, name, method)
    return made


class OtherFileSystem(filesystem.FileSystem):
    pass


class Duck:
    """Only behaves like a writer."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def registry(**extensions):
    made = _extension.ExtensionRegistry()
    made.extensions.update(extensions)
    return made


NATIVE, HOOKS, FOREIGN = "native", "planner hooks", "foreign storage"
ZSTD = _extension.ZStandard
W, R = dcp.FileSystemWriter, dcp.FileSystemReader
ROUTES = [
    (lambda p: decide_load(checkpoint_id=p), NATIVE, "local path"),
    (lambda p: decide_save(checkpoint_id="memory://x"), NATIVE, "memory:// URL"),
    (lambda p: decide_save(checkpoint_id="step-1"), NATIVE, "local path"),
    (lambda p: decide_save(OwnSave(), None, p), HOOKS, "OwnSave"),
    (lambda p: decide_load(OwnLoad(), None, p), HOOKS, "OwnLoad"),
    (lambda p: decide_load(_EmptyStateDictLoadPlanner(), None, p), HOOKS, "_EmptyStateDict"),
    (
        lambda p: decide_save(patched(dcp.DefaultSavePlanner(), resolve_data=len), None, p),
        HOOKS,
        "resolve_data",
    ),
    (lambda p: decide_save(OwnSave(), OwnWriter(p)), FOREIGN, "OwnWriter"),
    (lambda p: decide_load(OwnLoad(), OwnReader(p)), FOREIGN, "OwnReader"),
    (lambda p: decide_save(None, dcp.HuggingFaceStorageWriter(str(p))), FOREIGN, ""),
    (lambda p: decide_save(None, patched(W(p), finish=max)), FOREIGN, "finish"),
    (lambda p: decide_save(None, patched(W(p), fs=OtherFileSystem())), FOREIGN, "OtherFileSystem"),
    (lambda p: decide_save(None, W(p, _extensions=[])), NATIVE, ""),
    (lambda p: decide_save(None, W(p, _extensions=[ZSTD()])), FOREIGN, ""),
    (lambda p: decide_load(None, R(p, registry())), NATIVE, ""),
    (lambda p: decide_load(None, R(p, registry(mine=ZSTD))), FOREIGN, ""),
    (lambda p: decide_save(None, Duck()), FOREIGN, "Duck"),
    (lambda p: decide_save(checkpoint_id="simplecache::memory://x"), NATIVE, ""),
]


@pytest.mark.parametrize(("decide", "path", "reason"), ROUTES)
def test_what_is_not_torchs_own_goes_another_way_and_says_why(decide, path, reason, tmp_path):
    decision = decide(tmp_path)
    assert decision.path == path
    assert reason in decision.reason
    assert (decision.target is None) == (path == FOREIGN)
    assert decision.storage is not None or path != FOREIGN


def test_an_id_moves_an_fsspec_writer_and_its_options_stay(tmp_path):
    made = FsspecWriter("memory://run/step-1", skip_instance_cache=True, of_mine="x")
    moved = decide_save(None, made, "memory://run/step-2").target
    assert moved.url == "memory://run/step-2"
    assert moved.filesystem is made.fs.fs
    assert moved.filesystem.storage_options["of_mine"] == "x"


def test_a_protocol_that_nothing_serves_is_told_with_the_way_out():
    with pytest.raises(errors.InvalidRequestError, match=r"nosuch://x.*install the package"):
        decide_save(checkpoint_id="nosuch://x")


def test_neither_id_nor_storage_is_an_invalid_request_and_a_runtime_error():
    for decide in (decide_save, decide_load):
        for nothing in (None, ""):
            with pytest.raises(MissingTargetError, match="found neither") as raised:
                decide(checkpoint_id=nothing)
            assert isinstance(raised.value, RuntimeError)
            assert isinstance(raised.value, errors.InvalidRequestError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: decide_save(None, dcp.FileSystemReader(p)), r"StorageWriter, but is FileSyst"),
        (lambda p: decide_load(None, dcp.FileSystemWriter(p)), r"StorageReader, but is FileSyst"),
        (lambda p: decide_save(None, str(p)), r"StorageWriter, but is str, which has no reset"),
        (lambda p: decide_save(None, dcp.FileSystemWriter), r"the class FileSystemWriter"),
        (lambda p: decide_save(dcp.DefaultLoadPlanner(), None, p), r"this is a LoadPlanner"),
        (lambda p: decide_load(dcp.DefaultSavePlanner(), None, p), r"this is a SavePlanner"),
        (lambda p: decide_save(checkpoint_id=7), r"checkpoint_id must be .* but is int"),
        (lambda p: decide_save(checkpoint_id=b"x"), r"checkpoint_id must be .* but is bytes"),
    ],
)
def test_a_wrong_type_is_named(call, message, tmp_path):
    with pytest.raises(errors.InvalidRequestError, match=message):
        call(tmp_path)


def test_a_plugin_that_does_its_own_work_takes_no_filesystem_for_an_id(tmp_path):
    with pytest.raises(errors.InvalidRequestError, match="OwnWriter does its own work"):
        decide_save(None, OwnWriter(tmp_path), fsspec.filesystem("memory"))


def test_an_id_moves_an_fsspec_writer_to_another_protocol(tmp_path):
    there = decide_save(None, FsspecWriter(str(tmp_path)), "memory://x").target
    assert there.url == "memory://x"
    assert there.filesystem is fsspec.filesystem("memory")
    back = decide_save(None, FsspecWriter("memory://x"), f"file://{tmp_path}")
    assert (back.path, back.target.url, back.target.filesystem) == ("native", str(tmp_path), None)
