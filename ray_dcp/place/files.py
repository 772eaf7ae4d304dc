"""Lists the files at a place, those that a writer left unpublished too."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ray_dcp.store.storage import Entry, Storage


@runtime_checkable
class _ShowsUnpublished(Protocol):
    """A storage whose writers leave files behind if they crash."""

    def unpublished(self) -> tuple[Entry, ...]: ...


def everything(storage: Storage) -> list[Entry]:
    """Returns all files at a place, including those that writers have not published.

    Args:
        storage: The storage of the place.

    Raises:
        StorageError: It can't be listed.
    """
    return [*storage.list(), *unpublished(storage)]


def unpublished(storage: Storage) -> tuple[Entry, ...]:
    """Returns the files that writers, running or crashed, have not published.

    Args:
        storage: The storage of the place.

    Raises:
        StorageError: It can't be listed.
    """
    return storage.unpublished() if isinstance(storage, _ShowsUnpublished) else ()
