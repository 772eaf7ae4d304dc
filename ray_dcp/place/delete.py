"""`delete` removes a checkpoint, with all files of other attempts. No torch, no ray.

`ray_dcp.delete` is that of `step_deletion`, which asks first what protects a step of a run.

Its order: a delete record, from which on there is no checkpoint; `.metadata`; data; chunk tables;
older records. A crash in between leaves work for the next delete, collect or save, and never an
incomplete checkpoint.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ray_dcp.commit_protocol.garbage import attempts_of, sweep, verdicts
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Decision, Fenced, Open, Vote, Won
from ray_dcp.errors import CheckpointError, CheckpointExistsError, InvalidRequestError
from ray_dcp.format.manifest import DeleteRecord, Manifest, encode_record
from ray_dcp.format.save_trace import trace_key
from ray_dcp.format.step_info import info_slot
from ray_dcp.io.announced_deletions import ended
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.garbage import check_readable, find_dead
from ray_dcp.place.listing import (
    CollectReport,
    Listing,
    check_ours,
    look_at,
    named_by_metadata,
    remove,
)
from ray_dcp.place.records import standing_records
from ray_dcp.place.stock_files import without_stock_files
from ray_dcp.place.stock_metadata import withdraw
from ray_dcp.place.voting import Opener, decide
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage, target_of
from ray_dcp.store.storage import is_full, read_if_there

MOST_TRIES = 20
"""Most times that a delete begins again because a save was committed meanwhile."""


DELETED_BY_USER = "ray_dcp.delete was called"


def delete(
    path: AnyPlace,
    *,
    storage_options: Mapping[str, object] | None = None,
    dry_run: bool = False,
    opener: Opener = open_storage,
    expected: str | None = None,
    attempt: str | None = None,
    confirm: Callable[[], object] = lambda: None,
) -> CollectReport:
    """Deletes the checkpoint at a path, whatever protects it; with all files of other attempts.

    Atomic: a reader finds the whole checkpoint, or that it was deleted. A save that began before
    fails, or its checkpoint is deleted as well. One small record remains, and files that ray_dcp
    did not write. Deleting twice is allowed, also to finish an interrupted delete.

    Args:
        path: Path or URL of one checkpoint.
        storage_options: Options for the storage.
        dry_run: Whether only to report the files to delete.
        opener: Opens the storage.
        expected: Attempt of the checkpoint to delete, "" if there should be none: any other one is
            kept. None for any checkpoint.
        attempt: Attempt of the delete record, if it was announced (`io.records`).
        confirm: Called right before the delete record is created; raises to keep the checkpoint.

    Returns:
        The deleted files. Those that could not be deleted are in `kept` and `warnings`: the
        checkpoint is deleted nevertheless, and `collect` or another `delete` removes them.

    Raises:
        CheckpointNotFoundError: There are no files.
        InvalidRequestError: ray_dcp did not write the checkpoint.
        CheckpointExistsError: There is another checkpoint than the expected one, or the announced
            deletion was ended by another process; nothing is deleted.
        DamagedCheckpointError: A record can't be read, so that it is unknown whether the expected
            checkpoint exists; nothing is deleted.
        StorageError: The storage failed before the decision; or it did not say whether the deletion
            happened, which the message says.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> MemoryStorage("doc-delete").write("__0_0.0123456789abcdef.distcp", b"1234")
        >>> report = delete("memory://doc-delete")
        >>> report.deleted, report.num_bytes
        (('__0_0.0123456789abcdef.distcp',), 4)
    """
    target = target_of(path, storage_options)
    storage, is_freed = opener(target), False
    for _ in range(MOST_TRIES):
        place = look_at(storage)
        infos = [slot for slot in map(info_slot, place.sizes) if slot is not None]
        # Why also of a folder that is empty or has only infos: a save that writes here later must
        # find the record.
        is_known = infos or (attempt is not None and expected == "")
        if not is_known or place.foreign is not None:
            _check_deletable(place)
        # Why: what began since then may still be committed, unless another record ends it.
        is_begun = expected == "" and bool(attempts_of(place.sizes) - place.known)
        # Why: of a step of items, only an info is there until its items are durable.
        is_begun = is_begun or any(slot >= place.standing.slot for slot in infos)
        if isinstance(place.standing.record, DeleteRecord) and not is_begun:
            return _finish_delete(place, place.standing.record, dry_run)
        _check_expected(place, expected)
        if attempt in place.known:
            raise ended(storage.url)
        record = _delete_record(place, attempt or new_attempt())
        if dry_run:
            return _finish_delete(place, record, dry_run)
        confirm()
        match _commit_deletion(target, record, opener):
            case Won() as won:
                return _finish_won(place, record, won)
            case Fenced():
                raise ended(storage.url)
            case Open(error):
                if is_full(error) and not is_freed and make_room(place):
                    is_freed = True
                    continue
                unsure = copy.copy(error)
                unsure.message += ". Whether the checkpoint was deleted is unknown: delete again"
                raise unsure
    raise CheckpointError(
        f"Expected to delete the checkpoint, but {MOST_TRIES} times another save of the same id "
        f"was committed meanwhile. Stop the job that saves there, and delete again",
        checkpoint_id=storage.url,
    )


def make_room(place: Listing) -> bool:
    """Deletes unused files on a full disk; returns whether there were any.

    These are files that a record decides against, and the trace of the current checkpoint.
    """
    manifest = place.standing.manifest
    traces = () if manifest is None else (trace_key(manifest.attempt),)
    found = find_dead(place)
    done = remove(place, replace(found, delete=(*traces, *found.delete)), dry_run=False)
    return any(key in place.sizes for key in done.deleted)


def _finish_won(place: Listing, record: DeleteRecord, won: Won) -> CollectReport:
    """Deletes the unused files, unless a save was committed since, which then does it."""
    try:
        if standing_records(place.storage).slot == won.slot:
            return _finish_delete(place, record, dry_run=False)
        warning = "A save of the same id was committed right after the delete, and stands now"
    except CheckpointError as error:
        warning = f"The checkpoint is deleted, but its files are not: {error}. Delete again"
    manifest = place.standing.manifest
    attempt = None if manifest is None else manifest.attempt
    return CollectReport(place.storage.url, (), 0, (), checkpoint=attempt, warnings=(warning,))


def _check_deletable(place: Listing) -> None:
    check_ours(place)
    record = place.standing.record
    if place.foreign is None or isinstance(record, Manifest):
        return
    if record is None or record.replaced_metadata != place.foreign:
        raise InvalidRequestError(
            f"Expected a checkpoint of ray_dcp in {place.storage.url}, but the one that stands "
            f"there was written by another program: its .metadata says so. If you want it gone, "
            f"remove the directory; ray_dcp.collect removes what ray_dcp left beside it",
            checkpoint_id=place.storage.url,
        )


def _check_expected(place: Listing, expected: str | None) -> None:
    if expected is None:
        return
    # Why: it may be the commit of another checkpoint, or what ended this deletion.
    check_readable(place, "deleted")
    manifest = place.standing.manifest
    found = "" if manifest is None else manifest.attempt
    if found != expected:
        raise CheckpointExistsError(
            f"Expected to delete {f'the save {expected}' if expected else 'what crashes left'}, "
            f"but {f'the save {found}' if found else 'nothing'} stands there by now, and stays",
            checkpoint_id=place.storage.url,
        )


def _delete_record(place: Listing, attempt: str) -> DeleteRecord:
    standing = place.standing
    manifest = standing.manifest
    # Why: a foreign `.metadata` that the checkpoint replaced, but that still lies there, would
    # stand again; one that came after it is somebody else's.
    is_replaced = manifest is not None and manifest.replaced_metadata == place.foreign
    is_known = not standing.slots.unreadable
    return DeleteRecord(
        attempt=attempt,
        reason=DELETED_BY_USER,
        created_s=time.time(),
        replaced_metadata=place.foreign if is_replaced else None,
        previous_slot=standing.last_slot,
        decided=verdicts(standing.slots.records, attempts_of(place.sizes) if is_known else ()),
    )


def _commit_deletion(target: Target, record: DeleteRecord, opener: Opener) -> Decision:
    vote = Vote(
        target,
        record.attempt,
        record.previous_slot + 1,
        create_if_absent=opener(target).traits.create_if_absent,
    )
    return decide(vote, vote.commit(encode_record(record)), opener)


def _finish_delete(place: Listing, record: DeleteRecord, dry_run: bool) -> CollectReport:
    """Deletes the files that a deciding delete record makes unused."""
    storage = place.storage
    is_new = place.standing.record is not record
    # Careful: where a record can't be created only if absent, a save that runs may still replace
    # the delete, and needs its files.
    all_dead = is_new and (dry_run or storage.traits.create_if_absent)
    data = read_if_there(storage, METADATA_KEY)
    found = sweep(
        place.sizes,
        standing=None,
        last_slot=record.previous_slot,
        dead=place.known,
        all_dead=all_dead,
        named=named_by_metadata(place, record, data),
    )
    manifest = place.standing.manifest
    unnamed = attempts_of(place.sizes) - place.known
    done = CollectReport(
        path=storage.url,
        deleted=(),
        num_bytes=0,
        kept=found.kept,
        fenced=tuple(sorted(unnamed)) if all_dead else (),
        checkpoint=manifest.attempt if manifest is not None and is_new else None,
        dry_run=dry_run,
    )
    is_replaced = place.foreign is not None and place.foreign == record.replaced_metadata
    metadata = METADATA_KEY in place.sizes and (place.foreign is None or is_replaced)
    try:
        if not dry_run:
            metadata = withdraw(storage, record, data, manifest)
        stock = without_stock_files(storage, place.foreign_files) if is_replaced else ()
    except CheckpointError as error:
        # Why nothing is deleted: stock DCP still sees what `.metadata` names.
        warning = f".metadata could not be removed, so nothing was: {error}. Delete again"
        return replace(done, warnings=(warning,))
    report = remove(place, replace(found, delete=(*stock, *found.delete)), dry_run)
    removed = (METADATA_KEY,) if metadata else ()
    return replace(
        done,
        deleted=(*removed, *report.deleted),
        num_bytes=report.num_bytes + sum(place.sizes.get(key, 0) for key in removed),
        kept=report.kept,
        warnings=report.warnings,
    )
