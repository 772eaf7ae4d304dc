"""Finds from the names of stored options that another kind of optimizer saved them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from functools import cache

import torch

_OF_MANY = frozenset(
    {"params", "param_names", "lr", "weight_decay", "eps", "decoupled_weight_decay", "foreach"}
    | {"maximize", "capturable", "differentiable", "fused"}
)
"""Options that say nothing: most optimizers have them, or gained them in a version of torch."""


@cache
def _kinds() -> dict[str, frozenset[str]]:
    """Returns the options that tell torch's optimizers apart, by the names of the classes."""
    return {
        name: frozenset(inspect.signature(cls).parameters) - _OF_MANY
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
        if cls is not torch.optim.Optimizer
    }


def options_in(names: Iterable[str]) -> set[str]:
    """Returns the options of parameter groups that are among the names of an optimizer's values.

    Args:
        names: Names below that of the optimizer.

    Examples:
        >>> options_in(["param_groups.0.betas.1", "param_groups.0.params", "state.w.step"])
        {'betas'}
    """
    found = (name.split(".", 3) for name in names if name.startswith("param_groups."))
    options = {parts[2] for parts in found if len(parts) > 2 and parts[1].isdecimal()}
    return options - {"params", "param_names"}


def saved_by_another(optimizer: torch.optim.Optimizer, options: Collection[str]) -> str:
    """Returns what saved some options, if that is another kind of optimizer; else "".

    That needs an option on each side that the other side has in no group. An option alone may be of
    another version, of a scheduler, or the user's.

    Args:
        optimizer: The optimizer to load into.
        options: Stored options, of all groups.

    Examples:
        >>> one = torch.optim.SGD([torch.ones(1)])
        >>> saved_by_another(one, ["lr", "betas", "amsgrad"])
        'Adam or AdamW'
        >>> saved_by_another(one, ["lr", "betas"])
        'Adamax or RAdam or SparseAdam'
        >>> saved_by_another(one, ["lr", "momentum", "dampening", "nesterov", "initial_lr"])
        ''
    """
    defaults = set(getattr(optimizer, "defaults", ()))
    known = defaults.union(*optimizer.param_groups)
    stored = set(options) - _OF_MANY
    is_lacking = defaults - stored - _OF_MANY
    foreign = (stored - known) & set().union(*_kinds().values())
    if not (is_lacking and foreign):
        return ""
    sizes = {name: len(own) for name, own in _kinds().items() if own and own <= stored}
    best = [name for name, size in sizes.items() if size == max(sizes.values())]
    return " or ".join(sorted(best)) or f"one with {', '.join(sorted(foreign))}"
