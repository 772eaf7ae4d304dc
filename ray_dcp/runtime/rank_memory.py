"""What nodes keep in memory of the checkpoint that is loaded, asked for while reads are planned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ray_dcp.store.storage import Storage

__all__ = ["InMemory", "KeptIn", "MemorySource"]


class InMemory(Storage, Protocol):
    """A storage that takes some bytes from memory."""

    bytes_from_memory: int

    @property
    def most_threads(self) -> int | None:
        """More threads than this do not read sooner; None: nobody knows."""
        ...


KeptIn = Callable[[Storage, str], InMemory | None]
"""From a storage and the attempt that is loaded to the storage with what is in memory of it."""


class MemorySource:
    """Finds out in a thread of its own what is in memory: Ray is asked three things one by one.

    Args:
        kept: Asks; None where nobody keeps anything.
    """

    def __init__(self, kept: KeptIn | None) -> None:
        self._kept = kept
        self._thread: threading.Thread | None = None
        self._found: list[InMemory | None] = []
        self._asked: tuple[Storage, str] | None = None

    def ask(self, storage: Storage, attempt: str | None) -> None:
        """Begins to ask, at once.

        Args:
            storage: Where everything is.
            attempt: Id of the attempt that is loaded; None for one that nobody keeps.
        """
        if self._kept is None or attempt is None:
            return
        self._asked = (storage, attempt)
        self._thread = threading.Thread(target=self._ask, daemon=True, name="ray_dcp asks memory")
        self._thread.start()

    def found(self) -> InMemory | None:
        """Returns the storage with what is in memory, once that is known; None for nothing.

        Where nothing was found it is asked again: what has just been committed is kept a moment
        later.
        """
        if self._asked is None or self._kept is None or self._thread is None:
            return None
        self._thread.join()
        found = self._found.pop() if self._found else None
        return self._kept(*self._asked) if found is None else found

    def _ask(self) -> None:
        # Suppressed: it is asked again by who can raise it.
        with suppress(Exception):
            if self._asked is not None and self._kept is not None:
                self._found.append(self._kept(*self._asked))
