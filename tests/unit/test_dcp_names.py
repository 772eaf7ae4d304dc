"""Names of torch.distributed.checkpoint and of torch_xla, which are under ray_dcp.

The names come from torch's modules themselves. What is ray_dcp's own instead is listed here.

On XLA devices it is checked by `python -m tests.support.xla_check`.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import pkgutil
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint as stock

import ray_dcp
import ray_dcp.dcp
import ray_dcp.xla
from ray_dcp.errors import InvalidRequestError, MissingKeyError, ShapeMismatchError, StateDictError
from ray_dcp.xla import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer

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


# --- ray_dcp.xla ----------------------------------------------------------------------------------


OPTIMIZERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"weight_decay": 0.1}, "AdamW": {"amsgrad": True},
    "Adamax": {}, "ASGD": {"weight_decay": 0.1}, "NAdam": {"weight_decay": 0.1}, "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9}, "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, "Adafactor": {},
}  # fmt: skip


def test_every_name_of_torch_xla_s_module_is_there():
    # Source: torch_xla 2.9, experimental/distributed_checkpoint/__init__.py, `__all__`.
    names = {"CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"}
    assert set(ray_dcp.xla.__all__) == names
    parameters = list(inspect.signature(CheckpointManager.__init__).parameters.values())[1:8]
    defaults = [p.default for p in parameters[2:]]
    assert [p.name for p in parameters] == [
        "path", "save_interval", "max_to_keep", "max_pending_async", "num_of_threads",
        "process_group", "chkpt_on_preemption",
    ]  # fmt: skip
    assert defaults == [0, 1, 1, None, True]


def made(name: str, options: dict[str, object]):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    return model, getattr(torch.optim, name)(model.parameters(), **options)


def step(model, optimizer, seed=1):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_a_primed_optimizer_steps_as_one_that_was_not(name, options):
    model, optimizer = made(name, options)
    before = [p.detach().clone() for p in model.parameters()]
    assert prime_optimizer(optimizer) is optimizer
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        assert optimizer.state[parameter]
        assert float(optimizer.state[parameter].get("step", 0)) == 0
    expected, plain = made(name, options)
    for seed in (1, 2):
        for one, other in zip(
            step(model, optimizer, seed), step(expected, plain, seed), strict=True
        ):
            assert torch.equal(one, other), name
    states = [one.state_dict()["state"] for one in (optimizer, plain)]
    assert {k: set(v) for k, v in states[0].items()} == {k: set(v) for k, v in states[1].items()}


def test_a_live_optimizer_is_left_as_it_is():
    model, optimizer = made("Adam", {})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer)
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = {
        index: {name: value.clone() for name, value in state.items()}
        for index, state in optimizer.state_dict()["state"].items()
    }
    gradients = [p.grad.clone() for p in model.parameters()]
    prime_optimizer(optimizer)
    after = optimizer.state_dict()["state"]
    for index, state in before.items():
        for name, value in state.items():
            assert torch.equal(after[index][name], value)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert float(optimizer.state[extra]["step"]) == 0
    assert torch.equal(extra, torch.ones(3))
    assert called == []
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    del scheduler


def test_what_can_not_be_primed_is_refused_and_a_failing_step_changes_nothing():
    with pytest.raises(InvalidRequestError, match="expected a torch"):
        prime_optimizer(torch.nn.Linear(1, 1))
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(InvalidRequestError, match="LBFGS"):
        prime_optimizer(torch.optim.LBFGS([parameter]))

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    parameter.grad = torch.full((2,), 5.0)
    with pytest.raises(RuntimeError, match="no step"):
        prime_optimizer(Fails([parameter], lr=0.1))
    assert torch.equal(parameter, torch.ones(2))
    assert torch.equal(parameter.grad, torch.full((2,), 5.0))


def nested(step=1):
    return {
        "model": {"w": torch.full((3, 2), float(step)), "b": torch.full((), float(step))},
        "groups": [{"lr": 0.1 * step}, {"lr": 0.2}],
        "when": datetime.datetime(2024, 1, step),
    }


@pytest.mark.parametrize("stock", [False, True])
def test_the_planners_take_plain_tensors_too_through_ray_dcp_and_through_stock_dcp(tmp_path, stock):
    module = dcp if stock else ray_dcp
    found = nested(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.save(nested(1), checkpoint_id=tmp_path / "a", planner=SPMDSavePlanner())
        module.load(found, checkpoint_id=tmp_path / "a", planner=SPMDLoadPlanner())
    assert torch.equal(found["model"]["w"], torch.ones(3, 2))
    assert (found["groups"], found["when"]) == (nested(1)["groups"], nested(1)["when"])
    names = set(dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata)
    assert names == {"model.w", "model.b", "groups", "when"}  # as torch_xla names them


def test_missing_keys_other_shapes_and_equal_names_are_refused(tmp_path):
    ray_dcp.save(nested(), checkpoint_id=tmp_path / "a", planner=SPMDSavePlanner())

    def load(state):
        ray_dcp.load(state, checkpoint_id=tmp_path / "a", planner=SPMDLoadPlanner())

    with pytest.raises(MissingKeyError, match="Missing key in checkpoint state_dict: zy, zz"):
        load({"zz": torch.ones(1), "zy": torch.ones(1)})
    target = torch.full((4, 2), 7.0)
    with pytest.raises(ShapeMismatchError, match=r"\(4, 2\) wanted, \(3, 2\) stored"):
        load({"model": {"w": target}})
    assert torch.equal(target, torch.full((4, 2), 7.0))
    with pytest.raises(StateDictError, match=r"duplicated flatten key a\.b"):
        ray_dcp.save(
            {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
            checkpoint_id=tmp_path / "b", planner=SPMDSavePlanner(),
        )  # fmt: skip


class Subclass(SPMDSavePlanner):
    """As written for torch_xla's planner, whose signature and attributes it uses."""

    def set_up_planner(self, state_dict, is_coordinator):
        super().set_up_planner(state_dict, is_coordinator)
        self.unsharded_state_dict = {
            name: value for name, value in self.unsharded_state_dict.items() if name != "model.b"
        }


class Partial(SPMDLoadPlanner):
    def create_local_plan(self):
        assert self.sharded_state_dict == {}
        del self.unsharded_state_dict["when"]
        return super().create_local_plan()


@pytest.mark.parametrize("stock", [False, True])
def test_planners_that_were_derived_from_torch_xlas_work(tmp_path, stock):
    module = dcp if stock else ray_dcp
    found = {"model": {"w": torch.zeros(3, 2)}, "groups": [], "when": "never"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.save(nested(1), checkpoint_id=tmp_path / "a", planner=Subclass())
        module.load(found, checkpoint_id=tmp_path / "a", planner=Partial())
    assert torch.equal(found["model"]["w"], torch.ones(3, 2))
    assert (found["groups"], found["when"]) == (nested(1)["groups"], "never")
    names = set(dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata)
    assert names == {"model.w", "groups", "when"}


def test_the_manager_keeps_what_was_saved_last_over_processes_too(tmp_path):
    # As in torch_xla's test of `max_to_keep`, which does not wait with `join` either.
    kept = []
    for steps in ((10, 20, 30, 10), (20,)):
        with CheckpointManager(
            tmp_path, save_interval=10, max_to_keep=2, chkpt_on_preemption=False
        ) as manager:
            for number in steps:
                assert manager.save(number, nested())
                kept.append(manager.all_steps())
            assert manager.restore("auto", nested(9)).step == steps[-1]
    assert kept == [[10], [10, 20], [20, 30], [10, 30], [10, 20]]


def test_the_manager_replaces_a_step_that_is_saved_again(tmp_path):
    with CheckpointManager(tmp_path, 10, max_to_keep=2) as manager:
        for number in (10, 20, 20, 30):
            assert manager.save_async(number, nested(1 + number // 10))
        assert not manager.save(31, nested())
        manager.join()
        assert manager.all_steps() == [20, 30]
        found = nested(9)
        assert manager.restore(20, found).step == 20
        assert found["when"].day == 3
