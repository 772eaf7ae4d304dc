"""Planners that declare their plans to follow from the state's structure: not asked again in vain.

A class that defines `plan_settings` *itself* says: for equal settings and a state dict of equal
structure (names, containers, types, dtypes, shapes, strides, placements, meshes; not the content of
anything) my hooks give equal plans, and what they keep in the planner `resolve_data` does not need.
Then `create_local_plan`, `create_global_plan` and `finish_plan` run only when something changed.
`set_up_planner` and `resolve_data` run in every save: they have the data.

*Why a method and not a flag*: nobody can declare it without a thought for the settings. *Why only
the class's own*: a subclass that overrides a hook would inherit what no longer holds.

What was declared is checked: the hooks run again in the 2nd, 4th, 8th … save, and a planner that
then plans otherwise is asked in every save from then on, with a warning.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.values import Path

__all__ = ["PurePlans", "is_declared_pure", "settings_digest", "structure_digest"]

MOST_PLANS = 16
"""Of all layouts of a process."""

_FLAGS = (
    "flatten_state_dict", "flatten_sharded_tensors", "dedup_replicated_tensors",
    "dedup_save_to_lowest_rank", "_enable_plan_caching",
)  # fmt: skip
"""Arguments of `DefaultSavePlanner`, which count without being told."""

_HOOKS = (
    "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data",
    "lookup_object", "transform_object", "plan_settings",
)  # fmt: skip

_PLAIN: tuple[Any, ...] = (type(None), bool, int, float, str, bytes, torch.dtype)

_WRITES_ITSELF = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
"""What torch asks objects for that stand for tensors."""

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MOST_DEPTH = 200

Items = tuple[WriteItem, ...]


def is_declared_pure(planner: SavePlanner) -> bool:
    """Tells whether a planner's class declares its plans to follow from settings and structure.

    All ranks must agree on it, so it depends on the class, and on hooks that were replaced in the
    object, alone.

    Example:
        >>> from torch.distributed.checkpoint import DefaultSavePlanner
        >>> class OnlyTensors(DefaultSavePlanner):
        ...     def plan_settings(self):
        ...         return ()  # it has none
        ...
        ...     def create_local_plan(self):
        ...         plan = super().create_local_plan()
        ...         plan.items[:] = [item for item in plan.items if item.tensor_data is not None]
        ...         return plan
        >>> class Inheriting(OnlyTensors):
        ...     pass
        >>> is_declared_pure(OnlyTensors()), is_declared_pure(Inheriting())
        (True, False)
    """
    own = vars(planner)
    return "plan_settings" in vars(type(planner)) and not any(name in own for name in _HOOKS)


def settings_digest(planner: SavePlanner) -> bytes:
    """Returns 32 bytes that change with the settings of a planner that is declared pure.

    Raises:
        InvalidRequestError: `plan_settings` gave something that is no plain value.
        Exception: What it raised.
    """
    name = f"{type(planner).__module__}.{type(planner).__qualname__}"
    declared: Any = planner
    flags = tuple(bool(getattr(planner, flag, False)) for flag in _FLAGS)
    state = blake2b(repr((name, flags)).encode(), digest_size=32)
    state.update(_plain(declared.plan_settings(), name, 0).encode())
    return state.digest()


def structure_digest(state_dict: Mapping[str, Any]) -> bytes:
    """Returns 32 bytes that change with the structure of a state dict, and not with its content.

    Empty where a value's structure can't be told: a tensor of a class of somebody else's.

    Complexity:
        O(values), about 3 us a tensor.

    Example:
        >>> one, two = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> structure_digest(one) == structure_digest(two)
        True
        >>> structure_digest(one) == structure_digest({"w": torch.zeros(2, 1)})
        False
    """
    words: list[str] = []
    meshes: dict[int, str] = {}
    if not _describe(state_dict, words, meshes, 0):
        return b""
    return blake2b("\n".join(words).encode("utf-8", "surrogatepass"), digest_size=32).digest()


class PurePlans:
    """What is known of one planner's plans on one rank, in one save.

    Args:
        planner: Declared pure.
        rank: This rank.
        world_size: Number of ranks.
        coordinator_rank: Who plans for all.
    """

    def __init__(
        self, planner: SavePlanner, *, rank: int, world_size: int, coordinator_rank: int
    ) -> None:
        self._planner = planner
        self._who = (type(planner), rank, world_size, coordinator_rank)
        self._digest = b""
        self._usable: dict[bytes, _Known] = {}

    def look(self, structure: bytes) -> None:
        """Takes what is to be saved, and asks for the settings. To be called first.

        Args:
            structure: `structure_digest` of the state, from before the planner was set up.

        Raises:
            InvalidRequestError: As `settings_digest`.
        """
        if structure and type(self._planner) not in _liars:
            self._digest = blake2b(
                settings_digest(self._planner) + structure, digest_size=32
            ).digest()

    def offer(self) -> tuple[bytes, tuple[bytes, ...]]:
        """Returns what names this rank's input, and for which inputs of all its plan is known."""
        # Why kept: other saves of this process may have them forgotten before they are used.
        self._usable = _memory.usable(self._who, self._digest)
        return self._digest, tuple(self._usable)

    @staticmethod
    def agree(offers: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> tuple[bytes, bool]:
        """Returns what names the input of all ranks, and whether all know their plans for it.

        Args:
            offers: Of all ranks, in their order.
        """
        digests = [digest for digest, _ in offers]
        if not all(digests):
            return b"", False
        roll = blake2b(b"".join(digests), digest_size=32).digest()
        return roll, all(roll in usable for _, usable in offers)

    def plan_for(self, roll: bytes) -> tuple[Items, dict[str, Path]] | None:
        """Returns this rank's final plan, and notes that it is used."""
        known = self._usable.get(roll)
        if known is None:
            return None
        _memory.use((self._who, self._digest, roll), known)
        return known.items, known.paths

    def made(self, roll: bytes, items: Sequence[WriteItem], paths: Mapping[str, Path]) -> list[str]:
        """Takes what the hooks gave; returns a warning if they gave something else before."""
        if not roll or _memory.note(self._who, self._digest, roll, tuple(items), dict(paths)):
            return []
        _liars.add(type(self._planner))
        return [
            f"{type(self._planner).__name__}.plan_settings says that its plans follow from the "
            f"settings and the structure of the state, but for the same ones it has planned "
            f"otherwise now. Its hooks run in every save from now on: add what they depend on to "
            f"plan_settings, or remove it. Saves before this one may have missed such a change"
        ]


@dataclass
class _Known:
    items: Items
    paths: dict[str, Path]
    uses: int = 1

    @property
    def is_usable(self) -> bool:
        """Whether the next save may go without the hooks: not the 2nd, 4th, 8th … one."""
        following = self.uses + 1
        return following & (following - 1) != 0


class _Memory:
    """The last plans of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], _Known] = OrderedDict()

    def usable(self, who: tuple[Any, ...], digest: bytes) -> dict[bytes, _Known]:
        with self._lock:
            return {
                key[2]: known
                for key, known in self._known.items()
                if key[:2] == (who, digest) and known.is_usable
            }

    def use(self, key: tuple[Any, ...], known: _Known) -> None:
        with self._lock:
            known.uses += 1
            self._known[key] = known
            self._known.move_to_end(key)

    def note(
        self, who: tuple[Any, ...], digest: bytes, roll: bytes, items: Items, paths: dict[str, Path]
    ) -> bool:
        """Returns false if another plan was known."""
        with self._lock:
            key = (who, digest, roll)
            known = self._known.pop(key, None)
            if known is not None and (known.items, known.paths) != (items, paths):
                return False
            self._known[key] = _Known(items, paths, 1 if known is None else known.uses + 1)
            while len(self._known) > MOST_PLANS:
                self._known.popitem(last=False)
            return True


_memory = _Memory()
_liars: WeakSet[type] = WeakSet()


def _plain(value: Any, name: str, depth: int) -> str:
    """Returns a plain value as a text that tells it from all others."""
    if depth < _MOST_DEPTH:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Enum):
            return f"{kind}.{value.name}"
        for base in _PLAIN:
            if isinstance(value, base):
                # Why of the base: a class of somebody's own may call all its values the same.
                return f"{kind}:{base.__repr__(value)}"
        if isinstance(value, (list, tuple)):
            return f"{kind}[{','.join(_plain(one, name, depth + 1) for one in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"{{{','.join(sorted(_plain(one, name, depth + 1) for one in value))}}}"
        if isinstance(value, Mapping):
            pairs = [
                (_plain(k, name, depth + 1), _plain(v, name, depth + 1)) for k, v in value.items()
            ]
            return f"({','.join(f'{key}={one}' for key, one in pairs)})"
    raise InvalidRequestError(
        f"{name}.plan_settings must return numbers, texts, bytes, dtypes, enums, None, and lists, "
        f"tuples, sets and dicts of these, but there is a {type(value).__qualname__}",
        key="plan_settings",
    )


def _describe(value: Any, words: list[str], meshes: dict[int, str], depth: int) -> bool:
    """Adds what a value is like; returns false if that can't be told."""
    if depth > _MOST_DEPTH:
        return False
    kind = type(value)
    if kind in _TENSORS:
        words.append(_tensor(value))
        return True
    if kind is DTensor:
        mesh = value.device_mesh
        told = meshes.get(id(mesh))
        if told is None:
            names = mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names
            told = meshes[id(mesh)] = str(names)
        words.append(f"D {_tensor(value)} {value.placements} {told} {_tensor(value.to_local())}")
        return True
    if kind is ShardedTensor:
        local = [(shard.metadata, _tensor(shard.tensor)) for shard in value.local_shards()]
        words.append(f"S {value.metadata()} {local}")
        return True
    if isinstance(value, torch.Tensor) or any(hasattr(value, name) for name in _WRITES_ITSELF):
        return False
    words.append(f"{kind.__module__}.{kind.__qualname__}")
    if isinstance(value, Mapping):
        words.append(f"{len(value)}")
        for key, one in value.items():
            words.append(f"{type(key).__qualname__} {key!r}")
            if not _describe(one, words, meshes, depth + 1):
                return False
    elif isinstance(value, (list, tuple)):
        words.append(f"{len(value)}")
        return all(_describe(one, words, meshes, depth + 1) for one in value)
    return True


def _tensor(tensor: torch.Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (
        f"{type(tensor).__qualname__} {tensor.dtype} {tuple(tensor.shape)} {strides} "
        f"{tensor.requires_grad} {tensor.device.type} {tensor.layout} {tensor.is_pinned()}"
    )
