"""Whether the end of a `torch.save` item is the directory of a zip that holds it uncompressed.

`torch.load` believes a zip's directory: of a few bytes that unpack to any number, it would make
them all. torch itself never compresses. CRCs are `view.stock_items`' part.
Source: APPNOTE.TXT 4.3.12 to 4.3.16; caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ray_dcp.errors import DamagedCheckpointError

__all__ = ["check_directory", "stored_records"]

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


def stored_records(data: bytes | memoryview) -> list[tuple[str, memoryview]]:
    """Returns names and bytes of the records of a whole item.

    Args:
        data: The item.

    Raises:
        DamagedCheckpointError: It does not end with the directory of a zip, or a record of it is
            compressed, encrypted or not in the item; or all of them are longer than the item.
    """
    view, total, found = memoryview(data), 0, []
    for name, start, length in _entries(data, len(data)):
        total += length
        if start + _LOCAL.size > len(data) or total > len(data):
            raise _damaged(f"records in {len(data)} bytes", "others")
        magic, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(data, start)
        begin = start + _LOCAL.size + name_bytes + extra_bytes
        if magic != b"PK\3\4" or begin + length > len(data):
            raise _damaged("a record where the directory says", "other bytes")
        found.append((name, view[begin : begin + length]))
    return found


def check_directory(data: bytes | memoryview, item_bytes: int) -> None:
    """Checks the directory at the end of an item.

    Args:
        data: The end of the item, at least from the directory on.
        item_bytes: Length of the whole item.

    Raises:
        DamagedCheckpointError: It is no directory, or one that contradicts itself; or a record is
            compressed or encrypted.
    """
    for _ in _entries(data, item_bytes):
        pass


def _entries(data: bytes | memoryview, item_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Yields name, place of the local header and length of each record."""
    start, stop, count = _directory(data, item_bytes - len(data))
    for _ in range(count):
        if start + _CENTRAL.size > stop:
            raise _damaged(f"a directory of {count} records", "a shorter one")
        fields = _CENTRAL.unpack_from(data, start)
        magic, flags, method, stored, length = (fields[i] for i in (0, 3, 4, 8, 9))
        name_bytes, extra_bytes, comment_bytes, disk = fields[10:14]
        place = fields[16]
        if magic != b"PK\1\2" or disk != 0:
            raise _damaged("an entry of the directory", "other bytes")
        if method != 0 or flags & 0x2041:
            raise _damaged("records as torch.save writes them", "a compressed or encrypted one")
        extra = start + _CENTRAL.size + name_bytes
        name = bytes(data[extra - name_bytes : extra]).decode("utf-8", "replace")
        start = extra + extra_bytes + comment_bytes
        if start > stop:
            raise _damaged(f"a directory of {count} records", "a shorter one")
        if _FULL32 in (length, stored, place):
            inside = bytes(data[extra : extra + extra_bytes])
            length, stored, place = _long(inside, (length, stored, place))
        if length != stored:
            raise _damaged("one length of a record", f"{length} and {stored}")
        yield name, place, length
    if start != stop:
        raise _damaged(f"a directory of {count} records", "a longer one")


def _directory(data: bytes | memoryview, before: int) -> tuple[int, int, int]:
    """Returns first byte, end and number of entries of the directory; `before` is not in `data`.

    Careful: readers look for the last of these marks. Only at the very end it is surely that.
    """
    at = len(data) - _END.size
    if at < 0 or bytes(data[at : at + 4]) != b"PK\5\6":
        raise _damaged("a zip that ends with its directory", "other bytes at its end")
    _, disk, first_disk, here, count, length, offset, comment = _END.unpack_from(data, at)
    if (disk, first_disk, comment) != (0, 0, 0) or here != count:
        raise _damaged("a zip on one disk, without comment", "another one")
    stop, locator = at, at - _LOCATOR64.size
    has_end64 = locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\6\7"
    if has_end64:
        stop = locator - _END64.size
        _, first_disk, place, disks = _LOCATOR64.unpack_from(data, locator)
        is_there = stop >= 0 and bytes(data[stop : stop + 4]) == b"PK\6\6"
        if not is_there or (first_disk, place, disks) != (0, before + stop, 1):
            raise _damaged("the end of a large zip's directory", "other bytes")
        fields = _END64.unpack_from(data, stop)
        here, count, length, offset = fields[6:10]
        if fields[4:6] != (0, 0) or here != count or fields[1] != _END64.size - 12:
            raise _damaged("a zip on one disk", "another one")
    elif _FULL32 in (length, offset) or count == _FULL16:
        raise _damaged("the end of a large zip's directory", "none")
    start = stop - length
    if start < 0 or before + start != offset or count * _CENTRAL.size > length:
        raise _damaged(f"a directory of {count} records in {length} bytes", "another item")
    return start, stop, count


def _long(extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns lengths and place of a record, of which some are in its zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        field, size = struct.unpack_from("<2H", extra, at)
        inside = extra[at + 4 : at + 4 + size]
        at += 4 + size
        if field == 1 and len(inside) >= 8 * values.count(_FULL32):
            wide = iter(struct.unpack_from(f"<{len(inside) // 8}Q", inside))
            length, stored, place = (next(wide) if v == _FULL32 else v for v in values)
            return length, stored, place
    raise _damaged("the length of a large record in its zip64 field", "none")


def _damaged(expected: str, found: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Expected {expected}, found {found}; the item is damaged, load an earlier step"
    )
