"""Names of a module's values without the names of what wraps it or its parts.

DDP, FSDP1, `torch.compile` and activation checkpointing put a module into another one, and so a
part into each name: `_orig_mod`, `module`. A checkpoint has names without these parts, so that it
fits whatever wraps the module at the load. The class of each module on the way decides what is a
part of a wrapper: a user's own submodule may be called `module` too.

    torch.compile(DDP(net))       _orig_mod.module.0.weight   -> 0.weight
    checkpoint_wrapper(compiled)  0._orig_mod.weight          -> 0.weight
    net.module, a layer           module.weight               -> module.weight
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from warnings import catch_warnings, filterwarnings

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from ray_dcp.errors import StateDictError
from ray_dcp.torch_adapter.flatten import listed

_WRAPPERS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.parallel.DistributedDataParallel, "module"),
    (nn.DataParallel, "module"),
    (FullyShardedDataParallel, "_fsdp_wrapped_module"),
    (ActivationWrapper, "_checkpoint_wrapped_module"),
)
_COMPILED = "_orig_mod"
_PARTS = frozenset({_COMPILED, *(part for _, part in _WRAPPERS)})
_MAY_BE_WRAPPED = re.compile(rf"(?:^|\.)(?:{'|'.join(sorted(_PARTS))})\.")
_FLAT = "_flat_param"


def _wrapped_part(module: nn.Module | None) -> str | None:
    """Returns the name by which a wrapper holds what it wraps; None for other modules."""
    # Why by `sys.modules`: importing dynamo takes a second, and nothing is compiled before.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return _COMPILED
    for cls, part in _WRAPPERS:
        if isinstance(module, cls):
            return part
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module that is within all wrappers.

    Examples:
        >>> inner = nn.Linear(2, 1)
        >>> unwrapped(nn.DataParallel(nn.DataParallel(inner))) is inner
        True
    """
    part = _wrapped_part(module)
    while part is not None and (inner := module._modules.get(part)) is not None:
        module, part = inner, _wrapped_part(inner)
    return module


class ModuleNames:
    """The names of one module.

    Args:
        module: Any module, wrapped or not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._places: dict[str, tuple[nn.Module | None, str]] = {"": (module, "")}

    def clean(self, name: str) -> str:
        """Returns the name of a value of this module without the parts of its wrappers.

        Args:
            name: A key of the module's `state_dict()`, or a name of a parameter. As in these,
                parts of FSDP1 and of activation checkpointing may be left out already.

        Examples:
            >>> ModuleNames(nn.DataParallel(nn.Linear(2, 1))).clean("module.weight")
            'weight'
            >>> ModuleNames(nn.ModuleDict({"module": nn.Linear(2, 1)})).clean("module.weight")
            'module.weight'
        """
        prefix, _, last = name.rpartition(".")
        return self._place(prefix)[1] + last

    def _place(self, prefix: str) -> tuple[nn.Module | None, str]:
        """Returns the module at a prefix or None, and the prefix without wrappers."""
        found = self._places.get(prefix)
        if found is None:
            above, _, part = prefix.rpartition(".")
            found = self._places[prefix] = self._step(*self._place(above), part)
        return found

    def _step(
        self, module: nn.Module | None, clean: str, part: str
    ) -> tuple[nn.Module | None, str]:
        while module is not None and (inner := _wrapped_part(module)) is not None:
            if part == inner:
                return module._modules[part], clean
            if part in module._modules:  # of a subclass of the wrapper
                break
            module = module._modules[inner]
        return _child(module, part), f"{clean}{part}."

    def by_clean_name(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the given names by their clean names.

        Raises:
            StateDictError: Two of them have the same clean name.
        """
        found: dict[str, str] = {}
        clashes: list[str] = []
        for name in names:
            if (other := found.setdefault(self.clean(name), name)) != name:
                clashes.append(f"{other!r} and {name!r}")
        if clashes:
            raise StateDictError(
                f"{type(self._root).__name__} has values whose names are equal without those of "
                f"its wrappers: {listed(clashes, '; ')}. Rename what the class of the wrapper adds",
                key=clashes[0],
            )
        return found

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yields each parameter by its clean name; a shared one by each of its names.

        A flat parameter of FSDP1 is yielded by the name of each parameter in it.
        """
        for name, parameter in self._root.named_parameters(remove_duplicate=False):
            prefix, _, last = name.rpartition(".")
            inner = getattr(parameter, "_fqns", ()) if last == _FLAT else (last,)
            for each in inner:
                yield self.clean(f"{prefix}.{each}" if prefix else each), parameter

    def asked_for(self, name: str) -> str:
        """Returns the name in this module of a value of a checkpoint.

        Args:
            name: Name in the checkpoint, below that of the module. It may have parts of other
                wrappers than this module has, and may go on behind the name of the value.

        Examples:
            >>> ModuleNames(nn.Linear(2, 1)).asked_for("_orig_mod.module.weight.exp_avg")
            'weight.exp_avg'
        """
        parts = name.split(".")
        found = _resolve(self._root, parts)
        if found is None:
            found, module = [], self._root
            while parts:
                module = unwrapped(module)
                if (child := _child(module, parts[0])) is not None:
                    found.append(parts.pop(0))
                    module = child
                elif parts[0] in _PARTS and len(parts) > 1:
                    del parts[0]
                else:
                    break
            found += parts
        return ".".join(found)


def _child(module: nn.Module | None, part: str) -> nn.Module | None:
    if module is None:
        return None
    if hasattr(module, "_fqn_modifiers"):
        # Source: torch/distributed/checkpoint/state_dict.py, `_get_fqns`.
        removed = module._fqn_modifiers().get(part)  # type: ignore[operator]
        module = getattr(module, removed, module) if removed else module
    return module._modules.get(part)


def _resolve(
    module: nn.Module | None, parts: list[str], *, may_skip: bool = True
) -> list[str] | None:
    """Returns the parts by which a module finds a value, without others; None if it has none.

    Of several ways to read a name, that without parts of wrappers comes first, then those with
    outer ones: the whole is wrapped more often than its layers.

    Why not by the first match of each part: a model within DDP may have a child `module` too.
    """
    if module is None or not parts:
        return None
    module = unwrapped(module)
    part, *rest = parts
    if part in module._parameters or part in module._buffers or part == "_extra_state":
        return parts
    child = module._modules.get(part)
    if (found := _resolve(child, rest, may_skip=False)) is not None:
        return [part, *found]
    if not may_skip:
        return None
    if part in _PARTS and (found := _resolve(module, rest)) is not None:
        return found
    return None if (found := _resolve(child, rest)) is None else [part, *found]


def renamed(
    index: Mapping[str, int],
    owners: Mapping[str, ModuleNames],
) -> Mapping[str, int]:
    """Returns the names of a checkpoint as modules ask for them, without those of wrappers.

    Args:
        index: Names in the checkpoint, with their numbers.
        owners: The names of a module by a prefix below which they are used: that of the module, or
            of a part of an optimizer's state.

    Raises:
        StateDictError: Two values of the checkpoint have the same name then.

    Complexity: 0.2 us a name, and some 10 us for each that may have parts of wrappers.
    """
    candidates = [name for name in index if _MAY_BE_WRAPPED.search(name)]
    changed: dict[str, str] = {}
    for name in candidates:
        for prefix, names in owners.items():
            if name.startswith(prefix + "."):
                new = f"{prefix}.{names.asked_for(name[len(prefix) + 1 :])}"
                if new != name:
                    changed[name] = new
    if not changed:
        return index
    found: dict[str, int] = {}
    first: dict[str, str] = {}
    clashes: list[str] = []
    for name, number in index.items():
        new = changed.get(name, name)
        if new in found:
            clashes.append(f"{first[new]!r} and {name!r} both to {new!r}")
        first[new], found[new] = name, number
    if clashes:
        raise StateDictError(
            f"the names of this checkpoint have those of wrappers of modules in them, and without "
            f"these they lead {listed(clashes, '; ')}: map one of each to None, or to another "
            f"name, with LoadOptions(key_map=...)",
            key=clashes[0],
        )
    return found


@contextmanager
def sharded_state(module: nn.Module) -> Iterator[None]:
    """Lets FSDP1 modules give and take sharded state while the context is open.

    Source: torch/distributed/checkpoint/state_dict.py, `_verify_options`.
    """
    if not FullyShardedDataParallel.fsdp_modules(module):
        yield
        return
    with catch_warnings():
        filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            module,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ):
            yield
