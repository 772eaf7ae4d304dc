"""What a user gives to be saved, under names that do not depend on how many ranks there are.

Ray Train wraps a model in DDP where there are several workers, and leaves it bare where there is
one; `torch.compile` and FSDP put names of their own in front as well. A state dict that is to be
loaded at another size can't have these names in it. Nor can it number the parameters of an
optimizer. So top-level modules and optimizers are asked through torch's own helpers.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.errors import StateDictError
from ray_dcp.seam.state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

__all__ = ["give_back", "named_alike"]


class _Model(Stateful):
    """A module under its own names."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self._module, state_dict)


class _Optimizer(Stateful):
    """An optimizer under the names of its module's parameters."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._module, self._optimizer, state_dict)


def named_alike(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict for `ray_dcp.save` and `load` that fits any number of ranks.

    Args:
        state: As the user gives it. Top-level modules go in under the names that they have without
            DDP, FSDP and `torch.compile`; top-level optimizers, whose parameters all belong to one
            of these modules, under that module's names, also when they have not stepped yet. All
            else stays as it is.

    Raises:
        StateDictError: It is no mapping.

    Example:
        >>> named = named_alike({"model": nn.Linear(2, 1), "step": 3})
        >>> sorted(named["model"].state_dict()), named["step"]
        (['bias', 'weight'], 3)
    """
    if not isinstance(state, Mapping):
        raise StateDictError(
            f"expected a state dict (a mapping of names to values), found "
            f"{type(state).__name__}; a module or optimizer goes in under a name: "
            f"{{'model': model, 'optimizer': optimizer}}"
        )
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    return {name: _named(value, modules) for name, value in state.items()}


def give_back(state: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Puts what was loaded into `named_alike(state)` into the state itself.

    Args:
        state: Of the user; its values that are no `Stateful` are replaced.
        loaded: What `named_alike` gave for it, after the load.
    """
    for name, value in loaded.items():
        if not isinstance(value, (_Model, _Optimizer)) and state.get(name) is not value:
            state[name] = value


def _named(value: Any, modules: list[nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return _Model(value)
    if isinstance(value, torch.optim.Optimizer):
        owner = _owner(value, modules)
        return value if owner is None else _Optimizer(owner, value)
    return value


def _owner(optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> nn.Module | None:
    """Returns the module to which all parameters of an optimizer belong."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules:
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    return None
