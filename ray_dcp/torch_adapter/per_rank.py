"""Per-rank values: saved under one name for each rank, and restored by a rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_dcp.errors import (
    DamagedCheckpointError,
    InvalidRequestError,
    StateDictError,
)
from ray_dcp.torch_adapter.collective import call_user_code
from ray_dcp.torch_adapter.flatten import Flat, check_names

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


def refuse_per_rank(state_dict: Mapping[str, Any], way: str) -> None:
    """Raises if per-rank values could not be kept apart.

    Args:
        state_dict: The state dict to save or load.
        way: The reason, as half a sentence.

    Raises:
        InvalidRequestError: The state dict has a `PerRank`.
    """
    stack: list[tuple[str, Any, int]] = [("", state_dict, 0)]
    while stack:
        name, value, depth = stack.pop()
        if isinstance(value, PerRank):
            raise InvalidRequestError(
                f"{name!r} is a PerRank, which {way} can't save or load; use the default planner "
                f"and a storage of ray_dcp's",
                key=name,
            )
        if depth > 50:
            continue
        prefix = name + "." if name else ""
        if isinstance(value, Mapping):
            stack += [(f"{prefix}{key}", each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list):
            stack += [(f"{prefix}{i}", each, depth + 1) for i, each in enumerate(value)]


@dataclass(frozen=True)
class _Own:
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
        self._own: list[_Own] = []
        self._values: dict[int, Any] = {}
        rows = [row for row, value in enumerate(flat.values) if type(value) is PerRank]
        if not rows:
            return
        chosen = set(rows)
        self.rest = flat.only([row for row in range(len(flat.names)) if row not in chosen])
        stored = _stored(index)
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
        self._own.append(_Own(fqn, target, numbers, merge))

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
            own.target.value = values[0] if own.merge is None else self._merged(own, values)

    def _merged(self, own: _Own, values: list[Any]) -> Any:
        merge = own.merge or (lambda *_: None)
        return call_user_code(
            f"the function of PerRank {own.fqn!r}",
            lambda: merge(values, self._rank, self._world_size),
            rank=self._rank,
        )


def _stored(index: Mapping[str, int]) -> dict[str, dict[tuple[int, int], int]]:
    """Returns, for each FQN with per-rank values, the number in the table by `(rank, ranks)`."""
    stored: dict[str, dict[tuple[int, int], int]] = {}
    for name, number in index.items():
        if ".rank-" in name and (match := _NAME.fullmatch(name)):
            who = (int(match["rank"]), int(match["world"]))
            stored.setdefault(match["fqn"], {})[who] = number
    return stored
