"""Finds from the names of stored values that another kind of optimizer saved them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

import torch

_OF_MANY = frozenset(
    {"params", "param_names", "lr", "foreach", "maximize", "capturable", "differentiable", "fused"}
)
"""Options that say nothing: most optimizers have them, or gained them in a version of torch."""

_OF_USERS = frozenset({"weight_decay", "eps"})
"""Options that users also give to groups of optimizers that have no use for them."""

_DECOUPLED = "decoupled_weight_decay"
"""Option that some classes gained in a version of torch."""

_STATE = {"Adamax": "exp_inf", "RAdam": "exp_avg_sq", "SparseAdam": "exp_avg_sq"}
"""State that tells apart what has equal options."""


@cache
def _kinds() -> dict[str, frozenset[str]]:
    """Returns the options that tell torch's optimizers apart, by the names of the classes."""
    base = torch.optim.Optimizer
    return {
        # Why of all bases: AdamW gives Adam an option that it does not take itself.
        name: frozenset().union(
            *(inspect.signature(c).parameters for c in cls.__mro__ if issubclass(c, base))
        )
        - _OF_MANY
        - {"defaults"}
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base
    }


@dataclass(frozen=True)
class Traits:
    """What is known of an optimizer by the names of its values."""

    options: frozenset[str]
    """Options of its parameter groups."""
    state: frozenset[str] = frozenset()
    """Names of the state of a parameter, and of parts of it."""

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Traits:
        """Returns the traits that the names of an optimizer's values show.

        Args:
            names: Names below that of the optimizer; also as torch flattens options, by the names
                of parameters.

        Examples:
            >>> names = ["param_groups.0.betas.1", "param_groups.0.params", "state.w.step"]
            >>> found = Traits.of_names([*names, "param_groups.layers.0.weight.lr"])
            >>> sorted(found.options), sorted(found.state)
            (['betas', 'lr'], ['step'])
        """
        options, state = set[str](), set[str]()
        for name in names:
            part, *rest = name.split(".")
            if part != "param_groups":
                state.add(rest[-1] if rest else "")
            elif len(rest) > 1 and rest[0].isdecimal():
                options.add(rest[1])
            elif words := [word for word in rest if not word.isdecimal()]:
                options.add(words[-1])
        return cls(frozenset(options - {"params", "param_names"}), frozenset(state - {""}))

    def explained_by(self, kind: str) -> frozenset[str]:
        """Returns the options that a kind of torch's optimizers has, too."""
        return self.options & _kinds()[kind]

    def fits(self, kind: str) -> bool:
        """Returns whether there is all that a kind of torch's optimizers always has."""
        needed = _kinds()[kind] - {_DECOUPLED}
        known = self.state & {*_STATE.values()}
        is_state_fit = not known or kind not in _STATE or _STATE[kind] in known
        return bool(needed) and needed <= self.options and is_state_fit

    def kinds(self) -> set[str]:
        """Returns the kinds of torch's optimizers that fit, those that explain the most."""
        sizes = {kind: len(self.explained_by(kind)) for kind in _kinds() if self.fits(kind)}
        return {kind for kind, size in sizes.items() if size == max(sizes.values())}


def saved_by_another(optimizer: torch.optim.Optimizer, stored: Traits) -> str:
    """Returns what saved some values, if that is another kind of optimizer; else "".

    Args:
        optimizer: The optimizer to load into.
        stored: Traits of all stored values.

    Examples:
        >>> one = torch.optim.SGD([torch.ones(1)])
        >>> of_adam = Traits(frozenset({"lr", "betas", "eps", "amsgrad", "weight_decay"}))
        >>> saved_by_another(one, of_adam)
        'Adam or AdamW'
        >>> saved_by_another(torch.optim.RAdam([torch.ones(1)]), of_adam)
        'Adam or AdamW'
        >>> own = ["lr", "momentum", "dampening", "nesterov", "weight_decay", "initial_lr"]
        >>> saved_by_another(one, Traits(frozenset(own)))
        ''
    """
    defaults = frozenset(getattr(optimizer, "defaults", ()))
    known = defaults.union(*optimizer.param_groups)
    names = [c.__name__ for c in type(optimizer).__mro__ if vars(torch.optim).get(c.__name__) is c]
    kinds = {kind for kind in names[:1] if kind in _kinds() and Traits(known).fits(kind)}
    return _another(kinds, defaults, known, stored)


def plain_saved_by_another(own: Traits, stored: Traits) -> str:
    """Returns what saved some values, if they are not of the kind of a plain state dict; else "".

    Args:
        own: Traits of the state dict of an optimizer to load into.
        stored: Traits of all stored values.
    """
    of_torch = own.options & frozenset().union(*_kinds().values())
    lacks = {kind: len(_kinds()[kind] - own.options) for kind in own.kinds()}
    kinds = {kind for kind, number in lacks.items() if number == min(lacks.values())}
    return _another(kinds, of_torch, own.options, stored)


def _another(
    kinds: Collection[str], defaults: frozenset[str], known: frozenset[str], stored: Traits
) -> str:
    """Returns the name of the kind that saved some values, if it is another; else "".

    Either each side has an option that the other side has in no group: an option alone may be of
    another version, of a scheduler, or the user's. Or another kind fits, and explains all that
    the own one explains, and that one does not fit, or explains less.

    Args:
        kinds: What the own kind may be, of torch's optimizers; empty if it is none of these.
        defaults: The options that it has without a user or a scheduler.
        known: All options that it has.
        stored: Traits of all stored values.
    """
    best = stored.kinds()
    unclear = _OF_MANY | _OF_USERS | {_DECOUPLED}
    distinct = stored.options - unclear
    is_lacking = defaults - stored.options - unclear
    foreign = (distinct - known) & frozenset().union(*_kinds().values())
    is_better = bool(kinds) and all(
        any(_is_better(stored, other, kind, known) for other in best - {*kinds}) for kind in kinds
    )
    if not is_better and not (is_lacking and foreign):
        return ""
    return " or ".join(sorted(best)) or f"one with {', '.join(sorted(foreign))}"


def _is_better(stored: Traits, other: str, kind: str, known: frozenset[str]) -> bool:
    """Returns whether another kind, which fits, explains stored values better than the own one."""
    by_other, by_kind = stored.explained_by(other), stored.explained_by(kind)
    more = by_other - by_kind - known - _OF_USERS
    return by_kind <= by_other and (not stored.fits(kind) or bool(more))
