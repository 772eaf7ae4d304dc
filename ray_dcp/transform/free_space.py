"""Checks that a target has enough disk space before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from ray_dcp.core.quantities import size_text
from ray_dcp.errors import (
    StorageError,
)
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import Storage


def check_space(storage: Storage, num_bytes: int) -> None:
    """Checks that a local storage has `num_bytes` of free space; skips remote ones.

    Raises:
        StorageError: It does not.
    """
    if isinstance(storage, LocalStorage):
        check_free_bytes(Path(storage.url), num_bytes)


def check_free_bytes(path: Path, num_bytes: int) -> None:
    """Checks the free space of the disk of a path, which need not exist yet.

    Raises:
        StorageError: There is less, or it can't be read.
    """
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise StorageError(f"the free space in {there} can't be read: {error}") from error
    if num_bytes > free:
        raise StorageError(
            f"expected {size_text(num_bytes)} of space in {there}, but {size_text(free)} are free; "
            f"nothing was written. Free some, choose another disk, or less by include or dtype",
            key=str(path),
        )
