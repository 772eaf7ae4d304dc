"""`check_crashes`: interrupts an operation at every call, and looks at what is left each time.

The operation is run once to count its calls. Then, for every call and every variant, it is run
again on a fresh place and interrupted there, and the invariants are checked through a clean view.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint.state_dict_saver as stock

from ray_dcp.commit_protocol.messages import SaveGo, Target
from ray_dcp.core.values import Columns, RankPlan
from ray_dcp.errors import CheckpointError, CommitUnknownError, InvalidRequestError, StorageError
from ray_dcp.io.checkpoint import newest_record
from ray_dcp.io.writer import Published, file_layout
from ray_dcp.options import SaveOptions
from ray_dcp.place.collect import collect
from ray_dcp.place.delete import delete
from ray_dcp.rank.unchanged import RunHistory
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import PublishedFile, Storage
from tests.crash.interruptions import (
    ALL_VARIANTS,
    CRASHES,
    Interrupt,
    Step,
    Variant,
    interrupted_storage,
    one_call_at_a_time,
)
from tests.crash.invariants import INVARIANTS, Aftermath, Invariant, Told, all_keys, expect, is_same
from tests.crash.registry import NEW, NEXT, OLD, Operation, Place, directory_of
from tests.support.arrays import ArrayCapture, State
from tests.support.storages import CrashError, Fault, Script
from tests.support.world import load_state

# --- The operations -------------------------------------------------------------------------------


def torch_state(state: State) -> dict[str, Any]:
    """Returns a state with its arrays as tensors."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in state.items()
    }


def put_stock_checkpoint(place: Place, state: State = OLD) -> None:
    """Saves a state by `torch.distributed.checkpoint`, whatever the storage."""
    with tempfile.TemporaryDirectory() as directory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock.save(torch_state(state), checkpoint_id=directory, no_dist=True)
        for file in Path(directory).iterdir():
            place.storage.write(file.name, file.read_bytes())


def leave_a_crash(place: Place, *, after: str = "manifest-*", state: State = NEW) -> None:
    """Begins a save and lets its process die, so that files of an unfinished attempt are left.

    Args:
        place: Where.
        after: Pattern of the key that was to be written next.
        state: What was to be saved.
    """
    with suppress(CrashError), Script([Fault(operation="write", key=after, stops=True)]) as script:
        Place(script.wrap(place.storage)).save(state, 2, session="crashed")


def save_with_a_failing_rank(place: Place, state: State = NEW) -> str:
    """Saves, but what rank 1 holds can't be read."""
    return place.save(state, 2, session="failing", capture=_unreadable_on_rank_1)


def _unreadable_on_rank_1(state: State, rank: int, world_size: int) -> ArrayCapture:
    return (ArrayCapture if rank == 0 else _Unreadable)(state, rank, world_size)


class _Unreadable(ArrayCapture):
    def source(self, row: int, /) -> memoryview:
        raise RuntimeError("this memory can't be read")


def delete_at(place: Place) -> None:
    """Deletes the checkpoint at a place.

    Raises:
        CommitUnknownError: The storage did not say whether it happened.
    """
    try:
        delete(place.url, opener=place.open)
    except StorageError as error:
        if "is unknown" in error.message:
            raise CommitUnknownError(error.message) from error
        raise


def _nothing(place: Place) -> None:
    """Leaves the place empty."""


def _old_and_leftovers(place: Place) -> None:
    place.save(OLD)
    leave_a_crash(place)
    leave_a_crash(place, after="chunks.*")


def _replaced_and_leftovers(place: Place) -> None:
    place.save(NEW)
    _until_it_deletes(place, lambda place: place.save(OLD))
    leave_a_crash(place)


def _until_it_deletes(place: Place, run: Callable[[Place], object]) -> None:
    with suppress(CrashError), Script([Fault(operation="delete", nth=2, stops=True)]) as script:
        run(Place(script.wrap(place.storage)))


def _half_deleted(place: Place) -> None:
    place.save(OLD)
    _until_it_deletes(place, delete_at)


def _not_published(place: Place) -> None:
    leave_a_crash(place, after=".metadata")


def _load_new(place: Place) -> None:
    load_state(place.storage, NEW)


def _save_old(place: Place) -> None:
    place.save(OLD)


def _save_new(place: Place) -> str:
    return place.save(NEW, 2)


def _staged_new(place: Place) -> str:
    # Two of the ranks share a node.
    options = SaveOptions(num_threads=1)
    return place.save(NEW, 3, staged=True, nodes=("x", "x", "y"), options=options)


def _collect(place: Place, **how: bool) -> None:
    collect(place.url, opener=place.open, **how)


SETTLED = ("big", "rep.large")
NEW_WITH_OLD: State = {**NEW, **{name: OLD[name] for name in SETTLED}}
"""What is saved by an operation that keeps a part of what stands before."""
LINK = SaveOptions(num_threads=1, unchanged="link")


class KnownRun(RunHistory):
    """Knows at once, and of small states, what a run's history learns in a thread.

    Args:
        storage: Where the checkpoint stands whose files may be reused.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self._storage = storage
        self._plans: list[RankPlan] = []

    def guess(self, target: Target, columns: Columns, opener: object) -> Columns:
        is_settled = np.array([columns.names[one] in SETTLED for one in columns.name])
        return replace(columns, settled=is_settled.astype(np.int8))

    def planned(self, target: Target, go: SaveGo, *_: object) -> None:
        self._plans.append(go.plan)

    def published(self, attempt: str, opener: object) -> Published:
        found = newest_record(self._storage)
        if found is None:
            return {}
        files, url = tuple(found.manifest.files), self._storage.url
        return {
            file_layout(one): (PublishedFile(url, entry.key, entry.num_bytes, entry.digest),)
            for plan in self._plans
            for one in plan.files
            if one.settled and (entry := files[one.file])
        }

    def committed(self, *_: object) -> None:
        self._plans.clear()


def _save_to_link(place: Place) -> None:
    place.save(OLD, options=LINK, history=KnownRun(place.storage))


def _save_linked(place: Place) -> str:
    return place.save(NEW_WITH_OLD, 2, options=LINK, history=KnownRun(place.storage))


OPERATIONS = (
    Operation(
        name="save.linked", prepare=_save_to_link, run=_save_linked, previous=OLD, new=NEW_WITH_OLD
    ),
    Operation(name="save.first", prepare=_nothing, run=_save_new, new=NEW),
    Operation(name="save.overwrite", prepare=_save_old, run=_save_new, previous=OLD, new=NEW),
    Operation(
        name="save.overwrite_beside_leftovers", prepare=_old_and_leftovers, run=_save_new,
        previous=OLD, new=NEW,
    ),
    Operation(
        name="save.overwrite_stock", prepare=put_stock_checkpoint, run=_save_new, previous=OLD,
        new=NEW,
    ),
    Operation(
        name="save.staged", prepare=_old_and_leftovers, run=_staged_new, previous=OLD, new=NEW
    ),
    Operation(
        name="save.aborted", prepare=_save_old, run=save_with_a_failing_rank, previous=OLD,
        new=OLD, fails=True,
    ),
    Operation(
        name="load.repairs_metadata", prepare=_not_published, run=_load_new, previous=NEW, new=NEW
    ),
    Operation(name="delete", prepare=_old_and_leftovers, run=delete_at, previous=OLD),
    Operation(name="delete.again", prepare=_half_deleted, run=delete_at),
    Operation(
        name="collect", prepare=_replaced_and_leftovers, run=_collect, previous=OLD, new=OLD
    ),
    Operation(
        name="collect.abort_unfinished", prepare=_replaced_and_leftovers,
        run=partial(_collect, abort_unfinished=True), previous=OLD, new=OLD,
    ),
)  # fmt: skip


# --- The enumeration ------------------------------------------------------------------------------


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
    told_after: Mapping[Variant, frozenset[Told]]
    """The same, by variant."""
    stood: Mapping[Stands, int]
    """What stood afterwards."""


@one_call_at_a_time()
def check_crashes(
    operation: Operation | str,
    *,
    storage: Callable[[], Storage] | None = None,
    variants: Iterable[Variant] = ALL_VARIANTS,
    invariants: Sequence[Invariant] | None = None,
    interrupt: Interrupt = interrupted_storage,
    every: int | Mapping[Variant, int] = 1,
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
            (`interrupted_system`).
        every: Interrupt only every n-th of the calls that a variant applies to, to save time; one
            number for all variants, or a number for each.

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
    told_after: dict[Variant, frozenset[Told]] = {}
    stood: Counter[Stands] = Counter()
    for variant in variants:
        moments: list[Stands] = []
        allowed = [(number, step) for number, step in enumerate(steps) if step.allows(variant)]
        for number, step in allowed[:: every if isinstance(every, int) else every[variant]]:
            said, stands = enumeration.interrupted(number, step, variant)
            moments.append(stands)
            points[variant] += 1
            calls[step.what] += 1
            told[said] += 1
            told_after[variant] = told_after.get(variant, frozenset()) | {said}
        stood.update(moments)
        if variant in CRASHES and "new" in moments:
            expect(
                "previous" not in moments[moments.index("new") :],
                f"{operation.name}, {variant}: not one moment of commit, but {moments}",
            )
    return Reached(operation.name, dict(points), dict(calls), dict(told), told_after, dict(stood))


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
        self._steps_once(is_checked=False)
        return self._steps_once()

    def _steps_once(self, *, is_checked: bool = True) -> tuple[Step, ...]:
        name = self._operation.name
        with self._prepared() as (storage, beside):
            with self._interrupt(storage, None, "before") as (asked, interruption):
                told, attempt = told_by(lambda: self._operation.run(Place(asked)))
            expected: Told = "failed" if self._operation.fails else "committed"
            expect(told == expected, f"{name} was to be told {expected!r}, but is told {told!r}")
            if is_checked:
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
            # Why: who died between making a folder and its first file leaves it empty.
            for path in directory.iterdir() if directory and directory.exists() else ():
                shutil.rmtree(path)

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
