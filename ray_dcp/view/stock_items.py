"""Checks items of stock DCP, which have no checksums but the CRC32 values of their zip records.

`check_stock_item` compares each record with its CRC32. The CRC32 does not cover the record's name,
which a zip file contains twice; the names are therefore compared with those that torch writes.
Nothing is unpickled.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence

from ray_dcp.errors import (
    DamagedCheckpointError,
)
from ray_dcp.format.torch_items import (
    MAX_OBJECT_BYTES,
    ZSTD,
    check_directory,
    unpacked_item,
)
from ray_dcp.store.storage import Storage

_RECORDS = {"data.pkl", "version", "byteorder"}
"""Records of every item, in addition to its storages and to names that begin with a dot."""
_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
"""Maximum length of the end of an item in which the zip directory is searched. The directories of
torch have few records."""


def check_stock_item(
    storage: Storage,
    key: str,
    start: int,
    stop: int,
    *,
    transforms: Sequence[str] = (),
    max_bytes: int = MAX_OBJECT_BYTES,
) -> tuple[int, str | None]:
    """Compares every record of an item with its CRC32, and its name with those that torch writes.

    Args:
        storage: Storage of the checkpoint.
        key: Key of the file.
        start: First byte of the item in the file.
        stop: End of the item in the file.
        transforms: Stream transforms of the item, by `.metadata`.
        max_bytes: Maximum length of the item without its transforms.

    Returns:
        The number of bytes that were compared, and a note about what could not be checked, or None.

    Raises:
        DamagedCheckpointError: A record does not match.
        StorageError: The file can't be read.
    """
    unknown = set(transforms) - {ZSTD}
    if unknown:
        names = ", ".join(sorted(unknown))[:200]
        return 0, f"has items with the transforms {names}, which were not checked"
    item: io.BufferedIOBase
    if transforms:
        stored = storage.read(key, start, stop - start)
        item = io.BytesIO(unpacked_item(stored, transforms, max_bytes=max_bytes))
    else:
        item = io.BufferedReader(_Range(storage, key, start, stop), 64 << 10)
    try:
        # Why first: `zipfile` asks for a password if the directory calls a record encrypted.
        item_bytes = item.seek(0, io.SEEK_END)
        item.seek(max(0, item_bytes - _TAIL_BYTES))
        check_directory(item.read(), item_bytes)
        with zipfile.ZipFile(item) as archive:
            _check_names(archive.infolist())
            return _check_records(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise DamagedCheckpointError(f"the zip of torch.save is damaged: {error}") from error


def _check_names(found: Sequence[zipfile.ZipInfo]) -> None:
    """Checks that a load finds each record that torch wrote.

    Raises:
        ValueError: A record has a name that torch does not use, or the pickle is empty.
    """
    if any(one.filename.endswith("/data.pkl") and not one.file_size for one in found):
        raise ValueError("expected a pickle in data.pkl, found nothing")
    names = [one.filename for one in found]
    folders = {name.partition("/")[0] for name in names}
    records = [name.partition("/")[2] for name in names]
    storages = sum(name.startswith("data/") for name in records)
    expected = {"data.pkl", *(f"data/{number}" for number in range(storages))}
    other = {name for name in records if not name.startswith(".")} - _RECORDS - expected
    if len(folders) != 1 or len(set(records)) < len(records) or other or expected - {*records}:
        wrong = ", ".join(map(repr, names))[:500]
        raise ValueError(f"expected data.pkl, data/0 and so on in one folder, found {wrong}")


def _check_records(archive: zipfile.ZipFile) -> tuple[int, str | None]:
    checked, unchecked = 0, 0
    for record in archive.infolist():
        if record.CRC == 0 and record.file_size:
            unchecked += record.file_size
            continue
        with archive.open(record) as stream:
            while piece := stream.read(_PIECE_BYTES):
                checked += len(piece)
    note = f"{unchecked} bytes were saved without CRC32 and not checked" if unchecked else None
    return checked, note


class _Range(io.RawIOBase):
    """Presents a range of a stored file as a seekable file that can only be read."""

    def __init__(self, storage: Storage, key: str, start: int, stop: int) -> None:
        super().__init__()
        self._storage = storage
        self._key = key
        self._start = start
        self._length = stop - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError(f"byte {origin + offset} lies before the item")
        self._at = origin + offset
        return self._at

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        length = max(0, min(len(target), self._length - self._at))
        data = self._storage.read(self._key, self._start + self._at, length) if length else b""
        target[: len(data)] = data
        self._at += len(data)
        return len(data)
