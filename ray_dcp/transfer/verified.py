"""Small files of a checkpoint, read whole or in part, and compared with what the manifest says."""

from __future__ import annotations

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import FileEntry, Manifest
from ray_dcp.format.table import MAX_TABLE_BYTES
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["same_as", "verified", "verified_bytes", "verified_end", "verified_table"]


def verified(storage: Storage, entry: FileEntry) -> bytes:
    """Returns a file that a manifest names.

    Raises:
        DamagedCheckpointError: It is missing, or another one.
        StorageError: It can't be read.
    """
    return same_as(entry, _read(storage, entry.key, 0, min(entry.num_bytes, MAX_TABLE_BYTES) + 1))


def same_as(entry: FileEntry, data: bytes) -> bytes:
    """Returns the bytes of a file that a manifest names.

    Raises:
        DamagedCheckpointError: They are other ones.
    """
    _check(data, entry.num_bytes, entry.digest, entry.key, "")
    return data


def verified_table(storage: Storage, manifest: Manifest) -> bytes:
    """Returns the chunk table that a manifest names, all of it.

    Raises:
        DamagedCheckpointError: It is missing or another one, or ends otherwise than its end.
        StorageError: It can't be read.
    """
    data, end = verified(storage, manifest.table), manifest.table_end
    if end is not None:
        _check(data[-end.num_bytes :], end.num_bytes, end.digest, manifest.table.key, "last ")
    return data


def verified_end(storage: Storage, manifest: Manifest) -> bytes:
    """Returns the end of a chunk table in groups, which tells of them.

    Raises:
        DamagedCheckpointError: It is missing, or another one.
        StorageError: It can't be read.
    """
    entry, end = manifest.table, manifest.table_end
    if end is None or end.num_bytes > min(entry.num_bytes, MAX_TABLE_BYTES):
        raise DamagedCheckpointError(
            f"expected a chunk table with an end as {entry.key}; load an earlier step",
            key=entry.key,
        )
    start = entry.num_bytes - end.num_bytes
    data = _read(storage, entry.key, start, end.num_bytes + 1)
    _check(data, end.num_bytes, end.digest, entry.key, "last ")
    return data


def verified_bytes(storage: Storage, key: str, start: int, num_bytes: int) -> bytes:
    """Returns bytes of a file that must have as many.

    Raises:
        DamagedCheckpointError: It is missing or shorter.
        StorageError: It can't be read.
    """
    data = _read(storage, key, start, num_bytes) if num_bytes else b""
    if len(data) != num_bytes:
        raise DamagedCheckpointError(
            f"expected bytes [{start}, {start + num_bytes}) in {key}, but it was cut "
            f"off; load an earlier step",
            key=key,
        )
    return data


def _read(storage: Storage, key: str, start: int, num_bytes: int) -> bytes:
    try:
        return storage.read(key, start, num_bytes)
    except KeyMissingError as exc:
        raise DamagedCheckpointError(
            f"the manifest names {key}, but there is no such file; load an earlier step", key=key
        ) from exc


def _check(data: bytes, num_bytes: int, digest: str, key: str, which: str) -> None:
    if len(data) != num_bytes or digest_bytes(data).hex() != digest:
        raise DamagedCheckpointError(
            f"expected the {which}{num_bytes} bytes of digest {digest} that the manifest "
            f"names, found {len(data)} bytes of digest {digest_bytes(data).hex()}; load an "
            f"earlier step",
            key=key,
        )
