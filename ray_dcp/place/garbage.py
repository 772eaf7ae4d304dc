"""Finds the files at a place that no checkpoint needs."""

from __future__ import annotations

from collections.abc import Collection

from ray_dcp.commit_protocol.garbage import GarbagePlan, sweep
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.place.listing import Listing, named_by_metadata
from ray_dcp.store.storage import read_if_there


def check_readable(place: Listing, done: str) -> None:
    """Checks that every record above the one that decides can be read.

    Args:
        place: The listing.
        done: What would be done otherwise, for the error: "collected".

    Raises:
        DamagedCheckpointError: One can't be read.
    """
    for _, error in sorted(place.standing.unreadable.items()):
        error.message += f". Nothing is {done} before it is clear what stands: move it away"
        error.checkpoint_id = error.checkpoint_id or place.storage.url
        raise error


def find_dead(
    place: Listing,
    *,
    anonymous: bool = False,
    all_dead: bool = False,
    gone: Collection[str] = (),
) -> GarbagePlan:
    """Returns the files that no checkpoint needs.

    Args:
        place: The listing.
        anonymous: As for `sweep`.
        all_dead: As for `sweep`.
        gone: More attempts that are dead, and leases.

    Raises:
        StorageError: `.metadata` can't be read.
    """
    return sweep(
        place.sizes,
        standing=place.standing.manifest,
        last_slot=place.previous_slot,
        dead={*place.known, *gone},
        all_dead=all_dead,
        anonymous=anonymous,
        named=named_by_metadata(
            place, place.standing.record, read_if_there(place.storage, METADATA_KEY)
        ),
    )
