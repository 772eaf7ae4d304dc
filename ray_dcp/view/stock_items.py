"""Checks items that stock `torch.save` wrote: names and CRC32 of the records of their zips.

torch writes these CRCs and never looks at them again. They do not cover the names, which a zip has
twice; but where it is compressed the second may be a copy of the first. Nothing is unpickled.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.stored_zip import check_directory
from ray_dcp.format.stream_transforms import MAX_OBJECT_BYTES, ZSTD, unpacked_item
from ray_dcp.store.storage import Storage

__all__ = ["check_stock_item"]

_RECORDS = {"data.pkl", "version", "byteorder"}
"""Of every item, but for its storages and for what torch marks with a dot."""
_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
"""Longest end of an item that is looked at for the zip's directory; torch's has a few records."""


def check_stock_item(
    storage: Storage,
    key: str,
    start: int,
    stop: int,
    *,
    transforms: Sequence[str] = (),
    max_bytes: int = MAX_OBJECT_BYTES,
) -> tuple[int, str | None, str | None]:
    """Compares every record of one item with its CRC32, and its name with those of torch.

    Args:
        storage: Where the checkpoint lies.
        key: The file.
        start: First byte of the item in the file.
        stop: Behind its last byte.
        transforms: What `.metadata` says that the item went through.
        max_bytes: Longest item to unpack.

    Returns:
        Bytes that were compared; what is wrong, or None; what could not be checked, or None.

    Raises:
        StorageError: The storage refused.
    """
    item: io.BufferedIOBase
    if not transforms:
        item = io.BufferedReader(_Range(storage, key, start, stop), 64 << 10)
    elif set(transforms) == {ZSTD}:
        try:
            stored = storage.read(key, start, stop - start)
            item = io.BytesIO(unpacked_item(stored, transforms, max_bytes=max_bytes))
        except DamagedCheckpointError as error:
            return 0, error.message, None
    else:
        names = ", ".join(sorted(set(transforms) - {ZSTD}))[:200]
        return 0, None, f"holds items that went through {names}: not checked"
    try:
        # First: of records that the directory calls encrypted `zipfile` asks for a password.
        item_bytes = item.seek(0, io.SEEK_END)
        item.seek(max(0, item_bytes - _TAIL_BYTES))
        check_directory(item.read(), item_bytes)
        with zipfile.ZipFile(item) as archive:
            _check_names(archive.infolist())
            checked, note = _check_records(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        return 0, f"the zip of torch.save is damaged: {error}", None
    except DamagedCheckpointError as error:
        return 0, error.message, None
    return checked, None, note


def _check_names(found: Sequence[zipfile.ZipInfo]) -> None:
    """Checks that a load finds each record that torch wrote.

    Raises:
        ValueError: One has a name that torch gives none, or nothing is in the pickle.
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
    """A part of a stored file as a file of its own, read-only and seekable."""

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
