"""What an operation is that is interrupted at every point, and the place where it happens.

What is done with them is in `crashes`; so are those of ray_dcp itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import Storage
from tests.support.arrays import State, sample_state
from tests.support.world import save_state

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
    invariants: Sequence[Callable[[Any], None]] | None = None
    """What must hold afterwards, each called with an `Aftermath`; `INVARIANTS` if None."""
    look: Callable[[Storage, tuple[State, ...]], State | None] | None = None
    """From a place and the states that were ever there to the one that stands; for places that are
    no checkpoint themselves. `standing_state` if None."""

    def __str__(self) -> str:
        return self.name


def directory_of(storage: Storage) -> Path | None:
    """Returns the directory of a local storage; None for any other."""
    return Path(storage.url) if isinstance(storage, LocalStorage) else None
