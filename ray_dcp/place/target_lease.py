"""The lease of a command that writes to a place: `cp`, `average`, `import`, `export`.

An attempt belongs to nobody once its process is dead, and may be committed for ever. A command that
a person repeats must be able to ask: the lease names the process, its attempt and its work, and is
removed at its end. Whoever finds the lease of a process that lives is refused. Of one that is dead,
he fences the attempt, which has then lost whatever happens, and its files may be reused and go.

The lease is a numbered file that is created only if absent; the highest number is the lease. No
torch, no ray.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from ray_dcp.commit_protocol.garbage import LEASE, owner_of, sweep
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Fenced, Lost, Open, Won
from ray_dcp.core import bounds
from ray_dcp.errors import CheckpointError, CheckpointExistsError, CommitUnknownError
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.io.lease_holders import (
    BEATS,
    UNREADABLE,
    LeaseHolder,
    read_holder,
    renewed,
    this_process,
)
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.place.done_marks import remove_mark
from ray_dcp.place.listing import look_at, named_by_metadata, remove
from ray_dcp.place.outcome import settle
from ray_dcp.place.records import standing_records
from ray_dcp.place.stock_metadata import republish
from ray_dcp.place.voting import Opener
from ray_dcp.store.local import LocalStorage, volatile
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError, Storage, read_if_there

ENDED = "the process that wrote it ended before it was whole"
_MOST_TRIES = 20
_held: set[str] = set()
"""Nonces of the leases that this process holds. *Why*: an interrupt may keep one from being
removed, and this process would hold it as long as it lives."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetLease:
    """The lease of a place, while it is held."""

    attempt: str
    """Id for the attempt of the holder."""
    dead: frozenset[str] = frozenset()
    """Attempts of earlier holders that ended, which are fenced."""
    again: frozenset[str] = frozenset()
    """Those of them that had the same work."""
    is_again: bool = False
    """Whether an earlier holder ended in the middle of the same work."""
    is_done: bool = False
    """Whether it had committed that work, which stands."""


def leases_at(storage: Storage) -> list[str]:
    """Returns the keys of the leases at a place, the oldest first.

    Raises:
        StorageError: The storage can't be listed.
    """
    return sorted(e.key for e in storage.list("writing-") if LEASE.fullmatch(e.key))


@contextmanager
def writing_to(
    target: Target,
    work: str,
    *,
    opener: Opener = open_storage,
    lease_s: float = bounds.LEASE_S,
    attempts: bool = True,
) -> Iterator[TargetLease]:
    """Holds the lease of a place in the block; ends what dead processes left there.

    After the block, whether it failed or not, files of dead attempts are gone. After a
    `CommitUnknownError` everything stays, for whoever comes next.

    Args:
        target: The place.
        work: What is to be written, as text that is equal for equal work.
        opener: Opens the storage.
        lease_s: Time without a renewal after which a holder on another machine counts as dead, in
            seconds.
        attempts: Whether what is written has an attempt: False for files of other programs.

    Raises:
        CheckpointExistsError: Another process that lives writes there.
        StorageError: The storage failed.
        LimitError: No thread can be started to renew the lease.
    """
    storage = opener(target)
    own = replace(this_process(), root=target.url)
    _held.add(own.nonce)
    is_new_folder = isinstance(storage, LocalStorage) and not os.path.isdir(storage.url)
    stop: Callable[[], object] = list
    number, dead, attempt = 0, frozenset[str](), new_attempt() if attempts else ""
    try:
        number, earlier = _take(storage, own, attempt, work, lease_s)
        if storage.traits.shared:
            beat = partial(_beat, storage, own, attempt, work, _name(number))
            stop = renewed(beat, lease_s / BEATS)
        lease = _settled(target, storage, attempt, work, earlier, opener)
        dead = lease.dead
        yield lease
    except CommitUnknownError:
        _held.discard(own.nonce)
        stop()
        raise
    except BaseException:
        _held.discard(own.nonce)
        with suppress(CheckpointError):
            stop()
            # Why: the repeated command finds the lease, and that its work is done.
            if not _stands(storage, attempt):
                _give_back(storage, number, dead)
        if is_new_folder:
            with suppress(OSError):  # something is in it
                os.rmdir(storage.url)
        raise
    _held.discard(own.nonce)
    stop()
    remove_mark(partial(_give_back, storage, number, dead))


def ended_leases(storage: Storage) -> dict[str, str]:
    """Returns the leases at a place whose processes are known to be dead: key -> attempt.

    Raises:
        StorageError: The storage can't be read.
    """
    found, here = dict[str, str](), this_process()
    for key in leases_at(storage):
        data, holder = read_holder(storage, key)
        if holder is not None and holder is not UNREADABLE and _lives(holder, here) is False:
            found[key] = _words(data)[0]
    return found


def _take(
    storage: Storage, own: LeaseHolder, attempt: str, work: str, lease_s: float
) -> tuple[int, list[tuple[str, str]]]:
    """Creates the lease; returns its number, and attempt and work of the earlier holders."""
    content = _content(own, attempt, work)
    for _ in range(_MOST_TRIES):
        keys = leases_at(storage)
        read = {key: read_holder(storage, key) for key in keys}
        if keys:
            _check_ended(storage, keys[-1], *read[keys[-1]], own, lease_s)
        number = _number(keys[-1]) + 1 if keys else 1
        try:
            storage.write(_name(number), content, create=storage.traits.create_if_absent)
        except KeyExistsError:
            continue
        if storage.read(_name(number)) != content:
            continue  # Without conditional create, somebody else came at the same time.
        return number, [_words(data) for data, _ in read.values()]
    raise CheckpointExistsError(
        f"{storage.url} changed its writer {_MOST_TRIES} times meanwhile; who writes there? Choose "
        f"another place",
        checkpoint_id=storage.url,
    )


def _check_ended(
    storage: Storage,
    key: str,
    data: bytes,
    holder: LeaseHolder | None,
    own: LeaseHolder,
    lease_s: float,
) -> None:
    """Checks that the holder of a lease has ended; waits for a sign of life from other machines."""
    if holder is None:
        return
    if holder is UNREADABLE:
        raise CheckpointExistsError(
            f"Who writes to {storage.url} is not known, as its lease can't be read. If nobody "
            f"does, remove {key} there",
            checkpoint_id=storage.url,
            key=key,
        )
    lives = _lives(holder, own)
    if lives is None:
        logger.info("%s: looking for %g s whether %s still writes", storage.url, lease_s, holder)
        for _ in range(BEATS + 1):
            time.sleep(lease_s / BEATS)
            if (found := read_if_there(storage, key)) != data:
                lives = found is not None
                break
    if lives:
        raise CheckpointExistsError(
            f"{storage.url} is being written by {holder}, which lives: wait until that is done, "
            f"end that process, or choose another place",
            checkpoint_id=storage.url,
        )


def _lives(holder: LeaseHolder, here: LeaseHolder) -> bool | None:
    if holder.is_same_process(here):
        return holder.nonce in _held
    return holder.lives_here(here)


def _settled(
    target: Target,
    storage: Storage,
    attempt: str,
    work: str,
    earlier: list[tuple[str, str]],
    opener: Opener,
) -> TargetLease:
    """Fences the attempts of earlier holders; returns the lease."""
    dead, won = set[str](), set[str]()
    for one in (one for one, _ in earlier if one):
        match settle(target, one, reason=ENDED, rank=None, opener=opener):
            case Fenced():
                dead.add(one)
            case Won():
                won.add(one)
            case Lost():
                pass
            case Open(error):
                if storage.traits.create_if_absent:
                    raise error
                # Why: nobody can fence it there, and nobody who could commit it is alive.
                dead.add(one)
    same = {one for one, what in earlier if what == work}
    manifest = standing_records(storage).manifest
    is_done = manifest is not None and manifest.attempt in won & same
    if is_done:
        republish(storage, target.url)
    return TargetLease(
        attempt=attempt,
        dead=frozenset(dead),
        again=frozenset(dead & same),
        is_again=any(what == work for _, what in earlier),
        is_done=is_done,
    )


def _give_back(storage: Storage, number: int, dead: frozenset[str]) -> None:
    """Removes what dead attempts left, then the leases up to one's own."""
    if not number:
        return
    place = look_at(storage)
    if not place.standing.unreadable:
        found = sweep(
            place.sizes,
            standing=place.standing.manifest,
            last_slot=place.previous_slot,
            dead=place.known | dead,
            anonymous=True,
            named=named_by_metadata(
                place, place.standing.record, read_if_there(storage, METADATA_KEY)
            ),
        )
        # Why not the leases: nobody could tell any more whose these files were.
        files = [key for key in found.delete if (of := owner_of(key)) and of.kind != "lease"]
        remove(place, replace(found, delete=tuple(files)), dry_run=False)
    keys = [key for key in leases_at(storage) if _number(key) <= number]
    # Why not durably: a lease that comes back is that of a dead process whose work is done. So
    # nothing follows its deletion, and whoever is killed before it is found out by it.
    volatile(storage).delete(keys)


def _stands(storage: Storage, attempt: str) -> bool:
    """Returns whether an attempt is the checkpoint that stands."""
    manifest = standing_records(storage).manifest
    return manifest is not None and manifest.attempt == attempt


def _beat(
    storage: Storage, own: LeaseHolder, attempt: str, work: str, key: str, number: int
) -> bool:
    # Why: after an interrupt nobody may know this thread, which would write the lease again.
    if own.nonce not in _held or read_if_there(storage, key, 0) is None:
        return False
    storage.write(key, _content(own, attempt, work, number))
    return True


def _content(own: LeaseHolder, attempt: str, work: str, beat: int = 0) -> bytes:
    return own.encode(beat, attempt=attempt, work=work)


def _words(data: bytes) -> tuple[str, str]:
    """Returns attempt and work in a lease."""
    try:
        found = json.loads(data)
        return str(found["attempt"]), str(found["work"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def _name(number: int) -> str:
    return f"writing-{number:08d}.json"


def _number(key: str) -> int:
    found = LEASE.fullmatch(key)
    return int(found["number"]) if found else 0
