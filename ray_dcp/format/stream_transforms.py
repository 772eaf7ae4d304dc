"""Undoes the stream transform that stock DCP can put around an item: zstd compression.

DCP's other transforms are plug-ins of their users, whom only DCP's own reader calls.
Source: torch/distributed/checkpoint/_extension.py `ZStandard`; RFC 8878 3.1 (zstd frames).
"""

from __future__ import annotations

from typing import Any

import pyarrow

from ray_dcp.errors import DamagedCheckpointError

__all__ = ["MAX_OBJECT_BYTES", "plain_item"]

pa: Any = pyarrow

MAX_OBJECT_BYTES = 4 << 30
"""Longest object that is unpacked. Why: a few bytes can unpack to any number of them."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_ITEM_STARTS = (b"PK", b"\x80")
"""A zip of `torch.save`, and the bare pickles that it wrote before torch 1.6."""
_MAX_LAYERS = 4
_PIECE_BYTES = 1 << 20


def plain_item(
    data: bytes | memoryview, *, max_bytes: int = MAX_OBJECT_BYTES
) -> bytes | memoryview:
    """Returns what `torch.save` wrote, unpacked if the item is compressed.

    Args:
        data: One whole item, as stored.
        max_bytes: Longest item to expect.

    Raises:
        DamagedCheckpointError: It is no item of `torch.save`, a transform that is not known here,
            damaged, or longer than expected.
    """
    for _ in range(_MAX_LAYERS):
        if bytes(data[:4]) != _ZSTD:
            break
        data = _unpacked(data, max_bytes)
    if bytes(data[:2]).startswith(_ITEM_STARTS):
        return data
    raise DamagedCheckpointError(
        f"expected an item of torch.save, plain or in zstd, found one that begins with "
        f"{bytes(data[:4]).hex() or 'nothing'}; if it was saved with _extensions, load with "
        "storage_reader=FileSystemReader(path, _extension_registry=...), else load an earlier step"
    )


def _unpacked(data: bytes | memoryview, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        with pa.CompressedInputStream(pa.py_buffer(data), "zstd") as stream:
            while piece := stream.read(_PIECE_BYTES):
                pieces.append(piece)
                num_bytes += len(piece)
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
