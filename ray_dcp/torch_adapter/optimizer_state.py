"""The state of optimizers, under the names of their parameters.

`Optimizer.load_state_dict` and torch's helpers around it cast state to the dtype of a parameter,
rebuild it, or drop it, and they match parameter groups by position. This module matches by names
and preserves values: a load creates its targets by what is stored, fills existing tensors in place
where they fit, and sets `state` and `param_groups` itself. It uses torch's code in two cases only:
an optimizer whose class replaces `load_state_dict` loads by that method, and its state is compared
with the stored one afterwards; and FSDP1 shards the state of its flat parameters.
"""

from __future__ import annotations

import json
import logging
import re
from collections import ChainMap, Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from ray_dcp import events
from ray_dcp.core.columns import identified
from ray_dcp.core.values import ChunkTable, Columns, IntKey, Kind, NamePath
from ray_dcp.errors import StateDictError
from ray_dcp.torch_adapter.flatten import (
    MAX_DEPTH,
    below,
    flatten,
    listed,
    path_end,
    path_tail,
    set_by_path,
)
from ray_dcp.torch_adapter.module_names import ModuleNames, sharded_state
from ray_dcp.torch_adapter.optimizer_kind import Traits, plain_saved_by_another, saved_by_another
from ray_dcp.torch_adapter.priming import held_by, primed, shard_like, state_of, wrapped_by
from ray_dcp.torch_adapter.shards import as_sharded_like
from ray_dcp.torch_adapter.sink import target_problem
from ray_dcp.torch_adapter.tensors import dtype_name, dtype_of, is_plain

INNER = "inner_optimizers"
"""Name for the states of optimizers that an optimizer holds and its `state_dict` has not."""

OTHER_STATE = "other_state"
"""Name for the entries of `optimizer.state` whose keys are no parameters. Why separate: among names
of parameters, such a key would look like a parameter that an optimizer lacks."""

LOCAL_STATE = "local_state"
"""Name for what an optimizer keeps as plain tensors of the shape of its shard of a parameter. Each
is a part of the whole that the shards make, and no replica; a load gives each rank its part."""

Cast = tuple[str, str, str]
"""FQN, dtype in the checkpoint, dtype that the optimizer holds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredValue:
    """What is known about a stored value before it is read."""

    path: NamePath | None = None
    """Its path in the state dict that was saved."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """Dtype of a tensor; None for other values."""
    is_raw: bool | None = None
    """Whether a tensor is stored as raw bytes, and not in the pickled form of its class; None if
    only the item contains the answer."""


@dataclass(frozen=True)
class Stored:
    """The content of a checkpoint, by the names that a state dict requests."""

    names: Collection[str]
    """FQNs: a mapping or a set, for fast lookups."""
    value: Callable[[str], StoredValue]
    """Returns what is known about the value of a name."""
    takes_any: bool = False
    """Whether a load puts a stored tensor of any class in the place of an `AsStored`."""

    @classmethod
    def of(cls, metadata: Metadata) -> Stored:
        """Returns the content that DCP's metadata describes."""
        items, paths = metadata.state_dict_metadata, metadata.planner_data

        def value(name: str) -> StoredValue:
            item = items[name]
            path = paths.get(name) if isinstance(paths, Mapping) else None
            if isinstance(item, BytesStorageMetadata):
                return StoredValue(path)
            return StoredValue(path, tuple(item.size), item.properties.dtype)

        return cls(items, value)

    @classmethod
    def of_table(cls, table: ChunkTable, index: Mapping[str, int]) -> Stored:
        """Returns the content of a chunk table.

        Args:
            table: The chunk table; of stock DCP's, a tensor's item may be anything.
            index: Names that can be requested, with their numbers in the table.
        """
        of_tensors = table.kind[table.tensor] == Kind.TENSOR
        is_known = not bool((table.payload_offset[of_tensors] < 0).any())

        def value(name: str) -> StoredValue:
            number = index[name]
            kind, path = table.kind[number], table.paths[number]
            if kind == Kind.OBJECT:
                return StoredValue(path)
            shape = tuple(table.shape[number, : table.ndim[number]].tolist())
            dtype = dtype_of(table.dtypes[table.dtype[number]], fqn=name)
            is_raw = bool(kind == Kind.TENSOR)
            return StoredValue(path, shape, dtype, is_raw if is_known or not is_raw else None)

        return cls(index, value, takes_any=True)

    def below(self, key: str, prefixes: Sequence[str]) -> dict[str, StoredValue]:
        """Returns the selected values below a key, by the rest of their names."""
        start = f"{key}."
        return {
            name.removeprefix(start): self.value(name)
            for name in self.names
            if name.startswith(start) and (not prefixes or below(name, prefixes))
        }

    def traits_below(self, key: str) -> Traits:
        """Returns what shows which optimizer saved the values below a key, selected or not."""
        start = f"{key}."
        return Traits.of_names(
            name.removeprefix(start) for name in self.names if name.startswith(start)
        )


@dataclass
class OptimizerTargets:
    """The optimizer state to load into.

    Attributes:
        state: The targets; None if the checkpoint has the whole state as one object.
        left: Names in it that may belong to no group of this optimizer; `check_groups` decides.
        is_whole: Whether the loaded state replaces all state of the optimizer.
        decisive: Names in it that have to be loaded before any target changes: `check_groups` then
            finds whether the rest fits, and which names no group of this optimizer takes.
        stays: Whether the optimizer stays as it is: another kind of optimizer saved the state.
    """

    state: Any
    left: set[str] = field(default_factory=set)
    is_whole: bool = False
    decisive: set[str] = field(default_factory=set)
    stays: bool = False


def _is_others(optimizer: torch.optim.Optimizer, key: str, stored: Stored, *, strict: bool) -> bool:
    """Returns whether another kind of optimizer saved the values below a key, and warns of it.

    Args:
        optimizer: The optimizer to load into.
        key: Its name.
        stored: Content of the checkpoint.
        strict: Whether to raise.

    Raises:
        StateDictError: It did, and the load is strict.
    """
    saved_by = saved_by_another(optimizer, stored.traits_below(key))
    return _refuse_others(key, saved_by, type(optimizer).__name__, strict=strict)


def plain_of_others(
    value: Any, path: tuple[Any, ...], stored: Stored, *, strict: bool
) -> list[tuple[Any, ...]]:
    """Returns the paths of plain state dicts of optimizers whose values another kind saved.

    Args:
        value: A value of the state dict to load into.
        path: Its path.
        stored: Content of the checkpoint.
        strict: Whether to raise.

    Raises:
        StateDictError: There are some, and the load is strict.
    """
    found = []
    for place, state, groups in _plain_optimizers(value, path, 0):
        key = ".".join(map(str, place))
        options = {str(option) for group in groups for option in group}
        entries = [each for each in state.values() if isinstance(each, Mapping)]
        own = Traits(
            frozenset(options - {"params", "param_names"}),
            frozenset(str(name) for entry in entries for name in entry),
        )
        saved_by = plain_saved_by_another(own, stored.traits_below(key))
        if _refuse_others(key, saved_by, " or ".join(sorted(own.kinds())) or "it", strict=strict):
            found.append(place)
    return found


def _refuse_others(key: str, saved_by: str, own: str, *, strict: bool) -> bool:
    """Returns whether another kind of optimizer saved values, and warns of it; raises if strict.

    Args:
        key: Name of the optimizer to load into.
        saved_by: Name of the kind that saved the values; "" if it is the same.
        own: Name of its own kind.
        strict: Whether to raise.
    """
    if not saved_by:
        return False
    message = (
        f"the state of the optimizer {key!r} was saved by another optimizer ({saved_by}), whose "
        f"options and moments mean nothing to {own}"
    )
    if strict:
        raise StateDictError(
            f"{message}. Load into an optimizer as it was saved; or leave this one as it is with "
            f"LoadOptions(strict=False), or by leaving it out of the state dict",
            key=key,
        )
    events.warn(f"Not loaded: {message}: it stays as it is", stacklevel=2)
    return True


def optimizer_part(optimizer: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Returns the adapter of an optimizer: a `Stateful` with a method and an attribute more.

    `targets(key, stored, prefixes, strict)` returns the state to load into. `load_state_dict` then
    sets the loaded state, and raises if the optimizer would hold anything else. `casts` then lists
    the values that the optimizer holds in another dtype.

    Args:
        optimizer: Anything that `is_optimizer`.
        modules: Modules of the state dict by key. The first one that has all parameters of the
            optimizer defines their names; if there is none, the optimizer's own numbers are the
            names.
    """
    if not gives_torchs(optimizer, torch.optim.Optimizer):
        key = naming_module(optimizer, modules)
        if key is not None and FullyShardedDataParallel.fsdp_modules(modules[key]):
            return _OwnFormOverFlat(optimizer, modules[key])
        return _OwnForm(optimizer)
    held = held_by(optimizer).items()
    # Why not of equal state: the outer one's state dict has it.
    inner = {place: one for place, one in held if one.state is not optimizer.state}
    outer = _named_part(optimizer, modules)
    if not inner:
        return outer
    return _Wrapping(outer, {place: optimizer_part(one, modules) for place, one in inner.items()})


def _named_part(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> Any:
    """Returns the adapter of an optimizer alone whose `state_dict` is torch's."""
    key = naming_module(optimizer, modules)
    if key is None:
        return _Named(optimizer, {})
    if FullyShardedDataParallel.fsdp_modules(modules[key]):
        return _FlatParameters(optimizer, modules[key], key)
    wanted = {id(parameter) for parameter in _parameters(optimizer)}
    by_name = {n: p for n, p in ModuleNames(modules[key]).parameters() if id(p) in wanted}
    return _Named(optimizer, by_name, key)


def naming_module(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> str | None:
    """Returns the key of the first module that has all parameters of an optimizer, or None."""
    wanted = {id(parameter) for parameter in _parameters(optimizer)}
    for key, module in modules.items():
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return key
    return None


def gives_torchs(value: Any, cls: Any, name: str = "state_dict") -> bool:
    """Returns whether a method is that of `cls`, replaced neither by a subclass nor an instance."""
    return getattr(type(value), name) is getattr(cls, name) and name not in vars(value)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def group_identities(state: Any) -> list[str]:
    """Returns what distinguishes each parameter group from those of other ranks.

    That is the names of its parameters; of an empty group its index.

    Args:
        state: State of an optimizer.

    Returns:
        Identities for `columns.identified`; none if parameters have numbers instead of names, which
        are the same on ranks with different parameters.

    Examples:
        >>> groups = [{"params": ["a"]}, {"params": []}]
        >>> one, other = group_identities({"param_groups": groups})
        >>> [other, one] == group_identities({"param_groups": [{"params": []}, groups[0]]})
        False
        >>> group_identities({"param_groups": [{"params": [0]}]})
        []
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    lists = [group.get("params") for group in groups] if isinstance(groups, list) else [None]
    if not all(isinstance(some, list) and set(map(type, some)) <= {str} for some in lists):
        return []
    seen, found = Counter[str](), list[str]()
    for index, names in enumerate(lists):
        text = json.dumps(names or index).encode()
        identity = blake2b(text, digest_size=8).hexdigest()
        found.append(f"{identity}-{seen[identity]}" if identity in seen else identity)
        seen[identity] += 1
    return found


def named_states(optimizer: Any, state: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yields the states, with their paths, whose groups a load finds by names of parameters.

    Args:
        optimizer: An optimizer.
        state: Its state, as its `optimizer_part` gives it.
        path: Path of the state.
    """
    if gives_torchs(optimizer, torch.optim.Optimizer):
        yield path, state
        for place, inner in held_by(optimizer).items():
            if place in state.get(INNER, {}):
                yield from named_states(inner, state[INNER][place], (*path, INNER, place))


def with_group_identities(
    columns: Columns, identities: Mapping[tuple[str, ...], Sequence[str]]
) -> Columns:
    """Returns columns in which values of parameter groups have the identities of their groups.

    Args:
        columns: What a rank saves.
        identities: `group_identities` by the texts of the paths of optimizers.
    """
    if not identities:
        return columns
    names, paths = list(columns.names), list(columns.paths)
    for row, path in enumerate(paths):
        if not path or "param_groups" not in path[1:-2]:
            continue
        at = path.index("param_groups", 1)
        known = identities.get(tuple(map(str, path[:at])))
        if known and names[row] == ".".join(map(str, path)):
            index = path[at + 1]
            if isinstance(index, int) and index < len(known):
                names[row], paths[row] = identified(path, at + 1, known[index])
    return replace(columns, names=tuple(names), paths=tuple(paths))


def check_all_taken(
    left: Sequence[str], *, strict: bool | None, lost_state: Collection[str] = ()
) -> None:
    """Raises if a part of the checkpoint that must be loaded would be lost.

    Args:
        left: Names that must be loaded, but that no rank loads.
        strict: See `LoadOptions.strict`. False: warns only.
        lost_state: Those that `lost_state` returned.

    Raises:
        StateDictError: There are such names.
    """
    if not left:
        return
    of_state = [name for name in left if name in lost_state]
    told = listed([*map(repr, of_state or left)])
    message = (
        f"the checkpoint holds state of a module or optimizer that the one to load into does not "
        f"have: {told}. Make it as it was saved: a module with the same layers, an optimizer over "
        f"the same parameters, frozen ones too, in as many groups (add_param_group); or leave this "
        f"out with LoadOptions(strict=False)"
    )
    if strict:
        message = (
            f"LoadOptions(strict=True), but the checkpoint holds {len(left)} key(s) that the state "
            f"dict does not ask for: {told}"
        )
    elif of_state:
        message = (
            f"the checkpoint holds state of an optimizer whose state dict has no place for it, as "
            f"that of an optimizer that has not stepped: {told}. Load into the optimizer itself, "
            f"{{'optim': optimizer}} and not {{'optim': optimizer.state_dict()}}; or call "
            f"ray_dcp.xla.prime_optimizer(optimizer) first, which creates its state without a step"
        )
        if strict is None:
            message += "; or leave this state out with LoadOptions(strict=False)"
    if strict is False:
        events.warn(f"Not loaded: {message}", stacklevel=2)
        return
    raise StateDictError(message, key=(of_state or left)[0])


def lost_state(values: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the names of stored state that would be lost to optimizers.

    `Optimizer.state_dict()` has state only of parameters that have stepped, so that a load into
    that of a new optimizer would leave all moments out without a word.

    Args:
        values: The state dict to load into. At any depth it may have the state dicts of
            optimizers, mappings with `state` and `param_groups`.
        names: Names of the checkpoint that it does not request.

    Examples:
        >>> new = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        >>> lost_state({"o": new, "lr": {"step": 3}}, ["o.state.0.exp_avg", "lr.last"])
        ['o.state.0.exp_avg']
    """
    found = [*_plain_optimizers(values, (), 0)]
    lost = []
    for name in names if found else ():
        for path, state, groups in found:
            start = ".".join(map(str, (*path, "state", "")))
            if name.startswith(start) and _has_place(name[len(start) :], state, groups):
                lost.append(name)
                break
    return lost


_Plain = tuple[tuple[Any, ...], Mapping[Any, Any], Sequence[Mapping[str, Any]]]
"""Path of an optimizer's state dict, its state, and its parameter groups."""


def _plain_optimizers(values: Any, path: tuple[Any, ...], depth: int) -> Iterator[_Plain]:
    """Yields the optimizers' state dicts among plain values."""
    if not isinstance(values, Mapping | list) or depth > MAX_DEPTH:
        return
    groups = values.get("param_groups") if isinstance(values, Mapping) else None
    state = values.get("state") if isinstance(values, Mapping) else None
    if (
        isinstance(groups, list)
        and groups
        and isinstance(state, Mapping)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    ):
        yield path, state, groups
        return
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        yield from _plain_optimizers(value, (*path, key), depth + 1)


def _has_place(rest: str, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether stored state belongs to an optimizer's state dict.

    Why not always: a state dict may be that of an optimizer over some of the parameters.

    Args:
        rest: Name of the state below `state`.
        state: What the state dict has of it.
        groups: Its groups, whose parameters are names or numbers.
    """
    if not state:
        return True
    params = {entry for group in groups for entry in group["params"]}
    known = set(map(str, params))
    stops = [place for place, letter in enumerate(rest) if letter == "."]
    if any(rest[:stop] in known for stop in (*stops, len(rest))):
        return True
    is_numbered = not any(isinstance(entry, str) for entry in params)
    return is_numbered and not rest.partition(".")[0].isdecimal()


_PARTS = ("state", "param_groups", OTHER_STATE, LOCAL_STATE)


def _is_cut(parameter: DTensor) -> bool:
    """Returns whether a parameter is cut into parts: on each rank alike, whatever its length."""
    return any(
        place.is_shard() and parameter.device_mesh.size(dim) > 1
        for dim, place in enumerate(parameter.placements)
    )


def _is_plain(value: Any) -> bool:
    """Returns whether state is a plain tensor that may be a part of a whole: no number."""
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor and value.dim() > 0


def _fixed_shapes(
    sharded: Iterable[tuple[Mapping[Any, Any], DTensor]],
) -> set[tuple[Any, torch.Size]]:
    """Returns the names and shapes of plain state that do not follow the shape of a shard.

    Such a value is a replica, as a step in a tensor of one element, also where a shard happens to
    have that shape. Ranks whose shards have other lengths would save it in two ways otherwise.

    Args:
        sharded: State with its sharded parameter.
    """
    found = {("step", torch.Size([1]))}
    for state, parameter in sharded:
        own = parameter.to_local().shape
        found |= {(k, v.shape) for k, v in state.items() if _is_plain(v) and v.shape != own}
    return found


class _Named:
    """Adapter of an optimizer, by the names of its module's parameters or by its own numbers.

    Args:
        optimizer: An optimizer whose `state_dict` is torch's.
        by_name: Its parameters by name; empty for its own numbers.
        module_key: Key of the module that names them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, by_name: dict[str, Any], module_key: str = ""
    ) -> None:
        self.casts: list[Cast] = []
        self._optimizer = optimizer
        self._by_name = by_name
        self._module_key = module_key
        self._by_number: dict[str, Any] = {}
        self._numbers: list[list[Any]] = []
        self._table: Mapping[str, Any] | None = None
        self._num_stored: int | None = None
        self._flat_keys: dict[str, tuple[str, str]] = {}
        self._absent: set[str] = set()
        self._renamed_to: dict[str, str] = {}
        self._as_saved: set[int] = set()
        self._listed: set[int] = set()
        self._group_names: dict[int, list[str]] = {}
        self._key, self._is_whole, self._is_strict = "", True, True

    def state_dict(self) -> dict[str, Any]:
        found = self._own_state_dict()
        named = self._renamed(found)
        lists = zip(named["param_groups"], self._optimizer.param_groups, strict=False)
        owners = {
            entry: parameter
            for group, own in lists
            for entry, parameter in zip(group["params"], own["params"], strict=False)
        }
        local: dict[Any, dict[Any, Any]] = {}
        sharded = {
            entry: (state, parameter)
            for entry, state in named["state"].items()
            if isinstance(state, Mapping)
            and isinstance(parameter := owners.get(entry), DTensor)
            and _is_cut(parameter)
        }
        fixed = _fixed_shapes(sharded.values())
        for entry, (state, parameter) in sharded.items():
            parts = {
                k: v
                for k, v in state.items()
                if _is_plain(v)
                and v.shape == parameter.to_local().shape
                and (k, v.shape) not in fixed
            }
            if parts:
                local[entry] = {k: as_sharded_like(v, parameter) for k, v in parts.items()}
        if not local:
            return named
        rest = {
            entry: {k: v for k, v in state.items() if k not in local[entry]}
            if entry in local
            else state
            for entry, state in named["state"].items()
        }
        rest = {entry: state for entry, state in rest.items() if state or entry not in local}
        return {**named, "state": rest, LOCAL_STATE: local}

    def _renamed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's own state dict with the names of its parameters."""
        if not self._by_name:
            return dict(found)
        names: dict[int, str] = {}
        for name, parameter in self._by_name.items():
            names.setdefault(id(parameter), name)
        # Why not counted again: a user's hook may have changed the numbers.
        name_of: dict[Any, str] = {}
        for group, own in zip(found["param_groups"], self._optimizer.param_groups, strict=False):
            for number, parameter in zip(group["params"], own["params"], strict=False):
                name_of.setdefault(number, names[id(parameter)])
        state = found["state"]
        named = {
            **found,
            "state": {name_of[key]: value for key, value in state.items() if key in name_of},
            "param_groups": [
                {**group, "params": [name_of[number] for number in group["params"]]}
                for group in found["param_groups"]
            ],
        }
        others = {key: value for key, value in state.items() if key not in name_of}
        return {**named, OTHER_STATE: others} if others else named

    def _own_state_dict(self) -> dict[str, Any]:
        own = {id(parameter) for parameter in _parameters(self._optimizer)}
        for key in self._optimizer.state:
            if isinstance(key, torch.Tensor) and id(key) not in own:
                raise StateDictError(
                    f"expected the state of {type(self._optimizer).__name__} to belong to "
                    f"parameters of its groups, found some of a tensor of shape "
                    f"{tuple(key.shape)} that is in none; remove it from optimizer.state, or add "
                    f"the tensor with add_param_group"
                )
        return self._optimizer.state_dict()

    # --- targets of a load -----------------------------------------------------------------------

    def targets(
        self, key: str, stored: Stored, prefixes: Sequence[str], *, strict: bool
    ) -> OptimizerTargets:
        self._key, self._is_whole, self._is_strict = key, not prefixes, strict
        groups = self._own_state_dict()["param_groups"]
        self._numbers = [list(group["params"]) for group in groups]
        self._by_number = {str(n): p for n, p in reversed(self._numbered())}
        self._table, self._num_stored = None, None
        in_module = _stored_in_module(stored, self._module_key, self._by_name)
        self._renamed_to = _renamed(in_module)
        self._as_saved = {
            id(self._by_name[name])
            for name, item in in_module.items()
            if tuple(self._by_name[name].shape) == item.shape
        }
        items = stored.below(key, prefixes)
        if not items:
            return OptimizerTargets(None if key in stored.names else self.state_dict())
        if _is_others(self._optimizer, key, stored, strict=strict):
            return OptimizerTargets(None, stays=True)
        parts: dict[str, dict[str, StoredValue]] = {"param_groups": {}, "state": {}}
        for name, item in items.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = item
        for part in ("state", OTHER_STATE, LOCAL_STATE):
            # An empty mapping has the name of the part.
            parts.get(part, {}).pop("", None)
        tree: dict[str, Any] = {"state": {}}
        groups_items = parts.pop("param_groups")
        left = self._ask_groups(groups_items, tree)
        local = self._ask_local(parts.pop(LOCAL_STATE, {}))
        if local:
            tree[LOCAL_STATE] = local
        others = self._ask_state(parts.pop("state"), tree["state"], local)
        self._ask_others(tree["state"], others)
        if OTHER_STATE in parts:
            self._ask_others(tree.setdefault(OTHER_STATE, {}), parts.pop(OTHER_STATE))
        if self._optimizer._optimizer_load_state_dict_pre_hooks or not self._takes_torchs():
            # A user's code may handle more parts than those of torch.
            for part, rests in parts.items():
                for rest, item in rests.items():
                    path = (part, *path_tail(item.path, rest)) if rest else (part,)
                    set_by_path(tree, path, self._target(None, path, item, None))
        return OptimizerTargets(tree, left, self._is_whole, self._deciding_names(groups_items))

    def _deciding_names(self, items: Mapping[str, StoredValue]) -> set[str]:
        """Returns the names of the groups' values, if the groups might not fit the optimizer's.

        One group of named parameters always fits one.
        """
        is_simple = self._num_stored == 1 == len(self._numbers) and self._table is self._by_name
        return set() if is_simple else {f"{self._key}.param_groups.{rest}" for rest in items}

    def _numbered(self) -> list[tuple[Any, Any]]:
        """Returns each of the optimizer's own numbers with its parameter."""
        numbers = chain.from_iterable(self._numbers)
        return list(zip(numbers, _parameters(self._optimizer), strict=False))

    def _ask_groups(self, items: Mapping[str, StoredValue], tree: dict[str, Any]) -> set[str]:
        """Adds targets for the groups; returns the names of those beyond the optimizer's number."""
        own, left, options = self._optimizer.param_groups, set[str](), set[str]()
        known = {option for group in own for option in group} - {"params", "param_names"}
        self._flat_keys, self._group_names = {}, {}
        if any(_flat_part(item.path) for item in items.values()):
            tree["param_groups"] = self._ask_flat_groups(items)
            self._num_stored = len({name for name, _ in self._flat_keys.values()})
            self._absent = known - {option for _, option in self._flat_keys.values()}
            return left
        tree["param_groups"] = []
        for rest, item in items.items():
            number, _, option = rest.partition(".")
            if not (number.isdecimal() and option):
                continue
            path = path_tail(item.path, option)
            options.add(str(path[0]))
            target = None if item.dtype is None else torch.empty(item.shape, dtype=item.dtype)
            set_by_path(tree, ("param_groups", int(number), *path), target)
            self._group_names.setdefault(int(number), []).append(f"{self._key}.param_groups.{rest}")
            if int(number) >= len(own):
                left.add(f"{self._key}.param_groups.{rest}")
        groups = tree["param_groups"] = [group or {} for group in tree["param_groups"]]
        self._num_stored = len(groups)
        groups += [{} for _ in own[len(groups) :]]
        self._absent = known - options
        for index, (group, held) in enumerate(zip(groups, own, strict=False)):
            lacking = known if index >= self._num_stored else self._absent
            group.update({option: held[option] for option in held if option in lacking})
        return left

    def _ask_flat_groups(self, items: Mapping[str, StoredValue]) -> dict[str, Any]:
        """Returns targets for groups that torch has flattened: options of each parameter."""
        if not self._by_name:
            raise StateDictError(
                f"the checkpoint has the options of the optimizer {self._key!r} by the names of "
                f"its parameters (flatten_optimizer_state_dict=True); give the module that has "
                f"them in the state dict too",
                key=self._key,
            )
        tree: dict[str, Any] = {}
        for rest, item in items.items():
            part = _flat_part(item.path)
            inner = item.path[item.path.index(part) + 1 :] if item.path and part else ()
            key = rest.removesuffix("".join(f".{each}" for each in inner))
            owner = _map_to_owner({key: None}, self._by_name).get(key)
            if owner is None:
                continue
            self._flat_keys[key] = owner, key[len(owner) + 1 :]
            target = None if item.dtype is None else torch.empty(item.shape, dtype=item.dtype)
            set_by_path(tree, (key, *inner), target)
        return tree

    def _as_list(self, groups: Any) -> list[dict[str, Any]]:
        """Returns the groups of a state: of each parameter by itself if they are flattened."""
        if not isinstance(groups, Mapping):
            return list(groups)
        found: dict[str, dict[str, Any]] = {}
        for key, value in groups.items():
            name, option = self._flat_keys[key]
            found.setdefault(name, {"params": [name]})[option] = value
        return list(found.values())

    def _ask_local(self, items: Mapping[str, StoredValue]) -> dict[str, Any]:
        """Returns targets for state of the shape of shards: of the whole, or parts of it."""
        tree: dict[str, Any] = {}
        ends = {name: path_end(item.path, name) for name, item in items.items()}
        for table in (self._by_name, self._by_number):
            owners = _map_to_owner(ends, table)
            for name, owner in owners.items():
                path = path_tail(items[name].path, name[len(owner) + 1 :])
                made = torch.empty_like(table[owner], dtype=items[name].dtype, requires_grad=False)
                set_by_path(tree, (owner, *path), made)
            if owners:
                self._table = table
                break
        return tree

    def _ask_state(
        self,
        items: Mapping[str, StoredValue],
        root: dict[str, Any],
        local: Mapping[str, Mapping[Any, Any]],
    ) -> dict[str, StoredValue]:
        """Adds targets for the state of parameters; returns the items of no parameter.

        Args:
            items: The stored values.
            root: Receives the targets.
            local: State that has targets already.
        """
        ends = {name: path_end(item.path, name) for name, item in items.items()}
        named, numbered = _map_to_owner(ends, self._by_name), _map_to_owner(ends, self._by_number)
        # A name may be a number too, "0" of a list of parameters; then only its path decides.
        is_named = bool(named) and not any(isinstance((ends[n] or ("",))[0], IntKey) for n in named)
        if named or numbered or not self._by_name:
            self._table = self._by_name if is_named else self._by_number
        table = self._table or {}
        wanted: dict[str, list[tuple[NamePath, StoredValue]]] = {}
        for name, owner in (named if is_named else numbered).items():
            tail = path_tail(items[name].path, name[len(owner) + 1 :]) if name != owner else ()
            path, start = items[name].path or (), -len(tail)
            if ends[name] is None and len(path) > len(tail) and path[start:] == tail:
                self._renamed_to[str(path[start - 1])] = owner
            wanted.setdefault(owner, []).append(((ends[name] or ("", *tail))[1:], items[name]))
        fresh, samples = self._fresh_state({id(table[owner]): one for owner, one in wanted.items()})
        for owner, rows in wanted.items():
            parameter = table[owner]
            held = state_of(self._optimizer, parameter)
            own = fresh.get(id(parameter)) if held is None else held
            pattern = samples.get(id(parameter)) if own is None else own
            for tail, item in rows:
                path, like = _find(pattern, tail)
                target = self._target(parameter, path, item, None if own is None else like)
                set_by_path(root, (owner, *path), target)
            if isinstance(root[owner], dict) and isinstance(pattern, Mapping):
                there = {**root[owner], **local.get(owner, {})}
                lacking = _missing_state(there, own or {}, has_stepped=held is not None)
                root[owner].update(lacking)
                _add_empty(root[owner], pattern)
        if self._table is not self._by_number:
            return {}
        # Why not names with dots if there is no number at all: those are names of parameters.
        return {
            name: item
            for name, item in items.items()
            if not (first := str(path_tail(item.path, name)[0])).isdecimal()
            and (numbered or "." not in first)
        }

    def _fresh_state(
        self, wanted: Mapping[int, list[tuple[NamePath, StoredValue]]]
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns state of step 0 for parameters whose stored state is not determined without it.

        The optimizer's class creates this state for one parameter of each group. It shows the names
        and classes of values, and the layout of values whose shape differs from that of a sharded
        parameter.

        Args:
            wanted: The stored values, by the id of the parameter.

        Returns:
            The state by the id of its parameter, and for each parameter the state of one in its
            group.
        """
        optimizer, samples = self._optimizer, dict[int, Any]()
        groups = [
            [
                parameter
                for parameter in group["params"]
                if id(parameter) in wanted
                and parameter.requires_grad
                and state_of(optimizer, parameter) is None
            ]
            for group in optimizer.param_groups
        ]
        ids = set[int]()
        # Those whose stored state may be that of a parameter of another shape; alike ones together.
        odd: dict[Any, list[Any]] = {}
        for index, own in enumerate(groups):
            for p in own:
                shapes = tuple(item.shape for _, item in wanted[id(p)])
                if any(len(one) == p.dim() and tuple(one) != tuple(p.shape) for one in shapes):
                    odd.setdefault((index, tuple(p.shape), shapes), []).append(p)
        ids |= {id(some[0]) for some in odd.values()}
        for own in groups:
            ids |= {id(p) for p in own if not all(_is_known(p, *row) for row in wanted[id(p)])}
            # Why not sharded parameters: the step may wait for other ranks, which need not take it.
            plain = sorted((p for p in own if not isinstance(p, DTensor)), key=torch.Tensor.numel)
            ids.update(map(id, plain[: 1 if self._is_strict else None]))
        made = self._primed(ids)
        for first, *others in odd.values():
            found = [(_find(made.get(id(first)), tail)[1], one) for tail, one in wanted[id(first)]]
            if any(self._must_fit(like, first, item) for like, item in found):
                made |= self._primed(set(map(id, others)) - made.keys())
        for own in groups:
            sample = next((made[id(p)] for p in own if id(p) in made), None)
            if isinstance(sample, Mapping):
                samples.update({id(p): sample for p in own})
                if not all(map(_has_bytes, sample.values())):
                    made |= self._primed({id(p) for p in own} - made.keys())
        return made, samples

    def _primed(self, ids: set[int]) -> dict[int, Any]:
        """Returns the state of step 0, by the id of its parameter."""
        if not ids:
            return {}
        with primed(self._optimizer, ids) as made:
            return made

    def _ask_others(self, root: dict[str, Any], items: Mapping[str, StoredValue]) -> None:
        for rest, item in items.items():
            path, held = _find(self._optimizer.state, path_tail(item.path, rest))
            set_by_path(root, path, self._target(None, path, item, held))

    def _target(self, parameter: Any, path: NamePath, item: StoredValue, like: Any) -> Any:
        """Returns the target of a stored value: the existing one if it fits, else a new tensor."""
        if item.dtype is None:
            return None
        if _is_like(like, item):
            return _of_dtype(like, item.dtype)
        if parameter is not None and self._must_fit(like, parameter, item):
            return _of_dtype(like, item.dtype)
        if parameter is not None and tuple(parameter.shape) == item.shape and _has_bytes(parameter):
            made = torch.empty_like(parameter, dtype=item.dtype, requires_grad=False)
            shard_like(made, parameter)
            return made
        owner = parameter if parameter is not None else _parameters(self._optimizer)[0]
        device = owner.device
        if isinstance(like, torch.Tensor):
            device = like.device
        elif path[-1:] == ("step",):
            device = torch.device("cpu")  # `_move_state` moves it where the optimizer counts.
        return torch.empty(item.shape, dtype=item.dtype, device=device)

    def _must_fit(self, tensor: Any, parameter: Any, item: StoredValue) -> bool:
        """Returns whether state with the lengths of its parameter is stored with another of them.

        The load then reports the shapes, or fills the part that `LoadOptions.resize` allows. A
        parameter that is stored as it is has lengths of state that an option of its group selects.
        """
        return (
            id(parameter) not in self._as_saved
            and isinstance(tensor, torch.Tensor)
            and _has_bytes(tensor)
            and tensor.dim() == len(item.shape) == parameter.dim()
            and _fits_shape(tensor.shape, parameter.shape)
            and any(
                own == full != stored
                for own, full, stored in zip(tensor.shape, parameter.shape, item.shape, strict=True)
            )
        )

    # --- setting loaded state --------------------------------------------------------------------

    def check_groups(self, state: Mapping[str, Any]) -> set[str]:
        """Checks that the stored groups fit those of the optimizer; changes nothing.

        Args:
            state: The targets, with all `OptimizerTargets.decisive` in place.

        Returns:
            Names of stored groups that this optimizer has no parameter of: another rank may.

        Raises:
            StateDictError: They do not fit.
        """
        stored = self._stored_groups(state["param_groups"])
        taken = {index for matches in self._match(stored) for index in matches}
        self._options_of(stored)
        return _names_of_left(stored, taken, self._group_names)

    def _stored_groups(self, groups: Any) -> list[dict[str, Any]]:
        return self._as_list(groups)[: self._num_stored]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        packed = self._pack(state_dict)
        if self._takes_torchs():
            self._set_state(packed)
            return
        self._optimizer.load_state_dict(packed)
        held = self._renamed(self._optimizer.state_dict())
        self.casts = _find_casts(self._optimizer, self._key, self._renamed(packed), held)

    def _takes_torchs(self) -> bool:
        return gives_torchs(self._optimizer, torch.optim.Optimizer, "load_state_dict")

    def _pack(self, loaded: Any) -> dict[str, Any]:
        """Returns the state that the optimizer should have, in the form of its `state_dict()`."""
        optimizer = self._optimizer
        if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= loaded.keys():
            raise StateDictError(
                f"expected the state of an optimizer, a mapping with 'state' and 'param_groups', "
                f"found {type(loaded).__name__}",
                key=self._key,
            )
        listed = self._as_list(loaded["param_groups"])
        groups = self._options_of(listed[: self._num_stored])
        table = self._table
        if table is None:
            is_named = any(key in self._by_name for key in loaded["state"])
            table = self._by_name if is_named else self._by_number
        numbers = {id(parameter): number for number, parameter in reversed(self._numbered())}
        values: dict[int, Any] = {}
        others = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
        others = {} if self._is_whole else others
        for key, value in loaded["state"].items():
            parameter = table.get(str(key))
            if parameter is not None:
                values[id(parameter)] = value
            elif not any(key in (g.get("params") or ()) for g in listed):
                others[key] = value
            elif self._is_strict:
                check_all_taken([f"{self._key}.state.{key}"], strict=None)
        others.update(loaded.get(OTHER_STATE, {}))
        for key, value in loaded.get(LOCAL_STATE, {}).items():
            parts = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in value.items()}
            owner = id(table[str(key)])
            values[owner] = {**values.get(owner, {}), **parts}
        state: dict[Any, Any] = {}
        packed: list[dict[str, Any]] = []
        for group, own, options in zip(optimizer.param_groups, self._numbers, groups, strict=True):
            for parameter in group["params"]:
                held = optimizer.state.get(parameter)
                value = values.get(id(parameter), held)
                if id(parameter) in values:
                    value = self._move_state(parameter, group, options, value)
                    if not self._is_whole and isinstance(held, Mapping):
                        value = {**held, **value}
                elif held is None or (
                    options is not None
                    and self._is_whole
                    # Why: of a parameter that no stored group lists, the checkpoint knows nothing.
                    and (self._is_strict or id(parameter) in self._listed)
                ):
                    continue
                state[numbers[id(parameter)]] = value
            stays = group if options is None or not self._is_whole else self._absent
            kept = {k: v for k, v in group.items() if k in stays or k == "param_names"}
            new = {k: _move_option(v, group.get(k)) for k, v in (options or {}).items()}
            packed.append({**kept, **new, "params": own})
        rest = {k: v for k, v in loaded.items() if k not in _PARTS}
        return {**rest, "state": {**state, **others}, "param_groups": packed}

    def _options_of(self, stored: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Returns the stored options of each group of the optimizer; None if there are none."""
        hits = self._match(stored)
        lost = [index for index, matches in enumerate(hits) if not matches]
        if lost and self._is_strict and self._is_whole:
            raise StateDictError(
                f"expected the parameters of group {lost[0]} of the optimizer {self._key!r} in a "
                f"parameter group of the checkpoint, which has {len(stored)}, found them in none. "
                f"Make the groups as they were saved, or leave this one as it is with "
                f"LoadOptions(strict=False)",
                key=self._key,
            )
        return [
            self._options([stored[j] for j in matches]) if matches else None for matches in hits
        ]

    def _match(self, stored: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Returns the indices of the stored groups whose options each group has.

        Groups are matched by their parameters, and empty groups by their order, or by their options
        if several ranks saved empty groups. The remaining
        groups are matched by position: if each rank has its own parameters, the list that earlier
        versions stored is that of one rank.
        """
        own = self._optimizer.param_groups
        lists = [group.get("params") or () for group in stored]
        renamed = _under_new_names(lists, self._renamed_to)
        members = [self._members(entries) for entries in renamed]
        self._listed = set().union(*members)
        ids = [{id(parameter) for parameter in group["params"]} for group in own]
        hits = [[j for j, some in enumerate(members) if mine & some] for mine in ids]
        for mine, matches in zip(ids, hits, strict=True):
            # Why: stages that share a parameter have different groups with it.
            exact = [j for j in matches if members[j] == mine and len(renamed[j]) == len(mine)]
            matches[:] = exact or matches
        empty = [j for j, group in enumerate(stored) if group.get("params") == []]
        # Why only of more: those of one process are in their order.
        is_of_many = len(empty) > sum(not mine for mine in ids)
        for group, mine, matches in zip(own, ids, hits, strict=True):
            if not mine and empty:
                alike = [_num_equal(group, stored[j]) if is_of_many else 0 for j in empty]
                matches.append(empty.pop(alike.index(max(alike))))
        taken = {j for matches in hits for j in matches}
        for index, matches in enumerate(hits):
            if not matches and index < len(stored) and index not in taken:
                matches.append(index)
        return hits

    def _members(self, entries: Sequence[Any]) -> set[int]:
        """Returns the ids of the optimizer's parameters that are in a stored group."""
        is_number = any(not isinstance(entry, str) for entry in entries)
        if is_number and (self._table is self._by_name or entries not in self._numbers):
            told = "names them" if self._table is self._by_name else f"has {self._numbers}"
            raise StateDictError(
                f"the checkpoint numbers the parameters of the optimizer {self._key!r}, with the "
                f"group {list(entries)!r}, but the one to load into {told}. Make its groups as "
                f"they were saved, with as many parameters in the same order",
                key=self._key,
            )
        table = self._by_number if is_number else self._by_name or self._by_number
        if entries and not self._by_name and not table.keys() & set(map(str, entries)):
            raise StateDictError(
                f"the checkpoint names the parameters of the optimizer {self._key!r}, as "
                f"{entries[0]!r}; give the module that has them in the state dict too",
                key=self._key,
            )
        return {id(table[str(entry)]) for entry in entries if str(entry) in table}

    def _options(self, stored: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the options of a group, given those of the stored groups of its parameters."""
        no_options = {"params", "param_names", *self._absent}
        options = [{k: v for k, v in one.items() if k not in no_options} for one in stored]
        _check_alike(options, self._key)
        return options[0]

    def _move_state(self, parameter: Any, group: Any, options: Any, value: Any) -> Any:
        """Returns the state of a parameter with all tensors on its device."""
        if not isinstance(value, Mapping):
            return _move(value, parameter.device, everything=self._table is None)
        found = {
            k: _move(v, parameter.device, everything=self._table is None and k != "step")
            for k, v in value.items()
        }
        step = found.get("step")
        if isinstance(step, torch.Tensor):
            # Source: torch/optim/optimizer.py, `_process_value_according_to_param_policy`.
            if _counts_on_device(group if options is None else options):
                found["step"] = step.to(parameter.device)
            elif _counts_on_device(group):
                found["step"] = step.cpu()
        return found

    def _set_state(self, packed: dict[str, Any]) -> None:
        """Sets the state in place, as torch's `load_state_dict` does, but without its casts.

        Source: `torch/optim/optimizer.py`, `Optimizer.load_state_dict`.
        """
        optimizer = self._optimizer
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(optimizer, packed)
            packed = packed if changed is None else changed
        groups, own = packed["param_groups"], optimizer.param_groups
        sizes = [[len(group["params"]) for group in some] for some in (groups, own)]
        if sizes[0] != sizes[1]:
            raise StateDictError(
                f"a hook of the optimizer {self._key!r} made groups of {sizes[0]} parameters, "
                f"which has groups of {sizes[1]}; return as many",
                key=self._key,
            )
        numbers = chain.from_iterable(group["params"] for group in groups)
        owners = dict(zip(numbers, _parameters(optimizer), strict=True))
        held = [dict(group) for group in own]
        for group, new in zip(own, groups, strict=True):
            options = {k: v for k, v in new.items() if k != "params"}
            for option in group.keys() - options.keys() - {"params", "param_names"}:
                del group[option]
            for option, value in options.items():
                group[option] = _filled(option, group.get(option), value, held)
        state = dict(optimizer.state)
        optimizer.state.clear()
        for key, value in packed["state"].items():
            key = owners.get(key, key)
            before = state.get(key)
            if isinstance(before, MutableMapping) and isinstance(value, Mapping):
                value = dict(value)
                before.clear()
                before.update(value)
                value = before
            optimizer.state[key] = value
        optimizer.__setstate__({"state": optimizer.state, "param_groups": own})
        for done in optimizer._optimizer_load_state_dict_post_hooks.values():
            done(optimizer)


class _Wrapping:
    """Adapter of an optimizer with others inside, of which torch's `state_dict` has nothing.

    Args:
        outer: Adapter of the optimizer alone.
        inner: Adapters of those that it holds, by their place.
    """

    def __init__(self, outer: Any, inner: Mapping[str, Any]) -> None:
        self._outer, self._inner = outer, inner
        self._asked: list[str] = []

    @property
    def casts(self) -> list[Cast]:
        return [cast for one in (self._outer, *self._inner.values()) for cast in one.casts]

    def state_dict(self) -> dict[str, Any]:
        inner = {place: part.state_dict() for place, part in self._inner.items()}
        return {**self._outer.state_dict(), INNER: inner}

    def targets(
        self, key: str, stored: Stored, prefixes: Sequence[str], *, strict: bool
    ) -> OptimizerTargets:
        start = f"{key}.{INNER}"
        mine = [name for name in stored.names if not below(name, (start,))]
        found: OptimizerTargets = self._outer.targets(
            key, replace(stored, names=dict.fromkeys(mine)), prefixes, strict=strict
        )
        self._asked = []
        if found.state is None:
            return found
        for place, part in self._inner.items():
            name = f"{start}.{place}"
            if not stored.below(name, prefixes):
                continue
            asked = part.targets(name, stored, prefixes, strict=strict)
            if asked.stays:
                continue
            found.state.setdefault(INNER, {})[place] = asked.state
            found.left |= asked.left
            found.decisive |= asked.decisive
            self._asked.append(place)
        if not self._asked and not prefixes and stored.below(key, ()):
            # As earlier versions saved it.
            events.warn(
                f"the checkpoint has no state of {', '.join(map(repr, self._inner))}, which the "
                f"optimizer {key!r} holds: it stays as it is",
                stacklevel=2,
            )
        return found

    def check_groups(self, state: Mapping[str, Any]) -> set[str]:
        """Checks the groups of all; see `_Named.check_groups`."""
        parts = [(self._outer, state)]
        parts += [(self._inner[place], state[INNER][place]) for place in self._asked]
        checked = [part.check_groups(one) for part, one in parts if hasattr(part, "check_groups")]
        return set().union(*checked)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = {key: value for key, value in state_dict.items() if key != INNER}
        self._outer.load_state_dict(own)
        for place in self._asked:
            self._inner[place].load_state_dict(state_dict[INNER][place])


_PAIR = re.compile(r"\(([0-9]{1,9}), ([0-9]{1,9})\)")
"""Text of a key of which some wrappers make use: index of a group, and of a parameter in it."""


class _OwnForm:
    """Adapter of an optimizer whose class replaces `state_dict` and so defines names and values.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.casts: list[Cast] = []
        self._optimizer = optimizer
        self._key = ""
        self._listed: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def targets(
        self, key: str, stored: Stored, prefixes: Sequence[str], *, strict: bool
    ) -> OptimizerTargets:
        self._key = key
        items = stored.below(key, prefixes)
        if key in stored.names and not items:
            return OptimizerTargets(None)
        if _is_others(self._optimizer, key, stored, strict=strict):
            return OptimizerTargets(None, stays=True)
        with primed(self._optimizer):
            tree = _containers(self.state_dict())
        if items and strict and not prefixes:
            self._drop_unstored(tree, stored.names)
            self._drop_options(tree, items)
        self._add_missing(tree, items)
        return OptimizerTargets(tree)

    def _drop_options(self, tree: dict[str, Any], items: Mapping[str, StoredValue]) -> None:
        """Removes options that later steps or schedulers have added to the groups."""
        family = (self._optimizer, *wrapped_by(self._optimizer))
        usual = {"params", "param_names"}.union(*(getattr(one, "defaults", ()) for one in family))
        known = _with_parents(items)
        for name, groups in _lists_of_groups(tree, ""):
            for index, group in enumerate(groups):
                start = f"{name}{index}."
                for option in [*group] if start[:-1] in known else ():
                    if option not in usual and f"{start}{option}" not in known:
                        del group[option]

    def _add_missing(self, tree: dict[str, Any], items: Mapping[str, StoredValue]) -> None:
        """Adds targets for stored values that the optimizer makes only in later steps.

        What may belong to a parameter of another rank is left out.
        """
        groups = chain.from_iterable(some for _, _, some in _plain_optimizers(tree, (), 0))
        entries = chain.from_iterable(group["params"] for group in groups)
        self._listed = {entry for entry in entries if isinstance(entry, str)}
        for name, item in items.items():
            self._add_one(tree, path_tail(item.path, name), item)

    def _add_one(self, tree: Any, path: NamePath, item: StoredValue) -> None:
        here, parent = tree, ""
        for place, part in enumerate(path):
            is_last = place == len(path) - 1
            key = next((key for key in _keys(part) if _has(here, key)), None)
            if key is None:
                key = None if place == 0 else self._own_key(parent, part)
                if key is None or not isinstance(here, dict) or isinstance(path[-1], int):
                    return
                here[key] = self._made(item, here) if is_last else {}
            if not is_last:
                here, parent = here[key], str(part)

    def _own_key(self, parent: str, part: Any) -> Any:
        """Returns the key of a new entry in a mapping; None if it may be another rank's."""
        key = _keys(part)[-1]
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if isinstance(key, tuple):
            return key if key[0] < len(sizes) and key[1] < sizes[key[0]] else None
        if parent != "state":
            return part.key if isinstance(part, IntKey) else part
        if self._listed:
            return key if key in self._listed else None
        return key if not isinstance(key, int) or key < sum(sizes) else None

    def _made(self, item: StoredValue, siblings: Mapping[Any, Any]) -> Any:
        """Returns a target for a stored value, laid out as state or a parameter of its shape."""
        if item.dtype is None:
            return None
        parameters = _parameters(self._optimizer)
        for one in (*siblings.values(), *parameters):
            is_alike = isinstance(one, torch.Tensor) and tuple(one.shape) == item.shape
            if is_alike and _has_bytes(one):
                return torch.empty_like(one, dtype=item.dtype, requires_grad=False)
        device = parameters[0].device if parameters and item.shape else "cpu"
        return torch.empty(item.shape, dtype=item.dtype, device=device)

    def _drop_unstored(self, tree: dict[str, Any], names: Collection[str]) -> None:
        """Removes the state of parameters that had none when they were saved.

        It asks for a state dict more on every rank, as that may be a collective.
        """
        states = [one.state for one in (self._optimizer, *wrapped_by(self._optimizer))]
        held = [dict(state) for state in states]
        for state in states:
            state.clear()
        try:
            with suppress(Exception):  # a class that has no state dict without state
                without_state = flatten({self._key: self.state_dict()}).names
                _prune(tree, self._key, names, _with_parents([*without_state, *names]))
        finally:
            for state, before in zip(states, held, strict=True):
                state.clear()
                state.update(before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Why a copy: torch's helper changes its argument.
        self._set(_containers(state_dict))
        self.casts = _find_casts(self._optimizer, self._key, state_dict, self.state_dict())

    def _set(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)


class _FlatParameters(_OwnForm):
    """Adapter of an optimizer over FSDP1's flat parameters; FSDP1 shards their state."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: nn.Module, module_key: str
    ) -> None:
        super().__init__(optimizer)
        self._module, self._module_key = module, module_key
        self._names = ModuleNames(module)
        self._own_names: dict[str, str] = {}
        self._groups: list[list[str]] = []
        self._group_names: dict[int, list[str]] = {}
        self._renamed_to: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        with sharded_state(self._module):
            found = FullyShardedDataParallel.optim_state_dict(
                self._module,
                self._optimizer,
                self._optimizer.state_dict(),
                group=_group_of(self._module),
            )
        listed_names = chain.from_iterable(group["params"] for group in found["param_groups"])
        # FSDP1's own names, which have the parts of `torch.compile` in them.
        self._own_names = self._names.by_clean_name([*found["state"], *listed_names])
        clean = {own: name for name, own in self._own_names.items()}
        return {
            **found,
            "state": {clean[name]: value for name, value in found["state"].items()},
            "param_groups": [
                {**group, "params": [clean[name] for name in group["params"]]}
                for group in found["param_groups"]
            ],
        }

    def targets(
        self, key: str, stored: Stored, prefixes: Sequence[str], *, strict: bool
    ) -> OptimizerTargets:
        found = super().targets(key, stored, prefixes, strict=strict)
        names = dict(self._names.parameters())
        self._renamed_to = _renamed(_stored_in_module(stored, self._module_key, names))
        self._groups, self._group_names = [], {}
        items = stored.below(key, ())
        if found.state is None or not items:
            return found
        self._groups = [group["params"] for group in found.state["param_groups"]]
        state = found.state["state"]
        for name in list(state):
            if not any(each in items for each in flatten({"state": {name: state[name]}}).names):
                del state[name]
        self._ask_groups(found, items)
        return found

    def _ask_groups(self, found: OptimizerTargets, items: Mapping[str, StoredValue]) -> None:
        """Adds targets for the groups that other ranks have saved."""
        num_own = len(self._groups)
        for name, item in items.items():
            part, _, rest = name.partition(".")
            number, _, option = rest.partition(".")
            if part != "param_groups" or not (number.isdecimal() and option):
                continue
            full_name = f"{self._key}.{name}"
            self._group_names.setdefault(int(number), []).append(full_name)
            if int(number) >= num_own:
                found.left.add(full_name)
                target = None if item.dtype is None else torch.empty(item.shape, dtype=item.dtype)
                path = ("param_groups", int(number), *path_tail(item.path, option))
                set_by_path(found.state, path, target)
        if len(self._group_names) > 1:
            found.decisive = {name for names in self._group_names.values() for name in names}

    def check_groups(self, state: Mapping[str, Any]) -> set[str]:
        """Returns names of stored groups that this optimizer has no parameter of.

        Raises:
            StateDictError: A group has parameters of stored groups whose options differ.
        """
        groups = state["param_groups"]
        taken = set[int]()
        for own in self._groups:
            hits = self._hits(own, groups)
            taken.update(hits)
            options = [
                {k: v for k, v in groups[j].items() if k not in ("params", "param_names")}
                for j in hits
            ]
            _check_alike(options, self._key)
        return _names_of_left(groups, taken, self._group_names)

    def _hits(self, own: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the indices of the stored groups that have the parameters of a group."""
        lists = [{*names} for names in self._lists_of(groups)]
        # Why equal ones alone: stages that share a parameter have different groups with it.
        exact = [j for j, names in enumerate(lists) if names == {*own}]
        return exact or [j for j, names in enumerate(lists) if names & {*own}]

    def _lists_of(self, groups: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[Any]]:
        return _under_new_names([group["params"] for group in groups], self._renamed_to)

    def _add_missing(self, tree: dict[str, Any], items: Mapping[str, StoredValue]) -> None:
        """Adds targets for stored options that the groups lack; FSDP1 gives all other names."""
        _add_options(tree.get("param_groups"), items)

    def _drop_unstored(self, tree: dict[str, Any], names: Collection[str]) -> None:
        """Does nothing, as `targets` does it by names: a state dict more is a collective more."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if self._groups:
            # Why made anew: FSDP1 takes groups by position.
            held, stored = self._optimizer.param_groups, groups
            groups = [
                dict(ChainMap({"params": own}, *(stored[j] for j in self._hits(own, stored)), rest))
                for own, rest in zip(self._groups, held, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _set(self, state_dict: dict[str, Any]) -> None:
        own = self._own_names
        state = {own.get(name, name): value for name, value in state_dict["state"].items()}
        groups = [
            {**group, "params": [own[name] for name in group["params"] if name in own]}
            for group in state_dict["param_groups"]
        ]
        with sharded_state(self._module):
            packed = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module,
                self._optimizer,
                {**state_dict, "state": state, "param_groups": groups},
                group=_group_of(self._module),
            )
        self._optimizer.load_state_dict(packed)


class _OwnFormOverFlat(_OwnForm):
    """Adapter of an optimizer that defines its own values, over FSDP1's flat parameters.

    FSDP1 shards what the optimizer has for each parameter. The form stays the optimizer's, with the
    numbers that parameters have without FSDP1, so that a load without it finds them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        super().__init__(optimizer)
        self._module = module
        self._inner = next(iter(wrapped_by(optimizer)), optimizer)
        self._names: list[list[str]] = []
        """FSDP1's names of the parameters of each group."""

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = _containers(self._optimizer.state_dict())
        for each in _by_parameter(found):
            each.renew(self._sharded(each.by_number(self._sizes())), self._own_sizes())
        return found

    def _sizes(self) -> list[int]:
        """Returns how many parameters this rank's groups have, each flat one as one."""
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _own_sizes(self) -> list[int]:
        """Returns how many parameters the groups have without FSDP1."""
        return [len(names) for names in self._names]

    def _sharded(self, state: dict[int, Any]) -> dict[int, Any]:
        """Returns state by the numbers of parameters without FSDP1; a collective."""
        numbers = iter(range(sum(self._sizes())))
        groups = [{"params": list(islice(numbers, size))} for size in self._sizes()]
        with sharded_state(self._module):
            found = FullyShardedDataParallel.optim_state_dict(
                self._module,
                self._inner,
                {"state": state, "param_groups": groups},
                group=_group_of(self._module),
            )
        self._names = [group["params"] for group in found["param_groups"]]
        names = enumerate(chain.from_iterable(self._names))
        return {number: found["state"][name] for number, name in names if name in found["state"]}

    def _own_key(self, parent: str, part: Any) -> Any:
        key = _keys(part)[-1]
        sizes = self._own_sizes()
        if isinstance(key, tuple):
            return key if key[0] < len(sizes) and key[1] < sizes[key[0]] else None
        if parent == "state" and isinstance(key, int):
            return key if key < sum(sizes) else None
        return super()._own_key(parent, part)

    def _set(self, state_dict: dict[str, Any]) -> None:
        for each in _by_parameter(state_dict):
            each.renew(self._local(each.by_number(self._own_sizes())), self._sizes())
        self._optimizer.load_state_dict(state_dict)

    def _local(self, state: dict[int, Any]) -> dict[int, Any]:
        """Returns this rank's part of state, by the numbers of its parameters; a collective."""
        names = list(chain.from_iterable(self._names))
        with sharded_state(self._module):
            packed = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module,
                self._inner,
                {
                    "state": {names[number]: value for number, value in state.items()},
                    "param_groups": [{"params": some} for some in self._names],
                },
                group=_group_of(self._module),
            )
        found: dict[int, Any] = packed["state"]
        for number, parameter in enumerate(_parameters(self._optimizer)):
            # Why: FSDP1 leaves out parameters of which this rank has no part; some count them.
            if number not in found and number in state and not parameter.numel():
                found[number] = {
                    k: parameter.new_empty(parameter.shape, dtype=v.dtype)
                    if isinstance(v, torch.Tensor) and v.dim()
                    else v
                    for k, v in state[number].items()
                }
        return found


@dataclass
class _ByParameter:
    """State in an optimizer's own form that has an entry for each parameter.

    Args:
        state: By the number of the parameter, or by that of its group and in it.
        groups: The groups that list the numbers; None if there are none beside it.
    """

    state: dict[Any, Any]
    groups: list[dict[str, Any]] | None = None

    def by_number(self, sizes: Sequence[int]) -> dict[int, Any]:
        """Returns the entries by the numbers of parameters, counted over the groups.

        Args:
            sizes: How many parameters each group has.
        """
        if self.groups is not None:
            return dict(self.state)
        starts = [0, *accumulate(sizes)]
        return {starts[group] + number: value for (group, number), value in self.state.items()}

    def renew(self, state: Mapping[int, Any], sizes: Sequence[int]) -> None:
        """Replaces the entries, given by number, and the numbers that groups list."""
        numbers = iter(range(sum(sizes)))
        lists = [list(islice(numbers, size)) for size in sizes]
        keys: dict[int, Any] = {}
        for index, some in enumerate(lists):
            for place, number in enumerate(some):
                keys[number] = number if self.groups is not None else (index, place)
        self.state.clear()
        self.state.update((keys[number], value) for number, value in state.items())
        for group, some in zip(self.groups or (), lists, strict=False):
            group["params"] = some


def _by_parameter(tree: Any, depth: int = 0) -> Iterator[_ByParameter]:
    """Yields what an optimizer's own form has for each parameter, in the same order on all ranks.

    A mapping that is empty counts: other ranks may have entries in it.
    """
    if not isinstance(tree, dict) or depth > MAX_DEPTH:
        return
    state, groups = tree.get("state"), tree.get("param_groups")
    if isinstance(state, dict) and isinstance(groups, list):
        yield _ByParameter(state, groups)
        return
    if all(_is_pair(key) for key in tree):
        yield _ByParameter(tree)
        return
    for value in tree.values():
        yield from _by_parameter(value, depth + 1)


def _is_pair(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, int) for part in key)


def _group_of(module: nn.Module) -> Any:
    """Returns the process group of the outermost FSDP1 module; None if it has several.

    Source: torch/distributed/checkpoint/state_dict.py, `_get_fsdp_process_group`.
    """
    first = FullyShardedDataParallel.fsdp_modules(module)[0]
    several = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    group = first.process_group
    return None if first.sharding_strategy in several or isinstance(group, tuple) else group


# --- names and places ---------------------------------------------------------------------------


def _stored_in_module(stored: Stored, key: str, names: Iterable[str]) -> dict[str, StoredValue]:
    """Returns the stored parameters of a module by their names, as far as there are any."""
    full_names = {name: f"{key}.{name}" for name in names}
    return {name: stored.value(full) for name, full in full_names.items() if full in stored.names}


def _renamed(in_module: Mapping[str, StoredValue]) -> dict[str, str]:
    """Returns the parameters that the load renames in their module, by their stored names.

    Why needed: a parameter without state has no other name in the checkpoint than its module's.
    """
    return {
        str(item.path[-1]): name
        for name, item in in_module.items()
        if item.path and path_end(item.path, name) is None
    }


def _under_new_names(
    groups: Sequence[Sequence[Any]], renamed_to: Mapping[str, str]
) -> Sequence[Sequence[Any]]:
    """Returns the lists of parameters of stored groups with the names that a load gives these.

    Why: a key map changes the names of values, and not what a group's list of names holds.
    """
    listed_names = {entry for group in groups for entry in group if isinstance(entry, str)}
    if not listed_names & renamed_to.keys():
        return groups
    given = set(renamed_to.values())
    return [
        [
            renamed_to.get(entry, entry)
            for entry in group
            if entry in renamed_to or entry not in given
        ]
        for group in groups
    ]


def _check_alike(options: Sequence[Mapping[str, Any]], key: str) -> None:
    """Raises if the stored groups of one group's parameters have other options.

    Args:
        options: Those of each stored group.
        key: Name of the optimizer.
    """
    for other in options[1:]:
        if not _is_same(options[0], other):
            raise StateDictError(
                f"the checkpoint has the parameters of one group of the optimizer {key!r} in "
                f"{len(options)} groups with other options, {options[0]!r} and {other!r}; make "
                f"the groups as they were saved",
                key=key,
            )


def _names_of_left(
    stored: Sequence[Mapping[str, Any]], taken: Collection[int], names: Mapping[int, Sequence[str]]
) -> set[str]:
    """Returns the names of stored groups that an optimizer does not take.

    An empty group has nothing that could be lost.

    Args:
        stored: The stored groups.
        taken: Indices of those that are taken.
        names: Names of the values of each stored group.
    """
    left = [j for j, group in enumerate(stored) if j not in taken and group.get("params") != []]
    return {name for j in left for name in names.get(j, ())}


def _num_equal(group: Mapping[str, Any], stored: Mapping[str, Any]) -> int:
    """Returns how many options of a group are as stored."""
    return sum(key in group and _is_same(value, group[key]) for key, value in stored.items())


def _flat_part(path: NamePath | None) -> str | None:
    """Returns the key that `StateDictOptions(flatten_optimizer_state_dict=True)` gave to an option.

    That is `"param_groups.NAME.OPTION"`, with the name of a parameter.
    """
    keys = (part for part in path or () if isinstance(part, str))
    return next((key for key in keys if key.startswith("param_groups.")), None)


def _map_to_owner(ends: Mapping[str, NamePath | None], table: Mapping[str, Any]) -> dict[str, str]:
    """Maps each name that begins with a name of the table to that name."""
    found: dict[str, str] = {}
    for name, end in ends.items():
        if end is not None:
            owner = str(end[0])
        else:
            stop = name.find(".")
            while stop != -1 and name[:stop] not in table:
                stop = name.find(".", stop + 1)
            owner = name if stop == -1 else name[:stop]
        if owner in table:
            found[name] = owner
    return found


def _find(container: Any, path: NamePath) -> tuple[NamePath, Any]:
    """Returns a path with the container's own keys, and the value there, or None."""
    real: list[Any] = []
    for part in path:
        key: Any = part.key if isinstance(part, IntKey) else part
        if isinstance(container, Mapping):
            # Why: checkpoints of stock DCP have all keys as texts.
            is_number = type(part) is str and key not in container and part.isdecimal()
            if is_number and int(part) in container:
                key = int(part)
            container = container.get(key)
            real.append(IntKey(key) if isinstance(key, int) else part)
        else:
            is_there = isinstance(container, (list, tuple)) and isinstance(key, int)
            container = container[key] if is_there and 0 <= key < len(container) else None
            real.append(part)
    return tuple(real), container


def _missing_state(
    stored: Mapping[Any, Any], own: Mapping[Any, Any], *, has_stepped: bool
) -> dict[Any, Any]:
    """Returns the state of a parameter that a checkpoint of this optimizer would have in addition.

    This is the state that the first step creates. For an optimizer that has stepped it is the
    existing state, unless that only adds to the stored state: then a later step added it, and it is
    removed.
    """
    if has_stepped and stored.keys() <= own.keys():
        return {}
    return {key: value for key, value in own.items() if key not in stored}


def _add_empty(tree: dict[Any, Any], pattern: Mapping[Any, Any]) -> None:
    """Adds the empty mappings of a pattern, of which DCP stores nothing."""
    for key, value in pattern.items():
        if isinstance(value, Mapping) and not value:
            tree.setdefault(key, {})
        elif isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _add_empty(tree[key], value)


def _has_bytes(value: Any) -> bool:
    """Returns whether a value is no tensor, or a tensor that its bytes describe completely."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return not isinstance(local, torch.Tensor) or is_plain(local)


def _is_like(tensor: Any, item: StoredValue) -> bool:
    """Returns whether a tensor has the shape and the kind of a stored one."""
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != item.shape:
        return False
    return item.is_raw in (None, _has_bytes(tensor))


def _fits_shape(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether each length is that of the whole, or 1 as in state that is factored."""
    return all(length in (1, full) for length, full in zip(shape, whole, strict=True))


def _is_known(parameter: Any, path: NamePath, item: StoredValue) -> bool:
    """Returns whether the layout of a stored value follows from its parameter."""
    if item.dtype is None or not isinstance(parameter, DTensor):
        return item.is_raw is not False
    if tuple(parameter.shape) == item.shape:
        return item.is_raw is True
    return not item.shape and path[-1:] == ("step",)


def _of_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype and target_problem(tensor) is None:
        return tensor
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _move(value: Any, device: torch.device, *, everything: bool) -> Any:
    """Returns a value with its tensors moved to a device.

    Args:
        value: Any value.
        device: The device.
        everything: Also move tensors outside of tuples, which a load has already placed.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device) if everything else value
    if isinstance(value, tuple):
        moved = [_move(each, device, everything=True) for each in value]
        if all(a is b for a, b in zip(moved, value, strict=True)):
            return value
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if type(value) is dict:
        return {k: _move(v, device, everything=everything) for k, v in value.items()}
    if type(value) is list:
        return [_move(each, device, everything=everything) for each in value]
    return value


def _move_option(value: Any, own: Any) -> Any:
    """Returns the value of a group's option, with tensors on the devices of the existing ones."""
    if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and not own.is_meta:
        return value.to(own.device)
    if type(value) is tuple and isinstance(own, tuple) and len(value) == len(own):
        return tuple(map(_move_option, value, own))
    return value


def _filled(option: str, own: Any, value: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the value of a group's option: the existing tensor, filled, if it fits."""
    fits = (
        isinstance(own, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and own.shape == value.shape
        and own.dtype == value.dtype
        and target_problem(own) is None
    )
    # Why counted: groups may share the tensor of a default, and differ in the checkpoint.
    if own is value or not fits or sum(own is group.get(option) for group in groups) > 1:
        return value
    with torch.no_grad():
        own.detach().copy_(value)
    return own


def _lists_of_groups(value: Any, name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the lists of parameter groups in a state, with the beginnings of their names."""
    if isinstance(value, dict):
        for key, each in value.items():
            is_groups = key == "param_groups" and isinstance(each, list)
            if is_groups and all(isinstance(group, dict) for group in each):
                yield f"{name}param_groups.", each
            else:
                yield from _lists_of_groups(each, f"{name}{key}.")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _lists_of_groups(each, f"{name}{index}.")


def _add_options(groups: Any, items: Mapping[str, StoredValue]) -> None:
    """Adds targets for stored options that the groups of an optimizer lack.

    A scheduler that does not exist yet had added them, such as `initial_lr`.
    """
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return
    for name, item in items.items():
        part, _, rest = name.partition(".")
        index, _, option = rest.partition(".")
        is_option = part == "param_groups" and option and "." not in option
        if is_option and index.isdecimal() and int(index) < len(groups):
            target = None if item.dtype is None else torch.empty(item.shape, dtype=item.dtype)
            groups[int(index)].setdefault(option, target)


def _prune(tree: Any, key: str, stored: Collection[str], known: Collection[str]) -> None:
    """Removes mappings that an optimizer has only with state, and of which nothing is stored.

    Args:
        tree: State of an optimizer, or a mapping or list in it; changed in place.
        key: Its name.
        stored: Names of stored values.
        known: Names of the values that are stored, or that the optimizer has without state, and of
            all that contains them.
    """
    for part, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        name = f"{key}.{part}"
        if isinstance(value, list):
            _prune(value, name, stored, known)
        elif not isinstance(value, dict) or not value:
            continue
        elif name in stored:  # as an empty mapping
            tree[part] = {}
        elif name in known:
            _prune(value, name, stored, known)
        elif isinstance(tree, dict):  # the others in a list keep their places
            del tree[part]


def _with_parents(names: Iterable[str]) -> set[str]:
    """Returns names, and the beginnings of each that end before a dot."""
    found: set[str] = set()
    for name in names:
        while name and name not in found:
            found.add(name)
            name = name.rpartition(".")[0]
    return found


def _keys(part: Any) -> tuple[Any, ...]:
    """Returns the keys that a part of a path may stand for, the likeliest last.

    Examples:
        >>> _keys("exp_avg"), _keys("(0, 1)"), _keys(IntKey(7))
        (('exp_avg',), ('(0, 1)', (0, 1)), ('7', 7))
    """
    if isinstance(part, str) and part.isdecimal():
        return (part, int(part))
    match = _PAIR.fullmatch(part) if isinstance(part, str) else None
    return (part,) if match is None else (part, tuple(map(int, match.groups())))


def _has(container: Any, key: Any) -> bool:
    if isinstance(container, list):
        return isinstance(key, int) and key < len(container)
    return isinstance(container, dict) and key in container


def _containers(value: Any) -> Any:
    """Copies mappings and lists as far as they are walked; the values are shared."""
    if isinstance(value, Mapping):
        return {key: _containers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_containers(each) for each in value]
    return value


# --- comparing ----------------------------------------------------------------------------------


def _find_casts(optimizer: Any, key: str, loaded: Any, held: Any) -> list[Cast]:
    """Returns the values that a library has cast when it loaded the state.

    Raises:
        StateDictError: The optimizer holds other state than was loaded.
    """
    now = flatten({key: held})
    found = dict(zip(now.names, now.values, strict=True))
    was = flatten({key: loaded})
    casts: list[Cast] = []
    wrong: list[str] = []
    for name, value in zip(was.names, was.values, strict=True):
        if name in was.empty:
            continue
        other = found.get(name)
        dtypes = [dtype_name(v.dtype) for v in (value, other) if isinstance(v, torch.Tensor)]
        if len(set(dtypes)) == 2:
            casts.append((name, dtypes[0], dtypes[1]))
        if name not in found or not _is_same(value, other):
            wrong.append(name)
    state = [name for name in wrong if not name.startswith(f"{key}.param_groups.")]
    if state:
        raise StateDictError(
            f"{type(optimizer).__name__}.load_state_dict got what the checkpoint has, but the "
            f"optimizer holds something else of {listed([*map(repr, state)])}; load into an "
            f"optimizer as it was saved, or mend load_state_dict",
            key=state[0],
        )
    if wrong:
        logger.warning(
            "%s.load_state_dict gave options of its own to %s",
            type(optimizer).__name__,
            ", ".join(wrong),
        )
    return casts


def _is_same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal in the dtype of `other`; NaN equals NaN."""
    if value is other:
        return True
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        ours, theirs = _local(value), _local(other)
        return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_is_same(value[k], other[k]) for k in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    try:
        return bool(value == other) or bool(value != value and other != other)
    except Exception:  # noqa: BLE001 - a user class without comparison
        return type(value) is type(other)


def _local(tensor: Any) -> list[torch.Tensor]:
    if isinstance(tensor, DTensor):
        return [tensor.to_local()]
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def _is_equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    if value.shape != other.shape:
        return False
    try:
        same = value.to(other.device, other.dtype)
        return bool(((same == other) | ((same != same) & (other != other))).all())
    except (RuntimeError, NotImplementedError):  # a class without comparison
        return type(value) is type(other)
