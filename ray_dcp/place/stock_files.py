"""Files at a place that stock DCP wrote, which its `.metadata` names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.errors import (
    CheckpointError,
)
from ray_dcp.format.manifest import (
    Manifest,
)
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.io.checkpoint import METADATA_KEY
from ray_dcp.store.storage import KeyMissingError, Storage, read_if_there

STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")


def without_stock_files(storage: Storage, keys: Iterable[str]) -> list[str]:
    """Returns the keys that the current `.metadata` of stock DCP, if there is one, does not name.

    *Why*: stock DCP uses the same names again, so that a file to be collected may belong to its
    next checkpoint.

    Args:
        storage: The storage of the target.
        keys: Keys to be collected.

    Raises:
        StorageError: `.metadata` can't be read.
    """
    keys = list(keys)
    named: set[str] = set()
    if any(map(STOCK_FILE.fullmatch, keys)):
        data = read_if_there(storage, METADATA_KEY)
        try:
            foreign = None if data is None else decode_metadata(data)
        except CheckpointError:
            named = {key for key in keys if STOCK_FILE.fullmatch(key)}
        else:
            if foreign is not None and foreign.attempt is None:
                named = set(foreign.table.files)
    return [key for key in keys if key not in named]


def foreign_metadata(
    storage: Storage, manifest: Manifest | None
) -> tuple[str | None, tuple[str, ...]]:
    """Returns the hex digest of a `.metadata` that ray_dcp did not write, and its files.

    Args:
        storage: The storage of the target.
        manifest: Manifest of the current checkpoint.

    Raises:
        StorageError: It can't be read.
    """
    try:
        data = storage.read(METADATA_KEY)
    except KeyMissingError:
        return None, ()
    digest = digest_bytes(data).hex()
    ours = manifest.metadata if manifest is not None else None
    if ours is not None and ours.digest == digest:
        return None, ()
    try:
        foreign = decode_metadata(data)
    except CheckpointError:
        return digest, ()
    if foreign.attempt is not None:
        return None, ()
    # Careful: only what DCP itself names so. Other files that a .metadata refers to may belong
    # to somebody else.
    return digest, tuple(key for key in foreign.table.files if STOCK_FILE.fullmatch(key))
