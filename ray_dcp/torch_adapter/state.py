"""Values that are converted for a checkpoint: `Stateful` values, modules, optimizers, `PerRank`.

As in DCP, only top-level `Stateful` values are converted, not nested ones; but modules, optimizers
and schedulers are at any depth of mappings, lists and tuples, as no safe load restores an object.

Modules and optimizers are `Stateful` too, and a checkpoint must fit them whatever wraps them at the
load: DDP, FSDP and `torch.compile` add parts to a module's names, and an optimizer numbers its
parameters. So both are named by parameter; see `module_names` and `optimizer_state`.

`PerRank` values are saved under one name for each rank, and restored by a rule.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidRequestError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.torch_adapter.collective import call_user_code
from ray_dcp.torch_adapter.flatten import (
    MAX_DEPTH,
    Flat,
    below,
    check_names,
    concerns,
    flatten,
)
from ray_dcp.torch_adapter.module_names import ModuleNames, renamed
from ray_dcp.torch_adapter.module_state import ModuleState
from ray_dcp.torch_adapter.optimizer_state import (
    Cast,
    Stored,
    group_identities,
    named_states,
    naming_module,
    optimizer_part,
    plain_of_others,
)
from ray_dcp.torch_adapter.priming import is_optimizer, primed

_NEVER = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, dict, list, int, float, str, bool})


@dataclass(frozen=True)
class LoadTargets:
    """The state to load into, for everything that a user passed to `load`."""

    values: dict[str, Any]
    """Values by key, sorted; those of `parts` as their state."""
    parts: dict[Path, Any] = field(default_factory=dict)
    """The objects that receive loaded state, by their paths."""
    owners: dict[Path, Any] = field(default_factory=dict)
    """The values of the user that `parts` are of."""
    left_out: set[Path] = field(default_factory=set)
    """Modules and optimizers that `LoadOptions.prefixes` leave out, or that take nothing stored."""
    left: set[str] = field(default_factory=set)
    """Names that are read, but may belong to nothing in the state dict; `check_groups` decides."""
    whole: list[str] = field(default_factory=list)
    """Names of values whose state the load replaces completely."""
    decisive: dict[Path, set[str]] = field(default_factory=dict)
    """Names that have to be loaded before `check_groups`, by the paths of optimizers."""
    aside: dict[Path, Any] = field(default_factory=dict)
    """Parts of a `Stateful` value's state that nothing is loaded into, which it gets back."""

    @property
    def casts(self) -> list[Cast]:
        """Values that modules and optimizers hold in another dtype than the loaded one."""
        found: list[Cast] = []
        for path, part in self.parts.items():
            if isinstance(part, ModuleState):
                found += part.casts(_at(self.values, path))
            elif is_optimizer(self.owners[path]):
                found += part.casts
        return found

    def check_groups(self) -> set[str]:
        """Checks the groups of optimizers whose `decisive` values are loaded; changes nothing.

        Returns:
            Names that are read, but belong to no group of the state dict.

        Raises:
            StateDictError: Groups do not fit.
        """
        return set().union(
            *(self.parts[path].check_groups(_at(self.values, path)) for path in self.decisive)
        )

    def put_back(self, state_dict: MutableMapping[str, Any]) -> None:
        """Passes the loaded state to the `Stateful` values, and replaces all other values.

        Args:
            state_dict: The user's argument of `load`; changed in place.

        Raises:
            StateDictError: The method of a `Stateful` value raised.

        Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
        """
        ends = (*self.parts, *self.left_out)
        on_the_way = {path[:end] for path in ends for end in range(1, len(path))}
        self._put(state_dict, self.values, (), on_the_way)

    def _put(self, container: Any, loaded: Any, path: Path, on_the_way: Collection[Path]) -> Any:
        """Puts loaded values into a container; returns it, or a tuple in its place.

        Args:
            container: The user's container.
            loaded: The one that was loaded into; itself, unless `parts` are in it.
            path: Its path.
            on_the_way: Paths of the containers that `parts` are in.
        """
        is_mapping = isinstance(container, Mapping)
        keys = _sorted_keys(container) if is_mapping else range(min(len(container), len(loaded)))
        into = list(container) if isinstance(container, tuple) else container
        for key in keys:
            here = (*path, key)
            if (is_mapping and (key not in container or key not in loaded)) or (
                here in self.left_out
            ):
                continue
            value = loaded[key]
            if here in self.parts:
                self._give(here, value)
                continue
            if here in on_the_way:
                value = self._put(container[key], value, here, on_the_way)
            if not path or into[key] is not value:
                into[key] = value
        if into is container or all(one is two for one, two in zip(into, container, strict=True)):
            return container
        return type(container)(*into) if hasattr(container, "_fields") else type(container)(into)

    def _give(self, path: Path, state: Any) -> None:
        owner = self.owners[path]
        for place, own in self.aside.items():
            if place[: len(path)] == path:
                _at(state, place[len(path) : -1])[place[-1]] = own
        try:
            self.parts[path].load_state_dict(state)
        except (CheckpointError, CheckpointException):
            raise
        except Exception as error:
            if not isinstance(owner, _OWNERS):
                raise  # As in DCP, an error of the user's own class is among the failures itself.
            refused = StateDictError(
                f"{type(owner).__name__}.load_state_dict refuses the state that is loaded for "
                f"{_name(path)!r}: {type(error).__name__}: {error}. Other values may be loaded "
                f"already; load into an object as it was saved",
                key=_name(path),
            )
            refused.add_note("".join(traceback.format_exception(error)))
            raise refused from error


def stateful_to_state_dict(
    state_dict: Mapping[str, Any], *, as_if_stepped: bool = False
) -> dict[str, Any]:
    """Returns a shallow copy with every top-level `Stateful` replaced by its `state_dict()`.

    Args:
        state_dict: The user's argument of `save`. Not changed. The state of modules and optimizers
            has the names of parameters without DDP, FSDP and `torch.compile`. An optimizer whose
            parameters are not all of one module in the state dict uses its own numbers.
        as_if_stepped: Use the state of step 0 for optimizers without state.

    Returns:
        The same keys in the same order.

    Raises:
        StateDictError: `state_dict` is not a mapping.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> _ = optimizer.step()
        >>> state = stateful_to_state_dict({"model": model, "optimizer": optimizer, "step": 3})
        >>> sorted(state["model"]), sorted(state["optimizer"]["state"]), state["step"]
        (['bias', 'weight'], ['bias', 'weight'], 3)

    Source: `torch/distributed/checkpoint/state_dict_saver.py`, `_stateful_to_state_dict`.
    """
    check_mapping(state_dict)
    modules, owners = _modules(state_dict), _owners(state_dict)
    with ExitStack() as stack:
        for optimizer in owners.values() if as_if_stepped else ():
            if is_optimizer(optimizer):
                stack.enter_context(primed(optimizer))
        states = {
            path: _part(value, modules).state_dict()
            for key in state_dict
            for path, value in _of_key(key, state_dict, owners).items()
        }
    return {**_replaced(state_dict, states)}


def group_identities_of(
    state_dict: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[tuple[str, ...], list[str]]:
    """Returns the `group_identities` of the optimizers of a state dict, by their paths as texts.

    Args:
        state_dict: The user's argument of `save`.
        plain: The result of `stateful_to_state_dict` for it.
    """
    return {
        tuple(map(str, place)): found
        for path, value in _owners(state_dict).items()
        if is_optimizer(value)
        for place, state in named_states(value, _at(plain, path), path)
        if (found := group_identities(state))
    }


def stateful_to_load_targets(
    state_dict: Mapping[str, Any],
    stored: Stored,
    prefixes: Sequence[str] = (),
    *,
    strict: bool | None = None,
) -> LoadTargets:
    """Returns the state to load into: sorted by key, `Stateful` values as their `state_dict()`.

    Keys are sorted so that all ranks call `state_dict()`, which may run collectives of the training
    job, in the same order. Neither parameters nor optimizers change.

    Args:
        state_dict: The user's argument of `load`. Not changed.
        stored: Content of the checkpoint. A module or optimizer uses its own names if the
            checkpoint has more of these: stock DCP saves them so. An optimizer requests the state
            that is stored, whatever state it has.
        prefixes: See `LoadOptions.prefixes`; keys that can't match are omitted.
        strict: See `LoadOptions.strict`.

    Raises:
        StateDictError: `state_dict` is not a mapping, or its keys can't be sorted.
        UnsupportedValueError: A module has no memory for values that are stored.

    Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
    """
    check_mapping(state_dict)
    modules, owners = _modules(state_dict), _owners(state_dict)
    states: dict[Path, Any] = {}
    targets = LoadTargets({})

    def of_others(value: Any, path: Path) -> dict[Path, Any]:
        found = plain_of_others(value, path, stored, strict=strict is not False)
        return {p: _LEFT_OUT for p in found if not prefixes or concerns(_name(p), prefixes)}

    for key in _sorted_keys(state_dict):
        # Why the second check: a `state_dict()` call may remove keys of the mapping that holds it.
        if (prefixes and not concerns(str(key), prefixes)) or key not in state_dict:
            continue
        some = _of_key(key, state_dict, owners)
        plain = {} if (key,) in some else of_others(state_dict[key], (key,))
        targets.left_out.update(plain)
        states.update(plain)
        some = {p: each for p, each in some.items() if not any(p[: len(o)] == o for o in plain)}
        for path, owner in some.items():
            name, part = _name(path), _part(owner, modules)
            if prefixes and not concerns(name, prefixes):
                targets.left_out.add(path)
                states[path] = _LEFT_OUT
                continue
            targets.owners[path], targets.parts[path] = owner, part
            if is_optimizer(owner):
                asked = part.targets(name, stored, prefixes, strict=strict is not False)
                if asked.stays:
                    del targets.owners[path], targets.parts[path]
                    targets.left_out.add(path)
                    states[path] = _LEFT_OUT
                    continue
                states[path] = asked.state
                targets.left.update(asked.left)
                if asked.decisive:
                    targets.decisive[path] = asked.decisive
                targets.whole.extend([name] if asked.is_whole else [])
            elif isinstance(part, ModuleState):
                states[path] = part.targets(name, stored, prefixes)
            else:
                state = part.state_dict()
                aside = of_others(state, path)
                targets.aside.update((place, _at(state, place[len(path) :])) for place in aside)
                state = _replaced(state, {p[len(path) :]: each for p, each in aside.items()})
                # Why: a scheduler of others has their lists of tensors until its first step.
                states[path] = _own_tensors(state) if isinstance(owner, LRScheduler) else state
            if len(path) > 1:
                _check_nested(state_dict, path, states[path], stored)
        placed = {path: states[path] for path in (*plain, *some)}
        targets.values.update(_replaced({key: state_dict[key]}, placed))
    return targets


def _check_nested(state_dict: Any, path: Path, state: Any, stored: Stored) -> None:
    """Raises if the state of a module or optimizer within containers can't be loaded into it."""
    name = _name(path)
    for end in range(1, len(path)):
        container = _at(state_dict, path[:end])
        if not isinstance(container, tuple) and not hasattr(type(container), "__setitem__"):
            raise UnsupportedValueError(
                f"{name!r} sits in a {type(container).__qualname__}, in which a loaded value can't "
                f"be put: use a dict or a list",
                key=name,
            )
    is_pickled = name in stored.names and stored.value(name).dtype is None
    if is_pickled and (state is None or flatten({name: state}).names != [name]):
        keys = "".join(f"[{key!r}]" for key in path)
        raise StateDictError(
            f"expected the values of {name!r}, found one pickled object, as DCP and earlier "
            f"versions save what is within containers. If you trust the file, load with None in "
            f"its place and LoadOptions(weights_only=False): what state{keys} is then has a "
            f"state_dict() for the load_state_dict of yours",
            key=name,
        )


def asked_names(state_dict: Mapping[str, Any], index: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the names of a checkpoint as the modules and optimizers of a state dict ask for them.

    Args:
        state_dict: The user's argument of `load`.
        index: Names in the checkpoint, with their numbers. They may have names of wrappers of
            modules in them, as those of `torch.compile(model).state_dict()`.

    Raises:
        StateDictError: Two values of the checkpoint have the same name without wrappers.
    """
    modules = _modules(state_dict)
    names = {key: ModuleNames(module) for key, module in modules.items()}
    for path, value in _owners(state_dict).items() if modules else ():
        if is_optimizer(value):
            module_key = naming_module(value, modules)
            if module_key is not None:
                for part in ("state", "param_groups"):
                    names[f"{_name(path)}.{part}"] = names[module_key]
    return renamed(index, names)


def must_be_taken(
    state_dict: Mapping[str, Any], unexpected: Sequence[str], *, strict: bool | None
) -> Sequence[str]:
    """Returns the names that this state dict, or that of another rank, must load.

    Args:
        state_dict: The user's argument of `load`.
        unexpected: Names of the checkpoint that it does not request.
        strict: See `LoadOptions.strict`. True: all of these names; None: those of modules and
            optimizers; False: none.
    """
    if strict is not None:
        return unexpected if strict else ()
    whole = owner_names(state_dict)
    return [name for name in unexpected if below(name, whole)] if whole else ()


def is_adapted(value: Any) -> bool:
    """Returns whether a value is a module or optimizer, all of whose state must be loaded."""
    return isinstance(value, nn.Module) or is_optimizer(value)


def owner_names(state_dict: Mapping[str, Any]) -> list[str]:
    """Returns the names of the modules and optimizers at any depth of a state dict."""
    owners = _owners(state_dict).items()
    return [_name(path) for path, value in owners if is_adapted(value)]


def has_states(value: Any) -> bool:
    """Returns whether `save` would put states in the places of objects within a value.

    Examples:
        >>> has_states((1, [nn.Linear(2, 1)])), has_states((1, [nn.Linear]))
        (True, False)
    """
    return bool(_owners({"": value}))


def frozen_names(state_dict: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of parameters that the modules of a state dict do not train.

    Args:
        state_dict: The user's argument of `save`.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> _ = model.weight.requires_grad_(False)
        >>> sorted(frozen_names({"model": model}))
        ['model.weight']
    """
    return frozenset(
        f"{key}.{name}"
        for key, value in _modules(state_dict).items()
        for name, parameter in ModuleNames(value).parameters()
        if not parameter.requires_grad
    )


def _own_tensors(value: Any) -> Any:
    """Copies mappings, lists and tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, MutableMapping):
        # Why by item: the scheduler needs its own class, and a `Counter` adds in `update`.
        made = copy(value)
        for key, each in value.items():
            made[key] = _own_tensors(each)
        return made
    return [_own_tensors(each) for each in value] if isinstance(value, list) else value


def _part(value: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Returns the object that provides and receives the state of a `Stateful` value."""
    if isinstance(value, nn.Module):
        return ModuleState(value, lambda each: type(each) is PerRank)
    if is_optimizer(value):
        return optimizer_part(value, modules)
    return value


Path = tuple[Any, ...]
"""Keys of mappings and indices of lists and tuples that lead to a value."""

_OWNERS = (nn.Module, torch.optim.Optimizer, LRScheduler)
"""What is treated at any depth as on the top level. As in DCP, other `Stateful` values are objects
within containers."""
_LEAVES = (_NEVER - {dict, list}) | {type(None), bytes, torch.Size}


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _owners(state_dict: Mapping[str, Any]) -> dict[Path, Any]:
    """Returns the modules, optimizers and schedulers at any depth of a state dict, by their paths.

    Mappings, lists and tuples are searched, keys of mappings in sorted order.
    """
    return dict(_owners_below(state_dict, (), set()))


def _owners_below(container: Any, path: Path, on_path: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yields what `_owners` returns, for one container.

    Args:
        container: The container.
        path: Its path.
        on_path: Containers above it, by `id`.
    """
    if id(container) in on_path or len(path) > MAX_DEPTH:
        return  # `flatten` refuses a state dict that contains itself.
    on_path.add(id(container))
    is_mapping = isinstance(container, Mapping)
    for key in _sorted_keys(container) if is_mapping else range(len(container)):
        value = container[key]
        if type(value) in _LEAVES:
            continue
        if isinstance(value, _OWNERS) or is_optimizer(value):
            yield (*path, key), value
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _owners_below(value, (*path, key), on_path)
    on_path.discard(id(container))


def _of_key(key: Any, state_dict: Mapping[str, Any], owners: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the values with a state of their own at or below a key, by their paths."""
    value = state_dict[key]
    if some := {path: each for path, each in owners.items() if path[0] == key}:
        return some
    # Why first: the protocol check costs 5 us, and most values of a flat state dict are tensors.
    is_stateful = type(value) not in _NEVER and isinstance(value, Stateful)
    return {(key,): value} if is_stateful else {}


def _replaced(container: Any, values: Mapping[Path, Any], path: Path = ()) -> Any:
    """Returns a container with other values at some paths; without them where they are `_LEFT_OUT`.

    Only containers on the way to these are copied: mappings as dicts, lists and tuples as lists.
    """
    inner = {each[: len(path) + 1] for each in values if each[: len(path)] == path}
    if not inner:
        return container

    def at(key: Any, value: Any) -> Any:
        here = (*path, key)
        if here in values:
            return values[here]
        return _replaced(value, values, here) if here in inner else value

    if isinstance(container, Mapping):
        made = {key: at(key, value) for key, value in container.items()}
        return {key: value for key, value in made.items() if value is not _LEFT_OUT}
    # Why not left out of a list: the others keep their places. Nothing is loaded into a mapping
    # that is empty.
    some = [at(index, value) for index, value in enumerate(container)]
    return [{} if value is _LEFT_OUT else value for value in some]


_LEFT_OUT = object()


def _at(container: Any, path: Path) -> Any:
    for key in path:
        container = container[key]
    return container


def _modules(state_dict: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Returns the modules at any depth of a state dict, by their names."""
    owners = _owners(state_dict).items()
    found = [(path, v) for path, v in owners if isinstance(v, nn.Module)]
    # Why sorted: names must not depend on the order in which a user passes modules.
    found.sort(key=lambda one: (len(one[0]), _name(one[0])))
    return {_name(path): value for path, value in found}


def check_mapping(state_dict: object) -> None:
    """Raises `StateDictError` if a state dict is not a mapping."""
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
        # Why: keys of several types, which DCP saves but does not load.
        return sorted(state_dict, key=str)


Merge = Callable[[Sequence[Any], int, int], Any]
RULES = ("error", "keep", "wrap")

_NAME = re.compile(
    r"(?P<fqn>.*)\.rank-(?P<rank>0|[1-9][0-9]{0,8})-of-(?P<world>[1-9][0-9]{0,8})", re.DOTALL
)


class PerRank:
    """A value that differs on every rank, such as a random state or the position in a data set.

    In a state dict it is saved once for each rank, as an object. Under one plain name, DCP would
    save the value of one rank and load it on all. Stock DCP finds the values under the names
    `<fqn>.rank-<rank>-of-<ranks>`.

    Args:
        value: Anything that can be saved as an object; tensors are saved whole, unsharded.
        resized: What a load does if another number of ranks saved the checkpoint. `"error"`: it
            raises. `"keep"`: it leaves `value` unchanged and reports the name as missing. `"wrap"`:
            rank r loads the value of rank r modulo the number of ranks that saved. A function
            `(values, rank, world_size)` returns this rank's value from those of all ranks, in rank
            order.

    Attributes:
        value: The value to save; after a load, the loaded value.

    Raises:
        InvalidRequestError: `resized` has another value.

    Examples:
        >>> import tempfile, ray_dcp
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = ray_dcp.save({"seed": PerRank(7)}, checkpoint_id=f"{root}/a")
        ...     state = {"seed": PerRank(0)}
        ...     _ = ray_dcp.load(state, checkpoint_id=f"{root}/a")
        ...     state["seed"].value
        7
    """

    def __init__(self, value: Any, *, resized: str | Merge = "error") -> None:
        if not callable(resized) and resized not in RULES:
            raise InvalidRequestError(
                f"PerRank(resized=...) must be one of {', '.join(map(repr, RULES))} or a function "
                f"of (values, rank, world_size), but is {resized!r}",
                key="resized",
            )
        self.value = value
        self.resized = resized

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, resized={self.resized!r})"


def name_of_rank(fqn: str, rank: int, world_size: int) -> str:
    """Returns the name under which a per-rank value is saved."""
    return f"{fqn}.rank-{rank}-of-{world_size}"


def named_for_rank(flat: Flat, rank: int, world_size: int) -> Flat:
    """Returns the state to save, with per-rank values under this rank's names.

    Args:
        flat: The state dict.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        StateDictError: Another value has the name that a per-rank value would get.
    """
    if PerRank not in set(map(type, flat.values)):
        return flat
    names, paths = list(flat.names), list(flat.paths)
    for row, value in enumerate(flat.values):
        if type(value) is PerRank:
            names[row] = name_of_rank(names[row], rank, world_size)
            paths[row] = (*paths[row], f"rank-{rank}-of-{world_size}")
    check_names(names)
    return replace(flat, names=names, paths=paths)


def refuse_per_rank(value: Any, way: str, name: str = "", depth: int = 0) -> None:
    """Raises if per-rank values could not be kept apart.

    Args:
        value: The state dict to save or load, or a value in it.
        way: The reason, as half a sentence.
        name: Name of the value.
        depth: How deep it is nested.

    Raises:
        InvalidRequestError: The state dict has a `PerRank`.
    """
    if isinstance(value, PerRank):
        raise InvalidRequestError(
            f"{name!r} is a PerRank, which {way} can't save or load; use the default planner "
            f"and a storage of ray_dcp's",
            key=name,
        )
    if isinstance(value, (Mapping, list)) and depth <= 50:
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            refuse_per_rank(each, way, f"{name}.{key}" if name else str(key), depth + 1)


@dataclass(frozen=True)
class _OwnValue:
    fqn: str
    target: PerRank
    numbers: Sequence[int]
    """Numbers of the table's objects to read: one, or those of all ranks for `merge`."""
    merge: Merge | None = None


class OwnValues:
    """The per-rank values that one rank loads.

    Args:
        flat: The state dict.
        index: Names that can be requested, with their numbers in the chunk table.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        rest: The state dict without per-rank values.
        asked: Their names in the checkpoint, for all ranks.
        loaded: FQNs that will be loaded.
        missing: FQNs that the checkpoint lacks.
        kept: FQNs whose rule leaves them unchanged.

    Raises:
        StateDictError: The number of ranks differs, and a rule makes this an error.
        DamagedCheckpointError: The checkpoint lacks the value of a rank.
    """

    def __init__(self, flat: Flat, index: Mapping[str, int], rank: int, world_size: int) -> None:
        self.rest = flat
        self.asked: set[str] = set()
        self.loaded: list[str] = []
        self.missing: list[str] = []
        self.kept: list[str] = []
        self._rank, self._world_size = rank, world_size
        self._own: list[_OwnValue] = []
        self._values: dict[int, Any] = {}
        rows = [row for row, value in enumerate(flat.values) if type(value) is PerRank]
        if not rows:
            return
        chosen = set(rows)
        self.rest = flat.only([row for row in range(len(flat.names)) if row not in chosen])
        stored = _per_rank_values(index)
        for row in rows:
            self._add(flat.names[row], flat.values[row], stored.get(flat.names[row]))

    def _add(self, fqn: str, target: PerRank, found: dict[tuple[int, int], int] | None) -> None:
        if found is None:
            self.missing.append(fqn)
            return
        worlds = sorted({world for _, world in found})
        world = worlds[0]
        if len(worlds) > 1 or sorted(rank for rank, _ in found) != list(range(world)):
            raise DamagedCheckpointError(
                f"expected {fqn!r} of ranks 0 to {world - 1}, found "
                f"{', '.join(f'rank {rank} of {world}' for rank, world in sorted(found))}",
                key=fqn,
            )
        self.asked.update(name_of_rank(fqn, rank, world) for rank in range(world))
        numbers = [found[rank, world] for rank in range(world)]
        merge: Merge | None = None
        if world == self._world_size:
            numbers = [numbers[self._rank]]
        elif target.resized == "error":
            raise StateDictError(
                f"{fqn!r} is a value of each rank and was saved by {world} ranks, but "
                f"{self._world_size} load it; say what is to become of it with "
                f"PerRank(..., resized='wrap', 'keep' or a function)",
                key=fqn,
            )
        elif target.resized == "keep":
            self.kept.append(fqn)
            return
        elif target.resized == "wrap":
            numbers = [numbers[self._rank % world]]
        elif callable(target.resized):
            merge = target.resized
        self.loaded.append(fqn)
        self._own.append(_OwnValue(fqn, target, numbers, merge))

    @property
    def numbers(self) -> list[tuple[int, str]]:
        """`(number in the table, FQN)` of every object to read."""
        return [(number, own.fqn) for own in self._own for number in own.numbers]

    def take(self, number: int, value: Any) -> None:
        """Stores the loaded value of one of `numbers`."""
        self._values[number] = value

    def finish(self) -> None:
        """Sets the values of the state dict's `PerRank`s.

        Raises:
            CheckpointError: A user's function raised.
        """
        for own in self._own:
            values = [self._values[number] for number in own.numbers]
            own.target.value = values[0]
            if own.merge is not None:
                own.target.value = call_user_code(
                    f"the function of PerRank {own.fqn!r}",
                    partial(own.merge, values, self._rank, self._world_size),
                    rank=self._rank,
                )


def _per_rank_values(index: Mapping[str, int]) -> dict[str, dict[tuple[int, int], int]]:
    """Returns, for each FQN with per-rank values, the number in the table by `(rank, ranks)`."""
    stored: dict[str, dict[tuple[int, int], int]] = {}
    for name, number in index.items():
        if ".rank-" in name and (match := _NAME.fullmatch(name)):
            who = (int(match["rank"]), int(match["world"]))
            stored.setdefault(match["fqn"], {})[who] = number
    return stored
