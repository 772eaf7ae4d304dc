"""load(save(S)) is S, and S goes on as it would have gone, for every optimizer there is.

What a case has to bring back are keys, values, dtypes, types and the options of groups; and the
next step of what was loaded must lead to the same bits as the next step of what was saved. See
`tests/support/optimizers.py` for the optimizers, `tests/support/optimizer_ranks.py` for what
several ranks do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.serialization import safe_globals

import ray_dcp
from tests.support import optimizers
from tests.support.adapter import OwnLookup, OwnSave
from tests.support.comparing import differences
from tests.support.optimizer_ranks import CASES as CASES_OF_RANKS
from tests.support.optimizers import CASES, SAFE_GLOBALS, WRAPPERS, Net
from tests.support.programs.forks import Programs

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",  # stock DCP's word for no_dist
    "ignore:TypedStorage is deprecated:UserWarning",  # stock DCP of torch 2.9, on every save
)


@pytest.fixture(autouse=True, scope="module")
def allowed() -> Iterator[None]:
    with safe_globals(SAFE_GLOBALS):
        yield


# How a state goes to the disk and back


def save_ours(state: dict[str, Any], path: Path) -> None:
    ray_dcp.save(state, checkpoint_id=path, no_dist=True)


def save_with_hooks(state: dict[str, Any], path: Path) -> None:
    ray_dcp.save(state, checkpoint_id=path, no_dist=True, planner=OwnSave())


def save_whole(state: dict[str, Any], path: Path) -> None:
    """The state of each module and optimizer as one object."""
    planner = ray_dcp.DefaultSavePlanner(flatten_state_dict=False)
    ray_dcp.save(state, checkpoint_id=path, no_dist=True, planner=planner)


def save_stock(state: dict[str, Any], path: Path) -> None:
    """As DCP's documentation does: by `get_state_dict`."""
    stock.save(named(state), checkpoint_id=path, no_dist=True)


def save_stock_as_it_is(state: dict[str, Any], path: Path) -> None:
    """Modules and optimizers as `Stateful` values: parameters are numbers."""
    stock.save(dict(state), checkpoint_id=path, no_dist=True)


def named(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what `get_state_dict` makes of one module and one optimizer."""
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer}


def load_ours(state: dict[str, Any], path: Path) -> Any:
    return ray_dcp.load(state, checkpoint_id=path, no_dist=True)


def load_with_hooks(state: dict[str, Any], path: Path) -> Any:
    return ray_dcp.load(state, checkpoint_id=path, no_dist=True, planner=OwnLookup())


def load_whole(state: dict[str, Any], path: Path) -> Any:
    planner = ray_dcp.DefaultLoadPlanner(flatten_state_dict=False)
    return ray_dcp.load(state, checkpoint_id=path, no_dist=True, planner=planner)


Save = Callable[[dict[str, Any], Path], None]
WAYS: dict[str, tuple[Save, Callable[[dict[str, Any], Path], Any]]] = {
    "ours": (save_ours, load_ours),
    "hooks": (save_with_hooks, load_with_hooks),
    "whole": (save_whole, load_whole),
    "stock": (save_stock, load_ours),
    "stock as it is": (save_stock_as_it_is, load_ours),
}

STOCK_FAILS = {"state of no parameter": KeyError}
"""What `get_state_dict` can't name."""


# Every optimizer


def trained(case: optimizers.Case, seed: int, steps: range) -> dict[str, Any]:
    module, optimizer = case.build(seed)
    optimizers.train(module, optimizer, steps, gradients=case.gradients)
    return {"model": module, "optimizer": optimizer}


def contents(state: dict[str, Any]) -> dict[str, Any]:
    return optimizers.contents(state["model"], state["optimizer"])


def go_on(case: optimizers.Case, state: dict[str, Any], steps: range) -> None:
    optimizers.train(state["model"], state["optimizer"], steps, gradients=case.gradients)


def check_same(found: dict[str, Any], expected: dict[str, Any], when: str) -> None:
    lines = differences(found, expected)
    if lines:
        pytest.fail(f"{len(lines)} differ {when}:\n" + "\n".join(lines[:12]), pytrace=False)


def test_no_optimizer_of_torch_is_left_out() -> None:
    classes = {
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    tried = {type(case.build(1)[1]) for case in optimizers.OF_TORCH.values()}
    assert tried == classes - {torch.optim.Optimizer}


ALL = CASES | WRAPPERS
UNUSUAL = ("LBFGS", "SGD, momentum", "AdamW, named", *optimizers.OF_THE_TESTS)
"""Optimizers whose state has another form than that of most."""


def ways_of_optimizers() -> Iterator[tuple[str, str, str]]:
    """Yields optimizer, way and into what; all ways of those whose state is unusual.

    What is around others is not loaded by stock DCP, nor saved by its helpers.
    """
    yield from ((name, "ours", into) for name in WRAPPERS for into in ("new", "same"))
    yield from ((name, "hooks", "new") for name in list(WRAPPERS)[:6])
    for number, name in enumerate(CASES):
        if name not in UNUSUAL:
            yield name, "ours", "same" if number % 2 else "new"
            yield name, "stock", "new"
            continue
        yield from ((name, "ours", into) for into in ("new", "same"))
        for turn, way in enumerate(WAYS):
            if way != "ours":
                yield name, way, "same" if (number + turn) % 2 else "new"


@pytest.mark.parametrize(("name", "way", "into"), list(ways_of_optimizers()))
def test_every_optimizer_comes_back_and_goes_on(name: str, way: str, into: str, tmp_path: Path):
    """Into a new module and optimizer; or into the same ones, which were trained on (a rollback).

    The twin was never saved, so that a save which changes what it saves is found too.
    """
    case, (save, load) = ALL[name], WAYS[way]
    if way == "stock" and name in STOCK_FAILS:
        with pytest.raises(STOCK_FAILS[name]):
            save(trained(case, 1, range(4)), tmp_path / "c")
        return
    saved, twin = trained(case, 1, range(4)), trained(case, 1, range(4))
    save(saved, tmp_path / "c")
    check_same(contents(saved), contents(twin), "after the save")
    if into == "same":
        other = saved
        go_on(case, other, range(20, 22))
        for group in other["optimizer"].param_groups:
            group["lr"] = group["lr"] * 3
    else:
        other = trained(case, 2, range(0))
    held = {n: p.data_ptr() for n, p in other["model"].named_parameters()}
    load(other, tmp_path / "c")
    check_same(contents(other), contents(twin), "after the load")
    assert {n: p.data_ptr() for n, p in other["model"].named_parameters()} == held
    for state in (other, twin):
        go_on(case, state, range(4, 6))
    check_same(contents(other), contents(twin), "after the next steps")


@pytest.mark.parametrize("name", ALL)
def test_a_save_before_the_first_step_comes_back_and_goes_on(name: str, tmp_path: Path):
    """In a new module and optimizer, and in those that were saved, after steps (a rollback)."""
    case = ALL[name]
    saved, twin, other = (trained(case, seed, range(0)) for seed in (1, 1, 2))
    save_ours(saved, tmp_path / "c")
    check_same(contents(saved), contents(twin), "after the save")
    go_on(case, saved, range(20, 24))
    go_on(case, twin, range(4))
    for state, what in ((other, "load"), (saved, "rollback")):
        load_ours(state, tmp_path / "c")
        go_on(case, state, range(4))
        check_same(contents(state), contents(twin), f"after the {what}")


OF_STOCK = ("AdamW", "Adagrad", "Adafactor", "Muon", "SparseAdam", *UNUSUAL)


@pytest.mark.parametrize("name", [name for name in OF_STOCK if name not in STOCK_FAILS])
def test_stock_loads_ours_wherever_it_loads_its_own(name: str, tmp_path: Path):
    """Into state dicts of `get_state_dict`, of a module and optimizer that have stepped."""
    case = CASES[name]
    saved = trained(case, 1, range(4))
    expected = named(saved)
    stock.save(expected, checkpoint_id=tmp_path / "stock", no_dist=True)
    save_ours(saved, tmp_path / "ours")

    def by_stock(path: Path) -> dict[str, Any]:
        into = named(trained(case, 2, range(4)))
        stock.load(into, checkpoint_id=path, no_dist=True)
        return optimizers.whole(into)

    check_same(by_stock(tmp_path / "ours"), by_stock(tmp_path / "stock"), "after the load")


# Groups, frozen parameters, several modules


@dataclass
class Job:
    """Modules and optimizers of one training, of which not all need be given to a checkpoint."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    given: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        names = self.given or tuple(self.modules)
        return {**{n: self.modules[n] for n in names}, **self.optimizers, **self.more}

    def train(self, steps: range) -> None:
        for step in steps:
            for module in self.modules.values():
                for name, parameter in module.named_parameters():
                    if parameter.requires_grad and name not in self.without:
                        parameter.grad = optimizers.gradient(name, parameter, step)
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in self.more.values():
                scheduler.step()

    def contents(self) -> dict[str, Any]:
        """Returns parameters of the modules that are given, and all that the optimizers hold."""
        found: dict[str, Any] = {}
        whole = nn.ModuleDict(self.modules)
        hidden = tuple(f"model.{n}." for n in self.modules if self.given and n not in self.given)
        for key, optimizer in self.optimizers.items():
            for path, value in optimizers.contents(whole, optimizer).items():
                if not path.startswith(hidden or ("-",)):
                    found[f"{key}.{path}"] = value
        return found | {k: optimizers.whole(v.state_dict()) for k, v in self.more.items()}

    def freeze(self, *names: str, free: bool = False) -> None:
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                if name in names:
                    parameter.requires_grad_(free)


Cls = Callable[..., torch.optim.Optimizer]
CLASSES: dict[str, tuple[Cls, torch.dtype]] = {
    "AdamW": (torch.optim.AdamW, torch.float32),
    "SGD": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.float32),
    "schedule-free": (optimizers.ScheduleFree, torch.float32),
    "8 bits": (optimizers.EightBit, torch.float32),
    "master": (optimizers.MasterWeights, torch.bfloat16),
}


class Story:
    """How a job is made, trained and changed, before and after the save; the plain one."""

    stock = True
    """Whether `get_state_dict` can name it."""
    numbered = True
    """Whether numbers of parameters are enough to know them by."""

    def __init__(self, cls: Cls, dtype: torch.dtype) -> None:
        self.cls, self.dtype = cls, dtype

    def net(self) -> nn.Module:
        return Net(dtype=self.dtype)

    def build(self) -> Job:
        """Returns the job that is saved, untrained."""
        module = self.net()
        return Job({"model": module}, {"optimizer": self.optimizer(module)})

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return self.cls(module.parameters())

    def until_save(self, job: Job) -> None:
        """Trains the job that is saved."""
        job.train(range(4))

    def after_save(self, job: Job) -> None:
        """Goes on with the job that is to be rolled back."""
        job.train(range(20, 22))

    def build_new(self) -> Job:
        """Returns the job to load into, untrained."""
        return self.build()

    def before_next(self, job: Job) -> None:
        """Makes jobs alike in what no checkpoint holds, before the next steps."""


class EmptyGroups(Story):
    def optimizer(self, module):
        first, *rest = module.parameters()
        return self.cls(
            [{"params": [first], "lr": 0.5}, {"params": [], "lr": 0.25}, {"params": rest},
             {"params": []}]
        )  # fmt: skip


class OtherOrderOfGroups(Story):
    order = (0, 1)
    numbered = False

    def optimizer(self, module):
        first, *rest = module.parameters()
        groups = [{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.25}]
        return self.cls([groups[number] for number in self.order])

    def build_new(self):
        self.order = (1, 0)
        job = self.build()
        for group in job.optimizers["optimizer"].param_groups:
            group["lr"] = 3.0
        self.order = (0, 1)
        return job


class OtherOrderOfParameters(Story):
    numbered = False

    def build_new(self):
        module = self.net()
        return Job(
            {"model": module}, {"optimizer": self.cls(list(reversed(list(module.parameters()))))}
        )


class AddedGroup(Story):
    def optimizer(self, module):
        return self.cls(list(module.parameters())[:2])

    def add(self, job):
        rest = list(job.modules["model"].parameters())[2:]
        job.optimizers["optimizer"].add_param_group({"params": rest, "lr": 0.5})

    def until_save(self, job):
        job.train(range(2))
        self.add(job)
        job.train(range(2, 4))

    def build_new(self):
        job = self.build()
        self.add(job)
        return job


class OptionsOfItsOwn(Story):
    def until_save(self, job):
        job.train(range(2))
        group = job.optimizers["optimizer"].param_groups[0]
        group.update(lr=0.0078125, note="kept", decay={"a": 1, "b": [2]}, ema=torch.ones(3))
        job.train(range(2, 4))


class SomeWithoutGradient(Story):
    def build(self):
        job = super().build()
        job.without = ("up.bias",)
        return job

    def after_save(self, job):
        job.without = ()
        job.train(range(20, 22))
        job.without = ("up.bias",)


class InNoGroup(Story):
    def optimizer(self, module):
        return self.cls(list(module.parameters())[1:])


class TrainedThenFrozen(Story):
    FROZEN = ("embed.weight", "up.bias")

    def until_save(self, job):
        job.train(range(2))
        job.freeze(*self.FROZEN)
        job.train(range(2, 4))

    def build_new(self):
        job = self.build()
        job.freeze(*self.FROZEN)
        return job


class FrozenThenFreed(TrainedThenFrozen):
    """Frozen when it was saved; free in the job to load into."""

    def after_save(self, job):
        self.before_next(job)
        super().after_save(job)

    def build_new(self):
        return self.build()

    def before_next(self, job):
        job.freeze(*self.FROZEN, free=True)


class FrozenAfterwards(TrainedThenFrozen):
    """Free when it was saved; frozen in the job to load into, and freed after the load."""

    def until_save(self, job):
        job.train(range(4))

    def after_save(self, job):
        job.freeze(*self.FROZEN)
        super().after_save(job)

    def before_next(self, job):
        job.freeze(*self.FROZEN, free=True)


class OneOfTwoModules(Story):
    stock = False
    given: tuple[str, ...] = ("model",)

    def build(self):
        modules = {"model": self.net(), "other": self.net()}
        together = [p for module in modules.values() for p in module.parameters()]
        return Job(modules, {"optimizer": self.cls(together)}, self.given)


class BothModules(OneOfTwoModules):
    given = ()


class TwoOptimizers(Story):
    stock = False

    def build(self):
        module = self.net()
        first, *rest = module.parameters()
        second = self.cls([{"params": rest, "lr": 0.5}])
        return Job({"model": module}, {"one": self.cls([first]), "two": second})


class Scheduled(Story):
    stock = False

    def build(self):
        job = super().build()
        optimizer = job.optimizers["optimizer"]
        job.more["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return job


STORIES: dict[str, type[Story]] = {
    "empty groups": EmptyGroups,
    "groups in another order": OtherOrderOfGroups,
    "parameters in another order": OtherOrderOfParameters,
    "an added group": AddedGroup,
    "options of its own": OptionsOfItsOwn,
    "some without gradient": SomeWithoutGradient,
    "some in no group": InNoGroup,
    "trained, then frozen": TrainedThenFrozen,
    "frozen, then freed": FrozenThenFreed,
    "frozen afterwards": FrozenAfterwards,
    "one of two modules": OneOfTwoModules,
    "both of two modules": BothModules,
    "two optimizers": TwoOptimizers,
    "a scheduler": Scheduled,
}


def ways_of_stories() -> Iterator[tuple[str, str, str, str]]:
    """Yields story, optimizer, way and into what; the optimizers by turns."""
    for number, (story, cls) in enumerate(STORIES.items()):
        others = ("SGD", "master") if number % 2 else ("schedule-free", "8 bits")
        yield from ((story, "AdamW", "ours", into) for into in ("new", "same"))
        for name, into in zip(others, ("new", "same"), strict=True):
            yield story, name, "ours", into
        yield story, "AdamW", "hooks", "same" if number % 2 else "new"
        yield story, "AdamW", "whole", "new" if number % 2 else "same"
        if cls.stock:
            yield from ((story, "AdamW", "stock", into) for into in ("new", "same"))
        if cls.numbered:
            yield story, "AdamW", "stock as it is", "new" if number % 2 else "same"


@pytest.mark.parametrize(("story", "name", "way", "into"), list(ways_of_stories()))
def test_every_arrangement_comes_back_and_goes_on(
    story: str, name: str, way: str, into: str, tmp_path: Path
):
    told, (save, load) = STORIES[story](*CLASSES[name]), WAYS[way]

    def made(seed: int, build: Callable[[], Job]) -> Job:
        torch.manual_seed(seed)
        return build()

    saved, twin = made(1, told.build), made(1, told.build)
    told.until_save(saved)
    told.until_save(twin)
    save(saved.state(), tmp_path / "c")
    check_same(saved.contents(), twin.contents(), "after the save")
    if into == "same":
        other = saved
        told.after_save(other)
    else:
        other = made(2, told.build_new)
    load(other.state(), tmp_path / "c")
    check_same(other.contents(), twin.contents(), "after the load")
    for job in (other, twin):
        told.before_next(job)
        job.train(range(4, 6))
    check_same(other.contents(), twin.contents(), "after the next steps")


# Several ranks


@pytest.fixture(scope="module")
def on_ranks(programs: Programs, tmp_path_factory: Any) -> dict[str, list[str]]:
    """What is not as it was, by case of `tests.support.optimizer_ranks`."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = programs.run(
        "-m", "tests.support.optimizer_ranks", str(folder), ranks=4, imports=["pytorch_optimizer"]
    )  # fmt: skip
    assert [one.returncode for one in ended] == [0] * 4, "\n".join(one.stderr for one in ended)
    return json.loads(ended[0].stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES_OF_RANKS)
def test_shards_of_several_ranks_come_back_and_go_on(case: str, on_ranks: Any):
    assert on_ranks[case] == []
