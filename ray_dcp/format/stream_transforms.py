"""Undoes the stream transform that stock DCP can apply to an item: zstd compression.

`.metadata` names the transforms of each item. DCP's other transforms are plug-ins of users, which
only DCP's own reader calls.
Source: torch/distributed/checkpoint/_extension.py `ZStandard`; RFC 8878 3.1 (zstd frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow

from ray_dcp.errors import DamagedCheckpointError

pa: Any = pyarrow

MAX_OBJECT_BYTES = 4 << 30
"""Longest object that is decompressed. Why: a few bytes can expand to any number of bytes."""
ZSTD = "stream.zstd/1"
"""The one transform that is supported, by its name in `.metadata`."""
_ITEM_STARTS = (b"PK", b"\x80")
"""First bytes of a zip of `torch.save`, and of the bare pickles that it wrote before torch 1.6."""
_MAX_LAYERS = 4
_PIECE_BYTES = 1 << 20
_WAY_OUT = (
    "if it was saved with _extensions, load with "
    "storage_reader=FileSystemReader(path, _extension_registry=...)"
)


def unpacked_item(
    data: bytes | memoryview, transforms: Sequence[str], *, max_bytes: int = MAX_OBJECT_BYTES
) -> bytes | memoryview:
    """Returns an item with its transforms undone.

    Args:
        data: One whole item, as stored.
        transforms: Names of its transforms, from `ForeignMetadata.transforms`; empty for none.
        max_bytes: Longest item accepted.

    Raises:
        DamagedCheckpointError: A transform is unknown, or the item is damaged or longer than
            `max_bytes`.
    """
    unknown = [name for name in transforms if name != ZSTD]
    if unknown:
        raise DamagedCheckpointError(
            f"expected the stream transform {ZSTD}, found {unknown[0][:100]!r}, which only its "
            f"own plug-in undoes; {_WAY_OUT}, else load an earlier step"
        )
    if len(transforms) > _MAX_LAYERS:
        raise DamagedCheckpointError(
            f"expected an item in at most {_MAX_LAYERS} layers of zstd, found {len(transforms)}"
        )
    for _ in transforms:
        data = _unpacked(data, max_bytes)
    return data


def check_plain(data: bytes | memoryview) -> None:
    """Checks that an item begins like the items that `torch.save` writes.

    Raises:
        DamagedCheckpointError: The item begins differently.
    """
    if not bytes(data[:2]).startswith(_ITEM_STARTS):
        raise DamagedCheckpointError(
            f"expected an item of torch.save, found one that begins with "
            f"{bytes(data[:4]).hex() or 'nothing'}; {_WAY_OUT}, else load an earlier step"
        )


def _unpacked(data: bytes | memoryview, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    room = memoryview(bytearray(_PIECE_BYTES))
    try:
        with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
            # Why not `read`: pyarrow 26 leaks the memory of a piece that fails to decompress.
            while count := stream.readinto(room):
                pieces.append(bytes(room[:count]))
                num_bytes += count
                if num_bytes > max_bytes:
                    break
    except OSError as error:
        raise DamagedCheckpointError(
            f"expected an item compressed with zstd, found {error}; load an earlier step"
        ) from error
    if num_bytes > max_bytes:
        raise DamagedCheckpointError(
            f"expected an item of at most {max_bytes} bytes, found one that unpacks to more; load "
            "an earlier step"
        )
    return b"".join(pieces)
