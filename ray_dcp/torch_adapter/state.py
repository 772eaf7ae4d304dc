"""Values that are converted for a checkpoint: `Stateful` values, modules, optimizers, `PerRank`.

As in DCP, only top-level `Stateful` values are converted, not nested ones.

Modules and optimizers are `Stateful` too, and a checkpoint must fit them whatever wraps them at the
load: DDP, FSDP and `torch.compile` add prefixes to a module's names, and an optimizer numbers its
parameters. So both are named by parameter, as in torch's own helpers; see `optimizer_state`.

`PerRank` values are saved under one name for each rank, and restored by a rule.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ray_dcp.errors import (
    DamagedCheckpointError,
    InvalidRequestError,
    StateDictError,
    UnsupportedValueError,
)
from ray_dcp.torch_adapter.collective import call_user_code
from ray_dcp.torch_adapter.flatten import Flat, below, check_names, concerns, flatten, listed
from ray_dcp.torch_adapter.module_names import ModuleNames, renamed, sharded_state
from ray_dcp.torch_adapter.optimizer_state import (
    Cast,
    Stored,
    gives_torchs,
    group_identities,
    naming_module,
    optimizer_part,
)
from ray_dcp.torch_adapter.priming import primed
from ray_dcp.torch_adapter.tensors import dtype_name

_NEVER = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, dict, list, int, float, str, bool})


@dataclass(frozen=True)
class LoadTargets:
    """The state to load into, for everything that a user passed to `load`."""

    values: dict[str, Any]
    """Values by key, sorted; `Stateful` values as their state."""
    parts: Mapping[str, Any]
    """The objects that receive loaded state, by key."""
    optimizers: list[Any] = field(default_factory=list)
    """Those of the parts that are an `optimizer_part`."""
    left: set[str] = field(default_factory=set)
    """Names that are read, but may belong to nothing in the state dict; `check_groups` decides."""
    whole: list[str] = field(default_factory=list)
    """Keys whose state the load replaces completely."""
    decisive: dict[str, set[str]] = field(default_factory=dict)
    """Names that have to be loaded before `check_groups`, by the keys of optimizers."""
    dtypes: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    """The dtype of each tensor of a module before the load, by the keys of modules."""
    modules: dict[str, nn.Module] = field(default_factory=dict)
    """The modules of `dtypes`."""

    @property
    def casts(self) -> list[Cast]:
        """Values that modules and optimizers hold in another dtype than the loaded one."""
        return [cast for part in self.optimizers for cast in part.casts] + [
            (f"{key}.{name}", dtype_name(loaded.dtype), dtype_name(dtype))
            for key, own in self.dtypes.items()
            for name, dtype in (own | _dtypes(self.modules[key])).items()
            if isinstance(loaded := self.values[key].get(name), torch.Tensor)
            and loaded.dtype != dtype
        ]

    def check_groups(self) -> set[str]:
        """Checks the groups of optimizers whose `decisive` values are loaded; changes nothing.

        Returns:
            Names that are read, but belong to no group of the state dict.

        Raises:
            StateDictError: Groups do not fit.
        """
        return set().union(
            *(self.parts[key].check_groups(self.values[key]) for key in self.decisive)
        )

    def put_back(self, state_dict: MutableMapping[str, Any]) -> None:
        """Passes the loaded state to the `Stateful` values, and replaces all other values.

        Args:
            state_dict: The user's argument of `load`; changed in place.

        Source: `torch/distributed/checkpoint/state_dict_loader.py`, `load`.
        """
        for key in _sorted_keys(state_dict):
            if key not in state_dict or key not in self.values:
                continue
            if key in self.parts:
                self.parts[key].load_state_dict(self.values[key])
            else:
                state_dict[key] = self.values[key]


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
    modules = _modules(state_dict)
    optimizers = [v for v in state_dict.values() if isinstance(v, torch.optim.Optimizer)]
    with ExitStack() as stack:
        for optimizer in optimizers if as_if_stepped else ():
            stack.enter_context(primed(optimizer))
        return {
            key: part.state_dict() if (part := _part(value, modules)) is not None else value
            for key, value in state_dict.items()
        }


def group_identities_of(
    state_dict: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Returns the `group_identities` of the optimizers of a state dict, by key.

    Args:
        state_dict: The user's argument of `save`.
        plain: The result of `stateful_to_state_dict` for it.
    """
    return {
        str(key): found
        for key, value in state_dict.items()
        if isinstance(value, torch.optim.Optimizer) and gives_torchs(value, torch.optim.Optimizer)
        if (found := group_identities(plain[key]))
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
    modules = _modules(state_dict)
    targets = LoadTargets({}, parts := {})
    for key in _sorted_keys(state_dict):
        # Why the second check: a `state_dict()` call may remove keys of the mapping that holds it.
        if (prefixes and not concerns(str(key), prefixes)) or key not in state_dict:
            continue
        value = state_dict[key]
        part = _part(value, modules)
        if part is None:
            targets.values[key] = value
        elif isinstance(value, torch.optim.Optimizer):
            asked = part.targets(str(key), stored, prefixes, strict=strict is not False)
            parts[key], targets.values[key] = part, asked.state
            targets.optimizers.append(part)
            targets.left.update(asked.left)
            if asked.decisive:
                targets.decisive[key] = asked.decisive
            targets.whole.extend([str(key)] if asked.is_whole else [])
        else:
            parts[key], targets.values[key] = _find_stateful(key, value, part, stored)
            if isinstance(part, _Model):
                tensors = _tensors(targets.values[key])
                targets.dtypes[key] = {name: tensor.dtype for name, tensor in tensors.items()}
                targets.modules[key] = value
                part.check_memory(key, tensors, stored, prefixes)
    return targets


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtypes of parameters and buffers, by their names with and without wrappers.

    Why not of `state_dict()`: that of FSDP1 is a collective.
    """
    found: dict[str, torch.dtype] = {}
    names = ModuleNames(module)
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found[name] = found[names.clean(name)] = tensor.dtype
    return found


def _may_give_memory(module: nn.Module) -> bool:
    """Returns whether a class or a hook, not one of torch, may give tensors memory in a load."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return not gives_torchs(module, nn.Module, "_load_from_state_dict") or any(
        not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks
    )


def _on_meta(key: str, names: Sequence[str]) -> UnsupportedValueError:
    """Returns the error of tensors of a module that a load leaves on the meta device."""
    return UnsupportedValueError(
        f"{len(names)} tensor(s) of the module {key!r} are on the meta device and have no "
        f"memory to load into: {listed([repr(f'{key}.{name}') for name in names])}. Give them some "
        f"first, as by module.to_empty(device='cpu'); or load {{{key!r}: module.state_dict()}}, "
        f"and pass what that holds then to module.load_state_dict(..., assign=True)",
        key=f"{key}.{names[0]}",
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
    owners = {key: ModuleNames(module) for key, module in modules.items()}
    for key, value in state_dict.items() if modules else ():
        if isinstance(value, torch.optim.Optimizer):
            module_key = naming_module(value, modules)
            if module_key is not None:
                for part in ("state", "param_groups"):
                    owners[f"{key}.{part}"] = owners[module_key]
    return renamed(index, owners)


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
    kinds = (nn.Module, torch.optim.Optimizer)
    whole = [str(key) for key, value in state_dict.items() if isinstance(value, kinds)]
    return [name for name in unexpected if below(name, whole)] if whole else ()


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
        for key, value in state_dict.items()
        if isinstance(value, nn.Module)
        for name, parameter in ModuleNames(value).parameters()
        if not parameter.requires_grad
    )


class _Model:
    """Adapter of a module, by the names that it has without wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: dict[str, str] = {}
        self._metadata: Any = None
        self._key, self._without_memory = "", list[str]()

    def check_memory(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        stored: Stored,
        prefixes: Sequence[str],
    ) -> None:
        """Raises if torch's `Module.load_state_dict` would skip tensors, as it does on `meta`."""
        skipped = [
            name
            for name, tensor in tensors.items()
            if tensor.is_meta and (full := f"{key}.{name}") in stored.names
            if not prefixes or below(full, prefixes)
        ]
        if not skipped or not gives_torchs(self._module, nn.Module, "load_state_dict"):
            return
        own = {prefix for prefix, each in self._module.named_modules() if _may_give_memory(each)}
        if refused := [name for name in skipped if "" not in own and not below(name, own)]:
            raise _on_meta(key, refused)
        self._key, self._without_memory = key, skipped

    def state_dict(self) -> dict[str, Any]:
        with sharded_state(self._module):
            own = self._module.state_dict()
        self._names = ModuleNames(self._module).by_clean_name(own)
        self._metadata = getattr(own, "_metadata", None)
        return {name: own[each] for name, each in self._names.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = OrderedDict((self._names.get(name, name), one) for name, one in state_dict.items())
        if self._metadata is not None:
            # Why: without it a class takes what it gets for state of an older version.
            own._metadata = self._metadata  # type: ignore[attr-defined]
        with sharded_state(self._module):
            self._module.load_state_dict(own)
        held = self._module.state_dict() if self._without_memory else {}
        if still := [name for name in self._without_memory if held[self._names[name]].is_meta]:
            raise _on_meta(self._key, still)


def _find_stateful(key: str, value: Any, part: Stateful, stored: Stored) -> tuple[Stateful, Any]:
    """Returns the object that receives the state of a value, and the state to load into.

    Of the two forms of a module, the one with more names in the checkpoint is chosen.
    """
    best: tuple[Stateful, Any] = part, part.state_dict()
    if isinstance(value, LRScheduler):
        # Why: a scheduler of others has their lists of tensors until its first step.
        return part, _own_tensors(best[1])
    if isinstance(part, _Model):
        most = -1
        for form in (part, value):
            state = best[1] if form is part else form.state_dict()
            names = flatten({key: state}).names
            num_found = sum(name in stored.names for name in names)
            if num_found > most:
                best, most = (form, state), num_found
            if num_found == len(names):
                break
        return best[0], _with_shapes(key, best[1], stored)
    return best


def _with_shapes(key: str, state: Any, stored: Stored) -> Any:
    """Returns the state of a module with tensors of the stored shapes for those of lazy modules.

    A lazy module takes the shapes of what its `load_state_dict` gets.
    """
    if not any(map(is_lazy, state.values())):
        return state
    return {
        name: torch.empty(stored.value(full).shape, dtype=value.dtype, device=value.device)
        if is_lazy(value) and (full := f"{key}.{name}") in stored.names
        else value
        for name, value in state.items()
    }


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
    """Returns the object that provides and receives the state of a value; None for plain values."""
    # Why first: the protocol check costs 5 us, and most values of a flat state dict are tensors.
    if type(value) in _NEVER or not isinstance(value, Stateful):
        return None
    if isinstance(value, nn.Module) and gives_torchs(value, nn.Module):
        return _Model(value)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_part(value, modules)
    return value


def _modules(state_dict: Mapping[str, Any]) -> dict[str, nn.Module]:
    # Why sorted: names must not depend on the order in which a user passes modules.
    found = [(str(key), v) for key, v in state_dict.items() if isinstance(v, nn.Module)]
    return dict(sorted(found, key=lambda one: one[0]))


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
