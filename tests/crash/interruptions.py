"""Ways to interrupt an operation at its n-th call of the storage, as `crashes` enumerates them.

Calls of the operating system are interrupted in `system_calls`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

from ray_dcp.errors import StorageError
from ray_dcp.store.fault_injection import Call, CrashError, Effect, Fault, Script
from ray_dcp.store.storage import Storage

__all__ = [
    "ALL_VARIANTS",
    "CRASHES",
    "CountedSteps",
    "Interruption",
    "Step",
    "Variant",
    "interrupted_storage",
]

Variant = Literal["before", "after", "torn", "refused", "lost", "broken"]
"""What becomes of the n-th call.

The process dies: `before` it; `after` it, without an answer; when half of its bytes were written
(`torn`). The process lives on with an error: nothing happened (`refused`); it happened (`lost`);
nothing happened, and every later call fails as well (`broken`)."""

CRASHES: tuple[Variant, ...] = ("before", "after", "torn")
_DEATHS: dict[Variant, Effect] = {"before": "before", "after": "after", "torn": "torn"}
ALL_VARIANTS: tuple[Variant, ...] = (*CRASHES, "refused", "lost", "broken")


@dataclass(frozen=True)
class Step:
    """One call that an operation made."""

    what: str
    where: str
    """Key or path."""
    changes: bool
    """It may change what is stored."""
    writes: bool
    """It writes bytes, so that half of them can be written."""

    def __str__(self) -> str:
        return f"{self.what} of {self.where!r}"

    def allows(self, variant: Variant) -> bool:
        """Tells whether a variant of this call says anything that no other does."""
        match variant:
            case "torn":
                return self.writes
            case "before" | "after" | "lost":
                # Why: what is stored is the same at the next change, and a read whose answer
                # is lost was refused.
                return self.changes
            case _:
                return True


class Interruption(Protocol):
    """What an operation has asked for, and whether it was interrupted."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every call so far."""
        ...

    @property
    def stopped(self) -> bool:
        """The process is dead."""
        ...


Interrupt = Callable[
    [Storage, int | None, Variant], AbstractContextManager[tuple[Storage, Interruption]]
]
"""From a storage, the number of the call (None for no interruption) and the variant to the
storage that the operation is to use, and what it asked for."""


class CountedSteps:
    """Counts the steps of several threads; implements `Interruption`.

    Args:
        at: Number of the step to interrupt, from 0; None to count them only.
        variant: What becomes of it.
    """

    def __init__(self, at: int | None, variant: Variant) -> None:
        self.variant = variant
        self._at = at
        self._steps: list[Step] = []
        self._stopped = False
        self._lock = threading.Lock()

    @property
    def steps(self) -> tuple[Step, ...]:
        """See `Interruption`."""
        return tuple(self._steps)

    @property
    def stopped(self) -> bool:
        """See `Interruption`."""
        return self._stopped

    def hits(self, step: Step) -> bool:
        """Counts a step; returns whether it is to be interrupted."""
        with self._lock:
            number = len(self._steps)
            self._steps.append(step)
        if self._at is None:
            return False
        return number == self._at or (number > self._at and self.variant == "broken")

    def die(self, where: object) -> NoReturn:
        """Lets the process die.

        Args:
            where: At which step, for the error.
        """
        self._stopped = True
        raise CrashError(f"the process died at {where} ({self.variant})")


@contextmanager
def interrupted_storage(
    storage: Storage, at: int | None, variant: Variant
) -> Iterator[tuple[Storage, Interruption]]:
    """Interrupts the n-th call of the storage; see `Interrupt`.

    A deleted key is a call of its own. `write` is atomic, so that it is never torn.
    """
    script = _StorageInterruption(at, variant)
    yield script.wrap(storage), script


class _StorageInterruption(Script):
    def __init__(self, at: int | None, variant: Variant) -> None:
        super().__init__()
        self._at = at
        self._variant = variant
        self._number = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """See `Interruption`."""
        return tuple(
            Step(
                call.operation,
                call.key,
                changes=call.operation not in ("read", "read_into", "list"),
                writes=call.operation == "writer.write",
            )
            for call in self.calls
        )

    def choose(self, call: Call) -> Fault | None:
        """See `Script.choose`."""
        number, self._number = self._number, self._number + 1
        if self._at is None or number < self._at:
            return None
        if number > self._at and self._variant != "broken":
            return None
        if self._variant in ("refused", "broken"):
            return Fault(operation=call.operation, error=_error(call, "was refused"))
        if self._variant == "lost":
            error = _error(call, "happened, but its answer was lost")
            return Fault(operation=call.operation, effect="after", error=error)
        return Fault(operation=call.operation, effect=_DEATHS[self._variant], stops=True)


def _error(call: Call, what: str) -> StorageError:
    return StorageError(f"scripted: {call} {what}", key=call.key or None)
