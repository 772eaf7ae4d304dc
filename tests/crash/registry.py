"""Which operations are interrupted at every point: `register_operation` adds one.

What is done with them is in `crashes`; those of ray_dcp itself are in `own_operations`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_dcp.errors import InvalidRequestError
from ray_dcp.protocol.messages import Target
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import Storage
from tests.crash.array_states import State, sample_state
from tests.crash.ranks import save_state

__all__ = [
    "NEW",
    "NEXT",
    "OLD",
    "Operation",
    "Place",
    "register_operation",
    "registered_operation",
    "registered_operations",
    "unregister_operation",
]

OLD, NEW, NEXT = sample_state(1), sample_state(2), sample_state(3)
"""What is saved before an operation, by it, and after everything."""


@dataclass(frozen=True)
class Place:
    """Where an operation happens."""

    storage: Storage
    """What the operation must use: calls to it are counted, and end in crashes and faults."""

    @property
    def url(self) -> str:
        """Path or URL of the place."""
        return self.storage.url

    def open(self, target: Target) -> Storage:
        """Returns the storage, whatever the target; an `opener`."""
        return self.storage

    def save(
        self,
        state: State,
        world_size: int = 2,
        **how: Any,
    ) -> str:
        """Saves a state by several ranks in this thread; returns the attempt.

        Args:
            state: What to save.
            world_size: Number of ranks.
            **how: As for `save_state`.

        Raises:
            CheckpointError: What the ranks were told.
        """
        return save_state(self.storage, state, world_size, **how).attempt


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Something that changes what stands at a place, and must do so at once or not at all."""

    name: str
    prepare: Callable[[Place], object]
    """Makes what stands before."""
    run: Callable[[Place], object]
    """Does it. Returns the attempt if it committed one. Must ask the storage the same in every
    run, so it must not use several threads."""
    previous: State | None = None
    """What stands before; None for nothing."""
    new: State | None = None
    """What stands after it; None for nothing."""
    fails: bool = False
    """It raises a `CheckpointError` also when nothing is wrong with the storage."""
    needs_path: bool = False
    """It does not use `Place.storage`, but opens the path: only its system calls can be
    interrupted, in a local directory."""
    invariants: Sequence[Callable[[Any], None]] | None = None
    """What must hold afterwards, each called with an `Aftermath`; `INVARIANTS` if None."""
    look: Callable[[Storage, tuple[State, ...]], State | None] | None = None
    """From a place and the states that were ever there to the one that stands; for places that are
    no checkpoint themselves. `standing_state` if None."""

    def __str__(self) -> str:
        return self.name


_OPERATIONS: dict[str, Operation] = {}


def register_operation(
    name: str,
    *,
    prepare: Callable[[Place], object],
    run: Callable[[Place], object],
    previous: State | None = None,
    new: State | None = None,
    fails: bool = False,
    needs_path: bool = False,
    invariants: Sequence[Callable[[Any], None]] | None = None,
    look: Callable[[Storage, tuple[State, ...]], State | None] | None = None,
) -> Operation:
    """Adds an operation to those that the tests interrupt at every point.

    Args:
        name: Of the operation, unique.
        prepare: Makes what stands before.
        run: Does it; see `Operation.run`.
        previous: What stands before; None for nothing.
        new: What stands after it; None for nothing.
        fails: It raises a `CheckpointError` also when nothing is wrong with the storage.
        needs_path: It opens the path by itself.
        invariants: See `Operation.invariants`.
        look: See `Operation.look`.

    Raises:
        InvalidRequestError: The name is taken.

    Example:
        >>> overwrite = register_operation(
        ...     "doc.mine",
        ...     prepare=lambda place: place.save(OLD),
        ...     run=lambda place: place.save(NEW, 3),
        ...     previous=OLD,
        ...     new=NEW,
        ... )
        >>> overwrite in registered_operations()
        True
        >>> unregister_operation("doc.mine")
    """
    if name in _OPERATIONS:
        raise InvalidRequestError(f"an operation {name!r} is registered already; take another name")
    operation = Operation(
        name=name, prepare=prepare, run=run, previous=previous, new=new, fails=fails,
        needs_path=needs_path, invariants=invariants, look=look,
    )  # fmt: skip
    _OPERATIONS[name] = operation
    return operation


def unregister_operation(name: str) -> None:
    """Takes an operation out again; does nothing when it is not there."""
    _OPERATIONS.pop(name, None)


def registered_operations() -> tuple[Operation, ...]:
    """Returns all operations, in the order in which they were registered."""
    _register_own()
    return tuple(_OPERATIONS.values())


def registered_operation(name: str) -> Operation:
    """Returns the operation of a name.

    Raises:
        InvalidRequestError: There is none; the message names those that there are.
    """
    _register_own()
    if name not in _OPERATIONS:
        raise InvalidRequestError(
            f"expected one of {', '.join(sorted(_OPERATIONS))}, but found {name!r}"
        )
    return _OPERATIONS[name]


def _register_own() -> None:
    # Why here: that module registers what ray_dcp does, with the functions of this one.
    importlib.import_module("tests.crash.own_operations")


def directory_of(storage: Storage) -> Path | None:
    """Returns the directory of a local storage; None for any other."""
    return Path(storage.url) if isinstance(storage, LocalStorage) else None
