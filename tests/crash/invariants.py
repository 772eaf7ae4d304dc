"""What must hold at a place whatever was interrupted there, as functions to be called.

Each takes an `Aftermath` and raises `AssertionError`. All but `a_later_save_works` only look.
Sources: `DESIGN.md`, sections 2 and 8.
"""

from __future__ import annotations

import errno
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint.state_dict_loader as stock

from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.manifest import Manifest, record_key
from ray_dcp.format.save_trace import trace_key
from ray_dcp.io.checkpoint import METADATA_KEY, read_checkpoint
from ray_dcp.io.records import read_slots
from ray_dcp.place.outcome import outcome
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.storage import Entry, Storage
from ray_dcp.view.run_listing import list_checkpoints
from ray_dcp.view.verify import verify_opened
from tests.crash.registry import NEXT
from tests.support.arrays import State, same_state
from tests.support.storages import Fault, Operation, Script
from tests.support.world import load_state, save_state

_STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")

Told = Literal["committed", "failed", "unknown", "nothing"]
"""What the caller of an operation was told; `nothing` when its process died."""


@dataclass(frozen=True)
class Aftermath:
    """What is known about a place after something was interrupted there."""

    storage: Storage
    """A clean view: nothing fails any more."""
    allowed: tuple[State | None, ...]
    """What may stand now; None for nothing."""
    earlier: tuple[State | None, ...] = ()
    """What stood before: stock DCP may still see it."""
    others: tuple[State | None, ...] = ()
    """What else was ever saved there, so that it can be told by name."""
    told: Told = "nothing"
    attempt: str | None = None
    """The attempt that was told as committed, or as unknown."""
    foreign: Mapping[str, bytes] = field(default_factory=dict)
    """Files of somebody else, which must stay as they are."""
    beside: frozenset[str] = frozenset()
    """Names in the parent of a local directory before the operation."""
    look: Callable[[Storage, tuple[State, ...]], State | None] | None = None
    """Finds what stands, as `Operation.look`."""

    @property
    def states(self) -> tuple[State, ...]:
        """Every state that was ever at the place, each once."""
        found = (*self.allowed, *self.earlier, *self.others)
        return tuple({id(state): state for state in found if state is not None}.values())

    @cached_property
    def standing(self) -> State | None:
        """The state that stands; see `standing_state`. Looked up once."""
        return (self.look or standing_state)(self.storage, self.states)


Invariant = Callable[[Aftermath], None]


def an_allowed_checkpoint_loads_whole(after: Aftermath) -> None:
    """One of the allowed states stands, and loads with all its bytes.

    Raises:
        AssertionError: Another one stands, or a mixture.
        CheckpointError: What stands can't be loaded.
    """
    expect(
        any(is_same(after.standing, state) for state in after.allowed),
        f"{after.told!r} was told, but there stands {name_of(after.standing)}",
    )


def what_is_gone_was_deleted(after: Aftermath) -> None:
    """Where nothing stands any more, the error says that it was deleted.

    Raises:
        AssertionError: It does not, or a first save left something that looks deleted.
    """
    if after.standing is not None:
        return
    try:
        read_checkpoint(after.storage)
    except CheckpointNotFoundError as error:
        was_there = any(state is not None for state in after.earlier)
        says_so = "it was deleted" in error.message
        expect(says_so or not was_there, f"what stood is gone, and the error says: {error}")
        return
    raise AssertionError("a checkpoint stands that holds nothing that was ever saved")


def what_stands_verifies(after: Aftermath) -> None:
    """`verify` finds no damage in what stands.

    Raises:
        AssertionError: It does.
    """
    try:
        checkpoint = read_checkpoint(after.storage)
    except CheckpointNotFoundError:
        return
    report = verify_opened(after.storage, checkpoint)
    expect(report.ok, f"verify found {[str(problem) for problem in report.problems]}")


def only_what_stands_is_listed(after: Aftermath) -> None:
    """Nothing but what stands is listed as a checkpoint, and what stands is.

    Raises:
        AssertionError: It is not so.
    """
    if not _can_be_opened(after.storage):
        return
    listed = [
        found
        for found in list_checkpoints(after.storage.url)
        if found.state not in ("in flight", "aborted", "deleted")
    ]
    try:
        kind = read_checkpoint(after.storage).kind
    except CheckpointNotFoundError:
        expect(listed == [], f"nothing stands, but there is listed {listed}")
        return
    expected = [(".", "committed" if kind == "native" else "stock")]
    found = [(item.name, item.state) for item in listed]
    expect(found == expected, f"a {kind} checkpoint stands, but there is listed {listed}")


def outcomes_agree(after: Aftermath) -> None:
    """`outcome` says of each attempt what stands and what was told.

    Raises:
        AssertionError: It does not.
    """
    slots = read_slots(after.storage, whole=True)
    records = {**slots.older, **slots.records}
    attempts = {record.attempt for record in records.values()} | {after.attempt} - {None}
    if _can_be_opened(after.storage):
        said: dict[str, str] = {
            attempt: outcome(after.storage.url, attempt) for attempt in attempts if attempt
        }
    else:
        said = {r.attempt: _word(r) for _, r in sorted(records.items(), reverse=True)}
    try:
        standing = read_checkpoint(after.storage).attempt
    except CheckpointNotFoundError:
        standing = None
    if standing is not None:
        expect(said[standing] == "committed", f"{standing} stands, but is said {said[standing]!r}")
    if after.told == "committed" and after.attempt is not None:
        expect(
            after.attempt == standing,
            f"{after.attempt} was told as committed, but {standing} stands",
        )


def stock_dcp_agrees(after: Aftermath) -> None:
    """Stock DCP loads a state that stood or stands, whole, or finds nothing.

    What it sees is never newer than what stands.

    Raises:
        AssertionError: It sees another one, or a mixture.
        Exception: What stock DCP raised for what it found.
    """
    found = stock_state(after.storage, after.states)
    if found is None:
        return
    expect(
        any(is_same(found, state) for state in (after.standing, *after.earlier)),
        f"stock DCP sees {name_of(found)}, but {name_of(after.standing)} stands",
    )


def nothing_lies_outside(after: Aftermath) -> None:
    """Nothing was made beside the place, and files of somebody else are as they were.

    Raises:
        AssertionError: It is not so.
    """
    for key, data in after.foreign.items():
        expect(after.storage.read(key) == data, f"{key} of somebody else was changed")
    if isinstance(after.storage, LocalStorage):
        root = Path(after.storage.url)
        new = {path.name for path in root.parent.iterdir()} - {root.name} - after.beside
        expect(not new, f"there are new files beside the place: {sorted(new)}")


def a_later_save_works(after: Aftermath) -> None:
    """A later save works: it loads with all checksums verified, and stock DCP sees it.

    Raises:
        AssertionError: What it saved does not stand.
        CheckpointError: It fails.
    """
    save_state(after.storage, NEXT, 1, session="later")
    for see in (standing_state, stock_state):
        found = see(after.storage, (NEXT, *after.states))
        expect(is_same(found, NEXT), f"after a later save {name_of(found)} is seen")


def nothing_is_left(after: Aftermath) -> None:
    """Only what stands is there, its record, and files of somebody else.

    Raises:
        AssertionError: More is there.
    """
    checkpoint = read_checkpoint(after.storage)
    expected = {*after.foreign, METADATA_KEY, record_key(checkpoint.slot)}
    if checkpoint.manifest is not None:
        expected |= {entry.key for entry in checkpoint.manifest.files}
        expected.add(checkpoint.manifest.table.key)
        expected.add(trace_key(checkpoint.manifest.attempt))
    found = set(all_keys(after.storage))
    # Why not those: once the `.metadata` that named them is replaced, nothing tells whose they are.
    left = {key for key in found - expected if not _STOCK_FILE.fullmatch(key)}
    expect(not left, f"these files are left: {sorted(left)}")


INVARIANTS: tuple[Invariant, ...] = (
    an_allowed_checkpoint_loads_whole,
    what_is_gone_was_deleted,
    what_stands_verifies,
    only_what_stands_is_listed,
    outcomes_agree,
    stock_dcp_agrees,
    nothing_lies_outside,
    a_later_save_works,
    nothing_is_left,
)
"""All of them, in the order in which they are called: the last two see what a later save leaves."""


def standing_state(
    storage: Storage, states: tuple[State, ...], world_size: int = 1
) -> State | None:
    """Returns the one of some states that stands in a storage; None when none does.

    Args:
        storage: Where to look.
        states: All of the same names, dtypes and shapes.
        world_size: Number of ranks that load it.

    Raises:
        AssertionError: What stands there is none of them, but a mixture.
        CheckpointError: It can't be loaded.
    """
    if not states:
        try:
            read_checkpoint(storage)
        except CheckpointNotFoundError:
            return None
        raise AssertionError("a checkpoint stands where none ever was")
    try:
        found = load_state(_read_only(storage), states[0], world_size)
    except CheckpointNotFoundError:
        return None
    return _one_of(found, states, "our own load")


def stock_state(storage: Storage, states: tuple[State, ...]) -> State | None:
    """Returns the one of some states that stock DCP loads from a storage; None when none.

    Args:
        storage: Where to look; its files are copied to a directory.
        states: All of the same names, dtypes and shapes.

    Raises:
        AssertionError: It loads none of them, but a mixture.
        Exception: What stock DCP raised.
    """
    found = loaded_by_stock(storage, states[0])
    return None if found is None else _one_of(found, states, "stock DCP")


def loaded_by_stock(storage: Storage, like: State) -> State | None:
    """Returns what stock DCP loads from a storage; None if it sees no checkpoint there."""
    if not any(entry.key == METADATA_KEY for entry in storage.list(METADATA_KEY)):
        return None
    found: dict[str, Any] = {
        name: torch.from_numpy(np.zeros_like(value)) if isinstance(value, np.ndarray) else None
        for name, value in like.items()
    }
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(storage, LocalStorage):
            stock.load(found, checkpoint_id=storage.url, no_dist=True)
        else:
            _export(storage, Path(directory))
            stock.load(found, checkpoint_id=directory, no_dist=True)
    return {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in found.items()}


def all_keys(storage: Storage) -> list[str]:
    """Returns every key of a storage, also those of unpublished files where it tells them."""
    unpublished: Sequence[Entry] = getattr(storage, "unpublished", tuple)()
    return [entry.key for entry in (*storage.list(), *unpublished)]


def expect(holds: bool, otherwise: str) -> None:
    """Raises `AssertionError` with a message unless something holds."""
    if not holds:
        raise AssertionError(otherwise)


def name_of(state: State | None) -> str:
    """Returns a state in a few words."""
    return "nothing" if state is None else f"the state of {state.get('step', 'no step')}"


def _read_only(storage: Storage) -> Storage:
    # Why: a load repairs a `.metadata` that was left behind, and who looks must change nothing.
    refused: tuple[Operation, ...] = ("write", "open_writer", "delete")
    faults = [Fault(operation=call, times=None, error=errno.EROFS) for call in refused]
    return Script(faults).wrap(storage)


def _one_of(found: State, states: tuple[State, ...], who: str) -> State:
    for state in states:
        if same_state(found, state):
            return state
    differing = [[n for n in s if not same_state({n: s[n]}, {n: found[n]})] for s in states]
    raise AssertionError(f"{who} gives none of {len(states)} states, which differ in {differing}")


def is_same(one: State | None, other: State | None) -> bool:
    """Returns whether two states are the same, or both are none."""
    return one is other or (one is not None and other is not None and same_state(one, other))


def _word(record: object) -> str:
    return "committed" if isinstance(record, Manifest) else "aborted"


def _can_be_opened(storage: Storage) -> bool:
    """Returns whether `open_storage` opens this very storage by its URL."""
    return isinstance(storage, LocalStorage | MemoryStorage)


def _export(storage: Storage, directory: Path) -> None:
    for entry in storage.list():
        path = directory / entry.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.read(entry.key))
