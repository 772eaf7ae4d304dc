"""torch's state-dict helpers with their holes closed: nothing that is alive changes by a look.

The work on names, FSDP and resharding is torch's own. Around it: an optimizer that has not stepped
yet stays as it is when it is asked for its state (torch's takes a step, so that its step count is 1
from then on), and dicts that are handed over to be loaded are not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as _stock
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ray_dcp.errors import MissingKeyError, StateDictError
from ray_dcp.seam.priming import prime

__all__ = [
    "as_if_stepped",
    "copied",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Returns the model's state by canonical names, whatever it is wrapped in.

    Args:
        model: Plain, DDP, FSDP, compiled …
        submodules: Deprecated by torch.
        options: See `torch.distributed.checkpoint.state_dict.StateDictOptions`.

    Example:
        >>> sorted(get_model_state_dict(nn.Linear(2, 1)))
        ['bias', 'weight']

    Source: `torch/distributed/checkpoint/state_dict.py`.
    """
    return _stock.get_model_state_dict(model, submodules=submodules, options=options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> Any:
    """Returns the optimizers' state by canonical names of parameters.

    Of an optimizer that has not stepped yet it returns the state of step 0, and leaves it alone:
    neither its state nor its parameters, gradients and hooks notice.

    Args:
        model: Whose parameters they optimize.
        optimizers: One or several.
        submodules: Deprecated by torch.
        options: As for `get_model_state_dict`.

    Raises:
        StateDictError: An optimizer can't make its state without a real step.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = get_optimizer_state_dict(model, optimizer)
        >>> state["state"]["weight"]["step"].item(), len(optimizer.state)
        (0.0, 0)

    Source: `torch/distributed/checkpoint/state_dict.py`.
    """
    every = _tuple(optimizers)
    with _initialised(every, keep=False):
        return _stock.get_optimizer_state_dict(model, every, submodules=submodules, options=options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], Any]:
    """Returns what `get_model_state_dict` and `get_optimizer_state_dict` do.

    Args:
        model: As there.
        optimizers: As there.
        submodules: Deprecated by torch.
        options: As there.

    Raises:
        StateDictError: As there.

    Source: `torch/distributed/checkpoint/state_dict.py`.
    """
    every = _tuple(optimizers)
    with _initialised(every, keep=False):
        return _stock.get_state_dict(model, every, submodules=submodules, options=options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Loads a state by canonical names into a model.

    Args:
        model: As for `get_model_state_dict`.
        model_state_dict: What that returned. Not changed.
        options: As there.

    Returns:
        `(missing_keys, unexpected_keys)`.

    Raises:
        RuntimeError: Keys are missing, or the dict is empty.

    Source: `torch/distributed/checkpoint/state_dict.py`.
    """
    with _telling_of_empty():
        return _stock.set_model_state_dict(model, dict(model_state_dict), options=options)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Any,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads a state by canonical names into optimizers.

    Where it fails, an optimizer that had not stepped yet is as it was.

    Args:
        model: As for `get_optimizer_state_dict`.
        optimizers: As there.
        optim_state_dict: What that returned. Not changed.
        options: As there.

    Raises:
        RuntimeError: The state of a parameter is missing, or the dict is empty.

    Source: `torch/distributed/checkpoint/state_dict.py`.
    """
    every = _tuple(optimizers)
    with _telling_of_empty(), _initialised(every, keep=True):
        _stock.set_optimizer_state_dict(model, every, copied(optim_state_dict), options=options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: Any,
    options: StateDictOptions | None = None,
) -> Any:
    """Does what `set_model_state_dict` and `set_optimizer_state_dict` do.

    Args:
        model: As there.
        optimizers: As there.
        model_state_dict: As there.
        optim_state_dict: As there.
        options: As there.

    Returns:
        `(missing_keys, unexpected_keys)` of the model.

    Raises:
        RuntimeError: As there.

    Source: `torch/distributed/checkpoint/state_dict.py`.
    """
    every = _tuple(optimizers)
    with _telling_of_empty(), _initialised(every, keep=True):
        return _stock.set_state_dict(
            model, every, model_state_dict=dict(model_state_dict),
            optim_state_dict=copied(optim_state_dict), options=options,
        )  # fmt: skip


def _tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    # Why: it is walked more than once, and may be a generator.
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def copied(state: Any) -> Any:
    """Returns the dicts that torch changes anew; the values in them stay the same."""
    if not isinstance(state, dict):
        return state
    copied = dict(state)
    if isinstance(copied.get("state"), dict):
        copied["state"] = dict(copied["state"])
    if isinstance(copied.get("param_groups"), list):
        copied["param_groups"] = [dict(group) for group in copied["param_groups"]]
    return copied


@contextmanager
def _telling_of_empty() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        # Why: torch's message about an empty state dict asks for a rank, which nobody has here.
        if dist.is_initialized() or "process group" not in str(error):
            raise
        raise MissingKeyError(
            "the state dict to load into the model is empty; hand over what get_model_state_dict "
            "gave, or pass StateDictOptions(strict=False)"
        ) from error


@contextmanager
def _initialised(optimizers: tuple[torch.optim.Optimizer, ...], *, keep: bool) -> Iterator[None]:
    """Gives optimizers that have not stepped the state of step 0, for the time of the block.

    Args:
        optimizers: Which; those that have a state are left alone.
        keep: Whether it stays when the block ends well.

    Raises:
        StateDictError: An optimizer can't make its state without a real step.
    """
    made: list[tuple[torch.optim.Optimizer, list[torch.Tensor]]] = []
    ended_well = False
    try:
        for optimizer in optimizers:
            if not optimizer.state:
                made.append((optimizer, _primed(optimizer)))
        with as_if_stepped(optimizers):
            yield
        ended_well = True
    finally:
        if not (keep and ended_well):
            for optimizer, parameters in made:
                for parameter in parameters:
                    optimizer.state.pop(parameter, None)


def _primed(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    try:
        return prime(optimizer)
    except Exception as error:
        raise StateDictError(
            f"{type(optimizer).__name__} has not stepped yet and can't make its state without a "
            f"real step ({type(error).__name__}: {error}); step once before"
        ) from error


@contextmanager
def as_if_stepped(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Keeps torch's helpers from stepping with an optimizer without state.

    A gradient is the sign for them that no state is to be made.
    """
    lent: list[torch.Tensor] = []
    try:
        for optimizer in optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if not optimizer.state and all(p.grad is None for p in parameters):
                for parameter in [p for p in parameters if p.requires_grad][:1]:
                    parameter.grad = torch.zeros_like(parameter)
                    lent.append(parameter)
        yield
    finally:
        for parameter in lent:
            parameter.grad = None
