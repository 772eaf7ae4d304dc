"""Creates the state that optimizers would create in their first step, and changes nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch

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

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


def prime_optimizer(optimizer: O) -> O:
    """Creates the state of an optimizer before its first step, so that a load can fill it.

    State is created for each parameter that has none. Parameters, gradients, existing state,
    options and step counts do not change; new step counts are 0. On XLA devices, new state is
    sharded like its parameter.

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
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}", key="optimizer"
        )
    prime(optimizer)
    return optimizer


@contextmanager
def primed(
    optimizer: torch.optim.Optimizer, only: Collection[int] | None = None
) -> Iterator[dict[int, Any]]:
    """Primes an optimizer for the time of the block; see `prime`.

    Yields the new state by the id of its parameter: none if the optimizer's step raises.
    """
    inside = [(one, dict(one.state)) for one in wrapped_by(optimizer)]
    made: list[torch.Tensor] = []
    with suppress(Exception):  # whatever its step raises: it has no state then
        made = prime(optimizer, only)
    try:
        yield {id(parameter): optimizer.state[parameter] for parameter in made}
    finally:
        for parameter in made:
            optimizer.state.pop(parameter, None)
        for one, before in inside:
            one.state.clear()
            one.state.update(before)


def wrapped_by(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers with state of their own that an optimizer has as attributes.

    They may be in a list, tuple or mapping that is an attribute.
    """
    family = [optimizer]
    for one in family:
        for value in vars(one).values():
            held = value.values() if isinstance(value, Mapping) else value
            for inner in held if isinstance(value, Mapping | list | tuple) else [value]:
                if isinstance(inner, torch.optim.Optimizer) and not any(
                    inner is known or inner.state is known.state for known in family
                ):
                    family.append(inner)
    return family[1:]


def prime(
    optimizer: torch.optim.Optimizer, only: Collection[int] | None = None
) -> list[torch.Tensor]:
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
    todo = [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        and state_of(optimizer, parameter) is None
        and (only is None or id(parameter) in only)
    ]
    inside = wrapped_by(optimizer)
    held = [dict(one.state) for one in inside]
    devices = {p.device.index or 0 for p, _ in todo if p.is_cuda}
    try:
        # Why a separate generator: a step may round at random.
        with ExitStack() as stack, torch.random.fork_rng(devices=devices):
            stack.enter_context(_without_gradients(optimizer))
            for one in (optimizer, *inside):
                stack.enter_context(_with_options_kept(one))
                stack.enter_context(_without_hooks(one))
            for one in inside:
                # Why: its step would change the state that is there.
                one.state.clear()
            for some in _batches(todo):
                _prime(optimizer, some)
    except BaseException:
        for one in (optimizer, *inside):
            for parameter, _ in todo:
                one.state.pop(parameter, None)
        raise
    finally:
        for one, before in zip(inside, held, strict=True):
            one.state.update(before)
    _sync()
    return [parameter for parameter, _ in todo if state_of(optimizer, parameter) is not None]


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
