"""`collect`: takes away what attempts left and no checkpoint needs. No torch, no ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.sweep import Sweep, sweep
from ray_dcp.protocol.vote import Fenced, Open
from ray_dcp.runtime.leftovers import (
    CollectReport,
    Place,
    check_ours,
    look_at,
    named_by_metadata,
    remove,
    target_of,
)
from ray_dcp.runtime.outcome import settle
from ray_dcp.runtime.publishing import republish
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

__all__ = ["collect"]

Opener = Callable[[Target], Storage]

COLLECTED = "ray_dcp.collect(abort_unfinished=True) was called"


def collect(
    path: AnyPlace,
    *,
    storage_options: Mapping[str, object] | None = None,
    abort_unfinished: bool = False,
    dry_run: bool = False,
    opener: Opener = open_storage,
) -> CollectReport:
    """Deletes what attempts left at a path and no checkpoint needs.

    A save does this itself after its commit; this is for when it was interrupted, or none follows.
    The checkpoint that stands stays, and so does what may still become one.

    Args:
        path: Path or URL of one checkpoint.
        storage_options: For the storage.
        abort_unfinished: End attempts that may still be committed, and delete their files: right
            when the jobs that saved here are gone. One that lives fails with
            `SaveCancelledError`.
        dry_run: Only tell what would be deleted.
        opener: What opens the storage.

    Returns:
        What was deleted and what not.

    Raises:
        CheckpointNotFoundError: There is nothing.
        InvalidRequestError: There is nothing of ray_dcp.
        DamagedCheckpointError: A record is damaged, so that nobody knows what stands.
        StorageError: The storage failed before anything was deleted.

    Example:
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
    _check_readable(place)
    warnings = [] if dry_run else _published(place, target)
    found = _dead(place, anonymous=abort_unfinished, all_dead=abort_unfinished and dry_run)
    fenced: tuple[str, ...] = ()
    if abort_unfinished and dry_run:
        fenced = _dead(place).unfinished
    elif abort_unfinished and found.unfinished:
        fenced, refused = _fence(target, found.unfinished, opener)
        warnings += refused
        place = look_at(storage)
        found = _dead(place, anonymous=True)
    report = remove(place, found, dry_run)
    return replace(report, fenced=fenced, warnings=(*warnings, *report.warnings))


def _check_readable(place: Place) -> None:
    for _, error in sorted(place.standing.unreadable.items()):
        error.message += ". Nothing is collected before it is clear what stands: move it away"
        error.checkpoint_id = error.checkpoint_id or place.storage.url
        raise error


def _published(place: Place, target: Target) -> list[str]:
    """Brings `.metadata` up to date before what an old one names is looked at."""
    if place.standing.record is None:
        return []
    try:
        republish(place.storage, target.url)
    except CheckpointError as error:
        return [f".metadata could not be brought up to date: {error}"]
    return []


def _dead(place: Place, *, anonymous: bool = False, all_dead: bool = False) -> Sweep:
    return sweep(
        place.sizes,
        standing=place.standing.manifest,
        last_slot=place.previous_slot,
        dead=place.known,
        all_dead=all_dead,
        anonymous=anonymous,
        named=named_by_metadata(place, place.standing.record),
    )


def _fence(
    target: Target, attempts: Collection[str], opener: Opener
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the attempts that are fenced off, and why others are not."""
    fenced, refused = [], []
    for attempt in attempts:
        match settle(target, attempt, reason=COLLECTED, rank=None, opener=opener):
            case Fenced():
                fenced.append(attempt)
            case Open(error):
                refused.append(f"attempt {attempt} could not be ended: {error}")
    return tuple(fenced), refused
