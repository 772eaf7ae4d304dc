"""Optimizers come back as they were saved: keys, values, dtypes, options; or the load says why not.

`tests/property/test_optimizer_roundtrip.py` does so for every optimizer of torch's.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import ray_dcp
from ray_dcp import saving
from ray_dcp.errors import CoverageError, MissingKeyError, ShapeMismatchError, StateDictError
from ray_dcp.torch_adapter.optimizer_state import Stored, StoredValue
from ray_dcp.torch_adapter.state import stateful_to_load_targets
from ray_dcp.xla import prime_optimizer
from tests.support import optimizers
from tests.support.adapter import OwnLookup, OwnSave
from tests.support.comparing import differences
from tests.support.threads import run_as_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Make = Callable[[nn.Module], torch.optim.Optimizer]
State = dict[str, Any]


def made(make: Make, seed: int = 1, dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    return {"m": model, "o": make(model)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def step(state: State, times: int = 1) -> None:
    for time in range(times):
        dtype = state["m"][0].weight.dtype
        x = torch.full((2, 3), 0.5 + time, dtype=dtype)
        state["m"](x).square().sum().backward()
        state["o"].step()
        state["o"].zero_grad()


def held(state: State) -> Any:
    """Returns what the optimizer holds, with types and dtypes, by parameters' names."""
    names = {id(p): n for n, p in state["m"].named_parameters()}
    found = {names.get(id(k), k): shown(v) for k, v in state["o"].state.items()}
    groups = [
        {k: [names[id(p)] for p in v] if k == "params" else shown(v) for k, v in group.items()}
        for group in state["o"].param_groups
    ]
    return found, groups


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shown(each) for each in value]
    return type(value), value


def save(state: State, path: Path) -> None:
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)


def load(state: State, path: Path, **options: Any) -> ray_dcp.LoadReport:
    return ray_dcp.load(
        state, checkpoint_id=path, no_dist=True, options=ray_dcp.LoadOptions(**options)
    )


def check_both(state: State, other: State, path: Path) -> None:
    """Saves, and loads into another one and, after steps, into the same."""
    expected = held(state)
    save(state, path)
    assert held(state) == expected
    assert load(other, path).cast == ()
    assert held(other) == expected
    step(state, 2)
    assert load(state, path).cast == ()
    assert held(state) == expected
    step(state)
    step(other)
    assert held(state) == held(other)


def test_warming_up_counts_the_state_that_an_optimizer_will_have(monkeypatch: pytest.MonkeyPatch):
    warmed: list[int] = []

    def warm(num_bytes: int) -> Future[None]:
        warmed.append(num_bytes)
        return Future()

    monkeypatch.setattr(saving, "warm_process", warm)
    state = made(adamw)
    ray_dcp.warm_up(state, no_dist=True)
    assert not state["o"].state
    step(state)
    ray_dcp.warm_up(state, no_dist=True)
    assert warmed[0] == warmed[1] > 3 * sum(p.nbytes for p in state["m"].parameters())


def test_an_optimizer_without_the_frozen_parameters_is_told_how_to_take_their_state(
    tmp_path: Path,
):
    state = made(adamw)
    step(state)
    save(state, tmp_path / "c")
    other = made(lambda model: torch.optim.AdamW(model[2].parameters()), 2)
    before = held(other)
    with pytest.raises(StateDictError, match=r"'o\.state\.0\.bias\.exp_avg.*frozen ones too"):
        load(other, tmp_path / "c")
    assert held(other) == before
    assert "o.state.0.bias.step" in load(other, tmp_path / "c", strict=False).unexpected
    assert held(other)[0]["2.bias"] == held(state)[0]["2.bias"]


# Groups


def grouped(*sizes: int, order: tuple[int, ...] = ()) -> Make:
    """Returns what makes groups of so many parameters, each with a learning rate of its own."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        rest = list(model.parameters())
        groups = []
        for number, size in enumerate(sizes):
            groups.append({"params": rest[:size], "lr": 0.5**number})
            rest = rest[size:]
        return torch.optim.AdamW([groups[index] for index in order or range(len(groups))], lr=1.0)

    return make


def test_groups_that_share_the_tensor_of_an_option_get_values_of_their_own(tmp_path: Path):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        return torch.optim.AdamW(groups, lr=torch.tensor(0.5), foreach=False)

    state, other = made(make), made(make, 2)
    assert other["o"].param_groups[0]["lr"] is other["o"].param_groups[1]["lr"]
    for number, group in enumerate(state["o"].param_groups):
        group["lr"] = torch.tensor(0.5**number)
    step(state)
    check_both(state, other, tmp_path / "c")


def test_an_option_that_a_group_was_saved_without_goes_from_it(tmp_path: Path):
    state, other = made(grouped(2, 2)), made(grouped(2, 2), 2)
    state["o"].param_groups[0]["initial_lr"] = 3.0
    for group in other["o"].param_groups:
        group["initial_lr"] = 4.0
    step(state)
    check_both(state, other, tmp_path / "c")
    assert ["initial_lr" in group for group in other["o"].param_groups] == [True, False]


def test_state_of_parameters_that_the_checkpoint_does_not_know_stays_unless_strict(tmp_path: Path):
    state = made(adamw)
    part: State = {"m": nn.Sequential(state["m"][0])}
    save(part | {"o": adamw(part["m"])}, tmp_path)
    step(state)
    first, *_, last = state["m"].parameters()
    before = state["o"].state[last]["exp_avg"].clone()
    load(state, tmp_path, strict=False)
    assert first not in state["o"].state  # it had none when it was saved
    assert torch.equal(state["o"].state[last]["exp_avg"], before)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("keys", ["o", "mo"])
def test_an_optimizer_that_had_not_stepped_is_loaded(keys: str, steps: int, tmp_path: Path):
    saved, other = made(adamw), made(adamw, 2)
    saved["o"].param_groups[0]["lr"] = 0.5
    save({key: saved[key] for key in keys}, tmp_path)
    step(other, steps)
    report = load({key: other[key] for key in keys}, tmp_path)
    assert report.missing == report.unexpected == ()
    assert held(other) == held(saved)


class Norms(torch.optim.SGD):
    """Keeps the norm of each gradient: state of one dimension that grows."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                norms = self.state[p].get("norms", torch.zeros(0))
                self.state[p]["norms"] = torch.cat([norms, torch.ones(1)])


def test_state_that_grows_by_steps_and_not_with_its_parameter_is_loaded(tmp_path: Path):
    def made(steps: int) -> State:
        layer = nn.Linear(2, 4)
        optimizer = Norms(layer.parameters(), lr=0.1)
        for _ in range(steps):
            for p in layer.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        return {"m": layer, "o": optimizer}

    save(made(3), tmp_path)
    other = made(1)
    load(other, tmp_path)
    assert {len(held["norms"]) for held in other["o"].state.values()} == {3}


class Projected(torch.optim.Optimizer):
    """Keeps moments of gradients that it projects to as many rows as an option says, as GaLore."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, {"rank": rank})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                made = torch.zeros(group["rank"], p.shape[-1])
                self.state[p].setdefault("exp_avg", made).add_(1)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("saved_rank", "rank"), [(2, 6), (6, 2), (2, 3), (1, 6)])
def test_state_whose_shape_an_option_selects_comes_with_the_option(
    saved_rank: int, rank: int, steps: int, tmp_path: Path
):
    """With six rows, state of rank 6 has the shape of its parameter by chance."""

    def made(rank: int, steps: int) -> State:
        layer = nn.Linear(4, 6, bias=False)
        optimizer = Projected(layer.parameters(), rank)
        for _ in range(steps):
            optimizer.step()
        return {"m": layer, "o": optimizer}

    saved, other = made(saved_rank, 2), made(rank, steps)
    save(saved, tmp_path)
    load(other, tmp_path)
    assert held(other) == held(saved)
    for state in (saved, other):
        state["o"].step()
    assert held(other) == held(saved)


@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_parameters_that_had_a_single_row_is_resized(steps: int, tmp_path: Path):
    def made(rows: int, steps: int) -> State:
        words = nn.ModuleList([nn.Embedding(rows, 4), nn.Embedding(rows, 4)])
        state = {"m": words, "o": torch.optim.Adam(words.parameters())}
        for parameter in words.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(steps):
            state["o"].step()
        return state

    save(made(1, 1), tmp_path)
    other = made(5, steps)
    load(other, tmp_path, resize={"*weight*": 0})
    assert {len(v) for held in other["o"].state.values() for v in held.values() if v.dim()} == {5}
    other["o"].step()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
def test_state_of_a_parameter_of_another_shape_is_refused_or_resized(
    cls: Any, steps: int, alone: bool, tmp_path: Path
):
    def words(number: int, steps: int) -> State:
        model = nn.ModuleList([nn.Embedding(number, 4), nn.Embedding(3, 4), nn.Embedding(3, 1)])
        state: State = {"m": model, "o": cls(model.parameters())}
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            state["o"].step()
        return {"o": state["o"]} if alone else state

    save(words(10, 2), tmp_path)
    same = words(10, steps)
    load(same, tmp_path)
    same["o"].step()
    other = words(12, steps)
    ((first, *_),) = [group["params"] for group in other["o"].param_groups]
    with pytest.raises(ShapeMismatchError, match=r"'o\.state\.0.*saved as \(10, "):
        load(other, tmp_path, **({} if alone else {"resize": {"m.*": 0}}))
    report = load(other, tmp_path, resize={"*": 0})
    of_rows = {"exp_avg", "exp_avg_sq"} if cls is torch.optim.AdamW else {"row_var"}
    assert {name.rpartition(".")[2] for name, *_ in report.resized} - {"weight"} == of_rows
    for name in of_rows:
        value = other["o"].state[first][name]
        assert len(value) == 12
        assert value[:10].all()
        assert bool(value[10:].any()) == bool(steps)
    first.grad = torch.ones_like(first)
    other["o"].step()


def only(name: str) -> str | None:
    """Leaves out the layers "head", and renames the layers "net" to "head"."""
    return None if ".head." in name else name.replace(".net.", ".head.")


@pytest.mark.parametrize("stepped", [("net", "head"), ("head",), ()])
@pytest.mark.parametrize(("names", "key_map"), [
    (("body", "top"), [(r"[.]net[.]", ".body."), (r"[.]head[.]", ".top.")]),
    (("head", "net"), lambda name: ".net.".join(
        part.replace(".net.", ".head.") for part in name.split(".head."))),
    (("head",), only),
])  # fmt: skip
def test_groups_are_found_by_their_parameters_where_a_load_renames_these(
    names: Sequence[str], key_map: Any, stepped: Sequence[str], tmp_path: Path
):
    """The stored groups list the names of before: by position each would get the other's rate."""

    def layers(names: Sequence[str], rates: dict[str, float]) -> State:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        groups = [{"params": model[name].parameters(), "lr": lr} for name, lr in rates.items()]
        return {"m": model, "o": torch.optim.AdamW(groups)}

    saved = layers(("net", "head"), {"head": 0.25, "net": 0.5})
    for name in stepped:
        for parameter in saved["m"][name].parameters():
            parameter.grad = torch.ones_like(parameter)
    saved["o"].step()
    save(saved, tmp_path)
    other = layers(names, dict.fromkeys(names, 0.1))
    load(other, tmp_path, key_map=key_map, strict=None if len(names) == 2 else False)
    rates = [group["lr"] for group in other["o"].param_groups]
    assert rates == [0.5, 0.25][: len(names)]
    for name, before in zip(names, ("net", "head"), strict=False):
        assert torch.equal(other["m"][name].weight, saved["m"][before].weight)
        assert (other["m"][name].weight in other["o"].state) == (before in stepped)


@pytest.mark.parametrize("has_state", [False, True])
def test_groups_are_found_by_their_parameters_where_those_are_in_nested_mappings(
    has_state: bool, tmp_path: Path
):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model.net = nn.Linear(2, 1, bias=False)
    groups = [{"params": [model.net.weight]}, {"params": [model.weight]}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    options = optimizer.state_dict()["param_groups"][0]
    momentum = {
        name: {"momentum_buffer": torch.full_like(p, 3)} for name, p in model.named_parameters()
    }
    save(
        {
            "m": {"weight": torch.zeros(2), "net": {"weight": torch.zeros(1, 2)}},
            "o": {
                "state": momentum if has_state else {},
                "param_groups": [
                    {**options, "lr": 0.1, "params": ["weight"]},
                    {**options, "lr": 0.2, "params": ["net.weight"]},
                ],
            },
        },
        tmp_path,
    )
    load({"m": model, "o": optimizer}, tmp_path)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_a_group_that_was_added_is_rolled_back_to_and_asked_for(tmp_path: Path):
    def add(state: State) -> None:
        state["o"].add_param_group({"params": state["m"][2].parameters(), "lr": 0.5})

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model[0].parameters())

    state, other, without = (made(make, seed) for seed in (1, 2, 3))
    step(state)
    save(state, tmp_path)
    add(state)
    add(other)
    step(state)
    check_both(state, other, tmp_path / "c")
    with pytest.raises(StateDictError, match=r"o\.param_groups\.1\.lr.*add_param_group"):
        load(without, tmp_path / "c")
    with pytest.raises(MissingKeyError, match=r"o\.param_groups\.1\.lr"):
        load(state, tmp_path)
    expected = held(state)
    assert "o.param_groups.1.lr" in load(state, tmp_path, strict=False).missing
    assert held(state)[1][1] == expected[1][1]
    assert held(state)[0]["2.weight"] == expected[0]["2.weight"]


def with_rates_in_tensors(make: Make) -> Make:
    def changed(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return optimizer

    return changed


@pytest.fixture
def memory_is_nan() -> Iterator[None]:
    """New tensors are NaN, and not by chance what is stored."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_groups_of_which_a_tensor_is_lost_change_no_target(tmp_path: Path):
    state, other = (made(with_rates_in_tensors(grouped(2, 2)), seed) for seed in (1, 2))
    model, optimizer = get_state_dict(state["m"], state["o"])
    stock.save({"m": model, "o": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    name = "o.param_groups.1.lr"
    metadata.state_dict_metadata[name].chunks.clear()
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != name}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    before = held(other), [p.tolist() for p in other["m"].parameters()]
    with pytest.raises(CoverageError, match=name):
        load(other, tmp_path)
    assert (held(other), [p.tolist() for p in other["m"].parameters()]) == before


def test_options_that_are_tensors_come_out_of_a_table_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray_dcp.format.table.GROUP_ROWS", 1)
    state, other = (made(with_rates_in_tensors(grouped(2, 2)), seed) for seed in (1, 2))
    step(state)
    options = ray_dcp.SaveOptions(part_bytes=1)
    ray_dcp.save(state, checkpoint_id=tmp_path, no_dist=True, options=options)
    load(other, tmp_path)
    assert held(other) == held(state)


def with_a_list_of_tensors(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.param_groups[0]["betas"] = [torch.tensor(0.8), torch.tensor(0.9)]
    return optimizer


@pytest.mark.parametrize(
    "of", [with_a_list_of_tensors, grouped(2, 2), with_rates_in_tensors(grouped(2, 2))]
)
def test_options_that_torch_has_flattened_come_into_groups(of: Make, tmp_path: Path):
    """As torchtitan saves them."""
    state, other = made(of), made(of, 2)
    step(state)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(state["m"], state["o"], options=flat)
    stock.save({"m": model, "o": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    step(other, 2)
    other["o"].param_groups[0]["lr"] *= 3
    report = load(other, tmp_path)
    assert held(other) == held(state)
    assert (report.missing, report.unexpected) == ((), ())
    before = held(other)
    with pytest.raises(StateDictError, match="give the module that has them"):
        load({"o": other["o"]}, tmp_path)
    assert held(other) == before
    if of is not with_a_list_of_tensors:
        third = made(grouped(3, 1), 3)
        before = held(third), [p.tolist() for p in third["m"].parameters()]
        with pytest.raises(StateDictError, match="in 3 groups with other options"):
            load(third, tmp_path)
        assert (held(third), [p.tolist() for p in third["m"].parameters()]) == before


def of_class(cls: Any, **options: Any) -> Make:
    return lambda model: cls(model.parameters(), **options)


@pytest.mark.parametrize(
    ("of", "steps", "saved", "to", "into", "told"),
    [
        (grouped(2, 2), 1, "mo", grouped(3, 1), "mo", "in 2 groups with other options"),
        (
            with_rates_in_tensors(grouped(2, 2)), 1, "mo",
            with_rates_in_tensors(grouped(3, 1)), "mo", "in 2 groups with other options",
        ),
        (grouped(1, 3), 1, "o", grouped(3, 1), "o", "as many parameters in the same order"),
        (adamw, 1, "mo", adamw, "o", None),
        (adamw, 0, "mo", adamw, "o", None),
        (of_class(torch.optim.Adam), 1, "mo", of_class(torch.optim.SGD), "mo", None),
        (of_class(torch.optim.Adam), 1, "mo", of_class(torch.optim.Adamax), "mo", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("planner", [None, OwnLookup])
@pytest.mark.usefixtures("memory_is_nan")
def test_what_does_not_fit_is_refused(
    of: Make,
    steps: int,
    saved: str,
    to: Make,
    into: str,
    told: str | None,
    planner: Any,
    tmp_path: Path,
):
    state, other = made(of), made(to, 2)
    step(state, steps)
    save({key: state[key] for key in saved}, tmp_path / "c")
    step(other)
    before = held(other), [p.tolist() for p in other["m"].parameters()]
    with pytest.raises((MissingKeyError, StateDictError), match=told):
        ray_dcp.load(
            {key: other[key] for key in into},
            checkpoint_id=tmp_path / "c",
            no_dist=True,
            planner=planner() if planner else None,
        )
    assert (held(other), [p.tolist() for p in other["m"].parameters()]) == before


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("saved", "other", "name"),
    [
        (adamw, of_class(torch.optim.SGD, momentum=0.5), "Adam or AdamW"),
        (of_class(torch.optim.SGD, momentum=0.5), adamw, "SGD"),
        (of_class(torch.optim.NAdam), of_class(torch.optim.Adagrad), "NAdam"),
        (of_class(torch.optim.RMSprop), of_class(torch.optim.Adafactor), "RMSprop"),
    ],
)
def test_what_another_kind_of_optimizer_saved_is_refused_or_left_out_as_a_whole(
    saved: Make, other: Make, name: str, nested: bool, steps: int, tmp_path: Path
):
    def put(state: State) -> State:
        return {"m": state["m"], "o": [state["o"]]} if nested else state

    state, fresh = made(saved), made(other, 2)
    step(state)
    step(fresh, steps)
    save(put(state), tmp_path / "c")
    before, weight = held(fresh), fresh["m"][0].weight.detach().clone()
    told = rf"was saved by another optimizer \({name}\)"
    with pytest.raises(StateDictError, match=told):
        load(put(fresh), tmp_path / "c")
    assert held(fresh) == before
    assert fresh["m"][0].weight.equal(weight)
    with pytest.warns(UserWarning, match=told):
        report = load(put(fresh), tmp_path / "c", strict=False)
    assert held(fresh) == before
    assert fresh["m"][0].weight.equal(state["m"][0].weight)
    assert {one for one in report.unexpected if one.startswith("o.")}


KINDS = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if cls is not torch.optim.Optimizer
}
"""Every optimizer of torch's."""


def of_kind(name: str, steps: int, seed: int) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.full((3, 4), float(seed)))
    found: torch.optim.Optimizer = KINDS[name]([weight], lr=0.5 * seed)

    def closure() -> torch.Tensor:
        dense = torch.full((3, 4), 0.5 + seed)
        weight.grad = dense.to_sparse() if name == "SparseAdam" else dense
        return weight.detach().square().sum()

    for _ in range(steps):
        closure()
        found.step(closure if name == "LBFGS" else None)  # type: ignore[arg-type]
    return found


class App:
    """Gives the state dict of an optimizer in one of its own, as DCP's tutorial does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1, "optim": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optim"])


FORMS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "itself": lambda optimizer: optimizer,
    "plain": lambda optimizer: optimizer.state_dict(),
    "plain in a list": lambda optimizer: [optimizer.state_dict()],
    "in a state of an object's": App,
}


@pytest.mark.parametrize(
    ("form", "steps"),
    [*((form, 0) for form in FORMS), ("itself", 1), ("plain", 1)],
)
@pytest.mark.filterwarnings("ignore:Not loaded:UserWarning")
def test_no_optimizer_of_torchs_takes_what_another_kind_saved(
    form: str, steps: int, tmp_path: Path
):
    """Every pair; only Adam and AdamW, which differ by the value of an option, are one kind."""
    put = FORMS[form]
    save({name: put(of_kind(name, 1, 1)) for name in KINDS}, tmp_path / "c")
    kinds = {name: {"Adam", "AdamW"} if name in {"Adam", "AdamW"} else {name} for name in KINDS}
    wrong = []
    for own in KINDS:
        others = {name: of_kind(own, steps, 2) for name in KINDS}
        state = {name: put(one) for name, one in others.items()}
        before = {name: shown(one.state_dict()) for name, one in others.items()}
        load(state, tmp_path / "c", strict=False)
        for name, one in others.items():
            now = state[name] if form.startswith("plain") else one.state_dict()
            found = shown(now[0] if isinstance(now, list) else now)
            if (found != before[name]) != (name in kinds[own]):
                wrong.append((name, own))
        with pytest.raises(StateDictError, match=r"was saved by another optimizer \("):
            load(
                {name: one for name, one in state.items() if name not in kinds[own]}, tmp_path / "c"
            )
    assert not wrong


def test_a_container_keeps_what_is_left_out_of_it(tmp_path: Path):
    state, other = made(adamw), made(of_class(torch.optim.SGD), 2)
    save({"all": {"o": state["o"], "n": 1, "plain": state["o"].state_dict()}}, tmp_path / "c")
    inner = {"o": other["o"], "n": 2, "plain": other["o"].state_dict()}
    target = {"all": inner}
    with pytest.warns(UserWarning, match="Not loaded: "):
        load(target, tmp_path / "c", strict=False)
    assert target["all"] is inner
    assert list(inner) == ["o", "n", "plain"]
    assert inner["n"] == 1


def test_groups_of_another_version_or_with_options_of_the_users_are_of_the_same_optimizer(
    tmp_path: Path,
):
    """One side alone has options that the other has not."""
    state = made(of_class(torch.optim.SGD, momentum=0.5))
    step(state)
    for group in state["o"].param_groups:
        group["betas"] = 3
    save(state, tmp_path / "more")
    del state["o"].param_groups[0]["dampening"], state["o"].param_groups[0]["betas"]
    save(state, tmp_path / "less")
    for folder in ("more", "less"):
        fresh = made(of_class(torch.optim.SGD, lr=9.0), 2)
        load(fresh, tmp_path / folder, strict=False)
        assert fresh["o"].param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("planner", [None, OwnLookup])
def test_groups_whose_tensors_agree_may_be_cut_differently(planner: Any, tmp_path: Path):
    """They are compared when these tensors are loaded, and not before."""

    def make(*sizes: int) -> State:
        state = made(with_rates_in_tensors(grouped(*sizes)))
        for group in state["o"].param_groups:
            group["lr"].fill_(0.375)
        return state

    state, other = make(2, 2), make(3, 1)
    step(state)
    save(state, tmp_path / "c")
    for group in other["o"].param_groups:
        group["lr"].fill_(7)
    how = {} if planner is None else {"planner": planner()}
    ray_dcp.load(other, checkpoint_id=tmp_path / "c", no_dist=True, **how)
    assert [group["lr"].item() for group in other["o"].param_groups] == [0.375] * 2
    assert held(other)[0] == held(state)[0]


def test_groups_that_do_not_fit_on_one_rank_change_no_target_of_another(tmp_path: Path):
    state = made(grouped(2, 2))
    step(state)
    save(state, tmp_path / "c")

    def load_one(rank: int) -> None:
        other = made(grouped(3, 1) if rank else grouped(2, 2), seed=2)
        step(other)
        before = held(other), [p.tolist() for p in other["m"].parameters()]
        with pytest.raises(StateDictError, match="in 2 groups with other options") as caught:
            ray_dcp.load(other, checkpoint_id=tmp_path / "c")
        assert caught.value.rank == 1
        assert (held(other), [p.tolist() for p in other["m"].parameters()]) == before

    on_ranks(load_one)


def test_numbers_are_not_taken_for_names_of_parameters_in_a_list(tmp_path: Path):
    def listed(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ParameterList([torch.rand(3), torch.rand(3)])
        return model, torch.optim.AdamW([model[1], model[0]])

    (model, optimizer), (other, others) = listed(1), listed(2)
    (model[0].sum() + 5 * model[1].sum()).backward()
    optimizer.step()
    ray_dcp.save({"o": optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    load({"m": other, "o": others}, tmp_path / "c", prefixes=["o"])
    for one, two in zip(model, other, strict=True):
        assert shown(others.state[two]) == shown(optimizer.state[one])


# Dtypes and kinds of values


class Keeps(torch.optim.Optimizer):
    """Keeps what a test says in its state; steps by the learning rate."""

    def __init__(self, params: Any, keeps: Callable[[torch.Tensor, int], dict[Any, Any]]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.keeps, self.num_steps = keeps, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"])
                    self.state[parameter].update(self.keeps(parameter, self.num_steps))


def late(p: torch.Tensor, n: int) -> dict[Any, Any]:
    """Keeps a second value from the second step on."""
    return {"first": p.clone(), **({"late": p + 1} if n > 1 else {})}


def test_a_rollback_takes_what_came_in_a_later_step(tmp_path: Path):
    state = made(lambda model: Keeps(model.parameters(), late))
    save(state, tmp_path / "none")
    step(state)
    expected = held(state)
    save(state, tmp_path / "c")
    step(state)
    assert "late" in held(state)[0]["0.weight"]
    load(state, tmp_path / "c")
    assert held(state) == expected
    load(state, tmp_path / "none")
    assert not held(state)[0]


def test_an_older_checkpoint_may_have_less_of_an_optimizer_than_a_damaged_one(tmp_path: Path):
    state = made(lambda model: Keeps(model.parameters(), late))
    for number in (1, 2):
        step(state)
        save(state, tmp_path / f"step-{number}")
        if number == 1:
            expected = held(state)
    (data,) = (tmp_path / "step-2").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="instead of the newer"):
        assert ray_dcp.load_newest(state, tmp_path, no_dist=True).step == 1
    assert held(state) == expected


def test_tensors_that_fit_are_filled_in_place_and_others_are_not_cast_into(tmp_path: Path):
    state = made(adamw)
    step(state)
    state["o"].param_groups[0]["lr"] = torch.tensor(0.5)
    expected = held(state)
    save(state, tmp_path / "c")
    weight = state["m"][0].weight
    inner, before = state["o"].state[weight], dict(state["o"].state[weight])
    group, rate = state["o"].param_groups[0], state["o"].param_groups[0]["lr"]
    step(state)
    rate.fill_(3.0)
    inner["exp_avg_sq"] = inner["exp_avg_sq"].bfloat16()
    load(state, tmp_path / "c")
    assert held(state) == expected
    assert state["o"].state[weight] is inner
    assert inner["exp_avg"] is before["exp_avg"]
    assert state["o"].param_groups[0] is group
    assert group["lr"] is rate


def test_options_that_groups_share_come_back_on_their_device():
    """On fake devices, as the process has no others: a graph of CUDA refuses one on the CPU."""
    values = {
        f"o.param_groups.{number}.{option}": StoredValue(
            ("o", "param_groups", number, option), (), torch.float32 if option == "lr" else None
        )
        for number in range(2)
        for option in ("lr", "betas", "params")
    }
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(2, device="cuda")) for _ in range(2)]
        optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights])
        rate, *betas = (torch.empty((), device="cuda") for _ in range(3))
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=tuple(betas))
        targets = stateful_to_load_targets({"o": optimizer}, Stored(values, values.__getitem__))
        for number, group in enumerate(targets.values["o"]["param_groups"]):
            group.update(params=[number], betas=(torch.zeros(()), torch.zeros(())))
        targets.put_back({"o": optimizer})
        for group in optimizer.param_groups:
            assert {one.device.type for one in (group["lr"], *group["betas"])} == {"cuda"}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, type("Own", (torch.optim.AdamW,), {
    "state_dict": lambda self: torch.optim.AdamW.state_dict(self),
})])  # fmt: skip
def test_an_optimizer_saved_as_one_object_is_found_by_a_load_that_flattens(
    cls: Any, tmp_path: Path
):
    state, other = (made(of_class(cls), seed) for seed in (1, 2))
    step(state)
    step(other)
    planner = ray_dcp.DefaultSavePlanner(flatten_state_dict=False)
    ray_dcp.save({"o": state["o"]}, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    load({"o": other["o"]}, tmp_path)
    assert held(other) == held(state)


# What belongs to no parameter


def test_state_of_a_tensor_that_is_in_no_group_is_refused_by_name(tmp_path: Path):
    state = made(adamw)
    step(state)
    state["o"].state[torch.ones(2, 7)] = {"step": 1}
    with pytest.raises(StateDictError, match=r"shape \(2, 7\) that is in none.*add_param_group"):
        save(state, tmp_path / "c")


# Optimizers that have something of their own


def test_hooks_are_called_with_what_torch_would_give_them(tmp_path: Path):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.extra = 0

        def before_load(own: Any, state_dict: Any) -> Any:
            own.extra = state_dict.pop("extra")
            assert set(state_dict) == {"state", "param_groups"}
            assert set(state_dict["state"]) <= set(range(4))
            return state_dict

        optimizer.register_state_dict_post_hook(lambda own, found: {**found, "extra": own.extra})
        optimizer.register_load_state_dict_pre_hook(before_load)
        optimizer.register_load_state_dict_post_hook(lambda own: setattr(own, "ready", True))
        return optimizer

    state, other = made(make), made(make, 2)
    step(state)
    state["o"].extra = 7
    check_both(state, other, tmp_path / "c")
    assert other["o"].extra == 7
    assert other["o"].ready


class Library(torch.optim.AdamW):
    """Takes its state by a `load_state_dict` of its own."""

    does = "nothing else"

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if self.does == "drop" and parameter.dim() == 1:
                del state["exp_avg"]
            elif self.does in ("change", "copy"):
                state["exp_avg"] = state["exp_avg"] + (self.does == "change")
        if self.does == "options":
            self.param_groups[0]["lr"] = 5.0


def library(model: nn.Module) -> torch.optim.Optimizer:
    return Library(model.parameters())


def test_a_library_that_takes_the_state_is_compared_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state, other = made(library), made(library, 2)
    step(state, 2)
    check_both(state, other, tmp_path / "c")
    state["o"].state[state["m"][0].weight]["exp_avg"][0] = torch.nan
    save(state, tmp_path / "d")
    other["o"].does = "copy"
    load(other, tmp_path / "d")
    assert other["o"].state[other["m"][0].weight]["exp_avg"][0].isnan().all()
    for does, what in {"drop": "0.bias", "change": "0.weight"}.items():
        other["o"].does = does
        with pytest.raises(StateDictError, match=rf"Library.*'o\.state\.{what}\.exp_avg'"):
            load(other, tmp_path / "d")
    other["o"].does = "options"
    with caplog.at_level(logging.WARNING, "ray_dcp"):
        load(other, tmp_path / "d")
    assert "gave options of its own to o.param_groups.0.lr" in caplog.text


def test_what_a_library_casts_is_reported(tmp_path: Path):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = library(model)
        optimizer.register_step_post_hook(
            lambda own, *_: [s.update(master=p.float() + 0.001) for p, s in own.state.items()]
        )
        return optimizer

    state, other = (made(make, seed, torch.bfloat16) for seed in (1, 2))
    step(state)
    save(state, tmp_path / "c")
    report = load(other, tmp_path / "c")
    assert ("o.state.0.weight.master", "float32", "bfloat16") in report.cast
    assert len(report.cast) == 4


def test_a_class_with_a_state_dict_of_its_own_keeps_its_form(tmp_path: Path):
    class Own(torch.optim.AdamW):
        def state_dict(self) -> Any:
            found = super().state_dict()
            return {"mine": {f"p{n}": s for n, s in found["state"].items()}, "lr": 0.5}

        def load_state_dict(self, state_dict: Any) -> None:
            found = super().state_dict()
            found["state"] = {int(n[1:]): s for n, s in state_dict["mine"].items()}
            super().load_state_dict(found)

    state, other = (made(lambda model: Own(model.parameters()), seed) for seed in (1, 2))
    step(state)
    check_both(state, other, tmp_path / "c")
    assert "o.mine.p0.exp_avg" in ray_dcp.open(tmp_path / "c")


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("trained", [(), (2,), (0, 2)])
def test_a_class_with_a_state_dict_of_its_own_is_rolled_back_to_less_state(
    trained: Any, num_steps: int, tmp_path: Path
):
    class Own(torch.optim.AdamW):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "more": {"deep": {"version": 1}}}

        def load_state_dict(self, state_dict: Any) -> None:
            assert state_dict["more"] == {"deep": {"version": 1}}
            super().load_state_dict({k: v for k, v in state_dict.items() if k != "more"})

    saved, other = (made(lambda model: Own(model.parameters()), seed) for seed in (1, 2))
    for index in trained:
        saved["m"][index](torch.ones(saved["m"][index].in_features)).sum().backward()
    saved["o"].step()
    save(saved, tmp_path)
    step(other, num_steps)
    assert bool(load(other, tmp_path, strict=False).missing) == (len(trained) < 2)
    load(other, tmp_path)
    assert held(other) == held(saved)
    other["o"].param_groups[0]["amsgrad"] = True
    for state in other["o"].state.values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    if trained:
        with pytest.raises(MissingKeyError, match="max_exp_avg_sq"):
            load(other, tmp_path)


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_a_class_with_a_state_dict_of_its_own_takes_what_a_scheduler_added(lr: Any, tmp_path: Path):
    class Own(torch.optim.AdamW):
        def state_dict(self) -> Any:
            return super().state_dict()

    saved, other = (made(lambda model: Own(model.parameters(), lr=lr), seed) for seed in (1, 2))
    torch.optim.lr_scheduler.ExponentialLR(saved["o"], 0.5)
    step(saved)
    save(saved, tmp_path)
    load(other, tmp_path)
    assert held(other) == held(saved)
    assert other["o"].param_groups[0]["initial_lr"] == 0.5


def test_only_what_the_prefixes_name_changes(tmp_path: Path):
    state, other = made(adamw), made(adamw, 2)
    step(state)
    step(other, 2)
    other["o"].param_groups[0]["lr"] = 5.0
    save(state, tmp_path / "c")
    before = held(other)
    load(other, tmp_path / "c", prefixes=["o.state.0.weight"])
    assert held(other)[0]["0.weight"] == held(state)[0]["0.weight"]
    assert held(other)[0]["2.weight"] == before[0]["2.weight"]
    assert held(other)[1] == before[1]


# Stages of a pipeline


def stages(rank: int, *, num_layers: int = 4, seed: int = 1) -> State:
    torch.manual_seed(seed)
    layers = nn.ModuleDict({str(n): nn.Linear(3, 3) for n in range(num_layers)})
    own = nn.ModuleDict({n: layers[n] for n in layers if int(n) % 2 == rank})
    return {"m": own, "o": torch.optim.AdamW(own.parameters(), lr=0.1)}


def train_stage(state: State) -> None:
    for layer in state["m"].values():
        layer(torch.ones(1, 3)).square().sum().backward()
    state["o"].step()
    state["o"].zero_grad()


def on_ranks(work: Callable[[int], Any]) -> list[Any]:
    found = run_as_ranks(work, 2)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


@pytest.mark.filterwarnings("ignore:.*differ:UserWarning")
def test_stages_of_a_pipeline_each_load_their_own(tmp_path: Path):
    def save_stage(rank: int) -> Any:
        state = stages(rank)
        train_stage(state)
        ray_dcp.save(state, checkpoint_id=tmp_path / "c")
        return held(state)

    def load_stage(rank: int) -> Any:
        state = stages(rank, seed=2)
        ray_dcp.load(state, checkpoint_id=tmp_path / "c")
        return held(state)

    saved, loaded = on_ranks(save_stage), on_ranks(load_stage)
    assert loaded == saved

    def load_less(rank: int) -> Any:
        state = stages(rank, num_layers=3, seed=3)
        before = held(state), [p.tolist() for p in state["m"].parameters()]
        with pytest.raises(StateDictError, match=r"'m\.3\.(bias|weight)'"):
            ray_dcp.load(state, checkpoint_id=tmp_path / "c")
        after = held(state), [p.tolist() for p in state["m"].parameters()]
        assert after == before
        options = ray_dcp.LoadOptions(strict=False)
        return ray_dcp.load(state, checkpoint_id=tmp_path / "c", options=options).unexpected

    assert all("m.3.weight" in unexpected for unexpected in on_ranks(load_less))


def pipeline(*layers: int, groups: str = "all", rate: float = 0.1, seed: int = 1) -> State:
    """Returns a stage with some of eight layers; `rate` is multiplied by each layer's number + 1.

    `groups` is how it groups its parameters: `all` in one, `decay` by whether they are decayed, or
    `layers`, each its own.
    """
    torch.manual_seed(seed)
    every = nn.ModuleDict({str(n): nn.Linear(3, 3) for n in range(8)})
    own = nn.ModuleDict({str(n): every[str(n)] for n in layers})
    if groups == "layers":
        cut = [{"params": [*own[n].parameters()], "lr": rate * (int(n) + 1)} for n in own]
    elif groups == "decay":
        cut = [
            {"params": [own[n].weight for n in own if n != "7"], "weight_decay": 0.5 * rate},
            {"params": [own[n].bias for n in own if n != "0"], "weight_decay": rate / 8},
        ]
        cut[0]["params"] += [own["7"].weight] if "7" in own else []
        cut = [{**group, "lr": rate * (1 + min(layers))} for group in cut]
    else:
        cut = [{"params": [*own.parameters()], "lr": rate}]
    return {"m": own, "o": torch.optim.AdamW(cut)}


def options_by_name(state: State) -> dict[str, Any]:
    names = {id(p): name for name, p in state["m"].named_parameters()}
    return {
        names[id(p)]: {k: v for k, v in group.items() if k != "params"}
        for group in state["o"].param_groups
        for p in group["params"]
    }


SPLITS = {2: ((0, 1, 2, 3), (4, 5, 6, 7)), 3: ((0, 1), (2, 3, 4), (5, 6, 7)), 1: (tuple(range(8)),)}
"""Layers of each stage, by the number of ranks."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("planner", [None, OwnLookup])
@pytest.mark.parametrize("groups", ["all", "decay", "layers"])
def test_options_of_a_stages_groups_come_back_on_it_and_nobody_warns(
    groups: str, planner: Any, tmp_path: Path
):
    check = ray_dcp.SaveOptions(replicas="check")

    def rate(rank: int) -> float:
        return 0.1 * (rank + 1)

    def save_stage(rank: int) -> Any:
        state = pipeline(*SPLITS[2][rank], groups=groups, rate=rate(rank))
        train_stage(state)
        how = {"planner": OwnSave()} if planner else {}
        ray_dcp.save(state, checkpoint_id=tmp_path / "c", options=check, **how)
        return held(state), options_by_name(state)

    def load_stage(rank: int) -> Any:
        state = pipeline(*SPLITS[2][rank], groups=groups, rate=7.0, seed=2)
        how = {"planner": planner()} if planner else {}
        report = ray_dcp.load(state, checkpoint_id=tmp_path / "c", **how)
        assert report.missing == ()
        return held(state), options_by_name(state)

    saved = on_ranks(save_stage)
    assert on_ranks(load_stage) == saved
    if groups == "layers":
        every = saved[0][1] | saved[1][1]
        for split in (SPLITS[3], SPLITS[1]):

            def load_other(rank: int, split: Any = split) -> Any:
                state = pipeline(*split[rank], groups=groups, rate=7.0, seed=2)
                ray_dcp.load(state, checkpoint_id=tmp_path / "c")
                return options_by_name(state)

            found = run_as_ranks(load_other, len(split)) if len(split) > 1 else [load_other(0)]
            assert {k: v for one in found for k, v in one.items()} == every


@pytest.mark.filterwarnings("error")
def test_stages_with_equal_options_are_loaded_at_any_split(tmp_path: Path):
    def run(num: int, rank: int, *, is_saved: bool) -> Any:
        state = pipeline(*SPLITS[num][rank], rate=0.25 if is_saved else 3.0, seed=2 - is_saved)
        if is_saved:
            train_stage(state)
            ray_dcp.save(state, checkpoint_id=tmp_path / "c")
        else:
            ray_dcp.load(state, checkpoint_id=tmp_path / "c")
        return held(state)[0], options_by_name(state)

    saved = on_ranks(lambda rank: run(2, rank, is_saved=True))
    expected = [saved[0][i] | saved[1][i] for i in (0, 1)]
    for num in (1, 3):
        found = run_as_ranks(lambda rank, num=num: run(num, rank, is_saved=False), num)
        assert not any(isinstance(one, BaseException) for one in found), found
        for i in (0, 1):
            assert {k: v for one in found for k, v in one[i].items()} == expected[i]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_reads_the_groups_of_all_stages_as_one_process_has_them(tmp_path: Path):
    def save_stage(rank: int) -> State:
        state = pipeline(*SPLITS[2][rank], groups="layers")
        train_stage(state)
        ray_dcp.save(state, checkpoint_id=tmp_path / "c")
        return state

    first, second = on_ranks(save_stage)
    whole = pipeline(*SPLITS[1][0], groups="layers", rate=5.0, seed=2)
    train_stage(whole)
    model, optimizer = get_state_dict(whole["m"], whole["o"])
    into = {"m": model, "o": optimizer}
    stock.load(into, checkpoint_id=tmp_path / "c", no_dist=True)
    set_state_dict(whole["m"], whole["o"], model_state_dict=into["m"], optim_state_dict=into["o"])
    assert options_by_name(whole) == options_by_name(first) | options_by_name(second)
    assert held(whole)[0] == held(first)[0] | held(second)[0]


def test_a_group_that_no_rank_has_is_refused_by_name(tmp_path: Path):
    """Without momentum nothing but its group is stored of a parameter's optimizer."""

    def sgd(layers: Sequence[int], rate: float) -> State:
        model = pipeline(*layers)["m"]
        return {"m": model, "o": torch.optim.SGD(model.parameters(), lr=rate)}

    def load_group(layers: Sequence[int]) -> float:
        state = sgd(layers, 7.0)
        try:
            ray_dcp.load(state, checkpoint_id=tmp_path / "c", options=of_optimizer)
        except StateDictError:
            assert state["o"].param_groups[0]["lr"] == 7.0
            raise
        return state["o"].param_groups[0]["lr"]

    of_optimizer = ray_dcp.LoadOptions(prefixes=["o"])
    first, second = SPLITS[2]
    on_ranks(
        lambda rank: ray_dcp.save(sgd(SPLITS[2][rank], rank + 1), checkpoint_id=tmp_path / "c")
    )
    assert on_ranks(lambda rank: load_group((second, first)[rank])) == [2, 1]
    for error in run_as_ranks(lambda rank: load_group(first), 2):
        assert isinstance(error, StateDictError)
        assert "'o.param_groups.1.lr'" in str(error)


def test_stages_that_share_a_parameter_keep_their_own_options(tmp_path: Path):
    def stage(rank: int, rate: float) -> State:
        torch.manual_seed(1)
        tied, own = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        model = nn.ModuleDict({"tied": tied, str(rank): own})
        return {"m": model, "o": torch.optim.SGD(model.parameters(), lr=rate * (rank + 1))}

    both = [stage(rank, 0.5) for rank in (0, 1)]
    on_ranks(lambda rank: ray_dcp.save(both[rank], checkpoint_id=tmp_path / "c"))

    def load_stage(rank: int) -> float:
        state = stage(rank, 3.0)
        ray_dcp.load(state, checkpoint_id=tmp_path / "c")
        return state["o"].param_groups[0]["lr"]

    assert on_ranks(load_stage) == [0.5, 1.0]


def test_strict_counts_what_any_rank_asks_for(tmp_path: Path):
    ray_dcp.save(
        {"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True
    )
    strict = ray_dcp.LoadOptions(strict=True)

    def load_one(rank: int, names: str = "ab") -> None:
        state = {names[rank]: torch.zeros(2)}
        ray_dcp.load(state, checkpoint_id=tmp_path / "c", options=strict)
        assert state[names[rank]].tolist() == [1, 1]

    on_ranks(load_one)
    for error in run_as_ranks(lambda rank: load_one(rank, "aa"), 2):
        assert isinstance(error, StateDictError)
        assert "'b'" in str(error)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and keeps slow parameters of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                    parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state.get(p, {}) for group in self.param_groups for p in group["params"]]
        return {"inner": self.inner.state_dict(), "slow": dict(enumerate(slow))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.clear()
        for number, slow in state_dict["slow"].items():
            if slow:
                self.state[parameters[int(number)]] = dict(slow)


def wrapped(steps: int) -> State:
    state = made(lambda model: Lookahead(adamw(model)))
    step(state, steps)
    return state


def held_inside(state: State) -> Any:
    return shown(state["o"].state_dict()), shown(list(state["m"].parameters()))


@pytest.mark.parametrize("saved", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("keys", [("m", "o"), ("o",)])
def test_an_optimizer_that_wraps_another_is_loaded_at_any_step(
    saved: int, steps: int, keys: tuple[str, ...], tmp_path: Path
):
    state, other = wrapped(saved), wrapped(steps)
    save({key: state[key] for key in keys}, tmp_path / "c")
    load({key: other[key] for key in keys}, tmp_path / "c")
    assert shown(other["o"].state_dict()) == shown(state["o"].state_dict())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_priming_leaves_the_state_of_an_optimizer_inside(steps: int, tmp_path: Path):
    state = wrapped(steps)
    before = held_inside(state)
    ray_dcp.warm_up(state, no_dist=True).result(180)
    assert held_inside(state) == before
    save({"o": {"other": 1}}, tmp_path / "c")
    with pytest.raises(ray_dcp.CheckpointError):
        load(state, tmp_path / "c")
    assert held_inside(state) == before


class Several(torch.optim.Optimizer):
    """Steps several optimizers, as a list or a mapping of them."""

    def __init__(self, inner: dict[str, torch.optim.Optimizer], kind: type) -> None:
        super().__init__([p for one in inner.values() for p in parameters_of(one)], {})
        self.inner = kind(inner) if kind is dict else kind(inner.values())

    def every(self) -> list[torch.optim.Optimizer]:
        return list(self.inner.values() if isinstance(self.inner, dict) else self.inner)

    def step(self, closure: Any = None) -> None:
        for one in self.every():
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [one.state_dict() for one in self.every()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one, its in zip(self.every(), state_dict["inner"], strict=True):
            one.load_state_dict(its)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [dict, list])
def test_an_optimizer_that_steps_several_is_loaded_or_left_as_it_was(
    kind: type, steps: int, saved: int, tmp_path: Path
):
    def several(model: torch.nn.Module) -> Several:
        first, *others = model.parameters()
        adam, sgd = torch.optim.AdamW([first]), torch.optim.SGD(others, momentum=0.5)
        return Several({"adam": adam, "sgd": sgd}, kind)

    state, other = made(several), made(several)
    step(state, saved)
    step(other, steps)
    before = held_inside(other)
    save(state, tmp_path / "c")
    with pytest.raises(ray_dcp.CheckpointError):
        load({**other, "missing": torch.ones(1)}, tmp_path / "c")
    assert held_inside(other) == before
    load(other, tmp_path / "c")
    assert held_inside(other) == held_inside(state)


@pytest.mark.parametrize("name", optimizers.WRAPPERS)
def test_a_wrapper_that_need_not_have_all_gets_all_the_same(name: str, tmp_path: Path):
    """With `strict=False` too it trains on as it would have."""
    case = optimizers.WRAPPERS[name]
    (model, optimizer), (other, fresh) = case.build(1), case.build(2)
    how = {"gradients": case.gradients}
    optimizers.train(model, optimizer, range(4), **how)
    optimizers.train(other, fresh, range(0), **how)
    save({"m": model, "o": optimizer}, tmp_path / "c")
    report = load({"m": other, "o": fresh}, tmp_path / "c", strict=False)
    assert (report.missing, report.unexpected) == ((), ())
    for one in ((model, optimizer), (other, fresh)):
        optimizers.train(*one, range(4, 8), **how)
    found = optimizers.contents(other, fresh)
    assert differences(found, optimizers.contents(model, optimizer)) == []


@pytest.mark.parametrize("name", ["its own form", "of several, at any depth", "of a wrapper"])
def test_a_wrapper_is_primed_with_all_that_it_holds(name: str):
    """Also one that steps only in its mode for training."""
    case = optimizers.WRAPPERS[name]
    (model, optimizer), (other, stepped) = case.build(1), case.build(1)
    before = optimizers.contents(model, optimizer)
    prime_optimizer(optimizer)
    made = optimizers.contents(model, optimizer)
    assert differences({path: made[path] for path in before}, before) == []
    optimizers.train(other, stepped, range(1))
    is_state = [path for path in optimizers.contents(other, stepped) if "state." in path]
    assert sorted(path for path in made if "state." in path) == sorted(is_state)


class _Key:
    def __str__(self) -> str:
        raise AssertionError("the text of a parameter takes long")

    __repr__ = __str__


class _Visited(dict[Any, Any]):
    num_visits = 0

    def items(self) -> Any:
        self.num_visits += 1
        return super().items()


def test_what_an_optimizer_holds_is_searched_once_and_named_only_if_it_is_an_optimizer(
    tmp_path: Path,
):
    """Optimizers keep mappings by parameter, and registries that hold themselves."""
    model = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    registry = _Visited({_Key(): 1})
    registry |= {"a": registry, "b": [registry], "adam": torch.optim.Adam(model.parameters())}
    optimizer.registry, optimizer.number_of = registry, {_Key(): 0}
    save({"m": model, "o": optimizer}, tmp_path / "c")
    names = ray_dcp.read_state_dict(tmp_path / "c")["o"]["inner_optimizers"]
    assert list(names) == ["registry.adam"]
    assert registry.num_visits < 20


def test_what_an_earlier_version_did_not_save_of_a_wrapper_is_warned_of(tmp_path: Path):
    case = optimizers.WRAPPERS["torch's form"]
    (model, optimizer), (other, fresh) = case.build(1), case.build(2)
    optimizers.train(model, optimizer, range(2))
    options = ray_dcp.LoadOptions(prefixes=["o.state", "o.param_groups", "m"])
    save({"m": model, "o": optimizer}, tmp_path / "c")
    earlier = {
        name: value
        for name, value in ray_dcp.read_state_dict(tmp_path / "c")["o"].items()
        if name != "inner_optimizers"
    }
    save({"m": model, "o": earlier}, tmp_path / "old")
    with pytest.warns(UserWarning, match="no state of 'base', which the optimizer 'o' holds"):
        load({"m": other, "o": fresh}, tmp_path / "old")
    ray_dcp.load({"m": other, "o": fresh}, checkpoint_id=tmp_path / "c", options=options)
    with pytest.raises(StateDictError, match="inner_optimizers"):
        load({"m": other, "o": optimizers.Around(other.parameters())}, tmp_path / "c")


def test_a_primed_optimizer_inside_is_at_step_0():
    state = wrapped(0)
    inner = prime_optimizer(state["o"]).inner
    expected = prime_optimizer(adamw(state["m"]))
    assert shown(inner.state_dict()["state"]) == shown(expected.state_dict()["state"])


def test_as_many_state_dicts_are_made_whatever_a_rank_lacks(tmp_path: Path):
    class Counts(torch.optim.AdamW):
        num_calls = 0

        def state_dict(self) -> dict[str, Any]:
            self.num_calls += 1  # a collective, say
            return super().state_dict()

    def counting() -> State:
        return made(lambda model: Counts(model.parameters()))

    state = counting()
    save(state, tmp_path / "0")
    step(state)
    save(state, tmp_path / "1")
    others = [counting(), counting()]
    for number, other in enumerate(others):
        load(other, tmp_path / str(number))
    assert others[0]["o"].num_calls == others[1]["o"].num_calls


# State dicts of optimizers as plain values


NESTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in a mapping": lambda form: {"top": {"o": form}},
    "in a list": lambda form: {"os": [form, {"x": 1}]},
}
"""Where the state dict of an optimizer may be."""


def form_of(state: State, where: str) -> dict[str, Any]:
    if where == "named":
        return get_state_dict(state["m"], state["o"])[1]
    return state["o"].state_dict()


@pytest.mark.parametrize("where", ["fresh", "named", "partly", *NESTED])
@pytest.mark.parametrize("planner", [None, OwnLookup])
def test_a_state_dict_without_place_for_the_stored_state_is_refused_with_the_ways(
    where: str, planner: Any, tmp_path: Path
):
    """A user writes `optimizer.state_dict()`, which has no state before the first step."""
    nest = NESTED.get(where, lambda form: {"o": form})
    state, other = made(adamw), made(adamw, 2)
    step(state)
    save(nest(form_of(state, where)), tmp_path / "c")
    form = form_of(other, where)
    form["state"] = {0: form_of(state, where)["state"][0]} if where == "partly" else {}
    target, before = nest(form), shown(form)

    def load_it(**options: Any) -> ray_dcp.LoadReport:
        how = {"planner": planner()} if planner else {"options": ray_dcp.LoadOptions(**options)}
        return ray_dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True, **how)

    with pytest.raises(StateDictError, match=r"\{'optim': optimizer\}.*prime_optimizer") as caught:
        load_it()
    assert ".state." in str(caught.value)
    assert shown(form) == before
    if planner is None:
        with pytest.warns(UserWarning, match=r"Not loaded: .*prime_optimizer"):
            report = load_it(strict=False)
        assert any("exp_avg" in name for name in report.unexpected)


def test_a_primed_optimizers_state_dict_is_loaded_and_goes_on(tmp_path: Path):
    state, other = made(adamw), made(adamw, 2)
    step(state)
    save({"m": state["m"], "o": state["o"].state_dict()}, tmp_path / "c")
    target = {"m": other["m"], "o": prime_optimizer(other["o"]).state_dict()}
    load(target, tmp_path / "c")
    other["o"].load_state_dict(target["o"])
    for one in (state, other):
        step(one)
    assert held(other) == held(state)


@pytest.mark.filterwarnings("error")
def test_state_dicts_that_are_shorter_for_a_reason_are_loaded(tmp_path: Path):
    """Those of schedulers and scalers, SGD, some of the parameters; and parts of optimizers."""
    state, other = made(adamw), made(adamw, 2)
    step(state)
    scheduler = torch.optim.lr_scheduler.StepLR(state["o"], 1)
    sgd = torch.optim.SGD(state["m"].parameters())
    saved = {
        "o": state["o"].state_dict(), "scheduler": scheduler.state_dict(), "sgd": sgd.state_dict(),
        "scaler": {"scale": 2.0, "state": {"growth": 1}},
    }  # fmt: skip
    save(saved, tmp_path / "c")
    head = torch.optim.AdamW([*other["m"].parameters()][:1])
    for parameter in head.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    head.step()
    for target in (
        {"o": head.state_dict()},
        {"o": {"param_groups": state["o"].state_dict()["param_groups"]}},
        {"scheduler": {"last_epoch": 0}, "scaler": {"scale": 1.0}},
        {"sgd": torch.optim.SGD(other["m"].parameters()).state_dict()},
    ):
        load(target, tmp_path / "c")


def test_state_that_another_rank_has_a_place_for_is_not_lost(tmp_path: Path):
    """Ranks give state dicts by the names of their own parameters."""

    def form(rank: int, *, is_trained: bool) -> dict[str, Any]:
        state = stages(rank)
        if is_trained:
            train_stage(state)
        return {"o": {"state": get_state_dict(state["m"], state["o"])[1]["state"],
                      "param_groups": [{"lr": 1, "params": ["all"]}]}}  # fmt: skip

    # Why made here: threads would draw from one generator.
    saved = [form(rank, is_trained=True) for rank in (0, 1)]
    on_ranks(lambda rank: ray_dcp.save(saved[rank], checkpoint_id=tmp_path / "c"))

    def load_stage(rank: int, *, is_empty: bool) -> dict[str, Any]:
        target = form(rank, is_trained=False)
        if rank and is_empty:
            target["o"]["state"] = {}
        ray_dcp.load(target, checkpoint_id=tmp_path / "c")
        return target["o"]["state"]

    found = on_ranks(lambda rank: load_stage(rank, is_empty=False))
    assert [shown(one) for one in found] == [shown(one["o"]["state"]) for one in saved]
    for error in run_as_ranks(lambda rank: load_stage(rank, is_empty=True), 2):
        assert isinstance(error, StateDictError)
