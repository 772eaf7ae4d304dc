"""The writer lease: one process at a time writes to a root; one that lost it finds out.

It is a numbered file that is created only if absent; the file with the highest number is the lease.
A process that wants the lease checks the current holder first. If the holder is alive, the process
is refused. If not, the process creates the next number; a holder that was assumed dead finds that
number before its next save.

Whether a holder is alive: `io.lease_holders`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ray_dcp.core import bounds
from ray_dcp.errors import (
    CheckpointExistsError,
    InvalidRequestError,
)
from ray_dcp.io.lease_holders import (
    BEATS,
    UNREADABLE,
    LeaseHolder,
    read_holder,
    renewed,
    this_process,
)
from ray_dcp.io.reserve import freeing, keep_reserve
from ray_dcp.manager.catalogue import FOLDER, Root
from ray_dcp.store.storage import KeyExistsError, Storage, read_if_there

logger = logging.getLogger(__name__)

_MOST_TRIES = 20
_LONGEST_RUN_S = 90 * 24 * 3600.0
"""Limit of the time that one holder adds to `ran_s`. *Why*: one wrong clock must not outweigh all
failures from then on."""
_RIGHT = re.compile(r"writer-(\d{8,16})\.(json|beat|released)")


class WriterLease:
    """The writer lease of a root. Not held until `take` returns.

    Args:
        root: The root.
        lease_s: Time without a renewal after which a holder on another machine counts as dead, in
            seconds.
        holder: Identity of the holder; this process by default.

    Attributes:
        failures: Number of earlier holders that ended without releasing the lease.
        ran_s: Total time that earlier holders had the lease, each until its last commit, in
            seconds.
    """

    def __init__(
        self,
        root: Root,
        *,
        lease_s: float = bounds.LEASE_S,
        holder: LeaseHolder | None = None,
        maker: str = "CheckpointManager",
    ) -> None:
        self._root, self._maker = root, maker
        self._lease_s = lease_s
        self._holder = replace(holder or this_process(), root=root.url)
        self._stop: Callable[[], None] = lambda: None
        self._number = 0
        self.failures = 0
        self.ran_s = 0.0

    @property
    def is_taken(self) -> bool:
        """Whether this process has taken the lease and not released it."""
        return self._number > 0

    def take(self, *, even_if_held: bool = False, now_s: float = 0.0, last_s: float = 0.0) -> None:
        """Acquires the lease; only checks it if this process has taken it already.

        Args:
            even_if_held: Whether to take the lease from a holder that is alive. That holder is
                refused from then on.
            now_s: Current time, in seconds since the epoch.
            last_s: Time of the last commit in this root, in seconds since the epoch.

        Raises:
            CheckpointExistsError: Another process holds the lease and is alive, or has taken it
                from this one.
            LimitError: No thread can be started to renew the lease.
            StorageError: The storage failed.
        """
        if self.is_taken:
            self.check()
            return
        storage = self._root.shared
        for _ in range(_MOST_TRIES):
            number, holder = self._read_newest(storage)
            if holder is not None and not even_if_held and self._is_live(storage, number, holder):
                raise self._held_error(number, holder)
            has_failed = holder is not None and not holder.is_same_process(self._holder)
            self._count(storage, number, has_failed, last_s)
            content = self._holder.encode(since_s=now_s, failures=self.failures, ran_s=self.ran_s)
            try:
                name = _name(number + 1)
                freeing(storage, partial(storage.write, name, content, create=True))
            except KeyExistsError:
                continue
            if has_failed:
                logger.info("%s was written by %s, which has ended", self._root.url, holder)
            if storage.traits.shared:
                self._stop = renewed(partial(self._beat, number + 1), self._lease_s / BEATS)
            self._number = number + 1
            self._remove_older(storage)
            keep_reserve(storage)
            return
        raise CheckpointExistsError(
            f"{self._root.url} changed its writer {_MOST_TRIES} times meanwhile; which jobs write "
            f"there? Use one root a job",
            checkpoint_id=self._root.url,
        )

    def _held_error(self, number: int, holder: LeaseHolder) -> CheckpointExistsError:
        url = self._root.url
        if holder is UNREADABLE:
            told = (
                f"Who writes to {url} is not known, as its lease can't be read. If no job does, "
                f"remove {FOLDER}/{_name(number)} there; {self._maker}(takeover=True) does "
                f"without"
            )
        elif holder.root not in ("", url):
            told = (
                f"{url} has the writer lease of {holder}, which lives and writes to {holder.root}. "
                f"If this is a copy of that run, {self._maker}(takeover=True) makes it a run "
                f"of its own, which that process never notices. If both are one directory, use one "
                f"root a job, or end that process"
            )
        else:
            told = (
                f"{url} is written by {holder}, which lives. Use one root a job; or "
                f"end that process, or close its manager; to read what it writes takes "
                f"no writer lease (restore, all_steps, follow). "
                f"{self._maker}(takeover=True) takes it away"
            )
        return CheckpointExistsError(told, checkpoint_id=url)

    def check_free(self) -> None:
        """Checks that no other process holds the lease that is alive; does not acquire it.

        Raises:
            CheckpointExistsError: Another process holds it, and is alive.
            StorageError: The storage failed.
        """
        storage = self._root.shared
        number, holder = self._read_newest(storage)
        if holder is not None and self._is_live(storage, number, holder):
            raise self._held_error(number, holder)

    def check(self) -> None:
        """Checks that this process still holds the lease.

        Raises:
            CheckpointExistsError: Another process has taken it, or it is gone.
            InvalidRequestError: This process has not taken it.
            StorageError: The storage failed.
        """
        if not self.is_taken:
            raise InvalidRequestError("the writer lease was not taken; call take() first")
        storage = self._root.shared
        highest, _ = _highest(storage)
        if highest == self._number:
            return
        if highest < self._number:
            raise CheckpointExistsError(
                f"the writer lease of {self._root.url} is gone: the directory was moved, deleted "
                f"or replaced since this manager opened it; nothing is saved or deleted by this "
                f"one any more. Make the manager anew, with the path of the run",
                checkpoint_id=self._root.url,
            )
        _, other = read_holder(storage, _name(highest))
        name = None if other is UNREADABLE else other
        raise CheckpointExistsError(
            f"{self._root.url} is written by {name or 'another manager'} since this manager "
            f"opened it; nothing is saved or deleted by this one any more. Use one root a job, or "
            f"end the other one and make the manager anew",
            checkpoint_id=self._root.url,
        )

    def give_back(self) -> None:
        """Releases the lease. Does nothing if another process holds it.

        Raises:
            StorageError: The storage failed.
        """
        self._stop()
        if not self.is_taken:
            return
        number, self._number = self._number, 0
        storage = self._root.shared
        if _highest(storage)[0] == number:
            storage.write(_name(number, "released"), b"")

    def _read_newest(self, storage: Storage) -> tuple[int, LeaseHolder | None]:
        """Returns the highest number and its holder; None if it was released."""
        number, is_released = _highest(storage)
        return number, None if is_released else read_holder(storage, _name(number))[1]

    def _count(self, storage: Storage, number: int, has_failed: bool, last_s: float) -> None:
        """Continues the counts of the previous holder, and adds that holder."""
        # Suppressed: a lease that can't be decoded has no counts.
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            before = json.loads(read_if_there(storage, _name(number)) or b"{}")
            self.failures = int(before["failures"]) + has_failed
            ran_s = last_s - float(before["since_s"])
            self.ran_s = float(before["ran_s"]) + min(max(0.0, ran_s), _LONGEST_RUN_S)

    def _is_live(self, storage: Storage, number: int, holder: LeaseHolder) -> bool:
        if holder is UNREADABLE:
            return True
        if holder.is_same_process(self._holder) or holder.nonce == self._holder.nonce:
            return False  # An earlier holder that this one replaces.
        lives = holder.lives_here(self._holder)
        if lives is not None:
            return lives
        logger.info(
            "%s was written by %s; looking for %g s whether it still is",
            self._root.url,
            holder,
            self._lease_s,
        )
        first = read_if_there(storage, _name(number, "beat"))
        for _ in range(BEATS + 1):
            time.sleep(self._lease_s / BEATS)
            if read_if_there(storage, _name(number, "beat")) != first:
                return True
        return False

    def _remove_older(self, storage: Storage) -> None:
        found = (_RIGHT.fullmatch(entry.key) for entry in storage.list("writer-"))
        storage.delete([one[0] for one in found if one and int(one[1]) < self._number])

    def _beat(self, number: int, beat: int) -> bool:
        storage = self._root.shared
        # Why: a manager that was succeeded, and never closed, would write as long as its process.
        if read_if_there(storage, _name(number), 0) is None:
            return False
        storage.write(_name(number, "beat"), str(beat).encode())
        return True


def _name(number: int, kind: str = "json") -> str:
    return f"writer-{number:08d}.{kind}"


def _highest(storage: Storage) -> tuple[int, bool]:
    """Returns the number of the newest lease (0 if there is none), and whether it is released."""
    keys = {entry.key for entry in storage.list("writer-")}
    leases = (found for found in map(_RIGHT.fullmatch, keys) if found and found[2] == "json")
    number = max((int(found[1]) for found in leases), default=0)
    return number, not number or _name(number, "released") in keys
