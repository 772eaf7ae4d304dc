"""Leases: a step that somebody reads is not deleted meanwhile.

The reader writes its lease and then looks for the mark of a deletion; who deletes writes that mark
and then looks for leases. One of the two sees the other, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ray_dcp.errors import CheckpointError, CheckpointNotFoundError
from ray_dcp.manager.places import DELETING, READING, Root
from ray_dcp.manager.processes import Beating, Holder, Unchanged, this_process
from ray_dcp.protocol.messages import Target
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["Deletions", "Lease"]

Opener = Callable[[Target], Storage]


class Lease:
    """Keeps a step while it is entered.

    Args:
        root: Where.
        step: Which step.
        opener: What opens storages.
        lease_s: Silence after which a reader on another machine counts as gone, in seconds.
        holder: Who reads; this process by default.
        beats: Let others see that this process lives, in a thread.

    Raises:
        CheckpointNotFoundError: When entered: the step is being deleted.
        StorageError: When entered: the lease could not be written.
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
        if any(e.key == _mark(self._step) for e in storage.list(_mark(self._step))):
            with suppress(CheckpointError):
                storage.delete([self._key])
            raise CheckpointNotFoundError(
                f"step {self._step} of {self._root.url} is being deleted; take a newer one",
                step=self._step,
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


class Deletions:
    """What who deletes asks before it does.

    Args:
        root: Where.
        opener: What opens storages.
        lease_s: Silence after which a reader on another machine counts as gone, in seconds.
        holder: Who deletes; this process by default.
        unchanged: Tells how long a lease has stayed as it is.
    """

    def __init__(
        self,
        root: Root,
        opener: Opener,
        *,
        lease_s: float,
        holder: Holder | None = None,
        unchanged: Unchanged | None = None,
    ) -> None:
        self._root = root
        self._opener = opener
        self._lease_s = lease_s
        self._holder = holder or this_process()
        self._unchanged = unchanged or Unchanged()

    def begin(self, step: int) -> bool:
        """Marks a step as being deleted, unless somebody reads it.

        Returns:
            Whether it may be deleted; `end` takes the mark away.

        Raises:
            StorageError: The storage failed.
        """
        storage = self._opener(self._root.shared)
        storage.write(_mark(step), b"")
        if not any(self._is_live(storage, e.key) for e in storage.list(f"{READING}{step}.")):
            return True
        storage.delete([_mark(step)])
        return False

    def end(self, step: int) -> None:
        """Takes the mark away.

        Raises:
            StorageError: The storage failed.
        """
        self._opener(self._root.shared).delete([_mark(step)])

    def forget_marks(self) -> None:
        """Takes away the marks of a writer that is gone. Only for who has the right to write.

        Raises:
            StorageError: The storage failed.
        """
        storage = self._opener(self._root.shared)
        storage.delete([entry.key for entry in storage.list(DELETING)])

    def _is_live(self, storage: Storage, key: str) -> bool:
        try:
            data = storage.read(key)
        except KeyMissingError:
            return False
        holder = Holder.decode(data)
        lives = None if holder is None else holder.lives_here(self._holder)
        if lives is None:
            lives = self._unchanged.since_s(key, data) < self._lease_s
        if not lives:
            storage.delete([key])
        return lives


def _mark(step: int) -> str:
    return f"{DELETING}{step}"
