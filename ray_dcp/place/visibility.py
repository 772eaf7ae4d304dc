"""Checks that the files of an attempt can be seen where its commit is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray_dcp.core.processes import run_tasks
from ray_dcp.errors import (
    CheckpointExistsError,
    StorageError,
)
from ray_dcp.place.records import standing_records
from ray_dcp.store.storage import KeyMissingError, Storage, threads_for

MOST_NAMED = 20


def check_complete(
    storage: Storage, files: list[tuple[str, int]], attempt: str, previous_slot: int, url: str
) -> None:
    """Checks that all files are visible, and if not, whether another commit removed them.

    Args:
        storage: The storage of the target.
        files: Keys and lengths of the files.
        attempt: The attempt to commit.
        previous_slot: Highest slot in use when it was planned.
        url: URL of the target.

    Raises:
        CheckpointExistsError: Another save or a delete was committed since it was planned.
        StorageError: Some files are missing or have another length.
    """
    with explaining_removal(storage, attempt, previous_slot, url):
        check_visible(storage, files)


@contextmanager
def explaining_removal(
    storage: Storage, attempt: str, previous_slot: int, url: str
) -> Iterator[None]:
    """Raises `CheckpointExistsError` if a storage fails because another commit removed files.

    Args:
        storage: The storage of the target.
        attempt: The attempt that owns the files.
        previous_slot: Highest slot in use when it was planned.
        url: URL of the target.
    """
    try:
        yield
    except StorageError as error:
        standing = standing_records(storage)
        if standing.record is None or standing.slot <= previous_slot:
            raise
        what = "committed" if standing.manifest is not None else "deleted"
        raise CheckpointExistsError(
            f"Expected attempt {attempt} to be the only one of this checkpoint id, but "
            f"attempt {standing.record.attempt} {what} it in slot {standing.slot} meanwhile, which "
            f"removes the files of all others ({error.message}). Only one save at a time can have "
            f"an id",
            checkpoint_id=url,
        ) from error


def check_visible(storage: Storage, files: list[tuple[str, int]]) -> None:
    """Checks that files of ranks are visible, where the commit is made or on the rank itself.

    *Why*: with a path that the nodes do not share, every rank writes without an error, and the
    checkpoint would be committed without its files.

    Raises:
        StorageError: Some files are missing or have another length.
    """
    wrong: list[str] = []

    def check(file: tuple[str, int]) -> None:
        # Why not a list: network filesystems show an old one for a while.
        key, num_bytes = file
        try:
            start = max(num_bytes - 1, 0)
            tail = storage.read(key, start, 2)
        except KeyMissingError:
            wrong.append(f"{key} is missing")
            return
        if len(tail) != num_bytes - start:
            wrong.append(f"{key} has another length than {num_bytes} bytes")

    run_tasks(files, check, threads_for(storage, len(files)))
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise StorageError(
            f"Expected every file that the ranks wrote in {storage.url}, as the coordinator sees "
            f"it, but {', '.join(sorted(wrong)[:MOST_NAMED])}{more}. Save to a place that all "
            f"nodes share; in Ray Train's workers, ray_dcp.train.checkpointer does"
        )
