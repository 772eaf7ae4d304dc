"""`collect` removes the files of attempts that no checkpoint needs. No torch, no ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Fenced, Open
from ray_dcp.errors import CheckpointError
from ray_dcp.place.delete import make_room
from ray_dcp.place.garbage import check_readable, find_dead
from ray_dcp.place.listing import (
    CollectReport,
    Listing,
    check_ours,
    look_at,
    remove,
)
from ray_dcp.place.outcome import settle
from ray_dcp.place.stock_metadata import republish
from ray_dcp.place.target_lease import ended_leases
from ray_dcp.place.voting import Opener
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, target_of
from ray_dcp.store.storage import is_full

COLLECTED = "ray_dcp.collect(abort_unfinished=True) was called"


def collect(
    path: AnyPlace,
    *,
    storage_options: Mapping[str, object] | None = None,
    abort_unfinished: bool = False,
    dry_run: bool = False,
    opener: Opener = open_storage,
) -> CollectReport:
    """Deletes the files of attempts at a path that no checkpoint needs.

    A save does this itself after its commit; this function is for interrupted saves that no other
    save follows. The current checkpoint is kept, and so are attempts that may still be committed.
    What a `copy`, `average`, `import` or `export` left is deleted if its process is known to be
    dead.

    Args:
        path: Path or URL of one checkpoint.
        storage_options: Options for the storage.
        abort_unfinished: Whether to end attempts that may still be committed, and to delete their
            files; right if the jobs that saved here are gone. A running save fails with
            `SaveCancelledError`.
        dry_run: Whether only to report the files to delete.
        opener: Opens the storage.

    Returns:
        The deleted and the kept files.

    Raises:
        CheckpointNotFoundError: There are no files.
        InvalidRequestError: There are no files of ray_dcp.
        DamagedCheckpointError: A record is damaged, so that the current checkpoint is unknown.
        StorageError: The storage failed before anything was deleted.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> MemoryStorage("doc-collect").write("__0_0.0123456789abcdef.distcp", b"1234")
        >>> collect("memory://doc-collect").kept[0].reason
        'attempt 0123456789abcdef may still be committed'
        >>> report = collect("memory://doc-collect", abort_unfinished=True)
        >>> report.deleted, report.fenced
        (('__0_0.0123456789abcdef.distcp',), ('0123456789abcdef',))
    """
    target = target_of(path, storage_options)
    storage = opener(target)
    place = look_at(storage)
    check_ours(place)
    check_readable(place, "collected")
    warnings = [] if dry_run else _publish_metadata(place, target)
    fenced: tuple[str, ...] = ()
    # What commands left whose processes are dead: nobody else can commit it.
    ended = ended_leases(storage)
    if any(ended.values()) and not dry_run:
        fenced, refused = _fence(target, {*filter(None, ended.values())} - place.known, opener)
        warnings += refused
        place = look_at(storage)
    gone = {*ended, *(ended.values() if dry_run else fenced)}
    found = find_dead(
        place, anonymous=abort_unfinished, all_dead=abort_unfinished and dry_run, gone=gone
    )
    if abort_unfinished and dry_run:
        fenced = find_dead(place).unfinished
    elif abort_unfinished and found.unfinished:
        more, refused = _fence(target, found.unfinished, opener)
        fenced += more
        if any(map(is_full, refused)) and make_room(place):
            again, refused = _fence(target, set(found.unfinished) - {*fenced}, opener)
            fenced += again
        warnings += refused
        place = look_at(storage)
        found = find_dead(place, anonymous=True, gone=gone)
    report = remove(place, found, dry_run)
    return replace(report, fenced=fenced, warnings=(*warnings, *report.warnings))


def _publish_metadata(place: Listing, target: Target) -> list[str]:
    """Updates `.metadata` before the names in it are read; returns a warning if that fails."""
    if place.standing.record is None:
        return []
    try:
        republish(place.storage, target.url)
    except CheckpointError as error:
        return [f".metadata could not be brought up to date: {error}"]
    return []


def _fence(
    target: Target, attempts: Collection[str], opener: Opener
) -> tuple[tuple[str, ...], list[str]]:
    """Fences attempts off; returns those that succeeded, and why others failed."""
    fenced, refused = [], []
    for attempt in attempts:
        match settle(target, attempt, reason=COLLECTED, rank=None, opener=opener):
            case Fenced():
                fenced.append(attempt)
            case Open(error):
                refused.append(f"the save {attempt} could not be ended: {error}")
    return tuple(fenced), refused
