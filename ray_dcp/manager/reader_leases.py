"""Reader leases: each protects a step from deletion while it is read.

The reader writes its lease and then aborts announced deletions; a deletion is announced before
leases are read. See `io.announced_deletions`. Whether a holder is alive: `io.lease_holders`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from ray_dcp.core.processes import OwnProcess
from ray_dcp.errors import (
    CheckpointError,
    StorageRefusedError,
)
from ray_dcp.format.names import READING
from ray_dcp.io.lease_holders import (
    BEATS,
    UNREADABLE,
    LeaseHolder,
    read_holder,
    renewed,
    this_process,
)
from ray_dcp.manager.catalogue import Root
from ray_dcp.store.local import volatile
from ray_dcp.store.storage import Storage

logger = logging.getLogger(__name__)
_reading: set[str] = set()
"""Nonces of the reader leases that this process holds. *Why*: an interrupt may keep a lease from
being removed, and this process would protect its step as long as it lives."""


class ReaderLease:
    """A context manager that protects a step from deletion.

    The caller checks that the step exists *after* entering it. Where this process may not write, as
    on a read-only mount, the step is read without protection.

    Args:
        root: The root.
        step: The step.
        lease_s: Time without a renewal after which a reader on another machine counts as dead, in
            seconds.
        holder: Identity of the reader; this process by default.

    Attributes:
        unsure: Why the step may be deleted nevertheless; empty if it can't be.
        is_held: Whether the lease was written, and the announced deletions of the step aborted.

    Raises:
        LimitError: On entry: no thread can be started to renew the lease.
        StorageError: On entry: the storage failed to write the lease, or to abort an announced
            deletion of the step.
    """

    def __init__(
        self,
        root: Root,
        step: int,
        *,
        lease_s: float,
        holder: LeaseHolder | None = None,
    ) -> None:
        self._holder = holder or this_process()
        self._root = root
        self._step = step
        self._lease_s = lease_s
        self._process = OwnProcess()
        self._stop: Callable[[], None] = lambda: None
        self.unsure = ""
        self.is_held = False

    @property
    def _key(self) -> str:
        return f"{READING}{self._step}.{self._holder.nonce}"

    def __enter__(self) -> ReaderLease:
        storage = self._root.shared
        _reading.add(self._holder.nonce)
        try:
            volatile(storage).write(self._key, self._holder.encode())
            reason = f"step {self._step} is read by {self._holder}"
            self.unsure = self._root.fence(reason, self._step)
            if storage.traits.shared:
                self._stop = renewed(self._beat, self._lease_s / BEATS)
            self.is_held = True
        except StorageRefusedError as error:
            # Why not raised: who has read access alone reads, too.
            logger.info("Step %d is read without a lease: %s", self._step, error)
            # Why without the step: a warning of the same text is shown once.
            self.unsure = (
                f"what is read of {self._root.url} is not protected from deletion, as no reader "
                f"lease could be taken: this process may not write there. A job that writes the "
                f"run may remove the step meanwhile"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._process.is_this:
            return  # A forked child leaves the block, while its parent reads on.
        _reading.discard(self._holder.nonce)
        try:
            self._stop()
        finally:
            # Suppressed: a lease that stays expires with its process.
            with suppress(CheckpointError):
                volatile(self._root.shared).delete([self._key])

    def _beat(self, number: int) -> bool:
        # Why: after an interrupt nobody may know this thread, which would write the lease again.
        if self._holder.nonce not in _reading:
            return False
        volatile(self._root.shared).write(self._key, self._holder.encode(number))
        return True


class Readers:
    """Checks whether the holders of reader leases are alive.

    Args:
        lease_s: Time without a renewal after which a reader on another machine counts as dead, in
            seconds.
        holder: Identity of this process.
    """

    def __init__(self, *, lease_s: float, holder: LeaseHolder | None = None) -> None:
        self._lease_s = lease_s
        self._holder = holder or this_process()
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Content of each lease, and the time at which it was first seen."""

    def is_live(self, shared: Storage, key: str) -> bool:
        """Returns whether a lease is held; removes it if its holder has ended.

        Args:
            shared: Storage of the shared folder.
            key: Key of the lease.

        Raises:
            StorageError: The storage failed.
        """
        data, holder = read_holder(shared, key)
        if holder is None:
            return False
        if holder is UNREADABLE:
            if key not in self._seen:
                logger.warning(
                    "%s/%s can't be read: its step stays. If nobody reads the step, remove that "
                    "file",
                    shared.url,
                    key,
                )
            self._seen[key] = (data, 0.0)
            return True
        lives = holder.lives_here(self._holder)
        if holder.is_same_process(self._holder):
            lives = holder.nonce in _reading
        if lives is None:
            now_s = time.monotonic()
            if self._seen.get(key, (b"", 0.0))[0] != data:
                self._seen[key] = (data, now_s)
            lives = now_s - self._seen[key][1] < self._lease_s
        if not lives:
            shared.delete([key])
        return lives
