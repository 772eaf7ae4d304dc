"""Every public name of torch.distributed.checkpoint is under ray_dcp, and a test covers it.

The names come from torch's modules themselves: one that a new torch adds fails here until it is
there and has a test.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as stock

import ray_dcp
import ray_dcp.dcp

ROOT = Path(__file__).parents[2]
HERE = "tests/unit/test_dcp_names.py::"
STORAGES = "tests/unit/test_dcp_storages.py::"
CONVERSION = "tests/unit/test_conversion.py::"
STATE_DICTS = "tests/unit/test_state_dicts.py::"

PRIVATE_MODULES = ("_consolidate_hf_safetensors", "_extension", "_fsspec_filesystem")
"""Modules with names that torch's documentation or other projects use all the same."""

# Names that torch's own objects stand for: `module.name` -> the test in which they are at work.
SAME = {
    "api.CheckpointException": "tests/unit/test_seam_errors.py::"
    "test_every_error_of_the_tree_is_a_torch_exception_and_survives_both_picklers",
    "default_planner.DefaultLoadPlanner": "tests/unit/test_seam_paths.py::"
    "test_flags_of_the_default_planners_are_mapped",
    "default_planner.DefaultSavePlanner": "tests/unit/test_seam_paths.py::"
    "test_flags_of_the_default_planners_are_mapped",
    "default_planner.create_default_global_load_plan": HERE + "test_plans_can_be_made_by_hand",
    "default_planner.create_default_global_save_plan": HERE + "test_plans_can_be_made_by_hand",
    "default_planner.create_default_local_load_plan": HERE + "test_plans_can_be_made_by_hand",
    "default_planner.create_default_local_save_plan": HERE + "test_plans_can_be_made_by_hand",
    "filesystem.FileSystem": HERE + "test_a_filesystem_of_the_users_is_used",
    "filesystem.FileSystemBase": HERE + "test_a_filesystem_of_the_users_is_used",
    "filesystem.SerializationFormat": "tests/unit/test_seam_paths.py::"
    "test_arguments_of_the_writer_become_options",
    "format_utils.DynamicMetaLoadPlanner": CONVERSION
    + "test_the_reader_of_torch_save_files_works_alone",
    "metadata.BytesStorageMetadata": "tests/unit/test_seam_metadata.py::",
    "metadata.ChunkStorageMetadata": "tests/unit/test_seam_metadata.py::",
    "metadata.Metadata": "tests/unit/test_seam_metadata.py::",
    "metadata.MetadataIndex": "tests/unit/test_seam_metadata.py::",
    "metadata.StorageMeta": "tests/unit/test_seam_metadata.py::",
    "metadata.TensorProperties": "tests/unit/test_seam_metadata.py::",
    "metadata.TensorStorageMetadata": "tests/unit/test_seam_metadata.py::",
    "optimizer.load_sharded_optimizer_state_dict": HERE + "test_types_are_torchs_own",
    "planner.BytesIOWriteData": "tests/unit/test_seam_planner_hooks.py::",
    "planner.LoadItemType": "tests/unit/test_seam_planner_hooks.py::",
    "planner.LoadPlan": "tests/unit/test_seam_planner_hooks.py::",
    "planner.LoadPlanner": "tests/unit/test_seam_planner_hooks.py::",
    "planner.ReadItem": "tests/unit/test_seam_planner_hooks.py::",
    "planner.SavePlan": "tests/unit/test_seam_planner_hooks.py::",
    "planner.SavePlanner": "tests/unit/test_seam_planner_hooks.py::",
    "planner.TensorWriteData": "tests/unit/test_seam_planner_hooks.py::",
    "planner.WriteItem": "tests/unit/test_seam_planner_hooks.py::",
    "planner.WriteItemType": "tests/unit/test_seam_planner_hooks.py::",
    "planner_helpers.create_read_items_for_chunk_list": HERE + "test_plans_can_be_made_by_hand",
    "quantized_hf_storage.QuantizedHuggingFaceStorageReader": STORAGES
    + "test_quantised_tensors_are_read_through_ours",
    "staging.AsyncStager": "tests/unit/test_async_inline.py::",
    "staging.BlockingAsyncStager": "tests/unit/test_async_inline.py::",
    "staging.DefaultStager": "tests/unit/test_async_inline.py::",
    "staging.StagingOptions": "tests/unit/test_async_inline.py::",
    "state_dict.DictValueType": HERE + "test_types_are_torchs_own",
    "state_dict.FQNS_T": HERE + "test_types_are_torchs_own",
    "state_dict.ListDictValueType": HERE + "test_types_are_torchs_own",
    "state_dict.OptimizerStateType": HERE + "test_types_are_torchs_own",
    "state_dict.PrimitiveType": HERE + "test_types_are_torchs_own",
    "state_dict.StateDictOptions": STATE_DICTS
    + "test_the_state_of_a_fresh_optimizer_is_that_of_step_0_and_its_own",
    "state_dict.ValueType": HERE + "test_types_are_torchs_own",
    "state_dict_saver.AsyncCheckpointerType": "tests/unit/test_async_inline.py::",
    "state_dict_saver.AsyncSaveResponse": "tests/unit/test_async_inline.py::",
    "stateful.Stateful": "tests/unit/test_load_choices.py::"
    "test_only_what_lies_below_a_prefix_is_loaded",
    "stateful.StatefulT": HERE + "test_types_are_torchs_own",
    "storage.StorageReader": "tests/unit/test_seam_foreign.py::",
    "storage.StorageWriter": "tests/unit/test_seam_foreign.py::",
    "storage.WriteResult": "tests/unit/test_seam_foreign.py::",
    "utils.find_state_dict_object": HERE + "test_values_are_looked_up",
    "utils.find_tensor_shard": HERE + "test_values_are_looked_up",
    "_extension.Extension": STORAGES + "test_stream_transforms_are_written_and_read",
    "_extension.ExtensionRegistry": STORAGES + "test_stream_transforms_are_written_and_read",
    "_extension.StreamTransformExtension": STORAGES + "test_stream_transforms_are_written_and_read",
    "_extension.ZStandard": STORAGES + "test_stream_transforms_are_written_and_read",
}

# Names that ray_dcp implements itself.
OWN = {
    "_consolidate_hf_safetensors.consolidate_safetensors_files": STORAGES
    + "test_consolidation_is_right_for_every_dtype",
    "_consolidate_hf_safetensors.consolidate_safetensors_files_on_every_rank": STORAGES
    + "test_consolidation_is_right_for_every_number_of_dimensions_and_cut",
    "_fsspec_filesystem.FsspecReader": STORAGES + "test_ours_work_on_both_sides",
    "_fsspec_filesystem.FsspecWriter": STORAGES + "test_ours_work_on_both_sides",
    "filesystem.FileSystemReader": STORAGES + "test_ours_work_on_both_sides",
    "filesystem.FileSystemWriter": STORAGES + "test_ours_work_on_both_sides",
    "format_utils.BroadcastingTorchSaveReader": CONVERSION
    + "test_the_reader_of_torch_save_files_works_alone",
    "format_utils.dcp_to_torch_save": CONVERSION + "test_a_torch_save_file_is_what_dcps_would_be",
    "format_utils.torch_save_to_dcp": CONVERSION + "test_there_and_back",
    "hf_storage.HuggingFaceStorageReader": STORAGES + "test_hugging_face_files_are_right",
    "hf_storage.HuggingFaceStorageWriter": STORAGES + "test_hugging_face_files_are_right",
    "state_dict.get_model_state_dict": STATE_DICTS
    + "test_the_results_are_torchs_once_it_has_stepped",
    "state_dict.get_optimizer_state_dict": STATE_DICTS
    + "test_a_look_at_an_optimizer_that_has_not_stepped_changes_nothing",
    "state_dict.get_state_dict": STATE_DICTS + "test_the_results_are_torchs_once_it_has_stepped",
    "state_dict.set_model_state_dict": STATE_DICTS
    + "test_what_is_loaded_is_not_changed_and_arrives",
    "state_dict.set_optimizer_state_dict": STATE_DICTS
    + "test_a_failed_load_leaves_a_fresh_optimizer_fresh",
    "state_dict.set_state_dict": STATE_DICTS + "test_what_is_loaded_is_not_changed_and_arrives",
    "state_dict_loader.load": "tests/unit/test_entrypoints.py::test_a_load_reports_what_it_did",
    "state_dict_loader.load_state_dict": "tests/unit/test_entrypoints.py::",
    "state_dict_saver.async_save": "tests/unit/test_async_inline.py::"
    "test_a_handle_is_both_of_what_dcp_returns",
    "state_dict_saver.save": "tests/unit/test_entrypoints.py::"
    "test_the_metadata_of_a_save_is_that_which_stock_dcp_reads",
    "state_dict_saver.save_state_dict": "tests/unit/test_entrypoints.py::",
}
COVERED = SAME | OWN


def modules() -> list[str]:
    public = [m.name for m in pkgutil.iter_modules(stock.__path__) if m.name[0] != "_"]
    return [*public, *PRIVATE_MODULES]


def theirs(module: str) -> Any:
    return importlib.import_module(f"torch.distributed.checkpoint.{module}")


def ours(module: str) -> Any:
    return importlib.import_module(f"ray_dcp.dcp.{module}")


def public_names(module: str) -> list[str]:
    """Returns what a module of torch declares, or else defines itself."""
    found = theirs(module)
    declared = getattr(found, "__all__", None)
    defined = [
        name
        for name, value in vars(found).items()
        if name[0] != "_" and getattr(value, "__module__", None) == found.__name__
    ]
    return sorted(set(declared if declared is not None else defined))


NAMES = [f"{module}.{name}" for module in modules() for name in public_names(module)]


def test_the_list_is_not_empty_by_mistake():
    assert len(modules()) >= 20
    assert len(NAMES) >= 70


@pytest.mark.parametrize("module", modules())
def test_every_module_is_there_by_all_its_names(module: str):
    found = ours(module)
    assert importlib.import_module(f"ray_dcp.{module}") is found
    assert getattr(ray_dcp, module) is getattr(ray_dcp.dcp, module) is found
    assert set(found.__all__) == set(getattr(theirs(module), "__all__", found.__all__))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_a_test_covers_it(name: str):
    module, _, attribute = name.rpartition(".")
    found, stock_one = getattr(ours(module), attribute), getattr(theirs(module), attribute)
    assert name in COVERED, f"{name} has no test"
    assert (found is stock_one) == (name in SAME)
    path, _, test = COVERED[name].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text() if test else (ROOT / path).exists()


def test_nothing_is_listed_that_torch_does_not_have():
    assert set(COVERED) - set(NAMES) == set()


def test_every_name_of_the_package_itself_is_there():
    for name in vars(stock):
        if name.startswith("__") or (name[0] == "_" and name not in PRIVATE_MODULES):
            continue
        assert getattr(ray_dcp, name, None) is not None, name
        assert getattr(ray_dcp.dcp, name, None) is not None, name


@pytest.mark.parametrize("name", [name for name in OWN if "." in name])
def test_what_is_our_own_takes_all_arguments_of_dcps(name: str):
    module, _, attribute = name.rpartition(".")
    mine = inspect.signature(getattr(ours(module), attribute)).parameters
    for parameter in inspect.signature(getattr(theirs(module), attribute)).parameters.values():
        assert parameter.name in mine, f"{name} lacks {parameter.name}"
        assert mine[parameter.name].kind == parameter.kind, parameter
        if parameter.name != "async_checkpointer_type" and (
            mine[parameter.name].default != parameter.default
        ):
            # Careful: an argument that torch demands may be left out here.
            assert parameter.default is inspect.Parameter.empty, parameter


def test_what_is_our_own_stands_in_for_torchs():
    for name in OWN:
        module, _, attribute = name.rpartition(".")
        mine, stock_one = getattr(ours(module), attribute), getattr(theirs(module), attribute)
        assert not inspect.isclass(mine) or issubclass(mine, stock_one)


def test_types_are_torchs_own():
    for name in SAME:
        module, _, attribute = name.rpartition(".")
        assert getattr(ours(module), attribute) is getattr(theirs(module), attribute)


def test_private_names_and_names_of_other_versions_come_from_torch():
    assert ours("default_planner")._EmptyStateDictLoadPlanner is (
        theirs("default_planner")._EmptyStateDictLoadPlanner
    )
    with pytest.raises(AttributeError, match=r"'ray_dcp\.dcp\.planner' has no attribute 'nope'"):
        ours("planner").nope  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError):
        ray_dcp.dcp.nope  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ray_dcp.nope")


def test_a_submodule_imports_by_either_name_first():
    program = (
        "import sys; from ray_dcp.state_dict import StateDictOptions as a; "
        "from ray_dcp.dcp.state_dict import StateDictOptions as b; import ray_dcp; "
        "assert a is b and ray_dcp.state_dict is sys.modules['ray_dcp.dcp.state_dict']; "
        "assert ray_dcp.state_dict.__spec__.name == 'ray_dcp.dcp.state_dict'"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stderr


# --- what no other test has at work -------------------------------------------------------------


def test_plans_can_be_made_by_hand():
    import torch

    planner = ours("default_planner")
    state = {"w": torch.ones(4)}
    local = planner.create_default_local_save_plan(state, True)
    plans, metadata = planner.create_default_global_save_plan([local])
    load = planner.create_default_local_load_plan(state, metadata)
    assert planner.create_default_global_load_plan([load]) == [load]
    chunks = metadata.state_dict_metadata["w"].chunks
    items = ours("planner_helpers").create_read_items_for_chunk_list(
        "w", metadata.state_dict_metadata["w"], chunks
    )
    assert [item.lengths for item in items] == [torch.Size([4])]
    assert len(plans) == 1


def test_a_filesystem_of_the_users_is_used(tmp_path: Path):
    import torch

    opened: list[str] = []

    class Watched(ours("filesystem").FileSystem):  # type: ignore[misc]
        def create_stream(self, path: Any, mode: str) -> Any:
            opened.append(Path(path).name)
            return super().create_stream(path, mode)

    assert issubclass(Watched, ours("filesystem").FileSystemBase)
    writer = ray_dcp.FileSystemWriter(tmp_path)
    writer.fs = Watched()
    ray_dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    written, looked_at, published = opened
    assert re.fullmatch(r"__0_[0-9]+[.]distcp", written)
    assert (looked_at, published) == (".metadata", ".metadata.tmp")
    reader = ray_dcp.FileSystemReader(tmp_path)
    reader.fs = Watched()
    found = {"w": torch.zeros(2)}
    ray_dcp.load(found, storage_reader=reader)
    assert opened[3:] == [".metadata", written]
    assert found["w"].tolist() == [1, 1]


def test_values_are_looked_up():
    import torch

    index = ours("metadata").MetadataIndex("w", torch.Size([0]))
    state = {"w": torch.ones(2)}
    assert ours("utils").find_state_dict_object(state, index) is state["w"]
    assert ours("utils").find_tensor_shard(state["w"], index) is state["w"]
