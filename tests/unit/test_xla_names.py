"""`ray_dcp.xla` where there is no torch_xla: its names, the planners on plain tensors, priming.

On XLA devices it is checked by `python -m tests.support.xla_check`.
"""

from __future__ import annotations

import datetime
import inspect
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ray_dcp
import ray_dcp.xla
from ray_dcp.errors import InvalidRequestError, MissingKeyError, ShapeMismatchError, StateDictError
from ray_dcp.xla import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer

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
