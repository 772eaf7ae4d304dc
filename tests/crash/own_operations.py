"""What ray_dcp itself does at a place."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint.state_dict_saver as stock

from ray_dcp.errors import CommitUnknownError, StorageError
from ray_dcp.options import SaveOptions
from ray_dcp.runtime.garbage_collection import collect, delete
from ray_dcp.store.fault_injection import CrashError, Fault, Script
from tests.crash.array_states import ArrayCapture, State
from tests.crash.ranks import load_state
from tests.crash.registry import NEW, OLD, Operation, Place

__all__ = [
    "OPERATIONS",
    "delete_at",
    "leave_a_crash",
    "put_stock_checkpoint",
    "save_with_a_failing_rank",
    "torch_state",
]

SAFETENSORS = SaveOptions(container="safetensors", num_threads=1)


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


def _safe_old(place: Place) -> None:
    place.save(OLD, options=SAFETENSORS)


def _save_old(place: Place) -> None:
    place.save(OLD)


def _save_new(place: Place) -> str:
    return place.save(NEW, 2)


def _staged_new(place: Place) -> str:
    # Two of the ranks share a node.
    options = SaveOptions(num_threads=1)
    return place.save(NEW, 3, staged=True, nodes=("x", "x", "y"), options=options)


def _safe_new(place: Place) -> str:
    return place.save(NEW, 2, options=SAFETENSORS)


def _collect(place: Place, **how: bool) -> None:
    collect(place.url, opener=place.open, **how)


OPERATIONS = (
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
    Operation(name="save.first_safetensors", prepare=_nothing, run=_safe_new, new=NEW),
    Operation(
        name="save.overwrite_safetensors", prepare=_safe_old, run=_safe_new, previous=OLD, new=NEW
    ),
    Operation(
        name="save.overwrite_by_safetensors", prepare=_save_old, run=_safe_new, previous=OLD,
        new=NEW,
    ),
    Operation(
        name="save.aborted", prepare=_save_old, run=save_with_a_failing_rank, previous=OLD,
        new=OLD, fails=True,
    ),
    Operation(
        name="load.repairs_metadata", prepare=_not_published, run=_load_new, previous=NEW, new=NEW
    ),
    Operation(name="delete", prepare=_old_and_leftovers, run=delete_at, previous=OLD),
    Operation(name="delete.safetensors", prepare=_safe_old, run=delete_at, previous=OLD),
    Operation(name="delete.again", prepare=_half_deleted, run=delete_at),
    Operation(
        name="collect", prepare=_replaced_and_leftovers, run=_collect, previous=OLD, new=OLD
    ),
    Operation(
        name="collect.abort_unfinished", prepare=_replaced_and_leftovers,
        run=partial(_collect, abort_unfinished=True), previous=OLD, new=OLD,
    ),
)  # fmt: skip
