"""The state of modules, under names without wrappers.

Tensors of a module are loaded in place. State that its owner takes in any form is given to it as it
was saved, whatever the target has now: `_extra_state`, and values of a class that replaces
`_load_from_state_dict`, such as the lists of a metric or a buffer that is registered anew.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ray_dcp.errors import UnsupportedValueError
from ray_dcp.torch_adapter.flatten import (
    below,
    flatten,
    listed,
    path_end,
    path_tail,
    set_by_path,
)
from ray_dcp.torch_adapter.module_names import ModuleNames, sharded_state
from ray_dcp.torch_adapter.optimizer_state import Cast, Stored, StoredValue, gives_torchs
from ray_dcp.torch_adapter.shards import is_on_meta, is_sharded
from ray_dcp.torch_adapter.sink import AsStored
from ray_dcp.torch_adapter.tensors import dtype_name

_EXTRA = "_extra_state"

Owned = dict[str, StoredValue]
"""Stored values at and below a name of a module's state, by the rest of their names."""


class ModuleState:
    """The adapter of a module; a `Stateful`.

    Args:
        module: Any module. If its class replaces `state_dict`, the values are the class's own.
        is_own: Returns whether a value of the state must stay the target: `PerRank` values.
    """

    def __init__(self, module: nn.Module, is_own: Any) -> None:
        self._module = module
        self._is_own = is_own
        self._names = ModuleNames(module)
        self._raw: dict[str, str] = {}
        self._metadata: Any = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._key, self._without_memory = "", list[str]()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state by names without wrappers; a collective with FSDP1."""
        with sharded_state(self._module):
            own = self._module.state_dict()
        self._metadata = getattr(own, "_metadata", None)
        if not _is_flat(own):
            self._raw = {}
            return own
        self._raw = self._names.by_clean_name(own)
        return {name: own[raw] for name, raw in self._raw.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the module a loaded state, of which `targets` has said what is asked for."""
        own: Any = state_dict
        if _is_flat(state_dict):
            own = OrderedDict((self._raw.get(name, name), one) for name, one in state_dict.items())
        if self._metadata is not None:
            # Why: without it a class takes what it gets for state of an older version.
            own._metadata = self._metadata
        with sharded_state(self._module):
            self._module.load_state_dict(own)
        held = self._module.state_dict() if self._without_memory else {}
        if still := [
            name for name in self._without_memory if is_on_meta(held[self._raw.get(name, name)])
        ]:
            raise _on_meta(self._key, still)

    def targets(self, key: str, stored: Stored, prefixes: Sequence[str]) -> dict[str, Any]:
        """Returns the state to load into.

        Args:
            key: Name of the module in the state dict.
            stored: Content of the checkpoint. If it has more of the names that the module has with
                its wrappers, these are asked for: stock DCP saves them so.
            prefixes: See `LoadOptions.prefixes`.

        Raises:
            UnsupportedValueError: The module has no memory for values that are stored.
        """
        self._key = key
        state = self.state_dict()
        if not _is_flat(state):
            return state
        state = self._with_shapes(self._named_as_stored(state, stored), stored)
        tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
        self._check_memory(tensors, stored, prefixes)
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return self._as_saved(state, stored, prefixes)

    def casts(self, loaded: Mapping[str, Any]) -> list[Cast]:
        """Returns the values that the module holds in another dtype than was loaded."""
        if not _is_flat(loaded):
            return []
        return [
            (f"{self._key}.{name}", dtype_name(value.dtype), dtype_name(dtype))
            for name, dtype in (self._dtypes | self._held_dtypes()).items()
            if isinstance(value := loaded.get(name), torch.Tensor) and value.dtype != dtype
        ]

    def _held_dtypes(self) -> dict[str, torch.dtype]:
        """Returns the dtypes of parameters and buffers, by their names with and without wrappers.

        Why not of `state_dict()`: that of FSDP1 is a collective.
        """
        found: dict[str, torch.dtype] = {}
        for named in (self._module.named_parameters, self._module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                found[name] = found[self._names.clean(name)] = tensor.dtype
        return found

    def _named_as_stored(self, state: dict[str, Any], stored: Stored) -> dict[str, Any]:
        found = _num_found(self._key, state, stored)
        raw = {self._raw[name]: value for name, value in state.items()}
        if found == len(state) or _num_found(self._key, raw, stored) <= found:
            return state
        self._raw = {}
        return raw

    def _with_shapes(self, state: dict[str, Any], stored: Stored) -> dict[str, Any]:
        """Returns the state with tensors of the stored shapes for those of lazy modules.

        A lazy module takes the shapes of what its `load_state_dict` gets.
        """
        if not any(map(is_lazy, state.values())):
            return state
        return {
            name: torch.empty(stored.value(full).shape, dtype=value.dtype, device=value.device)
            if is_lazy(value) and (full := f"{self._key}.{name}") in stored.names
            else value
            for name, value in state.items()
        }

    def _check_memory(
        self, tensors: Mapping[str, torch.Tensor], stored: Stored, prefixes: Sequence[str]
    ) -> None:
        """Raises if torch's `Module.load_state_dict` would skip tensors, as it does on `meta`."""
        skipped = [
            name
            for name, tensor in tensors.items()
            if is_on_meta(tensor) and (full := f"{self._key}.{name}") in stored.names
            if not prefixes or below(full, prefixes)
        ]
        if not skipped or not gives_torchs(self._module, nn.Module, "load_state_dict"):
            return
        own = {prefix for prefix, each in self._module.named_modules() if _may_give_memory(each)}
        if refused := [name for name in skipped if "" not in own and not below(name, own)]:
            raise _on_meta(self._key, refused)
        self._without_memory = skipped

    # --- state that its owner takes as it was saved ----------------------------------------------

    def _as_saved(
        self, state: dict[str, Any], stored: Stored, prefixes: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the state with targets as stored for what its owner takes in any form."""
        owners = {
            self._prefix(raw): (raw, each)
            for raw, each in self._module.named_modules(remove_duplicate=False)
            if _takes_any_form(each)
        }
        if not owners and not any(name.endswith(_EXTRA) for name in state):
            return state
        found: dict[str, Owned] = {}
        start = f"{self._key}."
        for full in stored.names:
            if not full.startswith(start) or (prefixes and not below(full, prefixes)):
                continue
            rest = full.removeprefix(start)
            if (name := _owned_name(rest, state, owners)) is not None:
                item = stored.value(full)
                if name not in state and (end := path_end(item.path, rest)):
                    name = str(end[0])  # A key may have dots, as that of a quantised weight.
                found.setdefault(name, {})[rest[len(name) + 1 :]] = item
        made, names_of = dict(state), dict[str, list[str]]()
        for name, items in found.items():
            names_of.setdefault(name.rpartition(".")[0], []).append(name)
            if name.endswith(_EXTRA) or not _fits(state.get(name), items):
                made |= self._tree(name, items, state.get(name), stored, owners)
        for prefix, (raw, owner) in owners.items():
            changed = {
                name
                for name in names_of.get(prefix, ())
                if made.get(name) is not state.get(name)
                and (name not in state or isinstance(state[name], torch.Tensor))
                and not name.endswith(_EXTRA)
            }
            self._raw |= {
                name: f"{raw}.{name.rpartition('.')[2]}" if raw else name for name in changed
            }
            for name in changed - self._taken(changed, prefix, raw, owner, made):
                if name in state:
                    made[name] = state[name]
                else:
                    del made[name]
        return made

    def _prefix(self, raw: str) -> str:
        """Returns the beginning of the names of a submodule, as they are asked for."""
        return self._names.clean(f"{raw}.{_EXTRA}").rpartition(".")[0] if raw and self._raw else raw

    def _tree(
        self, name: str, items: Owned, own: Any, stored: Stored, owners: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the targets of a value that is given as it was saved, by its name."""
        device = self._device_of(name, own, owners)
        flat = flatten({name: own})
        kept = dict(zip(flat.names, flat.values, strict=True))
        per_rank = [each for each, value in kept.items() if self._is_own(value)]
        root: dict[str, Any] = {}
        for path, value in zip(flat.paths, flat.values, strict=True):
            if self._is_own(value):
                set_by_path(root, path, value)
        for rest, item in items.items():
            full = f"{name}.{rest}" if rest else name
            if any(full.startswith(f"{each}.rank-") for each in per_rank):
                continue
            target: Any = None
            if item.dtype is not None:
                target = kept.get(full)
                if not is_sharded(target) or tuple(target.shape) != item.shape:
                    target = (
                        AsStored.of(item.shape, item.dtype, device)
                        if stored.takes_any
                        else torch.empty(item.shape, dtype=item.dtype, device=device)
                    )
            set_by_path(root, (name, *(path_tail(item.path, rest) if rest else ())), target)
        return root

    def _device_of(self, name: str, own: Any, owners: Mapping[str, Any]) -> torch.device | None:
        """Returns the device of a value that is given as it was saved; None for the default."""
        if isinstance(own, torch.Tensor):
            return None if own.is_meta else own.device
        _, owner = owners.get(name.rpartition(".")[0], ("", None))
        if owner is None or name.endswith(_EXTRA):
            return None
        # Why asked: the states of a metric are attributes.
        device = getattr(owner, "device", None)
        some = next(_direct_tensors(owner), None)
        if isinstance(device, torch.device):
            return device
        return None if some is None or some.is_meta else some.device

    def _taken(
        self, names: set[str], prefix: str, raw: str, owner: nn.Module, made: Mapping[str, Any]
    ) -> set[str]:
        """Returns the names whose values a class would take in another form than it has.

        A copy of the module without its children loads zeros. It is asked now, as nothing must have
        changed when the load is refused.
        """
        if not names or any(map(_is_own_code, _hooks(owner))):
            return names  # Why: a hook may be bound to the module itself, so it is not tried.
        start = f"{raw}." if raw else ""
        own = {
            name.rpartition(".")[2]: value
            for name, value in made.items()
            if name.rpartition(".")[0] == prefix and not name.endswith(_EXTRA)
        }
        given = OrderedDict((start + last, _zeros(value)) for last, value in own.items())
        if any(value is None for value in given.values()):
            return names  # an object, whose value is not known yet
        copied = _without_children(owner)
        problems: list[str] = []
        metadata = (self._metadata or {}).get(raw, {})
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copied._load_from_state_dict(given, start, metadata, True, [], problems, problems)
        except Exception:  # noqa: BLE001 - a user's class may raise anything
            return set()
        told = "\n".join(problems)
        return {name for name in names if f"{start}{name.rpartition('.')[2]}" not in told}


def _is_flat(state: Any) -> bool:
    """Returns whether a state has values by names, as those of torch's modules."""
    return isinstance(state, Mapping) and all(type(name) is str for name in state)


def _num_found(key: str, state: Mapping[str, Any], stored: Stored) -> int:
    return sum(f"{key}.{name}" in stored.names for name in state)


def _owned_name(
    rest: str, state: Mapping[str, Any], owners: Mapping[str, tuple[str, nn.Module]]
) -> str | None:
    """Returns the name in a module's state at or above a stored name whose owner takes any form."""
    parts = rest.split(".")
    if _EXTRA in parts:
        name = ".".join(parts[: parts.index(_EXTRA) + 1])
        return name if name in state else None
    for end in range(len(parts)):
        _, owner = owners.get(".".join(parts[:end]), ("", None))
        if owner is not None and parts[end] not in owner._modules:
            names = [".".join(parts[:stop]) for stop in range(len(parts), end, -1)]
            own = (name for name in names if name in state)
            name = next(own, names[-1])
            # Why not below a tensor: a key of the class's own begins with the tensor's name.
            return rest if name != rest and isinstance(state.get(name), torch.Tensor) else name
    return None


def _fits(own: Any, items: Owned) -> bool:
    """Returns whether stored values have a place in what the module has."""
    if list(items) != [""]:
        return False
    if is_sharded(own):
        return True
    if isinstance(own, torch.Tensor):
        return items[""].dtype is not None and tuple(own.shape) == items[""].shape
    return False


def _takes_any_form(module: nn.Module) -> bool:
    """Returns whether a class or a hook of a module may take values of another shape or kind."""
    is_own = _is_own_code(type(module)._load_from_state_dict)
    return is_own or any(map(_is_own_code, _hooks(module)))


def _hooks(module: nn.Module) -> list[Any]:
    hooks = module._load_state_dict_pre_hooks.values()
    return [getattr(hook, "hook", hook) for hook in hooks]


def _is_own_code(function: Any) -> bool:
    """Returns whether a function is not one of torch's."""
    return not f"{getattr(function, '__module__', '')}.".startswith("torch.")


def _direct_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for some in (module._parameters, module._buffers):
        yield from (one for one in some.values() if one is not None)


def _without_children(module: nn.Module) -> Any:
    """Returns a copy of a module with tensors of its own, for a load that changes nothing else."""
    made = type(module).__new__(type(module))
    vars(made).update(
        {
            name: copy(value) if type(value) in (dict, list, set, OrderedDict) else value
            for name, value in vars(module).items()
        }
    )
    vars(made)["_load_state_dict_pre_hooks"] = OrderedDict()
    vars(made)["_parameters"] = {
        name: one if one is None else nn.Parameter(torch.empty_like(one.detach()), False)
        for name, one in module._parameters.items()
    }
    vars(made)["_buffers"] = {
        name: one if one is None else torch.empty_like(one) for name, one in module._buffers.items()
    }
    return made


def _zeros(value: Any) -> Any:
    """Returns zeros in the form of targets; None if one of them is an object."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        made = {key: _zeros(each) for key, each in value.items()}
        return None if any(each is None for each in made.values()) else made
    if isinstance(value, list):
        some = [_zeros(each) for each in value]
        return None if any(each is None for each in some) else some
    return None


# --- modules without memory ---------------------------------------------------------------------


def _may_give_memory(module: nn.Module) -> bool:
    """Returns whether a class or a hook, not one of torch, may give tensors memory in a load."""
    is_own = not gives_torchs(module, nn.Module, "_load_from_state_dict")
    return is_own or any(map(_is_own_code, _hooks(module)))


def _on_meta(key: str, names: Sequence[str]) -> UnsupportedValueError:
    """Returns the error of tensors of a module that a load leaves on the meta device."""
    return UnsupportedValueError(
        f"{len(names)} tensor(s) of the module {key!r} are on the meta device and have no "
        f"memory to load into: {listed([repr(f'{key}.{name}') for name in names])}. Give them some "
        f"first, as by module.to_empty(device='cpu'); or load {{{key!r}: module.state_dict()}}, "
        f"and pass what that holds then to module.load_state_dict(..., assign=True)",
        key=f"{key}.{names[0]}",
    )
