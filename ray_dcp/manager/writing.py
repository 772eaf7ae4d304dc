"""The right to write to a root: one process at a time has it, and whoever lost it is told.

The right is a numbered file, made only if it is absent: the highest number has it. Whoever comes
looks at its holder first. One that lives is left alone, and the newcomer refused. One that is gone
is succeeded: and should it not be gone after all, it finds a higher number before its next save.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable

from ray_dcp.errors import CheckpointExistsError, InvalidRequestError
from ray_dcp.manager.places import Root
from ray_dcp.manager.processes import Beating, Holder, this_process
from ray_dcp.protocol.messages import Target
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, Storage

__all__ = ["LEASE_S", "Right"]

LEASE_S = 30.0
"""Silence after which a holder on another machine counts as gone, in seconds."""

_BEATS = 3
"""Beats within that time."""
_MOST_TRIES = 20
_RIGHT = re.compile(r"writer-(\d{8,16})\.json")

Opener = Callable[[Target], Storage]
logger = logging.getLogger(__name__)


class Right:
    """The right of this process to write to a root, once it is taken.

    Args:
        root: Where.
        opener: What opens storages.
        lease_s: Silence after which a holder on another machine counts as gone, in seconds.
        holder: Who takes it; this process by default.
        wait: Lets seconds pass.
        beats: Let others see that this process lives, in a thread.
    """

    def __init__(
        self,
        root: Root,
        opener: Opener,
        *,
        lease_s: float = LEASE_S,
        holder: Holder | None = None,
        wait: Callable[[float], object] | None = None,
        beats: bool = True,
    ) -> None:
        self._root = root
        self._opener = opener
        self._lease_s = lease_s
        self._holder = holder or this_process()
        self._wait = wait or threading.Event().wait
        self._beats = beats
        self._beating: Beating | None = None
        self._number = 0

    @property
    def is_taken(self) -> bool:
        """Whether this process took it and did not give it back."""
        return self._number > 0

    def holder(self) -> Holder | None:
        """Returns who has the right now, or had it last without giving it back; None for nobody.

        Raises:
            StorageError: The storage failed.
        """
        return self._held(self._opener(self._root.shared))[1]

    def take(self, *, even_if_held: bool = False) -> None:
        """Takes the right; does nothing when this process has it, as `check` tells.

        Args:
            even_if_held: Also from a holder that lives; it is refused from then on.

        Raises:
            CheckpointExistsError: Another process has it, and lives; or somebody else took it
                from this one.
            StorageError: The storage failed.
        """
        if self.is_taken:
            self.check()
            return
        storage = self._opener(self._root.shared)
        for _ in range(_MOST_TRIES):
            number, holder = self._held(storage)
            if holder is not None and not even_if_held and self._lives(storage, number, holder):
                raise CheckpointExistsError(
                    f"{self._root.url} is written by {holder}, which lives. Use one root a job; or "
                    f"end that process, or close its manager; to read what it writes no right is "
                    f"needed (restore, all_steps, follow). CheckpointManager(takeover=True) takes "
                    f"it away",
                    checkpoint_id=self._root.url,
                )
            try:
                storage.write(_key(number + 1), self._holder.encode(), create=True)
            except KeyExistsError:
                continue
            if holder is not None and not holder.is_same_process(self._holder):
                logger.info("%s was written by %s, which is gone", self._root.url, holder)
            self._number = number + 1
            self._remove_older(storage)
            if self._beats and storage.traits.shared:
                self._beating = Beating(self._beat, self._lease_s / _BEATS)
            return
        raise CheckpointExistsError(
            f"{self._root.url} changed its writer {_MOST_TRIES} times meanwhile; which jobs write "
            f"there? Use one root a job",
            checkpoint_id=self._root.url,
        )

    def check(self) -> None:
        """Checks that this process still has the right.

        Raises:
            CheckpointExistsError: Another one took it.
            InvalidRequestError: It was never taken.
            StorageError: The storage failed.
        """
        if not self.is_taken:
            raise InvalidRequestError("the right to write was not taken; call take() first")
        storage = self._opener(self._root.shared)
        highest = max(_numbers(storage), default=0)
        if highest == self._number:
            return
        other = self._holder_of(storage, highest)
        raise CheckpointExistsError(
            f"{self._root.url} is written by {other or 'another manager'} since this manager "
            f"opened it; nothing is saved or deleted by this one any more. Use one root a job, or "
            f"end the other one and make the manager anew",
            checkpoint_id=self._root.url,
        )

    def give_back(self) -> None:
        """Lets others take the right at once. Does nothing when another one has it.

        Raises:
            StorageError: The storage failed.
        """
        if self._beating is not None:
            self._beating.stop()
            self._beating = None
        if not self.is_taken:
            return
        number, self._number = self._number, 0
        storage = self._opener(self._root.shared)
        if max(_numbers(storage), default=0) == number:
            storage.write(_released(number), b"")

    def _held(self, storage: Storage) -> tuple[int, Holder | None]:
        """Returns the highest number, and its holder unless it was given back."""
        number = max(_numbers(storage), default=0)
        if not number or any(entry.key == _released(number) for entry in storage.list("writer-")):
            return number, None
        return number, self._holder_of(storage, number)

    def _holder_of(self, storage: Storage, number: int) -> Holder | None:
        try:
            return Holder.decode(storage.read(_key(number)))
        except KeyMissingError:
            return None

    def _lives(self, storage: Storage, number: int, holder: Holder) -> bool:
        if holder.is_same_process(self._holder):
            return False  # an earlier manager of this process: the later one counts
        lives = holder.lives_here(self._holder)
        if lives is not None:
            return lives
        logger.info(
            "%s was written by %s; looking for %g s whether it still is",
            self._root.url, holder, self._lease_s,
        )  # fmt: skip
        first = _content(storage, _beat(number))
        for _ in range(_BEATS + 1):
            self._wait(self._lease_s / _BEATS)
            if _content(storage, _beat(number)) != first:
                return True
        return False

    def _remove_older(self, storage: Storage) -> None:
        names = [entry.key for entry in storage.list("writer-")]
        storage.delete([name for name in names if _number_in(name) < self._number])

    def _beat(self, number: int) -> None:
        self._opener(self._root.shared).write(_beat(self._number), str(number).encode())


def _key(number: int) -> str:
    return f"writer-{number:08d}.json"


def _beat(number: int) -> str:
    return f"writer-{number:08d}.beat"


def _released(number: int) -> str:
    return f"writer-{number:08d}.released"


def _number_in(key: str) -> int:
    return int(key[len("writer-") :].partition(".")[0])


def _numbers(storage: Storage) -> list[int]:
    found = (_RIGHT.fullmatch(entry.key) for entry in storage.list("writer-"))
    return [int(one[1]) for one in found if one is not None]


def _content(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read(key)
    except KeyMissingError:
        return None
