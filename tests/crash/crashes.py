"""`check_crashes`: interrupts an operation at every call, and looks at what is left each time.

The operation is run once to count its calls. Then, for every call and every variant, it is run
again on a fresh place and interrupted there, and the invariants are checked through a clean view.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ray_dcp.errors import CheckpointError, CommitUnknownError, InvalidRequestError
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import Storage
from tests.crash.array_states import State
from tests.crash.interruptions import (
    ALL_VARIANTS,
    CRASHES,
    Interrupt,
    Step,
    Variant,
    interrupted_storage,
)
from tests.crash.invariants import (
    INVARIANTS,
    Aftermath,
    Invariant,
    Told,
    all_keys,
    expect,
    is_same,
)
from tests.crash.own_operations import OPERATIONS
from tests.crash.registry import (
    NEXT,
    Operation,
    Place,
    directory_of,
)

__all__ = ["FOREIGN", "Reached", "aftermath_of", "check_crashes", "told_by"]

Stands = Literal["previous", "new", "neither"]
"""What stands after an interruption; `neither` when that can't be loaded."""

FOREIGN: Mapping[str, bytes] = {"notes.txt": b"mine", "other/notes.bin": bytes(range(7))}
"""What somebody else keeps at the place."""


@dataclass(frozen=True)
class Reached:
    """What an enumeration has seen: look at it, so that it is known to prove something."""

    operation: str
    points: Mapping[Variant, int]
    """How many calls were interrupted, by variant."""
    calls: Mapping[str, int]
    """How many, by kind of call."""
    told: Mapping[Told, int]
    """What the caller was told."""
    stood: Mapping[Stands, int]
    """What stood afterwards."""


def check_crashes(
    operation: Operation | str,
    *,
    storage: Callable[[], Storage] | None = None,
    variants: Iterable[Variant] = ALL_VARIANTS,
    invariants: Sequence[Invariant] | None = None,
    interrupt: Interrupt = interrupted_storage,
    every: int = 1,
) -> Reached:
    """Interrupts an operation at every call in turn and checks what is left.

    Args:
        operation: What to interrupt, or the name of one of `OPERATIONS`.
        storage: Makes an empty storage, each time another one or the same again (which is faster:
            what stands before is then written from a copy); a `MemoryStorage` by default. What is
            left in it is deleted.
        variants: What becomes of the call.
        invariants: What must hold, in the order in which it is checked; those of the operation,
            or else `INVARIANTS`, if None.
        interrupt: At which calls: of the storage by default, or of the operating system
            (`system_calls.interrupted_system`).
        every: Interrupt only every n-th of the calls that a variant applies to, to save time.

    Returns:
        How much was reached.

    Raises:
        AssertionError: An invariant does not hold; the message says after which interruption.
        InvalidRequestError: The storage is not empty.

    Complexity:
        Calls times variants runs of the operation, each with several loads and a save.

    Example:
        >>> reached = check_crashes("save.first", variants=["before"])
        >>> sorted(reached.stood), reached.told == {"nothing": reached.points["before"]}
        (['new', 'previous'], True)
    """
    if isinstance(operation, str):
        operation = next(one for one in OPERATIONS if one.name == operation)
    make = storage or partial(MemoryStorage, f"ray_dcp-testing/{uuid.uuid4().hex}")
    chosen = operation.invariants or INVARIANTS if invariants is None else invariants
    enumeration = _Enumeration(operation, make, chosen, interrupt)
    steps = enumeration.steps()
    expect(len(steps) > 0, f"{operation.name} asks nothing of its storage")
    points: Counter[Variant] = Counter()
    calls: Counter[str] = Counter()
    told: Counter[Told] = Counter()
    stood: Counter[Stands] = Counter()
    for variant in variants:
        moments: list[Stands] = []
        allowed = [(number, step) for number, step in enumerate(steps) if step.allows(variant)]
        for number, step in allowed[::every]:
            said, stands = enumeration.interrupted(number, step, variant)
            moments.append(stands)
            points[variant] += 1
            calls[step.what] += 1
            told[said] += 1
        stood.update(moments)
        if variant in CRASHES and "new" in moments:
            expect(
                "previous" not in moments[moments.index("new") :],
                f"{operation.name}, {variant}: not one moment of commit, but {moments}",
            )
    return Reached(operation.name, dict(points), dict(calls), dict(told), dict(stood))


def aftermath_of(
    operation: Operation,
    storage: Storage,
    told: Told,
    attempt: str | None = None,
    beside: frozenset[str] = frozenset(),
) -> Aftermath:
    """Returns what may stand after an operation, by what its caller was told.

    Args:
        operation: What was done.
        storage: Where, as a clean view.
        told: What the caller was told.
        attempt: The attempt that was told.
        beside: Names in the parent directory before.
    """
    previous, new = operation.previous, operation.new
    allowed: dict[Told, tuple[State | None, ...]] = {
        "committed": (new,), "failed": (previous,), "unknown": (previous, new),
        "nothing": (previous, new),
    }  # fmt: skip
    return Aftermath(
        storage=storage, allowed=allowed[told], earlier=(previous,), others=(new, NEXT), told=told,
        attempt=attempt, foreign=FOREIGN, beside=beside, look=operation.look,
    )  # fmt: skip


def told_by(run: Callable[[], object]) -> tuple[Told, str | None]:
    """Runs an operation; returns what its caller is told, and of which attempt.

    Raises:
        CrashError: Its process died.
    """
    try:
        attempt = run()
    except CommitUnknownError as error:
        return "unknown", error.attempt or None
    except CheckpointError:
        return "failed", None
    return "committed", attempt if isinstance(attempt, str) else None


class _Enumeration:
    """Runs one operation again and again, each time on a fresh place."""

    def __init__(
        self,
        operation: Operation,
        make: Callable[[], Storage],
        invariants: Sequence[Invariant],
        interrupt: Interrupt,
    ) -> None:
        self._operation = operation
        self._make = make
        self._invariants = invariants
        self._interrupt = interrupt
        self._known: dict[str, dict[str, bytes]] = {}

    def steps(self) -> tuple[Step, ...]:
        """Returns the calls that the operation makes when nothing interrupts it."""
        # Why twice: what a process asks only once (what a filesystem can do) is no part of it.
        self._steps_once()
        return self._steps_once()

    def _steps_once(self) -> tuple[Step, ...]:
        name = self._operation.name
        with self._prepared() as (storage, beside):
            with self._interrupt(storage, None, "before") as (asked, interruption):
                told, attempt = told_by(lambda: self._operation.run(Place(asked)))
            expected: Told = "failed" if self._operation.fails else "committed"
            expect(told == expected, f"{name} was to be told {expected!r}, but is told {told!r}")
            after = aftermath_of(self._operation, storage, told, attempt, beside)
            self._check(after, name)
            return interruption.steps

    def interrupted(self, number: int, step: Step, variant: Variant) -> tuple[Told, Stands]:
        """Interrupts one call; returns what was told and what stands afterwards."""
        told: Told = "nothing"
        attempt: str | None = None
        crash: BaseException | None = None
        with self._prepared() as (storage, beside):
            with self._interrupt(storage, number, variant) as (asked, interruption):
                try:
                    told, attempt = told_by(lambda: self._operation.run(Place(asked)))
                except BaseException as error:  # Why all: others wrap a CrashError.
                    if not interruption.stopped:
                        raise
                    # Why kept: its frames hold what the dead process can't clean up.
                    crash = error
            where = f"{self._operation.name}, {variant} call {number} ({step}) in {storage.url}"
            self._expect_reached(interruption.steps, number, step, where)
            expect(
                (crash is not None) == interruption.stopped == (variant in CRASHES),
                f"{where}: the process should {'die' if variant in CRASHES else 'live'}: {crash}",
            )
            after = aftermath_of(self._operation, storage, told, attempt, beside)
            return told, self._check(after, where)

    @contextmanager
    def _prepared(self) -> Iterator[tuple[Storage, frozenset[str]]]:
        """Lends a place with what stands before, and tells what lies beside it."""
        storage = self._make()
        if storage.list():
            raise InvalidRequestError(
                f"expected an empty storage, but there is something in {storage.url}"
            )
        directory = directory_of(storage)
        try:
            self._prepare(storage)
            beside = {path.name for path in directory.parent.iterdir()} if directory else set()
            yield storage, frozenset(beside)
        finally:
            storage.delete(all_keys(storage))

    def _prepare(self, storage: Storage) -> None:
        known = self._known.get(storage.url)
        for key, data in (FOREIGN if known is None else known).items():
            storage.write(key, data)
        if known is not None:
            return
        self._operation.prepare(Place(storage))
        # Why by URL: what is stored may tell where it is.
        keys = [entry.key for entry in storage.list()]
        if len(keys) == len(all_keys(storage)):
            self._known[storage.url] = {key: storage.read(key) for key in keys}

    def _check(self, after: Aftermath, where: str) -> Stands:
        """Checks all invariants; returns what stood before one of them saved again."""
        stands = self._stands(after)
        for invariant in self._invariants:
            try:
                invariant(after)
            except Exception as error:
                raise AssertionError(
                    f"{where}, told {after.told!r}: {invariant.__name__} does not hold: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return stands

    def _stands(self, after: Aftermath) -> Stands:
        try:
            is_new = is_same(after.standing, self._operation.new)
        except (AssertionError, CheckpointError):
            return "neither"
        return (
            "new" if is_new and self._operation.new is not self._operation.previous else "previous"
        )

    def _expect_reached(self, steps: Sequence[Step], number: int, step: Step, where: str) -> None:
        expect(len(steps) > number, f"{where}: this time it made only {len(steps)} calls")
        expect(
            steps[number].what == step.what,
            f"{where}: this time it is {steps[number]}; an operation must make the same calls in "
            f"every run, in one thread",
        )
