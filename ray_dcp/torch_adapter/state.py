"""`Stateful` values, modules and optimizers into plain state before a save or load, and back after.

Only top-level `Stateful` values are asked; nested ones are left alone, as DCP leaves them.

Modules and optimizers are `Stateful` too, and a checkpoint must fit whatever they are at the load:
DDP, FSDP and `torch.compile` put names of their own in front of a module's, an optimizer numbers
its parameters, and makes its state only in its first step. So they are asked through torch's own
helpers, which name everything by parameter. A load is in place, so an optimizer that has not
stepped is primed: `prime_optimizer` gives it the state that it would only make at its first step,
and changes nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as _stock
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.errors import InvalidRequestError, StateDictError
from ray_dcp.torch_adapter.flatten import below, concerns, flatten
from ray_dcp.torch_adapter.spmd import is_on_xla, xla_modules

AT_ONCE_BYTES = 256 << 20
"""Parameters that are primed together, in bytes: as much memory is needed beside them."""

_FRESH: dict[str, dict[str, str | float]] = {
    "NAdam": {"mu_product": 1.0},
    "ASGD": {"mu": 1.0, "eta": "lr"},
}
"""State that a step changes although parameters and gradients are 0, with what it begins at; a text
names an option of the parameter group."""

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


def prime_optimizer(optimizer: O) -> O:
    """Gives an optimizer the state of one that has made no step, so that a load can fill it.

    For each parameter that has no state yet. Parameters, gradients, the state that is there,
    options and step counts are as before; new step counts are 0. On XLA devices new state is
    sharded as its parameter is.

    Args:
        optimizer: Any that makes its state in `step()` without a closure.

    Returns:
        The same optimizer.

    Raises:
        InvalidRequestError: It is no optimizer, or needs a closure, as `LBFGS`.

    Complexity:
        One step of the optimizer for each `AT_ONCE_BYTES` of parameters.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = prime_optimizer(torch.optim.AdamW([weight], weight_decay=0.5))
        >>> state = optimizer.state[weight]
        >>> weight.tolist(), state["step"].item(), state["exp_avg"].tolist()
        ([1.0, 1.0], 0.0, [0.0, 0.0])

    Source: `torch_xla/experimental/distributed_checkpoint/util.py`, whose own makes a real step.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}", key="optimizer"
        )
    prime(optimizer)
    return optimizer


def prime(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Does what `prime_optimizer` does, and returns the parameters that have state only by it.

    Raises:
        InvalidRequestError: It needs a closure, as `LBFGS`.
        Exception: What its step raised; no state was added.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError(
            "LBFGS has no state before a step with a closure; make one, and load then",
            key="optimizer",
        )
    _sync()
    todo = [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    options = [dict(group) for group in optimizer.param_groups]
    try:
        with _without_gradients(optimizer), _without_hooks(optimizer):
            for some in _batches(todo):
                _prime(optimizer, some)
    except BaseException:
        for parameter, _ in todo:
            optimizer.state.pop(parameter, None)
        raise
    finally:
        # Why: some count their steps in the options of a group.
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)
    _sync()
    return [parameter for parameter, _ in todo if optimizer.state.get(parameter)]


def _prime(optimizer: torch.optim.Optimizer, some: list[tuple[Any, dict[str, Any]]]) -> None:
    """Steps with parameters and gradients of 0, which leaves state at its beginning."""
    kept = [parameter.detach().clone() for parameter, _ in some]
    with torch.no_grad():
        try:
            for parameter, _ in some:
                parameter.detach().zero_()
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                _shard_like(parameter.grad, parameter)
            # Why the class's: a scheduler has put a wrapper around the optimizer's own, which
            # counts.
            type(optimizer).step(optimizer)
        finally:
            for (parameter, _), value in zip(some, kept, strict=True):
                parameter.grad = None
                parameter.detach().copy_(value)
        for parameter, group in some:
            if parameter in optimizer.state:
                _to_beginning(optimizer, parameter, group)
    _sync()


def _to_beginning(optimizer: torch.optim.Optimizer, parameter: Any, group: dict[str, Any]) -> None:
    state = optimizer.state[parameter]
    fresh: dict[str, Any] = {"step": 0.0}
    for cls in type(optimizer).__mro__:
        fresh |= _FRESH.get(cls.__name__, {})
    for name, value in state.items():
        if name in fresh:
            begins = group[fresh[name]] if isinstance(fresh[name], str) else fresh[name]
            if isinstance(value, torch.Tensor):
                value.fill_(float(begins))
            elif isinstance(value, (int, float)):
                state[name] = type(value)(begins)
        elif isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            _shard_like(value, parameter)


def _batches(
    todo: list[tuple[Any, dict[str, Any]]],
) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    some: list[tuple[Any, dict[str, Any]]] = []
    num_bytes = 0
    for parameter, group in todo:
        some.append((parameter, group))
        num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= AT_ONCE_BYTES:
            yield some
            some, num_bytes = [], 0
    if some:
        yield some


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Takes gradients away, so that a step changes nothing, and gives them back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _without_hooks(optimizer: Any) -> Iterator[None]:
    """Keeps a user's step hooks from being called."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    for name in kept:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optimizer, name, hooks)


def _shard_like(tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    modules = xla_modules()
    if modules is None or not is_on_xla(parameter):
        return
    sharding = modules.root._XLAC._get_xla_op_sharding(parameter)
    if sharding and not modules.root._XLAC._get_xla_op_sharding(tensor):
        modules.root._XLAC._xla_mark_sharding(tensor, sharding)


def _sync() -> None:
    """Has all that was asked of XLA devices done."""
    modules = xla_modules()
    if modules is not None:
        modules.root.sync()
        modules.model.wait_device_ops()


_NEVER = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, int, float, str, bool})


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, by the names that a state dict asks by."""

    names: Collection[str]
    """FQNs; looked up, so a mapping or a set."""
    is_object: Callable[[str], bool]
    """Whether the value of a name is no tensor."""

    @classmethod
    def of(cls, metadata: Metadata) -> Stored:
        """Returns what DCP's metadata tells."""
        items = metadata.state_dict_metadata
        return cls(items, lambda name: isinstance(items[name], BytesStorageMetadata))


@dataclass(frozen=True)
class LoadTargets:
    """The state to load into, of everything that a user gave to `load`."""

    values: dict[str, Any]
    """By key, sorted; `Stateful` values as their state."""
    parts: Mapping[str, Stateful]
    """What takes the loaded state, of those."""

    def put_back(self, state_dict: MutableMapping[str, Any]) -> None:
        """Hands the loaded state to the `Stateful` values and replaces all others.

        Args:
            state_dict: What the user gave to `load`; changed in place.

        Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
        """
        for key in _sorted_keys(state_dict):
            if key not in state_dict or key not in self.values:
                continue
            if key in self.parts:
                self.parts[key].load_state_dict(self.values[key])
            else:
                state_dict[key] = self.values[key]


def stateful_to_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a shallow copy in which every top-level `Stateful` is its `state_dict()`.

    Args:
        state_dict: What the user gave to `save`. Not changed. Modules and optimizers give their
            state by the names that parameters have without DDP, FSDP and `torch.compile`; an
            optimizer whose parameters are not all of one module in it gives its own numbers.

    Returns:
        The same keys in the same order.

    Raises:
        StateDictError: `state_dict` is no mapping.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> state = stateful_to_state_dict({"model": model, "optimizer": optimizer, "step": 3})
        >>> sorted(state["model"]), sorted(state["optimizer"]["state"]), state["step"]
        (['bias', 'weight'], ['bias', 'weight'], 3)

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `_stateful_to_state_dict`.
    """
    check_mapping(state_dict)
    modules = _modules(state_dict)
    return {
        key: part.state_dict() if (part := _part(value, modules)) is not None else value
        for key, value in state_dict.items()
    }


def stateful_to_load_targets(
    state_dict: Mapping[str, Any], stored: Stored, prefixes: Sequence[str] = ()
) -> LoadTargets:
    """Returns the state to load into: sorted by key, `Stateful` values as their `state_dict()`.

    Keys are sorted so that all ranks call `state_dict()` (which may run collectives of the
    training job) in the same order. Neither parameters nor optimizers change.

    Args:
        state_dict: What the user gave to `load`. Not changed.
        stored: What the checkpoint holds. A module or optimizer is asked by its own names where
            the checkpoint has more of these: stock DCP saves them so. An optimizer that has not
            stepped asks for the state that is stored.
        prefixes: See `LoadOptions.prefixes`: keys that they do not concern are left out.

    Raises:
        StateDictError: `state_dict` is no mapping, or its keys can't be sorted.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    """
    check_mapping(state_dict)
    modules = _modules(state_dict)
    targets = LoadTargets({}, parts := {})
    for key in _sorted_keys(state_dict):
        # Why the second look: a `state_dict()` call may drop keys of the mapping that holds it.
        if (prefixes and not concerns(str(key), prefixes)) or key not in state_dict:
            continue
        value = state_dict[key]
        part = _part(value, modules)
        if part is None:
            targets.values[key] = value
        else:
            parts[key], targets.values[key] = _asked(key, value, part, stored)
    return targets


def check_all_taken(
    state_dict: Mapping[str, Any], unexpected: Collection[str], *, strict: bool | None
) -> None:
    """Raises where a checkpoint holds state of a module or optimizer that it would not get.

    Args:
        state_dict: What the user gave to `load`.
        unexpected: Names of the checkpoint that nobody asks for.
        strict: See `LoadOptions.strict`.

    Raises:
        StateDictError: There is such state, and it matters.
    """
    if strict is False or not unexpected:
        return
    kinds = (nn.Module, torch.optim.Optimizer)
    whole = [str(key) for key, value in state_dict.items() if isinstance(value, kinds)]
    left = [name for name in unexpected if below(name, whole)]
    if left:
        raise StateDictError(
            f"the checkpoint holds state of a module or optimizer that the one to load into does "
            f"not have: {', '.join(map(repr, left[:8]))}{' and more' if len(left) > 8 else ''} "
            f"({len(left)} in all). Make it as it was saved (an optimizer that makes its state "
            f"only with a closure has to step once before), or leave this out with "
            f"LoadOptions(strict=False)",
            key=left[0],
        )


class _Model:
    """A module under the names that it has without wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._has_own_names = False

    def state_dict(self) -> dict[str, Any]:
        # Why: torch's helper leaves out what is on no device, and so it would be lost.
        tensors = [*self._module.parameters(), *self._module.buffers()]
        # Why not empty: it asks for a rank to say that there is nothing.
        if tensors and not any(tensor.is_meta for tensor in tensors):
            try:
                return _stock.get_model_state_dict(self._module)
            except (AttributeError, AssertionError, RuntimeError):
                # It has keys that are no attributes: `weight.absmax` of a quantised layer.
                pass
        self._has_own_names = True
        return self._module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._has_own_names:
            self._module.load_state_dict(state_dict)
        else:
            # Why a copy: torch's helper changes what it is given.
            _stock.set_model_state_dict(self._module, dict(state_dict))


class _Optimizer:
    """An optimizer under the names of its module's parameters, or under its own numbers."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module | None) -> None:
        self._optimizer = optimizer
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        with self._primed(when=not self._optimizer.state):
            return self._named()

    def asked(self, key: str, stored: Stored) -> dict[str, Any]:
        """Returns the state to load into: what is there, and of what is not, what is stored."""
        with self._primed(when=True) as primed:
            made = [self._optimizer.state[parameter] for parameter in primed]
            found = self._named()
        for name, state in list(found.get("state", {}).items()):
            if any(state is one for one in made):
                inner = flatten({key: {"state": {name: state}}}).names
                if not any(each in stored.names for each in inner):
                    del found["state"][name]
        groups = f"{key}.param_groups."
        options = {str(index): group for index, group in enumerate(found.get("param_groups", []))}
        for name in stored.names:
            if name.startswith(groups) and stored.is_object(name):
                index, _, option = name.removeprefix(groups).partition(".")
                if index in options and "." not in option:
                    # A scheduler that is not made yet had put it there: "initial_lr".
                    options[index].setdefault(option, None)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._module is None:
            self._optimizer.load_state_dict(state_dict)
            return
        with _as_if_stepped(self._optimizer):
            # Why not strict: a parameter that never had a gradient has no state.
            _stock.set_optimizer_state_dict(
                self._module,
                self._optimizer,
                _copied(state_dict),
                options=StateDictOptions(strict=False),
            )

    def _named(self) -> dict[str, Any]:
        if self._module is None:
            return self._optimizer.state_dict()
        with _as_if_stepped(self._optimizer):
            found: Any = _stock.get_optimizer_state_dict(self._module, self._optimizer)
        return dict(found)

    @contextmanager
    def _primed(self, *, when: bool) -> Iterator[list[torch.Tensor]]:
        """Gives it the state of step 0 where it has none, for the time of the block."""
        made: list[torch.Tensor] = []
        if when:
            try:
                made = prime(self._optimizer)
            except Exception:  # noqa: BLE001 - whatever its step raises: it has no state then
                made = []
        try:
            yield made
        finally:
            for parameter in made:
                self._optimizer.state.pop(parameter, None)


@contextmanager
def _as_if_stepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps torch's helpers from stepping with an optimizer without state.

    A gradient is the sign for them that no state is to be made.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lent: list[torch.Tensor] = []
    try:
        if not optimizer.state and all(p.grad is None for p in parameters):
            for parameter in [p for p in parameters if p.requires_grad][:1]:
                parameter.grad = torch.zeros_like(parameter)
                lent.append(parameter)
        yield
    finally:
        for parameter in lent:
            parameter.grad = None


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the dicts that torch's helper changes anew; the values in them stay the same."""
    copied = dict(state)
    if isinstance(copied.get("state"), dict):
        copied["state"] = dict(copied["state"])
    if isinstance(copied.get("param_groups"), list):
        copied["param_groups"] = [dict(group) for group in copied["param_groups"]]
    return copied


def _asked(key: str, value: Any, part: Stateful, stored: Stored) -> tuple[Stateful, Any]:
    """Returns what takes the state of a value, and the state to load into.

    Of a module or optimizer in the form of which the checkpoint has more names.
    """
    forms: list[Stateful] = [part]
    if isinstance(part, _Model):
        forms.append(value)
    elif isinstance(part, _Optimizer):
        forms.append(_Optimizer(value, None))
    best: tuple[Stateful, Any] = part, None
    most = -1
    for form in forms:
        state = form.asked(key, stored) if isinstance(form, _Optimizer) else form.state_dict()
        if len(forms) == 1:
            return form, state
        names = flatten({key: state}).names
        num_found = sum(name in stored.names for name in names)
        if num_found > most:
            best, most = (form, state), num_found
        if num_found == len(names):
            break
    return best


def _part(value: Any, modules: list[nn.Module]) -> Stateful | None:
    """Returns what gives and takes the state of a value; None if it is its own state."""
    # Why: the protocol check costs 5 us, and most values of a flat state dict are tensors.
    if type(value) in _NEVER or not isinstance(value, Stateful):
        return None
    if isinstance(value, nn.Module) and _gives_torchs(value, nn.Module):
        return _Model(value)
    if isinstance(value, torch.optim.Optimizer):
        is_torchs = _gives_torchs(value, torch.optim.Optimizer)
        return _Optimizer(value, _owner(value, modules) if is_torchs else None)
    return value


def _gives_torchs(value: Any, cls: Any) -> bool:
    """Whether nobody has replaced its `state_dict`, whose names are the user's then."""
    return type(value).state_dict is cls.state_dict and "state_dict" not in vars(value)


def _modules(state_dict: Mapping[str, Any]) -> list[nn.Module]:
    # Why sorted: names must not depend on the order in which a user gives modules.
    found = [(str(key), v) for key, v in state_dict.items() if isinstance(v, nn.Module)]
    return [module for _, module in sorted(found, key=lambda one: one[0])]


def _owner(optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> nn.Module | None:
    """Returns the first module that has all parameters of an optimizer."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules:
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    return None


def check_mapping(state_dict: object) -> None:
    """Raises `StateDictError` for a state dict that is no mapping."""
    if not isinstance(state_dict, Mapping):
        raise StateDictError(
            f"expected a state dict (a mapping of names to values), found "
            f"{type(state_dict).__name__}; a module or optimizer goes in under a name: "
            f"{{'model': model}}"
        )


def _sorted_keys(state_dict: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(state_dict)
    except TypeError:
        # Why: keys of several types, which DCP saves, and does not load.
        return sorted(state_dict, key=str)
