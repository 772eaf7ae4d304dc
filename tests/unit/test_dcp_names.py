"""Every public name of torch.distributed.checkpoint is under ray_dcp, and is torch's own object.

The names come from torch's modules themselves. What is ray_dcp's own instead is listed here.
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
import torch
import torch.distributed.checkpoint as stock

import ray_dcp
import ray_dcp.dcp

PRIVATE_MODULES = ["_consolidate_hf_safetensors", "_extension", "_fsspec_filesystem"]
"""Modules with names that torch's documentation or other projects use all the same."""

LATER = {"protocol": (2, 14), "fsspec_filesystem": (2, 15)}
"""Modules that torch has from a version on, and `ray_dcp` under every torch."""

HERE = tuple(map(int, torch.__version__.split(".")[:2]))

if LATER["fsspec_filesystem"] <= HERE:
    PRIVATE_MODULES.remove("_fsspec_filesystem")  # deprecated: to import it is to be warned

OWN = {
    # The entry points: what ray_dcp is for.
    "state_dict_saver.save",
    "state_dict_saver.async_save",
    "state_dict_saver.save_state_dict",
    "state_dict_loader.load",
    "state_dict_loader.load_state_dict",
}
"""Names that ray_dcp implements itself; all others are torch's objects."""


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


@pytest.mark.parametrize("module", modules())
def test_every_module_is_there_by_both_names(module: str):
    found = ours(module)
    assert importlib.import_module(f"ray_dcp.{module}") is found
    assert getattr(ray_dcp, module) is getattr(ray_dcp.dcp, module) is found
    assert getattr(found, "__all__", None) == getattr(theirs(module), "__all__", None)
    replaces = {name.partition(".")[0] for name in OWN}
    assert (found is theirs(module)) == (module not in replaces)
    assert found.__spec__.name == found.__name__
    stub = Path(ray_dcp.__file__).with_name(f"{module}.py").read_text()
    if module in ("protocol", "fsspec_filesystem", "_fsspec_filesystem"):
        assert set(re.findall(r"import (\w+)", stub)) in (
            {"annotations"},
            set(found.__all__),
            set(),
        )
    elif found is theirs(module):
        assert stub.splitlines()[1:] == ["", f"from {found.__name__} import *  # noqa: F403"]
    else:
        assert set(re.findall(r" as (\w+)", stub)) == set(found.__all__)


def test_what_later_versions_of_torch_have_is_there_under_every_one():
    fsspec = importlib.import_module("ray_dcp.fsspec_filesystem")
    assert fsspec is ray_dcp.dcp.fsspec_filesystem
    for name in ("FsspecReader", "FsspecWriter"):
        kinds = [getattr(home, name) for home in (fsspec, ray_dcp, ray_dcp.dcp)]
        assert kinds[0] is kinds[1] is kinds[2]
        assert kinds[0].__module__.startswith("torch.distributed.checkpoint.")
    protocol = importlib.import_module("ray_dcp.protocol")
    assert protocol is ray_dcp.dcp.protocol
    assert protocol.__all__ == ["CheckpointableTensor"]
    kind = protocol.CheckpointableTensor
    assert kind is ray_dcp.CheckpointableTensor is ray_dcp.dcp.CheckpointableTensor
    for module, since in LATER.items():
        is_torchs = ours(module).__name__ == f"torch.distributed.checkpoint.{module}"
        assert is_torchs == (since <= HERE)
    assert {"CheckpointableTensor", "FsspecReader"} <= {*dir(ray_dcp)} & {*ray_dcp.dcp.__all__}


def test_a_tensor_with_the_attributes_is_a_checkpointable_tensor():
    tensor = torch.zeros(4)
    names = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    for name, value in zip(names, ((8,), ((4,),), ((0,),), ((4,),)), strict=True):
        assert not isinstance(tensor, ray_dcp.CheckpointableTensor)
        setattr(tensor, name, value)
    assert isinstance(tensor, ray_dcp.CheckpointableTensor)


def test_nothing_of_ours_asks_torch_for_what_it_has_deprecated(tmp_path: Path):
    code = f"""
import torch, ray_dcp, ray_dcp.dcp
for home in (ray_dcp, ray_dcp.dcp):
    for name in {{*home.__all__, *dir(home)}} - {{"train", "__cached__"}}:
        getattr(home, name)
state = {{"w": torch.ones(3)}}
ray_dcp.save(state, storage_writer=ray_dcp.FsspecWriter({str(tmp_path)!r}), no_dist=True)
ray_dcp.load(state, storage_reader=ray_dcp.FsspecReader({str(tmp_path)!r}), no_dist=True)
"""
    how = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    ran = subprocess.run(
        [sys.executable, *how, "-c", code], capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stderr


OUR_MODULES = {"ray_dcp.asynchronous", "ray_dcp.loading", "ray_dcp.saving"}


def test_every_name_is_torchs_object_but_our_own():
    differ = set()
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        if getattr(ours(module), attribute) is not getattr(theirs(module), attribute):
            differ.add(name)
    assert differ == OWN


def test_every_name_of_the_package_itself_is_torchs_object_but_our_own():
    own = {name.rpartition(".")[2] for name in OWN}
    for name, value in vars(stock).items():
        if name.startswith("__") or (name[0] == "_" and name not in PRIVATE_MODULES):
            continue
        for package in (ray_dcp, ray_dcp.dcp):
            if name in own:
                assert getattr(package, name).__module__ in OUR_MODULES, name
            elif not inspect.ismodule(value):
                assert getattr(package, name) is value, name


@pytest.mark.parametrize("name", sorted(OWN))
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


def test_private_names_and_names_of_other_versions_come_from_torch():
    assert ours("default_planner")._EmptyStateDictLoadPlanner is (
        theirs("default_planner")._EmptyStateDictLoadPlanner
    )
    assert (
        ours("state_dict_loader")._load_state_dict is theirs("state_dict_loader")._load_state_dict
    )
    with pytest.raises(AttributeError, match="nope"):
        ours("planner").nope  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError, match="nope"):
        ours("state_dict_saver").nope  # noqa: B018
    with pytest.raises(AttributeError, match="nope"):
        ray_dcp.dcp.nope  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ray_dcp.nope")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ray_dcp.dcp.nope")


def test_torchs_command_runs_under_our_names(programs):
    (ran,) = programs.run("-m", "ray_dcp.format_utils", "--help")
    assert ran.returncode == 0, ran.stderr
    assert "{torch_to_dcp,dcp_to_torch}" in ran.stdout
