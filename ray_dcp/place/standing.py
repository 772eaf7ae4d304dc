"""What a save needs to know of a place before it is planned."""

from __future__ import annotations

from collections.abc import Iterable

from ray_dcp.commit_protocol.commands import RecordsRead
from ray_dcp.commit_protocol.garbage import attempts_of, left_by_others, verdicts
from ray_dcp.format.manifest import (
    Manifest,
)
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.io.records import slots_in
from ray_dcp.place.files import everything
from ray_dcp.place.records import Standing, standing_records
from ray_dcp.place.stock_files import foreign_metadata
from ray_dcp.store.storage import Storage


def read_standing(storage: Storage) -> RecordsRead:
    """Returns the state of a place that a save needs before it is planned.

    Args:
        storage: The storage of the target.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.
    """
    keys = [entry.key for entry in everything(storage)]
    standing = standing_records(storage, used=slots_in(keys))
    digest, foreign_files = None, tuple[str, ...]()
    if METADATA_KEY in keys:
        digest, foreign_files = foreign_metadata(storage, standing.manifest)
    present = attempts_of(keys)
    if not storage.traits.create_if_absent:
        # Why: two saves may both believe to have won there; the files of neither may go.
        known = {record.attempt for record in standing.slots.records.values()}
        if standing.record is not None:
            known |= {verdict.attempt for verdict in standing.record.decided}
        keys = [key for key in keys if attempts_of([key]) <= known]
    left = left_by_others(keys, last_slot=standing.last_slot)
    # Why none where a record can't be read: it may be the commit of one of them.
    is_known = storage.traits.create_if_absent and not standing.slots.unreadable
    return RecordsRead(
        last_slot=standing.last_slot,
        committed=_in_words(standing, digest),
        foreign_metadata=digest,
        replaced=tuple(dict.fromkeys((*_files(standing.manifest), *foreign_files, *left))),
        warnings=(
            *(
                f"The record in slot {slot} can't be read and is replaced: {error}"
                for slot, error in sorted(standing.unreadable.items())
            ),
            *_unprotected(storage),
        ),
        create_if_absent=storage.traits.create_if_absent,
        decided=verdicts(standing.slots.records, present if is_known else ()),
    )


def _unprotected(storage: Storage) -> tuple[str, ...]:
    if storage.traits.create_if_absent:
        return ()
    return (
        f"{storage.url} can't create a file only if there is none (hard links or conditional "
        f"writes), so that this save's coordinator alone decides what is committed. Two jobs that "
        f"save here at once can overwrite each other's checkpoint unnoticed: let one at a time",
    )


def _in_words(standing: Standing, foreign: str | None) -> str | None:
    found = []
    if standing.manifest is not None:
        found.append(f"attempt {standing.manifest.attempt} committed in slot {standing.slot}")
    if standing.unreadable:
        found.append(f"unreadable records in slots {sorted(standing.unreadable)}")
    if foreign is not None:
        found.append("a .metadata that ray_dcp did not write")
    return " and ".join(found) or None


def _files(manifest: Manifest | None) -> Iterable[str]:
    if manifest is None:
        return ()
    # Careful: all our names bear the attempt. Another one is that of somebody else, whatever the
    # manifest has.
    keys = (*(e.key for e in manifest.files), manifest.table.key)
    return (key for key in keys if manifest.attempt in key)
