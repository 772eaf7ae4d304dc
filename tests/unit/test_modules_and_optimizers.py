"""Modules and optimizers given as they are: what one process saved, a new one goes on with."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
import torchmetrics
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ray_dcp
from ray_dcp.errors import (
    MissingKeyError,
    ShapeMismatchError,
    StateDictError,
    UnsupportedValueError,
)
from tests.support import wrapping
from tests.support.threads import run_as_ranks

Wrap = Any


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one: enough for every wrapper to do its names."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bare(model: nn.Module) -> nn.Module:
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)


def sharded(model: nn.Module) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=half)


def save(state: dict[str, Any], path: Path) -> None:
    ray_dcp.save(state, checkpoint_id=path / "c", no_dist=True)


def load(state: dict[str, Any], path: Path, **options: Any) -> ray_dcp.LoadReport:
    how = ray_dcp.LoadOptions(**options)
    return ray_dcp.load(state, checkpoint_id=path / "c", no_dist=True, options=how)


WRAPS: dict[str, Wrap] = {
    "bare": bare,
    "DDP": DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "DDP of compiled": lambda m: DistributedDataParallel(torch.compile(m, backend="eager")),
    "TP": tensor_parallel,
    "FSDP2, mixed": sharded,
}


def made(wrap: str, seed: int) -> dict[str, Any]:
    """Returns the state of a training: model, optimizer, EMA copy, scheduler, scaler, a number."""
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = WRAPS[wrap](plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = torch.optim.swa_utils.AveragedModel(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "ema": ema,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu"),
        "tokens": seed,
    }


def train(state: dict[str, Any], num_steps: int, accumulate: int = 2) -> None:
    for step in range(num_steps * accumulate):
        loss = state["model"](torch.full((3, 4), 0.5 + step)).float().square().mean()
        (loss / accumulate).backward()
        if step % accumulate == accumulate - 1:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["scheduler"].step()
    state["tokens"] += num_steps


def values(state: dict[str, Any]) -> dict[str, Any]:
    """Returns all tensors of a state as they are, whole, by the names under which they lie."""
    model = state["model"]
    found = {"tokens": state["tokens"], "lr": state["scheduler"].get_last_lr()}
    found |= flat(get_model_state_dict(model), "model")
    found |= flat(get_optimizer_state_dict(model, state["optimizer"]), "optimizer")
    return found | flat(state["ema"].state_dict(), "ema")


def flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(one, f"{name}.{key}").items()}
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return {name: value.tolist()}
    return {name: repr(value)}


@pytest.mark.parametrize("loaded_as", WRAPS)
@pytest.mark.parametrize("saved_as", ["DDP", "bare"])
def test_what_one_wrapper_saved_any_other_restores(saved_as: str, loaded_as: str, tmp_path: Path):
    state = made(saved_as, seed=1)
    train(state, 3)
    save(state, tmp_path)
    other = made(loaded_as, seed=2)
    load(other, tmp_path)
    assert values(other) == values(state)
    assert other["tokens"] == 4
    if loaded_as not in ("FSDP2, mixed", "TP"):
        train(state, 2)
        train(other, 2)
        assert values(other) == values(state)


def plain(seed: int, cls: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    """Returns a model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return {"model": model, "optimizer": cls(model.parameters(), **options)}


def step(state: dict[str, Any], num_steps: int = 1) -> None:
    for number in range(num_steps):
        state["model"](torch.full((3, 4), 0.5 + number)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def of_all(state: dict[str, Any]) -> dict[str, Any]:
    return flat({key: value.state_dict() for key, value in state.items()}, "")


def test_a_scheduler_that_is_made_later_begins_where_the_saved_one_did(tmp_path: Path):
    state, other = (plain(seed, torch.optim.SGD, lr=0.1) for seed in (1, 2))
    torch.optim.lr_scheduler.ExponentialLR(state["optimizer"], 0.5)
    save(state, tmp_path)
    load(other, tmp_path)
    assert [group["initial_lr"] for group in other["optimizer"].param_groups] == [0.1]


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_scheduler_of_schedulers_has_rates_in_tensors_of_its_own(num_steps: int, tmp_path: Path):
    """Until its first step it shows the list of another scheduler as its own."""

    def scheduled(num_steps: int) -> dict[str, Any]:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.zeros(2)
        optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5))
        parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.5, 0.1)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step()
        return {"optimizer": optimizer, "scheduler": scheduler}

    state, other = scheduled(5), scheduled(num_steps)
    save(state, tmp_path)
    load(other, tmp_path)
    assert other["scheduler"].state_dict() == state["scheduler"].state_dict()
    for each in (state, other):
        each["optimizer"].step()
        each["scheduler"].step()
    assert other["scheduler"].state_dict() == state["scheduler"].state_dict()
    lrs = [each["optimizer"].param_groups[0]["lr"] for each in (state, other)]
    assert lrs[0] == lrs[1]


def test_a_scheduler_keeps_the_classes_of_its_mappings(tmp_path: Path):
    """`MultiStepLR` counts its milestones in a `Counter`, and asks that for its elements."""

    def scheduled() -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
        return {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])}

    state, other = scheduled(), scheduled()
    save(state, tmp_path)
    load(other, tmp_path)
    assert type(other["scheduler"].milestones) is Counter
    assert other["scheduler"].state_dict() == state["scheduler"].state_dict()


def flat_one(seed: int, use_orig_params: bool) -> dict[str, Any]:
    """Returns a model of FSDP1, and its optimizer."""
    model = FullyShardedDataParallel(
        plain(seed)["model"],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_save_takes_no_step_with_flat_parameters(use_orig_params: bool, tmp_path: Path):
    state, stepped = flat_one(1, use_orig_params), flat_one(2, use_orig_params)
    loss = state["model"](torch.ones(2, 4)).sum()
    save(state, tmp_path)
    loss.backward()
    assert not any(".state." in name for name in ray_dcp.open(tmp_path / "c"))
    step(stepped)
    load(stepped, tmp_path)
    assert not stepped["optimizer"].state


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_what_the_helper_for_flat_parameters_casts_is_reported(
    use_orig_params: bool, tmp_path: Path
):
    def moments(state: dict[str, Any]) -> list[Any]:
        return [value["exp_avg"].tolist() for value in state["optimizer"].state.values()]

    state, other = (flat_one(seed, use_orig_params) for seed in (1, 2))
    step(state)
    save(state, tmp_path)
    assert load(other, tmp_path).cast == ()
    assert moments(other) == moments(state)
    for value in state["optimizer"].state.values():
        value["exp_avg"] = value["exp_avg"].bfloat16()
    ray_dcp.save(state, checkpoint_id=tmp_path / "half", no_dist=True)
    for into in (other, state):
        cast = ray_dcp.load(into, checkpoint_id=tmp_path / "half", no_dist=True).cast
        assert ("optimizer.state.0.weight.exp_avg", "bfloat16", "float32") in cast
        assert len(cast) == 4


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("key_map", [None, [(r"[.]net[.]", ".body."), (r"[.]head[.]", ".top.")]])
def test_groups_of_flat_parameters_are_found_by_names(key_map: Any, num_steps: int, tmp_path: Path):
    def layers(rates: dict[str, float]) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in rates})
        flat = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        groups = [{"params": [*model[name].parameters()], "lr": rates[name]} for name in rates]
        return {"model": flat, "optimizer": torch.optim.AdamW(groups)}

    saved = layers({"head": 0.25, "net": 0.5})
    for parameter in saved["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(num_steps):
        saved["optimizer"].step()
    save(saved, tmp_path)
    other = layers({"body" if key_map else "net": 0.1, "top" if key_map else "head": 0.1})
    load(other, tmp_path, key_map=key_map)
    assert [group["lr"] for group in other["optimizer"].param_groups] == [0.5, 0.25]
    assert len(other["optimizer"].state) == len(saved["optimizer"].state)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_groups_that_stages_saved_come_into_flat_parameters_or_are_refused(tmp_path: Path):
    def layers(rates: dict[str, float], wrap: Any = bare, **options: Any) -> dict[str, Any]:
        model = wrap(nn.ModuleDict({name: nn.Linear(2, 2) for name in rates}), **options)
        cut: dict[float, list[Any]] = {}
        for name, rate in rates.items():
            cut.setdefault(rate, []).extend(model[name].parameters())
        groups = [{"params": parameters, "lr": rate} for rate, parameters in cut.items()]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    def flat(**rates: float) -> dict[str, Any]:
        how = {"use_orig_params": True, "device_id": torch.device("cpu")}
        return layers(rates, FullyShardedDataParallel, **how)

    saved = [layers({"first": 0.25}), layers({"second": 0.5})]
    for state in saved:
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
    done = run_as_ranks(lambda rank: ray_dcp.save(saved[rank], checkpoint_id=tmp_path), 2)
    assert not any(isinstance(one, BaseException) for one in done), done
    other = flat(second=7.0, first=8.0)
    ray_dcp.load(other, checkpoint_id=tmp_path, no_dist=True)
    assert [group["lr"] for group in other["optimizer"].param_groups] == [0.5, 0.25]
    assert len(other["optimizer"].state) == 4
    for state, told in (
        (flat(first=7.0), "second"),
        (flat(first=7.0, second=7.0), "in 2 groups with other options"),
    ):
        before = [p.tolist() for p in state["model"].parameters()]
        with pytest.raises(StateDictError, match=told):
            ray_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert [p.tolist() for p in state["model"].parameters()] == before
        assert {group["lr"] for group in state["optimizer"].param_groups} == {7.0}


def test_a_module_without_memory_is_refused_and_nothing_is_called_loaded(tmp_path: Path):
    """torch's `load_state_dict` warns of such tensors at most, and leaves them on `meta`."""
    state = {"model": nn.Linear(2, 2), "t": torch.ones(1)}
    save(state, tmp_path)
    with torch.device("meta"):
        other = {"model": nn.Linear(2, 2), "t": torch.zeros(1, device="cpu")}
    with pytest.raises(UnsupportedValueError, match=r"'model\.weight', 'model\.bias'.*to_empty"):
        load(other, tmp_path)
    assert other["t"] == 0
    parts = {"model": other["model"].state_dict()}
    load(parts, tmp_path)
    other["model"].load_state_dict(parts["model"], assign=True)
    assert torch.equal(other["model"].weight, state["model"].weight)
    assert load({**other, "model": other["model"].to_empty(device="cpu")}, tmp_path).loaded


@pytest.mark.parametrize("how", ["hook", "class"])
def test_a_module_that_takes_memory_in_its_own_load_is_loaded(how: str, tmp_path: Path):
    class Own(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
            self.to_empty(device="cpu")
            super()._load_from_state_dict(state_dict, prefix, *more)

    state = {"model": nn.Sequential(nn.Linear(2, 2))}
    save(state, tmp_path)
    with torch.device("meta"):
        model = nn.Sequential((Own if how == "class" else nn.Linear)(2, 2))
    if how == "hook":
        model.register_load_state_dict_pre_hook(lambda own, *_: own.to_empty(device="cpu"))
    load({"model": model}, tmp_path)
    assert torch.equal(model[0].weight, state["model"][0].weight)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    model.register_load_state_dict_pre_hook(lambda *_: None)
    refused = pytest.raises(UnsupportedValueError, match=r"'model\.0\.weight', 'model\.0\.bias'")
    with pytest.warns(UserWarning, match="no-op"), refused:
        load({"model": model}, tmp_path)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_module_loads_by_a_method_of_its_own_that_has_one_argument(where: str, tmp_path: Path):
    calls: list[str] = []

    class Own(nn.Linear):
        def load_state_dict(self, state: Any) -> Any:
            calls.append("class")
            return super().load_state_dict(state)

    state, model = {"model": nn.Linear(2, 2)}, Own(2, 2)
    if where == "instance":
        model.load_state_dict = lambda state: calls.append(where)
    before = dict(vars(model))
    save(state, tmp_path)
    load({"model": model}, tmp_path)
    assert torch.equal(model.weight, state["model"].weight)
    assert calls == [where]
    assert vars(model) == before


@pytest.mark.parametrize("wrap", ["bare", "compile", "DDP of compiled", "compiled DDP"])
def test_a_module_whose_hooks_omit_parameters_is_loaded_without_them(wrap: str, tmp_path: Path):
    def adapted() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)

        def omit(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
            for name in ("0.weight", "0.bias"):
                del state[prefix + name]

        def add(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
            for name, parameter in model[0].named_parameters():
                state[f"{prefix}0.{name}"] = parameter.detach()

        model.register_state_dict_post_hook(omit)
        model.register_load_state_dict_pre_hook(add)
        return {"model": WRAPS[wrap](model)}

    state, other = adapted(), adapted()
    save(state, tmp_path)
    assert set(ray_dcp.open(tmp_path / "c").names) == {"model.1.weight", "model.1.bias"}
    load(other, tmp_path)
    *frozen, weight, bias = zip(
        *(each["model"].parameters() for each in (state, other)), strict=True
    )
    assert torch.equal(*weight)
    assert torch.equal(*bias)
    assert not torch.equal(*frozen[0])


def test_a_lazy_module_takes_the_shapes_that_are_stored(tmp_path: Path):
    state = {"model": nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())}
    refused = r"'model\.0\.weight'.*has no shape before the first forward pass"
    with pytest.raises(UnsupportedValueError, match=refused):
        save(state, tmp_path)
    state["model"](torch.ones(2, 4))
    save(state, tmp_path)
    other = {"model": nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())}
    load(other, tmp_path)
    for name, value in state["model"].state_dict().items():
        assert torch.equal(other["model"].state_dict()[name], value)
    other["model"](torch.ones(2, 4)).sum().backward()
    lazy = nn.LazyLinear(3)
    with pytest.raises(UnsupportedValueError, match=r"'model\.0\.weight' has no shape"):
        load({"model": {"0.weight": lazy.weight}}, tmp_path)


@pytest.mark.parametrize("wrap", [bare, WRAPS["compile"]])
@pytest.mark.parametrize("assigns", [False, True])
def test_what_a_module_rounds_is_reported_where_the_saved_dtype_is_to_be_kept(
    assigns: bool, wrap: Wrap, tmp_path: Path
):
    class Assigns(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *more: Any):
            metadata["assign_to_params_buffers"] = assigns
            super()._load_from_state_dict(state_dict, prefix, metadata, *more)

    save({"model": nn.Linear(2, 2)}, tmp_path)
    model = wrap(Assigns(2, 2).bfloat16())
    report = load({"model": model}, tmp_path, dtype="keep")
    rounded = (("model.weight", "float32", "bfloat16"), ("model.bias", "float32", "bfloat16"))
    assert report.cast == (() if assigns else rounded)
    assert {each.dtype for each in model.parameters()} == {
        torch.float32 if assigns else torch.bfloat16
    }


def test_state_that_nobody_takes_is_an_error_unless_strict_is_false(tmp_path: Path):
    state = plain(1)
    step(state)
    save(state, tmp_path)
    smaller = {"model": nn.Sequential(nn.Linear(4, 6))}
    with pytest.raises(StateDictError, match=r"'model\.2\.weight'"):
        load(smaller, tmp_path)
    report = load(smaller, tmp_path, strict=False)
    assert "model.2.weight" in report.unexpected
    assert torch.equal(smaller["model"][0].weight, state["model"][0].weight)
    # What no module or optimizer is asked for is reported, as ever.
    only: dict[str, Any] = {"model": plain(3)["model"]}
    report = load(only, tmp_path)
    assert any(name.startswith("optimizer.state.") for name in report.unexpected)


def test_what_a_stateful_of_the_users_own_has_beside_its_state_is_its_own(tmp_path: Path):
    class Counter:
        casts = optimizers = 5

        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = state_dict["n"]

    state = {"c": Counter()}
    save(state, tmp_path)
    report = load(state, tmp_path)
    assert state["c"].loaded == 1
    assert not report.cast


def test_a_state_dict_of_the_users_own_keeps_its_names(tmp_path: Path):
    class Quantised(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight.absmax"] = torch.ones(1)

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.absmax = state_dict.pop(prefix + "weight.absmax")
            super()._load_from_state_dict(state_dict, prefix, *rest)

    class Renaming(nn.Module):
        value = 1

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"mine": self.value}

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self.value = state_dict["mine"]

    state = {"model": nn.Sequential(Quantised(2, 1)), "other": Renaming()}
    state["other"].value = 5
    save(state, tmp_path)
    into = {"model": nn.Sequential(Quantised(2, 1)), "other": Renaming()}
    load(into, tmp_path)
    assert torch.equal(into["model"][0].weight, state["model"][0].weight)
    assert into["model"][0].absmax.tolist() == [1.0]
    assert into["other"].value == 5


def test_an_optimizer_of_other_parameters_keeps_its_numbers(tmp_path: Path):
    def lone(value: float) -> dict[str, Any]:
        weight = nn.Parameter(torch.full((2,), value))
        return {"model": nn.Linear(1, 1), "optimizer": torch.optim.AdamW([weight])}

    state, other = lone(1.0), lone(2.0)
    for group in state["optimizer"].param_groups:
        group["params"][0].sum().backward()
    state["optimizer"].step()
    save(state, tmp_path)
    assert "optimizer.state.0.exp_avg" in ray_dcp.open(tmp_path / "c")
    load(other, tmp_path)
    assert of_all(other) == of_all(state)


def wrapped_net(text: str, seed: int) -> dict[str, Any]:
    """Returns a model that is wrapped as a text of `wrapping.WRAPPED` says, and its optimizer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = wrapping.wrapped(text, net, init_device_mesh("cpu", (1,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def losses(state: dict[str, Any], num_steps: int = 2) -> list[float]:
    found = []
    for number in range(num_steps):
        loss = state["model"](torch.full((3, 4), 0.5 + number)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        found.append(loss.item())
    return found


WRAPPED = tuple(wrapping.WRAPPED) if os.environ.get("RAY_DCP_THOROUGH") else wrapping.FEW


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """What a plain model and optimizer save after two steps, and their losses after that."""
    state, path = wrapped_net(" | ", 1), tmp_path_factory.mktemp("plain")
    losses(state)
    save(state, path)
    return path, losses(state)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("text", WRAPPED)
def test_every_order_of_wrappers_gives_a_plain_model_s_names(
    text: str, undisturbed: tuple[Path, list[float]], tmp_path: Path
):
    path, expected = undisturbed
    state = wrapped_net(text, 1)
    losses(state)
    save(state, tmp_path)
    assert set(ray_dcp.open(tmp_path / "c").names) == set(ray_dcp.open(path / "c").names)
    for other, saved in ((text, tmp_path), (text, path), (" | ", tmp_path)):
        fresh = wrapped_net(other, 2)
        load(fresh, saved)
        assert losses(fresh) == expected


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("text", [" | ", *WRAPPED])
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace(".", "._orig_mod."),
        lambda name: "_orig_mod.module." + name.replace(".", "._checkpoint_wrapped_module."),
        lambda name: "_fsdp_wrapped_module." + name,
    ],
)
def test_names_of_wrappers_in_a_checkpoint_fit_whatever_wraps_the_module_now(
    text: str, rename: Any, undisturbed: tuple[Path, list[float]], tmp_path: Path
):
    """Stock DCP saves such names, and so did versions before."""
    path, expected = undisturbed
    plain = ray_dcp.read_state_dict(path / "c")
    save(wrapping.with_parts_of_wrappers(plain, rename), tmp_path)
    fresh = wrapped_net(text, 2)
    report = load(fresh, tmp_path)
    assert "model.0.weight" in report.loaded
    assert not report.unexpected
    assert losses(fresh) == expected


class OwnPlanner(DefaultLoadPlanner):
    """As torch's, but a class of a user's."""


class OwnReader(stock.FileSystemReader):
    """As torch's, but a class of a user's."""


@pytest.mark.parametrize("how", ["ours", "a reader of the user's"])
def test_names_of_wrappers_are_no_business_of_a_planner_of_ones_own(
    how: str, undisturbed: tuple[Path, list[float]], tmp_path: Path
):
    plain = ray_dcp.read_state_dict(undisturbed[0] / "c")
    saved = wrapping.with_parts_of_wrappers(plain, lambda name: "_orig_mod." + name)
    save(saved, tmp_path)
    fresh = wrapped_net(" | ", 2)
    losses(fresh)
    before = copy.deepcopy((fresh["model"].state_dict(), fresh["optimizer"].state_dict()))

    def load_by(planner: Any) -> None:
        reader = OwnReader(tmp_path / "c") if how != "ours" else None
        where = {"storage_reader": reader} if reader else {"checkpoint_id": tmp_path / "c"}
        ray_dcp.load(fresh, planner=planner, no_dist=True, **where)

    told = r"'model\._orig_mod\.0\.weight' for 'model\.0\.weight'.*planner of your own"
    with pytest.raises(MissingKeyError, match=told):
        load_by(OwnPlanner())
    with pytest.warns(UserWarning, match=told):
        load_by(OwnPlanner(allow_partial_load=True))
    held = fresh["model"].state_dict(), fresh["optimizer"].state_dict()["state"]
    assert str(held) == str((before[0], before[1]["state"]))


def test_a_submodule_with_the_name_of_a_wrapper_s_part_keeps_it(tmp_path: Path):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})
            self.head = nn.Linear(2, 1)

    names = {name for name, _ in Outer().named_parameters()}
    state = {"model": WRAPS["compiled DDP"](Outer())}
    save(state, tmp_path)
    assert set(ray_dcp.open(tmp_path / "c").names) == {f"model.{name}" for name in names}
    raw = {"model": {f"module.{n}": one for n, one in Outer().state_dict().items()}}
    ray_dcp.save(raw, checkpoint_id=tmp_path / "raw", no_dist=True)
    for folder, values in (("c", state["model"]._orig_mod.module.state_dict()), ("raw", None)):
        other = Outer()
        ray_dcp.load({"model": other}, checkpoint_id=tmp_path / folder, no_dist=True)
        for name, value in other.state_dict().items():
            assert value.equal(values[name] if values else raw["model"][f"module.{name}"])


def test_values_whose_names_differ_by_a_wrapper_s_part_alone_are_refused_by_name(tmp_path: Path):
    class Adds(DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.ones(1))

    both = r"'module\.weight' and 'weight'|'weight' and 'module\.weight'"
    with pytest.raises(StateDictError, match=both):
        save({"model": Adds(nn.Linear(2, 2))}, tmp_path)
    one = torch.ones(2, 2)
    state = {"_orig_mod.weight": one, "module.weight": one + 1, "bias": one[0]}
    save({"model": state}, tmp_path)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(StateDictError, match=r"_orig_mod\.weight.*module\.weight.*key_map") as told:
        load({"model": model}, tmp_path)
    assert "'model.weight'" in str(told.value)
    assert model.weight.equal(before)
    load({"model": model}, tmp_path, strict=False, key_map={"model.module.weight": "old"})
    assert model.weight.equal(one)


# --- state that its owner takes -------------------------------------------------------------------


class Extra(nn.Module):
    """A module with an extra state of any form."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Registers(nn.Module):
    """A module that registers its buffer as long as it is loaded."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("history", None if length is None else torch.arange(float(length)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.register_buffer("history", torch.zeros_like(state_dict[prefix + "history"]))
        super()._load_from_state_dict(state_dict, prefix, *more)


class Hooked(Registers):
    """The same by a hook."""

    _load_from_state_dict = nn.Module._load_from_state_dict  # type: ignore[assignment]

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.register_load_state_dict_pre_hook(
            lambda own, state, prefix, *_: own.register_buffer(
                "history", torch.zeros_like(state[prefix + "history"])
            )
        )


def metric(cls: Any, *updates: Any, **how: Any) -> nn.Module:
    made: nn.Module = cls(**how)
    made.persistent(True)
    for update in updates:
        made.update(*update)
    return made


def binary(*updates: Any) -> nn.Module:
    return metric(torchmetrics.AUROC, *updates, task="binary")


one, two = torch.tensor([0.25]), torch.tensor([0.5, 0.75])
OWNED: dict[str, tuple[nn.Module, nn.Module]] = {
    "bytes that grew": (Extra(torch.full((3000,), 7, dtype=torch.uint8)), Extra(one.byte())),
    "a dict that grew": (Extra({"h": two, "n": {"x": [one, two]}, 1: 5}), Extra({"h": one[:0]})),
    "None that became a dict": (Extra({"h": two}), Extra(None)),
    "a dict that became None": (Extra(None), Extra({"h": two})),
    "an empty dict": (Extra({}), Extra({"h": two})),
    "empty values": (Extra({"a": {}, "b": [], "c": None}), Extra({"h": two})),
    "a list of tensors": (Extra([one, two]), Extra([])),
    "another dtype": (Extra(torch.arange(3)), Extra(torch.zeros(3))),
    "a history": (Registers(50), Registers(0)),
    "a shorter history": (Registers(3), Registers(50)),
    "a buffer that was none": (Registers(5), Registers(None)),
    "a buffer by a hook": (Hooked(50), Hooked(0)),
    "a list of a metric": (
        metric(torchmetrics.CatMetric, (one,), (two,)), metric(torchmetrics.CatMetric),
    ),
    "a reset metric": (metric(torchmetrics.CatMetric), metric(torchmetrics.CatMetric, (two,))),
    "scores and labels": (binary((two, torch.tensor([0, 1]))), binary()),
    "a collection": (
        torchmetrics.MetricCollection([binary((two, torch.tensor([0, 1])))]),
        torchmetrics.MetricCollection([binary()]),
    ),
}  # fmt: skip


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and value.equal(other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


@pytest.mark.parametrize("wrap", ["bare", "compiled DDP", "within"])
@pytest.mark.parametrize("case", OWNED)
def test_state_that_its_owner_takes_is_given_as_it_was_saved(case: str, wrap: str, tmp_path: Path):
    """`torch.save` of the same state is what must be equal."""

    def wrapped(module: nn.Module) -> nn.Module:
        inside = nn.Sequential(nn.Linear(1, 1), copy.deepcopy(module))
        return {"bare": bare, "within": WRAPS["compile"]}.get(wrap, WRAPS["compiled DDP"])(
            copy.deepcopy(module) if wrap == "bare" else inside
        )

    trained, fresh = OWNED[case]
    state, other, oracle = wrapped(trained), wrapped(fresh), wrapped(fresh)
    torch.save(state.state_dict(), tmp_path / "oracle.pt")
    oracle.load_state_dict(torch.load(tmp_path / "oracle.pt", weights_only=False))
    save({"model": state}, tmp_path)
    for options in ({}, {"resize": {"*": 0}}):
        load({"model": other}, tmp_path, **options)
        assert same(dict(other.state_dict()), dict(oracle.state_dict()))
        other = wrapped(fresh)


def test_a_class_that_does_not_take_another_shape_is_refused_before_anything_changes(
    tmp_path: Path,
):
    class Same(nn.Linear):
        calls = 0

        def _load_from_state_dict(self, *more: Any) -> None:
            self.calls += 1
            super()._load_from_state_dict(*more)

    save({"a": torch.ones(2), "model": nn.Sequential(Same(2, 3)), "z": torch.ones(2)}, tmp_path)
    model = nn.Sequential(Same(2, 2))
    state: dict[str, Any] = {"a": torch.zeros(2), "model": model, "z": torch.zeros(2)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ShapeMismatchError, match=r"'model\.0\.weight' is saved as \(3, 2\)"):
        load(state, tmp_path)
    assert same(dict(model.state_dict()), before)
    assert model[0].calls == 0
    assert not state["a"].any()
    assert not state["z"].any()


def test_a_module_that_knows_versions_gets_what_it_saved_as_of_its_own_version(tmp_path: Path):
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(
            self, state_dict: Any, prefix: str, metadata: Any, *more: Any
        ) -> None:
            if metadata.get("version", 1) < 2:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
            super()._load_from_state_dict(state_dict, prefix, metadata, *more)

    for wrap in ("bare", "compiled DDP"):
        state, other = (WRAPS[wrap](nn.Sequential(Versioned(2, 2))) for _ in range(2))
        save({"model": state}, tmp_path)
        load({"model": other}, tmp_path)
        assert same(dict(other.state_dict()), dict(state.state_dict()))


def with_head(num_classes: int, seed: int, *, stepped: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = {"body": nn.Linear(4, 4), "head": nn.Linear(4, num_classes)}
    state = {"model": nn.Sequential(OrderedDict(layers))}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    if stepped:
        step(state)
    return state


@pytest.mark.parametrize("wrap", ["bare", "compile"])
def test_the_error_of_a_new_head_says_what_loads_the_rest(wrap: str, tmp_path: Path):
    saved = with_head(3, 1, stepped=True)
    ray_dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    other = with_head(5, 2, stepped=False)
    head = other["model"].head.weight.detach().clone()
    target = {**other, "model": WRAPS[wrap](other["model"])}
    with pytest.raises(ShapeMismatchError, match="prefixes") as told:
        load(target, tmp_path)
    advice = re.search(r"LoadOptions\((strict=False, key_map=.*? else name)\)", str(told.value))
    assert advice
    load(target, tmp_path, **eval(f"dict({advice[1]})"))
    assert other["model"].body.weight.equal(saved["model"].body.weight)
    assert other["model"].head.weight.equal(head)
    moments = [each["optimizer"].state[each["model"].body.weight] for each in (saved, other)]
    assert same(moments[0], moments[1])
    step(other)
    other = with_head(5, 2, stepped=False)
    load({"model": other["model"]}, tmp_path, prefixes=["model.body"])
    assert other["model"].body.weight.equal(saved["model"].body.weight)


def test_resize_does_not_drop_all_of_a_value(tmp_path: Path):
    save({"history": torch.arange(50)}, tmp_path)
    with pytest.raises(ShapeMismatchError, match="takes nothing of it"):
        load({"history": torch.zeros(0, dtype=torch.int64)}, tmp_path, resize={"history": 0})


def test_what_a_module_raises_is_an_error_of_ours_with_its_cause_in_a_note(tmp_path: Path):
    class Fussy(Extra):
        def set_extra_state(self, state: Any) -> None:
            raise LookupError("no such thing")

    save({"model": Extra(3)}, tmp_path)
    with pytest.raises(StateDictError, match=r"Fussy.*'model'.*LookupError: no such") as told:
        load({"model": Fussy(3)}, tmp_path)
    assert any("in set_extra_state" in note for note in told.value.__notes__)


# --- modules and optimizers within containers -----------------------------------------------------


def nested(seed: int) -> dict[str, Any]:
    """Returns models and optimizers in mappings, lists and tuples, and all of them again."""
    one, two, three = (plain(seed + number, lr=0.1 + seed) for number in range(3))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(one["optimizer"], 0.5)
    return {
        "train": {
            **one,
            "scheduler": scheduler,
            "more": [{"ema": two["model"]}, seed, torch.full((2,), seed)],
        },
        "both": (two["optimizer"], three["model"], {"step": seed, 5: three["optimizer"]}),
        "plain": {"x": torch.full((2,), seed), "y": [seed]},
    }


def parts(state: dict[str, Any]) -> dict[str, Any]:
    train, both = state["train"], state["both"]
    return {
        "a": {"model": train["model"], "optimizer": train["optimizer"]},
        "b": {"model": train["more"][0]["ema"], "optimizer": both[0]},
        "c": {"model": both[1], "optimizer": both[2][5]},
    }


def trained_parts(state: dict[str, Any]) -> dict[str, Any]:
    for each in parts(state).values():
        step(each, 2)
    state["train"]["scheduler"].step()
    return state


@pytest.mark.parametrize("way", ["save", "async_save", "planner", "manager"])
def test_modules_and_optimizers_within_containers_change_in_place(way: str, tmp_path: Path):
    class Own(DefaultSavePlanner):
        pass

    class OwnLoad(DefaultLoadPlanner):
        pass

    state, other = trained_parts(nested(1)), nested(2)
    held, tensors = parts(other), (other["train"]["more"][2], other["plain"]["x"])
    both, more = other["both"], other["train"]["more"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if way == "manager":
            with ray_dcp.CheckpointManager(tmp_path / "run", no_dist=True) as manager:
                manager.save(1, state)
                manager.restore(1, other)
        else:
            planner = Own() if way == "planner" else None
            how = {"checkpoint_id": tmp_path / "c", "no_dist": True, "planner": planner}
            saved = (ray_dcp.async_save if way == "async_save" else ray_dcp.save)(state, **how)
            if way == "async_save":
                saved.result()
            how["planner"] = OwnLoad() if planner else None
            ray_dcp.load(other, **how)
    assert not [str(each.message) for each in warned if "object" in str(each.message)]
    assert other["train"]["more"] is more
    for name, each in parts(other).items():
        assert all(each[key] is held[name][key] for key in each)
        assert of_all(each) == of_all(parts(state)[name])
    assert other["train"]["more"][2] is tensors[0]
    assert other["plain"]["x"] is tensors[1]
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [1, 1]]
    assert [other["train"]["more"][1], *other["plain"]["y"]] == [1, 1]
    assert other["both"] is both
    assert other["both"][2]["step"] == 1
    assert other["train"]["scheduler"].state_dict() == state["train"]["scheduler"].state_dict()
    for each in (state, other):
        trained_parts(each)
    assert of_all(parts(other)["a"]) == of_all(parts(state)["a"])


def test_modules_within_containers_have_the_names_of_their_states(tmp_path: Path):
    """So that stock DCP loads them into states, and its files are loaded into modules."""
    state = {"train": {"models": [plain(1)["model"]]}}
    save(state, tmp_path)
    target = {"train": {"models": [plain(2)["model"].state_dict()]}}
    stock.load(target, checkpoint_id=tmp_path / "c")
    assert same(target["train"]["models"][0], dict(state["train"]["models"][0].state_dict()))
    stock.save(target, checkpoint_id=tmp_path / "stock")
    other = {"train": {"models": [plain(3)["model"]]}}
    ray_dcp.load(other, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert of_all({"m": other["train"]["models"][0]}) == of_all({"m": state["train"]["models"][0]})
    only = {"train": {"models": [plain(4)["model"]]}, "other": {"x": plain(5)["model"]}}
    before = of_all(only["other"])
    load(only, tmp_path, prefixes=["train.models.0.0"])
    assert only["train"]["models"][0][0].weight.equal(state["train"]["models"][0][0].weight)
    assert not only["train"]["models"][0][2].weight.equal(state["train"]["models"][0][2].weight)
    assert of_all(only["other"]) == before
    smaller = {"train": {"models": [nn.Sequential(nn.Linear(4, 6))]}}
    with pytest.raises(StateDictError, match=r"'train\.models\.0\.2\.weight'"):
        load(smaller, tmp_path)


def test_pickled_modules_within_containers_are_refused_with_what_loads_them(tmp_path: Path):
    """Stock DCP saves them so, and so did versions before."""
    state = {"train": plain(1)}
    step(state["train"])
    stock.save(state, checkpoint_id=tmp_path / "c")
    other = {"train": plain(2)}
    before = of_all(other["train"])
    with pytest.raises(
        StateDictError, match=r"'train\.model'.*weights_only=False.*state\['train'\]"
    ):
        load(other, tmp_path)
    with pytest.raises(StateDictError, match=r"'train\.model'"):
        load(other, tmp_path, weights_only=False)
    assert of_all(other["train"]) == before
    objects: dict[str, Any] = {"train": {"model": None, "optimizer": None}}
    load(objects, tmp_path, weights_only=False)
    for key, value in objects["train"].items():
        other["train"][key].load_state_dict(value.state_dict())
    assert of_all(other["train"]) == of_all(state["train"])


def test_a_module_in_a_mapping_that_can_not_change_is_refused_by_name(tmp_path: Path):
    state = {"train": MappingProxyType({"model": plain(1)["model"]})}
    save(state, tmp_path)
    with pytest.raises(UnsupportedValueError, match=r"'train\.model' sits in a mappingproxy"):
        load(state, tmp_path)
