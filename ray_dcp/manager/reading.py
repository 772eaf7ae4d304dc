"""Leases: a step that somebody reads is not deleted meanwhile.

The reader writes its lease and then fences the deletions that are announced; who deletes announces
it and then looks for leases. See `ray_dcp.transfer.announcements`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ray_dcp.errors import CheckpointError
from ray_dcp.manager.places import READING, Root
from ray_dcp.manager.processes import Beating, Holder, Unchanged, this_process
from ray_dcp.protocol.messages import Target
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.announcements import fence

__all__ = ["Lease", "Readers"]

Opener = Callable[[Target], Storage]


class Lease:
    """Keeps a step while it is entered. Look whether the step is there *after* that.

    Args:
        root: Where.
        step: Which step.
        opener: What opens storages.
        lease_s: Silence after which a reader on another machine counts as gone, in seconds.
        holder: Who reads; this process by default.
        beats: Let others see that this process lives, in a thread.

    Raises:
        StorageError: When entered: the lease could not be written, or a deletion of the step that
            is announced could not be ended.
    """

    def __init__(
        self,
        root: Root,
        step: int,
        opener: Opener,
        *,
        lease_s: float,
        holder: Holder | None = None,
        beats: bool = True,
    ) -> None:
        self._holder = holder or this_process()
        self._root = root
        self._step = step
        self._opener = opener
        self._lease_s = lease_s
        self._beats = beats
        self._beating: Beating | None = None

    @property
    def _key(self) -> str:
        return f"{READING}{self._step}.{self._holder.nonce}"

    def __enter__(self) -> Lease:
        storage = self._opener(self._root.shared)
        storage.write(self._key, self._holder.encode())
        fence(
            storage,
            lambda name: self._opener(self._root.below(name)),
            f"step {self._step} is read by {self._holder}",
            self._step,
        )
        if self._beats and storage.traits.shared:
            self._beating = Beating(self._beat, self._lease_s / 3)
        return self

    def __exit__(self, *_: object) -> None:
        if self._beating is not None:
            self._beating.stop()
            self._beating = None
        # Why suppressed: the reader is done, and a lease of a process that is gone ends by itself.
        with suppress(CheckpointError):
            self._opener(self._root.shared).delete([self._key])

    def _beat(self, number: int) -> None:
        self._opener(self._root.shared).write(self._key, self._holder.encode(number))


class Readers:
    """Tells whether who reads a step still does.

    Args:
        lease_s: Silence after which a reader on another machine counts as gone, in seconds.
        holder: Who asks; this process by default.
        unchanged: Tells how long a lease has stayed as it is.
    """

    def __init__(
        self, *, lease_s: float, holder: Holder | None = None, unchanged: Unchanged | None = None
    ) -> None:
        self._lease_s = lease_s
        self._holder = holder or this_process()
        self._unchanged = unchanged or Unchanged()

    def is_live(self, shared: Storage, key: str) -> bool:
        """Tells whether a lease is held; removes it where its holder is gone.

        Args:
            shared: What managers share.
            key: Of the lease.

        Raises:
            StorageError: The storage failed.
        """
        try:
            data = shared.read(key)
        except KeyMissingError:
            return False
        holder = Holder.decode(data)
        lives = None if holder is None else holder.lives_here(self._holder)
        if lives is None:
            lives = self._unchanged.since_s(key, data) < self._lease_s
        if not lives:
            shared.delete([key])
        return lives
