"""`new_checkpoint`: the frame in which a command makes a checkpoint at a new place.

Whatever is made, and of what: the place is checked before and under its lease, interrupted work is
found again, and what a failure leaves is removed. No torch, no ray.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ray_dcp.commit_protocol.garbage import owner_of
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointExistsError
from ray_dcp.format.manifest import record_key
from ray_dcp.place.done_marks import marks_removed_last
from ray_dcp.place.records import standing_records
from ray_dcp.place.target_lease import TargetLease, leases_at, writing_to
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transform.free_space import check_space
from ray_dcp.transform.source import still_there
from ray_dcp.view.checkpoint_view import CheckpointView
from ray_dcp.view.progress import Meter, ShowProgress, reporting


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that is being made."""

    storage: Storage
    lease: TargetLease
    """The lease of its place, which has the attempt to commit, and whether that is done."""
    meter: Meter
    """Counts the bytes that are written."""

    def check_free(self) -> None:
        """Checks the place again, under its lease: nothing but dead attempts of commands is there.

        Raises:
            CheckpointExistsError: There is.
        """
        check_free(self.storage, self.lease.dead)


@contextmanager
def new_checkpoint(
    doing: str,
    target: Target,
    work: str,
    *,
    sources: Collection[CheckpointView] = (),
    num_bytes: int = 0,
    progress: ShowProgress = False,
    opener: Callable[[Target], Storage] = open_storage,
    attempts: bool = True,
) -> Iterator[NewCheckpoint]:
    """Holds a place in the block, in which the caller makes a checkpoint there unless it is done.

    Args:
        doing: The operation, as `Progress` names it.
        target: The place, absolute.
        work: What is made, as text that is equal for equal work.
        sources: What it is made of; an error of damage tells if one was deleted or replaced.
        num_bytes: Bytes that a local place needs; 0 if the caller looks for them.
        progress: As for `export`.
        opener: Opens the storage of the place.
        attempts: See `writing_to`.

    Raises:
        CheckpointExistsError: A checkpoint, or files of one, are at the place; or another process
            that lives writes there.
        StorageError: There is not enough space, or the storage failed.
    """
    storage = opener(target)
    check_writable(storage)
    check_space(storage, num_bytes)
    with ExitStack() as stack:
        stack.enter_context(marks_removed_last())
        meter = stack.enter_context(reporting(progress, doing, target.url))
        for view in sources:
            stack.enter_context(still_there(view))
        lease = stack.enter_context(writing_to(target, work, opener=opener, attempts=attempts))
        yield NewCheckpoint(storage, lease, meter)


def check_writable(storage: Storage) -> None:
    """Checks that no checkpoint is at a place, unless a lease of a command is there.

    Raises:
        CheckpointExistsError: There is.
    """
    if not leases_at(storage):
        check_free(storage)


def check_free(target: Storage, dead: Collection[str] = (), taken: Collection[str] = ()) -> None:
    """Checks that no checkpoint is at a place, nor data files of one.

    Records may be: of attempts that failed, or of a delete.

    Args:
        target: The place.
        dead: Attempts whose files may be there.
        taken: Files that may be there.

    Raises:
        CheckpointExistsError: There is.
    """
    standing = standing_records(target)
    there = [record_key(standing.slot)] if standing.manifest is not None else []
    there += map(record_key, standing.slots.unreadable)
    for entry in target.list():
        owned = owner_of(entry.key)
        if entry.key in taken or (owned is not None and owned.attempt in dead):
            continue
        is_others = "/" not in entry.key and entry.key.endswith((".distcp", ".safetensors"))
        if is_others or (owned is not None and owned.kind in ("data", "metadata")):
            there.append(entry.key)
    if there:
        raise CheckpointExistsError(
            f"expected nothing of a checkpoint in {target.url}, found {there[0]}"
            f"{f' and {len(there) - 1} more files' if len(there) > 1 else ''}; choose another "
            f"place, or delete it first (what a save left that was killed: ray-dcp gc "
            f"--abort-unfinished)",
            checkpoint_id=target.url,
        )
