"""The state-dict helpers: torch's results, and nothing alive that changes by a look."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as stock

import ray_dcp
from ray_dcp.dcp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def pair(kind: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, MAKERS[kind](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_look_at_an_optimizer_that_has_not_stepped_changes_nothing(kind: str):
    model, optimizer = pair(kind)
    twin = copy.deepcopy(model)
    other = MAKERS[kind](twin.parameters())
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = repr(optimizer.state_dict())
    get_optimizer_state_dict(model, optimizer)
    get_state_dict(model, (each for each in [optimizer]))
    assert repr(optimizer.state_dict()) == before
    assert called == []
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, 3)
    train(twin, other, 3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_state_of_a_fresh_optimizer_is_that_of_step_0_and_its_own():
    model, optimizer = pair()
    for options in (None, StateDictOptions(full_state_dict=True, cpu_offload=True)):
        state = get_optimizer_state_dict(model, optimizer, options=options)
        assert {float(each["step"]) for each in state["state"].values()} == {0.0}
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert float(flat["state.0.weight.step"]) == 0.0
    train(model, optimizer)
    assert float(state["state"]["0.weight"]["step"]) == 0.0


def test_the_results_are_torchs_once_it_has_stepped():
    model, optimizer = pair()
    train(model, optimizer, 2)
    ours, theirs = get_state_dict(model, optimizer), stock.get_state_dict(model, optimizer)
    assert repr(ours) == repr(theirs)
    assert repr(get_model_state_dict(model)) == repr(stock.get_model_state_dict(model))


def test_what_is_loaded_is_not_changed_and_arrives():
    model, optimizer = pair()
    train(model, optimizer, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    kept = copy.deepcopy((model_state, optimizer_state))
    other, fresh = pair()
    wrapped = torch.compile(other, backend="eager")
    found = set_state_dict(
        wrapped, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert not found.missing_keys
    assert not found.unexpected_keys
    assert repr(kept) == repr((model_state, optimizer_state))
    assert repr(get_state_dict(wrapped, fresh)) == repr(kept)
    set_model_state_dict(other, model_state)
    set_optimizer_state_dict(other, fresh, copy.deepcopy(optimizer_state))
    train(model, optimizer)
    train(other, fresh)
    assert torch.equal(model[0].weight, other[0].weight)


def test_a_failed_load_leaves_a_fresh_optimizer_fresh():
    model, optimizer = pair()
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    del state["state"]["0.weight"]
    other, fresh = pair()
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        set_optimizer_state_dict(other, fresh, state)
    assert not fresh.state
    assert [group["lr"] for group in fresh.param_groups] == [0.1]


def test_an_empty_state_dict_is_told_without_a_process_group():
    model, _ = pair()
    with pytest.raises(RuntimeError, match="is empty") as caught:
        set_model_state_dict(model, {})
    assert isinstance(caught.value, ray_dcp.CheckpointError)


def test_an_optimizer_that_needs_a_closure_says_so():
    model, _ = pair()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ray_dcp.CheckpointError, match="LBFGS has not stepped yet"):
        get_optimizer_state_dict(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1]
    assert all(p.grad is None for p in model.parameters())


def test_parameters_without_a_learning_rate_do_not_move():
    class Walks(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(1.0)
                        self.state[parameter]["seen"] = torch.ones(())

    model, _ = pair()
    optimizer = Walks(model.parameters())
    before = copy.deepcopy(model.state_dict())
    get_optimizer_state_dict(model, optimizer)
    assert repr(model.state_dict()) == repr(before)


def test_a_round_trip_through_a_checkpoint(tmp_path: Any):
    model, optimizer = pair()
    train(model, optimizer, 2)
    ours = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    ray_dcp.save(ours, checkpoint_id=tmp_path / "c")
    other, fresh = pair()
    state = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    ray_dcp.load(state, checkpoint_id=tmp_path / "c")
    set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(model, optimizer)
    train(other, fresh)
    assert torch.equal(model[1].bias, other[1].bias)
