"""Creates the state that optimizers would create in their first step; nothing else changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.errors import InvalidRequestError
from ray_dcp.torch_adapter.spmd import is_on_xla, xla_modules

AT_ONCE_BYTES = 256 << 20
"""Bytes of parameters that are primed at once, which need as much memory in addition."""

_FRESH: dict[str, dict[str, str | float]] = {
    "NAdam": {"mu_product": 1.0},
    "ASGD": {"mu": 1.0, "eta": "lr"},
}
"""State that a step changes even if parameters and gradients are 0, with its initial value; a text
names an option of the parameter group."""

_MOST_DEPTH = 20
"""Deepest containers in which optimizers are looked for."""

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


def prime_optimizer(optimizer: O) -> O:
    """Creates the state of an optimizer before its first step, so that a load can fill it.

    State is created for each parameter that has none, in optimizers that this one wraps too.
    Parameters, gradients, existing state, options and step counts do not change; new step counts
    are 0. On XLA devices, new state is sharded like its parameter.

    Args:
        optimizer: An optimizer that creates its state in `step()` without a closure.

    Returns:
        The same optimizer.

    Raises:
        InvalidRequestError: The object is no optimizer, or needs a closure, like `LBFGS`.

    Complexity:
        One step of the optimizer for each `AT_ONCE_BYTES` of parameters.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = prime_optimizer(torch.optim.AdamW([weight], weight_decay=0.5))
        >>> state = optimizer.state[weight]
        >>> weight.tolist(), state["step"].item(), state["exp_avg"].tolist()
        ([1.0, 1.0], 0.0, [0.0, 0.0])
    """
    # Source: `torch_xla/experimental/distributed_checkpoint/util.py`, whose function makes a real
    # step.
    if not is_optimizer(optimizer):
        raise InvalidRequestError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}", key="optimizer"
        )
    prime(optimizer)
    return optimizer


@contextmanager
def primed(optimizer: Any, only: Collection[int] | None = None) -> Iterator[dict[int, Any]]:
    """Primes an optimizer for the time of the block; see `prime`.

    Those that it wraps are primed one by one if its own step raises.

    Yields the new state by the id of its parameter: none if the optimizer's step raises.
    """
    family = [optimizer, *wrapped_by(optimizer)]
    before = [dict(one.state) for one in family]
    try:
        made = []
        with suppress(Exception):  # whatever its step raises: it has no state then
            made = prime(optimizer, only)
        if not made:
            for one in family[1:]:
                with suppress(Exception):
                    prime(one, only)
        yield {id(parameter): optimizer.state[parameter] for parameter in made}
    finally:
        _put_back(family, before)


def _put_back(family: Sequence[Any], before: Sequence[dict[Any, Any]]) -> None:
    """Gives optimizers the state of before; they may share one mapping."""
    for one, held in zip(family, before, strict=True):
        one.state.clear()
        one.state.update(held)


def is_optimizer(value: Any) -> bool:
    """Returns whether a value is an optimizer: one of torch's, or another that steps such."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return _steps(value) and isinstance(value, Stateful) and bool(held_by(value))


def _steps(value: Any) -> bool:
    """Returns whether a value is used as an optimizer, as wrappers are that derive from none."""
    names = ("param_groups", "state", "step", "zero_grad")
    return not isinstance(value, type | torch.nn.Module) and all(
        hasattr(value, name) for name in names
    )


def wrapped_by(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers with state of their own inside an optimizer, at any depth."""
    family = [optimizer]
    for one in family:
        for inner in held_by(one).values():
            # A wrapper that is none of torch's optimizers has the state of the one inside.
            own = [one for one in family if isinstance(one, torch.optim.Optimizer)]
            if not any(inner is known or inner.state is known.state for known in own):
                family.append(inner)
    return family[1:]


def held_by(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizers that an optimizer holds itself, by their place.

    They may be attributes, or in lists, tuples and mappings that are, and in wrappers that are no
    optimizers of torch.

    Examples:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        >>> sgd.others = {"adam": [torch.optim.Adam(sgd.param_groups)]}
        >>> list(held_by(sgd))
        ['others.adam.0']
    """
    found: dict[str, torch.optim.Optimizer] = {}
    for name, value in getattr(optimizer, "__dict__", {}).items():
        # Why not: tensors are the keys of `state`, which may hold many.
        if name not in ("state", "param_groups", "defaults"):
            _find_held(value, (name,), found, {})
    return found


def _find_held(
    value: Any, path: tuple[Any, ...], found: dict[str, Any], seen: dict[int, Any]
) -> None:
    if isinstance(value, torch.optim.Optimizer):
        if not any(value is one for one in found.values()):
            # Why not a text before: keys may be parameters, whose text takes long.
            found[".".join(map(str, path))] = value
        return
    is_wrapper = not isinstance(value, Mapping | list | tuple)
    if is_wrapper and not (hasattr(value, "__dict__") and _steps(value)):
        return
    if id(value) in seen or len(path) > _MOST_DEPTH + 1:
        return  # Containers may hold each other.
    seen[id(value)] = value
    container = vars(value) if is_wrapper else value
    pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, each in pairs:
        _find_held(each, (*path, key), found, seen)


def prime(optimizer: Any, only: Collection[int] | None = None) -> list[torch.Tensor]:
    """Does as `prime_optimizer`, and returns the parameters whose state it created.

    Args:
        optimizer: See `prime_optimizer`.
        only: Ids of the parameters to prime; by default all.

    Raises:
        InvalidRequestError: The optimizer needs a closure, like `LBFGS`.
        Exception: The exception of its step; no state was added.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError(
            "LBFGS has no state before a step with a closure; make one, and load then",
            key="optimizer",
        )
    _sync()
    inside = wrapped_by(optimizer)
    family = [optimizer, *inside]
    before = [dict(one.state) for one in family]
    # Why not its own step if it is none of torch's: that may scale gradients, or wait for ranks.
    todo = _without_state(optimizer, only) if isinstance(optimizer, torch.optim.Optimizer) else []
    try:
        if todo:
            # Why: its step would change the state that is there.
            for one in inside:
                one.state.clear()
            _step_once(optimizer, inside, todo)
            for one, held in zip(inside, before[1:], strict=True):
                one.state.update(held)
        for one in inside:
            # An optimizer that is stepped by another may have fewer states than that has.
            if (lacking := _without_state(one, only)) and type(one) is not torch.optim.LBFGS:
                _step_once(one, wrapped_by(one), lacking)
    except BaseException:
        _put_back(family, before)
        raise
    _sync()
    return [parameter for parameter, _ in todo if state_of(optimizer, parameter) is not None]


def _without_state(optimizer: Any, only: Collection[int] | None) -> list[tuple[Any, Any]]:
    """Returns the trained parameters without state, with their groups."""
    return [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        and state_of(optimizer, parameter) is None
        and (only is None or id(parameter) in only)
    ]


def _step_once(optimizer: Any, inside: Sequence[Any], todo: list[tuple[Any, Any]]) -> None:
    """Creates the state of parameters by a step that changes nothing else."""
    devices = {p.device.index or 0 for p, _ in todo if p.is_cuda}
    # Why a separate generator: a step may round at random.
    with ExitStack() as stack, torch.random.fork_rng(devices=devices):
        stack.enter_context(_without_gradients(optimizer))
        for one in (optimizer, *inside):
            stack.enter_context(_with_options_kept(one))
            stack.enter_context(_without_hooks(one))
            _begin_training(one)
        for some in _batches(todo):
            _prime(optimizer, some)


def _begin_training(optimizer: Any) -> None:
    """Sets the mode in which schedule-free optimizers step, without moving parameters."""
    for place in (vars(optimizer), *optimizer.param_groups):
        if isinstance(place.get("train_mode"), bool):
            place["train_mode"] = True


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Any:
    """Returns an optimizer's state of a parameter; None if there is none, or an empty mapping."""
    state = optimizer.state.get(parameter)
    return None if isinstance(state, Mapping) and not state else state


def _prime(optimizer: torch.optim.Optimizer, some: list[tuple[Any, dict[str, Any]]]) -> None:
    """Steps with parameters and gradients of 0, which leaves new state at its initial values."""
    kept = [parameter.detach().clone() for parameter, _ in some]
    with torch.no_grad():
        try:
            for parameter, _ in some:
                parameter.detach().zero_()
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                shard_like(parameter.grad, parameter)
            # Why the class's method: a scheduler wraps the optimizer's own, and counts its calls.
            type(optimizer).step(optimizer)
        finally:
            for (parameter, _), value in zip(some, kept, strict=True):
                parameter.grad = None
                parameter.detach().copy_(value)
        primed_ids = {id(parameter) for parameter, _ in some}
        for one in (optimizer, *wrapped_by(optimizer)):
            for group in one.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in primed_ids and parameter in one.state:
                        _to_beginning(one, parameter, group)
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
            shard_like(value, parameter)


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
    """Removes gradients for the time of the block, so that a step changes nothing."""
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
def _with_options_kept(optimizer: Any) -> Iterator[None]:
    """Restores options and attributes after the block, as some optimizers count steps in these."""
    options = [dict(group) for group in optimizer.param_groups]
    attributes = dict(vars(optimizer))
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)


@contextmanager
def _without_hooks(optimizer: Any) -> Iterator[None]:
    """Disables a user's step hooks for the time of the block."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    for name in kept:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optimizer, name, hooks)


def shard_like(tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """Shards a tensor on an XLA device like a parameter."""
    modules = xla_modules()
    if modules is None or not is_on_xla(parameter):
        return
    sharding = modules.root._XLAC._get_xla_op_sharding(parameter)
    if sharding and not modules.root._XLAC._get_xla_op_sharding(tensor):
        modules.root._XLAC._xla_mark_sharding(tensor, sharding)


def _sync() -> None:
    """Executes all pending work of XLA devices."""
    modules = xla_modules()
    if modules is not None:
        modules.root.sync()
        modules.model.wait_device_ops()
