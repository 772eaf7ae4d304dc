"""Optimizers of every kind that a checkpoint meets: torch's, and some whose state is unusual.

Each is a `Case` by name. `train` steps with gradients that depend on nothing but the parameter's
name and the number of the step, so that a copy which is given the same state goes the same way to
the bit. `contents` is everything that a checkpoint has to bring back, as values that can be
compared.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

Trust = namedtuple("Trust", ["ratio", "where"])
"""A record that an optimizer keeps."""

SAFE_GLOBALS = [Trust, TwoTensor]
"""Classes that a safe load has to be told of."""


class Net(nn.Module):
    """Parameters of one and two dimensions, and a buffer; rows of 64 for equal vector loops."""

    def __init__(
        self,
        *,
        only_matrices: bool = False,
        dtype: torch.dtype = torch.float32,
        rows: int = 7,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 64, dtype=dtype)
        self.up = nn.Linear(64, rows, bias=not only_matrices, dtype=dtype)
        self.down = nn.Linear(64, 3, bias=False, dtype=dtype)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))


# Optimizers of the tests' own


class Plain(torch.optim.Optimizer):
    """What the others share: one update for each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
            self.after(group)

    def update(self, parameter: Any, gradient: Any, state: Any, group: Any) -> None:
        raise NotImplementedError

    def after(self, group: dict[str, Any]) -> None:
        """Ends the step of a group."""


class ScheduleFree(Plain):
    """Averages instead of a schedule: what it counts lies in the options of its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, k=0, weight_sum=0.0, lr_max=-1.0, train_mode=True, betas=(0.9, 1))

    def update(self, parameter, gradient, state, group):
        z = state.setdefault("z", parameter.clone())
        second = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
        second.lerp_(gradient.square(), 0.02)
        weight = (group["k"] + 1) ** 0.5
        z.addcdiv_(gradient, second.sqrt() + 1e-8, value=-group["lr"])
        parameter.lerp_(z, weight / (group["weight_sum"] + weight))

    def after(self, group):
        group["lr_max"] = max(group["lr_max"], group["lr"] * (1 + group["k"]) / 10)
        group["weight_sum"] += (group["k"] + 1) ** 0.5
        group["k"] += 1


class EightBit(Plain):
    """Its moment is uint8 codes with one scale a row."""

    def update(self, parameter, gradient, state, group):
        moment = gradient.clone()
        if "codes" in state:
            scale = state["scale"].reshape(-1, *[1] * (parameter.dim() - 1))
            moment = moment + 0.9 * (state["codes"].to(parameter.dtype) - 128) * scale
        rows = moment.abs() if moment.dim() == 1 else moment.abs().amax(dim=1)
        state["scale"] = rows / 127 + 1e-12
        scale = state["scale"].reshape(-1, *[1] * (parameter.dim() - 1))
        state["codes"] = ((moment / scale).round() + 128).to(torch.uint8)
        parameter.add_(moment, alpha=-group["lr"])


class LocalCodes(Plain):
    """Its moment is codes of its own part of a parameter, in a plain tensor."""

    def update(self, parameter, gradient, state, group):
        sharded = isinstance(parameter, DTensor)
        local = parameter.to_local() if sharded else parameter
        here = gradient.to_local() if sharded else gradient
        codes = state.setdefault("codes", torch.full(local.shape, 128, dtype=torch.uint8))
        moment = 0.9 * (codes.float() - 128) / 32 + here
        codes.copy_((moment * 32 + 128).round().clamp(0, 255).to(torch.uint8))
        state["step"] = state.get("step", 0) + 1
        local.sub_(moment * group["lr"] / state["step"])


class OneElement(Plain):
    """Its counters are plain tensors of one element, as a part of a small parameter may be."""

    def update(self, parameter, gradient, state, group):
        if not state:
            state["step"] = torch.zeros(1)
            state["clock"] = torch.zeros(1)
        state["step"] += 1
        state["clock"] += 2
        parameter.add_(gradient, alpha=-group["lr"] / (state["step"] + state["clock"]).item())


class TwoHalves(Plain):
    """Its moment is a tensor subclass that holds two tensors, and they differ."""

    def update(self, parameter, gradient, state, group):
        sharded = isinstance(parameter, DTensor)
        local = parameter.to_local() if sharded else parameter
        here = gradient.to_local() if sharded else gradient
        if "moment" not in state:
            pair = TwoTensor(torch.zeros_like(local), torch.ones_like(local))
            state["moment"] = like(parameter, pair)
        pair = state["moment"].to_local() if sharded else state["moment"]
        pair.a.lerp_(here, 0.1)
        pair.b.lerp_(here.square(), 0.01)
        local.addcdiv_(pair.a, pair.b.sqrt() + 1e-8, value=-group["lr"])


class MasterWeights(Plain):
    """Keeps fp32 weights and moments of parameters that are bf16."""

    def update(self, parameter, gradient, state, group):
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32)
            state["exp_avg"] = torch.zeros_like(state["master"])
        state["exp_avg"].lerp_(gradient.to(torch.float32), 0.1)
        state["master"].add_(state["exp_avg"], alpha=-group["lr"] / 100)
        parameter.copy_(state["master"])


class HalfMoments(Plain):
    """Keeps bf16 moments of parameters that are fp32."""

    def update(self, parameter, gradient, state, group):
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["exp_avg"].lerp_(gradient.to(torch.bfloat16), 0.1)
        parameter.add_(state["exp_avg"].to(torch.float32), alpha=-group["lr"])


class Counting(Plain):
    """Counts in int64, also beyond what a float32 can count."""

    def update(self, parameter, gradient, state, group):
        if "seen" not in state:
            state["seen"] = torch.tensor((1 << 40) + 1)
            state["signs"] = torch.zeros_like(parameter, dtype=torch.int64)
            state["is_warm"] = torch.tensor(False)
            state["calls"] = 0
        state["seen"] += 1
        state["signs"] += (gradient > 0).to(torch.int64)
        state["is_warm"] = state["seen"] > (1 << 40) + 2
        state["calls"] += 1
        rate = group["lr"] / (state["seen"] - (1 << 40)).item()
        parameter.sub_(gradient * rate + state["signs"].to(parameter.dtype) * 1e-3)


class Global(Plain):
    """Keeps state under keys that are no parameters."""

    def update(self, parameter, gradient, state, group):
        shared = self.state["global"]
        shared["norm"] = shared.get("norm", torch.zeros(3)) * 0.9 + 0.1
        shared["calls"] = shared.get("calls", 0) + 1
        state["exp_avg"] = state.get("exp_avg", torch.zeros_like(parameter)).lerp(gradient, 0.1)
        parameter.sub_(state["exp_avg"] * float(shared["norm"].sum()) * group["lr"])


class Odd(Plain):
    """Keeps values that are no tensors in a parameter's state."""

    def update(self, parameter, gradient, state, group):
        if not state:
            state["phase"] = "warm-up"
            state["trust"] = Trust(0.5, "here")
            state["window"] = [torch.zeros_like(parameter), torch.zeros(2, dtype=torch.int32)]
            state["nested"] = {"by_step": {0: torch.zeros(2)}, "plain": [1, "a", None]}
            state["nothing"] = None
            state["pair"] = (1, 2.5)
            state["flags"] = [True, False]
            state["empty"] = {}
            state["raw"] = b"\x00\xff"
        state["phase"] = "steady" if state["phase"] == "warm-up" else "warm-up"
        state["trust"] = Trust(state["trust"].ratio * 1.5, state["phase"])
        state["window"][0].lerp_(gradient, 0.1)
        state["window"][1] += 1
        state["nested"]["by_step"][0] += 1
        rate = group["lr"] * state["trust"].ratio * float(state["nested"]["by_step"][0][0])
        parameter.sub_(state["window"][0] * (rate if state["phase"] == "steady" else rate / 2))


class Late(Plain):
    """Makes a key of its state only in its third step, as Lookahead does."""

    def update(self, parameter, gradient, state, group):
        state["step"] = state.get("step", 0) + 1
        if state["step"] == 3:
            state["slow"] = parameter.clone()
        parameter.sub_(gradient * group["lr"])
        if "slow" in state:
            state["slow"].lerp_(parameter, 0.5)
            parameter.copy_(state["slow"])


# Optimizers around others


class Averaging(torch.optim.Optimizer):
    """Averages what another optimizer does, and counts in the options of that one's groups.

    It has a `state_dict` of its own, steps in a mode for training alone, and is no sooner at its
    state than in its first step: as `ScheduleFreeWrapper` of `pytorch_optimizer` is.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.train_mode = base, False
        self.param_groups = base.param_groups

    def train(self) -> None:
        self.train_mode = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.train_mode:
            raise RuntimeError("not in the mode for training")
        self.base.step()
        for group in self.param_groups:
            group["weight_sum"] = group.get("weight_sum", 0.0) + 1.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    slow = self.state[parameter].setdefault("slow", parameter.clone())
                    parameter.copy_(slow.lerp_(parameter, 1 / group["weight_sum"]))

    def state_dict(self) -> dict[str, Any]:
        slow = {
            (number, index): dict(self.state[parameter])
            for number, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter in self.state
        }
        return {"slow_state": slow, "base": self.base.state_dict(), "train_mode": self.train_mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        self.train_mode = state_dict["train_mode"]
        self.state.clear()
        for (number, index), slow in state_dict["slow_state"].items():
            self.state[self.param_groups[number]["params"][index]] = dict(slow)


class Around(Plain):
    """Steps others first, that torch's `state_dict` does not find, wherever they are."""

    def __init__(self, params: Any, **inside: Any) -> None:
        super().__init__(params, lr=0.25)
        vars(self).update(inside)

    def step(self, closure: Any = None) -> None:
        for inner in inside(self):
            inner.step()
        super().step()

    def update(self, parameter, gradient, state, group):
        slow = state.setdefault("slow", parameter.clone())
        parameter.copy_(slow.lerp_(parameter, group["lr"]))


class NoOptimizer:
    """Is used as an optimizer, but derives from none; its state is that of the one inside."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.base.step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        z = self.state[parameter].setdefault("z", parameter.detach().clone())
                        parameter.copy_(z.lerp_(parameter, 1 / group["steps"]))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


def inside(optimizer: Any) -> list[Any]:
    """Returns the optimizers that one holds, at any depth, each once."""
    found: list[Any] = []

    def find(value: Any) -> None:
        if isinstance(value, torch.optim.Optimizer | NoOptimizer):
            if not any(value is one for one in found):
                found.append(value)
        elif isinstance(value, Mapping):
            [find(each) for each in value.values()]
        elif isinstance(value, list | tuple):
            [find(each) for each in value]

    find({k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")})
    return found


def family(optimizer: Any) -> list[Any]:
    """Returns an optimizer and those inside."""
    every = [optimizer]
    for one in every:
        every += inside(one)
    return every


def everywhere(module: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer with others in an attribute, a mapping and lists in one."""
    first, second, *rest = module.parameters()
    return Around(
        module.parameters(),
        base=optim.SGD([first], lr=0.1, momentum=0.9),
        more={"adam": [optim.AdamW([second], lr=0.1)], "deep": {"er": [optim.RMSprop(rest)]}},
    )


# Cases

Make = Callable[[nn.Module], torch.optim.Optimizer]


def of(cls: Any, **options: Any) -> Make:
    return lambda module: cls(module.parameters(), **options)


def in_groups(cls: Any, **options: Any) -> Make:
    """Returns what makes an optimizer of a group for matrices and one for the others."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() < 2]
        return cls([{"params": matrices, **options}, {"params": others}], lr=0.125)

    return make


@dataclass(frozen=True)
class Case:
    """An optimizer and what it is for."""

    make: Make
    dtype: torch.dtype = torch.float32
    only_matrices: bool = False
    rows: int = 7
    gradients: str = "dense"
    """`dense`, `sparse`, those of a `closure`, or `twice`: dense ones, then those of a closure."""

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Returns a module with random parameters, and its optimizer."""
        torch.manual_seed(seed)
        module = Net(only_matrices=self.only_matrices, dtype=self.dtype, rows=self.rows)
        return module, self.make(module)


optim = torch.optim

OF_TORCH: dict[str, Case] = {
    "ASGD": Case(of(optim.ASGD, t0=2.0, lambd=0.1)),
    "Adadelta": Case(of(optim.Adadelta)),
    "Adafactor": Case(of(optim.Adafactor)),
    "Adagrad": Case(of(optim.Adagrad, initial_accumulator_value=0.5)),
    "Adam": Case(of(optim.Adam)),
    "Adam, amsgrad": Case(of(optim.Adam, amsgrad=True, maximize=True)),
    "AdamW": Case(of(optim.AdamW)),
    "AdamW, bf16": Case(of(optim.AdamW), dtype=torch.bfloat16),
    "AdamW, fused": Case(of(optim.AdamW, fused=True)),
    "AdamW, one by one": Case(of(optim.AdamW, foreach=False)),
    "AdamW, learning rate in a tensor": Case(
        lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.0625), foreach=False)
    ),
    "AdamW, two groups": Case(in_groups(optim.AdamW, lr=0.25, betas=(0.5, 0.75))),
    "AdamW, named": Case(lambda m: optim.AdamW(m.named_parameters())),
    "Adamax": Case(of(optim.Adamax)),
    "LBFGS": Case(of(optim.LBFGS, max_iter=3, history_size=2), gradients="closure"),
    "Muon": Case(of(optim.Muon), only_matrices=True),
    "NAdam": Case(of(optim.NAdam, decoupled_weight_decay=True)),
    "RAdam": Case(of(optim.RAdam)),
    "RMSprop": Case(of(optim.RMSprop)),
    "RMSprop, centred": Case(of(optim.RMSprop, centered=True, momentum=0.5)),
    "Rprop": Case(of(optim.Rprop)),
    "SGD": Case(of(optim.SGD, lr=0.1)),
    "SGD, momentum": Case(of(optim.SGD, lr=0.1, momentum=0.9)),
    "SparseAdam": Case(of(optim.SparseAdam), only_matrices=True, gradients="sparse"),
}

OF_THE_TESTS: dict[str, Case] = {
    "schedule-free": Case(of(ScheduleFree)),
    "8 bits": Case(of(EightBit)),
    "subclass": Case(of(TwoHalves)),
    "local codes": Case(of(LocalCodes)),
    "counters of one element": Case(of(OneElement)),
    "fp32 master of bf16": Case(of(MasterWeights), dtype=torch.bfloat16),
    "bf16 moments of fp32": Case(of(HalfMoments)),
    "int64 counters": Case(of(Counting)),
    "state of no parameter": Case(of(Global)),
    "texts and records": Case(of(Odd)),
    "a key made later": Case(of(Late)),
}

CASES = OF_TORCH | OF_THE_TESTS


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=0.05)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


WRAPPERS: dict[str, Case] = {
    "its own form": Case(lambda m: Averaging(adam(m))),
    "its own form, two groups": Case(lambda m: Averaging(in_groups(optim.AdamW, lr=0.25)(m))),
    "torch's form": Case(lambda m: Around(m.parameters(), base=adam(m))),
    "of several, at any depth": Case(everywhere),
    "of a wrapper": Case(lambda m: Around(m.parameters(), base=Averaging(momentum(m)))),
    "no optimizer of torch": Case(lambda m: NoOptimizer(momentum(m))),
}
"""Optimizers around others."""


def of_packages() -> dict[str, Case]:
    """Returns optimizers of other packages; of large ones by hand, where they are installed."""
    import pytorch_optimizer as more
    import schedulefree as free

    found: dict[str, Case] = {}
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        found[f"schedulefree {name}"] = Case(of(getattr(free, name), lr=0.05))
    found["schedulefree wrapper"] = Case(lambda m: free.ScheduleFreeWrapper(momentum(m)))
    for name in ("ScheduleFreeWrapper", "OrthoGrad", "TRAC", "Magma", "PCGrad"):
        found[f"pytorch_optimizer {name}"] = Case(lambda m, n=name: getattr(more, n)(adam(m)))
    for how in ("none", "reset", "pullback"):
        found[f"pytorch_optimizer Lookahead, {how}"] = Case(
            lambda m, how=how: more.Lookahead(momentum(m), k=3, pullback_momentum=how)
        )
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        found[f"pytorch_optimizer {name}"] = Case(
            of(getattr(more, name), base_optimizer=optim.SGD, lr=0.05, momentum=0.9),
            gradients="twice",
        )
    # Why by hand: these packages are large, and warn of kernels that they have not.
    if os.environ.get("RAY_DCP_THOROUGH") and find_spec("torchao"):
        from torchao import optim as ao

        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
            found[f"torchao {name}"] = Case(of(getattr(ao, name), lr=0.05), rows=64)
    if os.environ.get("RAY_DCP_THOROUGH") and find_spec("bitsandbytes"):
        from bitsandbytes import optim as bits

        for name in ("AdamW", "AdamW8bit", "Lion8bit", "SGD8bit"):
            options = {"lr": 0.05} | ({"momentum": 0.9} if name == "SGD8bit" else {})
            found[f"bitsandbytes {name}"] = Case(of(getattr(bits, name), **options), rows=64)
    return found


WRAPPERS |= of_packages()


# What they do and hold


def like(parameter: Any, local: torch.Tensor) -> Any:
    """Returns a local tensor as part of a DTensor like the parameter, if that is one."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def gradient(name: str, parameter: Any, step: int) -> Any:
    """Returns the gradient of a step, the same for every way in which a parameter is cut."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, parameter.placements)


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    *,
    gradients: str = "dense",
    without: Iterable[str] = (),
) -> None:
    """Takes the steps of these numbers.

    Args:
        module: Has the parameters.
        optimizer: Of it.
        steps: Their gradients follow from them.
        gradients: See `Case`.
        without: Names of parameters that get no gradient.
    """
    for one in family(optimizer):
        getattr(one, "train", lambda: None)()
    for step in steps:
        torch.manual_seed(step)  # of optimizers that draw
        if gradients in ("closure", "twice"):
            if gradients == "twice":
                closed(module, step)
            optimizer.step(lambda step=step: closed(module, step))
        else:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and name not in without:
                    made = gradient(name, parameter, step)
                    if gradients == "sparse":
                        made[step % len(made)] = 0
                        made = made.to_sparse(1)
                    parameter.grad = made
            optimizer.step()
        for parameter in module.parameters():
            parameter.grad = None
        with torch.no_grad():
            module.calls += 1


def closed(module: nn.Module, step: int) -> torch.Tensor:
    """Returns the loss of a bowl whose bottom is not at 0, with its gradients."""
    for parameter in module.parameters():
        parameter.grad = None
    loss = torch.zeros(())
    for name, parameter in module.named_parameters():
        away = parameter - gradient(name, parameter, step)
        loss = loss + away.square().sum() + 0.1 * away.pow(4).sum()
    loss.backward()
    return loss


def contents(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns copies of all that a checkpoint brings back, whole and by path.

    Options of a group are under the names of its parameters, so that its place is of no account.
    """
    found = {f"model.{name}": value for name, value in module.named_parameters()}
    found |= {f"model.{name}": value for name, value in module.named_buffers()}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for index, one in enumerate(family(optimizer)):
        start = f"inside {index}." if index else ""
        for key, state in one.state.items():
            where = names.get(key, key) if isinstance(key, torch.Tensor) else key
            if not (isinstance(state, Mapping) and not state):
                found[f"{start}state.{where}"] = by_name(of_all(state, key), names)
        for number, group in enumerate(one.param_groups):
            held = ",".join(sorted(str(names.get(p, "?")) for p in group["params"]))
            for option, value in group.items():
                if option != "params":
                    found[f"{start}group({held or number}).{option}"] = value
    return {path: whole(value) for path, value in sorted(found.items())}


def of_all(state: Any, parameter: Any) -> Any:
    """Returns state in which a rank's own part, in a plain tensor, is a part of a sharded one."""
    if not isinstance(parameter, DTensor) or not isinstance(state, Mapping):
        return state
    local = parameter.to_local().shape
    return {
        key: like(parameter, value)
        if key == "codes" and value.shape == local
        else value
        for key, value in state.items()
    }  # fmt: skip


def by_name(state: Any, names: Mapping[Any, str]) -> Any:
    """Returns state with the names of parameters in place of parameters as its keys."""
    if not isinstance(state, Mapping):
        return state
    return {names.get(k, k) if isinstance(k, torch.Tensor) else k: v for k, v in state.items()}


def whole(value: Any) -> Any:
    """Returns a copy of a value in which sharded tensors are whole, and mappings are sorted."""
    if isinstance(value, DTensor):
        local = value.to_local()
        if type(local) is TwoTensor:
            return TwoTensor(whole(like(value, local.a)), whole(like(value, local.b)))
        value = value.full_tensor()
    if type(value) is TwoTensor:
        return TwoTensor(whole(value.a), whole(value.b))
    if hasattr(value, "__tensor_flatten__"):
        return {name: whole(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: whole(value[key]) for key in sorted(value, key=str)}
    return [whole(each) for each in value] if type(value) is list else copy.deepcopy(value)
