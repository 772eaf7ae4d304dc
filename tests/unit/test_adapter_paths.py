"""Which path a save or load takes, and what is made of the arguments of torch's own classes."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _extension, filesystem
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import ray_dcp
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError
from ray_dcp.fsspec_filesystem import FsspecReader, FsspecWriter
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.torch_adapter.dispatch import (
    MissingTargetError,
    PlannerFlags,
    decide_load,
    decide_save,
)


class WriterSubclass(dcp.FileSystemWriter):
    pass


class ReaderSubclass(dcp.FileSystemReader):
    pass


class SavePlannerSubclass(dcp.DefaultSavePlanner):
    pass


class LoadPlannerSubclass(dcp.DefaultLoadPlanner):
    pass


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


@pytest.mark.parametrize(
    "save",
    [
        lambda path: ray_dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(
                path, serialization_format=filesystem.SerializationFormat.SAFETENSORS
            ),
        ),
    ],
)
def test_safetensors_are_refused_with_the_way_out_before_a_file_is_made(tmp_path, save):
    told = r"but (is 'safetensors'|has SAFETENSORS).*ray_dcp\.export\(path, target, 'hf'\)"
    with pytest.raises(InvalidRequestError, match=told):
        save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_the_caller_set_stands_against_the_writer(tmp_path):
    options = SaveOptions(overwrite=False, num_threads=9, sync_files=False)
    assert decide_save(None, dcp.FileSystemWriter(tmp_path)).apply(options) == options
    decision = decide_save(None, dcp.FileSystemWriter(tmp_path, thread_count=7))
    assert decision.apply(SaveOptions(num_threads=3)).num_threads == 3


@pytest.mark.parametrize("thread_count", [0, -1, 1.5, "many"])
def test_a_thread_count_that_is_none_is_named(tmp_path, thread_count):
    writer = dcp.FileSystemWriter(tmp_path, thread_count=thread_count)
    with pytest.raises(InvalidRequestError, match="thread_count"):
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
WAYS = [
    (lambda p: decide_load(checkpoint_id=p), NATIVE, "local path"),
    (lambda p: decide_save(checkpoint_id="memory://x"), NATIVE, "memory:// URL"),
    (lambda p: decide_save(checkpoint_id="step-1"), NATIVE, "local path"),
    (lambda p: decide_save(SavePlannerSubclass(), None, p), HOOKS, "SavePlannerSubclass"),
    (lambda p: decide_load(LoadPlannerSubclass(), None, p), HOOKS, "LoadPlannerSubclass"),
    (lambda p: decide_load(_EmptyStateDictLoadPlanner(), None, p), HOOKS, "_EmptyStateDict"),
    (
        lambda p: decide_save(patched(dcp.DefaultSavePlanner(), resolve_data=len), None, p),
        HOOKS,
        "resolve_data",
    ),
    (lambda p: decide_save(SavePlannerSubclass(), WriterSubclass(p)), FOREIGN, "WriterSubclass"),
    (lambda p: decide_load(LoadPlannerSubclass(), ReaderSubclass(p)), FOREIGN, "ReaderSubclass"),
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


@pytest.mark.parametrize(("decide", "path", "reason"), WAYS)
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
    with pytest.raises(InvalidRequestError, match=r"nosuch://x.*install the package"):
        decide_save(checkpoint_id="nosuch://x")


def test_neither_id_nor_storage_is_an_invalid_request_and_a_runtime_error():
    for decide in (decide_save, decide_load):
        for nothing in (None, ""):
            with pytest.raises(MissingTargetError, match="found neither") as raised:
                decide(checkpoint_id=nothing)
            assert isinstance(raised.value, RuntimeError)
            assert isinstance(raised.value, InvalidRequestError)


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
    with pytest.raises(InvalidRequestError, match=message):
        call(tmp_path)


def test_a_plugin_that_does_its_own_work_takes_no_filesystem_for_an_id(tmp_path):
    with pytest.raises(InvalidRequestError, match="WriterSubclass does its own work"):
        decide_save(None, WriterSubclass(tmp_path), fsspec.filesystem("memory"))


def test_an_id_moves_an_fsspec_writer_to_another_protocol(tmp_path):
    there = decide_save(None, FsspecWriter(str(tmp_path)), "memory://x").target
    assert there.url == "memory://x"
    assert there.filesystem is fsspec.filesystem("memory")
    back = decide_save(None, FsspecWriter("memory://x"), f"file://{tmp_path}")
    assert (back.path, back.target.url, back.target.filesystem) == ("native", str(tmp_path), None)
